//! Each text is what it is alone, whatever memory and company it has, and what it took is freed.

use cellar_engine::serve::{Service, ServiceConfig, TextStream};
use cellar_engine::{Engine, EngineConfig};
use kv_backend::Backend;

use crate::service::models::{Case, Generated, preempting, stories, tiny, with_old_rows};

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
            let config = preempting(every);
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
    let service = case.service_on(engine);
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
fn texts_are_what_they_are_alone_with_old_rows() {
    check_texts(&with_old_rows(stories("stories-llama")));
    check_texts(&with_old_rows(stories("stories-gemma3")));
    check_texts(&with_old_rows(tiny("jamba")));
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

#[test]
fn texts_are_what_they_are_alone_with_delta_rules() {
    check_texts(&tiny("qwen3_next"));
}

#[test]
fn texts_are_what_they_are_alone_with_short_convolutions() {
    check_texts(&tiny("lfm2"));
}
