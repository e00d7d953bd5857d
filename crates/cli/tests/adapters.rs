//! Adapters, control vectors and settings of the command line.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::path::{Path, PathBuf};

use crate::support::{directory, failure, json, model, output};
use kv_graph::weights::{Weight, WeightSource};
use model_core::architecture::Registry;
use model_core::gguf::{GgufFile, GgufWriter};
use model_core::model_file::OpenModel;
use model_tests::{Recipe, distance, fixture, write_adapter};

struct Case {
    folder: tempfile::TempDir,
}

impl Case {
    fn new() -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
        }
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    /// An adapter of the model in the repository.
    fn adapter(&self, name: &str, seed: u64) -> String {
        let path = self.path(name);
        let mut registry = Registry::new();
        model_llama::register(&mut registry);
        let file = OpenModel::open(model(), &registry).unwrap();
        write_adapter(Path::new(&path), "llama", &*file.weights(), seed);
        path
    }

    fn text(&self, args: &[&str]) -> String {
        let model = model().display().to_string();
        let mut all = vec![
            "run",
            "-m",
            &model,
            "Once upon",
            "--raw",
            "--temp",
            "0",
            "-n",
            "12",
        ];
        all.extend(args);
        output(&all).0
    }
}

/// Logits of a few tokens.
fn logits(model: &Path, args: &[&str]) -> Vec<f32> {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("logits").display().to_string();
    let model = model.display().to_string();
    let ids = "1,5,9,200,31,77,4,18,250,99,12,3";
    let mut all = vec!["logits", "-m", &model, "--tokens", ids, "--out", &out];
    all.extend(args);
    output(&all);
    let bytes = std::fs::read(&out).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let view = file.tensor("logits").unwrap();
    let words = view.data().as_chunks::<4>().0.iter().copied();
    words.map(f32::from_le_bytes).collect()
}

#[test]
fn a_text_is_written_with_adapters_and_scales() {
    let case = Case::new();
    let (one, other) = (case.adapter("one.gguf", 1), case.adapter("other.gguf", 2));
    let base = case.text(&[]);
    let with_one = case.text(&["--lora", &one]);
    assert_ne!(with_one, base);
    let scaled = format!("{one}=0");
    assert_eq!(case.text(&["--lora", &scaled]), base);
    let both = format!("{one}=1.0");
    let both = case.text(&["--lora", &both, "--lora", &other]);
    assert!(both != with_one && both != base);
    let as_llama = format!("{one}:1,{other}:1");
    assert_eq!(case.text(&["--lora-scaled", &as_llama]), both);
}

#[test]
fn a_merged_file_is_the_model_with_its_adapter() {
    let case = Case::new();
    let from = directory("llama_gqa_untied");
    let adapter = PathBuf::from(case.path("adapter"));
    Recipe::adapter(&fixture("adapters").join("all_linear")).expand(&adapter);
    let (adapter, merged) = (adapter.display().to_string(), case.path("merged.gguf"));
    let source = from.path().display().to_string();
    let convert = [
        "convert", &source, &merged, "--type", "f32", "--lora", &adapter,
    ];
    output(&convert);
    let wanted = logits(from.path(), &["--lora", &adapter]);
    let off = distance(&logits(Path::new(&merged), &[]), &wanted);
    assert!(off < 2e-4, "off by {off}");
    assert!(distance(&wanted, &logits(from.path(), &[])) > 0.1);
}

/// Matrices that the adapter changes keep their type, and all others their bytes.
#[test]
fn a_merged_copy_keeps_the_types_of_its_tensors() {
    let case = Case::new();
    let from = directory("llama_gqa_untied");
    let adapter = PathBuf::from(case.path("adapter"));
    Recipe::adapter(&fixture("adapters").join("patterns")).expand(&adapter);
    let [source, adapter] = [from.path(), &adapter].map(|path| path.display().to_string());
    let [stored, merged] = ["stored.gguf", "merged.gguf"].map(|name| case.path(name));
    output(&["convert", &source, &stored, "--type", "q8_0"]);
    let as_stored = ["convert", &stored, &merged, "--type", "as_stored"];
    let (_, stderr) = output(&[&as_stored[..], &["--lora", &adapter]].concat());
    let [before, after] = [&stored, &merged].map(|path| GgufFile::open(path).unwrap());
    let mut n_changed = 0;
    for name in before.names() {
        let [before, after] = [&before, &after].map(|file| file.require(&name).unwrap());
        assert_eq!(before.info(), after.info(), "{name}");
        n_changed += usize::from(**before.bytes() != **after.bytes());
    }
    assert!(n_changed > 0 && n_changed < before.names().len());
    let wanted = format!("{n_changed} tensors that adapters change are quantized again");
    assert!(stderr.contains(&wanted), "{stderr}");
    let wanted = logits(Path::new(&stored), &["--lora", &adapter]);
    let off = distance(&logits(Path::new(&merged), &[]), &wanted);
    assert!(off < 0.6, "off by {off}");
}

#[test]
fn the_plan_counts_adapters() {
    let case = Case::new();
    let adapter = case.adapter("one.gguf", 1);
    let model = model().display().to_string();
    let total = |args: &[&str]| {
        let mut all = vec!["plan", &model, "--json"];
        all.extend(args);
        json(&all)["weights"].as_u64().unwrap()
    };
    let added = total(&["--lora", &adapter]) - total(&[]);
    let n_bytes = std::fs::metadata(&adapter).unwrap().len();
    assert!(added > 0 && added < 2 * n_bytes, "{added} of {n_bytes}");
}

