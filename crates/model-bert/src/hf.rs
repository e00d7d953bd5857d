//! [`CLASSES`]: how directories of encoders are translated. Data over the tables that
//! [`model_core::hf`] shares. Heads that predict tokens are left out: an encoder gives rows, or the
//! scores of a classification head.

use model_core::gguf::Array;
use model_core::hf::{
    Expected, HfClass, HfConfig, Key, Keys, ModelFileError, RopeKind, RopeSettings, SIZE_KEYS,
    Step, TensorRule, layer_types, same, with,
};
use model_core::sentence::Pooling;

use crate::read::{ACTIVATION, ACTIVATIONS};

/// All classes.
pub(crate) const CLASSES: &[HfClass] = &[
    BERT,
    HfClass {
        name: "BertForMaskedLM",
        tensors: &[BERT_MASKED_TENSORS, BERT_MASKED_POSITIONS, BERT_OLD_NORMS],
        unused: BERT_HEADS,
        ..BERT
    },
    HfClass {
        name: "BertForPreTraining",
        tensors: &[BERT_MASKED_TENSORS, BERT_MASKED_POSITIONS, BERT_OLD_NORMS],
        unused: BERT_HEADS,
        ..BERT
    },
    HfClass {
        name: "BertForSequenceClassification",
        keys: &[SIZE_KEYS, BERT_KEYS, RANK],
        tensors: &[
            BERT_MASKED_TENSORS,
            BERT_MASKED_POSITIONS,
            BERT_OLD_NORMS,
            BERT_SCORES,
        ],
        unused: &["bert.embeddings.position_ids"],
        ..BERT
    },
    ROBERTA,
    HfClass {
        name: "RobertaForSequenceClassification",
        ..ROBERTA_SCORER
    },
    HfClass {
        name: "XLMRobertaModel",
        ..ROBERTA
    },
    HfClass {
        name: "XLMRobertaForSequenceClassification",
        ..ROBERTA_SCORER
    },
    MODERN_BERT,
    HfClass {
        name: "ModernBertForMaskedLM",
        tensors: &[MODERN_MASKED_TENSORS],
        unused: &[
            "head.dense.weight",
            "head.norm.weight",
            "decoder.weight",
            "decoder.bias",
        ],
        ..MODERN_BERT
    },
];

const BERT: HfClass = HfClass {
    name: "BertModel",
    architecture: "bert",
    keys: &[SIZE_KEYS, BERT_KEYS],
    tensors: &[BERT_TENSORS, BERT_POSITIONS],
    unused: &[
        "embeddings.position_ids",
        "pooler.dense.weight",
        "pooler.dense.bias",
    ],
    ..HfClass::EMPTY
};

const BERT_KEYS: &[Key] = &[
    Key::Number {
        to: "attention.layer_norm_epsilon",
        from: "layer_norm_eps",
    },
    Key::Only {
        from: "position_embedding_type",
        is: Expected::Text(&["absolute"]),
    },
    Key::Only {
        from: "is_decoder",
        is: Expected::Flag(false),
    },
    Key::Only {
        from: "add_cross_attention",
        is: Expected::Flag(false),
    },
    Key::With(not_causal),
    Key::With(|config, keys| activation(config, keys, "hidden_act")),
];

/// RoBERTa (Liu et al., arXiv 1907.11692) and XLM-RoBERTa: BERT whose positions begin after that of
/// the padding, with one token type.
const ROBERTA: HfClass = HfClass {
    name: "RobertaModel",
    keys: &[SIZE_KEYS, BERT_KEYS, ROBERTA_KEYS],
    tensors: &[BERT_TENSORS, ROBERTA_POSITIONS],
    ..BERT
};

