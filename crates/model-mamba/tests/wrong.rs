//! Files that would come out wrong are refused by the key or the tensor.

#![allow(clippy::unwrap_used)] // helpers of tests

use crate::common::{CASES, case};
use kv_graph::weights::WeightSource;
use model_tests::{Case, Recipe, refusal, remove_key};
use serde_json::{Value, json};

/// The error of a directory with this value under a key of its config, or without the key.
fn directory_error(name: &'static str, key: &str, value: Option<Value>) -> String {
    let recipe = Recipe::named(name).with_config(|config| {
        let (object, key) = match key.split_once('.') {
            Some((object, key)) => (config[object].as_object_mut().unwrap(), key),
            None => (config, key),
        };
        match value {
            Some(value) => drop(object.insert(key.to_owned(), value)),
            None => assert!(object.remove(key).is_some(), "no {key}"),
        }
    });
    let error = recipe.directory(&case(name).registry()).map(drop);
    error.unwrap_err().to_string()
}

#[test]
fn settings_that_cannot_be_are_refused_by_their_key() {
    for (case, key, value) in [
        ("mamba", "mamba.ssm.conv_kernel", 0u32),
        ("mamba", "mamba.ssm.state_size", 0),
        ("mamba2", "mamba2.ssm.time_step_rank", 7),
        ("mamba2", "mamba2.ssm.group_count", 3),
        ("bamba", "granitehybrid.attention.head_count", 3),
        ("jamba", "jamba.expert_used_count", 99),
        ("falcon_h1", "falcon-h1.attention.head_count_kv", 3),
        ("falcon_h1", "falcon-h1.rope.dimension_count", 5),
        ("rwkv4", "rwkv4.time_mix.inner_size", 0),
        ("rwkv6", "rwkv6.wkv.head_size", 24),
        ("rwkv6", "rwkv6.token_shift_count", 1),
        ("rwkv7", "rwkv7.wkv.head_size", 0),
        ("rwkv7", "rwkv7.attention.gate_lora_rank", 0),
        ("qwen3_next", "qwen3next.ssm.time_step_rank", 7),
        ("qwen3_next", "qwen3next.ssm.group_count", 3),
        ("qwen3_next", "qwen3next.ssm.state_size", 0),
        ("qwen3_next", "qwen3next.attention.value_length", 8),
        ("qwen3_next", "qwen3next.rope.dimension_count", 18),
        ("qwen3_next", "qwen3next.expert_gating_func", 4),
        ("qwen3_next", "qwen3next.expert_group_count", 2),
        ("qwen3_5", "qwen35.nextn_predict_layers", 5),
        ("qwen3_5_moe", "qwen35moe.expert_used_count", 8),
        ("lfm2", "lfm2.shortconv.l_cache", 0),
        ("lfm2_moe", "lfm2moe.expert_gating_func", 3),
        ("kimi_linear", "kimi-linear.kda.head_dim", 0),
        ("kimi_linear", "kimi-linear.rope.dimension_count", 18),
        ("kimi_linear", "kimi-linear.attention.key_length", 27),
        ("kimi_linear", "kimi-linear.attention.q_lora_rank", 12),
        ("nemotron_h", "nemotron_h.feed_forward_length", 96),
        ("nemotron_h_moe", "nemotron_h_moe.expert_group_count", 4),
        (
            "nemotron_h_groups",
            "nemotron_h_moe.expert_group_used_count",
            0,
        ),
        ("kimi_linear_heads", "kimi-linear.kda.head_count", 0),
        ("nemotron_h_moe", "nemotron_h_moe.expert_used_count", 7),
        ("nemotron_h_moe", "nemotron_h_moe.expert_gating_func", 3),
        ("minimax", "minimax.attention.key_length", 0),
        ("minimax", "minimax.expert_used_count", 9),
        ("xlstm", "xlstm.mlstm.head_count", 0),
        ("xlstm", "xlstm.mlstm.key_length", 0),
        ("zamba2", "zamba2.attention.head_count", 3),
        ("zamba2", "zamba2.ssm.group_count", 3),
        ("zamba2", "zamba2.shared_block.count", 0),
        ("zamba2", "zamba2.shared_block.lora_rank", 0),
        ("recurrent_gemma", "recurrentgemma.rg_lru.head_count", 7),
        ("recurrent_gemma", "recurrentgemma.ssm.conv_kernel", 0),
        ("recurrent_gemma", "recurrentgemma.rope.dimension_count", 18),
    ] {
        let case = Case::named(CASES, case);
        let error = refusal(case, |metadata| drop(metadata.insert(key, value)), "");
        assert!(error.contains(key), "{}: {error}", case.name);
    }
}

