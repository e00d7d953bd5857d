//! Attention: its queries, what they look at, and what heads have for themselves.

use kv_core::LayerIdx;
use kv_core::backend::BackendError;
use kv_core::graph::{AttendSpec, Input, Node, Op};

use super::{Resolver, Value, unsupported};
use crate::plan::{HeadValues, PlainAttention, PlainStep, Step};

impl<'a> Resolver<'a> {
    /// Keys that begin with the values.
    pub(super) fn store_k(
        &mut self,
        node: &Node,
        layer: LayerIdx,
    ) -> Result<Step<Value>, BackendError> {
        let (at, rows) = self.layer(layer)?;
        let part = rows.part;
        let is_own = |i: &Input| matches!(i, Input::Cells { part: p } if *p == part);
        self.operand_input(node, 1, is_own)?;
        let k = self.operand(node, 0)?;
        let n = self.graph.shape().n_tokens;
        if rows.stored_v().is_some() {
            return Err(BackendError::NoRows { layer });
        }
        if k.shape(self.graph) != (n, rows.k.len()) {
            let (rows, width) = k.shape(self.graph);
            return Err(BackendError::RowShape {
                layer,
                wanted: format!("K of {rows} rows of {width} values"),
                got: format!("K of {n} rows of {} values", self.layer(layer)?.1.k.len()),
            });
        }
        Ok(Step::Store {
            layer: at,
            part: part.as_usize(),
            k,
            v: None,
        })
    }

    pub(super) fn attend(
        &mut self,
        node: &'a Node,
        (layer, spec): (LayerIdx, AttendSpec),
        out: Value,
    ) -> Result<Step<Value>, BackendError> {
        let attended = self.layout.attended(layer).map(|(at, rows)| (at, *rows));
        let (at, rows) = attended.ok_or(BackendError::NoRows { layer })?;
        let part = rows.part;
        let is_own = |i: &Input| matches!(i, Input::Visibility { part: p, .. } if *p == part);
        self.operand_input(node, 2, is_own)?;
        let q = self.operand(node, 0)?;
        crate::attend::check_shape(&spec, &rows)?;
        self.check_queries(node, &spec, [q, out])?;
        Ok(Step::Attend {
            layer: at,
            part: part.as_usize(),
            spec,
            beside: self.head_values(node, &spec, 3)?,
            q,
            out,
        })
    }

    pub(super) fn attend_batch(
        &mut self,
        node: &'a Node,
        spec: AttendSpec,
        out: Value,
    ) -> Result<Step<Value>, BackendError> {
        let visibility = node.operands.get(3).and_then(|&id| self.graph.node(id));
        let Some(Op::Input(Input::BatchVisibility { window })) = visibility.map(|v| &v.op) else {
            return Err(unsupported(node));
        };
        let qkv = [
            self.operand(node, 0)?,
            self.operand(node, 1)?,
            self.operand(node, 2)?,
        ];
        self.check_queries(node, &spec, [qkv[0], out])?;
        let n = self.graph.shape().n_tokens;
        let fits = spec.kv_heads > 0
            && spec.n_heads.is_multiple_of(spec.kv_heads)
            && qkv[1].len(self.graph) == n * spec.kv_heads * spec.k_dim
            && qkv[2].len(self.graph) == n * spec.kv_heads * spec.v_dim;
        if !fits {
            return Err(unsupported(node));
        }
        Ok(Step::AttendBatch {
            window: *window,
            spec,
            beside: self.head_values(node, &spec, 4)?,
            qkv,
            out,
        })
    }

    /// A step of plain attention.
    pub(super) fn plain(
        &mut self,
        node: &'a Node,
        out: Value,
    ) -> Result<Step<Value>, BackendError> {
        let x = self.operand(node, 0)?;
        let table = |of: &Node| of.shape.last().copied().unwrap_or(0);
        let n = self.graph.shape().n_tokens;
        let (step, spec, n_kv, wanted) = match &node.op {
            Op::Kq { layer, spec } => {
                let n_kv = table(node);
                let layer = self.plain_layer(*layer, spec, n_kv)?;
                (PlainStep::Scores { layer }, *spec, n_kv, [spec.k_dim, n_kv])
            }
            Op::KqSoftMax { spec, .. } => {
                let n_kv = table(node);
                let part = self.plain_part(node, n_kv)?;
                let beside = self.head_values(node, spec, 2)?;
                (PlainStep::SoftMax { part, beside }, *spec, n_kv, [n_kv; 2])
            }
            Op::Kqv { layer, spec } => {
                let weights = node.operands.first().and_then(|&id| self.graph.node(id));
                let n_kv = weights.map_or(0, table);
                let layer = self.plain_layer(*layer, spec, n_kv)?;
                (PlainStep::Sum { layer }, *spec, n_kv, [n_kv, spec.v_dim])
            }
            _ => return Err(unsupported(node)),
        };
        if [x, out].map(|v| v.len(self.graph)) != wanted.map(|dim| n * spec.n_heads * dim) {
            return Err(unsupported(node));
        }
        let of = PlainAttention { step, spec, n_kv };
        Ok(Step::Plain { of, x, out })
    }

    /// The place of a layer that has `n_kv` cells.
    fn plain_layer(
        &self,
        layer: LayerIdx,
        spec: &AttendSpec,
        n_kv: usize,
    ) -> Result<usize, BackendError> {
        let (at, rows) = self.layer(layer)?;
        crate::attend::check_shape(spec, &rows)?;
        if n_kv > rows.n_rows {
            let (wanted, got) = (format!("{n_kv} cells"), format!("{} cells", rows.n_rows));
            return Err(BackendError::RowShape { layer, wanted, got });
        }
        Ok(at)
    }

    /// The part whose visibility is operand 1, of which nobody may see what the table does not reach.
    fn plain_part(&mut self, node: &'a Node, n_kv: usize) -> Result<usize, BackendError> {
        let visibility = node.operands.get(1).and_then(|&id| self.graph.node(id));
        let Some(Op::Input(Input::Visibility { part, .. })) = visibility.map(|v| &v.op) else {
            return Err(unsupported(node));
        };
        let needs = self.part(*part);
        needs.n_cells = needs.n_cells.min(n_kv);
        Ok(part.as_usize())
    }

    fn check_queries(
        &self,
        node: &Node,
        spec: &AttendSpec,
        [q, out]: [Value; 2],
    ) -> Result<(), BackendError> {
        let n = self.graph.shape().n_tokens;
        let fits = q.len(self.graph) == n * spec.n_heads * spec.k_dim
            && out.len(self.graph) == n * spec.n_heads * spec.v_dim;
        if fits { Ok(()) } else { Err(unsupported(node)) }
    }

    /// Sinks and slopes; operand `at` must be the positions where there are slopes.
    fn head_values(
        &mut self,
        node: &'a Node,
        spec: &AttendSpec,
        at: usize,
    ) -> Result<HeadValues, BackendError> {
        let (Op::Attend { sinks, .. }
        | Op::AttendBatch { sinks, .. }
        | Op::KqSoftMax { sinks, .. }) = &node.op
        else {
            return Err(unsupported(node));
        };
        let sinks = sinks.as_ref().map(|name| self.vector(name, node));
        let sinks = sinks.transpose()?;
        if sinks.as_ref().is_some_and(|s| s.len() != spec.n_heads) {
            return Err(unsupported(node));
        }
        let slopes = spec.alibi.map(|alibi| alibi.slopes(spec.n_heads).into());
        if slopes.is_some() {
            self.operand_input(node, at, |i| matches!(i, Input::Positions))?;
        }
        Ok(HeadValues { sinks, slopes })
    }
}
