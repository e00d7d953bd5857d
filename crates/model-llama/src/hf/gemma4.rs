//! [`CLASSES`]: Gemma 4, whose last layers share keys and values, whose full layers have heads of
//! their own, and whose layers have embeddings of their own or mixtures next to dense blocks.
//!
//! Vision and audio towers are not read. Does not know graphs.

use model_core::gguf::Array;
use model_core::hf::{
    ATTENTION_TENSORS, FixedValue, GATED_TENSORS, HfClass, HfConfig, HfWeights, Key, Keys,
    ModelFileError, RMS_EPS, ROW_KEYS, RopeSettings, TRAINED_LENGTH, TensorRule, VOCAB_SIZE,
    head_dim, in_layers, layer_types, same,
};

use super::LLAMA;

/// The classes of this file.
pub(super) const CLASSES: &[HfClass] = &[
    GEMMA4,
    HfClass {
        name: "Gemma4ForConditionalGeneration",
        section: Some("text_config"),
        text: "language_model.",
        other_parts: TOWERS,
        ..GEMMA4
    },
];

/// Tensors of vision and audio towers.
pub(super) const TOWERS: &[&str] = &[
    "model.vision_tower.",
    "model.audio_tower.",
    "model.embed_vision.",
    "model.embed_audio.",
];

const GEMMA4: HfClass = HfClass {
    name: "Gemma4ForCausalLM",
    architecture: "gemma4",
    keys: &[RMS_EPS, DECODER, KEYS],
    tensors: &[
        EMBEDDINGS,
        NORMS,
        ATTENTION_TENSORS,
        GATED_TENSORS,
        INPUTS,
        EXPERTS,
    ],
    defaults: &[
        ("head_dim", 256),
        ("global_head_dim", 512),
        ("num_key_value_heads", 4),
        ("sliding_window", 512),
        ("hidden_size_per_layer_input", 256),
    ],
    derive: Some(check_values),
    ..LLAMA
};

/// The settings that assistants have, too.
pub(super) const DECODER: &[Key] = &[
    TRAINED_LENGTH,
    Key::All(ROW_KEYS),
    VOCAB_SIZE,
    Key::Only {
        from: "hidden_activation",
        is: FixedValue::Text(&["gelu_pytorch_tanh"]),
    },
    Key::Only {
        from: "attention_bias",
        is: FixedValue::Flag(false),
    },
    // Images attend in both directions with "vision"; tokens of text do not.
    Key::Only {
        from: "use_bidirectional_attention",
        is: FixedValue::Text(&["vision"]),
    },
    Key::OptionalNumber {
        to: "final_logit_softcapping",
        from: "final_logit_softcapping",
    },
    Key::With(heads),
    Key::With(windows),
    Key::With(rope),
];

const KEYS: &[Key] = &[
    Key::With(feed_forward),
    Key::With(experts),
    Key::With(per_layer_inputs),
];

pub(super) const EMBEDDINGS: &[TensorRule] = &[
    same("token_embd.weight", "model.embed_tokens.weight"),
    same("output_norm.weight", "model.norm.weight"),
    same("output.weight", "lm_head.weight"),
    same(
        "per_layer_token_embd.weight",
        "model.embed_tokens_per_layer.weight",
    ),
    same(
        "per_layer_model_proj.weight",
        "model.per_layer_model_projection.weight",
    ),
    same(
        "per_layer_proj_norm.weight",
        "model.per_layer_projection_norm.weight",
    ),
];

pub(super) const NORMS: &[TensorRule] = &in_layers(
    "model.layers.{l}.",
    [
        same("attn_norm.weight", "input_layernorm.weight"),
        same(
            "post_attention_norm.weight",
            "post_attention_layernorm.weight",
        ),
        same("ffn_norm.weight", "pre_feedforward_layernorm.weight"),
        same("post_ffw_norm.weight", "post_feedforward_layernorm.weight"),
        same("attn_q_norm.weight", "self_attn.q_norm.weight"),
        same("attn_k_norm.weight", "self_attn.k_norm.weight"),
    ],
);

/// The per-layer embeddings, and the factor on their rows.
pub(super) const INPUTS: &[TensorRule] = &in_layers(
    "model.layers.{l}.",
    [
        same("inp_gate.weight", "per_layer_input_gate.weight"),
        same("proj.weight", "per_layer_projection.weight"),
        same("post_norm.weight", "post_per_layer_input_norm.weight"),
        same("layer_output_scale.weight", "layer_scalar"),
    ],
);

