//! [`Conversation`]: its messages, which of them the model still sees, and its form as JSON.
//!
//! Invariant: every message of the user has an answer. Turns that no longer fit the context stay
//! part of it, for saving. Knows nothing of tokens.

use std::path::{Path, PathBuf};

use model_core::chat_template::ChatMessage;
use model_core::media::MediaKind;
use model_core::picture::PreparedPicture;
use serde::{Deserialize, Serialize};

use crate::commands::answer::{Answer, ThinkingFormat};

/// A picture or a sound of a message.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ShownPicture {
    /// A picture or a sound.
    pub(super) media: MediaKind,
    /// The file that it was read from.
    pub(super) path: PathBuf,
    /// Its values as the model sees or hears them.
    pub(super) prepared: PreparedPicture,
}

/// A message of the user, and the pictures and sounds before it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct UserMessage {
    /// The text.
    pub(super) text: String,
    /// The pictures and sounds.
    pub(super) pictures: Vec<ShownPicture>,
}

/// A message and its answer.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Turn {
    /// What the user wrote.
    pub(super) user: UserMessage,
    /// What the model wrote.
    pub(super) answer: Answer,
}

/// A message that the model sees.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct SeenMessage<'a> {
    /// Its role and its text.
    pub(super) message: ChatMessage,
    /// The pictures and sounds before the text.
    pub(super) pictures: &'a [ShownPicture],
}

/// A conversation.
#[derive(Clone, Debug, Default, PartialEq)]
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
    content: SavedContent,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
}

/// The content of a message in a file: as chat servers take it, but for pictures and sounds, which
/// are named by their files.
#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum SavedContent {
    Text(String),
    Parts(Vec<SavedPart>),
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
enum SavedPart {
    Text { text: String },
    Image { path: PathBuf },
    Audio { path: PathBuf },
}

impl UserMessage {
    fn saved(&self) -> SavedContent {
        let text = self.text.clone();
        if self.pictures.is_empty() {
            return SavedContent::Text(text);
        }
        let part = |shown: &ShownPicture| {
            let path = shown.path.clone();
            match shown.media {
                MediaKind::Picture => SavedPart::Image { path },
                MediaKind::Sound => SavedPart::Audio { path },
            }
        };
        let pictures = self.pictures.iter().map(part);
        SavedContent::Parts(pictures.chain([SavedPart::Text { text }]).collect())
    }
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
    pub(super) fn messages<'a>(
        &'a self,
        format: &ThinkingFormat,
        next: Option<&'a UserMessage>,
    ) -> Vec<SeenMessage<'a>> {
        let text = |role: &str, text: &str| SeenMessage {
            message: ChatMessage::new(role, text),
            pictures: &[],
        };
        let of_user = |user: &'a UserMessage| SeenMessage {
            pictures: &user.pictures,
            ..text("user", &user.text)
        };
        let mut messages = Vec::new();
        messages.extend(self.system.iter().map(|system| text("system", system)));
        for turn in &self.turns[self.n_dropped..] {
            messages.push(of_user(&turn.user));
            messages.push(text("assistant", &format.for_template(&turn.answer)));
        }
        messages.extend(next.map(of_user));
        messages
    }

    /// The conversation as JSON: `messages` with `role` and `content`, as chat servers take them.
    ///
    /// # Errors
    /// None that can occur: all of it is text.
    pub(super) fn to_json(&self, model: String) -> serde_json::Result<String> {
        let message = |role: &str, content: SavedContent| SavedMessage {
            role: role.to_owned(),
            content,
            reasoning_content: None,
        };
        let text = |text: &String| SavedContent::Text(text.clone());
        let system = self
            .system
            .iter()
            .map(|system| message("system", text(system)));
        let mut messages: Vec<SavedMessage> = system.collect();
        for turn in &self.turns {
            messages.push(message("user", turn.user.saved()));
            messages.push(SavedMessage {
                reasoning_content: turn.answer.thinking.clone(),
                ..message("assistant", text(&turn.answer.text))
            });
        }
        let model = Some(model);
        serde_json::to_string_pretty(&Saved { model, messages })
    }

    /// True if this is a conversation that was saved, whatever became of its pictures.
    pub(super) fn is_saved(text: &str) -> bool {
        serde_json::from_str::<Saved>(text).is_ok()
    }

    /// The conversation that [`Conversation::to_json`] wrote. `read` reads the pictures and sounds
    /// that it names.
    ///
    /// # Errors
    /// Where it is no such JSON, its messages do not take turns, or a picture cannot be read.
    pub(super) fn from_json(
        text: &str,
        mut read: impl FnMut(MediaKind, &Path) -> anyhow::Result<PreparedPicture>,
    ) -> anyhow::Result<Self> {
        let saved: Saved = serde_json::from_str(text)?;
        let mut messages = saved.messages.into_iter().zip(1..).peekable();
        let system = messages.next_if(|(message, _)| message.role == "system");
        let system = system.map(|(message, at)| text_of(message.content, at));
        let mut conversation = Self::new(system.transpose()?);
        while let Some((user, at)) = messages.next() {
            check_role(&user, at, "user")?;
            let Some((answer, at)) = messages.next() else {
                anyhow::bail!("message {at} is the last, and nothing answers it");
            };
            check_role(&answer, at, "assistant")?;
            conversation.push(Turn {
                user: user_message(user.content, &mut read)?,
                answer: Answer {
                    thinking: answer.reasoning_content,
                    text: text_of(answer.content, at)?,
                },
            });
        }
        Ok(conversation)
    }
}

