//! Attention over stored rows and within the ubatch: pieces of work, then their merge.
//!
//! Which positions a piece has and where its partial results go is in the tables of the inputs
//! (`visibility_table`). Invariant: how a row's pieces are cut does not depend on other rows.

use bytemuck::{Pod, Zeroable};
use kv_core::backend::{BackendError, RowKind};
use kv_core::graph::{AttendSpec, Node, NodeId, Op};
use kv_core::hadamard::HeadRotation;
use kv_core::layers::{RowShape, ValueRows};
use kv_core::{KvType, LayerIdx};

use super::store::{hadamard, kv_type_number};
use super::{Lower, word};
use crate::config::Precision;
use crate::device::Device;
use crate::program::{Grid, Operand};
use crate::visibility_table::TILE_ROWS;
use crate::weights::WeightForm;

/// The widest heads of values: 8 columns for each of 256 threads.
const MAX_V_DIM: usize = 2048;
/// Queries that a thread block attends by tensor cores.
const TILE_QUERIES: u32 = 64;

/// `AttendArgs` of `kv_pieces.h`.
#[derive(Clone, Copy, Default, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Settings {
    /// The first word of the visibility's header, and of the rows' positions.
    pub(super) header: u32,
    pub(super) positions: u32,
    pub(super) many: u32,
    pub(super) n_heads: u32,
    kv_heads: u32,
    k_dim: u32,
    v_dim: u32,
    k_type: u32,
    v_type: u32,
    k_row_bytes: u32,
    v_row_bytes: u32,
    v_stride: u32,
    pub(super) sums: u32,
    alibi: u32,
    scale: f32,
    soft_cap: f32,
    max_bias: f32,
}

impl Settings {
    /// Those of a specification.
    pub(super) fn of_spec(spec: &AttendSpec) -> Result<Self, BackendError> {
        Ok(Self {
            n_heads: word(spec.n_heads)?,
            kv_heads: word(spec.kv_heads)?,
            k_dim: word(spec.k_dim)?,
            v_dim: word(spec.v_dim)?,
            alibi: u32::from(spec.alibi.is_some()),
            scale: spec.scale,
            soft_cap: spec.soft_cap.unwrap_or(0.0),
            max_bias: spec.alibi.map_or(0.0, |alibi| alibi.max_bias),
            ..Self::default()
        })
    }

    /// The same with the rows that are attended over.
    pub(super) fn new<D: Device>(
        attended: &Attended<D>,
        spec: &AttendSpec,
    ) -> Result<Self, BackendError> {
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
}

/// The rows that are attended over.
pub(super) struct Attended<D: Device> {
    pub(super) k: Operand<D>,
    pub(super) v: Operand<D>,
    pub(super) k_shape: RowShape,
    pub(super) v_shape: RowShape,
    pub(super) values: ValueRows,
}

impl<D: Device> Attended<D> {
    /// Those of a layer, or of the one whose rows it shares.
    pub(super) fn of_layer(lower: &Lower<'_, D>, layer: LayerIdx) -> Result<Self, BackendError> {
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
        })
    }

    /// Operands 1 and 2 of a node, `[n, kv_heads, dim]` each.
    fn of_batch(
        lower: &Lower<'_, D>,
        node: &Node,
        spec: &AttendSpec,
    ) -> Result<Self, BackendError> {
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

    /// Whether heads begin at multiples of 8 values and are as long.
    fn is_wide(&self) -> bool {
        let dims = [self.k_shape.dim, self.v_shape.dim];
        dims.iter().all(|dim| dim.is_multiple_of(8))
    }

    /// The kernel that attends many rows by tensor cores; `None` for heads that none takes.
    fn tiles_kernel(&self, settings: &Settings) -> Option<&'static str> {
        match settings.k_dim.max(settings.v_dim) {
            _ if !self.is_wide() => None,
            0..=64 => Some("attend_tiles_64"),
            65..=128 => Some("attend_tiles_128"),
            129..=256 => Some("attend_tiles_256"),
            _ => None,
        }
    }
}

/// Whether biases have a factor, which kernels do not know.
pub(super) fn scales_biases(spec: &AttendSpec) -> bool {
    spec.alibi.is_some_and(|alibi| alibi.factor != 1.0)
}

