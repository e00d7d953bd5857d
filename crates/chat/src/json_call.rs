//! [`JsonCall`]: one call of a tool as JSON, `{"name": …, "arguments": {…}}`, read character by
//! character.
//!
//! Invariant: the name comes once and before all arguments; the arguments concatenated are the
//! beginning of a JSON value, and a whole one once the call is done.

use serde_json::Value;

use crate::reader::{CallEvent, Progress};
use crate::value::{Dialect, Step, ValueReader};

/// The members that name the tool.
const NAMES: [&str; 3] = ["name", "tool_name", "function"];
/// The members that hold its arguments.
const ARGUMENTS: [&str; 2] = ["arguments", "parameters"];
/// The members that say what it is.
const OTHERS: [&str; 3] = ["id", "tool_call_id", "type"];

#[derive(Clone, Debug)]
enum At {
    Before,
    Key,
    InKey {
        quote: char,
    },
    Colon,
    Value(ValueReader),
    /// Behind a value.
    After,
    Done,
    Broken,
}

/// A call that is being read.
#[derive(Clone, Debug)]
pub(crate) struct JsonCall {
    at: At,
    key: String,
    value: String,
    has_name: bool,
    has_arguments: bool,
    /// Arguments that came before the name.
    early: String,
    /// True if it has a member that calls do not have.
    is_odd: bool,
}

impl JsonCall {
    pub(crate) fn new() -> Self {
        Self {
            at: At::Before,
            key: String::new(),
            value: String::new(),
            has_name: false,
            has_arguments: false,
            early: String::new(),
            is_odd: false,
        }
    }

    /// True if it has a member that calls do not have, and so may be data.
    pub(crate) fn is_odd(&self) -> bool {
        self.is_odd
    }

    /// Reads from the front of what is held.
    pub(crate) fn step(&mut self, held: &mut String, events: &mut Vec<CallEvent>) -> Progress {
        let text = std::mem::take(held);
        for (at, c) in text.char_indices() {
            let was_in_arguments = matches!(self.at, At::Value(_)) && self.is_arguments();
            self.push(c, events);
            let (rest, progress) = match self.at {
                At::Done => (at + c.len_utf8(), Progress::Done),
                // What follows sound arguments is no part of the call.
                At::Broken if self.has_arguments && self.has_name && !was_in_arguments => {
                    (at, Progress::Done)
                }
                At::Broken => (at, Progress::Broken),
                _ => continue,
            };
            text.get(rest..).unwrap_or_default().clone_into(held);
            return progress;
        }
        Progress::Open
    }

    /// The arguments that it has taken and not given out, where the answer ends.
    pub(crate) fn last_arguments(&self) -> String {
        match &self.at {
            At::Value(reader) if self.is_arguments() && self.has_name => reader.last_word(),
            _ => String::new(),
        }
    }

    fn push(&mut self, c: char, events: &mut Vec<CallEvent>) {
        self.at = match std::mem::replace(&mut self.at, At::Broken) {
            At::Before if c.is_whitespace() => At::Before,
            At::Before if c == '{' => At::Key,
            At::Key if c.is_whitespace() || c == ',' => At::Key,
            At::Key | At::After if c == '}' => self.end(events),
            At::Key if c == '"' || c == '\'' => {
                self.key.clear();
                At::InKey { quote: c }
            }
            At::InKey { quote } if c == quote => {
                let known = NAMES.iter().chain(&ARGUMENTS).chain(&OTHERS);
                self.is_odd |= !known.into_iter().any(|name| *name == self.key);
                At::Colon
            }
            At::InKey { quote } if c != '\\' => {
                self.key.push(c);
                At::InKey { quote }
            }
            At::Colon if c.is_whitespace() => At::Colon,
            At::Colon if c == ':' => {
                self.value.clear();
                At::Value(ValueReader::new(Dialect::Json))
            }
            At::Value(reader) => self.push_value(c, reader, events),
            At::After if c.is_whitespace() => At::After,
            At::After if c == ',' => At::Key,
            _ => At::Broken,
        };
    }

    fn push_value(&mut self, c: char, mut reader: ValueReader, events: &mut Vec<CallEvent>) -> At {
        let before = self.value.len();
        let step = reader.push(c, &mut self.value);
        if self.is_arguments() && self.value.starts_with('{') {
            // Objects are given out as they come, all else when it is complete.
            let new = self.value.split_off(before.max(1));
            let new = if before == 0 { format!("{{{new}") } else { new };
            self.add_arguments(&new, events);
        }
        match step {
            Step::Open => At::Value(reader),
            Step::Broken => {
                if self.is_arguments() {
                    let rest = reader.unwritten();
                    self.add_arguments(&rest, events);
                }
                At::Broken
            }
            Step::Done => self.end_value(events),
            Step::Behind => match (self.end_value(events), c) {
                (At::After, '}') => self.end(events),
                (At::After, ',') => At::Key,
                (At::After, c) if c.is_whitespace() => At::After,
                _ => At::Broken,
            },
        }
    }

    fn is_arguments(&self) -> bool {
        ARGUMENTS.contains(&self.key.as_str())
    }

