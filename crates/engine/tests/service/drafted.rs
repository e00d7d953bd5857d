//! A service with a draft model: texts are those without, whatever runs with them and however short
//! either memory is.

use std::time::{Duration, Instant};

use cellar_engine::serve::{
    Service, ServiceConfig, ServiceExtras, Speculated, Speculation, SpeculationOff, TextRequest,
    TextStream,
};
use cellar_engine::{DraftModel, Engine};
use kv_cpu::CpuBackend;

use crate::service::draft_model::{N_MAX, draft_model_for};
use crate::service::models::{
    Case, Generated, last_counters, preempting, stories, tiny, with_old_rows,
};

/// Requests of a service.
const N: u64 = 8;

fn engine(case: &Case, n_seqs: u32, n_ctx: u32) -> Engine<CpuBackend> {
    case.engine_with_snapshots(n_seqs, n_ctx, N_MAX as u32)
}

fn start(
    case: &Case,
    engine: Engine<CpuBackend>,
    config: &ServiceConfig,
    model: Option<&DraftModel>,
) -> Service<CpuBackend> {
    let extras = ServiceExtras {
        draft_model: model.cloned(),
        ..ServiceExtras::default()
    };
    Service::start_with(engine, &case.tokenizer, config, extras).unwrap()
}

/// A request of a text that is long enough to be drafted for, greedy or at 0.8.
fn request(case: &Case, number: u64) -> TextRequest {
    let mut request = case.request(number);
    request.options.n_predict = Some(24 + number as usize * 7 % 30);
    request.speculation = Speculation::Draft { n_max: N_MAX };
    request
}

fn alone(case: &Case, n_ctx: u32) -> Vec<Generated> {
    let mut engine = engine(case, 1, n_ctx);
    let alone = (0..N).map(|number| case.alone_on(&mut engine, &request(case, number)));
    alone.collect()
}

/// The texts of a service, and what was drafted.
fn serve(case: &Case, service: Service<CpuBackend>) -> (Vec<Generated>, Speculated) {
    let submit = |number| service.submit(request(case, number)).unwrap();
    let streams: Vec<TextStream> = (0..N).map(submit).collect();
    let mut sum = Speculated::default();
    let texts = streams.into_iter().map(|stream| {
        let end = stream.finish().unwrap();
        sum.n_drafted += end.usage.speculated.n_drafted;
        sum.n_accepted += end.usage.speculated.n_accepted;
        sum.off = sum.off.or(end.usage.speculated.off);
        Generated::from(end)
    });
    let texts = texts.collect();
    let counters = last_counters(&service);
    assert_eq!(sum.n_drafted as u64, counters.n_drafted_tokens);
    assert_eq!(sum.n_accepted as u64, counters.n_accepted_tokens);
    let model = service.draft_model().cloned();
    let engine = service.stop().unwrap();
    assert_eq!(engine.memory().n_used(), 0, "cells are in use");
    assert_eq!(
        model.unwrap().n_texts(),
        0,
        "sequences of the draft model are in use"
    );
    (texts, sum)
}

/// With preemptions forced every 1, 3 and 17 steps, with and without reuse, drafted by the model
/// itself and by another.
fn check(target: &Case, drafts: &[&Case]) {
    let alone = alone(target, 220);
    for (number, draft) in drafts.iter().enumerate() {
        // Drafts of another model are seldom right, which is tried once.
        let every: &[u32] = match number {
            0 => &[0, 1, 3, 17],
            _ => &[3],
        };
        for &every in every {
            let config = preempting(every);
            let model = draft_model_for(draft, target, 4, 400);
            let service = start(target, engine(target, 4, 220), &config, Some(&model));
            let (texts, speculated) = serve(target, service);
            let name = format!("{} for {}, every {every}", draft.name, target.name);
            assert_eq!(texts, alone, "{name}");
            assert_eq!(speculated.off, None, "{name}");
            assert!(speculated.n_accepted > 0, "{name}: {speculated:?}");
        }
    }
}

#[test]
fn texts_are_the_same_with_full_attention() {
    let target = stories("stories-llama");
    check(&target, &[&target, &stories("stories-mamba")]);
}

#[test]
fn texts_are_the_same_with_windows() {
    let target = stories("stories-gemma3");
    check(&target, &[&target, &stories("stories-llama")]);
}

#[test]
fn texts_are_the_same_with_old_rows() {
    let target = with_old_rows(stories("stories-llama"));
    check(&target, &[&target, &stories("stories-mamba")]);
}

#[test]
fn texts_are_the_same_with_states() {
    let target = stories("stories-mamba");
    check(&target, &[&target, &stories("stories-gemma3")]);
}

