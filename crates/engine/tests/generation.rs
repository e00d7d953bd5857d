//! Generated text against an independent implementation's, every way to end, and texts that go on.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use std::num::NonZeroU32;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use crate::support::text::{Writer, greedy, with_step};
use crate::support::{Moody, engine, ids, references, stories};
use cellar_engine::sampler::{Candidates, SamplerConfig, Step, TokenOrigin};
use cellar_engine::session::{
    Activity, PromptProgress, RequestError, Retention, ServiceConfig, ServiceError, Session,
    TextRequest,
};
use cellar_engine::{
    CancelFlag, Completion, CompletionOptions, EngineConfig, EngineError, FinishReason, SaveOptions,
};
use kv_backend::state::SavedState;
use kv_core::{
    SeqId, TokenId,
    memory::{Memory, Seqs, Streams},
};
use kv_rows::{KvType, KvTypes};
use model_core::tokenizer::EncodeOptions;

/// A text on an engine of its own.
fn begin(config: &EngineConfig, request: TextRequest) -> Writer<Moody> {
    Writer::new(engine(config), stories().tokenizer(), request).unwrap()
}

struct Told {
    text: String,
    tokens: Vec<u32>,
    finish: FinishReason,
}

fn prompt(text: &str) -> Vec<TokenId> {
    stories().tokenizer().encode(text, EncodeOptions::PROMPT)
}

fn tell(config: &EngineConfig, request: TextRequest) -> Told {
    let mut told = begin(config, request).finish();
    assert_eq!(told.next().unwrap(), None, "nothing after the end");
    Told {
        text: told.text.clone(),
        tokens: told.tokens.iter().map(|t| t.0).collect(),
        finish: told.finish_reason(),
    }
}

fn f32_config() -> EngineConfig {
    EngineConfig {
        kv_types: KvTypes::from(KvType::F32),
        ..EngineConfig::default()
    }
}

#[test]
fn greedy_text_is_the_reference_s() {
    for (reference, n_ubatch) in references().iter().zip([1, 7, 512]) {
        for streams in [Streams::Shared, Streams::PerSequence] {
            let config = EngineConfig {
                n_ubatch,
                streams,
                ..f32_config()
            };
            let request = greedy(prompt(&reference.prompt), reference.greedy_ids.len());
            let told = tell(&config, request);
            assert_eq!(told.text, reference.continuation);
            assert_eq!(told.tokens, reference.greedy_ids);
            assert_eq!(told.finish, FinishReason::Length);
        }
    }
}

/// Texts are the same whether the graph finds the candidates or rows of logits come back.
#[test]
fn candidates_of_the_graph_give_the_same_text() {
    let tell = |sampler: SamplerConfig, prefers_candidates: bool| {
        let engine = engine(&EngineConfig::default());
        let prefers = &engine.backend().prefers_candidates;
        prefers.store(prefers_candidates, Ordering::Relaxed);
        let mut request = greedy(prompt("Once upon a time"), 24);
        request.options.sampler = sampler;
        let told = Writer::new(engine, stories().tokenizer(), request).unwrap();
        let told = told.finish();
        let found = told.session.engine().last_candidates().is_some();
        (told.tokens, found)
    };
    let seeded = SamplerConfig {
        seed: 5,
        ..SamplerConfig::default()
    };
    let mut penalized = seeded.clone();
    penalized.penalties.repeat = 1.3;
    let all = SamplerConfig {
        top_k: None,
        ..seeded.clone()
    };
    for (config, finds) in [
        (SamplerConfig::greedy(), true),
        (seeded, true),
        (penalized, true),
        (all, false),
    ] {
        let (whole, found) = tell(config.clone(), false);
        assert!(!found);
        assert_eq!(tell(config.clone(), true), (whole, finds), "{config:?}");
    }
}

#[test]
fn a_seed_tells_the_same_story() {
    let story = |seed| {
        let mut request = greedy(prompt("Once"), 30);
        request.options.sampler = SamplerConfig {
            seed,
            ..SamplerConfig::default()
        };
        tell(&EngineConfig::default(), request).text
    };
    assert_eq!(story(1), story(1));
    assert_ne!(story(1), story(2));
}

#[test]
fn a_stop_string_ends_the_text_before_it() {
    let mut request = greedy(prompt("Once upon a time"), 50);
    request.options.stop = vec!["nobody".into(), "Lily. S".into()];
    let told = tell(&EngineConfig::default(), request);
    assert_eq!(told.text, ", there was a little girl named ");
    assert_eq!(
        told.finish,
        FinishReason::StopString {
            text: "Lily. S".into()
        }
    );
}

