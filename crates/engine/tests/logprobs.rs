//! Log probabilities are those of the rows that `Engine::decode` gives, however tokens are cut into
//! ubatches and whatever is computed together.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use std::num::NonZeroU32;

use crate::service::models::{Case, stories};
use crate::support::text::by_hand;
use cellar_engine::sampler::SamplerConfig;
use cellar_engine::serve::{Missed, Service, ServiceConfig, ServiceError, TextRequest};
use cellar_engine::{
    Completion, CompletionOptions, ConfigError, EngineConfig, EngineError, Logprobs, LongContext,
    OutputRow, TokenLogprobs,
};
use kv_core::batch::Batch;
use kv_core::{SeqId, TokenId};
use kv_graph::TopK;

const N_CTX: u32 = 256;

/// The request of the service's tests with log probabilities of everything.
fn request(case: &Case, number: u64) -> TextRequest {
    let mut request = case.request(number);
    request.options.stop.clear();
    request.options.logprobs = Logprobs::Top(5);
    request.options.prompt_logprobs = Logprobs::Top(2);
    request
}

/// One text with its log probabilities.
#[derive(Debug, PartialEq)]
struct Generated {
    tokens: Vec<TokenId>,
    logprobs: Vec<TokenLogprobs>,
    prompt_logprobs: Vec<TokenLogprobs>,
}

fn alone(case: &Case, number: u64, n_ubatch: u32) -> Generated {
    let config = EngineConfig {
        n_ctx: Some(N_CTX),
        n_ubatch,
        ..EngineConfig::default()
    };
    let mut engine = case.engine_with(&config);
    let mut completion = Completion::new(&case.tokenizer, request(case, number).options).unwrap();
    let prompt = request(case, number).prompt;
    let mut batch = Batch::new();
    for &token in &prompt {
        batch.push_token(token).with_output();
    }
    let rows = engine.decode(&batch).unwrap();
    for (index, &next) in prompt.iter().enumerate().skip(1) {
        let row = rows.row(index - 1).unwrap();
        completion.take_prompt_row(index - 1, next, row).unwrap();
    }
    let _removed = engine.clear();
    by_hand(
        &mut engine,
        SeqId(0),
        &prompt,
        &mut completion,
        LongContext::Stop,
    );
    Generated {
        tokens: completion.tokens().to_vec(),
        logprobs: completion.logprobs().to_vec(),
        prompt_logprobs: completion.prompt_logprobs().to_vec(),
    }
}

/// Checks a place against its row.
fn check(place: &TokenLogprobs, row: &[f32], token: TokenId, n_top: usize) {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let shifted = row.iter().map(|&l| (f64::from(l) - f64::from(max)).exp());
    let log_sum = f64::from(max) + shifted.sum::<f64>().ln();
    let logprob = |token: TokenId| f64::from(row[token.as_usize()]) - log_sum;
    let is_near = |a: f64, b: f64| (a - b).abs() < 1e-12 * b.abs().max(1.0);
    assert_eq!(place.chosen.token, token);
    assert!(is_near(place.chosen.logprob, logprob(token)), "{place:?}");
    let mut ids: Vec<u32> = (0..row.len() as u32).collect();
    ids.sort_by(|&a, &b| row[b as usize].total_cmp(&row[a as usize]).then(a.cmp(&b)));
    assert_eq!(place.top.len(), n_top);
    for (top, &id) in place.top.iter().zip(&ids) {
        assert_eq!(top.token.0, id);
        assert!(is_near(top.logprob, logprob(top.token)), "{place:?}");
    }
}

fn check_against_rows(case: &Case) {
    for number in 0..3 {
        let generated = alone(case, number, 32);
        assert!(!generated.tokens.is_empty());
        assert_eq!(generated.logprobs.len(), generated.tokens.len());
        let prompt = request(case, number).prompt;
        assert_eq!(generated.prompt_logprobs.len(), prompt.len() - 1);
        // All rows of the whole text, from one batch.
        let mut engine = case.engine(1, N_CTX);
        let all = [&prompt[..], &generated.tokens].concat();
        let mut batch = Batch::new();
        for &token in &all {
            batch.push_token(token).in_sequence(SeqId(0)).with_output();
        }
        let rows = engine.decode(&batch).unwrap();
        for (index, &next) in all.iter().enumerate().skip(1) {
            let row = rows.row(index - 1).unwrap();
            match index.checked_sub(prompt.len()) {
                Some(at) => check(&generated.logprobs[at], row, next, 5),
                None => check(&generated.prompt_logprobs[index - 1], row, next, 2),
            }
        }
        for n_ubatch in [1, 3, 200] {
            assert_eq!(
                alone(case, number, n_ubatch),
                generated,
                "ubatches of {n_ubatch}"
            );
        }
    }
}

#[test]
fn they_are_the_log_softmax_of_the_rows_with_full_attention() {
    check_against_rows(&stories("stories-llama"));
}

