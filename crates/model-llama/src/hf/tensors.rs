//! Which tensors of the files become which GGUF tensors, where the shared tables do not cover it.

use model_core::hf::{
    ATTENTION_TENSORS, ATTENTION_VECTORS, EMBEDDING_TENSORS, GATED, GATED_EXPERTS, INPUT_NORM,
    NORM_BEFORE_FFN, PLUS_ONE, TensorRule, TensorStep, in_layers, same, with,
};

pub(super) const GEMMA_EMBEDDING: &[TensorRule] = &[
    same("token_embd.weight", "model.embed_tokens.weight"),
    with("output_norm.weight", "model.norm.weight", PLUS_ONE),
    same("output.weight", "lm_head.weight"),
];

/// Mixtral's names of an expert's matrices.
pub(super) const MIXTRAL_TENSORS: &[TensorRule] = &in_layers(
    "model.layers.{l}.block_sparse_moe.",
    [
        same("ffn_gate_inp.weight", "gate.weight"),
        same("ffn_gate_exps.weight", "experts.{e}.w1.weight"),
        same("ffn_down_exps.weight", "experts.{e}.w2.weight"),
        same("ffn_up_exps.weight", "experts.{e}.w3.weight"),
    ],
);

pub(super) const QWEN3_MOE_ROUTER: &[TensorRule] = &in_layers(
    "model.layers.{l}.mlp.",
    [same("ffn_gate_inp.weight", "gate.weight")],
);

/// A mixture in each layer behind attention whose queries and keys are normalized.
pub(super) const QWEN3_MOE_TENSORS: &[&[TensorRule]] = &[
    EMBEDDING_TENSORS,
    INPUT_NORM,
    ATTENTION_TENSORS,
    ATTENTION_VECTORS,
    NORM_BEFORE_FFN,
    QWEN3_MOE_ROUTER,
    QWEN3_MOE_EXPERTS,
];

pub(super) const QWEN3_MOE_EXPERTS: &[TensorRule] =
    &in_layers("model.layers.{l}.mlp.experts.{e}.", GATED_EXPERTS);

/// Queries, keys and values in one matrix, gate and up in another, as in GGUF.
pub(super) const PHI3_TENSORS: &[TensorRule] = &in_layers(
    "model.layers.{l}.",
    [
        same("attn_qkv.weight", "self_attn.qkv_proj.weight"),
        same("attn_output.weight", "self_attn.o_proj.weight"),
        same("ffn_up.weight", "mlp.gate_up_proj.weight"),
        same("ffn_down.weight", "mlp.down_proj.weight"),
    ],
);

/// Norms after the blocks.
pub(super) const OLMO2_NORMS: &[TensorRule] = &in_layers(
    "model.layers.{l}.",
    [
        same(
            "post_attention_norm.weight",
            "post_attention_layernorm.weight",
        ),
        same("post_ffw_norm.weight", "post_feedforward_layernorm.weight"),
    ],
);

/// A bias for each norm: that of the output, and those of a layer.
pub(super) const STARCODER2_NORM_BIASES: &[TensorRule] = &[
    same("output_norm.bias", "model.norm.bias"),
    same(
        "blk.{l}.attn_norm.bias",
        "model.layers.{l}.input_layernorm.bias",
    ),
    same(
        "blk.{l}.ffn_norm.bias",
        "model.layers.{l}.post_attention_layernorm.bias",
    ),
];

/// No gate, and biases.
pub(super) const STARCODER2_FEED_FORWARD: &[TensorRule] = &in_layers(
    "model.layers.{l}.mlp.",
    [
        same("ffn_up.weight", "c_fc.weight"),
        same("ffn_up.bias", "c_fc.bias"),
        same("ffn_down.weight", "c_proj.weight"),
        same("ffn_down.bias", "c_proj.bias"),
    ],
);

/// Every second column, from the first or the second on.
const EVEN: TensorStep = TensorStep::EveryColumn { first: 0, step: 2 };
const ODD: TensorStep = TensorStep::EveryColumn { first: 1, step: 2 };

pub(super) const GPT_OSS_NORM: &[TensorRule] = &in_layers(
    "model.layers.{l}.",
    [
        same("attn_sinks.weight", "self_attn.sinks"),
        same(
            "post_attention_norm.weight",
            "post_attention_layernorm.weight",
        ),
    ],
);

/// gpt-oss: gate and up take turns in the columns of one matrix `[experts, dim, 2 hidden]`.
pub(super) const GPT_OSS_EXPERTS: &[TensorRule] = &in_layers(
    "model.layers.{l}.mlp.",
    [
        same("ffn_gate_inp.weight", "router.weight"),
        same("ffn_gate_inp.bias", "router.bias"),
        with(
            "ffn_gate_exps.weight",
            "experts.gate_up_proj",
            &[EVEN, TensorStep::Transposed],
        ),
        with(
            "ffn_up_exps.weight",
            "experts.gate_up_proj",
            &[ODD, TensorStep::Transposed],
        ),
        with("ffn_gate_exps.bias", "experts.gate_up_proj_bias", &[EVEN]),
        with("ffn_up_exps.bias", "experts.gate_up_proj_bias", &[ODD]),
        with(
            "ffn_down_exps.weight",
            "experts.down_proj",
            &[TensorStep::Transposed],
        ),
        same("ffn_down_exps.bias", "experts.down_proj_bias"),
    ],
);

pub(super) const LLAMA4_DENSE: &[TensorRule] = &in_layers("model.layers.{l}.feed_forward.", GATED);

/// Gate and up are the halves of the columns of one matrix `[experts, dim, 2 hidden]`.
pub(super) const GATE_AND_UP_IN_COLUMNS: [TensorRule; 3] = [
    with(
        "ffn_gate_exps.weight",
        "gate_up_proj",
        &[
            TensorStep::ColumnPart { part: 0, of: 2 },
            TensorStep::Transposed,
        ],
    ),
    with(
        "ffn_up_exps.weight",
        "gate_up_proj",
        &[
            TensorStep::ColumnPart { part: 1, of: 2 },
            TensorStep::Transposed,
        ],
    ),
    with(
        "ffn_down_exps.weight",
        "down_proj",
        &[TensorStep::Transposed],
    ),
];

pub(super) const LLAMA4_EXPERTS: &[TensorRule] = &in_layers(
    "model.layers.{l}.feed_forward.experts.",
    GATE_AND_UP_IN_COLUMNS,
);

pub(super) const LLAMA4_ROUTER: &[TensorRule] = &in_layers(
    "model.layers.{l}.feed_forward.",
    [
        same("ffn_gate_inp.weight", "router.weight"),
        same("ffn_gate_shexp.weight", "shared_expert.gate_proj.weight"),
        same("ffn_up_shexp.weight", "shared_expert.up_proj.weight"),
        same("ffn_down_shexp.weight", "shared_expert.down_proj.weight"),
    ],
);
