//! Which tensors of the decoders of before Llama become which GGUF tensors.
//!
//! One table for each naming that classes share. Fused queries, keys and values come out in this
//! order, however they lie in the files.

use model_core::hf::{
    HfConfig, ModelFileError, PLUS_ONE, PickedRows, TensorRule, TensorStep, head_dim, in_layers,
    same, with,
};

/// Heads whose queries, keys and values lie together.
fn heads(config: &HfConfig) -> Result<usize, ModelFileError> {
    config.count("num_attention_heads")
}

/// Heads whose keys and values a GPT-BigCode has, which follow their queries: all or one.
fn bigcode_groups(config: &HfConfig) -> Result<usize, ModelFileError> {
    match config.optional_flag("multi_query")? {
        Some(false) => heads(config),
        _ => Ok(1),
    }
}

/// Heads whose keys and values a Falcon has: as many as it says in newer decoders, or all or one.
pub(super) fn falcon_kv_heads(config: &HfConfig) -> Result<usize, ModelFileError> {
    let n_heads = heads(config)?;
    if config.optional_flag("new_decoder_architecture")? != Some(true) {
        return bigcode_groups(config);
    }
    let key = "num_kv_heads";
    let own = config.optional_count(key)?.unwrap_or(n_heads);
    if n_heads.is_multiple_of(own) {
        Ok(own)
    } else {
        let wanted = format!("a divisor of 'num_attention_heads', which is {n_heads}");
        Err(config.wrong(key, wanted))
    }
}

/// Falcon's queries, keys and values.
fn falcon_parts(config: &HfConfig) -> Result<PickedRows, ModelFileError> {
    grouped_rows(config, falcon_kv_heads(config)?, &[0, 1, 2])
}

/// The rows of queries (0), keys (1) or values (2) where they lie key head by key head, its queries
/// first, its value last.
pub(super) fn grouped_rows(
    config: &HfConfig,
    kv_heads: usize,
    parts: &[usize],
) -> Result<PickedRows, ModelFileError> {
    let (n_queries, dim) = (heads(config)? / kv_heads, head_dim(config)?);
    let starts = [0, n_queries, n_queries + 1, n_queries + 2].map(|at| at * dim);
    let group = starts[3];
    let of_part = |&part: &usize| {
        let of_head =
            move |head: usize| head * group + starts[part]..head * group + starts[part + 1];
        (0..kv_heads).map(of_head)
    };
    Ok(PickedRows {
        n_rows: kv_heads * group,
        rows: parts.iter().flat_map(of_part).collect(),
    })
}

/// CodeGen lays its heads out for four devices.
fn four_groups(_: &HfConfig) -> Result<usize, ModelFileError> {
    Ok(4)
}

/// The first rows of OPT's positions are for padding.
fn two_rows(_: &HfConfig) -> Result<usize, ModelFileError> {
    Ok(2)
}

const BY_HEAD: &[TensorStep] = &[TensorStep::PartsTogether {
    groups: heads,
    of: 3,
}];

const BY_HEAD_UNLESS_SHARED: &[TensorStep] = &[TensorStep::PartsTogether {
    groups: bigcode_groups,
    of: 3,
}];

const BY_KEY_HEAD: &[TensorStep] = &[TensorStep::PickedRows(falcon_parts)];

const TRANSPOSED: &[TensorStep] = &[TensorStep::Transposed];

/// The output matrix of models that do not reuse the embedding, and its bias.
pub(super) const HEAD: &[TensorRule] = &[
    same("output.weight", "lm_head.weight"),
    same("output.bias", "lm_head.bias"),
];

/// Embedding and last norm of GPT-2 and its descendants.
pub(super) const GPT_EMBEDDING: &[TensorRule] = &[
    same("token_embd.weight", "transformer.wte.weight"),
    same("output_norm.weight", "transformer.ln_f.weight"),
    same("output_norm.bias", "transformer.ln_f.bias"),
];

/// Learnt positions.
pub(super) const GPT_POSITIONS: &[TensorRule] =
    &[same("position_embd.weight", "transformer.wpe.weight")];

/// The norm before the attention, or before both blocks.
pub(super) const GPT_FIRST_NORM: &[TensorRule] = &in_layers(
    "transformer.h.{l}.",
    [
        same("attn_norm.weight", "ln_1.weight"),
        same("attn_norm.bias", "ln_1.bias"),
    ],
);

/// The norm before the feed-forward block.
pub(super) const GPT_SECOND_NORM: &[TensorRule] = &in_layers(
    "transformer.h.{l}.",
    [
        same("ffn_norm.weight", "ln_2.weight"),
        same("ffn_norm.bias", "ln_2.bias"),
    ],
);

