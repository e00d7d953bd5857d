//! What recurrent layers compute: some channels through all groups of rows.
//!
//! A task takes a range of channels through all groups, so it depends on no other task, and what it
//! computes does not depend on how channels are divided, nor on where groups are cut. The state under
//! way lives where the group stores its last one. Knows nothing of sequences.

mod by_heads;
mod by_values;
mod conv;
mod scan;
mod tile;

use std::ops::Range;

use kv_core::CellIdx;
use kv_core::graph::StateGroup;

use crate::kernels::fetch::Level;
use crate::values::SharedValues;

pub(crate) use conv::Convolution;
pub(crate) use scan::{Rule, Scan};

/// Values between asking for something that is read from beginning to end and reading it: some hundred nanoseconds of a tile's
/// work.
const AHEAD: usize = 1024;

/// Asks for as many values as a piece that begins here has, [`AHEAD`] or the whole piece further on.
fn fetch_ahead(piece: *const f32, len: usize) {
    let from = piece.wrapping_add(AHEAD.max(len));
    Level::of_streams().fetch(from.cast(), len * size_of::<f32>());
}

/// What a recurrent layer does to its channels, each by itself.
pub(crate) trait Channels: Sync {
    /// Computes these channels; the first is a multiple of 16.
    ///
    /// # Safety
    /// The groups are sound for the rows and states, and no other task has these channels.
    unsafe fn run(&self, groups: &[StateGroup], channels: Range<usize>);
}

/// The states of one layer, `[states, row_len]`.
#[derive(Clone, Copy)]
pub(crate) struct States<'a> {
    pub(crate) values: SharedValues<'a>,
    pub(crate) row_len: usize,
}

impl States<'_> {
    /// Asks for what comes some way after a piece of a row, which is most likely taken soon.
    fn fetch_ahead(self, row: CellIdx, piece: &Range<usize>) {
        let at = row.as_usize() * self.row_len + piece.start;
        fetch_ahead(self.values.start().wrapping_add(at), piece.len());
    }

    /// Takes all groups through `advance(state, rows)`, where `state` are the values `piece` of a
    /// group's state, and `rows` the next rows, up to one after which the state is stored.
    ///
    /// # Safety
    /// The groups are sound for these states, and within `piece` no other task reads or writes.
    unsafe fn walk(
        self,
        groups: &[StateGroup],
        piece: &Range<usize>,
        mut advance: impl FnMut(&mut [f32], &[u32]),
    ) {
        let at = |row: usize| {
            let first = row * self.row_len;
            first + piece.start..first + piece.end
        };
        for group in groups {
            let Some(last) = group.stores.last() else {
                continue;
            };
            self.fetch_ahead(last.to, piece);
            if let Some(row) = group.source {
                self.fetch_ahead(row, piece);
            }
            // SAFETY: as promised: within this piece this task alone reads and writes, and the row
            // of the last state is another than the source.
            let state = unsafe { self.values.range(at(last.to.as_usize())) };
            match group.source {
                Some(row) => {
                    // SAFETY: as above.
                    let source = unsafe { self.values.range(at(row.as_usize())) };
                    state.copy_from_slice(source);
                }
                None => state.fill(0.0),
            }
            let mut done = 0;
            for store in &group.stores {
                let end = store.n_rows as usize;
                advance(state, &group.rows[done..end]);
                done = end;
                if store.to != last.to {
                    // SAFETY: as above; sound groups store no row twice.
                    let to = unsafe { self.values.range(at(store.to.as_usize())) };
                    to.copy_from_slice(state);
                }
            }
        }
    }
}
