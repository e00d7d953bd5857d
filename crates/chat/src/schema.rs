//! The type of a value that a model wrote without it, by the tool's schema.
//!
//! Pure functions. Invariant: a value that the schema wants as text is the text unchanged.

use serde_json::Value;

use crate::tool::Tool;
use crate::value::{Dialect, ValueReader};

/// Schemas in schemas that a grammar follows: a schema may refer to itself.
#[cfg(feature = "grammar")]
pub(crate) const MAX_DEPTH: usize = 12;

/// The schema of a member of a tool's arguments.
pub(crate) fn of_argument<'t>(tools: &'t [Tool], name: &str, key: &str) -> Option<&'t Value> {
    let tool = tools.iter().find(|tool| tool.name == name)?;
    let schema = tool.parameters.get("properties")?.get(key)?;
    Some(referred(&tool.parameters, schema))
}

/// The target of a schema that is nothing but a reference into the whole.
pub(crate) fn referred<'t>(whole: &'t Value, mut schema: &'t Value) -> &'t Value {
    // References may go round.
    for _ in 0..8 {
        let only = schema.get("allOf").and_then(Value::as_array);
        let only = only.and_then(|all| {
            if let [one] = all.as_slice() {
                Some(one)
            } else {
                None
            }
        });
        let reference = only.unwrap_or(schema).get("$ref").and_then(Value::as_str);
        let target = reference.and_then(|to| whole.pointer(to.strip_prefix('#')?));
        match target {
            Some(target) => schema = target,
            None => return schema,
        }
    }
    schema
}

/// The value that a text stands for: text where the schema says so or nothing, JSON where it says
/// otherwise and it is.
pub(crate) fn value_of(schema: Option<&Value>, text: &str) -> Value {
    let Some(schema) = schema.filter(|schema| !is_text(schema)) else {
        return Value::from(text);
    };
    let value = read(text).filter(|value| allows(schema, value));
    value.unwrap_or_else(|| Value::from(text))
}

/// A text as JSON, or as Python writes it.
pub(crate) fn read(text: &str) -> Option<Value> {
    let json = serde_json::from_str(text.trim()).ok();
    json.or_else(|| ValueReader::read_all(Dialect::Json, text))
}

/// True if a schema allows a value of this type; `None` where it does not say so.
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

/// True if a schema allows nothing but texts.
pub(crate) fn is_text(schema: &Value) -> bool {
    if let Some(values) = schema.get("enum").and_then(Value::as_array) {
        return values.iter().all(Value::is_string);
    }
    match schema.get("type") {
        Some(Value::String(kind)) => kind == "string",
        Some(Value::Array(kinds)) => kinds.iter().all(|kind| kind == "string"),
        _ => schema.get("const").is_some_and(Value::is_string),
    }
}