#[test]
fn missing_keys_are_named() {
    for (case, key) in [
        ("mamba", "mamba.ssm.inner_size"),
        ("mamba2", "mamba2.ssm.group_count"),
        ("jamba", "jamba.feed_forward_length"),
        ("nemotron_h", "nemotron_h.feed_forward_length"),
        ("nemotron_h_moe", "nemotron_h_moe.expert_count"),
        ("granitemoehybrid", "granitehybrid.block_count"),
        ("falcon_h1", "falcon-h1.embedding_length"),
        ("rwkv4", "rwkv4.attention.layer_norm_epsilon"),
        ("rwkv6", "rwkv6.time_mix_extra_dim"),
        ("rwkv7", "rwkv7.attention.iclr_lora_rank"),
        ("qwen3_next", "qwen3next.ssm.inner_size"),
        ("qwen3_5", "qwen35.feed_forward_length"),
        ("qwen3_5_moe", "qwen35moe.expert_count"),
        ("lfm2", "lfm2.shortconv.l_cache"),
        ("kimi_linear", "kimi-linear.attention.kv_lora_rank"),
        ("minimax", "minimax.attention.key_length"),
        ("minimax", "minimax.expert_count"),
        ("xlstm", "xlstm.mlstm.epsilon"),
        ("xlstm", "xlstm.final_logit_softcapping"),
        ("zamba2", "zamba2.shared_block.lora_rank"),
        ("zamba2", "zamba2.ssm.inner_size"),
        ("recurrent_gemma", "recurrentgemma.rg_lru.width"),
        ("recurrent_gemma", "recurrentgemma.attention.sliding_window"),
    ] {
        let case = Case::named(CASES, case);
        let error = refusal(case, |metadata| remove_key(metadata, key), "");
        assert!(error.contains(key), "{}: {error}", case.name);
    }
}

#[test]
fn missing_tensors_are_named_and_so_are_those_of_another_shape() {
    for (case, tensor) in [
        ("mamba", "blk.1.ssm_x.weight"),
        ("mamba2", "blk.0.ssm_dt.bias"),
        ("jamba", "blk.0.ssm_b_norm.weight"),
        ("bamba", "blk.2.attn_k.weight"),
        ("nemotron_h", "blk.1.ffn_down.weight"),
        ("nemotron_h_moe", "blk.1.exp_probs_b.bias"),
        ("nemotron_h_moe", "blk.4.ffn_up_exps.weight"),
        ("falcon_h1", "blk.1.ffn_norm"),
        ("granitemoehybrid", "blk.1.ffn_down_exps.weight"),
        ("rwkv4", "blk.2.time_mix_decay.weight"),
        ("rwkv4", "token_embd_norm.bias"),
        ("rwkv6", "blk.1.time_mix_w2.weight"),
        ("rwkv6", "blk.0.time_mix_lerp_v.weight"),
        ("rwkv6", "blk.2.channel_mix_lerp_r.weight"),
        ("rwkv7", "blk.0.time_mix_lerp_fused.weight"),
        ("rwkv7", "blk.1.time_mix_v0.weight"),
        ("rwkv7", "blk.2.time_mix_r_k.weight"),
        ("qwen3_next", "blk.1.ssm_ba.weight"),
        ("qwen3_next", "blk.4.attn_q_norm.weight"),
        ("qwen3_5", "blk.0.ssm_alpha.weight"),
        ("lfm2", "blk.1.shortconv.conv.weight"),
        ("lfm2", "token_embd_norm.weight"),
        ("lfm2_moe", "blk.2.exp_probs_b.bias"),
        ("kimi_linear", "blk.1.ssm_conv1d_k.weight"),
        ("kimi_linear", "blk.3.ssm_f_a.weight"),
        ("kimi_linear", "blk.2.attn_k_b.weight"),
        ("minimax", "blk.0.attn_gate.weight"),
        ("minimax", "blk.3.ssm_norm.weight"),
        ("xlstm", "blk.0.mlstm_f_gate.bias"),
        ("xlstm", "blk.2.mlstm_norm.weight"),
        ("zamba2", "blk.1.attn_q_lora_b.2.weight"),
        ("zamba2", "blk.3.ffn_up_lora_a.1.weight"),
        ("zamba2", "blk.5.shared_out.weight"),
        ("zamba2", "blk.3.shared_norm.weight"),
        ("recurrent_gemma", "blk.1.lru_decay_gate.bias"),
        ("recurrent_gemma", "blk.2.attn_output.bias"),
        ("recurrent_gemma", "blk.4.ffn_down.bias"),
    ] {
        let case = Case::named(CASES, case);
        let error = refusal(case, |_| (), tensor);
        assert!(error.contains(tensor), "{}: {error}", case.name);
    }
    let case = Case::named(CASES, "mamba");
    let error = refusal(
        case,
        |metadata| drop(metadata.insert("mamba.ssm.state_size", 8u32)),
        "",
    );
    assert!(
        error.contains("'blk.0.ssm_x.weight' has shape [36, 128]") && error.contains("[20, 128]"),
        "{error}"
    );
}

