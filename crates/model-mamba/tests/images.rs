//! The text decoder of Qwen 3.5 over rows of images, against an independent implementation: several
//! rows of an image have one position, and the states of delta rules go on over them.

#![allow(clippy::unwrap_used)] // helpers of tests

use crate::common::{CASES, IMAGES, case};
use model_core::gguf::{Array, Metadata};
use model_tests::checks::{MANY, ONE};
use model_tests::{Case, Runner, Setup, cpu, images, refusal, remove_key};

/// Largest difference of a key, value or state.
const ROW_TOLERANCE: f32 = 1e-4;

const KEY: &str = "qwen35.rope.dimension_sections";

#[test]
fn logits_are_the_references_however_the_prompt_comes() {
    images::logits_agree(&IMAGES);
}

#[test]
fn continuations_are_the_references() {
    images::continuations_agree(&IMAGES);
}

#[test]
fn what_layers_remember_is_the_references() {
    images::memories_agree(&IMAGES, ROW_TOLERANCE);
}

#[test]
fn graphs_are_as_they_were_read() {
    let model = IMAGES.model();
    let text = model.graph(ONE).unwrap().text().to_string();
    insta::assert_snapshot!("qwen3_5_vl_text-one", text);
    let of_rows = model.of_rows().unwrap();
    let text = of_rows.graph(MANY).unwrap().text().to_string();
    insta::assert_snapshot!("qwen3_5_vl_text-rows", text);
}

#[test]
fn texts_rotate_as_without_sections() {
    let with = Case::named(CASES, "qwen3_5");
    let prompt = &with.reference().prompts()[0];
    let whole = Runner::new(cpu(), with, &Setup::default()).feed(0, prompt, 512);
    let (weights, mut metadata) = with.open();
    remove_key(&mut metadata, KEY);
    let plain = case("qwen3_5")
        .registry()
        .model(&metadata, &*weights)
        .unwrap();
    let text =
        |model: &dyn model_core::architecture::Model| model.graph(ONE).unwrap().text().to_string();
    assert!(
        text(&*with.model()).contains("rope_sections") && !text(&*plain).contains("rope_sections")
    );
    let mut runner = Runner::new(cpu(), with, &Setup::default()).with_model(plain);
    assert!(runner.feed(0, prompt, 512) == whole);
}

#[test]
fn sections_that_do_not_fit_are_refused_by_their_key() {
    for wrong in [[3, 3, 1, 0], [3, 3, 0, 2], [-3, 6, 5, 0], [9, 0, 0, 0]] {
        let edit = |metadata: &mut Metadata| {
            drop(metadata.insert(KEY, Array::I32(wrong.to_vec())));
        };
        let error = refusal(&IMAGES, edit, "");
        assert!(error.contains(KEY), "{error}");
    }
}
