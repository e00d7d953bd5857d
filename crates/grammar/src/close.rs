//! [`close_objects`]: objects of a schema with the properties that they list, and no others.
//!
//! JSON Schema lets an object have any further properties. A model that may write them invents
//! names until its text is cut off, and no caller of a schema with listed properties wants them.

use serde_json::Value;

/// Adds `additionalProperties: false` to every object of a schema that lists its properties and
/// does not say whether there are more. An object that `allOf` or a reference adds to has more
/// properties, and stays open.
pub fn close_objects(schema: &mut Value) {
    let Some(keys) = schema.as_object_mut() else {
        return;
    };
    let is_open = OPENS.iter().any(|key| keys.contains_key(*key));
    if keys.contains_key("properties") && !is_open {
        keys.insert("additionalProperties".to_owned(), Value::Bool(false));
    }
    let is_composed = keys.contains_key("allOf");
    for (key, part) in keys {
        match (key.as_str(), part) {
            ("$defs" | "definitions", _) if is_composed => {}
            ("properties" | "$defs" | "definitions", Value::Object(schemas)) => {
                schemas.values_mut().for_each(close_objects);
            }
            ("items" | "anyOf" | "oneOf" | "prefixItems", Value::Array(schemas)) => {
                schemas.iter_mut().for_each(close_objects);
            }
            ("items" | "additionalProperties", part) => close_objects(part),
            _ => {}
        }
    }
}

/// Keys next to which `properties` are not all that there is.
const OPENS: [&str; 8] = [
    "additionalProperties",
    "unevaluatedProperties",
    "patternProperties",
    "allOf",
    "anyOf",
    "oneOf",
    "$ref",
    "if",
];
