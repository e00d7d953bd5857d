//! [`CLASSES`]: classes that recombine what earlier ones brought: Gemma 1, Command R and its
//! mixtures, OLMoE, AFM, Granite with windows, GLM-4 9B, DBRX, Jais 2.

use model_core::gguf::Array;
use model_core::hf::{
    ATTENTION_TENSORS, ATTENTION_VECTORS, DECODER_KEYS, EMBEDDING_TENSORS, FixedValue,
    GATED_TENSORS, GRANITE_FACTORS, HfClass, HfConfig, INPUT_NORM, Key, Keys, ModelFileError,
    NORM_BEFORE_FFN, PAIRED_ATTENTION, PLUS_ONE, RMS_EPS, ROPE_KEYS, ROW_KEYS, RopeSettings, SILU,
    TRAINED_LENGTH, TensorRule, TensorStep, VOCAB_SIZE, head_keys, in_layers, layer_types, only,
    rope_keys, same, windows_by_layer, with,
};
use model_core::windows::{FullLayer, WindowPattern};

use super::gpt::eps;
use super::keys::{COHERE_KEYS, EXPERT_KEYS, NO_QK_NORM, as_u32, cohere2_windows};
use super::recent::{GRANITE_EXPERTS, GRANITE_MOE, OFF, ON};
use super::routed::{
    SHARED_EXPERTS, dense_layers, n_dense_layers, sigmoid_or_softmax, sum_of_chosen,
};
use super::tensors::{
    GEMMA_EMBEDDING, QWEN3_MOE_EXPERTS, QWEN3_MOE_ROUTER, QWEN3_MOE_TENSORS, STARCODER2_NORM_BIASES,
};
use super::{GRANITE, LLAMA};