const ROBERTA_SCORER: HfClass = HfClass {
    keys: &[SIZE_KEYS, BERT_KEYS, ROBERTA_KEYS, RANK],
    tensors: &[
        ROBERTA_SCORER_TENSORS,
        ROBERTA_SCORER_POSITIONS,
        ROBERTA_SCORES,
    ],
    unused: &[
        "roberta.embeddings.position_ids",
        "roberta.pooler.dense.weight",
        "roberta.pooler.dense.bias",
    ],
    ..ROBERTA
};

const ROBERTA_KEYS: &[Key] = &[Key::With(roberta_length)];

/// What comes out are the scores of pairs.
const RANK: &[Key] = &[Key::Constant {
    to: "pooling_type",
    value: Pooling::Rank.code(),
}];

/// The tensors of BERT after a prefix, without positions.
macro_rules! bert_tensors {
    ($prefix:literal) => {
        &[
            same(
                "token_embd.weight",
                concat!($prefix, "embeddings.word_embeddings.weight"),
            ),
            same(
                "token_types.weight",
                concat!($prefix, "embeddings.token_type_embeddings.weight"),
            ),
            bert_tensors!(@ $prefix, "token_embd_norm", "embeddings.LayerNorm", "weight"),
            bert_tensors!(@ $prefix, "token_embd_norm", "embeddings.LayerNorm", "bias"),
            bert_tensors!(@layer $prefix, "attn_q", "attention.self.query", "weight"),
            bert_tensors!(@layer $prefix, "attn_q", "attention.self.query", "bias"),
            bert_tensors!(@layer $prefix, "attn_k", "attention.self.key", "weight"),
            bert_tensors!(@layer $prefix, "attn_k", "attention.self.key", "bias"),
            bert_tensors!(@layer $prefix, "attn_v", "attention.self.value", "weight"),
            bert_tensors!(@layer $prefix, "attn_v", "attention.self.value", "bias"),
            bert_tensors!(@layer $prefix, "attn_output", "attention.output.dense", "weight"),
            bert_tensors!(@layer $prefix, "attn_output", "attention.output.dense", "bias"),
            bert_tensors!(
                @layer $prefix, "attn_output_norm", "attention.output.LayerNorm", "weight"
            ),
            bert_tensors!(@layer $prefix, "attn_output_norm", "attention.output.LayerNorm", "bias"),
            bert_tensors!(@layer $prefix, "ffn_up", "intermediate.dense", "weight"),
            bert_tensors!(@layer $prefix, "ffn_up", "intermediate.dense", "bias"),
            bert_tensors!(@layer $prefix, "ffn_down", "output.dense", "weight"),
            bert_tensors!(@layer $prefix, "ffn_down", "output.dense", "bias"),
            bert_tensors!(@layer $prefix, "layer_output_norm", "output.LayerNorm", "weight"),
            bert_tensors!(@layer $prefix, "layer_output_norm", "output.LayerNorm", "bias"),
        ]
    };
    (@ $prefix:literal, $to:literal, $from:literal, $kind:literal) => {
        same(concat!($to, ".", $kind), concat!($prefix, $from, ".", $kind))
    };
    (@layer $prefix:literal, $to:literal, $from:literal, $kind:literal) => {
        same(
            concat!("blk.{l}.", $to, ".", $kind),
            concat!($prefix, "encoder.layer.{l}.", $from, ".", $kind),
        )
    };
}

const BERT_TENSORS: &[TensorRule] = bert_tensors!("");
const BERT_MASKED_TENSORS: &[TensorRule] = bert_tensors!("bert.");
const ROBERTA_SCORER_TENSORS: &[TensorRule] = bert_tensors!("roberta.");

const BERT_POSITIONS: &[TensorRule] = &[same(
    "position_embd.weight",
    "embeddings.position_embeddings.weight",
)];
const BERT_MASKED_POSITIONS: &[TensorRule] = &[same(
    "position_embd.weight",
    "bert.embeddings.position_embeddings.weight",
)];
const ROBERTA_POSITIONS: &[TensorRule] = &[with(
    "position_embd.weight",
    "embeddings.position_embeddings.weight",
    &[Step::RowsAfter(first_position)],
)];
const ROBERTA_SCORER_POSITIONS: &[TensorRule] = &[with(
    "position_embd.weight",
    "roberta.embeddings.position_embeddings.weight",
    &[Step::RowsAfter(first_position)],
)];

