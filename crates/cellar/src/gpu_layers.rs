//! A model of which a GPU computes the last layers, or these without their experts, and the CPU the
//! rest: where it is divided, and how many layers fit.
//!
//! Invariant: what each half takes is planned from the very graphs and rows that it is given. Knows
//! no concrete backend.

use std::collections::BTreeMap;
use std::sync::Arc;

use cellar_engine::{EngineError, Workload};
use kv_backend::{BackendError, CustomOps, ExpertShare};
use kv_graph::weights::WeightSource;
use kv_graph::{Graph, GraphShape, SplitPoint};
use kv_rows::RowLayout;
use model_core::architecture::{Model, ModelError};
use model_core::expert_tensors::ExpertLayers;

use crate::backends::{BackendKind, BackendOptions, BackendWork, fastest_on_host};
use crate::choice::ModelWork;
use crate::error::Error;

/// What a backend computes of a model: graphs, and the rows of the memory.
#[derive(Clone, Debug)]
pub(crate) struct Share {
    /// The graphs, as an engine compiles them.
    pub(crate) graphs: Vec<Graph>,
    /// The rows.
    pub(crate) layout: RowLayout,
    /// Its custom operations.
    custom: CustomOps,
}

/// A model's work on a GPU and the CPU.
#[derive(Clone, Debug)]
pub(crate) struct Shares {
    /// The CPU's parts: whole layers, and experts alone, each with a backend of its own.
    pub(crate) host: Vec<Share>,
    /// The part of the backend that was chosen.
    pub(crate) backend: Share,
}

/// The backend of each part of a model.
#[derive(Clone, Debug, Default)]
pub(crate) struct Placement {
    /// The layers before it are the CPU's.
    pub(crate) point: Option<SplitPoint>,
    /// The experts of other layers that are the CPU's.
    pub(crate) experts: Option<ExpertShare>,
}

impl Shares {
    /// The graphs and rows of a load.
    ///
    /// # Errors
    /// [`Error::Model`] where a graph cannot be divided so.
    pub(crate) fn new(load: &Workload, placement: &Placement) -> Result<Self, Error> {
        let graphs = [&load.graphs[..], &load.with_candidates[..]].concat();
        let of = |graphs, layout| Share {
            graphs,
            layout,
            custom: load.custom.clone(),
        };
        let mut backend = of(graphs, load.settings.layout.clone());
        let mut host = Vec::new();
        if let Some(point) = &placement.point {
            let (first, second) = backend.layout.partition(|layer| point.is_first(layer));
            let mut layers = of(Vec::new(), first);
            let mut rest = of(Vec::new(), second);
            for graph in backend.graphs {
                let split = graph.split(point).map_err(ModelError::Graph)?;
                layers.graphs.extend(split.first);
                rest.graphs.extend(split.second);
            }
            host.push(layers);
            backend = rest;
        }
        if let Some(share) = &placement.experts {
            let (nothing, _) = backend.layout.partition(|_| false);
            let mut experts = of(Vec::new(), nothing);
            for graph in &mut backend.graphs {
                let split = share.split(graph).map_err(ModelError::Graph)?;
                *graph = split.rest;
                experts.graphs.extend(split.mixtures);
            }
            host.push(experts);
            backend.custom = ExpertShare::planned_ops(&load.custom);
        }
        Ok(Self { host, backend })
    }
}

impl Share {
    /// The work of a backend that computes this share.
    pub(crate) fn work<'a>(&'a self, weights: &'a Arc<dyn WeightSource>) -> BackendWork<'a> {
        BackendWork {
            graphs: &self.graphs,
            weights,
            layout: &self.layout,
            custom: &self.custom,
        }
    }
}

/// Number of a model's layers, as `gpu_layers` counts them.
///
/// # Errors
/// [`Error::Model`] where the model cannot build its graph.
pub(crate) fn n_layers(model: &dyn Model) -> Result<u32, Error> {
    Ok(graph_of_one(model)?.n_blocks())
}

/// The placement by these options: all of the model on one backend, where there is no GPU.
///
/// # Errors
/// [`Error::Model`] where the model cannot build its graph, or cannot be split there;
/// [`Error::Engine`] where the configuration does not fit the model; [`Error::HostExperts`].
pub(crate) fn placement(
    options: &BackendOptions,
    work: &ModelWork<'_>,
) -> Result<Placement, Error> {
    if !options.kind.is_some_and(BackendKind::is_own_gpu) {
        return Ok(Placement::default());
    }
    let point = split_point(options, work)?;
    let n_first = point.as_ref().map_or(0, SplitPoint::n_first);
    let mut matrices = BTreeMap::new();
    if !options.host_experts.is_empty() {
        let found = options.host_experts.matrices(&work.weights.names());
        matrices = found.map_err(Error::HostExperts)?;
        matrices.retain(|&layer, _| layer >= n_first);
    }
    let experts = (!matrices.is_empty()).then(|| ExpertShare {
        n_layers: matrices.len(),
        weights: matrices.into_values().flatten().collect(),
    });
    Ok(Placement { point, experts })
}

/// The point at which a model's layers are divided.
fn split_point(
    options: &BackendOptions,
    work: &ModelWork<'_>,
) -> Result<Option<SplitPoint>, Error> {
    let Some(n_on_gpu) = options.gpu_layers else {
        return Ok(None);
    };
    let model = work.config.model(work.model).map_err(EngineError::from)?;
    let graph = graph_of_one(&*model)?;
    match graph.n_blocks().saturating_sub(n_on_gpu) {
        0 => Ok(None),
        n_first => Ok(Some(
            SplitPoint::new(&graph, n_first).map_err(ModelError::Graph)?,
        )),
    }
}

/// The numbers of layers, ascending, that a GPU could compute while the CPU computes those before.
pub(crate) fn possible_gpu_layers(model: &dyn Model) -> Vec<u32> {
    let Ok(graph) = graph_of_one(model) else {
        return Vec::new();
    };
    let n_blocks = graph.n_blocks();
    let can_split = |n: &u32| SplitPoint::new(&graph, n_blocks - n).is_ok();
    (1..n_blocks).filter(can_split).collect()
}

fn graph_of_one(model: &dyn Model) -> Result<Graph, Error> {
    Ok(model.graph(GraphShape {
        n_tokens: 1,
        n_outputs: 1,
    })?)
}

/// The options of the backend that computes what is not on a GPU.
///
/// # Errors
/// [`BackendError::Unavailable`] where this crate was built without one for the CPU.
pub(crate) fn on_host(options: &BackendOptions) -> Result<BackendOptions, BackendError> {
    Ok(BackendOptions {
        kind: Some(fastest_on_host()?),
        gpu_layers: None,
        host_experts: ExpertLayers::default(),
        ..options.clone()
    })
}

/// The options of the backend on a GPU, which holds what it computes: memory for experts is that of
/// the host, where it computes some.
pub(crate) fn on_gpu(options: &BackendOptions, placement: &Placement) -> BackendOptions {
    let of_host = placement.experts.is_some();
    BackendOptions {
        gpu_layers: None,
        host_experts: ExpertLayers::default(),
        experts: options.experts.clone().filter(|_| !of_host),
        ..options.clone()
    }
}
