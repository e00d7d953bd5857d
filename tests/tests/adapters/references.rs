//! Logits with adapters against those of the PEFT library.

use cellar_engine::EngineConfig;
use kv_backend::Backend;
use model_core::adapters::{AdapterOptions, AdapterSpec};
use model_core::model_file::OpenModel;
use model_tests::{candle, cpu, distance};

use super::{Files, adapter, engine, logits};

/// All adapters, each with the model that it is for.
pub(super) const ALL: [(&str, &str); 6] = [
    ("all_linear", "llama_gqa_untied"),
    ("patterns", "llama_gqa_untied"),
    ("ends", "llama_gqa_untied"),
    ("conv1d", "gpt2"),
    ("fused", "phi3"),
    ("biased", "qwen2"),
];

/// Largest difference of a logit.
const TOLERANCE: f32 = 2e-4;

fn check<B: Backend>(backend: B, name: &str, file: &OpenModel) {
    let reference = adapter(name).reference();
    let ids = reference.ids("ids_0").unwrap();
    let mut engine = engine(backend, file, EngineConfig::default());
    let got = logits(&mut engine, &ids);
    let n_vocab = got.len() / ids.len();
    let wanted = reference.logits(0);
    let rows = wanted.positions.iter();
    let kept: Vec<f32> = rows
        .flat_map(|row| got[row * n_vocab..(row + 1) * n_vocab].to_vec())
        .collect();
    let off = distance(&kept, &wanted.values);
    assert!(off < TOLERANCE, "{name}: off by {off}");
}

#[test]
fn logits_are_those_of_peft_on_both_backends() {
    for (name, model) in ALL {
        let files = Files::new();
        let file = files.open_with(&files.model(model), &[(name, 1.0)]);
        check(cpu(), name, &file);
        check(candle(), name, &file);
    }
}

/// The names of modules are those of a class, and rows of queries and keys lie otherwise.
#[test]
fn directories_of_peft_fit_gguf_files_too() {
    for (name, model) in ALL {
        let files = Files::new();
        let file = files.open_with(&files.gguf(model), &[(name, 1.0)]);
        check(cpu(), name, &file);
    }
}

#[test]
fn merged_weights_give_the_same_logits() {
    for (name, model) in ALL {
        let files = Files::new();
        check(cpu(), name, &files.merged(&files.model(model), name));
    }
}

/// Half of one adapter and a quarter of another, taken from it, are what both merged are.
#[test]
fn several_adapters_are_added_up_by_their_scales() {
    let files = Files::new();
    let scales = [("all_linear", 0.5), ("patterns", -0.25)];
    let model = files.model("llama_gqa_untied");
    let file = files.open_with(&model, &scales);
    let merged = files.open(&model);
    let specs = scales.map(|(name, scale)| AdapterSpec {
        path: files.path(name),
        name: None,
        scale,
    });
    let options = AdapterOptions {
        adapters: specs.to_vec(),
        ..AdapterOptions::default()
    };
    let adapters = options.open(&merged, &files.registry).unwrap().unwrap();
    let merged = merged.merged_with(adapters);
    let ids = adapter("all_linear").reference().ids("ids_0").unwrap();
    let got = logits(&mut engine(cpu(), &file, EngineConfig::default()), &ids);
    let wanted = logits(&mut engine(cpu(), &merged, EngineConfig::default()), &ids);
    let off = distance(&got, &wanted);
    assert!(off < TOLERANCE, "off by {off}");
    let bare = files.open(&model);
    let bare = logits(&mut engine(cpu(), &bare, EngineConfig::default()), &ids);
    assert!(distance(&got, &bare) > 0.1, "adapters change the logits");
}
