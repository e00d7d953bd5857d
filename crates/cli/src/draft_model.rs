//! The model of `--draft-model`, next to the one that it drafts for.
//!
//! Invariant: its memory holds as long a text, and a sequence for each text that is drafted for at
//! the same time. Knows nothing of texts.

use std::sync::Arc;

use cellar::{MemoryNeeds, ModelWork, taken, weight_shapes};
use cellar_engine::{DraftModel, EngineConfig, MemoryBudget, PromptOutputs, Settings};
use kv_core::memory::SwaSize;
use kv_rows::{KvType, KvTypes};
use model_core::architecture::Model;
use model_core::tokenizer::Tokenizer;

use crate::args::{EngineArgs, SpeculationArgs};
use crate::models::ModelSource;
use crate::resolve;

/// What a draft model drafts for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DraftFor<'a> {
    /// The tokenizer of the model.
    pub(crate) target: &'a Tokenizer,
    /// The longest text, or all together where they share cells.
    pub(crate) n_ctx: u32,
    /// Texts at the same time.
    pub(crate) n_texts: u32,
}

impl<'a> DraftFor<'a> {
    /// For texts of a model that an engine with these settings runs.
    pub(crate) fn engine(target: &'a Tokenizer, settings: &Settings) -> Self {
        Self {
            target,
            n_ctx: settings.n_ctx,
            n_texts: settings.n_active(),
        }
    }
}

/// Opens the draft model; `None` where none is named.
///
/// # Errors
/// As of [`resolve::open_engine`]; where its vocabulary is another.
pub(crate) fn open(
    args: &SpeculationArgs,
    engine: &EngineArgs,
    texts: DraftFor<'_>,
) -> anyhow::Result<Option<DraftModel>> {
    let Some(path) = args.draft_model()? else {
        return Ok(None);
    };
    let file = ModelSource::new(Some(path)).load()?;
    resolve::continues_without_source(&file)?;
    DraftModel::check_vocabulary(file.tokenizer(), texts.target)?;
    let config = EngineConfig {
        n_ctx: Some(texts.n_ctx),
        n_seqs: texts.n_texts,
        ..config(args, engine, &**file.model())
    };
    let engine = resolve::open_engine(&file, &engine.compute, &config, PromptOutputs::Last)?;
    let n_max = args.draft_max() as usize;
    Ok(Some(DraftModel::new(
        engine,
        file.tokenizer(),
        texts.target,
        n_max,
    )?))
}

/// What a draft model takes.
#[derive(Debug)]
pub(crate) struct PlannedDraft {
    pub(crate) name: String,
    model: Arc<dyn Model>,
    config: EngineConfig,
    /// Its rows, and what is kept of its cells.
    pub(crate) memory: u64,
    /// With its memory.
    pub(crate) taken: MemoryNeeds,
}

impl PlannedDraft {
    /// What its memory takes with another context.
    pub(crate) fn memory_with(&self, n_ctx: u32) -> Option<u64> {
        let config = EngineConfig {
            n_ctx: Some(n_ctx),
            ..self.config.clone()
        };
        let settings = config.sizes(&*self.model).ok()?;
        Some(settings.memory_bytes())
    }
}

/// What the draft model takes, before anything of it is loaded; `None` where none is named.
///
/// # Errors
/// Where it cannot be read or computed; where its vocabulary is another.
pub(crate) fn plan(
    args: &SpeculationArgs,
    engine: &EngineArgs,
    texts: DraftFor<'_>,
) -> anyhow::Result<Option<PlannedDraft>> {
    let Some(path) = args.draft_model()? else {
        return Ok(None);
    };
    let source = ModelSource::new(Some(path));
    let file = source.load()?;
    resolve::continues_without_source(&file)?;
    DraftModel::check_vocabulary(file.tokenizer(), texts.target)?;
    let config = EngineConfig {
        n_ctx: Some(texts.n_ctx),
        n_seqs: texts.n_texts,
        budget: MemoryBudget::Unlimited,
        ..config(args, engine, &**file.model())
    };
    let memory = config.sizes(&**file.model())?.memory_bytes();
    let weights = if source.is_directory() {
        // Those are computed when they are read.
        weight_shapes(&*file.weights())
    } else {
        file.weights()
    };
    let work = ModelWork {
        model: file.model(),
        config: &config,
        weights: &weights,
        outputs: PromptOutputs::Last,
    };
    let options = resolve::backend_flags(&engine.compute)?.options();
    let taken = taken(&options, &work, memory)?;
    Ok(Some(PlannedDraft {
        name: source.name(),
        model: Arc::clone(file.model()),
        config,
        memory,
        taken,
    }))
}

/// The engine of a draft model, but for its context and its sequences.
fn config(args: &SpeculationArgs, engine: &EngineArgs, model: &dyn Model) -> EngineConfig {
    let config = resolve::engine_config(engine, model, KvType::F16);
    EngineConfig {
        // What was drafted is taken back, by recurrent layers and through windows too.
        n_snapshots: args.draft_max(),
        swa: SwaSize::Full,
        // Its rows would take as much room in two types, and it may have no old ones.
        kv_types: KvTypes {
            old: None,
            ..config.kv_types
        },
        ..config
    }
}
