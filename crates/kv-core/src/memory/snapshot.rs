//! [`Snapshot`]: what a memory holds of sequences, as data that can be saved and restored.
//!
//! Which tokens are in which rows, what windows have recycled, and which recurrent states are kept;
//! no rows, and not how large the memory is. Invariant, checked by [`Snapshot::new`]: some memory
//! could hold it. Every sequence ends at the same position in every part and in its state, and its
//! next token misses nothing that its window reaches.

use std::collections::BTreeSet;

use super::recurrent::KeptState;
use super::stream::SeqEnd;
use super::{Refusal, WindowForgotten};
use crate::batch::MAX_POS;
use crate::cells::Cell;
use crate::ids::{CellIdx, MAX_SEQS, PartIdx, Pos, SeqId};
use crate::seq_set::SeqSet;
use crate::window::{PosRange, Window};

/// The saved tokens of sequences in all parts of a memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    parts: Vec<PartSnapshot>,
    states: Option<Vec<StateHistory>>,
    /// Sequences that were saved without tokens.
    empty: SeqSet,
}

/// The saved tokens of sequences in one part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartSnapshot {
    /// The part.
    pub part: PartIdx,
    /// Its window.
    pub window: Window,
    /// The cells in use.
    pub cells: Vec<CellRecord>,
    /// The positions that sequences had and that were recycled.
    pub forgotten: Vec<(SeqId, Vec<PosRange>)>,
}

/// A cell in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CellRecord {
    /// The row with its keys and values.
    pub row: CellIdx,
    /// Its position and its sequences.
    pub cell: Cell,
}

/// The recurrent states of one sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateHistory {
    /// The sequence.
    pub seq: SeqId,
    /// Position of its first token.
    pub first: Pos,
    /// The states that it can be at, oldest first; the last is its current one.
    pub states: Vec<KeptState>,
}

/// A snapshot that no memory could hold.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// A part, a row of one, or a sequence's list occurs twice.
    #[error("{what} {number} is there twice")]
    Twice {
        /// The kind of thing.
        what: &'static str,
        /// The number.
        number: u32,
    },
    /// A sequence id that no memory can have.
    #[error("sequence {seq} is beyond {}", MAX_SEQS - 1)]
    Seq {
        /// The id.
        seq: SeqId,
    },
    /// A token of no sequence.
    #[error("part {part}: the token in row {row} belongs to no sequence")]
    NoSequence {
        /// The part.
        part: PartIdx,
        /// Its row.
        row: CellIdx,
    },
    /// A position that no token can have.
    #[error("position {pos} is beyond {MAX_POS}")]
    Position {
        /// The position.
        pos: Pos,
    },
    /// Ranges of positions that are empty, do not ascend, or touch.
    #[error("sequence {seq}: the ranges of positions that it forgot are not in order")]
    Ranges {
        /// The sequence.
        seq: SeqId,
    },
    /// States that do not follow one another.
    #[error("sequence {seq}: its states do not follow one another")]
    Chain {
        /// The sequence.
        seq: SeqId,
    },
    /// A sequence that ends at different positions.
    #[error(
        "sequence {seq} ends at {} in one place and at {} in another",
        or_nowhere(.ends.0),
        or_nowhere(.ends.1)
    )]
    Ends {
        /// The sequence.
        seq: SeqId,
        /// Its end.
        ends: (Option<Pos>, Option<Pos>),
    },
    /// A sequence whose tokens attend over a source that is not there.
    #[error("sequence {seq} has tokens, but no source")]
    NoSource {
        /// The sequence.
        seq: SeqId,
    },
    /// A sequence that could not go on.
    #[error("{0}")]
    WindowForgotten(WindowForgotten),
}

fn or_nowhere(end: Option<Pos>) -> String {
    end.map_or("no position".to_owned(), |pos| pos.to_string())
}

