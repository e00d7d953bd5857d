//! Rows, vectors and scores of recipes are those of independent implementations: on both backends,
//! three sequences in one batch and each alone.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use crate::common::data;
use crate::common::subject::Subject;
use kv_candle::CandleBackend;
use model_tests::{Recipe, cpu};

fn all() -> impl Iterator<Item = Subject> {
    let recipes = Recipe::all_in(&data("")).into_iter();
    recipes.map(|recipe| Subject::recipe(&recipe.name()))
}

#[test]
fn rows_and_scores_are_those_of_the_references() {
    assert!(all().count() > 5);
    for subject in all() {
        subject.check("kv-cpu", cpu);
        subject.check("kv-candle", CandleBackend::cpu);
    }
}

#[test]
fn on_the_cpu_a_sequence_alone_gives_the_same_bits() {
    for subject in all() {
        let together = subject.rows(cpu(), &[0, 1, 2], subject.wanted());
        for (at, together) in together.iter().enumerate() {
            let alone = subject.rows(cpu(), &[at], subject.wanted());
            assert_eq!(&alone[0], together, "{}, sequence {at}", subject.name);
        }
    }
}
