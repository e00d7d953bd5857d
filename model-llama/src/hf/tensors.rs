//! Which tensors of the files become which GGUF tensors, where the shared tables do not say.

use model_core::hf::{Heads, Step, TensorRule, same, with};

pub(super) const NORM_BEFORE_FFN: &[TensorRule] = &[same(
    "blk.{l}.ffn_norm.weight",
    "model.layers.{l}.post_attention_layernorm.weight",
)];

/// As in every `llama` file, rows of queries and keys are in pairs.
pub(super) const PAIRED_ATTENTION: &[TensorRule] = &[
    same(
        "blk.{l}.attn_norm.weight",
        "model.layers.{l}.input_layernorm.weight",
    ),
    with(
        "blk.{l}.attn_q.weight",
        "model.layers.{l}.self_attn.q_proj.weight",
        &[Step::Pairs(Heads::Query)],
    ),
    with(
        "blk.{l}.attn_k.weight",
        "model.layers.{l}.self_attn.k_proj.weight",
        &[Step::Pairs(Heads::KeyValue)],
    ),
    same(
        "blk.{l}.attn_v.weight",
        "model.layers.{l}.self_attn.v_proj.weight",
    ),
    same(
        "blk.{l}.attn_output.weight",
        "model.layers.{l}.self_attn.o_proj.weight",
    ),
];

/// Gemma stores gains as their distance from 1.
pub(super) const GEMMA_TENSORS: &[TensorRule] = &[
    same("token_embd.weight", "model.embed_tokens.weight"),
    with("output_norm.weight", "model.norm.weight", &[Step::PlusOne]),
    same("output.weight", "lm_head.weight"),
    with(
        "blk.{l}.attn_norm.weight",
        "model.layers.{l}.input_layernorm.weight",
        &[Step::PlusOne],
    ),
    with(
        "blk.{l}.post_attention_norm.weight",
        "model.layers.{l}.post_attention_layernorm.weight",
        &[Step::PlusOne],
    ),
    with(
        "blk.{l}.ffn_norm.weight",
        "model.layers.{l}.pre_feedforward_layernorm.weight",
        &[Step::PlusOne],
    ),
    with(
        "blk.{l}.post_ffw_norm.weight",
        "model.layers.{l}.post_feedforward_layernorm.weight",
        &[Step::PlusOne],
    ),
    with(
        "blk.{l}.attn_q_norm.weight",
        "model.layers.{l}.self_attn.q_norm.weight",
        &[Step::PlusOne],
    ),
    with(
        "blk.{l}.attn_k_norm.weight",
        "model.layers.{l}.self_attn.k_norm.weight",
        &[Step::PlusOne],
    ),
    same(
        "blk.{l}.attn_q.weight",
        "model.layers.{l}.self_attn.q_proj.weight",
    ),
    same(
        "blk.{l}.attn_k.weight",
        "model.layers.{l}.self_attn.k_proj.weight",
    ),
    same(
        "blk.{l}.attn_v.weight",
        "model.layers.{l}.self_attn.v_proj.weight",
    ),
    same(
        "blk.{l}.attn_output.weight",
        "model.layers.{l}.self_attn.o_proj.weight",
    ),
];

/// Mixtral: the experts' matrices go by number.
pub(super) const MIXTRAL_TENSORS: &[TensorRule] = &[
    same(
        "blk.{l}.ffn_gate_inp.weight",
        "model.layers.{l}.block_sparse_moe.gate.weight",
    ),
    same(
        "blk.{l}.ffn_gate_exps.weight",
        "model.layers.{l}.block_sparse_moe.experts.{e}.w1.weight",
    ),
    same(
        "blk.{l}.ffn_down_exps.weight",
        "model.layers.{l}.block_sparse_moe.experts.{e}.w2.weight",
    ),
    same(
        "blk.{l}.ffn_up_exps.weight",
        "model.layers.{l}.block_sparse_moe.experts.{e}.w3.weight",
    ),
];

pub(super) const QWEN3_MOE_TENSORS: &[TensorRule] = &[
    same(
        "blk.{l}.ffn_gate_inp.weight",
        "model.layers.{l}.mlp.gate.weight",
    ),
    same(
        "blk.{l}.ffn_gate_exps.weight",
        "model.layers.{l}.mlp.experts.{e}.gate_proj.weight",
    ),
    same(
        "blk.{l}.ffn_up_exps.weight",
        "model.layers.{l}.mlp.experts.{e}.up_proj.weight",
    ),
    same(
        "blk.{l}.ffn_down_exps.weight",
        "model.layers.{l}.mlp.experts.{e}.down_proj.weight",
    ),
];

