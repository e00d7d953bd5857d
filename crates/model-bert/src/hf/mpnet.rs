//! MPNet (Song et al., arXiv 2004.09297): BERT whose positions begin after that of the padding,
//! with biases of scores by distance, which all layers share.

use model_core::hf::{HfClass, Key, SIZE_KEYS, TensorRule, TensorStep, in_layers, same, with};

use super::bert::{FEED_FORWARD, ROBERTA_SCORES};
use super::{LAYER_NORM_EPS, NOT_CAUSAL, RANK, activation, first_position, length_after_padding};

/// The classes of this file.
pub(super) const CLASSES: &[HfClass] = &[
    MPNET,
    HfClass {
        name: "MPNetForMaskedLM",
        ..MPNET
    },
    HfClass {
        name: "MPNetForSequenceClassification",
        keys: &[SIZE_KEYS, MPNET_KEYS, RANK],
        tensors: &[
            MPNET_INPUT,
            MPNET_ATTENTION,
            MPNET_FEED_FORWARD,
            ROBERTA_SCORES,
        ],
        ..MPNET
    },
];

const MPNET: HfClass = HfClass {
    name: "MPNetModel",
    architecture: "mpnet",
    keys: &[SIZE_KEYS, MPNET_KEYS],
    tensors: &[MPNET_INPUT, MPNET_ATTENTION, MPNET_FEED_FORWARD],
    unused: &[
        "embeddings.position_ids",
        "mpnet.embeddings.position_ids",
        "pooler.dense.weight",
        "pooler.dense.bias",
        "mpnet.pooler.dense.weight",
        "mpnet.pooler.dense.bias",
        "lm_head.bias",
        "lm_head.decoder.weight",
        "lm_head.decoder.bias",
        "lm_head.dense.weight",
        "lm_head.dense.bias",
        "lm_head.layer_norm.weight",
        "lm_head.layer_norm.bias",
    ],
    body: "mpnet.",
    ..HfClass::EMPTY
};

const MPNET_KEYS: &[Key] = &[
    LAYER_NORM_EPS,
    NOT_CAUSAL,
    Key::With(|config, keys| activation(config, keys, "hidden_act")),
    Key::With(length_after_padding),
    // transformers' buckets are for this number, whatever the config says.
    Key::With(
        |config, _| match config.optional_count("relative_attention_num_buckets")? {
            None | Some(32) => Ok(()),
            Some(_) => Err(config.wrong("relative_attention_num_buckets", "32")),
        },
    ),
];

const MPNET_INPUT: &[TensorRule] = &[
    same(
        "token_embd.weight",
        "mpnet.embeddings.word_embeddings.weight",
    ),
    same(
        "token_embd_norm.weight",
        "mpnet.embeddings.LayerNorm.weight",
    ),
    same("token_embd_norm.bias", "mpnet.embeddings.LayerNorm.bias"),
    with(
        "position_embd.weight",
        "mpnet.embeddings.position_embeddings.weight",
        &[TensorStep::RowsAfter(first_position)],
    ),
    same(
        "attn_rel_b.weight",
        "mpnet.encoder.relative_attention_bias.weight",
    ),
];

const MPNET_ATTENTION: &[TensorRule] = &in_layers(
    "mpnet.encoder.layer.{l}.attention.",
    [
        same("attn_q.weight", "attn.q.weight"),
        same("attn_q.bias", "attn.q.bias"),
        same("attn_k.weight", "attn.k.weight"),
        same("attn_k.bias", "attn.k.bias"),
        same("attn_v.weight", "attn.v.weight"),
        same("attn_v.bias", "attn.v.bias"),
        same("attn_output.weight", "attn.o.weight"),
        same("attn_output.bias", "attn.o.bias"),
        same("attn_output_norm.weight", "LayerNorm.weight"),
        same("attn_output_norm.bias", "LayerNorm.bias"),
    ],
);

const MPNET_FEED_FORWARD: &[TensorRule] = &in_layers("mpnet.encoder.layer.{l}.", FEED_FORWARD);