/// The target of a snapshot that is restored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestoreInto {
    /// All sequences become what they were, and what else the memory holds goes.
    All,
    /// One becomes another, or itself; the others stay as they are.
    One {
        /// The sequence that was saved.
        from: SeqId,
        /// The sequence that it becomes. What this had goes.
        to: SeqId,
    },
    /// A range of one, saved by [`Snapshot::within`], is put behind what another has. Only in
    /// memories with full attention alone.
    Behind {
        /// The sequence that was saved.
        from: SeqId,
        /// The sequence that gets its tokens: the first of them has its next position.
        to: SeqId,
    },
}

impl RestoreInto {
    /// The sequences that a set of saved sequences becomes.
    pub fn map(self, saved: &SeqSet) -> SeqSet {
        match self {
            Self::All => saved.clone(),
            Self::One { from, to } | Self::Behind { from, to } if saved.contains(from) => {
                SeqSet::one(to)
            }
            Self::One { .. } | Self::Behind { .. } => SeqSet::EMPTY,
        }
    }

    /// The sequence that a saved one becomes; `None` where it is left out.
    pub fn seq(self, saved: SeqId) -> Option<SeqId> {
        match self {
            Self::All => Some(saved),
            Self::One { from, to } | Self::Behind { from, to } => (saved == from).then_some(to),
        }
    }

    /// The sequences of a memory with `n_seqs` that lose what they have.
    pub(super) fn replaced(self, snapshot: &Snapshot, n_seqs: u32) -> Result<SeqSet, Refusal> {
        let saved = snapshot.seqs();
        match self {
            Self::All => match saved.iter().find(|seq| seq.0 >= n_seqs) {
                Some(seq) => Err(Refusal::NoSuchSequence { seq, n_seqs }),
                None => Ok(SeqSet::first_n(n_seqs)),
            },
            Self::One { from: seq, .. } | Self::Behind { from: seq, .. }
                if !saved.contains(seq) && !snapshot.empty.contains(seq) =>
            {
                Err(Refusal::NotSaved { seq, saved })
            }
            Self::One { to: seq, .. } | Self::Behind { to: seq, .. } if seq.0 >= n_seqs => {
                Err(Refusal::NoSuchSequence { seq, n_seqs })
            }
            Self::One { to, .. } => Ok(SeqSet::one(to)),
            Self::Behind { .. } => Ok(SeqSet::EMPTY),
        }
    }
}

impl Snapshot {
    /// A snapshot of these parts and, where a memory has recurrent layers, states.
    ///
    /// # Errors
    /// [`SnapshotError`] where no memory could hold it.
    pub fn new(
        parts: Vec<PartSnapshot>,
        states: Option<Vec<StateHistory>>,
    ) -> Result<Self, SnapshotError> {
        let mut numbers = BTreeSet::new();
        for part in &parts {
            once("part", part.part.0, &mut numbers)?;
            part.check()?;
        }
        let mut seqs = BTreeSet::new();
        for chain in states.iter().flatten() {
            once("sequence", chain.seq.0, &mut seqs)?;
            chain.check()?;
        }
        let snapshot = Self {
            parts,
            states,
            empty: SeqSet::EMPTY,
        };
        snapshot.check_ends()?;
        Ok(snapshot)
    }

    /// A snapshot of one part of a memory.
    pub(super) fn of_part(part: PartSnapshot) -> Self {
        Self {
            parts: vec![part],
            states: None,
            empty: SeqSet::EMPTY,
        }
    }

    /// A snapshot of the recurrent layers of a memory.
    pub(super) fn of_states(chains: Vec<StateHistory>) -> Self {
        Self {
            parts: Vec::new(),
            states: Some(chains),
            empty: SeqSet::EMPTY,
        }
    }

    /// The same of these sequences: those of them that have no tokens are restored as such.
    #[must_use]
    pub fn of_seqs(mut self, seqs: &SeqSet) -> Self {
        let with_tokens = self.seqs();
        let empty = seqs.iter().filter(|seq| !with_tokens.contains(*seq));
        self.empty = empty.collect();
        self
    }

