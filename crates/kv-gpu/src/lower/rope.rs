//! Rotary position embeddings.

use bytemuck::{Pod, Zeroable};
use kv_graph::rope::{RopeSections, RopeSpec, RopeStyle};
use kv_graph::{Node, NodeId, Op};

use super::{Lower, Result, word};
use crate::device::Device;
use crate::inputs::{NumberedNode, after};
use crate::program::{Grid, Operand};

/// The number of nodes after queries' rotation keys' may be.
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

impl<'a, D: Device> Lower<'a, D> {
    /// Lowers a rotary embedding.
    pub(super) fn rope(
        &mut self,
        (id, node): NumberedNode<'_>,
        rope: &RopeSpec,
        sections: Option<RopeSections>,
    ) -> Result<()> {
        let angles = self.angles(node, rope, sections)?;
        let settings = settings(node, rope)?;
        let x = self.operand(node, 0)?;
        let Some((second_id, second)) = self.partner((id, node))? else {
            let x_out = self.result(id);
            let operands = vec![x.clone(), x, angles, x_out.clone(), x_out];
            return self.launch("rope", grid(&[node])?, operands, &settings);
        };
        let settings = Settings {
            n_more_heads: word(second.shape[1])?,
            ..settings
        };
        self.done[second_id.as_usize()] = true;
        if let Some(store) = self.store_of(second_id)? {
            let x_out = self.result(id);
            return self.rope_and_store(store, second, [x, angles, x_out], settings);
        }
        let z = self.operand(second, 0)?;
        let (x_out, z_out) = (self.result(id), self.result(second_id));
        let operands = vec![x, z, angles, x_out, z_out];
        self.launch("rope", grid(&[node, second])?, operands, &settings)
    }

    /// The node that stores the keys `id`, where nothing else reads them and its values are there.
    fn store_of(&mut self, id: NodeId) -> Result<Option<NumberedNode<'a>>> {
        let mut readers = self
            .readers(id)
            .filter(|(_, node)| !matches!(node.op, Op::Reshape))
            .filter(|(_, node)| node.operands.iter().any(|&of| self.root(of) == id));
        let (Some((at, store)), None) = (readers.next(), readers.next()) else {
            return Ok(None);
        };
        drop(readers);
        // An output is read at the end of the graph.
        let only_reader = self.last_use[id.as_usize()] == at.as_usize();
        let stores = matches!(store.op, Op::StoreKv { .. }) && self.root(store.operands[0]) == id;
        let there = only_reader && stores && self.compute_ahead(store.operands[1])?;
        Ok(there.then_some((at, store)))
    }

    /// The same rotation of other values soon after, whose operand is there, or can be: keys.
    fn partner(&mut self, (id, node): NumberedNode<'_>) -> Result<Option<NumberedNode<'a>>> {
        let is_partner = |other: &Node| {
            (&other.op, other.operands.get(1)) == (&node.op, node.operands.get(1))
                && other.shape.first() == node.shape.first()
                && other.shape.last() == node.shape.last()
                && other.n_values() > 0
        };
        let later = after(self.context.graph, id);
        let found = later.take(REACH).find(|(_, other)| is_partner(other));
        let Some((second_id, second)) = found else {
            return Ok(None);
        };
        let is_there = self.compute_ahead(second.operands[0])?;
        Ok(is_there.then_some((second_id, second)))
    }

    /// The table of angles of a node's rotation.
    fn angles(
        &mut self,
        node: &Node,
        rope: &RopeSpec,
        sections: Option<RopeSections>,
    ) -> Result<Operand<D>> {
        let factors = match &rope.factors {
            Some(name) => Some(self.host_weight(name, node)?.to_f32()),
            None => None,
        };
        let rotation = (rope, sections);
        let table = self.inputs.angles(node, rotation, factors.as_deref())?;
        Ok(Operand::Inputs(table.at * 4))
    }
}

/// A thread for each value.
fn grid(nodes: &[&Node]) -> Result<Grid> {
    let n_values: usize = nodes.iter().map(|node| node.n_values()).sum();
    Ok(Grid::values(word(n_values)?))
}

/// The kernel's settings for a node `[n, heads, dim]`.
fn settings(node: &Node, rope: &RopeSpec) -> Result<Settings> {
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
