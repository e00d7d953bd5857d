//! EmbeddingGemma (Schechter Vera et al., arXiv 2509.20354): Gemma 3 whose tokens see later ones.

use model_core::hf::{
    ATTENTION_TENSORS, ClassWhen, Expected, GATED_TENSORS, HfClass, HfConfig, Key, Keys,
    ModelFileError, RMS_EPS, RopeKind, RopeSettings, SIZE_KEYS, Step, TensorRule, head_dim,
    in_layers, same, windows_by_layer, with,
};
use model_core::windows::{FullLayer, WindowPattern};

use super::{NOT_CAUSAL, activation};

/// The classes of this file.
pub(super) const CLASSES: &[HfClass] = &[HfClass {
    name: "Gemma3TextModel",
    when: ClassWhen::Flagged("use_bidirectional_attention"),
    architecture: "gemma-embedding",
    keys: &[SIZE_KEYS, RMS_EPS, GEMMA_KEYS],
    tensors: &[GEMMA_INPUT, GEMMA_NORMS, ATTENTION_TENSORS, GATED_TENSORS],
    defaults: &[
        ("head_dim", 256),
        ("num_key_value_heads", 4),
        ("query_pre_attn_scalar", 256),
        ("sliding_window", 4096),
        ("rope_theta", 1_000_000),
        ("rope_local_base_freq", 10_000),
    ],
    ..HfClass::EMPTY
}];

const GEMMA_KEYS: &[Key] = &[
    Key::Only {
        from: "attention_bias",
        is: Expected::Flag(false),
    },
    NOT_CAUSAL,
    Key::With(|config, keys| activation(config, keys, "hidden_activation")),
    Key::With(no_soft_caps),
    Key::With(score_scale),
    Key::With(windows),
    Key::With(bases),
];

fn no_soft_caps(config: &HfConfig, _: &mut Keys) -> Result<(), ModelFileError> {
    for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if config.optional_number(key)?.is_some() {
            return Err(config.wrong(key, "null"));
        }
    }
    Ok(())
}

/// The factor on scores, where it is not that of a head's size.
fn score_scale(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let key = "query_pre_attn_scalar";
    match config.optional_number(key)? {
        Some(width) if !(width.is_finite() && width > 0.0) => {
            Err(config.wrong(key, "a number above 0"))
        }
        Some(width) if width != head_dim(config)? as f64 => {
            keys.set("attention.scale", width.sqrt().recip() as f32);
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Every sixth layer sees everything, where the config does not say which.
fn windows(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let pattern = WindowPattern {
        period: 6,
        full: FullLayer::Last,
    };
    windows_by_layer(config, keys, pattern)
}

/// Two bases, which older files have under names of their own.
fn bases(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    if !head_dim(config)?.is_multiple_of(2) {
        return Err(config.wrong("head_dim", "an even number"));
    }
    for (to, layers) in [
        ("rope.freq_base", "full_attention"),
        ("rope.freq_base_swa", "sliding_attention"),
    ] {
        let rope = RopeSettings::read(config, Some(layers))?;
        if rope.kind != RopeKind::Plain || rope.partial != 1.0 {
            let wanted = "a rotation of whole heads without scaling";
            return Err(config.wrong("rope_parameters", wanted));
        }
        let is_old = config.value("rope_parameters").is_none();
        let theta = match layers == "sliding_attention" && is_old {
            true => config.number("rope_local_base_freq")?,
            false => rope.theta,
        };
        keys.set(to, theta as f32);
    }
    Ok(())
}

/// Gemma stores gains as their distance from 1.
const PLUS_ONE: &[Step] = &[Step::PlusOne];

const GEMMA_INPUT: &[TensorRule] = &[
    same("token_embd.weight", "model.embed_tokens.weight"),
    with("output_norm.weight", "model.norm.weight", PLUS_ONE),
    same("dense_2.weight", "dense_2.linear.weight"),
    same("dense_3.weight", "dense_3.linear.weight"),
];

const GEMMA_NORMS: &[TensorRule] = &in_layers(
    "model.layers.{l}.",
    [
        with("attn_norm.weight", "input_layernorm.weight", PLUS_ONE),
        with(
            "post_attention_norm.weight",
            "post_attention_layernorm.weight",
            PLUS_ONE,
        ),
        with(
            "ffn_norm.weight",
            "pre_feedforward_layernorm.weight",
            PLUS_ONE,
        ),
        with(
            "post_ffw_norm.weight",
            "post_feedforward_layernorm.weight",
            PLUS_ONE,
        ),
        with("attn_q_norm.weight", "self_attn.q_norm.weight", PLUS_ONE),
        with("attn_k_norm.weight", "self_attn.k_norm.weight", PLUS_ONE),
    ],
);
