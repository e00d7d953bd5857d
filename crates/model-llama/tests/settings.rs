//! Every setting of every recipe's `config.json`, changed and left out.

#![allow(clippy::unwrap_used)] // helpers of tests

use crate::common::{CASES, IMAGE_CASES};
use model_tests::defaults::Defaults;
use model_tests::settings::{HeadsOf, SettingsCheck, StatedDefault};
use model_tests::{Case, Recipe, Source, fixture};
use serde_json::json;

/// Settings of training, libraries, tokenizers and heads other than that of tokens.
const WITHOUT_EFFECT: &[&str] = &[
    "image_token_id", // rows of images come from outside
    "video_token_id",
    "vision_config",
    "vision_end_token_id",
    "vision_start_token_id",
    "mask_token_id", // of denoising
    "rope_full_precision",
    "block_group_size",
    "_sliding_window_pattern", // next to layer_types
    "attention_dropout",
    "attention_softmax_in_fp32",
    "attn_pdrop",
    "altup_coef_clip", // while training
    "attn_config._name_or_path",
    "attn_config.architectures",
    "attn_config.attn_impl",
    "attn_config.attn_pdrop",
    "attn_config.attn_uses_sequence_id",
    "attn_config.chunk_size_feed_forward",
    "attn_config.dtype",
    "attn_config.id2label",
    "attn_config.id2label.0",
    "attn_config.id2label.1",
    "attn_config.is_encoder_decoder",
    "attn_config.label2id",
    "attn_config.label2id.LABEL_0",
    "attn_config.label2id.LABEL_1",
    "attn_config.model_type",
    "attn_config.output_attentions",
    "attn_config.output_hidden_states",
    "attn_config.problem_type",
    "attn_config.return_dict",
    "ffn_config._name_or_path",
    "ffn_config.architectures",
    "ffn_config.chunk_size_feed_forward",
    "ffn_config.dtype",
    "ffn_config.id2label",
    "ffn_config.id2label.0",
    "ffn_config.id2label.1",
    "ffn_config.is_encoder_decoder",
    "ffn_config.label2id",
    "ffn_config.label2id.LABEL_0",
    "ffn_config.label2id.LABEL_1",
    "ffn_config.model_type",
    "ffn_config.output_attentions",
    "ffn_config.output_hidden_states",
    "ffn_config.problem_type",
    "ffn_config.return_dict",
    "bos_token_id",
    "classifier_dropout",
    "dropout",
    "dtype",
    "emb_pdrop",
    "embd_pdrop",
    "embed_dropout",
    "embedding_initializer_range",
    "embedding_dropout",
    "eod_token_id",
    "eos_token_id",
    "hidden_dropout",
    "embedding_fraction", // while training
    "init_device",
    "init_std",
    "initializer_range",
    "input_jitter_noise",
    "layerdrop",
    "is_decoder",
    "model_type",
    "n_ctx",
    "num_nextn_predict_layers", // layers that predict further tokens are left out
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "reorder_and_upcast_attn",
    "rope_parameters.max_position_embeddings",
    "resid_dropout",
    "resid_pdrop",
    "residual_dropout",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "scale_attention_softmax_in_fp32",
    "sep_token_id",
    "slow_but_exact",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "tie_word_embeddings", // the file has an output matrix of its own, or not
    "weight_tying",        // the same
    "transformers_version",
    "use_cache",
];

/// Settings that repeat what tensors are there, or their shapes.
const TENSORS_SAY: &[&str] = &[
    "attention_layer_norm_with_affine",
    "embedding_size",
    "layer_norm_with_affine",
    "attention_bias",
    "attention_out_bias",
    "bias",
    "decoder_sparse_step",
    "expansion_ratio",
    "interleave_moe_layer_step",
    "intermediate_size",
    "laurel_rank",
    "learned_pos_emb",
    "lm_head_bias",
    "mlp_bias",
    "mlp_only_layers",
    "moe_layer_end_index",
    "moe_layer_interval",
    "moe_layers",
    "moe_num_shared_experts",
    "n_shared_experts",
    "num_shared_experts",
    "qk_layernorm",
    "parallel_attn",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "use_bias",
    "use_parallel_residual",
    "use_qk_norm",
    "use_qkv_bias",
    "vocab_size_per_layer_input",
];

