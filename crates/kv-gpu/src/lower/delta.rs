//! The gated delta rule, and its decay factors.

use bytemuck::{Pod, Zeroable};
use kv_core::LayerIdx;
use kv_core::backend::{BackendError, RowKind};
use kv_core::graph::{DecaySpec, DeltaSpec, KeySharing, Node, NodeId, Op};

use super::elementwise::THREADS;
use super::recurrent::CHANNELS;
use super::{Lower, word};
use crate::device::Device;
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

/// Lowers a delta rule or its decay factors.
pub(super) fn lower<D: Device>(
    lower: &mut Lower<'_, D>,
    id: NodeId,
    node: &Node,
) -> Result<(), BackendError> {
    match &node.op {
        Op::Decay { decay } => lower.decay((id, node), decay),
        Op::Delta { layer, delta } if delta.k_dim <= MAX_K_DIM => {
            lower.delta((id, node), *layer, delta)
        }
        _ => Err(lower.unsupported(node)),
    }
}

impl<D: Device> Lower<'_, D> {
    fn decay(
        &mut self,
        (id, node): (NodeId, &Node),
        decay: &DecaySpec,
    ) -> Result<(), BackendError> {
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
        let grid = Grid::Fixed([settings.n.div_ceil(THREADS), 1]);
        self.launch("decay", grid, operands, &settings)
    }

    fn delta(
        &mut self,
        (id, node): (NodeId, &Node),
        layer: LayerIdx,
        delta: &DeltaSpec,
    ) -> Result<(), BackendError> {
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
        let values = (0..5).map(|at| self.operand(node, at));
        let mut operands = values.collect::<Result<Vec<_>, _>>()?;
        operands.push(Operand::Inputs(0));
        operands.push(self.rows(layer, RowKind::State)?);
        operands.push(self.result(id));
        let x = settings.n_heads * settings.v_dim.div_ceil(CHANNELS);
        let kernel = self.of_state_type(layer, ["delta_f32", "delta_f16", "delta_bf16"])?;
        self.launch(kernel, Grid::Chains { x }, operands, &settings)
    }
}
