//! Files that would come out wrong are refused by the key or the tensor.

#![allow(clippy::unwrap_used)] // helpers of tests

use crate::common::CASES;
use kv_graph::weights::MemoryWeights;
use model_core::gguf::Metadata;
use model_tests::{Case, checks::ONE, refusal, remove_key};

fn error(case: &str, edit: impl FnOnce(&mut Metadata), without: &str) -> String {
    refusal(Case::named(CASES, case), edit, without)
}

#[test]
fn settings_that_cannot_be_are_refused_by_their_key() {
    let refused = |case: &str, key: &str, value: f32| {
        let as_count = value.fract() == 0.0;
        let error = error(
            case,
            |metadata| {
                if as_count {
                    metadata.insert(key, value as u32);
                } else {
                    metadata.insert(key, value);
                }
            },
            "",
        );
        assert!(error.contains(key), "{case}: {error}");
    };
    // What a member does not have.
    refused("qwen3", "qwen3.expert_count", 4.0);
    refused("qwen2", "qwen2.logit_scale", 0.5);
    refused("llama_gqa_tied", "llama.embedding_scale", 0.5);
    refused("phi3", "phi3.residual_scale", 0.5);
    refused("qwen3", "qwen3.final_logit_softcapping", 30.5);
    refused("qwen2", "qwen2.attention.max_alibi_bias", 8.5);
    refused("gpt2", "gpt2.attention.max_alibi_bias", 8.5);
    refused("bloom", "bloom.attention.clamp_kqv", 1.5);
    refused("hunyuan_v1_dense", "hunyuan-dense.expert_count", 4.0);
    // What no model can have.
    refused("qwen3_moe", "qwen3moe.expert_count", 0.0);
    refused("mixtral", "llama.expert_used_count", 5.0);
    refused("mixtral", "llama.expert_used_count", 0.0);
    refused("mixtral", "llama.expert_gating_func", 7.0);
    refused("mixtral", "llama.expert_weights_scale", 2.5);
    refused("gpt_oss_swa8", "gpt-oss.expert_feed_forward_length", 0.0);
    refused("llama4_chunk16", "llama4.attention.chunk_size", 0.0);
    refused("llama4_chunk16", "llama4.attention.temperature_length", 0.0);
    refused("cohere2_swa8", "cohere2.logit_scale", -0.5);
    refused("mpt", "mpt.attention.clamp_kqv", -0.5);
    refused("mpt", "mpt.attention.max_alibi_bias", -0.5);
    refused("bloom", "bloom.attention.max_alibi_bias", -0.5);
    refused("ministral3", "mistral3.attention.temperature_scale", -0.5);
    refused("glm4_moe", "glm4moe.nextn_predict_layers", 4.0);
    refused("glm4_moe", "glm4moe.expert_weights_scale", -0.5);
    refused("phimoe", "phimoe.expert_router_jitter", -0.5);
    refused("phimoe", "phimoe.expert_used_count", 3.0);
    refused("phimoe", "phimoe.rope.scaling.attn_factor_short", -0.5);
    for (case, architecture) in [
        ("gemma2_swa8", "gemma2"),
        ("gemma3_iswa8", "gemma3"),
        ("cohere2_swa8", "cohere2"),
        ("gpt_oss_swa8", "gpt-oss"),
    ] {
        let key = format!("{architecture}.attention.sliding_window");
        refused(case, &key, 0.0);
    }
    refused("llama_gqa_tied", "llama.attention.head_count_kv", 3.0);
    refused("qwen2", "qwen2.attention.head_count", 0.0);
    refused("qwen2", "qwen2.block_count", 0.0);
    refused("phi3", "phi3.rope.dimension_count", 7.0);
    refused("gemma2_swa8", "gemma2.attn_logit_softcapping", -0.5);
    refused("granite", "granite.residual_scale", -0.5);
    refused("apertus", "xielu.eps", -0.5);
    refused("apertus", "xielu.beta", 200.5);
    refused("apertus", "xielu.alpha_p", f32::NAN);
    refused("apertus", "xielu.alpha_n", -99.5);
    refused(
        "starcoder2",
        "starcoder2.attention.layer_norm_epsilon",
        -0.5,
    );
}

