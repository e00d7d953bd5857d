//! What is done to a memory: operations that are as likely to be refused as in life.

use kv_core::memory::{Division, PosChange, RestoreInto, RowsWritten, Seqs};
use kv_core::{Pos, PosDelta, PosRange, SeqId};
use proptest::prelude::*;

use crate::saves::{Device, restore_into};

pub(crate) const N_SEQS: u32 = 4;

#[derive(Clone, Debug)]
pub(crate) enum Op {
    /// Sequence sets as bits; `true` repeats the position of the entry before.
    Batch {
        entries: Vec<(u32, bool)>,
        n_ubatch: u32,
        failure: Option<(usize, RowsWritten)>,
    },
    Remove {
        seqs: Seqs,
        range: RelativeRange,
    },
    Copy {
        from: SeqId,
        to: SeqId,
        range: RelativeRange,
    },
    Reposition {
        seq: SeqId,
        range: RelativeRange,
        change: PosChange,
    },
    /// What makes room: remove some tokens, move those behind them down.
    ContextShift {
        seq: SeqId,
        n_keep: u32,
    },
    Compact,
    /// Saves sequences, in place of what was saved before.
    Save(Seqs),
    /// Takes back what was saved last, or fails at it when its rows are half written.
    Restore {
        into: RestoreInto,
        device: Device,
    },
    KeepOnly(SeqId),
    Clear,
}

/// A range by distance from a sequence's last position.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RelativeRange {
    All,
    LastFrom(u32),
    FirstTo(u32),
    Middle { back: u32, len: u32 },
}

impl RelativeRange {
    pub(crate) fn resolve(self, last: Option<Pos>) -> PosRange {
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

fn seq() -> impl Strategy<Value = SeqId> {
    (0..N_SEQS).prop_map(SeqId)
}

fn range() -> impl Strategy<Value = RelativeRange> {
    prop_oneof![
        2 => Just(RelativeRange::All),
        4 => (0u32..10).prop_map(RelativeRange::LastFrom),
        2 => (0u32..10).prop_map(RelativeRange::FirstTo),
        2 => (0u32..10, 0u32..5).prop_map(|(back, len)| RelativeRange::Middle { back, len }),
    ]
}

fn change() -> impl Strategy<Value = PosChange> {
    let delta = prop_oneof![8 => -9i32..10, 1 => Just(i32::MAX), 1 => Just(i32::MIN)];
    let origin = prop_oneof![1 => Just(0), 1 => 0u32..12];
    let by = prop_oneof![1 => Just(0), 9 => 1u32..5];
    prop_oneof![
        3 => delta.prop_map(|delta| PosChange::Shift(PosDelta(delta))),
        2 => (by, origin).prop_map(|(by, origin)| {
            let origin = Pos(origin);
            PosChange::Divide(Division { by, origin })
        }),
    ]
}

fn entries() -> impl Strategy<Value = Vec<(u32, bool)>> {
    let one = (0..N_SEQS).prop_map(|s| 1 << s);
    let repeat = prop::bool::weighted(0.1);
    prop_oneof![
        // A prompt of one sequence, one token of several, anything.
        ((0..N_SEQS), 1usize..14).prop_map(|(s, n)| vec![(1 << s, false); n]),
        prop::sample::subsequence((0..N_SEQS).collect::<Vec<_>>(), 1..=N_SEQS as usize)
            .prop_map(|seqs| seqs.into_iter().map(|s| (1 << s, false)).collect()),
        prop::collection::vec(
            (prop_oneof![4 => one, 1 => 1u32..1 << N_SEQS], repeat),
            1..10
        ),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    let rows = prop_oneof![Just(RowsWritten::No), Just(RowsWritten::Perhaps)];
    let failure = prop::option::weighted(0.3, (0usize..4, rows));
    let device = prop_oneof![4 => Just(Device::Works), 1 => Just(Device::Fails)];
    let saved_seqs = prop_oneof![1 => seq().prop_map(Seqs::One), 2 => Just(Seqs::All)];
    let seqs = prop_oneof![5 => seq().prop_map(Seqs::One), 1 => Just(Seqs::All)];
    prop_oneof![
        10 => (entries(), 1u32..8, failure)
            .prop_map(|(entries, n_ubatch, failure)| Op::Batch { entries, n_ubatch, failure }),
        3 => (seqs, range()).prop_map(|(seqs, range)| Op::Remove { seqs, range }),
        3 => (seq(), seq(), range()).prop_map(|(from, to, range)| Op::Copy { from, to, range }),
        4 => (seq(), range(), change())
            .prop_map(|(seq, range, change)| Op::Reposition { seq, range, change }),
        2 => (seq(), 0u32..4).prop_map(|(seq, n_keep)| Op::ContextShift { seq, n_keep }),
        1 => Just(Op::Compact),
        2 => saved_seqs.prop_map(Op::Save),
        3 => (restore_into(), device).prop_map(|(into, device)| Op::Restore { into, device }),
        1 => seq().prop_map(Op::KeepOnly),
        1 => Just(Op::Clear),
    ]
}

pub(crate) fn ops() -> impl Strategy<Value = Vec<Op>> {
    prop::collection::vec(op(), 1..40)
}