#[test]
fn held_text_is_released_at_the_end() {
    let mut request = greedy(prompt("Once upon a time"), 7);
    request.options.stop = vec!["named Bob".into()];
    let told = tell(&EngineConfig::default(), request);
    assert_eq!(told.finish, FinishReason::Length);
    assert_eq!(told.text, ", there was a little girl named");
}

#[test]
fn the_context_can_be_filled_to_its_last_cell() {
    let config = EngineConfig {
        n_ctx: Some(12),
        ..EngineConfig::default()
    };
    let told = tell(&config, greedy(prompt("Once upon a time"), 100));
    assert_eq!(told.finish, FinishReason::ContextFull);
    // Five tokens of prompt and seven more fill 12 cells; the last one's logits choose an eighth.
    assert_eq!(told.tokens, references()[0].greedy_ids[..8]);
}

#[test]
fn the_model_can_end_its_story() {
    let request = greedy(prompt("Once upon a time"), 500);
    let told = tell(&EngineConfig::default(), request);
    let FinishReason::EndOfGeneration { token } = told.finish else {
        panic!("{:?}", told.finish);
    };
    assert!(stories().tokenizer().is_end_of_generation(token));
    assert!(!told.tokens.contains(&token.0));
}

#[test]
fn nothing_to_predict_is_fine() {
    let told = tell(
        &EngineConfig::default(),
        greedy(prompt("Once upon a time"), 0),
    );
    assert_eq!(
        (told.text.as_str(), told.finish),
        ("", FinishReason::Length)
    );
}

fn ubatches_of_2() -> EngineConfig {
    EngineConfig {
        n_ubatch: 2,
        ..EngineConfig::default()
    }
}

fn progress(n_done: usize) -> PromptProgress {
    PromptProgress {
        n_done,
        n_tokens: references()[0].ids.len(),
        n_reused: 0,
    }
}

#[test]
fn cancelling_ends_prompt_and_text() {
    let cancel = CancelFlag::default();
    let request = TextRequest {
        cancel: Some(cancel.clone()),
        ..greedy(ids(&references()[0].ids), 5)
    };
    let mut text = begin(&ubatches_of_2(), request);
    let mut seen = Vec::new();
    text.read_prompt(|progress| {
        seen.push(progress);
        if progress.n_done == 4 {
            cancel.cancel();
        }
    });
    assert_eq!(seen, [2, 4].map(progress));
    assert_eq!(text.next().unwrap(), None);
    assert_eq!(text.finish_reason(), FinishReason::Cancelled);
    assert_eq!(text.usage().timings().prompt.n_tokens, 4);
}

#[test]
fn a_cancelled_text_goes_on_once_the_flag_is_reset() {
    let reference = &references()[0];
    let cancel = CancelFlag::default();
    let mut request = TextRequest {
        cancel: Some(cancel.clone()),
        ..greedy(ids(&reference.ids), reference.greedy_ids.len())
    };
    request.options.stop = vec!["named Bob".into()];
    let mut text = begin(&EngineConfig::default(), request);
    // Token by token, with a cancelled call between any two: also where text is held back.
    loop {
        cancel.cancel();
        while text.next().unwrap().is_some() {}
        if text.finish_reason() != FinishReason::Cancelled {
            break;
        }
        cancel.reset();
        text.session.resume(&mut text.stream, Vec::new()).unwrap();
        assert_eq!(text.stream.finish_reason(), None);
        if text.next().unwrap().is_none() {
            break;
        }
    }
    assert_eq!(text.text, reference.continuation);
    assert_eq!(text.tokens, ids(&reference.greedy_ids));
    assert_eq!(text.finish_reason(), FinishReason::Length);
    // Nothing of it was computed again.
    let counters = text.session.scheduler().counters();
    let n_computed = reference.ids.len() + reference.greedy_ids.len() - 1;
    assert_eq!(counters.n_tokens, n_computed as u64);
}

#[test]
fn texts_take_turns_on_one_session() {
    let references = references();
    let config = EngineConfig {
        n_seqs: 2,
        ..f32_config()
    };
    let tokenizer = stories().tokenizer().clone();
    let mut session = Session::new(engine(&config), &tokenizer, &ServiceConfig::default()).unwrap();
    let mut streams: Vec<_> = references[..2]
        .iter()
        .map(|reference| {
            let n = reference.greedy_ids.len();
            session.submit(greedy(ids(&reference.ids), n)).unwrap()
        })
        .collect();
    let mut texts = vec![String::new(); 2];
    let mut n_live = 2;
    while n_live > 0 {
        n_live = 0;
        for (stream, text) in streams.iter_mut().zip(&mut texts) {
            if let Some(piece) = session.next_piece(stream).unwrap() {
                *text += &piece;
                n_live += 1;
            }
        }
    }
    for (text, reference) in texts.iter().zip(&references) {
        assert_eq!(*text, reference.continuation);
    }
}

