//! [`ControlTexts`]: text of a request that spells a control token stays text.
//!
//! Invariant: no control token of a prompt comes from a string of the request: content of any role,
//! names, calls and their arguments, definitions of tools, variables. Those that the template
//! writes are found as ever. Only marks of reasoning (`<think>`) work in what an assistant said,
//! where templates look for them; they begin no turn.

use std::collections::{BTreeSet, HashSet};

use kv_core::TokenId;
use model_core::tokenizer::{EncodeOptions, TokenKind, Tokenizer};
use serde_json::{Map, Value};

use crate::generate::ChatPrompt;

/// Characters that no text has, of which one breaks what spells a token.
const MARKS: std::ops::RangeInclusive<char> = '\u{FDD0}'..='\u{FDEF}';

/// The texts of a vocabulary's control tokens, and of user-defined ones that are marks.
#[derive(Debug)]
pub(crate) struct ControlTexts {
    texts: HashSet<String>,
    /// In bytes, the longest first.
    lengths: Vec<usize>,
    firsts: BTreeSet<char>,
    /// The texts in order, and in order with their characters reversed.
    sorted: Vec<String>,
    reversed: Vec<String>,
    /// The texts without their first and their last character, where these are no words.
    inner: HashSet<String>,
    /// Marks that an assistant's texts may have.
    reasoning: Vec<String>,
}

/// A chat in which nothing spells a control token.
#[derive(Debug)]
pub(crate) struct Guarded {
    pub(crate) chat: ChatPrompt,
    /// Stands inside of what spelled one.
    mark: char,
}

/// The speaker of a string, who decides which marks it may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Speaker {
    /// An assistant, in text or thoughts: marks of reasoning.
    Assistant,
    /// None.
    Other,
}

impl Speaker {
    fn of(message: &Value) -> Self {
        if message["role"] == "assistant" {
            Self::Assistant
        } else {
            Self::Other
        }
    }

    /// The speaker of a member of a message: calls are data, also an assistant's.
    fn in_member(self, name: &str) -> Self {
        match name {
            "tool_calls" => Self::Other,
            _ => self,
        }
    }
}

impl ControlTexts {
    /// Those of this vocabulary, for this template.
    pub(crate) fn of(tokenizer: &Tokenizer, template: &str) -> Self {
        let n_tokens = u32::try_from(tokenizer.n_tokens()).unwrap_or(u32::MAX);
        let kinds = (0..n_tokens).map(TokenId).filter_map(|id| {
            let text = tokenizer.token_text(id)?;
            let kind = tokenizer.token_kind(id)?;
            let is_mark = match kind {
                TokenKind::Control => true,
                TokenKind::UserDefined => is_mark(text, template),
                _ => false,
            };
            is_mark.then_some((text, kind))
        });
        let mut texts = HashSet::new();
        let mut reasoning = Vec::new();
        for (text, kind) in kinds {
            // A single character cannot be broken.
            if text.chars().nth(1).is_some() {
                texts.insert(text.to_owned());
            }
            let is_plain = kind == TokenKind::UserDefined && is_of_reasoning(text);
            // Gemma 4 has channels of thought.
            let may_be = is_of_reasoning(text) || text.contains("channel");
            if is_plain || may_be && is_searched(text, template) {
                reasoning.push(text.to_owned());
            }
        }
        Self::new(texts, reasoning)
    }

    fn new(texts: HashSet<String>, reasoning: Vec<String>) -> Self {
        let lengths: BTreeSet<usize> = texts.iter().map(String::len).collect();
        let mut sorted: Vec<String> = texts.iter().cloned().collect();
        sorted.sort_unstable();
        let mut reversed: Vec<String> = texts.iter().map(|text| reverse(text)).collect();
        reversed.sort_unstable();
        let inner = texts.iter().filter_map(|text| {
            let mut chars = text.chars();
            chars.next();
            chars.next_back();
            let inner = chars.as_str();
            let is_word = inner.chars().all(|c| c.is_alphanumeric() || c == '_');
            (!is_word && inner.chars().nth(1).is_some()).then(|| inner.to_owned())
        });
        Self {
            firsts: sorted
                .iter()
                .filter_map(|text| text.chars().next())
                .collect(),
            lengths: lengths.into_iter().rev().collect(),
            inner: inner.collect(),
            sorted,
            reversed,
            reasoning,
            texts,
        }
    }

