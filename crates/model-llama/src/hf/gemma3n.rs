//! [`CLASSES`]: Gemma 3n, whose layers compute one of several streams.
//!
//! Vision and audio towers are not read. Does not know graphs.

use model_core::gguf::Array;
use model_core::hf::{
    ATTENTION_TENSORS, FixedValue, GATED_TENSORS, HfClass, HfConfig, Key, Keys, ModelFileError,
    RMS_EPS, ROW_KEYS, RopeKind, RopeSettings, TRAINED_LENGTH, TensorRule, VOCAB_SIZE, head_dim,
    head_keys, in_layers, same, windows_by_layer,
};
use model_core::windows::{FullLayer, WindowPattern};

use super::LLAMA;
use super::gemma4::{EMBEDDINGS, INPUTS, NORMS, TOWERS, number_or_zero};

/// The classes of this file.
pub(super) const CLASSES: &[HfClass] = &[
    GEMMA3N,
    HfClass {
        name: "Gemma3nForConditionalGeneration",
        section: Some("text_config"),
        text: "language_model.",
        other_parts: TOWERS,
        ..GEMMA3N
    },
];

const GEMMA3N: HfClass = HfClass {
    name: "Gemma3nForCausalLM",
    architecture: "gemma3n",
    keys: &[RMS_EPS, KEYS],
    tensors: &[
        EMBEDDINGS,
        NORMS,
        ATTENTION_TENSORS,
        GATED_TENSORS,
        INPUTS,
        STREAMS,
        STREAMS_OF_LAYERS,
    ],
    defaults: &[
        ("head_dim", 256),
        ("num_key_value_heads", 2),
        ("sliding_window", 512),
        ("hidden_size_per_layer_input", 256),
        ("num_kv_shared_layers", 15),
        ("altup_num_inputs", 4),
        ("altup_active_idx", 0),
        ("final_logit_softcapping", 30),
    ],
    ..LLAMA
};

const KEYS: &[Key] = &[
    TRAINED_LENGTH,
    Key::All(ROW_KEYS),
    VOCAB_SIZE,
    Key::With(head_keys),
    Key::Only {
        from: "hidden_activation",
        is: FixedValue::Text(&["gelu_pytorch_tanh"]),
    },
    Key::Only {
        from: "attention_bias",
        is: FixedValue::Flag(false),
    },
    Key::Only {
        from: "altup_correct_scale",
        is: FixedValue::Flag(true),
    },
    Key::Number {
        to: "final_logit_softcapping",
        from: "final_logit_softcapping",
    },
    Key::Count {
        to: "altup.num_inputs",
        from: "altup_num_inputs",
    },
    Key::With(numbers),
    Key::With(windows),
    Key::With(rope),
    Key::With(widths),
    Key::With(sparsity),
];

/// Matrices that spread rows to streams and merge them.
const STREAMS: &[TensorRule] = &[
    same("altup_proj.weight", "model.altup_projections.{e}.weight"),
    same(
        "altup_unembd_proj.weight",
        "model.altup_unembed_projections.{e}.weight",
    ),
];

const STREAMS_OF_LAYERS: &[TensorRule] = &in_layers(
    "model.layers.{l}.",
    [
        same("altup_router.weight", "altup.modality_router.weight"),
        same("altup_router_norm.weight", "altup.router_norm.weight"),
        same("altup_predict_coef.weight", "altup.prediction_coefs.weight"),
        same("altup_correct_coef.weight", "altup.correction_coefs.weight"),
        same("altup_correct_scale.weight", "altup.correct_output_scale"),
        same("laurel_l.weight", "laurel.linear_left.weight"),
        same("laurel_r.weight", "laurel.linear_right.weight"),
        same("laurel_post_norm.weight", "laurel.post_laurel_norm.weight"),
    ],
);

/// Numbers that may be 0.
fn numbers(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let n_layers = config.count("num_hidden_layers")?;
    let n_shared = number_or_zero(config, "num_kv_shared_layers")?;
    if n_shared as usize >= n_layers {
        let wanted = format!("fewer than 'num_hidden_layers', which is {n_layers}");
        return Err(config.wrong("num_kv_shared_layers", wanted));
    }
    keys.set("attention.shared_kv_layers", n_shared);
    let active = number_or_zero(config, "altup_active_idx")?;
    keys.set("altup.active_idx", active);
    let key = "hidden_size_per_layer_input";
    keys.set(
        "embedding_length_per_layer_input",
        config.count(key)? as u32,
    );
    Ok(())
}

fn windows(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let pattern = WindowPattern {
        period: 5,
        full: FullLayer::Last,
    };
    windows_by_layer(config, keys, pattern)
}

