//! The grammar of a call that is marks around keys and values.
//!
//! Invariant: a value is held to its schema, or there is no grammar: what the schema says of a text
//! beyond its being one of several cannot be held where nothing stands around the text.

use cellar_grammar::json_rule;
use serde_json::{Value, json};

use crate::grammar::Marks;
use crate::schema::{is_text, referred};
use crate::tagged::{Lines, Tags};

/// The words of a schema of arguments that are held to.
const KNOWN: [&str; 9] = [
    "type",
    "properties",
    "required",
    "additionalProperties",
    "$defs",
    "definitions",
    "$schema",
    "title",
    "description",
];

/// The words of a schema of a text that say nothing of the text.
const OF_TEXT: [&str; 7] = [
    "type",
    "enum",
    "const",
    "description",
    "title",
    "default",
    "examples",
];

/// The rules of a call of the tool with this number and name behind the mark; free but for the name
/// where no schema is given.
pub(crate) fn call(
    marks: &mut Marks<'_>,
    tags: &Tags,
    at: usize,
    name: &str,
    schema: Option<&Value>,
) -> Option<String> {
    // What ends the call, or begins a key, ends its name as well.
    let is_mark = |end: &&&str| **end != tags.key && **end != tags.end && **end != "\n";
    let end = tags
        .name_ends
        .iter()
        .find(is_mark)
        .copied()
        .unwrap_or_default();
    let head = json!(format!(
        "{name}{end}{}",
        tags.attributes_end.unwrap_or_default()
    ));
    let Some(schema) = schema else {
        return Some(format!("call_{at}: {head} until_end\n"));
    };
    let members = schema.as_object()?;
    // Without names of arguments any may follow.
    if !members.contains_key("properties")
        && members.get("additionalProperties") != Some(&json!(false))
    {
        return Some(format!("call_{at}: {head} until_end\n"));
    }
    if members.keys().any(|word| !KNOWN.contains(&word.as_str())) {
        return None;
    }
    let required: Vec<&str> = match members.get("required") {
        Some(names) => names.as_array()?.iter().filter_map(Value::as_str).collect(),
        None => Vec::new(),
    };
    let empty = serde_json::Map::new();
    let properties = match members.get("properties") {
        Some(properties) => properties.as_object()?,
        None => &empty,
    };
    if required.iter().any(|name| !properties.contains_key(*name)) {
        return None;
    }
    let (mut rule, mut rules) = (format!("call_{at}: {head}"), String::new());
    for (n, (key, property)) in properties.iter().enumerate() {
        let property = referred(schema, property);
        let is_wanted = required.contains(&key.as_str());
        rule += &format!(" SPACES? p_{at}_{n}{}", if is_wanted { "" } else { "?" });
        let line = match tags.lines {
            Lines::Around => "\"\\n\"",
            Lines::Inside => "",
        };
        let (key_mark, end) = (marks.mark(tags.key), marks.mark(tags.value_end));
        let key_end = match attributes(tags, property)? {
            attributes if attributes.is_empty() => marks.mark(tags.key_end),
            attributes => json!(format!("{}{attributes}", tags.key_end)).to_string(),
        };
        let value_mark = if tags.value.is_empty() {
            line.to_owned()
        } else {
            format!("SPACES? {}", marks.mark(tags.value))
        };
        let value = match text_of(property)? {
            Held::Any => "until_value_end".to_owned(),
            Held::OneOf(texts) => format!("({}) {line} {end}", texts.join(" | ")),
            Held::Json => {
                let mut property = property.clone();
                for defs in ["$defs", "definitions"] {
                    if let (Some(all), Some(object)) = (members.get(defs), property.as_object_mut())
                    {
                        object.entry(defs).or_insert_with(|| all.clone());
                    }
                }
                rules += &format!("v_{at}_{n}: {}\n", json_rule(&property));
                format!("v_{at}_{n} {line} {end}")
            }
        };
        let key = json!(key);
        rules += &format!("p_{at}_{n}: {key_mark} {key} {key_end} {value_mark} {value}\n");
    }
    let end = marks.mark(tags.end);
    Some(format!("{rule} SPACES? {end}\n{rules}"))
}

/// The text between a key and its value.
fn attributes(tags: &Tags, property: &Value) -> Option<String> {
    let Some(end) = tags.attributes_end else {
        return Some(String::new());
    };
    let of_text = is_text(property);
    Some(match tags.key {
        key if key.contains("DSML") => format!(" string=\"{of_text}\"{end}"),
        key if key.contains("<|open|>") => {
            let kind = property.get("type").and_then(Value::as_str)?;
            let kind = if kind == "integer" { "number" } else { kind };
            format!(" type=\"{kind}\"{end}")
        }
        _ => end.to_owned(),
    })
}

/// The grammar of a value.
enum Held {
    /// Any text.
    Any,
    /// One of these texts.
    OneOf(Vec<String>),
    /// JSON of the schema.
    Json,
}

/// `None` where a text cannot be held to its schema.
fn text_of(property: &Value) -> Option<Held> {
    if !property.is_object() {
        return None;
    }
    // A value without a type comes as text, as the reader reads it.
    if !is_text(property) {
        let says_type = ["type", "anyOf", "oneOf", "$ref", "enum", "const"];
        let is_json = says_type.iter().any(|word| property.get(word).is_some());
        let has_texts = property.to_string().contains("\"string\"")
            && property.get("type").is_none_or(|kind| !kind.is_string());
        return (is_json && !has_texts).then_some(Held::Json);
    }
    let members = property.as_object()?;
    if let Some(values) = members.get("enum").and_then(Value::as_array) {
        return Some(Held::OneOf(values.iter().map(Value::to_string).collect()));
    }
    if let Some(value) = members.get("const") {
        return Some(Held::OneOf(vec![value.to_string()]));
    }
    let is_free = members.keys().all(|word| OF_TEXT.contains(&word.as_str()));
    is_free.then_some(Held::Any)
}
