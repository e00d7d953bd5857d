//! [`CLASSES`]: Solar Open, a GLM-4.5 without norms of queries and keys, whose layers are all
//! mixtures and whose heads rotate whole.

use model_core::hf::{
    ATTENTION_TENSORS, EMBEDDING_TENSORS, HfClass, INPUT_NORM, Key, RMS_EPS, ROPE_KEYS, ROW_KEYS,
    SILU, TRAINED_LENGTH, VOCAB_SIZE, groups, head_keys, only,
};

use super::LLAMA;
use super::deepseek::sum_of_weights;
use super::recent::{NORM_AFTER_ATTENTION, OFF};
use super::routed::{EXPERT_WIDTH, SHARED_EXPERTS, SIGMOID, shared_experts};
use super::tensors::{QWEN3_MOE_EXPERTS, QWEN3_MOE_ROUTER};

/// The class of this file.
pub(super) const CLASSES: &[HfClass] = &[HfClass {
    name: "SolarOpenForCausalLM",
    architecture: "glm4moe",
    keys: &[
        ROW_KEYS,
        RMS_EPS,
        ROPE_KEYS,
        EXPERT_WIDTH,
        &[
            TRAINED_LENGTH,
            VOCAB_SIZE,
            SILU,
            only("attention_bias", OFF),
            Key::With(head_keys),
            Key::Count {
                to: "expert_count",
                from: "n_routed_experts",
            },
            Key::Count {
                to: "expert_used_count",
                from: "num_experts_per_tok",
            },
            Key::Number {
                to: "expert_weights_scale",
                from: "routed_scaling_factor",
            },
            Key::Constant {
                to: "expert_gating_func",
                value: SIGMOID,
            },
            Key::Constant {
                to: "leading_dense_block_count",
                value: 0,
            },
            Key::With(groups),
            Key::With(shared_experts),
            Key::With(sum_of_weights),
        ],
    ],
    tensors: &[
        EMBEDDING_TENSORS,
        INPUT_NORM,
        ATTENTION_TENSORS,
        NORM_AFTER_ATTENTION,
        QWEN3_MOE_ROUTER,
        QWEN3_MOE_EXPERTS,
        SHARED_EXPERTS,
    ],
    defaults: &[
        ("head_dim", 128),
        ("num_key_value_heads", 8),
        ("rope_theta", 1_000_000),
    ],
    ..LLAMA
}];