/// More texts than sequences: each goes on when it is asked for, as if it were alone.
#[test]
fn texts_make_way_for_each_other() {
    let references = references();
    let tokenizer = stories().tokenizer().clone();
    let config = ServiceConfig::default();
    let mut session = Session::new(engine(&f32_config()), &tokenizer, &config).unwrap();
    let mut texts: Vec<_> = references[..2]
        .iter()
        .map(|reference| {
            let request = greedy(ids(&reference.ids), reference.greedy_ids.len());
            (session.submit(request).unwrap(), Vec::new())
        })
        .collect();
    let mut n_live = 2;
    while n_live > 0 {
        n_live = 0;
        for (stream, tokens) in &mut texts {
            let is_paused = stream.finish_reason() == Some(FinishReason::Cancelled);
            if is_paused && !stream.has_tokens() {
                session.resume(stream, Vec::new()).unwrap();
            }
            session.make_way(stream);
            if let Some(pieces) = session.next_tokens(stream).unwrap() {
                tokens.extend(pieces.into_iter().filter_map(|piece| piece.token));
                n_live += 1;
            }
        }
    }
    for ((_, tokens), reference) in texts.iter().zip(&references) {
        assert_eq!(*tokens, ids(&reference.greedy_ids));
    }
}

#[test]
fn a_prompt_in_two_parts_is_one_prompt() {
    let reference = &references()[0];
    let mut text = begin(&EngineConfig::default(), greedy(ids(&reference.ids), 2)).finish();
    // What follows a chosen token is computed after it.
    let rest = ids(&reference.greedy_ids[2..4]);
    text.session.resume(&mut text.stream, rest).unwrap();
    assert_eq!(
        text.next().unwrap(),
        None,
        "it has as many tokens as it may"
    );
    let known = text.session.parked(&text.stream).unwrap();
    let all = [&reference.ids[..], &reference.greedy_ids[..4]].concat();
    assert_eq!((known.evaluated, known.pending), (ids(&all), Vec::new()));
    assert_eq!(known.seq, SeqId(0));
}

/// What is behind a state is what would have been behind the text itself, wherever it was cut.
#[test]
fn a_text_goes_on_behind_a_state_as_if_it_had_not_ended() {
    let reference = &references()[0];
    let n = reference.greedy_ids.len();
    for n_first in [0, 1, n / 2] {
        let mut text = begin(&f32_config(), greedy(ids(&reference.ids), n_first)).finish();
        let known = [text.session.parked(&text.stream).unwrap()];
        let mut bytes = Vec::new();
        let options = SaveOptions {
            seqs: Seqs::One(known[0].seq),
            tokens: &known,
            kv_type: None,
            state_type: None,
        };
        let saved = text.session.engine().save_state(&options, &mut bytes);
        assert_eq!(saved.unwrap(), bytes.len() as u64);
        let state = SavedState::parse(&bytes).unwrap();
        let config = ServiceConfig::default();
        let tokenizer = stories().tokenizer().clone();
        let mut session = Session::new(engine(&f32_config()), &tokenizer, &config).unwrap();
        // The next token of the text, or one that follows it.
        let next = match known[0].pending.as_slice() {
            [] => ids(&reference.greedy_ids[..1]),
            pending => pending.to_vec(),
        };
        let n_given = n_first.max(1);
        let request = greedy(next, n - n_given);
        let mut stream = session.restore(&state, known[0].seq, request).unwrap();
        assert_eq!(stream.usage().n_reused(), known[0].evaluated.len());
        let mut tokens = Vec::new();
        while let Some(pieces) = session.next_tokens(&mut stream).unwrap() {
            tokens.extend(pieces.into_iter().filter_map(|piece| piece.token));
        }
        assert_eq!(tokens, ids(&reference.greedy_ids[n_given..]));
    }
}

/// Never chooses some tokens, and notes where the tokens of the text come from.
#[derive(Debug)]
struct Without {
    tokens: Vec<TokenId>,
    accepted: Arc<Mutex<Vec<TokenOrigin>>>,
}

impl Step for Without {
    fn apply(&mut self, candidates: &mut Candidates<'_>) {
        candidates.retain(|candidate| !self.tokens.contains(&candidate.token));
    }