/// Lowers an attention.
pub(super) fn lower<D: Device>(
    lower: &mut Lower<'_, D>,
    id: NodeId,
    node: &Node,
) -> Result<(), BackendError> {
    let (attended, spec, sinks, seen_at) = match &node.op {
        Op::Attend { layer, spec, sinks } => (Attended::of_layer(lower, *layer)?, spec, sinks, 2),
        Op::AttendBatch {
            spec,
            sinks,
            relative: None,
        } => (Attended::of_batch(lower, node, spec)?, spec, sinks, 3),
        _ => return Err(lower.unsupported(node)),
    };
    if spec.v_dim > MAX_V_DIM || scales_biases(spec) {
        return Err(lower.unsupported(node));
    }
    let sinks = match sinks {
        Some(name) => Some(lower.weight(name, node, WeightForm::Floats)?),
        None => None,
    };
    let graph = lower.context.graph;
    let (visibility, header) = lower.inputs.visibility(graph, (id, node), seen_at)?;
    let n = graph.shape().n_tokens;
    let n_slots = lower.inputs.slots(n) * spec.n_heads;
    let partial = lower.temporary(n_slots * (spec.v_dim + 2) * size_of::<f32>());
    let q = rotated_queries(lower, node, &attended, n * spec.n_heads * spec.k_dim)?;
    let settings = Settings {
        header: word(header)?,
        positions: match spec.alibi {
            Some(_) => lower.input_word(node, node.operands.last().copied())?,
            None => 0,
        },
        sums: word(n_slots * 2)?,
        ..Settings::new(&attended, spec)?
    };
    let y = lower.result(id);
    launch_pieces(lower, &attended, (q, partial.clone()), settings, visibility)?;
    let merge = MergeSettings {
        header: settings.header,
        n: word(n)?,
        n_heads: settings.n_heads,
        v_dim: settings.v_dim,
        sums: settings.sums,
        sinks: u32::from(sinks.is_some()),
    };
    let n_values = word(n * spec.n_heads * spec.v_dim)?;
    let sinks = sinks.map_or(Operand::Inputs(0), Operand::Weight);
    let operands = vec![partial, Operand::Inputs(0), sinks, y.clone()];
    let grid = Grid::Fixed([n_values.div_ceil(256), 1]);
    lower.launch("attend_merge", grid, operands, &merge)?;
    rotate_back(lower, &attended, y, n_values)
}

/// Rotates results back where values are rotated, in place.
pub(super) fn rotate_back<D: Device>(
    lower: &mut Lower<'_, D>,
    attended: &Attended<D>,
    y: Operand<D>,
    n_values: u32,
) -> Result<(), BackendError> {
    let rotation = attended.v_shape.rotation;
    if rotation.is_none() {
        return Ok(());
    }
    let sizes = [n_values, word(rotation.group())?];
    hadamard(lower, y.clone(), y, sizes)
}

/// The queries, rotated as the keys are.
pub(super) fn rotated_queries<D: Device>(
    lower: &mut Lower<'_, D>,
    node: &Node,
    attended: &Attended<D>,
    n_values: usize,
) -> Result<Operand<D>, BackendError> {
    let q = lower.operand(node, 0)?;
    let rotation = attended.k_shape.rotation;
    if rotation.is_none() {
        return Ok(q);
    }
    let rotated = lower.temporary(n_values * size_of::<f32>());
    let sizes = [word(n_values)?, word(rotation.group())?];
    hadamard(lower, q, rotated.clone(), sizes)?;
    Ok(rotated)
}

/// Launches the pieces of few rows and those of many.
fn launch_pieces<D: Device>(
    lower: &mut Lower<'_, D>,
    attended: &Attended<D>,
    (q, partial): (Operand<D>, Operand<D>),
    settings: Settings,
    visibility: usize,
) -> Result<(), BackendError> {
    let spec_group = settings.n_heads / settings.kv_heads.max(1);
    let is_wide = attended.is_wide();
    let tiles = match lower.context.config.precision {
        Precision::Fast => attended.tiles_kernel(&settings),
        Precision::Precise => None,
    };
    for (many, rows) in [(0, 1), (1, TILE_ROWS as u32)] {
        let queries = spec_group * rows;
        let (kernel, at_once) = match (queries, tiles) {
            (_, Some(kernel)) if many == 1 => (kernel, TILE_QUERIES),
            _ if !is_wide => ("attend_odd", 1),
            (0 | 1, _) => ("attend_1", 1),
            _ => ("attend_4", 4),
        };
        let x = settings.kv_heads * queries.div_ceil(at_once);
        let grid = match many {
            0 => Grid::Few { x, visibility },
            _ => Grid::Many { x, visibility },
        };
        let operands = vec![
            q.clone(),
            Operand::Inputs(0),
            attended.k.clone(),
            attended.v.clone(),
            partial.clone(),
        ];
        lower.launch(kernel, grid, operands, &Settings { many, ..settings })?;
    }
    Ok(())
}
