//! [`Rows`]: one tensor `[n_rows, width]` for K and one for V of each layer, and two for the states
//! of each recurrent layer.
//!
//! Rows whose values stand for themselves are tensors of those values, all others (blocks, rotated
//! heads) tensors of bytes. Invariant: the stored bytes are those that [`RowShape::encode`] writes.
//! Nothing is written before everything that a call names has been found to exist. Knows nothing of
//! graphs.

use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use half::{bf16, f16};
use kv_backend::{BackendError, RowKind, RowSpan, expect_len};
use kv_core::{LayerIdx, memory::RowCopy};
use kv_rows::{HeadRotation, KvType, LayerRows, RowLayout, RowShape, StateRows};

use crate::error::{NAME, OnDevice};

/// K and V rows of all layers.
#[derive(Debug)]
pub struct Rows {
    layout: RowLayout,
    /// In the order of the layout's layers.
    layers: Vec<KvTensors>,
    /// In the order of the layout's recurrent layers.
    states: Vec<StateTensors>,
}

/// The states of one recurrent layer: `[n_rows, conv_row]` of `f32`, and `[n_rows, state_row]` of
/// their type.
#[derive(Debug)]
pub(crate) struct StateTensors {
    pub(crate) conv: Tensor,
    pub(crate) state: Tensor,
}

/// The rows of one layer.
#[derive(Debug)]
pub(crate) struct KvTensors {
    pub(crate) k: RowTensor,
    pub(crate) v: RowTensor,
}

/// Rows of one shape, `[n_rows, heads * dim]`, or `[n_rows, bytes]` where values do not stand for
/// themselves. Candle's tensors share their storage, so writing to rows goes through `&`; [`Rows`]
/// lets only `&mut` callers reach that.
#[derive(Debug)]
pub(crate) struct RowTensor {
    pub(crate) shape: RowShape,
    pub(crate) tensor: Tensor,
}

/// The contents of a tensor of such rows.
pub(crate) fn dtype(shape: RowShape) -> DType {
    match shape.kv_type {
        _ if !shape.rotation.is_none() => DType::U8,
        KvType::F32 => DType::F32,
        KvType::F16 => DType::F16,
        KvType::BF16 => DType::BF16,
        _ => DType::U8,
    }
}

impl RowTensor {
    /// Values that no row remembers, `[n, heads, dim]`.
    pub(crate) fn fresh(tensor: &Tensor) -> candle_core::Result<Self> {
        let (_, heads, dim) = tensor.dims3()?;
        let shape = RowShape {
            heads,
            dim,
            kv_type: KvType::F32,
            rotation: HeadRotation::None,
        };
        let tensor = tensor.flatten_from(1)?;
        Ok(Self { shape, tensor })
    }

    /// Rows `cells`, or all rows in a stretch, as `[n, heads * dim]` of `f32`.
    pub(crate) fn values(&self, rows: &Tensor) -> candle_core::Result<Tensor> {
        if rows.dtype() != DType::U8 {
            return rows.to_dtype(DType::F32);
        }
        let (n, len) = (rows.dim(0)?, self.shape.len());
        let bytes = rows.flatten_all()?.to_vec1::<u8>()?;
        let mut values = vec![0.0; n * len];
        let encoded = bytes.chunks_exact(self.shape.bytes().max(1));
        for (bytes, values) in encoded.zip(values.chunks_exact_mut(len.max(1))) {
            self.shape.decode(bytes, values);
        }
        Tensor::from_vec(values, (n, len), rows.device())
    }

    /// `values`, `[n, heads * dim]` of `f32`, as what the tensor holds.
    pub(crate) fn encoded(&self, values: &Tensor) -> candle_core::Result<Tensor> {
        if self.tensor.dtype() != DType::U8 {
            return values.to_dtype(self.tensor.dtype())?.contiguous();
        }
        let (n, row) = (values.dim(0)?, self.shape.bytes());
        let flat = values.flatten_all()?.to_vec1::<f32>()?;
        let mut bytes = vec![0; n * row];
        let rows = bytes.chunks_exact_mut(row.max(1));
        for (values, row) in flat.chunks_exact(self.shape.len().max(1)).zip(rows) {
            self.shape.encode(values, row);
        }
        Tensor::from_vec(bytes, (n, row), values.device())
    }
}

