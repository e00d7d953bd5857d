//! [`TaggedCall`]: a call as marks around keys and values, for example
//! `<function=name><parameter=key>value</parameter></function>`.
//!
//! Invariant: the arguments concatenated are a JSON object once the call is done. A text is given
//! out as it comes; another value once it is complete, as only the tool's schema and the whole
//! value say what it is.

use serde_json::Value;

use crate::family::Piece;
use crate::header::is_name;
use crate::marks::{LastSpaces, find_first, undecided};
use crate::reader::{CallEvent, Progress};
use crate::schema::{is_text, of_argument, read, value_of};
use crate::tool::Tool;
use crate::value::push_escaped;

/// The marks of a family. What begins a call stands before all of them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tags {
    /// The end of the name; not taken where it begins a key or ends the call.
    pub(crate) name_ends: &'static [&'static str],
    /// The end of attributes behind a name or a key, where there may be some.
    pub(crate) attributes_end: Option<&'static str>,
    /// The attributes behind a name, in a grammar.
    #[cfg_attr(not(feature = "grammar"), allow(dead_code))]
    pub(crate) name_attributes: &'static [Piece],
    /// The mark before a key; the next one is behind it.
    pub(crate) key: &'static str,
    pub(crate) key_end: &'static str,
    /// The attribute behind a key, in a grammar.
    #[cfg_attr(not(feature = "grammar"), allow(dead_code))]
    pub(crate) key_type: KeyType,
    /// The mark before a value; the next one is behind it.
    pub(crate) value: &'static str,
    pub(crate) value_end: &'static str,
    /// The end of the call.
    pub(crate) end: &'static str,
    pub(crate) lines: Lines,
    /// True if a value may be in `<![CDATA[…]]>`.
    pub(crate) has_cdata: bool,
}

/// The line breaks around a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lines {
    /// One before and one behind it are no part of it.
    Around,
    /// They are a part of it, but where one is before it and one behind.
    Inside,
}

/// The attribute behind a key that says the type of its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyType {
    /// There is none.
    Unwritten,
    /// `string="true"` or `string="false"`.
    IsText,
    /// `type="number"`: the type's name, where all numbers are of one type.
    Name,
}

/// The longest text of attributes.
const MAX_ATTRIBUTES: usize = 512;
/// The brackets around a key or a value whose marks mean nothing.
const CDATA: &str = "<![CDATA[";
const CDATA_END: &str = "]]>";

#[derive(Clone, Debug, PartialEq, Eq)]
enum At {
    Name,
    /// Behind the name, before what ends its attributes.
    NameAttributes,
    Parameters,
    /// Behind a key, before what begins its value.
    Key {
        key: String,
    },
    Value {
        key: String,
        kind: Kind,
    },
    /// In a text that is given out as it comes.
    Text {
        lines: Lines,
    },
    Done,
}

/// The type of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// An attribute says that it is text.
    Text,
    /// An attribute says that it is JSON.
    Json,
    /// The schema says it.
    BySchema,
}

/// A call that is being read.
#[derive(Clone, Debug)]
pub(crate) struct TaggedCall {
    tags: &'static Tags,
    at: At,
    name: String,
    has_started: bool,
    n_arguments: usize,
    /// Bytes of what is held in which the end of the value is not.
    n_searched: usize,
}

impl TaggedCall {
    pub(crate) fn new(tags: &'static Tags) -> Self {
        Self {
            tags,
            at: At::Name,
            name: String::new(),
            has_started: false,
            n_arguments: 0,
            n_searched: 0,
        }
    }

    /// Reads from the front of what is held.
    pub(crate) fn step(
        &mut self,
        held: &mut String,
        tools: &[Tool],
        events: &mut Vec<CallEvent>,
    ) -> Progress {
        match std::mem::replace(&mut self.at, At::Done) {
            At::Name => self.step_name(held),
            At::NameAttributes => {
                let Some(rest) = self.after_attributes(held) else {
                    self.at = At::NameAttributes;
                    return open(held);
                };
                *held = rest.text;
                self.at = At::Parameters;
                Progress::Read
            }
            At::Parameters => self.step_parameters(held, events),
            At::Key { key } => self.step_key(key, held),
            At::Value { key, kind } => self.step_value(Member { key, kind, tools }, held, events),
            At::Text { lines } => self.step_text(lines, held, events),
            At::Done => Progress::Done,
        }
    }

