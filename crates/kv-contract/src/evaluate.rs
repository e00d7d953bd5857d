//! [`evaluate`]: a graph computed in `f64` straight from the operations' definitions. Slow and
//! obviously right: the oracle for whole graphs.
//!
//! Rows are remembered as what their stored type can hold, so storage rounds here as it does on
//! devices. Does not know backends.

mod attend;
mod error_function;
mod recurrent;
mod route;

use std::collections::HashMap;

use kv_backend::GraphInputs;
use kv_core::{CellIdx, LayerIdx};
use kv_graph::rope::{RopeSpec, RopeStyle};
use kv_graph::weights::WeightSource;
use kv_graph::{Activation, Graph, Input, Node, NodeId, Op, PositionScale};
use kv_rows::{RowLayout, RowShape, ValueRows};

use error_function::erfc;

/// K and V of each layer and cell, as stored.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    rows: HashMap<(LayerIdx, u32), [Vec<f64>; 2]>,
    /// Last inputs of convolutions, oldest first, and states of scans.
    states: HashMap<(LayerIdx, StateKind, CellIdx), Vec<f64>>,
}

impl Memory {
    /// Takes K and V of a cell, as stored.
    pub(super) fn insert(&mut self, layer: LayerIdx, cell: CellIdx, rows: [Vec<f64>; 2]) {
        self.rows.insert((layer, cell.0), rows);
    }

    /// The state of a scan or a delta rule that was stored in a row.
    pub(super) fn state(&self, layer: LayerIdx, row: CellIdx) -> Option<&[f64]> {
        let state = self.states.get(&(layer, StateKind::Scan, row))?;
        Some(state)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum StateKind {
    Conv,
    Scan,
}

/// The values of a node, or none.
type Value = Vec<f64>;

struct Evaluator<'a> {
    graph: &'a Graph,
    weights: &'a dyn WeightSource,
    layout: &'a RowLayout,
    inputs: &'a GraphInputs<'a>,
    values: Vec<Value>,
}

/// The outputs of `graph`, after its rows were stored in `memory`.
///
/// # Panics
/// If weights or inputs do not fit the graph.
pub fn evaluate(
    graph: &Graph,
    weights: &dyn WeightSource,
    layout: &RowLayout,
    memory: &mut Memory,
    inputs: &GraphInputs<'_>,
) -> Vec<Vec<f64>> {
    let mut evaluator = Evaluator {
        graph,
        weights,
        layout,
        inputs,
        values: Vec::new(),
    };
    for node in graph.nodes() {
        let value = evaluator.node(node, memory);
        assert_eq!(
            value.len(),
            evaluator.n_values(node),
            "values of {}",
            node.name
        );
        evaluator.values.push(value);
    }
    graph
        .outputs()
        .iter()
        .map(|id| evaluator.values[id.as_usize()].clone())
        .collect()
}

/// The same numbers in `f64`.
pub(super) fn floats(values: &[f32]) -> Value {
    values.iter().map(|&v| f64::from(v)).collect()
}

fn integers(values: &[u32]) -> Value {
    values.iter().map(|&v| f64::from(v)).collect()
}

impl Evaluator<'_> {
    fn n_values(&self, node: &Node) -> usize {
        match (&node.op, node.shape.is_empty()) {
            (_, true) => 0,
            _ => node.n_values(),
        }
    }

    fn operand(&self, node: &Node, at: usize) -> &Value {
        &self.values[node.operands[at].as_usize()]
    }

    fn shape(&self, id: NodeId) -> &[usize] {
        &self.graph.nodes()[id.as_usize()].shape
    }

    fn weight(&self, name: &str) -> Value {
        floats(&self.weights.get(name).unwrap().to_f32())
    }