/// Settings that one class names and does not read, or reads where others are not there.
const WITHOUT_EFFECT_IN: &[(&str, &str)] = &[
    ("dream", "max_window_layers"), // without windows
    ("dream", "sliding_window"),
    ("llada", "alibi_bias_max"), // without biases by distance
    ("llada", "mlp_ratio"),      // next to mlp_hidden_size
    ("llada_moe", "dense_intermediate_size"), // every layer is a mixture
    ("qwen2_vl", "max_window_layers"), // without windows
    ("qwen2_vl", "sliding_window"),
    ("qwen2_vl", "use_sliding_window"),
    ("qwen2_5_vl", "max_window_layers"),
    ("qwen2_5_vl", "sliding_window"),
    ("qwen2_5_vl", "use_sliding_window"),
    ("deepseek_v2_lite", "n_group"), // the best of all are chosen
    ("deepseek_v2_lite", "topk_group"),
    ("exaone4", "sliding_window_pattern"), // next to layer_types
    ("exaone4_full", "sliding_window_pattern"),
    ("falcon", "num_kv_heads"), // of new_decoder_architecture
    ("falcon", "num_ln_in_parallel_attn"),
    ("falcon_alibi", "num_kv_heads"),
    ("falcon_alibi", "num_ln_in_parallel_attn"),
    ("falcon_alibi", "rope_parameters.rope_theta"), // biases in place of rotations
    ("gemma4_e", "moe_intermediate_size"),          // without enable_moe_block
    ("gemma4_e", "num_experts"),
    ("gemma4_e", "top_k_experts"),
    ("gemma4_moe", "use_double_wide_mlp"), // of layers that share rows
    ("glm4_moe", "topk_group"),            // of one group
    ("gpt_neo", "attention_types"),        // next to attention_layers
    ("gpt_neox", "partial_rotary_factor"), // next to rope_parameters
    ("hunyuan_v1_dense", "rope_parameters.beta_fast"), // of another rope_type
    ("hunyuan_v1_dense", "rope_parameters.beta_slow"),
    ("hunyuan_v1_dense", "rope_parameters.factor"),
    ("hunyuan_v1_dense", "rope_parameters.mscale"),
    ("hunyuan_v1_dense", "rope_parameters.mscale_all_dim"),
    ("hunyuan_v1_moe", "rope_parameters.beta_fast"),
    ("hunyuan_v1_moe", "rope_parameters.beta_slow"),
    ("hunyuan_v1_moe", "rope_parameters.factor"),
    ("hunyuan_v1_moe", "rope_parameters.mscale"),
    ("hunyuan_v1_moe", "rope_parameters.mscale_all_dim"),
    ("llama4_chunk16", "no_rope_layers"), // a 2 is as true as a 1
    ("llama4_chunk8192", "no_rope_layers"),
    ("llama4_maverick", "no_rope_layers"),
    ("mistral4", "topk_group"),                   // of one group
    ("mistral4", "head_dim"),                     // parts of heads have sizes of their own
    ("phi3", "original_max_position_embeddings"), // without longrope
    ("phi3_partial", "original_max_position_embeddings"),
    ("phi3_partial_swa8", "original_max_position_embeddings"),
    ("phimoe", "original_max_position_embeddings"), // next to rope_parameters
    ("phimoe", "rope_parameters.factor"),           // next to mscale
    ("qwen2", "max_window_layers"),                 // without windows
    ("qwen2", "sliding_window"),
    ("qwen2", "use_sliding_window"), // of no width
    ("qwen2_moe", "max_window_layers"),
    ("qwen2_moe", "sliding_window"),
    ("qwen2_moe", "use_sliding_window"),
    ("qwen3", "max_window_layers"),
    ("qwen3", "sliding_window"),
    ("qwen3", "use_sliding_window"),
    ("qwen3_moe", "sliding_window"),
    ("smollm3", "no_rope_layer_interval"), // next to no_rope_layers
    ("smollm3", "no_rope_layers"),         // a 2 is as true as a 1
    ("smollm3", "sliding_window"),
    ("smollm3_ropes", "no_rope_layer_interval"),
    ("smollm3_ropes", "no_rope_layers"),
    ("smollm3_ropes", "sliding_window"),
    ("deepseek_v32", "first_k_dense_replace"), // next to mlp_layer_types
    ("glm_moe_dsa", "first_k_dense_replace"),
    ("glm_moe_dsa", "head_dim"), // parts of heads have sizes of their own
    ("rnd1", "max_window_layers"), // without windows
    ("rnd1", "sliding_window"),
    ("rnd1", "use_sliding_window"),
    ("exaone_moe", "first_k_dense_replace"),
    ("exaone_moe", "sliding_window_pattern"), // next to layer_types
    ("cohere2_moe", "sliding_window_pattern"),
    ("cohere2_moe", "prefix_dense_sliding_window_pattern"),
    ("cohere2_moe", "rope_theta"), // next to rope_parameters
    ("granite_swa", "rope_parameters.rope_theta"), // next to layer_rope_theta
    ("dots1", "max_window_layers"), // next to layer_types
    ("dots1", "sliding_window"),
    ("hy_v3", "enable_moe_fp32_combine"), // all is computed in f32
    ("falcon_alibi", "new_decoder_architecture"), // with as many key heads as query heads
    ("falcon_40b", "multi_query"),        // of older decoders
    ("falcon_40b", "num_ln_in_parallel_attn"), // the norms are there
    ("chatglm", "apply_query_key_layer_scaling"), // of the precision
    ("chatglm", "fp32_residual_connection"),
    ("chatglm", "bias_dropout_fusion"),   // while training
    ("internlm2", "rope_scaling.factor"), // beyond the trained context
    ("deepseek", "aux_loss_alpha"),       // while training
    ("deepseek", "seq_aux"),
    ("baichuan2", "model_max_length"), // next to max_position_embeddings
    ("baichuan2", "z_loss_weight"),    // of training; that it is there says the version
    ("bailing_moe_v2", "max_window_layers"), // without windows
    ("bailing_moe_v2", "output_dropout"),
    ("bailing_moe_v2", "router_dtype"), // all is computed in f32
    ("dbrx", "ffn_config.hidden_size"), // that of the model
    ("dbrx", "ffn_config.moe_jitter_eps"), // while training
    ("dbrx", "ffn_config.moe_loss_weight"),
];

