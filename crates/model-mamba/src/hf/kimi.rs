//! Kimi Linear: delta rules whose key values decay by themselves, and attention over latents that
//! do not rotate.

use model_core::gguf::Array;
use model_core::hf::{
    FixedValue, GATED_TENSORS, HfClass, HfConfig, Key, Keys, ModelFileError, RMS_EPS, SILU,
    TensorRule, TensorStep, VOCAB_SIZE, WIDTH_KEYS, in_layers, latent_head_dims, latent_key_rows,
    latent_value_rows, layer_types, only, same, with,
};

use super::as_u32;
use crate::kimi::KDA_HEADS;

const ON: FixedValue = FixedValue::Flag(true);
const OFF: FixedValue = FixedValue::Flag(false);

const KEYS: &[Key] = &[
    Key::All(WIDTH_KEYS),
    SILU,
    Key::CountOr {
        to: "context_length",
        from: "model_max_length",
        or: "max_position_embeddings",
    },
    VOCAB_SIZE,
    Key::Count {
        to: "attention.head_count",
        from: "num_attention_heads",
    },
    only("is_causal", ON),
    only("attention_bias", OFF),
    only("mla_use_nope", FixedValue::StatedFlag(true)),
    Key::With(layer_kinds),
    Key::With(delta_sizes),
    Key::With(latents),
    Key::With(mixtures),
];

/// The class.
pub(super) const CLASS: HfClass = HfClass {
    name: "KimiLinearForCausalLM",
    architecture: "kimi-linear",
    keys: &[KEYS, RMS_EPS],
    tensors: &[FRAME_TENSORS, LAYERS, GATED_TENSORS, MIXTURE],
    defaults: &[("num_key_value_heads", 32)],
    ..HfClass::EMPTY
};

const FRAME_TENSORS: &[TensorRule] = &[
    same("token_embd.weight", "model.embed_tokens.weight"),
    same("output_norm.weight", "model.norm.weight"),
    same("output.weight", "lm_head.weight"),
    same(
        "blk.{l}.attn_norm.weight",
        "model.layers.{l}.input_layernorm.weight",
    ),
    same(
        "blk.{l}.ffn_norm.weight",
        "model.layers.{l}.post_attention_layernorm.weight",
    ),
];

/// A kernel, `[channels, 1, width]` in the files.
const KERNEL: &[TensorStep] = &[TensorStep::LeadingOne];

/// Both kinds of layers, which share some names.
const LAYERS: &[TensorRule] = &in_layers(
    "model.layers.{l}.self_attn.",
    [
        same("attn_q.weight", "q_proj.weight"),
        same("attn_output.weight", "o_proj.weight"),
        same("attn_k.weight", "k_proj.weight"),
        same("attn_v.weight", "v_proj.weight"),
        with("ssm_conv1d_q.weight", "q_conv1d.weight", KERNEL),
        with("ssm_conv1d_k.weight", "k_conv1d.weight", KERNEL),
        with("ssm_conv1d_v.weight", "v_conv1d.weight", KERNEL),
        same("ssm_f_a.weight", "f_a_proj.weight"),
        same("ssm_f_b.weight", "f_b_proj.weight"),
        same("ssm_g_a.weight", "g_a_proj.weight"),
        same("ssm_g_b.weight", "g_b_proj.weight"),
        same("ssm_beta.weight", "b_proj.weight"),
        with("ssm_a", "A_log", &[TensorStep::NegativeExp]),
        same("ssm_dt.bias", "dt_bias"),
        same("ssm_norm.weight", "o_norm.weight"),
        same("attn_kv_a_mqa.weight", "kv_a_proj_with_mqa.weight"),
        same("attn_kv_a_norm.weight", "kv_a_layernorm.weight"),
        with(
            "attn_k_b.weight",
            "kv_b_proj.weight",
            &[
                TensorStep::HeadRows(latent_key_rows),
                TensorStep::Transposed,
            ],
        ),
        with(
            "attn_v_b.weight",
            "kv_b_proj.weight",
            &[TensorStep::HeadRows(latent_value_rows)],
        ),
    ],
);

const MIXTURE: &[TensorRule] = &in_layers(
    "model.layers.{l}.block_sparse_moe.",
    [
        same("ffn_gate_inp.weight", "gate.weight"),
        same("exp_probs_b.bias", "gate.e_score_correction_bias"),
        same("ffn_gate_exps.weight", "experts.{e}.w1.weight"),
        same("ffn_down_exps.weight", "experts.{e}.w2.weight"),
        same("ffn_up_exps.weight", "experts.{e}.w3.weight"),
        same("ffn_gate_shexp.weight", "shared_experts.gate_proj.weight"),
        same("ffn_up_shexp.weight", "shared_experts.up_proj.weight"),
        same("ffn_down_shexp.weight", "shared_experts.down_proj.weight"),
    ],
);

/// The value of a key in one of two places, which must agree where both have it: newer files have
/// it at the top, older ones in `linear_attn_config`.
fn in_either(config: &HfConfig, top: &str, inner: &str) -> Result<usize, ModelFileError> {
    let inner = format!("linear_attn_config.{inner}");
    match (config.optional_count(top)?, config.optional_count(&inner)?) {
        (Some(own), Some(other)) if own != other => {
            Err(config.wrong(&inner, format!("'{top}', which is {own}")))
        }
        (Some(own), _) | (None, Some(own)) => Ok(own),
        (None, None) => config.count(&inner),
    }
}

