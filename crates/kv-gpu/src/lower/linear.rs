//! Products with matrices: few tokens row by row of the matrix, many by tiles.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use kv_core::backend::BackendError;
use kv_core::block::BlockFormat;
use kv_core::graph::{Node, NodeId, Op};

use super::activations::{ActivationForm, Activations};
use super::{Lower, word};
use crate::config::Precision;
use crate::device::Device;
use crate::inputs::after;
use crate::program::{Grid, Operand};
use crate::weights::{DeviceWeight, WeightForm};

/// Tokens that one pass over a matrix multiplies row by row.
pub(super) const MAX_GEMV_TOKENS: usize = 8;
/// Matrices of one launch.
const MAX_MATRICES: usize = 3;
/// Nodes in which others are looked for that multiply the same activations.
const LOOK_AHEAD: usize = 16;
/// Tokens and rows of a tile.
const TILE: u32 = 64;

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

/// What a product with experts needs besides.
#[derive(Clone, Debug)]
pub(super) struct Slots<D: Device> {
    /// The expert of each slot.
    pub(super) experts: Operand<D>,
    /// Slots of a token.
    pub(super) n_used: u32,
    pub(super) n_experts: u32,
    /// Whether each slot has activations of its own.
    pub(super) x_by_slot: bool,
}

/// Lowers a product, with others of the same activations.
pub(super) fn lower<D: Device>(
    lower: &mut Lower<'_, D>,
    id: NodeId,
    node: &Node,
) -> Result<(), BackendError> {
    let format = format_of(lower, node)?;
    let n_tokens = node.n_rows();
    if n_tokens > MAX_GEMV_TOKENS && lower.context.config.precision == Precision::Fast {
        let matrix = matrix(lower, id, node)?;
        return gemm(lower, node, &matrix, None);
    }
    let mut matrices = vec![matrix(lower, id, node)?];
    for (other, other_node) in same_activations(lower, id, node) {
        if matrices.len() < MAX_MATRICES && format_of(lower, other_node)? == format {
            matrices.push(matrix(lower, other, other_node)?);
            lower.done[other.as_usize()] = true;
        }
    }
    gemv(lower, node, &matrices, None)
}

