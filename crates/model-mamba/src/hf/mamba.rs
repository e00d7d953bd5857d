//! Models whose layers are Mamba mixers and nothing else.

use model_core::hf::{
    FixedValue, HfClass, HfConfig, Key, Keys, ModelFileError, TensorRule, TensorStep, in_layers,
    same, with,
};

use super::mixer_tensors::{CONV, MAMBA1, MAMBA2, PROJECTIONS};
use super::{as_u32, free_time_steps};

/// The length that files without a trained length are given: a state has no end.
const CONTEXT: u32 = 1 << 20;

/// The tensors around the layers, and their norm.
const FRAME_TENSORS: &[TensorRule] = &[
    same("token_embd.weight", "backbone.embeddings.weight"),
    same("output_norm.weight", "backbone.norm_f.weight"),
    same("output.weight", "lm_head.weight"),
    same(
        "blk.{l}.attn_norm.weight",
        "backbone.layers.{l}.norm.weight",
    ),
];

const PROJECTION_TENSORS: &[TensorRule] = &in_layers("backbone.layers.{l}.mixer.", PROJECTIONS);
const CONV_TENSORS: &[TensorRule] = &in_layers("backbone.layers.{l}.mixer.", CONV);
const MAMBA1_TENSORS: &[TensorRule] = &in_layers("backbone.layers.{l}.mixer.", MAMBA1);
const MAMBA2_TENSORS: &[TensorRule] = &in_layers("backbone.layers.{l}.mixer.", MAMBA2);

const MAMBA2_NORM: &[TensorRule] = &in_layers(
    "backbone.layers.{l}.mixer.",
    [with(
        "ssm_norm.weight",
        "norm.weight",
        &[TensorStep::Rows("n_groups")],
    )],
);

const FIRST: HfClass = HfClass {
    name: "MambaForCausalLM",
    architecture: "mamba",
    keys: &[COMMON_KEYS, &[Key::With(mamba1_sizes)]],
    tensors: &[
        FRAME_TENSORS,
        PROJECTION_TENSORS,
        CONV_TENSORS,
        MAMBA1_TENSORS,
    ],
    ..HfClass::EMPTY
};

const COMMON_KEYS: &[Key] = &[
    Key::Constant {
        to: "context_length",
        value: CONTEXT,
    },
    Key::Count {
        to: "embedding_length",
        from: "hidden_size",
    },
    Key::Constant {
        to: "feed_forward_length",
        value: 0,
    },
    Key::Constant {
        to: "attention.head_count",
        value: 0,
    },
    Key::Count {
        to: "block_count",
        from: "num_hidden_layers",
    },
    Key::Count {
        to: "ssm.conv_kernel",
        from: "conv_kernel",
    },
    Key::Count {
        to: "ssm.state_size",
        from: "state_size",
    },
    Key::Number {
        to: "attention.layer_norm_rms_epsilon",
        from: "layer_norm_epsilon",
    },
    Key::Only {
        from: "hidden_act",
        is: FixedValue::Text(&["silu", "swish"]),
    },
    Key::Only {
        from: "use_bias",
        is: FixedValue::Flag(false),
    },
];

/// The classes.
pub(super) const CLASSES: &[HfClass] = &[
    FIRST,
    HfClass {
        name: "FalconMambaForCausalLM",
        keys: &[
            COMMON_KEYS,
            &[Key::With(mamba1_sizes), Key::With(falcon_norms)],
        ],
        ..FIRST
    },
    HfClass {
        name: "Mamba2ForCausalLM",
        architecture: "mamba2",
        keys: &[
            COMMON_KEYS,
            &[
                Key::Count {
                    to: "ssm.group_count",
                    from: "n_groups",
                },
                Key::Count {
                    to: "ssm.time_step_rank",
                    from: "num_heads",
                },
                Key::With(mamba2_sizes),
                Key::With(free_time_steps),
            ],
        ],
        tensors: &[
            FRAME_TENSORS,
            PROJECTION_TENSORS,
            CONV_TENSORS,
            MAMBA2_TENSORS,
            MAMBA2_NORM,
        ],
        ..FIRST
    },
];

/// The inner width and the rank of the time steps, which configs leave to formulas.
fn mamba1_sizes(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let dim = config.count("hidden_size")?;
    let inner = match config.optional_count("intermediate_size")? {
        Some(inner) => inner,
        None => dim * config.count("expand")?,
    };
    let automatic = config.optional_text("time_step_rank").ok().flatten() == Some("auto");
    let rank = if automatic {
        dim.div_ceil(16)
    } else {
        config.count("time_step_rank")?
    };
    keys.set("ssm.inner_size", as_u32(inner));
    keys.set("ssm.time_step_rank", as_u32(rank));
    keys.set("ssm.dt_b_c_rms", false);
    Ok(())
}

/// Falcon Mamba norms time steps, B and C, with an `eps` of its own, which transformers knows.
fn falcon_norms(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    keys.set("ssm.dt_b_c_rms", true);
    let eps = config.optional_number("mixer_rms_eps")?.unwrap_or(1e-6);
    keys.set("ssm.dt_b_c_rms_epsilon", eps as f32);
    Ok(())
}

/// The inner width, which must be what the heads make up.
fn mamba2_sizes(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let inner = config.count("hidden_size")? * config.count("expand")?;
    let (heads, of_head) = (config.count("num_heads")?, config.count("head_dim")?);
    if heads * of_head != inner {
        let wanted = format!("{inner} / {of_head}: 'hidden_size' times 'expand' by 'head_dim'");
        return Err(config.wrong("num_heads", wanted));
    }
    keys.set("ssm.inner_size", as_u32(inner));
    Ok(())
}
