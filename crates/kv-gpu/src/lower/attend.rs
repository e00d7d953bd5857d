//! Attention over stored rows and within the ubatch: pieces of work, then their merge; and the
//! merge of results over different rows.
//!
//! Which positions a piece has and where its partial results go is in the tables of the inputs
//! (`visibility_table`). Invariant: how a row's pieces are cut does not depend on other rows.

use bytemuck::{Pod, Zeroable};
use kv_backend::{BackendError, RowKind};
use kv_core::LayerIdx;
use kv_graph::{AttendSpec, Node, NodeId, Op, ResultForm};
use kv_rows::{HeadRotation, KvType, RowShape, ValueRows};

use super::store::{HadamardSettings, kv_type_number};
use super::{Lower, Result, width, word};
use crate::config::Precision;
use crate::device::Device;
use crate::inputs::NumberedNode;
use crate::program::{Grid, Operand};
use crate::visibility_table::TILE_ROWS;

/// The widest heads of values: 8 columns for each of 256 threads.
const MAX_V_DIM: usize = 2048;
/// Whether pieces have many rows, and how many rows at most.
pub(super) const PIECES: [(u32, u32); 2] = [(0, 1), (1, TILE_ROWS as u32)];
/// Queries that a thread block attends by tensor cores: of many rows, and of one row's heads.
const TILE_QUERIES: u32 = 64;
const GROUP_QUERIES: u32 = 16;

/// `AttendArgs` of `kv_pieces.h`.
#[derive(Clone, Copy, Default, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Settings {
    /// The first word of the visibility's header, and of the rows' positions.
    pub(super) header: u32,
    pub(super) positions: u32,
    pub(super) many: u32,
    pub(super) n_heads: u32,
    pub(super) kv_heads: u32,
    pub(super) k_dim: u32,
    pub(super) v_dim: u32,
    pub(super) k_type: u32,
    pub(super) v_type: u32,
    pub(super) k_row_bytes: u32,
    pub(super) v_row_bytes: u32,
    pub(super) v_stride: u32,
    pub(super) sums: u32,
    pub(super) alibi: f32,
    pub(super) scale: f32,
    pub(super) soft_cap: f32,
    pub(super) max_bias: f32,
}

impl Settings {
    /// Those of a specification.
    pub(super) fn of_spec(spec: &AttendSpec) -> Result<Self> {
        Ok(Self {
            n_heads: word(spec.n_heads)?,
            kv_heads: word(spec.kv_heads)?,
            k_dim: word(spec.k_dim)?,
            v_dim: word(spec.v_dim)?,
            alibi: spec.alibi.map_or(0.0, |alibi| alibi.factor),
            scale: spec.scale,
            soft_cap: spec.soft_cap.unwrap_or(0.0),
            max_bias: spec.alibi.map_or(0.0, |alibi| alibi.max_bias),
            ..Self::default()
        })
    }

    /// The same with the rows that are attended over.
    pub(super) fn new<D: Device>(attended: &AttendedRows<D>, spec: &AttendSpec) -> Result<Self> {
        let (v_row_bytes, v_stride) = attended.value_rows();
        Ok(Self {
            k_type: kv_type_number(attended.k_shape.kv_type),
            v_type: kv_type_number(attended.v_shape.kv_type),
            k_row_bytes: word(attended.k_shape.bytes())?,
            v_row_bytes: word(v_row_bytes)?,
            v_stride: word(v_stride)?,
            ..Self::of_spec(spec)?
        })
    }
}

/// `MergeArgs` of `attend.k`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct MergeSettings {
    header: u32,
    n: u32,
    n_heads: u32,
    v_dim: u32,
    sums: u32,
    sinks: u32,
    n_pieces: u32,
    logs: u32,
    n_blocks: u32,
}

/// `PartialArgs` of `attend.k`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct PartialSettings {
    n: u32,
    dim: u32,
    width: u32,
}

/// The rows that are attended over.
pub(super) struct AttendedRows<D: Device> {
    pub(super) k: Operand<D>,
    pub(super) v: Operand<D>,
    pub(super) k_shape: RowShape,
    pub(super) v_shape: RowShape,
    pub(super) values: ValueRows,
    /// Number of rows.
    pub(super) n_cells: usize,
}

impl<D: Device> AttendedRows<D> {
    /// Those of a layer, or of the one whose rows it shares.
    pub(super) fn of_layer(lower: &Lower<'_, D>, layer: LayerIdx) -> Result<Self> {
        let rows = lower.context.layout.attended(layer);
        let (_, rows) = rows.ok_or(BackendError::NoRows { layer })?;
        let v_kind = match rows.values {
            ValueRows::Own => RowKind::V,
            ValueRows::InKeys => RowKind::K,
        };
        Ok(Self {
            k: lower.rows(rows.layer, RowKind::K)?,
            v: lower.rows(rows.layer, v_kind)?,
            k_shape: rows.k,
            v_shape: rows.v,
            values: rows.values,
            n_cells: rows.n_rows,
        })
    }

