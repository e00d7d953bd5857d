//! Several texts of one prompt: each is what the request alone gives with its seed, and the prompt
//! is computed once.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use std::num::NonZeroU32;

use crate::service::models::{Case, Generated, stories, tiny};
use cellar_engine::Logprobs;
use cellar_engine::sampler::{Candidates, Step};
use cellar_engine::serve::{
    Choices, PrefixCaching, Service, ServiceConfig, TextRequest, TextStream,
};
use kv_core::TokenId;

const N_CTX: u32 = 400;

/// A request that draws, with a prompt of some length.
fn request(case: &Case, number: u64) -> TextRequest {
    let mut request = case.request(2 * number + 1);
    request.options.sampler.temperature = 1.0;
    request.options.sampler.seed = u64::MAX - 1; // seeds wrap
    request.options.n_predict = Some(12);
    request
}

fn count(n: u32) -> NonZeroU32 {
    NonZeroU32::new(n).unwrap()
}

fn texts(streams: Vec<TextStream>) -> Vec<Generated> {
    let finished = streams.into_iter().map(|stream| {
        let end = stream.finish().unwrap();
        assert_eq!(end.usage.n_tokens, end.tokens.len());
        Generated {
            text: end.text,
            tokens: end.tokens,
            finish: end.finish,
        }
    });
    finished.collect()
}

/// The texts of the seeds of a request, one by one.
fn alone(case: &Case, number: u64, n: u32) -> Vec<Generated> {
    let with_seed = |index: u64| {
        let mut request = request(case, number);
        let seed = &mut request.options.sampler.seed;
        *seed = seed.wrapping_add(index);
        case.alone(&request, N_CTX)
    };
    (0..u64::from(n)).map(with_seed).collect()
}

fn check_texts(case: &Case) {
    let wanted = [alone(case, 0, 5), alone(case, 1, 3)];
    assert!(
        wanted[0]
            .windows(2)
            .any(|pair| pair[0].text != pair[1].text)
    );
    for (n_seqs, every) in [(8, 0), (8, 1), (3, 0), (3, 3), (1, 0)] {
        for prefix_cache in [PrefixCaching::On, PrefixCaching::Off] {
            let config = ServiceConfig {
                preempt_every: NonZeroU32::new(every),
                prefix_cache,
                ..ServiceConfig::default()
            };
            let engine = case.engine(n_seqs, N_CTX);
            let service = Service::start(engine, &case.tokenizer, &config).unwrap();
            let submit =
                |number, n| service.submit_texts(request(case, number), count(n), Vec::new);
            let (first, second) = (submit(0, 5).unwrap(), submit(1, 3).unwrap());
            let got = [texts(first), texts(second)];
            let name = case.name;
            assert_eq!(
                got, wanted,
                "{name}: {n_seqs} sequences, preempted every {every}"
            );
            let engine = service.stop().unwrap();
            assert_eq!(engine.memory().n_used(), 0, "cells are in use");
            let states = engine.memory().states().map_or(0, |states| states.n_used());
            assert_eq!(states, 0, "states are in use");
        }
    }
}

#[test]
fn texts_are_those_of_their_seeds_with_full_attention() {
    check_texts(&stories("stories-llama"));
}

#[test]
fn texts_are_those_of_their_seeds_with_windows() {
    check_texts(&stories("stories-gemma3"));
}

#[test]
fn texts_are_those_of_their_seeds_with_states() {
    check_texts(&stories("stories-mamba"));
}

#[test]
fn texts_are_those_of_their_seeds_with_attention_and_states() {
    check_texts(&tiny("jamba"));
}

