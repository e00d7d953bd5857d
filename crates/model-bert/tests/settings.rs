//! Every setting of every recipe's `config.json`, changed and left out.

use crate::common::{data, registry};
use model_tests::defaults::Defaults;
use model_tests::settings::{SettingsCheck, StatedDefault};
use model_tests::{Recipe, fixture};

/// Settings of training, of heads that predict tokens, of libraries, and of tokenizers.
const WITHOUT_EFFECT: &[&str] = &[
    "activation_dropout",
    "decoder_layerdrop",
    "dropout_rate",
    "encoder_layerdrop",
    "forced_eos_token_id", // of generation
    "init_std",
    "initializer_factor",
    "_sliding_window_pattern", // next to layer_types
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_implementation",
    "bos_token_id",
    "classifier_dropout",
    "classifier_dropout_prob",
    "cls_token_id",
    "decoder_bias",
    "deterministic_flash_attn",
    "dropout",
    "dtype",
    "emb_pooler",
    "embedding_dropout",
    "eos_token_id",
    "global_attn_every_n_layers", // next to layer_types
    "hidden_dropout_prob",
    "id2label",
    "initializer_cutoff_factor",
    "initializer_range",
    "label2id",
    "mask_token_id",
    "max_trained_positions", // without rotary_scaling_factor
    "mlp_dropout",
    "model_type",
    "pad_token_id", // but where positions follow it
    "legacy",
    "pooler_dropout",
    "pretraining_tp",
    "qa_dropout",
    "sep_token_id",
    "seq_classif_dropout",
    "sinusoidal_pos_embds",
    "sparse_pred_ignore_index",
    "sparse_prediction",
    "tie_word_embeddings",
    "transformers_version",
    "use_cache",
];

/// Settings that repeat the shapes of tensors.
const TENSORS_SAY: &[&str] = &["type_vocab_size"];

/// Settings that some classes name and do not read.
const WITHOUT_EFFECT_IN: &[(&str, &str)] = &[
    ("t5_relu_tied", "feed_forward_proj"), // next to dense_act_fn
    ("eurobert", "classifier_pooling"),    // without a head
    ("jina_bert_v2", "hidden_act"),        // gates have feed_forward_type's
    ("modernbert_classifier", "layer_norm_eps"), // it is norm_eps
    ("neobert", "intermediate_size"),      // rounded
    ("nomic_bert_moe", "rotary_scaling_factor"), // of no text that is longer than trained
];

/// The defaults of classes for settings that transformers' configs do not hold.
const STATED: &[StatedDefault] = &[
    StatedDefault {
        recipe: "deberta_v2_reranker",
        path: "norm_rel_ebd",
        value: "\"none\"", // transformers' DebertaV2Encoder
    },
    StatedDefault {
        recipe: "deberta_v2_own_keys",
        path: "norm_rel_ebd",
        value: "\"none\"",
    },
    StatedDefault {
        recipe: "t5_v1_1",
        path: "tie_word_embeddings",
        value: "true", // of every class
    },
];

/// Settings that say which class a model is of.
const CHOICES: &[&str] = &[
    "architectures",
    "num_experts",
    "use_bidirectional_attention",
];

#[test]
fn a_setting_is_understood_refused_or_without_effect() {
    let registry = registry();
    let check = SettingsCheck {
        registry: &registry,
        defaults: &Defaults::open(),
        without_effect: WITHOUT_EFFECT,
        tensors_say: TENSORS_SAY,
        without_effect_in: WITHOUT_EFFECT_IN,
        stated: STATED,
        choices: CHOICES,
        heads_of: None,
    };
    check.check(
        [data(""), fixture("seq2seq")]
            .iter()
            .flat_map(|folder| Recipe::all_in(folder)),
    );
}
