//! Moving tokens of a sequence to other positions.
//!
//! A move keeps the order of tokens: none is overtaken, and none falls off an end. Invariant:
//! checked whole before anything changes. Only the named sequence moves: where others share its
//! cells, it is given cells of its own first. The work on rows is returned, never queued.

use std::fmt;

use super::copy::add_row_copy;
use super::edit::Edited;
use super::refusal::{NeededFor, NoRoom, Refusal};
use super::stream::{SeqEnd, Stream};
use super::unified::Unified;
use crate::batch::MAX_POS;
use crate::cells::Cell;
use crate::ids::{CellIdx, PartIdx, Pos, PosDelta, SeqId, StreamIdx};
use crate::memory::RowShift;
use crate::seq_set::SeqSet;
use crate::slot::SlotSearch;
use crate::window::PosRange;

/// The new positions of some tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PosChange {
    /// All by the same distance.
    Shift(PosDelta),
    /// Closer together.
    Divide(Division),
}

/// Positions `origin + i` become `origin + i / by`, rounded down. Positions before the origin are
/// not concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Division {
    /// The divisor.
    pub by: u32,
    /// The position that stays.
    pub origin: Pos,
}

impl Division {
    /// Divides positions themselves.
    pub const fn by(by: u32) -> Self {
        Self { by, origin: Pos(0) }
    }
}

impl PosChange {
    /// The position that a token at `pos` gets, which may be none that exists.
    pub(super) fn apply(self, pos: Pos) -> i64 {
        let pos = i64::from(pos.0);
        match self {
            Self::Shift(delta) => pos + i64::from(delta.0),
            Self::Divide(Division { by, origin }) => {
                let origin = i64::from(origin.0);
                let ahead = (pos - origin).max(0);
                pos - ahead + ahead / i64::from(by.max(1))
            }
        }
    }

    /// Those positions of a range that are concerned.
    fn concerns(self, range: PosRange) -> PosRange {
        match self {
            Self::Shift(_) => range,
            Self::Divide(Division { origin, .. }) => range.intersection(PosRange::from(origin..)),
        }
    }

    /// Those positions of a range that become others.
    pub(super) fn changes(self, range: PosRange) -> PosRange {
        match self {
            Self::Shift(PosDelta(0)) | Self::Divide(Division { by: 1, .. }) => PosRange::EMPTY,
            Self::Shift(_) => range,
            Self::Divide(Division { origin, .. }) => {
                range.intersection(PosRange::from(origin.next()..))
            }
        }
    }
}

impl fmt::Display for PosChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shift(delta) => write!(f, "shifting by {delta}"),
            Self::Divide(Division { by, origin }) => {
                write!(f, "dividing by {by} from position {origin} on")
            }
        }
    }
}

/// Checks a move, and changes nothing.
pub(super) fn check(
    memory: &Unified,
    seq: SeqId,
    range: PosRange,
    change: PosChange,
) -> Result<(), Refusal> {
    memory.check_seq(seq)?;
    if let PosChange::Divide(Division { by: 0, .. }) = change {
        return Err(Refusal::DivideByZero { seq });
    }
    let number = memory.stream_of(seq);
    let changes = change.changes(range);
    let Some(stream) = memory.streams.get(number).filter(|_| !changes.is_empty()) else {
        return Ok(());
    };
    check_order(stream, seq, change.concerns(range), change)?;
    check_text(stream, seq, changes, change)?;
    end_after(stream, seq, changes, change).check(seq, memory.config().window)?;
    let n_wanted = tokens(stream, seq, changes)
        .filter(|&(cell, _)| stream.cells.is_shared(cell))
        .count() as u32;
    let n_free = stream.cells.free().n_free();
    if n_wanted > n_free {
        return Err(Refusal::NoRoom(NoRoom {
            needed_for: NeededFor::Move(seq),
            part: memory.config().part,
            stream: StreamIdx(number as u32),
            window: memory.config().window,
            n_wanted,
            n_free,
            n_recyclable: 0,
            n_cells: stream.cells.n_cells(),
            n_free_elsewhere: 0,
        }));
    }
    Ok(())
}

/// Moves the tokens of `seq` in `range`, after [`check`].
pub(super) fn shift(
    memory: &mut Unified,
    seq: SeqId,
    range: PosRange,
    change: PosChange,
) -> Edited {
    let (number, part) = (memory.stream_of(seq), memory.config().part);
    let changes = change.changes(range);
    match memory.streams.get_mut(number) {
        Some(stream) if !changes.is_empty() => move_tokens(stream, seq, part, changes, change),
        _ => Edited::default(),
    }
}