/// The pooler and the scores.
const BERT_SCORES: &[TensorRule] = &[
    same("cls.weight", "bert.pooler.dense.weight"),
    same("cls.bias", "bert.pooler.dense.bias"),
    same("cls.output.weight", "classifier.weight"),
    same("cls.output.bias", "classifier.bias"),
];
const ROBERTA_SCORES: &[TensorRule] = &[
    same("cls.weight", "classifier.dense.weight"),
    same("cls.bias", "classifier.dense.bias"),
    same("cls.output.weight", "classifier.out_proj.weight"),
    same("cls.output.bias", "classifier.out_proj.bias"),
];

/// Norms of files that were made by the first implementation.
const BERT_OLD_NORMS: &[TensorRule] = &[
    same("token_embd_norm.weight", "bert.embeddings.LayerNorm.gamma"),
    same("token_embd_norm.bias", "bert.embeddings.LayerNorm.beta"),
    same(
        "blk.{l}.attn_output_norm.weight",
        "bert.encoder.layer.{l}.attention.output.LayerNorm.gamma",
    ),
    same(
        "blk.{l}.attn_output_norm.bias",
        "bert.encoder.layer.{l}.attention.output.LayerNorm.beta",
    ),
    same(
        "blk.{l}.layer_output_norm.weight",
        "bert.encoder.layer.{l}.output.LayerNorm.gamma",
    ),
    same(
        "blk.{l}.layer_output_norm.bias",
        "bert.encoder.layer.{l}.output.LayerNorm.beta",
    ),
];

/// What predicts tokens or the next sentence.
const BERT_HEADS: &[&str] = &[
    "bert.embeddings.position_ids",
    "bert.pooler.dense.weight",
    "bert.pooler.dense.bias",
    "cls.predictions.bias",
    "cls.predictions.decoder.weight",
    "cls.predictions.decoder.bias",
    "cls.predictions.transform.dense.weight",
    "cls.predictions.transform.dense.bias",
    "cls.predictions.transform.LayerNorm.weight",
    "cls.predictions.transform.LayerNorm.bias",
    "cls.predictions.transform.LayerNorm.gamma",
    "cls.predictions.transform.LayerNorm.beta",
    "cls.seq_relationship.weight",
    "cls.seq_relationship.bias",
];

const MODERN_BERT: HfClass = HfClass {
    name: "ModernBertModel",
    architecture: "modern-bert",
    keys: &[SIZE_KEYS, MODERN_KEYS],
    tensors: &[MODERN_TENSORS],
    ..HfClass::EMPTY
};

const MODERN_KEYS: &[Key] = &[
    Key::Number {
        to: "attention.layer_norm_epsilon",
        from: "norm_eps",
    },
    Key::Only {
        from: "norm_bias",
        is: Expected::Flag(false),
    },
    Key::Only {
        from: "attention_bias",
        is: Expected::Flag(false),
    },
    Key::Only {
        from: "mlp_bias",
        is: Expected::Flag(false),
    },
    Key::With(not_causal),
    Key::With(|config, keys| activation(config, keys, "hidden_activation")),
    Key::With(modern_windows),
    Key::With(modern_rope),
];

