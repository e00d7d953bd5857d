//! Functions of single values.

use bytemuck::{Pod, Zeroable};
use kv_core::backend::BackendError;
use kv_core::graph::{Node, NodeId, Op};

use super::{Lower, word};
use crate::device::Device;
use crate::program::Grid;

/// `ElementwiseArgs` of `elementwise.k`.
#[derive(Clone, Copy, Default, Pod, Zeroable)]
#[repr(C)]
struct Settings {
    n: u32,
    function: u32,
    row_len: u32,
    a: f32,
    b: f32,
}

/// Lowers a function of single values.
pub(super) fn lower<D: Device>(
    lower: &mut Lower<'_, D>,
    id: NodeId,
    node: &Node,
) -> Result<(), BackendError> {
    let n = word(node.n_values())?;
    let settings = Settings {
        n,
        ..Settings::default()
    };
    let grid = Grid::Fixed([n.div_ceil(256), 1]);
    let kernel = match node.op {
        Op::Add => "add",
        Op::Mul => "mul",
        _ => return Err(lower.unsupported(node)),
    };
    let (x, z) = (lower.operand(node, 0)?, lower.operand(node, 1)?);
    let y = lower.result(id);
    lower.launch(kernel, grid, vec![x, z, y], &settings)
}
