//! [`RecordingBackend`]: computes with another backend, and sums the squares of what weight
//! matrices multiply, column by column, for importance matrices.
//!
//! The graphs that it compiles have the inputs of matrix products as further outputs, so it works
//! with every backend. Invariant: the results and rows are the other backend's. Does not know
//! texts, files or what the sums are for.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv_backend::{Backend, BackendError, GraphInputs, GraphOutputs};
use kv_graph::{Graph, MatMulInput, NodeId, Op, slots};
use kv_rows::RowLayout;
use model_core::imatrix::Importance;

/// Of which weight matrices the inputs are recorded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RecordedMatrices {
    /// Those of layers: their names begin with `blk.`.
    #[default]
    Layers,
    /// Also the output matrix, and others outside of layers.
    All,
}

impl RecordedMatrices {
    fn has(self, input: &MatMulInput<'_>) -> bool {
        self == Self::All || input.weight.starts_with("blk.")
    }

    /// Bytes of the values that one token of a graph adds to the outputs.
    pub fn bytes_per_token(self, graph: &Graph) -> usize {
        let recorded = Recorded::new(graph, self);
        let values = recorded.nodes.iter().filter_map(|&id| graph.node(id));
        values.map(|node| node.row_len() * size_of::<f32>()).sum()
    }
}

/// What was recorded so far; clones share it.
#[derive(Clone, Debug, Default)]
pub struct ActivationSums(Arc<Mutex<BTreeMap<String, Sums>>>);

/// Sums of one weight.
#[derive(Clone, Debug, Default)]
struct Sums {
    /// `[matrices, columns]`
    squares: Vec<f64>,
    /// Rows that each matrix multiplied.
    counts: Vec<u64>,
}

impl ActivationSums {
    /// The sums by the name of the weight.
    pub fn importance(&self) -> BTreeMap<String, Importance> {
        let sums = self.lock();
        let entry = |(name, sums): (&String, &Sums)| {
            let entry = Importance {
                sums: sums.squares.iter().map(|&sum| sum as f32).collect(),
                counts: sums.counts.iter().map(|&n| n as f32).collect(),
            };
            (name.clone(), entry)
        };
        sums.iter().map(entry).collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Sums>> {
        // Sums are valid after each addition.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, tap: &Tap, outputs: &[Vec<f32>]) {
        let mut all = self.lock();
        let sums = all.entry(tap.weight.clone()).or_default();
        let n_matrices = tap
            .experts
            .as_ref()
            .map_or(tap.n_heads, |experts| experts.n_experts);
        sums.squares.resize(n_matrices * tap.columns, 0.0);
        sums.counts.resize(n_matrices, 0);
        let Some(x) = outputs.get(tap.output) else {
            return;
        };
        let rows = x.chunks_exact(tap.columns.max(1));
        let Some(experts) = &tap.experts else {
            rows.enumerate()
                .for_each(|(at, row)| sums.add_row(at % tap.n_heads, row));
            return;
        };
        let Some(routes) = outputs.get(experts.output) else {
            return;
        };
        let rows: Vec<&[f32]> = rows.collect();
        let tokens = rows.chunks(experts.rows_per_token.max(1));
        let routes = routes.chunks_exact(experts.n_experts.max(1));
        for (rows, route) in tokens.zip(routes) {
            for (slot, (expert, _)) in slots(route, experts.n_used).enumerate() {
                // One row for all slots, or each slot's own.
                if let Some(row) = rows.get(slot).or(rows.first()) {
                    sums.add_row(expert, row);
                }
            }
        }
    }
}

impl Sums {
    fn add_row(&mut self, matrix: usize, row: &[f32]) {
        let sums = self.squares.chunks_exact_mut(row.len().max(1)).nth(matrix);
        for (sum, x) in sums.into_iter().flatten().zip(row) {
            *sum += f64::from(*x) * f64::from(*x);
        }
        if let Some(count) = self.counts.get_mut(matrix) {
            *count += 1;
        }
    }
}

/// Where the input of a weight is among the outputs of a graph.
#[derive(Clone, Debug)]
struct Tap {
    weight: String,
    output: usize,
    columns: usize,
    /// Heads with a matrix each, or 1.
    n_heads: usize,
    experts: Option<Experts>,
}

/// Which rows go to which expert.
#[derive(Clone, Debug)]
struct Experts {
    /// The output with the routes.
    output: usize,
    n_experts: usize,
    n_used: usize,
    /// 1 where all slots of a token have the same input.
    rows_per_token: usize,
}

/// What is recorded of a graph.
#[derive(Clone, Debug, Default)]
struct Recorded {
    /// The further outputs, each once.
    nodes: Vec<NodeId>,
    taps: Vec<Tap>,
}

impl Recorded {
    fn new(graph: &Graph, matrices: RecordedMatrices) -> Self {
        let n_own = graph.outputs().len();
        let mut recorded = Self::default();
        for input in graph.matmul_inputs().filter(|input| matrices.has(input)) {
            let Some(x) = graph.node(input.x) else {
                continue;
            };
            let experts = input.routes.and_then(|id| {
                let routes = graph.node(id)?;
                let Op::Route { spec, .. } = routes.op else {
                    return None;
                };
                Some(Experts {
                    output: n_own + recorded.output(id),
                    n_experts: routes.row_len(),
                    n_used: spec.n_used,
                    rows_per_token: match *x.shape {
                        [_, slots, _] => slots,
                        _ => 1,
                    },
                })
            });
            let tap = Tap {
                weight: input.weight.to_owned(),
                output: n_own + recorded.output(input.x),
                columns: x.shape.last().copied().unwrap_or(0),
                n_heads: match *x.shape {
                    [_, heads, _] if experts.is_none() => heads.max(1),
                    _ => 1,
                },
                experts,
            };
            recorded.taps.push(tap);
        }
        recorded
    }

