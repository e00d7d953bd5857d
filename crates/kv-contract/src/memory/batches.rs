//! What the oracles do to sequences: batches of any entries, and ranges that are near a sequence's
//! end.

use kv_core::batch::{Batch, BatchRules};
use kv_core::{Pos, PosRange, SeqId, SeqSet, TokenId};
use proptest::prelude::*;

/// Sequences of a memory under test.
pub const N_SEQS: u32 = 4;

/// The limits of the batches.
pub const RULES: BatchRules = BatchRules {
    n_batch: 64,
    n_seqs: N_SEQS,
    n_vocab: 1,
    n_embd: 1,
};

/// A range by distance from a sequence's last position.
#[derive(Clone, Copy, Debug)]
pub enum RelativeRange {
    /// Everything.
    All,
    /// So many last positions.
    LastFrom(u32),
    /// All but so many last positions.
    FirstTo(u32),
    /// Some positions before the end.
    Middle {
        /// The distance of their start from the end.
        back: u32,
        /// Their number.
        len: u32,
    },
}

impl RelativeRange {
    /// The range in a sequence with this last position.
    pub fn resolve(self, last: Option<Pos>) -> PosRange {
        let end = last.map_or(0, |last| last.0 + 1);
        let back = |n| Pos(end.saturating_sub(n));
        match self {
            Self::All => PosRange::ALL,
            Self::LastFrom(n) => PosRange::from(back(n)..),
            Self::FirstTo(n) => PosRange::from(..back(n)),
            Self::Middle { back: n, len } => PosRange::from(back(n)..Pos(back(n).0 + len)),
        }
    }
}

/// Any sequence.
pub fn seq() -> impl Strategy<Value = SeqId> {
    (0..N_SEQS).prop_map(SeqId)
}

/// Sequence sets as bits; `true` repeats the position of the entry before. Where anything goes, an
/// entry is `n_alone` times as likely to be one sequence's as to be any set's.
pub fn entries(n_alone: u32) -> impl Strategy<Value = Vec<(u32, bool)>> {
    let one = (0..N_SEQS).prop_map(|s| 1 << s);
    let repeat = prop::bool::weighted(0.1);
    prop_oneof![
        // A prompt of one sequence, one token of several, anything.
        ((0..N_SEQS), 1usize..14).prop_map(|(s, n)| vec![(1 << s, false); n]),
        prop::sample::subsequence((0..N_SEQS).collect::<Vec<_>>(), 1..=N_SEQS as usize)
            .prop_map(|seqs| seqs.into_iter().map(|s| (1 << s, false)).collect()),
        prop::collection::vec(
            (prop_oneof![n_alone => one, 1 => 1u32..1 << N_SEQS], repeat),
            1..10
        ),
    ]
}

/// The batch of these entries, each behind what its sequence has; `None` where one has no sequence.
pub fn batch(entries: &[(u32, bool)], last: impl Fn(SeqId) -> Option<Pos>) -> Option<Batch> {
    let mut batch = Batch::new();
    let mut last: Vec<Option<Pos>> = (0..N_SEQS).map(|s| last(SeqId(s))).collect();
    let mut in_batch = SeqSet::EMPTY;
    for &(bits, repeat) in entries {
        let seqs: SeqSet = (0..N_SEQS)
            .filter(|s| bits >> s & 1 == 1)
            .map(SeqId)
            .collect();
        let first = seqs.first()?;
        let entry = batch.push_token(TokenId(0)).in_sequences(&seqs);
        let next = match last[first.as_usize()] {
            Some(pos) if repeat && in_batch.contains(first) => {
                entry.at(pos);
                pos
            }
            pos => pos.map_or(Pos(0), Pos::next),
        };
        for seq in &seqs {
            last[seq.as_usize()] = Some(next);
        }
        in_batch = in_batch.union(&seqs);
    }
    Some(batch)
}
