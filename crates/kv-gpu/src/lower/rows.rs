//! Rows: some of them, some of their columns, sums with a row, products with a weight, mixes of
//! their parts, factors by position.

use bytemuck::{Pod, Zeroable};
use kv_graph::{Node, Op};

use super::norm::WARPS;
use super::{Lower, Result, width, word};
use crate::device::Device;
use crate::inputs::NumberedNode;
use crate::program::{Grid, Operand, THREADS};
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

impl<D: Device> Lower<'_, D> {
    /// Lowers an operation on rows.
    pub(super) fn on_rows(&mut self, (id, node): NumberedNode<'_>) -> Result<()> {
        let mut settings = Settings {
            n: word(node.n_values())?,
            row_len: word(node.row_len())?,
            ..Settings::default()
        };
        let mut operands = vec![self.operand(node, 0)?];
        let kernel = match &node.op {
            Op::Columns { first } => {
                // Of every head, where rows have heads.
                settings.first = word(*first)?;
                settings.width = word(width(self.operand_node(node, 0)?))?;
                settings.row_len = word(width(node))?;
                "columns"
            }
            Op::Concat => {
                settings.width = word(width(self.operand_node(node, 0)?))?;
                settings.row_len = word(width(node))?;
                operands.push(self.operand(node, 1)?);
                "concat"
            }
            Op::TakeRows => {
                operands.push(self.operand(node, 1)?);
                "take_rows"
            }
            Op::AddRow { weight, row } => {
                settings.first = word(*row)?;
                operands.push(self.floats(weight, node)?);
                "add_row"
            }
            Op::Gain { weight } => {
                let weight = self.weight(weight, node, WeightForm::Floats)?;
                settings.width = word(weight.shape.iter().product())?;
                operands.push(Operand::Weight(weight));
                "gain"
            }
            Op::ScaleByPosition { scale } if scale.offset <= 1 => {
                settings.offset = scale.offset;
                settings.every = scale.every.max(1);
                settings.strength = scale.strength;
                operands.push(self.operand(node, 1)?);
                "scale_by_position"
            }
            _ => return Err(self.unsupported(node)),
        };
        operands.push(self.result(id));
        self.launch(kernel, Grid::values(settings.n), operands, &settings)
    }

    /// Lowers linear combinations of the parts of rows.
    pub(super) fn mix(&mut self, (id, node): NumberedNode<'_>) -> Result<()> {
        let part = |node: &Node, at: usize| word(node.shape.get(at).copied().unwrap_or(1));
        let settings = MixSettings {
            n: word(node.n_values())?,
            inputs: part(self.operand_node(node, 0)?, 1)?,
            outputs: part(node, 1)?,
            dim: part(node, 2)?,
        };
        let (kernel, at_once) = if settings.inputs > settings.dim {
            ("mix_short", WARPS)
        } else {
            ("mix", THREADS)
        };
        let mut operands = self.operands(node, 2)?;
        operands.push(self.result(id));
        let grid = Grid::rows(settings.n.div_ceil(at_once));
        self.launch(kernel, grid, operands, &settings)
    }
}
