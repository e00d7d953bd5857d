//! The scan of Mamba-2: one decay for all channels of a head.
//!
//! Knows nothing of sequences.

use std::ops::Range;

use kv_core::graph::StateGroup;

use super::States;
use super::tile::{ROWS, TileRows};
use crate::kernels::{Decay, Kernels, LANES, ScanTile};
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
        // Tiles end with their head.
        while next < channels.end {
            let head = next / head_dim;
            let own = next..channels.end.min((head + 1) * head_dim).min(next + LANES);
            next = own.end;
            let advance = |state: &mut [f32], rows: &[u32]| match rows.len() {
                // SAFETY: as promised to this function.
                1 => unsafe { self.rows::<1>(state, rows, (head, &own)) },
                _ => rows.chunks(ROWS).for_each(|rows| {
                    // SAFETY: as promised to this function.
                    unsafe { self.rows::<ROWS>(state, rows, (head, &own)) };
                }),
            };
            // SAFETY: as promised to this function.
            unsafe {
                self.states
                    .walk(groups, &(own.start * n..own.end * n), advance)
            }
        }
    }

    /// Takes at most `N` rows into the states of some channels of a head.
    ///
    /// # Safety
    /// As for [`Self::run`].
    unsafe fn rows<const N: usize>(
        &self,
        state: &mut [f32],
        rows: &[u32],
        (head, own): (usize, &Range<usize>),
    ) {
        let weights = self.weights;
        let (n, n_heads, n_groups) = (weights.d_state, weights.a.len(), weights.n_groups);
        let [x, dt, b, c] = self.inputs;
        let mut steps = [0.0; N];
        let steps = &mut steps[..rows.len().min(N)];
        for (step, &row) in steps.iter_mut().zip(rows) {
            *step = dt[row as usize * n_heads + head] + weights.dt_bias[head];
        }
        (self.kernels.softplus)(steps);
        let x = TileRows::<N>::gather(x, self.channels, (rows, own));
        let mut decays = TileRows::<N>::zeros(rows.len());
        let (mut added, mut out) = (
            TileRows::<N>::zeros(rows.len()),
            TileRows::<N>::zeros(rows.len()),
        );
        let all = added.rows_mut().iter_mut().zip(out.rows_mut());
        let all = all.zip(decays.rows_mut());
        for (((added, out), decay), (x, step)) in all.zip(x.rows().iter().zip(steps)) {
            *added = x.map(|x| x * *step);
            *out = x.map(|x| x * weights.d[head]);
            *decay = [(*step * weights.a[head]).exp(); LANES];
        }
        let group = head / (n_heads / n_groups) * n;
        (self.kernels.scan_tile)(ScanTile {
            state,
            d_state: n,
            decay: Decay::PerChannel(decays.rows()),
            added: added.rows(),
            rows,
            b: &b[group..],
            c: &c[group..],
            stride: n_groups * n,
            out: out.rows_mut(),
        });
        for (&row, out) in rows.iter().zip(out.rows()) {
            let first = row as usize * self.channels;
            // SAFETY: as promised: no other task has these channels of any row.
            let to = unsafe { self.out.range(first + own.start..first + own.end) };
            to.copy_from_slice(&out[..own.len()]);
        }
    }
}
