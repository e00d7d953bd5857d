//! [`CLASSES`]: classes of the decoders of before Llama and of those that follow them: GPT-2 and
//! GPT-NeoX, OPT, BLOOM, Falcon, MPT, Phi-2, Nemotron, StableLM.
//!
//! Their configs have names of their own for the same numbers, and most fuse queries, keys and
//! values.

use kv_graph::Activation;
use model_core::hf::{
    ATTENTION_TENSORS, ATTENTION_VECTORS, DECODER_KEYS, EMBEDDING_TENSORS, FixedValue,
    GATED_TENSORS, HfClass, HfConfig, INPUT_NORM, Key, Keys, ModelFileError, NORM_BEFORE_FFN,
    ROPE_KEYS, ROW_KEYS, SILU, TRAINED_LENGTH, VOCAB_SIZE, head_dim, head_keys, only, rope_keys,
};
use model_core::hyperparameters::{ACTIVATION, activation_named, activation_names};
use model_core::windows::{FullLayer, WindowPattern};

use super::LLAMA;
use super::gpt_tensors::{
    BIGCODE_ATTENTION, BIGCODE_FEED_FORWARD, BLOOM_FUSED, BLOOM_LAYERS, BLOOM_TENSORS,
    CODEGEN_ATTENTION, FALCON_FUSED, FALCON_NORMS, GPT_BUFFERS, GPT_EMBEDDING, GPT_FIRST_NORM,
    GPT_NEO_ATTENTION, GPT_POSITIONS, GPT_SECOND_NORM, GPT2_LAYERS, GPTJ_ATTENTION,
    GPTJ_FEED_FORWARD, HEAD, MPT_LAYERS, MPT_TENSORS, NEMOTRON_LAYERS, NEMOTRON_TENSORS,
    NEOX_LAYERS, NEOX_TENSORS, OPT_LAYERS, OPT_TENSORS, PHI_EMBEDDING, PHI_LAYERS, STABLELM_NORMS,
    falcon_kv_heads,
};
use super::keys::as_u32;
use super::recent::{OFF, ON};
use super::tensors::STARCODER2_NORM_BIASES;
use crate::read::{EMBEDDING_WIDTH, NORMED_RESIDUAL, NORMED_SUMS};