    fn accept(&mut self, _: TokenId, origin: TokenOrigin) {
        self.accepted.lock().unwrap().push(origin);
    }
}

#[test]
fn a_step_of_the_caller_s_comes_first() {
    let reference = &references()[0];
    let accepted = Arc::default();
    let step = Without {
        tokens: ids(&reference.greedy_ids[1..2]),
        accepted: Arc::clone(&accepted),
    };
    let request = with_step(greedy(ids(&reference.ids), 3), step);
    let text = begin(&EngineConfig::default(), request).finish();
    assert_eq!(text.tokens[0].0, reference.greedy_ids[0]);
    assert_ne!(text.tokens[1].0, reference.greedy_ids[1]);
    let accepted = accepted.lock().unwrap();
    let n_given = reference.ids.len();
    assert_eq!(accepted[..n_given], vec![TokenOrigin::Prompt; n_given]);
    assert_eq!(accepted[n_given..], [TokenOrigin::Generated; 3]);
}

#[test]
fn cancelling_ends_a_prompt_within_a_ubatch() {
    let cancel = CancelFlag::default();
    let request = TextRequest {
        cancel: Some(cancel.clone()),
        ..greedy(ids(&references()[0].ids), 5)
    };
    let mut text = begin(&ubatches_of_2(), request);
    let in_run = text.session.engine().backend().cancel_in_run.clone();
    let mut seen = Vec::new();
    text.read_prompt(|progress| {
        seen.push(progress.n_done);
        *in_run.lock().unwrap() = Some(cancel.clone());
    });
    assert_eq!(seen, [2]);
    assert_eq!(text.next().unwrap(), None);
    assert_eq!(text.finish_reason(), FinishReason::Cancelled);
    assert_eq!(text.usage().timings().prompt.n_tokens, 2);
    let memory = text.session.engine().memory();
    assert_eq!(memory.n_tokens(SeqId(0)), 2);
    // It goes on from there, with the prompt's last tokens.
    cancel.reset();
    text.session.resume(&mut text.stream, Vec::new()).unwrap();
    let text = text.finish();
    assert_eq!(text.tokens, ids(&references()[0].greedy_ids[..5]));
}

#[test]
fn prompts_that_cannot_be_are_refused_with_numbers() {
    let config = EngineConfig {
        n_ctx: Some(4),
        ..EngineConfig::default()
    };
    let refused = |prompt: Vec<TokenId>| {
        let text = Writer::new(engine(&config), stories().tokenizer(), greedy(prompt, 5));
        text.unwrap_err()
    };
    assert!(matches!(
        refused(Vec::new()),
        ServiceError::Refused(RequestError::EmptyPrompt)
    ));
    assert_eq!(
        refused(ids(&references()[0].ids)).to_string(),
        "the prompt of 5 tokens does not fit the 4 that one request may have"
    );
}

/// What was computed, and what was chosen and not computed, take their part of the context.
#[test]
fn a_prompt_may_fill_the_context_to_its_last_token() {
    let prompt = ids(&references()[0].ids);
    for (n_ctx, fits) in [(6, false), (7, true)] {
        let config = EngineConfig {
            n_ctx: Some(n_ctx),
            ..EngineConfig::default()
        };
        let mut text = begin(&config, greedy(prompt.clone(), 1)).finish();
        let more = prompt[..1].to_vec();
        let resumed = text.session.resume(&mut text.stream, more);
        assert_eq!(resumed.is_ok(), fits);
        while text.next().unwrap().is_some() {}
        let n_held = text.session.engine().memory().n_tokens(SeqId(0));
        assert_eq!(n_held, if fits { n_ctx } else { 5 });
        if let Err(error) = resumed {
            let wanted = "the prompt of 7 tokens does not fit the 6 that one request may have";
            assert_eq!(error.to_string(), wanted);
        }
    }
}

/// Texts that may not go on say so, and nothing has changed.
#[test]
fn what_was_not_kept_does_not_go_on() {
    let reference = &references()[0];
    let released = TextRequest {
        retention: Retention::Release,
        ..greedy(ids(&reference.ids), 3)
    };
    let mut text = begin(&EngineConfig::default(), released).finish();
    let refused = text.session.resume(&mut text.stream, ids(&[5]));
    assert!(matches!(refused, Err(ServiceError::NotParked { .. })));
    assert!(text.session.parked(&text.stream).is_err());
    // One that is complete needs something that follows.
    let mut text = begin(&EngineConfig::default(), greedy(ids(&reference.ids), 0)).finish();
    let refused = text.session.resume(&mut text.stream, Vec::new());
    let Err(ServiceError::Engine(why)) = refused else {
        panic!("{refused:?}");
    };
    assert!(matches!(*why, EngineError::EmptyPrompt), "{why}");
    assert_eq!(text.finish_reason(), FinishReason::Length);
}

