//! The page that plans gives the bytes of `cellar plan`, for every fixture: it sees the first bytes
//! of files, the program the files.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use std::fs;
use std::path::{Path, PathBuf};

use model_tests::{Recipe, fixture, root};
use plan_page::Page;
use serde_json::{Value, json};

use crate::support::cellar;

/// Bytes of a GGUF file that the page reads first.
const FIRST_READ: usize = 4096;

/// Flags of the program, and the same choices in the page.
fn choices() -> [(Vec<&'static str>, Value); 3] {
    let options = |n_ctx: Option<u32>, n_seqs: u32, streams: &str, types: [&str; 3]| {
        let [k, v, state] = types;
        json!({
            "n_ctx": n_ctx, "n_seqs": n_seqs, "streams": streams, "k": k, "v": v, "state": state,
            "room": null,
        })
    };
    [
        (vec![], options(None, 1, "shared", ["f16", "f16", "f32"])),
        (
            vec![
                "-c",
                "3000",
                "--seqs",
                "3",
                "--kv-type-k",
                "f32",
                "--kv-type-v",
                "bf16",
            ],
            options(Some(3000), 3, "shared", ["f32", "bf16", "f32"]),
        ),
        (
            vec![
                "-c",
                "70000",
                "--seqs",
                "5",
                "--streams",
                "--kv-type",
                "q8_0",
                "--state-type",
                "f16",
            ],
            options(Some(70_000), 5, "per_sequence", ["q8_0", "q8_0", "f16"]),
        ),
    ]
}

fn ask(page: &mut Page, question: &Value, bytes: &[u8]) -> Value {
    let mut asked = question.to_string().into_bytes();
    asked.push(b'\n');
    asked.extend_from_slice(bytes);
    serde_json::from_str(&page.answer(&asked)).unwrap()
}

/// Opens a GGUF file as the page does: more and more of it, until its header is there.
fn open_gguf(page: &mut Page, path: &Path) -> Value {
    let bytes = fs::read(path).unwrap();
    let mut n = FIRST_READ;
    loop {
        n = n.min(bytes.len());
        let start = json!({"name": "model.gguf", "file_len": bytes.len(), "n_bytes": n});
        let answer = ask(page, &json!({"gguf": {"starts": [start]}}), &bytes[..n]);
        if answer.get("start_too_short").is_none() {
            return answer;
        }
        assert!(n < bytes.len(), "{}", path.display());
        n *= 4;
    }
}

/// Opens a directory by its config and the header of its tensors.
fn open_directory(page: &mut Page, path: &Path) -> Value {
    let json_of = |name: &str| -> Value {
        let text = fs::read(path.join(name));
        text.map_or(Value::Null, |text| serde_json::from_slice(&text).unwrap())
    };
    let bytes = fs::read(path.join("model.safetensors")).unwrap();
    let n = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    assert!(n < bytes.len());
    let question = json!({"directory": {
        "name": "directory",
        "config": json_of("config.json"),
        "generation_config": json_of("generation_config.json"),
        "starts": [{"name": "model.safetensors", "file_len": bytes.len(), "n_bytes": n}],
    }});
    ask(page, &question, &bytes[..n])
}

/// What the program says: its report, or its error.
fn planned(path: &Path, flags: &[&str]) -> Result<Value, String> {
    let mut command = cellar();
    command
        .args(["plan", "--json", "--backend", "cpu"])
        .arg(path)
        .args(flags);
    let output = command.output().unwrap();
    if output.status.success() {
        Ok(serde_json::from_slice(&output.stdout).unwrap())
    } else {
        Err(String::from_utf8(output.stderr).unwrap())
    }
}

/// What both report.
const FIELDS: [&str; 12] = [
    "architecture",
    "n_ctx",
    "n_seqs",
    "streams",
    "parts",
    "layers",
    "rows",
    "recent",
    "by_kind",
    "n_bytes",
    "memory",
    "weights",
];

/// Compares the plans of a model; the number of those that were made, and not refused by both.
fn compare(path: &Path, open: impl Fn(&mut Page, &Path) -> Value) -> usize {
    let mut page = Page::default();
    let opened = open(&mut page, path);
    let mut n_plans = 0;
    for (flags, options) in choices() {
        let answer = match opened.get("error") {
            Some(_) => opened.clone(),
            None => ask(&mut page, &json!({"plan": options}), &[]),
        };
        let place = format!("{} {flags:?}", path.display());
        match (planned(path, &flags), answer.get("plan")) {
            (Ok(wanted), Some(plan)) => {
                for field in FIELDS {
                    assert_eq!(plan.get(field), wanted.get(field), "{place}: {field}");
                }
                n_plans += 1;
            }
            (Err(error), None) => {
                // Labels of files differ, reasons do not.
                let reason = answer["error"].as_str().unwrap();
                let reason = reason.split_once(": ").map_or(reason, |(_, reason)| reason);
                let same = error.contains(reason);
                assert!(same, "{place}: {reason} instead of {error}");
            }
            (wanted, _) => panic!("{place}: {answer} instead of {wanted:?}"),
        }
    }
    n_plans
}

fn gguf_files() -> Vec<PathBuf> {
    let mut files = vec![root().join("models/stories-llama-f16.gguf")];
    for folder in ["gguf", "stories", "heads"] {
        let entries = fs::read_dir(fixture(folder)).unwrap();
        let paths = entries.map(|entry| entry.unwrap().path());
        files.extend(paths.filter(|path| path.extension().is_some_and(|end| end == "gguf")));
    }
    files
}

#[test]
fn bytes_are_those_of_the_program_for_every_gguf_file() {
    let files = gguf_files();
    let n_plans: usize = files.iter().map(|path| compare(path, open_gguf)).sum();
    assert!(files.len() >= 6 && n_plans >= 12, "{n_plans} of {files:?}");
}

#[test]
fn bytes_are_those_of_the_program_for_every_recipe() {
    let folders = [
        "recipes",
        "encoders",
        "seq2seq",
        "diffusion",
        "images",
        "heads",
    ];
    let recipes = folders
        .map(|folder| Recipe::all_in(&fixture(folder)))
        .concat();
    let n_plans: usize = recipes
        .iter()
        .map(|recipe| {
            let made = tempfile::tempdir().unwrap();
            recipe.expand(made.path());
            compare(made.path(), open_directory)
        })
        .sum();
    assert!(
        recipes.len() > 110 && n_plans > 250,
        "{n_plans} plans of {}",
        recipes.len()
    );
}

#[test]
fn the_beginning_of_a_file_whose_length_is_not_known_is_enough() {
    let path = root().join("models/stories-llama-f16.gguf");
    let mut page = Page::default();
    open_gguf(&mut page, &path);
    let plan = json!({"plan": choices()[0].1});
    let wanted = ask(&mut page, &plan, &[]);
    let bytes = fs::read(&path).unwrap();
    let part = &bytes[..bytes.len() / 2];
    let start = |file_len: Option<usize>| {
        let start = json!({"name": "cut.gguf", "file_len": file_len, "n_bytes": part.len()});
        json!({"gguf": {"starts": [start]}})
    };
    let error = ask(&mut page, &start(Some(part.len())), part);
    let error = error["error"].as_str().unwrap();
    assert!(
        error.contains("cut.gguf") && error.contains("truncated in the data"),
        "{error}"
    );
    // What cannot be opened leaves the model before.
    assert_eq!(ask(&mut page, &plan, &[]), wanted);
    let opened = ask(&mut page, &start(None), part);
    assert!(opened.get("opened").is_some(), "{opened}");
    assert_eq!(ask(&mut page, &plan, &[]), wanted);
    let short = ask(&mut page, &start(None), &part[..part.len() - 1]);
    assert!(
        short["error"].as_str().unwrap().contains("announced"),
        "{short}"
    );
}
