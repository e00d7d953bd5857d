//! [`CLASSES`]: classes that transformers does not have, by the names and settings of their
//! published files: InternLM 2, Baichuan, XVERSE, EXAONE 3, Pangu Embedded, CodeShell, Orion,
//! MiniCPM, ChatGLM, DeepSeekMoE, Ling 2.

use model_core::hf::{
    ATTENTION_TENSORS, ATTENTION_VECTORS, DECODER_KEYS, EMBEDDING_TENSORS, FixedValue,
    GATED_TENSORS, Heads, HfClass, HfConfig, INPUT_NORM, Key, Keys, ModelFileError,
    NORM_BEFORE_FFN, PAIRED_ATTENTION, PickedRows, RMS_EPS, ROPE_KEYS, ROW_KEYS, RopeKind,
    RopeSettings, SILU, TRAINED_LENGTH, TensorRule, TensorStep, VOCAB_SIZE, head_keys, in_layers,
    only, rope_base_is_stated, rope_keys, same, with,
};

use super::LLAMA;
use super::deepseek::sum_of_weights;
use super::gpt::eps;
use super::gpt_tensors::{
    BIGCODE_ATTENTION, BIGCODE_FEED_FORWARD, GPT_EMBEDDING, GPT_FIRST_NORM, GPT_SECOND_NORM, HEAD,
    grouped_rows,
};
use super::recent::{OFF, ON};
use super::routed::{
    EXPERT_WIDTH, SHARED_EXPERTS, SIGMOID_ROUTED, dense_layers, shared_experts, sum_of_chosen,
};
use super::tensors::{QWEN3_MOE_EXPERTS, QWEN3_MOE_ROUTER, STARCODER2_NORM_BIASES};

/// All classes of this file.
pub(super) const CLASSES: &[HfClass] = &[
    HfClass {
        name: "InternLM2ForCausalLM",
        architecture: "internlm2",
        keys: &[
            DECODER_KEYS,
            RMS_EPS,
            &[SILU, only("bias", OFF), Key::With(rope_within_context)],
        ],
        tensors: &[INTERNLM2_TENSORS, INTERNLM2_LAYERS],
        ..LLAMA
    },
    HfClass {
        name: "BaichuanForCausalLM",
        architecture: "baichuan",
        keys: &[
            ROW_KEYS,
            RMS_EPS,
            &[
                SILU,
                VOCAB_SIZE,
                Key::Count {
                    to: "feed_forward_length",
                    from: "intermediate_size",
                },
                Key::CountOr {
                    to: "context_length",
                    from: "max_position_embeddings",
                    or: "model_max_length",
                },
                Key::With(baichuan_attention),
            ],
        ],
        tensors: &[
            BAICHUAN_TENSORS,
            INPUT_NORM,
            BAICHUAN_ATTENTION,
            NORM_BEFORE_FFN,
            GATED_TENSORS,
        ],
        ..LLAMA
    },
    HfClass {
        name: "XverseForCausalLM",
        architecture: "xverse",
        ..LLAMA
    },
    HfClass {
        name: "ExaoneForCausalLM",
        architecture: "exaone",
        keys: &[
            DECODER_KEYS,
            RMS_EPS,
            ROPE_KEYS,
            &[only("activation_function", FixedValue::Text(&["silu"]))],
        ],
        tensors: &[EXAONE_TENSORS, EXAONE_LAYERS],
        aliases: &[
            ("num_hidden_layers", "num_layers"),
            ("rms_norm_eps", "layer_norm_epsilon"),
        ],
        body: "transformer.",
        ..LLAMA
    },
    HfClass {
        name: "PanguEmbeddedForCausalLM",
        architecture: "pangu-embedded",
        tensors: &[
            EMBEDDING_TENSORS,
            INPUT_NORM,
            ATTENTION_TENSORS,
            ATTENTION_VECTORS,
            NORM_BEFORE_FFN,
            GATED_TENSORS,
        ],
        ..LLAMA
    },
    CODESHELL,
    HfClass {
        name: "OrionForCausalLM",
        architecture: "orion",
        keys: &[
            DECODER_KEYS,
            ROPE_KEYS,
            // Its norms are layer norms, whatever the key says.
            &[SILU, only("attention_bias", OFF), eps("rms_norm_eps")],
        ],
        tensors: &[
            EMBEDDING_TENSORS,
            INPUT_NORM,
            ATTENTION_TENSORS,
            NORM_BEFORE_FFN,
            STARCODER2_NORM_BIASES,
            GATED_TENSORS,
        ],
        ..LLAMA
    },
    HfClass {
        name: "MiniCPMForCausalLM",
        architecture: "minicpm",
        keys: &[
            DECODER_KEYS,
            RMS_EPS,
            ROPE_KEYS,
            &[
                SILU,
                only("attention_bias", OFF),
                Key::Number {
                    to: "embedding_scale",
                    from: "scale_emb",
                },
                Key::With(no_experts),
                Key::With(minicpm_factors),
            ],
        ],
        ..LLAMA
    },
    CHATGLM,
    HfClass {
        name: "ChatGLMForConditionalGeneration",
        ..CHATGLM
    },
    HfClass {
        name: "DeepseekForCausalLM",
        architecture: "deepseek",
        keys: &[
            DECODER_KEYS,
            RMS_EPS,
            ROPE_KEYS,
            EXPERT_WIDTH,
            &[
                SILU,
                Key::Count {
                    to: "expert_count",
                    from: "n_routed_experts",
                },
                Key::Count {
                    to: "expert_used_count",
                    from: "num_experts_per_tok",
                },
                only("attention_bias", OFF),
                only("scoring_func", FixedValue::Text(&["softmax"])),
                Key::With(every_layer),
                Key::With(dense_layers),
                Key::With(shared_experts),
                Key::With(sum_of_chosen),
            ],
        ],
        tensors: &[
            EMBEDDING_TENSORS,
            INPUT_NORM,
            PAIRED_ATTENTION,
            NORM_BEFORE_FFN,
            GATED_TENSORS,
            QWEN3_MOE_ROUTER,
            QWEN3_MOE_EXPERTS,
            SHARED_EXPERTS,
        ],
        ..LLAMA
    },
    HfClass {
        name: "BailingMoeV2ForCausalLM",
        architecture: "bailingmoe2",
        keys: &[
            DECODER_KEYS,
            RMS_EPS,
            ROPE_KEYS,
            EXPERT_WIDTH,
            SIGMOID_ROUTED,
            &[
                SILU,
                only("use_bias", OFF),
                only("use_qkv_bias", OFF),
                only("use_qk_norm", ON),
                only("norm_head", OFF),
                only("norm_softmax", OFF),
                only("use_rmsnorm", ON),
                only("use_sliding_window", OFF),
                only("moe_router_enable_expert_bias", ON),
                only("score_function", FixedValue::Text(&["sigmoid"])),
                Key::With(sum_of_weights),
                Key::With(rope_base_is_stated),
                Key::With(|config, _| config.count("n_group").map(drop)),
            ],
        ],
        tensors: &[
            BAILING_TENSORS,
            INPUT_NORM,
            BAILING_ATTENTION,
            NORM_BEFORE_FFN,
            GATED_TENSORS,
            QWEN3_MOE_ROUTER,
            QWEN3_MOE_EXPERTS,
            SHARED_EXPERTS,
            BAILING_BIAS,
        ],
        aliases: &[
            ("n_routed_experts", "num_experts"),
            ("n_shared_experts", "num_shared_experts"),
        ],
        rotated_part: Some(0.5),
        ..LLAMA
    },
];