    /// The texts, in no order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &str> {
        self.texts.iter().map(String::as_str)
    }

    /// The chat without what spells a control token; `None` where nothing does.
    pub(crate) fn guard(&self, chat: &ChatPrompt) -> Option<Guarded> {
        self.spelled(chat)?;
        let mut marks = MARKS;
        let is_free = |mark: &char| !has_mark(&chat.messages, &chat.variables, *mark);
        let mark = marks.find(is_free).unwrap_or(*MARKS.start());
        let mut chat = chat.clone();
        let breaks = |text: &mut String, speaker| {
            if let Some(broken) = self.broken(text, mark, speaker) {
                *text = broken;
            }
        };
        for message in &mut chat.messages {
            let speaker = Speaker::of(message);
            if let Value::Object(members) = message {
                each_member(members, speaker, &breaks);
            }
        }
        each_member(&mut chat.variables, Speaker::Other, &breaks);
        Some(Guarded { chat, mark })
    }

    /// The path of a string of the chat that spells a control token or a part of one.
    pub(crate) fn spelled(&self, chat: &ChatPrompt) -> Option<String> {
        let is_spelled = |text: &str, speaker| self.broken(text, ' ', speaker).is_some();
        for (at, message) in chat.messages.iter().enumerate() {
            for (name, value) in message.as_object().into_iter().flatten() {
                let speaker = Speaker::of(message).in_member(name);
                if has_text(value, &|text| is_spelled(text, speaker)) {
                    return Some(format!("messages[{at}].{name}"));
                }
            }
        }
        let mut variables = chat.variables.iter();
        let is_spelled = |text: &str| is_spelled(text, Speaker::Other);
        let found =
            variables.find(|(name, value)| is_spelled(name) || has_text(value, &is_spelled));
        found.map(|(name, _)| name.clone())
    }

    /// The text with the mark in each control token that it spells, and at its ends where it would
    /// spell one together with its neighbours; `None` where nothing is to be broken.
    fn broken(&self, text: &str, mark: char, speaker: Speaker) -> Option<String> {
        let mut places = BTreeSet::new();
        let mut start = 0;
        if speaker == Speaker::Assistant {
            // Templates cut texts at these marks, or take them away.
            for (at, _) in text.match_indices(|c| self.firsts.contains(&c)) {
                let rest = text.get(at..).unwrap_or_default();
                let found = self.reasoning.iter().filter(|mark| rest.starts_with(*mark));
                if let Some(length) = found.map(String::len).max().filter(|_| at >= start) {
                    self.find_places(text, start..at, &mut places);
                    start = at + length;
                }
            }
        }
        self.find_places(text, start..text.len(), &mut places);
        if places.is_empty() {
            return None;
        }
        let mut out = String::with_capacity(text.len() + places.len() * mark.len_utf8());
        let mut copied = 0;
        for place in places {
            out.push_str(text.get(copied..place).unwrap_or_default());
            out.push(mark);
            copied = place;
        }
        out.push_str(text.get(copied..).unwrap_or_default());
        Some(out)
    }

    /// The place at which a part of a text is to be broken.
    fn find_places(&self, text: &str, range: std::ops::Range<usize>, places: &mut BTreeSet<usize>) {
        let offset = range.start;
        let part = text.get(range).unwrap_or_default();
        for (at, c) in part.char_indices() {
            if self.firsts.contains(&c) && self.begins_with_one(part.get(at..).unwrap_or_default())
            {
                places.insert(offset + at + c.len_utf8());
            }
        }
        // Templates trim texts, and write `<` and `>` around names.
        let trimmed = part.trim();
        let start = offset + (part.len() - part.trim_start().len());
        let end = start + trimmed.len();
        if self.inner.contains(trimmed) {
            let first = trimmed.chars().next().map_or(0, char::len_utf8);
            places.insert(start + first);
        }
        let (first, last) = match self.lengths.first() {
            Some(&longest) => (head(trimmed, longest), tail(trimmed, longest)),
            None => return,
        };
        if has_beginning_of(&self.sorted, last) {
            places.insert(end);
        }
        if has_beginning_of(&self.reversed, &reverse(first)) {
            places.insert(start);
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
        self.parts(rendered).concat()
    }

    /// True if the rendered text as a prompt has no other marks than its tokens have.
    pub(crate) fn is_safe_as_text(
        &self,
        controls: &ControlTexts,
        tokenizer: &Tokenizer,
        rendered: &str,
    ) -> bool {
        let n_marks = |tokens: Vec<TokenId>| {
            let texts = tokens.into_iter().filter_map(|id| tokenizer.token_text(id));
            texts.filter(|text| controls.texts.contains(*text)).count()
        };
        let as_text = tokenizer.encode(&self.text(rendered), EncodeOptions::CHAT);
        n_marks(as_text) == n_marks(self.encode(tokenizer, rendered))
    }

    /// Their tokens: what spelled a control token is in two parts.
    pub(crate) fn encode(&self, tokenizer: &Tokenizer, rendered: &str) -> Vec<TokenId> {
        tokenizer.encode_parts(self.parts(rendered), EncodeOptions::CHAT)
    }

    /// The rendered text without the mark, also where a template wrote it as JSON in ASCII.
    fn parts<'r>(&self, rendered: &'r str) -> Vec<&'r str> {
        let escaped = escaped(self.mark);
        let parts = rendered.split(self.mark);
        parts
            .flat_map(|part| part.split(escaped.as_str()))
            .collect()
    }
}

