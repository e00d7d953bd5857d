//! [`Occupancy`]: which cells belong to which sequences, for a live view.
//!
//! Invariant: a value of its own, taken in one pass over the cells; nothing in it refers to the
//! memory. Knows nothing of requests and tokens: the caller knows which request has which
//! sequence.

use std::collections::BTreeMap;

use crate::cells::OwnedRun;
use crate::ids::{CellIdx, PartIdx, SeqId};
use crate::seq_set::SeqSet;

use super::recurrent::Recurrent;
use super::unified::Unified;

/// The cells of each sequence at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Occupancy {
    /// The parts, in their order.
    pub parts: Vec<PartOccupancy>,
    /// The rows of recurrent states; `None` where there are none.
    pub states: Option<StateOccupancy>,
}

/// The cells of one part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartOccupancy {
    /// Its number.
    pub part: PartIdx,
    /// Cells that it has.
    pub n_cells: u32,
    /// The used cells, ascending.
    pub runs: Vec<OwnedRun>,
}

/// The rows of recurrent states.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateOccupancy {
    /// Rows that there are.
    pub n_rows: u32,
    /// The used rows, ascending.
    pub rows: Vec<OwnedRun>,
}

impl Occupancy {
    /// That of several memories together.
    pub(super) fn and(mut self, other: Self) -> Self {
        self.parts.extend(other.parts);
        self.states = self.states.or(other.states);
        self
    }
}

impl PartOccupancy {
    /// Cells in use.
    pub fn n_used(&self) -> u32 {
        self.runs.iter().map(|run| run.n_cells).sum()
    }

    /// Cells that belong to two or more sequences.
    pub fn n_shared(&self) -> u32 {
        let shared = self.runs.iter().filter(|run| run.seqs.len() > 1);
        shared.map(|run| run.n_cells).sum()
    }
}

pub(super) fn of_part(part: &Unified) -> Occupancy {
    let runs = part.streams.iter().flat_map(|s| s.cells.owned_runs());
    let part = PartOccupancy {
        part: part.config().part,
        n_cells: part.n_cells(),
        runs: runs.collect(),
    };
    Occupancy {
        parts: vec![part],
        states: None,
    }
}

pub(super) fn of_states(states: &Recurrent) -> Occupancy {
    let n_seqs = states.config().n_seqs();
    let mut rows: BTreeMap<CellIdx, OwnedRun> = BTreeMap::new();
    for seq in (0..n_seqs).map(SeqId) {
        for kept in states.states(seq) {
            let row = rows.entry(kept.row).or_insert_with(|| OwnedRun {
                first: kept.row,
                n_cells: 1,
                pos: kept.pos,
                seqs: SeqSet::EMPTY,
            });
            row.seqs.insert(seq);
        }
    }
    let states = StateOccupancy {
        n_rows: states.config().n_rows(),
        rows: rows.into_values().collect(),
    };
    Occupancy {
        parts: Vec::new(),
        states: Some(states),
    }
}
