//! Attention in three steps, over the first cells of a part whoever uses them: to be compared with the
//! fused one. K and V are read by rows, as they are stored.
//!
//! Invariant: a cell that a row does not see has the weight 0 there and is not looked at again. The
//! bits of a row depend on which cells hold what it sees, unlike those of the fused attention, and
//! on nothing else.

use kv_core::Visibility;
use kv_core::graph::AttendSpec;

use super::{Beside, Scratch};
use crate::kernels::Kernels;
use crate::storage::Stored;

/// What the three steps have in common.
#[derive(Clone, Copy)]
pub(crate) struct Plain<'a> {
    pub(crate) kernels: &'a Kernels,
    pub(crate) spec: &'a AttendSpec,
    /// Cells of the tables.
    pub(crate) n_kv: usize,
}

impl Plain<'_> {
    fn kv_head(&self, head: usize) -> usize {
        head / (self.spec.n_heads / self.spec.kv_heads.max(1)).max(1)
    }

    /// Scores of one row: `q [heads, k_dim]` to `out [heads, n_kv]`.
    pub(crate) fn scores(
        &self,
        keys: Stored<'_>,
        (q, out): (&[f32], &mut [f32]),
        scratch: &mut Scratch,
    ) {
        let k_dim = self.spec.k_dim;
        let key = &mut scratch.row[..keys.shape.len()];
        for cell in 0..self.n_kv {
            keys.decode_cell(cell, key);
            for (head, q) in q.chunks_exact(k_dim.max(1)).enumerate() {
                let key = &key[self.kv_head(head) * k_dim..][..k_dim];
                out[head * self.n_kv + cell] = (self.kernels.dot_f32)(q, key);
            }
        }
        (self.kernels.scale)(out, self.spec.scale);
        if let Some(cap) = self.spec.soft_cap {
            (self.kernels.soft_cap)(out, cap);
        }
    }

    /// Weights of one row: scores `[heads, n_kv]` to `out [heads, n_kv]`.
    pub(crate) fn soft_max(
        &self,
        (visibility, row): (&Visibility, u32),
        beside: Beside<'_>,
        scores: &[f32],
        out: &mut [f32],
    ) {
        let n_kv = self.n_kv.max(1);
        let heads = out.chunks_exact_mut(n_kv).zip(scores.chunks_exact(n_kv));
        for (head, (weights, scores)) in heads.enumerate() {
            let slope = beside.slopes.map(|slopes| slopes[head]);
            let sink = beside.sinks.map(|sinks| sinks[head]);
            weights.fill(f32::NEG_INFINITY);
            for (cell, pos) in visibility.row(row) {
                let bias = slope.map_or(0.0, |slope| {
                    slope * beside.positions[row as usize].abs_diff(pos.0) as f32
                });
                weights[cell.as_usize()] = scores[cell.as_usize()] - bias;
            }
            let max = (self.kernels.max)(weights).max(sink.unwrap_or(f32::NEG_INFINITY));
            if max == f32::NEG_INFINITY {
                weights.fill(0.0);
                continue;
            }
            let mut sum = (self.kernels.exp_sum)(weights, max);
            sum += sink.map_or(0.0, |sink| (sink - max).exp());
            (self.kernels.scale)(weights, 1.0 / sum);
        }
    }

    /// The result of one row: weights `[heads, n_kv]` to `out [heads, v_dim]`.
    pub(crate) fn sum(
        &self,
        values: Stored<'_>,
        (weights, out): (&[f32], &mut [f32]),
        scratch: &mut Scratch,
    ) {
        let v_dim = self.spec.v_dim;
        let value = &mut scratch.row[..values.shape.len()];
        out.fill(0.0);
        for cell in 0..self.n_kv {
            let of_head = |head: usize| weights[head * self.n_kv + cell];
            if (0..self.spec.n_heads).all(|head| of_head(head) == 0.0) {
                continue;
            }
            values.decode_cell(cell, value);
            for (head, out) in out.chunks_exact_mut(v_dim.max(1)).enumerate() {
                let weight = of_head(head);
                if weight != 0.0 {
                    // Values may be the beginnings of keys.
                    let value = &value[self.kv_head(head) * values.shape.dim..][..v_dim];
                    (self.kernels.axpy_f32)(out, weight, value);
                }
            }
        }
    }
}
