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

use crate::kernels::{Arrangement, Kernels, RepackFns, WeightRows};
use crate::memory;
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

/// Repacked rows, shared by whoever multiplies with some of them.
#[derive(Clone)]
pub(crate) struct Repacked {
    /// All that was repacked together.
    map: Arc<MmapMut>,
    /// Where the weight's rows begin in it.
    start: usize,
    /// Which of these rows these are.
    rows: Range<usize>,
    row_bytes: usize,
    /// As [`RepackFns`] has them.
    at_once: usize,
    stored_block: fn(&WeightRows<'_>, (usize, usize), &mut [u8]),
}

impl Repacked {
    /// Some of these rows, or `None` where that would part rows that lie side by side.
    pub(crate) fn part(&self, rows: Range<usize>) -> Option<Self> {
        let rows =
            self.rows.start.checked_add(rows.start)?..self.rows.start.checked_add(rows.end)?;
        let whole =
            rows.start.is_multiple_of(self.at_once) && rows.end.is_multiple_of(self.at_once);
        (whole && rows.end <= self.rows.end).then(|| Self {
            map: Arc::clone(&self.map),
            rows,
            ..*self
        })
    }

    /// The bytes of some of these rows, under the same condition.
    pub(crate) fn rows(&self, rows: Range<usize>) -> Option<&[u8]> {
        let part = self.rows.start + rows.start..self.rows.start + rows.end;
        let whole =
            part.start.is_multiple_of(self.at_once) && part.end.is_multiple_of(self.at_once);
        let at = |row: usize| self.start + row * self.row_bytes;
        self.map.get(at(part.start)..at(part.end)).filter(|_| whole)
    }

    /// The values of row `row`, if there is such a row.
    pub(crate) fn dequantize_row(
        &self,
        weight: &Weight,
        row: usize,
        out: &mut [f32],
    ) -> Option<()> {
        let (format, first) = (weight.format(), row / self.at_once * self.at_once);
        let group = WeightRows {
            format,
            arrangement: Arrangement::Repacked,
            bytes: self.rows(first..first + self.at_once)?,
            row_bytes: self.row_bytes,
            first: 0,
            n_columns: weight.n_columns(),
        };
        let mut block = [0; MOST_BLOCK_BYTES];
        let block = block.get_mut(..format.block_bytes())?;
        for (b, values) in out.chunks_exact_mut(format.block_len()).enumerate() {
            (self.stored_block)(&group, (row - first, b), block);
            dequantize(format, block, values);
        }
        Some(())
    }

    /// Bytes of a row, on average.
    pub(crate) fn row_bytes(&self) -> usize {
        self.row_bytes
    }
}

impl std::fmt::Debug for Repacked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Repacked({:?} of {} bytes)", self.rows, self.row_bytes)
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
    /// [`BackendError::Device`] where a thread failed.
    pub(crate) fn prepare(
        &self,
        graph: &Graph,
        get: impl Fn(&str) -> Option<Weight>,
        (kernels, lead): (&Kernels, &mut Lead<'_>),
    ) -> Result<(), BackendError> {
        let Some(fns) = &kernels.repack else {
            return Ok(());
        };
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut weights: Vec<Weight> = Vec::new();
        for name in graph.nodes().iter().filter_map(|n| matrix_of(&n.op)) {
            let is_known = all.contains_key(name) || weights.iter().any(|w| w.name() == name);
            let weight = Some(name).filter(|_| !is_known).and_then(&get);
            weights.extend(weight.filter(|w| suits(w, fns)));
        }
        let row_bytes = |w: &Weight| (fns.row_bytes)(w.format(), w.n_columns());
        let n_bytes = weights.iter().map(|w| w.n_rows() * row_bytes(w)).sum();
        let Some(mut map) = map_of(n_bytes) else {
            return Ok(());
        };
        repack(&weights, &mut map, fns, lead)?;
        let (map, mut start) = (Arc::new(map), 0);
        for weight in weights {
            let repacked = Repacked {
                map: Arc::clone(&map),
                start,
                rows: 0..weight.n_rows(),
                row_bytes: row_bytes(&weight),
                at_once: fns.at_once,
                stored_block: fns.stored_block,
            };
            start += weight.n_rows() * repacked.row_bytes;
            all.insert(weight.name().to_owned(), repacked);
        }
        Ok(())
    }
}

/// Memory for so many bytes, in large pages where the system has them; none where there is no room, or nothing wanted.
fn map_of(n_bytes: usize) -> Option<MmapMut> {
    let map = Some(n_bytes)
        .filter(|n| *n > 0 && memory::has_room_for(*n))
        .and_then(|n| MmapMut::map_anon(n).ok())?;
    #[cfg(target_os = "linux")]
    // Small pages do as well, only not as fast.
    map.advise(memmap2::Advice::HugePage).unwrap_or_default();
    Some(map)
}

/// Repacks all rows of some weights, one weight after the other.
fn repack(
    weights: &[Weight],
    mut to: &mut [u8],
    fns: &RepackFns,
    lead: &mut Lead<'_>,
) -> Result<(), BackendError> {
    let mut pieces = Vec::new();
    for weight in weights {
        let n_rows = weight.n_rows();
        let row_bytes = (fns.row_bytes)(weight.format(), weight.n_columns());
        let step = (BYTES_PER_TASK / row_bytes.max(1))
            .max(1)
            .next_multiple_of(fns.at_once);
        for first in (0..n_rows).step_by(step) {
            let rows = first..n_rows.min(first + step);
            let (piece, rest) = to.split_at_mut(rows.len() * row_bytes);
            pieces.push((weight, rows, piece));
            to = rest;
        }
    }
    let n_pieces = pieces.len();
    let pieces = Mutex::new(pieces.into_iter());
    let copies: Vec<_> = (0..lead.n_threads())
        .map(|_| Mutex::new(Vec::new()))
        .collect();
    lead.each(n_pieces, &|thread, _| {
        let next = pieces.lock().unwrap_or_else(PoisonError::into_inner).next();
        let mut copy = copies[thread]
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        next.map_or(Ok(()), |(weight, rows, to)| {
            repack_rows(weight, rows, to, (fns, &mut copy))
        })
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
    if !weight.bytes().copy(rows.start * row_bytes, copy) {
        let name = weight.name();
        return Err(BackendError::Device {
            backend: "cpu",
            reason: format!("rows {rows:?} of '{name}' could not be read from its file"),
        });
    }
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

/// The weight that a node multiplies with.
fn matrix_of(op: &Op) -> Option<&str> {
    match op {
        Op::Linear { weight, .. } | Op::ExpertLinear { weight, .. } => Some(weight),
        _ => None,
    }
}

/// Whether a weight is a matrix, or a matrix for each expert, of whole groups of rows in a format that is repacked.
fn suits(weight: &Weight, fns: &RepackFns) -> bool {
    let n_out = match *weight.shape() {
        [n_out, _] | [_, n_out, _] => n_out,
        _ => return false,
    };
    n_out > 0
        && n_out.is_multiple_of(fns.at_once)
        && (fns.row_bytes)(weight.format(), weight.n_columns()) > 0
}