/// GPT-2, whose matrices are stored `[in, out]`.
pub(super) const GPT2_LAYERS: &[TensorRule] = &in_layers(
    "transformer.h.{l}.",
    [
        with("attn_qkv.weight", "attn.c_attn.weight", TRANSPOSED),
        same("attn_qkv.bias", "attn.c_attn.bias"),
        with("attn_output.weight", "attn.c_proj.weight", TRANSPOSED),
        same("attn_output.bias", "attn.c_proj.bias"),
        with("ffn_up.weight", "mlp.c_fc.weight", TRANSPOSED),
        same("ffn_up.bias", "mlp.c_fc.bias"),
        with("ffn_down.weight", "mlp.c_proj.weight", TRANSPOSED),
        same("ffn_down.bias", "mlp.c_proj.bias"),
    ],
);

/// The same `[out, in]`: GPT-BigCode's attention.
pub(super) const BIGCODE_ATTENTION: &[TensorRule] = &in_layers(
    "transformer.h.{l}.attn.",
    [
        with("attn_qkv.weight", "c_attn.weight", BY_HEAD_UNLESS_SHARED),
        with("attn_qkv.bias", "c_attn.bias", BY_HEAD_UNLESS_SHARED),
        same("attn_output.weight", "c_proj.weight"),
        same("attn_output.bias", "c_proj.bias"),
    ],
);

/// The feed-forward block of GPT-BigCode and GPT-Neo.
pub(super) const BIGCODE_FEED_FORWARD: &[TensorRule] = &in_layers(
    "transformer.h.{l}.mlp.",
    [
        same("ffn_up.weight", "c_fc.weight"),
        same("ffn_up.bias", "c_fc.bias"),
        same("ffn_down.weight", "c_proj.weight"),
        same("ffn_down.bias", "c_proj.bias"),
    ],
);

pub(super) const GPT_NEO_ATTENTION: &[TensorRule] = &in_layers(
    "transformer.h.{l}.attn.attention.",
    [
        same("attn_q.weight", "q_proj.weight"),
        same("attn_k.weight", "k_proj.weight"),
        same("attn_v.weight", "v_proj.weight"),
        same("attn_output.weight", "out_proj.weight"),
        same("attn_output.bias", "out_proj.bias"),
    ],
);

pub(super) const GPTJ_ATTENTION: &[TensorRule] = &in_layers(
    "transformer.h.{l}.attn.",
    [
        same("attn_q.weight", "q_proj.weight"),
        same("attn_k.weight", "k_proj.weight"),
        same("attn_v.weight", "v_proj.weight"),
        same("attn_output.weight", "out_proj.weight"),
    ],
);

/// Queries, values and keys of a quarter of the heads after those of another.
const CODEGEN_QUERIES: &[TensorStep] = &[
    TensorStep::PartsTogether {
        groups: four_groups,
        of: 3,
    },
    TensorStep::RowPart { part: 0, of: 3 },
];
const CODEGEN_VALUES: &[TensorStep] = &[
    TensorStep::PartsTogether {
        groups: four_groups,
        of: 3,
    },
    TensorStep::RowPart { part: 1, of: 3 },
];
const CODEGEN_KEYS: &[TensorStep] = &[
    TensorStep::PartsTogether {
        groups: four_groups,
        of: 3,
    },
    TensorStep::RowPart { part: 2, of: 3 },
];

pub(super) const CODEGEN_ATTENTION: &[TensorRule] = &in_layers(
    "transformer.h.{l}.attn.",
    [
        with("attn_q.weight", "qkv_proj.weight", CODEGEN_QUERIES),
        with("attn_k.weight", "qkv_proj.weight", CODEGEN_KEYS),
        with("attn_v.weight", "qkv_proj.weight", CODEGEN_VALUES),
        same("attn_output.weight", "out_proj.weight"),
    ],
);

/// The feed-forward block of GPT-J and CodeGen.
pub(super) const GPTJ_FEED_FORWARD: &[TensorRule] = &in_layers(
    "transformer.h.{l}.mlp.",
    [
        same("ffn_up.weight", "fc_in.weight"),
        same("ffn_up.bias", "fc_in.bias"),
        same("ffn_down.weight", "fc_out.weight"),
        same("ffn_down.bias", "fc_out.bias"),
    ],
);

pub(super) const PHI_EMBEDDING: &[TensorRule] = &[
    same("token_embd.weight", "model.embed_tokens.weight"),
    same("output_norm.weight", "model.final_layernorm.weight"),
    same("output_norm.bias", "model.final_layernorm.bias"),
];

