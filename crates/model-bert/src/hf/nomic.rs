//! Nomic Embed (Nussbaum et al., arXiv 2402.01613) and its mixtures of experts (arXiv 2502.07972).
//!
//! Two kinds of config are about: that of transformers, and that of the class that the models were
//! published with, which has GPT-2's names and more settings.

use model_core::hf::{
    ClassWhen, FixedValue, HfClass, HfConfig, Key, Keys, ModelFileError, SIZE_KEYS, TensorRule,
    TensorStep, in_layers, only, rope_keys, same, with,
};
use model_core::hyperparameters::ACTIVATION;

use super::rotated::FLASH_INPUT;
use super::{LAYER_NORM_EPS, NOT_CAUSAL, activation, as_u32};

/// The classes of this file.
pub(super) const CLASSES: &[HfClass] = &[
    NOMIC,
    HfClass {
        when: ClassWhen::Counts("num_experts"),
        architecture: "nomic-bert-moe",
        keys: &[SIZE_KEYS, NOMIC_KEYS, BIASES, EXPERT_KEYS],
        tensors: &[FLASH_INPUT, NOMIC_LAYERS, MOE_LAYERS],
        ..NOMIC
    },
];

const NOMIC: HfClass = HfClass {
    name: "NomicBertModel",
    architecture: "nomic-bert",
    keys: &[SIZE_KEYS, NOMIC_KEYS, NO_BIASES],
    tensors: &[FLASH_INPUT, NOMIC_LAYERS, GATED_LAYERS],
    aliases: &[
        ("hidden_size", "n_embd"),
        ("intermediate_size", "n_inner"),
        ("num_hidden_layers", "n_layer"),
        ("num_attention_heads", "n_head"),
        ("max_position_embeddings", "n_positions"),
        ("layer_norm_eps", "layer_norm_epsilon"),
        ("hidden_act", "activation_function"),
    ],
    defaults: &[("rope_theta", 1000)],
    ..HfClass::EMPTY
};

const NOMIC_KEYS: &[Key] = &[
    LAYER_NORM_EPS,
    only("prenorm", FixedValue::Flag(false)),
    only("use_rms_norm", FixedValue::Flag(false)),
    only("parallel_block", FixedValue::Flag(false)),
    only("causal", FixedValue::Flag(false)),
    only("is_decoder", FixedValue::Flag(false)),
    only("rotary_emb_interleaved", FixedValue::Flag(false)),
    NOT_CAUSAL,
    Key::With(rotation),
    Key::With(length),
];

const NO_BIASES: &[Key] = &[
    only("qkv_proj_bias", FixedValue::Flag(false)),
    only("mlp_fc1_bias", FixedValue::Flag(false)),
    only("mlp_fc2_bias", FixedValue::Flag(false)),
    Key::With(gate),
];

const BIASES: &[Key] = &[
    only("qkv_proj_bias", FixedValue::Flag(true)),
    only("mlp_fc1_bias", FixedValue::Flag(true)),
    only("mlp_fc2_bias", FixedValue::Flag(true)),
    Key::With(|config, keys| activation(config, keys, "hidden_act")),
];

const EXPERT_KEYS: &[Key] = &[
    Key::Count {
        to: "expert_count",
        from: "num_experts",
    },
    Key::Count {
        to: "expert_used_count",
        from: "moe_top_k",
    },
    Key::Count {
        to: "moe_every_n_layers",
        from: "moe_every_n_layers",
    },
    only("moe_normalize_expert_weights", FixedValue::Flag(false)),
    only("expert_choice_router", FixedValue::Flag(false)),
    Key::With(
        |config, _| match config.optional_number("num_shared_experts")? {
            None | Some(0.0) => Ok(()),
            Some(_) => Err(config.wrong("num_shared_experts", "0")),
        },
    ),
];

/// The activation of gates; `swiglu` is that of the gate and the gate itself.
fn gate(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let key = "hidden_act";
    match config.optional_text(key)? {
        Some("swiglu") => {
            keys.set(ACTIVATION, "silu");
            Ok(())
        }
        // What the published class calls so has no gate.
        Some("gelu") if config.value("n_embd").is_some() => Err(config.wrong(key, "swiglu")),
        _ => activation(config, keys, key),
    }
}

/// The base of rotations of whole heads.
fn rotation(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    match config.optional_number("rotary_emb_fraction")? {
        Some(1.0) => {}
        // The published class, whose names are GPT-2's, rotates nothing then.
        None if config.value("n_embd").is_none() => {}
        _ => return Err(config.wrong("rotary_emb_fraction", "1")),
    }
    if config.value("rotary_emb_scale_base").is_some() {
        return Err(config.wrong("rotary_emb_scale_base", "null"));
    }
    let key = "rotary_emb_base";
    match config.optional_number(key)? {
        None if config.value("n_embd").is_none() => rope_keys(config, keys),
        None => Err(config.missing(key, "a number above 1")),
        Some(base) if base.is_finite() && base > 1.0 => {
            keys.set("rope.freq_base", base as f32);
            Ok(())
        }
        Some(_) => Err(config.wrong(key, "a number above 1")),
    }
}

/// Beyond the trained length a rotation that is scaled becomes another one.
fn length(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    if config.optional_number("rotary_scaling_factor")?.is_some() {
        let trained = config.count("max_trained_positions")?;
        let longest = config.count("max_position_embeddings")?;
        keys.set("context_length", as_u32(trained.min(longest)));
    }
    Ok(())
}

/// The tensors of all layers.
const NOMIC_LAYERS: &[TensorRule] = &in_layers(
    "encoder.layers.{l}.",
    [
        same("attn_qkv.weight", "attn.Wqkv.weight"),
        same("attn_output.weight", "attn.out_proj.weight"),
        same("attn_output_norm.weight", "norm1.weight"),
        same("attn_output_norm.bias", "norm1.bias"),
        same("ffn_down.weight", "mlp.fc2.weight"),
        same("layer_output_norm.weight", "norm2.weight"),
        same("layer_output_norm.bias", "norm2.bias"),
    ],
);

const GATED_LAYERS: &[TensorRule] = &in_layers(
    "encoder.layers.{l}.mlp.",
    [
        same("ffn_up.weight", "fc11.weight"),
        same("ffn_gate.weight", "fc12.weight"),
    ],
);

const MOE_LAYERS: &[TensorRule] = &in_layers(
    "encoder.layers.{l}.",
    [
        same("attn_qkv.bias", "attn.Wqkv.bias"),
        same("attn_output.bias", "attn.out_proj.bias"),
        same("ffn_up.weight", "mlp.fc1.weight"),
        same("ffn_up.bias", "mlp.fc1.bias"),
        same("ffn_down.bias", "mlp.fc2.bias"),
        same("ffn_gate_inp.weight", "mlp.router.layer.weight"),
        with(
            "ffn_up_exps.weight",
            "mlp.experts.mlp.w1",
            &[TensorStep::Stacked("num_experts")],
        ),
        with(
            "ffn_down_exps.weight",
            "mlp.experts.mlp.w2",
            &[TensorStep::Stacked("num_experts"), TensorStep::Transposed],
        ),
        with(
            "ffn_exps_sum.bias",
            "mlp.experts.bias",
            &[TensorStep::LeadingOne],
        ),
    ],
);