/// All classes of this file.
pub(super) const CLASSES: &[HfClass] = &[
    HfClass {
        name: "GemmaForCausalLM",
        architecture: "gemma",
        keys: &[
            DECODER_KEYS,
            RMS_EPS,
            ROPE_KEYS,
            &[
                // Published files say "gelu" of its tanh form.
                only(
                    "hidden_act",
                    FixedValue::Text(&["gelu", "gelu_pytorch_tanh"]),
                ),
                only("attention_bias", OFF),
            ],
        ],
        tensors: &[
            GEMMA_EMBEDDING,
            GEMMA1_NORMS,
            ATTENTION_TENSORS,
            GATED_TENSORS,
        ],
        defaults: &[("head_dim", 256), ("num_key_value_heads", 16)],
        ..LLAMA
    },
    COHERE,
    HfClass {
        name: "Cohere2MoeForCausalLM",
        architecture: "cohere2moe",
        keys: &[
            DECODER_KEYS,
            ROPE_KEYS,
            COHERE_KEYS,
            EXPERT_KEYS,
            COHERE2_MOE_KEYS,
        ],
        tensors: &[
            EMBEDDING_TENSORS,
            INPUT_NORM,
            ATTENTION_TENSORS,
            GATED_TENSORS,
            QWEN3_MOE_ROUTER,
            QWEN3_MOE_EXPERTS,
            SHARED_EXPERTS,
        ],
        defaults: &[
            ("head_dim", 128),
            ("sliding_window", 4096),
            ("prefix_dense_sliding_window_pattern", 1),
        ],
        ..COHERE
    },
    HfClass {
        name: "OlmoForCausalLM",
        architecture: "olmo",
        keys: &[
            DECODER_KEYS,
            ROPE_KEYS,
            &[
                SILU,
                only("attention_bias", OFF),
                Key::OptionalNumber {
                    to: "attention.clamp_kqv",
                    from: "clip_qkv",
                },
                // The class has a number for it, which no file names.
                Key::With(|_, keys| {
                    keys.set("attention.layer_norm_epsilon", 1e-5f32);
                    Ok(())
                }),
            ],
        ],
        tensors: &[EMBEDDING_TENSORS, PAIRED_ATTENTION, GATED_TENSORS],
        ..LLAMA
    },
    HfClass {
        name: "OlmoeForCausalLM",
        architecture: "olmoe",
        keys: &[
            DECODER_KEYS,
            RMS_EPS,
            ROPE_KEYS,
            EXPERT_KEYS,
            &[
                SILU,
                only("attention_bias", OFF),
                Key::With(sum_of_chosen),
                Key::With(no_clamp),
            ],
        ],
        tensors: QWEN3_MOE_TENSORS,
        ..LLAMA
    },
    HfClass {
        name: "ArceeForCausalLM",
        architecture: "arcee",
        keys: &[
            DECODER_KEYS,
            RMS_EPS,
            ROPE_KEYS,
            &[
                RELU_SQUARED,
                only("attention_bias", OFF),
                only("mlp_bias", OFF),
            ],
        ],
        tensors: &[
            EMBEDDING_TENSORS,
            INPUT_NORM,
            PAIRED_ATTENTION,
            NORM_BEFORE_FFN,
            UP_AND_DOWN,
        ],
        ..LLAMA
    },
    HfClass {
        name: "GraniteSWAForCausalLM",
        architecture: "granite_swa",
        keys: &[
            DECODER_KEYS,
            RMS_EPS,
            GRANITE_FACTORS,
            &[
                SILU,
                only("attention_bias", OFF),
                only("mlp_bias", OFF),
                Key::With(first_of_four_windows),
                Key::With(granite_bases),
            ],
        ],
        tensors: &[
            EMBEDDING_TENSORS,
            INPUT_NORM,
            PAIRED_ATTENTION,
            SINKS,
            NORM_BEFORE_FFN,
            GATED_TENSORS,
        ],
        defaults: &[("sliding_window", 128), ("num_key_value_heads", 4)],
        ..GRANITE
    },
    HfClass {
        name: "GraniteMoeSharedForCausalLM",
        tensors: &[
            EMBEDDING_TENSORS,
            INPUT_NORM,
            PAIRED_ATTENTION,
            NORM_BEFORE_FFN,
            GRANITE_EXPERTS,
            GRANITE_SHARED,
        ],
        ..GRANITE_MOE
    },
    HfClass {
        name: "GlmForCausalLM",
        architecture: "chatglm",
        keys: &[DECODER_KEYS, RMS_EPS, ROPE_KEYS, &[SILU]],
        tensors: &[
            EMBEDDING_TENSORS,
            INPUT_NORM,
            ATTENTION_TENSORS,
            ATTENTION_VECTORS,
            NORM_BEFORE_FFN,
            FUSED_GATE,
        ],
        defaults: &[("head_dim", 128), ("num_key_value_heads", 2)],
        rotated_part: Some(0.5),
        ..LLAMA
    },
    HfClass {
        name: "DbrxForCausalLM",
        architecture: "dbrx",
        keys: &[
            ROW_KEYS,
            &[
                VOCAB_SIZE,
                TRAINED_LENGTH,
                Key::With(dbrx_attention),
                Key::With(dbrx_experts),
            ],
        ],
        tensors: &[DBRX_TENSORS, DBRX_LAYERS],
        aliases: &[
            ("hidden_size", "d_model"),
            ("max_position_embeddings", "max_seq_len"),
            ("num_attention_heads", "n_heads"),
            ("num_hidden_layers", "n_layers"),
        ],
        body: "transformer.",
        ..LLAMA
    },
    HfClass {
        name: "Jais2ForCausalLM",
        architecture: "jais2",
        keys: &[
            DECODER_KEYS,
            ROPE_KEYS,
            &[
                eps("layer_norm_eps"),
                RELU_SQUARED,
                only("attention_bias", ON),
                only("mlp_bias", ON),
            ],
        ],
        tensors: &[
            EMBEDDING_TENSORS,
            INPUT_NORM,
            ATTENTION_TENSORS,
            ATTENTION_VECTORS,
            NORM_BEFORE_FFN,
            STARCODER2_NORM_BIASES,
            UP_AND_DOWN,
        ],
        ..LLAMA
    },
];

/// Command R.
const COHERE: HfClass = HfClass {
    name: "CohereForCausalLM",
    architecture: "command-r",
    keys: &[DECODER_KEYS, ROPE_KEYS, COHERE_KEYS],
    tensors: &[
        EMBEDDING_TENSORS,
        INPUT_NORM,
        ATTENTION_TENSORS,
        ATTENTION_VECTORS,
        GATED_TENSORS,
    ],
    defaults: &[("rope_theta", 500_000)],
    ..LLAMA
};

const RELU_SQUARED: Key = Key::Only {
    from: "hidden_act",
    is: FixedValue::Text(&["relu2"]),
};

const COHERE2_MOE_KEYS: &[Key] = &[
    NO_QK_NORM,
    Key::Count {
        to: "expert_feed_forward_length",
        from: "intermediate_size",
    },
    Key::With(sigmoid_or_softmax),
    Key::With(dense_layers),
    Key::With(cohere2_windows),
    Key::With(cohere2_moe_rest),
];

