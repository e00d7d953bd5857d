//! Prompts that begin alike are computed once, and a conversation that goes on stays cached.

use std::time::Duration;

use cellar_engine::EngineConfig;
use cellar_engine::serve::{Missed, Reuse, Service, ServiceConfig, TextRequest, TextStream};
use cellar_scheduler::Priority;
use kv_core::TokenId;

use crate::service::models::{Case, stories, tiny};

/// What requests with these prompts get when they come together, in order, each compared with what
/// it gets alone. Returns how many tokens of the prompts were computed.
fn serve_together(case: &Case, prompts: &[Vec<TokenId>]) -> u64 {
    let config = EngineConfig {
        n_ctx: Some(900),
        n_seqs: 16,
        n_active: Some(8),
        n_ubatch: 32,
        ..EngineConfig::default()
    };
    // Steps of any size: next to decode rows, chunks of prefill depend on the time.
    let service_config = ServiceConfig {
        step_time: Some(Duration::from_millis(2)),
        ..ServiceConfig::default()
    };
    let engine = case.engine_with(&config);
    let service = Service::start(engine, &case.tokenizer, &service_config).unwrap();
    let request = |number: usize| {
        let mut request = case.request(number as u64);
        request.prompt.clone_from(&prompts[number]);
        request.priority = Priority::Normal;
        request
    };
    let streams = (0..prompts.len()).map(|number| service.submit(request(number)).unwrap());
    let streams: Vec<TextStream> = streams.collect();
    for (number, stream) in streams.into_iter().enumerate() {
        let together = stream.finish().unwrap();
        let alone = case.alone(&request(number), 900);
        let (name, got) = (case.name, (together.text, together.tokens));
        assert_eq!(got, (alone.text, alone.tokens), "{name}: {number}");
    }
    let counters = service.counters();
    assert_eq!(counters.n_preemptions, 0, "{}", case.name);
    counters.n_prompt_tokens - counters.n_reused_tokens
}

/// Requests that come together compute a common prompt once, and the token that each text begins
/// from.
#[test]
fn equal_prompts_that_come_together_are_computed_once() {
    for case in [
        stories("stories-llama"),
        stories("stories-gemma3"),
        stories("stories-mamba"),
        tiny("falcon_h1"),
    ] {
        let prompt: Vec<TokenId> = (0..400).map(|at| TokenId(3 + at * at % 490)).collect();
        let prompts = vec![prompt; 8];
        let n_computed = serve_together(&case, &prompts);
        assert_eq!(n_computed, 400 + 7, "{}", case.name);
    }
}

/// And of prompts that part, what each has of its own. Cells that they share have to fit once.
#[test]
fn a_common_prefix_that_comes_together_is_computed_once() {
    let prompts = (0..8).map(|number| {
        let common = (0..400).map(|at| TokenId(3 + at * at % 490));
        let own = (0..10).map(|at| TokenId(3 + (number * 31 + at) % 490));
        common.chain(own).collect()
    });
    let prompts: Vec<Vec<TokenId>> = prompts.collect();
    let n_computed = serve_together(&stories("stories-llama"), &prompts);
    // A text may begin like the prompt of another, so a few more can be there already.
    assert!(
        (400 + 8..=400 + 8 * 10).contains(&n_computed),
        "{n_computed}"
    );
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
        let service = case.service(6, 600);
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

/// Ten turns of a conversation compute what is new, and each text is what it is alone.
#[test]
fn ten_turns_compute_what_is_new() {
    for case in [
        stories("stories-llama"),
        stories("stories-gemma3"),
        stories("stories-mamba"),
        tiny("falcon_h1"),
        tiny("jamba"),
    ] {
        let name = case.name;
        let service = case.service(6, 900);
        let mut prompt = Vec::new();
        let mut n_new = 0;
        for turn in 0..10u32 {
            // A message of a user.
            prompt.extend((0..40).map(|at| TokenId(3 + (turn * 37 + at * at) % 490)));
            n_new += 40;
            let request = || {
                let mut request = case.request(9);
                request.prompt.clone_from(&prompt);
                request
            };
            let answer = service.submit(request()).unwrap().finish().unwrap();
            let alone = case.alone(&request(), 900);
            assert_eq!(answer.tokens, alone.tokens, "{name}: turn {turn}");
            prompt.extend(&answer.tokens);
        }
        let counters = service.counters();
        let n_computed = counters.n_prompt_tokens - counters.n_reused_tokens;
        eprintln!("{name}: {n_computed} tokens of prompts computed for {n_new} new ones");
        assert!(
            n_computed as f64 <= 1.05 * f64::from(n_new),
            "{name}: {n_computed}"
        );
    }
}

/// A second prompt begins with the copy that was kept where the first one's messages end, and
/// prefixes have no more bytes than they may.
#[test]
fn ends_of_messages_are_found_within_a_budget() {
    for case in [stories("stories-gemma3"), stories("stories-mamba")] {
        let name = case.name;
        let config = EngineConfig {
            n_ctx: Some(900),
            n_seqs: 64,
            n_active: Some(2),
            idle_bytes: 400 << 10,
            n_ubatch: 32,
            ..EngineConfig::default()
        };
        let without = EngineConfig {
            idle_bytes: 0,
            ..config.clone()
        };
        let bytes = |config: &EngineConfig| {
            let settings = config.settings(&*case.model).unwrap();
            (settings.memory_bytes(), settings.n_active())
        };
        let (more, less) = (bytes(&config), bytes(&without));
        assert_eq!((more.1, less.1), (2, 2), "{name}");
        assert!(more.0 > less.0 && more.0 <= less.0 + (400 << 10), "{name}");
        let engine = case.engine_with(&config);
        let config = ServiceConfig {
            prefix_bytes: Some(400 << 10),
            ..ServiceConfig::default()
        };
        let service = Service::start(engine, &case.tokenizer, &config).unwrap();
        assert!(service.keeps_checkpoints(), "{name}");
        let request = |last: u32| {
            let mut request = case.request(9);
            request.prompt = (0..120).map(|at| TokenId(3 + at * at % 490)).collect();
            request.prompt.extend((0..30).map(|at| TokenId(last + at)));
            request.checkpoints = vec![120];
            request
        };
        for last in [100, 200] {
            let text = service.submit(request(last)).unwrap().finish().unwrap();
            let alone = case.alone(&request(last), 900);
            assert_eq!(text.tokens, alone.tokens, "{name}: {last}");
            let reuse = text.usage.reuse.unwrap();
            assert!(last == 100 || reuse.n_tokens >= 120, "{name}: {reuse:?}");
        }
    }
}
