//! The fields that say what a text is held to, under the names of OpenAI, llama-server and vLLM.
//!
//! Invariant: a text is held to one of them at most; a request with two is refused with both names.
//! Compiles nothing.

use serde_json::Value;

use crate::error::ApiError;
use crate::generate::{Constraint, Form, UnheldKeywords};
use crate::json::Body;

type Read = fn(&Value, &'static str) -> Result<Option<Constraint>, ApiError>;

/// The fields of a request. Their empty values say nothing.
const FIELDS: [(&str, Read); 8] = [
    ("response_format", |format, _| response_format(format)),
    ("structured_outputs", |outputs, _| {
        structured_outputs(outputs)
    }),
    ("json_schema", written_schema),
    ("grammar", grammar),
    ("guided_json", written_schema),
    ("guided_regex", regex),
    ("guided_choice", choice),
    ("guided_grammar", grammar),
];

/// The members of vLLM's `structured_outputs`.
const OUTPUTS: [(&str, &str, Read); 5] = [
    ("json", "structured_outputs.json", written_schema),
    ("regex", "structured_outputs.regex", regex),
    ("choice", "structured_outputs.choice", choice),
    ("grammar", "structured_outputs.grammar", grammar),
    (
        "json_object",
        "structured_outputs.json_object",
        |flag, param| match flag {
            Value::Bool(true) => Ok(Some(Constraint::JsonObject)),
            Value::Bool(false) => Ok(None),
            _ => Err(wrong(param, "it is true or false")),
        },
    ),
];

/// The constraint of the text of a request.
///
/// # Errors
/// [`ApiError`] 400 where a field is wrong, or there are two.
pub(in crate::api) fn constraint(body: &Body) -> Result<Option<Constraint>, ApiError> {
    let mut found: Option<(&'static str, Constraint)> = None;
    for (name, read) in FIELDS {
        let Some(value) = body.field(name) else {
            continue;
        };
        if let Some(constraint) = read(value, name)? {
            one_of(&mut found, name, constraint)?;
        }
    }
    Ok(found.map(|(_, constraint)| constraint))
}

/// Keeps the constraint, where it is the first.
fn one_of(
    found: &mut Option<(&'static str, Constraint)>,
    name: &'static str,
    constraint: Constraint,
) -> Result<(), ApiError> {
    match found {
        Some((first, _)) => {
            let message = format!("there is both '{first}' and '{name}': give one of them");
            Err(ApiError::invalid_param(name, message))
        }
        None => {
            *found = Some((name, constraint));
            Ok(())
        }
    }
}

fn wrong(param: &str, what: &str) -> ApiError {
    ApiError::invalid_param(param, format!("'{param}': {what}"))
}

fn response_format(format: &Value) -> Result<Option<Constraint>, ApiError> {
    let type_of = "response_format.type";
    match format.get("type").and_then(Value::as_str) {
        Some("text") => Ok(None),
        Some("json_object") => match format.get("schema") {
            // llama-server's extension.
            Some(schema) if !schema.is_null() => {
                json_schema(Some(schema), "response_format.schema").map(Some)
            }
            _ => Ok(Some(Constraint::JsonObject)),
        },
        Some("json_schema") => {
            let nested = format
                .get("json_schema")
                .filter(|nested| nested.is_object());
            let schema = nested.and_then(|nested| nested.get("schema"));
            let schema = schema.or_else(|| format.get("schema"));
            let schema = json_schema(schema, "response_format.json_schema.schema")?;
            Ok(Some(schema.strict_where(nested.unwrap_or(format))))
        }
        // Fireworks' and Together's extensions.
        Some("grammar") => match format.get("grammar") {
            Some(text) => grammar(text, "response_format.grammar"),
            None => Err(wrong("response_format.grammar", "it is missing")),
        },
        Some("regex") => match ["regex", "pattern", "value"]
            .iter()
            .find_map(|name| format.get(name))
        {
            Some(pattern) => regex(pattern, "response_format.regex"),
            None => Err(wrong("response_format.regex", "it is missing")),
        },
        Some(other) => Err(ApiError::invalid_param(
            type_of,
            format!("'{other}' is not one of text, json_object, json_schema, grammar, regex"),
        )),
        None => {
            let message = "'response_format' needs a 'type'";
            Err(ApiError::invalid_param(type_of, message))
        }
    }
}

fn structured_outputs(outputs: &Value) -> Result<Option<Constraint>, ApiError> {
    let Some(members) = outputs.as_object() else {
        return Err(wrong("structured_outputs", "it is not an object"));
    };
    let mut found = None;
    for (name, value) in members {
        if matches!(value, Value::Null | Value::Bool(false)) {
            continue;
        }
        let known = OUTPUTS.into_iter().find(|(known, ..)| known == name);
        let Some((_, param, read)) = known else {
            let param = format!("structured_outputs.{name}");
            let message = format!(
                "'{param}' is not supported: use json, regex, choice, grammar or json_object"
            );
            return Err(ApiError::unsupported(param, message));
        };
        if let Some(constraint) = read(value, param)? {
            one_of(&mut found, param, constraint)?;
        }
    }
    Ok(found.map(|(_, constraint)| constraint))
}

/// A schema, or its JSON in a text.
fn written_schema(schema: &Value, param: &'static str) -> Result<Option<Constraint>, ApiError> {
    let Some(text) = schema.as_str() else {
        return json_schema(Some(schema), param).map(Some);
    };
    if text.is_empty() {
        return Ok(None);
    }
    let schema: Value = serde_json::from_str(text)
        .map_err(|error| wrong(param, &format!("it is no JSON: {error}")))?;
    json_schema(Some(&schema), param).map(Some)
}

/// The schema that stands at this path of the request.
pub(in crate::api) fn json_schema(
    schema: Option<&Value>,
    param: &'static str,
) -> Result<Constraint, ApiError> {
    match schema {
        Some(schema) if schema.is_object() || schema.is_boolean() => Ok(Constraint::JsonSchema {
            schema: schema.clone(),
            param,
            unheld: UnheldKeywords::Skipped,
        }),
        _ => {
            let message = format!(
                "'{param}' is missing, or no schema: it needs a 'schema', which is an object"
            );
            Err(ApiError::invalid_param(param, message))
        }
    }
}

fn grammar(grammar: &Value, param: &'static str) -> Result<Option<Constraint>, ApiError> {
    text(grammar, param, Form::Grammar)
}

fn regex(pattern: &Value, param: &'static str) -> Result<Option<Constraint>, ApiError> {
    text(pattern, param, Form::Regex)
}

fn text(
    value: &Value,
    param: &'static str,
    form: fn(String) -> Form,
) -> Result<Option<Constraint>, ApiError> {
    let text = value
        .as_str()
        .ok_or_else(|| wrong(param, "it is no text"))?;
    let form = (!text.trim().is_empty()).then(|| form(text.to_owned()));
    Ok(form.map(|form| Constraint::Text { form, param }))
}

fn choice(texts: &Value, param: &'static str) -> Result<Option<Constraint>, ApiError> {
    let list = texts
        .as_array()
        .ok_or_else(|| wrong(param, "it is no list of texts"))?;
    let texts = list.iter().map(|text| text.as_str().map(str::to_owned));
    let texts: Option<Vec<String>> = texts.collect();
    let texts = texts.ok_or_else(|| wrong(param, "one of its members is no text"))?;
    if texts.is_empty() {
        return Err(wrong(param, "there is no text to choose"));
    }
    let form = Form::Choice(texts);
    Ok(Some(Constraint::Text { form, param }))
}
