//! RecurrentGemma: gated linear recurrences, and now and then local attention.

use model_core::hf::{
    FixedValue, HfClass, HfConfig, Key, Keys, ModelFileError, PLUS_ONE, RMS_EPS, ROW_KEYS,
    RopeKind, RopeSettings, TRAINED_LENGTH, TensorRule, TensorStep, VOCAB_SIZE, in_layers, same,
    with,
};

use super::as_u32;
use super::hybrid::kv_heads;

/// The class.
pub(super) const CLASS: HfClass = HfClass {
    name: "RecurrentGemmaForCausalLM",
    architecture: "recurrentgemma",
    keys: &[KEYS, RMS_EPS, &[Key::All(ROW_KEYS)]],
    tensors: &[FRAME_TENSORS, NORMS, RECURRENCE, ATTENTION, FEED_FORWARD],
    defaults: &[
        ("attention_window_size", 2048),
        ("conv1d_width", 4),
        ("logits_soft_cap", 30),
    ],
    ..HfClass::EMPTY
};

const KEYS: &[Key] = &[
    TRAINED_LENGTH,
    VOCAB_SIZE,
    Key::Count {
        to: "attention.head_count",
        from: "num_attention_heads",
    },
    Key::Count {
        to: "attention.sliding_window",
        from: "attention_window_size",
    },
    Key::Count {
        to: "ssm.conv_kernel",
        from: "conv1d_width",
    },
    Key::Count {
        to: "rg_lru.head_count",
        from: "num_attention_heads",
    },
    Key::CountOr {
        to: "rg_lru.width",
        from: "lru_width",
        or: "hidden_size",
    },
    Key::Number {
        to: "final_logit_softcapping",
        from: "logits_soft_cap",
    },
    Key::Only {
        from: "hidden_activation",
        is: FixedValue::Text(&["gelu_pytorch_tanh"]),
    },
    Key::Only {
        from: "embeddings_scale_by_sqrt_dim",
        is: FixedValue::Flag(true),
    },
    Key::With(layer_kinds),
    Key::With(feed_forward),
    Key::With(heads),
];

const FRAME_TENSORS: &[TensorRule] = &[
    same("token_embd.weight", "model.embed_tokens.weight"),
    with("output_norm.weight", "model.final_norm.weight", PLUS_ONE),
    same("output.weight", "lm_head.weight"),
];

const NORMS: &[TensorRule] = &in_layers(
    "model.layers.{l}.",
    [
        with("attn_norm.weight", "temporal_pre_norm.weight", PLUS_ONE),
        with("ffn_norm.weight", "channel_pre_norm.weight", PLUS_ONE),
    ],
);

/// Matrices of gates have inputs as rows.
const GATE: &[TensorStep] = &[TensorStep::Transposed];

/// Biases of gates lie head by head.
const FLAT: &[TensorStep] = &[TensorStep::Flat];

const RECURRENCE: &[TensorRule] = &in_layers(
    "model.layers.{l}.temporal_block.",
    [
        same("lru_x.weight", "linear_x.weight"),
        same("lru_x.bias", "linear_x.bias"),
        same("lru_y.weight", "linear_y.weight"),
        same("lru_y.bias", "linear_y.bias"),
        same("lru_out.weight", "linear_out.weight"),
        same("lru_out.bias", "linear_out.bias"),
        with(
            "lru_conv1d.weight",
            "conv_1d.weight",
            &[TensorStep::Squeezed],
        ),
        same("lru_conv1d.bias", "conv_1d.bias"),
        with("lru_input_gate.weight", "rg_lru.input_gate_weight", GATE),
        with("lru_input_gate.bias", "rg_lru.input_gate_bias", FLAT),
        with(
            "lru_decay_gate.weight",
            "rg_lru.recurrent_gate_weight",
            GATE,
        ),
        with("lru_decay_gate.bias", "rg_lru.recurrent_gate_bias", FLAT),
        with(
            "lru_a",
            "rg_lru.recurrent_param",
            &[TensorStep::NegativeSoftplus],
        ),
    ],
);

const ATTENTION: &[TensorRule] = &in_layers(
    "model.layers.{l}.temporal_block.",
    [
        same("attn_q.weight", "q_proj.weight"),
        same("attn_k.weight", "k_proj.weight"),
        same("attn_v.weight", "v_proj.weight"),
        same("attn_output.weight", "o_proj.weight"),
        same("attn_q.bias", "q_proj.bias"),
        same("attn_k.bias", "k_proj.bias"),
        same("attn_v.bias", "v_proj.bias"),
        same("attn_output.bias", "o_proj.bias"),
    ],
);

const FEED_FORWARD: &[TensorRule] = &in_layers(
    "model.layers.{l}.mlp_block.",
    [
        same("ffn_gate.weight", "gate_proj.weight"),
        same("ffn_gate.bias", "gate_proj.bias"),
        same("ffn_up.weight", "up_proj.weight"),
        same("ffn_up.bias", "up_proj.bias"),
        same("ffn_down.weight", "down_proj.weight"),
        same("ffn_down.bias", "down_proj.bias"),
    ],
);

/// The layers of a period that attend: the last of three where the config does not say.
fn layer_kinds(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let key = "block_types";
    let types = config.optional_texts(key)?;
    let types = types.unwrap_or_else(|| vec!["recurrent", "recurrent", "attention"]);
    let known = ["recurrent", "attention"];
    if types.is_empty() {
        return Err(config.wrong(key, "a list of at least one type"));
    }
    if let Some(at) = types.iter().position(|kind| !known.contains(kind)) {
        let wanted = format!("one of: {}", known.join(", "));
        return Err(config.wrong(&format!("{key}.{at}"), wanted));
    }
    kv_heads(config, keys, |layer| {
        types[layer % types.len()] == "attention"
    })
}

/// The config counts the rows of gate and up together.
fn feed_forward(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let key = "intermediate_size";
    let both = config.count(key)?;
    if both < 2 {
        return Err(config.wrong(key, "at least 2"));
    }
    keys.set("feed_forward_length", as_u32(both / 2));
    Ok(())
}

/// Heads divide the width, whatever size the config names, and half of a head rotates where it does
/// not say how much.
fn heads(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let (dim, n_heads) = (
        config.count("hidden_size")?,
        config.count("num_attention_heads")?,
    );
    if !dim.is_multiple_of(n_heads) {
        let wanted = format!("a divisor of 'hidden_size', which is {dim}");
        return Err(config.wrong("num_attention_heads", wanted));
    }
    if config
        .optional_count("head_dim")?
        .is_some_and(|own| own != dim / n_heads)
    {
        let wanted = format!("{}, which is a head's part of 'hidden_size'", dim / n_heads);
        return Err(config.wrong("head_dim", wanted));
    }
    let settings = RopeSettings::read(config, None)?;
    if settings.kind != RopeKind::Plain {
        let places = ["rope_parameters.rope_type", "rope_scaling.rope_type"];
        let place = places.into_iter().find(|at| config.value(at).is_some());
        return Err(config.wrong(place.unwrap_or("rope_scaling.type"), "default"));
    }
    let key = "partial_rotary_factor";
    let mut places = ["", "rope_parameters.", "rope_scaling."].into_iter();
    let is_given = places.any(|at| config.value(&format!("{at}{key}")).is_some());
    let partial = if is_given { settings.partial } else { 0.5 };
    RopeSettings {
        partial,
        ..settings
    }
    .write(config, keys)
}
