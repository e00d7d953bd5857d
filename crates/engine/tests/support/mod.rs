//! What the engine's tests share: the small model with its reference texts, and a backend that can
//! be told to fail.

// Each test file uses a part of this, and a panic is how a test fails.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::panic)]

pub mod text;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use cellar_engine::{CancelFlag, Engine, EngineConfig, EngineError};
use kv_backend::{Backend, BackendError, RowSpan};
use kv_backend::{GraphInputs, GraphOutputs};
use kv_candle::CandleBackend;
use kv_core::{TokenId, memory::RowCopy};
use kv_graph::Graph;
use kv_rows::RowLayout;
use model_core::architecture::Registry;
use model_core::model_file::ModelFile;
use serde::Deserialize;

const MODELS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models");

/// One prompt with its greedy continuation by an independent implementation.
#[derive(Debug, Deserialize)]
pub struct Reference {
    pub prompt: String,
    pub ids: Vec<u32>,
    pub greedy_ids: Vec<u32>,
    pub continuation: String,
}

pub fn stories() -> ModelFile {
    let mut registry = Registry::new();
    model_llama::register(&mut registry);
    ModelFile::open(format!("{MODELS}/stories-llama-f16.gguf"), &registry).unwrap()
}

/// A small model in which every fourth layer sees everything and the others a window.
pub fn interleaved() -> ModelFile {
    let mut registry = Registry::new();
    model_llama::register(&mut registry);
    let path = "../../tests/fixtures/stories/stories-gemma3-f16.gguf";
    ModelFile::open(format!("{}/{path}", env!("CARGO_MANIFEST_DIR")), &registry).unwrap()
}

pub fn references() -> Vec<Reference> {
    #[derive(Deserialize)]
    struct File {
        prompts: Vec<Reference>,
    }
    let text = std::fs::read_to_string(format!("{MODELS}/stories-llama.reference.json")).unwrap();
    serde_json::from_str::<File>(&text).unwrap().prompts
}

pub fn ids(ids: &[u32]) -> Vec<TokenId> {
    ids.iter().copied().map(TokenId).collect()
}

pub fn engine(config: &EngineConfig) -> Engine<Moody> {
    try_engine(config).unwrap()
}

pub fn try_engine(config: &EngineConfig) -> Result<Engine<Moody>, EngineError> {
    let file = stories();
    Engine::new(Moody::new(), file.model().clone(), file.weights(), config)
}

/// Runs that may still succeed before one fails; `NEVER` fails none.
pub const NEVER: usize = usize::MAX;

/// The reference backend, which fails at one run or compilation when told to. A failing run writes
/// its rows first, as a device that fails half-way would.
#[derive(Debug)]
pub struct Moody {
    inner: CandleBackend,
    pub runs_left: Arc<AtomicUsize>,
    pub compilations_left: Arc<AtomicUsize>,
    /// Calls of `write_rows` that may still succeed.
    pub writes_left: Arc<AtomicUsize>,
    /// Calls of `copy_rows` that may still succeed.
    pub copies_left: Arc<AtomicUsize>,
    /// Calls of `finish` that may still succeed.
    pub finishes_left: Arc<AtomicUsize>,
    /// Whether failures are panics.
    pub panics: AtomicBool,
    /// Whether it wants candidates found by its graphs.
    pub prefers_candidates: AtomicBool,
    /// Set when the next run begins.
    pub cancel_in_run: Arc<Mutex<Option<CancelFlag>>>,
}

impl Moody {
    pub fn new() -> Self {
        let never = || Arc::new(AtomicUsize::new(NEVER));
        Self {
            inner: CandleBackend::cpu(),
            runs_left: never(),
            compilations_left: never(),
            writes_left: never(),
            copies_left: never(),
            finishes_left: never(),
            panics: AtomicBool::new(false),
            prefers_candidates: AtomicBool::new(false),
            cancel_in_run: Arc::default(),
        }
    }

    fn fail(&self, left: &AtomicUsize) -> Result<(), BackendError> {
        let result = failure(left);
        assert!(
            result.is_ok() || !self.panics.load(Ordering::Relaxed),
            "a backend that panics"
        );
        result
    }
}

fn failure(left: &AtomicUsize) -> Result<(), BackendError> {
    let before = left.load(Ordering::Relaxed);
    if before == NEVER {
        return Ok(());
    }
    left.store(before.checked_sub(1).unwrap_or(NEVER), Ordering::Relaxed);
    match before {
        0 => Err(BackendError::Device {
            backend: "moody",
            reason: "as told".into(),
        }),
        _ => Ok(()),
    }
}

impl Backend for Moody {
    type Rows = <CandleBackend as Backend>::Rows;
    type Weights = <CandleBackend as Backend>::Weights;
    type Program = <CandleBackend as Backend>::Program;

    kv_backend::delegate!(info, allocate, load_weights, read_rows);

    fn prefers_candidates(&self) -> bool {
        self.prefers_candidates.load(Ordering::Relaxed)
    }

    fn write_rows(
        &self,
        rows: &mut Self::Rows,
        span: RowSpan,
        bytes: &[u8],
    ) -> Result<(), BackendError> {
        self.fail(&self.writes_left)?;
        self.inner.write_rows(rows, span, bytes)
    }

    fn compile(
        &self,
        graph: &Graph,
        weights: &Self::Weights,
        layout: &RowLayout,
    ) -> Result<Self::Program, BackendError> {
        self.fail(&self.compilations_left)?;
        self.inner.compile(graph, weights, layout)
    }

    fn run(
        &self,
        program: &mut Self::Program,
        rows: &mut Self::Rows,
        inputs: &GraphInputs<'_>,
        outputs: &mut GraphOutputs,
    ) -> Result<(), BackendError> {
        if let Some(cancel) = self.cancel_in_run.lock().unwrap().take() {
            cancel.cancel();
        }
        self.inner.run(program, rows, inputs, outputs)?;
        self.fail(&self.runs_left)
    }

    fn finish(&self, rows: &mut Self::Rows) -> Result<(), BackendError> {
        self.inner.finish(rows)?;
        self.fail(&self.finishes_left)
    }

    fn copy_rows(&self, rows: &mut Self::Rows, copies: &[RowCopy]) -> Result<(), BackendError> {
        self.fail(&self.copies_left)?;
        self.inner.copy_rows(rows, copies)
    }
}
