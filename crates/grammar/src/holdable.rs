//! [`HoldableSchema`]: a JSON schema without the keywords that no grammar can hold.
//!
//! Invariant: a text that the schema allows is allowed by what is left of it, and what is left
//! out is named, unless it allows everything. Knows the keywords, and compiles nothing but
//! patterns and alternatives.

use std::collections::HashSet;
use std::fmt;

use serde_json::{Map, Value, json};

use crate::locate::{escaped, parts, rewritten, with_root};

/// A schema of which every keyword can be held, as far as that is known without compiling it.
#[derive(Clone, Debug)]
pub struct HoldableSchema {
    /// The schema without what cannot be held.
    pub schema: Value,
    /// The keywords that were left out.
    pub skipped: Vec<SkippedKeyword>,
}

/// A keyword of a schema that texts are not held to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SkippedKeyword {
    /// JSON pointer to the keyword.
    pub pointer: String,
    /// Why it cannot be held.
    pub reason: String,
}

impl fmt::Display for SkippedKeyword {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "'{}' is skipped: {}", self.pointer, self.reason)
    }
}

/// The treatment of keywords that cannot be held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unholdable {
    /// They stay, and the compiler refuses them.
    Kept,
    /// They are left out, and named.
    Skipped,
}

/// The formats of strings that the compiler knows.
const FORMATS: [&str; 10] = [
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
];

/// Keywords that no grammar of a text from left to right can say.
const UNHOLDABLE: [&str; 15] = [
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "propertyNames",
    "uniqueItems",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
];

/// Keywords next to which `unevaluatedProperties` sees more than `additionalProperties`.
const APPLICATORS: [&str; 8] = [
    "additionalProperties",
    "allOf",
    "anyOf",
    "oneOf",
    "$ref",
    "$dynamicRef",
    "if",
    "dependentSchemas",
];

/// `schema` without keywords that allow everything, and where they are to be skipped, without
/// those that cannot be held. `compile` compiles a schema or says why it cannot be.
pub(crate) fn holdable(
    schema: &Value,
    unholdable: Unholdable,
    compile: impl Fn(&Value) -> Result<(), String>,
) -> HoldableSchema {
    let mut left = HoldableSchema {
        schema: schema.clone(),
        skipped: Vec::new(),
    };
    let mut alternatives = Vec::new();
    let mut places = vec![String::new()];
    let mut visited = HashSet::new();
    while let Some(place) = places.pop() {
        if !visited.insert(place.clone()) {
            continue;
        }
        let Some(Value::Object(part)) = left.schema.pointer_mut(&place) else {
            continue;
        };
        simplify(part);
        if unholdable == Unholdable::Skipped {
            for Unheld {
                keyword,
                reason,
                rest,
            } in unholdable_in(part, &compile)
            {
                match rest {
                    Some(rest) => part.insert(keyword.clone(), rest),
                    None => part.remove(&keyword),
                };
                let pointer = format!("{place}/{}", escaped(&keyword));
                left.skipped.push(SkippedKeyword { pointer, reason });
            }
            if part.contains_key("oneOf") {
                alternatives.push(place.clone());
            }
        }
        let part = left.schema.pointer(&place).unwrap_or(&Value::Null);
        places.extend(parts(part, &place, &left.schema, "#"));
    }
    if !alternatives.is_empty() {
        loosen(&mut left, &alternatives, compile);
    }
    left
}

/// Takes out what allows everything, and writes what can be said in other keywords in those.
fn simplify(part: &mut Map<String, Value>) {
    let is = |part: &Map<String, Value>, keyword: &str, allowed: &dyn Fn(&Value) -> bool| {
        part.get(keyword).is_some_and(allowed)
    };
    let mut free = Vec::new();
    for keyword in ["unevaluatedProperties", "unevaluatedItems", "contains"] {
        let is_count = keyword == "contains" && part.get("minContains") == Some(&json!(0));
        if is(part, keyword, &allows_all) && (keyword != "contains" || is_count) {
            free.push(keyword);
        }
    }
    if is(part, "propertyNames", &allows_names) {
        free.push("propertyNames");
    }
    if is(part, "uniqueItems", &|value| *value == json!(false)) {
        free.push("uniqueItems");
    }
    if is(part, "not", &|value| *value == json!(false)) {
        free.push("not");
    }
    if !part.contains_key("if") {
        free.extend(["then", "else"]);
    } else if !part.contains_key("then") && !part.contains_key("else") {
        free.push("if");
    }
    for keyword in ["dependencies", "dependentRequired", "dependentSchemas"] {
        if is(part, keyword, &|value| *value == json!({})) {
            free.push(keyword);
        }
    }
    if !holds_strings(part) {
        free.push("format");
    }
    for keyword in free {
        part.remove(keyword);
    }
    if !part.contains_key("contains") {
        part.remove("minContains");
        part.remove("maxContains");
    }
    if !APPLICATORS
        .iter()
        .any(|keyword| part.contains_key(*keyword))
        && let Some(others) = part.remove("unevaluatedProperties")
    {
        part.insert("additionalProperties".to_owned(), others);
    }
    name_properties(part);
}

