//! [`CLASSES`]: classes of models since OLMo 3 that recombine what earlier ones brought, with the
//! keys and tensors of their own.

use kv_graph::rope::YarnRamp;
use model_core::hf::{
    ATTENTION_TENSORS, ATTENTION_VECTORS, DECODER_KEYS, EMBEDDING_TENSORS, FixedValue,
    GATED_TENSORS, GRANITE_FACTORS, HfClass, HfConfig, INPUT_NORM, Key, Keys, ModelFileError,
    NORM_BEFORE_FFN, PAIRED_ATTENTION, RMS_EPS, ROPE_KEYS, RopeKind, RopeSettings, SILU,
    TensorRule, TensorStep, head_dim, in_layers, layer_types, only, rope_keys, same,
    windows_by_layer, with,
};
use model_core::windows::{FullLayer, WindowPattern};

use super::deepseek::{QUERY_GROWTH, query_growth};
use super::keys::{EXPERT_KEYS, as_u32};
use super::tensors::OLMO2_NORMS;
use super::{GRANITE, LLAMA, MISTRAL, OLMO2};

/// Three of four layers have a window.
const LAST_OF_FOUR: WindowPattern = WindowPattern {
    period: 4,
    full: FullLayer::Last,
};

pub(super) const ON: FixedValue = FixedValue::Flag(true);
pub(super) const OFF: FixedValue = FixedValue::Flag(false);

/// All classes of this file.
pub(super) const CLASSES: &[HfClass] = &[
    HfClass {
        name: "Olmo3ForCausalLM",
        keys: &[
            DECODER_KEYS,
            RMS_EPS,
            &[
                SILU,
                only("attention_bias", OFF),
                Key::With(three_of_four_windows),
                Key::With(olmo3_rope),
            ],
        ],
        defaults: &[("sliding_window", 4096), ("rope_theta", 500_000)],
        ..OLMO2
    },
    HfClass {
        name: "Exaone4ForCausalLM",
        architecture: "exaone4",
        keys: &[
            DECODER_KEYS,
            RMS_EPS,
            ROPE_KEYS,
            &[SILU, Key::With(three_of_four_windows)],
        ],
        tensors: &[
            EMBEDDING_TENSORS,
            OLMO2_NORMS,
            ATTENTION_TENSORS,
            ATTENTION_VECTORS,
            GATED_TENSORS,
        ],
        defaults: &[("sliding_window", 4096), ("num_key_value_heads", 32)],
        ..LLAMA
    },
    HfClass {
        name: "SeedOssForCausalLM",
        architecture: "seed_oss",
        keys: &[
            DECODER_KEYS,
            RMS_EPS,
            ROPE_KEYS,
            &[SILU, only("attention_bias", ON), only("mlp_bias", OFF)],
        ],
        tensors: &[
            EMBEDDING_TENSORS,
            INPUT_NORM,
            ATTENTION_TENSORS,
            ATTENTION_VECTORS,
            NORM_AFTER_ATTENTION,
            GATED_TENSORS,
        ],
        defaults: &[("head_dim", 128), ("num_key_value_heads", 8)],
        ..LLAMA
    },
    HfClass {
        name: "Glm4ForCausalLM",
        architecture: "glm4",
        keys: &[DECODER_KEYS, RMS_EPS, ROPE_KEYS, &[SILU]],
        tensors: &[
            EMBEDDING_TENSORS,
            INPUT_NORM,
            ATTENTION_TENSORS,
            ATTENTION_VECTORS,
            GLM4_TENSORS,
        ],
        defaults: &[("head_dim", 128), ("num_key_value_heads", 2)],
        rotated_part: Some(0.5),
        ..LLAMA
    },
    HfClass {
        name: "Ernie4_5ForCausalLM",
        architecture: "ernie4_5",
        keys: &[DECODER_KEYS, RMS_EPS, ROPE_KEYS, &[SILU]],
        tensors: &[
            EMBEDDING_TENSORS,
            INPUT_NORM,
            ATTENTION_TENSORS,
            ATTENTION_VECTORS,
            NORM_BEFORE_FFN,
            GATED_TENSORS,
            GATED_BIASES,
        ],
        defaults: &[
            ("head_dim", 128),
            ("num_key_value_heads", 2),
            ("rope_theta", 500_000),
        ],
        ..LLAMA
    },
    GRANITE_MOE,
    HfClass {
        name: "MinistralForCausalLM",
        keys: &[
            DECODER_KEYS,
            RMS_EPS,
            ROPE_KEYS,
            &[SILU, Key::With(ministral_windows)],
        ],
        ..MISTRAL
    },
    HfClass {
        name: "Ministral3ForCausalLM",
        architecture: "mistral3",
        keys: &[
            DECODER_KEYS,
            RMS_EPS,
            &[
                SILU,
                Key::With(model_core::hf::window_of_all),
                Key::With(ministral3_rope),
            ],
        ],
        defaults: &[("head_dim", 128), ("num_key_value_heads", 8)],
        ..LLAMA
    },
    HUNYUAN,
    HfClass {
        name: "HunYuanMoEV1ForCausalLM",
        architecture: "hunyuan-moe",
        keys: &[
            DECODER_KEYS,
            RMS_EPS,
            HUNYUAN_KEYS,
            &[
                Key::Count {
                    to: "expert_count",
                    from: "num_experts",
                },
                Key::With(hunyuan_experts),
            ],
        ],
        tensors: &[
            EMBEDDING_TENSORS,
            INPUT_NORM,
            ATTENTION_TENSORS,
            HUNYUAN_NORMS,
            NORM_BEFORE_FFN,
            HUNYUAN_EXPERTS,
        ],
        ..HUNYUAN
    },
];

