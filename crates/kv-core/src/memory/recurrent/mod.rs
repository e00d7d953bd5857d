//! Recurrent memory: one state for each sequence, and a few snapshots of where it was before.
//!
//! A state is a row in the storage of every recurrent layer (for Mamba: the last inputs of the
//! convolution, and the state of the scan). Rows are never updated in place. A ubatch reads the row
//! that a sequence is at and stores new states in rows that no sequence can be at; committing makes
//! the sequence point to them, and undoing makes it point back. So a computation that failed
//! half-way has destroyed nothing, sequences share rows until they part, and a sequence without
//! tokens reads no row at all.
//!
//! The states after the last tokens stay where they are as snapshots, also over several ubatches: a
//! sequence is a chain of at most `1 + n_snapshots` rows, and going back to one of them only drops
//! the newer. What is not in the chain is refused.
//!
//! What it costs: a ubatch can store as many rows as all sequences keep, beside those, so
//! `2 * n_seqs * (1 + n_snapshots)` rows always suffice, and that is how many
//! [`RecurrentConfig::new`] asks for: twice what in-place updates need. Where not all sequences are
//! in use, [`RecurrentConfig::with_rows`] takes fewer, and plans can be refused.
//!
//! Invariant: every row that a chain names holds exactly the state after that chain's tokens.
//! Knows nothing of attention.

use serde::{Deserialize, Serialize};

use super::error::{
    CopyRefused, NoSuchSequence, PlanError, RemoveRefused, RollbackRefused, ShiftRefused,
};
use super::shift::PosChange;
use super::{Compacted, Copied, Memory, MemoryInputs, Removed, RowsWritten, Seqs, Shifted};
use super::{Contents, RestoreInto, RestoreRefused, Restored};
use crate::batch::{SplitPolicy, UBatch};
use crate::ids::{CellIdx, MAX_SEQS, Pos, SeqId};
use crate::seq_set::SeqSet;
use crate::window::PosRange;

mod chain;
mod copy;
mod error;
mod place;
mod restore;
mod shift;

use chain::{Chain, Cut};

pub use chain::KeptState;
pub use error::{CoupledStates, NoStateRoom, RecurrentConfigError, StateGone, StateIndivisible};
pub use place::RecurrentPlacement;

/// What a [`Recurrent`] memory is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecurrentConfig {
    n_seqs: u32,
    n_snapshots: u32,
    n_rows: u32,
}

impl RecurrentConfig {
    /// For this many sequences, without snapshots, with rows enough for every plan.
    pub fn new(n_seqs: u32) -> Self {
        Self {
            n_seqs,
            n_snapshots: 0,
            n_rows: n_seqs.saturating_mul(2),
        }
    }

    /// The same, keeping the states before the last `n` tokens of each sequence, with rows enough
    /// for every plan.
    pub fn with_snapshots(self, n: u32) -> Self {
        let n_kept = n.saturating_add(1);
        Self {
            n_snapshots: n,
            n_rows: self.n_seqs.saturating_mul(2).saturating_mul(n_kept),
            ..self
        }
    }

    /// The same with another number of rows.
    pub fn with_rows(self, n_rows: u32) -> Self {
        Self { n_rows, ..self }
    }

    /// Number of sequences.
    pub fn n_seqs(&self) -> u32 {
        self.n_seqs
    }

    /// States kept of each sequence beside its current one.
    pub fn n_snapshots(&self) -> u32 {
        self.n_snapshots
    }

    /// Number of rows that every recurrent layer needs in the backend's storage.
    pub fn n_rows(&self) -> u32 {
        self.n_rows
    }

    fn n_kept(&self) -> usize {
        self.n_snapshots as usize + 1
    }
}

/// The memory of all recurrent layers of a model. Two are equal where their sequences are at the same
/// states.
#[derive(Clone, Debug)]
pub struct Recurrent {
    config: RecurrentConfig,
    /// By sequence; `None` where it has no tokens.
    chains: Vec<Option<Chain>>,
    /// By row: how often it was given to a step. Never goes back: what was overwritten stays so.
    n_stored: Vec<u64>,
}

impl PartialEq for Recurrent {
    fn eq(&self, other: &Self) -> bool {
        self.config == other.config && self.chains == other.chains
    }
}

impl Eq for Recurrent {}

/// The record of one step of a [`Recurrent`] memory.
#[derive(Clone, Debug, Default)]
pub struct RecurrentUndo {
    /// What the sequences of the step were.
    before: Vec<(SeqId, Option<Chain>)>,
    /// How often each row had been given to a step, this one included.
    n_stored: Vec<u64>,
}

impl Recurrent {
    /// An empty memory.
    ///
    /// # Errors
    /// [`RecurrentConfigError`] where it could hold nothing, or more than can be counted.
    pub fn new(config: RecurrentConfig) -> Result<Self, RecurrentConfigError> {
        let RecurrentConfig {
            n_seqs,
            n_snapshots,
            n_rows,
        } = config;
        if n_seqs == 0 || n_seqs as usize > MAX_SEQS {
            return Err(RecurrentConfigError::SeqCount { n_seqs });
        }
        let n_needed = u64::from(n_snapshots) + 2;
        if u64::from(n_rows) < n_needed || i32::try_from(n_rows).is_err() {
            return Err(RecurrentConfigError::RowCount {
                n_rows,
                n_snapshots,
                n_needed,
            });
        }
        Ok(Self {
            config,
            chains: vec![None; n_seqs as usize],
            n_stored: vec![0; n_rows as usize],
        })
    }

