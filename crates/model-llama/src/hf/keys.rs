//! Which keys of `config.json` become which GGUF keys, where the shared tables do not cover it.

use kv_graph::rope::YarnRamp;
use model_core::gguf::Array;
use model_core::hf::{
    FixedValue, HfConfig, Key, Keys, ModelFileError, RopeKind, RopeSettings, SILU, full_attention,
    gemma_score_scale, layer_types, window_of_all, windows_by_layer,
};
use model_core::windows::{FullLayer, WindowPattern};

/// Experts of every layer, by the names that most configs have.
pub(super) const EXPERT_KEYS: &[Key] = &[
    Key::CountOr {
        to: "expert_count",
        from: "num_local_experts",
        or: "num_experts",
    },
    Key::Count {
        to: "expert_used_count",
        from: "num_experts_per_tok",
    },
];

pub(super) const QWEN3_MOE_KEYS: &[Key] = &[
    SILU,
    Key::With(full_attention),
    Key::Count {
        to: "expert_feed_forward_length",
        from: "moe_intermediate_size",
    },
    Key::Only {
        from: "norm_topk_prob",
        is: FixedValue::StatedFlag(true),
    },
];

pub(super) const COHERE2_KEYS: &[Key] = &[
    Key::All(COHERE_KEYS),
    NO_QK_NORM,
    Key::With(cohere2_windows),
];

/// Norms of queries and keys are of Command R+ alone.
pub(super) const NO_QK_NORM: Key = Key::Only {
    from: "use_qk_norm",
    is: FixedValue::Flag(false),
};

/// Norms and the factor on logits of Command R and its descendants.
pub(super) const COHERE_KEYS: &[Key] = &[
    SILU,
    Key::Only {
        from: "attention_bias",
        is: FixedValue::Flag(false),
    },
    Key::Number {
        to: "attention.layer_norm_epsilon",
        from: "layer_norm_eps",
    },
    Key::Number {
        to: "logit_scale",
        from: "logit_scale",
    },
];

pub(super) const GPT_OSS_KEYS: &[Key] = &[
    SILU,
    Key::Count {
        to: "expert_feed_forward_length",
        from: "intermediate_size",
    },
    Key::With(alternating_windows),
    Key::With(gpt_oss_rope),
    Key::With(gpt_oss_curve),
];

pub(super) const LLAMA4_KEYS: &[Key] = &[
    SILU,
    Key::Count {
        to: "feed_forward_length",
        from: "intermediate_size_mlp",
    },
    Key::Count {
        to: "expert_feed_forward_length",
        from: "intermediate_size",
    },
    Key::Count {
        to: "interleave_moe_layer_step",
        from: "interleave_moe_layer_step",
    },
    Key::With(llama4_attention),
];

pub(super) const SMOLLM3_KEYS: &[Key] =
    &[SILU, Key::With(full_attention), Key::With(smollm3_rotation)];

pub(super) const STARCODER2_KEYS: &[Key] = &[
    Key::Number {
        to: "attention.layer_norm_epsilon",
        from: "norm_epsilon",
    },
    Key::Only {
        from: "hidden_act",
        is: FixedValue::Text(&["gelu_pytorch_tanh"]),
    },
    Key::Only {
        from: "use_bias",
        is: FixedValue::Flag(true),
    },
    Key::With(window_of_all),
];

pub(super) const GEMMA_KEYS: &[Key] = &[
    Key::Only {
        from: "hidden_activation",
        is: FixedValue::Text(&["gelu_pytorch_tanh"]),
    },
    Key::Only {
        from: "use_bidirectional_attention",
        is: FixedValue::Flag(false),
    },
    Key::OptionalNumber {
        to: "attn_logit_softcapping",
        from: "attn_logit_softcapping",
    },
    Key::OptionalNumber {
        to: "final_logit_softcapping",
        from: "final_logit_softcapping",
    },
    Key::With(gemma_score_scale),
];

/// Windowed layers have a base of their own: in newer files among `rope_parameters`, which come
/// first.
pub(super) fn gemma3_rope(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    RopeSettings::read(config, Some("full_attention"))?.write(config, keys)?;
    let windowed = "sliding_attention";
    config.check_object(&format!("rope_parameters.{windowed}"))?;
    let own = config.value(&format!("rope_parameters.{windowed}.rope_theta"));
    let local = match own {
        Some(_) => RopeSettings::read(config, Some(windowed))?.theta,
        None => config.number("rope_local_base_freq")?,
    };
    keys.set("rope.freq_base_swa", local as f32);
    Ok(())
}

/// Every second layer sees everything.
pub(super) fn alternating_windows(
    config: &HfConfig,
    keys: &mut Keys,
) -> Result<(), ModelFileError> {
    let pattern = WindowPattern {
        period: 2,
        full: FullLayer::Last,
    };
    windows_by_layer(config, keys, pattern)
}

pub(super) fn cohere2_windows(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let pattern = WindowPattern {
        period: 4,
        full: FullLayer::Last,
    };
    windows_by_layer(config, keys, pattern)
}

