//! [`ControlTexts`]: text of messages that spells a control token stays text.
//!
//! Invariant: no control token of a prompt comes from what a user, a system or a tool says; those of the
//! template are found as ever. Knows no request. What an assistant said before is left as it is: templates look
//! for marks in it.

use std::borrow::Cow;
use std::collections::{BTreeSet, HashSet};

use kv_core::TokenId;
use model_core::tokenizer::{AddSpecial, EncodeOptions, SpecialText, TokenKind, Tokenizer};
use serde_json::{Value, json};

/// Characters that no text has, of which one breaks what spells a token.
const MARKS: std::ops::RangeInclusive<char> = '\u{FDD0}'..='\u{FDEF}';

/// What the control tokens of a vocabulary spell.
#[derive(Debug)]
pub(crate) struct ControlTexts {
    texts: HashSet<String>,
    /// In bytes, the longest first.
    lengths: Vec<usize>,
    firsts: BTreeSet<char>,
}

/// Messages in which nothing spells a control token.
#[derive(Debug)]
pub(crate) struct Guarded {
    pub(crate) messages: Vec<Value>,
    /// Stands after the first character of what spelled one.
    mark: char,
}

impl ControlTexts {
    pub(crate) fn of(tokenizer: &Tokenizer) -> Self {
        let n_tokens = u32::try_from(tokenizer.n_tokens()).unwrap_or(u32::MAX);
        let ids = (0..n_tokens).map(TokenId);
        let controls = ids.filter(|id| tokenizer.token_kind(*id) == Some(TokenKind::Control));
        let texts = controls.filter_map(|id| tokenizer.token_text(id));
        // A single character cannot be broken.
        let texts: HashSet<String> = texts
            .filter(|text| text.chars().nth(1).is_some())
            .map(str::to_owned)
            .collect();
        let lengths: BTreeSet<usize> = texts.iter().map(String::len).collect();
        Self {
            firsts: texts
                .iter()
                .filter_map(|text| text.chars().next())
                .collect(),
            lengths: lengths.into_iter().rev().collect(),
            texts,
        }
    }

    /// The texts.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &str> {
        self.texts.iter().map(String::as_str)
    }

    /// The messages without what spells a control token; `None` where nothing does.
    pub(crate) fn guard(&self, messages: &[Value]) -> Option<Guarded> {
        let content = |message: &Value| {
            let is_guarded = message["role"] != "assistant";
            let text = message.get("content").and_then(Value::as_str);
            text.filter(|_| is_guarded).map(str::to_owned)
        };
        let texts: Vec<Option<String>> = messages.iter().map(content).collect();
        let is_spelled = |text: &String| matches!(self.broken(text, ' '), Cow::Owned(_));
        if !texts.iter().flatten().any(is_spelled) {
            return None;
        }
        let is_free = |mark: &char| !texts.iter().flatten().any(|text| text.contains(*mark));
        let mark = MARKS.into_iter().find(is_free).unwrap_or(*MARKS.start());
        let mut messages = messages.to_vec();
        for (message, text) in messages.iter_mut().zip(texts) {
            if let Some(text) = text {
                message["content"] = json!(self.broken(&text, mark));
            }
        }
        Some(Guarded { messages, mark })
    }

    /// The text with the mark in each control token that it spells.
    fn broken<'t>(&self, text: &'t str, mark: char) -> Cow<'t, str> {
        let mut out = String::new();
        let mut copied = 0;
        for (at, c) in text.char_indices() {
            if self.firsts.contains(&c) && self.begins_with_one(text.get(at..).unwrap_or_default())
            {
                let end = at + c.len_utf8();
                out.push_str(text.get(copied..end).unwrap_or_default());
                out.push(mark);
                copied = end;
            }
        }
        match copied {
            0 => Cow::Borrowed(text),
            _ => Cow::Owned(out + text.get(copied..).unwrap_or_default()),
        }
    }

    fn begins_with_one(&self, text: &str) -> bool {
        let mut starts = self.lengths.iter().filter_map(|&length| text.get(..length));
        starts.any(|start| self.texts.contains(start))
    }
}

impl Guarded {
    /// The rendered messages as they were meant.
    pub(crate) fn text(&self, rendered: &str) -> String {
        rendered.replace(self.mark, "")
    }

    /// Their tokens: what spelled a control token is in two pieces.
    pub(crate) fn encode(&self, tokenizer: &Tokenizer, rendered: &str) -> Vec<TokenId> {
        let inner = EncodeOptions {
            add: AddSpecial::Never,
            special: SpecialText::Parse,
        };
        let pieces = rendered.split(self.mark);
        let mut tokens: Vec<TokenId> = pieces
            .flat_map(|piece| tokenizer.encode(piece, inner))
            .collect();
        // As `EncodeOptions::CHAT` adds them.
        if let Some(first) = tokenizer
            .adds_first()
            .filter(|id| tokens.first() != Some(id))
        {
            tokens.insert(0, first);
        }
        let last = tokenizer.adds_last();
        tokens.extend(last.filter(|id| tokens.last() != Some(id)));
        tokens
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    fn texts(list: &[&str]) -> ControlTexts {
        let lengths: BTreeSet<usize> = list.iter().map(|text| text.len()).collect();
        ControlTexts {
            texts: list.iter().map(|&text| text.to_owned()).collect(),
            lengths: lengths.into_iter().rev().collect(),
            firsts: list.iter().filter_map(|text| text.chars().next()).collect(),
        }
    }

    #[test]
    fn what_spells_a_control_token_is_broken() {
        let controls = texts(&["<|im_end|>", "<s>", "｜begin｜"]);
        for (text, broken) in [
            ("a < b <| im_end", "a < b <| im_end"),
            ("x<|im_end|>y<s>", "x<#|im_end|>y<#s>"),
            ("<｜begin｜>", "<｜#begin｜>"),
            ("<s", "<s"),
        ] {
            assert_eq!(controls.broken(text, '#'), broken);
        }
    }

    #[test]
    fn what_an_assistant_said_is_left() {
        let controls = texts(&["<s>"]);
        let message = |role: &str, content: &str| json!({"role": role, "content": content});
        let said = [message("assistant", "<s>"), message("user", "Hi")];
        assert!(controls.guard(&said).is_none());
        let said = [message("assistant", "<s>"), message("tool", "<s>\u{FDD0}")];
        let guarded = controls.guard(&said).unwrap();
        assert_eq!(guarded.mark, '\u{FDD1}');
        assert_eq!(guarded.messages[0]["content"], "<s>");
        let rendered = guarded.messages[1]["content"].as_str().unwrap();
        assert_eq!(rendered, "<\u{FDD1}s>\u{FDD0}");
        assert_eq!(guarded.text(rendered), "<s>\u{FDD0}");
    }
}
