//! [`Contents`]: what a memory holds of sequences, as data that can leave it and come back.
//!
//! Which tokens lie in which rows, what windows have recycled, and which recurrent states are kept;
//! no rows and nothing of how large the memory is. Invariant, checked by [`Contents::new`]: some
//! memory could hold it. Every sequence ends at the same position in every part and in its state, and
//! its next token misses nothing that its window reaches.

use std::collections::BTreeSet;

use super::recurrent::KeptState;
use super::stream::SeqEnd;
use super::{NoSuchSequence, RestoreRefused, WindowForgotten};
use crate::batch::MAX_POS;
use crate::cells::Cell;
use crate::ids::{CellIdx, MAX_SEQS, PartIdx, Pos, SeqId};
use crate::seq_set::SeqSet;
use crate::window::{PosRange, Window};

/// What is held of sequences in all parts of a memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    parts: Vec<PartContents>,
    states: Option<Vec<ChainContents>>,
}

/// What is held of sequences in one part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartContents {
    /// The part.
    pub part: PartIdx,
    /// Its window.
    pub window: Window,
    /// The tokens, each in its row.
    pub tokens: Vec<HeldToken>,
    /// The positions that sequences had and that were recycled.
    pub forgotten: Vec<(SeqId, Vec<PosRange>)>,
}

/// A token that is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldToken {
    /// The row with its keys and values.
    pub row: CellIdx,
    /// Its position and its sequences.
    pub cell: Cell,
}

/// The recurrent states of one sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChainContents {
    /// The sequence.
    pub seq: SeqId,
    /// Position of its first token.
    pub first: Pos,
    /// The states that it can be at, oldest first; the last is its current one.
    pub states: Vec<KeptState>,
}

/// Contents that no memory could hold.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ContentsError {
    /// A part, a row of one, or a sequence's list occurs twice.
    #[error("{what} {number} is there twice")]
    Twice {
        /// What kind of thing.
        what: &'static str,
        /// Which.
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
        /// Where it ends.
        ends: (Option<Pos>, Option<Pos>),
    },
    /// A sequence that could not go on.
    #[error(transparent)]
    WindowForgotten(#[from] WindowForgotten),
}

fn or_nowhere(end: Option<Pos>) -> String {
    end.map_or("no position".to_owned(), |pos| pos.to_string())
}

/// Where contents go that are read back.
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
}

impl RestoreInto {
    /// What a set of saved sequences becomes.
    pub fn map(self, saved: SeqSet) -> SeqSet {
        match self {
            Self::All => saved,
            Self::One { from, to } if saved.contains(from) => SeqSet::one(to),
            Self::One { .. } => SeqSet::EMPTY,
        }
    }

    /// What a saved sequence becomes; `None` where it is left out.
    pub fn seq(self, saved: SeqId) -> Option<SeqId> {
        match self {
            Self::All => Some(saved),
            Self::One { from, to } => (saved == from).then_some(to),
        }
    }

    /// The sequences of a memory with `n_seqs` that lose what they have.
    pub(super) fn replaced(
        self,
        contents: &Contents,
        n_seqs: u32,
    ) -> Result<SeqSet, RestoreRefused> {
        let saved = contents.seqs();
        match self {
            Self::All => match saved.iter().find(|seq| seq.0 >= n_seqs) {
                Some(seq) => Err(NoSuchSequence { seq, n_seqs }.into()),
                None => Ok((0..n_seqs).map(SeqId).collect()),
            },
            Self::One { from: seq, .. } if !saved.contains(seq) => {
                Err(RestoreRefused::NotSaved { seq, saved })
            }
            Self::One { to: seq, .. } if seq.0 >= n_seqs => {
                Err(NoSuchSequence { seq, n_seqs }.into())
            }
            Self::One { to, .. } => Ok(SeqSet::one(to)),
        }
    }
}

impl Contents {
    /// Contents of these parts and, where a memory has recurrent layers, states.
    ///
    /// # Errors
    /// [`ContentsError`] where no memory could hold them.
    pub fn new(
        parts: Vec<PartContents>,
        states: Option<Vec<ChainContents>>,
    ) -> Result<Self, ContentsError> {
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
        let contents = Self { parts, states };
        contents.check_ends()?;
        Ok(contents)
    }

    /// Contents of one part of a memory.
    pub(super) fn of_part(part: PartContents) -> Self {
        Self {
            parts: vec![part],
            states: None,
        }
    }

    /// Contents of the recurrent layers of a memory.
    pub(super) fn of_states(chains: Vec<ChainContents>) -> Self {
        Self {
            parts: Vec::new(),
            states: Some(chains),
        }
    }

    /// Contents of both parts of one memory.
    pub(super) fn in_parts(mut self, other: Self) -> Self {
        self.parts.extend(other.parts);
        self.states = self.states.or(other.states);
        self
    }

    /// The parts.
    pub fn parts(&self) -> &[PartContents] {
        &self.parts
    }

    /// A part, or `None` where there is none of this number.
    pub fn part(&self, part: PartIdx) -> Option<&PartContents> {
        self.parts.iter().find(|p| p.part == part)
    }

    /// The recurrent states by sequence, or `None` without recurrent layers.
    pub fn states(&self) -> Option<&[ChainContents]> {
        self.states.as_deref()
    }

