//! [`AlignedBytes`] and [`CpuRows`]: zeroed memory on cache-line boundaries, and the K and V rows
//! and recurrent states of all layers in it.
//!
//! Invariant: the rows of a layer are contiguous, `[cells, heads, dim]`, exactly as many bytes as
//! the layout says; the first is on a 64-byte boundary. Knows nothing of tokens and sequences.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

use half::{bf16, f16};
use kv_backend::{BackendError, RowKind, RowSpan};
use kv_core::LayerIdx;
use kv_rows::{KvType, RowLayout, RowShape, StateType};

use crate::kv_rows::{KvRows, KvRowsMut};

/// Bytes of a cache line.
pub(crate) const LINE: usize = 64;

/// Zeroed bytes that start on a cache line. The system commits a page when it is first touched.
#[derive(Debug)]
pub(crate) struct AlignedBytes {
    start: NonNull<u8>,
    len: usize,
    /// The allocation, with slack to align `start`; `None` if `len` is 0.
    allocated: Option<(NonNull<u8>, Layout)>,
}

/// Bytes of all [`AlignedBytes`] in this process, touched or not.
static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

/// Largest alignment for which `alloc_zeroed` is a `calloc` that touches no page; above it the
/// allocator clears the memory itself and so commits all pages.
const MAX_CALLOC_ALIGN: usize = 16;

// SAFETY: the bytes belong to this value alone, like those of a `Box<[u8]>`.
unsafe impl Send for AlignedBytes {}
// SAFETY: as above; shared references only read.
unsafe impl Sync for AlignedBytes {}

impl AlignedBytes {
    /// `len` zeros; `what` names them in the error.
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
        let layout = Layout::from_size_align(wanted, MAX_CALLOC_ALIGN).map_err(|_| failed())?;
        // SAFETY: the layout's size is not zero.
        let first = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(failed)?;
        // SAFETY: at most one line further, and `len` plus one line were allocated.
        let start = unsafe { first.add(first.align_offset(LINE).min(LINE)) };
        ALLOCATED.fetch_add(len, Ordering::Relaxed);
        Ok(Self {
            start,
            len,
            allocated: Some((first, layout)),
        })
    }

    /// Bytes that all rows and programs of this process have committed or may still commit.
    pub(crate) fn allocated() -> usize {
        ALLOCATED.load(Ordering::Relaxed)
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
        // SAFETY: the start is aligned for `T` (64 bytes), `len / size` values are inside, every
        // bit pattern is a `T`, and `&mut self` makes this the only access.
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
            ALLOCATED.fetch_sub(self.len, Ordering::Relaxed);
        }
    }
}

/// Types of which every bit pattern is a value.
trait PlainBits {}
impl PlainBits for f32 {}
impl PlainBits for f16 {}
impl PlainBits for bf16 {}

#[derive(Debug)]
struct LayerStorage {
    k: AlignedBytes,
    v: AlignedBytes,
}

/// Recurrent states of one layer.
#[derive(Debug)]
struct StateStorage {
    conv: AlignedBytes,
    state: AlignedBytes,
}

/// All states of one layer by their type, to be overwritten.
#[derive(Debug)]
pub(crate) enum StatesMut<'a> {
    F32(&'a mut [f32]),
    F16(&'a mut [f16]),
    Bf16(&'a mut [bf16]),
}

/// The memory of a recurrent layer, to be overwritten.
#[derive(Debug)]
pub(crate) struct RecurrentMut<'a> {
    /// Inputs of convolutions.
    pub(crate) conv: &'a mut [f32],
    pub(crate) states: StatesMut<'a>,
}

/// K and V rows and recurrent states of all layers.
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
        for layer_states in layout.states() {
            let storage = |row_bytes: usize, kind: &str| {
                let what = format!("{kind} states of layer {}", layer_states.layer);
                AlignedBytes::zeroed(layer_states.n_rows * row_bytes, &what)
            };
            states.push(StateStorage {
                conv: storage(layer_states.conv_bytes(), "convolution")?,
                state: storage(layer_states.state_bytes(), "scan")?,
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
    /// `None` if there is no such layer.
    pub(crate) fn states_mut(&mut self, at: usize) -> Option<RecurrentMut<'_>> {
        let state_type = self.layout.states().get(at)?.state_type;
        let StateStorage { conv, state } = self.states.get_mut(at)?;
        Some(RecurrentMut {
            conv: conv.floats_mut(),
            states: match state_type {
                StateType::F32 => StatesMut::F32(state.floats_mut()),
                StateType::F16 => StatesMut::F16(state.cast_mut()),
                StateType::BF16 => StatesMut::Bf16(state.cast_mut()),
            },
        })
    }

    pub(crate) fn layout(&self) -> &RowLayout {
        &self.layout
    }

    fn index(&self, layer: LayerIdx) -> Result<usize, BackendError> {
        let at = self.layout.layers().iter().position(|l| l.layer == layer);
        at.ok_or(BackendError::NoRows { layer })
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

    /// Size in bytes of one kind of rows of a layer.
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

    /// K and V of the `at`-th layer of the layout, K twice if V is a part of it (MLA); `None` if
    /// there is no such layer.
    pub(crate) fn stored(&self, at: usize) -> Option<[KvRows<'_>; 2]> {
        let (shape, storage) = (self.layout.layers().get(at)?, self.layers.get(at)?);
        let k = KvRows::new(shape.k, storage.k.bytes());
        let v = shape.stored_v();
        Some([k, v.map_or(k, |v| KvRows::new(v, storage.v.bytes()))])
    }

    /// K and V of the `at`-th layer of the layout, to be overwritten.
    pub(crate) fn stored_mut(&mut self, at: usize) -> Option<[KvRowsMut<'_>; 2]> {
        let (shape, storage) = (self.layout.layers().get(at)?, self.layers.get_mut(at)?);
        Some([
            rows_mut(shape.k, &mut storage.k),
            rows_mut(shape.v, &mut storage.v),
        ])
    }
}

fn rows_mut(shape: RowShape, bytes: &mut AlignedBytes) -> KvRowsMut<'_> {
    match shape.kv_type {
        KvType::F32 if shape.rotation.is_none() => KvRowsMut::F32(bytes.cast_mut()),
        KvType::F16 if shape.rotation.is_none() => KvRowsMut::F16(bytes.cast_mut()),
        _ => KvRowsMut::Encoded(shape, bytes.bytes_mut()),
    }
}
