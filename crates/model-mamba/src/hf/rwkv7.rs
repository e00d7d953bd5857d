//! RWKV-7, as flash-linear-attention stores it: keys and tensors, under the names that llama.cpp
//! gives them.

use kv_block::BlockFormat;
use kv_graph::weights::{Weight, WeightError, WeightInfo, WeightSource};
use model_core::hf::{
    FixedValue, HfClass, HfConfig, HfWeights, Key, Keys, ModelFileError, ROW_KEYS, TensorRule,
    TensorStep, VOCAB_SIZE, in_layers, only, same, with,
};

use super::as_u32;
use super::hybrid::CONTEXT;
use crate::rwkv::{RWKV7, RWKV7_PARTS};

/// The class. Which kernels compute it (`attn_mode`, `fuse_norm`) changes rounding alone.
pub(super) const CLASS: HfClass = HfClass {
    name: "RWKV7ForCausalLM",
    architecture: RWKV7.name,
    keys: &[ROW_KEYS, KEYS],
    tensors: &[FRAME_TENSORS, TIME_MIX, SHARES, CHANNEL_MIX],
    derive: Some(fused_shares),
    ..HfClass::EMPTY
};

const KEYS: &[Key] = &[
    VOCAB_SIZE,
    Key::Constant {
        to: "context_length",
        value: CONTEXT,
    },
    Key::Number {
        to: "attention.layer_norm_epsilon",
        from: "norm_eps",
    },
    Key::Count {
        to: "attention.decay_lora_rank",
        from: "decay_low_rank_dim",
    },
    Key::Count {
        to: "attention.iclr_lora_rank",
        from: "a_low_rank_dim",
    },
    Key::Count {
        to: "attention.value_residual_mix_lora_rank",
        from: "v_low_rank_dim",
    },
    Key::Count {
        to: "attention.gate_lora_rank",
        from: "gate_low_rank_dim",
    },
    only("hidden_act", FixedValue::Text(&["sqrelu"])),
    only("norm_bias", FixedValue::Flag(true)),
    only("norm_first", FixedValue::Flag(true)),
    Key::With(no_attention),
    Key::With(heads),
    Key::With(feed_forward),
];

/// Layers that attend are not computed.
fn no_attention(config: &HfConfig, _: &mut Keys) -> Result<(), ModelFileError> {
    match config.value("attn") {
        None => Ok(()),
        Some(_) => Err(config.wrong("attn", "null")),
    }
}

/// Heads by their size, or by their number where there is none, and their norm, whose `eps` is that
/// of other norms times the size.
fn heads(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let dim = config.count("hidden_size")?;
    let (key, n) = match config.optional_count("head_dim")? {
        Some(n) => ("head_dim", n),
        None => ("num_heads", config.count("num_heads")?),
    };
    if !dim.is_multiple_of(n) {
        let wanted = format!("a divisor of 'hidden_size', which is {dim}");
        return Err(config.wrong(key, wanted));
    }
    let head_dim = if key == "head_dim" { n } else { dim / n };
    keys.set("wkv.head_size", as_u32(head_dim));
    let eps = config.number("norm_eps")? * head_dim as f64;
    keys.set("attention.group_norm_epsilon", eps as f32);
    let widths = config.optional_numbers("value_dim")?.unwrap_or_default();
    match widths.iter().position(|&width| width != dim as f64) {
        None => Ok(()),
        Some(at) => Err(config.wrong(&format!("value_dim.{at}"), dim.to_string())),
    }
}

/// Rounded up to a multiple of 32 where the config has a ratio only.
fn feed_forward(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let hidden = match config.optional_count("intermediate_size")? {
        Some(hidden) => hidden,
        None => {
            let ratio = config.optional_number("hidden_ratio")?.unwrap_or(4.0);
            let hidden = (config.count("hidden_size")? as f64 * ratio) as usize;
            if !ratio.is_finite() || hidden == 0 {
                return Err(config.wrong("hidden_ratio", "a number that makes at least 1"));
            }
            hidden.next_multiple_of(32)
        }
    };
    keys.set("feed_forward_length", as_u32(hidden));
    Ok(())
}

const FRAME_TENSORS: &[TensorRule] = &[
    same("token_embd.weight", "model.embeddings.weight"),
    same("token_embd_norm.weight", "model.layers.0.pre_norm.weight"),
    same("token_embd_norm.bias", "model.layers.0.pre_norm.bias"),
    same("output_norm.weight", "model.norm.weight"),
    same("output_norm.bias", "model.norm.bias"),
    same("output.weight", "lm_head.weight"),
];