#[test]
fn missing_keys_are_named() {
    for (case, key) in [
        ("llama_gqa_tied", "llama.embedding_length"),
        ("qwen2", "qwen2.block_count"),
        ("gemma3_iswa8", "gemma3.attention.head_count"),
        ("phi3", "phi3.attention.layer_norm_rms_epsilon"),
        ("starcoder2", "starcoder2.attention.layer_norm_epsilon"),
        ("qwen3_moe", "qwen3moe.expert_count"),
        ("cohere2_swa8", "cohere2.logit_scale"),
        ("gemma2_swa8", "gemma2.attention.sliding_window"),
        ("gemma3_iswa8", "gemma3.attention.sliding_window"),
        ("cohere2_swa8", "cohere2.attention.sliding_window"),
        ("gpt_oss_swa8", "gpt-oss.attention.sliding_window"),
        ("granite", "granite.context_length"),
        (
            "ministral3",
            "mistral3.rope.scaling.original_context_length",
        ),
        ("granitemoe", "granitemoe.logit_scale"),
        ("gpt_neo", "gptneo.attention.sliding_window"),
        ("apertus", "xielu.alpha_n"),
        ("apertus", "xielu.eps"),
    ] {
        let error = error(case, |metadata| remove_key(metadata, key), "");
        assert!(error.contains(key), "{case}: {error}");
    }
}

#[test]
fn rows_behind_norms_are_blooms_alone() {
    let key = "gpt2.residual_behind_norms";
    let error = error("gpt2", |metadata| drop(metadata.insert(key, true)), "");
    assert!(error.contains(key), "{error}");
}

#[test]
fn norms_behind_sums_are_opts_alone() {
    let key = "gpt2.norms_behind_sums";
    let error = error("gpt2", |metadata| drop(metadata.insert(key, true)), "");
    assert!(error.contains(key), "{error}");
}

#[test]
fn widths_of_embeddings_that_do_not_fit_are_named() {
    let key = "opt.input_embedding_length";
    let wide = |metadata: &mut Metadata| drop(metadata.insert(key, 33u32));
    let error = error("opt_350m", wide, "");
    assert!(
        error.contains("[160, 33]") && error.contains("[160, 32]"),
        "{error}"
    );
    for tensor in ["token_embd_proj.weight", "output_proj.weight"] {
        let error = refusal(Case::named(CASES, "opt_350m"), |_| (), tensor);
        assert!(error.contains(tensor), "{error}");
    }
}

#[test]
fn an_activation_of_another_name_is_refused_with_those_that_are_known() {
    let key = "gpt2.hidden_activation";
    let error = error("gpt2", |metadata| drop(metadata.insert(key, "mish")), "");
    assert!(error.contains(key) && error.contains("gelu_new"), "{error}");
}

#[test]
fn heads_that_do_not_divide_are_refused_with_numbers() {
    let error = error(
        "llama_gqa_tied",
        |metadata| drop(metadata.insert("llama.attention.head_count_kv", 3u32)),
        "",
    );
    assert!(
        error.contains("3 key/value heads") && error.contains("4 query heads"),
        "{error}"
    );
}

#[test]
fn half_of_long_rope_is_refused() {
    let (case, kind) = ("phi3_longrope_long", "phi3.rope.scaling.type");
    for tensor in ["rope_factors_long.weight", "rope_factors_short.weight"] {
        let error = error(case, |_| (), tensor);
        assert!(error.contains(kind) && error.contains(tensor), "{error}");
    }
    let yarn = error(case, |m| drop(m.insert(kind, "yarn")), "");
    assert!(yarn.contains(kind) && yarn.contains("yarn"), "{yarn}");
    let factor = "phi3.rope.scaling.factor";
    let stretched = error(case, |m| drop(m.insert(factor, 4f32)), "");
    assert!(stretched.contains(factor), "{stretched}");
    let short = error(
        case,
        |m| drop(m.insert("phi3.rope.dimension_count", 8u32)),
        "",
    );
    assert!(
        short.contains("rope_factors") && short.contains("[8]"),
        "{short}"
    );
}

#[test]
fn missing_tensors_are_named() {
    for (case, tensor) in [
        ("mixtral", "blk.1.ffn_gate_inp.weight"),
        ("mixtral", "blk.1.ffn_down_exps.weight"),
        ("gpt_oss_swa8", "blk.0.attn_sinks.weight"),
        ("gpt_oss_swa8", "blk.2.ffn_up_exps.bias"),
        ("llama4_chunk16", "blk.3.ffn_down_shexp.weight"),
        ("phi3", "blk.0.attn_qkv.weight"),
        ("olmo2", "blk.2.attn_q_norm.weight"),
        ("starcoder2", "output_norm.bias"),
        ("gemma2_swa8", "blk.1.post_ffw_norm.weight"),
        ("gpt2", "position_embd.weight"),
        ("gpt2", "blk.1.ffn_up.bias"),
        ("bloom", "token_embd_norm.bias"),
        ("glm4_moe", "blk.2.exp_probs_b.bias"),
        ("gpt_neox", "blk.0.ffn_norm.weight"),
        ("falcon_alibi", "blk.1.attn_qkv.bias"),
        ("exaone4", "blk.3.attn_q_norm.weight"),
        ("bitnet", "blk.1.attn_sub_norm.weight"),
        ("bitnet", "blk.2.ffn_sub_norm.weight"),
        ("minicpm3", "blk.1.attn_kv_a_norm.weight"),
    ] {
        let error = error(case, |_| (), tensor);
        assert!(error.contains(tensor), "{case}: {error}");
    }
}

