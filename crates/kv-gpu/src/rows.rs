//! [`GpuRows`]: K and V rows and recurrent states in buffers of a device.
//!
//! Invariant: a buffer holds the bytes that [`RowShape`](kv_rows::RowShape) defines, row
//! after row. Knows nothing of graphs.

use std::sync::atomic::{AtomicU64, Ordering};

use kv_backend::{BackendError, RowKind, RowSpan, RowStorage, expect_len};
use kv_core::LayerIdx;
use kv_rows::RowLayout;

use crate::device::{Device, Region};

/// Rows of all layers on one device.
#[derive(Debug)]
pub struct GpuRows<D: Device> {
    layout: RowLayout,
    stored: Vec<LayerBuffer<D>>,
    id: u64,
}

/// One kind of rows of one layer.
#[derive(Debug)]
struct LayerBuffer<D: Device> {
    layer: LayerIdx,
    kind: RowKind,
    bytes: usize,
    buffer: D::Buffer,
}

impl<D: Device> GpuRows<D> {
    /// All rows of `layout`, zeros.
    pub(crate) fn allocate(device: &D, layout: &RowLayout) -> Result<Self, BackendError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let mut stored = Vec::new();
        for (layer, kind, bytes) in kinds(layout) {
            let what = format!("{kind:?} rows of layer {layer}");
            let buffer = device.allocate(bytes, &what)?;
            stored.push(LayerBuffer {
                layer,
                kind,
                bytes,
                buffer,
            });
        }
        Ok(Self {
            layout: layout.clone(),
            stored,
            id: NEXT.fetch_add(1, Ordering::Relaxed),
        })
    }

    /// The number of these rows in the process.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// The number of the buffer of some rows of `layout`, which all rows of this layout have.
    pub(crate) fn number(
        layout: &RowLayout,
        layer: LayerIdx,
        kind: RowKind,
    ) -> Result<usize, BackendError> {
        let found = kinds(layout).position(|(l, k, _)| (l, k) == (layer, kind));
        found.ok_or(BackendError::NoRows { layer })
    }

    /// A buffer by its number.
    pub(crate) fn buffer(&self, number: usize) -> Option<&D::Buffer> {
        self.stored.get(number).map(|stored| &stored.buffer)
    }

    /// The buffer of some rows.
    pub(crate) fn buffer_of(
        &self,
        layer: LayerIdx,
        kind: RowKind,
    ) -> Result<&D::Buffer, BackendError> {
        self.find(layer, kind).map(|stored| &stored.buffer)
    }

    fn find(&self, layer: LayerIdx, kind: RowKind) -> Result<&LayerBuffer<D>, BackendError> {
        let found = self
            .stored
            .iter()
            .find(|s| (s.layer, s.kind) == (layer, kind));
        found.ok_or(BackendError::NoRows { layer })
    }

    /// The region of a span whose bytes the caller has, and their number is checked.
    pub(crate) fn span(&self, span: RowSpan, bytes: usize) -> Result<Region<'_, D>, BackendError> {
        let range = span.byte_range(&self.layout)?;
        expect_len("bytes of rows", range.len(), bytes)?;
        let buffer = self.buffer_of(span.layer, span.kind)?;
        Ok(Region {
            buffer,
            at: range.start,
        })
    }
}

/// The rows of a layout by layer and kind, in the order of their buffers, with the bytes of all of
/// them.
fn kinds(layout: &RowLayout) -> impl Iterator<Item = (LayerIdx, RowKind, usize)> {
    let attended = layout.layers().iter().flat_map(|rows| {
        let v = rows.stored_v().map(|v| (RowKind::V, v.bytes()));
        let kinds = [(RowKind::K, rows.k.bytes())].into_iter().chain(v);
        kinds.map(|(kind, bytes)| (rows.layer, kind, rows.n_rows * bytes))
    });
    let states = layout.states().iter().flat_map(|states| {
        let kinds = [
            (RowKind::Conv, states.conv_bytes()),
            (RowKind::State, states.state_bytes()),
        ];
        kinds.map(|(kind, bytes)| (states.layer, kind, states.n_rows * bytes))
    });
    attended.chain(states)
}

impl<D: Device> RowStorage for GpuRows<D> {
    fn layout(&self) -> &RowLayout {
        &self.layout
    }

    fn allocated_bytes(&self, layer: LayerIdx, kind: RowKind) -> Result<usize, BackendError> {
        self.find(layer, kind).map(|stored| stored.bytes)
    }
}
