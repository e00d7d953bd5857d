//! xLSTM: matrix LSTMs and feed-forward blocks.

use model_core::hf::{
    FixedValue, HfClass, HfConfig, Key, Keys, ModelFileError, TensorRule, VOCAB_SIZE, in_layers,
    same,
};

use super::as_u32;
use super::hybrid::CONTEXT;

/// The class. What the config says of kernels, chunks and their types changes rounding alone.
pub(super) const CLASS: HfClass = HfClass {
    name: "xLSTMForCausalLM",
    architecture: "xlstm",
    keys: &[KEYS],
    tensors: &[FRAME_TENSORS, LAYERS],
    body: "backbone.",
    defaults: &[
        ("hidden_size", 4096),
        ("num_hidden_layers", 32),
        ("ffn_round_up_to_multiple_of", 64),
        ("gate_soft_cap", 15),
        ("num_heads", 8),
        ("output_logit_soft_cap", 30),
    ],
    ..HfClass::EMPTY
};

const KEYS: &[Key] = &[
    Key::CountOr {
        to: "block_count",
        from: "num_blocks",
        or: "num_hidden_layers",
    },
    Key::CountOr {
        to: "embedding_length",
        from: "hidden_size",
        or: "embedding_dim",
    },
    VOCAB_SIZE,
    Key::Constant {
        to: "context_length",
        value: CONTEXT,
    },
    Key::Number {
        to: "mlstm.gate_softcapping",
        from: "gate_soft_cap",
    },
    Key::Number {
        to: "final_logit_softcapping",
        from: "output_logit_soft_cap",
    },
    Key::Only {
        from: "use_bias",
        is: FixedValue::Flag(false),
    },
    Key::Only {
        from: "add_out_norm",
        is: FixedValue::Flag(true),
    },
    Key::Only {
        from: "weight_mode",
        is: FixedValue::Text(&["single"]),
    },
    Key::With(equal_names),
    Key::With(epsilons),
    Key::With(heads),
    Key::With(feed_forward),
];

const FRAME_TENSORS: &[TensorRule] = &[
    same("token_embd.weight", "backbone.embeddings.weight"),
    same("output_norm.weight", "backbone.out_norm.weight"),
    same("output.weight", "lm_head.weight"),
];

const LAYERS: &[TensorRule] = &in_layers(
    "backbone.blocks.{l}.",
    [
        same("attn_norm.weight", "norm_mlstm.weight"),
        same("mlstm_q.weight", "mlstm_layer.q.weight"),
        same("mlstm_k.weight", "mlstm_layer.k.weight"),
        same("mlstm_v.weight", "mlstm_layer.v.weight"),
        same("mlstm_o_gate.weight", "mlstm_layer.ogate_preact.weight"),
        same("mlstm_i_gate.weight", "mlstm_layer.igate_preact.weight"),
        same("mlstm_i_gate.bias", "mlstm_layer.igate_preact.bias"),
        same("mlstm_f_gate.weight", "mlstm_layer.fgate_preact.weight"),
        same("mlstm_f_gate.bias", "mlstm_layer.fgate_preact.bias"),
        same("mlstm_norm.weight", "mlstm_layer.multihead_norm.weight"),
        same("mlstm_out.weight", "mlstm_layer.out_proj.weight"),
        same("ffn_norm.weight", "norm_ffn.weight"),
        same("ffn_gate.weight", "ffn.proj_up_gate.weight"),
        same("ffn_up.weight", "ffn.proj_up.weight"),
        same("ffn_down.weight", "ffn.proj_down.weight"),
    ],
);

/// Sizes with two names have one value.
fn equal_names(config: &HfConfig, _: &mut Keys) -> Result<(), ModelFileError> {
    for (key, other) in [
        ("num_blocks", "num_hidden_layers"),
        ("embedding_dim", "hidden_size"),
    ] {
        match (config.optional_count(key)?, config.optional_count(other)?) {
            (Some(own), Some(wanted)) if own != wanted => {
                return Err(config.wrong(key, format!("{wanted}, as '{other}' is")));
            }
            _ => {}
        }
    }
    Ok(())
}

fn epsilons(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    for (to, from) in [
        ("mlstm.epsilon", "eps"),
        ("attention.layer_norm_rms_epsilon", "norm_eps"),
    ] {
        let eps = config.optional_number(from)?.unwrap_or(1e-6);
        keys.set(to, eps as f32);
    }
    Ok(())
}

/// A part of the width, in whole heads.
fn head_len(config: &HfConfig, key: &str, usual: f64) -> Result<usize, ModelFileError> {
    let n_heads = config.count("num_heads")?;
    let factor = positive_or(config, key, usual)?;
    let width = (width(config)? as f64 * factor) as usize;
    if width > 0 && width.is_multiple_of(n_heads) {
        Ok(width / n_heads)
    } else {
        let wanted = format!("a factor that makes a multiple of {n_heads} heads ({width} is not)");
        Err(config.wrong(key, wanted))
    }
}

fn heads(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    keys.set("mlstm.head_count", as_u32(config.count("num_heads")?));
    let (k_dim, v_dim) = (
        head_len(config, "qk_dim_factor", 0.5)?,
        head_len(config, "v_dim_factor", 1.0)?,
    );
    keys.set("mlstm.key_length", as_u32(k_dim));
    keys.set("mlstm.value_length", as_u32(v_dim));
    Ok(())
}

/// Rounded up to a multiple.
fn feed_forward(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let factor = positive_or(config, "ffn_proj_factor", 2.667)?;
    let multiple = config.count("ffn_round_up_to_multiple_of")?;
    let width = width(config)? as f64 * factor + multiple as f64 - 1.0;
    let hidden = (width / multiple as f64).floor() as usize * multiple;
    if hidden == 0 {
        return Err(config.wrong("ffn_proj_factor", "a factor that makes at least 1"));
    }
    keys.set("feed_forward_length", as_u32(hidden));
    Ok(())
}

fn width(config: &HfConfig) -> Result<usize, ModelFileError> {
    match config.optional_count("hidden_size")? {
        Some(width) => Ok(width),
        None => config.count("embedding_dim"),
    }
}

fn positive_or(config: &HfConfig, key: &str, usual: f64) -> Result<f64, ModelFileError> {
    match config.optional_number(key)?.unwrap_or(usual) {
        factor if factor.is_finite() && factor > 0.0 => Ok(factor),
        _ => Err(config.wrong(key, "a number above 0")),
    }
}
