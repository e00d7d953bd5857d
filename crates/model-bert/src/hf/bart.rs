//! BART (Lewis et al., arXiv 1910.13461): positions and norms as in BERT, in an encoder and a
//! decoder. M2M-100 (Fan et al., arXiv 2010.11125) and NLLB-200: the same with norms before blocks
//! and waves as positions.

use model_core::blocks::POSITION_EMBEDDING;
use model_core::hf::{
    FixedValue, HfClass, HfConfig, Key, Keys, ModelFileError, TRAINED_LENGTH, TensorRule,
    TensorStep, VOCAB_SIZE, in_stack, only, same, with,
};

use super::t5::start;
use super::{activation, first_position};
use crate::seq2seq::read::{DECODER_HEADS, DECODER_HIDDEN, DECODER_LAYERS, EMBEDDING_SCALE};

/// The classes of this file.
pub(super) const CLASSES: &[HfClass] = &[BART, M2M_100];

const BART: HfClass = HfClass {
    name: "BartForConditionalGeneration",
    architecture: "bart",
    keys: &[BART_KEYS],
    tensors: &[BART_ENDS, BART_ENCODER, BART_DECODER, BART_CROSS_ATTENTION],
    unused: &[
        "model.encoder.embed_tokens.weight",
        "model.decoder.embed_tokens.weight",
        "lm_head.weight",
    ],
    defaults: &[("decoder_start_token_id", 2)],
    ..HfClass::EMPTY
};

const M2M_100: HfClass = HfClass {
    name: "M2M100ForConditionalGeneration",
    architecture: "m2m-100",
    keys: &[
        SEQ2SEQ_KEYS,
        &[Key::With(usual_embedding_scale), Key::With(wave_rows)],
    ],
    tensors: &[M2M_ENDS, BART_ENCODER, BART_DECODER, BART_CROSS_ATTENTION],
    unused: &[
        "model.encoder.embed_tokens.weight",
        "model.decoder.embed_tokens.weight",
        "model.encoder.embed_positions.weights",
        "model.decoder.embed_positions.weights",
        "lm_head.weight",
    ],
    defaults: &[("decoder_start_token_id", 2), ("pad_token_id", 1)],
    ..HfClass::EMPTY
};

/// The keys in the configs of both.
const SEQ2SEQ_KEYS: &[Key] = &[
    Key::Count {
        to: "block_count",
        from: "encoder_layers",
    },
    Key::Count {
        to: DECODER_LAYERS,
        from: "decoder_layers",
    },
    Key::Count {
        to: "embedding_length",
        from: "d_model",
    },
    Key::Count {
        to: "feed_forward_length",
        from: "encoder_ffn_dim",
    },
    Key::Count {
        to: DECODER_HIDDEN,
        from: "decoder_ffn_dim",
    },
    Key::Count {
        to: "attention.head_count",
        from: "encoder_attention_heads",
    },
    Key::Count {
        to: DECODER_HEADS,
        from: "decoder_attention_heads",
    },
    TRAINED_LENGTH,
    VOCAB_SIZE,
    // PyTorch's, which no config names.
    Key::With(|_, keys| {
        keys.set("attention.layer_norm_epsilon", 1e-5f32);
        Ok(())
    }),
    Key::With(|config, keys| activation(config, keys, "activation_function")),
    Key::With(start),
    Key::With(embedding_scale),
    only("is_decoder", FixedValue::Flag(false)),
    only("is_encoder_decoder", FixedValue::Flag(true)),
    only("tie_word_embeddings", FixedValue::Flag(true)),
];

const BART_KEYS: &[Key] = &[
    Key::All(SEQ2SEQ_KEYS),
    // Switches of files older than transformers' class, which has one form.
    only("normalize_before", FixedValue::Flag(false)),
    only("normalize_embedding", FixedValue::Flag(true)),
    only("add_final_layer_norm", FixedValue::Flag(false)),
    only("static_position_embeddings", FixedValue::Flag(false)),
];

/// The square root of the width, where the config asks for a factor.
fn embedding_scale(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    if config.optional_flag("scale_embedding")? == Some(true) {
        keys.set(EMBEDDING_SCALE, (config.count("d_model")? as f32).sqrt());
    }
    Ok(())
}

/// The same where the config does not say whether there is one.
fn usual_embedding_scale(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    if config.value("scale_embedding").is_none() {
        keys.set(EMBEDDING_SCALE, (config.count("d_model")? as f32).sqrt());
    }
    Ok(())
}

/// Values of waves that are made at most: published models have half as many.
const MAX_VALUES: usize = 1 << 22;