    /// What it has in a range of positions, to be restored [behind](RestoreInto::Behind) what
    /// comes before.
    ///
    /// # Errors
    /// [`Refusal::Unsupported`], where windows or recurrent states forget: what they keep is that
    /// of the last token.
    pub fn within(mut self, range: PosRange) -> Result<Self, Refusal> {
        let is_full = |part: &PartSnapshot| part.window == Window::Full;
        if self.states.is_some() || !self.parts.iter().all(is_full) {
            let operation = "save a range of a sequence: only full attention can";
            return Err(Refusal::Unsupported { operation });
        }
        let all = self.seqs().union(&self.empty);
        for part in &mut self.parts {
            part.cells.retain(|record| range.contains(record.cell.pos));
        }
        Ok(self.of_seqs(&all))
    }

    /// The snapshot of two parts of one memory.
    pub(super) fn and(mut self, other: Self) -> Self {
        self.parts.extend(other.parts);
        self.states = self.states.or(other.states);
        self
    }

    /// The parts.
    pub fn parts(&self) -> &[PartSnapshot] {
        &self.parts
    }

    /// A part, or `None` where there is none of this number.
    pub fn part(&self, part: PartIdx) -> Option<&PartSnapshot> {
        self.parts.iter().find(|p| p.part == part)
    }

    /// The recurrent states by sequence, or `None` without recurrent layers.
    pub fn states(&self) -> Option<&[StateHistory]> {
        self.states.as_deref()
    }

    /// The sequences that were saved without tokens.
    pub fn empty_seqs(&self) -> &SeqSet {
        &self.empty
    }

    /// The sequences that have tokens.
    pub fn seqs(&self) -> SeqSet {
        let tokens = self.parts.iter().flat_map(|part| &part.cells);
        let chains = self.states.iter().flatten();
        let in_parts = tokens.fold(SeqSet::EMPTY, |all, t| all.union(&t.cell.seqs));
        in_parts.union(&chains.map(|chain| chain.seq).collect())
    }

    /// The parts of the sequences' own tokens.
    fn own_parts(&self) -> impl Iterator<Item = &PartSnapshot> {
        self.parts.iter().filter(|part| !part.is_source())
    }

    /// The positions of a sequence that all parts remember, as
    /// [`Memory::positions`](super::Memory::positions) would give them; `None` where it has no
    /// tokens.
    pub fn positions(&self, seq: SeqId) -> Option<PosRange> {
        let in_parts = self.own_parts().map(|part| part.positions(seq));
        let chains = self.states.iter().map(|chains| {
            let chain = chains.iter().find(|c| c.seq == seq)?;
            Some(PosRange::new(chain.first, chain.last()?))
        });
        let both = |a: Option<PosRange>, b: Option<PosRange>| Some(a?.intersection(b?));
        in_parts.chain(chains).reduce(both).flatten()
    }

    /// Number of tokens of a sequence, in the part that holds most of them; `None` where only
    /// states remember it.
    pub fn n_tokens(&self, seq: SeqId) -> Option<u32> {
        let own = |part: &PartSnapshot| {
            let tokens = part.cells.iter();
            tokens.filter(|t| t.cell.seqs.contains(seq)).count() as u32
        };
        self.own_parts().map(own).max()
    }

    /// The rows of the states, each once, in the order in which they are first named.
    pub fn state_rows(&self) -> Vec<CellIdx> {
        let mut seen = BTreeSet::new();
        let chains = self.states.iter().flatten();
        let rows = chains.flat_map(|chain| chain.states.iter().map(|state| state.row));
        rows.filter(|row| seen.insert(*row)).collect()
    }

    /// Every sequence must end at the same position in all that remembers it.
    fn check_ends(&self) -> Result<(), SnapshotError> {
        let mut pieces = self.own_parts().map(PartSnapshot::ends);
        let of_states = self.states.iter().map(|chains| {
            let mut ends = vec![None; MAX_SEQS];
            for chain in chains {
                if let Some(end) = ends.get_mut(chain.seq.as_usize()) {
                    *end = chain.last();
                }
            }
            ends
        });
        let Some(first) = pieces.next() else {
            return Ok(());
        };
        if let Some(sources) = self.parts.iter().find(|part| part.is_source()) {
            let mut own = (0u32..).map(SeqId).zip(first.iter().zip(sources.ends()));
            if let Some((seq, _)) = own.find(|(_, (end, source))| end.is_some() && source.is_none())
            {
                return Err(SnapshotError::NoSource { seq });
            }
        }
        for other in pieces.chain(of_states) {
            for ((seq, &a), b) in (0u32..).map(SeqId).zip(&first).zip(other) {
                if a != b {
                    let ends = (a, b);
                    return Err(SnapshotError::Ends { seq, ends });
                }
            }
        }
        Ok(())
    }
}

