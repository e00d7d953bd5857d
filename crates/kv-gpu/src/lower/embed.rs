//! Rows of a weight by token id.

use bytemuck::{Pod, Zeroable};
use kv_core::backend::BackendError;
use kv_core::graph::{Node, NodeId, Op};

use super::{Lower, word};
use crate::device::Device;
use crate::program::{Grid, Operand};
use crate::weights::WeightForm;

/// `EmbedArgs` of `embed.k`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Settings {
    format: u32,
    n_columns: u32,
    planes: [u32; 3],
}

/// Lowers an embedding.
pub(super) fn lower<D: Device>(
    lower: &mut Lower<'_, D>,
    id: NodeId,
    node: &Node,
) -> Result<(), BackendError> {
    let Op::Embed { weight } = &node.op else {
        return Err(lower.unsupported(node));
    };
    let weight = lower.weight(weight, node, WeightForm::Stored)?;
    let settings = Settings {
        format: weight.format as u32,
        n_columns: word(node.row_len())?,
        planes: weight.planes.places(),
    };
    // A thread has 32 values, a block 32 threads.
    let grid = [word(node.n_rows())?, settings.n_columns.div_ceil(32 * 32)];
    let ids = lower.operand(node, 0)?;
    let operands = vec![Operand::Weight(weight), ids, lower.result(id)];
    lower.launch("embed", Grid::Fixed(grid), operands, &settings)
}