/// Norms before both blocks, with gains as their distance from 1.
const GEMMA1_NORMS: &[TensorRule] = &in_layers(
    "model.layers.{l}.",
    [
        with("attn_norm.weight", "input_layernorm.weight", PLUS_ONE),
        with(
            "ffn_norm.weight",
            "post_attention_layernorm.weight",
            PLUS_ONE,
        ),
    ],
);

/// No gate; biases where the files have them.
pub(super) const UP_AND_DOWN: &[TensorRule] = &in_layers(
    "model.layers.{l}.mlp.",
    [
        same("ffn_up.weight", "up_proj.weight"),
        same("ffn_up.bias", "up_proj.bias"),
        same("ffn_down.weight", "down_proj.weight"),
        same("ffn_down.bias", "down_proj.bias"),
    ],
);

/// Gate and up in one matrix, as in GGUF.
const FUSED_GATE: &[TensorRule] = &in_layers(
    "model.layers.{l}.mlp.",
    [
        same("ffn_up.weight", "gate_up_proj.weight"),
        same("ffn_down.weight", "down_proj.weight"),
    ],
);

const SINKS: &[TensorRule] = &in_layers(
    "model.layers.{l}.self_attn.",
    [same("attn_sinks.weight", "sinks")],
);

/// The expert of every row, gate before up.
const GRANITE_SHARED: &[TensorRule] = &in_layers(
    "model.layers.{l}.shared_mlp.",
    [
        with(
            "ffn_gate_shexp.weight",
            "input_linear.weight",
            &[TensorStep::RowPart { part: 0, of: 2 }],
        ),
        with(
            "ffn_up_shexp.weight",
            "input_linear.weight",
            &[TensorStep::RowPart { part: 1, of: 2 }],
        ),
        same("ffn_down_shexp.weight", "output_linear.weight"),
    ],
);

const DBRX_TENSORS: &[TensorRule] = &[
    same("token_embd.weight", "transformer.wte.weight"),
    same("output_norm.weight", "transformer.norm_f.weight"),
    same("output.weight", "lm_head.weight"),
];

/// The number of experts, whose rows follow one another in one matrix.
const DBRX_EXPERTS: &str = "ffn_config.moe_num_experts";

const DBRX_LAYERS: &[TensorRule] = &in_layers(
    "transformer.blocks.{l}.",
    [
        same("attn_norm.weight", "norm_attn_norm.norm_1.weight"),
        same("attn_qkv.weight", "norm_attn_norm.attn.Wqkv.weight"),
        same("attn_output.weight", "norm_attn_norm.attn.out_proj.weight"),
        same("attn_output_norm.weight", "norm_attn_norm.norm_2.weight"),
        same("ffn_gate_inp.weight", "ffn.router.layer.weight"),
        with(
            "ffn_gate_exps.weight",
            "ffn.experts.mlp.w1",
            &[TensorStep::Stacked(DBRX_EXPERTS)],
        ),
        with(
            "ffn_up_exps.weight",
            "ffn.experts.mlp.v1",
            &[TensorStep::Stacked(DBRX_EXPERTS)],
        ),
        with(
            "ffn_down_exps.weight",
            "ffn.experts.mlp.w2",
            &[TensorStep::Stacked(DBRX_EXPERTS), TensorStep::Transposed],
        ),
    ],
);

/// A bound behind the norms of queries and keys is another computation than one before.
fn no_clamp(config: &HfConfig, _: &mut Keys) -> Result<(), ModelFileError> {
    match config.value("clip_qkv") {
        None => Ok(()),
        Some(_) => Err(config.wrong("clip_qkv", "null")),
    }
}