impl Rows {
    /// All rows of `layout`, filled with zeros.
    pub(crate) fn allocate(layout: &RowLayout, device: &Device) -> Result<Self, BackendError> {
        let zeros = |(layer, n_rows): (LayerIdx, usize), kind: &str, shape: RowShape| {
            let wanted = n_rows.saturating_mul(shape.bytes());
            let what = || format!("{kind} rows of layer {layer}");
            let no_memory = || BackendError::OutOfMemory {
                backend: NAME,
                wanted,
                what: what(),
            };
            // Host memory that cannot be had aborts inside candle: ask for it here first.
            if device.is_cpu() && Vec::<u8>::new().try_reserve_exact(wanted).is_err() {
                return Err(no_memory());
            }
            let dtype = dtype(shape);
            let width = shape.bytes() / dtype.size_in_bytes();
            let tensor = Tensor::zeros((n_rows, width), dtype, device).map_err(|_| no_memory())?;
            Ok::<_, BackendError>(RowTensor { shape, tensor })
        };
        let tensors = |layer: &LayerRows| {
            let of = (layer.layer, layer.n_rows);
            Ok(KvTensors {
                k: zeros(of, "K", layer.k)?,
                v: zeros(of, "V", layer.stored_v().unwrap_or(without_values(layer.v)))?,
            })
        };
        let states = |states: &StateRows| {
            let of = (states.layer, states.n_rows);
            Ok(StateTensors {
                conv: zeros(of, "convolution", conv_shape(states))?.tensor,
                state: zeros(of, "state", state_shape(states))?.tensor,
            })
        };
        let layers = layout
            .layers()
            .iter()
            .map(tensors)
            .collect::<Result<_, BackendError>>()?;
        let states = layout
            .states()
            .iter()
            .map(states)
            .collect::<Result<_, BackendError>>()?;
        Ok(Self {
            layout: layout.clone(),
            layers,
            states,
        })
    }

    pub(crate) fn layout(&self) -> &RowLayout {
        &self.layout
    }

    /// Layout and tensors of one layer.
    pub(crate) fn layer(&self, layer: LayerIdx) -> Result<(&LayerRows, &KvTensors), BackendError> {
        let mut layers = self.layout.layers().iter().zip(&self.layers);
        layers
            .find(|(l, _)| l.layer == layer)
            .ok_or(BackendError::NoRows { layer })
    }

    /// Layout and tensors of the rows over which a layer attends.
    pub(crate) fn attended(
        &self,
        layer: LayerIdx,
    ) -> Result<(&LayerRows, &KvTensors), BackendError> {
        let attended = self.layout.attended(layer);
        let found = attended.and_then(|(at, rows)| Some((rows, self.layers.get(at)?)));
        found.ok_or(BackendError::NoRows { layer })
    }

    /// Layout and tensors of one recurrent layer.
    pub(crate) fn states(
        &self,
        layer: LayerIdx,
    ) -> Result<(&StateRows, &StateTensors), BackendError> {
        let mut states = self.layout.states().iter().zip(&self.states);
        states
            .find(|(s, _)| s.layer == layer)
            .ok_or(BackendError::NoRows { layer })
    }

    /// Bytes that the storage of one kind of rows of a layer takes.
    pub(crate) fn n_bytes(&self, layer: LayerIdx, kind: RowKind) -> Result<usize, BackendError> {
        let tensor = match kind {
            RowKind::K => &self.layer(layer)?.1.k.tensor,
            RowKind::V => {
                let (rows, tensors) = self.layer(layer)?;
                rows.stored_v().ok_or(BackendError::NoRows { layer })?;
                &tensors.v.tensor
            }
            RowKind::Conv => &self.states(layer)?.1.conv,
            RowKind::State => &self.states(layer)?.1.state,
        };
        Ok(storage_bytes(tensor))
    }

    /// The stored bytes of `span`.
    pub(crate) fn read(&self, span: RowSpan, out: &mut [u8]) -> Result<(), BackendError> {
        let (tensor, shape) = self.find(span, out.len())?;
        if out.is_empty() {
            return Ok(());
        }
        let rows = tensor.narrow(0, span.first.as_usize(), span.len as usize);
        let rows = rows.and_then(|r| r.flatten_all()).on_device()?;
        match dtype(shape) {
            DType::U8 => out.copy_from_slice(&rows.to_vec1::<u8>().on_device()?),
            DType::F16 => {
                let values = rows.to_vec1::<f16>().on_device()?;
                write_each(out, values.iter().map(|v| v.to_le_bytes()));
            }
            DType::BF16 => {
                let values = rows.to_vec1::<bf16>().on_device()?;
                write_each(out, values.iter().map(|v| v.to_le_bytes()));
            }
            _ => {
                let values = rows.to_vec1::<f32>().on_device()?;
                write_each(out, values.iter().map(|v| v.to_le_bytes()));
            }
        }
        Ok(())
    }

