//! Packs weight matrices once, before the first run, into the layout that kernels read fastest.
//!
//! [`PackedWeights::pack`] goes through the matrices that a graph multiplies with. The thread team
//! copies small pieces of each from the file, packs them, and releases the file's pages, so that a
//! model is in memory about once. Packed rows take as many bytes as stored ones, or fewer where
//! that loses nothing. Where memory is short, the remaining matrices are read from the file.
//!
//! Whether floats can be packed depends on their values. Where one value of a matrix says no, the
//! whole matrix is kept as stored.
//!
//! Invariant: packed rows never change, and results have the same bits with packed and with stored
//! rows. Knows neither formats nor instructions ([`PackFns`] does).

mod layout;
mod one_expert;
mod row_reader;

use std::collections::HashMap;
use std::ops::{Deref, Range};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use kv_backend::{BackendError, LoadProgress, OnProgress};
use kv_block::{BlockFormat, dequantize};
use kv_graph::weights::Weight;
use kv_graph::{Graph, Op};
use memmap2::{Mmap, MmapMut};

use self::layout::PackedLayout;
pub(crate) use self::one_expert::ExpertLayout;
pub(crate) use self::row_reader::{FileCache, RowReader};
use crate::kernels::{PackFns, WeightLayout, WeightRows};
use crate::machine;
use crate::storage::AlignedBytes;
use crate::team::TeamGuard;

/// The choice to pack weights into a layout that suits the processor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum RepackChoice {
    /// If there are kernels for it, and memory.
    #[default]
    Auto,
    /// Weights are always read as they lie in their file.
    Never,
}

/// No block is larger.
const MAX_BLOCK_BYTES: usize = 256;

/// From this many bytes on, weights that are not packed are copied to huge pages. Fewer bytes fit
/// in the TLB either way.
const MIN_HUGE_PAGE_BYTES: usize = 8 << 20;

/// Bytes that are packed between two looks at the free memory.
const MEMORY_CHECK_BYTES: usize = 64 << 20;

/// True if the system may be asked for huge pages.
const HAS_HUGE_PAGES: bool = cfg!(target_os = "linux");

/// The memory of packed rows.
enum PackedBytes {
    /// For as long as the model is loaded.
    Kept(Mmap),
    /// Until others take their place.
    Lent(MmapMut),
}

impl Deref for PackedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Kept(memory) => memory,
            Self::Lent(memory) => memory,
        }
    }
}

/// Rows of a matrix in packed memory, which several matrices share.
#[derive(Clone)]
pub(crate) struct PackedRows {
    memory: Arc<PackedBytes>,
    /// The start of the weight's rows.
    start: usize,
    /// The range of rows.
    rows: Range<usize>,
    layout: PackedLayout,
}

impl PackedRows {
    /// Number of rows. The weight may have a few more, which are read from the file.
    pub(crate) fn n_rows(&self) -> usize {
        self.rows.len()
    }

    /// Those of `rows` that are among these; `None` where there are none, or where groups of rows
    /// would be separated.
    pub(crate) fn part(&self, rows: Range<usize>) -> Option<Self> {
        let rows = rows.start..rows.end.min(self.n_rows());
        Some(Self {
            memory: Arc::clone(&self.memory),
            rows: self.range(rows).filter(|rows| !rows.is_empty())?,
            ..*self
        })
    }

    /// The same as kernels take them, of the weight that these rows belong to.
    pub(crate) fn rows(&self, weight: &Weight, rows: Range<usize>) -> Option<WeightRows<'_>> {
        let (first, row_bytes) = (rows.start, self.layout.row_bytes);
        let range = self.range(rows)?;
        let at = |row: usize| self.start + row * row_bytes;
        Some(WeightRows {
            format: weight.format(),
            layout: self.layout.layout(),
            bytes: self.memory.get(at(range.start)..at(range.end))?,
            row_bytes,
            first,
            n_columns: weight.n_columns(),
        })
    }

    /// The weight's rows that `rows` of these are, under the conditions of [`PackedRows::part`].
    fn range(&self, rows: Range<usize>) -> Option<Range<usize>> {
        let start = self.rows.start.checked_add(rows.start)?;
        let end = self.rows.start.checked_add(rows.end)?;
        let is_whole = |row: usize| row.is_multiple_of(self.layout.group_rows());
        (end <= self.rows.end && is_whole(start) && is_whole(end)).then_some(start..end)
    }

    /// Dequantizes row `row`, if there is such a row.
    pub(crate) fn dequantize_row(
        &self,
        weight: &Weight,
        row: usize,
        out: &mut [f32],
    ) -> Option<()> {
        let (format, group_rows) = (weight.format(), self.layout.group_rows());
        let first = row / group_rows * group_rows;
        let rows = self.rows(weight, first..first + group_rows)?;
        let Some(fns) = self.layout.fns else {
            dequantize(format, rows.bytes, out);
            return Some(());
        };
        let mut block = [0; MAX_BLOCK_BYTES];
        let block_len = (fns.block_len)(format);
        let block = block.get_mut(..format.row_bytes(block_len)?)?;
        for (b, values) in out.chunks_exact_mut(block_len).enumerate() {
            (fns.stored_block)(&rows, row - first, b, block);
            dequantize(format, block, values);
        }
        Some(())
    }
}

