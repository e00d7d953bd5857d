//! Zamba2: Mamba-2 in every layer, and before some of them a block of attention that layers share.

use model_core::hf::{
    FixedValue, HfClass, HfConfig, INPUT_NORM, Key, Keys, ModelFileError, RMS_EPS, ROW_KEYS,
    RopeSettings, TRAINED_LENGTH, TensorRule, TensorStep, VOCAB_SIZE, in_layers, same, with,
};

use super::hybrid::kv_heads;
use super::hybrid_tensors::{CONV_TENSORS, FRAME_TENSORS, PROJECTION_TENSORS};
use super::mixer_tensors::{CONV, PROJECTIONS};
use super::{as_u32, free_time_steps};

/// The class.
pub(super) const CLASS: HfClass = HfClass {
    name: "Zamba2ForCausalLM",
    architecture: "zamba2",
    keys: &[KEYS, RMS_EPS],
    tensors: &[
        FRAME_TENSORS,
        INPUT_NORM,
        PROJECTION_TENSORS,
        CONV_TENSORS,
        MIXERS,
        HYBRID_NORM,
        HYBRID_PROJECTIONS,
        HYBRID_CONV,
        HYBRID_MIXERS,
        SHARED,
        ADAPTERS,
    ],
    defaults: &[
        ("adapter_rank", 128),
        ("mamba_d_conv", 4),
        ("mamba_d_state", 64),
        ("mamba_expand", 2),
        ("mamba_ngroups", 1),
        ("n_mamba_heads", 8),
        ("num_mem_blocks", 1),
    ],
    ..HfClass::EMPTY
};

const KEYS: &[Key] = &[
    Key::All(ROW_KEYS),
    TRAINED_LENGTH,
    VOCAB_SIZE,
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
    Key::Count {
        to: "ssm.group_count",
        from: "mamba_ngroups",
    },
    Key::Count {
        to: "ssm.time_step_rank",
        from: "n_mamba_heads",
    },
    Key::Count {
        to: "shared_block.count",
        from: "num_mem_blocks",
    },
    Key::Count {
        to: "shared_block.lora_rank",
        from: "adapter_rank",
    },
    Key::Only {
        from: "hidden_act",
        is: FixedValue::Text(&["gelu"]),
    },
    Key::Only {
        from: "add_bias_linear",
        is: FixedValue::Flag(false),
    },
    Key::Only {
        from: "use_long_context",
        is: FixedValue::Flag(false),
    },
    Key::With(free_time_steps),
    Key::With(layer_kinds),
    Key::With(widths),
    Key::With(heads),
    Key::With(time_steps),
];

/// Of the mixer, without its projections and its convolution. A bias of time steps is kept as its
/// distance from that of the shortest one.
const MIXER: [TensorRule; 4] = [
    with(
        "ssm_dt_floor.weight",
        "dt_bias",
        &[TensorStep::LeadingOne, TensorStep::Plus(above_shortest)],
    ),
    with(
        "ssm_a",
        "A_log",
        &[TensorStep::NegativeExp, TensorStep::Column],
    ),
    with("ssm_d", "D", &[TensorStep::Column]),
    with(
        "ssm_norm.weight",
        "norm.weight",
        &[TensorStep::Rows("mamba_ngroups")],
    ),
];

const MIXERS: &[TensorRule] = &in_layers("model.layers.{l}.mamba.", MIXER);

const HYBRID_NORM: &[TensorRule] = &in_layers(
    "model.layers.{l}.mamba_decoder.",
    [same("attn_norm.weight", "input_layernorm.weight")],
);

const HYBRID_PROJECTIONS: &[TensorRule] =
    &in_layers("model.layers.{l}.mamba_decoder.mamba.", PROJECTIONS);

const HYBRID_CONV: &[TensorRule] = &in_layers("model.layers.{l}.mamba_decoder.mamba.", CONV);

const HYBRID_MIXERS: &[TensorRule] = &in_layers("model.layers.{l}.mamba_decoder.mamba.", MIXER);

/// The first layers that have a block have its matrices.
const SHARED: &[TensorRule] = &in_layers(
    "model.layers.{l}.",
    [
        same("shared_out.weight", "linear.weight"),
        same(
            "shared_norm.weight",
            "shared_transformer.input_layernorm.weight",
        ),
        same(
            "ffn_norm.weight",
            "shared_transformer.pre_ff_layernorm.weight",
        ),
        same(
            "ffn_up.weight",
            "shared_transformer.feed_forward.gate_up_proj.weight",
        ),
        same(
            "ffn_down.weight",
            "shared_transformer.feed_forward.down_proj.weight",
        ),
        same(
            "attn_q.weight",
            "shared_transformer.self_attn.q_proj.weight",
        ),
        same(
            "attn_k.weight",
            "shared_transformer.self_attn.k_proj.weight",
        ),
        same(
            "attn_v.weight",
            "shared_transformer.self_attn.v_proj.weight",
        ),
        same(
            "attn_output.weight",
            "shared_transformer.self_attn.o_proj.weight",
        ),
    ],
);

