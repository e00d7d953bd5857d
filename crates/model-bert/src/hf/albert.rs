//! ALBERT (Lan et al., arXiv 1909.11942): groups of layers, each of which is computed several times
//! with the same weights, and embeddings that are narrower than layers.

use model_core::hf::{
    HfClass, HfConfig, Key, Keys, ModelFileError, SIZE_KEYS, TensorRule, in_layers, same,
};

use super::bert::{BERT_KEYS, input};
use super::{RANK, as_u32};
use crate::read::{INPUT_LENGTH, LAYER_GROUP_LENGTH, LAYER_GROUPS};

/// The classes of this file.
pub(super) const CLASSES: &[HfClass] = &[
    ALBERT,
    HfClass {
        name: "AlbertForMaskedLM",
        ..ALBERT
    },
    HfClass {
        name: "AlbertForPreTraining",
        ..ALBERT
    },
    HfClass {
        name: "AlbertForSequenceClassification",
        keys: &[SIZE_KEYS, BERT_KEYS, ALBERT_KEYS, RANK],
        tensors: &[ALBERT_INPUT, ALBERT_LAYERS, ALBERT_SCORES],
        unused: &["albert.embeddings.position_ids"],
        ..ALBERT
    },
];

const ALBERT: HfClass = HfClass {
    name: "AlbertModel",
    architecture: "albert",
    keys: &[SIZE_KEYS, BERT_KEYS, ALBERT_KEYS],
    tensors: &[ALBERT_INPUT, ALBERT_LAYERS],
    group_len: Some((LAYER_GROUP_LENGTH, INNER_LAYERS)),
    unused: ALBERT_UNUSED,
    body: "albert.",
    ..HfClass::EMPTY
};

const ALBERT_KEYS: &[Key] = &[
    Key::Count {
        to: INPUT_LENGTH,
        from: "embedding_size",
    },
    Key::With(layer_groups),
];

/// The key of the number of layers in a group.
const INNER_LAYERS: &str = "inner_group_num";

/// Groups of layers. The config counts how often groups are computed, and not the layers in them.
fn layer_groups(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let (key, n_computed) = ("num_hidden_groups", config.count("num_hidden_layers")?);
    let n_groups = config.optional_count(key)?.unwrap_or(1);
    if n_groups > n_computed {
        let wanted = format!("at most 'num_hidden_layers', which is {n_computed}");
        return Err(config.wrong(key, wanted));
    }
    keys.set(LAYER_GROUPS, as_u32(n_groups));
    if let Some(len @ 2..) = config.optional_count(INNER_LAYERS)? {
        keys.set(LAYER_GROUP_LENGTH, as_u32(len));
        keys.set("block_count", as_u32(n_computed.saturating_mul(len)));
    }
    Ok(())
}

const ALBERT_INPUT: &[TensorRule] = input!(
    "albert.",
    same(
        "position_embd.weight",
        "albert.embeddings.position_embeddings.weight"
    ),
    same(
        "token_embd_proj.weight",
        "albert.encoder.embedding_hidden_mapping_in.weight"
    ),
    same(
        "token_embd_proj.bias",
        "albert.encoder.embedding_hidden_mapping_in.bias"
    )
);

const ALBERT_LAYERS: &[TensorRule] = &in_layers(
    "albert.encoder.albert_layer_groups.{l}.albert_layers.{i}.",
    [
        same("attn_q.weight", "attention.query.weight"),
        same("attn_q.bias", "attention.query.bias"),
        same("attn_k.weight", "attention.key.weight"),
        same("attn_k.bias", "attention.key.bias"),
        same("attn_v.weight", "attention.value.weight"),
        same("attn_v.bias", "attention.value.bias"),
        same("attn_output.weight", "attention.dense.weight"),
        same("attn_output.bias", "attention.dense.bias"),
        same("attn_output_norm.weight", "attention.LayerNorm.weight"),
        same("attn_output_norm.bias", "attention.LayerNorm.bias"),
        same("ffn_up.weight", "ffn.weight"),
        same("ffn_up.bias", "ffn.bias"),
        same("ffn_down.weight", "ffn_output.weight"),
        same("ffn_down.bias", "ffn_output.bias"),
        same("layer_output_norm.weight", "full_layer_layer_norm.weight"),
        same("layer_output_norm.bias", "full_layer_layer_norm.bias"),
    ],
);

/// The pooler and the scores.
const ALBERT_SCORES: &[TensorRule] = &[
    same("cls.weight", "albert.pooler.weight"),
    same("cls.bias", "albert.pooler.bias"),
    same("cls.output.weight", "classifier.weight"),
    same("cls.output.bias", "classifier.bias"),
];

/// Numbers of positions, the pooler, and what predicts tokens or the order of sentences.
const ALBERT_UNUSED: &[&str] = &[
    "embeddings.position_ids",
    "albert.embeddings.position_ids",
    "pooler.weight",
    "pooler.bias",
    "albert.pooler.weight",
    "albert.pooler.bias",
    "predictions.bias",
    "predictions.LayerNorm.weight",
    "predictions.LayerNorm.bias",
    "predictions.dense.weight",
    "predictions.dense.bias",
    "predictions.decoder.weight",
    "predictions.decoder.bias",
    "sop_classifier.classifier.weight",
    "sop_classifier.classifier.bias",
];