pub(super) const PHI_LAYERS: &[TensorRule] = &in_layers(
    "model.layers.{l}.",
    [
        same("attn_norm.weight", "input_layernorm.weight"),
        same("attn_norm.bias", "input_layernorm.bias"),
        same("attn_q_norm.weight", "self_attn.q_layernorm.weight"),
        same("attn_q_norm.bias", "self_attn.q_layernorm.bias"),
        same("attn_k_norm.weight", "self_attn.k_layernorm.weight"),
        same("attn_k_norm.bias", "self_attn.k_layernorm.bias"),
        same("attn_output.weight", "self_attn.dense.weight"),
        same("attn_output.bias", "self_attn.dense.bias"),
        same("ffn_up.weight", "mlp.fc1.weight"),
        same("ffn_up.bias", "mlp.fc1.bias"),
        same("ffn_down.weight", "mlp.fc2.weight"),
        same("ffn_down.bias", "mlp.fc2.bias"),
    ],
);

/// Norms of queries and keys, one for each head (12B).
pub(super) const STABLELM_NORMS: &[TensorRule] = &in_layers(
    "model.layers.{l}.self_attn.",
    [
        same("attn_q_norm.weight", "q_layernorm.norms.{e}.weight"),
        same("attn_k_norm.weight", "k_layernorm.norms.{e}.weight"),
    ],
);

/// Norms with gains as their distance from 1, and no gate.
pub(super) const NEMOTRON_TENSORS: &[TensorRule] = &[
    same("token_embd.weight", "model.embed_tokens.weight"),
    with("output_norm.weight", "model.norm.weight", PLUS_ONE),
    same("output_norm.bias", "model.norm.bias"),
    same("output.weight", "lm_head.weight"),
];

pub(super) const NEMOTRON_LAYERS: &[TensorRule] = &in_layers(
    "model.layers.{l}.",
    [
        with("attn_norm.weight", "input_layernorm.weight", PLUS_ONE),
        same("attn_norm.bias", "input_layernorm.bias"),
        with(
            "ffn_norm.weight",
            "post_attention_layernorm.weight",
            PLUS_ONE,
        ),
        same("ffn_norm.bias", "post_attention_layernorm.bias"),
        same("ffn_up.weight", "mlp.up_proj.weight"),
        same("ffn_down.weight", "mlp.down_proj.weight"),
    ],
);

pub(super) const OPT_TENSORS: &[TensorRule] = &[
    same("token_embd.weight", "model.decoder.embed_tokens.weight"),
    with(
        "position_embd.weight",
        "model.decoder.embed_positions.weight",
        &[TensorStep::RowsAfter(two_rows)],
    ),
    same(
        "output_norm.weight",
        "model.decoder.final_layer_norm.weight",
    ),
    same("output_norm.bias", "model.decoder.final_layer_norm.bias"),
    same("token_embd_proj.weight", "model.decoder.project_in.weight"),
    same("output_proj.weight", "model.decoder.project_out.weight"),
];

pub(super) const OPT_LAYERS: &[TensorRule] = &in_layers(
    "model.decoder.layers.{l}.",
    [
        same("attn_norm.weight", "self_attn_layer_norm.weight"),
        same("attn_norm.bias", "self_attn_layer_norm.bias"),
        same("attn_q.weight", "self_attn.q_proj.weight"),
        same("attn_q.bias", "self_attn.q_proj.bias"),
        same("attn_k.weight", "self_attn.k_proj.weight"),
        same("attn_k.bias", "self_attn.k_proj.bias"),
        same("attn_v.weight", "self_attn.v_proj.weight"),
        same("attn_v.bias", "self_attn.v_proj.bias"),
        same("attn_output.weight", "self_attn.out_proj.weight"),
        same("attn_output.bias", "self_attn.out_proj.bias"),
        same("ffn_norm.weight", "final_layer_norm.weight"),
        same("ffn_norm.bias", "final_layer_norm.bias"),
        same("ffn_up.weight", "fc1.weight"),
        same("ffn_up.bias", "fc1.bias"),
        same("ffn_down.weight", "fc2.weight"),
        same("ffn_down.bias", "fc2.bias"),
    ],
);

pub(super) const NEOX_TENSORS: &[TensorRule] = &[
    same("token_embd.weight", "gpt_neox.embed_in.weight"),
    same("output_norm.weight", "gpt_neox.final_layer_norm.weight"),
    same("output_norm.bias", "gpt_neox.final_layer_norm.bias"),
    same("output.weight", "embed_out.weight"),
];

