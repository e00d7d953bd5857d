//! A token whose numbers are none ends the requests that read it, and no other: neither those in
//! the same steps, nor those that get its cells and states afterwards.

use std::sync::Arc;

use cellar_engine::EngineError;
use cellar_engine::sampler::SampleError;
use cellar_engine::serve::{PrefixCaching, Service, ServiceConfig, ServiceError, TextRequest};
use kv_core::TokenId;
use kv_graph::weights::MemoryWeights;

use crate::service::models::{Case, Generated, tiny};

const N: u64 = 12;
const N_CTX: u32 = 200;

/// The same model, whose embedding of this token is not a number. Logits come from other weights.
fn broken(case: Case, token: TokenId) -> Case {
    let mut weights = MemoryWeights::new();
    assert!(case.weights.get("output.weight").is_some(), "{}", case.name);
    for name in case.weights.names() {
        weights.insert(case.weights.get(&name).unwrap());
    }
    let name = "token_embd.weight";
    let embeddings = case.weights.get(name).unwrap();
    let mut values = embeddings.to_f32();
    let row = embeddings.n_columns() * token.0 as usize;
    values[row..row + embeddings.n_columns()].fill(f32::NAN);
    weights
        .insert_f32(name, embeddings.shape(), &values)
        .unwrap();
    Case {
        weights: Arc::new(weights),
        ..case
    }
}

/// Every third request has the token, at the beginning, in the middle or at the end of its prompt.
fn request(case: &Case, number: u64, token: TokenId) -> TextRequest {
    let mut request = case.request(number);
    if has_it(number) {
        let at = request.prompt.len() * (number as usize / 3 % 3) / 2;
        request.prompt.insert(at, token);
    }
    request
}

fn has_it(number: u64) -> bool {
    number % 3 == 1
}

fn check(case: Case) {
    let others = (0..N).filter(|number| !has_it(*number));
    let alone: Vec<Generated> = others
        .map(|number| case.alone(&case.request(number), N_CTX))
        .collect();
    // Prompts have tokens below 500.
    let is_in_none = |token: &TokenId| !alone.iter().any(|text| text.tokens.contains(token));
    let token = (500..512).map(TokenId).find(is_in_none).unwrap();
    let case = broken(case, token);
    for prefix_cache in [PrefixCaching::On, PrefixCaching::Off] {
        let config = ServiceConfig {
            prefix_cache,
            ..ServiceConfig::default()
        };
        let engine = case.engine(4, N_CTX);
        let service = Service::start(engine, &case.tokenizer, &config).unwrap();
        let submit = |number| {
            (
                number,
                service.submit(request(&case, number, token)).unwrap(),
            )
        };
        let streams: Vec<_> = (0..N).map(submit).collect();
        let mut wanted = alone.iter();
        for (number, stream) in streams {
            let end = stream.finish();
            if has_it(number) {
                let error = end.map(Generated::from).unwrap_err();
                assert!(is_not_a_number(&error), "{}: {error:?}", case.name);
            } else {
                let text = Generated::from(end.unwrap());
                assert_eq!(Some(&text), wanted.next(), "{}: {number}", case.name);
            }
        }
        let engine = service.stop().unwrap();
        assert_eq!(engine.memory().n_used(), 0, "cells are in use");
    }
}

fn is_not_a_number(error: &ServiceError) -> bool {
    let ServiceError::Engine(error) = error else {
        return false;
    };
    matches!(**error, EngineError::Sample(SampleError::NotANumber { .. }))
}

#[test]
fn others_go_on_with_full_attention() {
    check(tiny("llama_gqa_untied"));
}

#[test]
fn others_go_on_with_states() {
    check(tiny("mamba_untied"));
}

#[test]
fn others_go_on_with_hybrids() {
    check(tiny("jamba"));
    check(tiny("falcon_h1"));
}
