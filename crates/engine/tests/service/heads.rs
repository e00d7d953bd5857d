//! Heads that draft change no text: what a model with its head gives is what it gives without,
//! whatever runs with it.

use std::path::Path;
use std::sync::Arc;

use cellar_engine::serve::{
    DraftCostSource, Service, ServiceConfig, Speculated, Speculation, SpeculationOff, TextRequest,
    TextStream,
};
use cellar_engine::session::{Retention, Session};
use cellar_engine::{Engine, EngineError, SaveOptions};
use kv_backend::state::SavedState;
use kv_core::SeqId;
use kv_core::memory::{RestoreInto, Seqs};
use kv_cpu::CpuBackend;
use kv_graph::weights::WeightSource;
use model_core::architecture::{Model, with_draft_head};
use model_tests::Recipe;
use model_tests::heads::own_head;

use crate::service::models::{
    Case, Generated, last_counters, of_recipe, preempting, registry, stories, stories_head,
};

/// Requests of a service.
const N: u64 = 16;

const N_SNAPSHOTS: u32 = 4;

const HEAD: Speculation = Speculation::Head { n_max: 6 };

fn engine(case: &Case, n_seqs: u32, n_ctx: u32) -> Engine<CpuBackend> {
    case.engine_with_snapshots(n_seqs, n_ctx, N_SNAPSHOTS)
}

/// A model of random weights, without its head.
fn tiny(name: &str) -> Case {
    of_recipe(&Recipe::open(&model_tests::fixture("heads").join(name)))
}

/// The same model with its head.
fn headed(case: &Case) -> Case {
    let model = with_draft_head(&*case.model, &*case.weights).unwrap();
    with_model(case, model.unwrap(), case.weights.clone())
}

fn with_model(case: &Case, model: Arc<dyn Model>, weights: Arc<dyn WeightSource>) -> Case {
    Case {
        name: case.name,
        model,
        weights,
        tokenizer: case.tokenizer.clone(),
        kv_types: case.kv_types.clone(),
    }
}

/// A model of random weights, without and with a head that is a file of its own.
fn with_own_head(model: &str, head: &str, folder: &Path) -> [Case; 2] {
    let case = of_recipe(&Recipe::named(model));
    let recipe = Recipe::open(&model_tests::fixture("heads").join(head));
    let own = own_head(&recipe, &folder.join(head), &registry());
    let joined = own.join(&*case.model, case.weights.clone(), &registry());
    let joined = joined.unwrap();
    let with = with_model(&case, joined.model, joined.weights);
    [case, with]
}

/// Models without and with a head: trained with it, of full attention, a hybrid, one whose head is
/// a file of its own, and one whose head attends over its rows.
fn all(folder: &Path) -> [[Case; 2]; 5] {
    let [trained, full, hybrid] = [stories_head(), tiny("glm4_moe"), tiny("qwen3_5")].map(|case| {
        let with = headed(&case);
        [case, with]
    });
    let own = with_own_head("llama_gqa_untied", "eagle3", folder);
    let sharing = with_own_head("gemma4_e", "gemma4_assistant", folder);
    [trained, full, hybrid, own, sharing]
}

/// A request of a text that is long enough to be drafted for, greedy or at 0.8.
fn request(case: &Case, number: u64, speculation: Speculation) -> TextRequest {
    let mut request = case.request(number);
    request.options.n_predict = Some(24 + number as usize * 7 % 30);
    request.speculation = speculation;
    request
}

fn alone(case: &Case) -> Vec<Generated> {
    let mut engine = engine(case, 1, 220);
    let alone = |number| case.alone_on(&mut engine, &request(case, number, Speculation::Off));
    (0..N).map(alone).collect()
}