    /// What it was made from.
    pub fn config(&self) -> &RecurrentConfig {
        &self.config
    }

    /// The states that a sequence can go back to, oldest first; the last is its current one. Empty
    /// where it has no tokens.
    pub fn states(&self, seq: SeqId) -> &[KeptState] {
        self.chain(seq).map_or(&[], Chain::states)
    }

    /// Number of rows that hold a state some sequence can be at.
    pub fn n_used(&self) -> u32 {
        self.used_rows().iter().filter(|used| **used).count() as u32
    }

    fn chain(&self, seq: SeqId) -> Option<&Chain> {
        self.chains.get(seq.as_usize())?.as_ref()
    }

    /// Gives a sequence another chain and returns the one before.
    fn set_chain(&mut self, seq: SeqId, chain: Option<Chain>) -> Option<Chain> {
        let slot = self.chains.get_mut(seq.as_usize())?;
        std::mem::replace(slot, chain)
    }

    /// For each row whether some sequence can be at it.
    fn used_rows(&self) -> Vec<bool> {
        let mut used = vec![false; self.config.n_rows as usize];
        for state in self.chains.iter().flatten().flat_map(Chain::states) {
            if let Some(used) = used.get_mut(state.row.as_usize()) {
                *used = true;
            }
        }
        used
    }

    fn check_seq(&self, seq: SeqId) -> Result<(), NoSuchSequence> {
        let n_seqs = self.config.n_seqs;
        if seq.0 < n_seqs {
            Ok(())
        } else {
            Err(NoSuchSequence { seq, n_seqs })
        }
    }

    fn seqs(&self, seqs: Seqs) -> SeqSet {
        match seqs {
            Seqs::One(seq) => SeqSet::one(seq),
            Seqs::All => (0..self.config.n_seqs).map(SeqId).collect(),
        }
    }

    /// What is left of a sequence without its tokens in `range`.
    fn without(&self, seq: SeqId, range: PosRange) -> Result<Option<Chain>, RemoveRefused> {
        let Some(chain) = self.chain(seq) else {
            return Ok(None);
        };
        let has = chain.positions();
        match chain.cut(range) {
            Cut::Untouched => Ok(Some(chain.clone())),
            Cut::Everything => Ok(None),
            Cut::BackTo(at) => Ok(Some(chain.clone().truncated(at))),
            Cut::Gone { oldest } => Err(RemoveRefused::StateGone(StateGone {
                seq,
                last: has.last,
                wanted: Pos(range.first.0.saturating_sub(1)),
                oldest,
                n_snapshots: (chain.states().len() - 1) as u32,
            })),
            Cut::Indivisible => Err(RemoveRefused::StateIndivisible(StateIndivisible {
                seq,
                has,
                range,
            })),
        }
    }

    /// Whether no step after that of `undo` was given this row.
    fn is_intact(&self, undo: &RecurrentUndo, row: CellIdx) -> bool {
        self.n_stored.get(row.as_usize()) == undo.n_stored.get(row.as_usize())
    }

    fn n_tokens(&self, seq: SeqId) -> u32 {
        let current = self.chain(seq).and_then(Chain::current);
        current.map_or(0, |state| state.n_tokens)
    }

    /// Gives sequences other chains and counts what went.
    fn replace(&mut self, chains: Vec<(SeqId, Option<Chain>)>) -> Removed {
        let n_used = self.n_used();
        let mut n_tokens = 0;
        for (seq, chain) in chains {
            let before = self.n_tokens(seq);
            self.set_chain(seq, chain);
            n_tokens += before.saturating_sub(self.n_tokens(seq));
        }
        Removed {
            n_tokens,
            n_cells: n_used.saturating_sub(self.n_used()),
        }
    }
}

impl Memory for Recurrent {
    type Placement = RecurrentPlacement;
    type Undo = RecurrentUndo;

    fn n_seqs(&self) -> u32 {
        self.config.n_seqs
    }

    /// From the first to the last token that went into the sequence's state.
    fn positions(&self, seq: SeqId) -> Option<PosRange> {
        self.chain(seq).map(Chain::positions)
    }

    fn split_policy(&self) -> SplitPolicy {
        SplitPolicy::InOrder
    }

    fn place(&self, ubatches: &[UBatch]) -> Result<RecurrentPlacement, PlanError> {
        place::place(self, ubatches)
    }

    fn commit(
        &mut self,
        ubatch: &UBatch,
        placement: &RecurrentPlacement,
        step: usize,
    ) -> RecurrentUndo {
        let groups = placement.groups(step);
        for store in groups.iter().flat_map(|group| &group.stores) {
            if let Some(n) = self.n_stored.get_mut(store.to.as_usize()) {
                *n += 1;
            }
        }
        RecurrentUndo {
            before: place::extend(self, ubatch, groups),
            n_stored: self.n_stored.clone(),
        }
    }

