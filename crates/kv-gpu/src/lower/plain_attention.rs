//! Attention in three steps: scores, softmax and weighted sum as tables over a part's first cells.

use bytemuck::{Pod, Zeroable};
use kv_core::LayerIdx;
use kv_graph::AttendSpec;

use super::attend::{AttendedRows, PIECES, Settings};
use super::{Lower, Result, word};
use crate::device::Device;
use crate::inputs::NumberedNode;
use crate::program::{Grid, Operand};

/// `PlainArgs` of `plain_attention.k`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct PlainSettings {
    attend: Settings,
    n_kv: u32,
}

impl<D: Device> Lower<'_, D> {
    /// Products of queries and keys.
    pub(super) fn kq(
        &mut self,
        (id, node): NumberedNode<'_>,
        layer: LayerIdx,
        spec: &AttendSpec,
    ) -> Result<()> {
        let n_rows = self.context.graph.shape().n_tokens * spec.n_heads;
        let attended = AttendedRows::of_layer(self, layer)?;
        let q = self.rotated_queries(node, &attended, n_rows * spec.k_dim)?;
        let n_kv = word(node.row_len() / spec.n_heads.max(1))?;
        let attend = Settings::new(&attended, spec)?;
        let y = self.result(id);
        let grid = Grid::Fixed([word(n_rows)?, n_kv.div_ceil(256)]);
        let settings = PlainSettings { attend, n_kv };
        self.launch("plain_kq", grid, vec![q, attended.k, y], &settings)
    }

    /// Sums of values by their weights.
    pub(super) fn kqv(
        &mut self,
        (id, node): NumberedNode<'_>,
        layer: LayerIdx,
        spec: &AttendSpec,
    ) -> Result<()> {
        let n_rows = self.context.graph.shape().n_tokens * spec.n_heads;
        let attended = AttendedRows::of_layer(self, layer)?;
        let weights = self.operand(node, 0)?;
        let n_kv = self.operand_node(node, 0)?.row_len() / spec.n_heads.max(1);
        let settings = PlainSettings {
            attend: Settings::new(&attended, spec)?,
            n_kv: word(n_kv)?,
        };
        let y = self.result(id);
        let columns = word(spec.v_dim)?.div_ceil(256);
        let grid = Grid::Fixed([word(n_rows)?, columns]);
        let operands = vec![weights, attended.v.clone(), y.clone()];
        self.launch("plain_kqv", grid, operands, &settings)?;
        self.rotate_back(&attended, y, (word(node.n_values())?, 0))
    }

    /// Hides all cells, shows those that rows see, and makes weights of them.
    pub(super) fn kq_soft_max(
        &mut self,
        (id, node): NumberedNode<'_>,
        spec: &AttendSpec,
        sinks: Option<&str>,
    ) -> Result<()> {
        let graph = self.context.graph;
        let (visibility, header) = self.inputs.visibility(graph, (id, node), 1)?;
        let kq = self.operand(node, 0)?;
        let mut attend = Settings::of_spec(spec)?;
        attend.header = header;
        attend.sums = u32::from(sinks.is_some());
        if spec.alibi.is_some() {
            attend.positions = self.input_word(node, node.operands.last().copied())?;
        }
        let n_kv = word(node.row_len() / spec.n_heads.max(1))?;
        let mut settings = PlainSettings { attend, n_kv };
        let sinks = self.floats_or(sinks, node, &Operand::Inputs(0))?;
        let y = self.result(id);
        let n_heads = settings.attend.n_heads;
        let n = word(graph.shape().n_tokens * spec.n_heads)?;
        let all = Grid::Fixed([n, settings.n_kv.div_ceil(256)]);
        self.launch("plain_hide", all, vec![y.clone()], &settings)?;
        let operands = vec![kq, Operand::Inputs(0), y.clone()];
        for (many, n_rows) in PIECES {
            settings.attend.many = many;
            let grid = Grid::pieces(many, n_heads * n_rows, visibility);
            self.launch("plain_mask", grid, operands.clone(), &settings)?;
        }
        self.launch("plain_soft_max", Grid::rows(n), vec![y, sinks], &settings)
    }
}
