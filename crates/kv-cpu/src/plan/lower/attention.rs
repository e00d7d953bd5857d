//! Lowers attention: storing, attending, and the three operations of plain attention.

use std::sync::Arc;

use kv_backend::GraphInputs;
use kv_backend::checks::window_of;
use kv_backend::{BackendError, StepKind};
use kv_core::{LayerIdx, PartIdx, Visibility, Window};
use kv_graph::{
    AttendSpec, IndexSpec, Input, Node, NodeId, Op, RelativeBias, RelativeScores, ResultForm,
};
use kv_rows::LayerRows;

use super::{Call, Lowering, Value, unsupported};
use crate::plan::{HeadBuckets, HeadWeights, StepOp};

/// An operation on the rows of a layer, or among the tokens of the ubatch.
#[derive(Clone, Debug)]
pub(crate) enum AttentionOp {
    /// Stores K and V in the `layer`-th layer of the layout; K alone where values are in it.
    /// `(k)` or `(k, v)`.
    Store { layer: usize, part: usize },
    /// Attention over the `layer`-th layer of the layout. `(q)`.
    Attend {
        layer: usize,
        seen: SeenPart,
        spec: AttendSpec,
        heads: HeadWeights,
        form: ResultForm,
    },
    /// The merge of partial results, `n_heads` heads a row. `(a, b)`.
    Merge { n_heads: usize },
    /// The choice of an indexer with keys in the `layer`-th layer of the layout. `(q, weights)`.
    Index {
        layer: usize,
        seen: SeenPart,
        index: IndexSpec,
    },
    /// Attention over what an indexer chose of the `layer`-th layer of the layout. `(q, chosen)`.
    AttendSparse {
        layer: usize,
        seen: SeenPart,
        spec: AttendSpec,
    },
    /// Attention among the tokens of the ubatch. `(q, k, v)`, and the tables of queries and keys
    /// where scores have any.
    AttendBatch {
        window: Window,
        spec: AttendSpec,
        heads: HeadWeights,
    },
    /// One of the three steps of plain attention. `(queries, scores or weights)`.
    Plain(PlainAttentionOp),
}

/// A part of the memory and the window through which it is seen.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SeenPart {
    part: PartIdx,
    window: Window,
}

impl SeenPart {
    /// The visibility in a run's inputs, which were checked.
    pub(crate) fn of<'a>(self, inputs: &GraphInputs<'a>) -> &'a Visibility {
        inputs.parts[self.part.as_usize()].seen(self.window)
    }
}

/// A step of plain attention over the first `n_kv` cells.
#[derive(Clone, Debug)]
pub(crate) struct PlainAttentionOp {
    pub(crate) step: PlainStep,
    pub(crate) spec: AttendSpec,
    pub(crate) n_kv: usize,
}

/// A step of plain attention, with its layer of the layout or part of the memory.
#[derive(Clone, Debug)]
pub(crate) enum PlainStep {
    /// Queries become scores.
    Scores { layer: usize },
    /// Scores become weights.
    SoftMax { seen: SeenPart, heads: HeadWeights },
    /// Weights become results.
    Sum { layer: usize },
}

impl AttentionOp {
    /// The kind that profiles count it as.
    pub(crate) fn kind(&self) -> StepKind {
        match self {
            Self::Store { .. } => StepKind::StoreKv,
            _ => StepKind::Attention,
        }
    }
}

/// An operation and the values that it reads.
type AttentionCall = (AttentionOp, Vec<Value>);

impl<'a> Lowering<'a> {
    pub(super) fn attention(&mut self, node: &'a Node) -> Result<Option<Call>, BackendError> {
        let call = match &node.op {
            Op::StoreKv { layer } => self.store_kv(node, *layer),
            Op::StoreK { layer } => self.store_k(node, *layer),
            Op::Attend {
                layer,
                spec,
                sinks,
                relative,
            } => self.attend(node, *layer, spec, sinks.as_deref(), relative.as_ref()),
            Op::AttendPartial { layer, spec, sinks } => {
                self.attend(node, *layer, spec, sinks.as_deref(), None)
            }
            Op::MergePartials { .. } => self.merge_partials(node),
            Op::Index { layer, index } => self.index(node, *layer, index),
            Op::AttendSparse { layer, spec } => self.attend_sparse(node, *layer, spec),
            Op::AttendBatch {
                spec,
                sinks,
                relative,
            } => self.attend_batch(node, spec, sinks.as_deref(), relative.as_ref()),
            Op::Kq { layer, spec } => self.kq(node, *layer, spec),
            Op::KqSoftMax { spec, sinks } => self.kq_soft_max(node, spec, sinks.as_deref()),
            Op::Kqv { layer, spec } => self.kqv(node, *layer, spec),
            _ => return Ok(None),
        };
        call.map(|(op, reads)| Some((StepOp::Attention(op), reads)))
    }

