//! `cellar convert` and `cellar perplexity`: what is written runs as what was read, and the figures
//! are llama.cpp's.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::path::{Path, PathBuf};

use crate::support::{cellar, directory, edited, failure, json, model, output};
use cellar_engine::{Engine, EngineConfig};
use kv_backend::Backend;
use kv_block::BlockFormat;
use kv_core::{SeqId, TokenId, batch::Batch};
use kv_graph::weights::{Weight, WeightSource};
use kv_rows::KvType;
use model_core::architecture::Registry;
use model_core::gguf::GgufFile;
use model_core::hf::HfTranslation;
use model_core::model_file::OpenModel;
use model_tests::checks::tolerance_of;
use model_tests::quantized::QuantizedDirectory;
use model_tests::{Recipe, candle, cpu, fixture};

/// The directory made of a recipe, and a file converted from it, in one folder.
struct Converted {
    from: tempfile::TempDir,
    to: PathBuf,
}

impl Converted {
    fn new(recipe: &str, file_type: &str) -> Self {
        let from = directory(recipe);
        let to = from.path().join("model.gguf");
        let paths = [from.path(), &to].map(|path| path.display().to_string());
        output(&["convert", &paths[0], &paths[1], "--type", file_type]);
        Self { from, to }
    }
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
    let Converted { from, to } = Converted::new("mistral_swa8", "f32");
    let file = GgufFile::open(&to).unwrap();
    assert_eq!(file.metadata().get::<u32>("general.file_type"), Ok(0));
    assert_eq!(
        file.metadata().get::<u32>("llama.attention.sliding_window"),
        Ok(8)
    );
    assert!(logits(&to) == logits(from.path()), "the same bits");
    let prompt = ["Once upon", "--temp", "0", "-n", "8"];
    let text = |model: &Path| {
        let model = model.display().to_string();
        output(&[&["run", "-m", &model], &prompt[..]].concat()).0
    };
    assert_eq!(text(&to), text(from.path()));
}

/// Logits of every token of a prompt.
fn logits_of<B: Backend>(backend: B, open: &OpenModel, prompt: &[u32]) -> Vec<f32> {
    let config = EngineConfig {
        n_ctx: Some(64),
        kv_types: KvType::F32.into(),
        ..EngineConfig::default()
    };
    let (model, weights) = (open.model().clone(), open.weights());
    let mut engine = Engine::new(backend, model, weights, &config).unwrap();
    let mut batch = Batch::new();
    for &id in prompt {
        let entry = batch.push_token(TokenId(id)).in_sequence(SeqId(0));
        entry.with_output();
    }
    engine.decode(&batch).unwrap().values().to_vec()
}

/// The file of every recipe has the keys and tensors of the directory, bit for bit, and computes
/// the same bits, which are the reference's within what f32 arithmetic in another order may make.
#[test]
fn every_recipe_becomes_a_file_that_computes_the_same() {
    let mut registry = Registry::new();
    model_llama::register(&mut registry);
    model_mamba::register(&mut registry);
    for recipe in Recipe::all_in(&fixture("recipes")) {
        let name = recipe.name();
        let Converted { from, to } = Converted::new(&name, "f32");
        let source = HfTranslation::open(from.path(), registry.hf_classes()).unwrap();
        let file = GgufFile::open(&to).unwrap();
        assert_eq!(file.tensors().len(), source.weights().names().len());
        for tensor in source.weights().names() {
            let [ours, theirs] = [file.require(&tensor), source.weights().require(&tensor)];
            let (ours, theirs) = (ours.unwrap(), theirs.unwrap());
            assert_eq!(ours.info(), theirs.info(), "{name}: {tensor}");
            assert!(**ours.bytes() == **theirs.bytes(), "{name}: {tensor}");
        }
        for (key, value) in source.metadata().iter() {
            assert_eq!(file.metadata().value(key), Some(value), "{name}: {key}");
        }
        let reference = recipe.reference();
        let prompts = reference.prompts();
        let models = [from.path(), &to].map(|path| OpenModel::open(path, &registry).unwrap());
        for (i, prompt) in prompts.iter().enumerate() {
            let [ours, theirs] = [&models[1], &models[0]].map(|m| logits_of(cpu(), m, prompt));
            assert!(ours == theirs, "{name}, prompt {i}: other bits");
            let off = reference.logits(i).distance(&ours);
            assert!(
                off < tolerance_of(&name),
                "{name}, prompt {i}: off by {off}"
            );
        }
        let off = reference.logits(2);
        let off = off.distance(&logits_of(candle(), &models[1], &prompts[2]));
        assert!(off < tolerance_of(&name), "{name}, candle: off by {off}");
    }
}

