//! Tensors of hybrids: which tensors of the files become which GGUF tensors.

use model_core::hf::{Heads, HfConfig, HfError, RowFactors, Step, TensorRule, same, with};

/// Norms and what stands around the layers.
pub(super) const FRAME_TENSORS: &[TensorRule] = &[
    same("token_embd.weight", "model.embed_tokens.weight"),
    same("output_norm.weight", "model.final_layernorm.weight"),
    same("output.weight", "lm_head.weight"),
    same(
        "blk.{l}.attn_norm.weight",
        "model.layers.{l}.input_layernorm.weight",
    ),
    same(
        "blk.{l}.ffn_norm.weight",
        "model.layers.{l}.pre_ff_layernorm.weight",
    ),
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
];

/// What mixers of both generations have.
pub(super) const MIXER_TENSORS: &[TensorRule] = &[
    same(
        "blk.{l}.ssm_in.weight",
        "model.layers.{l}.mamba.in_proj.weight",
    ),
    with(
        "blk.{l}.ssm_conv1d.weight",
        "model.layers.{l}.mamba.conv1d.weight",
        &[Step::Squeezed],
    ),
    same(
        "blk.{l}.ssm_conv1d.bias",
        "model.layers.{l}.mamba.conv1d.bias",
    ),
    same(
        "blk.{l}.ssm_out.weight",
        "model.layers.{l}.mamba.out_proj.weight",
    ),
];

pub(super) const MAMBA1_TENSORS: &[TensorRule] = &[
    same(
        "blk.{l}.ssm_x.weight",
        "model.layers.{l}.mamba.x_proj.weight",
    ),
    same(
        "blk.{l}.ssm_dt.weight",
        "model.layers.{l}.mamba.dt_proj.weight",
    ),
    same("blk.{l}.ssm_dt.bias", "model.layers.{l}.mamba.dt_proj.bias"),
    with(
        "blk.{l}.ssm_a",
        "model.layers.{l}.mamba.A_log",
        &[Step::NegativeExp],
    ),
    same("blk.{l}.ssm_d", "model.layers.{l}.mamba.D"),
    same(
        "blk.{l}.ssm_dt_norm.weight",
        "model.layers.{l}.mamba.dt_layernorm.weight",
    ),
    same(
        "blk.{l}.ssm_b_norm.weight",
        "model.layers.{l}.mamba.b_layernorm.weight",
    ),
    same(
        "blk.{l}.ssm_c_norm.weight",
        "model.layers.{l}.mamba.c_layernorm.weight",
    ),
];

pub(super) const MAMBA2_TENSORS: &[TensorRule] = &[
    same("blk.{l}.ssm_dt.bias", "model.layers.{l}.mamba.dt_bias"),
    with(
        "blk.{l}.ssm_a",
        "model.layers.{l}.mamba.A_log",
        &[Step::NegativeExp, Step::Column],
    ),
    with("blk.{l}.ssm_d", "model.layers.{l}.mamba.D", &[Step::Column]),
    with(
        "blk.{l}.ssm_norm.weight",
        "model.layers.{l}.mamba.norm.weight",
        &[Step::Rows("mamba_n_groups")],
    ),
];

