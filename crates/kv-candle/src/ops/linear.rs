//! GEMM: rows by a weight matrix, or heads by a matrix each.
//!
//! Knows nothing of cells.

use candle_core::{Result, Tensor};

use super::AffineTensors;

/// `x W^T + b`: `x [n, in]`, `weight [out, in]`, `bias [out]` → `[n, out]`.
pub(crate) fn linear(x: &Tensor, affine: AffineTensors<'_>) -> Result<Tensor> {
    let y = x.matmul(&affine.weight.t()?)?;
    match affine.bias {
        Some(bias) => y.broadcast_add(bias),
        None => Ok(y),
    }
}

/// `x [n, heads, in]`, `weight [heads, out, in]` → `[n, heads, out]`.
pub(crate) fn head_linear(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let by_head = x.transpose(0, 1)?.contiguous()?;
    let y = by_head.matmul(&weight.transpose(1, 2)?.contiguous()?)?;
    y.transpose(0, 1)?.contiguous()
}
