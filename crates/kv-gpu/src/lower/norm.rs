//! Norms of rows, and what is left of them above their mean.

use bytemuck::{Pod, Zeroable};
use kv_core::backend::BackendError;
use kv_core::graph::{Node, NodeId, Op};

use super::{Lower, word};
use crate::device::Device;
use crate::inputs::after;
use crate::program::{Grid, Operand};
use crate::weights::WeightForm;

/// Up to this many values, a warp norms a row by itself.
const MAX_SHORT: u32 = 256;
/// Warps of a block of `rms_norm_short` and `mix_short`.
pub(super) const WARPS: u32 = 8;

/// `NormArgs` of `norm.k`.
#[derive(Clone, Copy, Default, Pod, Zeroable)]
#[repr(C)]
struct Settings {
    n_rows: u32,
    dim: u32,
    n_gains: u32,
    has_bias: u32,
    n_blocks: u32,
    eps: f32,
}

/// Lowers a norm.
pub(super) fn lower<D: Device>(
    lower: &mut Lower<'_, D>,
    id: NodeId,
    node: &Node,
) -> Result<(), BackendError> {
    let x = lower.operand(node, 0)?;
    let settings = Settings::of(node)?;
    let by_block = Grid::Fixed([settings.n_rows, 1]);
    match &node.op {
        Op::RmsNorm { weight, eps } => {
            let (gain, settings) = rms_settings(lower, node, (weight.as_deref(), *eps))?;
            let gain = gain.unwrap_or_else(|| x.clone());
            let (kernel, grid) = match settings.dim <= MAX_SHORT {
                true => {
                    let n_blocks = settings.n_rows.div_ceil(WARPS);
                    ("rms_norm_short", Grid::Fixed([n_blocks, 1]))
                }
                false => ("rms_norm", by_block),
            };
            let y = lower.result(id);
            let (blocks, n_blocks) = lower.int8_beside(id, settings.dim as usize)?;
            let settings = Settings {
                n_blocks,
                ..settings
            };
            lower.launch(kernel, grid, vec![x, gain, y, blocks], &settings)
        }
        Op::LayerNorm { weight, bias, eps } => {
            let gain = lower.floats(weight, node)?;
            let bias_operand = match bias {
                Some(name) => lower.floats(name, node)?,
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
        Op::GaussianTopK { deviations } => {
            let settings = Settings {
                eps: *deviations,
                ..settings
            };
            let operands = vec![x, lower.result(id)];
            lower.launch("gaussian_top_k", by_block, operands, &settings)
        }
        _ => Err(lower.unsupported(node)),
    }
}

/// Lowers a sum together with the RMS norm of it, where the graph has one; whether it has.
pub(super) fn lower_with_sum<D: Device>(
    lower: &mut Lower<'_, D>,
    id: NodeId,
    node: &Node,
) -> Result<bool, BackendError> {
    let graph = lower.context.graph;
    let mut later = after(graph, id);
    let norm_of_it = later.find_map(|(norm, other)| match &other.op {
        Op::RmsNorm { weight, eps } if other.operands == [id] => {
            Some((norm, other, (weight.as_deref(), *eps)))
        }
        _ => None,
    });
    let Some((norm_id, norm, spec)) = norm_of_it else {
        return Ok(false);
    };
    let (gain, settings) = rms_settings(lower, norm, spec)?;
    let (x, z) = (lower.operand(node, 0)?, lower.operand(node, 1)?);
    let gain = gain.unwrap_or_else(|| x.clone());
    let (sum, y) = (lower.result(id), lower.result(norm_id));
    lower.done[norm_id.as_usize()] = true;
    let (blocks, n_blocks) = lower.int8_beside(norm_id, settings.dim as usize)?;
    let settings = Settings {
        n_blocks,
        ..settings
    };
    let grid = Grid::Fixed([settings.n_rows, 1]);
    let operands = vec![x, z, gain, sum, y, blocks];
    lower.launch("add_rms_norm", grid, operands, &settings)?;
    Ok(true)
}

/// The gain of an RMS norm, where it has one, and the settings of its kernels. Without a gain,
/// kernels are given something else that they do not read.
fn rms_settings<D: Device>(
    lower: &Lower<'_, D>,
    node: &Node,
    (weight, eps): (Option<&str>, f32),
) -> Result<(Option<Operand<D>>, Settings), BackendError> {
    let gain = weight.map(|name| lower.weight(name, node, WeightForm::Floats));
    let gain = gain.transpose()?;
    let settings = Settings::of(node)?;
    let n_values: usize = gain.as_ref().map_or(0, |gain| gain.shape.iter().product());
    let settings = Settings {
        n_gains: word(n_values)? / settings.dim,
        eps,
        ..settings
    };
    Ok((gain.map(Operand::Weight), settings))
}

impl Settings {
    /// Rows and values of a row of `node`.
    fn of(node: &Node) -> Result<Self, BackendError> {
        let dim = node.shape.last().copied().unwrap_or(1).max(1);
        Ok(Self {
            n_rows: word(node.n_values() / dim)?,
            dim: word(dim)?,
            ..Self::default()
        })
    }
}