/// Products soon after node `id` with the same activations.
pub(super) fn same_activations<'a, D: Device>(
    lower: &Lower<'a, D>,
    id: NodeId,
    node: &Node,
) -> Vec<(NodeId, &'a Node)> {
    let x = |node: &Node| node.operands.first().map(|x| lower.root[x.as_usize()]);
    let nodes = after(lower.context.graph, id);
    let kind = std::mem::discriminant(&node.op);
    let others = nodes.take(LOOK_AHEAD).filter(|(other, it)| {
        let same = std::mem::discriminant(&it.op) == kind && x(it) == x(node);
        same && it.operands.get(1) == node.operands.get(1) && !lower.done[other.as_usize()]
    });
    others.collect()
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

/// The format of a product's matrix.
pub(super) fn format_of<D: Device>(
    lower: &Lower<'_, D>,
    node: &Node,
) -> Result<BlockFormat, BackendError> {
    let (weight, _) = names(node).ok_or_else(|| lower.unsupported(node))?;
    lower
        .host_weight(weight, node)
        .map(|weight| weight.format())
}

/// Whether a node is a product that reads activations as blocks of int8.
pub(super) fn reads_int8<D: Device>(
    lower: &Lower<'_, D>,
    node: &Node,
) -> Result<bool, BackendError> {
    if names(node).is_none() || node.n_rows() > MAX_GEMV_TOKENS {
        return Ok(false);
    }
    let (form, _) = gemv_kernels(format_of(lower, node)?, lower.context.config.precision);
    Ok(form == ActivationForm::Int8)
}

/// The matrix of a product, with a place for its result.
pub(super) fn matrix<D: Device>(
    lower: &mut Lower<'_, D>,
    id: NodeId,
    node: &Node,
) -> Result<Matrix<D>, BackendError> {
    let (weight, bias) = names(node).ok_or_else(|| lower.unsupported(node))?;
    let bias = bias.map(|bias| lower.weight(bias, node, WeightForm::Floats));
    Ok(Matrix {
        weight: lower.weight(weight, node, WeightForm::Stored)?,
        bias: bias.transpose()?,
        n_rows: word(node.shape.last().copied().unwrap_or(1))?,
        y: lower.result(id),
    })
}

/// Products of one to eight tokens at once, or of slots one by one.
pub(super) fn gemv<D: Device>(
    lower: &mut Lower<'_, D>,
    node: &Node,
    matrices: &[Matrix<D>],
    slots: Option<&Slots<D>>,
) -> Result<(), BackendError> {
    let Some(first) = matrices.first() else {
        return Ok(());
    };
    let format = first.weight.format;
    let (form, kernels) = gemv_kernels(format, lower.context.config.precision);
    let n_tokens = match slots {
        Some(slots) => word(node.n_rows())? * slots.n_used,
        None => word(node.n_rows())?,
    };
    // Slots have different matrices: one token at a time.
    let one = n_tokens == 1 || slots.is_some();
    let x = lower.activations(node, form)?;
    let n_units = match format.block_len() == 1 && form == ActivationForm::Floats {
        true => x.n_columns.div_ceil(8),
        false => x.n_columns.div_ceil(32),
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
    let kernel = if one { kernels.one } else { kernels.eight };
    let n_block_rows = 4 / settings.split * kernel.n_rows;
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
    let n_passes = if one { n_tokens } else { n_tokens.div_ceil(8) };
    let grid = Grid::Fixed([n_groups, n_passes]);
    lower.launch(kernel.name, grid, operands, &settings)
}

/// A kernel and the rows that one of its warps has.
#[derive(Clone, Copy, Debug)]
struct GemvKernel {
    name: &'static str,
    n_rows: u32,
}

/// The kernels for one token and for up to eight.
#[derive(Clone, Copy, Debug)]
struct GemvKernels {
    one: GemvKernel,
    eight: GemvKernel,
}

/// The kernels for a format, and what they read.
fn gemv_kernels(format: BlockFormat, precision: Precision) -> (ActivationForm, GemvKernels) {
    macro_rules! kernels {
        ($form:ident, $name:literal, $one:literal, $eight:literal) => {
            (
                ActivationForm::$form,
                GemvKernels {
                    one: GemvKernel {
                        name: concat!("gemv_", $name, "_1"),
                        n_rows: $one,
                    },
                    eight: GemvKernel {
                        name: concat!("gemv_", $name, "_8"),
                        n_rows: $eight,
                    },
                },
            )
        };
    }
    match (precision, format) {
        (Precision::Precise, _) => kernels!(Floats, "floats", 1, 1),
        (_, BlockFormat::F32) => kernels!(Floats, "f32", 2, 4),
        (_, BlockFormat::F16) => kernels!(Floats, "f16", 2, 4),
        (_, BlockFormat::BF16) => kernels!(Floats, "bf16", 2, 4),
        (_, BlockFormat::Q4_0) => kernels!(Int8, "q4_0", 2, 4),
        (_, BlockFormat::Q4_1) => kernels!(Int8, "q4_1", 2, 4),
        (_, BlockFormat::Q5_0) => kernels!(Int8, "q5_0", 2, 4),
        (_, BlockFormat::Q5_1) => kernels!(Int8, "q5_1", 2, 4),
        (_, BlockFormat::Q8_0) => kernels!(Int8, "q8_0", 2, 4),
        (_, BlockFormat::Q2_K) => kernels!(Int8, "q2_k", 2, 4),
        (_, BlockFormat::Q3_K) => kernels!(Int8, "q3_k", 2, 4),
        (_, BlockFormat::Q4_K) => kernels!(Int8, "q4_k", 2, 4),
        (_, BlockFormat::Q5_K) => kernels!(Int8, "q5_k", 2, 4),
        (_, BlockFormat::Q6_K) => kernels!(Int8, "q6_k", 2, 4),
        (_, BlockFormat::IQ4_NL) => kernels!(Int8, "iq4_nl", 2, 4),
        (_, BlockFormat::IQ4_XS) => kernels!(Int8, "iq4_xs", 2, 4),
        (_, BlockFormat::MXFP4) => kernels!(Int8, "mxfp4", 2, 4),
        // A new format: what reads all of them says so where it does not.
        _ => kernels!(Floats, "floats", 1, 1),
    }
}

/// Products of many tokens, or of slots in the order of their experts.
pub(super) fn gemm<D: Device>(
    lower: &mut Lower<'_, D>,
    node: &Node,
    matrix: &Matrix<D>,
    slots: Option<(&Slots<D>, Operand<D>)>,
) -> Result<(), BackendError> {
    let format = matrix.weight.format;
    let Some(kernel) = gemm_kernel(format) else {
        return Err(BackendError::UnsupportedFormat {
            backend: lower.context.device.name(),
            name: node.name.clone(),
            format,
            node: node.name.clone(),
        });
    };
    let Activations {
        operand: x,
        n_rows: n_x,
        n_columns,
        padded,
    } = lower.activations(node, ActivationForm::Halves)?;
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
    let n_tiles = n_tokens.div_ceil(TILE) * matrix.n_rows.div_ceil(TILE);
    lower.launch(
        kernel,
        Grid::Fixed([n_tiles, n_experts]),
        operands,
        &settings,
    )
}

fn gemm_kernel(format: BlockFormat) -> Option<&'static str> {
    Some(match format {
        BlockFormat::F32 => "gemm_f32",
        BlockFormat::F16 => "gemm_f16",
        BlockFormat::BF16 => "gemm_bf16",
        BlockFormat::Q4_0 => "gemm_q4_0",
        BlockFormat::Q4_1 => "gemm_q4_1",
        BlockFormat::Q5_0 => "gemm_q5_0",
        BlockFormat::Q5_1 => "gemm_q5_1",
        BlockFormat::Q8_0 => "gemm_q8_0",
        BlockFormat::Q2_K => "gemm_q2_k",
        BlockFormat::Q3_K => "gemm_q3_k",
        BlockFormat::Q4_K => "gemm_q4_k",
        BlockFormat::Q5_K => "gemm_q5_k",
        BlockFormat::Q6_K => "gemm_q6_k",
        BlockFormat::IQ4_NL => "gemm_iq4_nl",
        BlockFormat::IQ4_XS => "gemm_iq4_xs",
        BlockFormat::MXFP4 => "gemm_mxfp4",
        _ => return None,
    })
}
