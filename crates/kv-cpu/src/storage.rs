//! [`AlignedBytes`] and [`CpuRows`]: zeroed memory on cache-line boundaries, and the K and V rows
//! and recurrent states of all layers in it.
//!
//! Invariant: the rows of a layer lie one after the other, `[cells, heads, dim]`, exactly as many
//! bytes as the layout says; the first is on a 64-byte boundary. Knows nothing of who is in a cell.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

use half::f16;
use kv_core::backend::{BackendError, RowKind, RowSpan};
use kv_core::hadamard::HeadRotation;
use kv_core::layers::{HeadBlocks, LayerRows, RowLayout, RowShape};
use kv_core::{KvType, LayerIdx};

use crate::attend::Heads;

/// Bytes of a cache line.
pub(crate) const LINE: usize = 64;

/// Zeroed bytes that start on a cache line. Pages are taken from the system when first touched.
#[derive(Debug)]
pub(crate) struct AlignedBytes {
    start: NonNull<u8>,
    len: usize,
    /// What was allocated, with room to begin on a line; not where there are no bytes.
    allocated: Option<(NonNull<u8>, Layout)>,
}

/// Bytes of all of these in this process, used or not yet.
static PROMISED: AtomicUsize = AtomicUsize::new(0);

/// What allocators give zeroed memory for without writing it: for more they clear it themselves, all pages of it.
const UNWRITTEN_ALIGN: usize = 16;

// SAFETY: the bytes belong to this value alone, like those of a `Box<[u8]>`.
unsafe impl Send for AlignedBytes {}
// SAFETY: as above; shared references only read.
unsafe impl Sync for AlignedBytes {}

impl AlignedBytes {
    /// `len` zeros.
    pub(crate) fn zeroed(len: usize, what: &str) -> Result<Self, BackendError> {
        if len == 0 {
            return Ok(Self {
                start: NonNull::<[u64; 8]>::dangling().cast(),
                len,
                allocated: None,
            });
        }
        let failed = || BackendError::OutOfMemory {
            backend: "cpu",
            wanted: len,
            what: what.to_owned(),
        };
        let wanted = len.checked_add(LINE).ok_or_else(failed)?;
        let layout = Layout::from_size_align(wanted, UNWRITTEN_ALIGN).map_err(|_| failed())?;
        // SAFETY: the layout's size is not zero.
        let first = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(failed)?;
        // SAFETY: less than a line further, and a line more than `len` bytes were allocated.
        let start = unsafe { first.add(first.align_offset(LINE).min(LINE)) };
        PROMISED.fetch_add(len, Ordering::Relaxed);
        Ok(Self {
            start,
            len,
            allocated: Some((first, layout)),
        })
    }

    /// Bytes that rows and programs of this process may still take, or have taken.
    pub(crate) fn promised() -> usize {
        PROMISED.load(Ordering::Relaxed)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: `start` points to `len` initialised bytes (or is dangling and `len` is 0) that
        // live as long as `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `&mut self` makes this the only access.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }

    /// All bytes as `T`, of which every bit pattern is a value.
    fn cast_mut<T: PlainBits>(&mut self) -> &mut [T] {
        // SAFETY: the start is aligned for `T` (64 bytes), `len / size` values are inside, every bit
        // pattern is a `T`, and `&mut self` makes this the only access.
        unsafe {
            std::slice::from_raw_parts_mut(self.start.as_ptr().cast(), self.len / size_of::<T>())
        }
    }

    /// All bytes as `f32`.
    pub(crate) fn floats_mut(&mut self) -> &mut [f32] {
        self.cast_mut()
    }
}

impl Drop for AlignedBytes {
    fn drop(&mut self) {
        if let Some((first, layout)) = self.allocated {
            // SAFETY: allocated in `zeroed` with this very layout.
            unsafe { dealloc(first.as_ptr(), layout) };
            PROMISED.fetch_sub(self.len, Ordering::Relaxed);
        }
    }
}

/// Types of which every bit pattern is a value.
trait PlainBits {}
impl PlainBits for f32 {}
impl PlainBits for f16 {}

/// Stored rows of one layer's K or V.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stored<'a> {
    pub(crate) shape: RowShape,
    bytes: &'a [u8],
}

