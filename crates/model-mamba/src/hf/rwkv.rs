//! RWKV-4: keys and tensors, some of which RWKV-6 shares. Names are GGUF's for RWKV-6 where the
//! tensors are alike.

use model_core::hf::{
    HfClass, HfConfig, Key, Keys, ModelFileError, ROW_KEYS, TensorRule, TensorStep, in_layers,
    same, with,
};

use super::as_u32;
use crate::rwkv::RWKV4;

const SQUEEZED: &[TensorStep] = &[TensorStep::Squeezed];

/// Embeddings, their norm, and what follows the blocks.
pub(super) const FRAME_TENSORS: &[TensorRule] = &[
    same("token_embd.weight", "rwkv.embeddings.weight"),
    same("token_embd_norm.weight", "rwkv.blocks.0.pre_ln.weight"),
    same("token_embd_norm.bias", "rwkv.blocks.0.pre_ln.bias"),
    same("output_norm.weight", "rwkv.ln_out.weight"),
    same("output_norm.bias", "rwkv.ln_out.bias"),
    same("output.weight", "head.weight"),
];

const NORM_TENSORS: &[TensorRule] = &in_layers(
    "rwkv.blocks.{l}.",
    [
        same("attn_norm.weight", "ln1.weight"),
        same("attn_norm.bias", "ln1.bias"),
        same("ffn_norm.weight", "ln2.weight"),
        same("ffn_norm.bias", "ln2.bias"),
    ],
);

const TIME_MIX_TENSORS: &[TensorRule] = &in_layers(
    "rwkv.blocks.{l}.attention.",
    [
        with("time_mix_share_k.weight", "time_mix_key", SQUEEZED),
        with("time_mix_share_v.weight", "time_mix_value", SQUEEZED),
        with("time_mix_share_r.weight", "time_mix_receptance", SQUEEZED),
        with(
            "time_mix_decay.weight",
            "time_decay",
            &[TensorStep::NegativeExp],
        ),
        same("time_mix_first.weight", "time_first"),
        same("time_mix_key.weight", "key.weight"),
        same("time_mix_value.weight", "value.weight"),
        same("time_mix_receptance.weight", "receptance.weight"),
        same("time_mix_output.weight", "output.weight"),
    ],
);

const CHANNEL_MIX_TENSORS: &[TensorRule] = &in_layers(
    "rwkv.blocks.{l}.feed_forward.",
    [
        with("channel_mix_share_k.weight", "time_mix_key", SQUEEZED),
        with(
            "channel_mix_share_r.weight",
            "time_mix_receptance",
            SQUEEZED,
        ),
        same("channel_mix_key.weight", "key.weight"),
        same("channel_mix_value.weight", "value.weight"),
        same("channel_mix_receptance.weight", "receptance.weight"),
    ],
);

/// Blocks, their width and their norms.
pub(super) const WIDTH_KEYS: &[Key] = &[
    Key::All(ROW_KEYS),
    Key::Number {
        to: "attention.layer_norm_epsilon",
        from: "layer_norm_epsilon",
    },
];

/// The class.
pub(super) const CLASS: HfClass = HfClass {
    name: "RwkvForCausalLM",
    architecture: RWKV4.name,
    keys: &[
        WIDTH_KEYS,
        &[
            Key::Count {
                to: "context_length",
                from: "context_length",
            },
            Key::With(widths),
        ],
    ],
    tensors: &[
        FRAME_TENSORS,
        NORM_TENSORS,
        TIME_MIX_TENSORS,
        CHANNEL_MIX_TENSORS,
    ],
    ..HfClass::EMPTY
};

/// Widths that configs leave to the library: that of the rows, and four times that.
fn widths(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let dim = config.count("hidden_size")?;
    for (to, from, usual) in [
        ("time_mix.inner_size", "attention_hidden_size", dim),
        ("feed_forward_length", "intermediate_size", 4 * dim),
    ] {
        let width = config.optional_count(from)?.unwrap_or(usual);
        keys.set(to, as_u32(width));
    }
    Ok(())
}
