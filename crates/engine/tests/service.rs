//! A service gives each request the text that it has alone, and frees what it took.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

#[path = "service/models.rs"]
mod models;
mod support;

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use engine::sampler::{Candidates, SamplerConfig, Step};
use engine::serve::{
    Missed, PrefixCaching, RequestError, Reuse, Service, ServiceConfig, ServiceError, TextRequest,
    TextStream,
};
use engine::{CompletionOptions, Engine, EngineConfig, EngineError, FinishReason, Logprobs};
use kv_core::TokenId;
use kv_core::backend::Backend;
use models::{Case, Generated, stories, tiny};
use support::Moody;

/// Texts of a service, in the order of their requests, which arrive over time.
fn serve_all(
    case: &Case,
    engine: Engine<impl Backend>,
    config: &ServiceConfig,
    n: u64,
) -> Vec<Generated> {
    let service = Service::start(engine, &case.tokenizer, config).unwrap();
    let mut streams: Vec<(TextStream, String)> = Vec::new();
    for number in 0..n {
        let mut stream = service.submit(case.request(number)).unwrap();
        // Some are begun before the next comes.
        let begun = match number % 4 {
            3 => stream.next_piece().unwrap().unwrap_or_default(),
            _ => String::new(),
        };
        streams.push((stream, begun));
    }
    let generated = streams.into_iter().map(|(stream, begun)| {
        let rest = stream.finish().unwrap();
        assert_eq!(rest.usage.n_tokens, rest.tokens.len());
        assert!(rest.usage.queued <= rest.usage.total);
        Generated {
            text: begun + &rest.text,
            tokens: rest.tokens,
            finish: rest.finish,
        }
    });
    let generated: Vec<Generated> = generated.collect();
    let counters = service.counters();
    if config.preempt_every.is_some() {
        assert!(counters.n_preemptions > 0, "{counters:?}");
    }
    let engine = service.stop().unwrap();
    assert_eq!(engine.memory().n_used(), 0, "cells are in use");
    if let Some(states) = engine.memory().states() {
        assert_eq!(states.n_used(), 0, "states are in use");
    }
    generated
}

/// The text of each request is what it is alone: with memory from ample to one request, with
/// preemptions forced every 1, 3 and 17 steps.
fn check_texts(case: &Case) {
    let n: u64 = std::env::var("CELLAR_SERVICE_REQUESTS").map_or(8, |n| n.parse().unwrap());
    let requests = (0..n).map(|number| case.request(number));
    for n_ctx in [1024, 200, 80] {
        let mut engine = case.engine(1, n_ctx);
        let alone = requests.clone();
        let alone = alone.map(|request| case.alone_on(&mut engine, &request));
        let alone: Vec<Generated> = alone.collect();
        for every in [0, 1, 3, 17] {
            if (every == 1 || every == 17) && n_ctx != 200 {
                continue;
            }
            let config = ServiceConfig {
                preempt_every: NonZeroU32::new(every),
                // Without a cache a request that was preempted is computed again from its tokens.
                prefix_cache: match every {
                    0 | 17 => PrefixCaching::On,
                    _ => PrefixCaching::Off,
                },
                headroom: 1,
                ..ServiceConfig::default()
            };
            let engine = case.engine(4, n_ctx);
            let together = serve_all(case, engine, &config, n);
            for (number, (together, alone)) in together.iter().zip(&alone).enumerate() {
                let name = case.name;
                assert_eq!(
                    together, alone,
                    "{name}: request {number}, {n_ctx} cells, preempted every {every} steps"
                );
            }
        }
    }
}

/// Sequences are ids: states and window cells are for those that run, so that 256 sequences do with
/// those of six.
#[test]
fn many_sequences_share_few_states_and_windows() {
    let config = EngineConfig {
        n_ctx: Some(4096),
        n_seqs: 256,
        n_active: Some(6),
        n_ubatch: 32,
        ..EngineConfig::default()
    };
    for case in [stories("stories-mamba"), stories("stories-gemma3")] {
        let engine = case.engine_with(&config);
        let six = case.engine_with(&EngineConfig {
            n_seqs: 6,
            n_active: None,
            ..config.clone()
        });
        assert_eq!(engine.settings().layout, six.settings().layout);
        let n = 16;
        let together = serve_all(&case, engine, &ServiceConfig::default(), n);
        let mut engine = case.engine(1, 4096);
        for (number, together) in (0..n).zip(together) {
            let alone = case.alone_on(&mut engine, &case.request(number));
            assert_eq!(together, alone, "{}: request {number}", case.name);
        }
    }
}

