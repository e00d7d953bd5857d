//! Attention of [`Evaluator`]: in one step over what a row sees, or as the three of plain
//! attention.
//!
//! Invariant: a row reads what its visibility shows, and a sink, nothing else. Does not know how
//! rows are stored: they come as decoded numbers.

use kv_core::{CellIdx, LayerIdx, Pos, Visibility};
use kv_graph::{
    AttendSpec, Attention, IndexSpec, Input, Node, Op, RelativeBias, RelativeScores, ResultForm,
};

use super::{Evaluator, Memory, Value, floats};

impl Evaluator<'_> {
    /// The visibility of rows through the window that operand `at` names.
    pub(super) fn stored_visibility(&self, node: &Node, at: usize) -> &Visibility {
        match self.graph.nodes()[node.operands[at].as_usize()].op {
            Op::Input(Input::Visibility { part, window }) => {
                self.inputs.parts[part.as_usize()].seen(window)
            }
            ref other => panic!("{other:?} is no visibility"),
        }
    }

    /// Attention of all rows, where `row_of` gives K and V of a cell.
    pub(super) fn attend<'r>(
        &self,
        node: &Node,
        attention: Attention<'_>,
        visibility: &Visibility,
        row_of: impl Fn(CellIdx) -> &'r [Value; 2],
        by_distance: impl Fn(u32, usize, (CellIdx, Pos)) -> f64,
    ) -> Value {
        let Attention { spec, sinks } = attention;
        let slopes = match spec.alibi {
            Some(alibi) => floats(&alibi.slopes(spec.n_heads)),
            None => vec![0.0; spec.n_heads],
        };
        let last = node.operands.last().map(|id| &self.values[id.as_usize()]);
        let positions = last.filter(|_| spec.alibi.is_some());
        let sinks = sinks.map(|name| self.weight(name));
        let width = spec.n_heads * spec.k_dim;
        let mut out = Vec::new();
        for (row, q) in (0u32..).zip(self.operand(node, 0).chunks_exact(width)) {
            let query = positions.map_or(0.0, |positions| positions[row as usize]);
            for (head, q) in q.chunks_exact(spec.k_dim).enumerate() {
                let seen: Vec<SeenToken<'_>> = visibility
                    .row(row)
                    .map(|(cell, pos)| SeenToken {
                        row: row_of(cell),
                        bias: by_distance(row, head, (cell, pos))
                            - slopes[head] * (query - f64::from(pos.0)).abs(),
                    })
                    .collect();
                let kv_head = head / (spec.n_heads / spec.kv_heads);
                let sink = sinks.as_ref().map(|sinks| sinks[head]);
                let (result, logarithm) = attend_head(&spec, q, kv_head, &seen, sink);
                out.extend(result);
                if ResultForm::of(&node.op) == ResultForm::Partial {
                    out.push(logarithm);
                }
            }
        }
        out
    }

    /// Attention over stored rows.
    pub(super) fn attend_stored<'r>(
        &self,
        node: &Node,
        row_of: impl Fn(CellIdx) -> &'r [Value; 2],
    ) -> Value {
        let (spec, sinks, relative) = match &node.op {
            Op::Attend {
                spec,
                sinks,
                relative,
                ..
            } => (spec, sinks, relative.as_ref()),
            Op::AttendPartial { spec, sinks, .. } => (spec, sinks, None),
            op => panic!("{op:?} attends over no stored rows"),
        };
        let visibility = self.stored_visibility(node, 2);
        let attention = Attention {
            spec: *spec,
            sinks: sinks.as_deref(),
        };
        let by_distance = self.scores_by_distance(node, *spec, relative);
        self.attend(node, attention, visibility, row_of, by_distance)
    }

    /// Partial results over different rows as one.
    pub(super) fn merge_partials(&self, node: &Node) -> Value {
        let width = self.shape(node.operands[0])[2];
        let is_partial = ResultForm::of(&node.op) == ResultForm::Partial;
        let [a, b] = [0, 1].map(|at| self.operand(node, at).chunks_exact(width));
        let merged = a.zip(b).flat_map(|(a, b)| {
            let (&[log_a, log_b], dim) = (&[a[width - 1], b[width - 1]], width - 1);
            let max = log_a.max(log_b);
            let (weight_a, weight_b, sum) = if max == f64::NEG_INFINITY {
                (0.5, 0.5, 0.0)
            } else {
                let [a, b] = [(log_a - max).exp(), (log_b - max).exp()];
                (a / (a + b), b / (a + b), a + b)
            };
            let values = (0..dim).map(move |i| weight_a * a[i] + weight_b * b[i]);
            values.chain(is_partial.then_some(max + sum.ln()))
        });
        merged.collect()
    }

    /// The bias on the score of a row and a head with a token by their distance.
    fn scores_by_distance(
        &self,
        node: &Node,
        spec: AttendSpec,
        relative: Option<&RelativeBias>,
    ) -> impl Fn(u32, usize, (CellIdx, Pos)) -> f64 {
        let weight = match relative.map(|relative| &relative.scores) {
            Some(RelativeScores::Weight(name)) => self.weight(name),
            Some(RelativeScores::Tables) | None => Vec::new(),
        };
        move |row: u32, head: usize, (cell, pos): (CellIdx, Pos)| {
            let Some(RelativeBias { buckets, scores }) = relative else {
                return 0.0;
            };
            let query = self.inputs.positions[row as usize];
            let bucket = buckets.of(i64::from(query) - i64::from(pos.0));
            if *scores != RelativeScores::Tables {
                return weight[bucket * spec.n_heads + head];
            }
            let n = buckets.n();
            let kv_head = head / (spec.n_heads / spec.kv_heads);
            let (row, cell) = (row as usize, cell.as_usize());
            self.operand(node, 4)[(row * spec.n_heads + head) * n + bucket]
                + self.operand(node, 5)[(cell * spec.kv_heads + kv_head) * n + bucket]
        }
    }

    /// Scores of plain attention.
    pub(super) fn kq(
        &self,
        node: &Node,
        layer: LayerIdx,
        spec: &AttendSpec,
        memory: &Memory,
    ) -> Value {
        let row_len = spec.kv_heads * spec.k_dim;
        let keys = rows_by_cell(memory, layer, 0, row_len, node.shape[2]);
        let q = self.operand(node, 0).chunks_exact(spec.k_dim);
        let score = |(i, q): (usize, &[f64])| -> Value {
            let kv_head = i % spec.n_heads / (spec.n_heads / spec.kv_heads);
            let keys = keys.iter().map(|key| &key[kv_head * spec.k_dim..]);
            let dots = keys.map(|k| q.iter().zip(k).map(|(a, b)| a * b).sum::<f64>());
            let scaled = dots.map(|dot| dot * f64::from(spec.scale));
            let cap = |x: f64, c: f32| f64::from(c) * (x / f64::from(c)).tanh();
            scaled
                .map(|x| spec.soft_cap.map_or(x, |c| cap(x, c)))
                .collect()
        };
        q.enumerate().flat_map(score).collect()
    }

    /// The weighted sum of plain attention.
    pub(super) fn kqv(
        &self,
        node: &Node,
        layer: LayerIdx,
        spec: &AttendSpec,
        memory: &Memory,
    ) -> Value {
        let n_kv = self.shape(node.operands[0])[2];
        let values = rows_by_cell(memory, layer, 1, spec.kv_heads * spec.v_dim, n_kv);
        let weights = self.operand(node, 0).chunks_exact(n_kv);
        let sum = |(i, weights): (usize, &[f64])| -> Value {
            let kv_head = i % spec.n_heads / (spec.n_heads / spec.kv_heads);
            let at = |j: usize| kv_head * spec.v_dim + j;
            let one = |j| weights.iter().zip(&values).map(|(w, v)| w * v[at(j)]).sum();
            (0..spec.v_dim).map(one).collect()
        };
        weights.enumerate().flat_map(sum).collect()
    }

    pub(super) fn kq_soft_max(&self, node: &Node, spec: &AttendSpec, sinks: Option<&str>) -> Value {
        let visibility = self.stored_visibility(node, 1);
        let slopes = spec.alibi.map(|alibi| alibi.slopes(spec.n_heads));
        let sinks = sinks.map(|name| self.weight(name));
        let n_kv = node.shape[2];
        let mut out = vec![0.0; node.n_values()];
        let tables = out
            .chunks_exact_mut(n_kv)
            .zip(self.operand(node, 0).chunks_exact(n_kv));
        for (i, (weights, scores)) in tables.enumerate() {
            let (row, head) = (i / spec.n_heads, i % spec.n_heads);
            let score = |(cell, pos): (CellIdx, kv_core::Pos)| {
                let slope = slopes.as_ref().map_or(0.0, |s| f64::from(s[head]));
                let distance = match slope {
                    0.0 => 0,
                    _ => self.inputs.positions[row].abs_diff(pos.0),
                };
                let cell = cell.as_usize();
                (cell, scores[cell] - slope * f64::from(distance))
            };
            let seen: Vec<(usize, f64)> = visibility.row(row as u32).map(score).collect();
            let all = seen
                .iter()
                .map(|s| s.1)
                .chain(sinks.as_ref().map(|sinks| sinks[head]));
            let max = all.clone().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = all.map(|s| (s - max).exp()).sum();
            for (cell, score) in seen {
                weights[cell] = (score - max).exp() / sum;
            }
        }
        out
    }

    /// The ranks of the rows with the largest scores, of what each row sees.
    pub(super) fn index(
        &self,
        node: &Node,
        layer: LayerIdx,
        of: &IndexSpec,
        memory: &Memory,
    ) -> Value {
        let visibility = self.stored_visibility(node, 3);
        let (_, rows) = self.layout.attended(layer).unwrap();
        let queries = self.operand(node, 0).chunks_exact(of.n_heads * of.dim);
        let weights = self.operand(node, 1).chunks_exact(of.n_heads);
        let mut out = Vec::new();
        for (row, (q, weights)) in (0u32..).zip(queries.zip(weights)) {
            let score = |(cell, _): (CellIdx, kv_core::Pos)| -> f64 {
                let [key, _] = &memory.rows[&(rows.layer, cell.0)];
                let dot = |q: &[f64]| q.iter().zip(key).map(|(a, b)| a * b).sum::<f64>();
                let heads = q.chunks_exact(of.dim).zip(weights);
                let sum: f64 = heads.map(|(q, weight)| weight * dot(q).max(0.0)).sum();
                // Zeros are equal, whatever their sign.
                sum + 0.0
            };
            let scores: Vec<f64> = visibility.row(row).map(score).collect();
            let mut ranks: Vec<usize> = (0..scores.len()).collect();
            // A stable sort: of equal scores the earlier comes first.
            ranks.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
            ranks.truncate(of.top_k);
            ranks.sort_unstable();
            let ranks = ranks.into_iter().map(|rank| rank as f64);
            out.extend(ranks.chain(std::iter::repeat(-1.0)).take(of.top_k));
        }
        out
    }

    /// Attention over the cells of these ranks.
    pub(super) fn attend_sparse(
        &self,
        node: &Node,
        layer: LayerIdx,
        spec: &AttendSpec,
        memory: &Memory,
    ) -> Value {
        let visibility = self.stored_visibility(node, 2);
        let (_, rows) = self.layout.attended(layer).unwrap();
        let per_row = self.shape(node.operands[3])[1];
        let chosen: Vec<f32> = self.operand(node, 3).iter().map(|&r| r as f32).collect();
        let mut kept = Visibility::default();
        visibility.keep_chosen(&chosen, per_row, &mut kept);
        let row_of = |cell: CellIdx| &memory.rows[&(rows.layer, cell.0)];
        let attention = Attention {
            spec: *spec,
            sinks: None,
        };
        self.attend(node, attention, &kept, row_of, |_, _, _| 0.0)
    }

    pub(super) fn attend_batch(
        &self,
        node: &Node,
        spec: &AttendSpec,
        sinks: Option<&str>,
        relative: Option<&RelativeBias>,
    ) -> Value {
        let visibility = match self.graph.nodes()[node.operands[3].as_usize()].op {
            Op::Input(Input::BatchVisibility { window }) => self.inputs.batch_visibility(window),
            ref other => panic!("{other:?} is no visibility of the ubatch"),
        };
        let [k, v] = [1, 2].map(|at| {
            let operand = &self.graph.nodes()[node.operands[at].as_usize()];
            let rows = self.operand(node, at).chunks_exact(operand.row_len());
            rows.map(<[f64]>::to_vec).collect::<Vec<_>>()
        });
        let rows: Vec<[Value; 2]> = k.into_iter().zip(v).map(|(k, v)| [k, v]).collect();
        let row_of = |cell: CellIdx| &rows[cell.as_usize()];
        let attention = Attention { spec: *spec, sinks };
        let by_distance = self.scores_by_distance(node, *spec, relative);
        self.attend(node, attention, visibility.unwrap(), row_of, by_distance)
    }
}