/// The same of heads.
const WITHOUT_EFFECT_IN_HEADS: &[(&str, &str)] = &[
    ("gemma4_assistant", "attention_k_eq_v"), // values are the model's
    ("gemma4_assistant_ordered", "attention_k_eq_v"),
    ("gemma4_assistant", "final_logit_softcapping"), // transformers has no cap there
    ("gemma4_assistant_ordered", "final_logit_softcapping"),
    ("gemma4_assistant", "max_position_embeddings"), // the model's context counts
    ("gemma4_assistant_ordered", "max_position_embeddings"),
    ("gemma4_assistant", "centroid_intermediate_top_k"), // without use_ordered_embeddings
    ("gemma4_assistant", "num_centroids"),
    ("eagle3", "max_position_embeddings"),
    ("eagle3_normed", "max_position_embeddings"),
    ("eagle3", "eagle_config.parallel_draft_heads_num_layers"), // of one token after the other
    ("eagle3_normed", "speculators_model_type"),                // the class says it
];

/// The defaults of published classes, which transformers does not have.
const STATED: &[StatedDefault] = &[
    // Published files have the base in attn_config alone.
    stated(
        "dbrx",
        "rope_parameters",
        r#"{"rope_theta": 20000.0, "rope_type": "default"}"#,
    ),
    stated("chatglm", "rope_ratio", "1"),
    stated("exaone", "rope_theta", "10000"),
    stated("pangu_embedded", "rope_theta", "10000"),
    stated("internlm2", "rope_theta", "10000"),
    stated("minicpm", "rope_theta", "10000"),
    stated("orion", "rope_theta", "10000"),
    stated("baichuan2", "z_loss_weight", "null"),
    stated("deepseek", "rope_theta", "10000"),
];

const fn stated(recipe: &'static str, path: &'static str, value: &'static str) -> StatedDefault {
    StatedDefault {
        recipe,
        path,
        value,
    }
}

/// Settings that say which class a model is of.
const CHOICES: &[&str] = &["architectures"];

#[test]
fn a_setting_is_understood_refused_or_without_effect() {
    let registry = CASES[0].registry();
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
    let cases = CASES.iter().filter(|case| case.source == Source::Recipe);
    let cases = cases.chain(IMAGE_CASES).map(|case| case.generated());
    check.check(cases.chain(Recipe::all_in(&fixture("diffusion"))));
}

/// The settings of heads that draft for a model.
fn check_heads(model: &str, heads: impl IntoIterator<Item = Recipe>, stated: &[StatedDefault]) {
    let case = Case::named(CASES, model);
    let registry = case.registry();
    let model = case.generated().directory(&registry).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let check = SettingsCheck {
        registry: &registry,
        defaults: &Defaults::open(),
        without_effect: WITHOUT_EFFECT,
        tensors_say: TENSORS_SAY,
        without_effect_in: WITHOUT_EFFECT_IN_HEADS,
        stated,
        choices: CHOICES,
        heads_of: Some(HeadsOf {
            model: &model,
            folder: folder.path(),
        }),
    };
    check.check(heads);
}

