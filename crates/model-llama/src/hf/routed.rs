//! [`CLASSES`]: classes whose mixtures of experts have biases on their choice or shared experts,
//! with the keys and tensors of their own.

use model_core::hf::{
    ATTENTION_TENSORS, ATTENTION_VECTORS, DECODER_KEYS, EMBEDDING_TENSORS, FixedValue,
    GATED_TENSORS, HEAD_TENSORS, HfClass, HfConfig, INPUT_NORM, Key, Keys, ModelFileError,
    NORM_BEFORE_FFN, RMS_EPS, ROPE_KEYS, SILU, TensorRule, TensorStep, full_attention, groups,
    head_dim, in_layers, layer_types, only, rope_keys, same, with,
};

use super::LLAMA;
use super::deepseek::sum_of_weights;
use super::keys::{EXPERT_KEYS, as_u32};
use super::recent::{NORM_AFTER_ATTENTION, OFF, ON, three_of_four_windows};
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
    GLM4_MOE,
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
        name: "Dots1ForCausalLM",
        architecture: "dots1",
        keys: &[
            DECODER_KEYS,
            RMS_EPS,
            ROPE_KEYS,
            EXPERT_WIDTH,
            SIGMOID_ROUTED,
            &[
                SILU,
                only("attention_bias", OFF),
                Key::With(sum_of_chosen),
                Key::With(dots_windows),
            ],
        ],
        tensors: SIGMOID_TENSORS,
        defaults: &[("max_window_layers", 62), ("sliding_window", 4096)],
        ..LLAMA
    },
    EXAONE_MOE,
    // As the published files call it.
    HfClass {
        name: "ExaoneMoEForCausalLM",
        ..EXAONE_MOE
    },
    HfClass {
        name: "HYV3ForCausalLM",
        architecture: "hy_v3",
        keys: &[
            DECODER_KEYS,
            RMS_EPS,
            ROPE_KEYS,
            EXPERT_WIDTH,
            SIGMOID_ROUTED,
            &[
                SILU,
                only("attention_bias", OFF),
                only("mlp_bias", OFF),
                only("route_norm", ON),
            ],
        ],
        tensors: &[
            EMBEDDING_TENSORS,
            INPUT_NORM,
            ATTENTION_TENSORS,
            ATTENTION_VECTORS,
            NORM_BEFORE_FFN,
            GATED_TENSORS,
            QWEN3_MOE_EXPERTS,
            HY_V3_EXPERTS,
        ],
        aliases: &[
            ("n_routed_experts", "num_experts"),
            ("n_shared_experts", "num_shared_experts"),
            ("routed_scaling_factor", "router_scaling_factor"),
        ],
        defaults: &[
            ("first_k_dense_replace", 1),
            ("head_dim", 128),
            ("num_key_value_heads", 8),
            ("rope_theta", 11_158_840),
        ],
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

/// K-EXAONE.
const EXAONE_MOE: HfClass = HfClass {
    name: "ExaoneMoeForCausalLM",
    architecture: "exaone-moe",
    keys: &[
        DECODER_KEYS,
        RMS_EPS,
        ROPE_KEYS,
        EXPERT_WIDTH,
        SIGMOID_ROUTED,
        &[
            SILU,
            Key::With(sum_of_weights),
            Key::With(three_of_four_windows),
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
        SHARED_EXPERTS,
        EXAONE_BIAS,
    ],
    other_parts: &["mtp."],
    aliases: &[
        ("n_routed_experts", "num_experts"),
        ("n_shared_experts", "num_shared_experts"),
    ],
    defaults: &[
        ("first_k_dense_replace", 1),
        ("num_key_value_heads", 32),
        ("sliding_window", 4096),
    ],
    ..LLAMA
};

/// The numbers of GGUF's `expert_gating_func`.
const SOFTMAX: u32 = 1;
pub(super) const SIGMOID: u32 = 2;

/// Sigmoids with biases on the choice, out of the best groups where there are any; the first layers
/// may be dense.
pub(super) const SIGMOID_ROUTED: &[Key] = &[
    Key::All(SIGMOID_ROUTES),
    Key::Number {
        to: "expert_weights_scale",
        from: "routed_scaling_factor",
    },
];

/// The same without the factor on their weights.
pub(super) const SIGMOID_ROUTES: &[Key] = &[
    Key::Count {
        to: "expert_count",
        from: "n_routed_experts",
    },
    Key::Count {
        to: "expert_used_count",
        from: "num_experts_per_tok",
    },
    Key::Constant {
        to: "expert_gating_func",
        value: SIGMOID,
    },
    Key::With(groups),
    Key::With(dense_layers),
    Key::With(shared_experts),
];

/// A layer of queries and keys that are normed, and experts of these routes.
const SIGMOID_TENSORS: &[&[TensorRule]] = &[
    EMBEDDING_TENSORS,
    INPUT_NORM,
    ATTENTION_TENSORS,
    ATTENTION_VECTORS,
    NORM_BEFORE_FFN,
    GATED_TENSORS,
    QWEN3_MOE_ROUTER,
    QWEN3_MOE_EXPERTS,
    SHARED_EXPERTS,
];

pub(super) const EXPERT_WIDTH: &[Key] = &[Key::Count {
    to: "expert_feed_forward_length",
    from: "moe_intermediate_size",
}];

/// GLM-4.5 and 4.6.
pub(super) const GLM4_MOE: HfClass = HfClass {
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
        SHARED_EXPERTS,
        HEAD_TENSORS,
    ],
    rotated_part: Some(0.5),
    ..LLAMA
};

/// Routing that GGUF files spell out.
pub(super) const GLM4_MOE_KEYS: &[Key] = &[
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

pub(super) const SHARED_EXPERTS: &[TensorRule] = &in_layers(
    "model.layers.{l}.mlp.",
    [
        same("exp_probs_b.bias", "gate.e_score_correction_bias"),
        same("ffn_gate_shexp.weight", "shared_experts.gate_proj.weight"),
        same("ffn_up_shexp.weight", "shared_experts.up_proj.weight"),
        same("ffn_down_shexp.weight", "shared_experts.down_proj.weight"),
    ],
);

/// The biases of the choice next to the router.
const EXAONE_BIAS: &[TensorRule] = &in_layers(
    "model.layers.{l}.mlp.",
    [same("exp_probs_b.bias", "e_score_correction_bias")],
);

const HY_V3_EXPERTS: &[TensorRule] = &in_layers(
    "model.layers.{l}.mlp.",
    [
        same("ffn_gate_inp.weight", "router.gate.weight"),
        same("exp_probs_b.bias", "expert_bias"),
        same("ffn_gate_shexp.weight", "shared_mlp.gate_proj.weight"),
        same("ffn_up_shexp.weight", "shared_mlp.up_proj.weight"),
        same("ffn_down_shexp.weight", "shared_mlp.down_proj.weight"),
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

/// The number of layers before the first mixture: what the list of all says, or the count.
pub(super) fn n_dense_layers(config: &HfConfig) -> Result<usize, ModelFileError> {
    let key = "mlp_layer_types";
    if let Some(types) = config.optional_texts(key)? {
        let n_layers = config.count("num_hidden_layers")?;
        let n_dense = types.iter().take_while(|&&t| t == "dense").count();
        let is_known =
            types.len() == n_layers && types.iter().skip(n_dense).all(|&t| t == "sparse");
        let wanted = format!("a list of {n_layers}: \"dense\" for the first, then \"sparse\"");
        return is_known
            .then_some(n_dense)
            .ok_or_else(|| config.wrong(key, wanted));
    }
    let key = "first_k_dense_replace";
    match config.optional_number(key)? {
        None | Some(0.0) => Ok(0),
        Some(_) => config.count(key),
    }
}

pub(super) fn dense_layers(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    keys.set("leading_dense_block_count", as_u32(n_dense_layers(config)?));
    Ok(())
}

/// The experts of every row, where there are any.
pub(super) fn shared_experts(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let key = "n_shared_experts";
    if config.optional_number(key)?.is_some_and(|n| n != 0.0) {
        let n = config.count(key)?;
        let width = n * config.count("moe_intermediate_size")?;
        keys.set("expert_shared_count", as_u32(n));
        keys.set("expert_shared_feed_forward_length", as_u32(width));
    }
    Ok(())
}

/// Sigmoids, divided by their sum or not, or a softmax of the chosen ones.
pub(super) fn sigmoid_or_softmax(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let key = "expert_selection_fn";
    match config.optional_text(key)? {
        Some("sigmoid") => {
            keys.set("expert_gating_func", SIGMOID);
            sum_of_weights(config, keys)
        }
        None | Some("softmax") => {
            keys.set("expert_gating_func", SOFTMAX);
            keys.set("expert_weights_norm", true);
            Ok(())
        }
        Some(_) => Err(config.wrong(key, "one of: sigmoid, softmax")),
    }
}

/// Layers from one on would have a window, where the config does not name them.
fn dots_windows(config: &HfConfig, _: &mut Keys) -> Result<(), ModelFileError> {
    let full = layer_types(config, &["full_attention"])?;
    let key = "sliding_window";
    let n_layers = config.count("num_hidden_layers")?;
    let windowed = config.optional_count(key)?.is_some()
        && config.optional_number("max_window_layers")?.unwrap_or(0.0) < n_layers as f64;
    if full.is_none() && windowed {
        return Err(config.wrong(key, "null"));
    }
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
