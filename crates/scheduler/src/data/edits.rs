//! Edits of one sequence, by numbers of tokens: copies and cuts.
//!
//! Invariant: the first `n` tokens of a sequence are at its first `n` positions.

use kv_core::memory::{Edit, Seqs};
use kv_core::{Pos, PosRange, SeqId};

/// The edit that gives `to` the first `n` tokens of another sequence.
pub(crate) fn copy(from: SeqId, to: SeqId, n: usize) -> Edit {
    let last = u32::try_from(n).unwrap_or(u32::MAX).saturating_sub(1);
    let range = PosRange::new(Pos(0), Pos(last));
    Edit::Copy { from, to, range }
}

/// The edit that leaves the first `n` tokens of a sequence.
pub(crate) fn cut(seq: SeqId, n: usize) -> Edit {
    let from = Pos(u32::try_from(n).unwrap_or(u32::MAX));
    Edit::Remove {
        seqs: Seqs::One(seq),
        range: PosRange::from(from..),
    }
}