/// Granite with a mixture in every layer.
pub(super) const GRANITE_MOE: HfClass = HfClass {
    name: "GraniteMoeForCausalLM",
    architecture: "granitemoe",
    keys: &[
        DECODER_KEYS,
        RMS_EPS,
        ROPE_KEYS,
        GRANITE_FACTORS,
        EXPERT_KEYS,
        &[SILU, only("attention_bias", OFF)],
    ],
    tensors: &[
        EMBEDDING_TENSORS,
        INPUT_NORM,
        PAIRED_ATTENTION,
        NORM_BEFORE_FFN,
        GRANITE_EXPERTS,
    ],
    ..GRANITE
};

const HUNYUAN: HfClass = HfClass {
    name: "HunYuanDenseV1ForCausalLM",
    architecture: "hunyuan-dense",
    keys: &[DECODER_KEYS, RMS_EPS, HUNYUAN_KEYS],
    tensors: &[
        EMBEDDING_TENSORS,
        INPUT_NORM,
        ATTENTION_TENSORS,
        HUNYUAN_NORMS,
        NORM_BEFORE_FFN,
        GATED_TENSORS,
    ],
    ..LLAMA
};

const HUNYUAN_KEYS: &[Key] = &[
    SILU,
    only("attention_bias", OFF),
    only("mlp_bias", OFF),
    only("use_cla", OFF),
    only("use_qk_norm", ON),
    Key::With(hunyuan_rope),
];

/// The norm before the feed-forward block, by the name of what it follows.
pub(super) const NORM_AFTER_ATTENTION: &[TensorRule] = &in_layers(
    "model.layers.{l}.",
    [same(
        "post_attention_norm.weight",
        "post_attention_layernorm.weight",
    )],
);

/// Norms around both blocks; gate and up in one matrix, as in GGUF.
pub(super) const GLM4_TENSORS: &[TensorRule] = &in_layers(
    "model.layers.{l}.",
    [
        same(
            "post_attention_norm.weight",
            "post_self_attn_layernorm.weight",
        ),
        same("ffn_norm.weight", "post_attention_layernorm.weight"),
        same("post_ffw_norm.weight", "post_mlp_layernorm.weight"),
        same("ffn_up.weight", "mlp.gate_up_proj.weight"),
        same("ffn_down.weight", "mlp.down_proj.weight"),
    ],
);

/// Experts in one tensor each, gate before up.
pub(super) const GRANITE_EXPERTS: &[TensorRule] = &in_layers(
    "model.layers.{l}.block_sparse_moe.",
    [
        same("ffn_gate_inp.weight", "router.layer.weight"),
        with(
            "ffn_gate_exps.weight",
            "input_linear.weight",
            &[TensorStep::RowPart { part: 0, of: 2 }],
        ),
        with(
            "ffn_up_exps.weight",
            "input_linear.weight",
            &[TensorStep::RowPart { part: 1, of: 2 }],
        ),
        same("ffn_down_exps.weight", "output_linear.weight"),
    ],
);

/// Biases of a feed-forward block with a gate.
const GATED_BIASES: &[TensorRule] = &in_layers(
    "model.layers.{l}.mlp.",
    [
        same("ffn_gate.bias", "gate_proj.bias"),
        same("ffn_up.bias", "up_proj.bias"),
        same("ffn_down.bias", "down_proj.bias"),
    ],
);

const HUNYUAN_NORMS: &[TensorRule] = &in_layers(
    "model.layers.{l}.self_attn.",
    [
        same("attn_q_norm.weight", "query_layernorm.weight"),
        same("attn_k_norm.weight", "key_layernorm.weight"),
    ],
);

