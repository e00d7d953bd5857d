//! T5 (Raffel et al., arXiv 1910.10683), T5 v1.1, Flan-T5 and mT5.

use model_core::hf::{
    FixedValue, HfClass, HfConfig, Key, Keys, ModelFileError, TensorRule, VOCAB_SIZE, in_stack,
    only, same,
};
use model_core::hyperparameters::{ACTIVATION, activation_named, activation_names};

use super::as_u32;
use crate::seq2seq::read::{BUCKETS, DECODER_LAYERS, FORCED, MAX_DISTANCE, OUTPUT_SCALE, START};

/// The classes of this file.
pub(super) const CLASSES: &[HfClass] = &[
    T5,
    HfClass {
        name: "MT5ForConditionalGeneration",
        ..T5
    },
];

const T5: HfClass = HfClass {
    name: "T5ForConditionalGeneration",
    architecture: "t5",
    keys: &[T5_KEYS],
    tensors: &[
        T5_ENDS,
        ENCODER_ATTENTION,
        ENCODER_FEED_FORWARD,
        DECODER_ATTENTION,
        CROSS_ATTENTION,
        DECODER_FEED_FORWARD,
    ],
    unused: &[
        "encoder.embed_tokens.weight",
        "decoder.embed_tokens.weight",
        // Published files of T5 have one, which transformers ignores: sources have no distances.
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
    ],
    body: "",
    defaults: &[
        ("relative_attention_num_buckets", 32),
        ("relative_attention_max_distance", 128),
    ],
    derive: Some(|config, weights| {
        if is_tied(config)? {
            weights.forget("output.weight");
        }
        Ok(())
    }),
    ..HfClass::EMPTY
};

const T5_KEYS: &[Key] = &[
    Key::Count {
        to: "block_count",
        from: "num_layers",
    },
    Key::CountOr {
        to: DECODER_LAYERS,
        from: "num_decoder_layers",
        or: "num_layers",
    },
    Key::Count {
        to: "embedding_length",
        from: "d_model",
    },
    Key::Count {
        to: "feed_forward_length",
        from: "d_ff",
    },
    Key::Count {
        to: "attention.head_count",
        from: "num_heads",
    },
    Key::Count {
        to: "attention.key_length",
        from: "d_kv",
    },
    Key::Count {
        to: "attention.value_length",
        from: "d_kv",
    },
    Key::Number {
        to: "attention.layer_norm_rms_epsilon",
        from: "layer_norm_epsilon",
    },
    Key::Count {
        to: BUCKETS,
        from: "relative_attention_num_buckets",
    },
    Key::Count {
        to: MAX_DISTANCE,
        from: "relative_attention_max_distance",
    },
    VOCAB_SIZE,
    only("is_decoder", FixedValue::Flag(false)),
    only("is_encoder_decoder", FixedValue::Flag(true)),
    Key::With(|config, keys| {
        let n = config.optional_count("n_positions")?.unwrap_or(512);
        keys.set("context_length", as_u32(n));
        Ok(())
    }),
    Key::With(start),
    Key::With(feed_forward),
    Key::With(output_scale),
];

/// The token that begins a text, and the one that follows it where the config forces one.
pub(super) fn start(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let first = config.number("decoder_start_token_id")?;
    let forced = config.optional_number("forced_bos_token_id")?;
    for (to, key, id) in [
        (START, "decoder_start_token_id", Some(first)),
        (FORCED, "forced_bos_token_id", forced),
    ] {
        match id {
            None => {}
            Some(id) if id.fract() == 0.0 && (0.0..1e9).contains(&id) => keys.set(to, id as u32),
            Some(_) => return Err(config.wrong(key, "a token id")),
        }
    }
    Ok(())
}

