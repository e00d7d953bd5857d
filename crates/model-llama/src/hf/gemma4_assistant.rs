//! [`CLASSES`]: directories of assistants of Gemma 4, whose layers have queries alone. Does not
//! know graphs.

use model_core::hf::{
    ATTENTION_TENSORS, FixedValue, GATED_TENSORS, HfClass, HfConfig, HfHead, Key, Keys,
    ModelFileError, RMS_EPS, TensorRule, same,
};

use super::LLAMA;
use super::gemma4::{DECODER, EMBEDDINGS, INPUTS, NORMS, number_or_zero};
use crate::gemma4_assistant::{GROUPED_TOKENS, MODEL_WIDTH, N_CHOSEN, N_GROUPS};

/// The classes of this file.
pub(super) const CLASSES: &[HfClass] = &[
    ASSISTANT,
    HfClass {
        name: "Gemma4UnifiedAssistantForCausalLM",
        ..ASSISTANT
    },
];

const ASSISTANT: HfClass = HfClass {
    name: "Gemma4AssistantForCausalLM",
    architecture: "gemma4_assistant",
    section: Some("text_config"),
    keys: &[RMS_EPS, DECODER, KEYS],
    tensors: &[
        EMBEDDINGS,
        NORMS,
        ATTENTION_TENSORS,
        GATED_TENSORS,
        INPUTS,
        OWN,
    ],
    defaults: &[
        ("head_dim", 256),
        ("global_head_dim", 512),
        ("num_key_value_heads", 4),
        ("sliding_window", 512),
        ("backbone_hidden_size", 1536),
        ("num_centroids", 2048),
        ("centroid_intermediate_top_k", 32),
    ],
    head: HfHead::Own,
    ..LLAMA
};

const KEYS: &[Key] = &[
    Key::Only {
        from: "enable_moe_block",
        is: FixedValue::Flag(false),
    },
    Key::Only {
        from: "use_double_wide_mlp",
        is: FixedValue::Flag(false),
    },
    Key::With(without_own_rows),
    Key::With(of_model),
];

/// The matrices before and behind its layers, and the groups of its tokens.
const OWN: &[TensorRule] = &[
    same("pre_projection.weight", "pre_projection.weight"),
    same("post_projection.weight", "post_projection.weight"),
    same("centroids.weight", "masked_embedding.centroids.weight"),
    same(GROUPED_TOKENS, "masked_embedding.token_ordering"),
];

/// All layers share rows, and have no inputs of their own.
fn without_own_rows(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let n_layers = config.count("num_hidden_layers")?;
    let key = "num_kv_shared_layers";
    let n_shared = number_or_zero(config, key)? as usize;
    // None is all, too.
    if n_shared != 0 && n_shared != n_layers {
        return Err(config.wrong(key, format!("'num_hidden_layers', which is {n_layers}")));
    }
    for key in ["hidden_size_per_layer_input", "vocab_size_per_layer_input"] {
        if number_or_zero(config, key)? != 0 {
            return Err(config.wrong(key, "0"));
        }
    }
    // Values are the model's, whatever they are of.
    config.optional_flag("attention_k_eq_v")?;
    let hidden = config.count("intermediate_size")?;
    keys.set(
        "feed_forward_length",
        u32::try_from(hidden).unwrap_or(u32::MAX),
    );
    Ok(())
}

/// The rows of the model, and the groups of tokens.
fn of_model(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let count = |key: &str| {
        let n = config.count(key)?;
        Ok::<_, ModelFileError>(u32::try_from(n).unwrap_or(u32::MAX))
    };
    keys.set(MODEL_WIDTH, count(MODEL_WIDTH)?);
    let (n_groups, n_chosen) = (count(N_GROUPS)?, count(N_CHOSEN)?);
    if config.optional_flag("use_ordered_embeddings")? == Some(true) {
        keys.set(N_GROUPS, n_groups);
        keys.set(N_CHOSEN, n_chosen);
    }
    Ok(())
}