    /// The sequences that have tokens.
    pub fn seqs(&self) -> SeqSet {
        let tokens = self.parts.iter().flat_map(|part| &part.tokens);
        let chains = self.states.iter().flatten();
        let in_parts = tokens.fold(SeqSet::EMPTY, |all, t| all.union(t.cell.seqs));
        in_parts.union(chains.map(|chain| chain.seq).collect())
    }

    /// The positions of a sequence that all parts remember, as
    /// [`Memory::positions`](super::Memory::positions) would give them; `None` where it has no tokens.
    pub fn positions(&self, seq: SeqId) -> Option<PosRange> {
        let in_parts = self.parts.iter().map(|part| part.positions(seq));
        let chains = self.states.iter().map(|chains| {
            let chain = chains.iter().find(|c| c.seq == seq)?;
            Some(PosRange::new(chain.first, chain.last()?))
        });
        let both = |a: Option<PosRange>, b: Option<PosRange>| Some(a?.intersection(b?));
        in_parts.chain(chains).reduce(both).flatten()
    }

    /// Number of tokens of a sequence, in the part that holds most of them; `None` where only states
    /// remember it.
    pub fn n_tokens(&self, seq: SeqId) -> Option<u32> {
        let own = |part: &PartContents| {
            let tokens = part.tokens.iter();
            tokens.filter(|t| t.cell.seqs.contains(seq)).count() as u32
        };
        self.parts.iter().map(own).max()
    }

    /// The rows of the states, each once, in the order in which they are first named.
    pub fn state_rows(&self) -> Vec<CellIdx> {
        let mut seen = BTreeSet::new();
        let chains = self.states.iter().flatten();
        let rows = chains.flat_map(|chain| chain.states.iter().map(|state| state.row));
        rows.filter(|row| seen.insert(*row)).collect()
    }

    /// Every sequence must end at the same position in all that remembers it.
    fn check_ends(&self) -> Result<(), ContentsError> {
        let mut pieces = self.parts.iter().map(PartContents::ends);
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
        for other in pieces.chain(of_states) {
            for ((seq, &a), b) in (0u32..).map(SeqId).zip(&first).zip(other) {
                if a != b {
                    let ends = (a, b);
                    return Err(ContentsError::Ends { seq, ends });
                }
            }
        }
        Ok(())
    }
}

impl PartContents {
    fn positions(&self, seq: SeqId) -> Option<PosRange> {
        let own = self.tokens.iter().filter(|t| t.cell.seqs.contains(seq));
        let own = own.map(|t| PosRange::new(t.cell.pos, t.cell.pos));
        own.reduce(PosRange::hull)
    }

    /// By sequence: its last position in this part.
    pub(super) fn ends(&self) -> Vec<Option<Pos>> {
        let mut ends: Vec<Option<Pos>> = vec![None; MAX_SEQS];
        for token in &self.tokens {
            for seq in token.cell.seqs {
                if let Some(end) = ends.get_mut(seq.as_usize()) {
                    *end = (*end).max(Some(token.cell.pos));
                }
            }
        }
        ends
    }

    fn check(&self) -> Result<(), ContentsError> {
        let mut rows = BTreeSet::new();
        for HeldToken { row, cell } in &self.tokens {
            once("row", row.0, &mut rows)?;
            check_pos(cell.pos)?;
            if cell.seqs.is_empty() {
                let part = self.part;
                return Err(ContentsError::NoSequence { part, row: *row });
            }
        }
        let ends = self.ends();
        let mut seqs = BTreeSet::new();
        for (seq, ranges) in &self.forgotten {
            once("sequence", seq.0, &mut seqs)?;
            let Some(&last) = ends.get(seq.as_usize()) else {
                return Err(ContentsError::Seq { seq: *seq });
            };
            let follows = |pair: &[PosRange]| pair[0].last.next() < pair[1].first;
            if ranges.iter().any(|range| range.is_empty()) || !ranges.windows(2).all(follows) {
                return Err(ContentsError::Ranges { seq: *seq });
            }
            let forgotten = ranges.last().map(|range| range.last);
            check_pos(forgotten.unwrap_or_default())?;
            SeqEnd { last, forgotten }.check(*seq, self.window)?;
        }
        Ok(())
    }
}

impl ChainContents {
    fn last(&self) -> Option<Pos> {
        self.states.last().map(|state| state.pos)
    }

    fn check(&self) -> Result<(), ContentsError> {
        let seq = self.seq;
        if seq.as_usize() >= MAX_SEQS {
            return Err(ContentsError::Seq { seq });
        }
        let mut rows = BTreeSet::new();
        let (mut before, mut pos) = (None, self.first);
        for state in &self.states {
            once("state row", state.row.0, &mut rows)?;
            check_pos(state.pos)?;
            let follows = before.is_none_or(|n: u32| n.checked_add(1) == Some(state.n_tokens));
            if !follows || state.n_tokens == 0 || state.pos < pos {
                return Err(ContentsError::Chain { seq });
            }
            (before, pos) = (Some(state.n_tokens), state.pos);
        }
        match before {
            Some(_) => Ok(()),
            None => Err(ContentsError::Chain { seq }),
        }
    }
}

fn once(what: &'static str, number: u32, seen: &mut BTreeSet<u32>) -> Result<(), ContentsError> {
    match seen.insert(number) {
        true => Ok(()),
        false => Err(ContentsError::Twice { what, number }),
    }
}

fn check_pos(pos: Pos) -> Result<(), ContentsError> {
    match pos <= MAX_POS {
        true => Ok(()),
        false => Err(ContentsError::Position { pos }),
    }
}
