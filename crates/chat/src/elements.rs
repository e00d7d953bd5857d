//! [`ElementsCall`]: a call whose arguments are elements in elements, as MiniMax-M3 writes them:
//! `name">` and then `<key>value</key>`, where each mark stands behind a text of its own.
//!
//! Invariant: nothing is given out before the whole call is there.

use serde_json::{Map, Value};

use crate::header::is_name;
use crate::reader::{CallEvent, Progress};
use crate::schema::value_of;
use crate::tool::Tool;

/// Elements in elements.
const MAX_DEPTH: usize = 32;
/// The element of a list.
const ITEM: &str = "item";

/// A call that is being read.
#[derive(Clone, Debug)]
pub(crate) struct ElementsCall {
    /// The text before each mark.
    space: &'static str,
    end: String,
    /// Bytes of what is held in which the end is not.
    n_searched: usize,
}

impl ElementsCall {
    pub(crate) fn new(space: &'static str) -> Self {
        Self {
            space,
            end: format!("{space}</invoke>"),
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
        let from = held.floor_char_boundary(self.n_searched);
        let Some(end) = held.get(from..).and_then(|rest| rest.find(&self.end)) else {
            self.n_searched = held.len().saturating_sub(self.end.len());
            return Progress::Open;
        };
        let end = end + from;
        let call = held.get(..end).and_then(|text| self.read(text, tools));
        let Some((name, arguments)) = call else {
            return Progress::Broken;
        };
        events.push(CallEvent::Name { name, id: None });
        events.push(CallEvent::Arguments(arguments.to_string()));
        *held = held
            .get(end + self.end.len()..)
            .unwrap_or_default()
            .to_owned();
        Progress::Done
    }

    fn read(&self, text: &str, tools: &[Tool]) -> Option<(String, Value)> {
        let (name, rest) = text.split_once("\">")?;
        if !is_name(name) {
            return None;
        }
        let tool = tools.iter().find(|tool| tool.name == name);
        let schema = tool.map(|tool| &tool.parameters);
        let mut elements = Elements {
            space: self.space,
            rest,
        };
        let members = elements.members(schema, 0)?;
        elements
            .rest
            .trim()
            .is_empty()
            .then(|| (name.to_owned(), Value::Object(members)))
    }
}

struct Elements<'t> {
    space: &'static str,
    rest: &'t str,
}

impl<'t> Elements<'t> {
    /// The name of the element that begins here.
    fn open(&mut self) -> Option<&'t str> {
        let begun = self.rest.trim_start().strip_prefix(self.space)?;
        let begun = begun
            .strip_prefix('<')
            .filter(|rest| !rest.starts_with('/'))?;
        let (name, rest) = begun.split_once('>')?;
        self.rest = rest;
        Some(name)
    }

    fn members(&mut self, schema: Option<&Value>, depth: usize) -> Option<Map<String, Value>> {
        let mut members = Map::new();
        while let Some(key) = self.open() {
            let schema = schema.and_then(|schema| schema.get("properties")?.get(key));
            let value = self.value(key, schema, depth)?;
            members.insert(key.to_owned(), value);
        }
        Some(members)
    }

    /// The value of an element, up to its end.
    fn value(&mut self, name: &str, schema: Option<&Value>, depth: usize) -> Option<Value> {
        let end = format!("{}</{name}>", self.space);
        let next = self.rest.find(self.space)?;
        let (text, behind) = self.rest.split_at(next);
        if behind.starts_with(&end) {
            self.rest = behind.get(end.len()..)?;
            return Some(value_of(schema, text));
        }
        if depth == MAX_DEPTH || !text.trim().is_empty() {
            return None;
        }
        let is_list = behind.get(self.space.len()..)?.starts_with("<item>");
        let value = if is_list {
            let mut items = Vec::new();
            let schema = schema.and_then(|schema| schema.get("items"));
            while let Some(ITEM) = self.open() {
                items.push(self.value(ITEM, schema, depth + 1)?);
            }
            Value::Array(items)
        } else {
            Value::Object(self.members(schema, depth + 1)?)
        };
        self.rest = self.rest.trim_start().strip_prefix(&end)?;
        Some(value)
    }
}