/// A control vector of a model with this width: `direction.N` for layers from 1 on.
fn control_vector(path: &Path, dim: usize, n_layers: usize) {
    let mut writer = GgufWriter::new();
    writer.set("general.architecture", "controlvector");
    for layer in 1..n_layers {
        let values: Vec<f32> = (0..dim).map(|at| (at % 3) as f32 - 1.0).collect();
        let weight = Weight::from_f32(format!("direction.{layer}"), vec![dim], &values);
        writer.add(weight.unwrap()).unwrap();
    }
    std::fs::write(path, writer.to_bytes().unwrap()).unwrap();
}

#[test]
fn control_vectors_move_what_leaves_layers() {
    let case = Case::new();
    let from = directory("llama_gqa_untied");
    let path = case.path("vector.gguf");
    control_vector(Path::new(&path), 64, 3);
    let bare = logits(from.path(), &[]);
    let steered = logits(from.path(), &["--control-vector", &path]);
    assert!(distance(&steered, &bare) > 0.1);
    let scaled = |scale: &str, range: &[&str]| {
        let file = format!("{path}:{scale}");
        let mut args = vec!["--control-vector-scaled", &file];
        if let [first, last] = range {
            args.extend(["--control-vector-layer-range", first, last]);
        }
        logits(from.path(), &args)
    };
    assert_eq!(scaled("1", &[]), steered);
    assert_eq!(scaled("0", &[]), bare);
    assert_eq!(scaled("1", &["1", "2"]), steered);
    assert!(distance(&scaled("1", &["2", "2"]), &steered) > 0.01);
    let source = from.path().display().to_string();
    let refused = |args: &[&str]| {
        let mut all = vec!["logits", "-m", &source, "--tokens", "1,2", "--out", "-"];
        all.extend(args);
        failure(&all).1
    };
    let range = [
        "--control-vector",
        &path,
        "--control-vector-layer-range",
        "1",
        "9",
    ];
    assert!(refused(&range).contains("layers 1 to 9 are not in the model"));
    control_vector(Path::new(&path), 32, 3);
    let narrow = refused(&["--control-vector", &path]);
    assert!(
        narrow.contains("'direction.1' is [64] in the model"),
        "{narrow}"
    );
}

#[test]
fn adapters_that_do_not_fit_are_refused() {
    let case = Case::new();
    let adapter = case.adapter("one.gguf", 1);
    let from = directory("qwen2");
    let source = from.path().display().to_string();
    let run = ["run", "-m", &source, "Hi", "--raw", "--lora", &adapter];
    let (code, text) = failure(&run);
    assert_eq!(code, 1);
    assert!(text.contains("this adapter is for llama models"), "{text}");
    let missing = case.path("missing.gguf");
    let (code, text) = failure(&["run", "Hi you", "--lora", &missing]);
    assert_eq!(code, 1);
    assert!(text.contains("missing.gguf"), "{text}");
    let (code, text) = failure(&["run", "Hi you", "--lora", "a.gguf=nan"]);
    assert_eq!(code, 2);
    assert!(text.contains("finite"), "{text}");
}

#[test]
fn settings_of_the_file_are_overridden() {
    let from = directory("llama_gqa_untied");
    let bare = logits(from.path(), &[]);
    let other = |args: &[&str]| logits(from.path(), args);
    let linear = other(&["--rope-freq-scale", "0.5"]);
    assert!(distance(&linear, &bare) > 1e-3);
    assert_eq!(other(&["--rope-scale", "2"]), linear);
    assert_eq!(
        other(&["--rope-scaling", "linear", "--rope-scale", "2"]),
        linear
    );
    assert_eq!(other(&["--rope-freq-base", "10000"]), bare);
    let base = other(&["--rope-freq-base", "500000"]);
    assert!(distance(&base, &bare) > 1e-3);
    let key = "llama.rope.freq_base=float:500000";
    assert_eq!(other(&["--override-kv", key]), base);
    let yarn = [
        "--rope-scaling",
        "yarn",
        "--rope-scale",
        "4",
        "--yarn-orig-ctx",
        "128",
    ];
    let yarn = other(&yarn);
    assert!(distance(&yarn, &bare) > 1e-3 && yarn != linear);
    let recipe = directory("llama_rope_linear");
    let none = logits(recipe.path(), &["--rope-scaling", "none"]);
    assert_ne!(none, logits(recipe.path(), &[]));
    let source = from.path().display().to_string();
    let wrong = [
        "logits",
        "-m",
        &source,
        "--tokens",
        "1",
        "--out",
        "-",
        "--override-kv",
    ];
    let (code, text) = failure(&[&wrong[..], &["llama.rope.freq_base=float:0"]].concat());
    assert_eq!(code, 1);
    assert!(text.contains("llama.rope.freq_base"), "{text}");
    let (code, text) = failure(&[&wrong[..], &["x=u8:1"]].concat());
    assert_eq!(code, 2);
    assert!(text.contains("KEY=TYPE:VALUE"), "{text}");
}

#[test]
fn the_context_is_what_fits() {
    let model = model().display().to_string();
    let args = [
        "run",
        "-m",
        &model,
        "Once upon",
        "--raw",
        "-n",
        "1",
        "--json",
        "-c",
        "auto",
    ];
    let report = json(&args);
    // All of the trained length fits.
    assert_eq!(report["n_ctx"], 512);
}