    fn store_kv(&mut self, node: &Node, layer: LayerIdx) -> Result<AttentionCall, BackendError> {
        let (at, rows) = self.layer(layer)?;
        rows.stored_v().ok_or(BackendError::NoRows { layer })?;
        let part = rows.part;
        let is_own = |i: &Input| matches!(i, Input::Cells { part: p } if *p == part);
        self.operand_input(node, 2, is_own)?;
        let reads = vec![self.operand(node, 0)?, self.operand(node, 1)?];
        let shape_of = |at: usize| {
            let id = node.operands.get(at).copied().unwrap_or(NodeId(u32::MAX));
            self.graph.node(id).map_or(&[][..], |n| &n.shape)
        };
        let n = self.graph.shape().n_tokens;
        let wanted = [[n, rows.k.heads, rows.k.dim], [n, rows.v.heads, rows.v.dim]];
        if [shape_of(0), shape_of(1)] != [&wanted[0][..], &wanted[1][..]] {
            return Err(BackendError::RowShape {
                layer,
                wanted: format!("K {:?} and V {:?}", shape_of(0), shape_of(1)),
                got: format!("K {:?} and V {:?}", wanted[0], wanted[1]),
            });
        }
        let part = part.as_usize();
        Ok((AttentionOp::Store { layer: at, part }, reads))
    }

