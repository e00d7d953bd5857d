//! [`Repacked`]: weight rows in the order in which one token meets them, made once from those of the file.
//!
//! Rows that lie side by side are read from beginning to end, and go to the lanes of a register without being turned.
//! They take as many bytes as before (rounded to lines), or fewer where that loses nothing. The first run of a program reads weights as they are stored, so
//! that nobody waits for the others; each run after it begins by repacking a few more of them, from copies of small pieces
//! of the file, whose pages leave the process, so that a model is in memory about once. Where there is no room for that,
//! weights stay as they are stored.
//!
//! Of floats it depends on their values whether they can be repacked, and how: the first and the last rows of a weight say
//! what is tried. Pieces that then cannot are read as they are stored.
//!
//! Invariant: which rows are repacked when changes no bit of a result. Knows neither formats nor instructions
//! ([`RepackFns`] does), nor steps.

mod form;
mod refused;

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use kv_core::backend::BackendError;
use kv_core::block::{BlockFormat, dequantize};
use kv_core::graph::{Graph, Op};
use kv_core::weights::Weight;

use self::form::Form;
use self::refused::Refused;
use crate::growing::Growing;
use crate::kernels::{Arrangement, RepackFns, WeightRows};
use crate::memory;
use crate::storage::AlignedBytes;
use crate::team::Lead;

/// Whether weights are brought into an order that suits the processor, a few in each run after the first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum RepackChoice {
    /// Where there are kernels for it, and memory.
    #[default]
    Auto,
    /// Weights are always read as they lie in their file.
    Never,
}

/// How far the repacking of weights has come, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Repacking {
    /// Those that are multiplied as they were repacked.
    pub done: usize,
    /// Those and all others that runs will repack.
    pub all: usize,
}

/// Runs that it takes to repack a large model, so that each takes about a quarter longer: a byte takes some fifteen times
/// as long to be repacked as to be read, and short answers never get that time back.
const RUNS: usize = 64;
/// Bytes that are worth doing in a run.
const LEAST_PER_RUN: usize = 16 << 20;

/// No block is larger.
const MOST_BLOCK_BYTES: usize = 256;

/// What is read as it is stored is copied to large pages from so many bytes on: fewer fit in any buffer of addresses.
const WORTH_LARGE_PAGES: usize = 8 << 20;

/// Rows in memory of their own, in the best order, shared by whoever multiplies with some of them.
#[derive(Clone)]
pub(crate) struct Repacked {
    /// What is repacked together, as far as it is.
    memory: Arc<Growing>,
    /// Where the weight's rows begin in it, or will.
    start: usize,
    refused: Arc<Refused>,
    /// Which of these rows these are.
    rows: Range<usize>,
    form: Form,
}

impl Repacked {
    /// How many rows these are; the weight may have a few after them, which are read as they are stored.
    pub(crate) fn n_rows(&self) -> usize {
        self.rows.len()
    }

    /// Those of some of the weight's rows that are among these, or `None` where there are none, or that would part rows that
    /// lie side by side.
    pub(crate) fn part(&self, rows: Range<usize>) -> Option<Self> {
        let rows = rows.start..rows.end.min(self.n_rows());
        Some(Self {
            memory: Arc::clone(&self.memory),
            refused: Arc::clone(&self.refused),
            rows: self.range(rows).filter(|rows| !rows.is_empty())?,
            ..*self
        })
    }

    /// The same as what is multiplied, of the weight that these rows are of; also `None` where they are not repacked yet, or
    /// cannot be.
    pub(crate) fn rows(&self, weight: &Weight, rows: Range<usize>) -> Option<WeightRows<'_>> {
        let (first, row_bytes) = (rows.start, self.form.row_bytes);
        let range = self.range(rows)?;
        let at = |row: usize| self.start + row * row_bytes;
        let bytes = self.memory.get(at(range.start)..at(range.end))?;
        // Asked after what is written is known: what was refused before that is seen now.
        if self.refused.has_some(&range) {
            return None;
        }
        Some(WeightRows {
            format: weight.format(),
            arrangement: self.form.arrangement(),
            bytes,
            row_bytes,
            first,
            n_columns: weight.n_columns(),
        })
    }

    /// Which of the weight's rows these are, under the same conditions.
    fn range(&self, rows: Range<usize>) -> Option<Range<usize>> {
        let start = self.rows.start.checked_add(rows.start)?;
        let end = self.rows.start.checked_add(rows.end)?;
        let is_whole = |row: usize| row.is_multiple_of(self.form.at_once());
        (end <= self.rows.end && is_whole(start) && is_whole(end)).then_some(start..end)
    }

    /// The values of row `row`, if there is such a row.
    pub(crate) fn dequantize_row(
        &self,
        weight: &Weight,
        row: usize,
        out: &mut [f32],
    ) -> Option<()> {
        let (format, at_once) = (weight.format(), self.form.at_once());
        let first = row / at_once * at_once;
        let rows = self.rows(weight, first..first + at_once)?;
        let Some(fns) = self.form.fns else {
            dequantize(format, rows.bytes, out);
            return Some(());
        };
        let mut block = [0; MOST_BLOCK_BYTES];
        let block_len = (fns.block_len)(format);
        let block = block.get_mut(..format.row_bytes(block_len)?)?;
        for (b, values) in out.chunks_exact_mut(block_len).enumerate() {
            (fns.stored_block)(&rows, (row - first, b), block);
            dequantize(format, block, values);
        }
        Some(())
    }
}

