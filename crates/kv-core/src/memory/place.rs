//! Where the ubatches of a plan go, without changing the memory.
//!
//! Later ubatches see the memory as the earlier ones will leave it. Invariant: committing the steps
//! in order finds every cell as it was planned. Knows nothing of rollbacks and edits.

use super::Memory as _;
use super::refusal::{NeededFor, NoRoom, Refusal, WindowForgotten};
use super::stream::Stream;
use super::unified::{Streams, Unified};
use crate::batch::{UBatch, UBatchRow};
use crate::cells::FreeMap;
use crate::ids::{CellIdx, Pos, SeqId, StreamIdx};
use crate::seq_set::SeqSet;
use crate::slot::{Shortage, SlotSearch};
use crate::window::Window;

/// Finds cells for ubatches that are committed one after the other: the cell of each token, by
/// ubatch.
pub(super) fn place(memory: &Unified, ubatches: &[UBatch]) -> Result<Vec<Vec<CellIdx>>, Refusal> {
    let mut shadows: Vec<Shadow<'_>> = memory.streams.iter().map(Shadow::of).collect();
    let repeating = repeating(memory, ubatches)?;
    let mut slots = Vec::with_capacity(ubatches.len());
    let mut slot = Vec::new();
    for (step, ubatch) in ubatches.iter().enumerate() {
        let rows = rows_by_stream(memory, ubatch)?;
        let ubatch_rows: Vec<UBatchRow> = ubatch.rows().collect();
        let mut cells = vec![CellIdx(0); rows.len()];
        for group in rows.chunk_by(|a, b| a.0 == b.0) {
            let Some(&(stream, _)) = group.first() else {
                continue;
            };
            slot.clear();
            // Of who has no more tokens here, an image may go on at its position in a later batch.
            let has_more = |seq: &SeqId| later(ubatches, step, *seq);
            let images = shadows[stream].stream().in_images();
            let images = images.iter().filter(|seq| !has_more(seq)).collect();
            let again = repeating[step].union(images);
            let search = shadows[stream]
                .search(memory.config().window)
                .with_repeating(again);
            search
                .find(group.len() as u32, &mut slot)
                .map_err(|shortage| {
                    let others = shadows.iter().enumerate().filter(|(s, _)| *s != stream);
                    let n_free_elsewhere = others.map(|(_, shadow)| shadow.n_free()).sum();
                    no_room(memory, step, (stream, n_free_elsewhere), shortage)
                })?;
            for (&(_, row), &cell) in group.iter().zip(&slot) {
                cells[row as usize] = cell;
            }
            if step + 1 < ubatches.len() {
                let rows = group.iter().map(|&(_, row)| ubatch_rows[row as usize]);
                shadows[stream].put(memory.config().window, slot.iter().copied().zip(rows));
            }
        }
        slots.push(cells);
    }
    Ok(slots)
}

/// Row numbers of `ubatch` with their streams, by stream, else in order.
fn rows_by_stream(memory: &Unified, ubatch: &UBatch) -> Result<Vec<(usize, u32)>, Refusal> {
    let mut rows = Vec::with_capacity(ubatch.entries.len());
    for (number, row) in (0u32..).zip(ubatch.rows()) {
        if let Some(beyond) = row.seqs.iter().find(|seq| seq.0 >= memory.config().n_seqs) {
            memory.check_seq(beyond)?;
        }
        if memory.config().streams == Streams::PerSequence && row.seqs.len() > 1 {
            let entry = ubatch
                .entries
                .get(number as usize)
                .copied()
                .unwrap_or(number);
            return Err(Refusal::CoupledStreams {
                entry,
                set: row.seqs,
            });
        }
        rows.push((memory.stream_of(row.first_seq), number));
    }
    rows.sort_unstable();
    Ok(rows)
}

