//! Restoring a snapshot into an attention memory of any size, shared or with streams.
//!
//! What was saved is given new cells: free ones first, so that what is replaced stays whole in its
//! rows until everything is written, as long as there is room for both. Invariant: checked whole
//! before anything changes; row writes are returned, never queued. Knows nothing of bytes.

use std::borrow::Cow;
use std::collections::BTreeMap;

use super::pos_set::PosSet;
use super::snapshot::{CellRecord, PartSnapshot, RestoreInto, Snapshot};
use super::unified::{Streams, Unified};
use super::{Memory as _, NeededFor, NoRoom, Refusal};
use crate::cells::{Cell, FreeMap};
use crate::ids::{CellIdx, PartIdx, Pos, SeqId, StreamIdx};
use crate::seq_set::SeqSet;
use crate::window::{PosRange, Window};

/// Rows of every layer of a part that are to be written as they were saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowWrite {
    /// The part.
    pub part: PartIdx,
    /// The row that the first of them had in the snapshot.
    pub from: CellIdx,
    /// The first row to write.
    pub to: CellIdx,
    /// Number of rows, one after the other in both places.
    pub len: u32,
}

/// A recurrent state that is to be written, in every recurrent layer, as it was saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateWrite {
    /// The row that it had in the snapshot.
    pub from: CellIdx,
    /// The row to write.
    pub to: CellIdx,
}

/// The rows that a restoration writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TargetRows {
    /// Only such as no sequence used: until they are written, a clone of the memory before is as
    /// good as it was.
    #[default]
    Free,
    /// Some of the sequences that it replaced.
    InUse,
}

/// The result of a restoration, and the work that is left.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use = "the backend has to write these rows before it does anything else with them"]
pub struct Restoration {
    /// Tokens that sequences were given; a token of two sequences counts twice.
    pub n_tokens: u32,
    /// Rows of attention layers that the backend must write.
    pub row_writes: Vec<RowWrite>,
    /// Rows of recurrent layers that the backend must write.
    pub state_writes: Vec<StateWrite>,
    /// The former use of the rows.
    pub rows_taken: TargetRows,
}

impl Restoration {
    /// The sum of two parts' restorations; each part holds the same tokens or fewer.
    pub fn and(mut self, other: Self) -> Self {
        self.n_tokens = self.n_tokens.max(other.n_tokens);
        self.row_writes.extend(other.row_writes);
        self.state_writes.extend(other.state_writes);
        if other.rows_taken == TargetRows::InUse {
            self.rows_taken = TargetRows::InUse;
        }
        self
    }
}

/// A saved token and the row that it had.
#[derive(Clone)]
struct Token {
    row: CellIdx,
    cell: Cell,
}

/// The tokens for one stream.
#[derive(Default)]
struct Share {
    tokens: Vec<Token>,
    forgotten: Vec<(SeqId, PosSet)>,
}

/// A restoration whose cells were found.
pub(super) struct PlannedRestore {
    /// The sequences that lose what they have.
    replaced: SeqSet,
    /// By number of the stream: what it is given, and the cells for it, in the same order.
    shares: Vec<(usize, Share, Vec<u32>)>,
    restored: Restoration,
}