/// Attention whose rows stay in place.
pub(super) const ATTENTION_TENSORS: &[TensorRule] = &[
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

/// Attention whose rows rotate as those of `llama`.
pub(super) const PAIRED_TENSORS: &[TensorRule] = &[
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

pub(super) const JAMBA_EXPERTS: &[TensorRule] = &[
    same(
        "blk.{l}.ffn_gate_inp.weight",
        "model.layers.{l}.feed_forward.router.weight",
    ),
    same(
        "blk.{l}.ffn_gate_exps.weight",
        "model.layers.{l}.feed_forward.experts.{e}.gate_proj.weight",
    ),
    same(
        "blk.{l}.ffn_up_exps.weight",
        "model.layers.{l}.feed_forward.experts.{e}.up_proj.weight",
    ),
    same(
        "blk.{l}.ffn_down_exps.weight",
        "model.layers.{l}.feed_forward.experts.{e}.down_proj.weight",
    ),
];

/// Granite 4: gate and up are the halves of one matrix.
pub(super) const GRANITE_TENSORS: &[TensorRule] = &[
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
    same(
        "blk.{l}.ffn_gate_inp.weight",
        "model.layers.{l}.block_sparse_moe.router.layer.weight",
    ),
    with(
        "blk.{l}.ffn_gate_exps.weight",
        "model.layers.{l}.block_sparse_moe.input_linear.weight",
        &[Step::RowPart { part: 0, of: 2 }],
    ),
    with(
        "blk.{l}.ffn_up_exps.weight",
        "model.layers.{l}.block_sparse_moe.input_linear.weight",
        &[Step::RowPart { part: 1, of: 2 }],
    ),
    same(
        "blk.{l}.ffn_down_exps.weight",
        "model.layers.{l}.block_sparse_moe.output_linear.weight",
    ),
    with(
        "blk.{l}.ffn_gate_shexp.weight",
        "model.layers.{l}.shared_mlp.input_linear.weight",
        &[Step::RowPart { part: 0, of: 2 }],
    ),
    with(
        "blk.{l}.ffn_up_shexp.weight",
        "model.layers.{l}.shared_mlp.input_linear.weight",
        &[Step::RowPart { part: 1, of: 2 }],
    ),
    same(
        "blk.{l}.ffn_down_shexp.weight",
        "model.layers.{l}.shared_mlp.output_linear.weight",
    ),
];

/// Falcon-H1: the config's factors are part of the weights.
pub(super) const FALCON_H1_TENSORS: &[TensorRule] = &[
    with(
        "token_embd.weight",
        "model.embed_tokens.weight",
        &[Step::Scaled("embedding_multiplier")],
    ),
    same("output_norm.weight", "model.final_layernorm.weight"),
    with(
        "output.weight",
        "lm_head.weight",
        &[Step::Scaled("lm_head_multiplier")],
    ),
    same(
        "blk.{l}.attn_norm.weight",
        "model.layers.{l}.input_layernorm.weight",
    ),
    // This one has no ending in GGUF.
    same(
        "blk.{l}.ffn_norm",
        "model.layers.{l}.pre_ff_layernorm.weight",
    ),
    with(
        "blk.{l}.ffn_gate.weight",
        "model.layers.{l}.feed_forward.gate_proj.weight",
        &[Step::Scaled("mlp_multipliers.0")],
    ),
    same(
        "blk.{l}.ffn_up.weight",
        "model.layers.{l}.feed_forward.up_proj.weight",
    ),
    with(
        "blk.{l}.ffn_down.weight",
        "model.layers.{l}.feed_forward.down_proj.weight",
        &[Step::Scaled("mlp_multipliers.1")],
    ),
    with(
        "blk.{l}.attn_q.weight",
        "model.layers.{l}.self_attn.q_proj.weight",
        &[Step::Scaled("attention_in_multiplier")],
    ),
    with(
        "blk.{l}.attn_k.weight",
        "model.layers.{l}.self_attn.k_proj.weight",
        &[
            Step::Scaled("key_multiplier"),
            Step::Scaled("attention_in_multiplier"),
        ],
    ),
    with(
        "blk.{l}.attn_v.weight",
        "model.layers.{l}.self_attn.v_proj.weight",
        &[Step::Scaled("attention_in_multiplier")],
    ),
    with(
        "blk.{l}.attn_output.weight",
        "model.layers.{l}.self_attn.o_proj.weight",
        &[Step::Scaled("attention_out_multiplier")],
    ),
    with(
        "blk.{l}.ssm_in.weight",
        "model.layers.{l}.mamba.in_proj.weight",
        &[Step::ScaledRows(falcon_rows)],
    ),
    with(
        "blk.{l}.ssm_conv1d.weight",
        "model.layers.{l}.mamba.conv1d.weight",
        &[Step::Squeezed],
    ),
    same(
        "blk.{l}.ssm_conv1d.bias",
        "model.layers.{l}.mamba.conv1d.bias",
    ),
    with(
        "blk.{l}.ssm_out.weight",
        "model.layers.{l}.mamba.out_proj.weight",
        &[Step::Scaled("ssm_out_multiplier")],
    ),
];

/// Rows of the first projection are gate, input, B, C and time steps, each with a factor.
fn falcon_rows(config: &HfConfig) -> Result<RowFactors, HfError> {
    let inner = config.count("mamba_d_ssm")?;
    let groups = config.count("mamba_n_groups")? * config.count("mamba_d_state")?;
    let heads = config.count("mamba_n_heads")?;
    let all = config.optional_number("ssm_in_multiplier")?.unwrap_or(1.0) as f32;
    let rows = [inner, inner, groups, groups, heads];
    let of_part = |(i, rows): (usize, usize)| {
        let factor = config.optional_number(&format!("ssm_multipliers.{i}"))?;
        Ok((rows, all * factor.unwrap_or(1.0) as f32))
    };
    rows.into_iter().enumerate().map(of_part).collect()
}
