//! Small graphs whose steps tests look at.

use std::sync::Arc;

use kv_backend::{BackendError, CustomOps, OnProgress};
use kv_block::BlockFormat;
use kv_contract::{in_blocks, tiny_llama, tiny_weights};
use kv_core::{
    Window,
    layers::{AttentionMemory, LayerMap, LayerMemory},
};
use kv_graph::weights::WeightSource;
use kv_graph::{Graph, GraphBuilder, GraphShape, Input, NodeId};
use kv_rows::{KvType, RowLayout};

use super::{FusedSteps, Step, Value};
use crate::activations::ActivationKind;
use crate::isa::Isa;
use crate::kernels::Kernels;
use crate::plan::Plan;
use crate::plan::lower::{LoweredGraph, lower};
use crate::repack::RepackChoice;
use crate::weights::{ActivationChoice, CpuWeights, WeightOptions};

/// Rows of 64 values that the caller hands in.
pub(super) fn embeddings(b: &mut GraphBuilder) -> NodeId {
    b.input(Input::Embeddings { dim: 64 }).unwrap()
}

/// A graph with its weights.
pub(super) struct Scene {
    graph: Graph,
    weights: Arc<dyn WeightSource>,
}

impl Scene {
    /// The graph that `build` adds, whose results are outputs; weights are floats.
    pub(super) fn new(
        n_tokens: usize,
        build: impl FnOnce(&mut GraphBuilder) -> Vec<NodeId>,
    ) -> Self {
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens,
            n_outputs: n_tokens,
        });
        let outputs = build(&mut b);
        let graph = b.finish(&outputs).unwrap();
        let weights = tiny_weights(&graph, 1);
        Self { graph, weights }
    }

    /// With matrices of this format.
    pub(super) fn in_format(self, format: BlockFormat) -> Self {
        Self {
            weights: in_blocks(&*self.weights, format),
            graph: self.graph,
        }
    }

    fn lowered(&self) -> LoweredGraph {
        let layout = RowLayout::new(&LayerMap::new(Vec::new()), &[], KvType::F16).unwrap();
        lower(&self.graph, &loaded(&self.weights), &layout).unwrap()
    }

    /// The values of the graph's outputs.
    pub(super) fn outputs(&self) -> Vec<Value> {
        self.lowered().outputs
    }

    /// The steps after these rules.
    pub(super) fn apply(
        &self,
        rules: impl FnOnce(&mut FusedSteps<'_>) -> Result<(), BackendError>,
    ) -> Vec<Step<Value>> {
        let lowered = self.lowered();
        let mut steps = FusedSteps {
            graph: &self.graph,
            steps: lowered.steps,
            outputs: &lowered.outputs,
        };
        rules(&mut steps).unwrap();
        steps.steps
    }
}

fn loaded(weights: &Arc<dyn WeightSource>) -> CpuWeights {
    CpuWeights::new(
        Arc::clone(weights),
        Kernels::for_isa(Isa::Scalar).unwrap(),
        WeightOptions {
            activations: ActivationChoice::Always(ActivationKind::Int8),
            repack: RepackChoice::Auto,
            custom: CustomOps::new(),
            on_progress: OnProgress::default(),
            experts: None,
            expert_meter: Default::default(),
        },
    )
}

/// The plan of a small Llama.
pub(in crate::plan) fn tiny_plan(n_tokens: usize, n_outputs: usize) -> Plan {
    tiny_plan_with(n_tokens, n_outputs, |weights| weights)
}

/// The same with other weights.
pub(super) fn tiny_plan_with(
    n_tokens: usize,
    n_outputs: usize,
    change: impl Fn(Arc<dyn WeightSource>) -> Arc<dyn WeightSource>,
) -> Plan {
    let graph = tiny_llama(GraphShape {
        n_tokens,
        n_outputs,
    });
    let memory = AttentionMemory {
        kv_heads: 2,
        k_dim: 16,
        v_dim: 16,
        window: Window::Full,
    };
    let map = LayerMap::new(vec![LayerMemory::Attention(memory); 2]);
    let layout = RowLayout::new(&map, &[16], KvType::F16).unwrap();
    Plan::new(&graph, &loaded(&change(tiny_weights(&graph, 1))), &layout).unwrap()
}