/// A user-defined token that is a mark: the template has it, or no ordinary text does. Others are
/// spaces, line breaks and tags of HTML, which texts are full of.
fn is_mark(text: &str, template: &str) -> bool {
    let ends = (text.chars().next(), text.chars().next_back());
    let is_bracketed = matches!(
        ends,
        (Some('<'), Some('>'))
            | (Some('['), Some(']'))
            | (Some('|'), Some('|'))
            | (Some('｜'), Some('｜'))
    );
    let has_bars = |bar: char| text.matches(bar).nth(1).is_some();
    is_bracketed && (has_bars('|') || has_bars('｜') || template.contains(text))
}

/// True for the marks around reasoning, in the words of all families.
fn is_of_reasoning(text: &str) -> bool {
    let text = text.to_ascii_lowercase();
    ["think", "thought", "reason"]
        .iter()
        .any(|word| text.contains(word))
}

/// True if the template looks for this text: `'</think>' in content`, `content.split('</think>')`.
fn is_searched(text: &str, template: &str) -> bool {
    const METHODS: [&str; 8] = [
        "split(",
        "rsplit(",
        "startswith(",
        "endswith(",
        "find(",
        "replace(",
        "partition(",
        "count(",
    ];
    template.match_indices(text).any(|(at, _)| {
        let before = template.get(..at).unwrap_or_default();
        let after = template.get(at + text.len()..).unwrap_or_default();
        let is_quoted = before.ends_with(['\'', '"']) && after.starts_with(['\'', '"']);
        let before = before.trim_end_matches(['\'', '"']).trim_end();
        let after = after.trim_start_matches(['\'', '"']).trim_start();
        let is_sought = after.starts_with("in ") || after.starts_with("not in ");
        is_quoted && (is_sought || METHODS.iter().any(|method| before.ends_with(method)))
    })
}

