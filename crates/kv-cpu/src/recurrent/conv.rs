//! The causal convolution of some channels of a recurrent layer, over groups of rows.
//!
//! Inputs before a group are read where its source lies. Knows nothing of sequences.

use std::ops::Range;

use kv_core::graph::StateGroup;
use kv_core::ids::CellIdx;

use super::Channels;
use crate::kernels::Kernels;
use crate::kernels::fetch::Level;
use crate::plan::ConvKernel;
use crate::values::SharedValues;

/// Channels between asking for something and reading it.
const AHEAD: usize = 256;

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

impl Channels for Convolution<'_> {
    unsafe fn run(&self, groups: &[StateGroup], channels: Range<usize>) {
        self.ask(groups, &channels);
        self.ask(groups, &(channels.start + AHEAD..channels.end + AHEAD));
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
}

impl Convolution<'_> {
    /// Asks for all that is read of these channels but the rows: short pieces from many places, too short for the processor
    /// to see what comes next. There need not be such channels.
    fn ask(&self, groups: &[StateGroup], channels: &Range<usize>) {
        let ask = |values: *const f32, row: usize| {
            let start = values.wrapping_add(row * self.channels + channels.start);
            Level::of_streams().fetch(start.cast(), channels.len() * size_of::<f32>());
        };
        let ConvKernel {
            width, taps, bias, ..
        } = self.kernel;
        (0..*width).for_each(|k| ask(taps.as_ptr(), k));
        if let Some(bias) = bias {
            ask(bias.as_ptr(), 0);
        }
        for group in groups {
            let last = group.stores.last().map(|store| store.to);
            for state in last.into_iter().chain(group.source) {
                let first = state.as_usize() * (width - 1);
                (first..first + width - 1).for_each(|row| ask(self.states.start(), row));
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
                (self.kernels.multiply_add)(out, input, taps);
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
