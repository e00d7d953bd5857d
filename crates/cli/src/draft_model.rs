//! The model of `--draft-model`, next to the one that it drafts for.
//!
//! Invariant: its memory holds as long a text. Knows nothing of texts.

use engine::{DraftModel, EngineConfig, PromptOutputs};
use kv_core::KvType;
use kv_core::memory::SwaSize;
use model_core::tokenizer::Tokenizer;

use crate::args::{EngineArgs, SpeculationArgs};
use crate::models::ModelSource;
use crate::resolve;

/// Opens the draft model for a model with this tokenizer and context; `None` where none is named.
///
/// # Errors
/// As of [`resolve::open_engine`]; where its vocabulary is another.
pub(crate) fn open(
    args: &SpeculationArgs,
    engine: &EngineArgs,
    target: &Tokenizer,
    n_ctx: u32,
) -> anyhow::Result<Option<DraftModel>> {
    let Some(path) = args.draft_model()? else {
        return Ok(None);
    };
    let file = ModelSource::new(Some(path)).load()?;
    resolve::continues_without_source(&file)?;
    let config = resolve::engine_config(engine, &**file.model(), KvType::F16);
    let config = EngineConfig {
        n_ctx: Some(n_ctx),
        n_seqs: 1,
        // What was drafted is taken back, by recurrent layers and through windows too.
        n_snapshots: args.draft_max(),
        swa: SwaSize::Full,
        ..config
    };
    let engine = resolve::open_engine(&file, engine, &config, PromptOutputs::Last)?;
    let n_max = args.draft_max() as usize;
    Ok(Some(DraftModel::new(
        engine,
        file.tokenizer(),
        target,
        n_max,
    )?))
}
