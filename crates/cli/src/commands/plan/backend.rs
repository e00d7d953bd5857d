//! What the backend of a plan takes: packed weights, and scratch memory of the graphs that a long
//! prompt and generation compile.
//!
//! Invariant: of the weights, only small vectors and first rows are read. Knows no backend.

use std::collections::HashMap;
use std::sync::Arc;

use cellar::{BackendMemory, BackendWork};
use engine::{AttentionMode, Settings};
use kv_core::PartIdx;
use kv_core::block::BlockFormat;
use kv_core::graph::{Graph, GraphShape};
use kv_core::weights::{Weight, WeightInfo, WeightSource};
use model_core::architecture::{Model, OutputKind};

use crate::args::PlanArgs;
use crate::backends::{self, BackendOptions};
use crate::models::Contents;

/// What the backend takes for this model in this memory; `None` where it cannot tell.
///
/// # Errors
/// Where the backend cannot compute the model.
pub(super) fn memory(
    args: &PlanArgs,
    model: &dyn Model,
    settings: &Settings,
    weights: Arc<dyn WeightSource>,
) -> anyhow::Result<Option<BackendMemory>> {
    let shapes = shapes(args, model, settings);
    let graphs = shapes.iter().map(|&shape| graph(shape, model, settings));
    let graphs = graphs.collect::<anyhow::Result<Vec<Graph>>>()?;
    let options = BackendOptions {
        n_threads: args.engine.threads,
        activations: args.engine.activations,
        repack: args.engine.repack,
        profile: None,
    };
    let work = BackendWork {
        graphs: &graphs,
        weights: &weights,
        layout: &settings.layout,
        custom: &model.custom_ops(),
    };
    let planned = backends::plan_memory(args.engine.backend, options, &work)?;
    // The last logits, as they come out of the graph and as the engine keeps them.
    let n_outputs = shapes
        .iter()
        .map(|shape| shape.n_outputs)
        .max()
        .unwrap_or(0);
    let outputs = 2 * n_outputs * settings.output_width() * size_of::<f32>();
    Ok(planned.map(|planned| BackendMemory {
        scratch: planned.scratch + outputs,
        ..planned
    }))
}

/// The weights of a GGUF file; of a directory, whose weights are computed when they are read,
/// others of the same shapes.
pub(super) fn weights(file: Contents) -> Arc<dyn WeightSource> {
    match file {
        Contents::Gguf(file) => Arc::new(file),
        Contents::Directory(directory) => Arc::new(Shapes::of(&**directory.weights())),
    }
}

/// A long prompt's ubatches, its last ubatch, and one token of each sequence.
fn shapes(args: &PlanArgs, model: &dyn Model, settings: &Settings) -> Vec<GraphShape> {
    let n_ubatch = settings.n_ubatch.min(settings.n_ctx) as usize;
    let n_seqs = args.seqs as usize;
    let shapes = match model.output() {
        OutputKind::Embeddings | OutputKind::Scores { .. } => vec![(n_ubatch, n_ubatch)],
        OutputKind::Logits => vec![(n_ubatch, 0), (n_ubatch, 1), (n_seqs, n_seqs)],
    };
    let shape = |(n_tokens, n_outputs)| GraphShape {
        n_tokens,
        n_outputs,
    };
    shapes.into_iter().map(shape).collect()
}

fn graph(shape: GraphShape, model: &dyn Model, settings: &Settings) -> anyhow::Result<Graph> {
    let graph = model.graph(shape)?;
    match settings.attention {
        AttentionMode::Fused => Ok(graph),
        AttentionMode::Plain => {
            let layers = settings.layout.layers();
            let n_cells = |part: PartIdx| layers.iter().find(|l| l.part == part);
            Ok(graph.with_plain_attention(|part| n_cells(part).map_or(0, |l| l.n_rows))?)
        }
    }
}

/// Bytes at the beginning of a weight that are not zero: more than a group of rows that is packed.
const N_FILLED: usize = 1 << 20;

/// Weights with the shapes and formats of a model. Their values are zeros, whose pages are never
/// read, but for the first ones: F16 and F32 take all of their bits there, as most values do.
struct Shapes(HashMap<String, WeightInfo>);

impl Shapes {
    fn of(weights: &dyn WeightSource) -> Self {
        let names = weights.names().into_iter();
        Self(
            names
                .filter_map(|name| {
                    let info = weights.describe(&name).ok()?;
                    Some((name, info))
                })
                .collect(),
        )
    }
}

impl WeightSource for Shapes {
    fn get(&self, name: &str) -> Option<Weight> {
        let WeightInfo { shape, format } = self.0.get(name)?.clone();
        let n_bytes = format.row_bytes(shape.iter().product())?;
        let mut bytes = vec![0; n_bytes];
        if matches!(format, BlockFormat::F16 | BlockFormat::F32) {
            // A third, in F16 and nearly in F32.
            let third = [0x55, 0x35].iter().cycle();
            bytes
                .iter_mut()
                .zip(third)
                .take(N_FILLED)
                .for_each(|(byte, &b)| *byte = b);
        }
        Weight::new(name, shape, format, bytes.into()).ok()
    }

    fn names(&self) -> Vec<String> {
        self.0.keys().cloned().collect()
    }
}