/// A sweep over many documents evicts no conversation that goes on, also where windows and states
/// have room for few.
#[test]
fn a_sweep_leaves_a_live_conversation_cached() {
    for case in [
        stories("stories-llama"),
        stories("stories-gemma3"),
        stories("stories-mamba"),
    ] {
        let name = case.name;
        let config = EngineConfig {
            n_ctx: Some(1024),
            n_seqs: 16,
            n_active: Some(4),
            n_ubatch: 32,
            ..EngineConfig::default()
        };
        let service_config = ServiceConfig {
            max_running: Some(2),
            ..ServiceConfig::default()
        };
        let engine = case.engine_with(&config);
        let service = Service::start(engine, &case.tokenizer, &service_config).unwrap();
        let mut known = case.request(9).prompt;
        for turn in 0..4 {
            let mut next = case.request(9);
            next.prompt.clone_from(&known);
            next.prompt.push(TokenId(300 + turn));
            let prompt = next.prompt.clone();
            let answer = service.submit(next).unwrap().finish().unwrap();
            let reuse = answer.usage.reuse.unwrap();
            if turn > 0 {
                // The last token of an answer was chosen, and never computed.
                assert!(
                    reuse.n_tokens + 1 >= known.len(),
                    "{name}: turn {turn}: {reuse:?} of {}",
                    known.len()
                );
            }
            known = [prompt, answer.tokens].concat();
            if turn == 2 {
                let documents = (0..32).map(|document| {
                    let mut request = case.request(document);
                    request.prompt.insert(1, TokenId(100 + document as u32));
                    service.submit(request).unwrap()
                });
                let documents: Vec<TextStream> = documents.collect();
                for document in documents {
                    document.finish().unwrap();
                }
                assert!(service.counters().n_evicted > 0, "{name}: no sweep");
            }
        }
    }
}

/// Requests that come and go change the shape of nearly every step: a few programs serve all.
#[test]
fn a_mixed_run_compiles_few_programs() {
    let case = stories("stories-llama");
    let engine = case.engine_with(&EngineConfig {
        n_ctx: Some(2048),
        n_seqs: 16,
        n_ubatch: 64,
        ..EngineConfig::default()
    });
    let service = Service::start(engine, &case.tokenizer, &ServiceConfig::default()).unwrap();
    let streams: Vec<TextStream> = (0..64)
        .map(|number| service.submit(case.request(number)).unwrap())
        .collect();
    for stream in streams {
        stream.finish().unwrap();
    }
    let n_compiled = service.stop().unwrap().n_compiled();
    // For 1, 32 and 64 tokens: all outputs, one at most, 32 at most, or one fewer than tokens.
    assert!((3..=9).contains(&n_compiled), "{n_compiled} programs");
}

#[test]
fn texts_are_what_they_are_alone_with_full_attention() {
    check_texts(&stories("stories-llama"));
}

#[test]
fn texts_are_what_they_are_alone_with_windows() {
    check_texts(&stories("stories-gemma3"));
}

#[test]
fn texts_are_what_they_are_alone_with_states() {
    check_texts(&stories("stories-mamba"));
}

#[test]
fn texts_are_what_they_are_alone_with_jamba() {
    check_texts(&tiny("jamba"));
}

#[test]
fn texts_are_what_they_are_alone_with_falcon_h1() {
    check_texts(&tiny("falcon_h1"));
}

#[test]
fn texts_are_what_they_are_alone_with_bamba() {
    check_texts(&tiny("bamba"));
}

#[test]
fn texts_are_what_they_are_alone_with_granite() {
    check_texts(&tiny("granitemoehybrid"));
}

/// A text that goes on until the context is full ends there, as it does alone.
#[test]
fn a_full_context_ends_a_text_where_it_ends_alone() {
    let case = stories("stories-llama");
    let mut request = case.request(1);
    request.options.n_predict = None;
    request.options.stop.clear();
    request.options.sampler = SamplerConfig::greedy();
    let never_ends = || -> Box<dyn Step> { Box::new(NeverEnds(case.tokenizer.clone())) };
    let n_ctx = 40;
    let service = Service::start(
        case.engine(2, n_ctx),
        &case.tokenizer,
        &ServiceConfig::default(),
    );
    let service = service.unwrap();
    request.steps.push(never_ends());
    let n_prompt = request.prompt.len();
    let end = service.submit(request).unwrap().finish().unwrap();
    assert_eq!(end.finish, FinishReason::ContextFull);
    // The last token was chosen but has no cell, as in a generation.
    assert_eq!(n_prompt + end.tokens.len(), n_ctx as usize + 1);
}

