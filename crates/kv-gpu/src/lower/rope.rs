//! Rotary position embeddings.

use bytemuck::{Pod, Zeroable};
use kv_core::backend::BackendError;
use kv_core::graph::{Node, NodeId, Op};
use kv_core::rope::{RopeSections, RopeSpec, RopeStyle};

use super::elementwise::THREADS;
use super::{Lower, word};
use crate::device::Device;
use crate::inputs::numbered;
use crate::program::{Grid, Operand};

/// How many nodes after queries' rotation keys' may be.
const REACH: usize = 4;

/// `RopeArgs` of `rope.k`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Settings {
    n_rows: u32,
    n_heads: u32,
    dim: u32,
    n_pairs: u32,
    halves: u32,
    n_more_heads: u32,
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
    let Some((second_id, second)) = partner(lower, id, node)? else {
        let operands = vec![lower.operand(node, 0)?, angles, lower.result(id)];
        let grid = grid(&[node], &settings)?;
        return lower.launch("rope", grid, operands, &settings);
    };
    let settings = Settings {
        n_more_heads: word(second.shape[1])?,
        ..settings
    };
    let (x, z) = (lower.operand(node, 0)?, lower.operand(second, 0)?);
    let (x_out, z_out) = (lower.result(id), lower.result(second_id));
    lower.done[second_id.as_usize()] = true;
    let grid = grid(&[node, second], &settings)?;
    let operands = vec![x, z, angles, x_out, z_out];
    lower.launch("rope_two", grid, operands, &settings)
}

/// A thread for each pair of values and for each value that is not in one.
fn grid(nodes: &[&Node], settings: &Settings) -> Result<Grid, BackendError> {
    let n_values: usize = nodes.iter().map(|node| node.n_values()).sum();
    let (dim, n_pairs) = (settings.dim.max(1) as usize, settings.n_pairs as usize);
    let n = word(n_values / dim * (dim - n_pairs))?;
    Ok(Grid::Fixed([n.div_ceil(THREADS), 1]))
}

/// The same rotation of other values soon after, whose operand is there, or can be: keys.
fn partner<'a, D: Device>(
    lower: &mut Lower<'a, D>,
    id: NodeId,
    node: &Node,
) -> Result<Option<(NodeId, &'a Node)>, BackendError> {
    let is_partner = |other: &Node| {
        (&other.op, other.operands.get(1)) == (&node.op, node.operands.get(1))
            && other.shape.first() == node.shape.first()
            && other.shape.last() == node.shape.last()
            && other.n_values() > 0
    };
    let later = numbered(lower.context.graph).skip(id.as_usize() + 1);
    let found = later.take(REACH).find(|(_, other)| is_partner(other));
    let Some((second_id, second)) = found else {
        return Ok(None);
    };
    let is_there = lower.compute_ahead(second.operands[0])?;
    Ok(is_there.then_some((second_id, second)))
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
        n_more_heads: 0,
    })
}
