//! Encoder-decoders in the program: the prompt is encoded, and a text follows; states go on in
//! another process, GGUF files give the same, and commands that need no source refuse them.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use crate::support::{BACKENDS, failure, json, output};
use model_tests::{Recipe, fixture};

const PROMPT: &str = "a small bird sang in the old tree";

/// A directory of T5 v1.1 with a tokenizer.
fn directory() -> tempfile::TempDir {
    let made = tempfile::tempdir().unwrap();
    let from = fixture("seq2seq");
    Recipe::open(&from.join("t5_v1_1")).expand(made.path());
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(from.join(file), made.path().join(file)).unwrap();
    }
    made
}

fn tokens(args: &[&str]) -> Vec<u64> {
    let report = json(&[&["run", "--temp", "0", "--json"], args].concat());
    let tokens = report["tokens"].as_array().unwrap().iter();
    tokens.map(|token| token.as_u64().unwrap()).collect()
}

#[test]
fn a_text_follows_its_source_on_every_backend_and_from_gguf() {
    let dir = directory();
    let model = dir.path().to_str().unwrap();
    let base = ["-m", model, "-n", "16", "--kv-type", "f32"];
    let wanted = tokens(&[&base[..], &[PROMPT]].concat());
    assert!(wanted.len() > 8, "{wanted:?}");
    for backend in BACKENDS {
        let got = tokens(&[&base[..], &["--backend", backend, PROMPT]].concat());
        assert_eq!(got, wanted, "{backend}");
    }
    let other = tokens(&[&base[..], &["the rain fell"]].concat());
    assert_ne!(other, wanted, "another source, another text");
    // The prompt is no part of the text, and is not printed.
    let (text, _) = output(&[&["run", "--temp", "0"], &base[..], &[PROMPT]].concat());
    assert!(!text.contains(PROMPT) && !text.trim().is_empty(), "{text}");
    let file = dir.path().join("t5.gguf");
    let file = file.to_str().unwrap();
    output(&["convert", "--type", "f32", model, file]);
    let base = ["-m", file, "-n", "16", "--kv-type", "f32"];
    assert_eq!(tokens(&[&base[..], &[PROMPT]].concat()), wanted);
}

/// A config names the language of a translation so.
#[test]
fn a_text_follows_the_token_that_the_config_forces() {
    let dir = directory();
    let model = dir.path().to_str().unwrap();
    let base = ["-m", model, "--kv-type", "f32", "-n"];
    let wanted = tokens(&[&base[..], &["9", PROMPT]].concat());
    let path = dir.path().join("config.json");
    let config = std::fs::read(&path).unwrap();
    let mut config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    config["forced_bos_token_id"] = wanted[0].into();
    std::fs::write(&path, config.to_string()).unwrap();
    assert_eq!(tokens(&[&base[..], &["8", PROMPT]].concat()), wanted[1..]);
    // Newer directories have it in a file of its own, which comes first.
    config["forced_bos_token_id"] = wanted[1].into();
    std::fs::write(&path, config.to_string()).unwrap();
    let generation = serde_json::json!({"forced_bos_token_id": wanted[0]});
    let own = dir.path().join("generation_config.json");
    std::fs::write(own, generation.to_string()).unwrap();
    assert_eq!(tokens(&[&base[..], &["8", PROMPT]].concat()), wanted[1..]);
    let state = dir.path().join("text.state");
    let state = state.to_str().unwrap();
    tokens(&[&base[..], &["0", "--save-state", state, PROMPT]].concat());
    let rest = tokens(&[&base[..], &["8", "--load-state", state, ""]].concat());
    assert_eq!(rest, wanted[1..]);
}

#[test]
fn a_text_goes_on_in_another_process_without_its_source() {
    let dir = directory();
    let model = dir.path().to_str().unwrap();
    let state = dir.path().join("text.state");
    let state = state.to_str().unwrap();
    let base = ["-m", model, "--kv-type", "f32"];
    let wanted = tokens(&[&base[..], &["-n", "9", PROMPT]].concat());
    for n_first in [0usize, 4] {
        let (n, rest) = (n_first.to_string(), (wanted.len() - n_first).to_string());
        let first = ["-n", &n, "--save-state", state, PROMPT];
        let mut got = tokens(&[&base[..], &first].concat());
        let second = ["-n", &rest, "--load-state", state, ""];
        got.extend(tokens(&[&base[..], &second].concat()));
        assert_eq!(got, wanted, "after {n_first}");
    }
}

/// Several texts at once, each after a source of its own.
#[test]
fn a_batch_encodes_the_source_of_each_line() {
    let dir = directory();
    let model = dir.path().to_str().unwrap();
    let base = ["-m", model, "-n", "16", "--temp", "0", "--kv-type", "f32"];
    let prompts = [PROMPT, "the rain fell", "a bird"];
    let requests = dir.path().join("requests.jsonl");
    let lines = prompts.map(|prompt| serde_json::json!({"prompt": prompt}).to_string());
    std::fs::write(&requests, lines.join("\n")).unwrap();
    let requests = requests.to_str().unwrap();
    let (answers, _) = output(&[&["batch"], &base[..], &["-f", requests]].concat());
    let mut answers: Vec<serde_json::Value> = answers
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    answers.sort_by_key(|answer| answer["index"].as_u64());
    assert_eq!(answers.len(), 3, "{answers:?}");
    for (prompt, answer) in prompts.iter().zip(answers) {
        let alone = json(&[&["run", "--json"], &base[..], &[prompt]].concat());
        assert_eq!(answer["text"], alone["text"], "{prompt}: {answer}");
    }
}

#[test]
fn what_needs_no_source_is_refused() {
    let dir = directory();
    let model = dir.path().to_str().unwrap();
    let text = dir.path().join("text.txt");
    std::fs::write(&text, PROMPT).unwrap();
    let text = text.to_str().unwrap();
    let out = dir.path().join("logits.safetensors");
    let out = out.to_str().unwrap();
    for args in [
        &["perplexity", "-m", model, "-f", text][..],
        &["chat", "-m", model],
        &["bench", "-m", model, "-p", "4", "-n", "4"],
        &["logits", "-m", model, "--tokens", "0,5", "--out", out],
    ] {
        let (code, message) = failure(args);
        assert_eq!(code, 2, "{message}");
        assert!(message.contains("'cellar run' is for it"), "{message}");
    }
    let (code, message) = failure(&[
        "run",
        "-m",
        model,
        "--json",
        "--prompt-logprobs",
        "1",
        PROMPT,
    ]);
    assert_eq!(code, 1, "{message}");
    assert!(
        message.contains("the model encodes its prompt"),
        "{message}"
    );
    let long = "bird ".repeat(40);
    let (_, message) = failure(&["run", "-m", model, "--ubatch", "64", &long]);
    assert!(message.contains("64"), "{message}");
}

#[test]
fn a_plan_shows_the_rows_of_sources() {
    let dir = directory();
    let model = dir.path().to_str().unwrap();
    let (plan, _) = output(&["plan", model, "--ctx", "64", "--kv-type", "f32"]);
    assert!(plan.contains("source"), "{plan}");
}
