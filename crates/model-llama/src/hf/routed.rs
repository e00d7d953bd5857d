//! [`CLASSES`]: classes whose mixtures of experts have biases on their choice or shared experts,
//! with the keys and tensors of their own.

use model_core::hf::{
    ATTENTION_TENSORS, ATTENTION_VECTORS, DECODER_KEYS, EMBEDDING_TENSORS, FixedValue,
    GATED_TENSORS, HEAD_TENSORS, HfClass, HfConfig, INPUT_NORM, Key, Keys, ModelFileError,
    NORM_BEFORE_FFN, RMS_EPS, ROPE_KEYS, SILU, TensorRule, TensorStep, full_attention, head_dim,
    in_layers, only, rope_keys, same, with,
};

use super::LLAMA;
use super::keys::{EXPERT_KEYS, as_u32};
use super::recent::{NORM_AFTER_ATTENTION, OFF, ON};
use super::tensors::{MIXTRAL_TENSORS, QWEN3_MOE_EXPERTS, QWEN3_MOE_ROUTER};

/// All classes of this file.
pub(super) const CLASSES: &[HfClass] = &[
    HfClass {
        name: "Qwen2MoeForCausalLM",
        architecture: "qwen2moe",
        keys: &[
            DECODER_KEYS,
            RMS_EPS,
            ROPE_KEYS,
            EXPERT_KEYS,
            EXPERT_WIDTH,
            &[
                SILU,
                Key::With(full_attention),
                only("qkv_bias", ON),
                Key::Count {
                    to: "expert_shared_feed_forward_length",
                    from: "shared_expert_intermediate_size",
                },
                Key::With(sum_of_chosen),
            ],
        ],
        tensors: &[
            EMBEDDING_TENSORS,
            INPUT_NORM,
            ATTENTION_TENSORS,
            ATTENTION_VECTORS,
            NORM_BEFORE_FFN,
            GATED_TENSORS,
            QWEN3_MOE_ROUTER,
            QWEN3_MOE_EXPERTS,
            QWEN2_MOE_SHARED,
        ],
        ..LLAMA
    },
    HfClass {
        name: "Glm4MoeForCausalLM",
        architecture: "glm4moe",
        keys: &[
            DECODER_KEYS,
            RMS_EPS,
            ROPE_KEYS,
            EXPERT_WIDTH,
            &[SILU],
            GLM4_MOE_KEYS,
        ],
        tensors: &[
            EMBEDDING_TENSORS,
            INPUT_NORM,
            ATTENTION_TENSORS,
            ATTENTION_VECTORS,
            NORM_AFTER_ATTENTION,
            GATED_TENSORS,
            QWEN3_MOE_ROUTER,
            QWEN3_MOE_EXPERTS,
            GLM4_MOE_EXPERTS,
            HEAD_TENSORS,
        ],
        rotated_part: Some(0.5),
        ..LLAMA
    },
    HfClass {
        name: "Ernie4_5_MoeForCausalLM",
        architecture: "ernie4_5-moe",
        keys: &[
            DECODER_KEYS,
            RMS_EPS,
            ROPE_KEYS,
            EXPERT_WIDTH,
            &[SILU, only("use_bias", OFF), Key::With(ernie_experts)],
        ],
        tensors: &[
            EMBEDDING_TENSORS,
            INPUT_NORM,
            ATTENTION_TENSORS,
            NORM_BEFORE_FFN,
            GATED_TENSORS,
            QWEN3_MOE_ROUTER,
            QWEN3_MOE_EXPERTS,
            ERNIE_EXPERTS,
        ],
        defaults: &[("num_key_value_heads", 4), ("rope_theta", 500_000)],
        ..LLAMA
    },
    HfClass {
        name: "MiniMaxM2ForCausalLM",
        architecture: "minimax-m2",
        keys: &[
            DECODER_KEYS,
            RMS_EPS,
            EXPERT_KEYS,
            &[
                SILU,
                Key::Count {
                    to: "expert_feed_forward_length",
                    from: "intermediate_size",
                },
                Key::Constant {
                    to: "expert_gating_func",
                    value: SIGMOID,
                },
                Key::Only {
                    from: "scoring_func",
                    is: FixedValue::Text(&["sigmoid"]),
                },
                Key::Only {
                    from: "qk_norm_type",
                    is: FixedValue::Text(&["per_layer"]),
                },
                only("use_qk_norm", ON),
                only("use_routing_bias", ON),
                only("attention_bias", OFF),
                Key::With(minimax_rope),
            ],
        ],
        tensors: &[
            EMBEDDING_TENSORS,
            INPUT_NORM,
            ATTENTION_TENSORS,
            ATTENTION_VECTORS,
            NORM_BEFORE_FFN,
            MIXTRAL_TENSORS,
            MINIMAX_BIAS,
        ],
        defaults: &[("head_dim", 128), ("rope_theta", 5_000_000)],
        ..LLAMA
    },
];

/// The number of GGUF's `expert_gating_func`.
const SIGMOID: u32 = 2;

