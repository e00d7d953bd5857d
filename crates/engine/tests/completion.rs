//! A completion that is driven by hand gives the text of a session.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use crate::support::text::Writer;
use crate::support::{engine, stories};
use cellar_engine::sampler::{SampleError, SamplerConfig};
use cellar_engine::session::TextRequest;
use cellar_engine::{
    Completion, CompletionOptions, ConfigError, EngineConfig, EngineError, FinishReason, Logprobs,
    OutputRow,
};
use kv_core::batch::Batch;
use kv_core::{SeqId, TokenId};
use kv_graph::TopK;
use model_core::tokenizer::EncodeOptions;

/// The text, its reason to end and its tokens.
type Generated = (String, Option<FinishReason>, Vec<TokenId>);

fn by_session(options: &CompletionOptions) -> Generated {
    let file = stories();
    let request = TextRequest {
        prompt: file.tokenizer().encode("Once upon", EncodeOptions::PROMPT),
        options: options.clone(),
        ..TextRequest::default()
    };
    let engine = engine(&EngineConfig::default());
    let text = Writer::new(engine, file.tokenizer(), request)
        .unwrap()
        .finish();
    (
        text.text.clone(),
        text.stream.finish_reason(),
        text.tokens.clone(),
    )
}

fn by_completion(options: &CompletionOptions) -> Generated {
    let file = stories();
    let mut engine = engine(&EngineConfig::default());
    let mut completion = Completion::new(file.tokenizer(), options.clone()).unwrap();
    let prompt = file.tokenizer().encode("Once upon", EncodeOptions::PROMPT);
    completion.accept_prompt(&prompt);
    let (mut batch, mut text) = (Batch::prompt(SeqId(0), prompt), String::new());
    while completion.finish_reason().is_none() {
        let row = engine.decode(&batch).unwrap().last().unwrap();
        text += &completion.take(OutputRow::Logits(row)).unwrap();
        batch = Batch::prompt(SeqId(0), completion.tokens().last().copied());
    }
    assert_eq!(text, completion.text());
    assert_eq!(
        completion.end(FinishReason::ContextFull),
        "",
        "it has ended"
    );
    let finish = completion.finish_reason().cloned();
    (text, finish, completion.tokens().to_vec())
}

#[test]
fn a_completion_tells_what_a_session_tells() {
    let mut penalized = SamplerConfig {
        seed: 3,
        ..SamplerConfig::default()
    };
    penalized.penalties.repeat = 1.2;
    for sampler in [SamplerConfig::greedy(), penalized] {
        for (n_predict, stop) in [
            (Some(0), vec![]),
            (Some(1), vec![]),
            (Some(30), vec![" the".to_owned()]),
            (Some(30), vec!["no such text".to_owned()]),
            (None, vec![]),
        ] {
            let options = CompletionOptions {
                sampler: sampler.clone(),
                n_predict,
                stop,
                ..CompletionOptions::default()
            };
            assert_eq!(by_completion(&options), by_session(&options), "{options:?}");
        }
    }
}

/// The text before the token, whether it is chosen from whole rows or from the likeliest tokens.
#[test]
fn a_stop_token_ends_a_text_and_is_not_in_it() {
    let file = stories();
    let mut options = CompletionOptions {
        sampler: SamplerConfig::greedy(),
        n_predict: Some(20),
        ..CompletionOptions::default()
    };
    let (whole, _, tokens) = by_completion(&options);
    let token = tokens[8];
    let first = tokens.iter().position(|t| *t == token).unwrap();
    options.stop_tokens = vec![TokenId(0), token];
    let stopped = by_completion(&options);
    let finish = FinishReason::StopToken { token };
    assert_eq!(stopped.1.as_ref(), Some(&finish));
    assert_eq!(stopped.2, tokens[..first]);
    assert!(whole.starts_with(&stopped.0));
    assert_eq!(by_session(&options), stopped);

    let mut logits = vec![0.0; file.tokenizer().n_tokens()];
    logits[token.as_usize()] = 1.0;
    let mut completion = Completion::new(file.tokenizer(), options.clone()).unwrap();
    let k = completion.n_candidates().unwrap();
    let mut row = vec![0.0; TopK::row_len(k)];
    TopK::of(&logits, &mut row);
    let top = OutputRow::Candidates(TopK::read(&row).unwrap());
    assert_eq!(completion.take(top).unwrap(), "");
    assert_eq!(completion.finish_reason(), Some(&finish));
    assert!(completion.tokens().is_empty());

    // Not before the text has so many tokens.
    options.sampler.min_tokens = 1;
    let mut completion = Completion::new(file.tokenizer(), options.clone()).unwrap();
    completion.take(OutputRow::Logits(&logits)).unwrap();
    assert!(completion.tokens().len() == 1 && completion.tokens() != [token]);
    completion.take(OutputRow::Logits(&logits)).unwrap();
    assert_eq!(completion.finish_reason(), Some(&finish));
}

#[test]
fn a_stop_token_outside_the_vocabulary_is_refused() {
    let file = stories();
    let n_tokens = file.tokenizer().n_tokens();
    let options = CompletionOptions {
        stop_tokens: vec![TokenId(n_tokens as u32)],
        ..CompletionOptions::default()
    };
    let refused = Completion::new(file.tokenizer(), options).unwrap_err();
    let wanted =
        format!("token {n_tokens} is to end texts, but the vocabulary has {n_tokens} tokens");
    assert_eq!(refused.to_string(), wanted);
}

