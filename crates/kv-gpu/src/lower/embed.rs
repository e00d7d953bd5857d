//! Rows of a weight by token id.

use bytemuck::{Pod, Zeroable};

use super::{Lower, Result, word};
use crate::device::Device;
use crate::inputs::NumberedNode;
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

impl<D: Device> Lower<'_, D> {
    /// Lowers an embedding.
    pub(super) fn embed(&mut self, (id, node): NumberedNode<'_>, weight: &str) -> Result<()> {
        let weight = self.weight(weight, node, WeightForm::Stored)?;
        let settings = Settings {
            format: weight.format as u32,
            n_columns: word(node.row_len())?,
            planes: weight.planes.places(),
        };
        // A thread has 32 values, a block 32 threads.
        let grid = [word(node.n_rows())?, settings.n_columns.div_ceil(32 * 32)];
        let ids = self.operand(node, 0)?;
        let operands = vec![Operand::Weight(weight), ids, self.result(id)];
        self.launch("embed", Grid::Fixed(grid), operands, &settings)
    }
}