/// The message of a user in a file.
fn user_message(
    content: SavedContent,
    read: &mut impl FnMut(MediaKind, &Path) -> anyhow::Result<PreparedPicture>,
) -> anyhow::Result<UserMessage> {
    let mut user = UserMessage::default();
    let parts = match content {
        SavedContent::Text(text) => vec![SavedPart::Text { text }],
        SavedContent::Parts(parts) => parts,
    };
    for part in parts {
        let (media, path) = match part {
            SavedPart::Text { text } => {
                user.text.push_str(&text);
                continue;
            }
            SavedPart::Image { path } => (MediaKind::Picture, path),
            SavedPart::Audio { path } => (MediaKind::Sound, path),
        };
        user.pictures.push(ShownPicture {
            media,
            prepared: read(media, &path)?,
            path,
        });
    }
    Ok(user)
}

/// The content of a message that is text alone.
fn text_of(content: SavedContent, at: usize) -> anyhow::Result<String> {
    match content {
        SavedContent::Text(text) => Ok(text),
        SavedContent::Parts(_) => {
            anyhow::bail!(
                "message {at} has parts, and only those of the user have pictures or sounds"
            )
        }
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
    use std::sync::Arc;

    use model_core::picture::{Picture, PictureName};

    use super::*;

    fn turn(user: &str, text: &str) -> Turn {
        Turn {
            user: said(user),
            answer: Answer {
                thinking: None,
                text: text.to_owned(),
            },
        }
    }

    fn said(text: &str) -> UserMessage {
        UserMessage {
            text: text.to_owned(),
            ..UserMessage::default()
        }
    }

    fn unread(_: MediaKind, path: &Path) -> anyhow::Result<PreparedPicture> {
        anyhow::bail!("'{}' is not read", path.display())
    }

    fn prepared(path: &Path) -> PreparedPicture {
        let mut name = [0; 16];
        name[0] = path.as_os_str().len() as u8;
        PreparedPicture {
            picture: Arc::new(Picture::new(PictureName(name), Vec::new(), 2, None)),
            text: "<image>".to_owned(),
            runs: vec![2],
        }
    }

    #[test]
    fn pictures_are_saved_by_the_names_of_their_files() {
        let mut conversation = Conversation::default();
        let shown = |media, path: &str| ShownPicture {
            media,
            path: PathBuf::from(path),
            prepared: prepared(Path::new(path)),
        };
        let pictures = [
            shown(MediaKind::Picture, "a.png"),
            shown(MediaKind::Sound, "bc.wav"),
        ];
        let mut shown = turn("What?", "Cats.");
        shown.user.pictures = pictures.to_vec();
        conversation.push(shown);
        let json = conversation.to_json(String::new()).unwrap();
        let read = |_: MediaKind, path: &Path| Ok(prepared(path));
        assert_eq!(Conversation::from_json(&json, read).unwrap(), conversation);
        let error = Conversation::from_json(&json, unread).unwrap_err();
        assert_eq!(error.to_string(), "'a.png' is not read");
        let format = ThinkingFormat::of_template("");
        let next = said("And now?");
        let n_pictures: Vec<usize> = conversation
            .messages(&format, Some(&next))
            .iter()
            .map(|seen| seen.pictures.len())
            .collect();
        assert_eq!(n_pictures, [2, 0, 0]);
        let moved = json.replace("\"user\"", "\"system\"");
        let error = Conversation::from_json(&moved, read).unwrap_err();
        assert!(error.to_string().contains("message 1 has parts"), "{error}");
    }

    fn contents(conversation: &Conversation) -> Vec<String> {
        let format = ThinkingFormat::of_template("");
        let next = said("next");
        let messages = conversation.messages(&format, Some(&next));
        messages.into_iter().map(|m| m.message.content).collect()
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
            user: said("c"),
            answer: Answer {
                thinking: Some("hm".to_owned()),
                text: "d".to_owned(),
            },
        });
        let json = conversation.to_json("model.gguf".to_owned()).unwrap();
        assert_eq!(
            Conversation::from_json(&json, unread).unwrap(),
            conversation
        );
        let empty = Conversation::new(None);
        let json = empty.to_json(String::new()).unwrap();
        assert_eq!(Conversation::from_json(&json, unread).unwrap(), empty);
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
            let message = Conversation::from_json(&json, unread)
                .unwrap_err()
                .to_string();
            assert!(message.contains(wanted), "{message}");
        }
    }
}
