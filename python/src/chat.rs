//! Messages to JSON objects, as chat templates take them. Knows no models.

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde_json::{Map, Value};

use crate::values::json;

/// Messages and what else a template reads.
pub(crate) struct Chat {
    pub(crate) messages: Vec<Value>,
    pub(crate) variables: Map<String, Value>,
}

impl Chat {
    /// # Errors
    /// `ValueError` for a message without a role, or with parts that are no text; `TypeError` where
    /// it is no dict.
    pub(crate) fn new(
        messages: &Bound<'_, PyAny>,
        tools: Option<&Bound<'_, PyAny>>,
        variables: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let Value::Array(messages) = json(messages)? else {
            return Err(PyTypeError::new_err("messages: a list of dicts is needed"));
        };
        let messages = messages.into_iter().map(message);
        let mut chat = Self {
            messages: messages.collect::<PyResult<_>>()?,
            variables: match variables {
                None => Map::new(),
                Some(variables) => match json(variables)? {
                    Value::Object(variables) => variables,
                    _ => Map::new(), // a dict is an object
                },
            },
        };
        if let Some(tools) = tools {
            chat.variables.insert("tools".to_owned(), json(tools)?);
        }
        Ok(chat)
    }
}

/// A message whose content is one text: parts are joined.
fn message(message: Value) -> PyResult<Value> {
    let Value::Object(mut message) = message else {
        return Err(PyTypeError::new_err("a message is no dict"));
    };
    if !message.get("role").is_some_and(Value::is_string) {
        return Err(PyValueError::new_err("a message has no 'role'"));
    }
    let text = match message.get("content") {
        Some(Value::Array(parts)) => Some(parts.iter().map(part).collect::<PyResult<String>>()?),
        Some(Value::String(_) | Value::Null) => None,
        None if message.contains_key("tool_calls") => None,
        None => return Err(PyValueError::new_err("a message has no 'content'")),
        Some(_) => {
            let wrong = "the 'content' of a message is neither a text nor a list of parts";
            return Err(PyTypeError::new_err(wrong));
        }
    };
    if let Some(text) = text {
        message.insert("content".to_owned(), Value::String(text));
    }
    Ok(Value::Object(message))
}

fn part(part: &Value) -> PyResult<&str> {
    let kind = part["type"].as_str();
    match (kind, part["text"].as_str()) {
        (Some("text"), Some(text)) => Ok(text),
        _ => Err(PyValueError::new_err(format!(
            "a part of type '{}' in a message: only parts {{'type': 'text', 'text': …}} are supported",
            kind.unwrap_or("none")
        ))),
    }
}