/// Every token that moves exists afterwards, and is where it was among those that do not move.
/// What is forgotten counts: it moves or stays like everything else.
fn check_order(
    stream: &Stream,
    seq: SeqId,
    range: PosRange,
    change: PosChange,
) -> Result<(), Refusal> {
    let (Some(runs), Some(forgotten)) = (stream.cells.runs(seq), stream.forgotten(seq)) else {
        return Ok(());
    };
    let held = runs
        .within(range)
        .map(|run| PosRange::new(run.pos, run.last_pos()));
    let moved = held
        .chain(forgotten.within(range))
        .fold(PosRange::EMPTY, PosRange::hull);
    if moved.is_empty() {
        return Ok(());
    }
    let (first, last) = (change.apply(moved.first), change.apply(moved.last));
    if first < 0 || last > i64::from(MAX_POS.0) {
        return Err(Refusal::OutOfRange {
            seq,
            moved,
            change,
            first,
            last,
        });
    }
    let below = runs
        .last_before(range.first)
        .max(forgotten.last_before(range.first));
    let above = [
        runs.first_after(range.last),
        forgotten.first_after(range.last),
    ];
    let above = above.into_iter().flatten().min();
    let in_the_way = below
        .filter(|pos| i64::from(pos.0) >= first)
        .or(above.filter(|pos| i64::from(pos.0) <= last));
    match in_the_way {
        Some(other) => Err(Refusal::Overtakes {
            seq,
            moved,
            change,
            other,
        }),
        None => Ok(()),
    }
}

/// No token that moves is one of an image, whose row and column would have to move with it.
fn check_text(
    stream: &Stream,
    seq: SeqId,
    changes: PosRange,
    change: PosChange,
) -> Result<(), Refusal> {
    if stream.cells.grids().is_empty() {
        return Ok(());
    }
    let of_image = tokens(stream, seq, changes)
        .find_map(|(cell, pos)| Some((pos, *stream.cells.grids().get(&cell)?)));
    match of_image {
        Some((pos, grid)) => Err(Refusal::Image {
            seq,
            change,
            pos,
            grid,
        }),
        None => Ok(()),
    }
}

/// The end of the sequence after the move.
fn end_after(stream: &Stream, seq: SeqId, changes: PosRange, change: PosChange) -> SeqEnd {
    let moved = |pos: Pos| {
        if changes.contains(pos) {
            applied(change, pos)
        } else {
            pos
        }
    };
    let end = stream.end(seq);
    SeqEnd {
        last: end.last.map(moved),
        forgotten: match end.forgotten {
            none if none.is_empty() => none,
            some => PosRange::new(moved(some.first), moved(some.last)),
        },
    }
}

/// The position that a token gets, after the check that it exists.
fn applied(change: PosChange, pos: Pos) -> Pos {
    let applied = u32::try_from(change.apply(pos));
    debug_assert!(applied.is_ok(), "{change} was checked for {pos}");
    applied.map_or(pos, Pos)
}

fn tokens(stream: &Stream, seq: SeqId, range: PosRange) -> impl Iterator<Item = (CellIdx, Pos)> {
    let runs = stream.cells.runs(seq).into_iter();
    runs.flat_map(move |runs| runs.within(range))
        .flat_map(|run| run.iter())
}

fn move_tokens(
    stream: &mut Stream,
    seq: SeqId,
    part: PartIdx,
    range: PosRange,
    change: PosChange,
) -> Edited {
    let moved: Vec<(CellIdx, Pos)> = tokens(stream, seq, range).collect();
    let shared = moved
        .iter()
        .filter(|(cell, _)| stream.cells.is_shared(*cell));
    let n_shared = shared.count() as u32;
    let mut slot = Vec::new();
    let mut search = SlotSearch::new(&stream.cells, stream.head);
    let found = search.find((0..n_shared).map(|_| seq), &mut slot);
    debug_assert!(found.is_ok(), "room was checked before: {found:?}");
    let mut edited = Edited {
        n_tokens: moved.len() as u32,
        ..Edited::default()
    };
    stream.cells.remove(seq, range);
    let mut own_cells = slot.into_iter();
    for (from, pos) in moved {
        // A cell is in use still where others share it.
        let to = match stream.cells.get(from).and_then(|_| own_cells.next()) {
            Some(own) => {
                add_row_copy(&mut edited.row_copies, part, from, own);
                stream.set_head_behind(own);
                own
            }
            None => from,
        };
        let new = applied(change, pos);
        let seqs = SeqSet::one(seq);
        // Tokens of images do not move.
        stream.cells.insert(to, &Cell::new(new, seqs));
        let delta = PosDelta((i64::from(new.0) - i64::from(pos.0)) as i32);
        add_row_shift(&mut edited.row_shifts, part, to, delta);
    }
    if let Some(forgotten) = stream.forgotten_mut(seq) {
        let old: Vec<PosRange> = forgotten.within(range).collect();
        forgotten.remove(range);
        for range in old {
            let (first, last) = (applied(change, range.first), applied(change, range.last));
            forgotten.insert(PosRange::new(first, last));
        }
    }
    edited
}

/// Adds the shift of one row, joined to the one before where it continues that.
fn add_row_shift(shifts: &mut Vec<RowShift>, part: PartIdx, cell: CellIdx, delta: PosDelta) {
    match shifts.last_mut() {
        Some(s) if s.delta == delta && s.first.offset(s.len) == cell => s.len += 1,
        _ => shifts.push(RowShift {
            part,
            first: cell,
            len: 1,
            delta,
        }),
    }
}