#[test]
fn they_are_the_log_softmax_of_the_rows_with_states() {
    check_against_rows(&stories("stories-mamba"));
}

/// Together, preempted, taken from the stream piece by piece: they are those of the text alone.
#[test]
fn a_service_gives_each_text_those_that_it_has_alone() {
    for name in ["stories-llama", "stories-gemma3", "stories-mamba"] {
        let case = stories(name);
        for every in [0, 1, 5] {
            let config = ServiceConfig {
                preempt_every: NonZeroU32::new(every),
                ..ServiceConfig::default()
            };
            let engine = case.engine(3, N_CTX);
            let service = Service::start(engine, &case.tokenizer, &config).unwrap();
            let streams: Vec<_> = (0..5)
                .map(|number| service.submit(request(&case, number)).unwrap())
                .collect();
            for (number, mut stream) in (0..).zip(streams) {
                let mut taken = Vec::new();
                let mut text = String::new();
                let mut of_prompt = Vec::new();
                while let Some(piece) = stream.next_piece().unwrap() {
                    text += &piece;
                    if of_prompt.is_empty() {
                        of_prompt = stream.take_prompt_logprobs();
                        assert!(!of_prompt.is_empty(), "they are there with the first piece");
                    }
                    taken.extend(stream.take_logprobs());
                    let n_written: usize = taken
                        .iter()
                        .map(|place| place.chosen.token)
                        .map(|t| {
                            case.tokenizer
                                .piece(t, model_core::tokenizer::SpecialPieces::Skip)
                        })
                        .map(|piece| piece.unwrap().len())
                        .sum();
                    // A byte that is no character is written as one of three bytes.
                    let n_read = text.replace('\u{fffd}', "").len();
                    assert!(
                        n_written >= n_read,
                        "each piece comes with its tokens: {text:?} {taken:?}"
                    );
                }
                let end = stream.finish().unwrap();
                taken.extend(end.logprobs);
                let generated = Generated {
                    tokens: end.tokens,
                    logprobs: taken,
                    prompt_logprobs: of_prompt,
                };
                assert!(end.prompt_logprobs.is_empty(), "they come once");
                assert_eq!(
                    generated,
                    alone(&case, number, 32),
                    "{name} {number}, every {every}"
                );
                let missed = end.usage.reuse.unwrap().missed;
                assert_eq!(
                    missed,
                    Some(Missed::Disabled),
                    "rows of a prompt need all of it"
                );
            }
        }
    }
}

#[test]
fn what_was_not_asked_for_is_not_there() {
    let case = stories("stories-llama");
    let service = Service::start(
        case.engine(1, N_CTX),
        &case.tokenizer,
        &ServiceConfig::default(),
    );
    let service = service.unwrap();
    let end = service.submit(case.request(0)).unwrap().finish().unwrap();
    assert!(end.logprobs.is_empty() && end.prompt_logprobs.is_empty());
    let mut bare = case.request(0);
    bare.options.logprobs = Logprobs::Top(0);
    let end = service.submit(bare).unwrap().finish().unwrap();
    assert_eq!(end.logprobs.len(), end.tokens.len());
    assert!(end.logprobs.iter().all(|place| place.top.is_empty()));
}

#[test]
fn too_many_are_refused_by_number() {
    let case = stories("stories-llama");
    let service = Service::start(
        case.engine(1, N_CTX),
        &case.tokenizer,
        &ServiceConfig::default(),
    );
    let service = service.unwrap();
    let of_text = |options: &mut CompletionOptions| options.logprobs = Logprobs::Top(21);
    let of_prompt = |options: &mut CompletionOptions| options.prompt_logprobs = Logprobs::Top(21);
    for edit in [of_text as fn(&mut CompletionOptions), of_prompt] {
        let mut request = case.request(0);
        edit(&mut request.options);
        let refused = service.submit(request).map(|_| ());
        let Err(ServiceError::Engine(why)) = refused else {
            panic!("{refused:?}")
        };
        let is_named = matches!(
            *why,
            EngineError::Config(ConfigError::TopLogprobs { got: 21 })
        );
        assert!(is_named, "{why}");
    }
}

/// Candidates are no whole row, so there is nothing to sum.
#[test]
fn candidates_are_refused_where_log_probabilities_are_wanted() {
    let case = stories("stories-llama");
    let options = CompletionOptions {
        sampler: SamplerConfig::greedy(),
        logprobs: Logprobs::Top(1),
        ..CompletionOptions::default()
    };
    let mut completion = Completion::new(&case.tokenizer, options).unwrap();
    assert_eq!(completion.n_candidates(), None);
    let mut row = vec![0.0; TopK::row_len(2)];
    TopK::of(&[0.0, 1.0, 2.0], &mut row);
    let refused = completion.take(OutputRow::Candidates(TopK::read(&row).unwrap()));
    assert!(matches!(refused, Err(EngineError::NoLogits)), "{refused:?}");
}
