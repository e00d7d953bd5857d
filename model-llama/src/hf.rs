//! [`CLASSES`]: how directories of the family's models are translated. Data over the tables that
//! [`model_core::hf`] shares.

use model_core::hf::{
    ATTENTION_TENSORS, DECODER_KEYS, EMBEDDING_TENSORS, Expected, GATED_TENSORS, Heads, HfClass,
    HfConfig, HfError, Key, Keys, RMS_EPS, ROPE_KEYS, RopeSettings, SILU, Step, TensorRule,
    full_attention, head_dim, same, window_of_all, windows_by_layer, with,
};
use model_core::windows::{FullLayer, WindowPattern};

/// Tables of buffers that old files hold.
const UNUSED: &[&str] = &["model.layers.{l}.self_attn.rotary_emb.inv_freq"];

const NORM_BEFORE_FFN: &[TensorRule] = &[same(
    "blk.{l}.ffn_norm.weight",
    "model.layers.{l}.post_attention_layernorm.weight",
)];

/// As in every `llama` file, rows of queries and keys are in pairs.
const PAIRED_ATTENTION: &[TensorRule] = &[
    same(
        "blk.{l}.attn_norm.weight",
        "model.layers.{l}.input_layernorm.weight",
    ),
    with(
        "blk.{l}.attn_q.weight",
        "model.layers.{l}.self_attn.q_proj.weight",
        &[Step::Pairs(Heads::Query)],
    ),
    with(
        "blk.{l}.attn_k.weight",
        "model.layers.{l}.self_attn.k_proj.weight",
        &[Step::Pairs(Heads::KeyValue)],
    ),
    same(
        "blk.{l}.attn_v.weight",
        "model.layers.{l}.self_attn.v_proj.weight",
    ),
    same(
        "blk.{l}.attn_output.weight",
        "model.layers.{l}.self_attn.o_proj.weight",
    ),
];

/// Gemma stores gains as their distance from 1.
const GEMMA_TENSORS: &[TensorRule] = &[
    same("token_embd.weight", "model.embed_tokens.weight"),
    with("output_norm.weight", "model.norm.weight", &[Step::PlusOne]),
    same("output.weight", "lm_head.weight"),
    with(
        "blk.{l}.attn_norm.weight",
        "model.layers.{l}.input_layernorm.weight",
        &[Step::PlusOne],
    ),
    with(
        "blk.{l}.post_attention_norm.weight",
        "model.layers.{l}.post_attention_layernorm.weight",
        &[Step::PlusOne],
    ),
    with(
        "blk.{l}.ffn_norm.weight",
        "model.layers.{l}.pre_feedforward_layernorm.weight",
        &[Step::PlusOne],
    ),
    with(
        "blk.{l}.post_ffw_norm.weight",
        "model.layers.{l}.post_feedforward_layernorm.weight",
        &[Step::PlusOne],
    ),
    with(
        "blk.{l}.attn_q_norm.weight",
        "model.layers.{l}.self_attn.q_norm.weight",
        &[Step::PlusOne],
    ),
    with(
        "blk.{l}.attn_k_norm.weight",
        "model.layers.{l}.self_attn.k_norm.weight",
        &[Step::PlusOne],
    ),
    same(
        "blk.{l}.attn_q.weight",
        "model.layers.{l}.self_attn.q_proj.weight",
    ),
    same(
        "blk.{l}.attn_k.weight",
        "model.layers.{l}.self_attn.k_proj.weight",
    ),
    same(
        "blk.{l}.attn_v.weight",
        "model.layers.{l}.self_attn.v_proj.weight",
    ),
    same(
        "blk.{l}.attn_output.weight",
        "model.layers.{l}.self_attn.o_proj.weight",
    ),
];

const LLAMA: HfClass = HfClass {
    name: "LlamaForCausalLM",
    architecture: "llama",
    keys: &[DECODER_KEYS, RMS_EPS, ROPE_KEYS, &[SILU]],
    tensors: &[
        EMBEDDING_TENSORS,
        PAIRED_ATTENTION,
        NORM_BEFORE_FFN,
        GATED_TENSORS,
    ],
    unused: UNUSED,
};

/// All classes.
pub(crate) const CLASSES: &[HfClass] = &[
    LLAMA,
    HfClass {
        name: "MistralForCausalLM",
        keys: &[
            DECODER_KEYS,
            RMS_EPS,
            ROPE_KEYS,
            &[SILU, Key::With(window_of_all)],
        ],
        ..LLAMA
    },
    HfClass {
        name: "Qwen2ForCausalLM",
        architecture: "qwen2",
        keys: &[
            DECODER_KEYS,
            RMS_EPS,
            ROPE_KEYS,
            &[SILU, Key::With(full_attention)],
        ],
        tensors: &[
            EMBEDDING_TENSORS,
            ATTENTION_TENSORS,
            NORM_BEFORE_FFN,
            GATED_TENSORS,
        ],
        unused: UNUSED,
    },
    HfClass {
        name: "Gemma3ForCausalLM",
        architecture: "gemma3",
        keys: &[DECODER_KEYS, RMS_EPS, GEMMA3_KEYS],
        tensors: &[GEMMA_TENSORS, GATED_TENSORS],
        unused: UNUSED,
    },
];

const GEMMA3_KEYS: &[Key] = &[
    Key::Only {
        from: "hidden_activation",
        is: Expected::Text(&["gelu_pytorch_tanh"]),
    },
    Key::Only {
        from: "use_bidirectional_attention",
        is: Expected::Flag(false),
    },
    Key::OptionalNumber {
        to: "attn_logit_softcapping",
        from: "attn_logit_softcapping",
    },
    Key::OptionalNumber {
        to: "final_logit_softcapping",
        from: "final_logit_softcapping",
    },
    Key::With(score_scale),
    Key::With(gemma3_windows),
    Key::With(gemma3_rope),
];

/// `query_pre_attn_scalar`, where it is not the size of a head.
fn score_scale(config: &HfConfig, keys: &mut Keys) -> Result<(), HfError> {
    let key = "query_pre_attn_scalar";
    match config.optional_number(key)? {
        Some(width) if !(width.is_finite() && width > 0.0) => {
            Err(config.wrong(key, "a number above 0"))
        }
        Some(width) if width != head_dim(config)? as f64 => {
            keys.set("attention.scale", width.sqrt().recip() as f32);
            Ok(())
        }
        _ => Ok(()),
    }
}

fn gemma3_windows(config: &HfConfig, keys: &mut Keys) -> Result<(), HfError> {
    let pattern = WindowPattern {
        period: 6,
        full: FullLayer::Last,
    };
    windows_by_layer(config, keys, pattern)
}

/// Windowed layers have a base of their own: in newer files among `rope_parameters`.
fn gemma3_rope(config: &HfConfig, keys: &mut Keys) -> Result<(), HfError> {
    RopeSettings::read(config, Some("full_attention"))?.write(config, keys)?;
    let local = match config.optional_number("rope_local_base_freq")? {
        Some(base) => base,
        None => RopeSettings::read(config, Some("sliding_attention"))?.theta,
    };
    keys.set("rope.freq_base_swa", local as f32);
    Ok(())
}
