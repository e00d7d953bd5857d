//! GEMM: rows by a weight matrix.
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