#[test]
fn texts_are_the_same_with_a_hybrid() {
    let target = tiny("jamba");
    check(&target, &[&target]);
}

/// Either memory holds less than all texts together; a draft model may also have fewer sequences.
#[test]
fn where_memory_is_short_drafts_give_way_and_texts_do_not() {
    for case in ["stories-llama", "stories-gemma3", "stories-mamba"].map(stories) {
        let alone = alone(&case, 90);
        for (n_ctx, n_texts, n_draft_ctx) in
            [(90, 4, 400), (400, 4, 100), (400, 2, 400), (90, 3, 95)]
        {
            let config = ServiceConfig {
                headroom: 1,
                ..ServiceConfig::default()
            };
            let model = draft_model_for(&case, &case, n_texts, n_draft_ctx);
            let service = start(&case, engine(&case, 4, n_ctx), &config, Some(&model));
            let (texts, speculated) = serve(&case, service);
            let name = format!("{}: {n_ctx}, {n_texts} texts of {n_draft_ctx}", case.name);
            assert_eq!(texts, alone, "{name}");
            assert!(speculated.n_accepted > 0, "{name}: {speculated:?}");
        }
    }
}

/// A text that gets longer than what the draft model remembers goes on without it.
#[test]
fn texts_longer_than_the_draft_models_memory_say_so() {
    let case = stories("stories-llama");
    let model = draft_model_for(&case, &case, 4, 20);
    let config = ServiceConfig::default();
    let service = start(&case, engine(&case, 4, 400), &config, Some(&model));
    let (texts, speculated) = serve(&case, service);
    assert_eq!(texts, alone(&case, 400));
    let full = SpeculationOff::DraftModelFull { n_ctx: 20 };
    assert_eq!(speculated.off, Some(full));
}

/// Requests choose how they are drafted for.
#[test]
fn each_request_chooses() {
    let case = stories("stories-llama");
    let config = ServiceConfig::default();
    let ask = |service: &Service<CpuBackend>, speculation| {
        let request = TextRequest {
            speculation,
            ..request(&case, 2)
        };
        let end = service.submit(request).unwrap().finish().unwrap();
        (end.tokens, end.usage.speculated)
    };
    let draft = Speculation::Draft { n_max: N_MAX };
    let model = draft_model_for(&case, &case, 4, 400);
    let service = start(&case, engine(&case, 4, 400), &config, Some(&model));
    let (plain, of_plain) = ask(&service, Speculation::Off);
    assert_eq!(of_plain, Speculated::default());
    let (tokens, of_draft) = ask(&service, draft);
    assert_eq!(tokens, plain);
    assert!(
        of_draft.n_accepted > 8 && of_draft.off.is_none(),
        "{of_draft:?}"
    );
    let (tokens, _) = ask(&service, Speculation::LOOKUP);
    assert_eq!(tokens, plain);
    // Fewer steps than tokens.
    let n_before = service.counters().n_steps;
    ask(&service, draft);
    let n_steps = service.counters().n_steps - n_before;
    assert!(
        n_steps < plain.len() as u64 / 2,
        "{n_steps} steps of {} tokens",
        plain.len()
    );

    let without = start(&case, engine(&case, 4, 400), &config, None);
    let (tokens, speculated) = ask(&without, draft);
    assert_eq!(tokens, plain);
    assert_eq!(speculated.off, Some(SpeculationOff::NoDraftModel));
}

#[test]
fn a_request_that_is_cancelled_gives_its_sequence_back() {
    let case = stories("stories-llama");
    let model = draft_model_for(&case, &case, 4, 400);
    let config = ServiceConfig::default();
    let service = start(&case, engine(&case, 4, 400), &config, Some(&model));
    let mut endless = request(&case, 2);
    endless.options.n_predict = None;
    endless.options.sampler.min_tokens = 390;
    let mut streams = Vec::new();
    for _ in 0..3 {
        let mut stream = service.submit(endless_copy(&endless)).unwrap();
        stream.next_piece().unwrap();
        stream.next_piece().unwrap();
        streams.push(stream);
    }
    drop(streams);
    let until = Instant::now() + Duration::from_secs(30);
    while model.n_texts() > 0 {
        assert!(Instant::now() < until, "sequences are in use");
        std::thread::sleep(Duration::from_millis(5));
    }
    let end = service.submit(request(&case, 2)).unwrap().finish().unwrap();
    let mut engine = engine(&case, 1, 400);
    assert_eq!(
        end.tokens,
        case.alone_on(&mut engine, &request(&case, 2)).tokens
    );
}

fn endless_copy(request: &TextRequest) -> TextRequest {
    TextRequest {
        prompt: request.prompt.clone(),
        options: request.options.clone(),
        speculation: request.speculation,
        ..TextRequest::default()
    }
}