    fn step_name(&mut self, held: &mut String) -> Progress {
        let found = find_first(held, self.tags.name_ends);
        // A name on a line of its own may have a line break before it.
        let begun = held.trim_start();
        let n_before = held.len() - begun.len();
        let found = match found {
            Some((at, _)) if at < n_before => {
                find_first(begun, self.tags.name_ends).map(|(at, end)| (at + n_before, end))
            }
            found => found,
        };
        let Some((at, end)) = found else {
            let n = undecided(begun, self.tags.name_ends, LastSpaces::Held);
            let may_be = n == 0 || begun.get(..n).is_some_and(is_name);
            self.at = At::Name;
            return if may_be {
                Progress::Open
            } else {
                Progress::Broken
            };
        };
        let name = held.get(..at).unwrap_or_default().trim();
        if !is_name(name) {
            return Progress::Broken;
        }
        name.clone_into(&mut self.name);
        let is_kept = end == self.tags.key || end == self.tags.end;
        let rest = if is_kept { at } else { at + end.len() };
        *held = held.get(rest..).unwrap_or_default().to_owned();
        self.at = match self.tags.attributes_end {
            Some(_) => At::NameAttributes,
            None => At::Parameters,
        };
        Progress::Read
    }

    /// The attributes behind a name or key, and what follows them.
    fn after_attributes(&self, held: &str) -> Option<Attributes> {
        let Some(end) = self.tags.attributes_end else {
            return Some(Attributes {
                kind: Kind::BySchema,
                text: held.to_owned(),
            });
        };
        let (attributes, rest) = held.split_once(end)?;
        let kind = match attributes {
            _ if attributes.contains("string=\"true\"") => Kind::Text,
            _ if attributes.contains("type=\"string\"") => Kind::Text,
            _ if attributes.contains("string=\"false\"") => Kind::Json,
            _ if attributes.contains("type=\"") => Kind::Json,
            _ => Kind::BySchema,
        };
        Some(Attributes {
            kind,
            text: rest.to_owned(),
        })
    }

    fn step_parameters(&mut self, held: &mut String, events: &mut Vec<CallEvent>) -> Progress {
        let begun = held.trim_start();
        if let Some(rest) = begun.strip_prefix(self.tags.end) {
            *held = rest.to_owned();
            self.start(events);
            self.end(events);
            return Progress::Done;
        }
        if let Some(rest) = begun.strip_prefix(self.tags.key) {
            let Some((key, rest)) = rest.split_once(self.tags.key_end) else {
                self.at = At::Parameters;
                return open(rest);
            };
            let key = key.trim().to_owned();
            *held = rest.to_owned();
            self.start(events);
            self.at = At::Key { key };
            return Progress::Read;
        }
        if self.tags.end.starts_with(begun) || self.tags.key.starts_with(begun) {
            self.at = At::Parameters;
            return Progress::Open;
        }
        if !self.has_started {
            return Progress::Broken;
        }
        // Text where a parameter should be ends the call.
        self.end(events);
        Progress::Done
    }

    fn step_key(&mut self, key: String, held: &mut String) -> Progress {
        let Some(Attributes { kind, text }) = self.after_attributes(held) else {
            self.at = At::Key { key };
            return open(held);
        };
        let begun = text.trim_start();
        let value = self.tags.value;
        let rest = match begun.strip_prefix(value) {
            _ if value.is_empty() => text,
            Some(rest) => rest.to_owned(),
            None if value.starts_with(begun) => {
                self.at = At::Key { key };
                return Progress::Open;
            }
            None => return Progress::Broken,
        };
        *held = rest;
        self.n_searched = 0;
        self.at = At::Value { key, kind };
        Progress::Read
    }