impl std::fmt::Debug for PackedRows {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (rows, row_bytes) = (&self.rows, self.layout.row_bytes);
        write!(f, "PackedRows({rows:?} of {row_bytes} bytes)")
    }
}

/// The memory that packing takes, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PackingPlan {
    /// Of the packed matrices.
    pub(crate) packed: usize,
    /// Of the same matrices in their file, which is not read any more.
    pub(crate) replaced: usize,
}

/// The packed matrices of a model, by name.
#[derive(Default)]
pub(crate) struct PackedWeights {
    by_name: Mutex<HashMap<String, PackedRows>>,
}

impl PackedWeights {
    /// The packed rows of this weight, if there are any.
    pub(crate) fn get(&self, name: &str) -> Option<PackedRows> {
        let all = self.by_name.lock().unwrap_or_else(PoisonError::into_inner);
        all.get(name).cloned()
    }

    /// Drops the packed rows of these weights: the memory goes with the last program that reads
    /// what was packed with them.
    pub(crate) fn forget(&self, names: &[String]) {
        let mut all = self.by_name.lock().unwrap_or_else(PoisonError::into_inner);
        names.iter().for_each(|name| drop(all.remove(name)));
    }

    /// Bytes of all packed rows.
    pub(crate) fn n_bytes(&self) -> usize {
        let all = self.by_name.lock().unwrap_or_else(PoisonError::into_inner);
        let n_bytes = |p: &PackedRows| p.rows.len() * p.layout.row_bytes;
        all.values().map(n_bytes).sum()
    }

    /// The memory that packing the matrices of graphs would take, if there is enough for all of
    /// them. Of floats, the first rows tell whether the values of a matrix can be packed.
    pub(crate) fn plan<'g>(
        graphs: impl Iterator<Item = &'g Graph>,
        get: impl Fn(&str) -> Option<Weight>,
        fns_of: impl Fn(BlockFormat) -> Option<&'static PackFns>,
    ) -> PackingPlan {
        let mut weights = Vec::new();
        for graph in graphs {
            select(graph, |_| false, &get, &fns_of, &mut weights);
        }
        let copies_stored = retain_worth_copying(&mut weights);
        let as_packed = |(weight, layout): (Weight, PackedLayout)| {
            if first_rows_pack(&weight, &layout) {
                return Some((weight, layout));
            }
            let stored = PackedLayout::stored(&weight).filter(|_| copies_stored)?;
            Some((weight, stored))
        };
        let weights: Vec<_> = weights.into_iter().filter_map(as_packed).collect();
        let packed = weights.iter().map(|(_, layout)| layout.n_bytes()).sum();
        let replaced = weights.iter().map(|(weight, _)| weight.bytes().len()).sum();
        PackingPlan { packed, replaced }
    }

    /// Packs those of a graph's matrices that are not packed yet, as far as there is memory.
    ///
    /// # Errors
    /// [`BackendError::Device`] where a thread failed or the file can no longer be read.
    pub(crate) fn pack(
        &self,
        graph: &Graph,
        get: impl Fn(&str) -> Option<Weight>,
        fns_of: impl Fn(BlockFormat) -> Option<&'static PackFns>,
        on_progress: &OnProgress,
        lead: &mut TeamGuard<'_>,
    ) -> Result<(), BackendError> {
        let mut all = self.by_name.lock().unwrap_or_else(PoisonError::into_inner);
        let mut weights: Vec<(Weight, PackedLayout)> = Vec::new();
        let is_packed = |name: &str| all.contains_key(name);
        select(graph, is_packed, get, fns_of, &mut weights);
        let Some(mut packer) = Packer::new(&mut weights, lead.n_threads()) else {
            return Ok(());
        };
        let mut progress = LoadProgress {
            done: 0,
            total: weights.iter().map(stored_bytes).sum(),
        };
        let mut packed = Vec::with_capacity(weights.len());
        for (weight, layout) in &weights {
            if !packer.has_memory_for(layout.n_bytes()) {
                let n_bytes = packer.n_written;
                tracing::info!(n_bytes, "memory is short: other weights are read as stored");
                break;
            }
            let start = packer.n_written;
            let layout = packer.pack(weight, *layout, lead)?;
            packed.extend(layout.map(|layout| (weight.name(), start, layout)));
            progress.done += weight.bytes().len() as u64;
            on_progress.report(progress);
        }
        let memory = packer.finish()?;
        for (name, start, layout) in packed {
            let rows = PackedRows {
                memory: Arc::clone(&memory),
                start,
                rows: 0..layout.n_rows,
                layout,
            };
            all.insert(name.to_owned(), rows);
        }
        Ok(())
    }
}

