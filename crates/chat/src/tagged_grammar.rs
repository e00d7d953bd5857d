//! The grammar of a call that is marks around keys and values.
//!
//! Invariant: a value is held to its schema, or there is no grammar: what the schema says of a text
//! beyond its being one of several cannot be held where nothing stands around the text.

use cellar_grammar::json_rule;
use serde_json::{Value, json};

use crate::mark_rules::Marks;
use crate::schema::{is_text, referred};
use crate::tagged::{KeyType, Lines, Tags};

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

/// The members of an object, by its schema.
pub(crate) enum Members<'s> {
    /// Any.
    Any,
    /// These, in this order.
    Listed(Vec<Member<'s>>),
}

/// A member of an object.
pub(crate) struct Member<'s> {
    pub(crate) key: &'s str,
    pub(crate) schema: &'s Value,
    /// True if it must be there.
    pub(crate) is_required: bool,
}

/// The members that this schema lists, with references into the whole; `None` where it says more.
pub(crate) fn members<'s>(whole: &'s Value, schema: &'s Value) -> Option<Members<'s>> {
    let words = schema.as_object()?;
    // Without names of members any may follow.
    if !words.contains_key("properties") && words.get("additionalProperties") != Some(&json!(false))
    {
        return Some(Members::Any);
    }
    if words.keys().any(|word| !KNOWN.contains(&word.as_str())) {
        return None;
    }
    let required: Vec<&str> = match words.get("required") {
        Some(names) => names.as_array()?.iter().filter_map(Value::as_str).collect(),
        None => Vec::new(),
    };
    let properties = match words.get("properties") {
        Some(properties) => Some(properties.as_object()?),
        None => None,
    };
    let is_listed = |name: &&str| properties.is_some_and(|all| all.contains_key(*name));
    if !required.iter().all(is_listed) {
        return None;
    }
    let member = |(key, schema): (&'s String, &'s Value)| Member {
        key,
        schema: referred(whole, schema),
        is_required: required.contains(&key.as_str()),
    };
    Some(Members::Listed(
        properties.into_iter().flatten().map(member).collect(),
    ))
}

/// The JSON of a part of a schema, with what the whole defines.
pub(crate) fn json_of(whole: &Value, part: &Value) -> String {
    let mut part = part.clone();
    for defs in ["$defs", "definitions"] {
        if let (Some(all), Some(words)) = (whole.get(defs), part.as_object_mut()) {
            words.entry(defs).or_insert_with(|| all.clone());
        }
    }
    json_rule(&part)
}

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
    let end = tags.name_ends.iter().find(is_mark);
    let head = format!(
        "{} {} {} {}",
        json!(name),
        marks.mark(end.copied().unwrap_or_default()),
        marks.all(tags.name_attributes),
        marks.mark(tags.attributes_end.unwrap_or_default()),
    );
    let members = match schema {
        Some(schema) => members(schema, schema)?,
        None => Members::Any,
    };
    let (Members::Listed(members), Some(schema)) = (members, schema) else {
        return Some(format!("call_{at}: {head} until_end\n"));
    };
    let (mut rule, mut rules) = (format!("call_{at}: {head}"), String::new());
    for (n, member) in members.iter().enumerate() {
        let optional = if member.is_required { "" } else { "?" };
        rule += &format!(" SPACES? p_{at}_{n}{optional}");
        let line = match tags.lines {
            Lines::Around => "\"\\n\"",
            Lines::Inside => "",
        };
        let (key_mark, end) = (marks.mark(tags.key), marks.mark(tags.value_end));
        let key_end = format!(
            "{} {}",
            key_end(marks, tags, member.schema)?,
            marks.mark(tags.attributes_end.unwrap_or_default())
        );
        let value_mark = if tags.value.is_empty() {
            line.to_owned()
        } else {
            format!("SPACES? {}", marks.mark(tags.value))
        };
        let value = match text_of(member.schema)? {
            Held::Any => "until_value_end".to_owned(),
            Held::OneOf(texts) => format!("({}) {line} {end}", texts.join(" | ")),
            Held::Json => {
                rules += &format!("v_{at}_{n}: {}\n", json_of(schema, member.schema));
                format!("v_{at}_{n} {line} {end}")
            }
        };
        let key = json!(member.key);
        rules += &format!("p_{at}_{n}: {key_mark} {key} {key_end} {value_mark} {value}\n");
    }
    let end = marks.mark(tags.end);
    Some(format!("{rule} SPACES? {end}\n{rules}"))
}

/// The end of a key, with what stands there of the value's type.
fn key_end(marks: &mut Marks<'_>, tags: &Tags, property: &Value) -> Option<String> {
    let end = tags.key_end;
    match tags.key_type {
        KeyType::Unwritten => Some(marks.mark(end)),
        KeyType::IsText => Some(marks.mark(&format!("{end} string=\"{}\"", is_text(property)))),
        KeyType::Name => {
            let mut types: Vec<String> = Vec::new();
            for name in type_names(property)? {
                let name = if name == "integer" { "number" } else { name };
                types.push(json!(name).to_string());
            }
            let before = marks.mark(&format!("{end} type=\""));
            Some(format!("{before} ({}) \"\\\"\"", types.join(" | ")))
        }
    }
}

/// The types that a schema allows; `None` where it does not say.
fn type_names(schema: &Value) -> Option<Vec<&str>> {
    let of_value = |value: &Value| match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    if let Some(value) = schema.get("const") {
        return Some(vec![of_value(value)]);
    }
    if let Some(values) = schema.get("enum").and_then(Value::as_array) {
        return Some(values.iter().map(of_value).collect());
    }
    match schema.get("type")? {
        Value::String(name) => Some(vec![name]),
        Value::Array(names) => names.iter().map(Value::as_str).collect(),
        _ => None,
    }
}

/// The grammar of a value.
pub(crate) enum Held {
    /// Any text.
    Any,
    /// One of these texts.
    OneOf(Vec<String>),
    /// JSON of the schema.
    Json,
}

/// `None` where a text cannot be held to its schema.
pub(crate) fn text_of(property: &Value) -> Option<Held> {
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
