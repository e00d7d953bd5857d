//! Rotary position embeddings.

use bytemuck::{Pod, Zeroable};
use kv_core::backend::BackendError;
use kv_core::graph::{Node, NodeId, Op};
use kv_core::rope::{RopeSections, RopeSpec, RopeStyle};

use super::elementwise::THREADS;
use super::{Lower, store, word};
use crate::device::Device;
use crate::inputs::after;
use crate::program::{Grid, Operand};

/// How many nodes after queries' rotation keys' may be.
const REACH: usize = 4;

/// `RopeArgs` of `blocks/rope.h`.
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

impl Settings {
    /// Values of a row of the first operand.
    pub(super) fn row_len(&self) -> u32 {
        self.n_heads * self.dim
    }
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
    let x = lower.operand(node, 0)?;
    let Some((second_id, second)) = partner(lower, id, node)? else {
        let x_out = lower.result(id);
        let operands = vec![x.clone(), x, angles, x_out.clone(), x_out];
        return lower.launch("rope", grid(&[node])?, operands, &settings);
    };
    let settings = Settings {
        n_more_heads: word(second.shape[1])?,
        ..settings
    };
    lower.done[second_id.as_usize()] = true;
    if let Some(store) = store_of(lower, second_id)? {
        let x_out = lower.result(id);
        return store::lower_with_rope(lower, store, second, [x, angles, x_out], settings);
    }
    let z = lower.operand(second, 0)?;
    let (x_out, z_out) = (lower.result(id), lower.result(second_id));
    let operands = vec![x, z, angles, x_out, z_out];
    lower.launch("rope", grid(&[node, second])?, operands, &settings)
}

/// A thread for each value.
fn grid(nodes: &[&Node]) -> Result<Grid, BackendError> {
    let n_values: usize = nodes.iter().map(|node| node.n_values()).sum();
    Ok(Grid::Fixed([word(n_values)?.div_ceil(THREADS), 1]))
}

/// The node that stores the keys `id`, where nothing else reads them and its values are there.
fn store_of<'a, D: Device>(
    lower: &mut Lower<'a, D>,
    id: NodeId,
) -> Result<Option<(NodeId, &'a Node)>, BackendError> {
    let root = |lower: &Lower<'_, D>, id: &NodeId| lower.root[id.as_usize()];
    let mut readers = lower
        .readers(id)
        .filter(|(_, node)| !matches!(node.op, Op::Reshape))
        .filter(|(_, node)| node.operands.iter().any(|of| root(lower, of) == id));
    let (Some((at, store)), None) = (readers.next(), readers.next()) else {
        return Ok(None);
    };
    drop(readers);
    // An output is read at the end of the graph.
    let only_reader = lower.last_use[id.as_usize()] == at.as_usize();
    let stores = matches!(store.op, Op::StoreKv { .. }) && root(lower, &store.operands[0]) == id;
    let there = only_reader && stores && lower.compute_ahead(store.operands[1])?;
    Ok(there.then_some((at, store)))
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
    let later = after(lower.context.graph, id);
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
