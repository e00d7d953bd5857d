//! Operations on whole rows: matrix product and RMS norm.
//!
//! Knows nothing of cells.

use candle_core::{Result, Tensor};

/// `x W^T + b`: `x [n, in]`, `weight [out, in]`, `bias [out]` → `[n, out]`.
pub(crate) fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let y = x.matmul(&weight.t()?)?;
    match bias {
        Some(bias) => y.broadcast_add(bias),
        None => Ok(y),
    }
}

/// `x / sqrt(mean(x^2) + eps) * w` over the last dimension.
pub(crate) fn rms_norm(x: &Tensor, weight: &Tensor, eps: f32) -> Result<Tensor> {
    candle_nn::ops::rms_norm(&x.contiguous()?, weight, eps)
}