/// K (`kind` 0) or V rows of the first cells, zeros where nothing was stored.
fn rows_by_cell(
    memory: &Memory,
    layer: LayerIdx,
    kind: usize,
    row_len: usize,
    n_kv: usize,
) -> Vec<Value> {
    let row = |cell: u32| match memory.rows.get(&(layer, cell)) {
        Some(rows) => rows[kind].clone(),
        None => vec![0.0; row_len],
    };
    (0..n_kv as u32).map(row).collect()
}

/// A token as a head sees it: K and V, and the bias on its score. K and V of a token, and what is
/// added to its score.
struct SeenToken<'a> {
    row: &'a [Value; 2],
    bias: f64,
}

/// The result of a head, and the logarithm of the sum of `e^score`.
fn attend_head(
    spec: &AttendSpec,
    q: &[f64],
    kv_head: usize,
    seen: &[SeenToken<'_>],
    sink: Option<f64>,
) -> (Value, f64) {
    let score = |seen: &SeenToken<'_>| {
        let k = &seen.row[0][kv_head * spec.k_dim..][..spec.k_dim];
        let score = q.iter().zip(k).map(|(a, b)| a * b).sum::<f64>() * f64::from(spec.scale);
        let capped = |cap: f32| f64::from(cap) * (score / f64::from(cap)).tanh();
        spec.soft_cap.map_or(score, capped) + seen.bias
    };
    let scores: Vec<f64> = seen.iter().map(score).collect();
    let all = || scores.iter().copied().chain(sink);
    let max = all().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = all().map(|s| (s - max).exp()).sum();
    let mut out = vec![0.0; spec.v_dim];
    for (s, seen) in scores.iter().zip(seen) {
        for (o, v) in out.iter_mut().zip(&seen.row[1][kv_head * spec.v_dim..]) {
            *o += (s - max).exp() / sum * v;
        }
    }
    let logarithm = if max == f64::NEG_INFINITY {
        max
    } else {
        max + sum.ln()
    };
    (out, logarithm)
}
