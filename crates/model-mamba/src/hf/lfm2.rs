//! LFM2 and its mixture of experts: short convolutions, and now and then attention.

use model_core::hf::{
    FixedValue, HfClass, HfConfig, Key, Keys, ModelFileError, ROPE_KEYS, ROW_KEYS, TRAINED_LENGTH,
    TensorRule, TensorStep, VOCAB_SIZE, in_layers, layer_types, same, with,
};

use super::as_u32;
use super::hybrid::kv_heads;

const COMMON_KEYS: &[Key] = &[
    TRAINED_LENGTH,
    Key::All(ROW_KEYS),
    VOCAB_SIZE,
    Key::Count {
        to: "attention.head_count",
        from: "num_attention_heads",
    },
    Key::Number {
        to: "attention.layer_norm_rms_epsilon",
        from: "norm_eps",
    },
    Key::Count {
        to: "shortconv.l_cache",
        from: "conv_L_cache",
    },
    Key::With(conv_bias),
    Key::Only {
        from: "is_causal",
        is: FixedValue::Flag(true),
    },
    Key::With(layer_kinds),
    Key::With(head_length),
];

/// The number of GGUF's `expert_gating_func`.
const SIGMOID: u32 = 2;

const EXPERT_KEYS: &[Key] = &[
    Key::Count {
        to: "feed_forward_length",
        from: "intermediate_size",
    },
    Key::Count {
        to: "expert_count",
        from: "num_experts",
    },
    Key::Count {
        to: "expert_used_count",
        from: "num_experts_per_tok",
    },
    Key::Count {
        to: "expert_feed_forward_length",
        from: "moe_intermediate_size",
    },
    Key::Constant {
        to: "expert_gating_func",
        value: SIGMOID,
    },
    Key::Only {
        from: "use_expert_bias",
        is: FixedValue::Flag(true),
    },
    Key::With(routing),
];

/// The classes.
pub(super) const CLASSES: &[HfClass] = &[
    LFM2,
    // With pictures: what its vision tower makes comes in as rows.
    HfClass {
        name: "Lfm2VlForConditionalGeneration",
        section: Some("text_config"),
        text: "language_model.",
        other_parts: &["model.vision_tower.", "model.multi_modal_projector."],
        ..LFM2
    },
    HfClass {
        name: "Lfm2MoeForCausalLM",
        architecture: "lfm2moe",
        keys: &[COMMON_KEYS, ROPE_KEYS, EXPERT_KEYS],
        tensors: &[FRAME_TENSORS, LAYERS, DENSE, EXPERTS],
        defaults: &[
            ("num_key_value_heads", 8),
            ("num_dense_layers", 2),
            ("rope_theta", 1_000_000),
        ],
        ..HfClass::EMPTY
    },
];

const LFM2: HfClass = HfClass {
    name: "Lfm2ForCausalLM",
    architecture: "lfm2",
    keys: &[COMMON_KEYS, ROPE_KEYS, &[Key::With(feed_forward)]],
    tensors: &[FRAME_TENSORS, LAYERS, DENSE],
    aliases: &[("intermediate_size", "block_ff_dim")],
    defaults: &[("num_key_value_heads", 8), ("rope_theta", 1_000_000)],
    ..HfClass::EMPTY
};

/// GGUF files call the last norm that of the embedding.
const FRAME_TENSORS: &[TensorRule] = &[
    same("token_embd.weight", "model.embed_tokens.weight"),
    same("token_embd_norm.weight", "model.embedding_norm.weight"),
    same("output.weight", "lm_head.weight"),
];