#[test]
fn the_prompt_is_computed_once() {
    for name in ["stories-llama", "stories-gemma3", "stories-mamba"] {
        let case = stories(name);
        let config = ServiceConfig {
            prefix_cache: PrefixCaching::Off,
            ..ServiceConfig::default()
        };
        let service = Service::start(case.engine(8, N_CTX), &case.tokenizer, &config).unwrap();
        let n_prompt = request(&case, 0).prompt.len();
        let streams = service.submit_texts(request(&case, 0), count(8), Vec::new);
        let texts = texts(streams.unwrap());
        let n_text: usize = texts.iter().map(|text| text.tokens.len()).sum();
        let n_computed = service.counters().n_tokens as usize;
        // The last token of a text is chosen and not computed.
        assert!(
            n_computed <= n_prompt + n_text,
            "{name}: {n_computed} of {n_prompt} + {n_text}"
        );
    }
}

/// Readers that leave take nothing from the others.
#[test]
fn cancelled_texts_leave_the_others_as_they_are() {
    let case = stories("stories-llama");
    let wanted = alone(&case, 0, 4);
    for gone in [vec![0], vec![1, 3], vec![0, 1, 2], vec![0, 1, 2, 3]] {
        let config = ServiceConfig {
            step_tokens: Some(4), // many steps for the prompt
            ..ServiceConfig::default()
        };
        let service = Service::start(case.engine(4, N_CTX), &case.tokenizer, &config).unwrap();
        let streams = service.submit_texts(request(&case, 0), count(4), Vec::new);
        let streams = streams.unwrap();
        gone.iter()
            .for_each(|&index: &usize| streams[index].cancel());
        for (index, stream) in streams.into_iter().enumerate() {
            let end = stream.finish().unwrap();
            let wanted = &wanted[index];
            if gone.contains(&index) {
                assert!(wanted.tokens.starts_with(&end.tokens));
            } else {
                assert_eq!((&end.text, &end.tokens), (&wanted.text, &wanted.tokens));
            }
        }
        let engine = service.stop().unwrap();
        assert_eq!(engine.memory().n_used(), 0, "cells are in use");
    }
}

#[derive(Debug)]
struct Forbid(TokenId);

impl Step for Forbid {
    fn apply(&mut self, candidates: &mut Candidates<'_>) {
        candidates.adjust(self.0, |_| f32::NEG_INFINITY);
    }
}

#[test]
fn each_text_has_steps_of_its_own() {
    let case = stories("stories-llama");
    let common = alone(&case, 0, 1)[0].tokens[0];
    let service = Service::start(
        case.engine(4, N_CTX),
        &case.tokenizer,
        &ServiceConfig::default(),
    );
    let service = service.unwrap();
    let forbid = || -> Vec<Box<dyn Step>> { vec![Box::new(Forbid(common))] };
    let mut request = request(&case, 0);
    request.steps = forbid();
    let streams = service.submit_texts(request, count(6), forbid).unwrap();
    let texts = texts(streams);
    assert!(
        texts.iter().all(|text| !text.tokens.contains(&common)),
        "{texts:?}"
    );
}

#[test]
fn the_best_of_many_is_chosen_by_its_mean_log_probability() {
    let case = stories("stories-llama");
    let service = Service::start(
        case.engine(4, N_CTX),
        &case.tokenizer,
        &ServiceConfig::default(),
    );
    let service = service.unwrap();
    let choices = Choices::new(2, Some(6)).unwrap();
    let mut request = request(&case, 0);
    request.options.logprobs = Logprobs::Top(0);
    let streams = service
        .submit_texts(request, choices.n_computed(), Vec::new)
        .unwrap();
    let all: Vec<_> = streams
        .into_iter()
        .map(|stream| stream.finish().unwrap())
        .collect();
    let mean = |logprobs: &[cellar_engine::TokenLogprobs]| {
        logprobs
            .iter()
            .map(|place| place.chosen.logprob)
            .sum::<f64>()
            / logprobs.len() as f64
    };
    let mut means: Vec<f64> = all.iter().map(|text| mean(&text.logprobs)).collect();
    means.sort_by(|a, b| b.total_cmp(a));
    let best = choices.choose(all, |text| &text.logprobs);
    let got: Vec<f64> = best.iter().map(|text| mean(&text.logprobs)).collect();
    assert_eq!(got, means[..2]);
}