    fn add_arguments(&mut self, text: &str, events: &mut Vec<CallEvent>) {
        if text.is_empty() {
            return;
        }
        self.has_arguments = true;
        if self.has_name {
            events.push(CallEvent::Arguments(text.to_owned()))
        } else {
            self.early.push_str(text)
        }
    }

    fn end_value(&mut self, events: &mut Vec<CallEvent>) -> At {
        if self.is_arguments() && self.value.starts_with('{') {
            return At::After;
        }
        let Ok(value) = serde_json::from_str::<Value>(&self.value) else {
            return At::Broken;
        };
        match (self.key.as_str(), value) {
            (key, Value::String(name)) if NAMES.contains(&key) && !self.has_name => {
                self.add_name(name, events)
            }
            // {"type": "function", "function": {"name": …, "arguments": …}}
            ("function", Value::Object(call)) if !self.has_name => {
                let name = call.get("name").and_then(Value::as_str);
                let Some(name) = name else {
                    return At::Broken;
                };
                let arguments = ARGUMENTS.iter().find_map(|key| call.get(*key));
                match arguments {
                    Some(Value::String(text)) => self.add_text(text, events),
                    Some(value) => self.add_arguments(&value.to_string(), events),
                    None => {}
                }
                self.add_name(name.to_owned(), events)
            }
            (key, _) if key == "name" && !self.has_name => At::Broken,
            // Arguments as JSON in a text.
            (_, Value::String(text)) if self.is_arguments() => {
                self.add_text(&text, events);
                At::After
            }
            (_, Value::Null) if self.is_arguments() => At::After,
            _ if self.is_arguments() => {
                let value = self.value.clone();
                self.add_arguments(&value, events);
                At::After
            }
            _ => At::After,
        }
    }

    /// Adds arguments that are JSON in a text: mended where that is possible.
    fn add_text(&mut self, text: &str, events: &mut Vec<CallEvent>) {
        let (mut reader, mut json) = (ValueReader::new(Dialect::Json), String::new());
        let mut steps = text.trim().chars().map(|c| reader.push(c, &mut json));
        let end = steps.find(|step| *step != Step::Open);
        if end == Some(Step::Done) && steps.next().is_none() {
            self.add_arguments(&json, events)
        } else {
            self.add_arguments(text, events)
        }
    }

    fn add_name(&mut self, name: String, events: &mut Vec<CallEvent>) -> At {
        if name.trim().is_empty() {
            return At::Broken;
        }
        self.has_name = true;
        events.push(CallEvent::Name { name, id: None });
        let early = std::mem::take(&mut self.early);
        if !early.is_empty() {
            events.push(CallEvent::Arguments(early));
        }
        At::After
    }

    fn end(&mut self, events: &mut Vec<CallEvent>) -> At {
        if !self.has_name {
            return At::Broken;
        }
        if !self.has_arguments {
            self.add_arguments("{}", events);
        }
        At::Done
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reader::joined;

    fn read(text: &str) -> (Progress, Vec<CallEvent>) {
        let (mut call, mut events) = (JsonCall::new(), Vec::new());
        let progress = call.step(&mut text.to_owned(), &mut events);
        (progress, joined(events))
    }

    #[test]
    fn names_come_before_arguments() {
        for (text, arguments) in [
            (
                r#" {"name": "f", "arguments": {"a": "}\"{", "b": [1, {}]}}"#,
                r#"{"a": "}\"{", "b": [1, {}]}"#,
            ),
            (r#"{"parameters": {"a": 1}, "name": "f"}"#, r#"{"a": 1}"#),
            (r#"{"name":"f"}"#, "{}"),
            (r#"{"name":"f","arguments":null}"#, "{}"),
            (r#"{"name":"f","arguments":"{\"a\":1}"}"#, r#"{"a":1}"#),
            (
                r#"{"id": 7, "type": "function", "name": "f", "arguments": {}}"#,
                "{}",
            ),
            (
                r#"{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}"#,
                r#"{"a":1}"#,
            ),
            (
                r#"{"function": "f", "parameters": {"a": 1 } }"#,
                r#"{"a": 1 }"#,
            ),
            (
                r#"{"tool_call_id": "0", "tool_name": "f", "parameters": {}}"#,
                "{}",
            ),
            (
                "{'name': 'f', 'arguments': {'a': True,},}",
                r#"{"a": true}"#,
            ),
        ] {
            let (progress, events) = read(text);
            assert_eq!(progress, Progress::Done, "{text}");
            let expected = [
                CallEvent::Name {
                    name: "f".to_owned(),
                    id: None,
                },
                CallEvent::Arguments(arguments.to_owned()),
            ];
            assert_eq!(events, expected, "{text}");
        }
    }

    #[test]
    fn what_is_no_call_is_broken() {
        for text in [
            "hello",
            "{hello",
            r#"{"a": 1}"#,
            r#"{"name": 1}"#,
            r#"{"name": ""}"#,
            r#"{"name": "f" x"#,
        ] {
            assert_eq!(read(text).0, Progress::Broken, "{text}");
        }
        assert_eq!(read(r#"{"name": "f", "argu"#).0, Progress::Open);
    }
}
