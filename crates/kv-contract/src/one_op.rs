//! [`OneOp`]: an operation on stored rows as a graph of its own, which is how tests ask a backend
//! to store K and V and to attend.
//!
//! A backend has no methods for operations, so what is tested is what its graphs compute. Knows no
//! backend; wanted values come from [`evaluate`].

use std::sync::Arc;

use super::Random;
use super::evaluate::{Memory, evaluate};
use super::larger::Program;
use super::scene::{Step, memory_weights};
use kv_backend::{Backend, BackendError, RowKind, RowSpan, RowStorage};
use kv_core::{CellIdx, LayerIdx, PartIdx, Visibility, Window, memory::PartInputs};
use kv_graph::weights::MemoryWeights;
use kv_graph::{AttendSpec, Graph, GraphBuilder, GraphShape, Input, NodeId};
use kv_rows::{RowLayout, RowShape, ValueRows};

/// Name of the weight that holds sinks.
const SINKS: &str = "sinks.w";

/// K and V of some tokens, to be stored in one layer.
#[derive(Clone, Copy, Debug)]
pub struct StoreRows<'a> {
    /// The layer that owns the rows.
    pub layer: LayerIdx,
    /// `[tokens, kv_heads, k_dim]`.
    pub k: &'a [f32],
    /// `[tokens, kv_heads, v_dim]`; empty where values are in the keys.
    pub v: &'a [f32],
    /// The cell of each token.
    pub cells: &'a [CellIdx],
}

/// Query rows that attend over one layer.
#[derive(Clone, Copy, Debug)]
pub struct Attend<'a> {
    /// The layer that owns the rows.
    pub layer: LayerIdx,
    /// Heads, widths and scale.
    pub spec: AttendSpec,
    /// `[rows, heads, k_dim]`.
    pub q: &'a [f32],
    /// The cells that each row sees.
    pub visibility: &'a Visibility,
    /// Position of each row, `[rows]`; only needed where `spec` has ALiBi, else it may be empty.
    pub positions: &'a [u32],
    /// A score without a value for each head, `[heads]`, where the layer has sinks.
    pub sinks: Option<&'a [f32]>,
    /// The first of as many cells as there are rows, none of them visible: the rows' own K and V go
    /// there, for no graph attends without storing.
    pub spare: CellIdx,
}

/// A graph with one operation, its weights and its inputs.
#[derive(Clone, Debug)]
pub struct OneOp {
    graph: Graph,
    weights: MemoryWeights,
    step: Step,
}

/// Inputs that are cut from embedding rows, one after the other.
struct Columns {
    builder: GraphBuilder,
    embeddings: NodeId,
    first: usize,
}

impl Columns {
    fn new(n_tokens: usize, dim: usize) -> Self {
        let mut builder = GraphBuilder::new(GraphShape {
            n_tokens,
            n_outputs: 0,
        });
        let embeddings = builder.input(Input::Embeddings { dim }).unwrap();
        Self {
            builder,
            embeddings,
            first: 0,
        }
    }

    /// The next `heads * dim` columns as `[tokens, heads, dim]`.
    fn next(&mut self, name: &str, heads: usize, dim: usize) -> NodeId {
        let columns = self.first..self.first + heads * dim;
        self.first = columns.end;
        let n_tokens = self.builder.shape().n_tokens;
        let flat = self
            .builder
            .columns(&format!("{name}.flat"), self.embeddings, columns);
        let shape = [n_tokens, heads, dim];
        self.builder.reshape(name, flat.unwrap(), &shape).unwrap()
    }
}

/// Rows of several inputs, `[tokens, ..]` each, next to each other.
fn join(n_tokens: usize, inputs: &[&[f32]]) -> Vec<f32> {
    let row = |token: usize| {
        inputs.iter().flat_map(move |values| {
            let len = values.len() / n_tokens;
            &values[token * len..][..len]
        })
    };
    (0..n_tokens).flat_map(row).copied().collect()
}

/// The shapes of what a layer stores, and where.
#[derive(Clone, Copy)]
struct StoredShapes {
    layer: LayerIdx,
    part: PartIdx,
    k: RowShape,
    v: Option<RowShape>,
}

impl StoredShapes {
    /// The rows that `layer` attends over. A layer without rows gets those of another: backends
    /// refuse it.
    fn of(layout: &RowLayout, layer: LayerIdx) -> Self {
        let rows = match layout.attended(layer) {
            Some((_, rows)) => *rows,
            None => layout.layers()[0],
        };
        Self {
            layer: rows.layer,
            part: rows.part,
            k: rows.k,
            v: rows.stored_v(),
        }
    }

    fn v_len(&self) -> usize {
        self.v.map_or(0, |v| v.len())
    }

    /// A node that stores the next columns in the layer `to`.
    fn node(&self, c: &mut Columns, to: LayerIdx) -> NodeId {
        let cells = Input::Cells { part: self.part };
        let cells = c.builder.input(cells).unwrap();
        let k = c.next("k", self.k.heads, self.k.dim);
        let node = match self.v {
            Some(v) => {
                let v = c.next("v", v.heads, v.dim);
                c.builder.store_kv("store", to, [k, v, cells])
            }
            None => c.builder.store_k("store", to, [k, cells]),
        };
        node.unwrap()
    }

    fn parts(&self, inputs: PartInputs) -> Vec<PartInputs> {
        let mut parts = vec![PartInputs::default(); self.part.as_usize()];
        parts.push(inputs);
        parts
    }
}

