//! [`CLASSES`]: how directories of Mamba models are translated.

use model_core::hf::{
    Expected, HfClass, HfConfig, HfError, Key, Keys, Step, TensorRule, same, with,
};

/// The length that files without a trained length are given: a state has no end.
const CONTEXT: u32 = 1 << 20;

const MAMBA_TENSORS: &[TensorRule] = &[
    same("token_embd.weight", "backbone.embeddings.weight"),
    same("output_norm.weight", "backbone.norm_f.weight"),
    same("output.weight", "lm_head.weight"),
    same(
        "blk.{l}.attn_norm.weight",
        "backbone.layers.{l}.norm.weight",
    ),
    same(
        "blk.{l}.ssm_in.weight",
        "backbone.layers.{l}.mixer.in_proj.weight",
    ),
    with(
        "blk.{l}.ssm_conv1d.weight",
        "backbone.layers.{l}.mixer.conv1d.weight",
        &[Step::Squeezed],
    ),
    same(
        "blk.{l}.ssm_conv1d.bias",
        "backbone.layers.{l}.mixer.conv1d.bias",
    ),
    same(
        "blk.{l}.ssm_x.weight",
        "backbone.layers.{l}.mixer.x_proj.weight",
    ),
    same(
        "blk.{l}.ssm_dt.weight",
        "backbone.layers.{l}.mixer.dt_proj.weight",
    ),
    same(
        "blk.{l}.ssm_dt.bias",
        "backbone.layers.{l}.mixer.dt_proj.bias",
    ),
    with(
        "blk.{l}.ssm_a",
        "backbone.layers.{l}.mixer.A_log",
        &[Step::NegativeExp],
    ),
    same("blk.{l}.ssm_d", "backbone.layers.{l}.mixer.D"),
    same(
        "blk.{l}.ssm_out.weight",
        "backbone.layers.{l}.mixer.out_proj.weight",
    ),
];

const MAMBA_KEYS: &[Key] = &[
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
        is: Expected::Text(&["silu", "swish"]),
    },
    Key::Only {
        from: "use_bias",
        is: Expected::Flag(false),
    },
    Key::With(mamba1_sizes),
];

/// All classes.
pub(crate) const CLASSES: &[HfClass] = &[HfClass {
    name: "MambaForCausalLM",
    architecture: "mamba",
    keys: &[MAMBA_KEYS],
    tensors: &[MAMBA_TENSORS],
    unused: &[],
}];

/// The inner width and the rank of the time steps, which configs leave to formulas.
fn mamba1_sizes(config: &HfConfig, keys: &mut Keys) -> Result<(), HfError> {
    let dim = config.count("hidden_size")?;
    let inner = match config.optional_count("intermediate_size")? {
        Some(inner) => inner,
        None => dim * config.count("expand")?,
    };
    let automatic = config.optional_text("time_step_rank").ok().flatten() == Some("auto");
    let rank = match automatic {
        true => dim.div_ceil(16),
        false => config.count("time_step_rank")?,
    };
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    keys.set("ssm.inner_size", count(inner));
    keys.set("ssm.time_step_rank", count(rank));
    keys.set("ssm.dt_b_c_rms", false);
    Ok(())
}