/// Queries, keys and values in one matrix, gate and up in another, as in GGUF.
pub(super) const PHI3_TENSORS: &[TensorRule] = &[
    same(
        "blk.{l}.attn_norm.weight",
        "model.layers.{l}.input_layernorm.weight",
    ),
    same(
        "blk.{l}.attn_qkv.weight",
        "model.layers.{l}.self_attn.qkv_proj.weight",
    ),
    same(
        "blk.{l}.attn_output.weight",
        "model.layers.{l}.self_attn.o_proj.weight",
    ),
    same(
        "blk.{l}.ffn_norm.weight",
        "model.layers.{l}.post_attention_layernorm.weight",
    ),
    same(
        "blk.{l}.ffn_up.weight",
        "model.layers.{l}.mlp.gate_up_proj.weight",
    ),
    same(
        "blk.{l}.ffn_down.weight",
        "model.layers.{l}.mlp.down_proj.weight",
    ),
];

/// gpt-oss: gate and up take turns in the columns of one matrix `[experts, dim, 2 hidden]`.
pub(super) const GPT_OSS_TENSORS: &[TensorRule] = &[
    same(
        "blk.{l}.attn_sinks.weight",
        "model.layers.{l}.self_attn.sinks",
    ),
    same(
        "blk.{l}.post_attention_norm.weight",
        "model.layers.{l}.post_attention_layernorm.weight",
    ),
    same(
        "blk.{l}.ffn_gate_inp.weight",
        "model.layers.{l}.mlp.router.weight",
    ),
    same(
        "blk.{l}.ffn_gate_inp.bias",
        "model.layers.{l}.mlp.router.bias",
    ),
    with(
        "blk.{l}.ffn_gate_exps.weight",
        "model.layers.{l}.mlp.experts.gate_up_proj",
        &[Step::EveryColumn { first: 0, step: 2 }, Step::Transposed],
    ),
    with(
        "blk.{l}.ffn_up_exps.weight",
        "model.layers.{l}.mlp.experts.gate_up_proj",
        &[Step::EveryColumn { first: 1, step: 2 }, Step::Transposed],
    ),
    with(
        "blk.{l}.ffn_gate_exps.bias",
        "model.layers.{l}.mlp.experts.gate_up_proj_bias",
        &[Step::EveryColumn { first: 0, step: 2 }],
    ),
    with(
        "blk.{l}.ffn_up_exps.bias",
        "model.layers.{l}.mlp.experts.gate_up_proj_bias",
        &[Step::EveryColumn { first: 1, step: 2 }],
    ),
    with(
        "blk.{l}.ffn_down_exps.weight",
        "model.layers.{l}.mlp.experts.down_proj",
        &[Step::Transposed],
    ),
    same(
        "blk.{l}.ffn_down_exps.bias",
        "model.layers.{l}.mlp.experts.down_proj_bias",
    ),
];

/// Llama 4: gate and up are the halves of the columns of one matrix `[experts, dim, 2 hidden]`.
pub(super) const LLAMA4_TENSORS: &[TensorRule] = &[
    same(
        "blk.{l}.ffn_gate.weight",
        "model.layers.{l}.feed_forward.gate_proj.weight",
    ),
    same(
        "blk.{l}.ffn_up.weight",
        "model.layers.{l}.feed_forward.up_proj.weight",
    ),
    same(
        "blk.{l}.ffn_down.weight",
        "model.layers.{l}.feed_forward.down_proj.weight",
    ),
    same(
        "blk.{l}.ffn_gate_inp.weight",
        "model.layers.{l}.feed_forward.router.weight",
    ),
    with(
        "blk.{l}.ffn_gate_exps.weight",
        "model.layers.{l}.feed_forward.experts.gate_up_proj",
        &[Step::ColumnPart { part: 0, of: 2 }, Step::Transposed],
    ),
    with(
        "blk.{l}.ffn_up_exps.weight",
        "model.layers.{l}.feed_forward.experts.gate_up_proj",
        &[Step::ColumnPart { part: 1, of: 2 }, Step::Transposed],
    ),
    with(
        "blk.{l}.ffn_down_exps.weight",
        "model.layers.{l}.feed_forward.experts.down_proj",
        &[Step::Transposed],
    ),
    same(
        "blk.{l}.ffn_gate_shexp.weight",
        "model.layers.{l}.feed_forward.shared_expert.gate_proj.weight",
    ),
    same(
        "blk.{l}.ffn_up_shexp.weight",
        "model.layers.{l}.feed_forward.shared_expert.up_proj.weight",
    ),
    same(
        "blk.{l}.ffn_down_shexp.weight",
        "model.layers.{l}.feed_forward.shared_expert.down_proj.weight",
    ),
];
