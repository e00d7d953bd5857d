//! Hybrids: Jamba, Bamba, Granite 4 and Falcon-H1.

use model_core::gguf::Array;
use model_core::hf::{
    ATTENTION_TENSORS, EMBEDDING_TENSORS, FixedValue, GRANITE_FACTORS, HfClass, HfConfig,
    INPUT_NORM, Key, Keys, ModelFileError, NORM_BEFORE_FFN, PAIRED_ATTENTION, RMS_EPS, ROPE_KEYS,
    SILU, TRAINED_LENGTH, WIDTH_KEYS, head_dim, layer_types,
};

use super::hybrid_tensors::{
    CONV_TENSORS, DENSE_TENSORS, FALCON_H1_FRAME, FALCON_H1_LAYERS, FFN_NORM, FRAME_TENSORS,
    GRANITE_EXPERTS, GRANITE_SHARED, JAMBA_EXPERTS, JAMBA_NORMS, JAMBA_ROUTER, MAMBA1_TENSORS,
    MAMBA2_NORM, MAMBA2_TENSORS, PROJECTION_TENSORS,
};
use super::{as_u32, free_time_steps};

/// The length that models without positions are given: they have no end.
pub(super) const CONTEXT: u32 = 1 << 20;

const FRAME_KEYS: &[Key] = &[
    SILU,
    Key::All(WIDTH_KEYS),
    Key::Count {
        to: "attention.head_count",
        from: "num_attention_heads",
    },
    Key::Count {
        to: "ssm.conv_kernel",
        from: "mamba_d_conv",
    },
    Key::Count {
        to: "ssm.state_size",
        from: "mamba_d_state",
    },
    Key::Only {
        from: "mamba_proj_bias",
        is: FixedValue::Flag(false),
    },
];

/// Sizes of second generation mixers.
const HEADS_KEYS: &[Key] = &[
    Key::Count {
        to: "ssm.group_count",
        from: "mamba_n_groups",
    },
    Key::Count {
        to: "ssm.time_step_rank",
        from: "mamba_n_heads",
    },
    Key::With(free_time_steps),
];

/// The classes.
pub(super) const CLASSES: &[HfClass] = &[
    HfClass {
        name: "JambaForCausalLM",
        architecture: "jamba",
        keys: &[
            FRAME_KEYS,
            RMS_EPS,
            &[
                TRAINED_LENGTH,
                Key::Count {
                    to: "expert_count",
                    from: "num_experts",
                },
                Key::Count {
                    to: "expert_used_count",
                    from: "num_experts_per_tok",
                },
                Key::With(jamba_layers),
                Key::With(jamba_mixer),
            ],
        ],
        tensors: &[
            FRAME_TENSORS,
            INPUT_NORM,
            FFN_NORM,
            DENSE_TENSORS,
            PROJECTION_TENSORS,
            CONV_TENSORS,
            MAMBA1_TENSORS,
            JAMBA_NORMS,
            ATTENTION_TENSORS,
            JAMBA_ROUTER,
            JAMBA_EXPERTS,
        ],
        ..HfClass::EMPTY
    },
    HfClass {
        name: "BambaForCausalLM",
        architecture: "granitehybrid",
        keys: &[
            FRAME_KEYS,
            HEADS_KEYS,
            RMS_EPS,
            ROPE_KEYS,
            &[
                TRAINED_LENGTH,
                Key::With(inner_of_heads),
                Key::With(bamba_layers),
            ],
        ],
        tensors: &[
            FRAME_TENSORS,
            INPUT_NORM,
            FFN_NORM,
            DENSE_TENSORS,
            PROJECTION_TENSORS,
            CONV_TENSORS,
            MAMBA2_TENSORS,
            MAMBA2_NORM,
            PAIRED_ATTENTION,
        ],
        rotated_part: Some(0.5),
        ..HfClass::EMPTY
    },
    HfClass {
        name: "GraniteMoeHybridForCausalLM",
        architecture: "granitehybrid",
        keys: &[FRAME_KEYS, HEADS_KEYS, RMS_EPS, ROPE_KEYS, GRANITE_KEYS],
        tensors: &[
            EMBEDDING_TENSORS,
            INPUT_NORM,
            NORM_BEFORE_FFN,
            GRANITE_EXPERTS,
            GRANITE_SHARED,
            PROJECTION_TENSORS,
            CONV_TENSORS,
            MAMBA2_TENSORS,
            MAMBA2_NORM,
            PAIRED_ATTENTION,
        ],
        ..HfClass::EMPTY
    },
    HfClass {
        name: "FalconH1ForCausalLM",
        architecture: "falcon-h1",
        keys: &[
            FRAME_KEYS,
            HEADS_KEYS,
            RMS_EPS,
            ROPE_KEYS,
            &[
                TRAINED_LENGTH,
                Key::CountOr {
                    to: "attention.head_count_kv",
                    from: "num_key_value_heads",
                    or: "num_attention_heads",
                },
                Key::Count {
                    to: "ssm.inner_size",
                    from: "mamba_d_ssm",
                },
                Key::Only {
                    from: "mamba_norm_before_gate",
                    is: FixedValue::StatedFlag(false),
                },
                Key::With(falcon_heads),
                Key::With(falcon_factors),
            ],
        ],
        tensors: &[
            FALCON_H1_FRAME,
            INPUT_NORM,
            FALCON_H1_LAYERS,
            CONV_TENSORS,
            MAMBA2_TENSORS,
            MAMBA2_NORM,
        ],
        ..HfClass::EMPTY
    },
];