const HUNYUAN_EXPERTS: &[TensorRule] = &in_layers(
    "model.layers.{l}.mlp.",
    [
        same("ffn_gate_inp.weight", "gate.wg.weight"),
        same("ffn_gate_exps.weight", "experts.{e}.gate_proj.weight"),
        same("ffn_up_exps.weight", "experts.{e}.up_proj.weight"),
        same("ffn_down_exps.weight", "experts.{e}.down_proj.weight"),
        same("ffn_gate_shexp.weight", "shared_mlp.gate_proj.weight"),
        same("ffn_up_shexp.weight", "shared_mlp.up_proj.weight"),
        same("ffn_down_shexp.weight", "shared_mlp.down_proj.weight"),
    ],
);

pub(super) fn three_of_four_windows(
    config: &HfConfig,
    keys: &mut Keys,
) -> Result<(), ModelFileError> {
    windows_by_layer(config, keys, LAST_OF_FOUR)
}

/// A window for all layers, or those that `layer_types` names, where the config names its width.
fn ministral_windows(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    match config.optional_count("sliding_window")? {
        Some(_) => windows_by_layer(config, keys, WindowPattern::EVERY),
        None => layer_types(config, &["full_attention"]).map(drop),
    }
}

/// Only layers without a window are stretched.
fn olmo3_rope(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    RopeSettings::read(config, Some("full_attention"))?.write(config, keys)?;
    let windowed = "sliding_attention";
    let base = match config.value(&format!("rope_parameters.{windowed}")) {
        None => RopeSettings::base(config, Some(windowed))?,
        Some(_) => {
            let own = RopeSettings::read(config, Some(windowed))?;
            if own.kind != RopeKind::Plain {
                let key = format!("rope_parameters.{windowed}.rope_type");
                return Err(config.wrong(&key, "default"));
            }
            own.theta
        }
    };
    keys.set("rope.freq_base_swa", base as f32);
    Ok(())
}

/// YaRN, also where the config does not say so, and a factor on queries that grows after each
/// original context.
fn ministral3_rope(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let usual = RopeSettings {
        theta: 1_000_000.0,
        partial: 1.0,
        kind: RopeKind::Yarn {
            factor: 16.0,
            original: 16_384,
            beta_fast: Some(32.0),
            beta_slow: Some(1.0),
            attention: Some(1.0),
            ramp: YarnRamp::Whole,
        },
    };
    RopeSettings::read_or(&config.without(QUERY_GROWTH), usual)?.write(config, keys)?;
    let mut objects = ["rope_parameters", "rope_scaling"].into_iter();
    if objects.all(|object| config.value(object).is_none()) {
        keys.set("attention.temperature_scale", 0.1f32);
    }
    query_growth(config, keys)
}

/// A base that `alpha` enlarges once and for all; what else stands next to it changes nothing.
fn hunyuan_rope(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let objects = ["rope_parameters", "rope_scaling"].into_iter();
    let mut kinds = objects.flat_map(|o| ["rope_type", "type"].map(|k| (o, format!("{o}.{k}"))));
    let kind = kinds.find(|(_, kind)| config.value(kind).is_some());
    let Some((object, kind)) = kind else {
        return rope_keys(config, keys);
    };
    if config.optional_text(&kind)? != Some("dynamic") {
        return rope_keys(config, keys);
    }
    let key = format!("{object}.alpha");
    let alpha = match config.number(&key)? {
        alpha if alpha.is_finite() && alpha >= 1.0 => alpha,
        _ => return Err(config.wrong(&key, "a number of at least 1")),
    };
    let dim = head_dim(config)? as f64;
    let settings = RopeSettings {
        theta: RopeSettings::base(config, None)? * alpha.powf(dim / (dim - 2.0)),
        partial: RopeSettings::rotated_part(config, None)?,
        kind: RopeKind::Plain,
    };
    settings.write(config, keys)
}

/// A count that some configs give once a layer; it has to be the same in all.
fn count_of_all(config: &HfConfig, key: &str) -> Result<u32, ModelFileError> {
    let Ok(Some(each)) = config.optional_numbers(key) else {
        return config.count(key).map(as_u32);
    };
    let n_layers = config.count("num_hidden_layers")?;
    let first = config.count(&format!("{key}.0"))?;
    if each.len() >= n_layers && each.iter().all(|&n| n == first as f64) {
        Ok(as_u32(first))
    } else {
        Err(config.wrong(key, "one number, the same for all layers"))
    }
}

fn hunyuan_experts(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let width = count_of_all(config, "moe_intermediate_size")?;
    let n_shared = count_of_all(config, "num_shared_expert")?;
    keys.set("expert_used_count", count_of_all(config, "moe_topk")?);
    keys.set("expert_feed_forward_length", width);
    keys.set("expert_shared_feed_forward_length", n_shared * width);
    keys.set("expert_shared_count", n_shared);
    Ok(())
}