#[test]
fn a_router_of_another_size_is_named() {
    let error = error(
        "mixtral",
        |metadata| drop(metadata.insert("llama.expert_count", 5u32)),
        "",
    );
    assert!(error.contains("blk.0.ffn_gate_inp.weight"), "{error}");
    assert!(
        error.contains("[4, 64]") && error.contains("[5, 64]"),
        "{error}"
    );
}

#[test]
fn the_largest_llama_4_norms_no_queries() {
    let case = Case::named(CASES, "llama4_chunk16");
    let (file, mut metadata) = case.open();
    let normed = |metadata: &Metadata| {
        let architecture = case.registry();
        let model = architecture.get("llama4").unwrap().model(metadata, &*file);
        let graph = model.unwrap().graph(ONE).unwrap();
        graph.find("Qnormed-0").is_some()
    };
    assert!(normed(&metadata));
    metadata.insert("llama4.expert_count", 128u32);
    assert!(!normed(&metadata));
}

/// StableLM 2 12B's and Command R+'s norms of heads, MPT's rows of positions, a bias.
#[test]
fn tensors_of_variants_are_refused() {
    for (case, tensor) in [
        ("stablelm", "blk.2.attn_q_norm.weight"),
        ("cohere", "blk.2.attn_q_norm.weight"),
        ("mpt", "position_embd.weight"),
        ("mpt", "blk.1.attn_qkv.bias"),
        ("llama_gqa_tied", "blk.1.attn_k.bias"),
    ] {
        let case = Case::named(CASES, case);
        let (file, metadata) = case.open();
        let mut weights = MemoryWeights::new();
        let names = file.names().into_iter();
        names.for_each(|name| weights.insert(file.require(&name).unwrap()));
        let n_layers = case.registry().model(&metadata, &weights).map(|model| {
            model.layers().iter().count() // the same weights are those of a model
        });
        assert!(n_layers.unwrap() >= 3, "{}", case.name);
        weights.insert_f32(tensor, &[1], &[1.0]).unwrap();
        let error = case.registry().model(&metadata, &weights).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!(
                "tensor '{tensor}' is not used: this variant of the architecture is not supported"
            )
        );
    }
}

/// The layer after the others of a GLM-4.5 predicts the token after the next.
#[test]
fn layers_that_predict_further_tokens_are_not_computed() {
    let case = Case::named(CASES, "glm4_moe");
    let (file, mut metadata) = case.open();
    let n_layers = |metadata: &Metadata| {
        let model = case.registry().model(metadata, &*file).unwrap();
        model.layers().iter().count()
    };
    assert_eq!(n_layers(&metadata), 4);
    metadata.insert("glm4moe.nextn_predict_layers", 1u32);
    assert_eq!(n_layers(&metadata), 3);
}

/// Two classes of models have one name.
#[test]
fn falcon_without_a_second_norm_has_parallel_blocks() {
    let [parallel, serial] = ["falcon", "falcon_alibi"].map(|name| {
        let graph = Case::named(CASES, name).model().graph(ONE).unwrap();
        (graph.find("ffn_norm-0").is_none(), graph.text().to_string())
    });
    assert!(parallel.0 && !serial.0);
    assert!(parallel.1.contains("rope(") && !parallel.1.contains("alibi="));
    assert!(serial.1.contains("alibi=8, alibi_factor=0.31622776") && !serial.1.contains("rope("));
}

#[test]
fn granite_without_trained_positions_does_not_rotate() {
    let case = Case::named(CASES, "granite");
    let (file, mut metadata) = case.open();
    metadata.insert("granite.rope.scaling.finetuned", false);
    let model = case.registry().model(&metadata, &*file).unwrap();
    assert!(
        !model
            .graph(ONE)
            .unwrap()
            .text()
            .to_string()
            .contains("rope(")
    );
}

/// In a moment: the graph of a header that lies is built before its tensors are missed.
#[test]
fn thousands_of_layers_without_tensors_are_refused_at_once() {
    let started = std::time::Instant::now();
    let text = error(
        "llama_gqa_tied",
        |metadata| {
            metadata.insert("llama.block_count", 3335u32);
        },
        "",
    );
    assert!(text.contains("block_count"), "{text}");
    assert!(text.contains("3335") && text.contains("29"), "{text}");
    assert!(started.elapsed().as_secs() < 2, "{:?}", started.elapsed());
}