/// Takes the tokens out that end a text.
#[derive(Debug)]
struct NeverEnds(std::sync::Arc<model_core::tokenizer::Tokenizer>);

impl Step for NeverEnds {
    fn apply(&mut self, candidates: &mut Candidates<'_>) {
        candidates.retain(|candidate| !self.0.is_end_of_generation(candidate.token));
    }
}

/// A request for a long text that does not end by itself.
fn endless(case: &Case, number: u64) -> TextRequest {
    TextRequest {
        options: CompletionOptions {
            sampler: SamplerConfig::greedy(),
            ..CompletionOptions::default()
        },
        steps: vec![Box::new(NeverEnds(case.tokenizer.clone()))],
        ..case.request(number)
    }
}

#[test]
fn what_cannot_be_is_refused_before_it_is_queued() {
    let case = stories("stories-llama");
    let config = ServiceConfig {
        max_queued: 2,
        max_queued_tokens: 60,
        ..ServiceConfig::default()
    };
    let service = Service::start(case.engine(1, 64), &case.tokenizer, &config).unwrap();
    let refusal = |request: TextRequest| match service.submit(request) {
        Err(ServiceError::Refused(why)) => why,
        other => panic!("{other:?}"),
    };
    let with = |prompt: Vec<TokenId>| TextRequest {
        prompt,
        ..case.request(0)
    };
    assert_eq!(refusal(with(Vec::new())), RequestError::EmptyPrompt);
    let too_long = RequestError::TooLong {
        n_prompt: 65,
        limit: 64,
    };
    assert_eq!(refusal(with(vec![TokenId(5); 65])), too_long);
    let n_vocab = service.prompt_limits().n_vocab;
    let token = TokenId(n_vocab);
    let beyond = RequestError::TokenOutOfRange {
        at: 1,
        token,
        n_vocab,
    };
    assert_eq!(refusal(with(vec![TokenId(5), token])), beyond);
    let mut hot = case.request(0);
    hot.options.sampler.temperature = -1.0;
    let refused = service.submit(hot).err();
    assert!(
        matches!(refused, Some(ServiceError::Engine(_))),
        "{refused:?}"
    );

    let mut first = service.submit(endless(&case, 0)).unwrap();
    first.next_piece().unwrap(); // it is admitted
    let with_prompt = |n: usize| TextRequest {
        prompt: vec![TokenId(5); n],
        ..endless(&case, 1)
    };
    let second = service.submit(with_prompt(20)).unwrap();
    let busy = RequestError::BusyTokens {
        queued: 20,
        n_prompt: 41,
        limit: 60,
    };
    assert_eq!(refusal(with_prompt(41)), busy);
    let third = service.submit(with_prompt(20)).unwrap();
    let (queued, limit) = (2, 2);
    assert_eq!(
        refusal(with_prompt(1)),
        RequestError::Busy { queued, limit }
    );
    assert_eq!(service.n_queued(), 2);
    drop((first, second, third));
    wait_until(|| service.n_queued() == 0);
}