/// What the published code computes of these settings is something else.
#[test]
fn variants_of_rwkv_are_refused_by_their_key() {
    for (case, key, value) in [
        ("rwkv6", "attention_hidden_size", json!(32)),
        ("rwkv6", "head_size_divisor", json!(0)),
        ("rwkv7", "attn", json!({"layers": [1]})),
        ("rwkv7", "hidden_act", json!("relu")),
        ("rwkv7", "norm_first", json!(false)),
        ("rwkv7", "norm_bias", json!(false)),
        ("rwkv7", "head_dim", json!(24)),
        ("rwkv7", "value_dim", json!([64, 32, 64])),
    ] {
        let error = directory_error(case, key, Some(value));
        assert!(error.contains(&format!("'{key}")), "{case}, {key}: {error}");
    }
}

/// What transformers computes of these settings is something else.
#[test]
fn variants_of_directories_are_refused_by_their_key() {
    for (case, key, value) in [
        ("qwen3_next", "attention_bias", json!(true)),
        ("qwen3_next", "hidden_act", json!("gelu")),
        ("qwen3_next", "decoder_sparse_step", json!(2)),
        ("qwen3_next", "mlp_only_layers", json!([1])),
        ("qwen3_next", "linear_num_value_heads", json!(3)),
        ("qwen3_next", "layer_types", json!(["full_attention"])),
        (
            "qwen3_5",
            "layer_types",
            json!(["sliding_attention", "conv", "conv", "conv", "conv"]),
        ),
        ("qwen3_5", "linear_num_key_heads", json!(4)),
        ("qwen3_5", "rope_parameters.mrope_interleaved", json!(false)),
        ("qwen3_5", "rope_parameters.mrope_section", json!([2, 2])),
        ("qwen3_5", "rope_parameters.other", json!(1)),
        ("qwen3_5_moe", "num_experts", json!(0)),
        ("lfm2", "conv_bias", json!("yes")),
        ("nemotron_h_moe", "n_group", json!(4)),
        ("lfm2", "layer_types", json!(["conv"])),
        ("lfm2", "block_ffn_dim_multiplier", json!(-1)),
        ("lfm2_moe", "use_expert_bias", json!(false)),
        ("lfm2_moe", "num_dense_layers", json!(1.5)),
        ("lfm2_moe", "routed_scaling_factor", json!(0)),
        ("kimi_linear", "mla_use_nope", json!(false)),
        ("kimi_linear", "q_lora_rank", json!(12)),
        ("kimi_linear", "num_expert_group", json!(2)),
        (
            "kimi_linear",
            "moe_router_activation_func",
            json!("softmax"),
        ),
        ("kimi_linear", "mlp_layer_types", json!(["dense", "dense"])),
        ("kimi_linear", "linear_num_heads", json!(2)),
        ("kimi_linear", "linear_attn_config.num_heads", json!(2)),
        (
            "kimi_linear",
            "linear_attn_config.full_attn_layers",
            json!([2, 5]),
        ),
        (
            "kimi_linear",
            "linear_attn_config.kda_layers",
            json!([1, 2]),
        ),
        ("kimi_linear", "routed_scaling_factor", json!(-1)),
        ("minimax", "sliding_window", json!(8)),
        ("minimax", "hidden_act", json!("gelu")),
        ("minimax", "layer_types", json!(["linear_attention"])),
        ("minimax", "mlp_beta_factor", json!("one")),
        ("xlstm", "use_bias", json!(true)),
        ("xlstm", "add_out_norm", json!(false)),
        ("xlstm", "weight_mode", json!("fused")),
        ("xlstm", "num_blocks", json!(2)),
        ("xlstm", "embedding_dim", json!(32)),
        ("xlstm", "qk_dim_factor", json!(0.99)),
        ("xlstm", "v_dim_factor", json!(0)),
        ("xlstm", "ffn_proj_factor", json!(-1)),
        ("zamba2", "layers_block_type", json!(["hybrid"])),
        (
            "zamba2",
            "layers_block_type",
            json!(["mamba", "mamba", "mamba", "mamba", "mamba", "attention"]),
        ),
        ("zamba2", "hidden_act", json!("silu")),
        ("zamba2", "add_bias_linear", json!(true)),
        ("zamba2", "use_long_context", json!(true)),
        ("zamba2", "time_step_limit", json!([0.001, 0.1])),
        ("zamba2", "time_step_min", json!(0)),
        ("zamba2", "attention_head_dim", json!(16)),
        ("zamba2", "num_attention_heads", json!(3)),
        ("zamba2", "num_key_value_heads", json!(3)),
        ("recurrent_gemma", "block_types", json!([])),
        ("recurrent_gemma", "block_types", json!(["mamba"])),
        ("recurrent_gemma", "hidden_activation", json!("silu")),
        (
            "recurrent_gemma",
            "embeddings_scale_by_sqrt_dim",
            json!(false),
        ),
        ("recurrent_gemma", "head_dim", json!(16)),
        ("recurrent_gemma", "num_attention_heads", json!(7)),
        ("recurrent_gemma", "intermediate_size", json!(1)),
        (
            "recurrent_gemma",
            "rope_parameters",
            json!({"rope_type": "linear", "factor": 2.0}),
        ),
        (
            "recurrent_gemma",
            "rope_parameters.rope_type",
            json!("dynamic"),
        ),
        ("recurrent_gemma", "rope_parameters.factor_2", json!(4)),
    ] {
        let error = directory_error(case, key, Some(value));
        assert!(error.contains(key), "{case}, {key}: {error}");
    }
    for (case, key) in [
        ("qwen3_next", "linear_conv_kernel_dim"),
        ("qwen3_next", "linear_value_head_dim"),
        ("qwen3_5", "intermediate_size"),
        ("qwen3_5_moe", "moe_intermediate_size"),
        ("lfm2", "conv_L_cache"),
        ("lfm2_moe", "num_experts"),
        ("kimi_linear", "kv_lora_rank"),
        ("kimi_linear", "mla_use_nope"),
        ("minimax", "num_local_experts"),
        ("xlstm", "vocab_size"),
        ("zamba2", "layers_block_type"),
        ("recurrent_gemma", "rms_norm_eps"),
        ("recurrent_gemma", "intermediate_size"),
    ] {
        let error = directory_error(case, key, None);
        assert!(error.contains(key), "{case}, {key}: {error}");
    }
}

