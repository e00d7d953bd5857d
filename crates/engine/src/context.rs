//! Going on when a text gets longer than its context: [`LongContext`], and the edits of an
//! [`Engine`] that move tokens to other positions.
//!
//! Context shift drops the older half of what follows the beginning and moves the rest down (Xiao
//! et al., arXiv 2309.17453, keep the first tokens for the reason given there). Self-extend lets
//! groups of older tokens share a position (Jin et al., arXiv 2401.01325). Invariant: positions and
//! keys agree after every call; a refused call changes nothing.

use kv_core::backend::{Backend, RowSpan};
use kv_core::memory::{Division, Edit, Memory, PosChange, Seqs};
use kv_core::{Pos, PosDelta, PosRange, SeqId};

use crate::decode::Engine;
use crate::error::EngineError;

/// How a text goes on that gets longer than the context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LongContext {
    /// It ends.
    #[default]
    Stop,
    /// When the memory is full, the first `n_keep` tokens are kept, half of the others are dropped.
    Shift {
        /// Tokens at the beginning that are never dropped.
        n_keep: u32,
    },
    /// Older tokens share positions, so that positions stay below the trained length. Cells are
    /// not saved: the memory must be as large as the text.
    Group(GroupAttention),
}

/// Groups of tokens that share a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupAttention {
    factor: u32,
    width: u32,
}

impl GroupAttention {
    /// `factor` tokens share a position, once `width` tokens are there to be grouped.
    ///
    /// # Errors
    /// [`EngineError::GroupAttention`] where a number is 0 or `width` is no multiple of `factor`.
    pub fn new(factor: u32, width: u32) -> Result<Self, EngineError> {
        if factor == 0
            || width == 0
            || !width.is_multiple_of(factor)
            || i32::try_from(width).is_err()
        {
            return Err(EngineError::GroupAttention { factor, width });
        }
        Ok(Self { factor, width })
    }

    /// Tokens that share a position.
    pub fn factor(self) -> u32 {
        self.factor
    }

    /// Tokens that are grouped at once.
    pub fn width(self) -> u32 {
        self.width
    }

    /// Positions that `width` tokens take once they are grouped.
    pub fn n_positions(self) -> u32 {
        self.width / self.factor
    }
}

impl<B: Backend, M: Memory + Clone> Engine<B, M> {
    /// Whether tokens can move to other positions at all.
    ///
    /// # Errors
    /// [`EngineError::CannotShift`] where the model does something to its keys that a rotation
    /// cannot be exchanged with.
    pub fn check_shift(&self) -> Result<(), EngineError> {
        match &self.runner.key_ropes {
            Ok(_) => Ok(()),
            Err(error) => Err(EngineError::CannotShift(error.clone())),
        }
    }

    /// Whether a text can go on in this way when it gets longer than the context.
    ///
    /// # Errors
    /// As [`Engine::check_shift`]; [`EngineError::OneState`] where layers are recurrent.
    pub fn check_long_context(&self, long_context: LongContext) -> Result<(), EngineError> {
        if long_context == LongContext::Stop {
            return Ok(());
        }
        let layers = self.model().layers();
        let mut recurrent = layers
            .iter()
            .filter(|&(layer, _)| layers.recurrent(layer).is_some());
        match recurrent.next() {
            Some((layer, _)) => Err(EngineError::OneState { layer }),
            None => self.check_shift(),
        }
    }

    /// Moves the tokens of a sequence with positions in `range` to other positions, and rotates
    /// their keys. Sequences that share them keep them where they are. Returns how many tokens
    /// moved.
    ///
    /// # Errors
    /// As [`Engine::edit`].
    pub fn reposition(
        &mut self,
        seq: SeqId,
        range: PosRange,
        change: PosChange,
    ) -> Result<u32, EngineError> {
        let edited = self.edit(Edit::Reposition { seq, range, change })?;
        Ok(edited.n_tokens)
    }

    /// Keeps the first `n_keep` positions of a sequence, removes half of the others, and moves the
    /// rest down to close the gap. Returns how many positions were removed.
    ///
    /// # Errors
    /// [`EngineError::NothingToDiscard`] where fewer than two positions follow those that are
    /// kept; otherwise as [`Engine::remove`] and [`Engine::reposition`].
    pub fn shift_context(&mut self, seq: SeqId, n_keep: u32) -> Result<u32, EngineError> {
        self.check_shift()?;
        let n_past = self.memory.positions(seq).map_or(0, |has| has.last.0 + 1);
        let n_discard = n_past.saturating_sub(n_keep) / 2;
        if n_discard == 0 {
            return Err(EngineError::NothingToDiscard {
                seq,
                n_past,
                n_keep,
            });
        }
        // Removal and move are one edit: both happen, or neither.
        let mut memory = self.memory.clone();
        let behind = Pos(n_keep + n_discard);
        memory.remove(Seqs::One(seq), PosRange::from(Pos(n_keep)..behind))?;
        // Positions fit `i32`, and a half of them does.
        let edit = Edit::Reposition {
            seq,
            range: PosRange::from(behind..),
            change: PosChange::Shift(PosDelta(-(n_discard as i32))),
        };
        let edited = memory.apply(edit)?;
        self.memory = memory;
        self.move_rows(edit, &edited)?;
        Ok(n_discard)
    }

    /// Lets the tokens at `width` positions from `first` on share positions in groups, and moves
    /// those behind them down to close the gap.
    ///
    /// # Errors
    /// As [`Engine::reposition`].
    pub fn group(
        &mut self,
        seq: SeqId,
        first: Pos,
        group: GroupAttention,
    ) -> Result<(), EngineError> {
        self.check_shift()?;
        let behind = Pos(first.0.saturating_add(group.width));
        let division = Division {
            by: group.factor,
            origin: first,
        };
        let down = PosDelta(-((group.width - group.n_positions()) as i32));
        let mut memory = self.memory.clone();
        let divided = memory.divide(seq, PosRange::from(first..behind), division)?;
        let rest = Edit::Reposition {
            seq,
            range: PosRange::from(behind..),
            change: PosChange::Shift(down),
        };
        // Other tokens than those of the division: no row is rotated twice.
        let edited = divided.and(memory.apply(rest)?);
        self.memory = memory;
        self.move_rows(rest, &edited)
    }

    /// Moves tokens, with their KV rows, until each sequence is one run and the used cells are the
    /// first ones, as far as sharing and free cells allow. What tokens see stays the same. Returns
    /// how often a token moved. It makes no room, as any free cells do: it makes runs longer.
    ///
    /// # Errors
    /// [`EngineError::Backend`] where KV rows could not be copied; the passes before have moved
    /// their tokens then, and nothing is lost.
    pub fn compact(&mut self) -> Result<u32, EngineError> {
        let mut n_moved = 0;
        loop {
            match self.edit(Edit::Compact)?.n_cells {
                0 => return Ok(n_moved),
                n => n_moved += n,
            }
        }
    }

    /// Reads the stored bytes of some rows, to look at.
    ///
    /// # Errors
    /// As [`Backend::read_rows`].
    pub fn read_rows(&self, span: RowSpan, out: &mut [u8]) -> Result<(), EngineError> {
        Ok(self
            .runner
            .backend
            .read_rows(&self.runner.rows, span, out)?)
    }
}
