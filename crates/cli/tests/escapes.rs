//! Strings from files never reach a terminal as control sequences, on stdout or in errors.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use crate::support;

use std::fs;

use crate::support::{cellar, directory, edited, output, with_template};
use kv_backend::state::{SavedState, StateToSave, save};
use kv_rows::{KvType, RowLayout};
use model_core::gguf::{Array, Value};

/// Colour, a C1 control, a bell, a direction mark.
const HOSTILE: &str = "\x1b[31mred\u{9b}2J\x07\u{202e}";
const SHOWN: &str = r"\u{1b}[31mred\u{9b}2J\u{7}\u{202e}";
const SHOWN_AS_JSON: &str = r"\u001b[31mred\u009b2J\u0007\u202e";

/// Runs, checks that stdout and stderr are harmless, and returns both.
#[track_caller]
fn harmless(args: &[&str]) -> String {
    let done = cellar().args(args).output().unwrap();
    let printed = [done.stdout, done.stderr].concat();
    let printed = String::from_utf8(printed).unwrap();
    for c in printed.chars() {
        let marks = ['\u{202e}'];
        let bad = c.is_control() && c != '\n' || marks.contains(&c);
        assert!(!bad, "{args:?} printed {c:?}: {printed:?}");
    }
    printed
}

#[track_caller]
fn shows(args: &[&str], wanted: &str) {
    let printed = harmless(args);
    assert!(printed.contains(wanted), "{args:?}: {printed}");
}

#[test]
fn metadata_is_escaped() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let file = path.to_str().unwrap();
    let write = |key: &str, value: Value| {
        let bytes = edited(|writer| {
            writer.set(key, value);
        });
        fs::write(&path, bytes).unwrap();
    };
    write(HOSTILE, HOSTILE.into());
    shows(&["inspect", file], &format!("{SHOWN}  "));
    shows(&["inspect", file], &format!("\"{SHOWN}\""));
    let json = format!("\"{SHOWN_AS_JSON}\":\"{SHOWN_AS_JSON}\"");
    shows(&["inspect", file, "--json"], &json);
    write(
        "list",
        Value::Array(Array::String(vec![HOSTILE.to_owned()])),
    );
    shows(&["inspect", file], &format!("[\"{SHOWN}\"]"));
    write("general.architecture", HOSTILE.into());
    for args in [
        &["inspect", file][..],
        &["run", "-p", "Hi", "-m", file],
        &["plan", file],
        &["graph", "-m", file],
    ] {
        shows(args, &format!("unknown architecture '{SHOWN}'"));
    }
    write("tokenizer.ggml.model", HOSTILE.into());
    shows(&["tokenize", "Hi", "-m", file], "tokenizer model ");
    harmless(&["inspect", file]);
}

#[test]
fn tokens_are_escaped() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let file = path.to_str().unwrap();
    let bytes = edited(|writer| {
        let mut tokens = token_texts();
        // Begin of sequence.
        tokens[1].push_str(HOSTILE);
        writer.set("tokenizer.ggml.tokens", Value::Array(Array::String(tokens)));
    });
    fs::write(&path, bytes).unwrap();
    shows(&["tokenize", "Hi", "-m", file], SHOWN);
    shows(&["tokenize", "Hi", "-m", file, "--json"], SHOWN_AS_JSON);
    shows(&["inspect", file], SHOWN);
}

fn token_texts() -> Vec<String> {
    let file = model_core::gguf::GgufFile::open(support::model()).unwrap();
    let tokens: &[String] = file.metadata().get("tokenizer.ggml.tokens").unwrap();
    tokens.to_vec()
}

#[test]
fn what_a_template_complains_of_is_escaped() {
    let dir = tempfile::tempdir().unwrap();
    let template = format!("{{{{ raise_exception('{HOSTILE}') }}}}");
    let file = with_template(&dir, &template);
    shows(&["run", "--chat", "Hi", "-m", &file], SHOWN);
}

#[test]
fn states_are_escaped() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state");
    let file = path.to_str().unwrap();
    output(&["run", "-p", "Once", "-n", "0", "--save-state", file]);
    let bytes = fs::read(&path).unwrap();
    let state = SavedState::parse(&bytes).unwrap();
    let mut fingerprint = state.fingerprint().clone();
    fingerprint.architecture = HOSTILE.to_owned();
    let layout = RowLayout::new(&fingerprint.layers, &[64], KvType::F16).unwrap();
    let hostile = StateToSave {
        fingerprint: &fingerprint,
        snapshot: state.snapshot(),
        tokens: state.tokens(),
        layout: &layout,
        kv_type: None,
        state_type: None,
        note: "",
    };
    let mut written = Vec::new();
    save(&hostile, &mut |_, _| Ok(()), &mut written).unwrap();
    fs::write(&path, written).unwrap();
    shows(
        &["state", "inspect", file],
        &format!("model: {SHOWN}, 6 layers"),
    );
    shows(&["state", "inspect", file, "--json"], SHOWN_AS_JSON);
    shows(&["run", "-p", "Hi", "--load-state", file], SHOWN);
}

#[test]
fn names_of_files_and_classes_are_escaped() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(HOSTILE);
    let file = path.to_str().unwrap();
    shows(&["run", "-p", "Hi", "-m", file], SHOWN);
    fs::copy(support::model(), &path).unwrap();
    shows(&["inspect", file], SHOWN);
    shows(
        &["bench", "-m", file, "-p", "1", "-n", "1", "-r", "1"],
        SHOWN,
    );
    let made = directory("mistral_swa8");
    let config = made.path().join("config.json");
    let text = fs::read_to_string(&config).unwrap();
    let text = text.replace("MistralForCausalLM", r"\u001b[31mred");
    fs::write(&config, text).unwrap();
    let made = made.path().to_str().unwrap();
    shows(&["run", "-p", "Hi", "-m", made], r"\u{1b}[31mred");
}
