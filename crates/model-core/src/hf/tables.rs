//! Tensor tables that many classes share: what blocks are called in GGUF, and in the files.
//!
//! Names stand without their beginnings; [`in_layers`] puts them in their place. Knows no class.

use super::{Heads, TensorRule, TensorStep, same, with};

/// Rules of something that every layer has, below `blk.{l}.` in GGUF and below `place` in the
/// files.
pub const fn in_layers<const N: usize>(
    place: &'static str,
    rules: [TensorRule; N],
) -> [TensorRule; N] {
    in_stack("blk.{l}.", place, rules)
}

/// As [`in_layers`], where a model has several stacks of layers: below `to` in GGUF.
pub const fn in_stack<const N: usize>(
    to: &'static str,
    place: &'static str,
    mut rules: [TensorRule; N],
) -> [TensorRule; N] {
    let mut at = 0;
    while at < N {
        rules[at].to_place = to;
        rules[at].from_place = place;
        at += 1;
    }
    rules
}

/// Embedding, last norm and head.
pub const EMBEDDING_TENSORS: &[TensorRule] = &[
    same("token_embd.weight", "model.embed_tokens.weight"),
    same("output_norm.weight", "model.norm.weight"),
    same("output.weight", "lm_head.weight"),
];

/// The norm before the attention, or whatever else comes first in a layer.
pub const INPUT_NORM: &[TensorRule] = &in_layers(
    "model.layers.{l}.",
    [same("attn_norm.weight", "input_layernorm.weight")],
);

/// The norm before the feed-forward block, named after what it follows.
pub const NORM_BEFORE_FFN: &[TensorRule] = &in_layers(
    "model.layers.{l}.",
    [same("ffn_norm.weight", "post_attention_layernorm.weight")],
);

/// The tensors that a layer behind the last one has more than others, to predict the token after
/// the next.
pub const HEAD_TENSORS: &[TensorRule] = &in_layers(
    "model.layers.{l}.",
    [
        same("nextn.eh_proj.weight", "eh_proj.weight"),
        same("nextn.enorm.weight", "enorm.weight"),
        same("nextn.hnorm.weight", "hnorm.weight"),
        same("nextn.shared_head_norm.weight", "shared_head.norm.weight"),
        same("nextn.embed_tokens.weight", "embed_tokens.weight"),
        same("nextn.shared_head_head.weight", "shared_head.head.weight"),
    ],
);

/// Attention whose rows stay in place.
pub const ATTENTION_TENSORS: &[TensorRule] = &in_layers(
    "model.layers.{l}.self_attn.",
    [
        same("attn_q.weight", "q_proj.weight"),
        same("attn_k.weight", "k_proj.weight"),
        same("attn_v.weight", "v_proj.weight"),
        same("attn_output.weight", "o_proj.weight"),
    ],
);

/// Attention whose rows of queries and keys are in pairs, as in every `llama` file.
pub const PAIRED_ATTENTION: &[TensorRule] = &in_layers(
    "model.layers.{l}.self_attn.",
    [
        with(
            "attn_q.weight",
            "q_proj.weight",
            &[TensorStep::Pairs(Heads::Query)],
        ),
        with(
            "attn_k.weight",
            "k_proj.weight",
            &[TensorStep::Pairs(Heads::KeyValue)],
        ),
        same("attn_v.weight", "v_proj.weight"),
        same("attn_output.weight", "o_proj.weight"),
    ],
);

/// Biases of an attention, and norms of its queries and keys.
pub const ATTENTION_VECTORS: &[TensorRule] = &in_layers(
    "model.layers.{l}.self_attn.",
    [
        same("attn_q.bias", "q_proj.bias"),
        same("attn_k.bias", "k_proj.bias"),
        same("attn_v.bias", "v_proj.bias"),
        same("attn_output.bias", "o_proj.bias"),
        same("attn_q_norm.weight", "q_norm.weight"),
        same("attn_k_norm.weight", "k_norm.weight"),
    ],
);

/// A feed-forward block with a gate.
pub const GATED: [TensorRule; 3] = [
    same("ffn_gate.weight", "gate_proj.weight"),
    same("ffn_up.weight", "up_proj.weight"),
    same("ffn_down.weight", "down_proj.weight"),
];

/// That block where most classes have it.
pub const GATED_TENSORS: &[TensorRule] = &in_layers("model.layers.{l}.mlp.", GATED);

/// Experts whose gate and up are the halves of the rows of one matrix for each.
pub const GATE_AND_UP_IN_ROWS: [TensorRule; 3] = [
    with(
        "ffn_gate_exps.weight",
        "gate_up_proj",
        &[TensorStep::RowPart { part: 0, of: 2 }],
    ),
    with(
        "ffn_up_exps.weight",
        "gate_up_proj",
        &[TensorStep::RowPart { part: 1, of: 2 }],
    ),
    same("ffn_down_exps.weight", "down_proj"),
];

/// Experts with gates, by number.
pub const GATED_EXPERTS: [TensorRule; 3] = [
    same("ffn_gate_exps.weight", "gate_proj.weight"),
    same("ffn_up_exps.weight", "up_proj.weight"),
    same("ffn_down_exps.weight", "down_proj.weight"),
];
