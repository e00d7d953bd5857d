//! Speculation changes no text: what a service and a session give with prompt lookup is what
//! they give without, and the memory holds what it held.

use cellar_engine::sampler::{Candidates, SamplerConfig, Step};
use cellar_engine::serve::{
    Retention, Service, ServiceConfig, ServiceError, Speculated, Speculation, SpeculationOff,
    TextRequest, TextStream,
};
use cellar_engine::{
    CompletionOptions, ConfigError, Engine, EngineError, FinishReason, GroupAttention, Logprobs,
    LongContext, MAX_DRAFT,
};
use kv_core::memory::Memory;
use kv_cpu::CpuBackend;

use crate::service::models::{Case, Generated, last_counters, preempting, stories};
use crate::support::text::Writer;

const N_SNAPSHOTS: u32 = 6;

fn engine(case: &Case, n_seqs: u32, n_ctx: u32) -> Engine<CpuBackend> {
    case.engine_with_snapshots(n_seqs, n_ctx, N_SNAPSHOTS)
}

/// Leaves a text three tokens to choose from, so that it repeats itself whatever the weights are.
#[derive(Debug)]
struct FewTokens;

impl Step for FewTokens {
    fn apply(&mut self, candidates: &mut Candidates<'_>) {
        candidates.retain(|candidate| (10..13).contains(&candidate.token.0));
    }
}

fn steps(case: &Case) -> Vec<Box<dyn Step>> {
    if case.name.starts_with("stories") {
        Vec::new()
    } else {
        vec![Box::new(FewTokens)]
    }
}

/// A request whose text tends to repeat itself, greedy and drawn.
fn request(case: &Case, number: u64) -> TextRequest {
    let mut request = case.request(number);
    request.options.n_predict = Some(30 + number as usize * 7 % 40);
    request.steps = steps(case);
    if number % 4 == 1 {
        request.options.sampler.temperature = 0.3;
    }
    request
}

fn with_lookup(request: TextRequest, n_max: usize) -> TextRequest {
    TextRequest {
        speculation: Speculation::Lookup { n_max },
        ..request
    }
}

/// A text with what it took, on an engine to itself.
fn generate(
    case: &Case,
    engine: Engine<CpuBackend>,
    request: TextRequest,
) -> (Generated, Speculated, Vec<f64>) {
    let prompt = request.prompt.clone();
    let mut request = TextRequest {
        retention: Retention::Park,
        ..request
    };
    request.options.logprobs = Logprobs::Top(0);
    let text = Writer::new(engine, &case.tokenizer, request).unwrap();
    let mut text = text.finish();
    // What is there at the end is the text, perhaps but its last token.
    let known = text.session.parked(&text.stream).unwrap();
    let held = text.session.engine().memory().next_pos(known.seq);
    assert_eq!(held.as_usize(), known.evaluated.len());
    assert_eq!(
        [known.evaluated, known.pending].concat(),
        [&prompt[..], &text.tokens].concat()
    );
    let logprobs = text.logprobs.iter().map(|place| place.chosen.logprob);
    let generated = Generated {
        text: text.text.clone(),
        tokens: text.tokens.clone(),
        finish: text.finish_reason(),
    };
    (generated, text.usage().speculated, logprobs.collect())
}

fn serve(case: &Case, config: &ServiceConfig, requests: Vec<TextRequest>) -> Vec<Generated> {
    let service = Service::start(engine(case, 4, 220), &case.tokenizer, config).unwrap();
    assert!(service.draft_limit().unwrap() >= N_SNAPSHOTS as usize);
    let submit = |request| service.submit(request).unwrap();
    let streams: Vec<TextStream> = requests.into_iter().map(submit).collect();
    let (mut n_drafted, mut n_accepted) = (0, 0);
    let texts = streams.into_iter().map(|stream| {
        let end = stream.finish().unwrap();
        let Speculated {
            n_drafted: drafted,
            n_accepted: accepted,
            off,
            ..
        } = end.usage.speculated;
        assert_eq!(off, None);
        assert!(accepted <= end.tokens.len());
        n_drafted += drafted;
        n_accepted += accepted;
        Generated::from(end)
    });
    let texts = texts.collect();
    let counters = last_counters(&service);
    assert!(n_drafted > 0, "nothing was drafted");
    assert_eq!(n_drafted as u64, counters.n_drafted_tokens);
    assert_eq!(n_accepted as u64, counters.n_accepted_tokens);
    let engine = service.stop().unwrap();
    assert_eq!(engine.memory().n_used(), 0, "cells are in use");
    texts
}

