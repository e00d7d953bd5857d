//! Norms of rows.

use bytemuck::{Pod, Zeroable};
use kv_core::backend::BackendError;
use kv_core::graph::{Node, NodeId, Op};

use super::{Lower, word};
use crate::device::Device;
use crate::program::{Grid, Operand};
use crate::weights::WeightForm;

/// Up to this many values, a warp norms a row by itself.
const MAX_SHORT: u32 = 256;
/// Warps of a block of `rms_norm_short`.
const WARPS: u32 = 8;

/// `NormArgs` of `norm.k`.
#[derive(Clone, Copy, Default, Pod, Zeroable)]
#[repr(C)]
struct Settings {
    n_rows: u32,
    dim: u32,
    n_gains: u32,
    has_bias: u32,
    eps: f32,
}

/// Lowers a norm.
pub(super) fn lower<D: Device>(
    lower: &mut Lower<'_, D>,
    id: NodeId,
    node: &Node,
) -> Result<(), BackendError> {
    let x = lower.operand(node, 0)?;
    let dim = node.shape.last().copied().unwrap_or(1).max(1);
    let settings = Settings {
        n_rows: word(node.n_values() / dim)?,
        dim: word(dim)?,
        ..Settings::default()
    };
    let by_block = Grid::Fixed([settings.n_rows, 1]);
    match &node.op {
        Op::RmsNorm { weight, eps } => {
            // Without a gain, its place is taken by something that is not read.
            let (gain, n_gains) = match weight {
                Some(name) => {
                    let gain = lower.weight(name, node, WeightForm::Floats)?;
                    let n_gains = gain.shape.iter().product::<usize>() / dim;
                    (Operand::Weight(gain), word(n_gains)?)
                }
                None => (x.clone(), 0),
            };
            let (kernel, grid) = match settings.dim <= MAX_SHORT {
                true => {
                    let n_blocks = settings.n_rows.div_ceil(WARPS);
                    ("rms_norm_short", Grid::Fixed([n_blocks, 1]))
                }
                false => ("rms_norm", by_block),
            };
            let y = lower.result(id);
            let settings = Settings {
                n_gains,
                eps: *eps,
                ..settings
            };
            lower.launch(kernel, grid, vec![x, gain, y], &settings)
        }
        Op::LayerNorm { weight, bias, eps } => {
            let gain = Operand::Weight(lower.weight(weight, node, WeightForm::Floats)?);
            let bias_operand = match bias {
                Some(name) => Operand::Weight(lower.weight(name, node, WeightForm::Floats)?),
                None => gain.clone(),
            };
            let y = lower.result(id);
            let settings = Settings {
                has_bias: u32::from(bias.is_some()),
                eps: *eps,
                ..settings
            };
            let operands = vec![x, gain, bias_operand, y];
            lower.launch("layer_norm", by_block, operands, &settings)
        }
        _ => Err(lower.unsupported(node)),
    }
}
