//! `--schema` and `--grammar` of `cellar run` and `cellar chat`: what is printed is complete, or it
//! is a failure.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use crate::support;

use std::path::Path;

use crate::support::{cellar, failure, json, output, with_template};

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
        // The schema itself, by llama.cpp's name.
        let inline = ["--json-schema", SCHEMA, "--seed", seed, "-c", "400"];
        let args = [&["run", "Once upon a time"][..], &inline].concat();
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
        let (code, message) = failure(&["run", "-p", "Hi", flag, &path]);
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
    let (code, message) = failure(&["run", "-p", "Hi", "--schema", "{\"type\": 3}"]);
    let told = "cannot use the schema of the command line: the schema";
    assert!(code == 1 && message.contains(told), "{message}");
    let (code, message) = failure(&["run", "-p", "Hi", "--schema", "a", "--grammar", "b"]);
    assert!(
        code == 2 && message.contains("cannot be used with"),
        "{message}"
    );
    let (code, message) = failure(&["run", "-p", "Hi", "--schema", "/nowhere.json"]);
    assert!(code == 1 && message.contains("/nowhere.json"), "{message}");
}

const TEMPLATE: &str =
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:";

/// A conversation through a pipe: its exit code, stdout and stderr.
fn chat(args: &[&str], input: &str) -> (i32, String, String) {
    let mut command = cellar();
    command.arg("chat").args(args).write_stdin(input.to_owned());
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    let code = output.status.code().unwrap();
    (code, text(&output.stdout), text(&output.stderr))
}

#[test]
fn every_answer_of_a_chat_is_json_of_the_schema() {
    let dir = tempfile::tempdir().unwrap();
    let schema = file(dir.path(), "schema.json", SCHEMA);
    // A template that begins thinking: what the schema allows is the answer nevertheless.
    let thinks = TEMPLATE.replace("assistant:", "assistant:<think>");
    for template in [TEMPLATE, &thinks] {
        let model = with_template(&dir, template);
        let flags = ["-m", &model, "--schema", &schema, "--seed", "5"];
        // Sampling is set in the middle, and an answer is given again.
        let input = "Who?\n/set temp 1.5\nAnd then?\n/regen\n/clear\nWho else?\n";
        let (code, stdout, stderr) = chat(&flags, input);
        assert_eq!(code, 0, "{stderr}");
        let answers = serde_json::Deserializer::from_str(&stdout).into_iter();
        let answers: Vec<serde_json::Value> = answers.map(Result::unwrap).collect();
        assert_eq!(answers.len(), 4, "{stdout}");
        for answer in answers {
            assert_eq!(answer.as_object().unwrap().len(), 3, "{stdout}");
            let kind = answer["kind"].as_str().unwrap();
            assert!(["cat", "dog"].contains(&kind), "{stdout}");
        }
    }
}

#[test]
fn a_grammar_begins_anew_at_each_message() {
    let dir = tempfile::tempdir().unwrap();
    let model = with_template(&dir, TEMPLATE);
    let grammar = file(dir.path(), "answer.lark", "start: \"yes\" | \"no\"");
    let flags = ["-m", &model, "--grammar", &grammar, "--temp", "0"];
    let (code, stdout, stderr) = chat(&flags, "Is it?\nAnd this?\n/show messages\n");
    assert_eq!(code, 0, "{stderr}");
    let answers: Vec<&str> = stdout.lines().collect();
    assert_eq!(answers.len(), 2, "{stdout}");
    for answer in &answers {
        assert!(["yes", "no"].contains(answer), "{stdout}");
    }
    // The answers are in the conversation as they were printed.
    let shown = format!("> Is it?\n{}\n> And this?\n{}\n", answers[0], answers[1]);
    assert!(stderr.contains(&shown), "{stderr}");
}

#[test]
fn a_chat_refuses_what_cannot_be_used_and_what_is_incomplete() {
    let dir = tempfile::tempdir().unwrap();
    let model = with_template(&dir, TEMPLATE);
    let schema = file(dir.path(), "schema.json", SCHEMA);
    let with = |flags: &[&str]| chat(&[&["-m", &*model], flags].concat(), "Who?\nWho else?\n");
    let (code, stdout, stderr) = with(&["--schema", &schema, "-n", "3", "--temp", "0"]);
    assert_eq!(code, 1, "{stderr}");
    assert!(stderr.contains("the text is incomplete: --predict ended it"));
    assert!(stdout.ends_with('\n'), "its line ends: {stdout:?}");
    assert!(!stdout.ends_with("\n\n"), "{stdout:?}");
    let (code, _, stderr) = with(&["--schema", &schema, "--stop", "\"kind"]);
    assert_eq!(code, 1, "{stderr}");
    assert!(
        stderr.contains("the stop string \"\\\"kind\" ended it"),
        "{stderr}"
    );
    let wrong = file(dir.path(), "wrong.json", r#"{"not": {}}"#);
    let (code, stdout, stderr) = with(&["--schema", &wrong]);
    assert_eq!((code, &*stdout), (1, ""), "{stderr}");
    assert!(stderr.contains("the schema at '/not'"), "{stderr}");
    for flag in ["--schema", "--grammar"] {
        let (code, _, stderr) = with(&[flag, "-"]);
        assert_eq!(code, 2, "{stderr}");
        assert!(stderr.contains("stdin brings messages"), "{stderr}");
    }
}