    fn node(&self, node: &Node, memory: &mut Memory) -> Value {
        match &node.op {
            Op::Input(input) => self.input(input),
            Op::Embed { weight } => self.embed(node, weight),
            Op::Linear { weight, bias } => self.linear(node, weight, bias.as_deref()),
            Op::RmsNorm { weight, eps } => self.rms_norm(node, weight.as_deref(), f64::from(*eps)),
            Op::Rope { rope } => self.rope(node, rope, |_| 0),
            Op::RopeSections { rope, sections } => self.rope(node, rope, |i| sections.axis(i)),
            Op::Reshape => self.operand(node, 0).clone(),
            Op::Add => self.each_pair(node, |a, b| a + b),
            Op::Mul => self.each_pair(node, |a, b| a * b),
            Op::Scale { factor } => self.each(node, |x| x * f64::from(*factor)),
            Op::Gate { activation } => {
                let f = activation_of(*activation);
                self.each_pair(node, |gate, up| f(gate) * up)
            }
            Op::Activate { activation } => self.each(node, activation_of(*activation)),
            Op::Columns { first } => {
                let (x, len) = (self.shape(node.operands[0]), node.shape.last().unwrap());
                let rows = self
                    .operand(node, 0)
                    .chunks_exact((*x.last().unwrap()).max(1));
                rows.flat_map(|row| row[*first..first + len].iter().copied())
                    .collect()
            }
            Op::Conv { layer, conv } => self.conv(node, *layer, conv, memory),
            Op::Scan { layer, scan } => self.scan(node, *layer, scan, memory),
            Op::ScanHeads { layer, scan } => self.scan_heads(node, *layer, scan, memory),
            Op::Decay { decay } => self.decay(node, decay),
            Op::Delta { layer, delta } => self.delta(node, *layer, delta, memory),
            Op::StoreKv { layer } | Op::StoreK { layer } => self.store(node, *layer, memory),
            Op::LayerNorm { weight, bias, eps } => {
                self.layer_norm(node, [weight, bias], f64::from(*eps))
            }
            Op::AddRow { weight, row } => self.add_row(node, weight, *row),
            Op::Gain { weight } => {
                let gain = self.weight(weight);
                let x = self.operand(node, 0).iter().zip(gain.iter().cycle());
                x.map(|(x, gain)| x * gain).collect()
            }
            Op::Mix => self.mix(node),
            Op::GaussianTopK { deviations } => self.gaussian_top_k(node, f64::from(*deviations)),
            Op::SoftCap { cap } => {
                let cap = f64::from(*cap);
                self.each(node, |x| cap * (x / cap).tanh())
            }
            Op::Clamp { limit } => {
                let limit = f64::from(*limit);
                self.each(node, |x| x.clamp(-limit, limit))
            }
            Op::ClampedGate { slope, limit } => {
                self.clamped_gate(node, f64::from(*slope), f64::from(*limit))
            }
            Op::ScaleByPosition { scale } => self.scale_by_position(node, scale),
            Op::Route { spec, bias, gain } => {
                self.route(node, spec, bias.as_deref(), gain.as_deref())
            }
            Op::ExpertLinear { weight, bias } => self.expert_linear(node, weight, bias.as_deref()),
            Op::ExpertScale => self.by_slots(node, |x, (_, weight), out| {
                out.extend(x.iter().map(|x| x * weight));
            }),
            Op::ExpertSum => self.expert_sum(node),
            Op::HeadLinear { weight } => self.head_linear(node, weight),
            Op::Concat => self.concat(node),
            Op::TopK { k } => self.top_k(node, *k),
            Op::MergePartials { .. } => self.merge_partials(node),
            Op::Attend { layer, .. } | Op::AttendPartial { layer, .. } => {
                let (_, rows) = self.layout.attended(*layer).unwrap();
                let row_of = |cell: CellIdx| &memory.rows[&(rows.layer, cell.0)];
                self.attend_stored(node, row_of)
            }
            Op::Index { layer, index } => self.index(node, *layer, index, memory),
            Op::AttendSparse { layer, spec } => self.attend_sparse(node, *layer, spec, memory),
            Op::AttendBatch {
                spec,
                sinks,
                relative,
            } => self.attend_batch(node, spec, sinks.as_deref(), relative.as_ref()),
            Op::Custom { custom } => {
                panic!(
                    "'{}' has no definition here: its tests bring their own",
                    custom.name
                )
            }
            Op::Kq { layer, spec } => self.kq(node, *layer, spec, memory),
            Op::KqSoftMax { spec, sinks } => self.kq_soft_max(node, spec, sinks.as_deref()),
            Op::Kqv { layer, spec } => self.kqv(node, *layer, spec, memory),
            Op::TakeRows => {
                let (x, rows) = (self.operand(node, 0), self.operand(node, 1));
                let n = node.row_len();
                rows.iter()
                    .flat_map(|&r| x[r as usize * n..][..n].iter().copied())
                    .collect()
            }
            op => panic!("the reference evaluator does not know {op:?}"),
        }
    }

