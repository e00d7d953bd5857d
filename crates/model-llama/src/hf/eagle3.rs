//! Directories of EAGLE-3 heads, as they are published under several names of classes.

use model_core::gguf::Array;
use model_core::hf::{
    ClassWhen, DECODER_KEYS, FixedValue, GATED, Heads, HfClass, HfConfig, HfHead, Key, Keys,
    ModelFileError, RMS_EPS, ROPE_KEYS, SILU, TensorRule, TensorStep, full_attention, in_stack,
    only, same, with,
};

use super::LLAMA;
use crate::eagle3::{
    DRAFT_VOCAB, NORM_BEFORE_FC, NORM_BEFORE_RESIDUAL, TARGET_LAYERS, TARGET_WIDTH,
    TOKENS_BY_DISTANCE,
};

/// All classes.
pub(super) const CLASSES: &[HfClass] = &[
    EAGLE3,
    HfClass {
        name: "Eagle3LlamaForCausalLM",
        ..EAGLE3
    },
    HfClass {
        name: "Eagle3DraftModel",
        section: Some("transformer_layer_config"),
        ..EAGLE3
    },
    HfClass {
        name: "Eagle3Speculator",
        section: Some("transformer_layer_config"),
        ..EAGLE3
    },
    // Some heads call themselves a Llama.
    HfClass {
        name: "LlamaForCausalLM",
        when: ClassWhen::Counts("draft_vocab_size"),
        ..EAGLE3
    },
];

const EAGLE3: HfClass = HfClass {
    name: "LlamaForCausalLMEagle3",
    architecture: "eagle3",
    keys: &[
        DECODER_KEYS,
        RMS_EPS,
        ROPE_KEYS,
        VARIANTS,
        &[SILU, Key::With(head_keys)],
    ],
    tensors: &[
        OUTER,
        NORMS,
        ATTENTION,
        FEED_FORWARD,
        NORMS_0,
        ATTENTION_0,
        FEED_FORWARD_0,
    ],
    unused: &["t2d"],
    head: HfHead::Own,
    ..LLAMA
};

const OUTER: &[TensorRule] = &[
    same("fc.weight", "fc.weight"),
    same("enc.output_norm.weight", "input_norm.weight"),
    same("token_embd.weight", "embed_tokens.weight"),
    same("output_norm.weight", "norm.weight"),
    same("output.weight", "lm_head.weight"),
    same("d2t", "d2t"),
];

const LAYER_NORMS: [TensorRule; 3] = [
    same("attn_norm.weight", "input_layernorm.weight"),
    same("attn_norm_2.weight", "hidden_norm.weight"),
    same("ffn_norm.weight", "post_attention_layernorm.weight"),
];

const LAYER_ATTENTION: [TensorRule; 8] = [
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
    same("attn_output.weight", "o_proj.weight"),
    with(
        "attn_q.bias",
        "q_proj.bias",
        &[TensorStep::Pairs(Heads::Query)],
    ),
    with(
        "attn_k.bias",
        "k_proj.bias",
        &[TensorStep::Pairs(Heads::KeyValue)],
    ),
    same("attn_v.bias", "v_proj.bias"),
    same("attn_output.bias", "o_proj.bias"),
];

/// The one layer, by its name in most files, and in those of speculators.
const NORMS: &[TensorRule] = &in_stack("blk.0.", "midlayer.", LAYER_NORMS);
const ATTENTION: &[TensorRule] = &in_stack("blk.0.", "midlayer.self_attn.", LAYER_ATTENTION);
const FEED_FORWARD: &[TensorRule] = &in_stack("blk.0.", "midlayer.mlp.", GATED);
const NORMS_0: &[TensorRule] = &in_stack("blk.0.", "layers.0.", LAYER_NORMS);
const ATTENTION_0: &[TensorRule] = &in_stack("blk.0.", "layers.0.self_attn.", LAYER_ATTENTION);
const FEED_FORWARD_0: &[TensorRule] = &in_stack("blk.0.", "layers.0.mlp.", GATED);

/// Settings of heads that compute something else: EAGLE-1 and MTP, several tokens at once, norms of
/// each layer's rows or of the rows that go on, windows.
const VARIANTS: &[Key] = &[
    Key::With(|config, _| config.check_object(OWN)),
    only(
        "eagle_config.eagle_decoder_type",
        FixedValue::Text(&["llama"]),
    ),
    only("eagle_config.use_aux_hidden_state", FixedValue::Flag(true)),
    only(
        "eagle_config.use_input_layernorm_in_first_layer",
        FixedValue::Flag(true),
    ),
    only("eagle_config.use_last_layernorm", FixedValue::Flag(true)),
    only("eagle_config.use_mtp_layernorm", FixedValue::Flag(false)),
    only("eagle_config.next_layer_regular", FixedValue::Flag(true)),
    only("fc_norm", FixedValue::Flag(false)),
    only("norm_output", FixedValue::Flag(false)),
    Key::With(one_at_once),
    Key::With(full_attention),
];

/// The object that some files have settings of heads in.
const OWN: &str = "eagle_config";

/// The layers whose rows are read: before those of these numbers, and behind those.
const BEFORE_LAYERS: &str = "eagle_aux_hidden_state_layer_ids";
const BEHIND_LAYERS: &str = "eagle_config.eagle_aux_hidden_state_layer_ids";

/// One token is drafted after the other.
fn one_at_once(config: &HfConfig, _: &mut Keys) -> Result<(), ModelFileError> {
    let key = "eagle_config.parallel_draft_step";
    match config.optional_count(key)? {
        None | Some(1) => Ok(()),
        Some(_) => Err(config.wrong(key, "1: one token after the other")),
    }
}

/// The rows of the model that it reads, and the tokens that it knows.
fn head_keys(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    for (key, n_behind) in [(BEFORE_LAYERS, 0), (BEHIND_LAYERS, 1)] {
        let named = config.optional_numbers(key)?.unwrap_or_default();
        let before = |&layer: &f64| whole(layer)?.checked_add(n_behind);
        let layers: Option<Vec<u32>> = named.iter().map(before).collect();
        match layers {
            Some(layers) if layers.is_empty() => {}
            Some(layers) if layers.len() == 3 => {
                keys.set(TARGET_LAYERS, Array::U32(layers));
                break;
            }
            _ => return Err(config.wrong(key, "a list of three layers")),
        }
    }
    for key in [TARGET_WIDTH, DRAFT_VOCAB] {
        if let Some(count) = config.optional_count(key)? {
            keys.set(key, u32::try_from(count).unwrap_or(u32::MAX));
        }
    }
    for flag in [NORM_BEFORE_RESIDUAL, NORM_BEFORE_FC] {
        let own = config.optional_flag(&format!("{OWN}.{flag}"))?;
        if let Some(value) = config.optional_flag(flag)?.or(own) {
            keys.set(flag, value);
        }
    }
    keys.set(TOKENS_BY_DISTANCE, true);
    Ok(())
}

/// The number of a layer.
fn whole(number: f64) -> Option<u32> {
    let layer = number as u32;
    (f64::from(layer) == number).then_some(layer)
}
