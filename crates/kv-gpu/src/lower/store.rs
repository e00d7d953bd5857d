//! K and V rows to their cells.

use bytemuck::{Pod, Zeroable};
use kv_core::KvType;
use kv_core::backend::{BackendError, RowKind};
use kv_core::graph::{Node, NodeId, Op};
use kv_core::layers::RowShape;

use super::{Lower, rope, word};
use crate::device::Device;
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

/// Lowers the storing of K, and of V where the layer has V rows.
pub(super) fn lower<D: Device>(
    lower: &mut Lower<'_, D>,
    _id: NodeId,
    node: &Node,
) -> Result<(), BackendError> {
    let Storing {
        settings,
        n_chunks,
        rows: [k_rows, v_rows],
    } = storing(lower, node)?;
    let n_rows = word(lower.context.graph.shape().n_tokens)?;
    let has_v = matches!(node.op, Op::StoreKv { .. });
    let operands = vec![
        lower.operand(node, 0)?,
        lower.operand(node, usize::from(has_v))?,
        Operand::Inputs(0),
        k_rows,
        v_rows,
    ];
    let grid = Grid::Fixed([n_chunks, n_rows]);
    lower.launch("store_kv", grid, operands, &settings)
}

/// Lowers the storing of keys that are `rotated`, and nothing else, together with the rotation of
/// queries: their values, the angles, and where rotated ones go.
pub(super) fn lower_with_rope<D: Device>(
    lower: &mut Lower<'_, D>,
    (id, node): (NodeId, &Node),
    rotated: &Node,
    [q, angles, q_out]: [Operand<D>; 3],
    rope: rope::Settings,
) -> Result<(), BackendError> {
    let Storing {
        settings,
        n_chunks,
        rows: [k_rows, v_rows],
    } = storing(lower, node)?;
    let settings = RopeSettings {
        q_chunks: rope.row_len().div_ceil(CHUNK),
        rope,
        store: settings,
    };
    let n_rows = word(lower.context.graph.shape().n_tokens)?;
    let (k, v) = (lower.operand(rotated, 0)?, lower.operand(node, 1)?);
    let operands = vec![q, k, v, angles, Operand::Inputs(0), q_out, k_rows, v_rows];
    lower.done[id.as_usize()] = true;
    let grid = Grid::Fixed([settings.q_chunks + n_chunks, n_rows]);
    lower.launch("rope_store_kv", grid, operands, &settings)
}

/// How a node's rows are stored.
struct Storing<D: Device> {
    settings: Settings,
    /// Thread blocks for a row of K and V.
    n_chunks: u32,
    /// Those of K, and those of V or of K again.
    rows: [Operand<D>; 2],
}

fn storing<D: Device>(lower: &Lower<'_, D>, node: &Node) -> Result<Storing<D>, BackendError> {
    let (Op::StoreKv { layer } | Op::StoreK { layer }) = node.op else {
        return Err(lower.unsupported(node));
    };
    let rows = lower.context.layout.layer(layer);
    let rows = *rows.ok_or(BackendError::NoRows { layer })?;
    let k = StoredRows::new(&rows.k)?;
    let stored_v = rows.stored_v();
    let v = stored_v.as_ref().map_or(Ok(k), StoredRows::new)?;
    let v_kind = stored_v.map_or(RowKind::K, |_| RowKind::V);
    Ok(Storing {
        settings: Settings {
            cells: lower.input_word(node, node.operands.last().copied())?,
            k_chunks: k.chunks(),
            k,
            v,
        },
        n_chunks: k.chunks() + stored_v.map_or(0, |_| v.chunks()),
        rows: [lower.rows(layer, RowKind::K)?, lower.rows(layer, v_kind)?],
    })
}

/// Rotates groups of the `n` values at `from` to `to`.
pub(super) fn hadamard<D: Device>(
    lower: &mut Lower<'_, D>,
    from: Operand<D>,
    to: Operand<D>,
    settings: HadamardSettings,
) -> Result<(), BackendError> {
    let grid = Grid::Fixed([settings.n.div_ceil(CHUNK), 1]);
    lower.launch("hadamard", grid, vec![from, to], &settings)
}
