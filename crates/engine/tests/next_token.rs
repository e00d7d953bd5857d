//! Tokens that fail, the rows of prompts, and drafts of a text, one next token at a time.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use std::sync::atomic::Ordering;

use crate::service::models;
use crate::support::{engine, ids, references, stories};
use cellar_engine::sampler::{Candidates, SamplerConfig, Step};
use cellar_engine::{
    EngineConfig, EngineError, FinishReason, GenerateOptions, Generation, Logprobs, Speculated,
    Speculation, SpeculationOff,
};
use kv_core::TokenId;
use kv_core::batch::Batch;
use kv_core::{KvType, SeqId};
use model_core::tokenizer::EncodeOptions;

fn greedy(n_predict: usize) -> GenerateOptions {
    GenerateOptions {
        sampler: SamplerConfig::greedy(),
        n_predict: Some(n_predict),
        ..GenerateOptions::default()
    }
}

fn f32_config() -> EngineConfig {
    EngineConfig {
        kv_types: KvType::F32.into(),
        ..EngineConfig::default()
    }
}

#[test]
fn a_token_that_could_not_be_computed_stays() {
    let (file, reference) = (stories(), &references()[0]);
    let mut engine = engine(&f32_config());
    let mut text = Generation::new(&engine, file.tokenizer(), greedy(6)).unwrap();
    text.feed(&mut engine, &ids(&reference.ids), |_| {})
        .unwrap();
    text.next_piece(&mut engine).unwrap();
    let pending = text.pending();
    assert_eq!(pending, Some(TokenId(reference.greedy_ids[0])));
    engine.backend().runs_left.store(0, Ordering::Relaxed);
    let failed = text.next_piece(&mut engine).unwrap_err();
    assert!(matches!(failed, EngineError::Backend(_)), "{failed}");
    assert_eq!(text.pending(), pending);
    while text.next_piece(&mut engine).unwrap().is_some() {}
    assert_eq!(text.tokens(), ids(&reference.greedy_ids[..6]));
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

/// Its row was there once: the token before it is in the memory.
#[test]
fn a_token_that_could_not_be_chosen_has_no_row_any_more() {
    let (file, prompt) = (stories(), ids(&references()[0].ids));
    let mut engine = engine(&f32_config());
    let text = Generation::new(&engine, file.tokenizer(), greedy(6)).unwrap();
    let mut text = text.with_step(Box::new(Nothing { after: 2 }));
    text.feed(&mut engine, &prompt, |_| {}).unwrap();
    text.next_piece(&mut engine).unwrap();
    text.next_piece(&mut engine).unwrap();
    let failed = text.next_piece(&mut engine).unwrap_err();
    assert!(matches!(failed, EngineError::Sample(_)), "{failed}");
    assert_eq!(text.pending(), None);
    let failed = text.next_piece(&mut engine).unwrap_err();
    assert!(matches!(failed, EngineError::NoLogits), "{failed}");
}

#[test]
fn a_prompt_that_failed_has_no_row() {
    let (file, prompt) = (stories(), ids(&references()[0].ids));
    let mut engine = engine(&f32_config());
    let mut text = Generation::new(&engine, file.tokenizer(), greedy(6)).unwrap();
    text.feed(&mut engine, &prompt, |_| {}).unwrap();
    engine.backend().runs_left.store(0, Ordering::Relaxed);
    text.feed(&mut engine, &prompt, |_| {}).unwrap_err();
    let failed = text.next_piece(&mut engine).unwrap_err();
    assert!(matches!(failed, EngineError::NoLogits), "{failed}");
}

/// The last token of a text is chosen and not computed.
#[test]
fn tokens_are_counted_as_they_are_computed() {
    let (file, prompt) = (stories(), ids(&references()[0].ids));
    let mut engine = engine(&f32_config());
    let mut text = Generation::new(&engine, file.tokenizer(), greedy(6)).unwrap();
    text.feed(&mut engine, &prompt, |_| {}).unwrap();
    assert_eq!(engine.last_logits().n_rows(), 1);
    while text.next_piece(&mut engine).unwrap().is_some() {}
    let timings = text.timings();
    assert_eq!(timings.prompt.n_tokens, prompt.len());
    assert_eq!(timings.generation.n_tokens, 5);
}

#[test]
fn rows_of_a_prompt_are_whole_and_at_most_64_at_once() {
    let file = stories();
    let prompt: Vec<TokenId> = (3..103).map(TokenId).collect();
    for (n_ubatch, wanted) in [(512, vec![64, 100]), (40, vec![40, 80, 100])] {
        let mut engine = engine(&EngineConfig {
            n_ubatch,
            ..f32_config()
        });
        let prefers_candidates = &engine.backend().prefers_candidates;
        prefers_candidates.store(true, Ordering::Relaxed);
        let options = GenerateOptions {
            prompt_logprobs: Logprobs::Top(0),
            ..greedy(1)
        };
        let mut text = Generation::new(&engine, file.tokenizer(), options).unwrap();
        let mut done = Vec::new();
        text.feed(&mut engine, &prompt, |progress| done.push(progress.n_done))
            .unwrap();
        assert_eq!(done, wanted);
        let places = text.prompt_logprobs().iter();
        let tokens: Vec<TokenId> = places.map(|place| place.chosen.token).collect();
        assert_eq!(tokens, prompt[1..]);
    }
}

/// Where no cell is missing, the context still ends.
#[test]
fn a_text_of_states_ends_with_its_context() {
    let case = models::stories("stories-mamba");
    let mut engine = case.engine(1, 12);
    let options = GenerateOptions {
        n_predict: None,
        ..greedy(0)
    };
    let prompt = case.tokenizer.encode("Once upon a", EncodeOptions::PROMPT);
    let mut text = Generation::new(&engine, &case.tokenizer, options).unwrap();
    text.feed(&mut engine, &prompt, |_| {}).unwrap();
    while text.next_piece(&mut engine).unwrap().is_some() {}
    assert_eq!(text.finish_reason(), Some(&FinishReason::ContextFull));
    assert_eq!(text.tokens().len(), 12 - prompt.len() + 1);
}

#[test]
fn tokens_that_were_there_before_are_looked_up() {
    let (case, reference) = (models::stories("stories-llama"), &references()[0]);
    let told = ids(&[&reference.ids[..], &reference.greedy_ids[..20]].concat());
    let n_drafted = |history: Vec<TokenId>| {
        let mut engine = case.engine(1, 100);
        engine
            .decode(&Batch::prompt(SeqId(0), told.iter().copied()))
            .unwrap();
        let options = GenerateOptions {
            history,
            speculation: Speculation::Lookup { n_max: 4 },
            ..greedy(2)
        };
        let mut text = Generation::new(&engine, &case.tokenizer, options).unwrap();
        text.feed(&mut engine, &told[..4], |_| {}).unwrap();
        while text.next_piece(&mut engine).unwrap().is_some() {}
        text.speculated().n_drafted
    };
    assert_eq!(n_drafted(Vec::new()), 0);
    assert!(n_drafted(told.clone()) > 0);
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
        let mut engine = case.engine_with(&EngineConfig {
            n_ctx: Some(100),
            n_ubatch,
            ..EngineConfig::default()
        });
        let options = GenerateOptions {
            speculation: Speculation::Lookup { n_max: 8 },
            ..greedy(40)
        };
        let text = Generation::new(&engine, &case.tokenizer, options).unwrap();
        let mut text = text.with_step(Box::new(Only(TokenId(10))));
        text.feed(&mut engine, &[TokenId(10); 9], |_| {}).unwrap();
        let mut most = 0;
        while text.next_piece(&mut engine).unwrap().is_some() {
            most = most.max(text.last_pieces().len());
        }
        assert_eq!(most, n_ubatch as usize);
        let off = (n_ubatch == 1).then_some(SpeculationOff::NothingTakenBack);
        assert_eq!(text.speculated().off, off);
    }
}

#[test]
fn what_was_not_asked_for_is_not_refused() {
    let case = models::stories("stories-mamba");
    let engine = case.engine(1, 100);
    let text = Generation::new(&engine, &case.tokenizer, greedy(1)).unwrap();
    assert_eq!(text.speculated(), Speculated::default());
}
