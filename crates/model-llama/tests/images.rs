//! Text decoders of models that see images, against an independent implementation: rows of images
//! stand in place of tokens, at their rows and columns.

#![allow(clippy::unwrap_used)] // helpers of tests

use crate::common::IMAGE_CASES;
use kv_core::SeqId;
use kv_rows::KvType;
use model_core::gguf::{Array, Metadata};
use model_tests::checks::{MANY, ONE};
use model_tests::images::{self, ImagePrompt};
use model_tests::{Runner, Setup, cpu, refusal, remove_key};

/// Largest difference of a key or value.
const ROW_TOLERANCE: f32 = 5e-5;

#[test]
fn logits_are_the_references_however_the_prompt_comes() {
    IMAGE_CASES.iter().for_each(images::logits_agree);
}

#[test]
fn continuations_are_the_references() {
    IMAGE_CASES.iter().for_each(images::continuations_agree);
}

#[test]
fn keys_and_values_are_the_references() {
    for case in IMAGE_CASES {
        images::memories_agree(case, ROW_TOLERANCE);
    }
}

#[test]
fn f16_rows_stay_near_the_reference() {
    for case in IMAGE_CASES {
        let mut runner = Runner::new(cpu(), case, &Setup::with_type(KvType::F16));
        let ours = images::feed(&mut runner, &ImagePrompt::of(case, 0), SeqId(0), 512);
        let off = case.reference().logits(0).distance(&ours);
        assert!(off < 0.03, "{}: off by {off}", case.name);
    }
}

#[test]
fn graphs_are_as_they_were_read() {
    for case in IMAGE_CASES {
        let (name, model) = (case.name, case.model());
        let text = model.graph(ONE).unwrap().text().to_string();
        insta::assert_snapshot!(format!("{name}-one"), text);
        let of_rows = model.of_rows().unwrap();
        let text = of_rows.graph(MANY).unwrap().text().to_string();
        insta::assert_snapshot!(format!("{name}-rows"), text);
    }
}

#[test]
fn sections_that_do_not_fit_are_refused_by_their_key() {
    for case in IMAGE_CASES {
        let name = case.model().architecture().to_owned();
        let key = format!("{name}.rope.dimension_sections");
        for wrong in [[4, 2, 1, 0], [4, 2, 0, 2], [-4, 6, 6, 0], [9, 0, 0, 0]] {
            let edit = |metadata: &mut Metadata| {
                drop(metadata.insert(&key, Array::I32(wrong.to_vec())));
            };
            let error = refusal(case, edit, "");
            assert!(error.contains(&key), "{error}");
        }
        let error = refusal(case, |metadata| remove_key(metadata, &key), "");
        assert!(error.contains(&key), "{error}");
    }
}