    /// Operands 1 and 2 of a node, `[n, kv_heads, dim]` each.
    fn of_batch(lower: &Lower<'_, D>, node: &Node, spec: &AttendSpec) -> Result<Self> {
        let shape = |dim| RowShape {
            heads: spec.kv_heads,
            dim,
            kv_type: KvType::F32,
            rotation: HeadRotation::None,
        };
        Ok(Self {
            k: lower.operand(node, 1)?,
            v: lower.operand(node, 2)?,
            k_shape: shape(spec.k_dim),
            v_shape: shape(spec.v_dim),
            values: ValueRows::Own,
            n_cells: node.n_rows(),
        })
    }

    /// Bytes of a stored row that the values are in, and the values from head to head in it.
    fn value_rows(&self) -> (usize, usize) {
        let holder = match self.values {
            ValueRows::Own => self.v_shape,
            ValueRows::InKeys => self.k_shape,
        };
        (holder.bytes(), holder.dim)
    }

    /// True if heads begin at multiples of 8 values and are as long.
    pub(super) fn is_wide(&self) -> bool {
        let dims = [self.k_shape.dim, self.v_shape.dim];
        dims.iter().all(|dim| dim.is_multiple_of(8))
    }

    /// The kernels that attend one row and many rows by tensor cores; `None` for heads that none
    /// takes.
    fn tiles_kernels(&self, settings: &Settings) -> Option<[&'static str; 2]> {
        match settings.k_dim.max(settings.v_dim) {
            _ if !self.is_wide() => None,
            0..=64 => Some(["attend_group_64", "attend_tiles_64"]),
            65..=128 => Some(["attend_group_128", "attend_tiles_128"]),
            129..=256 => Some(["attend_group_256", "attend_tiles_256"]),
            _ => None,
        }
    }
}

/// An attention of queries over rows, in pieces.
pub(super) struct Attention<'a, D: Device> {
    pub(super) id: NodeId,
    pub(super) node: &'a Node,
    pub(super) attended: AttendedRows<D>,
    /// Rotated as the keys are.
    pub(super) q: Operand<D>,
    /// The results of pieces: two sums for each slot and head, then its values.
    pub(super) partial: Operand<D>,
    pub(super) settings: Settings,
}

impl<'a, D: Device> Attention<'a, D> {
    /// The attention of a node with room for the partial results of `n_slots` rows.
    pub(super) fn new(
        lower: &mut Lower<'_, D>,
        (id, node): NumberedNode<'a>,
        attended: AttendedRows<D>,
        spec: AttendSpec,
        n_slots: usize,
    ) -> Result<Self> {
        if spec.v_dim > MAX_V_DIM {
            return Err(lower.unsupported(node));
        }
        let n = lower.context.graph.shape().n_tokens;
        let n_sums = n_slots * spec.n_heads;
        Ok(Self {
            partial: lower.temporary(n_sums * (spec.v_dim + 2) * size_of::<f32>()),
            q: lower.rotated_queries(node, &attended, n * spec.n_heads * spec.k_dim)?,
            settings: Settings {
                sums: word(n_sums * 2)?,
                ..Settings::new(&attended, &spec)?
            },
            id,
            node,
            attended,
        })
    }

    /// The first operands of all kernels: queries, inputs, K and V.
    pub(super) fn operands(&self) -> Vec<Operand<D>> {
        let AttendedRows { k, v, .. } = &self.attended;
        vec![self.q.clone(), Operand::Inputs(0), k.clone(), v.clone()]
    }

    /// Blocks for the queries of all heads in `n_rows` rows, `at_once` of a K/V head a block.
    pub(super) fn n_blocks(&self, n_rows: u32, at_once: u32) -> u32 {
        let kv_heads = self.settings.kv_heads.max(1);
        kv_heads * (self.settings.n_heads / kv_heads * n_rows).div_ceil(at_once)
    }

    /// Merges what pieces gave: `n_pieces` of every row, or 0 for those of its visibility.
    pub(super) fn merge(
        self,
        lower: &mut Lower<'_, D>,
        sinks: Option<&str>,
        n_pieces: u32,
    ) -> Result<(), BackendError> {
        let n_values = word(self.node.n_values())?;
        let logs = u32::from(ResultForm::of(&self.node.op) == ResultForm::Partial);
        // What is rotated back afterwards is not what a product reads.
        let is_final = self.attended.v_shape.rotation.is_none() && logs == 0;
        let (blocks, n_blocks) = if is_final {
            lower.with_int8(self.id, self.node.n_values())?
        } else {
            (Operand::Inputs(0), 0)
        };
        let settings = MergeSettings {
            header: self.settings.header,
            n: word(self.node.n_rows())?,
            n_heads: self.settings.n_heads,
            v_dim: self.settings.v_dim,
            sums: self.settings.sums,
            sinks: u32::from(sinks.is_some()),
            n_pieces,
            logs,
            n_blocks,
        };
        let sinks = lower.floats_or(sinks, self.node, &Operand::Inputs(0))?;
        let y = lower.result(self.id);
        let operands = vec![self.partial, Operand::Inputs(0), sinks, y.clone(), blocks];
        lower.launch("attend_merge", Grid::values(n_values), operands, &settings)?;
        lower.rotate_back(&self.attended, y, (n_values, logs))
    }
}

