//! RWKV-6: keys and tensors, under the names that llama.cpp gives them.

use model_core::hf::{
    HfClass, HfConfig, Key, Keys, ModelFileError, TensorRule, TensorStep, VOCAB_SIZE, in_layers,
    same, with,
};

use super::as_u32;
use super::hybrid::CONTEXT;
use super::rwkv::{FRAME_TENSORS, WIDTH_KEYS};
use crate::rwkv::RWKV6;

/// The class. `rescale_every` halves rows and weights alike, which norms undo.
pub(super) const CLASS: HfClass = HfClass {
    name: "Rwkv6ForCausalLM",
    architecture: RWKV6.name,
    keys: &[WIDTH_KEYS, KEYS],
    tensors: &[FRAME_TENSORS, NORM_TENSORS, TIME_MIX, CHANNEL_MIX],
    defaults: &[("head_size", 64), ("head_size_divisor", 8)],
    ..HfClass::EMPTY
};

const KEYS: &[Key] = &[
    Key::Constant {
        to: "context_length",
        value: CONTEXT,
    },
    VOCAB_SIZE,
    Key::With(widths),
    Key::With(head_norm),
];

/// Widths that the published code makes of that of the rows, and heads that divide it.
fn widths(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let dim = config.count("hidden_size")?;
    let head_dim = config.count("head_size")?;
    if !dim.is_multiple_of(head_dim) {
        let wanted = format!("a divisor of 'hidden_size', which is {dim}");
        return Err(config.wrong("head_size", wanted));
    }
    keys.set("wkv.head_size", as_u32(head_dim));
    let attention = config.optional_count("attention_hidden_size")?;
    if attention.is_some_and(|width| width != dim) {
        let wanted = format!("{dim}, as 'hidden_size' is");
        return Err(config.wrong("attention_hidden_size", wanted));
    }
    let usual = dim * 7 / 2 / 32 * 32;
    let hidden = config.optional_count("intermediate_size")?.unwrap_or(usual);
    keys.set("feed_forward_length", as_u32(hidden));
    let [mix, decay] = match dim {
        4096 => [64u32, 128],
        _ => [32, 64],
    };
    keys.set("time_mix_extra_dim", mix);
    keys.set("time_decay_extra_dim", decay);
    Ok(())
}

/// The norm of heads that are divided by a number, as one of undivided heads.
fn head_norm(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let divisor = config.count("head_size_divisor")? as f64;
    keys.set(
        "attention.group_norm_epsilon",
        (1e-5 * divisor * divisor) as f32,
    );
    Ok(())
}

const SQUEEZED: &[TensorStep] = &[TensorStep::Squeezed];
const TRANSPOSED: &[TensorStep] = &[TensorStep::Transposed];

const NORM_TENSORS: &[TensorRule] = &in_layers(
    "rwkv.blocks.{l}.",
    [
        same("attn_norm.weight", "ln1.weight"),
        same("attn_norm.bias", "ln1.bias"),
        same("attn_norm_2.weight", "ln2.weight"),
        same("attn_norm_2.bias", "ln2.bias"),
    ],
);

const TIME_MIX: &[TensorRule] = &in_layers(
    "rwkv.blocks.{l}.attention.",
    [
        with("time_mix_lerp_x.weight", "time_maa_x", SQUEEZED),
        with("time_mix_lerp_w.weight", "time_maa_w", SQUEEZED),
        with("time_mix_lerp_k.weight", "time_maa_k", SQUEEZED),
        with("time_mix_lerp_v.weight", "time_maa_v", SQUEEZED),
        with("time_mix_lerp_r.weight", "time_maa_r", SQUEEZED),
        with("time_mix_lerp_g.weight", "time_maa_g", SQUEEZED),
        with("time_mix_w1.weight", "time_maa_w1", TRANSPOSED),
        with("time_mix_w2.weight", "time_maa_w2", TRANSPOSED),
        with("time_mix_decay.weight", "time_decay", SQUEEZED),
        with("time_mix_decay_w1.weight", "time_decay_w1", TRANSPOSED),
        with("time_mix_decay_w2.weight", "time_decay_w2", TRANSPOSED),
        same("time_mix_first.weight", "time_faaaa"),
        same("time_mix_receptance.weight", "receptance.weight"),
        same("time_mix_key.weight", "key.weight"),
        same("time_mix_value.weight", "value.weight"),
        same("time_mix_gate.weight", "gate.weight"),
        same("time_mix_ln.weight", "ln_x.weight"),
        same("time_mix_ln.bias", "ln_x.bias"),
        same("time_mix_output.weight", "output.weight"),
    ],
);

const CHANNEL_MIX: &[TensorRule] = &in_layers(
    "rwkv.blocks.{l}.feed_forward.",
    [
        with("channel_mix_lerp_k.weight", "time_maa_k", SQUEEZED),
        with("channel_mix_lerp_r.weight", "time_maa_r", SQUEEZED),
        same("channel_mix_key.weight", "key.weight"),
        same("channel_mix_receptance.weight", "receptance.weight"),
        same("channel_mix_value.weight", "value.weight"),
    ],
);
