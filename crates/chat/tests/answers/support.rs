//! Splitters with tools, and the comparison of every cut of an answer.

use cellar_chat::{Arguments, Calls, ChatSplitter, Part, Tool, ToolPaths};
use serde_json::{Value, json};

/// The parts of an answer, with neighbours of one kind joined.
pub(crate) fn join(parts: impl IntoIterator<Item = Part>) -> Vec<Part> {
    let mut joined: Vec<Part> = Vec::new();
    for part in parts {
        match (joined.last_mut(), &part) {
            (Some(Part::Text(last)), Part::Text(more))
            | (Some(Part::Reasoning(last)), Part::Reasoning(more))
            | (
                Some(Part::ToolArguments { text: last, .. }),
                Part::ToolArguments { text: more, .. },
            ) => last.push_str(more),
            _ => joined.push(part),
        }
    }
    joined
}

pub(crate) fn split(splitter: &ChatSplitter, pieces: &[&str]) -> Vec<Part> {
    let mut splitter = splitter.clone();
    let mut parts = Vec::new();
    for piece in pieces {
        parts.extend(splitter.push(piece));
    }
    parts.extend(splitter.finish());
    join(parts)
}

/// The parts of an answer, which are the same whole, cut at every place, and character by
/// character.
#[track_caller]
pub(crate) fn read(splitter: &ChatSplitter, text: &str) -> Vec<Part> {
    let whole = split(splitter, &[text]);
    for (at, _) in text.char_indices() {
        let (before, after) = text.split_at(at);
        let cut = split(splitter, &[before, after]);
        assert_eq!(cut, whole, "{before:?} | {after:?}");
    }
    let characters: Vec<String> = text.chars().map(String::from).collect();
    let pieces: Vec<&str> = characters.iter().map(String::as_str).collect();
    assert_eq!(split(splitter, &pieces), whole, "{text:?} by characters");
    whole
}

#[track_caller]
pub(crate) fn check(splitter: &ChatSplitter, text: &str, expected: &[Part]) {
    assert_eq!(read(splitter, text), expected, "{text:?}");
}

pub(crate) fn tool(name: &str, parameters: Value) -> Tool {
    Tool {
        name: name.to_owned(),
        parameters,
        arguments: Arguments::Free,
        paths: ToolPaths::default(),
    }
}

/// A splitter with the tools `f` and `g`.
pub(crate) fn with(template: &str) -> ChatSplitter {
    after(template, "")
}

/// The same behind a prompt.
pub(crate) fn after(template: &str, prompt: &str) -> ChatSplitter {
    let properties = json!({
        "city": {"type": "string"}, "days": {"type": "integer"},
        "text": {"type": "string"}, "n": {"type": "integer"}, "is": {"type": "boolean"},
        "list": {"type": "array"}, "mood": {"enum": ["1", "2"]},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "some": {"type": ["string", "null"]},
    });
    let tools = vec![
        tool("f", json!({"properties": properties})),
        tool("g", Value::Null),
    ];
    ChatSplitter::new(template, prompt, Calls::Free(tools))
}

/// A splitter without tools.
pub(crate) fn without(template: &str, prompt: &str) -> ChatSplitter {
    ChatSplitter::new(template, prompt, Calls::None)
}

pub(crate) fn text(text: &str) -> Part {
    Part::Text(text.to_owned())
}

pub(crate) fn thought(text: &str) -> Part {
    Part::Reasoning(text.to_owned())
}

pub(crate) fn call(index: usize, name: &str, arguments: &str) -> [Part; 2] {
    let (name, text) = (name.to_owned(), arguments.to_owned());
    let id = None;
    [
        Part::ToolStart { index, name, id },
        Part::ToolArguments { index, text },
    ]
}
