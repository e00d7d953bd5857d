//! [`XmlCall`]: a call as Qwen3-Coder writes it, `NAME><parameter=KEY>value</parameter></function>`
//! behind `<function=`.
//!
//! Invariant: as of [`super::call`]: the name comes once and before all arguments, and the arguments
//! concatenated are a JSON object. A value is given out once it is complete, as only the tool's schema
//! and the whole value say what it is.

use serde_json::Value;

use super::call::CallEvent;
use crate::generate::Tool;

pub(super) const OPEN: &str = "<function=";
const CLOSE: &str = "</function>";
pub(super) const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";

#[derive(Clone, Debug, PartialEq, Eq)]
enum At {
    /// Before the end of the name of the function.
    Name,
    /// Between parameters.
    Parameters,
    /// In the value of a parameter.
    Value {
        key: String,
    },
    Done,
}

/// What became of the text so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// More is needed.
    Open,
    /// A part was read.
    Read,
    /// The call is complete.
    Done,
    /// It is no call.
    Broken,
}

/// A call that is being read.
#[derive(Clone, Debug)]
pub(super) struct XmlCall {
    at: At,
    name: String,
    n_arguments: usize,
}

impl XmlCall {
    pub(super) fn new() -> Self {
        Self {
            at: At::Name,
            name: String::new(),
            n_arguments: 0,
        }
    }

    /// Reads from the front of what is held.
    pub(super) fn step(
        &mut self,
        held: &mut String,
        tools: &[Tool],
        events: &mut Vec<CallEvent>,
    ) -> Step {
        match self.at.clone() {
            At::Name => {
                let Some((name, rest)) = held.split_once('>') else {
                    let is_name = !held.contains(['\n', '<']);
                    return if is_name { Step::Open } else { Step::Broken };
                };
                let name = name.trim();
                if name.is_empty() || name.contains(['\n', '<']) {
                    return Step::Broken;
                }
                self.name = name.to_owned();
                events.push(CallEvent::Name(name.to_owned()));
                *held = rest.to_owned();
                self.at = At::Parameters;
                Step::Read
            }
            At::Parameters => self.step_parameters(held, events),
            At::Value { key } => {
                let Some((value, rest)) = held.split_once(PARAMETER_END) else {
                    return Step::Open;
                };
                let value = self.value(tools, &key, value);
                self.add(&key, &value, events);
                *held = rest.to_owned();
                self.at = At::Parameters;
                Step::Read
            }
            At::Done => Step::Done,
        }
    }

    fn step_parameters(&mut self, held: &mut String, events: &mut Vec<CallEvent>) -> Step {
        let begun = held.trim_start();
        if let Some(rest) = begun.strip_prefix(CLOSE) {
            *held = rest.to_owned();
            self.end(events);
            return Step::Done;
        }
        if let Some(rest) = begun.strip_prefix(PARAMETER) {
            let Some((key, rest)) = rest.split_once('>') else {
                return Step::Open;
            };
            let key = key.trim().to_owned();
            *held = rest.to_owned();
            self.at = At::Value { key };
            return Step::Read;
        }
        if CLOSE.starts_with(begun) || PARAMETER.starts_with(begun) {
            return Step::Open;
        }
        // Text where a parameter should be ends the call.
        *held = begun.to_owned();
        self.end(events);
        Step::Done
    }

    fn add(&mut self, key: &str, value: &Value, events: &mut Vec<CallEvent>) {
        let before = if self.n_arguments == 0 { "{" } else { ", " };
        self.n_arguments += 1;
        let text = format!("{before}{}: {value}", Value::from(key));
        events.push(CallEvent::Arguments(text));
    }

    fn end(&mut self, events: &mut Vec<CallEvent>) {
        let text = if self.n_arguments == 0 { "{}" } else { "}" };
        events.push(CallEvent::Arguments(text.to_owned()));
        self.at = At::Done;
    }

    /// The value of a parameter: text where the schema says so or nothing, JSON where it says
    /// otherwise and it is.
    fn value(&self, tools: &[Tool], key: &str, text: &str) -> Value {
        // Models put values on lines of their own.
        let text = text.strip_prefix('\n').unwrap_or(text);
        let text = text.strip_suffix('\n').unwrap_or(text);
        let tool = tools.iter().find(|tool| tool.name == self.name);
        let schema = tool.and_then(|tool| tool.parameters.get("properties")?.get(key));
        let Some(schema) = schema.filter(|schema| !is_text(schema)) else {
            return Value::from(text);
        };
        let value = match text.trim() {
            // As Python writes them.
            "True" => Some(Value::Bool(true)),
            "False" => Some(Value::Bool(false)),
            "None" => Some(Value::Null),
            json => serde_json::from_str(json).ok(),
        };
        let value = value.filter(|value| allows(schema, value));
        value.unwrap_or_else(|| Value::from(text))
    }
}

/// Whether a schema allows a value of this type, where it says so.
fn allows(schema: &Value, value: &Value) -> bool {
    let is_kind = |kind: &Value| match kind.as_str() {
        Some("null") => value.is_null(),
        Some("boolean") => value.is_boolean(),
        Some("integer" | "number") => value.is_number(),
        Some("string") => value.is_string(),
        Some("array") => value.is_array(),
        Some("object") => value.is_object(),
        _ => true,
    };
    let any_of = schema.get("anyOf").or_else(|| schema.get("oneOf"));
    match (schema.get("type"), any_of) {
        (Some(Value::Array(kinds)), _) => kinds.iter().any(is_kind),
        (Some(kind), _) => is_kind(kind),
        (None, Some(Value::Array(schemas))) => schemas.iter().any(|one| allows(one, value)),
        (None, _) => true,
    }
}

/// Whether a schema allows nothing but texts.
fn is_text(schema: &Value) -> bool {
    if let Some(values) = schema.get("enum").and_then(Value::as_array) {
        return values.iter().all(Value::is_string);
    }
    match schema.get("type") {
        Some(Value::String(kind)) => kind == "string",
        Some(Value::Array(kinds)) => kinds.iter().all(|kind| kind == "string"),
        _ => schema.get("const").is_some_and(Value::is_string),
    }
}