/// Numbered by the layers that have a block.
const ADAPTERS: &[TensorRule] = &in_layers(
    "model.layers.{l}.shared_transformer.",
    [
        same(
            "ffn_up_lora_a.{e}.weight",
            "feed_forward.gate_up_proj_adapter_list.{e}.0.weight",
        ),
        same(
            "ffn_up_lora_b.{e}.weight",
            "feed_forward.gate_up_proj_adapter_list.{e}.1.weight",
        ),
        same(
            "attn_q_lora_a.{e}.weight",
            "self_attn.linear_q_adapter_list.{e}.0.weight",
        ),
        same(
            "attn_q_lora_b.{e}.weight",
            "self_attn.linear_q_adapter_list.{e}.1.weight",
        ),
        same(
            "attn_k_lora_a.{e}.weight",
            "self_attn.linear_k_adapter_list.{e}.0.weight",
        ),
        same(
            "attn_k_lora_b.{e}.weight",
            "self_attn.linear_k_adapter_list.{e}.1.weight",
        ),
        same(
            "attn_v_lora_a.{e}.weight",
            "self_attn.linear_v_adapter_list.{e}.0.weight",
        ),
        same(
            "attn_v_lora_b.{e}.weight",
            "self_attn.linear_v_adapter_list.{e}.1.weight",
        ),
    ],
);

/// The layers that have a block; the older name of the others is `mamba`.
fn layer_kinds(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let key = "layers_block_type";
    let n_layers = config.count("num_hidden_layers")?;
    let wanted = format!("a list of {n_layers} ('num_hidden_layers')");
    let types = config.optional_texts(key)?;
    let types = types.ok_or_else(|| config.missing(key, wanted.clone()))?;
    if types.len() != n_layers {
        return Err(config.wrong(key, wanted));
    }
    let known = ["linear_attention", "mamba", "hybrid"];
    if let Some(at) = types.iter().position(|kind| !known.contains(kind)) {
        let wanted = format!("one of: {}", known.join(", "));
        return Err(config.wrong(&format!("{key}.{at}"), wanted));
    }
    kv_heads(config, keys, |layer| types.get(layer) == Some(&"hybrid"))
}

fn widths(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let dim = config.count("hidden_size")?;
    let inner = dim * config.count("mamba_expand")?;
    keys.set("ssm.inner_size", as_u32(inner));
    let hidden = config.optional_count("intermediate_size")?;
    keys.set("feed_forward_length", as_u32(hidden.unwrap_or(4 * dim)));
    let adapts = config.optional_flag("use_shared_attention_adapter")?;
    keys.set("shared_block.attention_lora", adapts.unwrap_or(false));
    Ok(())
}

/// Heads divide twice the width, whatever size the config names; all of a head rotates, or nothing.
fn heads(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let key = "num_attention_heads";
    let (width, n_heads) = (2 * config.count("hidden_size")?, config.count(key)?);
    if !width.is_multiple_of(n_heads) {
        let wanted = format!("a divisor of {width}, which is twice 'hidden_size'");
        return Err(config.wrong(key, wanted));
    }
    let dim = width / n_heads;
    let own = config.optional_count("attention_head_dim")?;
    if own.is_some_and(|own| own != dim) {
        let wanted = format!("{dim}, which is a head's part of twice 'hidden_size'");
        return Err(config.wrong("attention_head_dim", wanted));
    }
    keys.set("attention.key_length", as_u32(dim));
    keys.set("attention.value_length", as_u32(dim));
    let rotates = config.optional_flag("use_mem_rope")?.unwrap_or(false);
    keys.set("rope.scaling.finetuned", rotates);
    if rotates {
        RopeSettings::read(config, None)?.write_rotating(dim, config, keys)
    } else {
        Ok(())
    }
}

/// A time step is the softplus of a number, and at least this one's. transformers forgets that for
/// single tokens, where all before them are in its cache; here it holds however tokens come in.
fn shortest(config: &HfConfig) -> Result<f32, ModelFileError> {
    let key = "time_step_min";
    match config.optional_number(key)?.unwrap_or(0.001) {
        least if least.is_finite() && least > 0.0 => Ok(least.exp_m1().ln() as f32),
        _ => Err(config.wrong(key, "a number above 0")),
    }
}

fn above_shortest(config: &HfConfig) -> Result<f32, ModelFileError> {
    shortest(config).map(|shortest| -shortest)
}

/// The bias that is left of time steps: that of the shortest one.
fn time_steps(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let bias = vec![shortest(config)?; config.count("n_mamba_heads")?];
    for layer in 0..config.count("num_hidden_layers")? {
        keys.add_vector(&format!("blk.{layer}.ssm_dt.bias"), &bias)?;
    }
    Ok(())
}
