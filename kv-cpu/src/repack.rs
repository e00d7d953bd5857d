//! [`Repacked`]: weight rows in the order in which one token meets them, made once from those of the file.
//!
//! Rows that lie side by side are read from beginning to end, and go to the lanes of a register without being turned.
//! They take as many bytes as before (rounded to lines) and are made from copies of small pieces of the file, so a model is
//! in memory once. Where there is no room for them, weights are read as they are stored.
//!
//! Knows neither formats nor instructions ([`RepackFns`] does), nor steps.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use kv_core::backend::BackendError;
use kv_core::block::dequantize;
use kv_core::graph::{Graph, Op};
use kv_core::weights::Weight;
use memmap2::MmapMut;

use crate::kernels::{Arrangement, RepackFns, WeightRows};
use crate::memory;
use crate::storage::{AlignedBytes, LINE};
use crate::team::Lead;

/// Whether weights are brought into an order that suits the processor before they are first used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum RepackChoice {
    /// Where there are kernels for it, and memory.
    #[default]
    Auto,
    /// Weights are always read as they lie in their file.
    Never,
}

/// Bytes that a task repacks, about.
const BYTES_PER_TASK: usize = 256 << 10;

/// No block is larger.
const MOST_BLOCK_BYTES: usize = 256;

/// What is read as it is stored is copied to large pages from so many bytes on: fewer fit in any buffer of addresses.
const WORTH_LARGE_PAGES: usize = 8 << 20;

/// How the rows of a weight lie.
#[derive(Clone, Copy)]
struct Form {
    /// How they were repacked; not where they lie as they are stored.
    fns: Option<&'static RepackFns>,
    /// Bytes of a row, on average.
    row_bytes: usize,
}

impl Form {
    /// The best one for a weight, none where it is no matrix, nor one for each expert.
    fn of(weight: &Weight, fns: Option<&'static RepackFns>) -> Option<Self> {
        let (&[n_out, _] | &[_, n_out, _]) = weight.shape() else {
            return None;
        };
        let row_bytes = |fns: &RepackFns| (fns.row_bytes)(weight.format(), weight.n_columns());
        let fns = fns.filter(|f| n_out.is_multiple_of(f.at_once) && row_bytes(f) > 0);
        let row_bytes = match fns {
            Some(fns) => row_bytes(fns),
            None => weight.format().row_bytes(weight.n_columns())?,
        };
        (n_out > 0 && row_bytes > 0).then_some(Self { fns, row_bytes })
    }

    fn arrangement(&self) -> Arrangement {
        match self.fns {
            Some(_) => Arrangement::Repacked,
            None => Arrangement::Stored,
        }
    }

    /// Rows that cannot be parted.
    fn at_once(&self) -> usize {
        self.fns.map_or(1, |fns| fns.at_once)
    }

    /// Bytes of all rows, whole lines.
    fn n_bytes(&self, weight: &Weight) -> usize {
        (weight.n_rows() * self.row_bytes).next_multiple_of(LINE)
    }
}

/// Rows in memory of their own, in the best order, shared by whoever multiplies with some of them.
#[derive(Clone)]
pub(crate) struct Repacked {
    /// All that was repacked together.
    map: Arc<MmapMut>,
    /// Where the weight's rows begin in it.
    start: usize,
    /// Which of these rows these are.
    rows: Range<usize>,
    form: Form,
}

impl Repacked {
    /// Some of these rows, or `None` where there are no such rows, or that would part rows that lie side by side.
    pub(crate) fn part(&self, rows: Range<usize>) -> Option<Self> {
        Some(Self {
            map: Arc::clone(&self.map),
            rows: self.range(rows)?,
            ..*self
        })
    }

