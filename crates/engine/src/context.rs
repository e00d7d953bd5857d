//! Going on when a text gets longer than its context: [`LongContext`], and the edits of an
//! [`Engine`] that move tokens to other positions.
//!
//! Context shift drops the older half of what follows the beginning and moves the rest down (Xiao
//! et al., arXiv 2309.17453, keep the first tokens for the reason given there). Self-extend lets
//! groups of older tokens share a position (Jin et al., arXiv 2401.01325). Invariant: positions and
//! keys agree after every call; a refused call changes nothing.

use cellar_scheduler::Shift;
use kv_backend::{Backend, RowSpan};
use kv_core::memory::{Division, Edit, Memory, PosChange, Refusal};
use kv_core::{Pos, PosDelta, PosRange, SeqId};

use crate::decode::Engine;
use crate::error::EngineError;

/// Passes after which a compaction has not ended: a [`Composite`](kv_core::memory::Composite) takes
/// fewer than a tenth.
const MAX_COMPACT_PASSES: u32 = 1024;

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
        self.check_can_move()
    }

    /// Checks that tokens of this model can move to other positions, and its states allow it.
    ///
    /// # Errors
    /// As [`Engine::check_long_context`].
    pub(crate) fn check_can_move(&self) -> Result<(), EngineError> {
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

    /// Keeps the first `n_keep` tokens of a sequence, removes half of the others, and moves the
    /// rest down to close the gap. Tokens that share a position with one that is kept are kept too,
    /// and those whose rows stay for good where old rows are apart
    /// ([`RecentTokens::n_first`](kv_core::layers::RecentTokens::n_first)). Returns how many tokens
    /// were removed, with those whose cells a window had recycled.
    ///
    /// # Errors
    /// [`EngineError::Refused`] where there is no such sequence; [`EngineError::NothingToDiscard`]
    /// where fewer than two tokens follow those that are kept; otherwise as [`Engine::remove`] and
    /// [`Engine::reposition`].
    pub fn shift_context(&mut self, seq: SeqId, n_keep: u32) -> Result<u32, EngineError> {
        self.check_shift()?;
        let n_seqs = self.memory.n_seqs();
        if seq.0 >= n_seqs {
            return Err(Refusal::NoSuchSequence { seq, n_seqs }.into());
        }
        let tokens = TokenPositions(self.memory.token_ranges(seq));
        let n_keep = n_keep.max(tokens.n_before(Pos(self.n_first())));
        let n_tokens = tokens.n_tokens();
        let n_discard = n_tokens.saturating_sub(n_keep) / 2;
        let from = tokens.position_after(n_keep);
        let behind = tokens.position_after(n_keep.saturating_add(n_discard));
        if from >= behind {
            return Err(EngineError::NothingToDiscard {
                seq,
                n_tokens,
                n_keep,
            });
        }
        self.drop_tokens(Edit::drop_between(seq, from, behind))?;
        Ok(tokens.n_before(behind) - tokens.n_before(from))
    }

    /// Drops tokens and moves those behind them down, as [`Edit::drop_between`] has it: both, or
    /// neither.
    fn drop_tokens(&mut self, [removal, move_down]: [Edit; 2]) -> Result<(), EngineError> {
        self.check_shift()?;
        let mut memory = self.memory.clone();
        // A removal leaves no work on rows.
        let _removed = memory.apply(removal)?;
        let edited = memory.apply(move_down)?;
        self.memory = memory;
        self.runner.note_edit(move_down);
        self.move_rows(move_down, &edited)
    }

    /// Drops tokens of a text that is full, as a scheduler plans it.
    ///
    /// # Errors
    /// As [`Engine::shift_context`].
    pub(crate) fn shift(&mut self, shift: &Shift) -> Result<(), EngineError> {
        self.drop_tokens(shift.edits())
    }

    /// Tokens at the beginning of a sequence whose rows stay for good, where old rows are apart
    /// ([`RecentTokens::n_first`](kv_core::layers::RecentTokens::n_first)).
    pub(crate) fn n_first(&self) -> u32 {
        let parts = self.model().layers().parts();
        parts
            .iter()
            .map(|part| part.window.n_first())
            .max()
            .unwrap_or(0)
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
        self.runner.note_edit(rest);
        self.move_rows(rest, &edited)
    }

    /// Moves tokens, with their KV rows, until each sequence is one run and the used cells are the
    /// first ones, as far as sharing and free cells allow. What tokens see stays the same. Returns
    /// how often a token moved. It makes no room, as any free cells do: it makes runs longer.
    ///
    /// # Errors
    /// [`EngineError::Backend`] where KV rows could not be copied; the passes before have moved
    /// their tokens then, and nothing is lost. [`EngineError::EndlessCompaction`] where a memory
    /// goes on to move tokens.
    pub fn compact(&mut self) -> Result<u32, EngineError> {
        let mut n_moved: u32 = 0;
        for _ in 0..MAX_COMPACT_PASSES {
            match self.edit(Edit::Compact)?.n_cells {
                0 => return Ok(n_moved),
                n => n_moved = n_moved.saturating_add(n),
            }
        }
        Err(EngineError::EndlessCompaction {
            n_passes: MAX_COMPACT_PASSES,
        })
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

/// Positions of a sequence's tokens, see [`Memory::token_ranges`].
struct TokenPositions(Vec<PosRange>);

impl TokenPositions {
    fn n_tokens(&self) -> u32 {
        self.n_before(Pos(u32::MAX))
    }

    /// Number of tokens before a position.
    fn n_before(&self, pos: Pos) -> u32 {
        let before = |range: &PosRange| range.intersection(PosRange::from(..pos)).len();
        let n: u64 = self.0.iter().map(before).sum();
        u32::try_from(n).unwrap_or(u32::MAX)
    }

    /// The first position before which there are `n` tokens or more; the last possible one where
    /// there are fewer.
    fn position_after(&self, n: u32) -> Pos {
        let (mut too_few, mut enough) = (0, u32::MAX);
        if n == 0 {
            return Pos(0);
        }
        while enough - too_few > 1 {
            let middle = too_few + (enough - too_few) / 2;
            if self.n_before(Pos(middle)) >= n {
                enough = middle;
            } else {
                too_few = middle;
            }
        }
        Pos(enough)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    #[test]
    fn tokens_are_counted_and_positions_are_not() {
        let range = |first, last| PosRange::new(Pos(first), Pos(last));
        // Two tokens at position 12; a hole behind 13.
        let tokens = TokenPositions(vec![range(10, 13), range(12, 12), range(20, 22)]);
        assert_eq!(tokens.n_tokens(), 8);
        let after = |n| tokens.position_after(n).0;
        assert_eq!([after(0), after(1), after(2)], [0, 11, 12]);
        assert_eq!([after(3), after(4), after(5)], [13, 13, 14]);
        assert_eq!([after(6), after(8)], [21, 23]);
        assert_eq!(tokens.n_before(Pos(13)), 4);
        assert_eq!(TokenPositions(vec![range(0, 0)]).position_after(1), Pos(1));
    }

    #[test]
    fn a_group_has_the_numbers_that_it_was_made_with() {
        let group = GroupAttention::new(3, 12).unwrap();
        assert_eq!((group.factor(), group.width()), (3, 12));
        assert_eq!(group.n_positions(), 4);
    }
}