/// For each ubatch the sequences whose next token, in this or a later one, is at the position
/// of their last one in an earlier one, or in the memory.
fn repeating(memory: &Unified, ubatches: &[UBatch]) -> Result<Vec<SeqSet>, WindowForgotten> {
    let mut repeating = vec![SeqSet::EMPTY; ubatches.len()];
    if memory.config().window == Window::Full {
        return Ok(repeating);
    }
    // By sequence: its last position, and how many ubatches there are up to it.
    let mut latest: Vec<Option<(usize, Pos)>> = (0..memory.config().n_seqs)
        .map(|seq| Some((0, memory.positions(SeqId(seq))?.last)))
        .collect();
    for (step, ubatch) in ubatches.iter().enumerate() {
        for row in ubatch.rows() {
            for seq in row.seqs {
                let Some(latest) = latest.get_mut(seq.as_usize()) else {
                    continue;
                };
                if let Some((n_before, pos)) = *latest
                    && pos == row.pos
                {
                    if n_before == 0 {
                        check_repeat(memory, seq, pos)?;
                    }
                    let waiting = repeating.iter_mut().take(step + 1).skip(n_before);
                    waiting.for_each(|seqs| {
                        seqs.insert(seq);
                    });
                }
                *latest = Some((step + 1, row.pos));
            }
        }
    }
    Ok(repeating)
}

/// Whether a sequence has tokens in ubatch `step` or a later one.
fn later(ubatches: &[UBatch], step: usize, seq: SeqId) -> bool {
    let rows = ubatches.iter().skip(step).flat_map(UBatch::rows);
    rows.into_iter().any(|row| row.seqs.contains(seq))
}

/// Whether a token at the last position of a sequence misses nothing that its window reaches.
fn check_repeat(memory: &Unified, seq: SeqId, last: Pos) -> Result<(), WindowForgotten> {
    let window = memory.config().window;
    let needed_from = window.oldest_key(last);
    let stream = memory.streams.get(memory.stream_of(seq));
    match stream.and_then(|stream| stream.forgotten(seq)?.last()) {
        Some(forgotten_to) if forgotten_to >= needed_from => Err(WindowForgotten {
            seq,
            window,
            next: last,
            needed_from,
            forgotten_to,
        }),
        _ => Ok(()),
    }
}

fn no_room(
    memory: &Unified,
    ubatch: usize,
    (stream, n_free_elsewhere): (usize, u32),
    shortage: Shortage,
) -> NoRoom {
    let Shortage {
        n_wanted,
        n_free,
        n_recyclable,
        n_cells,
    } = shortage;
    NoRoom {
        needed_for: NeededFor::Ubatch(ubatch),
        part: memory.config().part,
        stream: StreamIdx(stream as u32),
        window: memory.config().window,
        n_wanted,
        n_free,
        n_recyclable,
        n_cells,
        n_free_elsewhere,
    }
}

/// A stream as it will be after some steps of a plan; shares what it can with the real one.
struct Shadow<'a> {
    stream: &'a Stream,
    changed: Changed,
}

enum Changed {
    Not,
    /// With a full window only the free cells matter.
    Free {
        free: FreeMap,
        head: u32,
    },
    All(Box<Stream>),
}

impl<'a> Shadow<'a> {
    fn of(stream: &'a Stream) -> Self {
        Self {
            stream,
            changed: Changed::Not,
        }
    }

    /// The stream, but for free cells: those are in `changed` where the window is full.
    fn stream(&self) -> &Stream {
        match &self.changed {
            Changed::All(stream) => stream,
            Changed::Not | Changed::Free { .. } => self.stream,
        }
    }

    fn n_free(&self) -> u32 {
        match &self.changed {
            Changed::Not => self.stream.cells.free().n_free(),
            Changed::Free { free, .. } => free.n_free(),
            Changed::All(stream) => stream.cells.free().n_free(),
        }
    }

    fn search(&self, window: Window) -> SlotSearch<'_> {
        match &self.changed {
            Changed::Not => SlotSearch::new(&self.stream.cells, self.stream.head, window),
            Changed::Free { free, head } => {
                SlotSearch::in_free(free, self.stream.cells.first_cell(), *head)
            }
            Changed::All(stream) => SlotSearch::new(&stream.cells, stream.head, window),
        }
    }

    fn put(&mut self, window: Window, rows: impl Iterator<Item = (CellIdx, UBatchRow)>) {
        if let Changed::Not = self.changed {
            self.changed = match window {
                Window::Full => {
                    let free = self.stream.cells.free().clone();
                    Changed::Free {
                        free,
                        head: self.stream.head,
                    }
                }
                _ => Changed::All(Box::new(self.stream.clone())),
            };
        }
        match &mut self.changed {
            Changed::Not => {}
            Changed::Free { free, head } => {
                for (cell, _) in rows {
                    let i = cell.0 - self.stream.cells.first_cell().0;
                    free.take(i);
                    *head = i + 1;
                }
            }
            Changed::All(stream) => {
                stream.put(rows);
            }
        }
    }
}