/// Finds cells for what was saved. Changes nothing, and copies nothing but the streams of sequences
/// that have tokens to lose.
pub(super) fn plan(
    memory: &Unified,
    snapshot: &Snapshot,
    into: RestoreInto,
) -> Result<PlannedRestore, Refusal> {
    let config = *memory.config();
    let replaced = into.replaced(snapshot, config.n_seqs)?;
    let saved = snapshot.part(config.part).ok_or(Refusal::NoPart {
        part: config.part,
        window: config.window,
    })?;
    if saved.window != config.window {
        return Err(Refusal::OtherWindow {
            part: config.part,
            saved: saved.window,
            here: config.window,
        });
    }
    if let RestoreInto::Behind { from, to } = into {
        check_behind(memory, saved, from, to)?;
    }
    let mut planned = PlannedRestore {
        replaced,
        shares: Vec::new(),
        restored: Restoration::default(),
    };
    for (number, share) in shares(saved, into, memory) {
        let mut share = share;
        let Some(before) = memory.streams.get(number) else {
            continue;
        };
        let mut after = Cow::Borrowed(before);
        for seq in &planned.replaced {
            if before.cells.positions(seq).is_some() {
                after.to_mut().remove(seq, PosRange::ALL);
            }
        }
        let n_cells = before.cells.n_cells();
        let n_free = after.cells.free().n_free();
        if share.tokens.len() > n_free as usize {
            share.forget_hidden(config.window);
        }
        let n_wanted = u32::try_from(share.tokens.len()).unwrap_or(u32::MAX);
        if n_wanted > n_free {
            return Err(Refusal::NoRoom(NoRoom {
                needed_for: NeededFor::Restore,
                part: config.part,
                stream: StreamIdx(number as u32),
                window: config.window,
                n_wanted,
                n_free,
                n_recyclable: 0,
                n_cells,
                n_free_elsewhere: 0,
            }));
        }
        let cells = free_cells(before.cells.free(), after.cells.free(), n_wanted);
        let restored = &mut planned.restored;
        for (token, &i) in share.tokens.iter().zip(&cells) {
            restored.n_tokens += token.cell.seqs.len() as u32;
            if !before.cells.free().is_free(i) {
                restored.rows_taken = TargetRows::InUse;
            }
            add_row_write(
                &mut restored.row_writes,
                RowWrite {
                    part: config.part,
                    from: token.row,
                    to: before.cells.first_cell().offset(i),
                    len: 1,
                },
            );
        }
        planned.shares.push((number, share, cells));
    }
    Ok(planned)
}

/// Does what was planned for this memory as it is.
pub(super) fn carry_out(memory: &mut Unified, planned: PlannedRestore) -> Restoration {
    for seq in &planned.replaced {
        let stream = memory.stream_of(seq);
        if let Some(stream) = memory.streams.get_mut(stream) {
            stream.remove(seq, PosRange::ALL);
        }
    }
    for (number, share, cells) in planned.shares {
        let Some(stream) = memory.streams.get_mut(number) else {
            continue;
        };
        for (token, i) in share.tokens.iter().zip(cells) {
            let to = stream.cells.first_cell().offset(i);
            stream.cells.insert(to, &token.cell);
            stream.set_head_behind(to);
        }
        for (seq, forgotten) in share.forgotten {
            stream.set_forgotten(seq, forgotten);
        }
    }
    planned.restored
}

/// Checks that saved tokens can follow those of a sequence: every token sees all before it, and the
/// first saved one has the next position.
fn check_behind(
    memory: &Unified,
    saved: &PartSnapshot,
    from: SeqId,
    to: SeqId,
) -> Result<(), Refusal> {
    if saved.window != Window::Full {
        let operation = "restore a range of a sequence: only full attention can";
        return Err(Refusal::Unsupported { operation });
    }
    let next = memory.next_pos(to);
    match saved.positions(from) {
        Some(positions) if positions.first != next => Err(Refusal::NotBehind {
            seq: to,
            next,
            first: positions.first,
        }),
        _ => Ok(()),
    }
}

/// The tokens of a saved part for the sequences of each stream, by number of the stream.
fn shares(saved: &PartSnapshot, into: RestoreInto, memory: &Unified) -> BTreeMap<usize, Share> {
    let mut shares: BTreeMap<usize, Share> = BTreeMap::new();
    for &CellRecord { row, ref cell } in &saved.cells {
        let seqs = into.map(&cell.seqs);
        let mut give = |stream, seqs| {
            let cell = Cell { seqs, ..*cell };
            let share = shares.entry(stream).or_default();
            share.tokens.push(Token { row, cell });
        };
        match (memory.config().streams, seqs.first()) {
            (_, None) => {}
            (Streams::Shared, Some(_)) => give(0, seqs),
            (Streams::PerSequence, Some(_)) => {
                for seq in &seqs {
                    give(memory.stream_of(seq), SeqSet::one(seq));
                }
            }
        }
    }
    for (seq, ranges) in &saved.forgotten {
        if let Some(seq) = into.seq(*seq) {
            let mut set = PosSet::default();
            ranges.iter().for_each(|range| set.insert(*range));
            let share = shares.entry(memory.stream_of(seq)).or_default();
            share.forgotten.push((seq, set));
        }
    }
    shares
}

