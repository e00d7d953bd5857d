//! Where in a JSON schema the part is that cannot be compiled.
//!
//! Invariant: the part that is found does not compile by itself, and where a single keyword is to
//! blame, the part without it does. Knows the keywords that hold schemas, and no others.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

/// Keywords whose value is a schema.
const SCHEMA: [&str; 3] = ["items", "additionalProperties", "additionalItems"];
/// Keywords whose value is a list of schemas.
const LIST: [&str; 4] = ["prefixItems", "anyOf", "allOf", "oneOf"];
/// Keywords whose value is an object of schemas. Definitions are reached through `$ref`.
const OBJECT: [&str; 2] = ["properties", "patternProperties"];

/// The definition that holds the whole schema when a part of it is compiled.
const ROOT: &str = "#/$defs/root";

/// A JSON pointer to the smallest part of `schema` that `compile` refuses, and why.
pub(crate) fn locate(
    schema: &Value,
    reason: String,
    compile: impl Fn(&Value) -> Result<(), String>,
) -> (String, String) {
    let root = rewritten(schema);
    let check = |part: &Value| compile(&with_root(part, &root));
    let (mut pointer, mut reason) = (String::new(), reason);
    let mut visited = HashSet::from([String::new()]);
    loop {
        let part = root.pointer(&pointer).unwrap_or(&Value::Null);
        let next = parts(part, &pointer, &root, ROOT)
            .into_iter()
            .find_map(|place| {
                // `false` allows nothing, and is what its schema means.
                let inner = root.pointer(&place).filter(|part| !part.is_boolean())?;
                // A circle leads back to a part that is refused for another reason.
                let target = inner.get("$ref").and_then(Value::as_str);
                let target = target.and_then(|place| place.strip_prefix(ROOT));
                let is_new =
                    !visited.contains(&place) && !target.is_some_and(|t| visited.contains(t));
                let refused = check(inner).err().filter(|_| is_new)?;
                Some((place, refused))
            });
        let Some((place, refused)) = next else {
            break;
        };
        visited.insert(place.clone());
        (pointer, reason) = (place, refused);
    }
    if let Some(Value::Object(part)) = root.pointer(&pointer)
        && let Some(keyword) = keyword_to_blame(part, |without| {
            let mut changed = root.clone();
            if let Some(place) = changed.pointer_mut(&pointer) {
                *place = without.clone();
            }
            compile(&with_root(without, &changed))
        })
    {
        pointer = format!("{pointer}/{}", escaped(keyword));
    }
    (pointer, reason)
}

/// The only keyword without which the part compiles.
fn keyword_to_blame(
    part: &Map<String, Value>,
    check: impl Fn(&Value) -> Result<(), String>,
) -> Option<&str> {
    let mut keywords = part.keys().map(String::as_str);
    keywords.find(|keyword| {
        let mut without = part.clone();
        without.remove(*keyword);
        check(&Value::Object(without)).is_ok()
    })
}

/// Pointers to the schemas inside of `part`, which is at `pointer`, and to what it refers to by a
/// reference that begins with `prefix`.
pub(crate) fn parts(part: &Value, pointer: &str, root: &Value, prefix: &str) -> Vec<String> {
    let mut places = Vec::new();
    for keyword in SCHEMA.into_iter().filter(|k| part.get(k).is_some()) {
        places.push(format!("{pointer}/{keyword}"));
    }
    for keyword in LIST {
        let n = part
            .get(keyword)
            .and_then(Value::as_array)
            .map_or(0, Vec::len);
        places.extend((0..n).map(|at| format!("{pointer}/{keyword}/{at}")));
    }
    for keyword in OBJECT {
        let members = part.get(keyword).and_then(Value::as_object);
        let names = members.into_iter().flat_map(Map::keys);
        places.extend(names.map(|name| format!("{pointer}/{keyword}/{}", escaped(name))));
    }
    let reference = part.get("$ref").and_then(Value::as_str);
    if let Some(place) = reference.and_then(|place| place.strip_prefix(prefix))
        && root.pointer(place).is_some()
    {
        places.push(place.to_owned());
    }
    places
}

/// The schema with references into the definition that holds it.
pub(crate) fn rewritten(schema: &Value) -> Value {
    match schema {
        Value::Object(members) => {
            let rewrite = |(name, value): (&String, &Value)| {
                let value = match value.as_str().and_then(|text| text.strip_prefix('#')) {
                    Some(place) if name == "$ref" => {
                        Value::String(format!("{ROOT}{}", place.trim_end_matches('/')))
                    }
                    _ => rewritten(value),
                };
                (name.clone(), value)
            };
            Value::Object(members.iter().map(rewrite).collect())
        }
        Value::Array(items) => Value::Array(items.iter().map(rewritten).collect()),
        other => other.clone(),
    }
}

/// A part that can be compiled alone: what it refers to is with it.
pub(crate) fn with_root(part: &Value, root: &Value) -> Value {
    let mut part = part.clone();
    if let Value::Object(members) = &mut part {
        members.insert("$defs".to_owned(), json!({ "root": root }));
    }
    part
}

/// A name in a JSON pointer (RFC 6901).
pub(crate) fn escaped(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Refuses every schema that has the keyword `bad`, there or in what it refers to.
    fn compile(schema: &Value) -> Result<(), String> {
        fn find(schema: &Value, root: &Value, depth: usize) -> bool {
            let reference = schema.get("$ref").and_then(Value::as_str);
            let target = reference.map(|place| root.pointer(place.trim_start_matches('#')));
            let refers = match target {
                Some(None) => true,
                Some(Some(target)) => depth < 8 && find(target, root, depth + 1),
                None => false,
            };
            let inner = |keyword: &str| schema.get(keyword).into_iter();
            let inside = inner("items")
                .chain(inner("properties").flat_map(|p| p.as_object().unwrap().values()))
                .chain(inner("anyOf").flat_map(|p| p.as_array().unwrap()));
            let inside: Vec<&Value> = inside.collect();
            refers
                || schema.get("bad").is_some()
                || inside.iter().any(|part| find(part, root, depth))
        }
        if find(schema, schema, 0) {
            Err("bad".to_owned())
        } else {
            Ok(())
        }
    }

    fn pointer(schema: Value) -> String {
        locate(&schema, "bad".to_owned(), compile).0
    }

    #[test]
    fn the_smallest_part_and_its_keyword_are_named() {
        assert_eq!(pointer(json!({"bad": 1})), "/bad");
        let deep = json!({"properties": {"a": {}, "b/c": {"items": {"bad": 1, "title": ""}}}});
        assert_eq!(pointer(deep), "/properties/b~1c/items/bad");
        assert_eq!(pointer(json!({"anyOf": [{}, {"bad": 1}]})), "/anyOf/1/bad");
    }

    #[test]
    fn references_are_followed() {
        let schema = json!({
            "items": {"$ref": "#/$defs/a"},
            "$defs": {"a": {"properties": {"x": {"bad": 1}}}}
        });
        assert_eq!(pointer(schema), "/$defs/a/properties/x/bad");
        let nowhere = json!({"items": {"$ref": "#/$defs/none"}});
        assert_eq!(pointer(nowhere), "/items/$ref");
        let circle = json!({"properties": {"again": {"$ref": "#"}}, "bad": 1});
        assert_eq!(pointer(circle), "/bad");
    }
}