    /// Replaces the stored bytes of `span`.
    pub(crate) fn write(&mut self, span: RowSpan, bytes: &[u8]) -> Result<(), BackendError> {
        let (tensor, shape) = self.find(span, bytes.len())?;
        if bytes.is_empty() {
            return Ok(());
        }
        let (n, device) = (span.len as usize, tensor.device());
        let dims = (n, bytes.len() / n / dtype(shape).size_in_bytes());
        let rows = match dtype(shape) {
            DType::U8 => Tensor::from_slice(bytes, dims, device),
            DType::F16 => Tensor::from_vec(read_each(bytes, f16::from_le_bytes), dims, device),
            DType::BF16 => Tensor::from_vec(read_each(bytes, bf16::from_le_bytes), dims, device),
            _ => Tensor::from_vec(read_each(bytes, f32::from_le_bytes), dims, device),
        };
        tensor
            .slice_set(&rows.on_device()?, 0, span.first.as_usize())
            .on_device()
    }

    /// Copies whole rows of every layer of a part, one copy after the other.
    pub(crate) fn copy(&mut self, copies: &[RowCopy]) -> Result<(), BackendError> {
        let layers = || self.layout.layers().iter().zip(&self.layers);
        for copy in copies {
            for (layer, _) in layers().filter(|(l, _)| l.part == copy.part) {
                for first in [copy.from, copy.to] {
                    let span = RowSpan {
                        layer: layer.layer,
                        kind: RowKind::K,
                        first,
                        len: copy.len,
                    };
                    span.byte_range(&self.layout)?;
                }
            }
        }
        for copy in copies.iter().filter(|c| c.len > 0) {
            for (rows, tensors) in layers().filter(|(l, _)| l.part == copy.part) {
                let v = rows.stored_v().map(|_| &tensors.v);
                for rows in [&tensors.k].into_iter().chain(v) {
                    copy_within(&rows.tensor, copy).on_device()?;
                }
            }
        }
        Ok(())
    }

    fn find(&self, span: RowSpan, n_bytes: usize) -> Result<(&Tensor, RowShape), BackendError> {
        let range = span.byte_range(&self.layout)?;
        expect_len("bytes of rows", range.len(), n_bytes)?;
        let attention = || self.layer(span.layer);
        let recurrent = || self.states(span.layer);
        Ok(match span.kind {
            RowKind::K => attention().map(|(layer, tensors)| (&tensors.k.tensor, layer.k))?,
            RowKind::V => attention().map(|(layer, tensors)| (&tensors.v.tensor, layer.v))?,
            RowKind::Conv => {
                let (states, tensors) = recurrent()?;
                (&tensors.conv, conv_shape(states))
            }
            RowKind::State => {
                let (states, tensors) = recurrent()?;
                (&tensors.state, state_shape(states))
            }
        })
    }
}

/// Bytes of the storage behind a tensor: on the host its length, elsewhere what candle asks for.
fn storage_bytes(tensor: &Tensor) -> usize {
    let (storage, _) = tensor.storage_and_layout();
    let n_values = match &*storage {
        Storage::Cpu(CpuStorage::F32(values)) => values.len(),
        Storage::Cpu(CpuStorage::F16(values)) => values.len(),
        Storage::Cpu(CpuStorage::BF16(values)) => values.len(),
        Storage::Cpu(CpuStorage::U8(values)) => values.len(),
        _ => tensor.elem_count(),
    };
    n_values * tensor.dtype().size_in_bytes()
}

/// Rows that take no room: of values that are in the keys.
fn without_values(shape: RowShape) -> RowShape {
    RowShape { dim: 0, ..shape }
}

/// The inputs of a convolution.
fn conv_shape(states: &StateRows) -> RowShape {
    RowShape {
        heads: 1,
        dim: states.row.conv_row,
        kv_type: KvType::F32,
        rotation: HeadRotation::None,
    }
}

/// A state but for these.
fn state_shape(states: &StateRows) -> RowShape {
    RowShape {
        dim: states.row.state_row,
        kv_type: states.state_type.kv_type(),
        ..conv_shape(states)
    }
}

fn write_each<const N: usize>(out: &mut [u8], values: impl Iterator<Item = [u8; N]>) {
    for (out, value) in out.as_chunks_mut().0.iter_mut().zip(values) {
        *out = value;
    }
}

fn read_each<T, const N: usize>(bytes: &[u8], value: fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks().0.iter().map(|b| value(*b)).collect()
}

fn copy_within(tensor: &Tensor, copy: &RowCopy) -> candle_core::Result<()> {
    // Candle wants a source with storage of its own.
    let from = tensor
        .narrow(0, copy.from.as_usize(), copy.len as usize)?
        .force_contiguous()?;
    tensor.slice_set(&from, 0, copy.to.as_usize())
}
