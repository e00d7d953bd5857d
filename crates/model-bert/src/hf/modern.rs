//! ModernBERT (Warner et al., arXiv 2412.13663), whose local layers see a symmetric window.

use model_core::gguf::Array;
use model_core::hf::{
    FixedValue, HfClass, HfConfig, Key, Keys, ModelFileError, SIZE_KEYS, TensorRule, in_layers,
    layer_types, same,
};

use super::{NOT_CAUSAL, RANK, activation, as_u32};
use crate::head::HEAD_POOLING;

/// The classes of this file.
pub(super) const CLASSES: &[HfClass] = &[
    MODERN_BERT,
    HfClass {
        name: "ModernBertForMaskedLM",
        ..MODERN_BERT
    },
    HfClass {
        name: "ModernBertForSequenceClassification",
        keys: &[SIZE_KEYS, MODERN_KEYS, RANK, MODERN_HEAD],
        tensors: &[MODERN_TENSORS, MODERN_LAYERS, MODERN_SCORES],
        unused: &[],
        ..MODERN_BERT
    },
];

const MODERN_BERT: HfClass = HfClass {
    name: "ModernBertModel",
    architecture: "modern-bert",
    keys: &[SIZE_KEYS, MODERN_KEYS],
    tensors: &[MODERN_TENSORS, MODERN_LAYERS],
    unused: &[
        "head.dense.weight",
        "head.norm.weight",
        "decoder.weight",
        "decoder.bias",
    ],
    defaults: &[("global_rope_theta", 160_000), ("local_rope_theta", 10_000)],
    ..HfClass::EMPTY
};

const MODERN_KEYS: &[Key] = &[
    Key::Number {
        to: "attention.layer_norm_epsilon",
        from: "norm_eps",
    },
    Key::Only {
        from: "norm_bias",
        is: FixedValue::Flag(false),
    },
    Key::Only {
        from: "attention_bias",
        is: FixedValue::Flag(false),
    },
    Key::Only {
        from: "mlp_bias",
        is: FixedValue::Flag(false),
    },
    NOT_CAUSAL,
    Key::With(|config, keys| activation(config, keys, "hidden_activation")),
    Key::With(modern_windows),
    Key::With(modern_rope),
];

/// A head that scores the row of the first token, or the mean of all.
const MODERN_HEAD: &[Key] = &[
    Key::With(|config, keys| {
        let key = "classifier_pooling";
        match config.optional_text(key)? {
            None => Ok(()),
            Some(name @ ("cls" | "mean")) => {
                keys.set(HEAD_POOLING, name);
                Ok(())
            }
            Some(_) => Err(config.wrong(key, "one of: cls, mean")),
        }
    }),
    Key::Only {
        from: "classifier_activation",
        is: FixedValue::Text(&["gelu"]),
    },
    Key::Only {
        from: "classifier_bias",
        is: FixedValue::Flag(false),
    },
];

const MODERN_TENSORS: &[TensorRule] = &[
    same(
        "token_embd.weight",
        "model.embeddings.tok_embeddings.weight",
    ),
    same("token_embd_norm.weight", "model.embeddings.norm.weight"),
    same("output_norm.weight", "model.final_norm.weight"),
];

const MODERN_LAYERS: &[TensorRule] = &in_layers(
    "model.layers.{l}.",
    [
        same("attn_norm.weight", "attn_norm.weight"),
        same("attn_qkv.weight", "attn.Wqkv.weight"),
        same("attn_output.weight", "attn.Wo.weight"),
        same("ffn_norm.weight", "mlp_norm.weight"),
        same("ffn_up.weight", "mlp.Wi.weight"),
        same("ffn_down.weight", "mlp.Wo.weight"),
    ],
);

const MODERN_SCORES: &[TensorRule] = &[
    same("cls.weight", "head.dense.weight"),
    same("cls.norm.weight", "head.norm.weight"),
    same("cls.output.weight", "classifier.weight"),
    same("cls.output.bias", "classifier.bias"),
];

/// The layers that see a window: by a list, or every one but the first of a period.
fn modern_windows(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let width = config.count("local_attention")?;
    keys.set("attention.sliding_window", as_u32(width));
    let name = "attention.sliding_window_pattern";
    match layer_types(config, &["sliding_attention", "full_attention"])? {
        Some(types) => {
            let flags = types.iter().map(|&t| t == "sliding_attention").collect();
            keys.set(name, Array::Bool(flags));
        }
        None => {
            let period = config.count("global_attn_every_n_layers")?;
            keys.set(name, as_u32(period));
        }
    }
    Ok(())
}

/// Two bases: in old files under names of their own.
fn modern_rope(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    super::two_bases(config, keys, ["global_rope_theta", "local_rope_theta"])
}
