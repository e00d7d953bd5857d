//! What decoders and encoders of the Gemma family share: gains, norms, windows, the factor on
//! scores.

use super::{
    HfConfig, Keys, ModelFileError, TensorRule, TensorStep, head_dim, in_layers, windows_by_layer,
    with,
};
use crate::windows::{FullLayer, WindowPattern};

/// For gains that are stored as their distance from 1.
pub const PLUS_ONE: &[TensorStep] = &[TensorStep::PlusOne];

/// Norms before and after both blocks of a layer, and of queries and keys.
pub const GEMMA_NORMS: &[TensorRule] = &in_layers(
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

/// `query_pre_attn_scalar`, where it is not the size of a head.
///
/// # Errors
/// [`ModelFileError`] where it is not above 0.
pub fn gemma_score_scale(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
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
///
/// # Errors
/// [`ModelFileError`] naming the key.
pub fn gemma3_windows(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let pattern = WindowPattern {
        period: 6,
        full: FullLayer::Last,
    };
    windows_by_layer(config, keys, pattern)
}
