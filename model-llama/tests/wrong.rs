//! Files that would come out wrong are refused by the key or the tensor.

#![allow(clippy::unwrap_used)] // helpers of tests

mod common;

use common::CASES;
use kv_core::weights::{Weight, WeightSource};
use model_core::gguf::Metadata;
use model_tests::{Case, checks::ONE};

/// A file without one of its tensors.
struct Without<'a>(&'a dyn WeightSource, &'a str);

impl WeightSource for Without<'_> {
    fn get(&self, name: &str) -> Option<Weight> {
        self.0.get(name).filter(|_| name != self.1)
    }

    fn names(&self) -> Vec<String> {
        let names = self.0.names().into_iter();
        names.filter(|name| name != self.1).collect()
    }
}

fn error(case: &str, edit: impl FnOnce(&mut Metadata), without: &str) -> String {
    let case = Case::named(CASES, case);
    let (file, mut metadata) = case.open();
    edit(&mut metadata);
    let model = case.registry().model(&metadata, &Without(&*file, without));
    model.unwrap_err().to_string()
}

#[test]
fn settings_that_cannot_be_are_refused_by_their_key() {
    let refused = |case: &str, key: &str, value: f32| {
        let as_count = value.fract() == 0.0;
        let error = error(
            case,
            |metadata| {
                match as_count {
                    true => metadata.insert(key, value as u32),
                    false => metadata.insert(key, value),
                };
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
    refused("gemma2_swa8", "gemma2.attn_logit_softcapping", -0.5);
    refused("granite", "granite.residual_scale", -0.5);
    refused(
        "starcoder2",
        "starcoder2.attention.layer_norm_epsilon",
        -0.5,
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
        ("olmo2", "blk.3.attn_q_norm.weight"),
        ("starcoder2", "output_norm.bias"),
        ("gemma2_swa8", "blk.1.post_ffw_norm.weight"),
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
