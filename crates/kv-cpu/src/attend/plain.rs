//! Plain attention, the reference for the fused one: scores, masked softmax and weighted sum as
//! three steps over the first `n_kv` cells of a part.
//!
//! Selected by `--attention plain`. Invariant: a cell that a row does not see has the weight 0 and
//! its value is not read. A row's bits depend on which cells hold what it sees, unlike those of
//! fused attention, and on nothing else.

use kv_core::Visibility;
use kv_graph::AttendSpec;

use super::{ScoreMods, Scratch};
use crate::kernels::Kernels;
use crate::kv_rows::KvRows;

/// The values that the three steps share.
#[derive(Clone, Copy)]
pub(crate) struct PlainAttention<'a> {
    pub(crate) kernels: &'a Kernels,
    pub(crate) spec: &'a AttendSpec,
    /// Cells of the score matrix.
    pub(crate) n_kv: usize,
}

/// The row of a softmax: what it sees, and how its scores are modified.
#[derive(Clone, Copy)]
pub(crate) struct SoftmaxRow<'a> {
    pub(crate) visibility: &'a Visibility,
    pub(crate) row: u32,
    pub(crate) score_mods: ScoreMods<'a>,
}

impl PlainAttention<'_> {
    fn kv_head(&self, head: usize) -> usize {
        head / (self.spec.n_heads / self.spec.kv_heads.max(1)).max(1)
    }

    /// Scores of one row: `q` `[n_heads, k_dim]` to `out` `[n_heads, n_kv]`.
    pub(crate) fn scores(
        &self,
        keys: KvRows<'_>,
        q: &[f32],
        out: &mut [f32],
        scratch: &mut Scratch,
    ) {
        let k_dim = self.spec.k_dim;
        let key = scratch.row(keys.shape.len());
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

    /// Masked softmax of one row: `scores` `[n_heads, n_kv]` to weights `out` `[n_heads, n_kv]`.
    pub(crate) fn softmax(&self, row: SoftmaxRow<'_>, scores: &[f32], out: &mut [f32]) {
        let SoftmaxRow {
            visibility,
            row,
            score_mods,
        } = row;
        let n_kv = self.n_kv.max(1);
        let heads = out.chunks_exact_mut(n_kv).zip(scores.chunks_exact(n_kv));
        for (head, (weights, scores)) in heads.enumerate() {
            let slope = score_mods.slopes.map(|slopes| slopes[head]);
            let sink = score_mods.sinks.map(|sinks| sinks[head]);
            weights.fill(f32::NEG_INFINITY);
            for (cell, pos) in visibility.row(row) {
                let bias = slope.map_or(0.0, |slope| {
                    slope * score_mods.positions[row as usize].abs_diff(pos.0) as f32
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

    /// Weighted sum of one row: `weights` `[n_heads, n_kv]` to `out` `[n_heads, v_dim]`.
    pub(crate) fn weighted_sum(
        &self,
        values: KvRows<'_>,
        weights: &[f32],
        out: &mut [f32],
        scratch: &mut Scratch,
    ) {
        let v_dim = self.spec.v_dim;
        let value = scratch.row(values.shape.len());
        out.fill(0.0);
        for cell in 0..self.n_kv {
            let head_weight = |head: usize| weights[head * self.n_kv + cell];
            if (0..self.spec.n_heads).all(|head| head_weight(head) == 0.0) {
                continue;
            }
            values.decode_cell(cell, value);
            for (head, out) in out.chunks_exact_mut(v_dim.max(1)).enumerate() {
                let weight = head_weight(head);
                if weight != 0.0 {
                    // `v_dim` may be less than the stored dimension: V is the start of K (MLA).
                    let value = &value[self.kv_head(head) * values.shape.dim..][..v_dim];
                    (self.kernels.axpy_f32)(out, weight, value);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;

    /// A weight of 0 would not hide what is infinite.
    #[test]
    fn a_head_reads_the_values_alone_that_it_weighs() {
        let spec = AttendSpec {
            n_heads: 2,
            kv_heads: 1,
            k_dim: 1,
            v_dim: 1,
            scale: 1.0,
            soft_cap: None,
            alibi: None,
        };
        let plain = PlainAttention {
            kernels: Kernels::for_isa(Isa::Scalar).unwrap(),
            spec: &spec,
            n_kv: 3,
        };
        let values = [2.0, f32::INFINITY, f32::NAN];
        let (mut out, mut scratch) = ([9.0; 2], Scratch::default());
        scratch.reserve_row(1);
        let weights = [1.0, 0.0, 0.0, 0.0, 0.5, 0.0];
        let values = KvRows::from_f32(&values, 1, 1);
        plain.weighted_sum(values, &weights, &mut out, &mut scratch);
        assert_eq!(out, [2.0, f32::INFINITY]);
    }
}
