//! Models of latents: plain attention, types of rows, and files that would come out wrong.

#![allow(clippy::unwrap_used)] // helpers of tests

use crate::common::CASES;
use kv_core::layers::LayerMemory;
use kv_graph::Op;
use kv_rows::KvType;
use model_core::gguf::Metadata;
use model_tests::checks::{ONE, TOLERANCE};
use model_tests::{Case, Runner, Setup, candle, cpu, refusal, remove_key};

/// Heads of 32 values: whole blocks of every type.
const WIDE: &str = "deepseek_v2_lite";

fn case(name: &str) -> &'static Case {
    Case::named(CASES, name)
}

#[test]
fn a_layer_remembers_one_row_a_token_for_all_heads() {
    let model = case("deepseek_v3").model();
    for (_, memory) in model.layers().iter() {
        let LayerMemory::Latent(rows) = memory else {
            panic!("{memory:?}");
        };
        assert_eq!((rows.kv_heads, rows.k_dim, rows.v_dim), (1, 28, 20));
    }
    let graph = model.graph(ONE).unwrap();
    let stores = graph
        .nodes()
        .iter()
        .filter(|node| matches!(node.op, Op::StoreK { .. }));
    assert_eq!(stores.count(), 4);
    // Keys that are values, too, cannot be moved.
    let (weights, _) = case("deepseek_v3").open();
    let error = graph.key_ropes(&*weights).unwrap_err().to_string();
    assert!(error.contains("values"), "{error}");
}

/// The bound on the change of the likeliest tokens by the type of rows: mean divergence of their
/// distribution from the reference's, in nats a token.
const TYPES: [(KvType, f64); 6] = [
    (KvType::F16, 5e-5),
    (KvType::BF16, 2e-3),
    (KvType::Q8_0, 2e-2),
    (KvType::Q5_1, 0.5),
    (KvType::Q4_0, 1.0),
    (KvType::IQ4_NL, 1.0),
];

#[test]
fn rows_of_every_type_stay_near_the_reference() {
    let case = case(WIDE);
    let reference = case.reference();
    let (prompt, theirs) = (&reference.prompts()[0], &reference.logits(0));
    for (kv_type, tolerance) in TYPES {
        let setup = Setup::with_type(kv_type);
        let on_cpu = Runner::new(cpu(), case, &setup).feed(0, prompt, 512);
        let on_candle = Runner::new(candle(), case, &setup).feed(0, prompt, 512);
        for logits in [&on_cpu, &on_candle] {
            let off = theirs.divergence(logits);
            println!("{kv_type}: {off}");
            assert!(off < tolerance, "{kv_type}: {off} nats a token");
        }
    }
}

/// 11 bits of mantissa move these logits (spread 3) by up to 0.12, where experts nearly tie.
const F16_TOLERANCE: f32 = 0.2;

#[test]
fn f16_rows_stay_near_the_reference() {
    let setup = Setup::with_type(KvType::F16);
    // What an indexer chooses differs at near-ties: tests/indexer.rs.
    let indexed = ["deepseek_v32", "glm_moe_dsa"];
    let dense = |case: &&Case| case.keys.is_latent() && !indexed.contains(&case.name);
    for case in CASES.iter().filter(dense) {
        let reference = case.reference();
        let logits = Runner::new(cpu(), case, &setup).feed(0, &reference.prompts()[0], 512);
        let off = reference.logits(0).distance(&logits);
        assert!(off < F16_TOLERANCE, "{}: off by {off}", case.name);
    }
}

/// Cells of the runner's memory.
const N_KV: usize = 512;

#[test]
fn plain_attention_over_latents_is_the_references() {
    let case = case(WIDE);
    let reference = case.reference();
    let (prompt, theirs) = (&reference.prompts()[1], reference.logits(1));
    let setup = Setup::default();
    let mut on_cpu = Runner::new(cpu(), case, &setup).with_plain_attention(N_KV);
    let mut on_candle = Runner::new(candle(), case, &setup).with_plain_attention(N_KV);
    for logits in [on_cpu.feed(0, prompt, 512), on_candle.feed(0, prompt, 512)] {
        let off = theirs.distance(&logits);
        assert!(off < TOLERANCE, "off by {off}");
    }
}

fn error(name: &str, edit: impl FnOnce(&mut Metadata)) -> String {
    refusal(case(name), edit, "")
}

#[test]
fn sizes_that_do_not_fit_are_refused_by_their_key() {
    for (key, value) in [
        ("attention.head_count_kv", 7u32),
        ("attention.key_length", 18),
        ("attention.value_length", 12),
        ("attention.kv_lora_rank", 0),
        ("attention.kv_lora_rank", 21),
        ("rope.dimension_count", 18),
        ("attention.value_length_mla", 0),
        ("expert_gating_func", 3),
        ("expert_group_used_count", 0),
    ] {
        let key = format!("deepseek2.{key}");
        let error = error("deepseek_v3", |metadata| drop(metadata.insert(&key, value)));
        let named = if key.ends_with("kv_lora_rank") && value > 0 {
            "deepseek2.attention.key_length"
        } else {
            &*key
        };
        assert!(error.contains(named), "{key}: {error}");
    }
    for key in [
        "attention.kv_lora_rank",
        "attention.key_length_mla",
        "attention.value_length_mla",
        "rope.dimension_count",
        "rope.scaling.yarn_log_multiplier",
        "expert_group_used_count",
    ] {
        let key = format!("deepseek2.{key}");
        let error = error("deepseek_v3", |metadata| remove_key(metadata, &key));
        assert!(error.contains(&key), "{error}");
    }
}

#[test]
fn biases_of_the_choice_are_missed_where_a_sigmoid_makes_weights() {
    let bias = "blk.1.exp_probs_b.bias";
    let without = refusal(case("deepseek_v3"), |_| (), bias);
    assert!(without.contains(bias), "{without}");
    let softmax = error("deepseek_v2", |metadata| {
        drop(metadata.insert("deepseek2.expert_gating_func", 2u32));
    });
    assert!(softmax.contains(bias), "{softmax}");
}
