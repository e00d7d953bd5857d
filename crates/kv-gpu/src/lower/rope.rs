//! Rotary position embeddings.

use bytemuck::{Pod, Zeroable};
use kv_core::backend::BackendError;
use kv_core::graph::{Node, NodeId, Op};
use kv_core::rope::{RopeSections, RopeSpec, RopeStyle};

use super::elementwise::THREADS;
use super::{Lower, word};
use crate::device::Device;
use crate::program::{Grid, Operand};

/// `RopeArgs` of `rope.k`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Settings {
    n_rows: u32,
    n_heads: u32,
    dim: u32,
    n_pairs: u32,
    halves: u32,
}

/// Lowers a rotary embedding.
pub(super) fn lower<D: Device>(
    lower: &mut Lower<'_, D>,
    id: NodeId,
    node: &Node,
) -> Result<(), BackendError> {
    let (rope, sections) = match &node.op {
        Op::Rope { rope } => (rope, None),
        Op::RopeSections { rope, sections } => (rope, Some(*sections)),
        _ => return Err(lower.unsupported(node)),
    };
    let angles = angles(lower, node, rope, sections)?;
    let settings = settings(node, rope)?;
    let n = word(node.n_values() / node.shape[2].max(1))?
        .checked_mul(settings.dim - settings.n_pairs)
        .ok_or_else(|| lower.unsupported(node))?;
    let x = lower.operand(node, 0)?;
    let y = lower.result(id);
    let grid = Grid::Fixed([n.div_ceil(THREADS), 1]);
    lower.launch("rope", grid, vec![x, angles, y], &settings)
}

/// The table of angles of a node's rotation.
pub(super) fn angles<D: Device>(
    lower: &mut Lower<'_, D>,
    node: &Node,
    rope: &RopeSpec,
    sections: Option<RopeSections>,
) -> Result<Operand<D>, BackendError> {
    let factors = match &rope.factors {
        Some(name) => Some(lower.host_weight(name, node)?.to_f32()),
        None => None,
    };
    let table = lower
        .inputs
        .angles(node, (rope, sections), factors.as_deref())?;
    Ok(Operand::Inputs(table.at * 4))
}

/// What the kernel is told of a node `[n, heads, dim]`.
pub(super) fn settings(node: &Node, rope: &RopeSpec) -> Result<Settings, BackendError> {
    let size = |at: usize| word(node.shape.get(at).copied().unwrap_or(1));
    Ok(Settings {
        n_rows: size(0)?,
        n_heads: size(1)?,
        dim: size(2)?,
        n_pairs: word(rope.n_rot / 2)?,
        halves: u32::from(rope.style == RopeStyle::Neox),
    })
}
