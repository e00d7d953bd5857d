//! Convolution and selective scan of some channels of a recurrent layer, over groups of rows.
//!
//! A task takes a range of channels through all groups, so it depends on no other task, and what it
//! computes does not depend on how channels are divided. The state under way lives where the group
//! stores its last one: no scratch memory. Knows nothing of sequences.

use std::ops::Range;

use kv_core::graph::StateGroup;
use kv_core::ids::CellIdx;

use crate::kernels::Kernels;
use crate::plan::{ConvKernel, ScanWeights};
use crate::values::SharedValues;

/// Values of a state that are updated at once.
const PIECE: usize = 64;

/// The convolution of one layer.
pub(crate) struct Convolution<'a> {
    pub(crate) kernels: &'a Kernels,
    pub(crate) kernel: &'a ConvKernel,
    pub(crate) channels: usize,
    /// `[rows, channels]`.
    pub(crate) x: &'a [f32],
    /// `[states, width - 1, channels]`.
    pub(crate) states: SharedValues<'a>,
    /// `[rows, channels]`.
    pub(crate) out: SharedValues<'a>,
}

impl Convolution<'_> {
    /// Computes these channels.
    ///
    /// # Safety
    /// The groups are sound for the rows and states, and no other task has these channels.
    pub(crate) unsafe fn run(&self, groups: &[StateGroup], channels: Range<usize>) {
        for group in groups {
            for (at, &row) in group.rows.iter().enumerate() {
                // SAFETY: as promised to this function.
                unsafe { self.row((group, at), row as usize, channels.clone()) };
            }
            for store in &group.stores {
                for k in 0..self.kernel.width - 1 {
                    // SAFETY: as promised: within these channels this task alone reads and writes.
                    let to = unsafe { self.states.range(self.input(store.to, k, &channels)) };
                    match self.before((group, store.n_rows as usize), k, channels.clone()) {
                        Some(from) => to.copy_from_slice(from),
                        None => to.fill(0.0),
                    }
                }
            }
        }
    }

    /// One row: the taps are added from the oldest input to the newest, then the bias.
    unsafe fn row(&self, (group, at): (&StateGroup, usize), row: usize, channels: Range<usize>) {
        let width = self.kernel.width;
        let here = row * self.channels + channels.start..row * self.channels + channels.end;
        // SAFETY: as promised to `run`.
        let out = unsafe { self.out.range(here.clone()) };
        out.fill(0.0);
        for k in 0..width {
            let taps = &self.kernel.taps[k * self.channels..][channels.clone()];
            let input = match k + 1 == width {
                true => Some(&self.x[here.clone()]),
                false => self.before((group, at), k, channels.clone()),
            };
            if let Some(input) = input {
                for ((out, x), w) in out.iter_mut().zip(input).zip(taps) {
                    *out += x * w;
                }
            }
        }
        if let Some(bias) = &self.kernel.bias {
            (self.kernels.add)(out, &bias[channels]);
        }
    }

    /// The `k`-th of the `width - 1` inputs before row `at` of a group; `None` where it is zeros.
    fn before(
        &self,
        (group, at): (&StateGroup, usize),
        k: usize,
        channels: Range<usize>,
    ) -> Option<&[f32]> {
        let n_old = self.kernel.width - 1;
        match (at + k).checked_sub(n_old) {
            Some(own) => {
                let row = group.rows[own] as usize * self.channels;
                Some(&self.x[row + channels.start..row + channels.end])
            }
            None => {
                let source = group.source?;
                let range = self.input(source, at + k, &channels);
                // SAFETY: sound groups write no row that is read in the same or an earlier group,
                // and within these channels this task alone reads and writes.
                Some(unsafe { self.states.range(range) })
            }
        }
    }

    /// Where the `k`-th input of a state is.
    fn input(&self, state: CellIdx, k: usize, channels: &Range<usize>) -> Range<usize> {
        let first = (state.as_usize() * (self.kernel.width - 1) + k) * self.channels;
        first + channels.start..first + channels.end
    }
}

/// The selective scan of one layer.
pub(crate) struct SelectiveScan<'a> {
    pub(crate) kernels: &'a Kernels,
    pub(crate) weights: &'a ScanWeights,
    pub(crate) channels: usize,
    /// x and dt `[rows, channels]`, B and C `[rows, d_state]`.
    pub(crate) inputs: [&'a [f32]; 4],
    /// `[states, channels, d_state]`.
    pub(crate) states: SharedValues<'a>,
    /// `[rows, channels]`.
    pub(crate) out: SharedValues<'a>,
}

impl SelectiveScan<'_> {
    /// Computes these channels.
    ///
    /// # Safety
    /// The groups are sound for the rows and states, and no other task has these channels.
    pub(crate) unsafe fn run(&self, groups: &[StateGroup], channels: Range<usize>) {
        for group in groups {
            let Some(last) = group.stores.last() else {
                continue;
            };
            // SAFETY: as promised: within these channels this task alone reads and writes, and the
            // row of the last state is another than the source.
            let state = unsafe { self.states.range(self.of(last.to, &channels)) };
            match group.source {
                Some(row) => {
                    // SAFETY: as above.
                    let source = unsafe { self.states.range(self.of(row, &channels)) };
                    state.copy_from_slice(source);
                }
                None => state.fill(0.0),
            }
            let mut snapshots = group.stores.iter().take(group.stores.len() - 1).peekable();
            for (n_rows, &row) in (1u32..).zip(&group.rows) {
                let row = row as usize;
                let range =
                    row * self.channels + channels.start..row * self.channels + channels.end;
                // SAFETY: as promised to this function.
                let out = unsafe { self.out.range(range) };
                self.token(state, row, channels.clone(), out);
                if let Some(store) = snapshots.next_if(|s| s.n_rows == n_rows) {
                    // SAFETY: as above; sound groups store no row twice.
                    let to = unsafe { self.states.range(self.of(store.to, &channels)) };
                    to.copy_from_slice(state);
                }
            }
        }
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

    /// Where the states of these channels are.
    fn of(&self, state: CellIdx, channels: &Range<usize>) -> Range<usize> {
        let n = self.weights.d_state;
        let first = state.as_usize() * self.channels * n;
        first + channels.start * n..first + channels.end * n
    }
}

/// `ln(1 + e^x)`; from 20 on that is `x` in `f32`.
fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}
