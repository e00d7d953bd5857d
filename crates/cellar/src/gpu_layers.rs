//! A model of which a GPU computes the last layers and the CPU those before: where it is split, and
//! how many layers fit.
//!
//! Invariant: what each half takes is planned from the very graphs and rows that it is given. Knows
//! no concrete backend.

use std::sync::Arc;

use cellar_engine::{EngineError, Workload};
use kv_backend::BackendError;
use kv_core::layers::RowLayout;
use kv_graph::weights::WeightSource;
use kv_graph::{Graph, GraphShape, SplitPoint};
use model_core::architecture::{Model, ModelError};

use crate::backends::{BackendOptions, BackendWork, fastest_on_host};
use crate::choice::ModelWork;
use crate::error::Error;

/// What a backend computes of a model: graphs, and the rows of the memory.
#[derive(Clone, Debug)]
pub(crate) struct Share {
    /// The graphs, as an engine compiles them.
    pub(crate) graphs: Vec<Graph>,
    /// The rows.
    pub(crate) layout: RowLayout,
}

/// A model's work on two backends.
#[derive(Clone, Debug)]
pub(crate) struct Shares {
    /// What the CPU computes; `None` where another backend computes all.
    pub(crate) host: Option<Share>,
    /// What the backend computes that was chosen.
    pub(crate) backend: Share,
}

impl Shares {
    /// The graphs and rows of a load, of which the blocks before `point` are the host's.
    ///
    /// # Errors
    /// [`Error::Backend`] where a graph cannot be split there.
    pub(crate) fn new(load: &Workload, point: Option<&SplitPoint>) -> Result<Self, Error> {
        let graphs = [&load.graphs[..], &load.with_candidates[..]].concat();
        let layout = &load.settings.layout;
        let Some(point) = point else {
            let layout = layout.clone();
            return Ok(Self {
                host: None,
                backend: Share { graphs, layout },
            });
        };
        let (first, second) = layout.partition(|layer| point.is_first(layer));
        let mut host = Share {
            graphs: Vec::new(),
            layout: first,
        };
        let mut backend = Share {
            graphs: Vec::new(),
            layout: second,
        };
        for graph in graphs {
            let split = graph.split(point).map_err(ModelError::Graph)?;
            host.graphs.extend(split.first);
            backend.graphs.extend(split.second);
        }
        Ok(Self {
            host: Some(host),
            backend,
        })
    }
}

impl Share {
    /// The work of a backend that computes this share.
    pub(crate) fn work<'a>(
        &'a self,
        load: &'a Workload,
        weights: &'a Arc<dyn WeightSource>,
    ) -> BackendWork<'a> {
        BackendWork {
            graphs: &self.graphs,
            weights,
            layout: &self.layout,
            custom: &load.custom,
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

/// Where a model is split with these options; `None` where one backend computes all of it.
///
/// # Errors
/// [`Error::Model`] where the model cannot build its graph, or cannot be split there;
/// [`Error::Engine`] where the configuration does not fit the model.
pub(crate) fn split_point(
    options: &BackendOptions,
    work: &ModelWork<'_>,
) -> Result<Option<SplitPoint>, Error> {
    let is_gpu = options.kind.is_some_and(|kind| kind.is_own_gpu());
    let Some(n_on_gpu) = options.gpu_layers.filter(|_| is_gpu) else {
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

/// The options of the backend that computes the layers before those on a GPU.
///
/// # Errors
/// [`BackendError::Unavailable`] where this crate was built without one for the CPU.
pub(crate) fn on_host(options: &BackendOptions) -> Result<BackendOptions, BackendError> {
    Ok(BackendOptions {
        kind: Some(fastest_on_host()?),
        gpu_layers: None,
        ..options.clone()
    })
}
