//! WavTokenizer's decoder on the command line: rows of codes, and what a model whose tokens are no
//! text is refused for.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use crate::support::{BACKENDS, failure, output};
use model_tests::{Reference, fixture};

/// Values of a row.
const WIDTH: usize = 18;

fn model() -> String {
    let file = fixture("gguf").join("wavtokenizer_dec.gguf");
    file.display().to_string()
}

/// The codes of every sequence as flags, and their rows.
fn reference() -> (Vec<String>, Vec<Vec<f32>>) {
    let path = fixture("gguf").join("wavtokenizer_dec.reference.safetensors");
    let reference = Reference::open(&path);
    let mut flags = Vec::new();
    for ids in reference.prompts() {
        let ids: Vec<String> = ids.iter().map(u32::to_string).collect();
        flags.extend(["--tokens".to_owned(), ids.join(",")]);
    }
    let rows = (0..3).map(|at| reference.values(&format!("hidden_{at}")).unwrap().1);
    (flags, rows.collect())
}

fn embed(args: &[&str]) -> Vec<Vec<Vec<f32>>> {
    let (stdout, stderr) = output(&[&["embed", "--pooling", "none"], args].concat());
    assert_eq!(stderr, "");
    serde_json::from_str(&stdout).unwrap()
}

#[track_caller]
fn assert_close(got: &[Vec<f32>], wanted: &[f32], tolerance: f32) {
    assert!(got.iter().all(|row| row.len() == WIDTH));
    let got = got.concat();
    assert_eq!(got.len(), wanted.len());
    let off = model_tests::distance(&got, wanted);
    assert!(off <= tolerance, "off by {off}");
}

#[test]
fn codes_become_the_rows_of_the_reference() {
    let (flags, wanted) = reference();
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    for backend in BACKENDS {
        for batch in ["2048", "8"] {
            let before = ["-m", &model(), "--backend", backend, "--batch", batch];
            let got = embed(&[&before[..], &flags].concat());
            assert_eq!(got.len(), wanted.len());
            for (got, wanted) in got.iter().zip(&wanted) {
                assert_close(got, wanted, 2e-4);
            }
        }
    }
    let of_length_1 = embed(&[&["-m", &model(), "--normalize", "unit"][..], &flags].concat());
    for row in of_length_1.iter().flatten() {
        let square: f32 = row.iter().map(|x| x * x).sum();
        assert!((square - 1.0).abs() < 1e-5, "{square}");
    }
}

#[test]
fn a_converted_file_keeps_its_convolutions() {
    let (flags, wanted) = reference();
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("q8.gguf").display().to_string();
    output(&["convert", &model(), &file, "--type", "q8_0"]);
    let got = embed(&[&["-m", &file][..], &flags].concat());
    for (got, wanted) in got.iter().zip(&wanted) {
        assert_close(got, wanted, 0.1);
    }
}

#[test]
fn commands_show_it() {
    let model = model();
    let (inspected, _) = output(&["inspect", &model]);
    assert!(inspected.contains("wavtokenizer-dec"), "{inspected}");
    assert!(inspected.contains("its tokens are no text"), "{inspected}");
    assert!(!inspected.contains("is missing"), "{inspected}");
    let (plan, _) = output(&["plan", &model]);
    assert!(plan.contains("it remembers nothing"), "{plan}");
    let (graph, _) = output(&["graph", "-m", &model]);
    for op in [
        "conv.neighbors",
        "conv.depthwise",
        "group_norm",
        "attend_batch",
    ] {
        assert!(graph.contains(op), "{op}: {graph}");
    }
}

#[test]
fn what_it_cannot_do_is_refused_with_the_reason() {
    let model = model();
    let said = |args: &[&str]| failure(args).1;
    let text = said(&["embed", "-m", &model, "--pooling", "none", "some text"]);
    assert_eq!(
        text,
        format!(
            "'{model}' has no tokenizer, because its tokens are no text: give their ids, as in \
             --tokens 1,2,3"
        )
    );
    let run = said(&["run", "-m", &model, "some text"]);
    assert!(run.contains("has no tokenizer"), "{run}");
    assert!(run.contains("its tokens are no text"), "{run}");
    let pooling = said(&["embed", "-m", &model, "--tokens", "1"]);
    assert!(
        pooling.contains("none prints a row for every token"),
        "{pooling}"
    );
    let none = ["embed", "-m", &model, "--pooling", "none", "--tokens"];
    let beyond = said(&[&none[..], &["7,40"]].concat());
    assert!(
        beyond.contains("token 40 is not below the vocabulary's 40"),
        "{beyond}"
    );
    let word = said(&[&none[..], &["7,x"]].concat());
    assert!(word.contains("'x' is no token id"), "{word}");
    let long = vec!["1"; 65].join(",");
    let long = said(&[&none[..], &[&long]].concat());
    assert!(long.contains("65 tokens, but the model takes 64"), "{long}");
    let both = said(&[&none[..], &["1", "some text"]].concat());
    assert!(both.contains("give either ids or texts"), "{both}");
}
