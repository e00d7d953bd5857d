//! [`CLASSES`]: MiMo-V2 Flash, whose keys are wider than values, and whose layers with a window
//! have twice as many of both.

use model_core::gguf::Array;
use model_core::hf::{
    ATTENTION_TENSORS, EMBEDDING_TENSORS, GATED_TENSORS, HfClass, HfConfig, INPUT_NORM, Key, Keys,
    ModelFileError, NORM_BEFORE_FFN, RMS_EPS, ROW_KEYS, RopeKind, RopeSettings, SILU,
    TRAINED_LENGTH, TensorRule, VOCAB_SIZE, in_layers, layer_types, only, same,
};

use super::LLAMA;
use super::deepseek::sum_of_weights;
use super::keys::as_u32;
use super::recent::OFF;
use super::routed::{EXPERT_WIDTH, SHARED_EXPERTS, SIGMOID_ROUTES};
use super::tensors::{QWEN3_MOE_EXPERTS, QWEN3_MOE_ROUTER};

/// The class of this file.
pub(super) const CLASSES: &[HfClass] = &[HfClass {
    name: "MiMoV2FlashForCausalLM",
    architecture: "mimo2",
    keys: &[
        ROW_KEYS,
        RMS_EPS,
        EXPERT_WIDTH,
        SIGMOID_ROUTES,
        &[
            Key::OptionalNumber {
                to: "expert_weights_scale",
                from: "routed_scaling_factor",
            },
            VOCAB_SIZE,
            TRAINED_LENGTH,
            Key::Count {
                to: "feed_forward_length",
                from: "intermediate_size",
            },
            SILU,
            only("attention_bias", OFF),
            Key::With(sum_of_weights),
            Key::With(mimo_attention),
        ],
    ],
    tensors: &[
        EMBEDDING_TENSORS,
        INPUT_NORM,
        ATTENTION_TENSORS,
        MIMO_SINKS,
        NORM_BEFORE_FFN,
        GATED_TENSORS,
        QWEN3_MOE_ROUTER,
        QWEN3_MOE_EXPERTS,
        SHARED_EXPERTS,
    ],
    other_parts: &["model.mtp."],
    defaults: &[
        ("first_k_dense_replace", 1),
        ("head_dim", 192),
        ("v_head_dim", 128),
        ("num_key_value_heads", 4),
        ("sliding_window", 129),
    ],
    ..LLAMA
}];

const MIMO_SINKS: &[TensorRule] = &in_layers(
    "model.layers.{l}.self_attn.",
    [same("attn_sinks.weight", "attention_sink_bias")],
);

/// The rotations of layers with a window and of the others: those of the class where the config has
/// no object of them.
fn mimo_rotations(config: &HfConfig) -> Result<[RopeSettings; 2], ModelFileError> {
    if config.value("rope_parameters").is_some() {
        let read = |kind| RopeSettings::read(config, Some(kind));
        return Ok([read("sliding_attention")?, read("full_attention")?]);
    }
    let number = |key: &str, usual: f64| -> Result<f64, ModelFileError> {
        Ok(config.optional_number(key)?.unwrap_or(usual))
    };
    let partial = number("partial_rotary_factor", 0.334)?;
    let rotation = |theta| RopeSettings {
        theta,
        partial,
        kind: RopeKind::Plain,
    };
    let windowed = rotation(number("swa_rope_theta", 10_000.0)?);
    Ok([windowed, rotation(number("rope_theta", 5_000_000.0)?)])
}

/// Keys that are wider than values, twice as many key/value heads in layers with a window, a base
/// for each kind of layer, and a factor on values.
fn mimo_attention(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let kinds = ["sliding_attention", "full_attention"];
    let n_layers = config.count("num_hidden_layers")?;
    let windowed: Vec<bool> = match layer_types(config, &kinds)? {
        Some(types) => types.iter().map(|&t| t == kinds[0]).collect(),
        // Published files have 1 for layers with a window.
        None => match config.optional_numbers("hybrid_layer_pattern")? {
            Some(flags) if flags.len() == n_layers => flags.iter().map(|&f| f != 0.0).collect(),
            Some(_) => {
                let wanted = format!("a list of {n_layers} ('num_hidden_layers')");
                return Err(config.wrong("hybrid_layer_pattern", wanted));
            }
            None => (0..n_layers)
                .map(|at| at != 0 && (at + 1) % 6 != 0)
                .collect(),
        },
    };
    let heads = config.count("num_attention_heads")?;
    let kv_heads = config.count("num_key_value_heads")?;
    if !heads.is_multiple_of(2 * kv_heads) {
        let wanted = format!("a divisor of half of 'num_attention_heads', which is {heads}");
        return Err(config.wrong("num_key_value_heads", wanted));
    }
    let of_layer = |&windowed: &bool| if windowed { 2 * kv_heads } else { kv_heads };
    let each = windowed.iter().map(of_layer).map(as_u32).collect();
    keys.set("attention.head_count", as_u32(heads));
    keys.set("attention.head_count_kv", Array::U32(each));
    let width = |key: &str| config.count(key).map(as_u32);
    keys.set("attention.key_length", width("head_dim")?);
    keys.set("attention.value_length", width("v_head_dim")?);
    // The tokens before a row, without itself, where the config has this key.
    let others = config.optional_count("sliding_window_size")?;
    let window = others.map_or_else(|| config.count("sliding_window"), |n| Ok(n + 1))?;
    keys.set("attention.sliding_window", as_u32(window));
    keys.set("attention.sliding_window_pattern", Array::Bool(windowed));
    let [windowed, full] = mimo_rotations(config)?;
    if windowed.kind != full.kind || windowed.partial != full.partial {
        let wanted = "the same for all layers but for 'rope_theta'";
        return Err(config.wrong("rope_parameters", wanted));
    }
    full.write(config, keys)?;
    keys.set("rope.freq_base_swa", windowed.theta as f32);
    let key = "attention_value_scale";
    match config.number(key)? {
        scale if scale > 0.0 && scale.is_finite() => {
            keys.set("attention.value_scale", scale as f32);
            Ok(())
        }
        _ => Err(config.wrong(key, "a number above 0")),
    }
}