impl<D: Device> Lower<'_, D> {
    /// Lowers an attention.
    pub(super) fn attend(&mut self, (id, node): NumberedNode<'_>) -> Result<()> {
        let (layer, spec, sinks, relative) = match &node.op {
            Op::Attend {
                layer,
                spec,
                sinks,
                relative,
            } => (Some(*layer), spec, sinks, relative),
            Op::AttendPartial { layer, spec, sinks } => (Some(*layer), spec, sinks, &None),
            Op::AttendBatch {
                spec,
                sinks,
                relative,
            } => (None, spec, sinks, relative),
            _ => return Err(self.unsupported(node)),
        };
        let (attended, seen_at) = match layer {
            Some(layer) => (AttendedRows::of_layer(self, layer)?, 2),
            None => (AttendedRows::of_batch(self, node, spec)?, 3),
        };
        let graph = self.context.graph;
        let (visibility, header) = self.inputs.visibility(graph, (id, node), seen_at)?;
        let n_slots = self.inputs.slots(graph.shape().n_tokens);
        let mut attention = Attention::new(self, (id, node), attended, *spec, n_slots)?;
        attention.settings.header = header;
        if spec.alibi.is_some() || relative.is_some() {
            let positions = self.input_word(node, node.operands.last().copied())?;
            attention.settings.positions = positions;
        }
        match relative {
            None => self.launch_pieces(&attention, visibility)?,
            Some(relative) => self.launch_distances(&attention, visibility, relative)?,
        }
        attention.merge(self, sinks.as_deref(), 0)
    }

    /// Lowers the merge of two partial results.
    pub(super) fn merge_partials(&mut self, (id, node): NumberedNode<'_>) -> Result<()> {
        let dim = width(self.operand_node(node, 0)?).saturating_sub(1);
        let settings = PartialSettings {
            n: word(node.n_values())?,
            dim: word(dim)?,
            width: word(ResultForm::of(&node.op).len(dim))?,
        };
        let mut operands = self.operands(node, 2)?;
        operands.push(self.result(id));
        let grid = Grid::values(settings.n);
        self.launch("merge_partials", grid, operands, &settings)
    }

    /// Rotates results back where values are rotated, in place; `logs` of `n_values` are behind
    /// each head.
    pub(super) fn rotate_back(
        &mut self,
        attended: &AttendedRows<D>,
        y: Operand<D>,
        (n_values, logs): (u32, u32),
    ) -> Result<()> {
        let rotation = attended.v_shape.rotation;
        if rotation.is_none() {
            return Ok(());
        }
        let dim = word(attended.v_shape.dim)?;
        let settings = HadamardSettings {
            n: n_values / (dim + logs) * dim,
            group: word(rotation.group())?,
            dim,
            stride: dim + logs,
        };
        self.hadamard(y.clone(), y, settings)
    }

    /// The queries, rotated as the keys are.
    pub(super) fn rotated_queries(
        &mut self,
        node: &Node,
        attended: &AttendedRows<D>,
        n_values: usize,
    ) -> Result<Operand<D>> {
        let q = self.operand(node, 0)?;
        let rotation = attended.k_shape.rotation;
        if rotation.is_none() {
            return Ok(q);
        }
        let rotated = self.temporary(n_values * size_of::<f32>());
        let dim = word(attended.k_shape.dim)?;
        let settings = HadamardSettings {
            n: word(n_values)?,
            group: word(rotation.group())?,
            dim,
            stride: dim,
        };
        self.hadamard(q, rotated.clone(), settings)?;
        Ok(rotated)
    }

    /// Launches the pieces of few rows and those of many.
    fn launch_pieces(&mut self, attention: &Attention<'_, D>, visibility: usize) -> Result<()> {
        let Attention {
            attended, settings, ..
        } = attention;
        let tiles = match self.context.config.precision {
            Precision::Fast => attended.tiles_kernels(settings),
            Precision::Precise => None,
        };
        // One query of a K/V head leaves tensor cores idle, and so do exchanges in their place.
        let group = settings.n_heads / settings.kv_heads.max(1);
        let in_groups = group > 1 && self.context.shared.device.has_tensor_cores();
        for (many, n_rows) in PIECES {
            let queries = settings.n_heads / settings.kv_heads.max(1) * n_rows;
            let (kernel, at_once) = match (queries, tiles) {
                (_, Some([_, kernel])) if many == 1 => (kernel, TILE_QUERIES),
                (_, Some([kernel, _])) if in_groups => (kernel, GROUP_QUERIES),
                _ if !attended.is_wide() => ("attend_odd", 1),
                (0 | 1, _) => ("attend_1", 1),
                _ => ("attend_4", 4),
            };
            let grid = Grid::pieces(many, attention.n_blocks(n_rows, at_once), visibility);
            let mut operands = attention.operands();
            operands.push(attention.partial.clone());
            self.launch(kernel, grid, operands, &Settings { many, ..*settings })?;
        }
        Ok(())
    }
}