    fn input(&self, input: &Input) -> Value {
        match input {
            Input::Tokens => integers(self.inputs.tokens),
            Input::Embeddings { .. } => floats(self.inputs.embeddings),
            Input::Positions => integers(self.inputs.positions),
            Input::TokenTypes => integers(self.inputs.token_types),
            Input::Coordinates => integers(self.inputs.coordinates.as_flattened()),
            Input::OutputRows => integers(self.inputs.output_rows),
            Input::Cells { part } => {
                let cells = &self.inputs.parts[part.as_usize()].cells;
                cells.iter().map(|c| f64::from(c.0)).collect()
            }
            Input::Visibility { .. } | Input::BatchVisibility { .. } | Input::States => Vec::new(),
        }
    }

    fn embed(&self, node: &Node, weight: &str) -> Value {
        let (n, matrix) = (node.row_len(), self.weight(weight));
        let row = |&token: &f64| matrix[token as usize * n..][..n].to_vec();
        self.operand(node, 0).iter().flat_map(row).collect()
    }

    fn linear(&self, node: &Node, weight: &str, bias: Option<&str>) -> Value {
        let n_in = self.shape(node.operands[0])[1];
        let n_out = node.shape[1];
        let (matrix, bias) = (self.weight(weight), bias.map(|b| self.weight(b)));
        let mut out = Vec::new();
        for x in self.operand(node, 0).chunks_exact(n_in) {
            for j in 0..n_out {
                let row = &matrix[j * n_in..][..n_in];
                let dot: f64 = x.iter().zip(row).map(|(a, b)| a * b).sum();
                out.push(dot + bias.as_ref().map_or(0.0, |b| b[j]));
            }
        }
        out
    }

    fn head_linear(&self, node: &Node, weight: &str) -> Value {
        let n_in = self.shape(node.operands[0])[2];
        let (heads, n_out) = (node.shape[1], node.shape[2]);
        let matrices = self.weight(weight);
        let rows = self.operand(node, 0).chunks_exact(n_in).enumerate();
        let product = |(at, x): (usize, &[f64])| {
            let rows = matrices.chunks_exact(n_in).skip(at % heads * n_out);
            let dot = |row: &[f64]| x.iter().zip(row).map(|(a, b)| a * b).sum::<f64>();
            rows.take(n_out).map(dot).collect::<Value>()
        };
        rows.flat_map(product).collect()
    }

    fn mix(&self, node: &Node) -> Value {
        let [n_inputs, dim] = [1, 2].map(|at| self.shape(node.operands[0])[at]);
        let (x, coefficients) = (self.operand(node, 0), self.operand(node, 1));
        let mut out = Vec::new();
        for (t, coefficients) in coefficients
            .chunks_exact(node.shape[1] * n_inputs)
            .enumerate()
        {
            for coefficients in coefficients.chunks_exact(n_inputs) {
                let value = |i: usize| {
                    let part = |j: usize| x[(t * n_inputs + j) * dim + i];
                    let terms = coefficients.iter().enumerate();
                    terms.map(|(j, c)| c * part(j)).sum::<f64>()
                };
                out.extend((0..dim).map(value));
            }
        }
        out
    }

    fn gaussian_top_k(&self, node: &Node, deviations: f64) -> Value {
        let rows = self.operand(node, 0).chunks_exact(node.row_len());
        let cut = |row: &[f64]| -> Value {
            let n = row.len() as f64;
            let mean = row.iter().sum::<f64>() / n;
            let variance = row.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n;
            let threshold = mean + deviations * variance.sqrt();
            row.iter().map(|v| (v - threshold).max(0.0)).collect()
        };
        rows.flat_map(cut).collect()
    }

    fn concat(&self, node: &Node) -> Value {
        let width = |at: usize| self.shape(node.operands[at]).last().copied().unwrap();
        let rows = |at: usize| self.operand(node, at).chunks_exact(width(at));
        let joined = rows(0).zip(rows(1)).map(|(a, b)| [a, b].concat());
        joined.flatten().collect()
    }

    fn rms_norm(&self, node: &Node, weight: Option<&str>, eps: f64) -> Value {
        let dim = node.shape[node.shape.len() - 1];
        let gain = weight.map_or_else(|| vec![1.0; dim], |weight| self.weight(weight));
        let norm = |(x, gain): (&[f64], &[f64])| {
            let mean = x.iter().map(|v| v * v).sum::<f64>() / dim as f64;
            let by = (mean + eps).sqrt();
            let normed = x.iter().zip(gain).map(|(v, w)| v / by * w);
            normed.collect::<Vec<_>>()
        };
        let gains = gain.chunks_exact(dim).cycle();
        let groups = self.operand(node, 0).chunks_exact(dim);
        groups.zip(gains).flat_map(norm).collect()
    }