/// All classes of this file.
pub(super) const CLASSES: &[HfClass] = &[
    HfClass {
        name: "PhiForCausalLM",
        architecture: "phi2",
        keys: &[
            DECODER_KEYS,
            ROPE_KEYS,
            &[eps("layer_norm_eps"), activation("hidden_act", TANH_GELU)],
        ],
        tensors: &[
            PHI_EMBEDDING,
            HEAD,
            ATTENTION_TENSORS,
            ATTENTION_VECTORS,
            PHI_LAYERS,
        ],
        rotated_part: Some(0.5),
        ..LLAMA
    },
    HfClass {
        name: "NemotronForCausalLM",
        architecture: "nemotron",
        keys: &[
            DECODER_KEYS,
            ROPE_KEYS,
            &[
                eps("norm_eps"),
                activation("hidden_act", &["relu2"]),
                only("attention_bias", OFF),
                only("mlp_bias", OFF),
            ],
        ],
        tensors: &[NEMOTRON_TENSORS, ATTENTION_TENSORS, NEMOTRON_LAYERS],
        rotated_part: Some(0.5),
        ..LLAMA
    },
    HfClass {
        name: "StableLmForCausalLM",
        architecture: "stablelm",
        keys: &[
            DECODER_KEYS,
            ROPE_KEYS,
            &[SILU, eps("layer_norm_eps"), Key::With(stablelm_residual)],
        ],
        tensors: &[
            EMBEDDING_TENSORS,
            INPUT_NORM,
            ATTENTION_TENSORS,
            ATTENTION_VECTORS,
            STABLELM_NORMS,
            NORM_BEFORE_FFN,
            STARCODER2_NORM_BIASES,
            GATED_TENSORS,
        ],
        rotated_part: Some(0.25),
        ..LLAMA
    },
    GPT2,
    HfClass {
        name: "GPTBigCodeForCausalLM",
        architecture: "starcoder",
        keys: &[
            SIZES,
            &[
                eps("layer_norm_epsilon"),
                Key::With(gpt_activation),
                Key::With(bigcode_heads),
            ],
            GPT2_ATTENTION_KEYS,
        ],
        tensors: &[
            GPT_EMBEDDING,
            GPT_POSITIONS,
            HEAD,
            GPT_FIRST_NORM,
            GPT_SECOND_NORM,
            BIGCODE_ATTENTION,
            BIGCODE_FEED_FORWARD,
        ],
        ..GPT2
    },
    HfClass {
        name: "GPTNeoForCausalLM",
        architecture: "gptneo",
        keys: &[
            SIZES,
            &[
                eps("layer_norm_epsilon"),
                Key::With(gpt_activation),
                Key::Count {
                    to: "attention.sliding_window",
                    from: "window_size",
                },
                Key::With(gpt_neo_windows),
            ],
        ],
        tensors: &[
            GPT_EMBEDDING,
            GPT_POSITIONS,
            HEAD,
            GPT_FIRST_NORM,
            GPT_SECOND_NORM,
            GPT_NEO_ATTENTION,
            BIGCODE_FEED_FORWARD,
        ],
        aliases: &[
            ("num_hidden_layers", "num_layers"),
            ("num_attention_heads", "num_heads"),
        ],
        ..GPT2
    },
    GPTJ,
    HfClass {
        name: "CodeGenForCausalLM",
        architecture: "codegen",
        tensors: &[
            GPT_EMBEDDING,
            HEAD,
            GPT_FIRST_NORM,
            CODEGEN_ATTENTION,
            GPTJ_FEED_FORWARD,
        ],
        ..GPTJ
    },
    HfClass {
        name: "OPTForCausalLM",
        architecture: "opt",
        keys: &[
            SIZES,
            &[
                activation("activation_function", &["relu"]),
                only("enable_bias", ON),
                only("layer_norm_elementwise_affine", ON),
                only("_remove_final_layer_norm", OFF),
                Key::With(opt_numbers),
            ],
        ],
        tensors: &[OPT_TENSORS, HEAD, OPT_LAYERS],
        aliases: &[("intermediate_size", "ffn_dim")],
        ..LLAMA
    },
    HfClass {
        name: "GPTNeoXForCausalLM",
        architecture: "gptneox",
        keys: &[
            DECODER_KEYS,
            ROPE_KEYS,
            &[
                eps("layer_norm_eps"),
                activation("hidden_act", EXACT_GELU),
                only("attention_bias", ON),
                Key::With(neox_residual),
            ],
        ],
        tensors: &[NEOX_TENSORS, NEOX_LAYERS],
        unused: GPT_BUFFERS,
        aliases: &[
            ("partial_rotary_factor", "rotary_pct"),
            ("rope_theta", "rotary_emb_base"),
        ],
        body: "gpt_neox.",
        rotated_part: Some(0.25),
        ..LLAMA
    },
    HfClass {
        name: "FalconForCausalLM",
        architecture: "falcon",
        keys: &[
            SIZES,
            ROPE_KEYS,
            &[
                eps("layer_norm_epsilon"),
                activation("activation", EXACT_GELU),
                Key::With(falcon_attention),
            ],
        ],
        tensors: &[
            BLOOM_TENSORS,
            HEAD,
            BLOOM_LAYERS,
            FALCON_NORMS,
            FALCON_FUSED,
        ],
        aliases: &[
            ("intermediate_size", "ffn_hidden_size"),
            ("num_hidden_layers", "n_layer"),
            ("num_attention_heads", "n_head"),
        ],
        defaults: &[("max_position_embeddings", 2048)],
        body: "transformer.",
        ..LLAMA
    },
    HfClass {
        name: "BloomForCausalLM",
        architecture: "bloom",
        keys: &[
            SIZES,
            &[eps("layer_norm_epsilon"), Key::With(bloom_residual)],
        ],
        tensors: &[BLOOM_TENSORS, HEAD, BLOOM_LAYERS, BLOOM_FUSED],
        aliases: &[
            ("hidden_size", "n_embed"),
            ("num_hidden_layers", "n_layer"),
            ("num_attention_heads", "n_head"),
            ("max_position_embeddings", "seq_length"),
        ],
        defaults: &[("max_position_embeddings", 2048)],
        body: "transformer.",
        ..LLAMA
    },
    HfClass {
        name: "MptForCausalLM",
        architecture: "mpt",
        keys: &[
            SIZES,
            &[
                eps("layer_norm_epsilon"),
                only("no_bias", ON),
                only("attn_config.alibi", ON),
                only("attn_config.qk_ln", OFF),
                only("attn_config.prefix_lm", OFF),
                activation("attn_config.attn_type", &["multihead_attention"]),
                activation("norm_type", &["low_precision_layernorm", "layernorm"]),
                Key::OptionalNumber {
                    to: "attention.clamp_kqv",
                    from: "attn_config.clip_qkv",
                },
                Key::OptionalNumber {
                    to: "attention.scale",
                    from: "attn_config.softmax_scale",
                },
                Key::With(mpt_biases),
            ],
        ],
        tensors: &[MPT_TENSORS, MPT_LAYERS],
        aliases: &[
            ("hidden_size", "d_model"),
            ("num_hidden_layers", "n_layers"),
            ("num_attention_heads", "n_heads"),
            ("max_position_embeddings", "max_seq_len"),
        ],
        body: "transformer.",
        ..LLAMA
    },
];

