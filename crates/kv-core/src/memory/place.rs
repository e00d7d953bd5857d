//! Where the ubatches of a plan go, without changing the memory.
//!
//! Later ubatches see the memory as the earlier ones will leave it. Invariant: committing the steps
//! in order finds every cell as it was planned. Knows nothing of rollbacks and edits.

use std::collections::{BTreeMap, HashMap};

use super::Memory as _;
use super::refusal::{NeededFor, NoRoom, Refusal, WindowForgotten};
use super::stream::Stream;
use super::unified::{Streams, Unified};
use crate::batch::UBatch;
use crate::ids::{CellIdx, Pos, SeqId, StreamIdx};
use crate::seq_set::SeqSet;
use crate::slot::{Shortage, SlotSearch};
use crate::window::Window;

/// Finds cells for ubatches that are committed one after the other: the cell of each token, by
/// ubatch.
pub(super) fn place(memory: &Unified, ubatches: &[UBatch]) -> Result<Vec<Vec<CellIdx>>, Refusal> {
    let mut shadows: BTreeMap<usize, Shadow<'_>> = BTreeMap::new();
    let repeating = repeating(memory, ubatches)?;
    let mut slots = Vec::with_capacity(ubatches.len());
    let mut slot = Vec::new();
    for (step, ubatch) in ubatches.iter().enumerate() {
        let rows = rows_by_stream(memory, ubatch)?;
        let mut cells = vec![CellIdx(0); rows.len()];
        for group in rows.chunk_by(|a, b| a.stream == b.stream) {
            let Some(&StreamRow { stream: number, .. }) = group.first() else {
                continue;
            };
            let Some(stream) = memory.streams.get(number) else {
                continue;
            };
            slot.clear();
            let window = memory.config().window;
            let shadow = shadows.entry(number).or_insert_with(|| Shadow::of(stream));
            let found = shadow.find(group, window, &mut slot, |images| {
                // A sequence that has no more tokens in this plan may go on with an image at its
                // position.
                let has_more = |seq: &SeqId| later(ubatches, step, *seq);
                let images = images.iter().filter(|seq| !has_more(seq)).collect();
                repeating[step].union(&images)
            });
            if let Err(shortage) = found {
                return Err(no_room(
                    memory,
                    &shadows,
                    shortage,
                    StreamStep {
                        step,
                        stream: number,
                    },
                )
                .into());
            }
            if step + 1 < ubatches.len() {
                shadow.insert(window, ubatch, group, &slot);
            }
            for (row, &cell) in group.iter().zip(&slot) {
                cells[row.number as usize] = cell;
            }
        }
        slots.push(cells);
    }
    Ok(slots)
}

/// A row of a ubatch and the stream that its token goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct StreamRow {
    stream: usize,
    number: u32,
    first_seq: SeqId,
}

/// The rows of `ubatch` by stream, else in order.
fn rows_by_stream(memory: &Unified, ubatch: &UBatch) -> Result<Vec<StreamRow>, Refusal> {
    let mut rows = Vec::with_capacity(ubatch.entries.len());
    let n_seqs = memory.config().n_seqs;
    let sequences = ubatch.seqs.iter().zip(&ubatch.first_seqs);
    for (number, (seqs, &first_seq)) in (0u32..).zip(sequences) {
        if let Some(beyond) = seqs.iter().find(|seq| seq.0 >= n_seqs) {
            memory.check_seq(beyond)?;
        }
        if memory.config().streams == Streams::PerSequence && seqs.len() > 1 {
            let entry = ubatch
                .entries
                .get(number as usize)
                .copied()
                .unwrap_or(number);
            return Err(Refusal::CoupledStreams {
                entry,
                set: seqs.clone(),
            });
        }
        rows.push(StreamRow {
            stream: memory.stream_of(first_seq),
            number,
            first_seq,
        });
    }
    rows.sort_unstable();
    Ok(rows)
}

/// For each ubatch the sequences whose next token, in this or a later one, is at the position
/// of their last one in an earlier one, or in the memory.
fn repeating(memory: &Unified, ubatches: &[UBatch]) -> Result<Vec<SeqSet>, WindowForgotten> {
    let mut repeating = vec![SeqSet::EMPTY; ubatches.len()];
    if memory.config().window.width().is_none() {
        return Ok(repeating);
    }
    // By sequence: its last position, and how many ubatches there are up to it.
    let mut latest: HashMap<SeqId, Option<(usize, Pos)>> = HashMap::new();
    for (step, ubatch) in ubatches.iter().enumerate() {
        for (seqs, &pos) in ubatch.seqs.iter().zip(&ubatch.positions) {
            let pos = Pos(pos);
            for seq in seqs {
                let latest = latest
                    .entry(seq)
                    .or_insert_with(|| Some((0, memory.positions(seq)?.last)));
                if let Some((n_before, last)) = *latest
                    && last == pos
                {
                    if n_before == 0 {
                        check_repeat(memory, seq, pos)?;
                    }
                    let waiting = repeating.iter_mut().take(step + 1).skip(n_before);
                    waiting.for_each(|seqs| {
                        seqs.insert(seq);
                    });
                }
                *latest = Some((step + 1, pos));
            }
        }
    }
    Ok(repeating)
}

