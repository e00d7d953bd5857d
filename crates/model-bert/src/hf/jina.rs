//! Jina Embeddings v2 (Günther et al., arXiv 2310.19923): BERT with linear biases instead of
//! positions, and gates.

use model_core::hf::{
    FixedValue, HfClass, Key, SIZE_KEYS, TensorRule, TensorStep, in_layers, same, with,
};
use model_core::hyperparameters::ACTIVATION;

use super::bert::{BERT_ATTENTION, input};
use super::{LAYER_NORM_EPS, NOT_CAUSAL};

/// The classes of this file.
pub(super) const CLASSES: &[HfClass] = &[
    JINA_V2,
    HfClass {
        name: "JinaBertForMaskedLM",
        ..JINA_V2
    },
];

const JINA_V2: HfClass = HfClass {
    name: "JinaBertModel",
    architecture: "jina-bert-v2",
    keys: &[SIZE_KEYS, JINA_KEYS],
    tensors: &[JINA_INPUT, JINA_ATTENTION, JINA_GATES],
    unused: &[
        "pooler.dense.weight",
        "pooler.dense.bias",
        "bert.pooler.dense.weight",
        "bert.pooler.dense.bias",
        "cls.predictions.bias",
        "cls.predictions.decoder.weight",
        "cls.predictions.decoder.bias",
        "cls.predictions.transform.dense.weight",
        "cls.predictions.transform.dense.bias",
        "cls.predictions.transform.LayerNorm.weight",
        "cls.predictions.transform.LayerNorm.bias",
    ],
    body: "bert.",
    ..HfClass::EMPTY
};

const JINA_KEYS: &[Key] = &[
    LAYER_NORM_EPS,
    Key::Only {
        from: "position_embedding_type",
        is: FixedValue::Text(&["alibi"]),
    },
    Key::Only {
        from: "feed_forward_type",
        is: FixedValue::Text(&["geglu"]),
    },
    Key::Only {
        from: "is_decoder",
        is: FixedValue::Flag(false),
    },
    Key::Only {
        from: "add_cross_attention",
        is: FixedValue::Flag(false),
    },
    NOT_CAUSAL,
    // The gate's; 'hidden_act' is not read where there are gates.
    Key::With(|_, keys| {
        keys.set(ACTIVATION, "gelu");
        Ok(())
    }),
];

const JINA_INPUT: &[TensorRule] = input!("bert.",);

const JINA_ATTENTION: &[TensorRule] = &in_layers("bert.encoder.layer.{l}.", BERT_ATTENTION);

const JINA_GATES: &[TensorRule] = &in_layers(
    "bert.encoder.layer.{l}.mlp.",
    [
        with(
            "ffn_gate.weight",
            "gated_layers.weight",
            &[TensorStep::RowPart { part: 0, of: 2 }],
        ),
        with(
            "ffn_up.weight",
            "gated_layers.weight",
            &[TensorStep::RowPart { part: 1, of: 2 }],
        ),
        same("ffn_down.weight", "wo.weight"),
        same("ffn_down.bias", "wo.bias"),
        same("layer_output_norm.weight", "layernorm.weight"),
        same("layer_output_norm.bias", "layernorm.bias"),
    ],
);
