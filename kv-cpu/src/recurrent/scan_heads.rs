//! The scan of Mamba-2: one decay for all channels of a head.
//!
//! Knows nothing of sequences.

use std::ops::Range;

use kv_core::graph::StateGroup;

use super::{States, softplus};
use crate::kernels::Kernels;
use crate::plan::HeadScanWeights;
use crate::values::SharedValues;

/// The scan of one layer, head by head.
pub(crate) struct HeadScan<'a> {
    pub(crate) kernels: &'a Kernels,
    pub(crate) weights: &'a HeadScanWeights,
    pub(crate) channels: usize,
    /// x `[rows, channels]`, dt `[rows, heads]`, B and C `[rows, groups, d_state]`.
    pub(crate) inputs: [&'a [f32]; 4],
    /// Rows are `[channels, d_state]`.
    pub(crate) states: States<'a>,
    /// `[rows, channels]`.
    pub(crate) out: SharedValues<'a>,
}

impl HeadScan<'_> {
    /// Computes these channels.
    ///
    /// # Safety
    /// The groups are sound for the rows and states, and no other task has these channels.
    pub(crate) unsafe fn run(&self, groups: &[StateGroup], channels: Range<usize>) {
        let n = self.weights.d_state;
        let head_dim = self.channels / self.weights.a.len().max(1);
        let mut next = channels.start;
        // Head by head, so that a state stays near while its rows pass.
        while next < channels.end {
            let head = next / head_dim;
            let own = next..channels.end.min((head + 1) * head_dim);
            next = own.end;
            let piece = own.start * n..own.end * n;
            let advance = |state: &mut [f32], rows: &[u32]| {
                for &row in rows {
                    self.token(state, row as usize, head, own.clone());
                }
            };
            // SAFETY: as promised to this function.
            unsafe { self.states.walk(groups, &piece, advance) }
        }
    }

    /// Takes one row into the states of some channels of a head.
    fn token(&self, state: &mut [f32], row: usize, head: usize, channels: Range<usize>) {
        let weights = self.weights;
        let (n, n_heads, n_groups) = (weights.d_state, weights.a.len(), weights.n_groups);
        let [x, dt, b, c] = self.inputs;
        let group = head / (n_heads / n_groups);
        let narrow = (row * n_groups + group) * n..(row * n_groups + group + 1) * n;
        let (b, c) = (&b[narrow.clone()], &c[narrow]);
        let step = softplus(dt[row * n_heads + head] + weights.dt_bias[head]);
        let decay = (step * weights.a[head]).exp();
        let kernels = self.kernels;
        let wide = row * self.channels + channels.start..row * self.channels + channels.end;
        // SAFETY: as promised to `run`: no other task has these channels of any row.
        let out = unsafe { self.out.range(wide.clone()) };
        for ((state, x), out) in state.chunks_exact_mut(n).zip(&x[wide]).zip(out) {
            (kernels.scale)(state, decay);
            (kernels.axpy_f32)(state, step * x, b);
            *out = (kernels.dot_f32)(state, c) + weights.d[head] * x;
        }
    }
}
