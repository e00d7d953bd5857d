//! Key tables that many classes share: sizes, heads, windows.

use super::class::as_u32;
use super::{FixedValue, HfConfig, Key, Keys, ModelFileError, rope_keys};
use crate::gguf::Array;
use crate::windows::WindowPattern;

/// A key that has one value in every model that is supported.
pub const fn only(from: &'static str, is: FixedValue) -> Key {
    Key::Only { from, is }
}

/// Number of layers, and width of rows.
pub const ROW_KEYS: &[Key] = &[
    Key::Count {
        to: "block_count",
        from: "num_hidden_layers",
    },
    Key::Count {
        to: "embedding_length",
        from: "hidden_size",
    },
];

/// Tokens of the vocabulary.
pub const VOCAB_SIZE: Key = Key::Count {
    to: "vocab_size",
    from: "vocab_size",
};

/// Layers and widths.
pub const WIDTH_KEYS: &[Key] = &[
    Key::All(ROW_KEYS),
    Key::Count {
        to: "feed_forward_length",
        from: "intermediate_size",
    },
];

/// The longest text of the training.
pub const TRAINED_LENGTH: Key = Key::Count {
    to: "context_length",
    from: "max_position_embeddings",
};

/// Sizes of a decoder, whose tokens see no later ones.
pub const DECODER_KEYS: &[Key] = &[
    Key::All(SIZE_KEYS),
    Key::Only {
        from: "is_causal",
        is: FixedValue::Flag(true),
    },
    Key::Only {
        from: "use_bidirectional_attention",
        is: FixedValue::Flag(false),
    },
];

/// Sizes of a model.
pub const SIZE_KEYS: &[Key] = &[
    Key::All(WIDTH_KEYS),
    TRAINED_LENGTH,
    VOCAB_SIZE,
    Key::With(head_keys),
];

/// The `eps` of RMS norms.
pub const RMS_EPS: &[Key] = &[Key::Number {
    to: "attention.layer_norm_rms_epsilon",
    from: "rms_norm_eps",
}];

/// The factors of Granite models.
pub const GRANITE_FACTORS: &[Key] = &[
    Key::Number {
        to: "attention.scale",
        from: "attention_multiplier",
    },
    Key::Number {
        to: "embedding_scale",
        from: "embedding_multiplier",
    },
    Key::Number {
        to: "residual_scale",
        from: "residual_multiplier",
    },
    Key::Number {
        to: "logit_scale",
        from: "logits_scaling",
    },
];

/// One rotation for all layers.
pub const ROPE_KEYS: &[Key] = &[Key::With(rope_keys)];

/// Values of one head.
///
/// # Errors
/// [`ModelFileError`] where heads do not divide the width, or a key is missing.
pub fn head_dim(config: &HfConfig) -> Result<usize, ModelFileError> {
    if let Some(own) = config.optional_count("head_dim")? {
        return Ok(own);
    }
    let (dim, heads) = (
        config.count("hidden_size")?,
        config.count("num_attention_heads")?,
    );
    if dim.is_multiple_of(heads) {
        Ok(dim / heads)
    } else {
        let wanted = format!(
            "a divisor of '{}', which is {dim}",
            config.own("hidden_size")
        );
        Err(config.wrong("num_attention_heads", wanted))
    }
}

/// Numbers of heads and their size.
///
/// # Errors
/// [`ModelFileError`] naming the key.
pub fn head_keys(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let heads = config.count("num_attention_heads")?;
    let kv_heads = config
        .optional_count("num_key_value_heads")?
        .unwrap_or(heads);
    if !heads.is_multiple_of(kv_heads) {
        let wanted = format!("a divisor of 'num_attention_heads', which is {heads}");
        return Err(config.wrong("num_key_value_heads", wanted));
    }
    let dim = as_u32(head_dim(config)?);
    keys.set("attention.head_count", as_u32(heads));
    keys.set("attention.head_count_kv", as_u32(kv_heads));
    keys.set("attention.key_length", dim);
    keys.set("attention.value_length", dim);
    Ok(())
}

/// One window for all layers, where the config names one.
///
/// # Errors
/// [`ModelFileError`] naming the key.
pub fn window_of_all(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    if let Some(width) = config.optional_count("sliding_window")? {
        keys.set("attention.sliding_window", as_u32(width));
    }
    Ok(())
}

