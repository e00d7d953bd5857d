//! Whole models on any GPU, which the program's root names [`Gpu`]: every fixture, the texts of
//! trained models, states that move between GPU and CPU, replays, and random operations on memories
//! for `CELLAR_SOAK_SECONDS`.

use std::time::Duration;

use kv_gpu::{GpuBackend, GpuConfig, Precision};
use kv_rows::KvType;
use model_tests::gpu::{distance_from_cpu, distance_from_reference};
use model_tests::{Case, Recipe, fixture};

use crate::gpu::texts::{Length, MODELS};
use crate::gpu::{self, encoders, fixtures, replays, soak, sources, states, texts};
use crate::{Gpu, any_gpu};

fn backend(precision: Precision) -> GpuBackend<Gpu> {
    GpuBackend::new(any_gpu::device(), GpuConfig { precision })
}

fn precise() -> GpuBackend<Gpu> {
    backend(Precision::Precise)
}

fn fast() -> GpuBackend<Gpu> {
    backend(Precision::Fast)
}

#[test]
fn four_models_agree() {
    for (backend, precision) in [
        (precise as fn() -> _, Precision::Precise),
        (fast, Precision::Fast),
    ] {
        fixtures::assert_near(&fixtures::four(), precision, |case| {
            distance_from_cpu(backend(), case)
        });
    }
}

#[test]
fn fixtures_agree_precise() {
    fixtures::assert_near(&fixtures::all(), Precision::Precise, |case| {
        distance_from_reference(precise, case).max(distance_from_cpu(precise(), case))
    });
}

#[test]
fn fixtures_agree_fast() {
    fixtures::assert_near(&fixtures::all(), Precision::Fast, |case| {
        distance_from_reference(fast, case).max(distance_from_cpu(fast(), case))
    });
}

#[test]
fn encoders_agree() {
    for name in ["bert_tiny", "modern_bert_tiny"] {
        encoders::vectors_agree(precise(), name, 1e-5);
        encoders::vectors_agree(fast(), name, 1e-2);
    }
    let scorers = [
        "xlm_roberta_reranker",
        "distilbert_classifier",
        "deberta_v2_reranker",
        "roberta_classifier",
        "modernbert_classifier",
    ];
    for recipe in Recipe::all_in(&fixture("encoders")) {
        match recipe.name() {
            name if scorers.contains(&&*name) => encoders::scores_agree(precise(), &name, 1e-4),
            name => encoders::rows_agree(precise(), &name, 1e-4),
        }
    }
}

#[test]
fn texts_over_sources_agree() {
    for name in ["t5_relu_tied", "t5_v1_1", "bart", "m2m_100"] {
        sources::logits_agree(precise(), name, 2e-4);
        sources::logits_agree(fast(), name, 8e-2);
    }
}

#[test]
fn stories_are_the_references() {
    texts::stories_are_the_references(precise, Length::WHOLE);
}

#[test]
fn choices_are_the_cpus() {
    texts::choices_are_the_cpus(fast, Length::WHOLE, 0.1);
}

#[test]
fn states_move() {
    for case in &MODELS {
        states::states_move(precise, case, KvType::F32, 1e-3);
        states::states_move(precise, case, KvType::F16, 0.05);
    }
    for name in ["gemma3_iswa8", "mamba2", "jamba"] {
        let case = Case::recipe(name, gpu::register);
        states::states_move(precise, &case, KvType::F32, 1e-3);
    }
}

#[test]
fn replays_change_no_bit() {
    for case in &fixtures::all() {
        replays::replays_change_no_bit(any_gpu::device, case);
    }
}

#[test]
fn random_operations() {
    let seconds = std::env::var("CELLAR_SOAK_SECONDS");
    let seconds = seconds.map_or(10, |text| text.parse().unwrap());
    let until = soak::SoakLimit::Elapsed(Duration::from_secs(seconds));
    soak::soak(precise, 28, until);
}
