//! [`Workload`]: the graphs that an engine compiles, to plan what a backend takes before one is
//! opened.
//!
//! Invariant: graphs and rows are those of an engine with the same configuration. Knows no backend.

use std::sync::Arc;

use kv_backend::CustomOps;
use kv_core::PartIdx;
use kv_graph::{Graph, GraphShape};
use model_core::aged::with_layers;
use model_core::architecture::{Model, ModelError, OutputKind};

use crate::capacities::Capacities;
use crate::config::{AttentionMode, EngineConfig, Settings};
use crate::error::EngineError;
use crate::session::MAX_CANDIDATES;

/// Of which tokens of a prompt the outputs are wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PromptOutputs {
    /// Of the last: a text is continued.
    #[default]
    Last,
    /// Of all: a text is measured.
    All,
}

/// What an engine computes: a long prompt's ubatches, its last ubatch, and one token of each
/// sequence.
#[derive(Clone, Debug)]
pub struct Workload {
    /// The settings, with the rows that a backend allocates.
    pub settings: Settings,
    /// The graphs, as the model gives them.
    pub graphs: Vec<Graph>,
    /// The same, where there is something to choose from, with the candidates of a sampler: for
    /// backends that prefer them.
    pub with_candidates: Vec<Graph>,
    /// What custom operations of the graphs compute.
    pub custom: CustomOps,
    /// The most rows of a graph that come out.
    pub n_outputs: usize,
}

impl Workload {
    /// What an engine of this model computes, whatever its memory's budget is, on a backend that
    /// compiles each shape.
    ///
    /// # Errors
    /// [`EngineError::Config`] as [`EngineConfig::sizes`]; [`EngineError::Model`] where the model
    /// cannot build its graphs.
    pub fn new(
        model: &Arc<dyn Model>,
        config: &EngineConfig,
        outputs: PromptOutputs,
    ) -> Result<Self, EngineError> {
        Self::with_capacities(model, config, outputs, &[])
    }

    /// The same on a backend with these [`Backend::program_capacities`].
    ///
    /// # Errors
    /// As [`Workload::new`].
    ///
    /// [`Backend::program_capacities`]: kv_backend::Backend::program_capacities
    pub fn with_capacities(
        model: &Arc<dyn Model>,
        config: &EngineConfig,
        outputs: PromptOutputs,
        capacities: &[usize],
    ) -> Result<Self, EngineError> {
        let settings = config.sizes(&**model)?;
        let model = &with_layers(Arc::clone(model), settings.layers());
        let longer = model.for_context(settings.n_ctx as usize);
        let model = longer.as_ref().unwrap_or(model);
        let ubatches = settings.shapes(outputs);
        let capacities = Capacities::new(capacities, settings.max_ubatch());
        let mut shapes: Vec<GraphShape> = ubatches
            .iter()
            .map(|&ubatch| capacities.shape_for(ubatch))
            .collect();
        shapes.dedup();
        let graphs = shapes.iter().map(|&shape| settings.graph(shape, &**model));
        let mut graphs = graphs.collect::<Result<Vec<_>, _>>()?;
        let with_candidates = match model.output() {
            OutputKind::Logits => {
                let k = MAX_CANDIDATES.min(settings.output_width());
                let last = graphs.iter().zip(&shapes);
                let last = last.filter(|(_, s)| s.n_outputs > 0 && outputs == PromptOutputs::Last);
                let chosen = last.map(|(graph, _)| graph.clone().with_candidates(k));
                chosen
                    .collect::<Result<_, _>>()
                    .map_err(ModelError::Graph)?
            }
            OutputKind::Embeddings | OutputKind::Scores { .. } | OutputKind::MaskLogits(_) => {
                Vec::new()
            }
        };
        if let Some(encoder) = model.source_encoder() {
            let shape = GraphShape {
                n_tokens: settings.n_ubatch.min(settings.n_ctx) as usize,
                n_outputs: 0,
            };
            graphs.push(settings.graph(shape, &*encoder.model)?);
        }
        if let Some(head) = model.draft_head() {
            let n_active = settings.n_active() as usize;
            let drafts = GraphShape {
                n_tokens: n_active,
                n_outputs: n_active,
            };
            for shape in ubatches.iter().map(stored).chain([drafts]) {
                let shape = capacities.shape_for(shape);
                graphs.push(settings.graph(shape, &*head)?);
            }
        }
        Ok(Self {
            graphs,
            with_candidates,
            custom: model.custom_ops(),
            n_outputs: ubatches.iter().map(|s| s.n_outputs).max().unwrap_or(0),
            settings,
        })
    }
}

/// The shape in which a head stores what it has of a ubatch.
fn stored(ubatch: &GraphShape) -> GraphShape {
    GraphShape {
        n_outputs: 0,
        ..*ubatch
    }
}

impl Settings {
    fn shapes(&self, outputs: PromptOutputs) -> Vec<GraphShape> {
        let n_ubatch = self.n_ubatch.min(self.n_ctx) as usize;
        let n_active = self.n_active() as usize;
        let shapes = match (self.output, outputs) {
            (OutputKind::Logits, PromptOutputs::Last) => {
                vec![(n_ubatch, 0), (n_ubatch, 1), (n_active, n_active)]
            }
            (OutputKind::Logits, PromptOutputs::All)
            | (OutputKind::Embeddings | OutputKind::Scores { .. } | OutputKind::MaskLogits(_), _) =>
            {
                vec![(n_ubatch, n_ubatch)]
            }
        };
        let shape = |(n_tokens, n_outputs)| GraphShape {
            n_tokens,
            n_outputs,
        };
        shapes.into_iter().map(shape).collect()
    }

    fn graph(&self, shape: GraphShape, model: &dyn Model) -> Result<Graph, ModelError> {
        let graph = model.graph(shape)?;
        match self.attention {
            AttentionMode::Fused => Ok(graph),
            AttentionMode::Plain => {
                let layers = self.layout.layers();
                let n_cells = |part: PartIdx| layers.iter().find(|l| l.part == part);
                graph
                    .with_plain_attention(|part| n_cells(part).map_or(0, |l| l.n_rows))
                    .map_err(ModelError::Graph)
            }
        }
    }
}