#[test]
fn each_type_is_written_and_stays_near() {
    let exact = logits(directory("mistral_swa8").path());
    for (name, format, tolerance) in [
        ("f16", BlockFormat::F16, 0.05),
        ("bf16", BlockFormat::BF16, 0.3),
        // 8 bits for 32 values: some five times the error of bf16; 4 bits: sixteen times that.
        ("q8_0", BlockFormat::Q8_0, 0.6),
        ("Q4_0", BlockFormat::Q4_0, 6.0),
    ] {
        let Converted { from: _dir, to } = Converted::new("mistral_swa8", name);
        let file = GgufFile::open(&to).unwrap();
        let stored = file.require("blk.1.ffn_down.weight").unwrap().format();
        assert_eq!(stored, format, "{name}");
        let norm = file.require("blk.1.ffn_norm.weight").unwrap().format();
        assert_eq!(norm, BlockFormat::F32, "{name}");
        let rounded = logits(&to);
        let off = rounded.iter().zip(&exact).map(|(a, b)| (a - b).abs());
        let off = off.fold(0.0, f32::max);
        assert!(off > 0.0 && off < tolerance, "{name}: off by {off}");
    }
}

#[test]
fn a_mix_has_its_number_and_quantizing_again_is_warned_of() {
    let dir = tempfile::tempdir().unwrap();
    let [first, second] = ["a.gguf", "b.gguf"].map(|n| dir.path().join(n).display().to_string());
    let stories = model().display().to_string();
    let (_, stderr) = output(&["convert", &stories, &first, "--type", "q4_k_m"]);
    assert_eq!(stderr, "", "f16 is no quantized format");
    let number = |path: &str| {
        let file = GgufFile::open(path).unwrap();
        file.metadata().get::<u32>("general.file_type").unwrap()
    };
    assert_eq!(number(&first), 15);
    output(&["convert", &stories, &first, "--type", "q8_0", "--force"]);
    let (_, stderr) = output(&["convert", &first, &second, "--type", "q4_0"]);
    let wanted = "tensors are quantized already (Q8_0) and are quantized again";
    assert!(
        stderr.starts_with("warning: ") && stderr.contains(wanted),
        "{stderr}"
    );
    for lossless in ["f32", "q8_0"] {
        let (_, stderr) = output(&["convert", &first, &second, "--type", lossless, "--force"]);
        assert_eq!(stderr, "", "{lossless}");
    }
}

/// Values that one or two bits can hold are the same afterwards.
#[test]
fn types_of_few_bits_keep_values_that_fit() {
    let dir = tempfile::tempdir().unwrap();
    let [from, to] = ["from.gguf", "to.gguf"].map(|name| dir.path().join(name));
    let name = "blk.8.ffn_up_extra.weight";
    for (file_type, format, n_levels) in [
        ("tq2_0", BlockFormat::TQ2_0, 3),
        ("tq1_0", BlockFormat::TQ1_0, 3),
        ("q2_0", BlockFormat::Q2_0, 3),
        ("q1_0", BlockFormat::Q1_0, 2),
    ] {
        // -0.25 and 0.25, or those and 0.
        let step = 0.5 / (n_levels - 1) as f32;
        let level = |i: usize| (i * i + i / 7) % n_levels;
        let values = (0..4 * 256).map(|i| step * level(i) as f32 - 0.25);
        let values: Vec<f32> = values.collect();
        let edited = edited(|writer| {
            let weight = Weight::from_f32(name, vec![4, 256], &values);
            writer.add(weight.unwrap()).unwrap();
        });
        std::fs::write(&from, edited).unwrap();
        let paths = [&from, &to].map(|path| path.display().to_string());
        output(&[
            "convert", &paths[0], &paths[1], "--type", file_type, "--force",
        ]);
        let weight = GgufFile::open(&to).unwrap().require(name).unwrap();
        assert_eq!(weight.format(), format);
        assert_eq!(weight.to_f32(), values, "{file_type}");
    }
}

/// A matrix of 256 columns takes the format of its place in a mix, and is close to the original. It
/// lies in a layer that the model does not compute: one in its layers would be refused.
#[test]
fn a_mix_stores_some_matrices_in_more_bits() {
    let dir = tempfile::tempdir().unwrap();
    let [from, to] = ["from.gguf", "to.gguf"].map(|name| dir.path().join(name));
    let values: Vec<f32> = (0..4 * 256).map(|i| (i as f32 * 0.37).sin()).collect();
    let names = ["ffn_down_extra", "ffn_up_extra"].map(|name| format!("blk.8.{name}.weight"));
    let edited = edited(|writer| {
        for name in &names {
            let weight = Weight::from_f32(name, vec![4, 256], &values);
            writer.add(weight.unwrap()).unwrap();
        }
    });
    std::fs::write(&from, edited).unwrap();
    let paths = [&from, &to].map(|path| path.display().to_string());
    output(&["convert", &paths[0], &paths[1], "--type", "q4_k_m"]);
    let file = GgufFile::open(&to).unwrap();
    let formats = [(BlockFormat::Q6_K, 0.05), (BlockFormat::Q4_K, 0.12)];
    for (name, (format, tolerance)) in names.iter().zip(formats) {
        let weight = file.require(name).unwrap();
        assert_eq!(weight.format(), format, "{name}");
        let off = weight
            .to_f32()
            .iter()
            .zip(&values)
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, f32::max);
        assert!(off < tolerance, "{name}: off by {off}");
    }
}

