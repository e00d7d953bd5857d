//! The graph of every member, for one token and for many, as snapshots that a person reads.

#![allow(clippy::unwrap_used)] // helpers of tests

use crate::common::CASES;
use model_core::architecture::Registry;
use model_tests::checks::{self, MANY, ONE};
use model_tests::{Case, Recipe, fixture};

#[test]
fn graphs_are_as_they_were_read() {
    for case in CASES {
        let (name, model) = (case.name, case.model());
        let [one, many] = [ONE, MANY].map(|shape| model.graph(shape).unwrap());
        checks::differ_in_rows_alone(&one, &many);
        insta::assert_snapshot!(format!("{name}-many"), many.text().to_string());
    }
}

#[test]
fn graphs_of_diffusion_models_are_as_they_were_read() {
    let mut registry = Registry::new();
    model_llama::register(&mut registry);
    for name in ["dream", "llada", "llada_moe", "rnd1"] {
        let recipe = Recipe::open(&fixture("diffusion").join(name));
        let directory = recipe.directory(&registry).unwrap();
        let graph = directory.model().graph(MANY).unwrap();
        insta::assert_snapshot!(format!("{name}-many"), graph.text().to_string());
    }
}

#[test]
fn tied_and_untied_differ_in_the_output_matrix_alone() {
    let [tied, untied] = ["llama_gqa_tied", "llama_gqa_untied"].map(|n| Case::named(CASES, n));
    checks::differ_in_the_output_matrix_alone(tied, untied);
}

#[test]
fn the_length_of_the_context_chooses_the_factors() {
    let [long, short] = ["long", "short"].map(|set| {
        let case = Case::named(CASES, &format!("phi3_longrope_{set}"));
        case.model().graph(ONE).unwrap()
    });
    let model = Case::named(CASES, "phi3_longrope_long").model();
    let within = |n_tokens| model.for_context(n_tokens).unwrap().graph(ONE).unwrap();
    assert_eq!(within(16), short);
    assert_eq!(within(17), long);
    assert!(Case::named(CASES, "phi3").model().for_context(33).is_none());
    // Phi-3.5 MoE has a factor on rotated values for each set.
    let model = Case::named(CASES, "phimoe").model();
    for (n_tokens, set, factor) in [(256, "short", "1.150000"), (257, "long", "1.240000")] {
        let graph = model.for_context(n_tokens).unwrap().graph(ONE).unwrap();
        let text = graph.text().to_string();
        let has = |part: &str| text.contains(part);
        assert!(has(&format!("rope_factors_{set}.weight")), "{text}");
        assert!(has(&format!("attention_factor={factor}")), "{text}");
    }
}