/// The layers that attend: those of the types that the config lists, or of its list of numbers,
/// which count from 1. Both must agree where both are there.
fn layer_kinds(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let n_layers = config.count("num_hidden_layers")?;
    let types = layer_types(config, &["linear_attention", "full_attention"])?;
    let from_types: Option<Vec<bool>> =
        types.map(|types| types.iter().map(|&t| t == "full_attention").collect());
    let listed = |key: &str| {
        let layers = config.optional_numbers(key)?;
        let is_listed = |layers: Vec<f64>| -> Vec<bool> {
            (1..=n_layers)
                .map(|layer| layers.contains(&(layer as f64)))
                .collect()
        };
        Ok::<_, ModelFileError>(layers.map(is_listed))
    };
    let [full, kda] =
        ["full_attn_layers", "kda_layers"].map(|key| format!("linear_attn_config.{key}"));
    let attends = match (from_types, listed(&full)?) {
        (Some(types), Some(list)) if types != list => {
            return Err(config.wrong(&full, "the layers that attend in 'layer_types'"));
        }
        (Some(own), _) | (None, Some(own)) => own,
        (None, None) => return Err(config.missing(&full, "a list of layers, from 1")),
    };
    if let Some(recurrent) = listed(&kda)?
        && recurrent.iter().zip(&attends).any(|(a, b)| a == b)
    {
        return Err(config.wrong(&kda, "all layers that do not attend, from 1"));
    }
    let heads = attends.iter().map(|&attends| i32::from(attends)).collect();
    keys.set("attention.head_count_kv", Array::I32(heads));
    Ok(())
}

/// Sizes of the delta rule.
fn delta_sizes(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let heads = in_either(config, "linear_num_heads", "num_heads")?;
    if heads != config.count("num_attention_heads")? {
        keys.set(KDA_HEADS, as_u32(heads));
    }
    let dim = in_either(config, "linear_head_dim", "head_dim")?;
    let width = in_either(config, "linear_conv_kernel_dim", "short_conv_kernel_size")?;
    keys.set("kda.head_dim", as_u32(dim));
    keys.set("ssm.conv_kernel", as_u32(width));
    Ok(())
}

/// Latents, and the key that all heads share.
fn latents(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let heads = config.count("num_attention_heads")?;
    let key = "num_key_value_heads";
    if config.optional_count(key)?.is_some_and(|n| n != heads) {
        let wanted = format!("'num_attention_heads', which is {heads}");
        return Err(config.wrong(key, wanted));
    }
    let key = "q_lora_rank";
    if config.optional_count(key)?.is_some() {
        return Err(config.wrong(key, "null"));
    }
    let [plain, shared] = latent_head_dims(config)?;
    let rank = config.count("kv_lora_rank")?;
    keys.set("attention.kv_lora_rank", as_u32(rank));
    keys.set("attention.key_length", as_u32(rank + shared));
    keys.set("attention.key_length_mla", as_u32(plain + shared));
    let v_dim = config.count("v_head_dim")?;
    keys.set("attention.value_length_mla", as_u32(v_dim));
    // What llama.cpp's converter writes, which means nothing here.
    if let Some(dim) = config.optional_count("head_dim")? {
        keys.set("attention.value_length", as_u32(dim));
    }
    keys.set("rope.dimension_count", as_u32(shared));
    let key = "qk_head_dim";
    match config.optional_count(key)? {
        Some(own) if own != plain + shared => Err(config.wrong(key, (plain + shared).to_string())),
        _ => Ok(()),
    }
}

/// The number of GGUF's `expert_gating_func`.
const SIGMOID: u32 = 2;

/// Dense first layers and then mixtures of experts, without groups.
fn mixtures(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    for key in ["num_expert_group", "topk_group", "moe_layer_freq"] {
        if config.optional_count(key)?.is_some_and(|n| n != 1) {
            return Err(config.wrong(key, "1"));
        }
    }
    let key = "moe_router_activation_func";
    if config
        .optional_text(key)?
        .is_some_and(|text| text != "sigmoid")
    {
        return Err(config.wrong(key, "sigmoid"));
    }
    let key = "first_k_dense_replace";
    let n_dense = match config.optional_number(key)? {
        None | Some(0.0) => 0,
        Some(_) => config.count(key)?,
    };
    let key = "mlp_layer_types";
    for (layer, kind) in config.optional_texts(key)?.iter().flatten().enumerate() {
        let wanted = if layer < n_dense { "dense" } else { "sparse" };
        if *kind != wanted {
            return Err(config.wrong(&format!("{key}.{layer}"), wanted));
        }
    }
    for (to, from) in [
        ("expert_count", "num_experts"),
        ("expert_used_count", "num_experts_per_token"),
        ("expert_feed_forward_length", "moe_intermediate_size"),
        ("expert_shared_count", "num_shared_experts"),
    ] {
        keys.set(to, as_u32(config.count(from)?));
    }
    let scale = config.number("routed_scaling_factor")?;
    if !(scale.is_finite() && scale > 0.0) {
        return Err(config.wrong("routed_scaling_factor", "a number above 0"));
    }
    keys.set("expert_weights_scale", scale as f32);
    let sums = config.optional_flag("moe_renormalize")?.unwrap_or(true);
    keys.set("expert_weights_norm", sums);
    keys.set("expert_gating_func", SIGMOID);
    keys.set("expert_group_used_count", 1u32);
    keys.set("leading_dense_block_count", as_u32(n_dense));
    Ok(())
}
