//! [`Program`]: a program under test, and where the backend declares that its programs run with
//! fewer tokens and outputs ([`Backend::program_capacities`]) one of a larger graph, which must
//! give the same bits.
//!
//! So every test of the suite that runs a graph also runs a larger one. Knows no graph and no
//! wanted value.

use std::cell::RefCell;
use std::collections::BTreeSet;

use kv_backend::{Backend, BackendError, RowKind, RowSpan, RowStorage};
use kv_backend::{GraphInputs, GraphOutputs};
use kv_core::CellIdx;
use kv_graph::{Graph, GraphShape, Op};
use kv_rows::RowLayout;

/// Tokens of a larger graph beyond those of the run: as many as change how a backend computes.
const MORE_TOKENS: usize = 37;
const MORE_OUTPUTS: usize = 3;

thread_local! {
    static COMPILED: RefCell<CompiledOps> = RefCell::default();
}

/// The operations of graphs that a test of this thread asked a backend to compile.
#[derive(Debug, Default)]
pub(crate) struct CompiledOps {
    /// Those of graphs that compiled.
    pub(crate) taken: BTreeSet<&'static str>,
    /// Those of graphs that were refused.
    pub(crate) refused: BTreeSet<&'static str>,
}

impl CompiledOps {
    /// Those since the last call.
    pub(crate) fn take() -> Self {
        COMPILED.take()
    }

    fn note<T>(graph: &Graph, outcome: &Result<T, BackendError>) {
        let names = graph.nodes().iter().map(|node| node.op.name());
        COMPILED.with_borrow_mut(|ops| match outcome {
            Ok(_) => ops.taken.extend(names),
            Err(_) => ops.refused.extend(names),
        });
    }
}

/// True if graphs have an operation of this name.
pub(crate) fn is_op(name: &str) -> bool {
    let op = serde_json::from_value::<Op>(serde_json::json!({ "op": name }));
    op.map_or_else(
        |e| !e.to_string().starts_with("unknown operation"),
        |_| true,
    )
}

/// A compiled graph.
pub(crate) struct Program<B: Backend> {
    shape: GraphShape,
    exact: B::Program,
    larger: Option<B::Program>,
}

impl<B: Backend> Program<B> {
    pub(crate) fn compile(
        backend: &B,
        graph: &Graph,
        weights: &B::Weights,
        layout: &RowLayout,
    ) -> Result<Self, BackendError> {
        let exact = backend.compile(graph, weights, layout);
        CompiledOps::note(graph, &exact);
        let exact = exact?;
        let larger = match backend.program_capacities() {
            [] => None,
            _ => larger(graph),
        };
        let larger = larger.map(|graph| backend.compile(&graph, weights, layout));
        Ok(Self {
            shape: graph.shape(),
            exact,
            larger: larger.transpose()?,
        })
    }

    /// All outputs.
    pub(crate) fn run(
        &mut self,
        backend: &B,
        rows: &mut B::Rows,
        inputs: &GraphInputs<'_>,
    ) -> Result<Vec<Vec<f32>>, BackendError> {
        let wanted = outputs(backend, &mut self.exact, rows, inputs);
        let Some(larger) = &mut self.larger else {
            return wanted;
        };
        let stored = stored_bytes(backend, rows);
        // A run may be repeated: what it reads is not what it writes.
        let inputs = GraphInputs {
            shape: inputs.shape.or(Some(self.shape)),
            ..*inputs
        };
        let got = outputs(backend, larger, rows, &inputs);
        let bits = |values: &[Vec<f32>]| -> Vec<Vec<u32>> {
            let of = |values: &Vec<f32>| values.iter().map(|v| v.to_bits()).collect();
            values.iter().map(of).collect()
        };
        match (&got, &wanted) {
            (Ok(got), Ok(wanted)) => assert!(
                bits(got) == bits(wanted),
                "a larger program gives {got:?}, not {wanted:?}"
            ),
            (got, wanted) => assert!(
                got.is_err() && wanted.is_err(),
                "a larger program gives {got:?}, not {wanted:?}"
            ),
        }
        assert!(
            stored_bytes(backend, rows) == stored,
            "a larger program stores other rows"
        );
        wanted
    }
}

fn outputs<B: Backend>(
    backend: &B,
    program: &mut B::Program,
    rows: &mut B::Rows,
    inputs: &GraphInputs<'_>,
) -> Result<Vec<Vec<f32>>, BackendError> {
    // What was in the buffers before must not matter.
    let mut outputs = GraphOutputs {
        values: vec![vec![f32::NAN; 7]; 3],
    };
    backend.run(program, rows, inputs, &mut outputs)?;
    backend.finish(rows)?;
    Ok(outputs.values)
}

/// The same graph with more tokens and outputs; none where its rows cannot be counted.
fn larger(graph: &Graph) -> Option<Graph> {
    let counts = graph.row_counts()?;
    let shape = GraphShape {
        n_tokens: graph.shape().n_tokens + MORE_TOKENS,
        n_outputs: graph.shape().n_outputs + MORE_OUTPUTS,
    };
    let mut json = serde_json::to_value(graph).unwrap();
    json["shape"] = serde_json::to_value(shape).unwrap();
    let nodes = json["nodes"].as_array_mut().unwrap();
    for (node, count) in nodes.iter_mut().zip(counts) {
        if let Some(n_rows) = node["shape"].as_array_mut().and_then(|s| s.first_mut()) {
            *n_rows = count.of(shape).into();
        }
    }
    Some(Graph::from_json(&json.to_string()).unwrap())
}

/// The bytes of all rows and states, layer after layer.
fn stored_bytes<B: Backend>(backend: &B, rows: &B::Rows) -> Vec<Vec<u8>> {
    let layout = rows.layout();
    let of_layers = layout.layers().iter().flat_map(|l| {
        let v = l.stored_v().map(|_| RowKind::V);
        let kinds = [RowKind::K].into_iter().chain(v);
        kinds.map(move |kind| (l.layer, kind, l.n_rows))
    });
    let of_states = layout.states().iter().flat_map(|s| {
        let kinds = [RowKind::Conv, RowKind::State].into_iter();
        kinds.map(move |kind| (s.layer, kind, s.n_rows))
    });
    let read = |(layer, kind, n_rows): (_, _, usize)| {
        let span = RowSpan {
            layer,
            kind,
            first: CellIdx(0),
            len: n_rows as u32,
        };
        let mut bytes = vec![0; span.byte_range(layout).unwrap().len()];
        backend.read_rows(rows, span, &mut bytes).unwrap();
        bytes
    };
    of_layers.chain(of_states).map(read).collect()
}
