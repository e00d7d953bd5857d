//! Attention in three steps, over the first cells of a part, whichever sequences use them.
//!
//! A masked cell's weight is exactly 0, but its value is multiplied: rows that hold infinities
//! reach everybody, unlike in `attend`. K and V are read by rows, as they are stored.

use candle_core::{D, Result, Tensor};
use kv_graph::AttendSpec;

use super::attend::Queries;
use crate::rows::RowTensor;

/// `[n, heads, n_kv]` scores of `q [n, heads, k_dim]` against the first rows of `keys`.
pub(crate) fn kq(keys: &RowTensor, spec: &AttendSpec, q: &Tensor, n_kv: usize) -> Result<Tensor> {
    let (n, shared) = (q.dim(0)?, spec.n_heads / spec.kv_heads);
    let keys = by_head(keys, spec.kv_heads, spec.k_dim, n_kv)?;
    let q = q
        .reshape((n, spec.kv_heads, shared, spec.k_dim))?
        .transpose(0, 1)?
        .contiguous()?;
    let q = q.reshape((spec.kv_heads, n * shared, spec.k_dim))?;
    let mut scores = q.matmul(&keys.t()?)?.affine(f64::from(spec.scale), 0.0)?;
    if let Some(cap) = spec.soft_cap.map(f64::from) {
        scores = scores.affine(1.0 / cap, 0.0)?.tanh()?.affine(cap, 0.0)?;
    }
    let scores = scores.reshape((spec.kv_heads, n, shared, n_kv))?;
    scores
        .transpose(0, 1)?
        .contiguous()?
        .reshape((n, spec.n_heads, n_kv))
}

/// The softmax of scores `[n, heads, n_kv]` (in place of the queries) over what each row sees.
pub(crate) fn kq_soft_max(spec: &AttendSpec, queries: Queries<'_>) -> Result<Tensor> {
    let scores = queries.q;
    let (n, heads, n_kv) = scores.dims3()?;
    let mut mask = vec![f32::NEG_INFINITY; n * n_kv];
    let mut distances = vec![0.0; n * n_kv];
    let mut sees = vec![0.0f32; n];
    for (row, sees) in sees.iter_mut().enumerate() {
        let query = queries.positions.get(row).copied().unwrap_or(0);
        for (cell, pos) in queries.visibility.row(row as u32) {
            let at = row * n_kv + cell.as_usize();
            mask[at] = 0.0;
            distances[at] = -(query.abs_diff(pos.0) as f32);
            *sees = 1.0;
        }
    }
    // A row that sees nothing would be a softmax of nothing: it sees all, and counts for nothing.
    for (row, _) in sees.iter().enumerate().filter(|(_, sees)| **sees == 0.0) {
        mask[row * n_kv..(row + 1) * n_kv].fill(0.0);
    }
    let device = scores.device();
    let mut scores = scores.clone();
    if let Some(alibi) = spec.alibi {
        let slopes = Tensor::from_vec(alibi.slopes(heads), (1, heads, 1), device)?;
        let distances = Tensor::from_vec(distances, (n, 1, n_kv), device)?;
        scores = scores.add(&slopes.broadcast_mul(&distances)?)?;
    }
    let mask = Tensor::from_vec(mask, (n, 1, n_kv), device)?;
    let mut scores = scores.broadcast_add(&mask)?;
    if let Some(sinks) = queries.sinks {
        let sinks = sinks.reshape((1, heads, 1))?.broadcast_as((n, heads, 1))?;
        scores = Tensor::cat(&[scores, sinks.contiguous()?], D::Minus1)?;
    }
    let weights = candle_nn::ops::softmax_last_dim(&scores)?;
    let weights = weights.narrow(D::Minus1, 0, n_kv)?;
    weights.broadcast_mul(&Tensor::from_vec(sees, (n, 1, 1), device)?)
}

/// `[n, heads * v_dim]`: the first rows of `values`, weighted. Heads may go on behind the values.
pub(crate) fn kqv(values: &RowTensor, spec: &AttendSpec, weights: &Tensor) -> Result<Tensor> {
    let (n, _, n_kv) = weights.dims3()?;
    let shared = spec.n_heads / spec.kv_heads;
    let values = by_head(values, spec.kv_heads, values.shape.dim, n_kv)?;
    let values = values.narrow(D::Minus1, 0, spec.v_dim)?.contiguous()?;
    let weights = weights
        .reshape((n, spec.kv_heads, shared, n_kv))?
        .transpose(0, 1)?
        .contiguous()?;
    let weights = weights.reshape((spec.kv_heads, n * shared, n_kv))?;
    let out = weights.matmul(&values)?;
    let out = out.reshape((spec.kv_heads, n, shared, spec.v_dim))?;
    out.transpose(0, 1)?
        .contiguous()?
        .reshape((n, spec.n_heads * spec.v_dim))
}

/// The first `n_kv` rows as `[heads, n_kv, dim]`.
fn by_head(rows: &RowTensor, heads: usize, dim: usize, n_kv: usize) -> Result<Tensor> {
    let values = rows.values(&rows.tensor.narrow(0, 0, n_kv)?)?;
    values
        .reshape((n_kv, heads, dim))?
        .transpose(0, 1)?
        .contiguous()
}