fn head(name: &str) -> Recipe {
    Recipe::open(&fixture("heads").join(name))
}

#[test]
fn a_setting_of_an_assistant_is_understood_refused_or_without_effect() {
    let heads = ["gemma4_assistant", "gemma4_assistant_ordered"];
    check_heads("gemma4_e", heads.map(head), &[]);
}

const PLAIN_ROPE: &str = r#"{"rope_theta": 10000.0, "rope_type": "default"}"#;
const PLAIN: &str = r#""default""#;
const ORIGINAL: &str = "rope_parameters.original_max_position_embeddings";
const ORIGINAL_OF_LAYER: &str =
    "transformer_layer_config.rope_parameters.original_max_position_embeddings";

/// The values of published code for settings that a file does not have.
const STATED_OF_EAGLE: &[StatedDefault] = &[
    // Before layers 2, n / 2 and n - 3 of 3.
    stated("eagle3", "eagle_aux_hidden_state_layer_ids", "[2, 1, 0]"),
    // A list of none says as little as none: these layers cannot be named behind others.
    stated("eagle3", "eagle_config", "{}"),
    stated(
        "eagle3",
        "eagle_config.eagle_aux_hidden_state_layer_ids",
        "[]",
    ),
    stated("eagle3_normed", "norm_before_fc", "false"),
    stated("eagle3_normed", "norm_before_residual", "false"),
    stated("eagle3_normed", "rope_parameters", PLAIN_ROPE),
    stated("eagle3_normed", "rope_parameters.rope_type", PLAIN),
    stated("eagle3_normed", ORIGINAL, "512"), // that of the config
    stated(
        "eagle3_normed",
        "transformer_layer_config.rope_parameters",
        PLAIN_ROPE,
    ),
    stated(
        "eagle3_normed",
        "transformer_layer_config.rope_parameters.rope_type",
        PLAIN,
    ),
    stated("eagle3_normed", ORIGINAL_OF_LAYER, "512"),
];

/// The same head with the object of settings that NVIDIA's files have.
fn with_eagle_config(recipe: Recipe) -> Recipe {
    recipe.with_config(|config| {
        let layers = config.remove("eagle_aux_hidden_state_layer_ids").unwrap();
        let behind = layers.as_array().unwrap().iter();
        let behind: Vec<u64> = behind.map(|layer| layer.as_u64().unwrap() - 1).collect();
        let normed = config.remove("norm_before_fc").unwrap();
        let own = json!({
            "eagle_aux_hidden_state_layer_ids": behind,
            "eagle_decoder_type": "llama",
            "next_layer_regular": true,
            "norm_before_fc": normed,
            "parallel_draft_heads_num_layers": 1,
            "parallel_draft_step": 1,
            "use_aux_hidden_state": true,
            "use_input_layernorm_in_first_layer": true,
            "use_last_layernorm": true,
            "use_mtp_layernorm": false,
        });
        config.insert("eagle_config".to_owned(), own);
    })
}

/// The same head as the library Speculators saves it: with its layer's settings in an object.
fn as_speculator(recipe: Recipe) -> Recipe {
    recipe.with_config(|config| {
        let mut outer = json!({
            "architectures": ["Eagle3DraftModel"],
            "fc_norm": false,
            "norm_output": false,
            "speculators_model_type": "eagle3",
        });
        let object = outer.as_object_mut().unwrap();
        for key in [
            "draft_vocab_size",
            "norm_before_fc",
            "norm_before_residual",
            "target_hidden_size",
            "tie_word_embeddings",
        ] {
            object.insert(key.to_owned(), config.remove(key).unwrap());
        }
        config.remove("architectures");
        for (key, value) in [
            ("layer_types", json!(["full_attention"])),
            ("use_sliding_window", json!(false)),
        ] {
            config.insert(key.to_owned(), value);
        }
        let layer = std::mem::take(config);
        config.extend(std::mem::take(object));
        config.insert("transformer_layer_config".to_owned(), layer.into());
    })
}

#[test]
fn a_setting_of_a_head_of_eagle_is_understood_refused_or_without_effect() {
    let heads = [
        head("eagle3"),
        head("eagle3_normed"),
        with_eagle_config(head("eagle3")),
        as_speculator(head("eagle3_normed")),
    ];
    check_heads("llama_gqa_untied", heads, STATED_OF_EAGLE);
}