/// The tensors of ModernBERT after a prefix.
macro_rules! modern_tensors {
    ($prefix:literal) => {
        &[
            same(
                "token_embd.weight",
                concat!($prefix, "embeddings.tok_embeddings.weight"),
            ),
            same(
                "token_embd_norm.weight",
                concat!($prefix, "embeddings.norm.weight"),
            ),
            same("output_norm.weight", concat!($prefix, "final_norm.weight")),
            modern_tensors!(@layer $prefix, "attn_norm", "attn_norm"),
            modern_tensors!(@layer $prefix, "attn_qkv", "attn.Wqkv"),
            modern_tensors!(@layer $prefix, "attn_output", "attn.Wo"),
            modern_tensors!(@layer $prefix, "ffn_norm", "mlp_norm"),
            modern_tensors!(@layer $prefix, "ffn_up", "mlp.Wi"),
            modern_tensors!(@layer $prefix, "ffn_down", "mlp.Wo"),
        ]
    };
    (@layer $prefix:literal, $to:literal, $from:literal) => {
        same(
            concat!("blk.{l}.", $to, ".weight"),
            concat!($prefix, "layers.{l}.", $from, ".weight"),
        )
    };
}

const MODERN_TENSORS: &[TensorRule] = modern_tensors!("");
const MODERN_MASKED_TENSORS: &[TensorRule] = modern_tensors!("model.");

/// The row of the position table that the first token has.
fn first_position(config: &HfConfig) -> Result<usize, ModelFileError> {
    match config.optional_number("pad_token_id")? {
        None => Ok(2),
        Some(id) if id.fract() == 0.0 && (0.0..1e9).contains(&id) => Ok(id as usize + 1),
        Some(_) => Err(config.wrong("pad_token_id", "a token id")),
    }
}

/// The rows before the first position are no positions.
fn roberta_length(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let key = "max_position_embeddings";
    let first = first_position(config)?;
    match config.count(key)?.checked_sub(first) {
        None | Some(0) => Err(config.wrong(key, format!("a number above {first}"))),
        Some(n) => {
            keys.set("context_length", count(n));
            Ok(())
        }
    }
}

fn not_causal(_: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    keys.set("attention.causal", false);
    Ok(())
}

/// The activation, which must be one that there is.
fn activation(config: &HfConfig, keys: &mut Keys, key: &str) -> Result<(), ModelFileError> {
    let known = || {
        let names: Vec<_> = ACTIVATIONS.iter().map(|(name, _)| *name).collect();
        format!("one of: {}", names.join(", "))
    };
    match config.optional_text(key)? {
        None => Err(config.missing(key, known())),
        Some(name) if ACTIVATIONS.iter().any(|(known, _)| *known == name) => {
            keys.set(ACTIVATION, name);
            Ok(())
        }
        Some(_) => Err(config.wrong(key, known())),
    }
}

/// Which layers see a window: by a list, or every one but the first of a period.
fn modern_windows(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let width = config.count("local_attention")?;
    keys.set("attention.sliding_window", count(width));
    let name = "attention.sliding_window_pattern";
    match layer_types(config, &["sliding_attention", "full_attention"])? {
        Some(types) => {
            let flags = types.iter().map(|&t| t == "sliding_attention").collect();
            keys.set(name, Array::Bool(flags));
        }
        None => {
            let period = config.count("global_attn_every_n_layers")?;
            keys.set(name, count(period));
        }
    }
    Ok(())
}

/// Two bases: in old files under names of their own.
fn modern_rope(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    for (to, old, layers) in [
        ("rope.freq_base", "global_rope_theta", "full_attention"),
        (
            "rope.freq_base_swa",
            "local_rope_theta",
            "sliding_attention",
        ),
    ] {
        let theta = match config.optional_number(old)? {
            Some(theta) if theta.is_finite() && theta > 1.0 => theta,
            Some(_) => return Err(config.wrong(old, "a number above 1")),
            None if config.value("rope_parameters").is_some() => {
                let rope = RopeSettings::read(config, Some(layers))?;
                if rope.kind != RopeKind::Plain || rope.partial != 1.0 {
                    let wanted = "a rotation of whole heads without scaling";
                    return Err(config.wrong("rope_parameters", wanted));
                }
                rope.theta
            }
            None => return Err(config.missing(old, "a number above 1")),
        };
        keys.set(to, theta as f32);
    }
    Ok(())
}

fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