const CODESHELL: HfClass = HfClass {
    name: "CodeShellForCausalLM",
    architecture: "codeshell",
    keys: &[
        ROW_KEYS,
        &[
            VOCAB_SIZE,
            TRAINED_LENGTH,
            eps("layer_norm_epsilon"),
            Key::Count {
                to: "feed_forward_length",
                from: "intermediate_size",
            },
            only(
                "activation_function",
                FixedValue::Text(&["gelu_pytorch_tanh"]),
            ),
            only("position_embedding_type", FixedValue::Text(&["rope"])),
            only("scale_attn_weights", ON),
            Key::With(codeshell_attention),
        ],
    ],
    tensors: &[
        GPT_EMBEDDING,
        HEAD,
        GPT_FIRST_NORM,
        GPT_SECOND_NORM,
        BIGCODE_ATTENTION,
        BIGCODE_FEED_FORWARD,
    ],
    unused: &["transformer.h.{l}.attn.rotary_emb.inv_freq"],
    aliases: &[
        ("hidden_size", "n_embd"),
        ("intermediate_size", "n_inner"),
        ("max_position_embeddings", "n_positions"),
        ("num_attention_heads", "n_head"),
        ("num_hidden_layers", "n_layer"),
        ("num_key_value_heads", "num_query_groups"),
    ],
    body: "transformer.",
    ..LLAMA
};

