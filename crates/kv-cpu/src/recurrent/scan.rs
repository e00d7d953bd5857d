//! [`Scan`]: states that rows decay and add to, some neighbouring channels at a time.
//!
//! What decays by how much is the [`Rule`]'s; channels are taken through all groups, and rows through
//! a state in pieces that the rule asks for. Knows nothing of sequences.

use std::ops::Range;

use kv_core::graph::StateGroup;

use super::tile::{ROWS, TileRows};
use super::{Channels, States};
use crate::kernels::{Decay, Kernels, LANES, ScanTile};
use crate::values::SharedValues;

/// The scan of one layer.
pub(crate) struct Scan<'a, R> {
    pub(crate) kernels: &'a Kernels,
    pub(crate) rule: &'a R,
    pub(crate) channels: usize,
    /// x `[rows, channels]`, dt, B and C.
    pub(crate) inputs: [&'a [f32]; 4],
    /// Rows are `[channels, d_state]`.
    pub(crate) states: States<'a>,
    /// `[rows, channels]`.
    pub(crate) out: SharedValues<'a>,
}

/// One kind of scan.
pub(crate) trait Rule: Sync {
    /// Values of the state of one channel.
    fn d_state(&self) -> usize;

    /// Up to where channels from `first` on may be taken at once, of [`LANES`] at most.
    fn tile_end(&self, first: usize, channels: usize) -> usize;

    /// Takes at most `N` rows into the states of a tile.
    ///
    /// # Safety
    /// As for [`Channels::run`].
    unsafe fn rows<const N: usize>(scan: &Scan<'_, Self>, state: &mut [f32], place: Tile<'_>)
    where
        Self: Sized;
}

/// Some rows of some neighbouring channels.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tile<'a> {
    pub(crate) rows: &'a [u32],
    pub(crate) channels: &'a Range<usize>,
}

/// B and C of a tile: from where on they are its own, and from one row to the next.
#[derive(Clone, Copy, Debug)]
pub(super) struct Narrow {
    pub(super) first: usize,
    pub(super) stride: usize,
}

impl<R: Rule> Channels for Scan<'_, R> {
    unsafe fn run(&self, groups: &[StateGroup], channels: Range<usize>) {
        let n = self.rule.d_state();
        let mut next = channels.start;
        while next < channels.end {
            let end = self.rule.tile_end(next, self.channels).min(channels.end);
            let own = next..end.min(next + LANES);
            next = own.end;
            let channels = &own;
            let advance = |state: &mut [f32], rows: &[u32]| match rows.len() {
                // SAFETY: as promised to this function.
                1 => unsafe { R::rows::<1>(self, state, Tile { rows, channels }) },
                _ => rows.chunks(ROWS).for_each(|rows| {
                    // SAFETY: as promised to this function.
                    unsafe { R::rows::<ROWS>(self, state, Tile { rows, channels }) };
                }),
            };
            // SAFETY: as promised to this function.
            unsafe {
                self.states
                    .walk(groups, &(own.start * n..own.end * n), advance)
            }
        }
    }
}

impl<R: Rule> Scan<'_, R> {
    /// Takes what rows add into a state; `out` begins as what does not pass through it.
    ///
    /// # Safety
    /// As for [`Channels::run`].
    pub(super) unsafe fn advance<const N: usize>(
        &self,
        (state, tile): (&mut [f32], Tile<'_>),
        (decay, added): (Decay<'_>, &TileRows<N>),
        narrow: Narrow,
        mut out: TileRows<N>,
    ) {
        let [_, _, b, c] = self.inputs;
        (self.kernels.scan_tile)(ScanTile {
            state,
            d_state: self.rule.d_state(),
            decay,
            added: added.rows(),
            rows: tile.rows,
            b: &b[narrow.first..],
            c: &c[narrow.first..],
            stride: narrow.stride,
            out: out.rows_mut(),
        });
        for (&row, out) in tile.rows.iter().zip(out.rows()) {
            let first = row as usize * self.channels;
            let place = first + tile.channels.start..first + tile.channels.end;
            // SAFETY: as promised: no other task has these channels of any row.
            let to = unsafe { self.out.range(place) };
            to.copy_from_slice(&out[..tile.channels.len()]);
        }
    }
}