const EXPERTS: &[TensorRule] = &in_layers(
    "model.layers.{l}.",
    [
        same("ffn_gate_inp.weight", "router.proj.weight"),
        same("ffn_gate_inp.scale", "router.scale"),
        same("ffn_down_exps.scale", "router.per_expert_scale"),
        same("ffn_gate_up_exps.weight", "experts.gate_up_proj"),
        same("ffn_down_exps.weight", "experts.down_proj"),
        same(
            "post_ffw_norm_1.weight",
            "post_feedforward_layernorm_1.weight",
        ),
        same(
            "pre_ffw_norm_2.weight",
            "pre_feedforward_layernorm_2.weight",
        ),
        same(
            "post_ffw_norm_2.weight",
            "post_feedforward_layernorm_2.weight",
        ),
    ],
);

/// A whole number that may be 0 or absent, which is the same.
pub(super) fn number_or_zero(config: &HfConfig, key: &str) -> Result<u32, ModelFileError> {
    match config.optional_number(key)? {
        None => Ok(0),
        Some(n) if n >= 0.0 && n.fract() == 0.0 && n <= f64::from(u32::MAX) => Ok(n as u32),
        Some(_) => Err(config.wrong(key, "a whole number")),
    }
}

fn as_u32(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// The layers that see a window: those that the config names, or five of six; never the last.
fn windowed(config: &HfConfig) -> Result<Vec<bool>, ModelFileError> {
    let n_layers = config.count("num_hidden_layers")?;
    let types = layer_types(config, &["sliding_attention", "full_attention"])?;
    let mut windowed: Vec<bool> = match types {
        Some(types) => types.iter().map(|&t| t == "sliding_attention").collect(),
        None => (0..n_layers).map(|l| !(l + 1).is_multiple_of(6)).collect(),
    };
    if let Some(last) = windowed.last_mut() {
        *last = false;
    }
    Ok(windowed)
}

/// True if full layers have keys for values.
fn keys_are_values(config: &HfConfig) -> Result<bool, ModelFileError> {
    Ok(config.optional_flag("attention_k_eq_v")? == Some(true))
}

/// Full layers have heads of another width and, where their keys are their values, of another
/// number.
fn heads(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    if config.value("per_layer_config").is_some() {
        let wanted = "absent: heads of full layers are read from 'global_head_dim' and \
                      'num_global_key_value_heads'";
        return Err(config.wrong("per_layer_config", wanted));
    }
    let n_heads = config.count("num_attention_heads")?;
    let divides = |key: &str, kv_heads: usize| {
        if n_heads.is_multiple_of(kv_heads) {
            Ok(as_u32(kv_heads))
        } else {
            let wanted = format!("a divisor of 'num_attention_heads', which is {n_heads}");
            Err(config.wrong(key, wanted))
        }
    };
    let key = "num_key_value_heads";
    let own = divides(key, config.count(key)?)?;
    let key = "num_global_key_value_heads";
    let full = match config.optional_count(key)? {
        Some(full) if keys_are_values(config)? => divides(key, full)?,
        _ => own,
    };
    keys.set("attention.head_count", as_u32(n_heads));
    if own == full {
        keys.set("attention.head_count_kv", own);
    } else {
        let of = |is_windowed: bool| if is_windowed { own } else { full };
        let heads = windowed(config)?.into_iter().map(of).collect();
        keys.set("attention.head_count_kv", Array::U32(heads));
    }
    let (full, own) = (config.count("global_head_dim")?, head_dim(config)?);
    for (kind, width) in [("", full), ("_swa", own)] {
        for name in ["key", "value"] {
            keys.set(&format!("attention.{name}_length{kind}"), as_u32(width));
        }
    }
    Ok(())
}

fn windows(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let windowed = windowed(config)?;
    keys.set("attention.sliding_window_pattern", Array::Bool(windowed));
    keys.set(
        "attention.sliding_window",
        as_u32(config.count("sliding_window")?),
    );
    Ok(())
}

/// The frequencies of full layers from some pair on are 0: divisors make them so.
fn rope(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let (full, own) = ("full_attention", "sliding_attention");
    let is_given = config.value("rope_parameters").is_some();
    let place = |kind: &str, key: &str| format!("rope_parameters.{kind}.{key}");
    if is_given {
        for kind in [full, own] {
            config.number(&place(kind, "rope_theta"))?;
        }
    }
    let settings = RopeSettings::read(config, Some(own))?;
    if settings.kind != model_core::hf::RopeKind::Plain || settings.partial != 1.0 {
        let key = place(own, "rope_type");
        return Err(config.wrong(&key, "default, of whole heads"));
    }
    let width = config.count("global_head_dim")?;
    let (theta, partial, kind) = if is_given {
        (
            RopeSettings::base(config, Some(full))?,
            RopeSettings::rotated_part(config, Some(full))?,
            config.optional_text(&place(full, "rope_type"))?,
        )
    } else {
        (1_000_000.0, 0.25, Some("proportional"))
    };
    let known = ["rope_type", "rope_theta", "partial_rotary_factor", "factor"];
    config.check_known(&format!("rope_parameters.{full}"), &known)?;
    // As transformers rounds it.
    let (n_rotated, factor) = match kind {
        None | Some("default") => (width / 2, 1.0),
        Some("proportional") => {
            let factor = config.optional_number(&place(full, "factor"))?;
            (
                (partial * width as f64 / 2.0) as usize,
                factor.unwrap_or(1.0),
            )
        }
        Some(_) => {
            return Err(config.wrong(&place(full, "rope_type"), "one of: default, proportional"));
        }
    };
    if !(factor.is_finite() && factor > 0.0) {
        return Err(config.wrong(&place(full, "factor"), "a number above 0"));
    }
    keys.set("rope.freq_base", theta as f32);
    keys.set("rope.freq_base_swa", settings.theta as f32);
    keys.set("rope.dimension_count", as_u32(width));
    keys.set("rope.dimension_count_swa", as_u32(head_dim(config)?));
    let divisor = |pair| {
        if pair < n_rotated {
            factor as f32
        } else {
            UNROTATED
        }
    };
    let divisors: Vec<f32> = (0..width / 2).map(divisor).collect();
    Ok(keys.add_vector("rope_freqs.weight", &divisors)?)
}

/// Divisor of a frequency that is to be 0, as llama.cpp's converter writes it.
const UNROTATED: f32 = 1e30;

/// Layers at the end that share keys and values, whose blocks may be twice as wide.
fn feed_forward(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let n_layers = config.count("num_hidden_layers")?;
    let n_shared = number_or_zero(config, "num_kv_shared_layers")?;
    if n_shared as usize >= n_layers {
        let wanted = format!("fewer than 'num_hidden_layers', which is {n_layers}");
        return Err(config.wrong("num_kv_shared_layers", wanted));
    }
    keys.set("attention.shared_kv_layers", n_shared);
    let hidden = as_u32(config.count("intermediate_size")?);
    let is_double = config.optional_flag("use_double_wide_mlp")? == Some(true);
    if is_double && n_shared > 0 {
        let first = n_layers - n_shared as usize;
        let of = |layer| {
            if layer < first {
                hidden
            } else {
                hidden.saturating_mul(2)
            }
        };
        let all = (0..n_layers).map(of).collect();
        keys.set("feed_forward_length", Array::U32(all));
    } else {
        keys.set("feed_forward_length", hidden);
    }
    Ok(())
}

fn experts(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    if config.optional_flag("enable_moe_block")? != Some(true) {
        return Ok(());
    }
    for (to, from) in [
        ("expert_count", "num_experts"),
        ("expert_used_count", "top_k_experts"),
        ("expert_feed_forward_length", "moe_intermediate_size"),
    ] {
        keys.set(to, as_u32(config.count(from)?));
    }
    Ok(())
}

/// The per-layer embeddings, where a model has them.
pub(super) fn per_layer_inputs(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let dim = number_or_zero(config, "hidden_size_per_layer_input")?;
    keys.set("embedding_length_per_layer_input", dim);
    Ok(())
}

/// Full layers have a matrix of values or not, as the config says: without one, keys are values.
fn check_values(config: &HfConfig, weights: &mut HfWeights) -> Result<(), ModelFileError> {
    let keys_are_values = keys_are_values(config)?;
    let windowed = windowed(config)?;
    let n_own = windowed.len() - number_or_zero(config, "num_kv_shared_layers")? as usize;
    for (layer, is_windowed) in windowed.into_iter().take(n_own).enumerate() {
        let name = format!("blk.{layer}.attn_v.weight");
        let is_there = weights.translated().any(|own| *own == name);
        let is_wanted = is_windowed || !keys_are_values;
        if is_there != is_wanted {
            let found = if is_there { "there" } else { "missing" };
            return Err(ModelFileError::Tensor {
                name: weights.name_in_files(&name).unwrap_or(name),
                reason: format!("it is {found}, but 'attention_k_eq_v' is {keys_are_values}"),
            });
        }
    }
    Ok(())
}