    fn layer_norm(&self, node: &Node, weights: [&Option<String>; 2], eps: f64) -> Value {
        let [gain, bias] = weights.map(|name| name.as_deref().map(|name| self.weight(name)));
        let dim = node.shape[node.shape.len() - 1];
        let norm = |x: &[f64]| -> Value {
            let mean = x.iter().sum::<f64>() / x.len() as f64;
            let variance = x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / x.len() as f64;
            let by = (variance + eps).sqrt();
            let value = |i: usize| {
                let gain = gain.as_ref().map_or(1.0, |gain| gain[i]);
                (x[i] - mean) / by * gain + bias.as_ref().map_or(0.0, |b| b[i])
            };
            (0..x.len()).map(value).collect()
        };
        let rows = self.operand(node, 0).chunks_exact(dim);
        rows.flat_map(norm).collect()
    }

    /// Rotates by the coordinates of a token; pair `i` takes coordinate `axis(i)`.
    fn rope(&self, node: &Node, rope: &RopeSpec, axis: impl Fn(usize) -> usize) -> Value {
        let mut out = self.operand(node, 0).clone();
        let [_, heads, dim] = *node.shape else {
            panic!("rope wants three dimensions")
        };
        let factors = rope
            .factors
            .as_ref()
            .map(|f| self.weights.get(f).unwrap().to_f32());
        let frequencies = rope.frequencies(factors.as_deref());
        let half = rope.n_rot / 2;
        let by = &self.graph.nodes()[node.operands[1].as_usize()];
        let coordinates = self.operand(node, 1).chunks_exact(by.row_len());
        for (row, at) in out.chunks_exact_mut(heads * dim).zip(coordinates) {
            for head in row.chunks_exact_mut(dim) {
                for (i, frequency) in frequencies.iter().enumerate() {
                    let (a, b) = match rope.style {
                        RopeStyle::Norm => (2 * i, 2 * i + 1),
                        RopeStyle::Neox => (i, i + half),
                    };
                    let (sin, cos) = (at[axis(i)] * frequency).sin_cos();
                    let (x, y) = (head[a] * rope.magnitude(), head[b] * rope.magnitude());
                    (head[a], head[b]) = (x * cos - y * sin, x * sin + y * cos);
                }
            }
        }
        out
    }

    fn top_k(&self, node: &Node, k: usize) -> Value {
        let width = self.shape(node.operands[0])[1];
        let row = |x: &[f64]| {
            let mut order: Vec<usize> = (0..x.len()).collect();
            order.sort_by(|&a, &b| x[b].total_cmp(&x[a]).then(a.cmp(&b)));
            order.truncate(k);
            let sum: f64 = x.iter().map(|x| x.exp()).sum();
            let values = order.iter().map(|&i| x[i]);
            let columns = order.iter().map(|&i| i as f64);
            let row: Vec<f64> = values.chain(columns).chain([sum.ln()]).collect();
            row
        };
        self.operand(node, 0)
            .chunks_exact(width)
            .flat_map(row)
            .collect()
    }

    fn expert_linear(&self, node: &Node, weight: &str, bias: Option<&str>) -> Value {
        let n_out = node.shape[2];
        let (matrices, bias) = (self.weight(weight), bias.map(|b| self.weight(b)));
        self.by_slots(node, |x, (expert, _), out| {
            for j in 0..n_out {
                let row = &matrices[(expert * n_out + j) * x.len()..][..x.len()];
                let dot: f64 = x.iter().zip(row).map(|(a, b)| a * b).sum();
                out.push(dot + bias.as_ref().map_or(0.0, |b| b[expert * n_out + j]));
            }
        })
    }

    /// Every slot of every row: `slot(x, (expert, weight), out)` adds its values to `out`.
    fn by_slots(&self, node: &Node, slot: impl Fn(&[f64], (usize, f64), &mut Value)) -> Value {
        let (x, routes) = (self.operand(node, 0), self.operand(node, 1));
        let (x_shape, n_experts) = (
            self.shape(node.operands[0]),
            self.shape(node.operands[1])[1],
        );
        let (n_used, n_out) = (node.shape[1], node.shape[2]);
        let width = x_shape[x_shape.len() - 1];
        let mut out = Vec::new();
        for (t, route) in routes.chunks_exact(n_experts).enumerate() {
            let chosen = (0..n_experts).filter(|&e| route[e] != 0.0);
            for (s, expert) in chosen.take(n_used).enumerate() {
                let row = if x_shape.len() == 3 {
                    t * n_used + s
                } else {
                    t
                };
                slot(
                    &x[row * width..][..width],
                    (expert, route[expert]),
                    &mut out,
                );
            }
            out.resize((t + 1) * n_used * n_out, 0.0);
        }
        out
    }