/// The gate, if there is one, and the activation.
fn feed_forward(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let key = "feed_forward_proj";
    let form = config.optional_text(key)?.unwrap_or("relu");
    let (is_gated, name) = match form.strip_prefix("gated-") {
        Some(name) => (true, name),
        None => (false, form),
    };
    // What transformers makes of it, unless the file has more to say.
    let name = match (is_gated, name) {
        (true, "gelu") => "gelu_new",
        (_, name) => name,
    };
    let (named_by, name) = match config.optional_text("dense_act_fn")? {
        Some(own) => ("dense_act_fn", own),
        None => (key, name),
    };
    if config
        .optional_flag("is_gated_act")?
        .is_some_and(|flag| flag != is_gated)
    {
        return Err(config.wrong("is_gated_act", format!("{is_gated}, as '{key}' has it")));
    }
    if activation_named(name).is_none() {
        let known = activation_names();
        let wanted = format!("one of: {known}, or 'gated-' and one of them");
        return Err(config.wrong(named_by, wanted));
    }
    keys.set(ACTIVATION, name);
    Ok(())
}

/// True if the output matrix is the embedding.
fn is_tied(config: &HfConfig) -> Result<bool, ModelFileError> {
    Ok(config.optional_flag("tie_word_embeddings")?.unwrap_or(true))
}

/// Models whose output matrix is the embedding scale what it multiplies.
fn output_scale(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let is_scaled = match config.optional_flag("scale_decoder_outputs")? {
        Some(is_scaled) => is_scaled,
        None => is_tied(config)?,
    };
    let dim = config.count("d_model")?;
    let scale = if is_scaled {
        1.0 / (dim as f32).sqrt()
    } else {
        1.0
    };
    keys.set(OUTPUT_SCALE, scale);
    Ok(())
}

const T5_ENDS: &[TensorRule] = &[
    same("token_embd.weight", "shared.weight"),
    same("output.weight", "lm_head.weight"),
    same("enc.output_norm.weight", "encoder.final_layer_norm.weight"),
    same("dec.output_norm.weight", "decoder.final_layer_norm.weight"),
];

/// Attention of a layer over the tokens of its own stack.
const SELF_ATTENTION: [TensorRule; 6] = [
    same("attn_q.weight", "SelfAttention.q.weight"),
    same("attn_k.weight", "SelfAttention.k.weight"),
    same("attn_v.weight", "SelfAttention.v.weight"),
    same("attn_o.weight", "SelfAttention.o.weight"),
    same(
        "attn_rel_b.weight",
        "SelfAttention.relative_attention_bias.weight",
    ),
    same("attn_norm.weight", "layer_norm.weight"),
];

/// The feed-forward block of a layer, with a gate or without.
const FEED_FORWARD: [TensorRule; 5] = [
    same("ffn_up.weight", "DenseReluDense.wi.weight"),
    same("ffn_gate.weight", "DenseReluDense.wi_0.weight"),
    same("ffn_up.weight", "DenseReluDense.wi_1.weight"),
    same("ffn_down.weight", "DenseReluDense.wo.weight"),
    same("ffn_norm.weight", "layer_norm.weight"),
];

const ENCODER_ATTENTION: &[TensorRule] =
    &in_stack("enc.blk.{l}.", "encoder.block.{l}.layer.0.", SELF_ATTENTION);
const ENCODER_FEED_FORWARD: &[TensorRule] =
    &in_stack("enc.blk.{l}.", "encoder.block.{l}.layer.1.", FEED_FORWARD);

const DECODER_ATTENTION: &[TensorRule] =
    &in_stack("dec.blk.{l}.", "decoder.block.{l}.layer.0.", SELF_ATTENTION);
const DECODER_FEED_FORWARD: &[TensorRule] =
    &in_stack("dec.blk.{l}.", "decoder.block.{l}.layer.2.", FEED_FORWARD);
const CROSS_ATTENTION: &[TensorRule] = &in_stack(
    "dec.blk.{l}.",
    "decoder.block.{l}.layer.1.",
    [
        same("cross_attn_q.weight", "EncDecAttention.q.weight"),
        same("cross_attn_k.weight", "EncDecAttention.k.weight"),
        same("cross_attn_v.weight", "EncDecAttention.v.weight"),
        same("cross_attn_o.weight", "EncDecAttention.o.weight"),
        same("cross_attn_norm.weight", "layer_norm.weight"),
    ],
);
