//! Schemas as clients write them: what of them is held, and what is skipped and named.

use cellar_grammar::{Grammar, GrammarCompiler, HoldableSchema};
use serde_json::{Value, json};

use super::{allows, tokenizer};

/// The rest of a schema, and its grammar.
fn held(schema: &Value) -> (HoldableSchema, Grammar) {
    let compiler = GrammarCompiler::new(&tokenizer()).unwrap();
    let held = compiler.holdable(schema);
    let grammar = compiler.json_schema(&held.schema.to_string());
    (
        held,
        grammar.unwrap_or_else(|error| panic!("{schema}: {error}")),
    )
}

/// The pointers of what is skipped.
fn skipped(schema: &Value) -> Vec<String> {
    let (held, _) = held(schema);
    held.skipped.into_iter().map(|skip| skip.pointer).collect()
}

/// The error of the schema where nothing is skipped.
fn strict(schema: &Value) -> String {
    let compiler = GrammarCompiler::new(&tokenizer()).unwrap();
    let compiled = compiler.json_schema(&schema.to_string());
    compiled.map(drop).unwrap_err().to_string()
}

/// pydantic's `set[str]`, `Decimal` and `dict[str, int]`, and zod's records.
#[test]
fn types_of_pydantic_and_zod_are_held_as_far_as_they_can_be() {
    let set = json!({"type": "object", "required": ["tags"], "properties": {
        "tags": {"items": {"type": "string"}, "title": "Tags", "type": "array", "uniqueItems": true}
    }});
    assert_eq!(skipped(&set), ["/properties/tags/uniqueItems"]);
    assert!(allows(&held(&set).1, r#"{"tags":["a","a"]}"#));
    assert!(!allows(&held(&set).1, r#"{"tags":[1]}"#));

    let pattern = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$";
    let decimal = json!({"anyOf": [{"type": "number"}, {"pattern": pattern, "type": "string"}]});
    assert_eq!(skipped(&decimal), ["/anyOf/1/pattern"]);
    assert!(allows(&held(&decimal).1, "1.5") && allows(&held(&decimal).1, "\"1.5\""));
    assert!(
        !allows(&held(&decimal).1, "\"1,5\""),
        "but for its lookaheads, it is held"
    );
    let error = strict(&decimal);
    assert!(error.contains("'/anyOf/1/pattern'"), "{error}");
    assert!(error.contains("look-around"), "the whole reason: {error}");

    let record = json!({"type": "object", "propertyNames": {"type": "string"},
                        "additionalProperties": {"type": "number"}});
    assert_eq!(skipped(&record), [""; 0]);
    assert!(allows(&held(&record).1, r#"{"any":1}"#));
    assert!(!allows(&held(&record).1, r#"{"any":"a"}"#));
    let compiler = GrammarCompiler::new(&tokenizer()).unwrap();
    assert!(
        compiler.json_schema(&record.to_string()).is_ok(),
        "always true"
    );

    let names = json!({"type": "object", "required": ["a"],
                       "propertyNames": {"type": "string", "enum": ["a", "b"]},
                       "additionalProperties": {"type": "number"}});
    assert_eq!(skipped(&names), [""; 0]);
    assert!(allows(&held(&names).1, r#"{"a":1,"b":2}"#));
    assert!(!allows(&held(&names).1, r#"{"a":1,"c":2}"#));

    let short = json!({"type": "object", "propertyNames": {"maxLength": 1}});
    assert_eq!(skipped(&short), ["/propertyNames"]);
    assert!(strict(&short).contains("'/propertyNames'"));
}

/// What consumes nothing is left out of a pattern, the rest is held.
#[test]
fn patterns_are_held_without_their_lookarounds() {
    for (pattern, allowed, refused) in [
        (r"^(?!a)[ab]+$", "aab", "abc"),
        (r"^(?=.*(x|(y)))[xyz]{2}$", "zz", "zzz"),
        (r"^(a(?<!b)|[(?=]c)+?$", "a(ca", "ab"),
        (r"^\((?!\))(?=b)*b$", "(b", "b"),
    ] {
        let schema = json!({"type": "string", "pattern": pattern});
        let (left, grammar) = held(&schema);
        assert!(left.skipped[0].reason.contains("lookarounds"), "{left:?}");
        let text = |text: &str| serde_json::to_string(text).unwrap();
        assert!(allows(&grammar, &text(allowed)), "{pattern} {allowed}");
        assert!(!allows(&grammar, &text(refused)), "{pattern} {refused}");
    }
    // A back reference cannot be held with them or without.
    let schema = json!({"type": "string", "pattern": r"^(?=a)(b)\1$"});
    assert!(!held(&schema).0.skipped[0].reason.contains("lookarounds"));
}

#[test]
fn formats_are_held_where_they_are_known() {
    let known = [
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
    let unknown = [
        "password",
        "binary",
        "byte",
        "int32",
        "int64",
        "float",
        "double",
        "path",
        "file-path",
        "json-string",
        "uuid4",
        "base64",
        "jwt",
        "cuid",
        "uri-reference",
        "json-pointer",
        "decimal",
        "directory-path",
        "regex",
        "iri",
        "idn-email",
    ];
    for format in known {
        let schema = json!({"type": "string", "format": format});
        assert_eq!(skipped(&schema), [""; 0], "{format}");
        assert!(!allows(&held(&schema).1, "\" \""), "{format} is held");
    }
    for format in unknown {
        let schema = json!({"type": "string", "format": format, "maxLength": 3});
        assert_eq!(skipped(&schema), ["/format"], "{format}");
        assert!(allows(&held(&schema).1, "\"any\"") && !allows(&held(&schema).1, "\"long\""));
        let error = strict(&schema);
        assert!(
            error.contains("'/format'") && error.contains(format),
            "{error}"
        );
    }
    // A format of strings says nothing of numbers.
    assert_eq!(
        skipped(&json!({"type": "integer", "format": "int32"})),
        [""; 0]
    );
    assert!(skipped(&json!({"properties": {"format": {"type": "string"}}})).is_empty());
}

#[test]
fn keywords_of_tools_are_skipped_and_named() {
    for (keyword, value) in [
        ("not", json!({"type": "null"})),
        ("dependentRequired", json!({"a": ["b"]})),
        ("dependentSchemas", json!({"a": {"required": ["b"]}})),
        ("contains", json!({"type": "string"})),
    ] {
        let part = json!({"type": ["object", "array"], keyword: value});
        let schema = json!({"type": "object", "properties": {"x/y": part}, "required": ["x/y"]});
        let pointer = format!("/properties/x~1y/{keyword}");
        assert_eq!(skipped(&schema).join(" "), pointer, "{keyword}");
        assert!(allows(&held(&schema).1, r#"{"x/y":{}}"#), "{keyword}");
        assert!(!allows(&held(&schema).1, r#"{"x/y":1}"#), "{keyword}");
        let error = strict(&schema);
        assert!(error.contains(&pointer), "{error}");
    }
    let branch = json!({"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}});
    assert_eq!(skipped(&branch), ["/if", "/then"]);
    assert!(skipped(&json!({"type": "object", "if": {"required": ["a"]}})).is_empty());
    let closed = json!({"type": "object", "properties": {"a": {"type": "integer"}},
                        "unevaluatedProperties": false});
    assert!(skipped(&closed).is_empty());
    assert!(allows(&held(&closed).1, r#"{"a":1}"#) && !allows(&held(&closed).1, r#"{"b":1}"#));
    let seen = json!({"type": "object", "allOf": [{"properties": {"a": {}}}],
                      "unevaluatedProperties": false});
    assert_eq!(skipped(&seen), ["/unevaluatedProperties"]);
}

#[test]
fn what_references_lead_to_is_looked_at_once() {
    let schema = json!({
        "type": "object",
        "properties": {"next": {"$ref": "#/components/schemas/Node"}},
        "components": {"schemas": {"Node": {
            "type": "object",
            "properties": {"id": {"type": "string", "format": "ulid"},
                           "next": {"$ref": "#/components/schemas/Node"}},
            "required": ["id"], "additionalProperties": false
        }}}
    });
    assert_eq!(
        skipped(&schema),
        ["/components/schemas/Node/properties/id/format"]
    );
    assert!(allows(
        &held(&schema).1,
        r#"{"next":{"id":"a","next":{"id":"b"}}}"#
    ));
}

#[test]
fn alternatives_that_overlap_are_held_as_any_of_them() {
    let apart = json!({"oneOf": [{"type": "string"}, {"type": "integer"}]});
    assert!(skipped(&apart).is_empty());
    let both = json!({"properties": {"a": apart, "b": {"oneOf": [{"type": "object"}, {"required": ["a"]}]}}});
    assert_eq!(skipped(&both), ["/properties/b/oneOf"]);
    assert!(!allows(&held(&both).1, r#"{"a":null}"#));
}

/// A model that may write further properties invents them until its text is cut off.
#[test]
fn objects_have_the_properties_that_they_list() {
    let open = json!({"type": "object", "properties": {"a": {"type": "object",
        "properties": {"b": {"type": "integer"}}}}});
    let (left, grammar) = held(&open);
    assert_eq!(left.skipped, []);
    assert!(allows(&grammar, r#"{"a":{"b":1}}"#));
    assert!(!allows(&grammar, r#"{"a":{"b":1},"c":2}"#));
    assert!(!allows(&grammar, r#"{"a":{"b":1,"c":2}}"#));
    // Those that say so, or list nothing, have any.
    for schema in [
        json!({"type": "object", "properties": {"a": {}}, "additionalProperties": true}),
        json!({"type": "object"}),
    ] {
        assert!(allows(&self::held(&schema).1, r#"{"c":2}"#), "{schema}");
    }
}
