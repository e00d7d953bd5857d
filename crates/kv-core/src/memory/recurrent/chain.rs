//! [`Chain`]: the states that a sequence can be at: its current one and the snapshots before it.
//!
//! Invariant: never empty; each state has taken in exactly one token more than the one before it;
//! no row occurs twice. Knows nothing of other sequences.

use crate::ids::{CellIdx, Pos};
use crate::window::PosRange;

/// A state that is kept, and which tokens went into it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeptState {
    /// The row that holds it.
    pub row: CellIdx,
    /// Position of the last token that went into it.
    pub pos: Pos,
    /// Number of tokens that went into it.
    pub n_tokens: u32,
}

/// The states of one sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Chain {
    /// Position of its first token.
    first: Pos,
    /// Oldest first; the last is the current one.
    states: Vec<KeptState>,
}

/// The outcome for a sequence when positions are taken from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cut {
    /// Nothing.
    Untouched,
    /// All of it goes.
    Everything,
    /// It goes back to the state with this number in its chain.
    BackTo(usize),
    /// It would have to go back to a state that is not kept.
    Gone {
        /// The oldest state that is kept.
        oldest: Pos,
    },
    /// Tokens would be left behind those that go: no state ever was like that.
    Indivisible,
}

impl Chain {
    /// A chain with no states but these, which follow `before`. At most `n_kept` are kept.
    pub(super) fn extended(
        before: Option<&Self>,
        new: impl Iterator<Item = KeptState> + Clone,
        first: Pos,
        n_kept: usize,
    ) -> Self {
        let n_new = new.clone().count();
        let old = before.map_or(&[][..], |chain| chain.states());
        let n_old = n_kept.saturating_sub(n_new).min(old.len());
        let mut states = Vec::with_capacity(n_new + n_old);
        states.extend_from_slice(&old[old.len() - n_old..]);
        states.extend(new);
        Self {
            first: before.map_or(first, |chain| chain.first),
            states,
        }
    }

    /// The same states of tokens at other positions; `to` gives positions that exist.
    pub(super) fn moved(&self, to: impl Fn(Pos) -> i64) -> Self {
        let to = |pos| u32::try_from(to(pos)).map_or(pos, Pos);
        let states = self.states.iter();
        Self {
            first: to(self.first),
            states: states
                .map(|state| KeptState {
                    pos: to(state.pos),
                    ..*state
                })
                .collect(),
        }
    }

    /// All states, oldest first.
    pub(super) fn states(&self) -> &[KeptState] {
        &self.states
    }

    /// The current state.
    pub(super) fn current(&self) -> Option<KeptState> {
        self.states.last().copied()
    }

    /// Positions of the first and the last token that went in.
    pub(super) fn positions(&self) -> PosRange {
        let last = self.current().map_or(self.first, |state| state.pos);
        PosRange::new(self.first, last)
    }

    /// The effect of taking the tokens in `range`.
    pub(super) fn cut(&self, range: PosRange) -> Cut {
        let has = self.positions();
        if range.intersection(has).is_empty() {
            return Cut::Untouched;
        }
        if range.last < has.last {
            return Cut::Indivisible;
        }
        if range.first <= has.first {
            return Cut::Everything;
        }
        let kept = self.states.iter().rposition(|s| s.pos < range.first);
        match (kept, self.states.first()) {
            (Some(at), _) => Cut::BackTo(at),
            (None, oldest) => Cut::Gone {
                oldest: oldest.map_or(has.last, |s| s.pos),
            },
        }
    }

    /// The chain without the states before the newest whose row does not fit; `None` where that is
    /// the current one.
    pub(super) fn newest_where(mut self, fits: impl Fn(CellIdx) -> bool) -> Option<Self> {
        let lost = self.states.iter().rposition(|state| !fits(state.row));
        self.states.drain(..lost.map_or(0, |at| at + 1));
        (!self.states.is_empty()).then_some(self)
    }

    /// Makes the state with this number the current one.
    pub(super) fn truncated(mut self, at: usize) -> Self {
        self.states.truncate(at + 1);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// States after positions, in rows of the same number.
    fn chain(first: u32, positions: &[u32]) -> Chain {
        let state = |(n, &pos): (u32, &u32)| KeptState {
            row: CellIdx(n),
            pos: Pos(pos),
            n_tokens: n + 10,
        };
        let states = (0u32..).zip(positions).map(state);
        Chain::extended(None, states, Pos(first), positions.len())
    }

    fn range(range: std::ops::Range<u32>) -> PosRange {
        PosRange::from(Pos(range.start)..Pos(range.end))
    }

    #[test]
    fn going_back_ends_at_a_kept_state() {
        let chain = chain(2, &[5, 6, 7]);
        assert_eq!(chain.cut(range(8..20)), Cut::Untouched);
        assert_eq!(chain.cut(range(0..2)), Cut::Untouched);
        assert_eq!(chain.cut(range(7..8)), Cut::BackTo(1));
        assert_eq!(chain.cut(range(6..20)), Cut::BackTo(0));
        assert_eq!(chain.cut(range(5..20)), Cut::Gone { oldest: Pos(5) });
        assert_eq!(chain.cut(range(2..8)), Cut::Everything);
        assert_eq!(chain.cut(range(2..7)), Cut::Indivisible);
    }

    #[test]
    fn tokens_of_one_position_go_together() {
        let chain = chain(0, &[3, 4, 4, 4]);
        assert_eq!(chain.cut(range(4..5)), Cut::BackTo(0));
        assert_eq!(chain.clone().truncated(0).positions(), range(0..4));
    }

    #[test]
    fn the_oldest_states_leave_first() {
        let old = chain(0, &[1, 2]);
        let new = chain(0, &[3, 4]).states;
        let longer = Chain::extended(Some(&old), new.iter().copied(), Pos(9), 3);
        let positions: Vec<u32> = longer.states().iter().map(|s| s.pos.0).collect();
        assert_eq!(positions, [2, 3, 4]);
        assert_eq!(longer.positions(), range(0..5));
    }
}