/// Adds the matrices of a graph that are not packed yet, with the layouts that they would get.
fn select(
    graph: &Graph,
    is_packed: impl Fn(&str) -> bool,
    get: impl Fn(&str) -> Option<Weight>,
    fns_of: impl Fn(BlockFormat) -> Option<&'static PackFns>,
    weights: &mut Vec<(Weight, PackedLayout)>,
) {
    for name in graph.nodes().iter().filter_map(|n| matrix_of(&n.op)) {
        let is_known = is_packed(name) || weights.iter().any(|(w, _)| w.name() == name);
        let weight = Some(name).filter(|_| !is_known).and_then(&get);
        let planned = weight.and_then(|weight| {
            let layout = PackedLayout::new(&weight, fns_of(weight.format()))?;
            Some((weight, layout))
        });
        weights.extend(planned);
    }
}

/// Removes weights that are not worth copying, and returns whether matrices that cannot be packed
/// are copied as they are stored.
fn retain_worth_copying(weights: &mut Vec<(Weight, PackedLayout)>) -> bool {
    let n_bytes: usize = weights.iter().map(|(_, layout)| layout.n_bytes()).sum();
    let copies_stored = HAS_HUGE_PAGES && n_bytes >= MIN_HUGE_PAGE_BYTES;
    weights.retain(|(_, layout)| copies_stored || layout.fns.is_some());
    copies_stored
}

fn stored_bytes((weight, _): &(Weight, PackedLayout)) -> u64 {
    weight.bytes().len() as u64
}

/// Writes packed matrices into one mapping, one after the other.
struct Packer {
    memory: MmapMut,
    n_written: usize,
    /// The bytes that may be written before the free memory is looked at again.
    checked_until: usize,
    /// True if matrices that cannot be packed are copied as they are stored.
    copies_stored: bool,
    /// For each thread, what reads the stored rows that it packs.
    readers: Vec<Mutex<RowReader>>,
}

impl Packer {
    /// For these weights, of which it removes those that are not worth copying. `None` where there
    /// is nothing to pack or no memory for it.
    fn new(weights: &mut Vec<(Weight, PackedLayout)>, n_threads: usize) -> Option<Self> {
        let sum = |weights: &[(Weight, PackedLayout)]| -> usize {
            weights.iter().map(|(_, layout)| layout.n_bytes()).sum()
        };
        let copies_stored = retain_worth_copying(weights);
        let n_bytes = sum(weights);
        if n_bytes == 0 {
            return None;
        }
        if !machine::has_room_for(n_bytes.saturating_add(AlignedBytes::allocated())) {
            tracing::info!(
                n_bytes,
                "no memory to pack weights: they are read as stored"
            );
            return None;
        }
        // Floats that turn out not to be packable take more. Pages are taken as they are written.
        let most = weights.iter().map(|(weight, layout)| {
            let stored = PackedLayout::stored(weight).filter(|_| copies_stored);
            layout.n_bytes().max(stored.map_or(0, |s| s.n_bytes()))
        });
        let memory = MmapMut::map_anon(most.sum()).ok()?;
        #[cfg(target_os = "linux")]
        // Without huge pages everything works, only slower.
        memory.advise(memmap2::Advice::HugePage).unwrap_or_default();
        Some(Self {
            memory,
            n_written: 0,
            checked_until: 0,
            copies_stored,
            readers: (0..n_threads).map(|_| Mutex::default()).collect(),
        })
    }

    /// True if so many bytes can be written without driving others out of memory.
    fn has_memory_for(&mut self, n_bytes: usize) -> bool {
        let end = self.n_written + n_bytes;
        if end > self.checked_until {
            let until = end.max(self.checked_until + MEMORY_CHECK_BYTES);
            if !machine::has_room_for(until - self.n_written) {
                return false;
            }
            self.checked_until = until;
        }
        true
    }

