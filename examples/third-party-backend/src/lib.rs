//! A backend for Cellar in plain loops: what the Llama family needs, in single precision with sums
//! in double precision, on one thread.
//!
//! It begins where [`kv_backend::null`] ends: rows are that backend's [`HostRows`], and what
//! is checked is the same; here a run computes. Invariant: a graph that compiles can be run; an
//! operation that `compute` does not know is an error when it is compiled.

mod attention;
mod compute;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use kv_backend::null::HostRows;
use kv_backend::{
    Backend, BackendError, BackendInfo, OnProgress, RowSpan, RowStorage, check_inputs, check_rows,
    check_weights, expect_len,
};
use kv_backend::{GraphInputs, GraphOutputs};
use kv_graph::weights::WeightSource;
use kv_graph::{Graph, Node};
use kv_rows::{KvType, RowLayout, StateType};

/// Name in [`BackendInfo`] and errors.
const NAME: &str = "loops";

/// Computes graphs in plain loops.
#[derive(Clone, Copy, Debug, Default)]
pub struct LoopsBackend;

/// Weights in their source, and decoded where a graph named them.
pub struct LoopsWeights {
    source: Arc<dyn WeightSource>,
    decoded: Mutex<HashMap<String, Arc<[f32]>>>,
}

impl LoopsWeights {
    /// All values of a weight, decoded at its first use and shared between programs from then on.
    fn get(&self, name: &str) -> Result<Arc<[f32]>, BackendError> {
        // A map of finished weights is whole even where a holder of the lock panicked.
        let mut decoded = self.decoded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(values) = decoded.get(name) {
            return Ok(Arc::clone(values));
        }
        let values: Arc<[f32]> = self.source.require(name)?.to_f32().into();
        decoded.insert(name.to_owned(), Arc::clone(&values));
        Ok(values)
    }
}

/// A graph that can be run.
#[derive(Debug)]
pub struct LoopsProgram {
    graph: Graph,
    layout: RowLayout,
    weights: HashMap<String, Arc<[f32]>>,
}

impl Backend for LoopsBackend {
    type Rows = HostRows;
    type Weights = LoopsWeights;
    type Program = LoopsProgram;

    fn info(&self) -> BackendInfo {
        BackendInfo {
            name: NAME.to_owned(),
            device: "one thread".to_owned(),
            // `RowShape` encodes and decodes them all.
            kv_types: KvType::ALL.to_vec(),
            // It stores states that nothing here computes.
            state_types: StateType::ALL.to_vec(),
        }
    }

    fn allocate(&self, layout: &RowLayout) -> Result<HostRows, BackendError> {
        HostRows::zeroed(NAME, layout)
    }

    fn load_weights(
        &self,
        source: Arc<dyn WeightSource>,
        _on_progress: OnProgress,
    ) -> Result<LoopsWeights, BackendError> {
        Ok(LoopsWeights {
            source,
            decoded: Mutex::default(),
        })
    }

    fn compile(
        &self,
        graph: &Graph,
        weights: &LoopsWeights,
        layout: &RowLayout,
    ) -> Result<LoopsProgram, BackendError> {
        check_weights(graph, &*weights.source)?;
        check_rows(graph, layout)?;
        for node in graph.nodes() {
            compute::check(node)?;
        }
        let named = graph.weights().iter().map(|weight| {
            let values = weights.get(&weight.name)?;
            Ok((weight.name.clone(), values))
        });
        let weights = named.collect::<Result<_, BackendError>>()?;
        Ok(LoopsProgram {
            graph: graph.clone(),
            layout: layout.clone(),
            weights,
        })
    }

    fn run(
        &self,
        program: &mut LoopsProgram,
        rows: &mut HostRows,
        inputs: &GraphInputs<'_>,
        outputs: &mut GraphOutputs,
    ) -> Result<(), BackendError> {
        if rows.layout() != &program.layout {
            let reason = "they have another layout than the program".to_owned();
            return Err(BackendError::Input {
                input: "rows",
                reason,
            });
        }
        // Everything is checked before the first row changes, so a refused run leaves no trace.
        check_inputs(&program.graph, &program.layout, inputs)?;
        let values = compute::run(program, rows, inputs)?;
        let wanted = program.graph.outputs();
        let sizes = wanted.iter().map(|&id| program.graph.node(id));
        let sizes = sizes.map(|node| node.map_or(0, Node::n_values));
        for (buffer, id) in outputs.resize(sizes).iter_mut().zip(wanted) {
            buffer.copy_from_slice(&values[id.as_usize()]);
        }
        Ok(())
    }

    fn read_rows(
        &self,
        rows: &HostRows,
        span: RowSpan,
        out: &mut [u8],
    ) -> Result<(), BackendError> {
        let bytes = rows.span(span)?;
        expect_len("bytes of rows", bytes.len(), out.len())?;
        out.copy_from_slice(bytes);
        Ok(())
    }

    fn write_rows(
        &self,
        rows: &mut HostRows,
        span: RowSpan,
        bytes: &[u8],
    ) -> Result<(), BackendError> {
        let to = rows.span_mut(span)?;
        expect_len("bytes of rows", to.len(), bytes.len())?;
        to.copy_from_slice(bytes);
        Ok(())
    }

    // `copy_rows` and `shift_rows` go through these two, and runs are complete when they return, so
    // there is nothing to finish: the bodies of the trait do.
}