impl<'a> Stored<'a> {
    /// Values that no row remembers, `[cells, heads, dim]`.
    pub(crate) fn fresh(values: &'a [f32], heads: usize, dim: usize) -> Self {
        // SAFETY: every byte of an `f32` is initialised, and bytes need no alignment.
        let bytes = unsafe {
            std::slice::from_raw_parts(values.as_ptr().cast(), std::mem::size_of_val(values))
        };
        let shape = RowShape {
            heads,
            dim,
            kv_type: KvType::F32,
            rotation: HeadRotation::None,
        };
        Self { shape, bytes }
    }

    /// Reads all heads of one cell, `[heads, dim]`.
    pub(crate) fn decode_cell(&self, cell: usize, values: &mut [f32]) {
        let n = self.shape.bytes();
        self.shape.decode(&self.bytes[cell * n..][..n], values);
    }

    /// The blocks that hold a head of each cell.
    #[inline]
    pub(crate) fn heads(&self, head: usize) -> Heads<'a> {
        let HeadBlocks {
            first_byte,
            n_bytes,
            n_values,
            skip,
        } = self.shape.head(head);
        Heads {
            bytes: self.bytes,
            stride: self.shape.bytes(),
            first_byte,
            n_bytes,
            n_values,
            skip,
        }
    }
}

