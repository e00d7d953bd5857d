//! The operations: [`check`] says which there are, [`run`] computes them node by node.
//!
//! Invariant: what passes [`check`] is computed. Sums are in double precision. Knows nothing of
//! attention, which has its own file.

use std::sync::Arc;

use kv_backend::BackendError;
use kv_backend::GraphInputs;
use kv_backend::checks::{Ids, ids, part_inputs, part_of};
use kv_backend::null::HostRows;
use kv_backend::{RowKind, RowSpan};
use kv_core::{CellIdx, LayerIdx};
use kv_graph::rope::RopeSpec;
use kv_graph::{Activation, Graph, Input, Node, Op, TopK};

use crate::{LoopsProgram, NAME};

/// Checks that a node can be computed.
pub(crate) fn check(node: &Node) -> Result<(), BackendError> {
    match &node.op {
        Op::Input(_) | Op::Embed { .. } | Op::Linear { .. } | Op::RmsNorm { .. } => Ok(()),
        Op::Rope { .. } | Op::Reshape | Op::Columns { .. } => Ok(()),
        Op::TakeRows | Op::TopK { .. } => Ok(()),
        Op::Add | Op::Mul | Op::Scale { .. } => Ok(()),
        Op::Gate { activation } | Op::Activate { activation }
            if activation_of(*activation).is_some() =>
        {
            Ok(())
        }
        Op::StoreKv { .. } | Op::StoreK { .. } | Op::Attend { relative: None, .. } => Ok(()),
        op => Err(BackendError::UnsupportedOp {
            backend: NAME,
            op: op.name(),
            node: node.name.clone(),
        }),
    }
}

/// The values of all nodes.
pub(crate) fn run(
    program: &LoopsProgram,
    rows: &mut HostRows,
    inputs: &GraphInputs<'_>,
) -> Result<Vec<Vec<f32>>, BackendError> {
    let mut run = Run {
        program,
        inputs,
        values: Vec::new(),
    };
    for node in program.graph.nodes() {
        inputs.check_cancelled()?;
        let value = run.node(node, rows)?;
        run.values.push(value);
    }
    Ok(run.values)
}

/// A run under way: the values of the nodes so far.
pub(crate) struct Run<'a> {
    program: &'a LoopsProgram,
    pub(crate) inputs: &'a GraphInputs<'a>,
    values: Vec<Vec<f32>>,
}

