//! Encoders with rotary positions: EuroBERT, NeoBERT and Jina Embeddings v3.

use model_core::hf::{
    ATTENTION_TENSORS, FixedValue, GATED_TENSORS, HfClass, HfConfig, INPUT_NORM, Key, Keys,
    ModelFileError, NORM_BEFORE_FFN, RMS_EPS, ROPE_KEYS, SIZE_KEYS, TensorRule, TensorStep,
    in_layers, rope_base_is_stated, same, with,
};

use super::{LAYER_NORM_EPS, NOT_CAUSAL, activation, as_u32};

/// The classes of this file.
pub(super) const CLASSES: &[HfClass] = &[
    EUROBERT,
    HfClass {
        name: "EuroBertForMaskedLM",
        ..EUROBERT
    },
    NEOBERT,
    HfClass {
        name: "NeoBERTLMHead",
        ..NEOBERT
    },
    JINA_V3,
];

/// EuroBERT (Boizard et al., arXiv 2503.05500): the names of Llama.
const EUROBERT: HfClass = HfClass {
    name: "EuroBertModel",
    architecture: "eurobert",
    keys: &[SIZE_KEYS, RMS_EPS, ROPE_KEYS, EUROBERT_KEYS],
    tensors: &[
        EUROBERT_INPUT,
        INPUT_NORM,
        ATTENTION_TENSORS,
        NORM_BEFORE_FFN,
        GATED_TENSORS,
    ],
    unused: &["lm_head.weight"],
    ..HfClass::EMPTY
};

const EUROBERT_KEYS: &[Key] = &[
    Key::Only {
        from: "attention_bias",
        is: FixedValue::Flag(false),
    },
    Key::Only {
        from: "mlp_bias",
        is: FixedValue::Flag(false),
    },
    Key::Only {
        from: "is_causal",
        is: FixedValue::Flag(false),
    },
    NOT_CAUSAL,
    Key::With(|config, keys| activation(config, keys, "hidden_act")),
    // The published class has another one than that of transformers where a config has none.
    Key::With(rope_base_is_stated),
];

const EUROBERT_INPUT: &[TensorRule] = &[
    same("token_embd.weight", "model.embed_tokens.weight"),
    same("output_norm.weight", "model.norm.weight"),
];

/// NeoBERT (Le Breton et al., arXiv 2502.19587).
const NEOBERT: HfClass = HfClass {
    name: "NeoBERT",
    architecture: "neo-bert",
    keys: &[SIZE_KEYS, NEOBERT_KEYS],
    tensors: &[NEOBERT_TENSORS, NEOBERT_LAYERS],
    unused: &["decoder.weight", "decoder.bias"],
    aliases: &[("max_position_embeddings", "max_length")],
    ..HfClass::EMPTY
};

const NEOBERT_KEYS: &[Key] = &[
    Key::Number {
        to: "attention.layer_norm_rms_epsilon",
        from: "norm_eps",
    },
    Key::Only {
        from: "hidden_act",
        is: FixedValue::Text(&["SwiGLU", "swiglu"]),
    },
    Key::Only {
        from: "rms_norm",
        is: FixedValue::Flag(true),
    },
    Key::Only {
        from: "rope",
        is: FixedValue::Flag(true),
    },
    Key::Only {
        from: "ngpt",
        is: FixedValue::Flag(false),
    },
    NOT_CAUSAL,
    Key::With(neobert_hidden),
    Key::With(|_, keys| {
        // The class has no key for it.
        keys.set("rope.freq_base", 10_000.0f32);
        Ok(())
    }),
];

/// Two thirds of the width that the config names, since there are two matrices instead of one,
/// in whole eights.
fn neobert_hidden(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let hidden = 2 * config.count("intermediate_size")? / 3;
    keys.set("feed_forward_length", as_u32(hidden.next_multiple_of(8)));
    Ok(())
}

fn heads(config: &HfConfig) -> Result<usize, ModelFileError> {
    config.count("num_attention_heads")
}

const NEOBERT_TENSORS: &[TensorRule] = &[
    same("token_embd.weight", "model.encoder.weight"),
    same("enc.output_norm.weight", "model.layer_norm.weight"),
];

const NEOBERT_LAYERS: &[TensorRule] = &in_layers(
    "model.transformer_encoder.{l}.",
    [
        same("attn_norm.weight", "attention_norm.weight"),
        // Queries, keys and values of one head after those of another.
        with(
            "attn_qkv.weight",
            "qkv.weight",
            &[TensorStep::PartsTogether {
                groups: heads,
                of: 3,
            }],
        ),
        same("attn_output.weight", "wo.weight"),
        same("ffn_norm.weight", "ffn_norm.weight"),
        same("ffn_up.weight", "ffn.w12.weight"),
        same("ffn_down.weight", "ffn.w3.weight"),
    ],
);

/// Jina Embeddings v3 (Sturua et al., arXiv 2409.10173), without adapters.
const JINA_V3: HfClass = HfClass {
    name: "JinaEmbeddingsV3Model",
    architecture: "jina-bert-v3",
    keys: &[SIZE_KEYS, ROPE_KEYS, JINA_V3_KEYS],
    tensors: &[FLASH_INPUT, JINA_V3_LAYERS],
    unused: &["pooler.dense.weight", "pooler.dense.bias"],
    defaults: &[("rope_theta", 20_000)],
    ..HfClass::EMPTY
};

const JINA_V3_KEYS: &[Key] = &[
    LAYER_NORM_EPS,
    Key::Only {
        from: "is_decoder",
        is: FixedValue::Flag(false),
    },
    NOT_CAUSAL,
    Key::With(|config, keys| activation(config, keys, "hidden_act")),
];

/// The tensors before layers that have the names of flash-attention's BERT.
pub(super) const FLASH_INPUT: &[TensorRule] = &[
    same("token_embd.weight", "embeddings.word_embeddings.weight"),
    same(
        "token_types.weight",
        "embeddings.token_type_embeddings.weight",
    ),
    same("token_embd_norm.weight", "emb_ln.weight"),
    same("token_embd_norm.bias", "emb_ln.bias"),
];

const JINA_V3_LAYERS: &[TensorRule] = &in_layers(
    "encoder.layers.{l}.",
    [
        same("attn_qkv.weight", "mixer.Wqkv.weight"),
        same("attn_qkv.bias", "mixer.Wqkv.bias"),
        same("attn_output.weight", "mixer.out_proj.weight"),
        same("attn_output.bias", "mixer.out_proj.bias"),
        same("attn_output_norm.weight", "norm1.weight"),
        same("attn_output_norm.bias", "norm1.bias"),
        same("ffn_up.weight", "mlp.fc1.weight"),
        same("ffn_up.bias", "mlp.fc1.bias"),
        same("ffn_down.weight", "mlp.fc2.weight"),
        same("ffn_down.bias", "mlp.fc2.bias"),
        same("layer_output_norm.weight", "norm2.weight"),
        same("layer_output_norm.bias", "norm2.bias"),
    ],
);
