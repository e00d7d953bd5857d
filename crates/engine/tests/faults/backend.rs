//! [`FaultyBackend`]: the reference backend, which can be told to fail at a node of a run.
//!
//! A graph is cut behind the node and computed so far, with everything that is stored on the way.

use std::sync::{Arc, Mutex};

use kv_backend::{Backend, BackendError, OnProgress, RowStorage};
use kv_backend::{GraphInputs, GraphOutputs};
use kv_candle::CandleBackend;
use kv_graph::weights::WeightSource;
use kv_graph::{DType, Graph};
use kv_rows::RowLayout;

/// The node at which the `run`-th run from now fails.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fault {
    pub(crate) run: usize,
    pub(crate) node: usize,
}

#[derive(Debug, Default)]
struct Told {
    fault: Option<Fault>,
    was_last_node: bool,
}

/// Fails where it is told to.
#[derive(Debug)]
pub(crate) struct FaultyBackend {
    inner: CandleBackend,
    told: Mutex<Told>,
}

impl Default for FaultyBackend {
    fn default() -> Self {
        Self {
            inner: CandleBackend::cpu(),
            told: Mutex::default(),
        }
    }
}

impl FaultyBackend {
    /// Makes a later run fail.
    pub(crate) fn fail(&self, fault: Fault) {
        let fault = Some(fault);
        *self.told.lock().unwrap() = Told {
            fault,
            was_last_node: false,
        };
    }

    /// Whether the last failure was at the last node of its graph, or behind it.
    pub(crate) fn take_was_last_node(&self) -> bool {
        std::mem::take(&mut self.told.lock().unwrap().was_last_node)
    }

    /// The node at which this run fails, if it does.
    fn node_of_this_run(&self, n_nodes: usize) -> Option<usize> {
        let mut told = self.told.lock().unwrap();
        let fault = told.fault.take()?;
        if let Some(run) = fault.run.checked_sub(1) {
            told.fault = Some(Fault { run, ..fault });
            return None;
        }
        told.was_last_node = fault.node + 1 >= n_nodes;
        Some(fault.node.min(n_nodes - 1))
    }
}

pub(crate) struct Program {
    whole: <CandleBackend as Backend>::Program,
    graph: Graph,
    weights: Arc<<CandleBackend as Backend>::Weights>,
}

/// The graph up to and with a node; `None` where nothing is computed up to there.
fn up_to(graph: &Graph, node: usize) -> Option<Graph> {
    let nodes = &graph.nodes()[..=node];
    let has_values = |n: &kv_graph::Node| n.dtype == DType::F32;
    let output = nodes.iter().rposition(has_values)?;
    let mut json: serde_json::Value = serde_json::from_str(&graph.to_json().unwrap()).unwrap();
    json["nodes"].as_array_mut().unwrap().truncate(node + 1);
    json["outputs"] = serde_json::json!([output]);
    // Of the weights those that some node still names: they are in the order of first use.
    let names = serde_json::to_string(&json["nodes"]).unwrap();
    let weights = json["weights"].as_array_mut().unwrap();
    weights.retain(|w| names.contains(&w["name"].to_string()));
    Some(Graph::from_json(&json.to_string()).unwrap())
}

impl Backend for FaultyBackend {
    type Rows = <CandleBackend as Backend>::Rows;
    type Weights = Arc<<CandleBackend as Backend>::Weights>;
    type Program = Program;

    kv_backend::delegate!(info, allocate, read_rows, write_rows, copy_rows);

    fn load_weights(
        &self,
        source: Arc<dyn WeightSource>,
        on_progress: OnProgress,
    ) -> Result<Self::Weights, BackendError> {
        Ok(Arc::new(self.inner.load_weights(source, on_progress)?))
    }

    fn compile(
        &self,
        graph: &Graph,
        weights: &Self::Weights,
        layout: &RowLayout,
    ) -> Result<Program, BackendError> {
        Ok(Program {
            whole: self.inner.compile(graph, weights, layout)?,
            graph: graph.clone(),
            weights: Arc::clone(weights),
        })
    }

    fn run(
        &self,
        program: &mut Program,
        rows: &mut Self::Rows,
        inputs: &GraphInputs<'_>,
        outputs: &mut GraphOutputs,
    ) -> Result<(), BackendError> {
        let graph = &program.graph;
        let Some(node) = self.node_of_this_run(graph.nodes().len()) else {
            return self.inner.run(&mut program.whole, rows, inputs, outputs);
        };
        if let Some(part) = up_to(graph, node) {
            let layout = rows.layout().clone();
            let mut part = self.inner.compile(&part, &program.weights, &layout)?;
            self.inner
                .run(&mut part, rows, inputs, &mut GraphOutputs::default())?;
        }
        Err(BackendError::Device {
            backend: "faulty",
            reason: format!("as told, at node {node}"),
        })
    }
}