impl std::fmt::Debug for Repacked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Repacked({:?} of {} bytes)",
            self.rows, self.form.row_bytes
        )
    }
}

/// Rows that a task repacks.
struct Piece {
    weight: Arc<Weight>,
    rows: Range<usize>,
    form: Form,
    refused: Arc<Refused>,
    /// Bytes that they take, with those that fill the last line of a weight.
    n_bytes: usize,
}

impl Piece {
    /// All of a weight's.
    fn all_of(
        weight: &Arc<Weight>,
        form: Form,
        refused: &Arc<Refused>,
    ) -> impl Iterator<Item = Self> {
        let (refused, step) = (Arc::clone(refused), form.rows_of_piece());
        let (weight, n_rows, n_bytes) = (Arc::clone(weight), form.n_rows, form.n_bytes());
        (0..n_rows).step_by(step).map(move |first| {
            let rows = first..n_rows.min(first + step);
            let end = match rows.end == n_rows {
                true => n_bytes,
                false => rows.end * form.row_bytes,
            };
            Self {
                weight: Arc::clone(&weight),
                n_bytes: end - rows.start * form.row_bytes,
                rows,
                form,
                refused: Arc::clone(&refused),
            }
        })
    }

    /// Puts the rows down, by way of a copy of them if they have to be brought into another order. Nobody will read the
    /// stored ones again, unless it turns out that these cannot be repacked.
    fn put(&self, to: &mut [u8], copy: &mut Vec<u8>) -> Result<(), BackendError> {
        let (weight, rows) = (&self.weight, &self.rows);
        let row_bytes = weight.bytes().len() / weight.n_rows().max(1);
        let to = &mut to[..rows.len() * self.form.row_bytes];
        let stored = rows.start * row_bytes..rows.end * row_bytes;
        let is_read = match self.form.fns {
            None => weight.bytes().copy(stored.start, to),
            Some(fns) => {
                copy.resize(stored.len(), 0);
                let is_read = weight.bytes().copy(stored.start, copy);
                let rows = WeightRows {
                    format: weight.format(),
                    arrangement: Arrangement::Stored,
                    bytes: copy,
                    row_bytes,
                    first: 0,
                    n_columns: weight.n_columns(),
                };
                if is_read && !(fns.repack)(&rows, to) {
                    self.refused.add(self.rows.start);
                    return Ok(());
                }
                is_read
            }
        };
        if !is_read {
            let name = weight.name();
            return Err(BackendError::Device {
                backend: "cpu",
                reason: format!("rows {rows:?} of '{name}' could not be read from its file"),
            });
        }
        weight.bytes().release(stored);
        Ok(())
    }
}

/// Weights that are repacked together, as far as they are not yet.
struct Waiting {
    memory: Arc<Growing>,
    /// Bytes that a run repacks at most.
    per_run: usize,
    pieces: VecDeque<Piece>,
}

impl Waiting {
    /// Repacks what one run does.
    fn go_on(&mut self, lead: &mut Lead<'_>) -> Result<(), BackendError> {
        let mut n_bytes = 0;
        let n_pieces = self.pieces.iter().take_while(|piece| {
            n_bytes += piece.n_bytes;
            n_bytes <= self.per_run.max(piece.n_bytes)
        });
        let n_pieces = n_pieces.count();
        let pieces: Vec<Piece> = self.pieces.drain(..n_pieces).collect();
        let n_bytes = pieces.iter().map(|piece| piece.n_bytes).sum();
        self.memory.append(n_bytes, |mut to| {
            let mut parts = Vec::with_capacity(n_pieces);
            for piece in &pieces {
                let (part, rest) = to.split_at_mut(piece.n_bytes);
                parts.push((piece, part));
                to = rest;
            }
            let parts = Mutex::new(parts.into_iter());
            let copies = (0..lead.n_threads()).map(|_| Mutex::new(Vec::new()));
            let copies: Vec<_> = copies.collect();
            lead.each(n_pieces, &|thread, _| {
                let next = parts.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some((piece, to)) = next else {
                    return Ok(());
                };
                let copy = copies[thread].lock();
                piece.put(to, &mut copy.unwrap_or_else(PoisonError::into_inner))
            })
        })
    }
}

/// What has been repacked of a model's weights, and what is to be.
#[derive(Default)]
pub(crate) struct RepackedWeights {
    by_name: Mutex<HashMap<String, Repacked>>,
    waiting: Mutex<VecDeque<Waiting>>,
    has_run: AtomicBool,
}