const TIME_MIX: &[TensorRule] = &in_layers(
    "model.layers.{l}.",
    [
        same("attn_norm.weight", "attn_norm.weight"),
        same("attn_norm.bias", "attn_norm.bias"),
        same("time_mix_w1.weight", "attn.w_lora.lora.0.weight"),
        same("time_mix_w2.weight", "attn.w_lora.lora.2.weight"),
        same("time_mix_w0.weight", "attn.w_lora.lora.2.bias"),
        same("time_mix_a1.weight", "attn.a_lora.lora.0.weight"),
        same("time_mix_a2.weight", "attn.a_lora.lora.2.weight"),
        same("time_mix_a0.weight", "attn.a_lora.lora.2.bias"),
        same("time_mix_v1.weight", "attn.v_lora.lora.0.weight"),
        same("time_mix_v2.weight", "attn.v_lora.lora.2.weight"),
        same("time_mix_v0.weight", "attn.v_lora.lora.2.bias"),
        same("time_mix_g1.weight", "attn.g_lora.lora.0.weight"),
        same("time_mix_g2.weight", "attn.g_lora.lora.2.weight"),
        same("time_mix_k_k.weight", "attn.k_k"),
        same("time_mix_k_a.weight", "attn.k_a"),
        with("time_mix_r_k.weight", "attn.r_k", &[TensorStep::Flat]),
        same("time_mix_receptance.weight", "attn.r_proj.weight"),
        same("time_mix_key.weight", "attn.k_proj.weight"),
        same("time_mix_value.weight", "attn.v_proj.weight"),
        same("time_mix_output.weight", "attn.o_proj.weight"),
        same("time_mix_ln.weight", "attn.g_norm.weight"),
        same("time_mix_ln.bias", "attn.g_norm.bias"),
    ],
);

const CHANNEL_MIX: &[TensorRule] = &in_layers(
    "model.layers.{l}.",
    [
        same("attn_norm_2.weight", "ffn_norm.weight"),
        same("attn_norm_2.bias", "ffn_norm.bias"),
        with("channel_mix_lerp_k.weight", "ffn.x_k", &[TensorStep::Flat]),
        same("channel_mix_key.weight", "ffn.key.weight"),
        same("channel_mix_value.weight", "ffn.value.weight"),
    ],
);

/// Shares of the row before; GGUF has all in one tensor.
const SHARES: &[TensorRule] = &in_layers(
    "model.layers.{l}.attn.",
    [
        with("time_mix_lerp_r.weight", "x_r", &[TensorStep::Flat]),
        with("time_mix_lerp_w.weight", "x_w", &[TensorStep::Flat]),
        with("time_mix_lerp_k.weight", "x_k", &[TensorStep::Flat]),
        with("time_mix_lerp_v.weight", "x_v", &[TensorStep::Flat]),
        with("time_mix_lerp_a.weight", "x_a", &[TensorStep::Flat]),
        with("time_mix_lerp_g.weight", "x_g", &[TensorStep::Flat]),
    ],
);

fn fused_shares(config: &HfConfig, weights: &mut HfWeights) -> Result<(), ModelFileError> {
    let dim = config.count("hidden_size")?;
    let format = BlockFormat::F32;
    for layer in 0..config.count("num_hidden_layers")? {
        let name = format!("blk.{layer}.time_mix_lerp_fused.weight");
        let parts = RWKV7_PARTS.map(|part| format!("blk.{layer}.time_mix_lerp_{part}.weight"));
        for part in &parts {
            let found = weights.describe(part).map(|info| info.shape);
            if found.as_deref() != Ok(&[dim]) {
                return Err(ModelFileError::Tensor {
                    name: weights.name_in_files(part).unwrap_or_default(),
                    reason: format!("it is missing or has not {dim} values"),
                });
            }
            weights.hide(part);
        }
        let shape = vec![RWKV7_PARTS.len(), 1, 1, dim];
        let info = WeightInfo {
            shape: shape.clone(),
            format,
        };
        let made = name.clone();
        weights.derive(&name, info, move |weights| {
            let values = parts
                .iter()
                .map(|part| Ok(weights.require(part)?.to_f32()))
                .collect::<Result<Vec<_>, WeightError>>()?;
            Weight::from_f32(&made, shape.clone(), &values.concat())
        });
    }
    Ok(())
}