impl PartSnapshot {
    /// True if its tokens are those of sources.
    pub fn is_source(&self) -> bool {
        self.window == Window::Source
    }

    pub(super) fn positions(&self, seq: SeqId) -> Option<PosRange> {
        let own = self.cells.iter().filter(|t| t.cell.seqs.contains(seq));
        let own = own.map(|t| PosRange::new(t.cell.pos, t.cell.pos));
        own.reduce(PosRange::hull)
    }

    /// By sequence: its last position in this part.
    pub(super) fn ends(&self) -> Vec<Option<Pos>> {
        let mut ends: Vec<Option<Pos>> = vec![None; MAX_SEQS];
        for token in &self.cells {
            for seq in &token.cell.seqs {
                if let Some(end) = ends.get_mut(seq.as_usize()) {
                    *end = (*end).max(Some(token.cell.pos));
                }
            }
        }
        ends
    }

    fn check(&self) -> Result<(), SnapshotError> {
        let mut rows = BTreeSet::new();
        for CellRecord { row, cell } in &self.cells {
            once("row", row.0, &mut rows)?;
            check_pos(cell.pos)?;
            if cell.seqs.is_empty() {
                let part = self.part;
                return Err(SnapshotError::NoSequence { part, row: *row });
            }
        }
        let ends = self.ends();
        let mut seqs = BTreeSet::new();
        for (seq, ranges) in &self.forgotten {
            once("sequence", seq.0, &mut seqs)?;
            let Some(&last) = ends.get(seq.as_usize()) else {
                return Err(SnapshotError::Seq { seq: *seq });
            };
            let follows = |pair: &[PosRange]| pair[0].last.next() < pair[1].first;
            if ranges.iter().any(|range| range.is_empty()) || !ranges.windows(2).all(follows) {
                return Err(SnapshotError::Ranges { seq: *seq });
            }
            let forgotten = ranges.iter().copied().fold(PosRange::EMPTY, PosRange::hull);
            check_pos(forgotten.last)?;
            let end = SeqEnd { last, forgotten };
            end.check(*seq, self.window)
                .map_err(SnapshotError::WindowForgotten)?;
        }
        Ok(())
    }
}

impl StateHistory {
    fn last(&self) -> Option<Pos> {
        self.states.last().map(|state| state.pos)
    }

    fn check(&self) -> Result<(), SnapshotError> {
        let seq = self.seq;
        if seq.as_usize() >= MAX_SEQS {
            return Err(SnapshotError::Seq { seq });
        }
        let mut rows = BTreeSet::new();
        let (mut before, mut pos) = (None, self.first);
        for state in &self.states {
            once("state row", state.row.0, &mut rows)?;
            check_pos(state.pos)?;
            let follows = before.is_none_or(|n: u32| n.checked_add(1) == Some(state.n_tokens));
            if !follows || state.n_tokens == 0 || state.pos < pos {
                return Err(SnapshotError::Chain { seq });
            }
            (before, pos) = (Some(state.n_tokens), state.pos);
        }
        match before {
            Some(_) => Ok(()),
            None => Err(SnapshotError::Chain { seq }),
        }
    }
}

fn once(what: &'static str, number: u32, seen: &mut BTreeSet<u32>) -> Result<(), SnapshotError> {
    if seen.insert(number) {
        Ok(())
    } else {
        Err(SnapshotError::Twice { what, number })
    }
}

fn check_pos(pos: Pos) -> Result<(), SnapshotError> {
    if pos <= MAX_POS {
        Ok(())
    } else {
        Err(SnapshotError::Position { pos })
    }
}
