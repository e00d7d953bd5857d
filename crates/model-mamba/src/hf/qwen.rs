//! Hybrids of gated DeltaNet and attention: Qwen3-Next, Qwen 3.5 and its mixture of experts.
//!
//! GGUF has the value heads of Qwen 3.5 in another order: those that share a key head lie that many
//! key heads apart, not next to each other.

use model_core::gguf::Array;
use model_core::hf::{
    ATTENTION_TENSORS, FixedValue, GATE_AND_UP_IN_ROWS, GATED_EXPERTS, GATED_TENSORS, HfClass,
    HfConfig, Key, Keys, ModelFileError, PLUS_ONE, RMS_EPS, ROW_KEYS, SILU, TRAINED_LENGTH,
    TensorRule, TensorStep, VOCAB_SIZE, head_dim, head_keys, in_layers, layer_types, rope_keys,
    same, with,
};

use super::as_u32;
use super::qwen_rows::{GATE, HEADS_TILED, QKV, QKV_TILED, VALUE_COLUMNS_TILED, VALUES_TILED};

const OFF: FixedValue = FixedValue::Flag(false);

const COMMON_KEYS: &[Key] = &[
    SILU,
    TRAINED_LENGTH,
    Key::All(ROW_KEYS),
    VOCAB_SIZE,
    Key::Only {
        from: "is_causal",
        is: FixedValue::Flag(true),
    },
    Key::Only {
        from: "attention_bias",
        is: OFF,
    },
    Key::With(head_keys),
    Key::Count {
        to: "ssm.conv_kernel",
        from: "linear_conv_kernel_dim",
    },
    Key::Count {
        to: "ssm.state_size",
        from: "linear_key_head_dim",
    },
    Key::Count {
        to: "ssm.group_count",
        from: "linear_num_key_heads",
    },
    Key::With(value_heads),
    Key::With(recurrent_layers),
];

const FEED_FORWARD_LENGTH: Key = Key::Count {
    to: "feed_forward_length",
    from: "intermediate_size",
};

const EXPERT_KEYS: &[Key] = &[
    Key::Count {
        to: "expert_count",
        from: "num_experts",
    },
    Key::Count {
        to: "expert_used_count",
        from: "num_experts_per_tok",
    },
    Key::Count {
        to: "expert_feed_forward_length",
        from: "moe_intermediate_size",
    },
    Key::Count {
        to: "expert_shared_feed_forward_length",
        from: "shared_expert_intermediate_size",
    },
];

/// The classes.
pub(super) const CLASSES: &[HfClass] = &[
    HfClass {
        name: "Qwen3NextForCausalLM",
        architecture: "qwen3next",
        keys: &[
            COMMON_KEYS,
            RMS_EPS,
            EXPERT_KEYS,
            &[
                FEED_FORWARD_LENGTH,
                Key::With(sum_of_chosen),
                Key::With(every_layer_is_a_mixture),
                Key::With(rope_keys),
            ],
        ],
        tensors: &[
            FRAME_TENSORS,
            NORMS,
            ATTENTION_TENSORS,
            MIXTURE,
            EXPERTS,
            NEXT_MIXER,
            HEAD,
        ],
        defaults: &[
            ("head_dim", 256),
            ("num_key_value_heads", 2),
            ("full_attention_interval", 4),
        ],
        rotated_part: Some(0.25),
        ..HfClass::EMPTY
    },
    QWEN3_5,
    // With images: its vision tower is not read, what it makes comes in as rows.
    HfClass {
        name: "Qwen3_5ForConditionalGeneration",
        section: Some("text_config"),
        text: "language_model.",
        other_parts: &["visual.", "model.visual."],
        ..QWEN3_5
    },
    // MiniCPM-V 4.6, which sees pictures as rows without places.
    HfClass {
        name: "MiniCPMV4_6ForConditionalGeneration",
        section: Some("text_config"),
        text: "language_model.",
        other_parts: &["model.vision_tower.", "model.merger."],
        ..QWEN3_5
    },
    QWEN3_5_MOE,
    HfClass {
        name: "Qwen3_5MoeForConditionalGeneration",
        section: Some("text_config"),
        text: "language_model.",
        other_parts: &["visual.", "model.visual."],
        ..QWEN3_5_MOE
    },
];