/// Layers of each kind rotate whole heads by a base of their own.
fn rope(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let bases = [
        (
            "full_attention",
            "rope_theta",
            "rope.freq_base",
            1_000_000.0,
        ),
        (
            "sliding_attention",
            "rope_local_base_freq",
            "rope.freq_base_swa",
            10_000.0,
        ),
    ];
    for (kind, old, to, usual) in bases {
        let object = format!("rope_parameters.{kind}");
        let settings = RopeSettings::read(config, Some(kind))?;
        if settings.kind != RopeKind::Plain || settings.partial != 1.0 {
            return Err(config.wrong(&object, "rope_type default, of whole heads"));
        }
        let own = [format!("{object}.rope_theta"), old.to_owned()];
        let own = own.iter().find(|key| config.value(key).is_some());
        let base = own.map_or(Ok(usual), |key| config.number(key))?;
        keys.set(to, base as f32);
    }
    keys.set("rope.dimension_count", head_dim(config)? as u32);
    Ok(())
}

/// Widths of feed-forward blocks: one, or one a layer.
fn widths(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let key = "intermediate_size";
    if config.value(key).is_none_or(|value| !value.is_array()) {
        keys.set("feed_forward_length", config.count(key)? as u32);
        return Ok(());
    }
    let n_layers = config.count("num_hidden_layers")?;
    let wanted = || config.wrong(key, format!("{n_layers} whole numbers of at least 1"));
    let numbers = config.optional_numbers(key)?.unwrap_or_default();
    let is_count = |n: &f64| n.fract() == 0.0 && (1.0..=f64::from(u32::MAX)).contains(n);
    if numbers.len() != n_layers || !numbers.iter().all(is_count) {
        return Err(wanted());
    }
    let widths = numbers.into_iter().map(|n| n as u32).collect();
    keys.set("feed_forward_length", Array::U32(widths));
    Ok(())
}

/// Layers that are sparse, of models that have more, where the config does not name them.
const USUAL_SPARSE: (usize, f64) = (10, 0.95);

/// The part of every layer's gate that is cut off, as deviations from its mean.
fn sparsity(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let key = "activation_sparsity_pattern";
    let n_layers = config.count("num_hidden_layers")?;
    let (n_sparse, part) = USUAL_SPARSE;
    let usual = |layer: usize| {
        if layer < n_sparse && n_layers > n_sparse {
            part
        } else {
            0.0
        }
    };
    let parts = match config.value(key) {
        None => (0..n_layers).map(usual).collect(),
        Some(value) if value.is_number() => vec![config.number(key)?; n_layers],
        Some(_) => config.optional_numbers(key)?.unwrap_or_default(),
    };
    if parts.len() != n_layers || !parts.iter().all(|part| (0.0..1.0).contains(part)) {
        let wanted = format!("{n_layers} numbers of at least 0 and below 1");
        return Err(config.wrong(key, wanted));
    }
    let scales = parts.into_iter().map(|part| {
        if part > 0.0 {
            normal_quantile(part) as f32
        } else {
            f32::NEG_INFINITY
        }
    });
    keys.set("activation_sparsity_scale", Array::F32(scales.collect()));
    Ok(())
}

/// The distance from the mean of a normal distribution, in deviations, above which this part of it
/// lies.
fn normal_quantile(part: f64) -> f64 {
    let (mut low, mut high) = (-40.0, 40.0);
    for _ in 0..200 {
        let middle = (low + high) / 2.0;
        if normal_part(middle) < part {
            low = middle;
        } else {
            high = middle;
        }
    }
    (low + high) / 2.0
}

/// The part of a normal distribution that is below so many deviations from its mean.
fn normal_part(deviations: f64) -> f64 {
    // The series of Abramowitz and Stegun, 26.2.11, has terms of one sign: it loses no digits.
    let x = deviations.abs();
    if x > 38.0 {
        return if deviations < 0.0 { 0.0 } else { 1.0 };
    }
    let (mut term, mut sum, mut n) = (x, x, 1.0);
    while term > sum * 1e-17 {
        n += 2.0;
        term *= x * x / n;
        sum += term;
    }
    let density = (-x * x / 2.0).exp() / std::f64::consts::TAU.sqrt();
    let above = (density * sum).min(0.5);
    if deviations < 0.0 {
        0.5 - above
    } else {
        0.5 + above
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_of_the_normal_distribution() {
        for (part, wanted) in [
            (0.5, 0.0),
            (0.9, 1.281_551_565_544_6),
            (0.95, 1.644_853_626_951_472_7),
            (0.1, -1.281_551_565_544_6),
            (0.999, 3.090_232_306_167_813),
        ] {
            let got = normal_quantile(part);
            assert!((got - wanted).abs() < 1e-12, "{part}: {got}");
        }
    }
}
