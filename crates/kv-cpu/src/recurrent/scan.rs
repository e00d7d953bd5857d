//! [`Scan`]: the selective scan of one layer, up to 16 neighbouring channels at a time.
//!
//! How states decay is the [`ScanVariant`]'s: Mamba or Mamba-2. Channels are taken through all
//! groups, tokens through a state in tiles. Knows nothing of sequences.

use std::ops::Range;

use kv_core::memory::StateGroup;

use super::channel_tile::{ChannelTile, MAX_TILE_TOKENS};
use super::{ChannelOp, StateValue, States};
use crate::kernels::{Decay, Kernels, SCAN_WIDTH, ScanTile};
use crate::values::SharedValues;

/// The scan of one layer.
pub(crate) struct Scan<'a, V, T> {
    pub(crate) kernels: &'a Kernels,
    pub(crate) variant: &'a V,
    pub(crate) channels: usize,
    /// x `[tokens, channels]`, dt, B and C.
    pub(crate) inputs: [&'a [f32]; 4],
    /// Rows are `[channels, d_state]`.
    pub(crate) states: States<'a, T>,
    /// `[tokens, channels]`.
    pub(crate) out: SharedValues<'a>,
}

/// One kind of scan, implemented by its weights.
pub(crate) trait ScanVariant: Sync {
    /// State values of one channel.
    fn d_state(&self) -> usize;

    /// The end of the channels from `first` on that may share a tile, which has [`SCAN_WIDTH`] at
    /// most.
    fn tile_end(&self, first: usize, channels: usize) -> usize;

    /// Updates the states of a tile of channels with at most `N` tokens.
    ///
    /// # Safety
    /// As for [`ChannelOp::run`].
    unsafe fn scan_tile<const N: usize, T: StateValue>(
        scan: &Scan<'_, Self, T>,
        state: &mut [f32],
        tile: TileIndices<'_>,
    ) where
        Self: Sized;
}

/// The tokens and the neighbouring channels of a tile.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TileIndices<'a> {
    /// Rows of the tokens.
    pub(crate) rows: &'a [u32],
    pub(crate) channels: &'a Range<usize>,
}

/// The values that [`Scan::advance`] adds to the states of a tile, and the place of its B and C.
pub(super) struct TileInputs<'a, const N: usize> {
    pub(super) decay: Decay<'a>,
    /// `dt · x`.
    pub(super) added: &'a ChannelTile<N>,
    /// Offset of the tile's first value in B and C.
    pub(super) bc_first: usize,
    /// Values of B or C from one token to the next.
    pub(super) bc_stride: usize,
    /// The part of the output that does not pass through the state: `D · x`.
    pub(super) skip: ChannelTile<N>,
}

impl<V: ScanVariant, T: StateValue> ChannelOp for Scan<'_, V, T> {
    unsafe fn run(&self, groups: &[StateGroup], channels: Range<usize>) {
        T::with_scratch(self.variant.d_state(), |scratch| {
            // SAFETY: as the caller promises.
            unsafe { self.run_with(groups, channels, scratch) };
        });
    }
}

impl<V: ScanVariant, T: StateValue> Scan<'_, V, T> {
    /// [`ChannelOp::run`], with room for a tile's states.
    ///
    /// # Safety
    /// As for [`ChannelOp::run`].
    unsafe fn run_with(&self, groups: &[StateGroup], channels: Range<usize>, scratch: &mut [f32]) {
        let n = self.variant.d_state();
        let mut next = channels.start;
        while next < channels.end {
            let end = self.variant.tile_end(next, self.channels).min(channels.end);
            let own = next..end.min(next + SCAN_WIDTH);
            next = own.end;
            let channels = &own;
            let advance = |state: &mut [f32], rows: &[u32]| match rows.len() {
                // SAFETY: as the caller of `run` promises.
                1 => unsafe { V::scan_tile::<1, T>(self, state, TileIndices { rows, channels }) },
                _ => rows.chunks(MAX_TILE_TOKENS).for_each(|rows| {
                    let tile = TileIndices { rows, channels };
                    // SAFETY: as the caller of `run` promises.
                    unsafe { V::scan_tile::<MAX_TILE_TOKENS, T>(self, state, tile) };
                }),
            };
            // SAFETY: as the caller of `run` promises.
            unsafe {
                self.states
                    .advance_groups(groups, &(own.start * n..own.end * n), scratch, advance)
            }
        }
    }

    /// Updates the states of a tile and writes its outputs.
    ///
    /// # Safety
    /// As for [`ChannelOp::run`].
    pub(super) unsafe fn advance<const N: usize>(
        &self,
        state: &mut [f32],
        tile: TileIndices<'_>,
        inputs: TileInputs<'_, N>,
    ) {
        let [_, _, b, c] = self.inputs;
        let mut out = inputs.skip;
        (self.kernels.scan_tile)(ScanTile {
            state,
            d_state: self.variant.d_state(),
            rounding: T::TYPE,
            decay: inputs.decay,
            added: inputs.added.tokens(),
            rows: tile.rows,
            b: &b[inputs.bc_first..],
            c: &c[inputs.bc_first..],
            stride: inputs.bc_stride,
            out: out.tokens_mut(),
        });
        for (&row, out) in tile.rows.iter().zip(out.tokens()) {
            let first = row as usize * self.channels;
            let range = first + tile.channels.start..first + tile.channels.end;
            // SAFETY: as the caller promises, no other task has these channels of any row.
            let to = unsafe { self.out.range(range) };
            to.copy_from_slice(&out[..tile.channels.len()]);
        }
    }
}
