//! Generated text against an independent implementation's, and every way to end.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};

use crate::support::{engine, ids, references, stories};
use cellar_engine::sampler::{Candidates, SamplerConfig, Step, TokenOrigin};
use cellar_engine::{
    CancelFlag, Completion, CompletionOptions, EngineConfig, EngineError, FinishReason,
    GenerateOptions, Generation, LongContext, PromptProgress,
};
use kv_core::batch::Batch;
use kv_core::memory::{Memory, Streams};
use kv_core::{KvType, KvTypes, SeqId, TokenId};
use model_core::tokenizer::EncodeOptions;

fn greedy(n_predict: usize) -> GenerateOptions {
    GenerateOptions {
        sampler: SamplerConfig::greedy(),
        n_predict: Some(n_predict),
        ..GenerateOptions::default()
    }
}

struct Told {
    text: String,
    tokens: Vec<u32>,
    finish: FinishReason,
}

fn tell(prompt: &str, config: &EngineConfig, options: GenerateOptions) -> Told {
    let file = stories();
    let mut engine = engine(config);
    let mut generation = Generation::new(&engine, file.tokenizer(), options).unwrap();
    let prompt = file.tokenizer().encode(prompt, EncodeOptions::PROMPT);
    generation.feed(&mut engine, &prompt, |_| {}).unwrap();
    let mut text = String::new();
    while let Some(piece) = generation.next_piece(&mut engine).unwrap() {
        text += &piece;
    }
    assert_eq!(text, generation.text());
    assert_eq!(
        generation.next_piece(&mut engine).unwrap(),
        None,
        "nothing after the end"
    );
    Told {
        text,
        tokens: generation.tokens().iter().map(|t| t.0).collect(),
        finish: generation.finish_reason().unwrap().clone(),
    }
}

#[test]
fn greedy_text_is_the_reference_s() {
    for (reference, n_ubatch) in references().iter().zip([1, 7, 512]) {
        for streams in [Streams::Shared, Streams::PerSequence] {
            let kv_types = KvTypes::from(KvType::F32);
            let config = EngineConfig {
                n_ubatch,
                streams,
                kv_types,
                ..EngineConfig::default()
            };
            let told = tell(
                &reference.prompt,
                &config,
                greedy(reference.greedy_ids.len()),
            );
            assert_eq!(told.text, reference.continuation);
            assert_eq!(told.tokens, reference.greedy_ids);
            assert_eq!(told.finish, FinishReason::Length);
        }
    }
}