    /// The same as what is multiplied, of the weight that these rows are of.
    pub(crate) fn rows(&self, weight: &Weight, rows: Range<usize>) -> Option<WeightRows<'_>> {
        let (first, row_bytes) = (rows.start, self.form.row_bytes);
        let range = self.range(rows)?;
        let at = |row: usize| self.start + row * row_bytes;
        Some(WeightRows {
            format: weight.format(),
            arrangement: self.form.arrangement(),
            bytes: self.map.get(at(range.start)..at(range.end))?,
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
        let block = block.get_mut(..format.block_bytes())?;
        for (b, values) in out.chunks_exact_mut(format.block_len()).enumerate() {
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

/// What has been repacked of a model's weights, by name.
#[derive(Debug, Default)]
pub(crate) struct RepackedWeights(Mutex<HashMap<String, Repacked>>);

impl RepackedWeights {
    /// The repacked rows of this weight, if there are any.
    pub(crate) fn get(&self, name: &str) -> Option<Repacked> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.get(name).cloned()
    }

    /// Repacks those of a graph's weights that are not yet, if there is room for them; else leaves all as they are.
    ///
    /// # Errors
    /// [`BackendError::Device`] where a thread failed, or the file can no longer be read.
    pub(crate) fn prepare(
        &self,
        graph: &Graph,
        get: impl Fn(&str) -> Option<Weight>,
        (fns, lead): (Option<&'static RepackFns>, &mut Lead<'_>),
    ) -> Result<(), BackendError> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut weights: Vec<(Weight, Form)> = Vec::new();
        for name in graph.nodes().iter().filter_map(|n| matrix_of(&n.op)) {
            let is_known = all.contains_key(name) || weights.iter().any(|(w, _)| w.name() == name);
            let weight = Some(name).filter(|_| !is_known).and_then(&get);
            weights.extend(weight.and_then(|w| Form::of(&w, fns).map(|form| (w, form))));
        }
        let n_bytes = |weights: &[(Weight, Form)]| weights.iter().map(|(w, f)| f.n_bytes(w)).sum();
        if n_bytes(&weights) < WORTH_LARGE_PAGES || !HAS_LARGE_PAGES {
            weights.retain(|(_, form)| form.fns.is_some());
        }
        let Some(mut map) = map_of(n_bytes(&weights)) else {
            return Ok(());
        };
        repack(&weights, &mut map, lead)?;
        let (map, mut start) = (Arc::new(map), 0);
        for (weight, form) in weights {
            let repacked = Repacked {
                map: Arc::clone(&map),
                start,
                rows: 0..weight.n_rows(),
                form,
            };
            start += form.n_bytes(&weight);
            all.insert(weight.name().to_owned(), repacked);
        }
        Ok(())
    }
}

/// Whether the system may be asked for large pages.
const HAS_LARGE_PAGES: bool = cfg!(target_os = "linux");

/// Memory for so many bytes, in large pages where the system has them; none where there is no room, or nothing wanted.
fn map_of(n_bytes: usize) -> Option<MmapMut> {
    let map = Some(n_bytes)
        .filter(|n| *n > 0 && memory::has_room_for(n.saturating_add(AlignedBytes::promised())))
        .and_then(|n| MmapMut::map_anon(n).ok())?;
    #[cfg(target_os = "linux")]
    // Small pages do as well, only not as fast.
    map.advise(memmap2::Advice::HugePage).unwrap_or_default();
    Some(map)
}

/// Repacks all rows of some weights, one weight after the other.
fn repack(
    weights: &[(Weight, Form)],
    mut to: &mut [u8],
    lead: &mut Lead<'_>,
) -> Result<(), BackendError> {
    let mut pieces = Vec::new();
    for (weight, form) in weights {
        let (mut of_weight, rest) = to.split_at_mut(form.n_bytes(weight));
        to = rest;
        let step = (BYTES_PER_TASK / form.row_bytes)
            .max(1)
            .next_multiple_of(form.at_once());
        for first in (0..weight.n_rows()).step_by(step) {
            let rows = first..weight.n_rows().min(first + step);
            let (piece, rest) = of_weight.split_at_mut(rows.len() * form.row_bytes);
            pieces.push((weight, rows, piece, form.fns));
            of_weight = rest;
        }
    }
    let n_pieces = pieces.len();
    let pieces = Mutex::new(pieces.into_iter());
    let copies = (0..lead.n_threads()).map(|_| Mutex::new(Vec::new()));
    let copies: Vec<_> = copies.collect();
    lead.each(n_pieces, &|thread, _| {
        let next = pieces.lock().unwrap_or_else(PoisonError::into_inner).next();
        let Some((weight, rows, to, fns)) = next else {
            return Ok(());
        };
        let Some(fns) = fns else {
            return copy_rows(weight, rows, to);
        };
        let mut copy = copies[thread]
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        repack_rows(weight, rows, to, (fns, &mut copy))
    })
}

/// Repacks some rows by way of a copy of them.
fn repack_rows(
    weight: &Weight,
    rows: Range<usize>,
    to: &mut [u8],
    (fns, copy): (&RepackFns, &mut Vec<u8>),
) -> Result<(), BackendError> {
    let row_bytes = weight.bytes().len() / weight.n_rows().max(1);
    copy.resize(rows.len() * row_bytes, 0);
    copy_rows(weight, rows, copy)?;
    let stored = WeightRows {
        format: weight.format(),
        arrangement: Arrangement::Stored,
        bytes: copy,
        row_bytes,
        first: 0,
        n_columns: weight.n_columns(),
    };
    (fns.repack)(&stored, to);
    Ok(())
}

/// Some rows as they are stored.
fn copy_rows(weight: &Weight, rows: Range<usize>, to: &mut [u8]) -> Result<(), BackendError> {
    let row_bytes = weight.bytes().len() / weight.n_rows().max(1);
    match weight.bytes().copy(rows.start * row_bytes, to) {
        true => Ok(()),
        false => Err(BackendError::Device {
            backend: "cpu",
            reason: format!(
                "rows {rows:?} of '{}' could not be read from its file",
                weight.name()
            ),
        }),
    }
}

/// The weight that a node multiplies with.
fn matrix_of(op: &Op) -> Option<&str> {
    match op {
        Op::Linear { weight, .. } | Op::ExpertLinear { weight, .. } => Some(weight),
        _ => None,
    }
}
