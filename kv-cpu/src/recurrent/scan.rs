//! The selective scan of Mamba: one decay for each value of a channel's state.
//!
//! Knows nothing of sequences.

use std::ops::Range;

use kv_core::graph::StateGroup;

use super::{States, softplus};
use crate::kernels::Kernels;
use crate::plan::ScanWeights;
use crate::values::SharedValues;

/// Values of a state that are updated at once.
const PIECE: usize = 64;

/// The selective scan of one layer.
pub(crate) struct SelectiveScan<'a> {
    pub(crate) kernels: &'a Kernels,
    pub(crate) weights: &'a ScanWeights,
    pub(crate) channels: usize,
    /// x and dt `[rows, channels]`, B and C `[rows, d_state]`.
    pub(crate) inputs: [&'a [f32]; 4],
    /// Rows are `[channels, d_state]`.
    pub(crate) states: States<'a>,
    /// `[rows, channels]`.
    pub(crate) out: SharedValues<'a>,
}

impl SelectiveScan<'_> {
    /// Computes these channels.
    ///
    /// # Safety
    /// The groups are sound for the rows and states, and no other task has these channels.
    pub(crate) unsafe fn run(&self, groups: &[StateGroup], channels: Range<usize>) {
        let n = self.weights.d_state;
        let piece = channels.start * n..channels.end * n;
        let advance = |state: &mut [f32], rows: &[u32]| {
            for &row in rows {
                let first = row as usize * self.channels;
                // SAFETY: as promised: no other task has these channels of any row.
                let out = unsafe { self.out.range(first + channels.start..first + channels.end) };
                self.token(state, row as usize, channels.clone(), out);
            }
        };
        // SAFETY: as promised to this function.
        unsafe { self.states.walk(groups, &piece, advance) }
    }

    fn token(&self, state: &mut [f32], row: usize, channels: Range<usize>, out: &mut [f32]) {
        let n = self.weights.d_state;
        let [x, dt, b, c] = self.inputs;
        let (b, c) = (&b[row * n..(row + 1) * n], &c[row * n..(row + 1) * n]);
        let kernels = self.kernels;
        for ((channel, out), state) in channels.zip(out).zip(state.chunks_exact_mut(n.max(1))) {
            let at = row * self.channels + channel;
            let step = softplus(dt[at]);
            let a = &self.weights.a[channel * n..(channel + 1) * n];
            let mut y = 0.0;
            for first in (0..n).step_by(PIECE) {
                let piece = first..(first + PIECE).min(n);
                let mut decay = [0.0; PIECE];
                let decay = &mut decay[..piece.len()];
                decay.copy_from_slice(&a[piece.clone()]);
                (kernels.scale)(decay, step);
                (kernels.exp_sum)(decay, 0.0);
                let state = &mut state[piece.clone()];
                (kernels.mul)(state, decay);
                (kernels.axpy_f32)(state, step * x[at], &b[piece.clone()]);
                y += (kernels.dot_f32)(state, &c[piece]);
            }
            *out = y + self.weights.d[channel] * x[at];
        }
    }
}