impl RepackedWeights {
    /// The rows of this weight that are repacked or will be, if there are any.
    pub(crate) fn get(&self, name: &str) -> Option<Repacked> {
        let all = self.by_name.lock().unwrap_or_else(PoisonError::into_inner);
        all.get(name).cloned()
    }

    /// How far it has come.
    pub(crate) fn progress(&self) -> Repacking {
        let all = self.by_name.lock().unwrap_or_else(PoisonError::into_inner);
        let mut progress = Repacking::default();
        for repacked in all.values() {
            let (start, row_bytes) = (repacked.start, repacked.form.row_bytes);
            let n_bytes = repacked.rows.len() * row_bytes;
            let written = repacked.memory.written().clamp(start, start + n_bytes) - start;
            let refused = repacked.refused.n_rows(&repacked.rows) * row_bytes;
            progress.done += written.saturating_sub(refused);
            progress.all += n_bytes - refused;
        }
        progress
    }

    /// Takes a place for those of a graph's weights that have none, if there is room for them; else leaves all of these as
    /// they are.
    pub(crate) fn prepare(
        &self,
        graph: &Graph,
        get: impl Fn(&str) -> Option<Weight>,
        fns: impl Fn(BlockFormat) -> &'static [RepackFns],
    ) {
        let mut all = self.by_name.lock().unwrap_or_else(PoisonError::into_inner);
        let mut weights: Vec<(Arc<Weight>, Form)> = Vec::new();
        for name in graph.nodes().iter().filter_map(|n| matrix_of(&n.op)) {
            let is_known = all.contains_key(name) || weights.iter().any(|(w, _)| w.name() == name);
            let weight = Some(name).filter(|_| !is_known).and_then(&get);
            let form =
                weight.and_then(|w| Form::of(&w, fns(w.format())).map(|form| (Arc::new(w), form)));
            weights.extend(form);
        }
        let n_bytes =
            |weights: &[(Arc<Weight>, Form)]| weights.iter().map(|(_, f)| f.n_bytes()).sum();
        if n_bytes(&weights) < WORTH_LARGE_PAGES || !HAS_LARGE_PAGES {
            weights.retain(|(_, form)| form.fns.is_some());
        }
        let Some(memory) = room_for(n_bytes(&weights)) else {
            return;
        };
        let (memory, mut start) = (Arc::new(memory), 0);
        let mut pieces = VecDeque::new();
        for (weight, form) in weights {
            let refused = Arc::new(Refused::none_of(&form));
            pieces.extend(Piece::all_of(&weight, form, &refused));
            let repacked = Repacked {
                memory: Arc::clone(&memory),
                start,
                refused,
                rows: 0..form.n_rows,
                form,
            };
            start += form.n_bytes();
            all.insert(weight.name().to_owned(), repacked);
        }
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.push_back(Waiting {
            memory,
            per_run: (start / RUNS).max(LEAST_PER_RUN),
            pieces,
        });
    }

    /// What a run begins with: repacks some rows, unless it is the first run.
    ///
    /// # Errors
    /// As [`RepackedWeights::go_on`].
    pub(crate) fn begin_run(&self, lead: &mut Lead<'_>) -> Result<(), BackendError> {
        if self.has_run.swap(true, Ordering::Relaxed) {
            self.go_on(lead)?;
        }
        Ok(())
    }

    /// Repacks some of the rows that have a place; says whether there are others.
    ///
    /// # Errors
    /// [`BackendError::Device`] where a thread failed, or the file can no longer be read: what has not been repacked then
    /// stays as it is stored.
    pub(crate) fn go_on(&self, lead: &mut Lead<'_>) -> Result<bool, BackendError> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(mut first) = waiting.pop_front() else {
            return Ok(false);
        };
        if memory::has_room_for(first.per_run) {
            first.go_on(lead)?;
        } else {
            let n_bytes = first.memory.written();
            tracing::info!(n_bytes, "no room left: other weights are read as stored");
            first.pieces.clear();
        }
        if first.pieces.is_empty() {
            let n_bytes = first.memory.written();
            tracing::debug!(n_bytes, "weights are repacked");
        } else {
            waiting.push_front(first);
        }
        Ok(!waiting.is_empty())
    }
}

/// Whether the system may be asked for large pages.
const HAS_LARGE_PAGES: bool = cfg!(target_os = "linux");

/// Memory for so many bytes; none where there is no room, or nothing wanted.
fn room_for(n_bytes: usize) -> Option<Growing> {
    if n_bytes == 0 {
        return None;
    }
    if !memory::has_room_for(n_bytes.saturating_add(AlignedBytes::promised())) {
        tracing::info!(
            n_bytes,
            "no room to repack weights: they are read as stored"
        );
        return None;
    }
    Growing::of(n_bytes)
}

/// The weight that a node multiplies with.
fn matrix_of(op: &Op) -> Option<&str> {
    match op {
        Op::Linear { weight, .. } | Op::ExpertLinear { weight, .. } => Some(weight),
        _ => None,
    }
}