const CHATGLM: HfClass = HfClass {
    name: "ChatGLMModel",
    architecture: "chatglm",
    keys: &[
        ROW_KEYS,
        RMS_EPS,
        &[
            VOCAB_SIZE,
            TRAINED_LENGTH,
            Key::Count {
                to: "feed_forward_length",
                from: "intermediate_size",
            },
            only("rmsnorm", ON),
            only("post_layer_norm", ON),
            only("add_bias_linear", OFF),
            only("add_qkv_bias", ON),
            only("apply_residual_connection_post_layernorm", OFF),
            only("original_rope", ON),
            only("interleaved_qkv", OFF),
            Key::With(chatglm_attention),
        ],
    ],
    tensors: &[CHATGLM_TENSORS, CHATGLM_LAYERS],
    unused: &["transformer.rotary_pos_emb.inv_freq"],
    aliases: &[
        ("head_dim", "kv_channels"),
        ("intermediate_size", "ffn_hidden_size"),
        ("max_position_embeddings", "seq_length"),
        ("num_hidden_layers", "num_layers"),
        ("num_key_value_heads", "multi_query_group_num"),
        ("rms_norm_eps", "layernorm_epsilon"),
        ("vocab_size", "padded_vocab_size"),
    ],
    body: "transformer.",
    ..LLAMA
};

const INTERNLM2_TENSORS: &[TensorRule] = &[
    same("token_embd.weight", "model.tok_embeddings.weight"),
    same("output_norm.weight", "model.norm.weight"),
    same("output.weight", "output.weight"),
];

/// Queries, keys and values lie key head by key head in one matrix.
fn internlm2_rows(config: &HfConfig, part: usize) -> Result<PickedRows, ModelFileError> {
    let heads = config.count("num_attention_heads")?;
    let kv_heads = config.optional_count("num_key_value_heads")?;
    grouped_rows(config, kv_heads.unwrap_or(heads), &[part])
}

const INTERNLM2_QUERIES: &[TensorStep] = &[
    TensorStep::PickedRows(|config| internlm2_rows(config, 0)),
    TensorStep::Pairs(Heads::Query),
];
const INTERNLM2_KEYS: &[TensorStep] = &[
    TensorStep::PickedRows(|config| internlm2_rows(config, 1)),
    TensorStep::Pairs(Heads::KeyValue),
];
const INTERNLM2_VALUES: &[TensorStep] =
    &[TensorStep::PickedRows(|config| internlm2_rows(config, 2))];

const INTERNLM2_LAYERS: &[TensorRule] = &in_layers(
    "model.layers.{l}.",
    [
        same("attn_norm.weight", "attention_norm.weight"),
        with("attn_q.weight", "attention.wqkv.weight", INTERNLM2_QUERIES),
        with("attn_k.weight", "attention.wqkv.weight", INTERNLM2_KEYS),
        with("attn_v.weight", "attention.wqkv.weight", INTERNLM2_VALUES),
        same("attn_output.weight", "attention.wo.weight"),
        same("ffn_norm.weight", "ffn_norm.weight"),
        same("ffn_gate.weight", "feed_forward.w1.weight"),
        same("ffn_down.weight", "feed_forward.w2.weight"),
        same("ffn_up.weight", "feed_forward.w3.weight"),
    ],
);

const EXAONE_TENSORS: &[TensorRule] = &[
    same("token_embd.weight", "transformer.wte.weight"),
    same("output_norm.weight", "transformer.ln_f.weight"),
    same("output.weight", "lm_head.weight"),
];

const EXAONE_LAYERS: &[TensorRule] = &in_layers(
    "transformer.h.{l}.",
    [
        same("attn_norm.weight", "ln_1.weight"),
        same("attn_q.weight", "attn.attention.q_proj.weight"),
        same("attn_k.weight", "attn.attention.k_proj.weight"),
        same("attn_v.weight", "attn.attention.v_proj.weight"),
        same("attn_output.weight", "attn.attention.out_proj.weight"),
        same("ffn_norm.weight", "ln_2.weight"),
        same("ffn_gate.weight", "mlp.c_fc_0.weight"),
        same("ffn_up.weight", "mlp.c_fc_1.weight"),
        same("ffn_down.weight", "mlp.c_proj.weight"),
    ],
);

const fn part(part: usize) -> TensorStep {
    TensorStep::RowPart { part, of: 3 }
}

/// Baichuan 2, whose config alone has this key, divides the rows of its output matrix by their
/// length.
const BAICHUAN_TENSORS: &[TensorRule] = &[
    same("token_embd.weight", "model.embed_tokens.weight"),
    same("output_norm.weight", "model.norm.weight"),
    with(
        "output.weight",
        "lm_head.weight",
        &[TensorStep::UnitRowsWhere("z_loss_weight")],
    ),
];

const BAICHUAN_ATTENTION: &[TensorRule] = &in_layers(
    "model.layers.{l}.self_attn.",
    [
        with(
            "attn_q.weight",
            "W_pack.weight",
            &[part(0), TensorStep::Pairs(Heads::Query)],
        ),
        with(
            "attn_k.weight",
            "W_pack.weight",
            &[part(1), TensorStep::Pairs(Heads::KeyValue)],
        ),
        with("attn_v.weight", "W_pack.weight", &[part(2)]),
        same("attn_output.weight", "o_proj.weight"),
    ],
);

