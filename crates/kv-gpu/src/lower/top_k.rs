//! The largest values of rows: by parts of a row, then of the parts.

use bytemuck::{Pod, Zeroable};

use super::{Lower, Result, word};
use crate::device::Device;
use crate::inputs::NumberedNode;
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

impl<D: Device> Lower<'_, D> {
    /// Lowers [`Op::TopK`](kv_graph::Op::TopK).
    pub(super) fn top_k(&mut self, (id, node): NumberedNode<'_>, k: usize) -> Result<()> {
        if k > MAX_K {
            return Err(self.unsupported(node));
        }
        let x = self.operand(node, 0)?;
        let width = self.operand_node(node, 0)?.row_len();
        let (n, parts) = (node.n_rows(), width.div_ceil(PART));
        let settings = Settings {
            n: word(n)?,
            width: word(width)?,
            k: word(k)?,
            parts: word(parts)?,
        };
        let [keys, columns] = [0; 2].map(|_| self.temporary(n * parts * k * 4));
        let sums = self.temporary(n * parts * 2 * 4);
        let y = self.result(id);
        let operands = vec![x, keys.clone(), columns.clone(), sums.clone()];
        let grid = Grid::Fixed([settings.parts, settings.n]);
        self.launch("top_k_part", grid, operands, &settings)?;
        let grid = Grid::Fixed([settings.n, 1]);
        self.launch("top_k_merge", grid, vec![keys, columns, sums, y], &settings)
    }
}
