//! The selective scan of Mamba: one decay for each value of a channel's state.
//!
//! Knows nothing of sequences.

use std::ops::Range;

use kv_core::graph::StateGroup;

use super::States;
use super::tile::{ROWS, TileRows};
use crate::kernels::{Decay, Kernels, LANES, ScanTile};
use crate::plan::ScanWeights;
use crate::values::SharedValues;

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
    /// Computes these channels; the first is that of a tile.
    ///
    /// # Safety
    /// The groups are sound for the rows and states, and no other task has these channels.
    pub(crate) unsafe fn run(&self, groups: &[StateGroup], channels: Range<usize>) {
        let n = self.weights.d_state;
        for tile in channels.clone().step_by(LANES) {
            let own = tile..channels.end.min(tile + LANES);
            let advance = |state: &mut [f32], rows: &[u32]| match rows.len() {
                // SAFETY: as promised to this function.
                1 => unsafe { self.rows::<1>(state, rows, &own) },
                _ => rows.chunks(ROWS).for_each(|rows| {
                    // SAFETY: as promised to this function.
                    unsafe { self.rows::<ROWS>(state, rows, &own) };
                }),
            };
            // SAFETY: as promised to this function.
            unsafe {
                self.states
                    .walk(groups, &(own.start * n..own.end * n), advance)
            }
        }
    }

    /// Takes at most `N` rows into the states of a tile.
    ///
    /// # Safety
    /// As for [`Self::run`].
    unsafe fn rows<const N: usize>(&self, state: &mut [f32], rows: &[u32], own: &Range<usize>) {
        let n = self.weights.d_state;
        let [x, dt, b, c] = self.inputs;
        let x = TileRows::<N>::gather(x, self.channels, (rows, own));
        let mut steps = TileRows::<N>::gather(dt, self.channels, (rows, own));
        (self.kernels.softplus)(steps.rows_mut().as_flattened_mut());
        let (mut added, mut out) = (
            TileRows::<N>::zeros(rows.len()),
            TileRows::<N>::zeros(rows.len()),
        );
        let d = &self.weights.d[own.clone()];
        let all = added.rows_mut().iter_mut().zip(out.rows_mut());
        for ((added, out), (x, step)) in all.zip(x.rows().iter().zip(steps.rows())) {
            for ((added, x), step) in added.iter_mut().zip(x).zip(step) {
                *added = x * step;
            }
            for ((out, x), d) in out.iter_mut().zip(x).zip(d) {
                *out = x * d;
            }
        }
        let first = own.start / LANES * n;
        (self.kernels.scan_tile)(ScanTile {
            state,
            d_state: n,
            decay: Decay::PerValue {
                steps: steps.rows(),
                rates: &self.weights.rates[first..first + n],
            },
            added: added.rows(),
            rows,
            b,
            c,
            stride: n,
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
