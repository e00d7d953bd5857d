//! Tensors of mixers, which models of mixers alone and hybrids keep in different places.

use model_core::hf::{TensorRule, TensorStep, same, with};

/// The first matrix and the last.
pub(super) const PROJECTIONS: [TensorRule; 2] = [
    same("ssm_in.weight", "in_proj.weight"),
    same("ssm_out.weight", "out_proj.weight"),
];

pub(super) const CONV: [TensorRule; 2] = [
    with(
        "ssm_conv1d.weight",
        "conv1d.weight",
        &[TensorStep::Squeezed],
    ),
    same("ssm_conv1d.bias", "conv1d.bias"),
];

/// Of the first generation.
pub(super) const MAMBA1: [TensorRule; 5] = [
    same("ssm_x.weight", "x_proj.weight"),
    same("ssm_dt.weight", "dt_proj.weight"),
    same("ssm_dt.bias", "dt_proj.bias"),
    with("ssm_a", "A_log", &[TensorStep::NegativeExp]),
    same("ssm_d", "D"),
];

/// Of the second generation, without its norm.
pub(super) const MAMBA2: [TensorRule; 3] = [
    same("ssm_dt.bias", "dt_bias"),
    with(
        "ssm_a",
        "A_log",
        &[TensorStep::NegativeExp, TensorStep::Column],
    ),
    with("ssm_d", "D", &[TensorStep::Column]),
];
