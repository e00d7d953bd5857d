//! How much memory models may take, and how much each does.
//!
//! Invariant: decided from headers and plans, before anything is allocated.

use std::sync::Arc;

use cellar::{BackendKind, MemoryNeeds, ModelWork, gpu_room, taken, weight_shapes};
use cellar_engine::{EngineConfig, MemoryBudget as EngineBudget, PromptOutputs};
use cellar_server::{MemoryBudget, ModelBytes};
use model_core::architecture::{Model, OutputKind};
use model_core::model_file::ModelFile;

use super::{DEFAULT_STEP_MS, embedder_config, engine_config, reranker_config};
use crate::args::ServeArgs;
use crate::backends::BackendName;
use crate::draft_model::{self, DraftFor};
use crate::failure::usage;
use crate::machine;
use crate::models::ModelSource;
use crate::resolve;

/// A model that is loaded when the server starts.
pub(super) struct RoomRequest<'a> {
    pub(super) id: &'a str,
    pub(super) bytes: ModelBytes,
}

/// What all models together may take, as of now.
pub(super) fn budget(args: &ServeArgs) -> MemoryBudget {
    if args.engine.compute.no_memory_check {
        return MemoryBudget::default();
    }
    let named = args.engine.compute.backend.and_then(BackendName::kind);
    let gpu = named.unwrap_or_else(BackendKind::own_gpu);
    let may_use_gpu = gpu.is_own_gpu() && args.engine.compute.gpu_layers != Some(0);
    let host = match args.memory {
        Some(size) => Some(size.0),
        None => machine::available_memory(),
    };
    MemoryBudget {
        // All models share these bytes.
        host: host.map(|host| host.saturating_sub(args.store.host_bytes())),
        device: if may_use_gpu { gpu_room(gpu) } else { None },
        experts: args.engine.compute.experts.memory().map(|m| m.budget()),
        free_now: Some(machine::available_memory),
    }
}

/// Checks that the models that are loaded at the start fit together. One alone is checked by its
/// engine, unless a budget was given, or flags that take memory of the host beyond it.
///
/// # Errors
/// A usage error with what each takes, where all take more than they may.
pub(super) fn check(
    args: &ServeArgs,
    budget: &MemoryBudget,
    models: &[RoomRequest<'_>],
) -> anyhow::Result<()> {
    let of_store = args.store.host_bytes();
    let is_plain = args.parallel.swap.memory_bytes() == 0 && of_store == 0;
    if models.len() < 2 && args.memory.is_none() && is_plain {
        return Ok(());
    }
    let host = |bytes: ModelBytes| bytes.host;
    let device = |bytes: ModelBytes| bytes.device;
    let has = match args.memory {
        Some(_) => "--memory allows",
        None => "this machine has free",
    };
    let rest = if of_store > 0 {
        " next to --cache-ram"
    } else {
        ""
    };
    let all = models.iter().map(|model| model.bytes);
    let all = budget.shared(all.fold(ModelBytes::default(), ModelBytes::plus));
    let of_host = budget.host.map(|available| (host(all), available));
    let of_device = budget.device.map(|available| (device(all), available));
    check_pool(models, of_host, host, [has, rest])?;
    check_pool(models, of_device, device, ["the GPU has free", ""])
}

/// Checks what all take of a pool against what it has, where that is known.
fn check_pool(
    models: &[RoomRequest<'_>],
    pool: Option<(u64, u64)>,
    of: fn(ModelBytes) -> u64,
    [has, rest]: [&str; 2],
) -> anyhow::Result<()> {
    let Some((sum, available)) = pool.filter(|(sum, available)| sum > available) else {
        return Ok(());
    };
    let each = models.iter().map(|model| {
        let n_bytes = machine::bytes(of(model.bytes));
        format!("'{}' {n_bytes}", model.id)
    });
    let each = each.collect::<Vec<_>>().join(", ");
    usage(format!(
        "the models take {} together ({each}), but {has} {}{rest}: serve fewer, or with a smaller \
         --ctx or --swap-memory (--no-memory-check tries anyway)",
        machine::bytes(sum),
        machine::bytes(available),
    ))
}

/// What a model takes, and where: the rows of its memory, weights as they are stored or packed, and
/// scratch memory; with those of the draft model, where there is one.
///
/// # Errors
/// Where the backend cannot compute it, the flags do not fit it, or a draft model has another
/// vocabulary.
pub(super) fn bytes_of(
    args: &ServeArgs,
    source: &ModelSource,
    file: &ModelFile,
) -> anyhow::Result<ModelBytes> {
    let weights = if source.is_directory() {
        // Those are computed when they are read.
        weight_shapes(&*file.weights())
    } else {
        file.weights()
    };
    let options = resolve::backend_flags(&args.engine.compute)?.options();
    let sized = |model: &Arc<dyn Model>, config: EngineConfig, outputs: PromptOutputs| {
        let config = EngineConfig {
            budget: EngineBudget::Unlimited,
            ..config
        };
        let memory = config.sizes(&**model)?.memory_bytes();
        let work = ModelWork {
            model,
            config: &config,
            weights: &weights,
            outputs,
        };
        anyhow::Ok(taken(&options, &work, memory)?)
    };
    let of_draft = |config: &EngineConfig| {
        let settings = config.sizes(&**file.model())?;
        let texts = DraftFor::engine(file.tokenizer(), &settings);
        let draft = draft_model::plan(&args.speculation, &args.engine, texts)?;
        anyhow::Ok(draft.map_or(MemoryNeeds::default(), |draft| draft.taken))
    };
    let mut swap = 0;
    let (own, draft) = match file.model().output() {
        OutputKind::Logits | OutputKind::MaskLogits(_) => {
            let config = engine_config(args, file);
            let draft = of_draft(&config)?;
            let limits = args.parallel.service_config(DEFAULT_STEP_MS);
            limits.check(&config.sizes(&**file.model())?)?;
            let args = &args.parallel.swap;
            swap = args.memory_bytes().saturating_add(args.read_bytes());
            (sized(file.model(), config, PromptOutputs::Last)?, draft)
        }
        OutputKind::Embeddings => {
            let plan = embedder_config(args, file).plan(file)?;
            let own = sized(&plan.model, plan.engine, PromptOutputs::All)?;
            (own, MemoryNeeds::default())
        }
        OutputKind::Scores { .. } => {
            let plan = reranker_config(args, file).plan(file)?;
            let own = sized(&plan.model, plan.engine, PromptOutputs::All)?;
            (own, MemoryNeeds::default())
        }
    };
    let experts = args.engine.compute.experts.memory();
    let draft = experts.map_or(draft, |memory| draft.next_to(own.experts, &memory));
    Ok(ModelBytes {
        experts: own.experts.saturating_add(draft.experts),
        host: own.host.saturating_add(draft.host).saturating_add(swap),
        device: own.device.saturating_add(draft.device),
    })
}