/// True if a sequence has tokens in ubatch `step` or a later one.
fn later(ubatches: &[UBatch], step: usize, seq: SeqId) -> bool {
    let mut sets = ubatches.iter().skip(step).flat_map(|ubatch| &ubatch.seqs);
    sets.any(|seqs| seqs.contains(seq))
}

/// Checks that a token at the last position of a sequence misses nothing that its window reaches.
fn check_repeat(memory: &Unified, seq: SeqId, last: Pos) -> Result<(), WindowForgotten> {
    match memory.streams.get(memory.stream_of(seq)) {
        Some(stream) => stream.end(seq).check_at(last, seq, memory.config().window),
        None => Ok(()),
    }
}

/// Why ubatch `step` has no room in a stream.
fn no_room(
    memory: &Unified,
    shadows: &BTreeMap<usize, Shadow<'_>>,
    shortage: Shortage,
    StreamStep { step, stream }: StreamStep,
) -> NoRoom {
    let Shortage {
        n_wanted,
        n_free,
        n_recyclable,
        n_cells,
    } = shortage;
    let free_in = |number: usize, real: &Stream| match shadows.get(&number) {
        Some(shadow) => shadow.n_free(),
        None => real.cells.free().n_free(),
    };
    let streams = memory.streams.iter().enumerate();
    let others = streams.filter(|(number, _)| *number != stream);
    NoRoom {
        needed_for: NeededFor::Ubatch(step),
        part: memory.config().part,
        stream: StreamIdx(stream as u32),
        window: memory.config().window,
        n_wanted,
        n_free,
        n_recyclable,
        n_cells,
        n_free_elsewhere: others.map(|(number, real)| free_in(number, real)).sum(),
    }
}

/// A stream in a step of a plan.
struct StreamStep {
    step: usize,
    stream: usize,
}

/// A stream as it will be after some steps of a plan; shares what it can with the real one.
enum Shadow<'a> {
    /// As it is, but for the cells that the search has found. Without a window that hides old
    /// tokens that is all there is to know.
    Searched {
        stream: &'a Stream,
        search: SlotSearch<'a>,
    },
    /// Tokens were stored, which may have recycled others.
    Changed(Box<Stream>),
}

impl<'a> Shadow<'a> {
    fn of(stream: &'a Stream) -> Self {
        Self::Searched {
            stream,
            search: SlotSearch::new(&stream.cells, stream.head),
        }
    }

    fn n_free(&self) -> u32 {
        match self {
            Self::Searched { search, .. } => search.n_free(),
            Self::Changed(stream) => stream.cells.free().n_free(),
        }
    }

    /// Appends a cell for each of `rows` to `slot`. `repeating` gets the sequences that end in an
    /// image.
    fn find(
        &mut self,
        rows: &[StreamRow],
        window: Window,
        slot: &mut Vec<CellIdx>,
        repeating: impl FnOnce(SeqSet) -> SeqSet,
    ) -> Result<(), Shortage> {
        let seqs = rows.iter().map(|row| row.first_seq);
        match self {
            Self::Searched { search, .. } if window.width().is_none() => search.find(seqs, slot),
            Self::Searched { stream, .. } => {
                recycling_search(stream, window, repeating).find(seqs, slot)
            }
            Self::Changed(stream) => recycling_search(stream, window, repeating).find(seqs, slot),
        }
    }

    /// Stores the tokens of `rows` in the cells of `slot`.
    fn insert(&mut self, window: Window, ubatch: &UBatch, rows: &[StreamRow], slot: &[CellIdx]) {
        if window.width().is_none() {
            return;
        }
        if let Self::Searched { stream, .. } = self {
            *self = Self::Changed(Box::new(stream.clone()));
        }
        if let Self::Changed(stream) = self {
            let tokens = rows
                .iter()
                .zip(slot)
                .filter_map(|(row, &cell)| Some((cell, ubatch.row(row.number)?)));
            stream.insert(window, tokens);
        }
    }
}

fn recycling_search(
    stream: &Stream,
    window: Window,
    repeating: impl FnOnce(SeqSet) -> SeqSet,
) -> SlotSearch<'_> {
    let repeating = repeating(stream.in_images());
    SlotSearch::new(&stream.cells, stream.head).with_recycling(window, repeating)
}