impl Share {
    /// Leaves out the tokens that a window hides from every token to come, as a memory would that
    /// needs their cells.
    fn forget_hidden(&mut self, window: Window) {
        if window.width().is_none() {
            return;
        }
        let mut ends: BTreeMap<SeqId, Pos> = BTreeMap::new();
        for token in &self.tokens {
            for seq in &token.cell.seqs {
                let last = ends.entry(seq).or_insert(token.cell.pos);
                *last = token.cell.pos.max(*last);
            }
        }
        let mut forgotten: BTreeMap<SeqId, PosSet> =
            std::mem::take(&mut self.forgotten).into_iter().collect();
        for Token { cell, .. } in &mut self.tokens {
            // A token at the last position again sees furthest back.
            let is_hidden = |seq: &SeqId| {
                let last = ends.get(seq);
                last.is_some_and(|&last| window.is_expired(cell.pos, last))
            };
            let hidden: Vec<SeqId> = cell.seqs.iter().filter(is_hidden).collect();
            for seq in hidden {
                cell.seqs.remove(seq);
                let forgotten = forgotten.entry(seq).or_default();
                forgotten.insert(PosRange::new(cell.pos, cell.pos));
            }
        }
        self.forgotten = forgotten.into_iter().collect();
        self.tokens.retain(|token| !token.cell.seqs.is_empty());
    }
}

/// The first `n` cells that will be free, those first that are free already.
fn free_cells(now: &FreeMap, then: &FreeMap, n: u32) -> Vec<u32> {
    let all = |map: &FreeMap, from| map.next_free(from);
    let free_now = std::iter::successors(all(now, 0), |&i| all(now, i + 1));
    let freed = std::iter::successors(all(then, 0), |&i| all(then, i + 1));
    let freed = freed.filter(|&i| !now.is_free(i));
    free_now.chain(freed).take(n as usize).collect()
}

/// Adds the write of one row of a part, joined to the one before where it continues that.
fn add_row_write(writes: &mut Vec<RowWrite>, write: RowWrite) {
    match writes.last_mut() {
        Some(w) if w.from.offset(w.len) == write.from && w.to.offset(w.len) == write.to => {
            w.len += 1;
        }
        _ => writes.push(write),
    }
}

/// The contents of a memory of these sequences, in the order in which it is read best later: by
/// sequence and position.
pub(super) fn snapshot(memory: &Unified, seqs: &SeqSet) -> PartSnapshot {
    let mut cells = Vec::new();
    let mut forgotten = Vec::new();
    let mut met = SeqSet::EMPTY;
    for seq in seqs {
        for (row, _) in memory.runs(seq).iter().flat_map(|run| run.iter()) {
            let Some(cell) = memory.cell(row) else {
                continue;
            };
            // A token of several sequences comes with the first of them.
            if !cell.seqs.intersects(&met) {
                let seqs = cell.seqs.intersection(seqs);
                cells.push(CellRecord {
                    row,
                    cell: Cell { seqs, ..cell },
                });
            }
        }
        met.insert(seq);
        let stream = memory.streams.get(memory.stream_of(seq));
        if let Some(set) = stream.and_then(|s| s.forgotten(seq))
            && !set.ranges().is_empty()
        {
            forgotten.push((seq, set.ranges().to_vec()));
        }
    }
    PartSnapshot {
        part: memory.config().part,
        window: memory.config().window,
        cells,
        forgotten,
    }
}