/// Texts are the same whether the graph finds the candidates or rows of logits come back.
#[test]
fn candidates_of_the_graph_give_the_same_text() {
    use std::sync::atomic::Ordering;

    let file = stories();
    let prompt = file
        .tokenizer()
        .encode("Once upon a time", EncodeOptions::PROMPT);
    let tell = |sampler: SamplerConfig, prefers_candidates: bool| {
        let mut engine = engine(&EngineConfig::default());
        let backend = engine.backend();
        backend
            .prefers_candidates
            .store(prefers_candidates, Ordering::Relaxed);
        let options = GenerateOptions {
            sampler,
            ..greedy(24)
        };
        let mut generation = Generation::new(&engine, file.tokenizer(), options).unwrap();
        generation.feed(&mut engine, &prompt, |_| {}).unwrap();
        while generation.next_piece(&mut engine).unwrap().is_some() {}
        let found = engine.last_candidates().is_some();
        (generation.tokens().to_vec(), found)
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
    let options = |seed| GenerateOptions {
        sampler: SamplerConfig {
            seed,
            ..SamplerConfig::default()
        },
        ..greedy(30)
    };
    let story = |seed| tell("Once", &EngineConfig::default(), options(seed)).text;
    assert_eq!(story(1), story(1));
    assert_ne!(story(1), story(2));
}

#[test]
fn a_stop_string_ends_the_text_before_it() {
    let options = GenerateOptions {
        stop: vec!["nobody".into(), "Lily. S".into()],
        ..greedy(50)
    };
    let told = tell("Once upon a time", &EngineConfig::default(), options);
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
    let options = GenerateOptions {
        stop: vec!["named Bob".into()],
        ..greedy(7)
    };
    let told = tell("Once upon a time", &EngineConfig::default(), options);
    assert_eq!(told.finish, FinishReason::Length);
    assert_eq!(told.text, ", there was a little girl named");
}

#[test]
fn the_context_can_be_filled_to_its_last_cell() {
    let config = EngineConfig {
        n_ctx: Some(12),
        ..EngineConfig::default()
    };
    let told = tell("Once upon a time", &config, greedy(100));
    assert_eq!(told.finish, FinishReason::ContextFull);
    // Five tokens of prompt and seven more fill 12 cells; the last one's logits choose an eighth.
    assert_eq!(told.tokens, references()[0].greedy_ids[..8]);
}

#[test]
fn the_model_can_end_its_story() {
    let told = tell("Once upon a time", &EngineConfig::default(), greedy(500));
    let FinishReason::EndOfGeneration { token } = told.finish else {
        panic!("{:?}", told.finish);
    };
    assert!(stories().tokenizer().is_end_of_generation(token));
    assert!(!told.tokens.contains(&token.0));
}

#[test]
fn nothing_to_predict_is_fine() {
    let told = tell("Once upon a time", &EngineConfig::default(), greedy(0));
    assert_eq!(
        (told.text.as_str(), told.finish),
        ("", FinishReason::Length)
    );
}

#[test]
fn cancelling_ends_prompt_and_text() {
    let (file, reference) = (stories(), &references()[0]);
    let config = EngineConfig {
        n_ubatch: 2,
        ..EngineConfig::default()
    };
    let mut engine = engine(&config);
    let cancel = CancelFlag::default();
    let options = GenerateOptions {
        cancel: cancel.clone(),
        ..greedy(5)
    };
    let mut generation = Generation::new(&engine, file.tokenizer(), options).unwrap();
    let mut seen = Vec::new();
    generation
        .feed(&mut engine, &ids(&reference.ids), |progress| {
            seen.push(progress);
            if progress.n_done == 4 {
                cancel.cancel();
            }
        })
        .unwrap();
    let n_tokens = reference.ids.len();
    assert_eq!(
        seen,
        [2, 4].map(|n_done| PromptProgress { n_done, n_tokens })
    );
    assert_eq!(generation.next_piece(&mut engine).unwrap(), None);
    assert_eq!(generation.finish_reason(), Some(&FinishReason::Cancelled));
    assert_eq!(generation.timings().prompt.n_tokens, 4);
}

#[test]
fn a_cancelled_text_goes_on_once_the_flag_is_reset() {
    let (file, reference) = (stories(), &references()[0]);
    let mut engine = engine(&EngineConfig::default());
    let cancel = CancelFlag::default();
    let options = GenerateOptions {
        cancel: cancel.clone(),
        stop: vec!["named Bob".into()],
        ..greedy(reference.greedy_ids.len())
    };
    let mut generation = Generation::new(&engine, file.tokenizer(), options).unwrap();
    let prompt = ids(&reference.ids);
    generation.feed(&mut engine, &prompt, |_| {}).unwrap();
    let mut text = String::new();
    // Token by token, with a cancelled call between any two: also where text is held back.
    loop {
        cancel.cancel();
        assert_eq!(generation.next_piece(&mut engine).unwrap(), None);
        assert_eq!(generation.finish_reason(), Some(&FinishReason::Cancelled));
        cancel.reset();
        match generation.next_piece(&mut engine).unwrap() {
            Some(piece) => text += &piece,
            None => break,
        }
        assert_eq!(generation.finish_reason(), None);
    }
    assert_eq!(text, reference.continuation);
    assert_eq!(generation.finish_reason(), Some(&FinishReason::Length));
    cancel.cancel();
    assert_eq!(generation.next_piece(&mut engine).unwrap(), None);
    assert_eq!(generation.finish_reason(), Some(&FinishReason::Length));
}

#[test]
fn texts_take_turns_on_one_engine() {
    let (file, references) = (stories(), references());
    let kv_types = KvTypes::from(KvType::F32);
    let mut engine = engine(&EngineConfig {
        n_seqs: 2,
        kv_types,
        ..EngineConfig::default()
    });
    let mut texts: Vec<Generation> = (0..2)
        .map(|seq| {
            let options = GenerateOptions {
                seq: SeqId(seq),
                ..greedy(references[seq as usize].greedy_ids.len())
            };
            Generation::new(&engine, file.tokenizer(), options).unwrap()
        })
        .collect();
    // Both prompts first: the logits of the first must survive the second.
    for (text, reference) in texts.iter_mut().zip(&references) {
        let prompt = ids(&reference.ids);
        text.feed(&mut engine, &prompt, |_| {}).unwrap();
    }
    let mut n_live = 2;
    while n_live > 0 {
        let go_on = |text: &mut Generation| text.next_piece(&mut engine).unwrap().is_some();
        n_live = texts.iter_mut().map(go_on).filter(|&live| live).count();
    }
    for (text, reference) in texts.iter().zip(&references) {
        assert_eq!(text.text(), reference.continuation);
    }
}

/// Neither a further prompt nor a token: unless the caller says that the change was meant.
#[test]
fn a_text_whose_sequence_others_changed_takes_no_prompt() {
    let (file, reference) = (stories(), &references()[0]);
    let mut engine = engine(&EngineConfig::default());
    let mut text = Generation::new(&engine, file.tokenizer(), greedy(5)).unwrap();
    let prompt = ids(&reference.ids);
    text.feed(&mut engine, &prompt, |_| {}).unwrap();
    text.next_piece(&mut engine).unwrap();
    let other = Batch::prompt(SeqId(0), [TokenId(5)]);
    engine.decode(&other).unwrap();
    let n_held = engine.memory().n_tokens(SeqId(0));
    let errors = [
        text.feed(&mut engine, &prompt, |_| {}).unwrap_err(),
        text.next_piece(&mut engine).map(drop).unwrap_err(),
    ];
    for error in errors {
        let seq = SeqId(0);
        let is_changed = matches!(error, EngineError::SequenceChanged { seq: s } if s == seq);
        assert!(is_changed, "{error}");
    }
    assert_eq!(engine.memory().n_tokens(SeqId(0)), n_held);
    text.accept_changes(&engine);
    text.next_piece(&mut engine).unwrap();
    assert_eq!(engine.memory().n_tokens(SeqId(0)), n_held + 1);
}

#[test]
fn a_prompt_in_two_parts_is_one_prompt() {
    let (file, reference) = (stories(), &references()[0]);
    let mut engine = engine(&EngineConfig::default());
    let options = greedy(reference.greedy_ids.len());
    let mut text = Generation::new(&engine, file.tokenizer(), options).unwrap();
    let prompt = ids(&reference.ids);
    // What follows a chosen token is evaluated after it.
    text.feed(&mut engine, &prompt, |_| {}).unwrap();
    text.next_piece(&mut engine).unwrap();
    text.next_piece(&mut engine).unwrap();
    let rest = ids(&reference.greedy_ids[2..4]);
    text.feed(&mut engine, &rest, |_| {}).unwrap();
    assert_eq!(text.pending(), None);
    while text.next_piece(&mut engine).unwrap().is_some() {}
    let told: Vec<u32> = text.tokens().iter().map(|t| t.0).collect();
    let wanted = [&reference.greedy_ids[..2], &reference.greedy_ids[4..]].concat();
    assert_eq!(told[..wanted.len()], wanted);
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
    let (file, reference) = (stories(), &references()[0]);
    let mut engine = engine(&EngineConfig::default());
    let accepted = Arc::default();
    let step = Without {
        tokens: ids(&reference.greedy_ids[1..2]),
        accepted: Arc::clone(&accepted),
    };
    let options = GenerateOptions {
        history: vec![TokenId(5)],
        ..greedy(3)
    };
    let text = Generation::new(&engine, file.tokenizer(), options).unwrap();
    let mut text = text.with_step(Box::new(step));
    text.feed(&mut engine, &ids(&reference.ids), |_| {})
        .unwrap();
    while text.next_piece(&mut engine).unwrap().is_some() {}
    assert_eq!(text.tokens()[0].0, reference.greedy_ids[0]);
    assert_ne!(text.tokens()[1].0, reference.greedy_ids[1]);
    let accepted = accepted.lock().unwrap();
    let n_given = 1 + reference.ids.len();
    assert_eq!(accepted[..n_given], vec![TokenOrigin::Prompt; n_given]);
    assert_eq!(accepted[n_given..], [TokenOrigin::Generated; 3]);
}

#[test]
fn cancelling_ends_a_prompt_within_a_ubatch() {
    let (file, reference) = (stories(), &references()[0]);
    let config = EngineConfig {
        n_ubatch: 2,
        ..EngineConfig::default()
    };
    let mut engine = engine(&config);
    let in_run = engine.backend().cancel_in_run.clone();
    let cancel = CancelFlag::default();
    let options = GenerateOptions {
        cancel: cancel.clone(),
        ..greedy(5)
    };
    let mut generation = Generation::new(&engine, file.tokenizer(), options).unwrap();
    let mut seen = Vec::new();
    let prompt = ids(&reference.ids);
    generation
        .feed(&mut engine, &prompt, |progress| {
            seen.push(progress.n_done);
            *in_run.lock().unwrap() = Some(cancel.clone());
        })
        .unwrap();
    assert_eq!(seen, [2]);
    assert_eq!(generation.next_piece(&mut engine).unwrap(), None);
    assert_eq!(generation.finish_reason(), Some(&FinishReason::Cancelled));
    assert_eq!(generation.timings().prompt.n_tokens, 2);
    assert_eq!(engine.memory().n_tokens(SeqId(0)), 2);
}

#[test]
fn prompts_that_cannot_be_are_refused_with_numbers() {
    let file = stories();
    let mut engine = engine(&EngineConfig {
        n_ctx: Some(4),
        ..EngineConfig::default()
    });
    let mut generation = Generation::new(&engine, file.tokenizer(), greedy(5)).unwrap();
    for _ in 0..2 {
        let failed = generation.next_piece(&mut engine);
        assert!(matches!(failed, Err(EngineError::EmptyPrompt)));
    }
    assert!(matches!(
        generation.feed(&mut engine, &[], |_| {}),
        Err(EngineError::EmptyPrompt)
    ));
    let error = generation
        .feed(&mut engine, &ids(&references()[0].ids), |_| {})
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "the prompt of 5 tokens does not fit the context of 4"
    );
}

