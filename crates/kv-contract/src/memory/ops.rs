//! What is done to a memory: operations that are as likely to be refused as in life.

use kv_core::memory::{Division, PosChange, RestoreInto, RowsWritten, Seqs};
use kv_core::{Pos, PosDelta, SeqId};
use proptest::prelude::*;

use super::batches::{RelativeRange, entries, seq};
use super::saves::{Device, restore_into};

/// The way a batch is computed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attempt {
    pub(crate) n_ubatch: u32,
    /// The ubatch that fails, if one does, and what that leaves behind.
    pub(crate) failure: Option<(usize, RowsWritten)>,
    /// Tokens of the source that sequences without one are given before, where the memory takes
    /// any; 0 leaves them without.
    pub(crate) n_source: u32,
}

/// Tokens of an image, all at one position: so many behind the last one, or that of the last one.
#[derive(Clone, Debug)]
pub(crate) struct Image {
    pub(crate) seq: SeqId,
    pub(crate) ahead: u32,
    /// Rows and columns, counted from the position.
    pub(crate) grid: Vec<(u32, u32)>,
}

#[derive(Clone, Debug)]
pub(crate) enum Op {
    /// Sequence sets as bits; `true` repeats the position of the entry before.
    Batch(Vec<(u32, bool)>, Attempt),
    Image(Image, Attempt),
    /// The sources of sequences, in the same way.
    Sources(Vec<(u32, bool)>, Attempt),
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
    /// A context shift: removes some tokens and moves those behind them down.
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

fn attempt() -> impl Strategy<Value = Attempt> {
    let rows = prop_oneof![Just(RowsWritten::No), Just(RowsWritten::Perhaps)];
    let failure = prop::option::weighted(0.3, (0usize..4, rows));
    let n_source = prop_oneof![1 => Just(0), 11 => 1u32..6];
    (1u32..8, failure, n_source).prop_map(|(n_ubatch, failure, n_source)| Attempt {
        n_ubatch,
        failure,
        n_source,
    })
}

fn image() -> impl Strategy<Value = Image> {
    let grid = prop::collection::vec((0u32..4, 0u32..4), 1..8);
    (seq(), 0u32..4, grid).prop_map(|(seq, ahead, grid)| Image { seq, ahead, grid })
}

fn op() -> impl Strategy<Value = Op> {
    let device = prop_oneof![4 => Just(Device::Works), 1 => Just(Device::Fails)];
    let saved_seqs = prop_oneof![1 => seq().prop_map(Seqs::One), 2 => Just(Seqs::All)];
    let seqs = prop_oneof![5 => seq().prop_map(Seqs::One), 1 => Just(Seqs::All)];
    prop_oneof![
        10 => (entries(4), attempt()).prop_map(|(entries, attempt)| Op::Batch(entries, attempt)),
        1 => (entries(4), attempt()).prop_map(|(entries, attempt)| Op::Sources(entries, attempt)),
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

/// The same among tokens of images.
pub(crate) fn ops_with_images() -> impl Strategy<Value = Vec<Op>> {
    let image = (image(), attempt()).prop_map(|(image, attempt)| Op::Image(image, attempt));
    prop::collection::vec(prop_oneof![4 => op(), 1 => image], 1..40)
}
