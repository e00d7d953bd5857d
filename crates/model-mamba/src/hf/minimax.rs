//! MiniMax-Text-01: lightning attention, and now and then attention.

use model_core::hf::{
    EMBEDDING_TENSORS, FixedValue, HfClass, HfConfig, INPUT_NORM, Key, Keys, ModelFileError,
    NORM_BEFORE_FFN, RMS_EPS, ROW_KEYS, RopeSettings, SILU, TRAINED_LENGTH, TensorRule, TensorStep,
    VOCAB_SIZE, head_dim, in_layers, layer_types, same, with,
};

use super::as_u32;
use super::hybrid::kv_heads;

/// The class. Blocks of tokens are how transformers computes, and change rounding alone.
pub(super) const CLASS: HfClass = HfClass {
    name: "MiniMaxForCausalLM",
    architecture: "minimax",
    keys: &[KEYS, RMS_EPS],
    tensors: &[
        EMBEDDING_TENSORS,
        INPUT_NORM,
        NORM_BEFORE_FFN,
        LIGHTNING,
        ATTENTION,
        EXPERTS,
    ],
    defaults: &[("rope_theta", 1_000_000)],
    // Computed by transformers out of the config, and by us.
    unused: &[
        "model.layers.{l}.self_attn.slope_rate",
        "model.layers.{l}.self_attn.query_decay",
        "model.layers.{l}.self_attn.key_decay",
        "model.layers.{l}.self_attn.diagonal_decay",
    ],
    ..HfClass::EMPTY
};

const KEYS: &[Key] = &[
    Key::All(ROW_KEYS),
    TRAINED_LENGTH,
    VOCAB_SIZE,
    SILU,
    Key::Count {
        to: "attention.head_count",
        from: "num_attention_heads",
    },
    Key::Count {
        to: "expert_count",
        from: "num_local_experts",
    },
    Key::Count {
        to: "expert_used_count",
        from: "num_experts_per_tok",
    },
    Key::Count {
        to: "expert_feed_forward_length",
        from: "intermediate_size",
    },
    Key::Only {
        from: "attention_bias",
        is: FixedValue::Flag(false),
    },
    Key::With(layer_kinds),
    Key::With(heads),
    Key::With(factors),
    Key::With(decays),
];

const LIGHTNING: &[TensorRule] = &in_layers(
    "model.layers.{l}.self_attn.",
    [
        with(
            "attn_qkv.weight",
            "qkv_proj.weight",
            &[TensorStep::PartsTogether {
                groups: n_heads,
                of: 3,
            }],
        ),
        same("attn_gate.weight", "output_gate.weight"),
        same("ssm_norm.weight", "norm.weight"),
        same("attn_output.weight", "out_proj.weight"),
    ],
);

const ATTENTION: &[TensorRule] = &in_layers(
    "model.layers.{l}.self_attn.",
    [
        same("attn_q.weight", "q_proj.weight"),
        same("attn_k.weight", "k_proj.weight"),
        same("attn_v.weight", "v_proj.weight"),
        same("attn_output.weight", "o_proj.weight"),
    ],
);

const EXPERTS: &[TensorRule] = &in_layers(
    "model.layers.{l}.block_sparse_moe.",
    [
        same("ffn_gate_inp.weight", "gate.weight"),
        same("ffn_gate_exps.weight", "experts.{e}.w1.weight"),
        same("ffn_down_exps.weight", "experts.{e}.w2.weight"),
        same("ffn_up_exps.weight", "experts.{e}.w3.weight"),
    ],
);

fn n_heads(config: &HfConfig) -> Result<usize, ModelFileError> {
    config.count("num_attention_heads")
}

/// The types of all layers; without a list every second one has lightning attention.
fn is_lightning(config: &HfConfig) -> Result<Vec<bool>, ModelFileError> {
    let n_layers = config.count("num_hidden_layers")?;
    let types = layer_types(config, &["linear_attention", "full_attention"])?;
    Ok(match types {
        Some(types) => types.iter().map(|&t| t == "linear_attention").collect(),
        None => (0..n_layers).map(|layer| layer % 2 == 1).collect(),
    })
}

fn layer_kinds(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let lightning = is_lightning(config)?;
    kv_heads(config, keys, |layer| lightning.get(layer) == Some(&false))
}

/// Whole heads rotate, whatever part the config names: transformers reads none.
fn heads(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    if config.optional_count("sliding_window")?.is_some() {
        return Err(config.wrong("sliding_window", "null"));
    }
    let dim = head_dim(config)?;
    keys.set("attention.key_length", as_u32(dim));
    keys.set("attention.value_length", as_u32(dim));
    let settings = RopeSettings::read(config, None)?;
    settings.write_rotating(dim, config, keys)
}

fn factors(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    for (to, from) in [
        ("lightning", "linear_attn"),
        ("attention", "full_attn"),
        ("feed_forward", "mlp"),
    ] {
        for part in ["alpha", "beta"] {
            let factor = config.optional_number(&format!("{from}_{part}_factor"))?;
            let factor = factor.unwrap_or(1.0) as f32;
            keys.set(&format!("residual.{to}_{part}"), factor);
        }
    }
    Ok(())
}

/// The softplus of this is 1: every token is one step.
const ONE_STEP: f32 = 0.541_324_85;

/// Decays of heads, which depend on the number of the layer, too.
fn decays(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let n_heads = n_heads(config)?;
    let lightning = is_lightning(config)?;
    let last = lightning.len() as f64 - 1.0 + 1e-5;
    let base = 0.5f64.powf(8.0 / n_heads as f64);
    for (layer, _) in lightning.iter().enumerate().filter(|(_, is)| **is) {
        let factor = 1.0 - layer as f64 / last + 1e-5;
        let rate = |head: usize| -(base.powf(head as f64 + 1.0) * factor) as f32;
        let rates: Vec<f32> = (0..n_heads).map(rate).collect();
        keys.add_column(&format!("blk.{layer}.ssm_a"), &rates)?;
        keys.add_column(&format!("blk.{layer}.ssm_d"), &vec![0.0; n_heads])?;
        let steps = vec![ONE_STEP; n_heads];
        keys.add_vector(&format!("blk.{layer}.ssm_dt.bias"), &steps)?;
    }
    Ok(())
}
