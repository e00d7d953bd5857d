//! The gated delta rule, and its decay factors.

use bytemuck::{Pod, Zeroable};
use kv_backend::RowKind;
use kv_core::LayerIdx;
use kv_graph::{DecaySpec, DeltaSpec, KeySharing};

use super::recurrent::CHANNELS;
use super::{Lower, Result, word};
use crate::device::Device;
use crate::inputs::NumberedNode;
use crate::program::{Grid, Operand};

/// Values of a key that the kernel has room for in registers.
const MAX_K_DIM: usize = 256;

/// `DecayArgs` of `scan.k`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct DecaySettings {
    n: u32,
    columns: u32,
    per_head: u32,
}

/// `DeltaArgs` of `delta.k`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct DeltaSettings {
    header: u32,
    n_heads: u32,
    key_heads: u32,
    k_dim: u32,
    v_dim: u32,
    n_decays: u32,
    interleaved: u32,
    scale: f32,
}

impl<D: Device> Lower<'_, D> {
    /// Lowers the decay factors of a delta rule.
    pub(super) fn decay(&mut self, (id, node): NumberedNode<'_>, decay: &DecaySpec) -> Result<()> {
        let settings = DecaySettings {
            n: word(node.n_values())?,
            columns: word(node.row_len())?,
            per_head: word(node.row_len() / decay.n_heads.max(1))?,
        };
        let operands = vec![
            self.operand(node, 0)?,
            self.floats(&decay.a, node)?,
            self.floats(&decay.dt_bias, node)?,
            self.result(id),
        ];
        self.launch("decay", Grid::values(settings.n), operands, &settings)
    }

    /// Lowers a delta rule.
    pub(super) fn delta(
        &mut self,
        (id, node): NumberedNode<'_>,
        layer: LayerIdx,
        delta: &DeltaSpec,
    ) -> Result<()> {
        if delta.k_dim > MAX_K_DIM {
            return Err(self.unsupported(node));
        }
        let decays = self.operand_node(node, 3)?.row_len();
        let n_heads = delta.n_heads.max(1);
        let settings = DeltaSettings {
            header: self.states_header(node)?,
            n_heads: word(n_heads)?,
            key_heads: word(delta.key_heads)?,
            k_dim: word(delta.k_dim)?,
            v_dim: word(node.row_len() / n_heads)?,
            n_decays: word(decays / n_heads)?,
            interleaved: u32::from(delta.sharing == KeySharing::Interleaved),
            scale: delta.scale,
        };
        let mut operands = self.operands(node, 5)?;
        let states = self.rows(layer, RowKind::State)?;
        operands.extend([Operand::Inputs(0), states, self.result(id)]);
        let x = settings.n_heads * settings.v_dim.div_ceil(CHANNELS);
        let kernel = self.of_state_type("delta", layer)?;
        self.launch(&kernel, Grid::Chains { x }, operands, &settings)
    }
}
