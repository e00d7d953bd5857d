//! Norms of rows: layer norm and RMS norm; and thresholds of rows by their own deviation.
//!
//! Knows nothing of cells.

use candle_core::{D, Result, Tensor};

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

/// `(x - mean(x)) / sqrt(variance(x) + eps) * w + b` over the last dimension.
pub(crate) fn layer_norm(
    x: &Tensor,
    [gain, bias]: [Option<&Tensor>; 2],
    eps: f32,
) -> Result<Tensor> {
    let centred = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
    let y = unit_norm(&centred, eps)?;
    let y = gain.map_or(Ok(y.clone()), |gain| y.broadcast_mul(gain))?;
    bias.map_or(Ok(y.clone()), |bias| y.broadcast_add(bias))
}

/// `max(x - (mean + deviations * deviation), 0)` with the mean and the deviation of each row.
pub(crate) fn gaussian_top_k(x: &Tensor, deviations: f32) -> Result<Tensor> {
    let centred = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
    let deviation = centred.sqr()?.mean_keepdim(D::Minus1)?.sqrt()?;
    let above = deviation.affine(f64::from(deviations), 0.0)?;
    centred.broadcast_sub(&above)?.relu()
}

fn unit_norm(x: &Tensor, eps: f32) -> Result<Tensor> {
    let mean_square = x.sqr()?.mean_keepdim(D::Minus1)?;
    x.broadcast_div(&mean_square.affine(1.0, f64::from(eps))?.sqrt()?)
}