/// Without a list of their types, three of four layers are recurrent; without a number of rotated
/// values, a quarter of a head rotates.
#[test]
fn what_a_config_leaves_out_is_what_transformers_takes() {
    let metadata = |key: &str| {
        let recipe = Recipe::named("qwen3_next").with_config(|config| drop(config.remove(key)));
        let translated = recipe.translated(&case("qwen3_next").registry()).unwrap();
        translated.metadata().clone()
    };
    let without_types = metadata("layer_types");
    assert!(
        without_types
            .value("qwen3next.attention.recurrent_layers")
            .is_none()
    );
    assert_eq!(
        without_types.get("qwen3next.full_attention_interval"),
        Ok(4u32)
    );
    let without_rope = metadata("rope_parameters");
    assert_eq!(without_rope.get("qwen3next.rope.dimension_count"), Ok(4u32));
}

/// LFM2's first configs list the layers that attend, and have another name for the width between
/// matrices.
#[test]
fn older_configs_of_lfm2_mean_the_same() {
    let registry = case("lfm2").registry();
    let translated = |recipe: Recipe| {
        let translated = recipe.translated(&registry).unwrap();
        translated.metadata().clone()
    };
    let older = Recipe::named("lfm2").with_config(|config| {
        config.remove("layer_types");
        config.insert("full_attn_idxs".into(), json!([2, 4]));
        let width = config.remove("intermediate_size").unwrap();
        config.insert("block_ff_dim".into(), width);
    });
    let metadata = translated(older);
    assert_eq!(metadata, translated(Recipe::named("lfm2")));
    assert_eq!(metadata.get("lfm2.feed_forward_length"), Ok(80u32));
    let whole = Recipe::named("lfm2").with_config(|config| {
        config.insert("block_auto_adjust_ff_dim".into(), json!(false));
    });
    assert_eq!(
        translated(whole).get("lfm2.feed_forward_length"),
        Ok(120u32)
    );
}