/// Stored rows to be overwritten.
#[derive(Debug)]
pub(crate) enum StoredMut<'a> {
    /// As `f32`.
    F32(&'a mut [f32]),
    /// As `f16`.
    F16(&'a mut [f16]),
    /// As the shape says.
    Encoded(RowShape, &'a mut [u8]),
}

#[derive(Debug)]
struct LayerStorage {
    k: AlignedBytes,
    v: AlignedBytes,
}

/// States of one recurrent layer, `f32`.
#[derive(Debug)]
struct StateStorage {
    conv: AlignedBytes,
    state: AlignedBytes,
}

/// Rows of all layers.
#[derive(Debug)]
pub struct CpuRows {
    layout: RowLayout,
    /// In the order of the layout's layers.
    layers: Vec<LayerStorage>,
    /// In the order of the layout's recurrent layers.
    states: Vec<StateStorage>,
}

impl CpuRows {
    pub(crate) fn new(layout: &RowLayout) -> Result<Self, BackendError> {
        let mut layers = Vec::with_capacity(layout.layers().len());
        for layer in layout.layers() {
            let storage = |shape: &RowShape, kind: &str| {
                let what = format!("{kind} rows of layer {}", layer.layer);
                AlignedBytes::zeroed(layer.n_rows * shape.bytes(), &what)
            };
            layers.push(LayerStorage {
                k: storage(&layer.k, "K")?,
                v: match layer.stored_v() {
                    Some(v) => storage(&v, "V")?,
                    None => AlignedBytes::zeroed(0, "no V rows")?,
                },
            });
        }
        let mut states = Vec::with_capacity(layout.states().len());
        for of_layer in layout.states() {
            let storage = |len: usize, kind: &str| {
                let what = format!("{kind} states of layer {}", of_layer.layer);
                AlignedBytes::zeroed(of_layer.n_rows * len * size_of::<f32>(), &what)
            };
            states.push(StateStorage {
                conv: storage(of_layer.row.conv_row, "convolution")?,
                state: storage(of_layer.row.state_row, "scan")?,
            });
        }
        Ok(Self {
            layout: layout.clone(),
            layers,
            states,
        })
    }

    fn state_index(&self, layer: LayerIdx) -> Result<usize, BackendError> {
        let at = self.layout.states().iter().position(|s| s.layer == layer);
        at.ok_or(BackendError::NoRows { layer })
    }

    /// Convolution and scan states of the `at`-th recurrent layer of the layout, to be overwritten;
    /// `None` where there is no such layer.
    pub(crate) fn states_mut(&mut self, at: usize) -> Option<[&mut [f32]; 2]> {
        let StateStorage { conv, state } = self.states.get_mut(at)?;
        Some([conv.floats_mut(), state.floats_mut()])
    }

    pub(crate) fn layout(&self) -> &RowLayout {
        &self.layout
    }

    fn index(&self, layer: LayerIdx) -> Result<usize, BackendError> {
        let at = self.layout.layers().iter().position(|l| l.layer == layer);
        at.ok_or(BackendError::NoRows { layer })
    }

    /// Shapes of a layer's rows, which is the `at`-th of the layout.
    pub(crate) fn layer(&self, layer: LayerIdx) -> Result<(usize, LayerRows), BackendError> {
        let at = self.index(layer)?;
        Ok((at, self.layout.layers()[at]))
    }

    /// The same of the rows over which a layer attends.
    pub(crate) fn attended(&self, layer: LayerIdx) -> Result<(usize, LayerRows), BackendError> {
        let attended = self.layout.attended(layer).map(|(at, rows)| (at, *rows));
        attended.ok_or(BackendError::NoRows { layer })
    }

    /// All bytes of one kind of rows of a layer.
    fn bytes(&self, layer: LayerIdx, kind: RowKind) -> Result<&AlignedBytes, BackendError> {
        Ok(match kind {
            RowKind::K => &self.layers[self.index(layer)?].k,
            RowKind::V => &self.layers[self.index(layer)?].v,
            RowKind::Conv => &self.states[self.state_index(layer)?].conv,
            RowKind::State => &self.states[self.state_index(layer)?].state,
        })
    }

    /// Bytes that were allocated for one kind of rows of a layer.
    pub(crate) fn n_bytes(&self, layer: LayerIdx, kind: RowKind) -> Result<usize, BackendError> {
        let v = self.layout.layer(layer).and_then(|rows| rows.stored_v());
        if kind == RowKind::V && v.is_none() {
            return Err(BackendError::NoRows { layer });
        }
        Ok(self.bytes(layer, kind)?.bytes().len())
    }

    pub(crate) fn read(&self, span: RowSpan, out: &mut [u8]) -> Result<(), BackendError> {
        let range = span.byte_range(&self.layout)?;
        let (wanted, got) = (range.len(), out.len());
        if wanted != got {
            return Err(BackendError::WrongLength {
                what: "bytes of rows",
                wanted,
                got,
            });
        }
        out.copy_from_slice(&self.bytes(span.layer, span.kind)?.bytes()[range]);
        Ok(())
    }

    pub(crate) fn write(&mut self, span: RowSpan, bytes: &[u8]) -> Result<(), BackendError> {
        let range = span.byte_range(&self.layout)?;
        let (wanted, got) = (range.len(), bytes.len());
        if wanted != got {
            return Err(BackendError::WrongLength {
                what: "bytes of rows",
                wanted,
                got,
            });
        }
        self.bytes_mut(span.layer, span.kind)?[range].copy_from_slice(bytes);
        Ok(())
    }

    /// All bytes of one kind of rows of a layer.
    pub(crate) fn bytes_mut(
        &mut self,
        layer: LayerIdx,
        kind: RowKind,
    ) -> Result<&mut [u8], BackendError> {
        let attention = self.index(layer);
        let recurrent = self.state_index(layer);
        Ok(match kind {
            RowKind::K => self.layers[attention?].k.bytes_mut(),
            RowKind::V => self.layers[attention?].v.bytes_mut(),
            RowKind::Conv => self.states[recurrent?].conv.bytes_mut(),
            RowKind::State => self.states[recurrent?].state.bytes_mut(),
        })
    }

    /// K and V of the `at`-th layer of the layout, K twice where values are in it; `None` where there
    /// is no such layer.
    pub(crate) fn stored(&self, at: usize) -> Option<[Stored<'_>; 2]> {
        let (shape, storage) = (self.layout.layers().get(at)?, self.layers.get(at)?);
        let k = (shape.k, storage.k.bytes());
        let v = shape.stored_v().map(|v| (v, storage.v.bytes()));
        Some([k, v.unwrap_or(k)].map(|(shape, bytes)| Stored { shape, bytes }))
    }

    /// The same, to be overwritten.
    pub(crate) fn stored_mut(&mut self, at: usize) -> Option<[StoredMut<'_>; 2]> {
        let (shape, storage) = (self.layout.layers().get(at)?, self.layers.get_mut(at)?);
        Some([
            stored_mut(shape.k, &mut storage.k),
            stored_mut(shape.v, &mut storage.v),
        ])
    }
}

fn stored_mut(shape: RowShape, bytes: &mut AlignedBytes) -> StoredMut<'_> {
    match shape.kv_type {
        KvType::F32 if shape.rotation.is_none() => StoredMut::F32(bytes.cast_mut()),
        KvType::F16 if shape.rotation.is_none() => StoredMut::F16(bytes.cast_mut()),
        _ => StoredMut::Encoded(shape, bytes.bytes_mut()),
    }
}