/// The texts of a service, and what was drafted.
fn serve(
    case: &Case,
    config: &ServiceConfig,
    speculation: Speculation,
) -> (Vec<Generated>, Speculated) {
    let service = Service::start(engine(case, 4, 220), &case.tokenizer, config).unwrap();
    let submit = |number| service.submit(request(case, number, speculation)).unwrap();
    let streams: Vec<TextStream> = (0..N).map(submit).collect();
    let mut sum = Speculated::default();
    let texts = streams.into_iter().map(|stream| {
        let end = stream.finish().unwrap();
        sum.n_drafted += end.usage.speculated.n_drafted;
        sum.n_accepted += end.usage.speculated.n_accepted;
        Generated::from(end)
    });
    let texts = texts.collect();
    let counters = last_counters(&service);
    assert_eq!(sum.n_drafted as u64, counters.n_drafted_tokens);
    assert_eq!(sum.n_accepted as u64, counters.n_accepted_tokens);
    let engine = service.stop().unwrap();
    assert_eq!(engine.memory().n_used(), 0, "cells are in use");
    (texts, sum)
}

/// 16 requests at once, with preemptions forced every 1, 3 and 17 steps, with and without reuse.
/// Gives the drafts where measured times decide nothing: the same on every machine.
fn check(case: &Case) -> Speculated {
    check_with(case, &headed(case))
}

fn check_with(without: &Case, case: &Case) -> Speculated {
    let alone = alone(without);
    let mut sum = Speculated::default();
    let auto = Speculation::Auto { n_max: 8 };
    for (every, speculation, draft_costs) in [
        (0, HEAD, DraftCostSource::Usual),
        (1, HEAD, DraftCostSource::Usual),
        (3, HEAD, DraftCostSource::Measured),
        (17, auto, DraftCostSource::Measured),
    ] {
        let config = ServiceConfig {
            draft_costs,
            ..preempting(every)
        };
        let (texts, speculated) = serve(case, &config, speculation);
        assert_eq!(texts, alone, "{}, every {every}", case.name);
        assert!(speculated.n_drafted > 0, "{}, every {every}", case.name);
        if draft_costs == DraftCostSource::Measured {
            continue;
        }
        sum.n_drafted += speculated.n_drafted;
        sum.n_accepted += speculated.n_accepted;
    }
    sum
}

#[test]
fn texts_are_the_same_with_full_attention() {
    check(&tiny("glm4_moe"));
}

#[test]
fn texts_are_the_same_with_latents() {
    check(&tiny("deepseek_v3"));
    check(&tiny("deepseek_v32"));
}

#[test]
fn texts_are_the_same_with_a_hybrid() {
    check(&tiny("qwen3_5"));
    check(&tiny("qwen3_5_moe"));
}

#[test]
fn texts_are_the_same_with_heads_of_other_files() {
    let folder = tempfile::tempdir().unwrap();
    for head in ["eagle3", "eagle3_normed"] {
        let [without, with] = with_own_head("llama_gqa_untied", head, folder.path());
        check_with(&without, &with);
    }
}

/// Their windows are shorter than the texts.
#[test]
fn texts_are_the_same_with_assistants() {
    let folder = tempfile::tempdir().unwrap();
    for head in ["gemma4_assistant", "gemma4_assistant_ordered"] {
        let [without, with] = with_own_head("gemma4_e", head, folder.path());
        check_with(&without, &with);
    }
}

/// The head was trained with its model: most of its tokens are right.
#[test]
fn a_trained_head_is_mostly_right() {
    let case = stories_head();
    let Speculated {
        n_drafted,
        n_accepted,
        ..
    } = check(&case);
    assert!(
        n_accepted * 3 > n_drafted,
        "{n_accepted} of {n_drafted} drafted tokens were right"
    );
}

