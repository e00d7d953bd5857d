//! [`OwnedRows`]: how many rows belong to exactly which sequences, to weigh what removing some of
//! them would free.
//!
//! Invariant: each row is counted once, and of the cells of the same sequences in a part with a
//! window at most as many as that shows: those that it hides are free for new tokens. Takes time in
//! the number of runs and of sets of sequences, never of cells. Knows no bytes.

use std::collections::BTreeMap;

use super::recurrent::Recurrent;
use super::unified::Unified;
use crate::ids::{CellIdx, PartIdx, SeqId};
use crate::seq_set::SeqSet;

/// The contents of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowsOf {
    /// K and V of tokens, in the layers of a part.
    Part(PartIdx),
    /// Recurrent states.
    States,
}

/// Rows that belong to the same sequences.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnedRows {
    /// The contents of the rows.
    pub rows: RowsOf,
    /// The sequences that all of them belong to, and no others do: at least one.
    pub seqs: SeqSet,
    /// Number of rows, of a part with a window at most as many as that shows.
    pub n_rows: u32,
}

pub(super) fn of_part(part: &Unified, owned: &mut Vec<OwnedRows>) {
    let rows = RowsOf::Part(part.config().part);
    let width = part.config().window.width().unwrap_or(u32::MAX);
    for stream in &part.streams {
        stream.cells.count_by_owners(|seqs, n_cells| {
            owned.push(OwnedRows {
                rows,
                seqs: seqs.clone(),
                n_rows: n_cells.min(width),
            });
        });
    }
}

pub(super) fn of_states(states: &Recurrent, owned: &mut Vec<OwnedRows>) {
    let mut owners: BTreeMap<CellIdx, SeqSet> = BTreeMap::new();
    for seq in (0..states.config().n_seqs()).map(SeqId) {
        for kept in states.states(seq) {
            owners.entry(kept.row).or_default().insert(seq);
        }
    }
    let rows = owners.into_values().map(|seqs| OwnedRows {
        rows: RowsOf::States,
        seqs,
        n_rows: 1,
    });
    owned.extend(rows);
}
