//! Recurrent layers (Mamba, Mamba-2, gated DeltaNet): causal convolution, selective scan and delta
//! rule over recurrent states.
//!
//! A task takes a range of channels through all groups of tokens, so tasks do not depend on each
//! other. Invariant: a channel's results depend neither on how channels are divided into tasks nor
//! on where groups are cut. The running state is kept in the state row where the group stores its
//! last state, or, where states are stored in two bytes a value, in a scratch of one tile. Knows
//! nothing of sequences.

mod causal_conv;
mod channel_tile;
mod delta;
mod mamba;
mod mamba2;
mod scan;
mod state_value;

use std::ops::Range;

use kv_core::CellIdx;
use kv_core::memory::StateGroup;

use crate::kernels::Kernels;
use crate::kernels::prefetch::CacheLevel;
use crate::values::SharedValues;

pub(crate) use causal_conv::CausalConv;
pub(crate) use delta::Delta;
pub(crate) use scan::{Scan, ScanVariant};
pub(crate) use state_value::{MAX_HALF_ROW, StateValue};

/// Distance of prefetches in arrays that are read from beginning to end, in values: some hundred
/// nanoseconds of a tile's work.
const PREFETCH_VALUES: usize = 1024;

/// Prefetches as many values as a piece that begins here has, [`PREFETCH_VALUES`] or the whole
/// piece further on.
fn prefetch_after<T>(piece: *const T, len: usize) {
    let from = piece.wrapping_add(PREFETCH_VALUES.max(len));
    CacheLevel::for_streams().prefetch(from.cast(), len * size_of::<T>());
}

/// A step of a recurrent layer that computes each channel by itself.
pub(crate) trait ChannelOp: Sync {
    /// Computes `channels` of all groups; the first is a multiple of 16.
    ///
    /// # Safety
    /// The groups are sound for the rows and states, and no other task has these channels.
    unsafe fn run(&self, groups: &[StateGroup], channels: Range<usize>);
}

/// The states of one layer, `[states, row_len]`.
#[derive(Clone, Copy)]
pub(crate) struct States<'a, T> {
    pub(crate) kernels: &'a Kernels,
    pub(crate) values: SharedValues<'a, T>,
    pub(crate) row_len: usize,
}

impl<T: StateValue> States<'_, T> {
    /// Prefetches what follows a piece of a state: most likely the next one that is computed.
    fn prefetch_after(self, state: CellIdx, piece: &Range<usize>) {
        let at = state.as_usize() * self.row_len + piece.start;
        prefetch_after(self.values.start().wrapping_add(at), piece.len());
    }

    /// Computes all groups by `advance(state, rows)`, which updates `state`, the values `piece` of
    /// a group's state, with the tokens `rows`: those up to the next one after which the group
    /// stores its state. It leaves values that `T` can store. `scratch` has room for a piece where
    /// those are not `f32`.
    ///
    /// # Safety
    /// The groups are sound for these states, and within `piece` no other task reads or writes.
    unsafe fn advance_groups(
        self,
        groups: &[StateGroup],
        piece: &Range<usize>,
        scratch: &mut [f32],
        mut advance: impl FnMut(&mut [f32], &[u32]),
    ) {
        let at = |state: usize| {
            let first = state * self.row_len;
            first + piece.start..first + piece.end
        };
        for group in groups {
            let Some(last) = group.stores.last() else {
                continue;
            };
            self.prefetch_after(last.to, piece);
            if let Some(source) = group.source {
                self.prefetch_after(source, piece);
            }
            // SAFETY: as the caller promises: within this piece this task alone reads and writes,
            // and the last stored state is not the source.
            let stored = unsafe { self.values.range(at(last.to.as_usize())) };
            let state = T::running(stored, scratch);
            match group.source {
                Some(source) => {
                    // SAFETY: another state than `last.to`, and this task alone has the piece.
                    let source = unsafe { self.values.range(at(source.as_usize())) };
                    T::load(self.kernels, source, state);
                }
                None => state.fill(0.0),
            }
            let mut done = 0;
            for store in &group.stores {
                let end = store.n_rows as usize;
                advance(state, &group.rows[done..end]);
                done = end;
                if store.to != last.to {
                    // SAFETY: another state than `last.to`; sound groups store no state twice.
                    let to = unsafe { self.values.range(at(store.to.as_usize())) };
                    T::store(self.kernels, state, to);
                }
            }
            T::finish(self.kernels, scratch, stored);
        }
    }
}