/// What decoder and stop strings hold back comes out when the caller ends the text.
#[test]
fn ending_a_text_releases_what_was_held_back() {
    let file = stories();
    let prompt = file.tokenizer().encode("Once upon", EncodeOptions::PROMPT);
    let mut engine = engine(&EngineConfig::default());
    let row = engine.decode(&Batch::prompt(SeqId(0), prompt)).unwrap();
    let row = row.last().unwrap().to_vec();
    let generated = |stop: &[&str]| {
        let options = CompletionOptions {
            sampler: SamplerConfig::greedy(),
            stop: stop.iter().map(|&s| s.to_owned()).collect(),
            ..CompletionOptions::default()
        };
        let mut completion = Completion::new(file.tokenizer(), options).unwrap();
        let piece = completion.take(OutputRow::Logits(&row)).unwrap();
        let rest = completion.end(FinishReason::ContextFull);
        assert_eq!(completion.finish_reason(), Some(&FinishReason::ContextFull));
        (piece, rest)
    };
    let (first, nothing) = generated(&[]);
    assert_eq!(nothing, "");
    let held = generated(&[&format!("{first} with more")]);
    assert_eq!(held, (String::new(), first));
}

#[test]
fn a_row_that_is_not_a_number_leaves_the_text_as_it_was() {
    let file = stories();
    let mut completion = Completion::new(file.tokenizer(), CompletionOptions::default()).unwrap();
    let error = completion.take(OutputRow::Logits(&[0.0, f32::NAN]));
    let is_sample_error = matches!(
        error,
        Err(EngineError::Sample(SampleError::NotANumber {
            token: 1,
            ..
        }))
    );
    assert!(is_sample_error, "{error:?}");
    assert!(completion.tokens().is_empty() && completion.finish_reason().is_none());
}

#[test]
fn a_text_may_be_required_to_be_as_long_as_it_may_get() {
    let file = stories();
    let made = |min_tokens| {
        let mut options = CompletionOptions {
            n_predict: Some(5),
            ..CompletionOptions::default()
        };
        options.sampler.min_tokens = min_tokens;
        Completion::new(file.tokenizer(), options)
    };
    assert!(made(5).is_ok());
    let refused = made(6).unwrap_err();
    let is_named = matches!(
        refused,
        EngineError::Config(ConfigError::MinTokens {
            min_tokens: 6,
            n_predict: 5
        })
    );
    assert!(is_named, "{refused}");
}

/// Only a stop token that is not taken yet needs whole rows of logits.
#[test]
fn candidates_are_enough_where_no_stop_token_has_to_wait() {
    let file = stories();
    let enough = |min_tokens, stop_tokens: &[u32]| {
        let mut options = CompletionOptions {
            stop_tokens: stop_tokens.iter().copied().map(TokenId).collect(),
            ..CompletionOptions::default()
        };
        options.sampler.min_tokens = min_tokens;
        let completion = Completion::new(file.tokenizer(), options).unwrap();
        completion.n_candidates().is_some()
    };
    assert!(enough(0, &[5]) && enough(3, &[]));
    assert!(!enough(3, &[5]));
}

#[test]
fn a_row_of_the_prompt_counts_once_and_must_be_of_numbers() {
    let file = stories();
    let options = CompletionOptions {
        prompt_logprobs: Logprobs::Top(0),
        ..CompletionOptions::default()
    };
    let mut completion = Completion::new(file.tokenizer(), options).unwrap();
    let take = |completion: &mut Completion, index, row: &[f32]| {
        let taken = completion.take_prompt_row(index, TokenId(0), row);
        (taken.is_ok(), completion.prompt_logprobs().len())
    };
    assert_eq!(
        take(&mut completion, 0, &[0.0, f32::NEG_INFINITY]),
        (true, 1)
    );
    assert_eq!(take(&mut completion, 0, &[f32::NAN, 0.0]), (true, 1));
    assert_eq!(take(&mut completion, 1, &[f32::NAN, 0.0]), (false, 1));
    assert_eq!(take(&mut completion, 1, &[0.0, f32::INFINITY]), (false, 1));
    assert_eq!(take(&mut completion, 1, &[0.0, 1.0]), (true, 2));
}

#[test]
fn the_stop_string_is_part_of_the_text_where_that_is_wanted() {
    let mut options = CompletionOptions {
        sampler: SamplerConfig::greedy(),
        stop: vec![" the".to_owned()],
        ..CompletionOptions::default()
    };
    let (without, finish, _) = by_completion(&options);
    options.includes_stop = true;
    let (with, same, _) = by_completion(&options);
    assert_eq!(with, without + " the");
    let text = " the".to_owned();
    assert_eq!(finish, Some(FinishReason::StopString { text }));
    assert_eq!(same, finish);
}

#[test]
fn nothing_is_chosen_after_the_end() {
    let file = stories();
    let options = CompletionOptions {
        n_predict: Some(1),
        ..CompletionOptions::default()
    };
    let mut completion = Completion::new(file.tokenizer(), options).unwrap();
    let logits = vec![0.0; file.tokenizer().n_tokens()];
    completion.take(OutputRow::Logits(&logits)).unwrap();
    assert_eq!(completion.finish_reason(), Some(&FinishReason::Length));
    let again = completion.take(OutputRow::Logits(&logits)).unwrap();
    assert_eq!((again.as_str(), completion.tokens().len()), ("", 1));
}

/// No tokenizer is needed for them.
#[test]
fn options_that_are_out_of_range_are_refused() {
    let refused = |edit: fn(&mut CompletionOptions)| {
        let mut options = CompletionOptions::default();
        edit(&mut options);
        options.check().is_err()
    };
    assert!(!refused(|_| {}));
    assert!(refused(|options| options.sampler.temperature = -1.0));
    assert!(refused(|options| options.logprobs = Logprobs::Top(21)));
    assert!(refused(
        |options| options.prompt_logprobs = Logprobs::Top(21)
    ));
}
