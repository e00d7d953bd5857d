//! Whether several models fit this machine together.
//!
//! Invariant: decided from headers and plans, before anything is allocated. One model alone is checked
//! by its engine. Memory of a device is checked by its backend, when a model is loaded.

use model_core::architecture::OutputKind;
use model_core::model_file::ModelFile;
use server::ModelSettings;

use super::{embedder_config, engine_config, reranker_config};
use crate::args::ServeArgs;
use crate::backends::BackendName;
use crate::failure::usage;
use crate::machine;

/// # Errors
/// A usage error with what each takes, where all take more than is free.
pub(super) fn check(
    args: &ServeArgs,
    files: &[ModelFile],
    settings: &[ModelSettings],
) -> anyhow::Result<()> {
    let on_device = matches!(
        args.engine.backend,
        Some(BackendName::Cuda | BackendName::Metal)
    );
    let available = machine::available_memory();
    let Some(available) = available.filter(|_| !args.engine.no_memory_check && !on_device) else {
        return Ok(());
    };
    let mut sum = 0u64;
    let mut each = Vec::with_capacity(files.len());
    for (file, settings) in files.iter().zip(settings) {
        let needs = bytes_of(args, file)?;
        sum = sum.saturating_add(needs);
        each.push(format!("'{}' {}", settings.id, machine::bytes(needs)));
    }
    if sum <= available {
        return Ok(());
    }
    usage(format!(
        "the models take {} together ({}), but this machine has {} free: serve fewer, or a smaller \
         --ctx (--no-memory-check tries anyway)",
        machine::bytes(sum),
        each.join(", "),
        machine::bytes(available),
    ))
}

/// Weights as they are stored, and the memory of the sequences.
fn bytes_of(args: &ServeArgs, file: &ModelFile) -> anyhow::Result<u64> {
    let memory = match file.model().output() {
        OutputKind::Logits | OutputKind::MaskLogits(_) => {
            let sizes = engine_config(args, file).sizes(&**file.model())?;
            sizes.memory_bytes()
        }
        OutputKind::Embeddings => {
            let plan = embedder_config(args, file).plan(file)?;
            plan.engine.sizes(&*plan.model)?.memory_bytes()
        }
        OutputKind::Scores { .. } => {
            let plan = reranker_config(args, file).plan(file)?;
            plan.engine.sizes(&*plan.model)?.memory_bytes()
        }
    };
    let weights = file.weights();
    let infos = weights.names().into_iter();
    let infos = infos.filter_map(|name| weights.describe(&name).ok());
    let bytes = infos.map(|info| info.n_bytes() as u64);
    Ok(bytes.fold(memory, u64::saturating_add))
}