/// Rows of sines and cosines, from the position after that of padding on, in the precision that
/// models were trained with.
fn wave_rows(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let (n_rows, dim) = (
        config.count("max_position_embeddings")?,
        config.count("d_model")?,
    );
    let half = dim / 2;
    if half < 2 {
        return Err(config.wrong("d_model", "at least 4"));
    }
    let most = MAX_VALUES / dim;
    if n_rows > most {
        let wanted = format!("at most {most}, as 'd_model' is {dim}");
        return Err(config.wrong("max_position_embeddings", wanted));
    }
    let first = first_position(config)?;
    let step = (10_000f64.ln() / (half as f64 - 1.0)) as f32;
    let frequencies: Vec<f32> = (0..half).map(|i| (i as f32 * -step).exp()).collect();
    let row = |at: usize| {
        let angles = frequencies.iter().map(move |f| (first + at) as f32 * f);
        let sines = angles.clone().map(|a| f64::from(a).sin() as f32);
        let cosines = angles.map(|a| f64::from(a).cos() as f32);
        // Of an odd width the last value is nothing.
        sines.chain(cosines).chain((2 * half < dim).then_some(0.0))
    };
    let mut rows = Vec::with_capacity(n_rows * dim);
    rows.extend((0..n_rows).flat_map(row));
    Ok(keys.add_matrix(POSITION_EMBEDDING, [n_rows, dim], &rows)?)
}

/// The first rows of the position tables are no positions.
fn n_before_positions(_: &HfConfig) -> Result<usize, ModelFileError> {
    Ok(2)
}

const POSITIONS: &[TensorStep] = &[TensorStep::RowsAfter(n_before_positions)];

const BART_ENDS: &[TensorRule] = &[
    same("token_embd.weight", "model.shared.weight"),
    with("output.bias", "final_logits_bias", &[TensorStep::Squeezed]),
    with(
        "enc.position_embd.weight",
        "model.encoder.embed_positions.weight",
        POSITIONS,
    ),
    with(
        "dec.position_embd.weight",
        "model.decoder.embed_positions.weight",
        POSITIONS,
    ),
    same(
        "enc.token_embd_norm.weight",
        "model.encoder.layernorm_embedding.weight",
    ),
    same(
        "enc.token_embd_norm.bias",
        "model.encoder.layernorm_embedding.bias",
    ),
    same(
        "dec.token_embd_norm.weight",
        "model.decoder.layernorm_embedding.weight",
    ),
    same(
        "dec.token_embd_norm.bias",
        "model.decoder.layernorm_embedding.bias",
    ),
];

const M2M_ENDS: &[TensorRule] = &[
    same("token_embd.weight", "model.shared.weight"),
    same("enc.output_norm.weight", "model.encoder.layer_norm.weight"),
    same("enc.output_norm.bias", "model.encoder.layer_norm.bias"),
    same("dec.output_norm.weight", "model.decoder.layer_norm.weight"),
    same("dec.output_norm.bias", "model.decoder.layer_norm.bias"),
];

/// The tensors of layers of both stacks.
const BART_LAYER: [TensorRule; 16] = [
    same("attn_q.weight", "self_attn.q_proj.weight"),
    same("attn_q.bias", "self_attn.q_proj.bias"),
    same("attn_k.weight", "self_attn.k_proj.weight"),
    same("attn_k.bias", "self_attn.k_proj.bias"),
    same("attn_v.weight", "self_attn.v_proj.weight"),
    same("attn_v.bias", "self_attn.v_proj.bias"),
    same("attn_o.weight", "self_attn.out_proj.weight"),
    same("attn_o.bias", "self_attn.out_proj.bias"),
    same("attn_norm.weight", "self_attn_layer_norm.weight"),
    same("attn_norm.bias", "self_attn_layer_norm.bias"),
    same("ffn_up.weight", "fc1.weight"),
    same("ffn_up.bias", "fc1.bias"),
    same("ffn_down.weight", "fc2.weight"),
    same("ffn_down.bias", "fc2.bias"),
    same("ffn_norm.weight", "final_layer_norm.weight"),
    same("ffn_norm.bias", "final_layer_norm.bias"),
];

const BART_ENCODER: &[TensorRule] =
    &in_stack("enc.blk.{l}.", "model.encoder.layers.{l}.", BART_LAYER);

const BART_DECODER: &[TensorRule] =
    &in_stack("dec.blk.{l}.", "model.decoder.layers.{l}.", BART_LAYER);

const BART_CROSS_ATTENTION: &[TensorRule] = &in_stack(
    "dec.blk.{l}.",
    "model.decoder.layers.{l}.",
    [
        same("cross_attn_q.weight", "encoder_attn.q_proj.weight"),
        same("cross_attn_q.bias", "encoder_attn.q_proj.bias"),
        same("cross_attn_k.weight", "encoder_attn.k_proj.weight"),
        same("cross_attn_k.bias", "encoder_attn.k_proj.bias"),
        same("cross_attn_v.weight", "encoder_attn.v_proj.weight"),
        same("cross_attn_v.bias", "encoder_attn.v_proj.bias"),
        same("cross_attn_o.weight", "encoder_attn.out_proj.weight"),
        same("cross_attn_o.bias", "encoder_attn.out_proj.bias"),
        same("cross_attn_norm.weight", "encoder_attn_layer_norm.weight"),
        same("cross_attn_norm.bias", "encoder_attn_layer_norm.bias"),
    ],
);