const GPT2: HfClass = HfClass {
    name: "GPT2LMHeadModel",
    architecture: "gpt2",
    keys: &[
        SIZES,
        &[eps("layer_norm_epsilon"), Key::With(gpt_activation)],
        GPT2_ATTENTION_KEYS,
    ],
    tensors: &[
        GPT_EMBEDDING,
        GPT_POSITIONS,
        HEAD,
        GPT_FIRST_NORM,
        GPT_SECOND_NORM,
        GPT2_LAYERS,
    ],
    unused: GPT_BUFFERS,
    aliases: GPT_NAMES,
    body: "transformer.",
    ..LLAMA
};

const GPTJ: HfClass = HfClass {
    name: "GPTJForCausalLM",
    architecture: "gptj",
    keys: &[
        SIZES,
        &[
            eps("layer_norm_epsilon"),
            Key::With(gpt_activation),
            Key::With(rotary_dim),
        ],
    ],
    tensors: &[
        GPT_EMBEDDING,
        HEAD,
        GPT_FIRST_NORM,
        GPTJ_ATTENTION,
        GPTJ_FEED_FORWARD,
    ],
    defaults: &[("rotary_dim", 64)],
    ..GPT2
};

/// The names of the usual keys in GPT-2's configs.
const GPT_NAMES: &[(&str, &str)] = &[
    ("hidden_size", "n_embd"),
    ("num_hidden_layers", "n_layer"),
    ("num_attention_heads", "n_head"),
    ("max_position_embeddings", "n_positions"),
    ("intermediate_size", "n_inner"),
];

const GPT2_ATTENTION_KEYS: &[Key] = &[
    only("scale_attn_weights", ON),
    only("scale_attn_by_inverse_layer_idx", OFF),
    only("add_cross_attention", OFF),
];

/// Names of the tanh form of GELU.
const TANH_GELU: &[&str] = &["gelu_new", "gelu_pytorch_tanh", "gelu_fast"];
/// Names of GELU itself.
const EXACT_GELU: &[&str] = &["gelu"];

/// Sizes of a decoder whose feed-forward block is four times as wide where the config does not
/// name its width.
const SIZES: &[Key] = &[
    Key::All(ROW_KEYS),
    VOCAB_SIZE,
    TRAINED_LENGTH,
    Key::With(head_keys),
    Key::With(inner_width),
];

/// The `eps` of layer norms.
pub(super) const fn eps(from: &'static str) -> Key {
    Key::Number {
        to: "attention.layer_norm_epsilon",
        from,
    }
}

