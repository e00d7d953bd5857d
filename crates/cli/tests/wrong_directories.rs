//! Model directories that are not as they should be: the error names file, key or tensor and what
//! was expected. And some that are: in several files, in 16 bits, with a tokenizer.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::support::{cellar, directory, output};
use kv_graph::weights::WeightSource;
use model_core::architecture::Registry;
use model_core::directory::HfDirectory;
use model_core::model_file::ModelFile;
use model_core::tokenizer::EncodeOptions;
use model_tests::{Recipe, fixture};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};

fn registry() -> Registry {
    let mut registry = Registry::new();
    model_llama::register(&mut registry);
    model_mamba::register(&mut registry);
    registry
}

/// A sound directory that may be changed.
fn copy() -> tempfile::TempDir {
    directory("mistral_swa8")
}

fn edit_json(path: &Path, edit: impl FnOnce(&mut Value)) {
    let mut json: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    edit(&mut json);
    fs::write(path, serde_json::to_vec(&json).unwrap()).unwrap();
}

type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

fn tensors(path: &Path) -> Tensors {
    let bytes = fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let read = |(name, view): (String, TensorView<'_>)| {
        let words = view.data().as_chunks::<4>().0.iter();
        let values = words.map(|&word| f32::from_le_bytes(word)).collect();
        (name, (view.shape().to_vec(), values))
    };
    file.tensors().into_iter().map(read).collect()
}