/// With preemptions forced every 1, 3 and 17 steps, drafts of all lengths.
fn check(case: &Case) {
    let n = 8;
    let alone = || engine(case, 1, 220);
    let plain: Vec<(Generated, Speculated, Vec<f64>)> = (0..n)
        .map(|number| generate(case, alone(), request(case, number)))
        .collect();
    let mut n_accepted = 0;
    for (number, plain) in plain.iter().enumerate() {
        let n_max = [1, 4, MAX_DRAFT][number % 3];
        let request = with_lookup(request(case, number as u64), n_max);
        let (text, speculated, logprobs) = generate(case, alone(), request);
        assert_eq!((&text, &logprobs), (&plain.0, &plain.2), "{number}");
        assert!(speculated.n_accepted <= speculated.n_drafted);
        n_accepted += speculated.n_accepted;
    }
    assert!(n_accepted > 0, "no draft was ever right");
    for every in [0, 1, 3, 17] {
        let config = preempting(every);
        let requests = (0..n).map(|number| with_lookup(request(case, number), 8));
        let together = serve(case, &config, requests.collect());
        for (number, (together, plain)) in together.iter().zip(&plain).enumerate() {
            let name = case.name;
            assert_eq!(
                together, &plain.0,
                "{name}: request {number}, every {every}"
            );
        }
    }
}

for_each_memory!(check);

/// A text that loops takes a fraction of the steps.
#[test]
fn a_text_that_repeats_itself_takes_fewer_steps() {
    let case = stories("stories-llama");
    let steps = |speculation| {
        let service = case.service_on(engine(&case, 1, 512));
        let request = TextRequest {
            options: CompletionOptions {
                sampler: SamplerConfig::greedy(),
                n_predict: Some(200),
                ..CompletionOptions::default()
            },
            speculation,
            ..case.request(0)
        };
        let end = service.submit(request).unwrap().finish().unwrap();
        (end.tokens, service.counters().n_steps)
    };
    let (plain, n_plain) = steps(Speculation::Off);
    let (tokens, n_steps) = steps(Speculation::LOOKUP);
    assert_eq!(tokens, plain);
    assert!(n_steps < n_plain, "{n_steps} steps instead of {n_plain}");
}

/// A stop token ends a text where it ends it without drafts, also where it was drafted itself.
#[test]
fn a_stop_token_ends_a_text_with_drafts_too() {
    let case = stories("stories-llama");
    let alone = || engine(&case, 1, 220);
    for number in 0..6 {
        let (whole, ..) = generate(&case, alone(), request(&case, number));
        let n = whole.tokens.len();
        let token = whole.tokens[n * 3 / 4];
        let stopping = || {
            let mut request = request(&case, number);
            request.options.stop_tokens = vec![token];
            request
        };
        let (plain, ..) = generate(&case, alone(), stopping());
        assert_eq!(plain.finish, FinishReason::StopToken { token });
        assert!(plain.tokens.len() < n && whole.tokens.starts_with(&plain.tokens));
        let drafted = || with_lookup(stopping(), 8);
        assert_eq!(generate(&case, alone(), drafted()).0, plain, "{number}");
        let service = case.service_on(engine(&case, 1, 220));
        let end = service.submit(drafted()).unwrap().finish().unwrap();
        assert_eq!(Generated::from(end), plain, "{number}");
    }
}

#[test]
fn the_context_is_used_to_its_last_token() {
    let case = stories("stories-llama");
    let full = |speculation| {
        let mut request = case.request(0);
        request.options.n_predict = None;
        request.options.sampler = SamplerConfig::greedy();
        // Loops, and never ends.
        request.options.sampler.min_tokens = 1000;
        request.speculation = speculation;
        generate(&case, engine(&case, 1, 60), request).0
    };
    let plain = full(Speculation::Off);
    assert_eq!(plain.finish, FinishReason::ContextFull);
    assert_eq!(full(Speculation::LOOKUP), plain);
}

#[test]
fn where_nothing_can_be_taken_back_the_usage_has_the_reason() {
    let case = stories("stories-mamba");
    let off = Some(SpeculationOff::NothingTakenBack);
    let request = || with_lookup(case.request(0), 8);
    let (_, speculated, _) = generate(&case, case.engine(1, 200), request());
    assert_eq!((speculated.n_drafted, speculated.off), (0, off));
    let service = case.service_on(case.engine(1, 200));
    assert_eq!(service.draft_limit().err(), off);
    let end = service.submit(request()).unwrap().finish().unwrap();
    assert_eq!(end.usage.speculated.off, off);
    let end = service.submit(case.request(0)).unwrap().finish().unwrap();
    assert_eq!(end.usage.speculated, Speculated::default());

    let case = stories("stories-llama");
    let request = TextRequest {
        speculation: Speculation::LOOKUP,
        long_context: Some(LongContext::Group(GroupAttention::new(2, 32).unwrap())),
        ..case.request(0)
    };
    let text = Writer::new(case.engine(1, 200), &case.tokenizer, request).unwrap();
    let off = Some(SpeculationOff::SharedPositions);
    assert_eq!(text.usage().speculated.off, off);
}

#[test]
fn impossible_drafts_are_refused_with_the_range() {
    let case = stories("stories-llama");
    let service = case.service_on(case.engine(1, 200));
    for n_max in [0, MAX_DRAFT + 1] {
        let refused = service.submit(with_lookup(case.request(0), n_max)).err();
        let Some(ServiceError::Engine(why)) = refused else {
            panic!("{refused:?}");
        };
        let is_range = matches!(
            *why,
            EngineError::Config(ConfigError::OutOfRange { name: "draft_max", got, max: MAX_DRAFT })
                if got == n_max
        );
        assert!(is_range, "{why:?}");
    }
}