/// A text that has one meaning in every model that is supported.
const fn activation(from: &'static str, names: &'static [&'static str]) -> Key {
    Key::Only {
        from,
        is: FixedValue::Text(names),
    }
}

fn inner_width(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let width = match config.optional_count("intermediate_size")? {
        Some(width) => width,
        None => 4 * config.count("hidden_size")?,
    };
    keys.set("feed_forward_length", as_u32(width));
    Ok(())
}

/// Norms show whether a block's attention and FFN are parallel; GGUF files have the key, too.
fn stablelm_residual(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let parallel = config.optional_flag("use_parallel_residual")?;
    keys.set("use_parallel_residual", parallel.unwrap_or(false));
    Ok(())
}

fn neox_residual(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let parallel = config.optional_flag("use_parallel_residual")?;
    keys.set("use_parallel_residual", parallel.unwrap_or(true));
    Ok(())
}

/// So many values of each head rotate, or all.
fn rotary_dim(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    rope_keys(config, keys)?;
    let Some(n_rot) = config.optional_count("rotary_dim")? else {
        return Ok(());
    };
    let dim = head_dim(config)?;
    if n_rot > dim || !n_rot.is_multiple_of(2) {
        return Err(config.wrong("rotary_dim", format!("an even number, at most {dim}")));
    }
    keys.set("rope.dimension_count", as_u32(n_rot));
    Ok(())
}

/// Every other layer from the second on has a window, unless the config names others.
fn gpt_neo_windows(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let usual = WindowPattern {
        period: 2,
        full: FullLayer::First,
    };
    let key = "attention_layers";
    let types = config.optional_texts(key)?;
    let Some(types) = types else {
        return Err(config.missing(
            key,
            "a list of \"global\" and \"local\", one for each layer",
        ));
    };
    if types.len() != config.count("num_hidden_layers")?
        || types.iter().any(|t| !["global", "local"].contains(t))
    {
        return Err(config.wrong(
            key,
            "a list of \"global\" and \"local\", one for each layer",
        ));
    }
    let own: Vec<bool> = types.iter().map(|&t| t == "local").collect();
    if own
        .iter()
        .enumerate()
        .any(|(at, &local)| local != usual.is_windowed(at))
    {
        let flags = model_core::gguf::Array::Bool(own);
        keys.set("attention.sliding_window_pattern", flags);
    }
    Ok(())
}

/// The epsilon that OPT's configs do not name, the width of embeddings, and the places of norms.
fn opt_numbers(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let dim = config.count("hidden_size")?;
    let width = config.optional_count("word_embed_proj_dim")?;
    if let Some(width) = width.filter(|&width| width != dim) {
        keys.set(EMBEDDING_WIDTH, as_u32(width));
    }
    if config.optional_flag("do_layer_norm_before")? == Some(false) {
        keys.set(NORMED_SUMS, true);
    }
    keys.set("attention.layer_norm_epsilon", 1e-5f32);
    Ok(())
}

/// The activation, which files name where it is not the usual one.
fn gpt_activation(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let key = "activation_function";
    match config.optional_text(key)? {
        Some(name) if activation_named(name).is_none() => {
            Err(config.wrong(key, format!("one of: {}", activation_names())))
        }
        Some(name) if activation_named(name) != Some(Activation::GeluTanh) => {
            keys.set(ACTIVATION, name);
            Ok(())
        }
        _ => Ok(()),
    }
}

/// The rows that blocks add to, which GGUF files do not name where they are those before the norms.
fn bloom_residual(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let key = "apply_residual_connection_post_layernorm";
    if config.optional_flag(key)? == Some(true) {
        keys.set(NORMED_RESIDUAL, true);
    }
    Ok(())
}

/// One key and value for all heads, or one for each.
fn bigcode_heads(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    if config.optional_flag("multi_query")? != Some(false) {
        keys.set("attention.head_count_kv", 1u32);
    }
    Ok(())
}

/// One key and value for all heads, one for each, or so many as newer decoders say; biases by
/// distance instead of rotations.
fn falcon_attention(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    keys.set("attention.head_count_kv", as_u32(falcon_kv_heads(config)?));
    if config.optional_flag("alibi")? == Some(true) {
        keys.set("attention.max_alibi_bias", 8f32);
    }
    Ok(())
}

fn mpt_biases(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    config.check_object("attn_config")?;
    if config.value("logit_scale").is_some() {
        return Err(config.wrong("logit_scale", "null"));
    }
    let key = "attn_config.alibi_bias_max";
    let largest = config.optional_number(key)?.unwrap_or(8.0);
    if !(largest.is_finite() && largest > 0.0) {
        return Err(config.wrong(key, "a number above 0"));
    }
    keys.set("attention.max_alibi_bias", largest as f32);
    Ok(())
}
