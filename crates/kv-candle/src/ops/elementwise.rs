//! Elementwise functions that some architectures have.
//!
//! Knows nothing of architectures.

use candle_core::{Result, Tensor};
use kv_graph::PositionScale;

/// `cap * tanh(x / cap)`.
pub(crate) fn soft_cap(x: &Tensor, cap: f32) -> Result<Tensor> {
    let cap = f64::from(cap);
    x.affine(1.0 / cap, 0.0)?.tanh()?.affine(cap, 0.0)
}

/// `g / (1 + e^(-slope g)) * (u + 1)` with both operands clamped at `limit`.
pub(crate) fn clamped_gate([gate, up]: [&Tensor; 2], slope: f32, limit: f32) -> Result<Tensor> {
    let (slope, limit) = (f64::from(slope), f64::from(limit));
    let gate = gate.minimum(limit)?;
    let up = up.clamp(-limit, limit)?.affine(1.0, 1.0)?;
    let curve = candle_nn::ops::sigmoid(&gate.affine(slope, 0.0)?)?;
    gate.mul(&curve)?.mul(&up)
}

/// Every row of `x [n, ..]` times the factor of its position.
pub(crate) fn scale_by_position(
    x: &Tensor,
    scale: &PositionScale,
    positions: &[u32],
) -> Result<Tensor> {
    let factors: Vec<f32> = positions.iter().map(|&p| scale.at(p)).collect();
    let mut shape = vec![1; x.rank()];
    if let Some(n) = shape.first_mut() {
        *n = factors.len();
    }
    x.broadcast_mul(&Tensor::from_vec(factors, shape, x.device())?)
}
