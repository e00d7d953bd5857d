//! The context where no `--ctx` is given: as long as the model was trained for, where it fits.
//!
//! Invariant: it is the same whenever a model is looked at, since what is free is looked at once,
//! and it is never shorter than the engine's own default.

use cellar_engine::{DEFAULT_N_CTX, EngineConfig};
use model_core::architecture::Model;
use model_core::model_file::OpenModel;

use crate::model_room::ModelRoom;

/// The context of a model, where none was asked for; `None` is the engine's default.
pub(super) fn default_n_ctx(
    room: &ModelRoom,
    config: &EngineConfig,
    file: &OpenModel,
) -> Option<u32> {
    let weights = file.weights();
    let infos = weights.names().into_iter();
    let infos = infos.filter_map(|name| weights.describe(&name).ok());
    let n_weights = infos.map(|info| info.n_bytes());
    let n_bytes = room.memory_bytes(n_weights.fold(0, u64::saturating_add))?;
    longest(config, &**file.model(), n_bytes)
}

/// The longest context of a model that fits into so many bytes.
fn longest(config: &EngineConfig, model: &dyn Model, n_bytes: u64) -> Option<u32> {
    let trained = u32::try_from(model.context_length()).unwrap_or(u32::MAX);
    if trained <= DEFAULT_N_CTX {
        return None;
    }
    let fitting = config.largest_n_ctx(model, n_bytes)?;
    let n_ctx = if fitting < trained {
        // A round number, which a small change of what is free leaves as it is.
        fitting / DEFAULT_N_CTX * DEFAULT_N_CTX
    } else {
        trained
    };
    Some(n_ctx.max(DEFAULT_N_CTX))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use std::sync::Arc;

    use kv_graph::weights::SharedBytes;

    use super::*;

    const LARGE: u64 = 1 << 40;

    /// The small model as if it had been trained for longer texts.
    fn trained_for(n_tokens: u32) -> OpenModel {
        const KEY: &[u8] = b"llama.context_length";
        let mut bytes = cellar_stories::STORIES_LLAMA.to_vec();
        let at = bytes
            .windows(KEY.len())
            .position(|part| part == KEY)
            .unwrap();
        // The type of the value comes first.
        let at = at + KEY.len() + 4;
        bytes[at..at + 4].copy_from_slice(&n_tokens.to_le_bytes());
        let bytes = SharedBytes::new(Arc::new(bytes));
        OpenModel::from_bytes(bytes, &cellar::architectures()).unwrap()
    }

    #[test]
    fn the_context_is_the_trained_one_where_it_fits() {
        let config = EngineConfig::default();
        let context = |trained, n_bytes| longest(&config, &**trained_for(trained).model(), n_bytes);
        assert_eq!(context(40_000, LARGE), Some(40_000));
        let n_bytes = |n_ctx| {
            let config = EngineConfig {
                n_ctx: Some(n_ctx),
                ..config.clone()
            };
            let model = trained_for(40_000);
            config.sizes(&**model.model()).unwrap().memory_bytes()
        };
        // Multiples of 4,096 where it does not, and never less than the engine's own default.
        assert_eq!(context(40_000, n_bytes(21_000)), Some(20_480));
        assert_eq!(context(40_000, n_bytes(1_000)), Some(4_096));
        // What was trained for less has that.
        assert_eq!(context(512, LARGE), None);
    }
}
