//! Sparse attention: an indexer scores the keys that rows see and chooses the largest; attention
//! over what it chose.

use bytemuck::{Pod, Zeroable};
use kv_core::LayerIdx;
use kv_graph::{AttendSpec, IndexSpec};

use super::attend::{AttendedRows, Attention, Settings};
use super::{Lower, Result, word};
use crate::device::Device;
use crate::inputs::NumberedNode;
use crate::program::{Grid, Operand};
use crate::visibility_table::PieceLimits;

/// Keys that a thread block scores, `kIndexKeys` of `index.k`.
const KEYS: usize = 64;
/// Scores that are kept at a time, unless one row sees more: 64 MiB.
const MAX_SCORES: usize = 1 << 24;
/// The fewest cells of a piece.
const SHORTEST_PIECE: usize = 64;

/// `IndexArgs` of `index.k`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct IndexSettings {
    header: u32,
    n_heads: u32,
    dim: u32,
    k_type: u32,
    k_row_bytes: u32,
    top_k: u32,
    first_row: u32,
    n_cells: u32,
}

/// `SparseArgs` of `attend_sparse.k`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct SparseSettings {
    attend: Settings,
    top_k: u32,
    n_pieces: u32,
    piece_len: u32,
}

impl<D: Device> Lower<'_, D> {
    /// Lowers an indexer, which scores some rows at a time, and chooses.
    pub(super) fn index(
        &mut self,
        (id, node): NumberedNode<'_>,
        layer: LayerIdx,
        index: &IndexSpec,
    ) -> Result<()> {
        let attended = AttendedRows::of_layer(self, layer)?;
        let (n, n_cells) = (self.context.graph.shape().n_tokens, attended.n_cells);
        let (_, header) = self.inputs.visibility(self.context.graph, (id, node), 3)?;
        let q = self.rotated_queries(node, &attended, n * index.n_heads * index.dim)?;
        let weights = self.operand(node, 1)?;
        let mut settings = IndexSettings {
            header,
            n_heads: word(index.n_heads)?,
            dim: word(index.dim)?,
            k_type: super::store::kv_type_number(attended.k_shape.kv_type),
            k_row_bytes: word(attended.k_shape.bytes())?,
            top_k: word(index.top_k)?,
            first_row: 0,
            n_cells: word(n_cells)?,
        };
        let at_once = (MAX_SCORES / n_cells.max(1)).clamp(1, n);
        let scores = self.temporary(at_once * n_cells * size_of::<f32>());
        let y = self.result(id);
        for first in (0..n).step_by(at_once) {
            settings.first_row = word(first)?;
            let n_rows = word(at_once.min(n - first))?;
            let grid = Grid::Fixed([word(n_cells.div_ceil(KEYS))?, n_rows]);
            let operands = [&q, &weights, &Operand::Inputs(0), &attended.k, &scores];
            let operands = operands.map(Clone::clone).into();
            self.launch("index_scores", grid, operands, &settings)?;
            let operands = vec![scores.clone(), Operand::Inputs(0), y.clone()];
            self.launch("index_choose", Grid::rows(n_rows), operands, &settings)?;
        }
        Ok(())
    }

    /// Lowers attention over what an indexer chose.
    pub(super) fn attend_sparse(
        &mut self,
        (id, node): NumberedNode<'_>,
        layer: LayerIdx,
        spec: &AttendSpec,
    ) -> Result<()> {
        let top_k = self.operand_node(node, 3)?.row_len();
        let chosen = self.operand(node, 3)?;
        let n = self.context.graph.shape().n_tokens;
        let most_pieces = PieceLimits::of(n).few();
        let piece_len = top_k.div_ceil(most_pieces).max(SHORTEST_PIECE);
        let n_pieces = top_k.div_ceil(piece_len);
        let attended = AttendedRows::of_layer(self, layer)?;
        let mut attention = Attention::new(self, (id, node), attended, *spec, n * n_pieces)?;
        let (_, header) = self.inputs.visibility(self.context.graph, (id, node), 2)?;
        attention.settings.header = header;
        let settings = SparseSettings {
            attend: attention.settings,
            top_k: word(top_k)?,
            n_pieces: word(n_pieces)?,
            piece_len: word(piece_len)?,
        };
        let (kernel, at_once) = if attention.attended.is_wide() {
            ("attend_sparse", 4)
        } else {
            ("attend_sparse_odd", 1)
        };
        let mut operands = attention.operands();
        operands.extend([chosen, attention.partial.clone()]);
        let grid = Grid::Fixed([attention.n_blocks(1, at_once), word(n * n_pieces)?]);
        self.launch(kernel, grid, operands, &settings)?;
        attention.merge(self, None, settings.n_pieces)
    }
}
