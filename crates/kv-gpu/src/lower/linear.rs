//! Products with matrices: few tokens row by row of the matrix, many by tiles.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use kv_block::BlockFormat;
use kv_graph::{Node, Op};

use super::activations::{ActivationForm, Activations};
use super::{Lower, Result, width, word};
use crate::config::Precision;
use crate::device::Device;
use crate::inputs::{NumberedNode, after};
use crate::program::{Grid, Operand};
use crate::weights::{DeviceWeight, WeightForm};

/// Tokens that one pass over a matrix multiplies row by row.
pub(super) const MAX_GEMV_TOKENS: usize = 8;
/// Matrices of one launch.
const MAX_MATRICES: usize = 3;
/// Nodes in which others are looked for that multiply the same activations.
const LOOK_AHEAD: usize = 16;
/// Tokens and rows of a tile of products of many tokens.
const TILE_TOKENS: u32 = 128;
const TILE_ROWS: u32 = 64;

/// `GemvMatrix` of `products.h`.
#[derive(Clone, Copy, Default, Pod, Zeroable)]
#[repr(C)]
struct GemvMatrix {
    n_rows: u32,
    planes: [u32; 3],
    has_bias: u32,
}

/// `GemvArgs` of `products.h`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct GemvSettings {
    format: u32,
    n_columns: u32,
    n_tokens: u32,
    split: u32,
    n_slots: u32,
    x_by_slot: u32,
    n_x: u32,
    matrices: [GemvMatrix; MAX_MATRICES],
}

/// `GemmArgs` of `gemm.h`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct GemmSettings {
    n_columns: u32,
    padded: u32,
    n_tokens: u32,
    n_rows: u32,
    planes: [u32; 3],
    has_bias: u32,
    n_slots: u32,
    x_by_slot: u32,
    n_x: u32,
    n_experts: u32,
}

/// A matrix, or one for each expert, with what is added and where the products go.
#[derive(Debug)]
pub(super) struct Matrix<D: Device> {
    pub(super) weight: Arc<DeviceWeight<D>>,
    pub(super) bias: Option<Arc<DeviceWeight<D>>>,
    /// Rows of one expert's matrix.
    pub(super) n_rows: u32,
    pub(super) y: Operand<D>,
}

impl<D: Device> Matrix<D> {
    fn bias(&self) -> Operand<D> {
        Operand::Weight(Arc::clone(self.bias.as_ref().unwrap_or(&self.weight)))
    }
}

/// The further operands of a product with experts.
#[derive(Clone, Debug)]
pub(super) struct Slots<D: Device> {
    /// The expert of each slot.
    pub(super) experts: Operand<D>,
    /// Slots of a token.
    pub(super) n_used: u32,
    pub(super) n_experts: u32,
    /// True if each slot has activations of its own.
    pub(super) x_by_slot: bool,
}

impl<'a, D: Device> Lower<'a, D> {
    /// Lowers a product, with others of the same activations.
    pub(super) fn linear(&mut self, (id, node): NumberedNode<'_>) -> Result<()> {
        if node.n_rows() > MAX_GEMV_TOKENS && self.context.config.precision == Precision::Fast {
            let matrix = self.matrix((id, node))?;
            return self.gemm(node, &matrix, None);
        }
        let matrices = self.matrices((id, node), MAX_MATRICES)?;
        self.gemv(node, &matrices, None)
    }

    /// The matrix of a product, and up to `most` with those of products soon after it with the same
    /// activations and format, which are lowered with it.
    pub(super) fn matrices(&mut self, at: NumberedNode<'_>, most: usize) -> Result<Vec<Matrix<D>>> {
        let (id, node) = at;
        let mut matrices = vec![self.matrix(at)?];
        let x = |lower: &Self, node: &Node| node.operands.first().map(|&x| lower.root(x));
        let kind = std::mem::discriminant(&node.op);
        for other in after(self.context.graph, id).take(LOOK_AHEAD) {
            let (other_id, it) = other;
            let same = std::mem::discriminant(&it.op) == kind
                && x(self, it) == x(self, node)
                && it.operands.get(1) == node.operands.get(1)
                && !self.done[other_id.as_usize()];
            if same && matrices.len() < most && self.format_of(it)? == matrices[0].weight.format {
                matrices.push(self.matrix(other)?);
                self.done[other_id.as_usize()] = true;
            }
        }
        Ok(matrices)
    }

    /// The format of a product's matrix.
    fn format_of(&self, node: &Node) -> Result<BlockFormat> {
        let (weight, _) = names(node).ok_or_else(|| self.unsupported(node))?;
        Ok(self.host_weight(weight, node)?.format())
    }

    /// True if a node is a product that reads activations as blocks of int8.
    pub(super) fn reads_int8(&self, node: &Node) -> Result<bool> {
        if names(node).is_none() || node.n_rows() > MAX_GEMV_TOKENS {
            return Ok(false);
        }
        let form = self.gemv_form(self.format_of(node)?);
        Ok(form == ActivationForm::Int8)
    }

    /// The input of products of few tokens with matrices of a format.
    fn gemv_form(&self, format: BlockFormat) -> ActivationForm {
        match self.context.config.precision {
            Precision::Fast if format.block_len() > 1 => ActivationForm::Int8,
            _ => ActivationForm::Floats,
        }
    }

