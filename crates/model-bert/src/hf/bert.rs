//! BERT, RoBERTa, XLM-RoBERTa and DistilBERT: files of one architecture.

use model_core::hf::{
    FixedValue, HfClass, Key, SIZE_KEYS, TensorRule, TensorStep, in_layers, same, with,
};

use super::{
    LAYER_NORM_EPS, NOT_CAUSAL, RANK, activation, first_position, head_activation,
    length_after_padding,
};

/// The classes of this file.
pub(super) const CLASSES: &[HfClass] = &[
    BERT,
    HfClass {
        name: "BertForMaskedLM",
        ..BERT
    },
    HfClass {
        name: "BertForPreTraining",
        ..BERT
    },
    HfClass {
        name: "BertForSequenceClassification",
        keys: &[SIZE_KEYS, BERT_KEYS, RANK],
        tensors: &[
            BERT_INPUT,
            BERT_LAYERS,
            BERT_FEED_FORWARD,
            BERT_OLD_NORMS,
            BERT_SCORES,
        ],
        unused: POSITION_IDS,
        ..BERT
    },
    ROBERTA,
    HfClass {
        name: "RobertaForMaskedLM",
        ..ROBERTA
    },
    HfClass {
        name: "RobertaForSequenceClassification",
        ..ROBERTA_SCORER
    },
    HfClass {
        name: "XLMRobertaModel",
        ..ROBERTA
    },
    HfClass {
        name: "XLMRobertaForMaskedLM",
        ..ROBERTA
    },
    HfClass {
        name: "XLMRobertaForSequenceClassification",
        ..ROBERTA_SCORER
    },
    DISTILBERT,
    HfClass {
        name: "DistilBertForMaskedLM",
        ..DISTILBERT
    },
    HfClass {
        name: "DistilBertForSequenceClassification",
        keys: &[SIZE_KEYS, DISTILBERT_KEYS, RANK, RELU_HEAD],
        tensors: &[DISTILBERT_INPUT, DISTILBERT_LAYERS, DISTILBERT_SCORES],
        unused: &[],
        ..DISTILBERT
    },
];

const BERT: HfClass = HfClass {
    name: "BertModel",
    architecture: "bert",
    keys: &[SIZE_KEYS, BERT_KEYS],
    tensors: &[BERT_INPUT, BERT_LAYERS, BERT_FEED_FORWARD, BERT_OLD_NORMS],
    unused: BERT_UNUSED,
    body: "bert.",
    ..HfClass::EMPTY
};

pub(super) const BERT_KEYS: &[Key] = &[
    LAYER_NORM_EPS,
    Key::Only {
        from: "position_embedding_type",
        is: FixedValue::Text(&["absolute"]),
    },
    Key::Only {
        from: "is_decoder",
        is: FixedValue::Flag(false),
    },
    Key::Only {
        from: "add_cross_attention",
        is: FixedValue::Flag(false),
    },
    NOT_CAUSAL,
    Key::With(|config, keys| activation(config, keys, "hidden_act")),
];

/// RoBERTa (Liu et al., arXiv 1907.11692) and XLM-RoBERTa: BERT whose positions begin after that of
/// the padding, with one token type.
const ROBERTA: HfClass = HfClass {
    name: "RobertaModel",
    keys: &[SIZE_KEYS, BERT_KEYS, ROBERTA_KEYS],
    tensors: &[ROBERTA_INPUT, ROBERTA_LAYERS, ROBERTA_FEED_FORWARD],
    unused: ROBERTA_UNUSED,
    body: "roberta.",
    ..BERT
};

const ROBERTA_SCORER: HfClass = HfClass {
    keys: &[SIZE_KEYS, BERT_KEYS, ROBERTA_KEYS, RANK],
    tensors: &[
        ROBERTA_INPUT,
        ROBERTA_LAYERS,
        ROBERTA_FEED_FORWARD,
        ROBERTA_SCORES,
    ],
    ..ROBERTA
};

const ROBERTA_KEYS: &[Key] = &[Key::With(length_after_padding)];

/// The tensors before the layers of BERT, but for positions: tokens, their types, and a norm.
macro_rules! input {
    ($prefix:literal, $($more:expr),*) => {
        &[
            same("token_embd.weight", concat!($prefix, "embeddings.word_embeddings.weight")),
            same("token_types.weight", concat!($prefix, "embeddings.token_type_embeddings.weight")),
            same("token_embd_norm.weight", concat!($prefix, "embeddings.LayerNorm.weight")),
            same("token_embd_norm.bias", concat!($prefix, "embeddings.LayerNorm.bias")),
            $($more),*
        ]
    };
}
pub(super) use input;

const BERT_INPUT: &[TensorRule] = input!(
    "bert.",
    same(
        "position_embd.weight",
        "bert.embeddings.position_embeddings.weight"
    )
);
const ROBERTA_INPUT: &[TensorRule] = input!(
    "roberta.",
    with(
        "position_embd.weight",
        "roberta.embeddings.position_embeddings.weight",
        &[TensorStep::RowsAfter(first_position)]
    )
);
const DISTILBERT_INPUT: &[TensorRule] = input!(
    "distilbert.",
    same(
        "position_embd.weight",
        "distilbert.embeddings.position_embeddings.weight"
    )
);

const BERT_LAYERS: &[TensorRule] = &in_layers("bert.encoder.layer.{l}.", BERT_ATTENTION);
const BERT_FEED_FORWARD: &[TensorRule] = &in_layers("bert.encoder.layer.{l}.", FEED_FORWARD);
const ROBERTA_LAYERS: &[TensorRule] = &in_layers("roberta.encoder.layer.{l}.", BERT_ATTENTION);
const ROBERTA_FEED_FORWARD: &[TensorRule] = &in_layers("roberta.encoder.layer.{l}.", FEED_FORWARD);