    /// Packs a matrix. Returns the layout that it got in the end: as stored where its values cannot
    /// be packed; `None` where it was not written at all.
    fn pack(
        &mut self,
        weight: &Weight,
        planned: PackedLayout,
        lead: &mut TeamGuard<'_>,
    ) -> Result<Option<PackedLayout>, BackendError> {
        let mut layout = planned;
        if !self.write(weight, &layout, lead)? {
            let Some(stored) = PackedLayout::stored(weight).filter(|_| self.copies_stored) else {
                return Ok(None);
            };
            layout = stored;
            self.write(weight, &layout, lead)?;
        }
        self.n_written += layout.n_bytes();
        // The stored rows are not read again.
        let stored_row_bytes = weight.bytes().len() / weight.n_rows().max(1);
        weight.bytes().release(0..layout.n_rows * stored_row_bytes);
        Ok(Some(layout))
    }

    /// Writes the rows of a matrix behind what is written. Returns whether its values could be
    /// packed.
    fn write(
        &mut self,
        weight: &Weight,
        layout: &PackedLayout,
        lead: &mut TeamGuard<'_>,
    ) -> Result<bool, BackendError> {
        let n_bytes = layout.n_rows * layout.row_bytes;
        let Some(to) = self
            .memory
            .get_mut(self.n_written..self.n_written + n_bytes)
        else {
            return Ok(false);
        };
        let step = layout.rows_per_task();
        let pieces: Vec<_> = (0..layout.n_rows)
            .step_by(step)
            .zip(to.chunks_mut(step * layout.row_bytes))
            .map(|piece| Mutex::new(Some(piece)))
            .collect();
        let readers = &self.readers;
        let is_packable = AtomicBool::new(true);
        lead.each(pieces.len(), &|thread, i| {
            let piece = pieces[i].lock().map(|mut piece| piece.take());
            let Some((first, to)) = piece.ok().flatten() else {
                return Ok(());
            };
            if !is_packable.load(Ordering::Relaxed) {
                return Ok(());
            }
            let reader = readers[thread].lock();
            let mut reader = reader.unwrap_or_else(PoisonError::into_inner);
            if !write_piece(weight, layout, first, to, &mut reader)? {
                is_packable.store(false, Ordering::Relaxed);
            }
            Ok(())
        })?;
        Ok(is_packable.into_inner())
    }

    /// The written memory, which does not change any more.
    fn finish(self) -> Result<Arc<PackedBytes>, BackendError> {
        let n_bytes = self.n_written;
        tracing::debug!(n_bytes, "weights are packed");
        let memory = self.memory.make_read_only();
        let memory = memory.map(|memory| Arc::new(PackedBytes::Kept(memory)));
        memory.map_err(|e| BackendError::Device {
            backend: "cpu",
            reason: format!("{n_bytes} bytes of packed weights could not be protected: {e}"),
        })
    }
}

/// Writes the rows from `first` on, as many as `to` has room for. Returns whether their values
/// could be packed.
fn write_piece(
    weight: &Weight,
    layout: &PackedLayout,
    first: usize,
    to: &mut [u8],
    reader: &mut RowReader,
) -> Result<bool, BackendError> {
    let n_rows = to.len() / layout.row_bytes;
    let row_bytes = weight.bytes().len() / weight.n_rows().max(1);
    let failed = || BackendError::Device {
        backend: "cpu",
        reason: format!(
            "rows {first}..{} of '{}' could not be read from its file",
            first + n_rows,
            weight.name()
        ),
    };
    let start = first * row_bytes;
    let Some(fns) = layout.fns else {
        let is_read = reader.read_to(weight.bytes(), start, to);
        return is_read.map(|()| true).ok_or_else(failed);
    };
    let range = start..start + n_rows * row_bytes;
    let bytes = reader.read(weight.bytes(), range).ok_or_else(failed)?;
    let stored = WeightRows {
        format: weight.format(),
        layout: WeightLayout::Stored,
        bytes,
        row_bytes,
        first: 0,
        n_columns: weight.n_columns(),
    };
    Ok((fns.pack)(&stored, to))
}

/// True if the first group of rows can be packed: of blocks always.
fn first_rows_pack(weight: &Weight, layout: &PackedLayout) -> bool {
    if layout.fns.is_none() || weight.format().block_len() > 1 {
        return true;
    }
    let mut group = vec![0; layout.group_rows().min(layout.n_rows) * layout.row_bytes];
    // What cannot be read now cannot be packed later either: loading reports it.
    write_piece(weight, layout, 0, &mut group, &mut RowReader::default()).unwrap_or(false)
}

/// The weight that a node multiplies with.
fn matrix_of(op: &Op) -> Option<&str> {
    match op {
        Op::Linear { weight, .. } | Op::ExpertLinear { weight, .. } | Op::HeadLinear { weight } => {
            Some(weight)
        }
        _ => None,
    }
}