impl Run<'_> {
    pub(crate) fn graph(&self) -> &Graph {
        &self.program.graph
    }

    pub(crate) fn operand(&self, node: &Node, at: usize) -> &[f32] {
        &self.values[node.operands[at].as_usize()]
    }

    pub(crate) fn weight(&self, name: &str) -> &Arc<[f32]> {
        &self.program.weights[name]
    }

    fn node(&self, node: &Node, rows: &mut HostRows) -> Result<Vec<f32>, BackendError> {
        Ok(match &node.op {
            Op::Input(Input::Embeddings { .. }) => self.inputs.embeddings.to_vec(),
            // Whoever takes another input asks for it.
            Op::Input(_) => Vec::new(),
            Op::Reshape => self.operand(node, 0).to_vec(),
            Op::Add => self.pairs(node, |a, b| a + b),
            Op::Mul => self.pairs(node, |a, b| a * b),
            Op::Scale { factor } => self.each(node, |x| x * factor),
            Op::Gate { activation } => {
                let f = known(node, *activation)?;
                self.pairs(node, |gate, up| f(gate) * up)
            }
            Op::Activate { activation } => self.each(node, known(node, *activation)?),
            Op::Embed { weight } => {
                let Ids { ids, .. } = ids(self.graph(), node, 0, self.inputs)?;
                select(self.weight(weight), ids, node.row_len())
            }
            Op::TakeRows => {
                let Ids { ids, .. } = ids(self.graph(), node, 1, self.inputs)?;
                select(self.operand(node, 0), ids, node.row_len())
            }
            Op::TopK { k } => self.top_k(node, *k),
            Op::Columns { first } => {
                // Of rows, or of every head.
                let last = |node: &Node| node.shape.last().copied().unwrap_or(0);
                let width = self.graph().node(node.operands[0]).map_or(0, last);
                let rows = self.operand(node, 0).chunks_exact(width.max(1));
                rows.flat_map(|row| &row[*first..first + last(node)])
                    .copied()
                    .collect()
            }
            Op::Linear { weight, bias } => self.linear(node, weight, bias.as_deref()),
            Op::RmsNorm { weight, eps } => self.rms_norm(node, weight.as_deref(), *eps),
            Op::Rope { rope } => self.rope(node, rope),
            Op::StoreKv { layer } | Op::StoreK { layer } => self.store(node, *layer, rows)?,
            Op::Attend {
                layer,
                spec,
                sinks,
                relative: None,
            } => self.attend(node, *layer, spec, sinks.as_deref(), rows)?,
            _ => check(node).map(|()| Vec::new())?,
        })
    }

    fn each(&self, node: &Node, f: impl Fn(f32) -> f32) -> Vec<f32> {
        self.operand(node, 0).iter().map(|&x| f(x)).collect()
    }

    fn pairs(&self, node: &Node, f: impl Fn(f32, f32) -> f32) -> Vec<f32> {
        let pairs = self.operand(node, 0).iter().zip(self.operand(node, 1));
        pairs.map(|(&a, &b)| f(a, b)).collect()
    }

    /// The largest values of every row, as [`TopK`] lays them out.
    fn top_k(&self, node: &Node, k: usize) -> Vec<f32> {
        let x = self.operand(node, 0);
        let mut out = vec![0.0; node.n_rows() * TopK::row_len(k)];
        let rows = x.chunks_exact((x.len() / node.n_rows().max(1)).max(1));
        for (row, out) in rows.zip(out.chunks_exact_mut(TopK::row_len(k))) {
            TopK::of(row, out);
        }
        out
    }

    /// GEMM: `[n, columns]` by `[rows, columns]` gives `[n, rows]`.
    fn linear(&self, node: &Node, weight: &str, bias: Option<&str>) -> Vec<f32> {
        let (x, matrix) = (self.operand(node, 0), self.weight(weight));
        let bias = bias.map(|name| self.weight(name));
        let n_columns = matrix.len() / node.row_len().max(1);
        let mut out = Vec::with_capacity(node.n_values());
        for x in x.chunks_exact(n_columns.max(1)) {
            for (j, row) in matrix.chunks_exact(n_columns.max(1)).enumerate() {
                let sum = dot(x, row) + bias.map_or(0.0, |bias| f64::from(bias[j]));
                out.push(sum as f32);
            }
        }
        out
    }

    /// Gains are of the last dimension, or of all dimensions but the first.
    fn rms_norm(&self, node: &Node, weight: Option<&str>, eps: f32) -> Vec<f32> {
        let dim = node.shape.last().copied().unwrap_or(1).max(1);
        let gains = weight.map(|name| self.weight(name));
        let n_gains = gains.map_or(1, |gains| gains.len() / dim).max(1);
        let norm = |(at, x): (usize, &[f32])| {
            let by = (dot(x, x) / dim as f64 + f64::from(eps)).sqrt();
            let gain = gains.map(|gains| &gains[at % n_gains * dim..][..dim]);
            let value = |i: usize| {
                let gain = gain.map_or(1.0, |gain| f64::from(gain[i]));
                (f64::from(x[i]) / by * gain) as f32
            };
            (0..dim).map(value).collect::<Vec<_>>()
        };
        let rows = self.operand(node, 0).chunks_exact(dim).enumerate();
        rows.flat_map(norm).collect()
    }

    fn rope(&self, node: &Node, rope: &RopeSpec) -> Vec<f32> {
        let factors = rope.factors.as_ref().map(|name| &**self.weight(name));
        let frequencies = rope.frequencies(factors);
        let (mut cos, mut sin) = (vec![0.0; frequencies.len()], vec![0.0; frequencies.len()]);
        let mut out = self.operand(node, 0).to_vec();
        let dim = node.shape.last().copied().unwrap_or(1).max(1);
        let rows = out.chunks_exact_mut(node.row_len().max(1));
        for (row, &pos) in rows.zip(self.inputs.positions) {
            rope.angles(&frequencies, pos, &mut cos, &mut sin);
            for head in row.chunks_exact_mut(dim) {
                rope.rotate_head(head, &cos, &sin);
            }
        }
        out
    }

    /// Encodes K rows, and V rows where values are not in the keys, into their cells.
    fn store(
        &self,
        node: &Node,
        layer: LayerIdx,
        rows: &mut HostRows,
    ) -> Result<Vec<f32>, BackendError> {
        let stored = *self
            .program
            .layout
            .layer(layer)
            .ok_or(BackendError::NoRows { layer })?;
        let part = part_of(self.graph(), node, node.operands.len() - 1)?;
        let cells = &part_inputs(self.inputs, part)?.cells;
        let v = stored.stored_v().map(|v| (RowKind::V, v));
        for (at, (kind, shape)) in [(RowKind::K, stored.k)].into_iter().chain(v).enumerate() {
            let values = self.operand(node, at).chunks_exact(shape.len().max(1));
            for (values, &cell) in values.zip(cells) {
                shape.encode(values, rows.span_mut(one_row(layer, kind, cell))?);
            }
        }
        Ok(Vec::new())
    }
}

/// One row as a span.
pub(crate) fn one_row(layer: LayerIdx, kind: RowKind, first: CellIdx) -> RowSpan {
    RowSpan {
        layer,
        kind,
        first,
        len: 1,
    }
}

pub(crate) fn dot(a: &[f32], b: &[f32]) -> f64 {
    let pairs = a.iter().zip(b);
    pairs.map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

/// The rows `ids` of a table whose rows have `width` values.
fn select(table: &[f32], ids: &[u32], width: usize) -> Vec<f32> {
    let rows = ids.iter().map(|&id| &table[id as usize * width..][..width]);
    rows.flatten().copied().collect()
}

fn activation_of(activation: Activation) -> Option<fn(f32) -> f32> {
    match activation {
        Activation::Silu => Some(|x| x / (1.0 + (-x).exp())),
        Activation::GeluTanh => Some(|x| {
            let inner = (2.0 / std::f32::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
            0.5 * x * (1.0 + inner.tanh())
        }),
        Activation::Sigmoid => Some(|x| 1.0 / (1.0 + (-x).exp())),
        Activation::Relu => Some(|x| x.max(0.0)),
        Activation::ReluSquared => Some(|x| x.max(0.0) * x.max(0.0)),
        // The exact GELU needs an error function, which the standard library does not have.
        _ => None,
    }
}

fn known(node: &Node, activation: Activation) -> Result<fn(f32) -> f32, BackendError> {
    activation_of(activation).ok_or_else(|| BackendError::UnsupportedOp {
        backend: NAME,
        op: node.op.name(),
        node: node.name.clone(),
    })
}
