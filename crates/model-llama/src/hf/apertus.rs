//! [`CLASSES`]: Apertus, BitNet, MiniCPM 3 and Youtu-LLM.

use model_core::hf::{
    ATTENTION_TENSORS, ATTENTION_VECTORS, DECODER_KEYS, EMBEDDING_TENSORS, FixedValue,
    GATED_TENSORS, HfClass, HfConfig, INPUT_NORM, Key, Keys, ModelFileError, NORM_BEFORE_FFN,
    RMS_EPS, ROPE_KEYS, SILU, TRAINED_LENGTH, TensorRule, VOCAB_SIZE, WIDTH_KEYS, in_layers, only,
    same,
};
use model_core::hyperparameters::ACTIVATION;

use super::LLAMA;
use super::deepseek::{LATENT_ATTENTION, latents, rope};
use super::further::UP_AND_DOWN;
use super::published::minicpm_factors;
use super::recent::{OFF, ON};

/// All classes of this file.
pub(super) const CLASSES: &[HfClass] = &[
    HfClass {
        name: "ApertusForCausalLM",
        architecture: "apertus",
        keys: &[
            DECODER_KEYS,
            RMS_EPS,
            ROPE_KEYS,
            &[
                only("hidden_act", FixedValue::Text(&["xielu"])),
                only("attention_bias", OFF),
                Key::With(rope_is_stated),
            ],
        ],
        tensors: &[
            EMBEDDING_TENSORS,
            ATTENTION_TENSORS,
            ATTENTION_VECTORS,
            UP_AND_DOWN,
            APERTUS_TENSORS,
        ],
        layer_numbers: &[
            ("xielu.alpha_n", XIELU[0]),
            ("xielu.alpha_p", XIELU[1]),
            ("xielu.beta", XIELU[2]),
            ("xielu.eps", XIELU[3]),
        ],
        defaults: &[("rope_theta", 12_000_000)],
        ..LLAMA
    },
    HfClass {
        name: "BitNetForCausalLM",
        architecture: "bitnet",
        keys: &[
            DECODER_KEYS,
            RMS_EPS,
            ROPE_KEYS,
            &[only("attention_bias", OFF), Key::With(bitnet_activation)],
        ],
        tensors: &[
            EMBEDDING_TENSORS,
            INPUT_NORM,
            ATTENTION_TENSORS,
            NORM_BEFORE_FFN,
            GATED_TENSORS,
            BITNET_NORMS,
        ],
        defaults: &[("num_key_value_heads", 5), ("rope_theta", 500_000)],
        ..LLAMA
    },
    HfClass {
        name: "MiniCPM3ForCausalLM",
        architecture: "minicpm3",
        keys: &[
            WIDTH_KEYS,
            RMS_EPS,
            &[
                TRAINED_LENGTH,
                VOCAB_SIZE,
                SILU,
                only("is_causal", ON),
                only("attention_bias", OFF),
                only("mlp_bias", OFF),
                Key::With(latents),
                Key::With(rope),
                Key::Number {
                    to: "embedding_scale",
                    from: "scale_emb",
                },
                Key::With(minicpm_factors),
            ],
        ],
        tensors: &[
            EMBEDDING_TENSORS,
            INPUT_NORM,
            LATENT_ATTENTION,
            NORM_BEFORE_FFN,
            GATED_TENSORS,
        ],
        defaults: &[("q_lora_rank", 768), ("num_key_value_heads", 40)],
        ..LLAMA
    },
    // arXiv 2512.24618: DeepSeek V3's attention, without experts.
    HfClass {
        name: "YoutuForCausalLM",
        architecture: "deepseek2",
        keys: &[
            WIDTH_KEYS,
            RMS_EPS,
            &[
                TRAINED_LENGTH,
                VOCAB_SIZE,
                SILU,
                only("attention_bias", OFF),
                only("mlp_bias", OFF),
                only("rope_interleave", ON),
                Key::With(latents),
                Key::With(rope),
            ],
        ],
        tensors: &[
            EMBEDDING_TENSORS,
            INPUT_NORM,
            LATENT_ATTENTION,
            NORM_BEFORE_FFN,
            GATED_TENSORS,
        ],
        defaults: &[("q_lora_rank", 1536), ("num_key_value_heads", 16)],
        ..LLAMA
    },
];

/// Names of an activation's numbers before they are metadata.
const XIELU: [&str; 4] = ["xielu.alpha_n", "xielu.alpha_p", "xielu.beta", "xielu.eps"];

const APERTUS_TENSORS: &[TensorRule] = &in_layers(
    "model.layers.{l}.",
    [
        same("attn_norm.weight", "attention_layernorm.weight"),
        same("ffn_norm.weight", "feedforward_layernorm.weight"),
        same(XIELU[0], "mlp.act_fn.alpha_n"),
        same(XIELU[1], "mlp.act_fn.alpha_p"),
        same(XIELU[2], "mlp.act_fn.beta"),
        same(XIELU[3], "mlp.act_fn.eps"),
    ],
);

const BITNET_NORMS: &[TensorRule] = &in_layers(
    "model.layers.{l}.",
    [
        same("attn_sub_norm.weight", "self_attn.attn_sub_norm.weight"),
        same("ffn_sub_norm.weight", "mlp.ffn_sub_norm.weight"),
    ],
);

/// Without it, transformers stretches the context.
fn rope_is_stated(config: &HfConfig, _: &mut Keys) -> Result<(), ModelFileError> {
    let mut objects = ["rope_parameters", "rope_scaling"].into_iter();
    if objects.any(|object| config.value(object).is_some()) {
        return Ok(());
    }
    Err(config.missing("rope_parameters", "an object, as published files have it"))
}

/// GGUF files do not name the activation where it is SiLU (the first reproductions).
fn bitnet_activation(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let key = "hidden_act";
    match config.optional_text(key)? {
        None => keys.set(ACTIVATION, "relu2"),
        Some("silu" | "swish") => {}
        Some(name @ "relu2") => keys.set(ACTIVATION, name),
        Some(_) => return Err(config.wrong(key, "one of: relu2, silu")),
    }
    Ok(())
}