fn wait_until(is_so: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_secs(20);
    while !is_so() {
        assert!(Instant::now() < until, "it takes too long");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A dropped stream ends its request, wherever it is, and the others go on.
#[test]
fn dropping_a_stream_cancels_its_request() {
    let case = stories("stories-llama");
    let alone = case.alone(&case.request(7), 600);
    let service = Service::start(
        case.engine(2, 600),
        &case.tokenizer,
        &ServiceConfig::default(),
    );
    let service = service.unwrap();
    let kept = service.submit(case.request(7)).unwrap();
    let mut in_text = service.submit(endless(&case, 1)).unwrap();
    in_text.next_piece().unwrap();
    let in_queue = service.submit(endless(&case, 2)).unwrap();
    drop(in_queue);
    let mut long = endless(&case, 3);
    long.prompt = vec![TokenId(5); 400];
    let in_prompt = service.submit(long).unwrap();
    drop(in_text);
    drop(in_prompt);
    let kept = kept.finish().unwrap();
    assert_eq!((kept.text, kept.tokens), (alone.text, alone.tokens));
    wait_until(|| service.n_queued() == 0);
    // The engine has all its cells again: a request that needs them all is served.
    let mut all = endless(&case, 4);
    all.prompt = vec![TokenId(6); 600];
    let all = service.submit(all).unwrap().finish().unwrap();
    assert_eq!(
        (all.tokens.len(), all.finish),
        (1, FinishReason::ContextFull)
    );
    let engine = service.stop().unwrap();
    assert_eq!(engine.memory().n_used(), 0);
}

#[test]
fn a_cancelled_text_ends_with_what_there_was() {
    let case = stories("stories-llama");
    let service = Service::start(
        case.engine(2, 2000),
        &case.tokenizer,
        &ServiceConfig::default(),
    );
    let service = service.unwrap();
    let mut stream = service.submit(endless(&case, 1)).unwrap();
    let mut text = stream.next_piece().unwrap().unwrap();
    stream.cancel();
    while let Some(piece) = stream.next_piece_within(Duration::from_secs(9)).unwrap() {
        assert!(!piece.is_empty(), "nothing came");
        text += &piece;
    }
    let end = stream.finish().unwrap();
    assert_eq!(end.finish, FinishReason::Cancelled);
    assert!(!text.is_empty() && end.text.is_empty());
}

/// A reader that takes nothing blocks no other request, and finds its whole text in the end.
#[test]
fn a_slow_reader_blocks_no_request() {
    let case = stories("stories-llama");
    let service = Service::start(
        case.engine(2, 600),
        &case.tokenizer,
        &ServiceConfig::default(),
    );
    let service = service.unwrap();
    let slow = service.submit(case.request(6)).unwrap();
    let fast = service.submit(case.request(8)).unwrap();
    let wanted = case.alone(&case.request(8), 600);
    assert_eq!(fast.finish().unwrap().text, wanted.text);
    let wanted = case.alone(&case.request(6), 600);
    assert_eq!(slow.finish().unwrap().text, wanted.text);
}

/// Stopping the service ends every text, once.
#[test]
fn texts_end_with_the_service() {
    let case = stories("stories-llama");
    let service = Service::start(
        case.engine(1, 2000),
        &case.tokenizer,
        &ServiceConfig::default(),
    );
    let service = service.unwrap();
    let mut running = service.submit(endless(&case, 1)).unwrap();
    running.next_piece().unwrap();
    let waiting = service.submit(endless(&case, 2)).unwrap();
    let engine = service.stop().unwrap();
    assert_eq!(engine.memory().n_used(), 0);
    let rest: Vec<_> = running.collect();
    let is_stopped = |error: &ServiceError| matches!(error, ServiceError::Stopped);
    assert!(
        rest.last().unwrap().as_ref().is_err_and(is_stopped),
        "{rest:?}"
    );
    assert!(waiting.finish().is_err_and(|error| is_stopped(&error)));
}

fn moody(case: &Case) -> Engine<Moody> {
    let config = EngineConfig {
        n_ctx: Some(400),
        n_seqs: 4,
        ..EngineConfig::default()
    };
    let (model, weights) = (case.model.clone(), case.weights.clone());
    Engine::new(Moody::new(), model, weights, &config).unwrap()
}

/// A panic of the backend ends every text, once, and later requests are refused.
#[test]
fn texts_end_with_a_thread_that_panics() {
    use std::sync::atomic::Ordering;

    let case = stories("stories-llama");
    let engine = moody(&case);
    engine.backend().panics.store(true, Ordering::Relaxed);
    let runs_left = std::sync::Arc::clone(&engine.backend().runs_left);
    let service = Service::start(engine, &case.tokenizer, &ServiceConfig::default()).unwrap();
    let first = service.submit(endless(&case, 0)).unwrap();
    let second = service.submit(endless(&case, 1)).unwrap();
    runs_left.store(1, Ordering::Relaxed);
    let is_stopped = |error: &ServiceError| matches!(error, ServiceError::Stopped);
    for stream in [first, second] {
        assert!(stream.finish().is_err_and(|error| is_stopped(&error)));
    }
    wait_until(|| {
        service
            .submit(endless(&case, 2))
            .is_err_and(|e| is_stopped(&e))
    });
    assert!(service.stop().is_err_and(|error| is_stopped(&error)));
}

/// A step that fails once ends no request.
#[test]
fn a_transient_failure_ends_no_request() {
    use std::sync::atomic::Ordering;

    let case = stories("stories-llama");
    let engine = moody(&case);
    let runs_left = std::sync::Arc::clone(&engine.backend().runs_left);
    let service = Service::start(engine, &case.tokenizer, &ServiceConfig::default()).unwrap();
    let mut streams: Vec<TextStream> = (0..3)
        .map(|number| service.submit(endless(&case, number)).unwrap())
        .collect();
    for stream in &mut streams {
        stream.next_piece().unwrap();
    }
    runs_left.store(2, Ordering::Relaxed);
    for stream in &mut streams {
        for _ in 0..8 {
            assert!(stream.next_piece().unwrap().is_some());
        }
        stream.cancel();
    }
    for stream in streams {
        assert_eq!(stream.finish().unwrap().finish, FinishReason::Cancelled);
    }
}

/// Nor does it end the request whose prompt it computes, where the rows of the prompt are wanted.
#[test]
fn a_transient_failure_ends_no_request_with_log_probabilities_of_its_prompt() {
    use std::sync::atomic::Ordering;

    let case = stories("stories-llama");
    let engine = moody(&case);
    engine.backend().runs_left.store(0, Ordering::Relaxed);
    let service = Service::start(engine, &case.tokenizer, &ServiceConfig::default()).unwrap();
    let mut request = case.request(0);
    request.options.prompt_logprobs = Logprobs::Top(0);
    let n_prompt = request.prompt.len();
    let end = service.submit(request).unwrap().finish().unwrap();
    assert_eq!(end.prompt_logprobs.len(), n_prompt - 1);
    assert!(!end.tokens.is_empty());
}

/// A row that is not a number ends its own request.
#[test]
fn a_step_that_leaves_no_token_ends_its_own_request() {
    #[derive(Debug)]
    struct Nothing;
    impl Step for Nothing {
        fn apply(&mut self, candidates: &mut Candidates<'_>) {
            candidates.retain(|_| false);
        }
    }
    let case = stories("stories-llama");
    let service = Service::start(
        case.engine(2, 400),
        &case.tokenizer,
        &ServiceConfig::default(),
    );
    let service = service.unwrap();
    let good = service.submit(case.request(6)).unwrap();
    let mut bad = case.request(8);
    bad.steps.push(Box::new(Nothing));
    let bad = service.submit(bad).unwrap().finish();
    let is_sample = |error: &ServiceError| match error {
        ServiceError::Engine(error) => matches!(**error, EngineError::Sample(_)),
        _ => false,
    };
    assert!(bad.as_ref().is_err_and(is_sample), "{bad:?}");
    let wanted = case.alone(&case.request(6), 400);
    assert_eq!(good.finish().unwrap().text, wanted.text);
}

/// The same prompt again computes one token, and the text is the same; the next turn of a
/// conversation computes what is new.
#[test]
fn prompts_that_begin_alike_are_computed_once() {
    for case in [
        stories("stories-llama"),
        stories("stories-gemma3"),
        stories("stories-mamba"),
        tiny("falcon_h1"),
    ] {
        let name = case.name;
        let service = Service::start(
            case.engine(6, 600),
            &case.tokenizer,
            &ServiceConfig::default(),
        );
        let service = service.unwrap();
        let serve = |request: TextRequest| service.submit(request).unwrap().finish().unwrap();
        let request = case.request(9);
        let n_prompt = request.prompt.len();
        let first = serve(request);
        let reuse = |n_tokens, missed| Some(Reuse { n_tokens, missed });
        let never_seen = reuse(0, Some(Missed::NeverSeen));
        assert_eq!(first.usage.reuse, never_seen, "{name}");
        let again = serve(case.request(9));
        assert_eq!(again.usage.reuse, reuse(n_prompt - 1, None), "{name}");
        assert_eq!(again.text, first.text, "{name}");
        assert_eq!(again.tokens, first.tokens, "{name}");
        let mut next = case.request(9);
        next.prompt.extend(&first.tokens);
        next.prompt.extend(&case.request(4).prompt);
        let n_known = n_prompt + first.tokens.len();
        let alone = case.alone(&next, 600);
        let generated = serve(next);
        assert_eq!(
            (generated.text, generated.tokens),
            (alone.text, alone.tokens),
            "{name}"
        );
        let reuse = generated.usage.reuse.unwrap();
        assert!(
            reuse.n_tokens + 1 >= n_known,
            "{name}: {reuse:?} of {n_known}"
        );
    }
}
