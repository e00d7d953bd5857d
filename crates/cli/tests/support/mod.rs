//! What the tests of the program share: how it is started, and models to give it.

// Each test file uses a part of this, and a panic is how a test fails.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::panic)]

use std::path::{Path, PathBuf};

use assert_cmd::Command;
use model_core::gguf::{GgufFile, GgufWriter};
use model_tests::{Recipe, fixture};
use serde::Deserialize;

pub const BACKENDS: [&str; 2] = ["cpu", "candle"];

pub fn cellar() -> Command {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("cellar"));
    command.env_remove("CELLAR_LOG").write_stdin("");
    // What a GPU of this machine computes is not tested here.
    command.env("CUDA_VISIBLE_DEVICES", "");
    command
}

pub fn model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/stories-llama-f16.gguf")
}

/// A model directory made of a recipe, with a tokenizer of 512 tokens.
pub fn directory(recipe: &str) -> tempfile::TempDir {
    let made = tempfile::tempdir().unwrap();
    Recipe::named(recipe).expand(made.path());
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        let from = fixture("tokenizers/spm512").join(file);
        std::fs::copy(from, made.path().join(file)).unwrap();
    }
    made
}

/// Standard output of a run that succeeds, and standard error.
#[track_caller]
pub fn output(args: &[&str]) -> (String, String) {
    let done = cellar().args(args).assert().success();
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (
        text(&done.get_output().stdout),
        text(&done.get_output().stderr),
    )
}

/// Runs and expects a failure; gives its code and its message.
#[track_caller]
pub fn failure(args: &[&str]) -> (i32, String) {
    let done = cellar().args(args).assert().failure();
    let output = done.get_output();
    let stderr = String::from_utf8(output.stderr.clone()).unwrap();
    let line = stderr
        .strip_suffix('\n')
        .unwrap_or_else(|| panic!("{args:?}: {stderr}"));
    let message = line
        .strip_prefix("error: ")
        .unwrap_or_else(|| panic!("{args:?}: {stderr}"));
    assert!(
        !message.contains('\n'),
        "{args:?}: more than a line: {stderr}"
    );
    assert!(!message.contains("panicked"), "{args:?}: {stderr}");
    assert!(output.stdout.is_empty(), "{args:?}: stdout is for results");
    (output.status.code().unwrap(), message.to_owned())
}

/// The JSON object on the last line of standard output.
#[track_caller]
pub fn json(args: &[&str]) -> serde_json::Value {
    let (stdout, _) = output(args);
    serde_json::from_str(stdout.lines().last().unwrap()).unwrap()
}

/// The JSON objects on the lines of standard output of a run with this standard input.
#[track_caller]
pub fn json_lines(args: &[&str], input: &str) -> Vec<serde_json::Value> {
    let done = cellar().args(args).write_stdin(input).assert().success();
    let stdout = String::from_utf8(done.get_output().stdout.clone()).unwrap();
    let lines = stdout.lines();
    lines.map(|l| serde_json::from_str(l).unwrap()).collect()
}

/// One prompt with its greedy continuation by an independent implementation.
#[derive(Debug, Deserialize)]
pub struct Reference {
    pub prompt: String,
    pub ids: Vec<u32>,
    pub greedy_ids: Vec<u32>,
    pub continuation: String,
}

pub fn references() -> Vec<Reference> {
    references_in(model().with_file_name("stories-llama.reference.json"))
}

pub fn references_in(path: impl AsRef<Path>) -> Vec<Reference> {
    #[derive(Deserialize)]
    struct File {
        prompts: Vec<Reference>,
    }
    serde_json::from_str::<File>(&std::fs::read_to_string(path).unwrap())
        .unwrap()
        .prompts
}

/// The small model with other metadata, as bytes of a GGUF file.
pub fn edited(edit: impl FnOnce(&mut GgufWriter)) -> Vec<u8> {
    let file = GgufFile::open(model()).unwrap();
    let mut writer = GgufWriter::with_metadata(file.metadata().clone());
    for tensor in file.tensors() {
        writer.add(file.weight(tensor.name()).unwrap()).unwrap();
    }
    edit(&mut writer);
    writer.to_bytes().unwrap()
}

/// The small model with a chat template, in a file of `dir`.
pub fn with_template(dir: &tempfile::TempDir, template: &str) -> String {
    let path = dir.path().join("chat.gguf");
    let bytes = edited(|writer| {
        writer.set("tokenizer.chat_template", template);
    });
    std::fs::write(&path, bytes).unwrap();
    path.to_str().unwrap().to_owned()
}
