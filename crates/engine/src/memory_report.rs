//! [`MemoryReport`]: what the memory of a configuration takes, by part, layer and kind, as data
//! that programs print.
//!
//! Invariant: every number comes from the plan that an engine allocates by. Knows nothing of
//! weights and backends.

use kv_core::{
    LayerIdx, Window,
    layers::{AttentionMemory, LayerMap, LayerMemory, RecentRows},
    memory::Streams,
};
use kv_rows::{MemoryPlan, PlannedKind, PlannedRows};
use model_core::architecture::Model;
use serde::Serialize;

use crate::config::{EngineConfig, Settings};

/// What a memory takes, line by line. Sizes are in bytes.
#[derive(Clone, Debug, Serialize)]
pub struct MemoryReport {
    /// The model's architecture.
    pub architecture: String,
    /// Tokens that the memory holds, see [`EngineConfig::n_ctx`].
    pub n_ctx: u32,
    /// Sequences.
    pub n_seqs: u32,
    /// Whether sequences share cells.
    pub streams: Streams,
    /// Layers with the same window.
    pub parts: Vec<PartReport>,
    /// The layers that remember something.
    pub layers: Vec<LayerReport>,
    /// The rows of each layer, by kind.
    pub rows: Vec<RowsReport>,
    /// Layers whose recent rows are kept apart, with the further layers that have them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub recent: Vec<RecentRows>,
    /// All rows of each kind.
    pub by_kind: Vec<KindReport>,
    /// All rows: what a backend allocates.
    pub n_bytes: u64,
}

/// A part: the layers that share cells.
#[derive(Clone, Debug, Serialize)]
pub struct PartReport {
    /// Its number.
    pub part: u32,
    /// The window of its layers.
    pub window: Window,
    /// Its cells, of all streams.
    pub n_cells: usize,
    /// Its layers.
    pub n_layers: usize,
    /// The rows of all of them.
    pub n_bytes: u64,
}

/// A layer that remembers something.
#[derive(Clone, Debug, Serialize)]
pub struct LayerReport {
    /// Its number.
    pub layer: LayerIdx,
    /// What it remembers, in words.
    pub remembers: String,
}

/// Rows of one kind of one layer.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct RowsReport {
    /// The rows.
    #[serde(flatten)]
    pub rows: PlannedRows,
    /// All of them.
    pub n_bytes: u64,
}

/// All rows of a kind.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct KindReport {
    /// The kind.
    pub kind: PlannedKind,
    /// All of them.
    pub n_bytes: u64,
}

impl MemoryReport {
    /// That of a model with these settings, which `config` gave.
    pub fn new(model: &dyn Model, config: &EngineConfig, settings: &Settings) -> Self {
        let plan = settings.memory_plan();
        let rows = plan.rows().iter().map(|rows| RowsReport {
            rows: *rows,
            n_bytes: rows.bytes(),
        });
        let by_kind = PlannedKind::ALL.map(|kind| KindReport {
            kind,
            n_bytes: plan.bytes_of_kind(kind),
        });
        Self {
            architecture: model.architecture().to_owned(),
            n_ctx: settings.n_ctx,
            n_seqs: config.n_seqs,
            streams: config.streams,
            parts: parts(settings, &plan),
            layers: layers(settings.layers()),
            rows: rows.collect(),
            recent: settings.layers().recent().to_vec(),
            by_kind: by_kind.into(),
            n_bytes: plan.bytes(),
        }
    }
}

fn parts(settings: &Settings, plan: &MemoryPlan) -> Vec<PartReport> {
    let layers = settings.layout.layers();
    let parts = settings.layers().parts();
    let report = |(part, shape): (u32, &kv_core::layers::Part)| {
        let one = layers.iter().find(|l| l.part.0 == part);
        PartReport {
            part,
            window: shape.window,
            n_cells: one.map_or(0, |l| l.n_rows),
            n_layers: shape.layers.len(),
            n_bytes: plan.bytes_of_part(Some(part.into())),
        }
    };
    (0u32..).zip(&parts).map(report).collect()
}

/// The layers of a model that remember something, those that use another's rows too.
fn layers(map: &LayerMap) -> Vec<LayerReport> {
    let report = |(layer, memory)| {
        let remembers = in_words(memory)?;
        let recent = map.recent().iter().find(|recent| recent.layer == layer);
        let remembers = match recent {
            Some(recent) => format!("{remembers} of recent tokens, of layer {}", recent.of.0),
            None => remembers,
        };
        Some(LayerReport { layer, remembers })
    };
    map.iter().filter_map(report).collect()
}

fn in_words(memory: LayerMemory) -> Option<String> {
    let words = match memory {
        LayerMemory::Attention(memory) | LayerMemory::Custom(memory) => rows(memory).to_owned(),
        LayerMemory::Latent(memory) if memory.v_dim == 0 => {
            "keys that an indexer chooses by".to_owned()
        }
        LayerMemory::Latent(_) => "latents: keys that are values too".to_owned(),
        LayerMemory::Recurrent(_) => "a state".to_owned(),
        LayerMemory::Both(memory, _) => format!("{}, and a state", rows(memory)),
        LayerMemory::SharedWith(of) => format!("shares the rows of layer {}", of.0),
        LayerMemory::Nothing => return None,
        other => format!("{other:?}"),
    };
    Some(words)
}

fn rows(memory: AttentionMemory) -> &'static str {
    match memory.window {
        Window::Source => "keys and values of the source",
        _ => "keys and values",
    }
}