/// GGUF files of Phi-3 have 0 where there is no window.
pub(super) fn phi3_window(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let width = config.optional_count("sliding_window")?.unwrap_or(0);
    keys.set("attention.sliding_window", as_u32(width));
    Ok(())
}

/// YaRN, also where the config does not say so.
fn gpt_oss_rope(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let usual = RopeSettings {
        theta: 150_000.0,
        partial: 1.0,
        kind: RopeKind::Yarn {
            factor: 32.0,
            original: 4096,
            beta_fast: Some(32.0),
            beta_slow: Some(1.0),
            attention: None,
            ramp: YarnRamp::Exact,
        },
    };
    RopeSettings::read_or(config, usual)?.write(config, keys)
}

/// The numbers of the clamped gate are in no GGUF file, so they must be the published ones.
fn gpt_oss_curve(config: &HfConfig, _: &mut Keys) -> Result<(), ModelFileError> {
    for (key, wanted) in [("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)] {
        if config
            .optional_number(key)?
            .is_some_and(|found| found != wanted)
        {
            return Err(config.wrong(key, wanted.to_string()));
        }
    }
    Ok(())
}

/// True if this is the last of four layers.
fn is_fourth(layer: usize) -> bool {
    layer % 4 == 3
}

/// Layers without positions, which GGUF files leave to the architecture: `no_rope_layers` has 1 for
/// layers *with* rotation.
fn every_fourth_does_not_rotate(config: &HfConfig, _: &mut Keys) -> Result<(), ModelFileError> {
    for layer in 0..config.count("num_hidden_layers")? {
        let key = format!("no_rope_layers.{layer}");
        let rotates = config.optional_number(&key)?.map(|flag| flag != 0.0);
        if rotates == Some(is_fourth(layer)) {
            return Err(config.wrong(&key, "0 for every fourth layer and 1 for the others"));
        }
    }
    let (interval, key) = (4, "no_rope_layer_interval");
    match config.optional_count(key)? {
        Some(own) if own != interval => Err(config.wrong(key, interval.to_string())),
        _ => Ok(()),
    }
}

/// Layers without positions: `no_rope_layers` has 1 for layers *with* rotation, and without it the
/// last of so many does not rotate. GGUF files leave every fourth to the architecture.
fn smollm3_rotation(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let n_layers = config.count("num_hidden_layers")?;
    let (list, key) = ("no_rope_layers", "no_rope_layer_interval");
    let interval = config.optional_count(key)?.unwrap_or(4);
    let rotates: Vec<bool> = match config.optional_numbers(list)? {
        None => (0..n_layers).map(|at| (at + 1) % interval != 0).collect(),
        Some(flags) if flags.len() == n_layers => flags.iter().map(|&flag| flag != 0.0).collect(),
        Some(_) => {
            let wanted = format!("a list of {n_layers}: 1 for layers that rotate, 0 for others");
            return Err(config.wrong(list, wanted));
        }
    };
    if rotates
        .iter()
        .enumerate()
        .any(|(at, &own)| own == is_fourth(at))
    {
        keys.set("attention.rope_pattern", Array::Bool(rotates));
    }
    Ok(())
}

/// The experts of Llama 4 Maverick, the only one whose queries and keys have no norms.
const MAVERICK_EXPERTS: usize = 128;

/// Chunks, layers without positions, and the temperature of long texts. GGUF files leave these to
/// the architecture's usual numbers; the keys are written where the config has others.
fn llama4_attention(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    every_fourth_does_not_rotate(config, keys)?;
    // Files do not say it: Maverick is the one without these norms, and has this many experts.
    let has_norms = config.optional_flag("use_qk_norm")?.unwrap_or(true);
    let n_experts = config.count("num_local_experts")?;
    if has_norms == (n_experts == MAVERICK_EXPERTS) {
        let wanted = format!(
            "{} for {n_experts} experts (true for all numbers but {MAVERICK_EXPERTS})",
            !has_norms
        );
        return Err(config.wrong("use_qk_norm", wanted));
    }
    let types = layer_types(config, &["chunked_attention", "full_attention"])?;
    let types = types.unwrap_or_default();
    let is_unusual = |(layer, &t): (usize, &&str)| (t == "chunked_attention") == is_fourth(layer);
    if let Some(layer) = types.iter().enumerate().position(is_unusual) {
        let wanted = "full_attention for every fourth layer and chunked_attention for the others";
        return Err(config.wrong(&format!("layer_types.{layer}"), wanted));
    }
    if let Some(width) = config.optional_count("attention_chunk_size")?
        && width != 8192
    {
        keys.set("attention.chunk_size", as_u32(width));
    }
    if config.optional_flag("attn_temperature_tuning")? == Some(false) {
        return Err(config.wrong("attn_temperature_tuning", "true"));
    }
    if let Some(length) = config.optional_count("floor_scale")?
        && length != 8192
    {
        keys.set("attention.temperature_length", as_u32(length));
    }
    if let Some(scale) = config.optional_number("attn_scale")?
        && scale != 0.1
    {
        keys.set("attention.temperature_scale", scale as f32);
    }
    Ok(())
}

/// A count as metadata store it.
pub(super) fn as_u32(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
