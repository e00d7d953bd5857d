//! Text decoders of models that see images, against an independent implementation: rows of images
//! stand in place of tokens, at their rows and columns.

#![allow(clippy::unwrap_used)] // helpers of tests

mod common;

use common::IMAGE_CASES;
use kv_core::backend::Backend;
use kv_core::{KvType, SeqId};
use model_core::gguf::{Array, Metadata};
use model_tests::checks::{MANY, ONE, TOLERANCE};
use model_tests::images::{ImagePrompt, feed, greedy, memories_distance};
use model_tests::{Case, Runner, Setup, candle, cpu, refusal, remove_key};

/// Largest difference of a key or value.
const ROW_TOLERANCE: f32 = 5e-5;

fn prompts(case: &Case) -> Vec<ImagePrompt> {
    let prompts: Vec<_> = (0..3).map(|i| ImagePrompt::of(case, i)).collect();
    let n_rows: Vec<usize> = prompts.iter().map(ImagePrompt::n_rows).collect();
    assert!(n_rows[0] > 0 && n_rows[1] > 0, "{n_rows:?}");
    prompts
}

/// The logits of each prompt alone.
fn alone<B: Backend>(backend: impl Fn() -> B, case: &Case, n: usize) -> Vec<Vec<f32>> {
    let one = |prompt: &ImagePrompt| {
        let mut runner = Runner::new(backend(), case, &Setup::default());
        feed(&mut runner, prompt, SeqId(0), n)
    };
    prompts(case).iter().map(one).collect()
}

/// All prompts in one memory, one batch of each in turn.
fn in_turn<B: Backend>(backend: B, case: &Case, n: usize) -> Vec<Vec<f32>> {
    let mut runner = Runner::new(backend, case, &Setup::default());
    let seqs = (0u32..).zip(prompts(case));
    let batches: Vec<_> = seqs.map(|(seq, p)| p.batches(SeqId(seq), n)).collect();
    let mut logits = vec![Vec::new(); batches.len()];
    for at in 0..batches.iter().map(Vec::len).max().unwrap() {
        for (of, batches) in logits.iter_mut().zip(&batches) {
            if let Some(batch) = batches.get(at) {
                of.extend(runner.decode(batch, 7).concat());
            }
        }
    }
    logits
}

fn assert_close(case: &Case, logits: &[Vec<f32>]) {
    for (prompt, ours) in logits.iter().enumerate() {
        let off = case.reference().logits(prompt).distance(ours);
        assert!(off < TOLERANCE, "{}, {prompt}: off by {off}", case.name);
    }
}

#[test]
fn logits_are_the_references_however_the_prompt_comes() {
    for case in IMAGE_CASES {
        let whole = alone(cpu, case, 512);
        assert_close(case, &whole);
        for n in [1, 5] {
            assert!(alone(cpu, case, n) == whole, "{}: {n}", case.name);
            assert!(in_turn(cpu(), case, n) == whole, "{}: {n}", case.name);
        }
        assert_close(case, &alone(candle, case, 512));
        assert_close(case, &in_turn(candle(), case, 5));
    }
}

#[test]
fn continuations_are_the_references() {
    for case in IMAGE_CASES {
        for (at, prompt) in prompts(case).iter().enumerate() {
            let wanted = case.reference().greedy(at);
            let mut runner = Runner::new(cpu(), case, &Setup::default());
            let ours = greedy(&mut runner, prompt, wanted.len());
            assert_eq!(ours, wanted, "{}, {at}", case.name);
        }
    }
}

#[test]
fn keys_and_values_are_the_references() {
    for case in IMAGE_CASES {
        let mut n_compared = 0;
        for (at, prompt) in prompts(case).iter().enumerate() {
            let mut runner = Runner::new(cpu(), case, &Setup::that_keeps_all_rows());
            feed(&mut runner, prompt, SeqId(0), 512);
            let n_tokens = prompt.len() as u32;
            let (off, n) = memories_distance(&runner, case, at, n_tokens);
            assert!(off < ROW_TOLERANCE, "{}, {at}: off by {off}", case.name);
            n_compared += n;
        }
        assert_eq!(n_compared, case.reference().n_recorded(), "{}", case.name);
    }
}

#[test]
fn f16_rows_stay_near_the_reference() {
    for case in IMAGE_CASES {
        let mut runner = Runner::new(cpu(), case, &Setup::with_type(KvType::F16));
        let ours = feed(&mut runner, &prompts(case)[0], SeqId(0), 512);
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
