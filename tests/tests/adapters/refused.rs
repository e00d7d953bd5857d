//! Adapters that do not fit: each is an error that names what is wrong, and nothing is loaded.

use std::fs;
use std::path::Path;

use model_core::adapters::Adapter;
use model_core::gguf::{GgufWriter, Value};
use model_core::model_file::OpenModel;
use serde_json::{Value as Json, json};

use super::{Files, adapter};

const MODEL: &str = "llama_gqa_untied";

fn refusal(files: &Files, path: &Path, model: &OpenModel) -> String {
    let error = Adapter::open(path, model, &files.registry).unwrap_err();
    let mut text = error.to_string();
    let mut source = std::error::Error::source(&error);
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

/// The adapter of this name with other settings.
fn with_settings(files: &Files, change: Json) -> std::path::PathBuf {
    let path = files.path("changed");
    adapter("all_linear")
        .with_config(|config| config.extend(change.as_object().unwrap().clone()))
        .expand(&path);
    path
}

#[test]
fn settings_that_are_not_computed_are_named() {
    let files = Files::new();
    let model = files.open(&files.model(MODEL));
    for (change, wanted) in [
        (json!({"use_dora": true}), "DoRA"),
        (json!({"peft_type": "LOHA"}), "LOHA"),
        (json!({"peft_type": "IA3"}), "IA3"),
        (json!({"bias": "all"}), "bias = all"),
        (json!({"modules_to_save": ["lm_head"]}), "modules_to_save"),
        (json!({"lora_bias": true}), "lora_bias"),
        (
            json!({"init_lora_weights": "pissa_niter_4"}),
            "pissa_niter_4",
        ),
        (
            json!({"target_parameters": ["experts"]}),
            "target_parameters",
        ),
        (json!({"r": 5}), "has rank 4, where the settings say 5"),
        (json!({"r": "four"}), "'r'"),
        (
            json!({"rank_pattern": {"q_proj": 2}}),
            "has rank 4, where the settings say 2",
        ),
        (json!({"rank_pattern": {"(": 2}}), "'rank_pattern'"),
    ] {
        let path = with_settings(&files, change.clone());
        let text = refusal(&files, &path, &model);
        assert!(text.contains(wanted), "{change}: {text}");
        assert!(text.contains("changed"), "{change}: {text}");
    }
}

#[test]
fn adapters_of_other_models_are_refused_with_shapes() {
    let files = Files::new();
    let qwen = files.open(&files.model("qwen2"));
    let gpt = files.open(&files.model("gpt2"));
    let text = refusal(&files, &files.adapter("all_linear"), &gpt);
    assert!(text.contains("is no matrix of this model (gpt2)"), "{text}");
    let other = files.open(&files.model("exaone4"));
    let fits_names = Adapter::open(&files.adapter("biased"), &qwen, &files.registry);
    assert!(fits_names.is_ok());
    if let Err(error) = Adapter::open(&files.path("biased"), &other, &files.registry) {
        assert!(error.to_string().contains("another model's"), "{error}");
    }
}

/// The adapter as GGUF, with a change.
fn gguf(files: &Files, change: impl FnOnce(&mut GgufFile)) -> std::path::PathBuf {
    let mut file = GgufFile {
        settings: vec![
            ("general.type", "adapter".into()),
            ("general.architecture", "llama".into()),
            ("adapter.type", "lora".into()),
            ("adapter.lora.alpha", Value::F32(8.0)),
        ],
        tensors: vec![
            ("blk.0.attn_output.weight.lora_a", [2, 64], 0.1),
            ("blk.0.attn_output.weight.lora_b", [64, 2], 0.1),
        ],
    };
    change(&mut file);
    let mut writer = GgufWriter::new();
    for (key, value) in file.settings {
        writer.set(key, value);
    }
    for (name, shape, value) in file.tensors {
        let values = vec![value; shape[0] * shape[1]];
        let weight = kv_graph::weights::Weight::from_f32(name, shape.to_vec(), &values).unwrap();
        writer.add(weight).unwrap();
    }
    let path = files.path("adapter.gguf");
    fs::write(&path, writer.to_bytes().unwrap()).unwrap();
    path
}

struct GgufFile {
    settings: Vec<(&'static str, Value)>,
    tensors: Vec<(&'static str, [usize; 2], f32)>,
}

#[test]
fn gguf_files_that_do_not_fit_are_refused() {
    let files = Files::new();
    let model = files.open(&files.model(MODEL));
    let good = gguf(&files, |_| ());
    let opened = Adapter::open(&good, &model, &files.registry).unwrap();
    assert_eq!(opened.name(), "adapter");
    let pair = &opened.pairs()["blk.0.attn_output.weight"];
    assert_eq!((pair.rank(), pair.scale), (2, 4.0));
    type Change = fn(&mut GgufFile);
    let cases: [(Change, &str); 8] = [
        (
            |file| file.settings[0].1 = "model".into(),
            "no LoRA adapter: 'general.type' or 'adapter.type' is 'model'",
        ),
        (|file| file.settings[2].1 = "dora".into(), "is 'dora'"),
        (
            |file| file.settings[1].1 = "qwen2".into(),
            "for qwen2 models, and the model is llama",
        ),
        (
            |file| file.tensors.truncate(1),
            "'blk.0.attn_output.weight' has no matrix lora_b",
        ),
        (
            |file| file.tensors[0].1 = [2, 32],
            "is [64, 64] in the model, and the adapter's matrices are [2, 32] and [64, 2]",
        ),
        (
            |file| file.tensors[1].2 = f32::NAN,
            "a value of 'blk.0.attn_output.weight' is NaN",
        ),
        (
            |file| file.settings[3].1 = Value::F32(f32::INFINITY),
            "the scale of 'blk.0.attn_output.weight' is inf",
        ),
        (
            |file| file.tensors[0].0 = "blk.0.attn_norm.weight",
            "tensor 'blk.0.attn_norm.weight' is no matrix of a pair",
        ),
    ];
    for (change, wanted) in cases {
        let text = refusal(&files, &gguf(&files, change), &model);
        assert!(text.contains(wanted), "{wanted}: {text}");
        assert!(text.contains("adapter.gguf"), "{text}");
    }
    let unknown = gguf(&files, |file| {
        file.tensors[0].0 = "blk.9.attn_output.weight.lora_a";
        file.tensors[1].0 = "blk.9.attn_output.weight.lora_b";
    });
    let text = refusal(&files, &unknown, &model);
    assert!(
        text.contains("'blk.9.attn_output.weight' is no matrix"),
        "{text}"
    );
    // Cut anywhere.
    let bytes = fs::read(gguf(&files, |_| ())).unwrap();
    for n in [0, 3, 24, 100, bytes.len() / 2, bytes.len() - 1] {
        fs::write(&good, &bytes[..n]).unwrap();
        assert!(
            Adapter::open(&good, &model, &files.registry).is_err(),
            "{n} bytes"
        );
    }
}

#[test]
fn a_directory_that_is_cut_short_is_refused() {
    let files = Files::new();
    let model = files.open(&files.model(MODEL));
    let path = files.adapter("all_linear");
    let tensors = path.join("adapter_model.safetensors");
    let bytes = fs::read(&tensors).unwrap();
    fs::write(&tensors, &bytes[..bytes.len() - 1]).unwrap();
    let text = refusal(&files, &path, &model);
    assert!(text.contains("no sound safetensors file"), "{text}");
    fs::remove_file(&tensors).unwrap();
    assert!(refusal(&files, &path, &model).contains("adapter_model.safetensors"));
    fs::remove_file(path.join("adapter_config.json")).unwrap();
    assert!(refusal(&files, &path, &model).contains("adapter_config.json"));
}