/// The attention of a layer of BERT.
pub(super) const BERT_ATTENTION: [TensorRule; 10] = [
    same("attn_q.weight", "attention.self.query.weight"),
    same("attn_q.bias", "attention.self.query.bias"),
    same("attn_k.weight", "attention.self.key.weight"),
    same("attn_k.bias", "attention.self.key.bias"),
    same("attn_v.weight", "attention.self.value.weight"),
    same("attn_v.bias", "attention.self.value.bias"),
    same("attn_output.weight", "attention.output.dense.weight"),
    same("attn_output.bias", "attention.output.dense.bias"),
    same(
        "attn_output_norm.weight",
        "attention.output.LayerNorm.weight",
    ),
    same("attn_output_norm.bias", "attention.output.LayerNorm.bias"),
];

/// The rest of a layer.
pub(super) const FEED_FORWARD: [TensorRule; 6] = [
    same("ffn_up.weight", "intermediate.dense.weight"),
    same("ffn_up.bias", "intermediate.dense.bias"),
    same("ffn_down.weight", "output.dense.weight"),
    same("ffn_down.bias", "output.dense.bias"),
    same("layer_output_norm.weight", "output.LayerNorm.weight"),
    same("layer_output_norm.bias", "output.LayerNorm.bias"),
];

/// The pooler and the scores.
const BERT_SCORES: &[TensorRule] = &[
    same("cls.weight", "bert.pooler.dense.weight"),
    same("cls.bias", "bert.pooler.dense.bias"),
    same("cls.output.weight", "classifier.weight"),
    same("cls.output.bias", "classifier.bias"),
];

/// The dense layer and the scores of RoBERTa's heads.
pub(super) const ROBERTA_SCORES: &[TensorRule] = &[
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

const POSITION_IDS: &[&str] = &["embeddings.position_ids", "bert.embeddings.position_ids"];

/// Numbers of positions, the pooler, and what predicts tokens or the next sentence.
const BERT_UNUSED: &[&str] = &[
    "embeddings.position_ids",
    "bert.embeddings.position_ids",
    "pooler.dense.weight",
    "pooler.dense.bias",
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

const ROBERTA_UNUSED: &[&str] = &[
    "embeddings.position_ids",
    "roberta.embeddings.position_ids",
    "pooler.dense.weight",
    "pooler.dense.bias",
    "roberta.pooler.dense.weight",
    "roberta.pooler.dense.bias",
    "lm_head.bias",
    "lm_head.decoder.weight",
    "lm_head.decoder.bias",
    "lm_head.dense.weight",
    "lm_head.dense.bias",
    "lm_head.layer_norm.weight",
    "lm_head.layer_norm.bias",
];

/// DistilBERT (Sanh et al., arXiv 1910.01108): BERT without token types, by other names.
const DISTILBERT: HfClass = HfClass {
    name: "DistilBertModel",
    keys: &[SIZE_KEYS, DISTILBERT_KEYS],
    tensors: &[DISTILBERT_INPUT, DISTILBERT_LAYERS],
    unused: &[
        "vocab_transform.weight",
        "vocab_transform.bias",
        "vocab_layer_norm.weight",
        "vocab_layer_norm.bias",
        "vocab_projector.weight",
        "vocab_projector.bias",
    ],
    aliases: &[
        ("hidden_size", "dim"),
        ("intermediate_size", "hidden_dim"),
        ("num_hidden_layers", "n_layers"),
        ("num_attention_heads", "n_heads"),
    ],
    body: "distilbert.",
    ..BERT
};

const DISTILBERT_KEYS: &[Key] = &[
    // The class has no key for it.
    Key::With(|_, keys| {
        keys.set("attention.layer_norm_epsilon", 1e-12f32);
        Ok(())
    }),
    NOT_CAUSAL,
    Key::With(|config, keys| activation(config, keys, "activation")),
];

/// The function after the dense layer of a head.
const RELU_HEAD: &[Key] = &[Key::With(|_, keys| {
    head_activation(keys, "relu");
    Ok(())
})];

const DISTILBERT_LAYERS: &[TensorRule] = &in_layers(
    "distilbert.transformer.layer.{l}.",
    [
        same("attn_q.weight", "attention.q_lin.weight"),
        same("attn_q.bias", "attention.q_lin.bias"),
        same("attn_k.weight", "attention.k_lin.weight"),
        same("attn_k.bias", "attention.k_lin.bias"),
        same("attn_v.weight", "attention.v_lin.weight"),
        same("attn_v.bias", "attention.v_lin.bias"),
        same("attn_output.weight", "attention.out_lin.weight"),
        same("attn_output.bias", "attention.out_lin.bias"),
        same("attn_output_norm.weight", "sa_layer_norm.weight"),
        same("attn_output_norm.bias", "sa_layer_norm.bias"),
        same("ffn_up.weight", "ffn.lin1.weight"),
        same("ffn_up.bias", "ffn.lin1.bias"),
        same("ffn_down.weight", "ffn.lin2.weight"),
        same("ffn_down.bias", "ffn.lin2.bias"),
        same("layer_output_norm.weight", "output_layer_norm.weight"),
        same("layer_output_norm.bias", "output_layer_norm.bias"),
    ],
);

const DISTILBERT_SCORES: &[TensorRule] = &[
    same("cls.weight", "pre_classifier.weight"),
    same("cls.bias", "pre_classifier.bias"),
    same("cls.output.weight", "classifier.weight"),
    same("cls.output.bias", "classifier.bias"),
];