/// Without a list of types every second layer of MiniMax has lightning attention; without factors
/// they are 1. Decays are those of the layer's number.
#[test]
fn what_configs_of_minimax_leave_out_is_what_transformers_takes() {
    let registry = case("minimax").registry();
    let left_out = Recipe::named("minimax").with_config(|config| {
        for key in ["layer_types", "mlp_alpha_factor", "rope_parameters"] {
            assert!(config.remove(key).is_some(), "no {key}");
        }
    });
    let metadata = left_out.translated(&registry).unwrap().metadata().clone();
    let kv_heads: Vec<u32> = metadata
        .per_layer("minimax.attention.head_count_kv", 5)
        .unwrap();
    assert_eq!(kv_heads, [2, 0, 2, 0, 2]);
    assert_eq!(
        metadata.get("minimax.residual.feed_forward_alpha"),
        Ok(1.0f32)
    );
    assert_eq!(
        metadata.get("minimax.residual.feed_forward_beta"),
        Ok(0.7f32)
    );
    assert_eq!(metadata.get("minimax.rope.freq_base"), Ok(1e6f32));
    let directory = Recipe::named("minimax").directory(&registry).unwrap();
    let rates = directory.weights().require("blk.3.ssm_a").unwrap();
    assert_eq!(rates.shape(), [4, 1]);
    // Layer 3 of 5: a quarter of 1/4, 1/16, 1/64 and 1/256.
    for (rate, wanted) in rates.to_f32().iter().zip([4.0f32, 16.0, 64.0, 256.0]) {
        assert!((rate * wanted + 0.25).abs() < 1e-4, "{rate}");
    }
}

/// Sizes of xLSTM have two names, and what is left out is what transformers takes.
#[test]
fn configs_of_xlstm_mean_the_same_with_one_name_and_without_some() {
    let registry = case("xlstm").registry();
    let translated = |recipe: Recipe| recipe.translated(&registry).unwrap().metadata().clone();
    let own = translated(Recipe::named("xlstm"));
    assert_eq!(own.get("xlstm.feed_forward_length"), Ok(96u32));
    let with_one_name = |keys: [&str; 2]| {
        Recipe::named("xlstm").with_config(|config| {
            for key in keys.iter().chain(&["eps", "norm_eps", "v_dim_factor"]) {
                assert!(config.remove(*key).is_some(), "no {key}");
            }
        })
    };
    let usual = with_one_name(["num_blocks", "embedding_dim"]);
    assert_eq!(translated(usual), own);
    // transformers takes 4096 values and 32 layers then.
    let other = with_one_name(["num_hidden_layers", "hidden_size"]);
    let error = other.translated(&registry).unwrap_err().to_string();
    let wanted = "'num_blocks' is 3, not 32, as 'num_hidden_layers' is";
    assert!(error.contains(wanted), "{error}");
    // 64 * 2.667 is 170.7, and the next multiple of 64 is 192.
    let without = Recipe::named("xlstm").with_config(|config| {
        for key in [
            "ffn_proj_factor",
            "ffn_round_up_to_multiple_of",
            "qk_dim_factor",
        ] {
            assert!(config.remove(key).is_some(), "no {key}");
        }
        config.remove("gate_soft_cap");
    });
    let without = translated(without);
    assert_eq!(without.get("xlstm.feed_forward_length"), Ok(192u32));
    assert_eq!(without.get("xlstm.mlstm.key_length"), Ok(8u32));
    assert_eq!(without.get("xlstm.mlstm.gate_softcapping"), Ok(15.0f32));
}

/// Published configs of Zamba2 have an older name for layers without a block; and what is left out
/// is what transformers takes. Only the first layers with a block have its matrices.
#[test]
fn configs_of_zamba2_mean_the_same_with_older_names_and_without_some() {
    let registry = case("zamba2").registry();
    let translated = |recipe: Recipe| recipe.translated(&registry).unwrap().metadata().clone();
    let own = translated(Recipe::named("zamba2"));
    let older = Recipe::named("zamba2").with_config(|config| {
        let types = ["mamba", "hybrid"].repeat(3);
        config.insert("layers_block_type".into(), json!(types));
        for key in ["mamba_d_conv", "mamba_expand", "attention_head_dim"] {
            assert!(config.remove(key).is_some(), "no {key}");
        }
    });
    assert_eq!(translated(older), own);
    let without = Recipe::named("zamba2").with_config(|config| {
        for key in ["use_mem_rope", "intermediate_size", "adapter_rank"] {
            assert!(config.remove(key).is_some(), "no {key}");
        }
    });
    let without = translated(without);
    assert_eq!(without.get("zamba2.rope.scaling.finetuned"), Ok(false));
    assert_eq!(without.get("zamba2.feed_forward_length"), Ok(256u32));
    assert_eq!(without.get("zamba2.shared_block.lora_rank"), Ok(128u32));
}