const EXPERT_WIDTH: &[Key] = &[Key::Count {
    to: "expert_feed_forward_length",
    from: "moe_intermediate_size",
}];

/// Routing that GGUF files spell out.
const GLM4_MOE_KEYS: &[Key] = &[
    Key::Count {
        to: "expert_count",
        from: "n_routed_experts",
    },
    Key::Count {
        to: "expert_used_count",
        from: "num_experts_per_tok",
    },
    Key::Count {
        to: "expert_group_count",
        from: "n_group",
    },
    Key::Count {
        to: "expert_group_used_count",
        from: "topk_group",
    },
    Key::Count {
        to: "expert_shared_count",
        from: "n_shared_experts",
    },
    Key::Number {
        to: "expert_weights_scale",
        from: "routed_scaling_factor",
    },
    Key::Constant {
        to: "expert_gating_func",
        value: SIGMOID,
    },
    Key::With(glm4_moe_layers),
];

const QWEN2_MOE_SHARED: &[TensorRule] = &in_layers(
    "model.layers.{l}.mlp.",
    [
        same("ffn_gate_inp_shexp.weight", "shared_expert_gate.weight"),
        same("ffn_gate_shexp.weight", "shared_expert.gate_proj.weight"),
        same("ffn_up_shexp.weight", "shared_expert.up_proj.weight"),
        same("ffn_down_shexp.weight", "shared_expert.down_proj.weight"),
    ],
);

const GLM4_MOE_EXPERTS: &[TensorRule] = &in_layers(
    "model.layers.{l}.mlp.",
    [
        same("exp_probs_b.bias", "gate.e_score_correction_bias"),
        same("ffn_gate_shexp.weight", "shared_experts.gate_proj.weight"),
        same("ffn_up_shexp.weight", "shared_experts.up_proj.weight"),
        same("ffn_down_shexp.weight", "shared_experts.down_proj.weight"),
    ],
);

const ERNIE_EXPERTS: &[TensorRule] = &in_layers(
    "model.layers.{l}.mlp.",
    [
        with(
            "exp_probs_b.bias",
            "moe_statics.e_score_correction_bias",
            &[TensorStep::Squeezed],
        ),
        same("ffn_gate_shexp.weight", "shared_experts.gate_proj.weight"),
        same("ffn_up_shexp.weight", "shared_experts.up_proj.weight"),
        same("ffn_down_shexp.weight", "shared_experts.down_proj.weight"),
    ],
);

const MINIMAX_BIAS: &[TensorRule] = &in_layers(
    "model.layers.{l}.block_sparse_moe.",
    [same("exp_probs_b.bias", "e_score_correction_bias")],
);

/// The key whose default in transformers is false.
pub(super) fn sum_of_chosen(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let sums = config.optional_flag("norm_topk_prob")?.unwrap_or(false);
    keys.set("expert_weights_norm", sums);
    Ok(())
}

/// The first layers are dense; weights of chosen experts add up to 1 unless the config says
/// otherwise.
fn glm4_moe_layers(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let sums = config.optional_flag("norm_topk_prob")?.unwrap_or(true);
    keys.set("expert_weights_norm", sums);
    let n_dense = config.number("first_k_dense_replace")?;
    if !(n_dense >= 0.0 && n_dense.fract() == 0.0) {
        return Err(config.wrong("first_k_dense_replace", "a whole number of at least 0"));
    }
    keys.set("leading_dense_block_count", n_dense as u32);
    Ok(())
}

fn ernie_experts(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let smallest = config.optional_number("moe_norm_min")?;
    if smallest.is_some_and(|least| least > 1e-6) {
        return Err(config.wrong(
            "moe_norm_min",
            "a number that no sum of weights falls below",
        ));
    }
    let count = |key: &str| config.count(key).map(as_u32);
    keys.set("expert_count", count("moe_num_experts")?);
    keys.set("expert_used_count", count("moe_k")?);
    let interval = config.optional_count("moe_layer_interval")?.unwrap_or(1);
    keys.set("interleave_moe_layer_step", as_u32(interval));
    let first = config.number("moe_layer_start_index")?;
    if !(first >= 0.0 && first.fract() == 0.0) {
        return Err(config.wrong("moe_layer_start_index", "a whole number of at least 0"));
    }
    keys.set("leading_dense_block_count", first as u32);
    if let Some(n_shared) = config.optional_number("moe_num_shared_experts")?
        && n_shared > 0.0
    {
        let (n_shared, width) = (
            count("moe_num_shared_experts")?,
            count("moe_intermediate_size")?,
        );
        keys.set("expert_shared_count", n_shared);
        keys.set("expert_shared_feed_forward_length", n_shared * width);
    }
    Ok(())
}

/// The rotated values of a head, by either of two keys.
fn minimax_rope(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    rope_keys(config, keys)?;
    let key = "rotary_dim";
    let Some(n_rot) = config.optional_count(key)? else {
        return Ok(());
    };
    if n_rot > head_dim(config)? {
        return Err(config.wrong(key, format!("at most {}", head_dim(config)?)));
    }
    keys.set("rope.dimension_count", as_u32(n_rot));
    Ok(())
}