const LAYERS: &[TensorRule] = &in_layers(
    "model.layers.{l}.",
    [
        same("attn_norm.weight", "operator_norm.weight"),
        same("ffn_norm.weight", "ffn_norm.weight"),
        with(
            "shortconv.conv.weight",
            "conv.conv.weight",
            &[TensorStep::Squeezed],
        ),
        same("shortconv.in_proj.weight", "conv.in_proj.weight"),
        same("shortconv.out_proj.weight", "conv.out_proj.weight"),
        same("shortconv.conv.bias", "conv.conv.bias"),
        same("shortconv.in_proj.bias", "conv.in_proj.bias"),
        same("shortconv.out_proj.bias", "conv.out_proj.bias"),
        same("attn_q.weight", "self_attn.q_proj.weight"),
        same("attn_k.weight", "self_attn.k_proj.weight"),
        same("attn_v.weight", "self_attn.v_proj.weight"),
        same("attn_output.weight", "self_attn.out_proj.weight"),
        same("attn_q_norm.weight", "self_attn.q_layernorm.weight"),
        same("attn_k_norm.weight", "self_attn.k_layernorm.weight"),
    ],
);

const DENSE: &[TensorRule] = &in_layers(
    "model.layers.{l}.feed_forward.",
    [
        same("ffn_gate.weight", "w1.weight"),
        same("ffn_down.weight", "w2.weight"),
        same("ffn_up.weight", "w3.weight"),
    ],
);

const EXPERTS: &[TensorRule] = &in_layers(
    "model.layers.{l}.feed_forward.",
    [
        same("ffn_gate_inp.weight", "gate.weight"),
        same("exp_probs_b.bias", "expert_bias"),
        same("ffn_gate_exps.weight", "experts.{e}.w1.weight"),
        same("ffn_down_exps.weight", "experts.{e}.w2.weight"),
        same("ffn_up_exps.weight", "experts.{e}.w3.weight"),
    ],
);

/// Layers of the types that the config lists, or by the numbers of those that attend; without
/// either all attend.
fn layer_kinds(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    if let Some(types) = layer_types(config, &["conv", "full_attention"])? {
        return kv_heads(config, keys, |layer| types.get(layer) != Some(&"conv"));
    }
    let attending = config.optional_numbers("full_attn_idxs")?;
    kv_heads(config, keys, |layer| {
        let is_listed = |layers: &Vec<f64>| layers.contains(&(layer as f64));
        attending.as_ref().is_none_or(is_listed)
    })
}

/// Checks the flag for biases of convolutions; their tensors say whether there are any.
fn conv_bias(config: &HfConfig, _: &mut Keys) -> Result<(), ModelFileError> {
    config.optional_flag("conv_bias").map(drop)
}

/// The size of a head, where the config names one.
fn head_length(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    if let Some(dim) = config.optional_count("head_dim")? {
        keys.set("attention.key_length", as_u32(dim));
        keys.set("attention.value_length", as_u32(dim));
    }
    Ok(())
}

/// The width between matrices, of which two thirds are taken, in multiples of another number,
/// unless the config says otherwise.
fn feed_forward(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let mut width = config.count("intermediate_size")?;
    if config.optional_flag("block_auto_adjust_ff_dim")? != Some(false) {
        width = 2 * width / 3;
        let key = "block_ffn_dim_multiplier";
        match config.optional_number(key)? {
            Some(factor) if !(factor.is_finite() && factor > 0.0) => {
                return Err(config.wrong(key, "a number above 0"));
            }
            Some(factor) => width = (factor * width as f64) as usize,
            None => {}
        }
        let multiple = config.optional_count("block_multiple_of")?.unwrap_or(256);
        width = width.div_ceil(multiple) * multiple;
    }
    keys.set("feed_forward_length", as_u32(width));
    Ok(())
}

/// Dense first layers, and the weights of chosen experts.
fn routing(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let n_dense = config.number("num_dense_layers")?;
    if !(n_dense >= 0.0 && n_dense.fract() == 0.0) {
        return Err(config.wrong("num_dense_layers", "a whole number of at least 0"));
    }
    keys.set("leading_dense_block_count", n_dense as u32);
    let sums = config.optional_flag("norm_topk_prob")?.unwrap_or(true);
    keys.set("expert_weights_norm", sums);
    let key = "routed_scaling_factor";
    match config.optional_number(key)?.unwrap_or(1.0) {
        factor if factor.is_finite() && factor > 0.0 => {
            keys.set("expert_weights_scale", factor as f32);
            Ok(())
        }
        _ => Err(config.wrong(key, "a number above 0")),
    }
}
