//! Norms of rows, and what is left of them above their mean.

use bytemuck::{Pod, Zeroable};
use kv_graph::{Node, Op};

use super::{Lower, Result, width, word};
use crate::device::Device;
use crate::inputs::{NumberedNode, after};
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

impl<D: Device> Lower<'_, D> {
    /// Lowers an RMS norm.
    pub(super) fn rms_norm(
        &mut self,
        (id, node): NumberedNode<'_>,
        spec: (Option<&str>, f32),
    ) -> Result<()> {
        let x = self.operand(node, 0)?;
        let (gain, settings) = self.rms_settings(node, spec)?;
        let gain = gain.unwrap_or_else(|| x.clone());
        let (kernel, n_blocks) = if settings.dim <= MAX_SHORT {
            ("rms_norm_short", settings.n_rows.div_ceil(WARPS))
        } else {
            ("rms_norm", settings.n_rows)
        };
        let grid = Grid::rows(n_blocks);
        let y = self.result(id);
        let (blocks, n_blocks) = self.with_int8(id, settings.dim as usize)?;
        let settings = Settings {
            n_blocks,
            ..settings
        };
        self.launch(kernel, grid, vec![x, gain, y, blocks], &settings)
    }

    /// Lowers a layer norm.
    pub(super) fn layer_norm(
        &mut self,
        (id, node): NumberedNode<'_>,
        [gain, bias]: [&Option<String>; 2],
        eps: f32,
    ) -> Result<()> {
        let x = self.operand(node, 0)?;
        let gain = match gain {
            Some(gain) => self.floats(gain, node)?,
            None => self.ones(node)?,
        };
        let settings = Settings {
            has_bias: u32::from(bias.is_some()),
            eps,
            ..Settings::of(node)?
        };
        let bias = self.floats_or(bias.as_deref(), node, &gain)?;
        let operands = vec![x, gain, bias, self.result(id)];
        let grid = Grid::rows(settings.n_rows);
        self.launch("layer_norm", grid, operands, &settings)
    }

    /// Factors that change nothing, one for each value of the last dimension.
    fn ones(&self, node: &Node) -> Result<Operand<D>> {
        let dim = node.shape.last().copied().unwrap_or(0);
        let (device, name) = (&self.context.shared.device, format!("{dim} ones"));
        let weights = &self.context.weights;
        let ones = weights.constant(device, name, &vec![1.0; dim])?;
        Ok(Operand::Weight(ones))
    }

    /// Lowers what is left of rows above their mean and some deviations.
    pub(super) fn gaussian_top_k(
        &mut self,
        (id, node): NumberedNode<'_>,
        deviations: f32,
    ) -> Result<()> {
        let settings = Settings {
            eps: deviations,
            ..Settings::of(node)?
        };
        let operands = vec![self.operand(node, 0)?, self.result(id)];
        let grid = Grid::rows(settings.n_rows);
        self.launch("gaussian_top_k", grid, operands, &settings)
    }

    /// Lowers a sum together with the RMS norm of it, where the graph has one; whether it has.
    pub(super) fn add_norm(&mut self, (id, node): NumberedNode<'_>) -> Result<bool> {
        let graph = self.context.graph;
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
        let (gain, settings) = self.rms_settings(norm, spec)?;
        let (x, z) = (self.operand(node, 0)?, self.operand(node, 1)?);
        let gain = gain.unwrap_or_else(|| x.clone());
        let (sum, y) = (self.result(id), self.result(norm_id));
        self.done[norm_id.as_usize()] = true;
        let (blocks, n_blocks) = self.with_int8(norm_id, settings.dim as usize)?;
        let settings = Settings {
            n_blocks,
            ..settings
        };
        let grid = Grid::rows(settings.n_rows);
        let operands = vec![x, z, gain, sum, y, blocks];
        self.launch("add_rms_norm", grid, operands, &settings)?;
        Ok(true)
    }

    /// The gain of an RMS norm, where it has one, and the settings of its kernels. Without a gain,
    /// kernels are given something else that they do not read.
    fn rms_settings(
        &self,
        node: &Node,
        (weight, eps): (Option<&str>, f32),
    ) -> Result<(Option<Operand<D>>, Settings)> {
        let gain = weight.map(|name| self.weight(name, node, WeightForm::Floats));
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
}

impl Settings {
    /// Rows and values of a row of `node`.
    fn of(node: &Node) -> Result<Self> {
        let dim = width(node).max(1);
        Ok(Self {
            n_rows: word(node.n_values() / dim)?,
            dim: word(dim)?,
            ..Self::default()
        })
    }
}
