//! A session gives each text what it has alone: beyond the context, from candidates, stepped by
//! hand.

use std::num::NonZeroU32;
use std::sync::atomic::Ordering;

use cellar_engine::sampler::SamplerConfig;
use cellar_engine::serve::{ServiceConfig, ServiceError, TextRequest};
use cellar_engine::session::{Activity, Session};
use cellar_engine::{
    Completion, CompletionOptions, EngineConfig, EngineError, FinishReason, GroupAttention,
    Logprobs, LongContext,
};
use kv_core::{SeqId, TokenId};
use kv_rows::KvType;

use super::models::{Case, stories, tiny};
use crate::support;
use crate::support::text::by_hand;

fn greedy(n_predict: usize) -> CompletionOptions {
    CompletionOptions {
        sampler: SamplerConfig::greedy(),
        n_predict: Some(n_predict),
        ..CompletionOptions::default()
    }
}

/// A text of the session's, and the same by hand.
fn both(case: &Case, n_ctx: u32, long_context: LongContext) -> [(Vec<TokenId>, FinishReason); 2] {
    let prompt = case.request(2).prompt;
    let mut session = Session::new(
        case.engine(2, n_ctx),
        &case.tokenizer,
        &ServiceConfig::default(),
    )
    .unwrap();
    let mut text = session
        .submit(TextRequest {
            prompt: prompt.clone(),
            options: greedy(150),
            long_context: Some(long_context),
            ..TextRequest::default()
        })
        .unwrap();
    while session.next_piece(&mut text).unwrap().is_some() {}
    let ended = text.finish().unwrap();
    let mut engine = session.into_engine();
    assert_eq!(engine.memory().n_used(), 0);
    let mut alone = Completion::new(&case.tokenizer, greedy(150)).unwrap();
    by_hand(&mut engine, SeqId(0), &prompt, &mut alone, long_context);
    [
        (ended.tokens, ended.finish),
        (
            alone.tokens().to_vec(),
            alone.finish_reason().unwrap().clone(),
        ),
    ]
}

#[test]
fn a_text_goes_on_beyond_the_context_as_alone() {
    for (name, n_keep) in [
        ("stories-llama", 0),
        ("stories-llama", 5),
        ("stories-gemma3", 3),
    ] {
        let case = stories(name);
        let [text, alone] = both(&case, 48, LongContext::Shift { n_keep });
        assert!(text.0.len() > 60, "{name}: {}", text.0.len());
        assert_eq!(text, alone, "{name}, {n_keep}");
    }
    let [text, alone] = both(&stories("stories-llama"), 48, LongContext::Stop);
    assert_eq!(text.1, FinishReason::ContextFull);
    assert_eq!(text, alone);
}

#[test]
fn a_text_whose_positions_are_shared_is_as_alone() {
    let group = GroupAttention::new(2, 8).unwrap();
    let case = stories("stories-llama");
    let [text, alone] = both(&case, 200, LongContext::Group(group));
    assert_eq!(text, alone);
    let [stopped, _] = both(&case, 200, LongContext::Stop);
    assert_ne!(stopped.0, text.0, "nothing was grouped");
}

/// A state cannot drop tokens: refused before anything is computed.
#[test]
fn what_cannot_move_is_refused_at_once() {
    let case = tiny("jamba");
    let engine = case.engine(1, 64);
    let mut session = Session::new(engine, &case.tokenizer, &ServiceConfig::default()).unwrap();
    let request = TextRequest {
        long_context: Some(LongContext::Shift { n_keep: 0 }),
        ..case.request(0)
    };
    let refused = session.submit(request).unwrap_err();
    let ServiceError::Engine(error) = refused else {
        panic!("{refused}");
    };
    assert!(matches!(*error, EngineError::OneState { .. }), "{error}");
    assert_eq!(session.step(), Activity::Idle);
}

/// Where the device finds candidates, rows of logits are read back only where a text needs them.
#[test]
fn candidates_are_found_on_the_device_where_all_texts_take_them() {
    let file = support::stories();
    let texts = |prefers: bool, logprobs: Logprobs| {
        let engine = support::engine(&EngineConfig {
            n_seqs: 3,
            n_ctx: Some(300),
            kv_types: KvType::F32.into(),
            ..EngineConfig::default()
        });
        let prefers_candidates = &engine.backend().prefers_candidates;
        prefers_candidates.store(prefers, Ordering::Relaxed);
        let mut session =
            Session::new(engine, file.tokenizer(), &ServiceConfig::default()).unwrap();
        let samplers = [
            SamplerConfig::greedy(),
            SamplerConfig {
                seed: 5,
                top_k: NonZeroU32::new(20),
                ..SamplerConfig::default()
            },
        ];
        let options = samplers.map(|sampler| CompletionOptions {
            sampler,
            n_predict: Some(20),
            logprobs,
            ..CompletionOptions::default()
        });
        let streams = options.map(|options| {
            let prompt = support::ids(&support::references()[0].ids);
            session
                .submit(TextRequest {
                    prompt,
                    options,
                    ..TextRequest::default()
                })
                .unwrap()
        });
        let mut has_candidates = false;
        while session.step() == Activity::Busy {
            has_candidates |= session.engine().last_candidates().is_some();
        }
        let texts = streams.map(|stream| stream.finish().unwrap().tokens);
        (texts, has_candidates)
    };
    let (whole, has_candidates) = texts(false, Logprobs::Off);
    assert!(!has_candidates);
    assert_eq!(texts(true, Logprobs::Off), (whole.clone(), true));
    assert_eq!(texts(true, Logprobs::Top(2)), (whole, false));
}

/// Texts that take turns in one session are computed together, and each is what it is alone.
#[test]
fn a_stepped_session_serves_several_texts() {
    let case = stories("stories-llama");
    let engine = case.engine(3, 600);
    let mut session = Session::new(engine, &case.tokenizer, &ServiceConfig::default()).unwrap();
    let mut streams: Vec<_> = (0..3)
        .map(|number| session.submit(case.request(number)).unwrap())
        .collect();
    let mut texts = vec![String::new(); 3];
    let mut has_more = true;
    while has_more {
        has_more = false;
        for (stream, text) in streams.iter_mut().zip(&mut texts) {
            if let Some(piece) = session.next_piece(stream).unwrap() {
                text.push_str(&piece);
                has_more = true;
            }
        }
    }
    for (number, text) in (0..).zip(&texts) {
        assert_eq!(*text, case.alone(&case.request(number), 600).text);
    }
    let counters = session.scheduler().counters();
    assert!(counters.n_tokens > counters.n_steps, "{counters:?}");
}
