//! Requests that are refused, cancelled or fail: each ends once, and the others go on.

use std::time::{Duration, Instant};

use cellar_engine::sampler::{Candidates, SamplerConfig, Step};
use cellar_engine::serve::{
    RequestError, Service, ServiceConfig, ServiceError, TextRequest, TextStream,
};
use cellar_engine::{CompletionOptions, Engine, EngineConfig, EngineError, FinishReason, Logprobs};
use kv_core::TokenId;

use crate::service::models::{Case, stories};
use crate::support::Moody;

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
    let service = case.service(2, 600);
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
    let service = case.service(2, 2000);
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
    let service = case.service(2, 600);
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
    let service = case.service(1, 2000);
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
    let service = case.service_on(engine);
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
    let service = case.service_on(engine);
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
    let service = case.service_on(engine);
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
    let service = case.service(2, 400);
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
    let service = case.service(2, n_ctx);
    request.steps.push(never_ends());
    let n_prompt = request.prompt.len();
    let end = service.submit(request).unwrap().finish().unwrap();
    assert_eq!(end.finish, FinishReason::ContextFull);
    // The last token was chosen but has no cell, as in a generation.
    assert_eq!(n_prompt + end.tokens.len(), n_ctx as usize + 1);
}
