//! [`CLASSES`]: diffusion language models, whose tokens see each other.

use model_core::architecture::MaskPlace;
use model_core::hf::{
    FixedValue, Heads, HfClass, HfConfig, Key, Keys, ModelFileError, RMS_EPS, ROPE_KEYS, SILU,
    SIZE_KEYS, TensorRule, TensorStep, full_attention, in_layers, only, rope_base_is_stated, same,
    with,
};

use super::keys::{EXPERT_KEYS, QWEN3_MOE_KEYS};
use super::recent::OFF;
use super::routed::sum_of_chosen;
use super::tensors::QWEN3_MOE_TENSORS;
use super::{LLAMA, QWEN2};
use crate::read::SHIFTED_LOGITS;

/// All classes of this file.
pub(super) const CLASSES: &[HfClass] = &[
    HfClass {
        name: "DreamModel",
        architecture: "dream",
        keys: &[
            SIZE_KEYS,
            RMS_EPS,
            ROPE_KEYS,
            &[
                SILU,
                Key::With(full_attention),
                Key::With(rope_base_is_stated),
                Key::With(|_, keys| of_masks(keys, MaskPlace::Before)),
            ],
        ],
        ..QWEN2
    },
    HfClass {
        name: "LLaDAModelLM",
        architecture: "llada",
        keys: &[SIZE_KEYS, RMS_EPS, ROPE_KEYS, LLADA_KEYS],
        tensors: &[LLADA_TENSORS, LLADA_LAYERS],
        aliases: &[
            ("hidden_act", "activation_type"),
            ("hidden_size", "d_model"),
            ("intermediate_size", "mlp_hidden_size"),
            ("max_position_embeddings", "max_sequence_length"),
            ("num_attention_heads", "n_heads"),
            ("num_hidden_layers", "n_layers"),
            ("num_key_value_heads", "n_kv_heads"),
            ("tie_word_embeddings", "weight_tying"),
        ],
        ..LLAMA
    },
    LLADA_MOE,
    HfClass {
        name: "LLaDAMoEModelLM",
        ..LLADA_MOE
    },
    RND1,
    HfClass {
        name: "RND1LM",
        ..RND1
    },
];

/// Qwen 3's mixtures, whose tokens see each other.
const RND1: HfClass = HfClass {
    name: "RND1",
    architecture: "rnd1",
    keys: &[
        SIZE_KEYS,
        RMS_EPS,
        ROPE_KEYS,
        EXPERT_KEYS,
        QWEN3_MOE_KEYS,
        &[
            only("attention_bias", OFF),
            Key::With(rope_base_is_stated),
            Key::With(|_, keys| of_masks(keys, MaskPlace::Before)),
        ],
    ],
    tensors: QWEN3_MOE_TENSORS,
    defaults: &[("head_dim", 128)],
    ..LLAMA
};

const LLADA_MOE: HfClass = HfClass {
    name: "LLaDAMoEModel",
    architecture: "llada-moe",
    keys: &[SIZE_KEYS, RMS_EPS, ROPE_KEYS, EXPERT_KEYS, LLADA_MOE_KEYS],
    tensors: QWEN3_MOE_TENSORS,
    aliases: &[("intermediate_size", "dense_intermediate_size")],
    ..LLAMA
};

/// Tokens see later ones, and the logits of a mask are in its row, or in the one before.
fn of_masks(keys: &mut Keys, place: MaskPlace) -> Result<(), ModelFileError> {
    keys.set("attention.causal", false);
    keys.set_whole(SHIFTED_LOGITS, place == MaskPlace::Before);
    Ok(())
}

const LLADA_KEYS: &[Key] = &[
    SILU,
    only("alibi", OFF),
    only("attention_layer_norm", OFF),
    only("bias_for_layer_norm", OFF),
    only("block_type", FixedValue::Text(&["llama"])),
    only("include_bias", OFF),
    only("include_qkv_bias", OFF),
    only("input_emb_norm", OFF),
    only("layer_norm_type", FixedValue::Text(&["rms"])),
    only("multi_query_attention", OFF),
    only("rope", FixedValue::Flag(true)),
    only("scale_logits", OFF),
    Key::With(rope_base_is_stated),
    Key::With(|_, keys| of_masks(keys, MaskPlace::Own)),
];

const LLADA_TENSORS: &[TensorRule] = &[
    same("token_embd.weight", "model.transformer.wte.weight"),
    same("output_norm.weight", "model.transformer.ln_f.weight"),
    same("output.weight", "model.transformer.ff_out.weight"),
];

const LLADA_LAYERS: &[TensorRule] = &in_layers(
    "model.transformer.blocks.{l}.",
    [
        same("attn_norm.weight", "attn_norm.weight"),
        with(
            "attn_q.weight",
            "q_proj.weight",
            &[TensorStep::Pairs(Heads::Query)],
        ),
        with(
            "attn_k.weight",
            "k_proj.weight",
            &[TensorStep::Pairs(Heads::KeyValue)],
        ),
        same("attn_v.weight", "v_proj.weight"),
        same("attn_output.weight", "attn_out.weight"),
        same("ffn_norm.weight", "ff_norm.weight"),
        same("ffn_gate.weight", "ff_proj.weight"),
        same("ffn_up.weight", "up_proj.weight"),
        same("ffn_down.weight", "ff_out.weight"),
    ],
);

const LLADA_MOE_KEYS: &[Key] = &[
    Key::With(rope_base_is_stated),
    SILU,
    Key::Count {
        to: "expert_feed_forward_length",
        from: "expert_intermediate_size",
    },
    only("attention_bias", OFF),
    only("qk_layernorm", FixedValue::Flag(true)),
    only("score_function", FixedValue::Text(&["softmax"])),
    Key::With(llada_moe),
];

/// The mixtures of published files: every layer has one, without a shared expert.
fn llada_moe(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    sum_of_chosen(config, keys)?;
    for key in ["clip_qkv", "shared_expert_intermediate_size"] {
        if config.optional_number(key)?.is_some() {
            return Err(config.wrong(key, "null"));
        }
    }
    let layers = config.optional_numbers("moe_layer_freq")?;
    if layers.is_some_and(|layers| layers.iter().any(|&of| of != 1.0)) {
        return Err(config.wrong("moe_layer_freq", "1 for every layer"));
    }
    let factor = "routed_scaling_factor";
    if config
        .optional_number(factor)?
        .is_some_and(|factor| factor != 1.0)
    {
        return Err(config.wrong(factor, "1"));
    }
    of_masks(keys, MaskPlace::Own)
}
