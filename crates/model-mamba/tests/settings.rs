//! Every setting of every recipe's `config.json`, changed and left out.

#![allow(clippy::unwrap_used)] // helpers of tests

use crate::common::{CASES, IMAGES};
use model_tests::defaults::Defaults;
use model_tests::settings::{SettingsCheck, StatedDefault};

/// Settings of training, libraries, tokenizers and kernels.
const WITHOUT_EFFECT: &[&str] = &[
    "image_token_id", // rows of images come from outside
    "video_token_id",
    "vision_config",
    "vision_end_token_id",
    "vision_start_token_id",
    "attention_dropout",
    "attn_mode",
    "block_size",
    "autocast_kernel_dtype",
    "bos_token_id",
    "chunk_size",
    "chunkwise_kernel",
    "dtype",
    "eos_token_id",
    "final_w_init_variance_scale",
    "fuse_cross_entropy",
    "fuse_norm",
    "hidden_dropout",
    "inference_state_dtype",
    "initializer_range",
    "mamba_chunk_size",
    "mamba_ssm_cache_dtype",
    "max_inference_chunksize",
    "mode",
    "moe_shared_expert_overlap",
    "mtp_layers_block_type", // layers that predict further tokens are left out
    "model_type",
    "norm_reduction_force_float32",
    "num_logits_to_keep",
    "num_nextn_predict_layers",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "rescale_every", // halves rows and weights, which norms undo
    "rescale_prenorm_residual",
    "residual_in_fp32",
    "rope_parameters.mrope_section", // positions of text are the same in all sections
    "return_last_states",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "sequence_kernel",
    "step_kernel",
    "tie_word_embeddings", // the file has an output matrix, or not
    "time_step_floor",
    "time_step_init_scheme",
    "time_step_max",
    "time_step_min",
    "time_step_scale",
    "transformers_version",
    "use_associative_scan",
    "use_cache",
    "use_mamba_kernels",
    "use_mambapy",
    "use_mem_eff_path",
    "w_init_variance_scale",
    "z_loss_coefficient",
];

/// Settings that repeat what tensors are there, or their shapes.
const TENSORS_SAY: &[&str] = &[
    "attention_bias",
    "attn_layer_period",
    "conv_bias",
    "expand",
    "expert_layer_offset",
    "expert_layer_period",
    "intermediate_size",
    "kv_channels",
    "mamba_conv_bias",
    "mamba_d_head",
    "mamba_expand",
    "mamba_headdim",
    "mamba_rms_norm",
    "mlp_bias",
    "moe_shared_expert_intermediate_size",
    "n_shared_experts",
    "num_shared_experts",
    "projectors_bias",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "use_conv_bias",
    "vocab_size",
];

/// Settings that one class names and does not read, or reads where others are not there.
const WITHOUT_EFFECT_IN: &[(&str, &str)] = &[
    ("granitemoehybrid", "max_position_embeddings"), // without positions
    ("granitemoehybrid", "rope_parameters.rope_theta"),
    ("kimi_linear", "head_dim"),
    ("kimi_linear", "linear_attn_config"), // next to keys of its own
    ("kimi_linear", "use_grouped_topk"),   // of one group
    ("kimi_linear_heads", "head_dim"),
    ("kimi_linear_heads", "linear_attn_config"),
    ("kimi_linear_heads", "use_grouped_topk"),
    ("lfm2", "full_attn_idxs"), // next to layer_types
    ("lfm2_bias", "full_attn_idxs"),
    ("mamba2", "time_step_rank"),
    ("nemotron_h", "sliding_window"),
    ("nemotron_h_moe", "sliding_window"),
    ("nemotron_h_groups", "sliding_window"),
    ("nemotron_h_moe", "topk_group"),     // of one group
    ("rwkv6", "num_attention_heads"),     // heads follow from their size
    ("rwkv7", "max_position_embeddings"), // texts have no end
    ("rwkv7", "num_heads"),               // next to head_dim
    ("zamba2", "attention_hidden_size"),  // twice the width
    ("zamba2", "hybrid_layer_ids"),       // next to layers_block_type
    ("zamba2", "num_query_groups"),
];

/// The defaults of classes for settings that transformers' configs do not hold.
const STATED: &[StatedDefault] = &[
    StatedDefault {
        recipe: "rwkv6",
        path: "head_size_divisor",
        value: "8", // the published class
    },
    StatedDefault {
        recipe: "qwen3_5",
        path: "rope_parameters.mrope_section",
        value: "null", // positions of a text are the same in all sections
    },
    StatedDefault {
        recipe: "qwen3_5_moe",
        path: "rope_parameters.mrope_section",
        value: "null", // likewise
    },
];

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
    let cases = CASES.iter().chain([&IMAGES]);
    check.check(cases.map(|case| case.generated()));
}