/// A window for some layers: those that `layer_types` names, or every one but one of a period,
/// which is `pattern` where the config does not say. What is not as `pattern` is written down.
/// Where a layer has a window, the config has to name it.
///
/// # Errors
/// [`ModelFileError`] naming the key.
pub fn windows_by_layer(
    config: &HfConfig,
    keys: &mut Keys,
    pattern: WindowPattern,
) -> Result<(), ModelFileError> {
    let name = "attention.sliding_window_pattern";
    let n_layers = config.count("num_hidden_layers")?;
    let flags = |pattern: WindowPattern| (0..n_layers).map(|i| pattern.is_windowed(i)).collect();
    let usual: Vec<bool> = flags(pattern);
    let own = match layer_types(config, &["sliding_attention", "full_attention"])? {
        Some(types) => {
            let own: Vec<bool> = types.iter().map(|&t| t == "sliding_attention").collect();
            if own != usual {
                keys.set(name, Array::Bool(own.clone()));
            }
            own
        }
        None => match config.optional_count("sliding_window_pattern")? {
            Some(period) => {
                let period = as_u32(period);
                keys.set(name, period);
                flags(WindowPattern { period, ..pattern })
            }
            None => usual,
        },
    };
    if own.contains(&true) {
        Key::Count {
            to: "attention.sliding_window",
            from: "sliding_window",
        }
        .apply(config, keys)
    } else {
        window_of_all(config, keys)
    }
}

/// The types of all layers, each one of `known`.
///
/// # Errors
/// [`ModelFileError`] where there are more or fewer than layers, or another type.
pub fn layer_types<'a>(
    config: &'a HfConfig,
    known: &[&str],
) -> Result<Option<Vec<&'a str>>, ModelFileError> {
    let Some(types) = config.optional_texts("layer_types")? else {
        return Ok(None);
    };
    let n_layers = config.count("num_hidden_layers")?;
    if types.len() != n_layers {
        let wanted = format!("a list of {n_layers} ('num_hidden_layers')");
        return Err(config.wrong("layer_types", wanted));
    }
    match types.iter().position(|t| !known.contains(t)) {
        None => Ok(Some(types)),
        Some(at) => {
            let wanted = format!("one of: {}", known.join(", "));
            Err(config.wrong(&format!("layer_types.{at}"), wanted))
        }
    }
}

/// Groups of experts, of which the best are chosen from.
///
/// # Errors
/// [`ModelFileError`] naming the key.
pub fn groups(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let Some(n) = config.optional_count("n_group")? else {
        return Ok(());
    };
    let (n_used, n_experts) = (
        config.count("topk_group")?,
        config.count("n_routed_experts")?,
    );
    if !n_experts.is_multiple_of(n) {
        let wanted = format!("a divisor of 'n_routed_experts', which is {n_experts}");
        return Err(config.wrong("n_group", wanted));
    }
    let n_chosen = config.count("num_experts_per_tok")?;
    if n_used > n || n_used * (n_experts / n) < n_chosen {
        let wanted = format!(
            "at most 'n_group', which is {n}, with the {n_chosen} experts of 'num_experts_per_tok'"
        );
        return Err(config.wrong("topk_group", wanted));
    }
    keys.set("expert_group_count", as_u32(n));
    keys.set("expert_group_used_count", as_u32(n_used));
    Ok(())
}

/// For classes that could have windows, but whose architecture knows none.
///
/// # Errors
/// [`ModelFileError`] where the config asks for one.
pub fn full_attention(config: &HfConfig, _: &mut Keys) -> Result<(), ModelFileError> {
    layer_types(config, &["full_attention"])?;
    let n_layers = config.count("num_hidden_layers")?;
    let first = config.optional_count("max_window_layers")?.unwrap_or(0);
    match config.optional_flag("use_sliding_window")? {
        Some(true) if first < n_layers => Err(config.wrong("use_sliding_window", "false")),
        _ => Ok(()),
    }
}

/// SiLU and nothing else.
pub const SILU: Key = Key::Only {
    from: "hidden_act",
    is: FixedValue::Text(&["silu", "swish"]),
};
