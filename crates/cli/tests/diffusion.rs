//! `cellar run` with a diffusion model: the masks behind a prompt are filled.
//!
//! The model has the weights of the story model, whose tokens were not trained to see later ones:
//! its texts are no stories, but each is the same again, and as long as was asked.

#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

use crate::support::{BACKENDS, failure, json, model, output};
use model_core::gguf::{GgufFile, GgufWriter, Metadata};
use model_tests::fixture;

/// The story model as an architecture of diffusion models.
fn diffusion_model(mask: Option<u32>) -> tempfile::NamedTempFile {
    let file = GgufFile::open(model()).unwrap();
    let mut metadata = Metadata::new();
    for (key, value) in file.metadata().iter() {
        let key = match key.strip_prefix("llama.") {
            Some(rest) => format!("llada.{rest}"),
            None => key.to_owned(),
        };
        metadata.insert(&key, value.clone());
    }
    metadata.insert("general.architecture", "llada");
    metadata.insert("llada.attention.causal", false);
    if let Some(mask) = mask {
        metadata.insert("tokenizer.ggml.mask_token_id", mask);
    }
    let mut writer = GgufWriter::with_metadata(metadata);
    for tensor in file.tensors() {
        writer.add(file.weight(tensor.name()).unwrap()).unwrap();
    }
    let made = tempfile::NamedTempFile::with_suffix(".gguf").unwrap();
    std::fs::write(made.path(), writer.to_bytes().unwrap()).unwrap();
    made
}

#[test]
fn masks_are_filled_in_the_steps_that_were_asked_for() {
    let file = diffusion_model(Some(0));
    let path = file.path().to_str().unwrap();
    let run = ["run", "-m", path, "Once upon a time", "-n", "12", "--json"];
    let texts = BACKENDS.map(|backend| {
        let steps = ["--backend", backend, "--diffusion-steps", "4"];
        let report = json(&[&run[..], &steps].concat());
        assert_eq!(report["steps"], 4);
        assert!(report["tokens"].as_array().unwrap().len() <= 12);
        report["text"].as_str().unwrap().to_owned()
    });
    assert_eq!(texts[0], texts[1], "the text is greedy");
    // A step for each token, and one by one they depend on each other.
    let report = json(&run);
    assert_eq!(report["steps"], 12);
    let (shown, note) = output(&["run", "-m", path, "Once upon a time", "-n", "12"]);
    let text = report["text"].as_str().unwrap();
    assert_eq!(shown, format!("Once upon a time{text}\n"));
    assert!(note.contains("filled: 12 tokens in 12 steps"), "{note}");
    let guided = json(&[&run[..], &["--diffusion-guidance", "2"]].concat());
    assert_ne!(guided["text"], report["text"]);
}

#[test]
fn drawn_texts_follow_the_seed() {
    let file = diffusion_model(Some(0));
    let path = file.path().to_str().unwrap();
    let drawn = |seed: &str, more: &[&str]| {
        let run = [
            "run", "-m", path, "The dog", "-n", "8", "--temp", "1", "--json",
        ];
        let report = json(&[&run[..], &["--seed", seed], more].concat());
        report["text"].as_str().unwrap().to_owned()
    };
    for more in [
        &["--diffusion-order", "random"][..],
        &["--diffusion-order", "entropy", "--diffusion-eps", "0.1"],
        &[
            "--diffusion-order",
            "margin",
            "--diffusion-block-length",
            "3",
        ],
    ] {
        assert_eq!(drawn("1", more), drawn("1", more));
        assert_ne!(drawn("1", more), drawn("2", more));
    }
}

#[test]
fn flags_of_the_other_kind_of_model_are_refused() {
    let file = diffusion_model(Some(0));
    let path = file.path().to_str().unwrap();
    for (flags, part) in [
        (
            &["--context-shift"][..],
            "--context-shift is for models that continue texts",
        ),
        (
            &["--save-state", "x.state"],
            "--save-state is for models that continue texts",
        ),
        (&["-n", "0"], "-n must be at least 1"),
        (&["-n", "100000"], "choose a smaller -n"),
        (&["--repeat-penalty", "2"], "masks are not filled in order"),
        (
            &["--logit-bias", "999999+1"],
            "the bias is of token 999999, but the vocabulary has",
        ),
        (
            &["-n", "9", "--diffusion-block-length", "10"],
            "between 1 and 9",
        ),
        (
            &[
                "-n",
                "9",
                "--diffusion-block-length",
                "2",
                "--diffusion-steps",
                "3",
            ],
            "3 steps are too few for 5 blocks",
        ),
    ] {
        let (code, message) = failure(&[&["run", "-m", path, "The"][..], flags].concat());
        assert_eq!(code, 2, "{message}");
        assert!(message.contains(part), "{message}");
    }
    let (code, message) = failure(&["run", "--diffusion-steps", "3", "-p", "The"]);
    assert_eq!(code, 2);
    assert!(
        message.contains("--diffusion-steps is for diffusion models"),
        "{message}"
    );
    let stories = fixture("stories/stories.txt");
    for command in [
        &["bench"][..],
        &["chat"],
        &["perplexity", "-f", stories.to_str().unwrap()],
    ] {
        let (code, message) = failure(&[command, &["-m", path]].concat());
        assert_eq!(code, 2, "{message}");
        assert!(message.contains("'cellar run' is for it"), "{message}");
    }
}

#[test]
fn a_file_that_names_no_mask_says_so() {
    let file = diffusion_model(None);
    let path = file.path().to_str().unwrap();
    let (code, message) = failure(&["run", "-m", path, "The"]);
    assert_eq!(code, 1);
    assert!(
        message.contains("tokenizer.ggml.mask_token_id"),
        "{message}"
    );
}