    fn add_row(&self, node: &Node, weight: &str, row: usize) -> Value {
        let (dim, rows) = (node.row_len(), self.weight(weight));
        let added = &rows[row * dim..][..dim];
        let x = self.operand(node, 0).iter().zip(added.iter().cycle());
        x.map(|(x, added)| x + added).collect()
    }

    fn clamped_gate(&self, node: &Node, slope: f64, limit: f64) -> Value {
        self.each_pair(node, |gate, up| {
            let (gate, up) = (gate.min(limit), up.clamp(-limit, limit));
            gate / (1.0 + (-slope * gate).exp()) * (up + 1.0)
        })
    }

    fn scale_by_position(&self, node: &Node, scale: &PositionScale) -> Value {
        let rows = self.operand(node, 0).chunks_exact(node.row_len());
        let factor = |position: f64| {
            let steps = ((position + f64::from(scale.offset)) / f64::from(scale.every)).floor();
            1.0 + f64::from(scale.strength) * steps.ln_1p()
        };
        let rows = rows.zip(self.operand(node, 1));
        rows.flat_map(|(row, &position)| row.iter().map(move |x| x * factor(position)))
            .collect()
    }

    fn expert_sum(&self, node: &Node) -> Value {
        let dim = node.row_len();
        let slots = self.operand(node, 0).chunks_exact(dim.max(1));
        let n_used = self.shape(node.operands[0])[1];
        let mut out = vec![0.0; node.n_values()];
        for (at, slot) in slots.enumerate() {
            let row = at / n_used;
            for (out, x) in out[row * dim..][..dim].iter_mut().zip(slot) {
                *out += x;
            }
        }
        out
    }

    fn each(&self, node: &Node, f: impl Fn(f64) -> f64) -> Value {
        self.operand(node, 0).iter().map(|&x| f(x)).collect()
    }

    fn each_pair(&self, node: &Node, f: impl Fn(f64, f64) -> f64) -> Value {
        let pairs = self.operand(node, 0).iter().zip(self.operand(node, 1));
        pairs.map(|(&a, &b)| f(a, b)).collect()
    }

    fn store(&self, node: &Node, layer: LayerIdx, memory: &mut Memory) -> Value {
        let rows = self.layout.layer(layer).unwrap();
        let as_stored = |values: &Value, at: usize, shape: RowShape| {
            let n = shape.len();
            let row: Vec<f32> = values[at * n..][..n].iter().map(|&v| v as f32).collect();
            let (mut bytes, mut back) = (vec![0; shape.bytes()], vec![0.0; n]);
            shape.encode(&row, &mut bytes);
            shape.decode(&bytes, &mut back);
            floats(&back)
        };
        let cells = node.operands.len() - 1;
        for (at, &cell) in self.operand(node, cells).iter().enumerate() {
            let k = as_stored(self.operand(node, 0), at, rows.k);
            let v = match rows.values {
                ValueRows::Own => as_stored(self.operand(node, 1), at, rows.v),
                ValueRows::InKeys => {
                    let heads = k.chunks_exact(rows.k.dim);
                    heads.flat_map(|head| head[..rows.v.dim].to_vec()).collect()
                }
            };
            memory.rows.insert((layer, cell as u32), [k, v]);
        }
        Vec::new()
    }
}

fn activation_of(activation: Activation) -> fn(f64) -> f64 {
    match activation {
        Activation::Silu => |x| x / (1.0 + (-x).exp()),
        Activation::GeluTanh => |x| {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
            0.5 * x * (1.0 + inner.tanh())
        },
        Activation::Sigmoid => |x| 1.0 / (1.0 + (-x).exp()),
        Activation::GeluErf => |x| 0.5 * x * erfc(-x / std::f64::consts::SQRT_2),
        Activation::Relu => |x| x.max(0.0),
        Activation::ReluSquared => |x| x.max(0.0).powi(2),
        activation => panic!("the reference evaluator does not know {activation:?}"),
    }
}