    /// The matrix of a product, with a place for its result.
    fn matrix(&mut self, (id, node): NumberedNode<'_>) -> Result<Matrix<D>> {
        let (weight, bias) = names(node).ok_or_else(|| self.unsupported(node))?;
        let bias = bias.map(|bias| self.weight(bias, node, WeightForm::Floats));
        Ok(Matrix {
            weight: self.weight(weight, node, WeightForm::Stored)?,
            bias: bias.transpose()?,
            n_rows: word(width(node))?,
            y: self.result(id),
        })
    }

    /// Products of one to eight tokens at once, or of slots one by one.
    pub(super) fn gemv(
        &mut self,
        node: &Node,
        matrices: &[Matrix<D>],
        slots: Option<&Slots<D>>,
    ) -> Result<()> {
        let Some(first) = matrices.first() else {
            return Ok(());
        };
        let format = first.weight.format;
        let n_tokens = match slots {
            Some(slots) => word(node.n_rows())? * slots.n_used,
            None => word(node.n_rows())?,
        };
        // Slots have different matrices: one token at a time.
        let one = n_tokens == 1 || slots.is_some();
        let (at_once, n_rows) = if one { (1, 2) } else { (8, 4) };
        // The kernel's name, and the rows that one of its warps has.
        let (of, n_rows) = match self.context.config.precision {
            Precision::Fast => (in_kernels(format), n_rows),
            Precision::Precise => ("floats".to_owned(), 1),
        };
        let x = self.activations(node, self.gemv_form(format))?;
        let n_units = match format.block_len() {
            1 => x.n_columns.div_ceil(8),
            _ => x.n_columns.div_ceil(32),
        };
        let mut settings = GemvSettings {
            format: format as u32,
            n_columns: x.n_columns,
            n_tokens,
            split: n_units.div_ceil(32).next_power_of_two().clamp(1, 4),
            n_slots: slots.map_or(0, |slots| slots.n_used),
            x_by_slot: slots.map_or(0, |slots| slots.x_by_slot.into()),
            n_x: x.n_rows,
            matrices: Default::default(),
        };
        let n_block_rows = 4 / settings.split * n_rows;
        let mut n_groups = 0;
        for (to, matrix) in settings.matrices.iter_mut().zip(matrices) {
            *to = GemvMatrix {
                n_rows: matrix.n_rows,
                planes: matrix.weight.planes.places(),
                has_bias: matrix.bias.is_some().into(),
            };
            n_groups += matrix.n_rows.div_ceil(n_block_rows);
        }
        let each = || (0..MAX_MATRICES).map(|at| matrices.get(at).unwrap_or(first));
        let mut operands: Vec<_> = each()
            .map(|m| Operand::Weight(Arc::clone(&m.weight)))
            .collect();
        operands.push(x.operand.clone());
        operands.extend(each().map(Matrix::bias));
        operands.push(slots.map_or(x.operand, |slots| slots.experts.clone()));
        operands.extend(each().map(|m| m.y.clone()));
        let grid = Grid::Fixed([n_groups, n_tokens.div_ceil(at_once)]);
        self.launch(&format!("gemv_{of}_{at_once}"), grid, operands, &settings)
    }

    /// Products of many tokens, or of slots in the order of their experts.
    pub(super) fn gemm(
        &mut self,
        node: &Node,
        matrix: &Matrix<D>,
        slots: Option<(&Slots<D>, Operand<D>)>,
    ) -> Result<()> {
        let Activations {
            operand: x,
            n_rows: n_x,
            n_columns,
            padded,
        } = self.activations(node, ActivationForm::Halves)?;
        let n_tokens = word(node.n_rows())?;
        let (n_slots, x_by_slot, n_experts) = match &slots {
            Some((slots, _)) => (slots.n_used, slots.x_by_slot.into(), slots.n_experts),
            None => (0, 0, 1),
        };
        let settings = GemmSettings {
            n_columns,
            padded,
            n_tokens,
            n_rows: matrix.n_rows,
            planes: matrix.weight.planes.places(),
            has_bias: matrix.bias.is_some().into(),
            n_slots,
            x_by_slot,
            n_x,
            n_experts,
        };
        let lists = slots.map_or_else(|| x.clone(), |(_, lists)| lists);
        let weight = Operand::Weight(Arc::clone(&matrix.weight));
        let operands = vec![weight, x, matrix.bias(), lists, matrix.y.clone()];
        let n_tiles = n_tokens.div_ceil(TILE_TOKENS) * matrix.n_rows.div_ceil(TILE_ROWS);
        let kernel = format!("gemm_{}", in_kernels(matrix.weight.format));
        let grid = Grid::Fixed([n_tiles, n_experts]);
        self.launch(&kernel, grid, operands, &settings)
    }
}

fn names(node: &Node) -> Option<(&str, Option<&str>)> {
    match &node.op {
        Op::Linear { weight, bias } | Op::ExpertLinear { weight, bias } => {
            Some((weight, bias.as_deref()))
        }
        Op::HeadLinear { weight } => Some((weight, None)),
        _ => None,
    }
}

/// The name of a format in the names of kernels.
fn in_kernels(format: BlockFormat) -> String {
    format.name().to_lowercase()
}