/// What was fed, and what was chosen but not evaluated, take their part of the context.
#[test]
fn a_prompt_may_fill_the_context_to_its_last_token() {
    let (file, prompt) = (stories(), ids(&references()[0].ids));
    for (n_ctx, fits) in [(6, false), (7, true)] {
        let mut engine = engine(&EngineConfig {
            n_ctx: Some(n_ctx),
            ..EngineConfig::default()
        });
        let mut text = Generation::new(&engine, file.tokenizer(), greedy(5)).unwrap();
        text.feed(&mut engine, &prompt, |_| {}).unwrap();
        text.next_piece(&mut engine).unwrap();
        let fed = text.feed(&mut engine, &prompt[..1], |_| {});
        assert_eq!(fed.is_ok(), fits);
        let n_held = engine.memory().n_tokens(SeqId(0));
        assert_eq!(n_held, if fits { n_ctx } else { 5 });
        if let Err(error) = fed {
            let EngineError::PromptTooLong { n_used, .. } = error else {
                panic!("{error}");
            };
            assert_eq!(n_used, 6);
        }
    }
}

/// The context of this text is not full, but another one has the cells.
#[test]
fn a_text_ends_where_another_one_has_the_rest_of_the_cells() {
    let (file, prompt) = (stories(), ids(&references()[0].ids));
    let config = EngineConfig {
        n_ctx: Some(16),
        n_seqs: 2,
        ..EngineConfig::default()
    };
    for long_context in [LongContext::Stop, LongContext::Shift { n_keep: 1 }] {
        let mut engine = engine(&config);
        let other = Batch::prompt(SeqId(1), ids(&references()[0].greedy_ids[..8]));
        engine.decode(&other).unwrap();
        let options = GenerateOptions {
            long_context,
            ..greedy(20)
        };
        let mut text = Generation::new(&engine, file.tokenizer(), options).unwrap();
        text.feed(&mut engine, &prompt, |_| {}).unwrap();
        while text.next_piece(&mut engine).unwrap().is_some() {}
        let (finish, n_tokens) = (text.finish_reason().unwrap(), text.tokens().len());
        match long_context {
            LongContext::Stop => assert_eq!((finish, n_tokens), (&FinishReason::ContextFull, 4)),
            _ => assert_eq!((finish, n_tokens), (&FinishReason::Length, 20)),
        }
        assert_eq!(engine.memory().n_tokens(SeqId(1)), 8);
    }
}