pub(super) const NEOX_LAYERS: &[TensorRule] = &in_layers(
    "gpt_neox.layers.{l}.",
    [
        same("attn_norm.weight", "input_layernorm.weight"),
        same("attn_norm.bias", "input_layernorm.bias"),
        with(
            "attn_qkv.weight",
            "attention.query_key_value.weight",
            BY_HEAD,
        ),
        with("attn_qkv.bias", "attention.query_key_value.bias", BY_HEAD),
        same("attn_output.weight", "attention.dense.weight"),
        same("attn_output.bias", "attention.dense.bias"),
        same("ffn_norm.weight", "post_attention_layernorm.weight"),
        same("ffn_norm.bias", "post_attention_layernorm.bias"),
        same("ffn_up.weight", "mlp.dense_h_to_4h.weight"),
        same("ffn_up.bias", "mlp.dense_h_to_4h.bias"),
        same("ffn_down.weight", "mlp.dense_4h_to_h.weight"),
        same("ffn_down.bias", "mlp.dense_4h_to_h.bias"),
    ],
);

/// Embedding and last norm of BLOOM and Falcon.
pub(super) const BLOOM_TENSORS: &[TensorRule] = &[
    same("token_embd.weight", "transformer.word_embeddings.weight"),
    same(
        "token_embd_norm.weight",
        "transformer.word_embeddings_layernorm.weight",
    ),
    same(
        "token_embd_norm.bias",
        "transformer.word_embeddings_layernorm.bias",
    ),
    same("output_norm.weight", "transformer.ln_f.weight"),
    same("output_norm.bias", "transformer.ln_f.bias"),
];

/// The tensors of layers of BLOOM and Falcon but for the fused matrix.
pub(super) const BLOOM_LAYERS: &[TensorRule] = &in_layers(
    "transformer.h.{l}.",
    [
        same("attn_norm.weight", "input_layernorm.weight"),
        same("attn_norm.bias", "input_layernorm.bias"),
        same("attn_output.weight", "self_attention.dense.weight"),
        same("attn_output.bias", "self_attention.dense.bias"),
        same("ffn_norm.weight", "post_attention_layernorm.weight"),
        same("ffn_norm.bias", "post_attention_layernorm.bias"),
        same("ffn_up.weight", "mlp.dense_h_to_4h.weight"),
        same("ffn_up.bias", "mlp.dense_h_to_4h.bias"),
        same("ffn_down.weight", "mlp.dense_4h_to_h.weight"),
        same("ffn_down.bias", "mlp.dense_4h_to_h.bias"),
    ],
);

pub(super) const BLOOM_FUSED: &[TensorRule] = &in_layers(
    "transformer.h.{l}.self_attention.query_key_value.",
    [
        with("attn_qkv.weight", "weight", BY_HEAD),
        with("attn_qkv.bias", "bias", BY_HEAD),
    ],
);

pub(super) const FALCON_FUSED: &[TensorRule] = &in_layers(
    "transformer.h.{l}.self_attention.query_key_value.",
    [
        with("attn_qkv.weight", "weight", BY_KEY_HEAD),
        with("attn_qkv.bias", "bias", BY_KEY_HEAD),
    ],
);

/// The norms of newer decoders, one for each block.
pub(super) const FALCON_NORMS: &[TensorRule] = &in_layers(
    "transformer.h.{l}.",
    [
        same("attn_norm.weight", "ln_mlp.weight"),
        same("attn_norm.bias", "ln_mlp.bias"),
        same("attn_norm_2.weight", "ln_attn.weight"),
        same("attn_norm_2.bias", "ln_attn.bias"),
    ],
);

pub(super) const MPT_TENSORS: &[TensorRule] = &[
    same("token_embd.weight", "transformer.wte.weight"),
    same("output_norm.weight", "transformer.norm_f.weight"),
];

pub(super) const MPT_LAYERS: &[TensorRule] = &in_layers(
    "transformer.blocks.{l}.",
    [
        same("attn_norm.weight", "norm_1.weight"),
        same("attn_qkv.weight", "attn.Wqkv.weight"),
        same("attn_output.weight", "attn.out_proj.weight"),
        same("ffn_norm.weight", "norm_2.weight"),
        same("ffn_up.weight", "ffn.up_proj.weight"),
        same("ffn_down.weight", "ffn.down_proj.weight"),
    ],
);

/// Masks that old files hold.
pub(super) const GPT_BUFFERS: &[&str] = &[
    "transformer.h.{l}.attn.bias",
    "transformer.h.{l}.attn.masked_bias",
    "transformer.h.{l}.attn.causal_mask",
    "transformer.h.{l}.attn.attention.bias",
    "transformer.h.{l}.attn.attention.masked_bias",
    "h.{l}.attn.bias",
    "h.{l}.attn.masked_bias",
    "gpt_neox.layers.{l}.attention.bias",
    "gpt_neox.layers.{l}.attention.masked_bias",
    "gpt_neox.layers.{l}.attention.rotary_emb.inv_freq",
];