/// Others take the room of a text that has ended; it is computed again when it goes on.
#[test]
fn a_text_whose_room_was_needed_is_computed_again() {
    let references = references();
    let [first, second] = [&references[0], &references[1]];
    let cancel = CancelFlag::default();
    let request = TextRequest {
        cancel: Some(cancel.clone()),
        ..greedy(ids(&first.ids), first.greedy_ids.len())
    };
    let mut text = begin(&f32_config(), request);
    for _ in 0..4 {
        text.next().unwrap();
    }
    cancel.cancel();
    while text.next().unwrap().is_some() {}
    let other = greedy(ids(&second.ids), second.greedy_ids.len());
    let mut other = text.session.submit(other).unwrap();
    let mut told = String::new();
    while let Some(piece) = text.session.next_piece(&mut other).unwrap() {
        told += &piece;
    }
    assert_eq!(told, second.continuation);
    assert!(
        text.session.parked(&text.stream).is_err(),
        "its room is gone"
    );
    drop(other);
    cancel.reset();
    text.session.resume(&mut text.stream, Vec::new()).unwrap();
    let text = text.finish();
    assert_eq!(text.text, first.continuation);
}

/// Nobody can go on with a text whose stream is gone: its tokens are for others.
#[test]
fn a_dropped_text_is_a_cached_prefix() {
    let reference = &references()[0];
    let prompt = ids(&[&reference.ids[..], &reference.greedy_ids[..12]].concat());
    let text = begin(&EngineConfig::default(), greedy(prompt.clone(), 1)).finish();
    let Writer {
        mut session,
        stream,
        ..
    } = text;
    drop(stream);
    assert_eq!(session.step(), Activity::Idle);
    let mut again = session.submit(greedy(prompt.clone(), 1)).unwrap();
    while session.next_piece(&mut again).unwrap().is_some() {}
    assert_eq!(again.usage().n_reused(), prompt.len() - 1);
}

#[test]
fn a_text_goes_on_behind_another_prompt() {
    let reference = &references()[0];
    let n = reference.greedy_ids.len();
    let cancel = CancelFlag::default();
    let request = TextRequest {
        cancel: Some(cancel.clone()),
        ..greedy(ids(&references()[1].ids), n)
    };
    let mut text = begin(&f32_config(), request);
    text.read_prompt(|_| ());
    text.next().unwrap();
    text.session.pause(&text.stream);
    while text.next().unwrap().is_some() {}
    let chosen = text.tokens.clone();
    let prompt = ids(&reference.ids);
    text.session
        .rebase(&mut text.stream, prompt.clone())
        .unwrap();
    let text = text.finish();
    assert!(text.tokens.starts_with(&chosen));
    let wanted = greedy([prompt, chosen.clone()].concat(), n - chosen.len());
    let wanted = begin(&f32_config(), wanted).finish();
    assert_eq!(text.tokens[chosen.len()..], wanted.tokens);
}

/// A device is asked for a bounded number of candidates; rows come back whole where that is not
/// enough.
#[test]
fn a_device_is_asked_for_512_candidates_at_most() {
    let prompt = ids(&references()[0].ids);
    let mut found = Vec::new();
    for k in 505..=515 {
        let sampler = SamplerConfig {
            top_k: NonZeroU32::new(k),
            ..SamplerConfig::default()
        };
        let options = CompletionOptions {
            sampler,
            n_predict: Some(1),
            ..CompletionOptions::default()
        };
        let completion = Completion::new(stories().tokenizer(), options.clone()).unwrap();
        let n_candidates = completion.n_candidates().unwrap();
        let engine = engine(&EngineConfig::default());
        let prefers_candidates = &engine.backend().prefers_candidates;
        prefers_candidates.store(true, Ordering::Relaxed);
        let request = TextRequest {
            prompt: prompt.clone(),
            options,
            ..TextRequest::default()
        };
        let text = Writer::new(engine, stories().tokenizer(), request).unwrap();
        let text = text.finish();
        found.push(text.session.engine().last_candidates().is_some());
        assert_eq!(found.last(), Some(&(n_candidates <= 512)), "{n_candidates}");
    }
    assert!(found.contains(&true) && found.contains(&false));
}