/// Layers that rotate though they see everything, and norms of another kind.
fn cohere2_moe_rest(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    if config.value("rms_norm_eps").is_some() {
        return Err(config.wrong("rms_norm_eps", "null"));
    }
    let key = "shared_expert_combination_strategy";
    if config.optional_text(key)?.is_some_and(|by| by != "average") {
        return Err(config.wrong(key, "average"));
    }
    let n_dense = n_dense_layers(config)?;
    if n_dense > 0 {
        let width = config.count("prefix_dense_intermediate_size")?;
        keys.set("feed_forward_length", as_u32(width));
    }
    let key = "prefix_dense_sliding_window_pattern";
    let types = layer_types(config, &["sliding_attention", "full_attention"])?;
    let types = types.ok_or_else(|| config.missing("layer_types", "a list, one for each layer"))?;
    let is_full = |t: &&str| *t == "full_attention";
    if config.count(key)? == 1 && types.iter().take(n_dense).any(is_full) {
        let wanted = "sliding_attention for the dense layers, whose attention rotates";
        return Err(config.wrong("layer_types", wanted));
    }
    let key = "num_shared_experts";
    if config.optional_number(key)?.is_some_and(|n| n != 0.0) {
        let n_shared = config.count(key)?;
        let width = n_shared * config.count("intermediate_size")?;
        keys.set("expert_shared_count", as_u32(n_shared));
        keys.set("expert_shared_feed_forward_length", as_u32(width));
    }
    Ok(())
}

/// The first of four layers sees everything.
fn first_of_four_windows(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let pattern = WindowPattern {
        period: 4,
        full: FullLayer::First,
    };
    windows_by_layer(config, keys, pattern)
}

/// A base for each layer, which has to be the same in all that rotate; 0 is for those that do not.
fn granite_bases(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let key = "layer_rope_theta";
    let Some(bases) = config.optional_numbers(key)? else {
        return rope_keys(config, keys);
    };
    let n_layers = config.count("num_hidden_layers")?;
    let wanted = format!("a list of {n_layers}: 0, or a base above 1 that is the same for all");
    let own = bases.iter().copied().find(|&base| base != 0.0);
    let is_known = |&base: &f64| base == 0.0 || Some(base) == own && base > 1.0 && base.is_finite();
    if bases.len() != n_layers || !bases.iter().all(is_known) {
        return Err(config.wrong(key, wanted));
    }
    let mut settings = RopeSettings::read(config, None)?;
    settings.theta = own.unwrap_or(settings.theta);
    settings.write(config, keys)?;
    if bases.contains(&0.0) {
        let rotates = bases.iter().map(|&base| base != 0.0).collect();
        keys.set("attention.rope_pattern", Array::Bool(rotates));
    }
    Ok(())
}

/// Heads, their bound and their rotation.
fn dbrx_attention(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    config.check_object("attn_config")?;
    let (heads, key) = (
        config.count("num_attention_heads")?,
        "attn_config.kv_n_heads",
    );
    let kv_heads = config.count(key)?;
    if !heads.is_multiple_of(kv_heads) {
        let wanted = format!("a divisor of 'n_heads', which is {heads}");
        return Err(config.wrong(key, wanted));
    }
    head_keys(config, keys)?;
    keys.set("attention.head_count_kv", as_u32(kv_heads));
    if let Some(bound) = config.optional_number("attn_config.clip_qkv")? {
        keys.set("attention.clamp_kqv", bound as f32);
    }
    // The class has a number for it, which no file names.
    keys.set("attention.layer_norm_epsilon", 1e-5f32);
    let key = "attn_config.rope_theta";
    let own = config.number(key)?;
    let mut settings = RopeSettings::read(config, None)?;
    if config.value("rope_parameters").is_none() {
        settings.theta = own;
    } else if settings.theta != own {
        return Err(config.wrong(
            key,
            format!("{}, as 'rope_parameters' says", settings.theta),
        ));
    }
    settings.write(config, keys)
}

/// The experts of every layer.
fn dbrx_experts(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    config.check_object("ffn_config")?;
    config.check_object("ffn_config.ffn_act_fn")?;
    let key = "ffn_config.ffn_act_fn.name";
    if config
        .optional_text(key)?
        .is_some_and(|name| name != "silu")
    {
        return Err(config.wrong(key, "silu"));
    }
    let count = |key: &str| config.count(&format!("ffn_config.{key}")).map(as_u32);
    keys.set("feed_forward_length", count("ffn_hidden_size")?);
    keys.set("expert_count", count("moe_num_experts")?);
    keys.set("expert_used_count", count("moe_top_k")?);
    let (section, name) = ("ffn_config", "moe_normalize_expert_weights");
    let key = &format!("{section}.{name}");
    // Without the key, weights sum up to 1; with `null`, they stay as they are.
    let stated = config.value(section).and_then(|object| object.get(name));
    if stated.is_some_and(|value| value.is_null()) {
        return Err(config.wrong(key, "1"));
    }
    match config.optional_number(key)? {
        None | Some(1.0) => Ok(()),
        Some(_) => Err(config.wrong(key, "1")),
    }
}