const GRANITE_KEYS: &[Key] = &[
    Key::All(GRANITE_FACTORS),
    Key::Count {
        to: "expert_shared_feed_forward_length",
        from: "shared_intermediate_size",
    },
    Key::With(inner_of_heads),
    Key::With(granite_experts),
    Key::With(granite_layers),
    Key::With(granite_positions),
];

/// Key/value heads of every layer: none where there is no attention.
pub(super) fn kv_heads(
    config: &HfConfig,
    keys: &mut Keys,
    attends: impl Fn(usize) -> bool,
) -> Result<(), ModelFileError> {
    let n_layers = config.count("num_hidden_layers")?;
    kv_heads_of(config, keys, n_layers, attends)
}

/// The same for a number of layers that the config names elsewhere.
pub(super) fn kv_heads_of(
    config: &HfConfig,
    keys: &mut Keys,
    n_layers: usize,
    attends: impl Fn(usize) -> bool,
) -> Result<(), ModelFileError> {
    let heads = config.count("num_attention_heads")?;
    let kv = config
        .optional_count("num_key_value_heads")?
        .unwrap_or(heads);
    if !heads.is_multiple_of(kv) {
        let wanted = format!("a divisor of 'num_attention_heads', which is {heads}");
        return Err(config.wrong("num_key_value_heads", wanted));
    }
    let kv = i32::try_from(kv).unwrap_or(i32::MAX);
    let of = |layer| if attends(layer) { kv } else { 0 };
    let list = (0..n_layers).map(of).collect();
    keys.set("attention.head_count_kv", Array::I32(list));
    Ok(())
}

fn jamba_layers(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let period = config.count("attn_layer_period")?;
    let offset = match config.optional_number("attn_layer_offset")? {
        Some(offset) if offset >= 0.0 && offset < period as f64 => offset as usize,
        Some(_) => return Err(config.wrong("attn_layer_offset", format!("0 to {}", period - 1))),
        None => return Err(config.missing("attn_layer_offset", format!("0 to {}", period - 1))),
    };
    kv_heads(config, keys, |layer| layer % period == offset)
}

fn jamba_mixer(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let dim = config.count("hidden_size")?;
    let automatic = config.optional_text("mamba_dt_rank").ok().flatten() == Some("auto");
    let rank = if automatic {
        dim.div_ceil(16)
    } else {
        config.count("mamba_dt_rank")?
    };
    keys.set(
        "ssm.inner_size",
        as_u32(dim * config.count("mamba_expand")?),
    );
    keys.set("ssm.time_step_rank", as_u32(rank));
    Ok(())
}

fn inner_of_heads(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let inner = config.count("hidden_size")? * config.count("mamba_expand")?;
    let heads = config.count("mamba_n_heads")?;
    if !inner.is_multiple_of(heads) {
        let wanted = format!("a divisor of {inner}, which 'hidden_size' times 'mamba_expand' is");
        return Err(config.wrong("mamba_n_heads", wanted));
    }
    keys.set("ssm.inner_size", as_u32(inner));
    Ok(())
}

fn bamba_layers(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let key = "attn_layer_indices";
    let layers = config.optional_numbers(key)?.unwrap_or_default();
    kv_heads(config, keys, |layer| layers.contains(&(layer as f64)))?;
    keys.set("rope.scaling.finetuned", true);
    Ok(())
}

/// Both the published names of layer types and those that newer versions of the library write.
fn granite_layers(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let known = ["mamba", "attention", "linear_attention", "full_attention"];
    let key = "layer_types";
    let types = layer_types(config, &known)?;
    let types = types.ok_or_else(|| config.missing(key, "a list, one for each layer"))?;
    kv_heads(config, keys, |layer| {
        matches!(types.get(layer), Some(&"attention" | &"full_attention"))
    })
}

/// Smaller models have shared blocks only.
fn granite_experts(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let n_experts = config.optional_number("num_local_experts")?.unwrap_or(0.0);
    if n_experts > 0.0 {
        keys.set("expert_count", as_u32(config.count("num_local_experts")?));
        keys.set(
            "expert_used_count",
            as_u32(config.count("num_experts_per_tok")?),
        );
    }
    Ok(())
}

fn granite_positions(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let key = "position_embedding_type";
    let rotates = match config.optional_text(key)? {
        Some("nope") | None => false,
        Some("rope") => true,
        Some(_) => return Err(config.wrong(key, "one of: nope, rope")),
    };
    keys.set("rope.scaling.finetuned", rotates);
    let length = if rotates {
        as_u32(config.count("max_position_embeddings")?)
    } else {
        CONTEXT
    };
    keys.set("context_length", length);
    Ok(())
}

/// Lists of factors on parts of a matrix are whole; the factors themselves go into the tensors.
fn falcon_factors(config: &HfConfig, _: &mut Keys) -> Result<(), ModelFileError> {
    for (key, n_parts) in [("mlp_multipliers", 2), ("ssm_multipliers", 5)] {
        match config.optional_numbers(key)? {
            Some(factors) if factors.len() != n_parts => {
                return Err(config.wrong(key, format!("a list of {n_parts} numbers")));
            }
            _ => {}
        }
    }
    Ok(())
}

fn falcon_heads(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let dim = as_u32(head_dim(config)?);
    keys.set("attention.key_length", dim);
    keys.set("attention.value_length", dim);
    Ok(())
}
