//! Operations on whole rows: matrix product and RMS norm.
//!
//! Knows nothing of cells.

use candle_core::{D, Result, Tensor};

/// `x W^T + b`: `x [n, in]`, `weight [out, in]`, `bias [out]` → `[n, out]`.
pub(crate) fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let y = x.matmul(&weight.t()?)?;
    match bias {
        Some(bias) => y.broadcast_add(bias),
        None => Ok(y),
    }
}

/// `x / sqrt(mean(x^2) + eps) * w` over the last dimension, with a gain `[dim]`, `[groups, dim]` or
/// none.
pub(crate) fn rms_norm(x: &Tensor, gain: Option<&Tensor>, eps: f32) -> Result<Tensor> {
    let x = x.contiguous()?;
    match gain {
        Some(gain) if gain.rank() == 1 => candle_nn::ops::rms_norm(&x, gain, eps),
        _ => {
            let ones = Tensor::ones(x.dim(D::Minus1)?, x.dtype(), x.device())?;
            let normed = candle_nn::ops::rms_norm(&x, &ones, eps)?;
            gain.map_or(Ok(normed.clone()), |gain| normed.broadcast_mul(gain))
        }
    }
}
