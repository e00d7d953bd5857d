//! Rows: some of them, some of their columns, sums with a row, products with a weight, mixes of their
//! parts, factors by position.

use bytemuck::{Pod, Zeroable};
use kv_core::backend::BackendError;
use kv_core::graph::{Node, NodeId, Op};

use super::elementwise::THREADS;
use super::norm::WARPS;
use super::{Lower, word};
use crate::device::Device;
use crate::program::{Grid, Operand};
use crate::weights::WeightForm;

/// `RowsArgs` of `rows.k`.
#[derive(Clone, Copy, Default, Pod, Zeroable)]
#[repr(C)]
struct Settings {
    n: u32,
    row_len: u32,
    width: u32,
    first: u32,
    every: u32,
    offset: u32,
    strength: f32,
}

/// `MixArgs` of `mix.k`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct MixSettings {
    n: u32,
    inputs: u32,
    outputs: u32,
    dim: u32,
}

/// The last dimension of a node.
fn width(node: &Node) -> Result<u32, BackendError> {
    word(node.shape.last().copied().unwrap_or(0))
}

/// Lowers an operation on rows.
pub(super) fn lower<D: Device>(
    lower: &mut Lower<'_, D>,
    id: NodeId,
    node: &Node,
) -> Result<(), BackendError> {
    let mut settings = Settings {
        n: word(node.n_values())?,
        row_len: word(node.row_len())?,
        ..Settings::default()
    };
    let mut operands = vec![lower.operand(node, 0)?];
    let kernel = match &node.op {
        Op::Columns { first } => {
            // Of every head, where rows have heads.
            settings.first = word(*first)?;
            settings.width = width(lower.operand_node(node, 0)?)?;
            settings.row_len = width(node)?;
            "columns"
        }
        Op::Concat => {
            settings.width = width(lower.operand_node(node, 0)?)?;
            settings.row_len = width(node)?;
            operands.push(lower.operand(node, 1)?);
            "concat"
        }
        Op::TakeRows => {
            operands.push(lower.operand(node, 1)?);
            "take_rows"
        }
        Op::AddRow { weight, row } => {
            settings.first = word(*row)?;
            let weight = lower.weight(weight, node, WeightForm::Floats)?;
            operands.push(Operand::Weight(weight));
            "add_row"
        }
        Op::Gain { weight } => {
            let weight = lower.weight(weight, node, WeightForm::Floats)?;
            settings.width = word(weight.shape.iter().product())?;
            operands.push(Operand::Weight(weight));
            "gain"
        }
        Op::ScaleByPosition { scale } if scale.offset <= 1 => {
            settings.offset = scale.offset;
            settings.every = scale.every.max(1);
            settings.strength = scale.strength;
            operands.push(lower.operand(node, 1)?);
            "scale_by_position"
        }
        _ => return Err(lower.unsupported(node)),
    };
    operands.push(lower.result(id));
    let grid = Grid::Fixed([settings.n.div_ceil(THREADS), 1]);
    lower.launch(kernel, grid, operands, &settings)
}

/// Lowers linear combinations of the parts of rows.
pub(super) fn mix<D: Device>(
    lower: &mut Lower<'_, D>,
    id: NodeId,
    node: &Node,
) -> Result<(), BackendError> {
    let part = |node: &Node, at: usize| word(node.shape.get(at).copied().unwrap_or(1));
    let settings = MixSettings {
        n: word(node.n_values())?,
        inputs: part(lower.operand_node(node, 0)?, 1)?,
        outputs: part(node, 1)?,
        dim: part(node, 2)?,
    };
    let (kernel, at_once) = match settings.inputs > settings.dim {
        true => ("mix_short", WARPS),
        false => ("mix", THREADS),
    };
    let operands = vec![
        lower.operand(node, 0)?,
        lower.operand(node, 1)?,
        lower.result(id),
    ];
    let grid = Grid::Fixed([settings.n.div_ceil(at_once), 1]);
    lower.launch(kernel, grid, operands, &settings)
}
