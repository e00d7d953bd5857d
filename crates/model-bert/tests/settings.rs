//! Every setting of every recipe's `config.json` is changed, and left out: it is refused by its key,
//! or by a tensor that contradicts it, or it makes another model, or it is one that has no part in
//! what an encoder computes.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

mod common;

use std::path::Path;

use common::{data, registry};
use kv_core::graph::GraphShape;
use model_core::model_file::OpenModel;
use model_tests::Recipe;
use serde_json::{Map, Value, json};

/// Settings of training, of heads that predict tokens, of libraries, and of tokenizers.
const WITHOUT_EFFECT: &[&str] = &[
    "_sliding_window_pattern", // next to layer_types
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_implementation",
    "bos_token_id",
    "classifier_dropout",
    "classifier_dropout_prob",
    "cls_token_id",
    "decoder_bias",
    "deterministic_flash_attn",
    "dropout",
    "dtype",
    "emb_pooler",
    "embedding_dropout",
    "eos_token_id",
    "global_attn_every_n_layers", // next to layer_types
    "hidden_dropout_prob",
    "id2label",
    "initializer_cutoff_factor",
    "initializer_range",
    "label2id",
    "mask_token_id",
    "max_trained_positions", // without rotary_scaling_factor
    "mlp_dropout",
    "model_type",
    "pad_token_id", // but where positions follow it
    "legacy",
    "pooler_dropout",
    "pretraining_tp",
    "qa_dropout",
    "sep_token_id",
    "seq_classif_dropout",
    "sinusoidal_pos_embds",
    "sparse_pred_ignore_index",
    "sparse_prediction",
    "tie_word_embeddings",
    "transformers_version",
    "type_vocab_size", // the tensor has as many rows as it has
    "use_cache",
];

/// Settings that some classes name and do not read.
const WITHOUT_EFFECT_IN: &[(&str, &str)] = &[
    ("eurobert", "classifier_pooling"),          // without a head
    ("jina_bert_v2", "hidden_act"),              // gates have feed_forward_type's
    ("modernbert_classifier", "layer_norm_eps"), // it is norm_eps
    ("neobert", "intermediate_size"),            // rounded
];

/// Settings that say which class a model is of.
const CHOICES: &[&str] = &[
    "architectures",
    "num_experts",
    "use_bidirectional_attention",
];

/// What a model computes, as far as its settings say.
fn computed(folder: &Path) -> Result<String, String> {
    let file = OpenModel::open(folder, &registry()).map_err(|error| error.to_string())?;
    let shape = GraphShape {
        n_tokens: 3,
        n_outputs: 1,
    };
    let graph = file.model().graph(shape).unwrap();
    Ok(format!(
        "{}\n{}",
        file.model().context_length(),
        graph.text()
    ))
}

/// The same kind of value, but another one.
fn changed(value: &Value) -> Value {
    match value {
        Value::Null => json!(3),
        Value::Bool(flag) => json!(!flag),
        Value::Number(number) if number.is_u64() => json!(number.as_u64().unwrap() + 1),
        // A default in disguise becomes a number that counts.
        Value::Number(number) if number.is_i64() => json!(4 - number.as_i64().unwrap()),
        Value::Number(number) => json!(number.as_f64().unwrap() * 2.0 + 0.5),
        Value::String(_) => json!("no such thing"),
        Value::Array(list) => {
            let mut list = list.clone();
            list[0] = changed(&list[0]);
            list.into()
        }
        Value::Object(object) => {
            let mut object = object.clone();
            let key = object.keys().next().unwrap().clone();
            object[&key] = changed(&object[&key]);
            object.into()
        }
    }
}

/// What is wrong with a recipe's settings.
fn faults(recipe: &Recipe) -> Vec<String> {
    let (name, dir) = (recipe.name(), tempfile::tempdir().unwrap());
    recipe.expand(dir.path());
    let path = dir.path().join("config.json");
    let config: Map<String, Value> =
        serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let with = |config: &Map<String, Value>| {
        std::fs::write(&path, serde_json::to_vec(config).unwrap()).unwrap();
        computed(dir.path())
    };
    let sound = with(&config).unwrap();
    let mut faults = Vec::new();
    for (key, value) in &config {
        let mut other = config.clone();
        other[key] = changed(value);
        let has_no_part = WITHOUT_EFFECT.contains(&&**key)
            || WITHOUT_EFFECT_IN.contains(&(&name, key))
            || value.is_null();
        match with(&other) {
            Ok(same) if same == sound && !has_no_part => {
                faults.push(format!("{name}: '{key}' as {} changes nothing", other[key]));
            }
            Ok(_) => {}
            Err(error) => {
                let is_named = error.contains(&format!("'{key}")) || error.contains("tensor '");
                if !is_named && !CHOICES.contains(&&**key) {
                    faults.push(format!("{name}: '{key}' as {}: {error}", other[key]));
                }
            }
        }
        other.remove(key);
        // What is left out is the default, or it is missed.
        if let Err(error) = with(&other) {
            // A class may have another name for it.
            let is_named = error.contains(&format!("'{key}'"))
                || error.contains("' is missing (")
                || error.contains("tensor '");
            if !is_named && !CHOICES.contains(&&**key) {
                faults.push(format!("{name}: without '{key}': {error}"));
            }
        }
    }
    faults
}

#[test]
fn a_setting_is_understood_refused_or_without_effect() {
    let recipes = Recipe::all_in(&data(""));
    let faults: Vec<String> = recipes.iter().flat_map(faults).collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}
