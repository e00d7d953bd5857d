//! [`Conversation`]: its messages, which of them the model still sees, and its form as JSON.
//!
//! Invariant: every message of the user has an answer. Turns that no longer fit the context stay
//! part of it, for saving. Knows nothing of tokens.

use model_core::chat_template::ChatMessage;
use serde::{Deserialize, Serialize};

use crate::commands::answer::{Answer, ThinkingFormat};

/// A message and its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Turn {
    /// What the user wrote.
    pub(super) user: String,
    /// What the model wrote.
    pub(super) answer: Answer,
}

/// A conversation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Conversation {
    /// The system message.
    pub(super) system: Option<String>,
    turns: Vec<Turn>,
    /// Oldest turns that the model does not see any more.
    n_dropped: usize,
}

/// A conversation in a file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Saved {
    /// The model that answered; only for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    model: Option<String>,
    messages: Vec<SavedMessage>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SavedMessage {
    role: String,
    content: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
}

impl Conversation {
    /// One that begins with this system message.
    pub(super) fn new(system: Option<String>) -> Self {
        Self {
            system,
            ..Self::default()
        }
    }

    /// The turns, oldest first.
    pub(super) fn turns(&self) -> &[Turn] {
        &self.turns
    }

    /// How many of the oldest turns the model does not see any more.
    pub(super) fn n_dropped(&self) -> usize {
        self.n_dropped
    }

    /// The number of messages, with the system message.
    pub(super) fn n_messages(&self) -> usize {
        usize::from(self.system.is_some()) + 2 * self.turns.len()
    }

    /// Adds a turn.
    pub(super) fn push(&mut self, turn: Turn) {
        self.turns.push(turn);
    }

    /// Takes the last turn away.
    pub(super) fn pop(&mut self) -> Option<Turn> {
        let turn = self.turns.pop();
        self.n_dropped = self.n_dropped.min(self.turns.len());
        turn
    }

    /// Hides the oldest turn from the model; returns whether there was one.
    pub(super) fn drop_oldest(&mut self) -> bool {
        let is_left = self.n_dropped < self.turns.len();
        self.n_dropped += usize::from(is_left);
        is_left
    }

    /// What the template is given: the messages that the model sees, and the next one.
    pub(super) fn messages(&self, format: &ThinkingFormat, next: Option<&str>) -> Vec<ChatMessage> {
        let mut messages = Vec::new();
        messages.extend(
            self.system
                .iter()
                .map(|text| ChatMessage::new("system", text)),
        );
        for turn in &self.turns[self.n_dropped..] {
            messages.push(ChatMessage::new("user", &turn.user));
            messages.push(ChatMessage::new(
                "assistant",
                format.for_template(&turn.answer),
            ));
        }
        messages.extend(next.map(|text| ChatMessage::new("user", text)));
        messages
    }

    /// The conversation as JSON: `messages` with `role` and `content`, as chat servers take them.
    ///
    /// # Errors
    /// None that can occur: all of it is text.
    pub(super) fn to_json(&self, model: String) -> serde_json::Result<String> {
        let message = |role: &str, content: &str| SavedMessage {
            role: role.to_owned(),
            content: content.to_owned(),
            reasoning_content: None,
        };
        let system = self.system.iter().map(|text| message("system", text));
        let mut messages: Vec<SavedMessage> = system.collect();
        for turn in &self.turns {
            messages.push(message("user", &turn.user));
            messages.push(SavedMessage {
                reasoning_content: turn.answer.thinking.clone(),
                ..message("assistant", &turn.answer.text)
            });
        }
        let model = Some(model);
        serde_json::to_string_pretty(&Saved { model, messages })
    }

    /// The conversation that [`Conversation::to_json`] wrote.
    ///
    /// # Errors
    /// Where it is no such JSON, or its messages do not take turns.
    pub(super) fn from_json(text: &str) -> anyhow::Result<Self> {
        let saved: Saved = serde_json::from_str(text)?;
        let mut messages = saved.messages.into_iter().zip(1..).peekable();
        let system = messages.next_if(|(message, _)| message.role == "system");
        let mut conversation = Self::new(system.map(|(message, _)| message.content));
        while let Some((user, at)) = messages.next() {
            check_role(&user, at, "user")?;
            let Some((answer, at)) = messages.next() else {
                anyhow::bail!("message {at} is the last, and nothing answers it");
            };
            check_role(&answer, at, "assistant")?;
            conversation.push(Turn {
                user: user.content,
                answer: Answer {
                    thinking: answer.reasoning_content,
                    text: answer.content,
                },
            });
        }
        Ok(conversation)
    }
}

fn check_role(message: &SavedMessage, at: usize, wanted: &str) -> anyhow::Result<()> {
    if message.role == wanted {
        Ok(())
    } else {
        anyhow::bail!(
            "message {at} has the role '{}', and '{wanted}' is expected there",
            message.role
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(user: &str, text: &str) -> Turn {
        Turn {
            user: user.to_owned(),
            answer: Answer {
                thinking: None,
                text: text.to_owned(),
            },
        }
    }

    fn contents(conversation: &Conversation) -> Vec<String> {
        let format = ThinkingFormat::of_template("");
        let messages = conversation.messages(&format, Some("next"));
        messages.into_iter().map(|m| m.content).collect()
    }

    #[test]
    fn the_oldest_turns_are_hidden_and_the_system_message_stays() {
        let mut conversation = Conversation::new(Some("kind".to_owned()));
        conversation.push(turn("a", "b"));
        conversation.push(turn("c", "d"));
        assert_eq!(
            contents(&conversation),
            ["kind", "a", "b", "c", "d", "next"]
        );
        assert!(conversation.drop_oldest());
        assert_eq!(contents(&conversation), ["kind", "c", "d", "next"]);
        assert!(conversation.drop_oldest() && !conversation.drop_oldest());
        assert_eq!(contents(&conversation), ["kind", "next"]);
        // They are still saved, and one that is taken away is hidden no more.
        assert_eq!(conversation.turns().len(), 2);
        conversation.pop();
        conversation.push(turn("e", "f"));
        assert_eq!(contents(&conversation), ["kind", "e", "f", "next"]);
    }

    #[test]
    fn a_saved_conversation_is_the_same() {
        let mut conversation = Conversation::new(Some("kind".to_owned()));
        conversation.push(turn("\"a\"\n", "b\u{1b}"));
        conversation.push(Turn {
            user: "c".to_owned(),
            answer: Answer {
                thinking: Some("hm".to_owned()),
                text: "d".to_owned(),
            },
        });
        let json = conversation.to_json("model.gguf".to_owned()).unwrap();
        assert_eq!(Conversation::from_json(&json).unwrap(), conversation);
        let empty = Conversation::new(None);
        let json = empty.to_json(String::new()).unwrap();
        assert_eq!(Conversation::from_json(&json).unwrap(), empty);
    }

    #[test]
    fn messages_must_take_turns() {
        for (messages, wanted) in [
            (
                r#"[{"role":"user","content":"a"}]"#,
                "message 1 is the last",
            ),
            (
                r#"[{"role":"assistant","content":"a"}]"#,
                "message 1 has the role 'assistant', and 'user'",
            ),
            (
                r#"[{"role":"user","content":"a"},{"role":"tool","content":"b"}]"#,
                "message 2 has the role 'tool', and 'assistant'",
            ),
            (r#"[{"role":"user"}]"#, "missing field `content`"),
        ] {
            let json = format!(r#"{{"messages":{messages}}}"#);
            let message = Conversation::from_json(&json).unwrap_err().to_string();
            assert!(message.contains(wanted), "{message}");
        }
    }
}
