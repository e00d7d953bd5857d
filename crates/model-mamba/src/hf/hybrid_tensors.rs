//! Tensors of hybrids: which tensors of the files become which GGUF tensors.

use model_core::hf::{
    GATED, GATED_EXPERTS, HfConfig, ModelFileError, RowFactors, TensorRule, TensorStep, in_layers,
    same, with,
};

use super::mixer_tensors::{CONV, MAMBA1, MAMBA2, PROJECTIONS};

/// The tensors around the layers.
pub(super) const FRAME_TENSORS: &[TensorRule] = &[
    same("token_embd.weight", "model.embed_tokens.weight"),
    same("output_norm.weight", "model.final_layernorm.weight"),
    same("output.weight", "lm_head.weight"),
];

pub(super) const FFN_NORM: &[TensorRule] = &in_layers(
    "model.layers.{l}.",
    [same("ffn_norm.weight", "pre_ff_layernorm.weight")],
);

pub(super) const DENSE_TENSORS: &[TensorRule] = &in_layers("model.layers.{l}.feed_forward.", GATED);

pub(super) const PROJECTION_TENSORS: &[TensorRule] =
    &in_layers("model.layers.{l}.mamba.", PROJECTIONS);

pub(super) const CONV_TENSORS: &[TensorRule] = &in_layers("model.layers.{l}.mamba.", CONV);

pub(super) const MAMBA1_TENSORS: &[TensorRule] = &in_layers("model.layers.{l}.mamba.", MAMBA1);

pub(super) const MAMBA2_TENSORS: &[TensorRule] = &in_layers("model.layers.{l}.mamba.", MAMBA2);

/// Norms of B, C and what time steps are made from.
pub(super) const JAMBA_NORMS: &[TensorRule] = &in_layers(
    "model.layers.{l}.mamba.",
    [
        same("ssm_dt_norm.weight", "dt_layernorm.weight"),
        same("ssm_b_norm.weight", "b_layernorm.weight"),
        same("ssm_c_norm.weight", "c_layernorm.weight"),
    ],
);

pub(super) const MAMBA2_NORM: &[TensorRule] = &in_layers(
    "model.layers.{l}.mamba.",
    [with(
        "ssm_norm.weight",
        "norm.weight",
        &[TensorStep::Rows("mamba_n_groups")],
    )],
);

pub(super) const JAMBA_ROUTER: &[TensorRule] = &in_layers(
    "model.layers.{l}.feed_forward.",
    [same("ffn_gate_inp.weight", "router.weight")],
);

pub(super) const JAMBA_EXPERTS: &[TensorRule] =
    &in_layers("model.layers.{l}.feed_forward.experts.{e}.", GATED_EXPERTS);

/// Granite 4: gate and up are the halves of one matrix.
const GATE: &[TensorStep] = &[TensorStep::RowPart { part: 0, of: 2 }];
const UP: &[TensorStep] = &[TensorStep::RowPart { part: 1, of: 2 }];

pub(super) const GRANITE_EXPERTS: &[TensorRule] = &in_layers(
    "model.layers.{l}.block_sparse_moe.",
    [
        same("ffn_gate_inp.weight", "router.layer.weight"),
        with("ffn_gate_exps.weight", "input_linear.weight", GATE),
        with("ffn_up_exps.weight", "input_linear.weight", UP),
        same("ffn_down_exps.weight", "output_linear.weight"),
    ],
);

pub(super) const GRANITE_SHARED: &[TensorRule] = &in_layers(
    "model.layers.{l}.shared_mlp.",
    [
        with("ffn_gate_shexp.weight", "input_linear.weight", GATE),
        with("ffn_up_shexp.weight", "input_linear.weight", UP),
        same("ffn_down_shexp.weight", "output_linear.weight"),
    ],
);

/// Falcon-H1: the config's factors are part of the weights.
pub(super) const FALCON_H1_FRAME: &[TensorRule] = &[
    with(
        "token_embd.weight",
        "model.embed_tokens.weight",
        &[TensorStep::Scaled("embedding_multiplier")],
    ),
    same("output_norm.weight", "model.final_layernorm.weight"),
    with(
        "output.weight",
        "lm_head.weight",
        &[TensorStep::Scaled("lm_head_multiplier")],
    ),
];

const ATTENTION_IN: TensorStep = TensorStep::Scaled("attention_in_multiplier");

pub(super) const FALCON_H1_LAYERS: &[TensorRule] = &in_layers(
    "model.layers.{l}.",
    [
        // This one has no ending in GGUF.
        same("ffn_norm", "pre_ff_layernorm.weight"),
        with(
            "ffn_gate.weight",
            "feed_forward.gate_proj.weight",
            &[TensorStep::Scaled("mlp_multipliers.0")],
        ),
        same("ffn_up.weight", "feed_forward.up_proj.weight"),
        with(
            "ffn_down.weight",
            "feed_forward.down_proj.weight",
            &[TensorStep::Scaled("mlp_multipliers.1")],
        ),
        with("attn_q.weight", "self_attn.q_proj.weight", &[ATTENTION_IN]),
        with(
            "attn_k.weight",
            "self_attn.k_proj.weight",
            &[TensorStep::Scaled("key_multiplier"), ATTENTION_IN],
        ),
        with("attn_v.weight", "self_attn.v_proj.weight", &[ATTENTION_IN]),
        with(
            "attn_output.weight",
            "self_attn.o_proj.weight",
            &[TensorStep::Scaled("attention_out_multiplier")],
        ),
        with(
            "ssm_in.weight",
            "mamba.in_proj.weight",
            &[TensorStep::ScaledRows(falcon_rows)],
        ),
        with(
            "ssm_out.weight",
            "mamba.out_proj.weight",
            &[TensorStep::Scaled("ssm_out_multiplier")],
        ),
    ],
);

/// Rows of the first projection are gate, input, B, C and time steps, each with a factor.
fn falcon_rows(config: &HfConfig) -> Result<RowFactors, ModelFileError> {
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