/// `propertyNames` that lists names, as zod writes records of an enum: they are properties then.
fn name_properties(part: &mut Map<String, Value>) {
    let is_named = ["properties", "patternProperties"];
    if is_named.iter().any(|keyword| part.contains_key(*keyword)) {
        return;
    }
    let names = part.get("propertyNames").and_then(Value::as_object);
    let known = |key: &str| matches!(key, "type" | "enum" | "title" | "description");
    let Some(names) = names.filter(|names| names.keys().all(|key| known(key))) else {
        return;
    };
    let Some(names) = names.get("enum").and_then(Value::as_array).cloned() else {
        return;
    };
    let value = part.remove("additionalProperties").unwrap_or(json!(true));
    let names = names.iter().filter_map(Value::as_str);
    let properties = names.map(|name| (name.to_owned(), value.clone()));
    part.insert("properties".to_owned(), properties.collect());
    part.insert("additionalProperties".to_owned(), json!(false));
    part.remove("propertyNames");
}

/// True if the schema allows everything.
fn allows_all(schema: &Value) -> bool {
    *schema == json!(true) || *schema == json!({})
}

/// True if every name of a property is allowed: a name is a string.
fn allows_names(schema: &Value) -> bool {
    let is_note = |key: &str| matches!(key, "title" | "description" | "$comment");
    let is_free = |(key, value): (&String, &Value)| {
        is_note(key) || (key == "type" && *value == json!("string"))
    };
    allows_all(schema) || schema.as_object().is_some_and(|m| m.iter().all(is_free))
}

/// True if the part may be about strings.
fn holds_strings(part: &Map<String, Value>) -> bool {
    match part.get("type") {
        Some(Value::String(name)) => name == "string",
        Some(Value::Array(names)) => names.contains(&json!("string")),
        _ => true,
    }
}

/// A keyword of a part that cannot be held.
struct Unheld {
    keyword: String,
    reason: String,
    /// The value with which it can be held: one that allows more.
    rest: Option<Value>,
}

/// The keywords of a part that cannot be held.
fn unholdable_in(
    part: &Map<String, Value>,
    compile: impl Fn(&Value) -> Result<(), String>,
) -> Vec<Unheld> {
    let check = |pattern: &str| compile(&json!({"type": "string", "pattern": pattern}));
    let unheld = |(keyword, value): (&String, &Value)| {
        let mut rest = None;
        let reason = match (keyword.as_str(), value) {
            ("format", Value::String(name)) if FORMATS.contains(&name.as_str()) => return None,
            ("format", value) => format!("{value} is no format that is known"),
            ("pattern", Value::String(pattern)) => {
                let reason = check(pattern).err()?;
                let consuming = without_lookarounds(pattern);
                match consuming.filter(|pattern| check(pattern).is_ok()) {
                    Some(pattern) => {
                        let reason = format!("its lookarounds are not held, '{pattern}' is");
                        rest = Some(Value::String(pattern));
                        reason
                    }
                    None => reason,
                }
            }
            (keyword, _) if UNHOLDABLE.contains(&keyword) => {
                format!("a grammar cannot hold '{keyword}'")
            }
            _ => return None,
        };
        Some(Unheld {
            keyword: keyword.clone(),
            reason,
            rest,
        })
    };
    part.iter().filter_map(unheld).collect()
}

/// A regular expression without its lookarounds, which consume nothing: every text that the
/// expression matches is matched by what is left. `None` if it has none.
fn without_lookarounds(pattern: &str) -> Option<String> {
    const OPENINGS: [&str; 4] = ["(?=", "(?!", "(?<=", "(?<!"];
    let mut left = String::new();
    let mut rest = pattern;
    // Groups that are open around this place, and how many were when a lookaround began.
    let (mut depth, mut lookaround) = (0usize, None);
    let mut is_class = false;
    let mut has_any = false;
    while let Some(c) = rest.chars().next() {
        let mut n = c.len_utf8();
        match c {
            '\\' => n += rest[n..].chars().next().map_or(0, char::len_utf8),
            '[' => is_class = true,
            ']' => is_class = false,
            '(' if !is_class => {
                depth += 1;
                if lookaround.is_none() && OPENINGS.iter().any(|start| rest.starts_with(start)) {
                    lookaround = Some(depth);
                    has_any = true;
                }
            }
            ')' if !is_class => {
                if lookaround == Some(depth) {
                    lookaround = None;
                    // How often nothing is repeated makes no difference.
                    rest = rest[n..].trim_start_matches(['*', '+', '?']);
                    depth = depth.saturating_sub(1);
                    continue;
                }
                depth = depth.saturating_sub(1);
            }
            _ => {}
        }
        if lookaround.is_none() {
            left.push_str(&rest[..n]);
        }
        rest = &rest[n..];
    }
    has_any.then_some(left)
}

/// Writes `anyOf` for each `oneOf` at these places of which several alternatives may match.
fn loosen(
    left: &mut HoldableSchema,
    places: &[String],
    compile: impl Fn(&Value) -> Result<(), String>,
) {
    if compile(&left.schema).is_ok() {
        return;
    }
    let root = rewritten(&left.schema);
    for place in places {
        let alternatives = root.pointer(&format!("{place}/oneOf"));
        let alone = json!({ "oneOf": alternatives });
        if compile(&with_root(&alone, &root)).is_ok() {
            continue;
        }
        let Some(Value::Object(part)) = left.schema.pointer_mut(place) else {
            continue;
        };
        if part.contains_key("anyOf") {
            continue;
        }
        if let Some(alternatives) = part.remove("oneOf") {
            part.insert("anyOf".to_owned(), alternatives);
            left.skipped.push(SkippedKeyword {
                pointer: format!("{place}/oneOf"),
                reason: "it is held as 'anyOf', so several of the alternatives may match"
                    .to_owned(),
            });
        }
    }
}
