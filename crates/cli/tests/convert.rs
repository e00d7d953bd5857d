//! `cellar convert` and `cellar perplexity`: what is written runs as what was read, and the figures
//! are llama.cpp's.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod support;

use std::path::{Path, PathBuf};

use kv_core::block::BlockFormat;
use kv_core::weights::WeightSource;
use model_core::architecture::Registry;
use model_core::gguf::GgufFile;
use model_core::hf::HfTranslation;
use support::{cellar, json, model, output};

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/directories/mistral_swa8")
}

fn converted(name: &str, file_type: &str) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join(name);
    let [from, to] = [directory(), out.clone()].map(|path| path.display().to_string());
    output(&["convert", &from, &to, "--type", file_type]);
    (dir, out)
}

/// Logits of a few tokens, as bytes of the file.
fn logits(model: &Path) -> Vec<f32> {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("logits").display().to_string();
    let model = model.display().to_string();
    let ids = "1,5,9,200,31,77,4,18,250,99,12,3";
    output(&["logits", "-m", &model, "--tokens", ids, "--out", &out]);
    let bytes = std::fs::read(out).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let view = file.tensor("logits").unwrap();
    let words = view.data().as_chunks::<4>().0.iter().copied();
    words.map(f32::from_le_bytes).collect()
}

#[test]
fn the_file_holds_what_the_directory_holds() {
    let (_dir, path) = converted("model.gguf", "f32");
    let file = GgufFile::open(&path).unwrap();
    let mut registry = Registry::new();
    model_llama::register(&mut registry);
    let source = HfTranslation::open(directory(), registry.hf_classes()).unwrap();
    assert_eq!(file.tensors().len(), source.weights().names().len());
    for name in source.weights().names() {
        let [ours, theirs] = [file.require(&name), source.weights().require(&name)];
        assert_eq!(ours.unwrap().to_f32(), theirs.unwrap().to_f32(), "{name}");
    }
    assert_eq!(file.metadata().get::<u32>("general.file_type"), Ok(0));
    assert_eq!(
        file.metadata().get::<u32>("llama.attention.sliding_window"),
        Ok(8)
    );
    assert!(logits(&path) == logits(&directory()), "the same bits");
    let prompt = ["Once upon", "--temp", "0", "-n", "8"];
    let text = |model: &Path| {
        let model = model.display().to_string();
        output(&[&["run", "-m", &model], &prompt[..]].concat()).0
    };
    assert_eq!(text(&path), text(&directory()));
}

#[test]
fn each_type_is_written_and_stays_near() {
    let exact = logits(&directory());
    for (name, format, tolerance) in [
        ("f16", BlockFormat::F16, 0.05),
        ("bf16", BlockFormat::BF16, 0.3),
        // 8 bits for 32 values: some five times the error of bf16; 4 bits: sixteen times that.
        ("q8_0", BlockFormat::Q8_0, 0.6),
        ("Q4_0", BlockFormat::Q4_0, 6.0),
    ] {
        let (_dir, path) = converted("model.gguf", name);
        let file = GgufFile::open(&path).unwrap();
        let stored = file.require("blk.1.ffn_down.weight").unwrap().format();
        assert_eq!(stored, format, "{name}");
        let norm = file.require("blk.1.ffn_norm.weight").unwrap().format();
        assert_eq!(norm, BlockFormat::F32, "{name}");
        let rounded = logits(&path);
        let off = rounded.iter().zip(&exact).map(|(a, b)| (a - b).abs());
        let off = off.fold(0.0, f32::max);
        assert!(off > 0.0 && off < tolerance, "{name}: off by {off}");
    }
}

#[test]
fn a_type_or_a_place_that_cannot_be_is_an_error() {
    let from = directory().display().to_string();
    let said = |args: &[&str], code: i32| {
        let done = cellar().args(args).assert().failure().code(code);
        String::from_utf8(done.get_output().stderr.clone()).unwrap()
    };
    let stderr = said(&["convert", &from, "x.gguf", "--type", "q3"], 2);
    assert!(stderr.contains("known are f32, f16, bf16"), "{stderr}");
    let stderr = said(&["convert", &from, "/absent/x.gguf", "--type", "f16"], 1);
    assert!(stderr.contains("cannot write '/absent/x.gguf'"), "{stderr}");
    let stderr = said(&["convert", "/absent", "x.gguf", "--type", "f16"], 1);
    assert!(stderr.contains("/absent"), "{stderr}");
}

/// llama-perplexity (build 11434, CPU) on the same file and text: 1.9136 for chunks of 64 tokens,
/// 1.7888 for chunks of 128.
#[test]
fn perplexity_is_that_of_llama_cpp() {
    let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/stories.txt");
    let (text, model) = (text.display().to_string(), model().display().to_string());
    for (n_ctx, n_chunks, wanted) in [("64", 6, 1.9136), ("128", 3, 1.7888)] {
        let args = [
            "perplexity",
            "-m",
            &model,
            "-f",
            &text,
            "-c",
            n_ctx,
            "--json",
        ];
        let report = json(&args);
        let found = report["perplexity"].as_f64().unwrap();
        assert!((found / wanted - 1.0).abs() < 1e-3, "{report}");
        assert_eq!(report["n_chunks"], n_chunks);
        // A batch that is smaller than a chunk changes nothing but rounding.
        let cut = json(&[&args[..], &["--batch", "24", "--kv-type", "f32"]].concat());
        assert!((cut["perplexity"].as_f64().unwrap() / found - 1.0).abs() < 1e-3);
    }
    let args = ["perplexity", "-m", &model, "-f", &text, "-c", "512"];
    let done = cellar().args(args).assert().failure();
    let stderr = String::from_utf8(done.get_output().stderr.clone()).unwrap();
    assert!(stderr.contains("at least 1024 are needed"), "{stderr}");
}
