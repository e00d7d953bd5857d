//! [`NamedCall`]: a call whose tool is named before its arguments, as `name[ARGS]{…}` and
//! `name(key=value)`.
//!
//! Invariant: the name is given out once the arguments begin, so that a text which only looks like
//! a header stays text.

use crate::header::{Header, ReadHeader};
use crate::reader::{CallEvent, Progress};
use crate::value::{Dialect, Step, ValueReader};

#[derive(Clone, Debug)]
enum At {
    Header,
    /// Before the arguments of this tool.
    Before {
        name: String,
        id: Option<String>,
    },
    Arguments(ValueReader),
}

/// A call that is being read.
#[derive(Clone, Debug)]
pub(crate) struct NamedCall {
    header: ReadHeader,
    dialect: Dialect,
    at: At,
}

impl NamedCall {
    pub(crate) fn new(header: ReadHeader, dialect: Dialect) -> Self {
        Self {
            header,
            dialect,
            at: At::Header,
        }
    }

    /// The arguments that it has taken and not given out, where the answer ends.
    pub(crate) fn last_arguments(&self) -> String {
        match &self.at {
            At::Arguments(reader) => reader.last_word(),
            At::Header | At::Before { .. } => String::new(),
        }
    }

    /// Reads from the front of what is held.
    pub(crate) fn step(&mut self, held: &mut String, events: &mut Vec<CallEvent>) -> Progress {
        match &mut self.at {
            At::Header => match (self.header)(held) {
                Header::Open => Progress::Open,
                Header::Broken => Progress::Broken,
                Header::Text { rest } => {
                    *held = rest.to_owned();
                    Progress::Text
                }
                Header::Name { name, id, rest } => {
                    let (name, id) = (name.to_owned(), id.map(str::to_owned));
                    *held = rest.to_owned();
                    self.at = At::Before { name, id };
                    Progress::Read
                }
            },
            At::Before { name, id } => {
                let begun = held.trim_start();
                let first = match self.dialect {
                    Dialect::Python => '(',
                    Dialect::Json | Dialect::Gemma => '{',
                };
                if begun.is_empty() {
                    return Progress::Open;
                }
                if !begun.starts_with(first) {
                    return Progress::Broken;
                }
                *held = begun.to_owned();
                let (name, id) = (std::mem::take(name), id.take());
                events.push(CallEvent::Name { name, id });
                self.at = At::Arguments(ValueReader::new(self.dialect));
                Progress::Read
            }
            At::Arguments(reader) => {
                let text = std::mem::take(held);
                let mut json = String::new();
                let mut end = None;
                for (at, c) in text.char_indices() {
                    end = match reader.push(c, &mut json) {
                        Step::Open => continue,
                        Step::Done => Some((Progress::Done, at + c.len_utf8())),
                        Step::Behind => Some((Progress::Done, at)),
                        Step::Broken => {
                            json.push_str(&reader.unwritten());
                            Some((Progress::Broken, at))
                        }
                    };
                    break;
                }
                if !json.is_empty() {
                    events.push(CallEvent::Arguments(json));
                }
                let Some((progress, rest)) = end else {
                    return Progress::Open;
                };
                text.get(rest..).unwrap_or_default().clone_into(held);
                progress
            }
        }
    }
}
