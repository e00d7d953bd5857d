//! GEMM: rows by a weight matrix.
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