    /// The number of this node among the further outputs.
    fn output(&mut self, id: NodeId) -> usize {
        let known = self.nodes.iter().position(|&other| other == id);
        known.unwrap_or_else(|| {
            self.nodes.push(id);
            self.nodes.len() - 1
        })
    }
}

/// A backend that records what weight matrices multiply.
#[derive(Debug)]
pub struct RecordingBackend<B> {
    inner: B,
    matrices: RecordedMatrices,
    sums: ActivationSums,
}

/// A program whose outputs are recorded.
#[derive(Debug)]
pub struct RecordingProgram<P> {
    program: P,
    taps: Vec<Tap>,
}

impl<B> RecordingBackend<B> {
    /// Computes with `inner` and adds to `sums`.
    pub fn new(inner: B, matrices: RecordedMatrices, sums: ActivationSums) -> Self {
        Self {
            inner,
            matrices,
            sums,
        }
    }
}

impl<B: Backend> Backend for RecordingBackend<B> {
    type Rows = B::Rows;
    type Weights = B::Weights;
    type Program = RecordingProgram<B::Program>;

    kv_backend::delegate!(
        info,
        memory,
        prefers_candidates,
        set_custom_ops,
        allocate,
        load_weights,
        finish,
        read_rows,
        write_rows,
        copy_rows,
        shift_rows
    );

    fn compile(
        &self,
        graph: &Graph,
        weights: &B::Weights,
        layout: &RowLayout,
    ) -> Result<Self::Program, BackendError> {
        let Recorded { nodes, taps } = Recorded::new(graph, self.matrices);
        // The nodes are those of this graph.
        let graph = graph.with_outputs(&nodes).unwrap_or_else(|_| graph.clone());
        let program = self.inner.compile(&graph, weights, layout)?;
        Ok(RecordingProgram { program, taps })
    }

    fn run(
        &self,
        program: &mut Self::Program,
        rows: &mut B::Rows,
        inputs: &GraphInputs<'_>,
        outputs: &mut GraphOutputs,
    ) -> Result<(), BackendError> {
        let inner = &mut program.program;
        self.inner.run(inner, rows, inputs, outputs)?;
        if inputs.output_rows.is_empty() {
            // Such a run may still be under way.
            self.inner.finish(rows)?;
        }
        for tap in &program.taps {
            self.sums.add(tap, &outputs.values);
        }
        Ok(())
    }
}