impl OneOp {
    /// Stores K and V.
    ///
    /// # Panics
    /// If the values are not those of as many tokens as there are cells.
    pub fn store(layout: &RowLayout, args: &StoreRows<'_>) -> Self {
        let stored = StoredShapes::of(layout, args.layer);
        let n_tokens = args.cells.len();
        assert_eq!(args.k.len(), n_tokens * stored.k.len(), "values of K");
        assert_eq!(args.v.len(), n_tokens * stored.v_len(), "values of V");
        let mut c = Columns::new(n_tokens, stored.k.len() + stored.v_len());
        stored.node(&mut c, args.layer);
        let graph = c.builder.finish(&[]).unwrap();
        let part = PartInputs {
            cells: args.cells.to_vec(),
            visibility: Visibility::default(),
            ..PartInputs::default()
        };
        let step = Step {
            embeddings: join(n_tokens, &[args.k, args.v]),
            parts: stored.parts(part),
            ..Step::default()
        };
        Self {
            graph,
            weights: MemoryWeights::new(),
            step,
        }
    }

    /// Attends; the output is `[rows, heads * v_dim]`.
    ///
    /// # Panics
    /// If the queries are not those of as many rows as the visibility has.
    pub fn attend(layout: &RowLayout, args: &Attend<'_>) -> Self {
        let (spec, stored) = (args.spec, StoredShapes::of(layout, args.layer));
        let n_tokens = args.visibility.n_rows as usize;
        let q_len = spec.n_heads * spec.k_dim;
        assert_eq!(args.q.len(), n_tokens * q_len, "values of queries");
        let mut c = Columns::new(n_tokens, q_len + stored.k.len() + stored.v_len());
        let q = c.next("q", spec.n_heads, spec.k_dim);
        let store = stored.node(&mut c, stored.layer);
        let seen = Input::Visibility {
            part: stored.part,
            window: Window::Full,
        };
        let seen = c.builder.input(seen).unwrap();
        let sinks = args.sinks.map(|_| SINKS);
        let operands = [q, store, seen];
        let kqv = c.builder.attend(
            "kqv",
            args.layer,
            kv_graph::Attention { spec, sinks },
            operands,
        );
        let graph = c.builder.finish(&[kqv.unwrap()]).unwrap();
        let mut weights = memory_weights(&graph, 97);
        if let Some(sinks) = args.sinks {
            weights.insert_f32(SINKS, &[sinks.len()], sinks).unwrap();
        }
        let mut random = Random::new(98);
        let k = random.values(n_tokens * stored.k.len());
        let v = random.values(n_tokens * stored.v_len());
        let part = PartInputs {
            cells: (0..args.visibility.n_rows)
                .map(|row| args.spare.offset(row))
                .collect(),
            visibility: args.visibility.clone(),
            ..PartInputs::default()
        };
        let step = Step {
            embeddings: join(n_tokens, &[args.q, &k, &v]),
            positions: args.positions.to_vec(),
            parts: stored.parts(part),
            ..Step::default()
        };
        Self {
            graph,
            weights,
            step,
        }
    }

    /// Runs it on a backend; gives the first output, where there is one.
    ///
    /// # Errors
    /// The backend's refusal.
    pub fn run<B: Backend>(
        &self,
        backend: &B,
        rows: &mut B::Rows,
    ) -> Result<Vec<f32>, BackendError> {
        let weights = Arc::new(self.weights.clone());
        let weights = backend.load_weights(weights, Default::default())?;
        let mut program = Program::compile(backend, &self.graph, &weights, rows.layout())?;
        let outputs = program.run(backend, rows, &self.step.inputs())?;
        Ok(outputs.into_iter().next().unwrap_or_default())
    }

    /// The values that [`Self::run`] must give over the rows that `memory` holds.
    pub fn wanted(&self, layout: &RowLayout, memory: &mut Memory) -> Vec<f64> {
        let inputs = self.step.inputs();
        let outputs = evaluate(&self.graph, &self.weights, layout, memory, &inputs);
        outputs.into_iter().next().unwrap_or_default()
    }
}

/// All K and V rows of a backend, decoded.
pub(super) fn read_memory<B: Backend>(backend: &B, rows: &B::Rows) -> Memory {
    let mut memory = Memory::default();
    for layer in rows.layout().layers() {
        let read = |kind: RowKind, shape: RowShape| -> Vec<Vec<f64>> {
            let span = RowSpan {
                layer: layer.layer,
                kind,
                first: CellIdx(0),
                len: layer.n_rows as u32,
            };
            let mut bytes = vec![0; shape.bytes() * layer.n_rows];
            backend.read_rows(rows, span, &mut bytes).unwrap();
            let mut values = vec![0.0; shape.len()];
            let rows = bytes.chunks_exact(shape.bytes());
            rows.map(|row| {
                shape.decode(row, &mut values);
                values.iter().map(|&v| f64::from(v)).collect()
            })
            .collect()
        };
        let k = read(RowKind::K, layer.k);
        let v = match layer.values {
            ValueRows::Own => read(RowKind::V, layer.v),
            ValueRows::InKeys => {
                let values = |row: &Vec<f64>| {
                    let heads = row.chunks_exact(layer.k.dim);
                    heads.flat_map(|h| h[..layer.v.dim].to_vec()).collect()
                };
                k.iter().map(values).collect()
            }
        };
        for (cell, row) in (0..).zip(k.into_iter().zip(v)) {
            memory.insert(layer.layer, CellIdx(cell), row.into());
        }
    }
    memory
}