/// Changes the strings of a message or of variables, and the keys inside of them.
fn each_member(
    members: &mut Map<String, Value>,
    speaker: Speaker,
    change: &dyn Fn(&mut String, Speaker),
) {
    for (name, value) in members {
        let speaker = speaker.in_member(name);
        each_text(value, &|text| change(text, speaker));
    }
}

fn each_text(value: &mut Value, change: &dyn Fn(&mut String)) {
    match value {
        Value::String(text) => change(text),
        Value::Array(items) => items.iter_mut().for_each(|item| each_text(item, change)),
        Value::Object(members) => {
            let old = std::mem::take(members);
            for (mut name, mut value) in old {
                change(&mut name);
                each_text(&mut value, change);
                members.insert(name, value);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// True if a string or a key of a value is one.
fn has_text(value: &Value, is_one: &dyn Fn(&str) -> bool) -> bool {
    match value {
        Value::String(text) => is_one(text),
        Value::Array(items) => items.iter().any(|item| has_text(item, is_one)),
        Value::Object(members) => {
            let mut members = members.iter();
            members.any(|(name, value)| is_one(name) || has_text(value, is_one))
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
    }
}

fn has_mark(messages: &[Value], variables: &Map<String, Value>, mark: char) -> bool {
    let escaped = escaped(mark);
    let has_it = |text: &str| text.contains(mark) || text.contains(&escaped);
    let is_marked = |value: &Value| has_text(value, &has_it);
    let mut variables = variables.iter();
    messages.iter().any(is_marked)
        || variables.any(|(name, value)| has_it(name) || is_marked(value))
}

/// A character as JSON in ASCII.
fn escaped(mark: char) -> String {
    format!("\\u{:04x}", u32::from(mark))
}

fn reverse(text: &str) -> String {
    text.chars().rev().collect()
}

/// The first characters of a text, of at most so many bytes.
fn head(text: &str, n_bytes: usize) -> &str {
    text.get(..text.floor_char_boundary(n_bytes))
        .unwrap_or_default()
}

/// The last characters of a text, of at most so many bytes.
fn tail(text: &str, n_bytes: usize) -> &str {
    let start = text.len().saturating_sub(n_bytes);
    text.get(text.ceil_char_boundary(start)..)
        .unwrap_or_default()
}

/// True if at least two last characters of a text begin one of these texts, and do not end it.
fn has_beginning_of(sorted: &[String], text: &str) -> bool {
    text.char_indices().any(|(at, c)| {
        let end = text.get(at..).unwrap_or_default();
        let first = sorted.partition_point(|one| one.as_str() < end);
        let is_longer = |one: &String| one.len() > end.len() && one.starts_with(end);
        // The text itself comes before longer ones.
        end.len() > c.len_utf8() && sorted.iter().skip(first).take(2).any(is_longer)
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use serde_json::json;

    use super::*;

    fn controls(list: &[&str]) -> ControlTexts {
        let texts = list.iter().map(|&text| text.to_owned()).collect();
        ControlTexts::new(texts, vec!["<think>".to_owned(), "</think>".to_owned()])
    }

    fn broken(controls: &ControlTexts, text: &str, speaker: Speaker) -> String {
        let broken = controls.broken(text, '#', speaker);
        broken.unwrap_or_else(|| text.to_owned())
    }

    #[test]
    fn what_spells_a_control_token_is_broken() {
        let controls = controls(&["<|im_end|>", "<s>", "｜begin｜"]);
        for (text, expected) in [
            ("a < b <| im_end", "a < b <| im_end"),
            ("x<|im_end|>y<s>", "x<#|im_end|>y<#s>"),
            ("<｜begin｜>", "<｜#begin｜>"),
            ("a <", "a <"),
        ] {
            assert_eq!(broken(&controls, text, Speaker::Other), expected);
        }
    }

    /// Templates write names and texts next to each other, and some trim them.
    #[test]
    fn what_spells_one_with_its_neighbours_is_broken() {
        let controls = controls(&["<|im_end|>", "</s>"]);
        for (text, expected) in [
            ("Hello <|im_ ", "Hello <|im_# "),
            ("</", "</#"),
            (" end|> you", " #end|> you"),
            ("|im_end|", "|#im_end|"),
            ("/s", "/#s"),
            ("> quoted, a <", "> quoted, a <"),
        ] {
            assert_eq!(broken(&controls, text, Speaker::Other), expected);
        }
    }

    #[test]
    fn marks_of_reasoning_work_in_what_an_assistant_said() {
        let controls = controls(&["<|im_end|>", "<think>", "</think>"]);
        let text = "<think>a<|im_end|></think>b";
        let said = broken(&controls, text, Speaker::Assistant);
        assert_eq!(said, "<think>a<#|im_end|></think>b");
        let asked = broken(&controls, text, Speaker::Other);
        assert_eq!(asked, "<#think>a<#|im_end|><#/think>b");
        // A template that takes the marks away puts no token together.
        let hidden = broken(&controls, "<|im_<think>end|>", Speaker::Assistant);
        assert_eq!(hidden, "<|im_#<think>#end|>");
    }

    /// In time that grows with the text.
    #[test]
    fn long_texts_are_guarded() {
        let controls = controls(&["<|im_end|>", "<think>", "</think>"]);
        let text = "<think>a<|im_end|>".repeat(200_000);
        let said = broken(&controls, &text, Speaker::Assistant);
        assert_eq!(said.len(), text.len() + 200_000);
    }

    #[test]
    fn all_strings_of_a_request_are_guarded() {
        let controls = controls(&["<s>"]);
        let call = json!({"function": {"name": "f<s>", "arguments": {"a<s>": ["<s>"]}}});
        let tool = json!({"function": {"description": "<s>", "parameters": {"x": {"<s>": 1}}}});
        let chat = ChatPrompt {
            messages: vec![
                json!({"role": "user", "content": "a\u{FDD0}"}),
                json!({"role": "assistant", "content": "<s>", "tool_calls": [call]}),
                json!({"role": "tool", "content": [{"text": "<s>"}]}),
            ],
            variables: Map::from_iter([("tools".to_owned(), json!([tool]))]),
        };
        assert_eq!(controls.spelled(&chat).unwrap(), "messages[1].content");
        let guarded = controls.guard(&chat).unwrap();
        assert_eq!(guarded.mark, '\u{FDD1}');
        let all = |chat: &ChatPrompt| json!([chat.messages, chat.variables]).to_string();
        assert_eq!(all(&chat).matches("<s>").count(), 7);
        let guarded_text = all(&guarded.chat);
        assert_eq!(guarded_text.matches("<s>").count(), 0);
        assert_eq!(guarded_text.matches("<\u{FDD1}s>").count(), 7);
        assert_eq!(guarded.text(&guarded_text), all(&chat));
        assert_eq!(guarded.text("<\\ufdd1s>"), "<s>");
        let plain = ChatPrompt {
            messages: vec![json!({"role": "user", "content": "Hi"})],
            variables: Map::new(),
        };
        assert!(controls.guard(&plain).is_none());
    }

    #[test]
    fn marks_of_the_template_are_found() {
        let template = "{% if '</think>' in content %}{{ content.split(\"[/THINK]\")[-1] }}\
                        {% endif %}<tool_call>[THINK]";
        assert!(is_searched("</think>", template));
        assert!(is_searched("[/THINK]", template));
        assert!(!is_searched("[THINK]", template));
        assert!(is_mark("<tool_call>", template));
        assert!(is_mark("<|file_sep|>", template));
        for text in ["\n\n", "<table>", "  ", "</s>", "is"] {
            assert!(!is_mark(text, template), "{text}");
        }
    }
}
