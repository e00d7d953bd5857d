//! Tokens that fail, the rows of prompts, and drafts of a text, one next token at a time.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use std::sync::atomic::Ordering;

use crate::service::models;
use crate::support::text::{Writer, greedy, with_step};
use crate::support::{engine, ids, references, stories};
use cellar_engine::sampler::{Candidates, Step};
use cellar_engine::session::{ServiceError, TextRequest};
use cellar_engine::{
    EngineConfig, EngineError, FinishReason, Logprobs, Speculated, Speculation, SpeculationOff,
};
use kv_core::TokenId;
use kv_rows::KvType;
use model_core::tokenizer::EncodeOptions;

fn f32_config() -> EngineConfig {
    EngineConfig {
        kv_types: KvType::F32.into(),
        ..EngineConfig::default()
    }
}

/// A step that fails once is computed again.
#[test]
fn a_token_that_could_not_be_computed_comes_later() {
    let reference = &references()[0];
    let request = greedy(ids(&reference.ids), 6);
    let mut text = Writer::new(engine(&f32_config()), stories().tokenizer(), request).unwrap();
    text.next().unwrap();
    assert_eq!(text.tokens, ids(&reference.greedy_ids[..1]));
    let backend = text.session.engine().backend();
    backend.runs_left.store(0, Ordering::Relaxed);
    let text = text.finish();
    assert_eq!(text.tokens, ids(&reference.greedy_ids[..6]));
}

/// Leaves nothing to choose from after so many tokens.
#[derive(Debug)]
struct Nothing {
    after: usize,
}

impl Step for Nothing {
    fn apply(&mut self, candidates: &mut Candidates<'_>) {
        match self.after.checked_sub(1) {
            Some(after) => self.after = after,
            None => candidates.retain(|_| false),
        }
    }
}

#[test]
fn a_token_that_could_not_be_chosen_ends_the_text() {
    let request = greedy(ids(&references()[0].ids), 6);
    let request = with_step(request, Nothing { after: 2 });
    let mut text = Writer::new(engine(&f32_config()), stories().tokenizer(), request).unwrap();
    text.next().unwrap();
    text.next().unwrap();
    let failed = text.next().unwrap_err();
    let ServiceError::Engine(why) = failed else {
        panic!("{failed}");
    };
    assert!(matches!(*why, EngineError::Sample(_)), "{why}");
    assert_eq!(text.next().unwrap(), None);
    let refused = text.session.resume(&mut text.stream, ids(&[5]));
    assert!(matches!(refused, Err(ServiceError::NotParked { .. })));
}

/// The last token of a text is chosen and not computed.
#[test]
fn tokens_are_counted_as_they_are_computed() {
    let prompt = ids(&references()[0].ids);
    let request = greedy(prompt.clone(), 6);
    let text = Writer::new(engine(&f32_config()), stories().tokenizer(), request).unwrap();
    let timings = text.finish().usage().timings();
    assert_eq!(timings.prompt.n_tokens, prompt.len());
    assert_eq!(timings.generation.n_tokens, 5);
}

#[test]
fn rows_of_a_prompt_are_whole_and_at_most_64_at_once() {
    let prompt: Vec<TokenId> = (3..103).map(TokenId).collect();
    for (n_ubatch, wanted) in [(512, vec![64, 100]), (40, vec![40, 80, 100])] {
        let engine = engine(&EngineConfig {
            n_ubatch,
            ..f32_config()
        });
        let prefers_candidates = &engine.backend().prefers_candidates;
        prefers_candidates.store(true, Ordering::Relaxed);
        let mut request = greedy(prompt.clone(), 1);
        request.options.prompt_logprobs = Logprobs::Top(0);
        let mut text = Writer::new(engine, stories().tokenizer(), request).unwrap();
        let mut done = Vec::new();
        text.read_prompt(|progress| done.push(progress.n_done));
        assert_eq!(done, wanted);
        let mut text = text.finish();
        let places = text.stream.take_prompt_logprobs();
        let tokens: Vec<TokenId> = places.iter().map(|place| place.chosen.token).collect();
        assert_eq!(tokens, prompt[1..]);
    }
}

/// Where no cell is missing, the context still ends.
#[test]
fn a_text_of_states_ends_with_its_context() {
    let case = models::stories("stories-mamba");
    let prompt = case.tokenizer.encode("Once upon a", EncodeOptions::PROMPT);
    let mut request = greedy(prompt.clone(), 0);
    request.options.n_predict = None;
    let text = Writer::new(case.engine(1, 12), &case.tokenizer, request).unwrap();
    let text = text.finish();
    assert_eq!(text.finish_reason(), FinishReason::ContextFull);
    assert_eq!(text.tokens.len(), 12 - prompt.len() + 1);
}

/// Says one token again and again.
#[derive(Debug)]
struct Only(TokenId);

impl Step for Only {
    fn apply(&mut self, candidates: &mut Candidates<'_>) {
        candidates.retain(|candidate| candidate.token == self.0);
    }
}

#[test]
fn a_draft_and_the_token_before_it_fit_a_ubatch() {
    let case = models::stories("stories-llama");
    for n_ubatch in [1, 2, 5] {
        let engine = case.engine_with(&EngineConfig {
            n_ctx: Some(100),
            n_ubatch,
            ..EngineConfig::default()
        });
        let request = TextRequest {
            speculation: Speculation::Lookup { n_max: 8 },
            ..greedy(vec![TokenId(10); 9], 40)
        };
        let request = with_step(request, Only(TokenId(10)));
        let mut text = Writer::new(engine, &case.tokenizer, request).unwrap();
        let mut most = 0;
        while text.next().unwrap().is_some() {
            let tokens = text.last.iter().filter(|piece| piece.token.is_some());
            most = most.max(tokens.count());
        }
        assert_eq!(most, n_ubatch as usize);
    }
}

#[test]
fn what_was_not_asked_for_is_not_refused() {
    let case = models::stories("stories-mamba");
    let request = greedy(vec![TokenId(5)], 1);
    let text = Writer::new(case.engine(1, 100), &case.tokenizer, request).unwrap();
    assert_eq!(text.usage().speculated, Speculated::default());
    let request = TextRequest {
        speculation: Speculation::LOOKUP,
        ..greedy(vec![TokenId(5)], 1)
    };
    let text = Writer::new(case.engine(1, 100), &case.tokenizer, request).unwrap();
    let off = Some(SpeculationOff::NothingTakenBack);
    assert_eq!(text.usage().speculated.off, off);
}