/// One after the other, so that each finds what those before left.
#[test]
fn cached_prefixes_are_found_with_and_without_heads() {
    let folder = tempfile::tempdir().unwrap();
    for [case, with] in all(folder.path()) {
        let ask = |case: &Case, speculation| {
            let config = ServiceConfig::default();
            let service = Service::start(engine(case, 4, 400), &case.tokenizer, &config).unwrap();
            let ask = |number: u64| {
                let mut asked = request(case, 2, speculation);
                let more = request(case, 3 + number / 2, speculation).prompt;
                asked.prompt.extend(more);
                let end = service.submit(asked).unwrap().finish().unwrap();
                (end.usage.reuse.unwrap().n_tokens, end.tokens)
            };
            (0..6).map(ask).collect::<Vec<_>>()
        };
        let plain = ask(&case, Speculation::Off);
        assert!(plain.iter().any(|(n_reused, _)| *n_reused > 0));
        assert_eq!(ask(&with, HEAD), plain, "{}", case.name);
    }
}

/// The text of a prompt that is stopped after some tokens and goes on.
#[test]
fn a_text_that_is_cancelled_and_resumed_is_the_same() {
    let folder = tempfile::tempdir().unwrap();
    for [case, with] in all(folder.path()) {
        for number in [2, 3] {
            let alone = {
                let asked = request(&case, number, Speculation::Off);
                case.alone_on(&mut engine(&case, 1, 220), &asked)
            };
            let config = ServiceConfig::default();
            let mut session =
                Session::new(engine(&with, 2, 220), &with.tokenizer, &config).unwrap();
            let asked = TextRequest {
                retention: Retention::Park,
                ..request(&with, number, HEAD)
            };
            let mut stream = session.submit(asked).unwrap();
            for _ in 0..3 {
                for _ in 0..4 {
                    session.step();
                }
                session.pause_all();
                if session.resume(&mut stream, Vec::new()).is_err() {
                    break; // it is complete
                }
            }
            while session.next_piece(&mut stream).unwrap().is_some() {}
            let tokens = stream.finish().unwrap().tokens;
            assert_eq!(tokens, alone.tokens, "{}, {number}", case.name);
        }
    }
}

/// A state that was saved in the middle of a text, by an engine with a head, goes on in another; it
/// is not that of an engine without.
#[test]
fn states_are_of_the_model_with_its_head() {
    let folder = tempfile::tempdir().unwrap();
    for [case, with] in all(folder.path()) {
        let prompt = case.request(2).prompt;
        let (start, rest) = prompt.split_at(prompt.len() / 2);
        let mut engines = [(); 2].map(|()| engine(&with, 1, 220));
        let feed = |engine: &mut Engine<CpuBackend>, tokens: &[kv_core::TokenId]| {
            let batch = kv_core::batch::Batch::prompt(SeqId(0), tokens.iter().copied());
            engine.decode(&batch).unwrap().last().unwrap().to_vec()
        };
        let [first, second] = &mut engines;
        feed(first, start);
        let mut bytes = Vec::new();
        let options = SaveOptions {
            seqs: Seqs::One(SeqId(0)),
            tokens: &[],
            kv_type: None,
            state_type: None,
        };
        first.save_state(&options, &mut bytes).unwrap();
        let state = SavedState::parse(&bytes).unwrap();
        second.restore_state(&state, RestoreInto::All).unwrap();
        let wanted = feed(&mut engine(&case, 1, 220), &prompt);
        assert_eq!(feed(second, rest), wanted, "{}", case.name);
        let refused = engine(&case, 1, 220).restore_state(&state, RestoreInto::All);
        assert!(
            matches!(refused, Err(EngineError::State(_))),
            "{}",
            case.name
        );
    }
}

#[test]
fn without_a_head_that_says_so() {
    let case = stories("stories-llama");
    let config = ServiceConfig::default();
    let service = Service::start(engine(&case, 2, 220), &case.tokenizer, &config).unwrap();
    let ask = |speculation| {
        let end = service.submit(request(&case, 2, speculation)).unwrap();
        end.finish().unwrap().usage.speculated
    };
    assert_eq!(ask(HEAD).off, Some(SpeculationOff::NoHead));
    assert_eq!(ask(Speculation::Auto { n_max: 4 }), Speculated::default());
}