/// Both files have the same tensors, byte for byte.
fn assert_same_tensors(ours: &GgufFile, theirs: &dyn WeightSource) {
    let mut names = [ours.names(), theirs.names()];
    names.iter_mut().for_each(|names| names.sort());
    assert_eq!(names[0], names[1]);
    for name in &names[0] {
        let [ours, theirs] = [ours.require(name), theirs.require(name)].map(Result::unwrap);
        assert_eq!(ours.info(), theirs.info(), "{name}");
        assert!(**ours.bytes() == **theirs.bytes(), "{name}: other bytes");
    }
}

#[test]
fn as_stored_copies_a_file_byte_for_byte() {
    let dir = tempfile::tempdir().unwrap();
    let [from, to] = ["from.gguf", "to.gguf"].map(|n| dir.path().join(n).display().to_string());
    let stories = model().display().to_string();
    output(&["convert", &stories, &from, "--type", "q4_k_m"]);
    let (_, stderr) = output(&["convert", &from, &to, "--type", "as_stored"]);
    assert_eq!(stderr, "", "nothing is lost");
    let [from, to] = [from, to].map(|path| GgufFile::open(path).unwrap());
    assert_same_tensors(&to, &from);
    let entries = |file: &GgufFile| {
        let all = file.metadata().iter();
        all.map(|(key, value)| format!("{key}: {value:?}"))
            .collect::<std::collections::BTreeSet<_>>()
    };
    assert_eq!(entries(&to), entries(&from));
}

/// Packed matrices of a directory become the blocks that hold them; of 8-bit floats with scales,
/// no block does.
#[test]
fn as_stored_keeps_what_a_directory_has() {
    let mut registry = Registry::new();
    model_llama::register(&mut registry);
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("model.gguf").display().to_string();
    let convert = |name: &str| {
        let from = dir.path().join(name);
        std::fs::create_dir(&from).unwrap();
        QuantizedDirectory::named(name).write(&from);
        let from = from.display().to_string();
        ["convert", &from, &to, "--type", "as_stored", "--force"].map(str::to_owned)
    };
    for (name, format) in [
        ("gptq_4bit", BlockFormat::Q4_0),
        ("mxfp4", BlockFormat::MXFP4),
    ] {
        let args = convert(name);
        output(&args.each_ref().map(String::as_str));
        let from = OpenModel::open(&args[1], &registry).unwrap();
        let file = GgufFile::open(&to).unwrap();
        let query = file.require("blk.0.attn_q.weight").unwrap();
        assert_eq!(query.format(), format, "{name}");
        assert_same_tensors(&file, &*from.weights());
        assert_eq!(
            file.metadata().optional::<u32>("general.file_type"),
            Ok(None)
        );
    }
    let args = convert("fp8");
    let (code, stderr) = failure(&args.each_ref().map(String::as_str));
    assert_eq!(code, 1);
    let wanted = "tensor 'blk.0.attn_k.weight' is stored as floats of 8 bits with scales";
    assert!(
        stderr.contains(wanted) && stderr.contains("1 more") && stderr.contains("choose f32"),
        "{stderr}"
    );
    let file = GgufFile::open(&to).unwrap();
    let query = file.require("blk.0.attn_q.weight").unwrap();
    assert_eq!(query.format(), BlockFormat::MXFP4, "the file of before");
}

/// Vectors of half precision are widened, and matrices are not touched.
#[test]
fn as_stored_widens_vectors_alone() {
    let dir = tempfile::tempdir().unwrap();
    let [from, to] = ["from.gguf", "to.gguf"].map(|n| dir.path().join(n));
    let values: Vec<f32> = (0..64).map(|i| i as f32 - 31.5).collect();
    let names = ["ffn_up_extra", "extra_norm"].map(|name| format!("blk.8.{name}.weight"));
    let edited = edited(|writer| {
        for (name, shape) in names.iter().zip([vec![1, 64], vec![64]]) {
            let bytes = kv_block::quantize(BlockFormat::BF16, &values).unwrap();
            let weight = Weight::new(name.as_str(), shape, BlockFormat::BF16, bytes.into());
            writer.add(weight.unwrap()).unwrap();
        }
    });
    std::fs::write(&from, edited).unwrap();
    let paths = [&from, &to].map(|path| path.display().to_string());
    output(&["convert", &paths[0], &paths[1], "--type", "as_stored"]);
    let file = GgufFile::open(&to).unwrap();
    let stored = names.map(|name| {
        let weight = file.require(&name).unwrap();
        assert_eq!(weight.to_f32(), values);
        weight.format()
    });
    assert_eq!(stored, [BlockFormat::BF16, BlockFormat::F32]);
}

#[test]
fn a_type_or_a_place_that_cannot_be_is_an_error() {
    let directory = directory("mistral_swa8");
    let from = directory.path().display().to_string();
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
    let text = fixture("stories/stories.txt");
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
