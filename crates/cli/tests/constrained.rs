//! `cellar run --schema` and `--grammar`: what is printed is complete, or the program fails.

#![cfg(feature = "grammar")]
#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

mod support;

use std::path::Path;

use support::{failure, json, output};

fn file(dir: &Path, name: &str, text: &str) -> String {
    let path = dir.join(name);
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

const SCHEMA: &str = r#"{
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["cat", "dog"]}
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": false
}"#;

#[test]
fn the_output_is_json_of_the_schema() {
    let dir = tempfile::tempdir().unwrap();
    let schema = file(dir.path(), "schema.json", SCHEMA);
    for seed in ["1", "2", "3"] {
        let flags = ["--schema", &schema, "--seed", seed, "-c", "400"];
        let args = [&["run", "Once upon a time"][..], &flags].concat();
        let text = output(&args).0;
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value.as_object().unwrap().len(), 3, "{text}");
        assert!(value["age"].as_u64().unwrap() < 100, "{text}");
        assert!(
            ["cat", "dog"].contains(&value["kind"].as_str().unwrap()),
            "{text}"
        );
        let report = json(&[&args[..], &["--json"]].concat());
        assert_eq!(report["finish"]["reason"], "end_of_generation");
        assert_eq!(report["text"].as_str().unwrap().trim(), text.trim());
    }
}

#[test]
fn a_grammar_chooses_the_text_and_ends_it() {
    let dir = tempfile::tempdir().unwrap();
    let grammar = file(dir.path(), "answer.lark", "start: \"yes\" | \"no\" | \"Ω\"");
    let text = output(&["run", "Is it?", "--grammar", &grammar]).0;
    assert!(["yes\n", "no\n", "Ω\n"].contains(&text.as_str()), "{text}");
}

#[test]
fn an_incomplete_text_is_a_failure() {
    let dir = tempfile::tempdir().unwrap();
    let schema = file(dir.path(), "schema.json", SCHEMA);
    for (flags, why) in [
        (["-n", "3"], "--predict ended it"),
        (["-c", "10"], "the context is full"),
    ] {
        let done = support::cellar()
            .args(["run", "Once upon a time", "--schema", &schema])
            .args(flags)
            .assert()
            .failure();
        let message = String::from_utf8(done.get_output().stderr.clone()).unwrap();
        assert!(
            message.contains("the text is incomplete") && message.contains(why),
            "{message}"
        );
    }
}

#[test]
fn what_cannot_be_used_is_refused_before_any_text() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |flag: &str, text: &str| {
        let path = file(dir.path(), "file", text);
        let (code, message) = failure(&["run", "Hi", flag, &path]);
        assert_eq!(code, 1, "{message}");
        message
    };
    let message = refused(
        "--schema",
        r#"{"properties": {"a": {"not": {}}}, "type": "object"}"#,
    );
    assert!(
        message.contains("the schema at '/properties/a/not'"),
        "{message}"
    );
    let message = refused("--schema", "{");
    assert!(
        message.contains("the schema is not JSON: line 1"),
        "{message}"
    );
    let message = refused("--grammar", "start: nothing");
    assert!(
        message.contains("the grammar cannot be compiled"),
        "{message}"
    );
    let (code, message) = failure(&["run", "Hi", "--schema", "a", "--grammar", "b"]);
    assert!(
        code == 2 && message.contains("cannot be used with"),
        "{message}"
    );
    let (code, message) = failure(&["run", "Hi", "--schema", "/nowhere.json"]);
    assert!(code == 1 && message.contains("/nowhere.json"), "{message}");
}