    fn step_value(
        &mut self,
        member: Member<'_>,
        held: &mut String,
        events: &mut Vec<CallEvent>,
    ) -> Progress {
        let Member { key, kind, tools } = member;
        if held.is_empty() {
            self.at = At::Value { key, kind };
            return Progress::Open;
        }
        let begun = held.trim_start();
        if self.tags.has_cdata && (CDATA.starts_with(begun) || begun.starts_with(CDATA)) {
            let inside = begun.strip_prefix(CDATA).unwrap_or_default();
            let ended = inside.split_once(CDATA_END).and_then(|(text, rest)| {
                let (_, rest) = rest.split_once(self.tags.value_end)?;
                Some((text.to_owned(), rest.to_owned()))
            });
            // The value may end before it is long enough to tell.
            if let Some((text, rest)) = ended {
                let value = self.value(tools, &key, kind, &text);
                self.add(&key, &value.to_string(), events);
                *held = rest;
                self.at = At::Parameters;
                return Progress::Read;
            }
            self.at = At::Value { key, kind };
            return Progress::Open;
        }
        let schema = of_argument(tools, &self.name, &key);
        let is_text = match kind {
            Kind::Text => true,
            Kind::Json => false,
            Kind::BySchema => schema.is_none_or(is_text),
        };
        if is_text {
            let lines = if held.starts_with('\n') {
                Lines::Around
            } else {
                self.tags.lines
            };
            let text = held.strip_prefix('\n').unwrap_or(held).to_owned();
            *held = text;
            self.add(&key, "\"", events);
            self.at = At::Text { lines };
            return Progress::Read;
        }
        let from = held.floor_char_boundary(self.n_searched);
        let end = held
            .get(from..)
            .and_then(|rest| rest.find(self.tags.value_end));
        let Some(end) = end.map(|at| at + from) else {
            self.n_searched = held.len().saturating_sub(self.tags.value_end.len());
            self.at = At::Value { key, kind };
            return Progress::Open;
        };
        let rest = held
            .get(end + self.tags.value_end.len()..)
            .unwrap_or_default();
        let rest = rest.to_owned();
        let text = held.get(..end).unwrap_or_default();
        let text = text.strip_prefix('\n').unwrap_or(text);
        let text = text.strip_suffix('\n').unwrap_or(text);
        let value = self.value(tools, &key, kind, text);
        self.add(&key, &value.to_string(), events);
        *held = rest;
        self.at = At::Parameters;
        Progress::Read
    }

    /// The argument that it has taken and not given out, where the answer ends with what is held.
    pub(crate) fn last_arguments(&self, held: &str, tools: &[Tool]) -> String {
        let At::Value { key, kind } = &self.at else {
            return String::new();
        };
        let n = undecided(held, &[self.tags.value_end], LastSpaces::Held);
        let text = held.get(..n).unwrap_or_default().trim_start();
        if text.is_empty() {
            return String::new();
        }
        self.member(key, &self.value(tools, key, *kind, text).to_string())
    }

    fn value(&self, tools: &[Tool], key: &str, kind: Kind, text: &str) -> Value {
        match kind {
            Kind::Text => Value::from(text),
            Kind::Json => read(text).unwrap_or_else(|| Value::from(text)),
            Kind::BySchema => value_of(of_argument(tools, &self.name, key), text),
        }
    }

    fn step_text(
        &mut self,
        lines: Lines,
        held: &mut String,
        events: &mut Vec<CallEvent>,
    ) -> Progress {
        let end = held.find(self.tags.value_end);
        let n = end.unwrap_or_else(|| undecided(held, &[self.tags.value_end], LastSpaces::Given));
        let text = held.get(..n).unwrap_or_default();
        let without_line = text.strip_suffix('\n');
        let text = match (without_line, end) {
            // The line break may be the last.
            (Some(text), None) => text,
            (Some(text), Some(_)) if lines == Lines::Around => text,
            _ => text,
        };
        let mut json = String::new();
        text.chars().for_each(|c| push_escaped(c, &mut json));
        let n_given = text.len();
        let progress = match end {
            Some(end) => {
                json.push('"');
                let rest = held
                    .get(end + self.tags.value_end.len()..)
                    .unwrap_or_default();
                *held = rest.to_owned();
                self.at = At::Parameters;
                Progress::Read
            }
            None => {
                held.drain(..n_given);
                self.at = At::Text { lines };
                Progress::Open
            }
        };
        if !json.is_empty() {
            events.push(CallEvent::Arguments(json));
        }
        progress
    }

    fn start(&mut self, events: &mut Vec<CallEvent>) {
        if !self.has_started {
            self.has_started = true;
            let name = self.name.clone();
            events.push(CallEvent::Name { name, id: None });
        }
    }

    fn add(&mut self, key: &str, value: &str, events: &mut Vec<CallEvent>) {
        events.push(CallEvent::Arguments(self.member(key, value)));
        self.n_arguments += 1;
    }

    /// The next member of the arguments.
    fn member(&self, key: &str, value: &str) -> String {
        let before = if self.n_arguments == 0 { "{" } else { ", " };
        format!("{before}{}: {value}", Value::from(key))
    }

    fn end(&mut self, events: &mut Vec<CallEvent>) {
        let text = if self.n_arguments == 0 { "{}" } else { "}" };
        events.push(CallEvent::Arguments(text.to_owned()));
        self.at = At::Done;
    }
}

/// The type that attributes give a value, and the text behind them.
struct Attributes {
    kind: Kind,
    text: String,
}

/// A member whose value is read.
struct Member<'t> {
    key: String,
    kind: Kind,
    tools: &'t [Tool],
}

/// More is needed, but not without end.
fn open(text: &str) -> Progress {
    if text.len() > MAX_ATTRIBUTES {
        Progress::Broken
    } else {
        Progress::Open
    }
}
