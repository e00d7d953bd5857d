//! [`CausalConv`]: the causal depthwise convolution of a recurrent layer, some channels at a time.
//!
//! Inputs before a group are read from the state that the group continues. Knows nothing of
//! sequences.

use std::ops::Range;

use kv_core::ids::CellIdx;
use kv_core::memory::StateGroup;

use super::ChannelOp;
use crate::kernels::Kernels;
use crate::kernels::prefetch::CacheLevel;
use crate::plan::ConvKernel;
use crate::values::SharedValues;

/// Distance of prefetches, in channels.
const PREFETCH_CHANNELS: usize = 256;

/// The convolution of one layer.
pub(crate) struct CausalConv<'a> {
    pub(crate) kernels: &'a Kernels,
    pub(crate) kernel: &'a ConvKernel,
    pub(crate) channels: usize,
    /// `[tokens, channels]`.
    pub(crate) x: &'a [f32],
    /// `[states, width - 1, channels]`.
    pub(crate) states: SharedValues<'a>,
    /// `[tokens, channels]`.
    pub(crate) out: SharedValues<'a>,
}

impl ChannelOp for CausalConv<'_> {
    unsafe fn run(&self, groups: &[StateGroup], channels: Range<usize>) {
        self.prefetch(groups, &channels);
        let later = channels.start + PREFETCH_CHANNELS..channels.end + PREFETCH_CHANNELS;
        self.prefetch(groups, &later);
        for group in groups {
            for token in 0..group.rows.len() {
                // SAFETY: as the caller promises.
                unsafe { self.convolve_token(group, token, channels.clone()) };
            }
            for store in &group.stores {
                for k in 0..self.kernel.width - 1 {
                    let to = self.state_range(store.to, k, &channels);
                    // SAFETY: within these channels this task alone reads and writes.
                    let to = unsafe { self.states.range(to) };
                    match self.earlier_input(group, store.n_rows as usize, k, channels.clone()) {
                        Some(from) => to.copy_from_slice(from),
                        None => to.fill(0.0),
                    }
                }
            }
        }
    }
}

impl CausalConv<'_> {
    /// Prefetches taps, bias and states of some channels: short pieces from many places, which the
    /// hardware prefetcher does not follow. The channels need not exist.
    fn prefetch(&self, groups: &[StateGroup], channels: &Range<usize>) {
        let prefetch = |values: *const f32, row: usize| {
            let start = values.wrapping_add(row * self.channels + channels.start);
            CacheLevel::for_streams().prefetch(start.cast(), channels.len() * size_of::<f32>());
        };
        let ConvKernel {
            width, taps, bias, ..
        } = self.kernel;
        (0..*width).for_each(|k| prefetch(taps.as_ptr(), k));
        if let Some(bias) = bias {
            prefetch(bias.as_ptr(), 0);
        }
        for group in groups {
            let last = group.stores.last().map(|store| store.to);
            for state in last.into_iter().chain(group.source) {
                let first = state.as_usize() * (width - 1);
                (first..first + width - 1).for_each(|row| prefetch(self.states.start(), row));
            }
        }
    }

    /// The output of one of a group's tokens: taps from the oldest input to the newest, then the
    /// bias.
    ///
    /// # Safety
    /// As for [`ChannelOp::run`].
    unsafe fn convolve_token(&self, group: &StateGroup, token: usize, channels: Range<usize>) {
        let width = self.kernel.width;
        let row = group.rows[token] as usize * self.channels;
        let own = row + channels.start..row + channels.end;
        // SAFETY: as the caller promises, no other task has these channels.
        let out = unsafe { self.out.range(own.clone()) };
        out.fill(0.0);
        for k in 0..width {
            let taps = &self.kernel.taps[k * self.channels..][channels.clone()];
            let input = if k + 1 == width {
                Some(&self.x[own.clone()])
            } else {
                self.earlier_input(group, token, k, channels.clone())
            };
            if let Some(input) = input {
                (self.kernels.multiply_add)(out, input, taps);
            }
        }
        if let Some(bias) = &self.kernel.bias {
            (self.kernels.add)(out, &bias[channels]);
        }
    }

    /// The `k`-th of the `width - 1` inputs before a group's `token`; `None` if it is zeros.
    fn earlier_input(
        &self,
        group: &StateGroup,
        token: usize,
        k: usize,
        channels: Range<usize>,
    ) -> Option<&[f32]> {
        let n_earlier = self.kernel.width - 1;
        match (token + k).checked_sub(n_earlier) {
            Some(own) => {
                let row = group.rows[own] as usize * self.channels;
                Some(&self.x[row + channels.start..row + channels.end])
            }
            None => {
                let source = group.source?;
                let range = self.state_range(source, token + k, &channels);
                // SAFETY: sound groups write no state that is read in the same or an earlier
                // group, and within these channels this task alone reads and writes.
                Some(unsafe { self.states.range(range) })
            }
        }
    }

    /// The range of the `k`-th input in a state.
    fn state_range(&self, state: CellIdx, k: usize, channels: &Range<usize>) -> Range<usize> {
        let first = (state.as_usize() * (self.kernel.width - 1) + k) * self.channels;
        first + channels.start..first + channels.end
    }
}