const QWEN3_5_MOE: HfClass = HfClass {
    name: "Qwen3_5MoeForCausalLM",
    architecture: "qwen35moe",
    keys: &[COMMON_KEYS, RMS_EPS, EXPERT_KEYS, &[Key::With(later_rope)]],
    tensors: &[
        FRAME_TENSORS,
        NORMS,
        ATTENTION_TENSORS,
        MIXTURE,
        EXPERTS,
        PACKED_EXPERTS,
        LATER_MIXER,
        HEAD,
    ],
    ..LATER
};

const QWEN3_5: HfClass = HfClass {
    name: "Qwen3_5ForCausalLM",
    architecture: "qwen35",
    keys: &[
        COMMON_KEYS,
        RMS_EPS,
        &[FEED_FORWARD_LENGTH, Key::With(later_rope)],
    ],
    tensors: &[
        FRAME_TENSORS,
        NORMS,
        ATTENTION_TENSORS,
        GATED_TENSORS,
        LATER_MIXER,
        HEAD,
    ],
    ..LATER
};

const LATER: HfClass = HfClass {
    defaults: &[
        ("head_dim", 256),
        ("num_key_value_heads", 4),
        ("full_attention_interval", 4),
    ],
    rotated_part: Some(0.25),
    ..HfClass::EMPTY
};

const FRAME_TENSORS: &[TensorRule] = &[
    same("token_embd.weight", "model.embed_tokens.weight"),
    with("output_norm.weight", "model.norm.weight", PLUS_ONE),
    same("output.weight", "lm_head.weight"),
];

const NORMS: &[TensorRule] = &in_layers(
    "model.layers.{l}.",
    [
        with("attn_norm.weight", "input_layernorm.weight", PLUS_ONE),
        with(
            "post_attention_norm.weight",
            "post_attention_layernorm.weight",
            PLUS_ONE,
        ),
        with("attn_q_norm.weight", "self_attn.q_norm.weight", PLUS_ONE),
        with("attn_k_norm.weight", "self_attn.k_norm.weight", PLUS_ONE),
    ],
);

const MIXTURE: &[TensorRule] = &in_layers(
    "model.layers.{l}.mlp.",
    [
        same("ffn_gate_inp.weight", "gate.weight"),
        same("ffn_gate_inp_shexp.weight", "shared_expert_gate.weight"),
        same("ffn_gate_shexp.weight", "shared_expert.gate_proj.weight"),
        same("ffn_up_shexp.weight", "shared_expert.up_proj.weight"),
        same("ffn_down_shexp.weight", "shared_expert.down_proj.weight"),
    ],
);

const EXPERTS: &[TensorRule] = &in_layers("model.layers.{l}.mlp.experts.{e}.", GATED_EXPERTS);

/// The same where files have those of a layer together: gate and up are the halves of the rows of
/// one matrix for each.
const PACKED_EXPERTS: &[TensorRule] =
    &in_layers("model.layers.{l}.mlp.experts.", GATE_AND_UP_IN_ROWS);

const NEXT_MIXER: &[TensorRule] = &in_layers(
    "model.layers.{l}.linear_attn.",
    [
        with("attn_qkv.weight", "in_proj_qkvz.weight", &[QKV]),
        with("attn_gate.weight", "in_proj_qkvz.weight", &[GATE]),
        same("ssm_ba.weight", "in_proj_ba.weight"),
        with(
            "ssm_conv1d.weight",
            "conv1d.weight",
            &[TensorStep::Squeezed],
        ),
        with("ssm_a", "A_log", &[TensorStep::NegativeExp]),
        same("ssm_dt.bias", "dt_bias"),
        same("ssm_norm.weight", "norm.weight"),
        same("ssm_out.weight", "out_proj.weight"),
    ],
);