/// A time step is at least the shortest one, and otherwise as without.
#[test]
fn time_steps_of_zamba2_have_a_floor() {
    let directory = Recipe::named("zamba2")
        .with_config(|config| drop(config.insert("time_step_min".into(), json!(0.25))))
        .directory(&case("zamba2").registry())
        .unwrap();
    let weight = |name: &str| directory.weights().require(name).unwrap().to_f32();
    let softplus = |x: f32| x.exp().ln_1p();
    let (floor, bias) = (
        weight("blk.3.ssm_dt_floor.weight"),
        weight("blk.3.ssm_dt.bias"),
    );
    let recipe = Recipe::named("zamba2");
    let own = recipe
        .weights()
        .require("model.layers.3.mamba_decoder.mamba.dt_bias");
    let own = own.unwrap().to_f32();
    assert_eq!([floor.len(), bias.len(), own.len()], [8; 3]);
    let mut n_floored = 0;
    for ((floor, bias), own) in floor.iter().zip(&bias).zip(own) {
        for dt in [-4.0f32, -0.5, 0.0, 0.7, 3.0] {
            let ours = softplus((dt + floor).max(0.0) + bias);
            let wanted = softplus(dt + own).max(0.25);
            assert!((ours - wanted).abs() < 1e-6, "{dt}: {ours}, {wanted}");
            n_floored += usize::from(wanted == 0.25);
        }
    }
    assert!((8..32).contains(&n_floored), "{n_floored}");
}

/// The published configs of RecurrentGemma have rotations in older keys; and what they leave out is
/// what transformers takes.
#[test]
fn configs_of_recurrent_gemma_mean_the_same_with_older_keys_and_without_some() {
    let registry = case("recurrent_gemma").registry();
    let translated = |recipe: Recipe| recipe.translated(&registry).unwrap().metadata().clone();
    let own = translated(Recipe::named("recurrent_gemma"));
    assert_eq!(own.get("recurrentgemma.rope.dimension_count"), Ok(6u32));
    let older = Recipe::named("recurrent_gemma").with_config(|config| {
        config.remove("rope_parameters");
        config.insert("rope_theta".into(), json!(10_000.0));
        config.insert("partial_rotary_factor".into(), json!(0.5));
    });
    assert_eq!(translated(older), own);
    let without = Recipe::named("recurrent_gemma").with_config(|config| {
        for key in ["rope_parameters", "lru_width", "block_types", "head_dim"] {
            assert!(config.remove(key).is_some(), "no {key}");
        }
    });
    assert_eq!(translated(without), own);
    let defaults = Recipe::named("recurrent_gemma").with_config(|config| {
        for key in ["attention_window_size", "conv1d_width", "logits_soft_cap"] {
            assert!(config.remove(key).is_some(), "no {key}");
        }
    });
    let defaults = translated(defaults);
    for (key, wanted) in [
        ("attention.sliding_window", 2048u32),
        ("ssm.conv_kernel", 4),
    ] {
        assert_eq!(defaults.get(&format!("recurrentgemma.{key}")), Ok(wanted));
    }
    let cap = defaults.get::<f32>("recurrentgemma.final_logit_softcapping");
    assert_eq!(cap, Ok(30.0));
}

/// Published configs of Kimi Linear list layers by number, from 1, and not by type.
#[test]
fn published_configs_of_kimi_linear_mean_the_same() {
    let registry = case("kimi_linear").registry();
    let published = Recipe::named("kimi_linear").with_config(|config| {
        for key in [
            "layer_types",
            "linear_conv_kernel_dim",
            "linear_head_dim",
            "linear_num_heads",
            "mlp_layer_types",
        ] {
            assert!(config.remove(key).is_some(), "no {key}");
        }
    });
    let [published, newer] = [published, Recipe::named("kimi_linear")]
        .map(|recipe| recipe.translated(&registry).unwrap().metadata().clone());
    assert_eq!(published, newer);
}
