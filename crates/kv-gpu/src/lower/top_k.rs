//! The largest values of rows: by parts of a row, then of the parts.

use bytemuck::{Pod, Zeroable};
use kv_core::backend::BackendError;
use kv_core::graph::{Node, NodeId};

use super::{Lower, word};
use crate::device::Device;
use crate::program::Grid;

/// Columns of a part, `TOP_PART` of `top_k.k`.
const PART: usize = 4096;
/// The most values that are sorted, `TOP_MAX`.
const MAX_K: usize = 1024;

/// `TopKArgs` of `top_k.k`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Settings {
    n: u32,
    width: u32,
    k: u32,
    parts: u32,
}

/// Lowers [`Op::TopK`](kv_core::graph::Op::TopK).
pub(super) fn lower<D: Device>(
    lower: &mut Lower<'_, D>,
    id: NodeId,
    node: &Node,
    k: usize,
) -> Result<(), BackendError> {
    if k > MAX_K {
        return Err(lower.unsupported(node));
    }
    let x = lower.operand(node, 0)?;
    let operand = node
        .operands
        .first()
        .and_then(|&id| lower.context.graph.node(id));
    let width = operand.map_or(0, Node::row_len);
    let (n, parts) = (node.n_rows(), width.div_ceil(PART));
    let settings = Settings {
        n: word(n)?,
        width: word(width)?,
        k: word(k)?,
        parts: word(parts)?,
    };
    let [keys, columns] = [0; 2].map(|_| lower.temporary(n * parts * k * 4));
    let sums = lower.temporary(n * parts * 2 * 4);
    let y = lower.result(id);
    let operands = vec![x, keys.clone(), columns.clone(), sums.clone()];
    let grid = Grid::Fixed([settings.parts, settings.n]);
    lower.launch("top_k_part", grid, operands, &settings)?;
    let grid = Grid::Fixed([settings.n, 1]);
    lower.launch("top_k_merge", grid, vec![keys, columns, sums, y], &settings)
}