const LATER_MIXER: &[TensorRule] = &in_layers(
    "model.layers.{l}.linear_attn.",
    [
        with("attn_qkv.weight", "in_proj_qkv.weight", &[QKV_TILED]),
        with("attn_gate.weight", "in_proj_z.weight", &[VALUES_TILED]),
        with("ssm_beta.weight", "in_proj_b.weight", &[HEADS_TILED]),
        with("ssm_alpha.weight", "in_proj_a.weight", &[HEADS_TILED]),
        with(
            "ssm_conv1d.weight",
            "conv1d.weight",
            &[TensorStep::Squeezed, QKV_TILED],
        ),
        with("ssm_a", "A_log", &[TensorStep::NegativeExp, HEADS_TILED]),
        with("ssm_dt.bias", "dt_bias", &[HEADS_TILED]),
        same("ssm_norm.weight", "norm.weight"),
        with("ssm_out.weight", "out_proj.weight", VALUE_COLUMNS_TILED),
    ],
);

/// The further tensors of the layer behind the last one: `mtp.fc` and the like in files.
const HEAD: &[TensorRule] = &in_layers(
    "model.layers.{l}.",
    [
        same("nextn.eh_proj.weight", "eh_proj.weight"),
        with("nextn.enorm.weight", "enorm.weight", PLUS_ONE),
        with("nextn.hnorm.weight", "hnorm.weight", PLUS_ONE),
        with(
            "nextn.shared_head_norm.weight",
            "shared_head.norm.weight",
            PLUS_ONE,
        ),
    ],
);

/// Value heads, of which as many share each key head.
fn value_heads(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let (key_heads, key) = (
        config.count("linear_num_key_heads")?,
        "linear_num_value_heads",
    );
    let heads = config.count(key)?;
    if !heads.is_multiple_of(key_heads) {
        let wanted = format!("a multiple of 'linear_num_key_heads', which is {key_heads}");
        return Err(config.wrong(key, wanted));
    }
    let channels = heads * config.count("linear_value_head_dim")?;
    keys.set("ssm.time_step_rank", as_u32(heads));
    keys.set("ssm.inner_size", as_u32(channels));
    Ok(())
}

/// Layers of the types that the config lists, or else all recurrent but the last of each period.
fn recurrent_layers(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let period = config.count("full_attention_interval")?;
    keys.set("full_attention_interval", as_u32(period));
    if let Some(types) = layer_types(config, &["linear_attention", "full_attention"])? {
        let flags = types.iter().map(|&t| t == "linear_attention").collect();
        keys.set("attention.recurrent_layers", Array::Bool(flags));
    }
    Ok(())
}

/// The key whose default in transformers is true.
fn sum_of_chosen(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let sums = config.optional_flag("norm_topk_prob")?.unwrap_or(true);
    keys.set("expert_weights_norm", sums);
    Ok(())
}

/// Dense layers among the others are not computed.
fn every_layer_is_a_mixture(config: &HfConfig, _: &mut Keys) -> Result<(), ModelFileError> {
    let key = "decoder_sparse_step";
    if config.optional_count(key)?.is_some_and(|step| step != 1) {
        return Err(config.wrong(key, "1"));
    }
    let key = "mlp_only_layers";
    match config.optional_numbers(key)? {
        Some(layers) if !layers.is_empty() => Err(config.wrong(key, "an empty list")),
        _ => Ok(()),
    }
}

/// Sections of the rotation, by which images and videos have places.
fn later_rope(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let mut plain = config.clone();
    for object in ["rope_parameters", "rope_scaling"] {
        let key = format!("{object}.mrope_section");
        if let Some(sections) = config.optional_numbers(&key)? {
            keys.set(
                "rope.dimension_sections",
                sections_of(config, &key, &sections)?,
            );
        }
        let interleaved = format!("{object}.mrope_interleaved");
        if config.optional_flag(&interleaved)? == Some(false) {
            return Err(config.wrong(&interleaved, "true"));
        }
        plain = plain.without(&key).without(&interleaved);
    }
    rope_keys(&plain, keys)
}

/// Pairs of rotated values for time, height and width, and none for a fourth.
fn sections_of(config: &HfConfig, key: &str, sections: &[f64]) -> Result<Array, ModelFileError> {
    // More pairs than this have no place in a head.
    let dim = head_dim(config)? as f64;
    let is_count = |n: &f64| *n >= 0.0 && n.fract() == 0.0 && *n <= dim;
    if sections.len() != 3 || !sections.iter().all(is_count) {
        return Err(config.wrong(key, "a list of 3 numbers of pairs"));
    }
    let sections = sections.iter().map(|&n| n as i32).chain([0]);
    Ok(Array::I32(sections.collect()))
}