    fn check_rollback(
        &self,
        undo: &RecurrentUndo,
        rows: RowsWritten,
    ) -> Result<(), RollbackRefused> {
        for (seq, chain) in &undo.before {
            if let Some(state) = chain.as_ref().and_then(Chain::current)
                && rows == RowsWritten::Perhaps
                && !self.is_intact(undo, state.row)
            {
                return Err(RollbackRefused::StateOverwritten {
                    seq: *seq,
                    last: state.pos,
                    row: state.row,
                });
            }
        }
        Ok(())
    }

    /// Exact for the step that was committed last, whatever was written: a step only writes rows that
    /// no sequence could be at. Of one before it, states that later steps overwrote are forgotten.
    fn rollback(&mut self, undo: RecurrentUndo, rows: RowsWritten) {
        for (seq, chain) in &undo.before {
            let chain = chain.clone().and_then(|chain| match rows {
                RowsWritten::No => Some(chain),
                RowsWritten::Perhaps => chain.newest_where(|row| self.is_intact(&undo, row)),
            });
            self.set_chain(*seq, chain);
        }
    }

    fn inputs(
        &self,
        _ubatch: &UBatch,
        placement: &RecurrentPlacement,
        step: usize,
        inputs: &mut MemoryInputs,
    ) {
        let groups = placement.groups(step);
        inputs.states.truncate(groups.len());
        let n_reused = inputs.states.len();
        for (to, from) in inputs.states.iter_mut().zip(groups) {
            to.clone_from(from);
        }
        inputs.states.extend(groups.iter().skip(n_reused).cloned());
    }

    fn check_remove(&self, seqs: Seqs, range: PosRange) -> Result<(), RemoveRefused> {
        if let Seqs::One(seq) = seqs {
            self.check_seq(seq)?;
        }
        self.seqs(seqs)
            .iter()
            .try_for_each(|seq| self.without(seq, range).map(drop))
    }

    fn remove(&mut self, seqs: Seqs, range: PosRange) -> Result<Removed, RemoveRefused> {
        if let Seqs::One(seq) = seqs {
            self.check_seq(seq)?;
        }
        let left = self
            .seqs(seqs)
            .iter()
            .map(|seq| Ok((seq, self.without(seq, range)?)))
            .collect::<Result<Vec<_>, RemoveRefused>>()?;
        Ok(self.replace(left))
    }

    fn check_copy(&self, from: SeqId, to: SeqId, range: PosRange) -> Result<(), CopyRefused> {
        copy::after(self, from, to, range).map(drop)
    }

    /// Shares the state: no row is copied.
    fn copy(&mut self, from: SeqId, to: SeqId, range: PosRange) -> Result<Copied, CopyRefused> {
        let Some((chain, n_tokens)) = copy::after(self, from, to, range)? else {
            return Ok(Copied::default());
        };
        self.set_chain(to, chain);
        Ok(Copied {
            n_tokens,
            row_copies: Vec::new(),
        })
    }

    fn check_reposition(
        &self,
        seq: SeqId,
        range: PosRange,
        change: PosChange,
    ) -> Result<(), ShiftRefused> {
        shift::after(self, seq, range, change).map(drop)
    }

    /// Moves whole sequences; no row changes.
    fn reposition(
        &mut self,
        seq: SeqId,
        range: PosRange,
        change: PosChange,
    ) -> Result<Shifted, ShiftRefused> {
        let Some(chain) = shift::after(self, seq, range, change)? else {
            return Ok(Shifted::default());
        };
        self.set_chain(seq, Some(chain));
        Ok(Shifted {
            n_tokens: self.n_tokens(seq),
            ..Shifted::default()
        })
    }

    /// States are in rows of their own: there are no holes.
    fn n_holes(&self) -> u32 {
        0
    }

    fn compact(&mut self) -> Compacted {
        Compacted::default()
    }

    fn keep_only(&mut self, seq: SeqId) -> Result<Removed, NoSuchSequence> {
        self.check_seq(seq)?;
        let mut others = self.seqs(Seqs::All);
        others.remove(seq);
        Ok(self.replace(others.iter().map(|seq| (seq, None)).collect()))
    }

    fn contents(&self, seqs: Seqs) -> Result<Contents, NoSuchSequence> {
        if let Seqs::One(seq) = seqs {
            self.check_seq(seq)?;
        }
        Ok(Contents::of_states(restore::contents(
            self,
            self.seqs(seqs),
        )))
    }

    fn check_restore(&self, contents: &Contents, into: RestoreInto) -> Result<(), RestoreRefused> {
        restore::after(self, contents, into).map(drop)
    }

    fn restore(
        &mut self,
        contents: &Contents,
        into: RestoreInto,
    ) -> Result<Restored, RestoreRefused> {
        let (after, restored) = restore::after(self, contents, into)?;
        *self = after;
        Ok(restored)
    }

    fn clear(&mut self) -> Removed {
        let all = self.seqs(Seqs::All);
        self.replace(all.iter().map(|seq| (seq, None)).collect())
    }
}
