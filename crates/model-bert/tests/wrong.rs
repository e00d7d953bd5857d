//! Directories and files that are not as they should be: the error names file, key or tensor and
//! what was expected.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::path::Path;

use crate::common::{BERT, MODERN, copy, data, edit_json, registry};
use cellar_tasks::{Embedder, EmbedderConfig};
use kv_block::BlockFormat;
use kv_candle::CandleBackend;
use kv_graph::weights::{MemoryWeights, Weight, WeightSource};
use model_core::directory::HfDirectory;
use model_core::gguf::Metadata;
use model_core::model_file::OpenModel;
use model_tests::Recipe;
use serde_json::{Value, json};

/// The refusal of a copy with one JSON file changed.
fn refused(name: &str, file: &str, edit: impl FnOnce(&mut Value)) -> String {
    let copy = copy(name);
    edit_json(&copy.path().join(file), edit);
    said_of(copy.path())
}

fn said_of(directory: &Path) -> String {
    let error = HfDirectory::open(directory, &registry()).unwrap_err();
    let text = error.to_string();
    text.replace(&directory.display().to_string(), "DIR")
}

#[test]
fn a_wrong_config_is_named_by_key_and_what_is_wanted() {
    let activations = "one of: gelu, gelu_python, gelu_new, gelu_pytorch_tanh, gelu_fast, silu, swish, relu, relu2";
    let cases: [(&str, &str, Value, String); 13] = [
        (
            BERT,
            "layer_norm_eps",
            Value::Null,
            "'layer_norm_eps' is missing (a number wanted)".into(),
        ),
        (
            BERT,
            "num_attention_heads",
            json!(5),
            "'num_attention_heads' is 5, not a divisor of 'hidden_size', which is 32".into(),
        ),
        (
            BERT,
            "num_attention_heads",
            json!(0),
            "'num_attention_heads' is 0, not a whole number of at least 1".into(),
        ),
        (
            BERT,
            "hidden_act",
            json!("mish"),
            format!("'hidden_act' is \"mish\", not {activations}"),
        ),
        (
            BERT,
            "hidden_act",
            Value::Null,
            format!("'hidden_act' is missing ({activations} wanted)"),
        ),
        (
            BERT,
            "position_embedding_type",
            json!("relative_key"),
            "'position_embedding_type' is \"relative_key\", not one of: absolute".into(),
        ),
        (
            BERT,
            "is_decoder",
            json!(true),
            "'is_decoder' is true, not false".into(),
        ),
        (
            MODERN,
            "local_attention",
            json!(0),
            "'local_attention' is 0, not a whole number of at least 1".into(),
        ),
        (
            MODERN,
            "global_rope_theta",
            Value::Null,
            "'global_rope_theta' is missing (a number above 1 wanted)".into(),
        ),
        (
            MODERN,
            "global_attn_every_n_layers",
            Value::Null,
            "'global_attn_every_n_layers' is missing (a whole number of at least 1 wanted)".into(),
        ),
        (
            MODERN,
            "mlp_bias",
            json!(true),
            "'mlp_bias' is true, not false".into(),
        ),
        (
            BERT,
            "vision_config",
            json!({"depth": 2}),
            "'vision_config' is {\"depth\":2}, not absent, as 'BertModel' is of text alone".into(),
        ),
        (
            MODERN,
            "audio_config",
            json!({}),
            "'audio_config' is {}, not absent, as 'ModernBertModel' is of text alone".into(),
        ),
    ];
    for (name, key, value, wanted) in cases {
        let said = refused(name, "config.json", |config| config[key] = value);
        assert_eq!(said, format!("'DIR/config.json': {wanted}"));
    }
}