fn write(path: &Path, tensors: &Tensors, dtype: Dtype) {
    let bytes: Vec<(&String, &Vec<usize>, Vec<u8>)> = tensors
        .iter()
        .map(|(name, (shape, values))| {
            let bytes = match dtype {
                Dtype::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
                Dtype::BF16 => {
                    let halves = values.iter().map(|v| v.to_bits() >> 16);
                    halves.flat_map(|v| (v as u16).to_le_bytes()).collect()
                }
                other => panic!("{other:?}"),
            };
            (name, shape, bytes)
        })
        .collect();
    let views = bytes.iter().map(|(name, shape, bytes)| {
        (
            name,
            TensorView::new(dtype, (*shape).clone(), bytes).unwrap(),
        )
    });
    fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// What is said of the directory whose config is changed.
fn refused(edit: impl FnOnce(&mut Value)) -> String {
    let copy = copy();
    edit_json(&copy.path().join("config.json"), edit);
    let error = HfDirectory::open(copy.path(), &registry()).unwrap_err();
    error
        .to_string()
        .replace(&copy.path().display().to_string(), "DIR")
}

#[test]
fn a_wrong_config_is_named_by_file_key_and_what_is_wanted() {
    let cases: [(&str, Value, &str); 11] = [
        (
            "hidden_size",
            Value::Null,
            "'DIR/config.json': 'hidden_size' is missing (a whole number of at least 1 wanted)",
        ),
        (
            "num_hidden_layers",
            json!(-1),
            "'DIR/config.json': 'num_hidden_layers' is -1, not a whole number of at least 1",
        ),
        (
            "num_key_value_heads",
            json!(3),
            "'DIR/config.json': 'num_key_value_heads' is 3, not a divisor of 'num_attention_heads', which is 4",
        ),
        (
            "sliding_window",
            json!(0),
            "'DIR/config.json': 'sliding_window' is 0, not a whole number of at least 1",
        ),
        (
            "hidden_act",
            json!("relu2"),
            "'DIR/config.json': 'hidden_act' is \"relu2\", not one of: silu, swish",
        ),
        (
            "rms_norm_eps",
            json!("small"),
            "'DIR/config.json': 'rms_norm_eps' is \"small\", not a number",
        ),
        (
            "rope_parameters",
            json!({"rope_type": "spiral"}),
            "'DIR/config.json': 'rope_parameters.rope_type' is \"spiral\", not one of: default, linear, llama3, yarn, longrope",
        ),
        (
            "architectures",
            json!(["ParrotForCausalLM"]),
            "'DIR/config.json': class 'ParrotForCausalLM' is not supported; known are 1",
        ),
        (
            "architectures",
            Value::Null,
            "'DIR/config.json': 'architectures' is missing",
        ),
        (
            "vocab_size",
            json!(500),
            "tensor 'model.embed_tokens.weight': shape [512, 64], but 'vocab_size' in 'DIR/config.json' is 500",
        ),
        (
            "intermediate_size",
            json!(96),
            "'DIR': tensor 'model.layers.0.mlp.gate_proj.weight (blk.0.ffn_gate.weight)' has shape [128, 64], but the metadata asks for [96, 64]",
        ),
    ];
    for (key, value, wanted) in cases {
        let error = refused(|config| config[key] = value.clone());
        assert!(error.starts_with(wanted), "{key} = {value}: {error}");
    }
    let error = refused(|config| {
        config.as_object_mut().unwrap().remove("head_dim");
        config["num_attention_heads"] = json!(6);
    });
    let wanted = "'DIR/config.json': 'num_attention_heads' is 6, not a divisor of 'hidden_size', which is 64";
    assert_eq!(error, wanted);
}

#[test]
fn a_class_that_is_declined_is_declined_with_the_reason() {
    let copy = copy();
    edit_json(&copy.path().join("config.json"), |config| {
        config["architectures"] = json!(["ParrotForCausalLM"]);
    });
    let mut registry = registry();
    registry.decline_hf("ParrotForCausalLM", "it repeats itself");
    let error = HfDirectory::open(copy.path(), &registry).unwrap_err();
    let error = error.to_string();
    let wanted = "class 'ParrotForCausalLM' is not supported: it repeats itself";
    assert!(error.ends_with(wanted), "{error}");
}

#[test]
fn tensors_of_rwkv_are_named_by_both_names() {
    let said = |change: &dyn Fn(&mut Tensors)| {
        let dir = tempfile::tempdir().unwrap();
        Recipe::named("rwkv4").expand(dir.path());
        let mut all = tensors(&dir.path().join("model.safetensors"));
        change(&mut all);
        write(&dir.path().join("model.safetensors"), &all, Dtype::F32);
        let error = HfDirectory::open(dir.path(), &registry()).unwrap_err();
        let path = dir.path().display().to_string();
        error.to_string().replace(&path, "DIR")
    };
    let decay = "rwkv.blocks.1.attention.time_decay";
    assert_eq!(
        said(&|all| drop(all.remove(decay))),
        format!(
            "'DIR': tensor '{decay} (blk.1.time_mix_decay.weight)' is missing; the model needs it as [64]"
        )
    );
    let short = || (vec![63], vec![0.0; 63]);
    assert_eq!(
        said(&|all| drop(all.insert(decay.to_owned(), short()))),
        format!(
            "'DIR': tensor '{decay} (blk.1.time_mix_decay.weight)' has shape [63], but the metadata asks \
             for [64]"
        )
    );
}

/// Keys are read before tensors, so the config is enough.
#[test]
fn keys_that_one_class_has_are_named_too() {
    for (name, key, value, wanted) in [
        (
            "gemma2_swa8",
            "sliding_window",
            Value::Null,
            "'sliding_window' is missing (a whole number of at least 1 wanted)",
        ),
        (
            "falcon_h1",
            "ssm_multipliers",
            json!([1, 2, 3, 4]),
            "'ssm_multipliers' is [1,2,3,4], not a list of 5 numbers",
        ),
        (
            "rwkv4",
            "layer_norm_epsilon",
            Value::Null,
            "'layer_norm_epsilon' is missing (a number wanted)",
        ),
        (
            "rwkv4",
            "attention_hidden_size",
            json!("wide"),
            "'attention_hidden_size' is \"wide\", not a whole number of at least 1",
        ),
        (
            "smollm3",
            "no_rope_layers",
            json!([1, 1, 1, 1]),
            "'no_rope_layers' is [1,1,1,1], not a list of 5: 1 for layers that rotate, 0 for others",
        ),
        (
            "qwen3_moe",
            "norm_topk_prob",
            Value::Null,
            "'norm_topk_prob' is absent, not true",
        ),
        (
            "starcoder2",
            "hidden_act",
            json!("silu"),
            "'hidden_act' is \"silu\", not one of: gelu_pytorch_tanh",
        ),
        (
            "granite",
            "logits_scaling",
            Value::Null,
            "'logits_scaling' is missing (a number wanted)",
        ),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join("config.json");
        let whole = fixture("recipes").join(name).join("config.json");
        fs::copy(whole, &config).unwrap();
        edit_json(&config, |config| config[key] = value);
        let error = HfDirectory::open(dir.path(), &registry()).unwrap_err();
        let wanted = format!("'{}': {wanted}", config.display());
        assert_eq!(error.to_string(), wanted, "{name}");
    }
}

#[test]
fn wrong_tensors_are_named() {
    let open = |change: &dyn Fn(&mut Tensors)| {
        let copy = copy();
        let path = copy.path().join("model.safetensors");
        let mut all = tensors(&path);
        change(&mut all);
        write(&path, &all, Dtype::F32);
        let error = HfDirectory::open(copy.path(), &registry()).unwrap_err();
        error
            .to_string()
            .replace(&copy.path().display().to_string(), "DIR")
    };
    let error = open(&|all| drop(all.remove("model.layers.1.self_attn.q_proj.weight")));
    assert_eq!(
        error,
        "'DIR': tensor 'model.layers.1.self_attn.q_proj.weight (blk.1.attn_q.weight)' is missing; the \
         model needs it as [64, 64]"
    );
    let error = open(&|all| drop(all.remove("lm_head.weight")));
    assert_eq!(
        error,
        "tensor 'lm_head.weight': it is missing, but 'tie_word_embeddings' in 'DIR/config.json' is false"
    );
    let bias = "model.layers.0.mlp.up_proj.bias";
    let error = open(&|all| drop(all.insert(bias.to_owned(), (vec![2], vec![0.0; 2]))));
    assert_eq!(
        error,
        "tensor 'model.layers.0.mlp.up_proj.bias': a MistralForCausalLM has no such tensor"
    );
    let layer = "model.layers.7.mlp.up_proj.weight";
    let error = open(&|all| drop(all.insert(layer.to_owned(), (vec![2], vec![0.0; 2]))));
    assert_eq!(
        error,
        "tensor 'model.layers.7.mlp.up_proj.weight (blk.7.ffn_up.weight)': a model of this config does \
         not use it (llama)"
    );
}

#[test]
fn broken_files_are_named() {
    let said = |change: &dyn Fn(&Path)| {
        let copy = copy();
        change(copy.path());
        let error = HfDirectory::open(copy.path(), &registry()).unwrap_err();
        error
            .to_string()
            .replace(&copy.path().display().to_string(), "DIR")
    };
    let error = said(&|dir| fs::remove_file(dir.join("model.safetensors")).unwrap());
    assert_eq!(error, "cannot read 'DIR/model.safetensors'");
    let error = said(&|dir| fs::write(dir.join("model.safetensors"), b"").unwrap());
    assert_eq!(error, "'DIR/model.safetensors': it is empty");
    let error = said(&|dir| fs::write(dir.join("model.safetensors"), [9; 90]).unwrap());
    assert!(
        error.starts_with("'DIR/model.safetensors': no sound safetensors file"),
        "{error}"
    );
    let error = said(&|dir| fs::write(dir.join("config.json"), b"{]").unwrap());
    assert!(
        error.starts_with("'DIR/config.json': no JSON object: "),
        "{error}"
    );
    let index = "model.safetensors.index.json";
    let error = said(&|dir| {
        let map = json!({"weight_map": {"a": "../../etc/passwd"}});
        fs::write(dir.join(index), map.to_string()).unwrap();
    });
    assert!(
        error.contains("'weight_map.a' is \"../../etc/passwd\""),
        "{error}"
    );
    let error = said(&|dir| {
        let map = json!({"weight_map": {"a": "model.safetensors"}});
        fs::write(dir.join(index), map.to_string()).unwrap();
    });
    assert!(
        error.starts_with("tensor 'a': 'DIR/model.safetensors.index.json' says"),
        "{error}"
    );
}

#[test]
fn several_files_in_16_bits_are_one_model() {
    let copy = copy();
    let whole = copy.path().join("model.safetensors");
    let all = tensors(&whole);
    fs::remove_file(&whole).unwrap();
    let mut map = serde_json::Map::new();
    for part in 0..2 {
        let file = format!("model-{}-of-2.safetensors", part + 1);
        let own: Tensors = all
            .iter()
            .enumerate()
            .filter(|(i, _)| i % 2 == part)
            .map(|(_, (name, tensor))| (name.clone(), tensor.clone()))
            .collect();
        map.extend(own.keys().map(|name| (name.clone(), json!(file))));
        write(&copy.path().join(&file), &own, Dtype::BF16);
    }
    let index = json!({"metadata": {}, "weight_map": map});
    fs::write(
        copy.path().join("model.safetensors.index.json"),
        index.to_string(),
    )
    .unwrap();
    let sound = directory("mistral_swa8");
    let [sharded, single] =
        [&copy, &sound].map(|dir| HfDirectory::open(dir.path(), &registry()).unwrap());
    assert_eq!(sharded.weights().names(), single.weights().names());
    for name in single.weights().names() {
        let [a, b] = [&sharded, &single].map(|dir| dir.weights().require(&name).unwrap());
        assert_eq!(a.shape(), b.shape());
        assert_eq!(a.format(), kv_block::BlockFormat::BF16);
        for (a, b) in a.to_f32().into_iter().zip(b.to_f32()) {
            assert_eq!(a, f32::from_bits(b.to_bits() >> 16 << 16), "{name}");
        }
    }
    // And the program runs it.
    let dir = copy.path().display().to_string();
    let (text, _) = output(&["run", "-m", &dir, "Once", "--temp", "0", "-n", "4"]);
    assert!(text.starts_with("Once"), "{text}");
}

/// A config that ties an output matrix of its own to the embedding is wrong: the matrix is used.
#[test]
fn a_tied_output_matrix_with_other_values_is_used() {
    let copy = copy();
    let config = copy.path().join("config.json");
    let has_output = || {
        let file = HfDirectory::open(copy.path(), &registry()).unwrap();
        file.weights().describe("output.weight").is_ok()
    };
    edit_json(&config, |config| {
        config["tie_word_embeddings"] = Value::Bool(true)
    });
    assert!(has_output());
    let path = copy.path().join("model.safetensors");
    let mut all = tensors(&path);
    let embedding = all["model.embed_tokens.weight"].clone();
    all.insert("lm_head.weight".to_owned(), embedding);
    write(&path, &all, Dtype::F32);
    assert!(!has_output());
}

/// For this class `null` is another computation than an absent key.
#[test]
fn weights_of_dbrx_that_are_not_normalized_are_refused() {
    let copy = directory("dbrx");
    let key = "moe_normalize_expert_weights";
    let config = copy.path().join("config.json");
    edit_json(&config, |config| config["ffn_config"][key] = Value::Null);
    let error = HfDirectory::open(copy.path(), &registry()).unwrap_err();
    assert!(error.to_string().contains(key), "{error}");
    edit_json(&config, |config| {
        config["ffn_config"].as_object_mut().unwrap().remove(key);
    });
    HfDirectory::open(copy.path(), &registry()).unwrap();
}

#[test]
fn text_needs_a_tokenizer_and_logits_do_not() {
    let copy = copy();
    let file = ModelFile::open(copy.path(), &registry()).unwrap();
    let ids = file.tokenizer().encode("Once", EncodeOptions::PROMPT);
    assert_eq!(ids.first().map(|id| id.0), Some(1), "BOS");
    fs::remove_file(copy.path().join("tokenizer.json")).unwrap();
    let dir = copy.path().display().to_string();
    let failed = cellar()
        .args(["run", "-m", &dir, "Once"])
        .assert()
        .failure();
    let stderr = String::from_utf8(failed.get_output().stderr.clone()).unwrap();
    assert_eq!(
        stderr,
        format!("error: '{dir}': there is no 'tokenizer.json', which text needs\n")
    );
    let out = copy.path().join("logits.safetensors").display().to_string();
    output(&["logits", "-m", &dir, "--tokens", "1,2,3", "--out", &out]);
    output(&["inspect", &dir]);
    output(&["graph", "-m", &dir]);
}