/// A device is asked for a bounded number of candidates; rows come back whole where that is not
/// enough.
#[test]
fn a_device_is_asked_for_512_candidates_at_most() {
    use std::sync::atomic::Ordering;

    let (file, prompt) = (stories(), ids(&references()[0].ids));
    let mut engine = engine(&EngineConfig::default());
    let prefers_candidates = &engine.backend().prefers_candidates;
    prefers_candidates.store(true, Ordering::Relaxed);
    let mut found = Vec::new();
    for k in 505..=515 {
        let sampler = SamplerConfig {
            top_k: NonZeroU32::new(k),
            ..SamplerConfig::default()
        };
        let of_text = CompletionOptions {
            sampler: sampler.clone(),
            ..CompletionOptions::default()
        };
        let completion = Completion::new(file.tokenizer(), of_text).unwrap();
        let n_candidates = completion.n_candidates().unwrap();
        let options = GenerateOptions {
            sampler,
            ..greedy(1)
        };
        engine.clear();
        let mut text = Generation::new(&engine, file.tokenizer(), options).unwrap();
        text.feed(&mut engine, &prompt, |_| {}).unwrap();
        found.push(engine.last_candidates().is_some());
        assert_eq!(found.last(), Some(&(n_candidates <= 512)), "{n_candidates}");
    }
    assert!(found.contains(&true) && found.contains(&false));
}
