//! Adapters in GGUF files: pairs of tensors `NAME.lora_a` and `NAME.lora_b`.
//!
//! Knows nothing of a model but its architecture's name.

use std::collections::BTreeMap;

use kv_core::TokenId;
use kv_graph::weights::Weight;

use super::{AdapterError, LowRank, RawAdapter, wrong};
use crate::error::ModelFileError;
use crate::gguf::{Array, GgufFile, Metadata};
use crate::model_file::OpenModel;

/// Checks that a file holds what it should: `kinds` are keys with the values that they must have.
pub(super) fn check_kind(
    metadata: &Metadata,
    wanted: &'static str,
    kinds: &[(&str, &str)],
) -> Result<(), AdapterError> {
    for (key, value) in kinds {
        let found = metadata.optional::<&str>(key).ok().flatten();
        if found != Some(*value) {
            return Err(AdapterError::NoAdapter {
                wanted,
                found: found.unwrap_or("not there").to_owned(),
            });
        }
    }
    Ok(())
}

/// Reads a file, and checks that it is for a model of this architecture.
pub(super) fn read(file: &GgufFile, model: &OpenModel) -> Result<RawAdapter, ModelFileError> {
    let wrong = |reason| wrong(file.label(), reason);
    let metadata = file.metadata();
    let kinds = [("general.type", "adapter"), ("adapter.type", "lora")];
    check_kind(metadata, "LoRA adapter", &kinds).map_err(wrong)?;
    let architecture = metadata.optional::<&str>("general.architecture");
    let architecture = architecture.ok().flatten().unwrap_or_default();
    if architecture != model.model().architecture() {
        return Err(wrong(AdapterError::Architecture {
            adapter: architecture.to_owned(),
            model: model.model().architecture().to_owned(),
        }));
    }
    let alpha = metadata.optional::<f32>("adapter.lora.alpha");
    let alpha = alpha.ok().flatten().unwrap_or(0.0);
    let key = "adapter.alora.invocation_tokens";
    let invocation = match metadata.optional::<&Array>(key) {
        Ok(Some(Array::U32(ids))) => ids.iter().copied().map(TokenId).collect(),
        _ => Vec::new(),
    };
    let mut parts: BTreeMap<String, [Option<Weight>; 2]> = BTreeMap::new();
    for tensor in file.tensors() {
        let name = tensor.name();
        let (matrix, at) = match (name.strip_suffix(".lora_a"), name.strip_suffix(".lora_b")) {
            (Some(matrix), _) => (matrix, 0),
            (_, Some(matrix)) => (matrix, 1),
            _ => {
                let tensor = name.to_owned();
                return Err(wrong(AdapterError::Tensor { tensor }));
            }
        };
        let pair = parts.entry(matrix.to_owned()).or_default();
        if let Some(part) = pair.get_mut(at) {
            *part = Some(file.weight(name)?);
        }
    }
    let mut pairs = BTreeMap::new();
    for (matrix, parts) in parts {
        let (a, b) = match parts {
            [Some(a), Some(b)] => (a, b),
            [a, _] => {
                let missing = if a.is_none() { "lora_a" } else { "lora_b" };
                return Err(wrong(AdapterError::Pair { matrix, missing }));
            }
        };
        let rank = b.n_columns();
        let scale = if alpha == 0.0 {
            1.0
        } else {
            alpha / rank as f32
        };
        pairs.insert(matrix, LowRank { a, b, scale });
    }
    Ok(RawAdapter {
        label: file.label().to_owned(),
        pairs,
        invocation,
        files: file.files().to_vec(),
    })
}
