//! [`JsonCall`]: one call of a tool as JSON, `{"name": …, "arguments": {…}}`, read character by
//! character.
//!
//! Invariant: the name comes once and before all arguments; the arguments concatenated are the text
//! of a JSON value. What is no call is [`JsonCall::is_broken`], and then the caller has the text.

use serde_json::Value;

/// What a call has so far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CallEvent {
    /// The name of the tool.
    Name(String),
    /// A part of its arguments.
    Arguments(String),
}

/// Follows the brackets and quotes of a JSON value.
#[derive(Clone, Debug, Default)]
pub(crate) struct ValueScanner {
    depth: u32,
    in_string: bool,
    is_escaped: bool,
    has_begun: bool,
}

/// What a character is to a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// White space before it.
    Before,
    /// A part of it.
    Inside,
    /// The last of it.
    Last,
    /// The first behind a number or word.
    Behind,
}

impl ValueScanner {
    pub(crate) fn push(&mut self, c: char) -> Place {
        if self.in_string {
            match c {
                _ if self.is_escaped => self.is_escaped = false,
                '\\' => self.is_escaped = true,
                '"' => {
                    self.in_string = false;
                    if self.depth == 0 {
                        return Place::Last;
                    }
                }
                _ => {}
            }
            return Place::Inside;
        }
        if !self.has_begun && c.is_whitespace() {
            return Place::Before;
        }
        let is_behind = self.has_begun && self.depth == 0;
        match c {
            ',' | '}' | ']' if is_behind => return Place::Behind,
            '"' => self.in_string = true,
            '{' | '[' => self.depth += 1,
            '}' | ']' => {
                self.depth = self.depth.saturating_sub(1);
                if self.depth == 0 {
                    return Place::Last;
                }
            }
            _ => {}
        }
        self.has_begun = true;
        Place::Inside
    }
}

#[derive(Clone, Debug)]
enum At {
    Before,
    Key,
    InKey { is_escaped: bool },
    Colon,
    Value(ValueScanner),
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
        }
    }

    pub(crate) fn is_done(&self) -> bool {
        matches!(self.at, At::Done)
    }

    pub(crate) fn is_broken(&self) -> bool {
        matches!(self.at, At::Broken)
    }

    /// Takes a character; not to be called when it is done or broken.
    pub(crate) fn push(&mut self, c: char, events: &mut Vec<CallEvent>) {
        self.at = match std::mem::replace(&mut self.at, At::Broken) {
            At::Before if c.is_whitespace() => At::Before,
            At::Before if c == '{' => At::Key,
            At::Key if c.is_whitespace() || c == ',' => At::Key,
            At::Key if c == '}' => self.end(events),
            At::Key if c == '"' => {
                self.key.clear();
                At::InKey { is_escaped: false }
            }
            At::InKey { is_escaped: false } if c == '"' => At::Colon,
            At::InKey { is_escaped } => {
                self.key.push(c);
                At::InKey {
                    is_escaped: !is_escaped && c == '\\',
                }
            }
            At::Colon if c.is_whitespace() => At::Colon,
            At::Colon if c == ':' => {
                self.value.clear();
                At::Value(ValueScanner::default())
            }
            At::Value(scanner) => self.push_value(c, scanner, events),
            _ => At::Broken,
        };
    }

    fn push_value(
        &mut self,
        c: char,
        mut scanner: ValueScanner,
        events: &mut Vec<CallEvent>,
    ) -> At {
        match scanner.push(c) {
            Place::Before => At::Value(scanner),
            Place::Inside => {
                self.add(c, events);
                At::Value(scanner)
            }
            Place::Last => {
                self.add(c, events);
                self.end_value(events)
            }
            Place::Behind => match (self.end_value(events), c) {
                (At::Key, '}') => self.end(events),
                (next, ',') => next,
                _ => At::Broken,
            },
        }
    }

    fn is_arguments(&self) -> bool {
        matches!(self.key.as_str(), "arguments" | "parameters")
    }

    fn add(&mut self, c: char, events: &mut Vec<CallEvent>) {
        self.value.push(c);
        // Objects are given out as they come, all else when it is complete.
        if self.is_arguments() && self.value.starts_with('{') {
            self.add_arguments(c.encode_utf8(&mut [0; 4]), events);
        }
    }

    fn add_arguments(&mut self, text: &str, events: &mut Vec<CallEvent>) {
        self.has_arguments = true;
        match (self.has_name, events.last_mut()) {
            (false, _) => self.early.push_str(text),
            (true, Some(CallEvent::Arguments(last))) => last.push_str(text),
            (true, _) => events.push(CallEvent::Arguments(text.to_owned())),
        }
    }

    fn end_value(&mut self, events: &mut Vec<CallEvent>) -> At {
        if self.key == "name" && !self.has_name {
            let Ok(name) = serde_json::from_str::<String>(&self.value) else {
                return At::Broken;
            };
            self.has_name = true;
            events.push(CallEvent::Name(name));
            let early = std::mem::take(&mut self.early);
            if !early.is_empty() {
                events.push(CallEvent::Arguments(early));
            }
        } else if self.is_arguments() && !self.value.starts_with('{') {
            match serde_json::from_str(&self.value) {
                // Arguments as JSON in a text.
                Ok(Value::String(text)) => self.add_arguments(&text, events),
                Ok(Value::Null) => {}
                _ => return At::Broken,
            }
        }
        At::Key
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

    fn read(text: &str) -> (JsonCall, Vec<CallEvent>) {
        let (mut call, mut events) = (JsonCall::new(), Vec::new());
        for c in text.chars() {
            if call.is_done() || call.is_broken() {
                break;
            }
            call.push(c, &mut events);
        }
        (call, events)
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
        ] {
            let (call, events) = read(text);
            assert!(call.is_done(), "{text}");
            let expected = [
                CallEvent::Name("f".to_owned()),
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
            r#"{"name": "f" x"#,
        ] {
            assert!(read(text).0.is_broken(), "{text}");
        }
        assert!(!read(r#"{"name": "f", "argu"#).0.is_broken());
    }
}