#[test]
fn sizes_that_tensors_do_not_have_are_named_by_tensor() {
    let said = refused(BERT, "config.json", |config| {
        config["max_position_embeddings"] = json!(33);
    });
    assert_eq!(
        said,
        "'DIR': tensor 'embeddings.position_embeddings.weight (position_embd.weight)' has shape \
         [32, 32], but the metadata asks for [33, 32]"
    );
    let said = refused(BERT, "config.json", |config| {
        config["num_hidden_layers"] = json!(3);
    });
    assert!(
        said.starts_with(
            "'DIR': tensor 'encoder.layer.2.attention.self.query.weight (blk.2.attn_q.weight)' is \
             missing"
        ),
        "{said}"
    );
    let said = refused(BERT, "config.json", |config| {
        config["num_hidden_layers"] = json!(1);
    });
    assert!(said.contains("does not use it (bert)"), "{said}");
    let said = refused(MODERN, "config.json", |config| {
        config["intermediate_size"] = json!(40);
    });
    assert_eq!(
        said,
        "'DIR': tensor 'layers.0.mlp.Wi.weight (blk.0.ffn_up.weight)' has shape [96, 32], but the \
         metadata asks for [80, 32]"
    );
}

#[test]
fn modules_that_would_change_vectors_are_refused() {
    let said = refused(BERT, "modules.json", |modules| {
        let dense = json!({"path": "3_Dense", "type": "sentence_transformers.models.Dense"});
        modules.as_array_mut().unwrap().push(dense);
    });
    assert_eq!(
        said,
        "'DIR/modules.json': module 'sentence_transformers.models.Dense' is not supported; known are: \
         Transformer, Pooling, Normalize"
    );
    let copy = copy(BERT);
    let prompts = copy.path().join("config_sentence_transformers.json");
    let write = |name: Value| {
        let json =
            json!({"prompts": {"query": "query: ", "none": ""}, "default_prompt_name": name});
        std::fs::write(&prompts, json.to_string()).unwrap();
    };
    write(json!("query"));
    assert_eq!(
        said_of(copy.path()),
        "'DIR/config_sentence_transformers.json': 'default_prompt_name' is \"query\", not null: a prompt \
         before every text is not supported"
    );
    for name in [Value::Null, json!("none")] {
        write(name);
        assert!(HfDirectory::open(copy.path(), &registry()).is_ok());
    }
    let pooling = "1_Pooling/config.json";
    let said = refused(BERT, pooling, |config| {
        config["pooling_mode_mean_tokens"] = json!(false);
        config["pooling_mode_max_tokens"] = json!(true);
    });
    assert_eq!(
        said,
        "'DIR/1_Pooling/config.json': 'pooling_mode_max_tokens' is true, not a mean, cls or lasttoken \
         pooling"
    );
    let said = refused(BERT, pooling, |config| {
        config["pooling_mode_cls_token"] = json!(true);
    });
    assert_eq!(
        said,
        "'DIR/1_Pooling/config.json': 'pooling_mode_cls_token' is true, not false, since another \
         pooling is true"
    );
}

#[test]
fn pooling_must_come_from_somewhere() {
    let copy = copy(BERT);
    std::fs::remove_file(copy.path().join("modules.json")).unwrap();
    let open = || OpenModel::open(copy.path(), &registry()).unwrap();
    let config = EmbedderConfig::default();
    // Without a list of modules, the usual folder says it.
    assert!(Embedder::new(CandleBackend::cpu(), &open(), &config).is_ok());
    std::fs::remove_dir_all(copy.path().join("1_Pooling")).unwrap();
    let error = Embedder::new(CandleBackend::cpu(), &open(), &config).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the model does not say how the rows of a text become one vector ('bert.pooling_type' is missing)"
    );
}

/// A model in memory, in the keys and names of GGUF.
fn loaded(name: &str) -> (Metadata, MemoryWeights) {
    let directory = HfDirectory::open(data(name), &registry()).unwrap();
    let mut weights = MemoryWeights::new();
    for name in directory.weights().names() {
        weights.insert(directory.weights().get(&name).unwrap());
    }
    (directory.metadata().clone(), weights)
}