const CHATGLM_TENSORS: &[TensorRule] = &[
    same(
        "token_embd.weight",
        "transformer.embedding.word_embeddings.weight",
    ),
    same(
        "output_norm.weight",
        "transformer.encoder.final_layernorm.weight",
    ),
    same("output.weight", "transformer.output_layer.weight"),
];

const CHATGLM_LAYERS: &[TensorRule] = &in_layers(
    "transformer.encoder.layers.{l}.",
    [
        same("attn_norm.weight", "input_layernorm.weight"),
        same("attn_qkv.weight", "self_attention.query_key_value.weight"),
        same("attn_qkv.bias", "self_attention.query_key_value.bias"),
        same("attn_output.weight", "self_attention.dense.weight"),
        same("ffn_norm.weight", "post_attention_layernorm.weight"),
        same("ffn_up.weight", "mlp.dense_h_to_4h.weight"),
        same("ffn_down.weight", "mlp.dense_4h_to_h.weight"),
    ],
);

const BAILING_TENSORS: &[TensorRule] = &[
    same("token_embd.weight", "model.word_embeddings.weight"),
    same("output_norm.weight", "model.norm.weight"),
    same("output.weight", "lm_head.weight"),
];

const BAILING_ATTENTION: &[TensorRule] = &in_layers(
    "model.layers.{l}.attention.",
    [
        same("attn_qkv.weight", "query_key_value.weight"),
        same("attn_q_norm.weight", "query_layernorm.weight"),
        same("attn_k_norm.weight", "key_layernorm.weight"),
        same("attn_output.weight", "dense.weight"),
    ],
);

const BAILING_BIAS: &[TensorRule] = &in_layers(
    "model.layers.{l}.mlp.",
    [same("exp_probs_b.bias", "gate.expert_bias")],
);

/// A rotation that changes beyond the trained context alone is none within it.
fn rope_within_context(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    for kind in ["rope_scaling.type", "rope_scaling.rope_type"] {
        if config.optional_text(kind)? == Some("dynamic") {
            let settings = RopeSettings {
                theta: RopeSettings::base(config, None)?,
                partial: 1.0,
                kind: RopeKind::Plain,
            };
            return settings.write(config, keys);
        }
    }
    rope_keys(config, keys)
}

/// Linear biases in the model of 40 layers, a rotation in the other; heads are all of one size.
fn baichuan_attention(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    head_keys(config, keys)?;
    rope_keys(config, keys)
}

/// Groups of queries with a key and a value each, by a base that no file names.
fn codeshell_attention(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    if config.optional_flag("group_query_attention")? != Some(true) {
        return Err(config.wrong("group_query_attention", "true"));
    }
    config.count("num_key_value_heads")?;
    head_keys(config, keys)?;
    rope_keys(config, keys)
}

/// The residual's factor is by the depth, that of logits by the width.
pub(super) fn minicpm_factors(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let depth = config.count("num_hidden_layers")? as f64;
    let scale = config.number("scale_depth")? / depth.sqrt();
    if !(scale.is_finite() && scale > 0.0) {
        return Err(config.wrong("scale_depth", "a number above 0"));
    }
    keys.set("residual_scale", scale as f32);
    let (width, base) = (
        config.count("hidden_size")?,
        config.count("dim_model_base")?,
    );
    keys.set("logit_scale", (width as f64 / base as f64) as f32);
    Ok(())
}

/// MiniCPM's mixtures have tensors of their own.
fn no_experts(config: &HfConfig, _: &mut Keys) -> Result<(), ModelFileError> {
    match config.optional_number("num_experts")? {
        Some(n) if n != 0.0 => Err(config.wrong("num_experts", "0")),
        _ => Ok(()),
    }
}

/// Half of each head rotates, by a base that the config stretches.
fn chatglm_attention(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    if config.optional_flag("multi_query_attention")? != Some(true) {
        return Err(config.wrong("multi_query_attention", "true"));
    }
    config.count("num_key_value_heads")?;
    head_keys(config, keys)?;
    let key = "rope_ratio";
    let ratio = match config.optional_number(key)?.unwrap_or(1.0) {
        ratio if ratio.is_finite() && ratio > 0.0 => ratio,
        _ => return Err(config.wrong(key, "a number above 0")),
    };
    let settings = RopeSettings {
        theta: 10_000.0 * ratio,
        partial: 0.5,
        kind: RopeKind::Plain,
    };
    settings.write(config, keys)
}

/// A mixture in every layer behind the dense ones.
fn every_layer(config: &HfConfig, _: &mut Keys) -> Result<(), ModelFileError> {
    let key = "moe_layer_freq";
    match config.optional_count(key)? {
        Some(n) if n != 1 => Err(config.wrong(key, "1")),
        _ => Ok(()),
    }
}
