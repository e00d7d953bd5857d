//! K and V rows to their cells.

use bytemuck::{Pod, Zeroable};
use kv_backend::{BackendError, RowKind};
use kv_graph::{Node, Op};
use kv_rows::{KvType, RowShape};

use super::{Lower, Result, rope, word};
use crate::device::Device;
use crate::inputs::NumberedNode;
use crate::program::{Grid, Operand};

/// Values that a thread block stores.
const CHUNK: u32 = 256;

/// `KvRows` of `store.k`.
#[derive(Clone, Copy, Default, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct StoredRows {
    len: u32,
    row_bytes: u32,
    kv_type: u32,
    group: u32,
}

/// `StoreArgs` of `store.k`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Settings {
    cells: u32,
    k_chunks: u32,
    k: StoredRows,
    v: StoredRows,
}

/// `RopeStoreArgs` of `store.k`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct RopeSettings {
    q_chunks: u32,
    rope: rope::Settings,
    store: Settings,
}

/// `HadamardArgs` of `store.k`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct HadamardSettings {
    pub(super) n: u32,
    pub(super) group: u32,
    /// Values of a head, and from head to head.
    pub(super) dim: u32,
    pub(super) stride: u32,
}

impl StoredRows {
    pub(crate) fn new(shape: &RowShape) -> Result<Self, BackendError> {
        Ok(Self {
            len: word(shape.len())?,
            row_bytes: word(shape.bytes())?,
            kv_type: kv_type_number(shape.kv_type),
            group: word(shape.rotation.group())?,
        })
    }

    /// Values of a row.
    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    fn chunks(&self) -> u32 {
        self.len.div_ceil(CHUNK)
    }
}

/// The number by which kernels know a type.
pub(crate) fn kv_type_number(kv_type: KvType) -> u32 {
    let number = KvType::ALL.iter().position(|t| *t == kv_type);
    number.map_or(u32::MAX, |number| number as u32)
}

/// The way a node's rows are stored.
struct StorePlan<D: Device> {
    settings: Settings,
    /// Thread blocks for a row of K and V.
    n_chunks: u32,
    /// Those of K, and those of V or of K again.
    rows: [Operand<D>; 2],
}

impl<D: Device> Lower<'_, D> {
    /// Lowers the storing of K, and of V where the layer has V rows.
    pub(super) fn store(&mut self, node: &Node) -> Result<()> {
        let StorePlan {
            settings,
            n_chunks,
            rows: [k_rows, v_rows],
        } = self.storing(node)?;
        let n_rows = word(self.context.graph.shape().n_tokens)?;
        let has_v = matches!(node.op, Op::StoreKv { .. });
        let (k, v) = (
            self.operand(node, 0)?,
            self.operand(node, usize::from(has_v))?,
        );
        let operands = vec![k, v, Operand::Inputs(0), k_rows, v_rows];
        let grid = Grid::Fixed([n_chunks, n_rows]);
        self.launch("store_kv", grid, operands, &settings)
    }

    /// Lowers the storing of keys that are `rotated`, and nothing else, together with the rotation
    /// of queries: their values, the angles, and where rotated ones go.
    pub(super) fn rope_and_store(
        &mut self,
        (id, node): NumberedNode<'_>,
        rotated: &Node,
        [q, angles, q_out]: [Operand<D>; 3],
        rope: rope::Settings,
    ) -> Result<()> {
        let StorePlan {
            settings,
            n_chunks,
            rows: [k_rows, v_rows],
        } = self.storing(node)?;
        let settings = RopeSettings {
            q_chunks: rope.row_len().div_ceil(CHUNK),
            rope,
            store: settings,
        };
        let n_rows = word(self.context.graph.shape().n_tokens)?;
        let (k, v) = (self.operand(rotated, 0)?, self.operand(node, 1)?);
        let operands = vec![q, k, v, angles, Operand::Inputs(0), q_out, k_rows, v_rows];
        self.done[id.as_usize()] = true;
        let grid = Grid::Fixed([settings.q_chunks + n_chunks, n_rows]);
        self.launch("rope_store_kv", grid, operands, &settings)
    }

    fn storing(&self, node: &Node) -> Result<StorePlan<D>> {
        let (Op::StoreKv { layer } | Op::StoreK { layer }) = node.op else {
            return Err(self.unsupported(node));
        };
        let rows = self.context.layout.layer(layer);
        let rows = *rows.ok_or(BackendError::NoRows { layer })?;
        let k = StoredRows::new(&rows.k)?;
        let stored_v = rows.stored_v();
        let v = stored_v.as_ref().map_or(Ok(k), StoredRows::new)?;
        let v_kind = stored_v.map_or(RowKind::K, |_| RowKind::V);
        Ok(StorePlan {
            settings: Settings {
                cells: self.input_word(node, node.operands.last().copied())?,
                k_chunks: k.chunks(),
                k,
                v,
            },
            n_chunks: k.chunks() + stored_v.map_or(0, |_| v.chunks()),
            rows: [self.rows(layer, RowKind::K)?, self.rows(layer, v_kind)?],
        })
    }

    /// Rotates groups of the `n` values at `from` to `to`.
    pub(super) fn hadamard(
        &mut self,
        from: Operand<D>,
        to: Operand<D>,
        settings: HadamardSettings,
    ) -> Result<()> {
        let grid = Grid::rows(settings.n.div_ceil(CHUNK));
        self.launch("hadamard", grid, vec![from, to], &settings)
    }
}
