//! Giving a sequence the tokens of another: by sharing cells within a stream, by copying rows
//! between streams.
//!
//! Invariant: checked whole before anything changes; row copies are returned, never queued.

use std::collections::BTreeMap;

use super::edit::Edited;
use super::refusal::{NeededFor, NoRoom, Refusal};
use super::stream::{SeqEnd, Stream};
use super::unified::Unified;
use crate::cells::Cell;
use crate::grid::GridPos;
use crate::ids::{CellIdx, PartIdx, Pos, SeqId, StreamIdx};
use crate::memory::RowCopy;
use crate::seq_set::SeqSet;
use crate::slot::SlotSearch;
use crate::visibility::CellRun;
use crate::window::PosRange;

/// Checks a copy, and changes nothing.
pub(super) fn check(
    memory: &Unified,
    from: SeqId,
    to: SeqId,
    range: PosRange,
) -> Result<(), Refusal> {
    memory.check_seq(from)?;
    memory.check_seq(to)?;
    if from == to || range.is_empty() {
        return Ok(());
    }
    end_after(memory, from, to, range).check(to, memory.config().window)?;
    let (source, target) = (memory.stream_of(from), memory.stream_of(to));
    if let (Some(s), Some(t)) = (memory.streams.get(source), memory.streams.get(target))
        && source != target
    {
        let n_wanted = n_within(s, from, range);
        let n_cells = t.cells.n_cells();
        let n_free = n_cells - t.cells.n_used() + n_within(t, to, range);
        if n_wanted > n_free {
            let (part, stream) = (memory.config().part, StreamIdx(target as u32));
            return Err(Refusal::NoRoom(NoRoom {
                needed_for: NeededFor::Copy(from),
                part,
                stream,
                window: memory.config().window,
                n_wanted,
                n_free,
                n_recyclable: 0,
                n_cells,
                n_free_elsewhere: 0,
            }));
        }
    }
    Ok(())
}

/// Makes the tokens of `to` in `range` those of `from`, after [`check`].
pub(super) fn copy(memory: &mut Unified, from: SeqId, to: SeqId, range: PosRange) -> Edited {
    let mut copied = Edited::default();
    if from == to || range.is_empty() {
        return copied;
    }
    let (source, target) = (memory.stream_of(from), memory.stream_of(to));
    let runs = memory.streams.get(source).and_then(|s| s.cells.runs(from));
    let runs: Vec<CellRun> = runs
        .into_iter()
        .flat_map(|runs| runs.within(range))
        .collect();
    let grids: BTreeMap<CellIdx, GridPos> = match memory.streams.get(source) {
        // Within a stream cells are shared and stay what they are.
        Some(stream) if source != target => stream.cells.grids().clone(),
        _ => BTreeMap::new(),
    };
    copied.n_tokens = runs.iter().map(|run| run.len).sum();
    let missing = memory.streams.get(source).and_then(|s| s.forgotten(from));
    let missing = missing.map(|set| set.within(range).collect::<Vec<_>>());
    let part = memory.config().part;
    let Some(stream) = memory.streams.get_mut(target) else {
        return copied;
    };
    stream.remove(to, range);
    if source == target {
        for &run in &runs {
            stream.cells.add_run(run, to);
        }
    } else {
        copied.row_copies = insert_copies(stream, to, &runs, &grids, part);
    }
    if let Some(forgotten) = stream.forgotten_mut(to) {
        missing
            .into_iter()
            .flatten()
            .for_each(|range| forgotten.insert(range));
    }
    copied
}

/// The end of `to` with the tokens of `from` in `range` instead of its own.
fn end_after(memory: &Unified, from: SeqId, to: SeqId, range: PosRange) -> SeqEnd {
    let stream = |seq| memory.streams.get(memory.stream_of(seq));
    let kept = stream(to).map_or(SeqEnd::OF_NOTHING, |s| s.end_without(to, range));
    let forgotten = |s: &Stream| {
        let ranges = s.forgotten(from).into_iter();
        let within = ranges.flat_map(|set| set.within(range));
        within.fold(PosRange::EMPTY, PosRange::hull)
    };
    let copied = stream(from).map_or(SeqEnd::OF_NOTHING, |s| SeqEnd {
        last: last_within(s, from, range),
        forgotten: forgotten(s),
    });
    kept.max(copied)
}

fn last_within(stream: &Stream, seq: SeqId, range: PosRange) -> Option<Pos> {
    Some(stream.cells.runs(seq)?.within(range).last()?.last_pos())
}

fn n_within(stream: &Stream, seq: SeqId, range: PosRange) -> u32 {
    let runs = stream.cells.runs(seq).into_iter();
    runs.flat_map(|runs| runs.within(range))
        .map(|run| run.len)
        .sum()
}

/// Gives `seq` cells of its own stream for the tokens in `runs` of another. There are enough.
fn insert_copies(
    stream: &mut Stream,
    seq: SeqId,
    runs: &[CellRun],
    grids: &BTreeMap<CellIdx, GridPos>,
    part: PartIdx,
) -> Vec<RowCopy> {
    let n: u32 = runs.iter().map(|run| run.len).sum();
    let mut slot = Vec::new();
    let mut search = SlotSearch::new(&stream.cells, stream.head);
    let found = search.find((0..n).map(|_| seq), &mut slot);
    debug_assert!(found.is_ok(), "room was checked before: {found:?}");
    let mut copies = Vec::new();
    for ((from, pos), &to) in runs.iter().flat_map(|run| run.iter()).zip(&slot) {
        stream.cells.insert(
            to,
            &Cell {
                pos,
                seqs: SeqSet::one(seq),
                grid: grids.get(&from).copied(),
            },
        );
        stream.set_head_behind(to);
        add_row_copy(&mut copies, part, from, to);
    }
    copies
}

/// Adds the copy of one row, joined to the one before where it continues that.
pub(super) fn add_row_copy(copies: &mut Vec<RowCopy>, part: PartIdx, from: CellIdx, to: CellIdx) {
    match copies.last_mut() {
        Some(c) if c.from.offset(c.len) == from && c.to.offset(c.len) == to => c.len += 1,
        _ => copies.push(RowCopy {
            part,
            from,
            to,
            len: 1,
        }),
    }
}