#[test]
fn a_wrong_file_is_named_by_key_or_tensor() {
    let said = |metadata: &Metadata, weights: &MemoryWeights| {
        let error = registry().model(metadata, weights).unwrap_err();
        error.to_string()
    };
    let (sound, weights) = loaded(BERT);
    assert!(registry().model(&sound, &weights).is_ok());
    let with = |key: &str, value: u32| {
        let mut metadata = sound.clone();
        metadata.insert(key, value);
        said(&metadata, &weights)
    };
    assert_eq!(
        with("bert.embedding_length", 0),
        "bert.embedding_length: 0 is not possible; it must be at least 1"
    );
    assert_eq!(
        with("bert.attention.head_count_kv", 3),
        "bert.attention.head_count_kv: 3 key/value heads do not divide 4 query heads"
    );
    let mut metadata = sound.clone();
    metadata.insert("bert.attention.causal", true);
    assert_eq!(
        said(&metadata, &weights),
        "bert.attention.causal: true is not supported: tokens of an encoder see later ones"
    );
    let mut metadata = sound.clone();
    metadata.insert("bert.hidden_activation", "mish");
    assert!(said(&metadata, &weights).starts_with("bert.hidden_activation: 'mish' is not one of"));

    let mut without = MemoryWeights::new();
    let kept = weights.names().into_iter();
    for name in kept.filter(|name| name != "blk.1.layer_output_norm.bias") {
        without.insert(weights.get(&name).unwrap());
    }
    assert_eq!(
        said(&sound, &without),
        "tensor 'blk.1.layer_output_norm.bias' is missing; the model needs it as [32]"
    );
    let mut narrow = weights.clone();
    let zeros = vec![0; 2 * 31 * 4];
    let types = Weight::new(
        "token_types.weight",
        vec![2, 31],
        BlockFormat::F32,
        zeros.into(),
    );
    narrow.insert(types.unwrap());
    assert_eq!(
        said(&sound, &narrow),
        "tensor 'token_types.weight' has shape [2, 31], but the metadata asks for [2, 32]"
    );
}

#[test]
fn token_types_may_be_absent() {
    let (metadata, weights) = loaded(BERT);
    let mut without = MemoryWeights::new();
    let kept = weights.names().into_iter();
    for name in kept.filter(|name| name != "token_types.weight") {
        without.insert(weights.get(&name).unwrap());
    }
    assert!(registry().model(&metadata, &without).is_ok());
}

/// Groups of two layers, three times: the first group twice.
#[test]
fn layers_of_groups_are_named_by_group_and_place() {
    let recipe = Recipe::open(&data("albert_inner_layers"));
    let directory = recipe.directory(&registry()).unwrap();
    let name = "encoder.albert_layer_groups.1.albert_layers.0.ffn.weight";
    let said = recipe.clone().without(name).directory(&registry());
    let said = said.unwrap_err().to_string();
    let wanted = format!("tensor '{name} (blk.2.ffn_up.weight)' is missing");
    assert!(said.contains(&wanted), "{said}");
    let fewer = recipe.with_config(|config| {
        config.insert("inner_group_num".to_owned(), json!(1));
    });
    let said = fewer.directory(&registry()).unwrap_err().to_string();
    let wanted = ".albert_layers.1.attention.LayerNorm.bias'";
    assert!(
        said.contains(wanted) && said.contains("no such tensor"),
        "{said}"
    );
    let with = |key: &str, value: u32| {
        let mut metadata = directory.metadata().clone();
        metadata.insert(key, value);
        let model = registry().model(&metadata, &**directory.weights());
        model.unwrap_err().to_string()
    };
    assert_eq!(
        with("albert.layer_group_length", 4),
        "albert.layer_group_length: 6 layers are no whole number of groups of 4"
    );
    assert_eq!(
        with("albert.layer_group_count", 4),
        "albert.layer_group_count: 4 groups of 2 in 6 layers"
    );
}