    /// Keys that begin with the values.
    fn store_k(&mut self, node: &Node, layer: LayerIdx) -> Result<AttentionCall, BackendError> {
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
            let (k_rows, width) = k.shape(self.graph);
            return Err(BackendError::RowShape {
                layer,
                wanted: format!("K of {k_rows} rows of {width} values"),
                got: format!("K of {n} rows of {} values", rows.k.len()),
            });
        }
        let part = part.as_usize();
        Ok((AttentionOp::Store { layer: at, part }, vec![k]))
    }

    fn attend(
        &mut self,
        node: &'a Node,
        layer: LayerIdx,
        spec: &AttendSpec,
        sinks: Option<&'a str>,
        relative: Option<&'a RelativeBias>,
    ) -> Result<AttentionCall, BackendError> {
        let (at, rows, seen) = self.attended(node, layer, 2)?;
        let q = self.operand(node, 0)?;
        crate::attend::check_shape(spec, &rows)?;
        self.check_queries(node, spec, q)?;
        let mut heads = self.head_weights(node, spec, sinks, 3)?;
        if let Some(relative) = relative {
            // Stored keys have no tables.
            if relative.scores == RelativeScores::Tables {
                return Err(unsupported(node));
            }
            heads.buckets = Some(self.head_buckets(node, relative, spec.n_heads)?);
        }
        let op = AttentionOp::Attend {
            layer: at,
            seen,
            spec: *spec,
            heads,
            form: ResultForm::of(&node.op),
        };
        Ok((op, vec![q]))
    }

    fn merge_partials(&self, node: &Node) -> Result<AttentionCall, BackendError> {
        let reads = vec![self.operand(node, 0)?, self.operand(node, 1)?];
        let partial = node.operands.first().and_then(|&id| self.graph.node(id));
        let n_heads = partial.and_then(|node| node.shape.get(1).copied());
        let n_heads = n_heads.ok_or_else(|| unsupported(node))?;
        let n_values = match ResultForm::of(&node.op) {
            ResultForm::Whole => node.n_values() + node.n_rows() * n_heads,
            ResultForm::Partial => node.n_values(),
        };
        if reads.iter().all(|x| x.len(self.graph) == n_values) {
            Ok((AttentionOp::Merge { n_heads }, reads))
        } else {
            Err(unsupported(node))
        }
    }

    /// The bias on scores by distances, for which the positions are the last operand.
    fn head_buckets(
        &mut self,
        node: &'a Node,
        relative: &'a RelativeBias,
        n_heads: usize,
    ) -> Result<Arc<HeadBuckets>, BackendError> {
        let last = node.operands.len().saturating_sub(1);
        self.operand_input(node, last, |i| matches!(i, Input::Positions))?;
        let weights = match &relative.scores {
            RelativeScores::Weight(name) => Some(self.vector(name, node)?),
            RelativeScores::Tables => None,
        };
        let buckets = HeadBuckets::new(relative, weights.as_deref(), n_heads);
        Ok(Arc::new(buckets))
    }

    fn index(
        &mut self,
        node: &Node,
        layer: LayerIdx,
        index: &IndexSpec,
    ) -> Result<AttentionCall, BackendError> {
        let (layer, rows, seen) = self.attended(node, layer, 3)?;
        let [q, weights] = [self.operand(node, 0)?, self.operand(node, 1)?];
        let n = self.graph.shape().n_tokens;
        let fits = [rows.k.heads, rows.k.dim] == [1, index.dim]
            && q.len(self.graph) == n * index.n_heads * index.dim
            && weights.len(self.graph) == n * index.n_heads
            && node.n_values() == n * index.top_k;
        if !fits {
            return Err(unsupported(node));
        }
        let op = AttentionOp::Index {
            layer,
            seen,
            index: *index,
        };
        Ok((op, vec![q, weights]))
    }

    fn attend_sparse(
        &mut self,
        node: &Node,
        layer: LayerIdx,
        spec: &AttendSpec,
    ) -> Result<AttentionCall, BackendError> {
        let (layer, rows, seen) = self.attended(node, layer, 2)?;
        let [q, chosen] = [self.operand(node, 0)?, self.operand(node, 3)?];
        crate::attend::check_shape(spec, &rows)?;
        self.check_queries(node, spec, q)?;
        if chosen.shape(self.graph).0 != self.graph.shape().n_tokens {
            return Err(unsupported(node));
        }
        let op = AttentionOp::AttendSparse {
            layer,
            seen,
            spec: *spec,
        };
        Ok((op, vec![q, chosen]))
    }

    /// The rows that a node reads, its own layer's or another's, and their visibility, operand
    /// `at`.
    fn attended(
        &self,
        node: &Node,
        layer: LayerIdx,
        at: usize,
    ) -> Result<(usize, LayerRows, SeenPart), BackendError> {
        let attended = self.layout.attended(layer).map(|(at, rows)| (at, *rows));
        let (number, rows) = attended.ok_or(BackendError::NoRows { layer })?;
        let is_own = |i: &Input| matches!(i, Input::Visibility { part, .. } if *part == rows.part);
        self.operand_input(node, at, is_own)?;
        Ok((number, rows, self.seen(node, at)?))
    }

    fn attend_batch(
        &mut self,
        node: &'a Node,
        spec: &AttendSpec,
        sinks: Option<&'a str>,
        relative: Option<&'a RelativeBias>,
    ) -> Result<AttentionCall, BackendError> {
        let visibility = node.operands.get(3).and_then(|&id| self.graph.node(id));
        let Some(Op::Input(Input::BatchVisibility { window })) = visibility.map(|v| &v.op) else {
            return Err(unsupported(node));
        };
        let [q, k, v] = [0, 1, 2].map(|at| self.operand(node, at));
        let (q, k, v) = (q?, k?, v?);
        self.check_queries(node, spec, q)?;
        let n = self.graph.shape().n_tokens;
        let fits = spec.kv_heads > 0
            && spec.n_heads.is_multiple_of(spec.kv_heads)
            && k.len(self.graph) == n * spec.kv_heads * spec.k_dim
            && v.len(self.graph) == n * spec.kv_heads * spec.v_dim;
        if !fits {
            return Err(unsupported(node));
        }
        let mut heads = self.head_weights(node, spec, sinks, node.operands.len() - 1)?;
        let mut reads = vec![q, k, v];
        if let Some(relative) = relative {
            heads.buckets = Some(self.head_buckets(node, relative, spec.n_heads)?);
            if relative.scores == RelativeScores::Tables {
                reads.extend([self.operand(node, 4)?, self.operand(node, 5)?]);
            }
        }
        let op = AttentionOp::AttendBatch {
            window: *window,
            spec: *spec,
            heads,
        };
        Ok((op, reads))
    }

    fn kq(
        &mut self,
        node: &Node,
        layer: LayerIdx,
        spec: &AttendSpec,
    ) -> Result<AttentionCall, BackendError> {
        let n_kv = node.shape.last().copied().unwrap_or(0);
        let layer = self.plain_layer(layer, spec, n_kv)?;
        let of = PlainAttentionOp {
            step: PlainStep::Scores { layer },
            spec: *spec,
            n_kv,
        };
        self.plain(node, of, [spec.k_dim, n_kv])
    }

    fn kq_soft_max(
        &mut self,
        node: &'a Node,
        spec: &AttendSpec,
        sinks: Option<&'a str>,
    ) -> Result<AttentionCall, BackendError> {
        let n_kv = node.shape.last().copied().unwrap_or(0);
        let seen = self.plain_part(node, n_kv)?;
        let heads = self.head_weights(node, spec, sinks, 2)?;
        let of = PlainAttentionOp {
            step: PlainStep::SoftMax { seen, heads },
            spec: *spec,
            n_kv,
        };
        self.plain(node, of, [n_kv; 2])
    }

    fn kqv(
        &mut self,
        node: &Node,
        layer: LayerIdx,
        spec: &AttendSpec,
    ) -> Result<AttentionCall, BackendError> {
        let weights = node.operands.first().and_then(|&id| self.graph.node(id));
        let n_kv = weights.and_then(|w| w.shape.last().copied()).unwrap_or(0);
        let layer = self.plain_layer(layer, spec, n_kv)?;
        let of = PlainAttentionOp {
            step: PlainStep::Sum { layer },
            spec: *spec,
            n_kv,
        };
        self.plain(node, of, [n_kv, spec.v_dim])
    }

    /// A step of plain attention from `widths[0]` to `widths[1]` values of each token and head.
    fn plain(
        &self,
        node: &Node,
        of: PlainAttentionOp,
        widths: [usize; 2],
    ) -> Result<AttentionCall, BackendError> {
        let x = self.operand(node, 0)?;
        let n_heads = self.graph.shape().n_tokens * of.spec.n_heads;
        if [x.len(self.graph), node.n_values()] == widths.map(|width| n_heads * width) {
            Ok((AttentionOp::Plain(of), vec![x]))
        } else {
            Err(unsupported(node))
        }
    }

    /// The index of a layer that has `n_kv` cells.
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

    /// The part that operand 1 shows; no row may see cells beyond the table.
    fn plain_part(&mut self, node: &Node, n_kv: usize) -> Result<SeenPart, BackendError> {
        let seen = self.seen(node, 1)?;
        let needs = self.part(seen.part);
        needs.n_cells = needs.n_cells.min(n_kv);
        Ok(seen)
    }

    /// The part that operand `at` shows.
    fn seen(&self, node: &Node, at: usize) -> Result<SeenPart, BackendError> {
        let (part, window) = window_of(self.graph, node, at)?;
        Ok(SeenPart { part, window })
    }

    fn check_queries(&self, node: &Node, spec: &AttendSpec, q: Value) -> Result<(), BackendError> {
        let n = self.graph.shape().n_tokens;
        let len = ResultForm::of(&node.op).len(spec.v_dim);
        let fits = q.len(self.graph) == n * spec.n_heads * spec.k_dim
            && node.n_values() == n * spec.n_heads * len;
        if fits { Ok(()) } else { Err(unsupported(node)) }
    }

    /// Sinks and slopes; operand `at` must be the positions where there are slopes.
    fn head_weights(
        &mut self,
        node: &'a Node,
        spec: &AttendSpec,
        sinks: Option<&'a str>,
        at: usize,
    ) -> Result<HeadWeights, BackendError> {
        let sinks = sinks.map(|name| self.vector(name, node)).transpose()?;
        if sinks.as_ref().is_some_and(|s| s.len() != spec.n_heads) {
            return Err(unsupported(node));
        }
        let slopes = spec.alibi.map(|alibi| alibi.slopes(spec.n_heads).into());
        if slopes.is_some() {
            self.operand_input(node, at, |i| matches!(i, Input::Positions))?;
        }
        Ok(HeadWeights {
            sinks,
            slopes,
            buckets: None,
        })
    }

    fn layer(&self, layer: LayerIdx) -> Result<(usize, LayerRows), BackendError> {
        let mut layers = self.layout.layers().iter().enumerate();
        let found = layers.find(|(_, l)| l.layer == layer);
        found
            .map(|(at, l)| (at, *l))
            .ok_or(BackendError::NoRows { layer })
    }
}
