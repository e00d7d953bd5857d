//! The convenient interface against the reference texts: greedy text, and what is computed again.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::num::NonZeroUsize;
use std::sync::Arc;

use cellar::engine::{EngineError, Timings};
use cellar::kv_graph::weights::SharedBytes;
use cellar::{
    BackendKind, BackendOptions, CancelFlag, ChatMessage, EngineConfig, Error, FinishReason,
    GenerateOptions, KvType, LongContext, Model, ModelFile, ModelOptions, Repack, SamplerConfig,
    TextState, TokenId, architectures, open_backend,
};
use serde::Deserialize;

const MODELS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models");

/// One prompt with its greedy continuation by an independent implementation.
#[derive(Debug, Deserialize)]
struct Reference {
    prompt: String,
    ids: Vec<u32>,
    greedy_ids: Vec<u32>,
    continuation: String,
}

fn references() -> Vec<Reference> {
    #[derive(Deserialize)]
    struct File {
        prompts: Vec<Reference>,
    }
    let text = std::fs::read_to_string(format!("{MODELS}/stories-llama.reference.json")).unwrap();
    serde_json::from_str::<File>(&text).unwrap().prompts
}

fn open(kind: Option<BackendKind>, engine: EngineConfig) -> Model {
    let options = ModelOptions {
        engine,
        ..ModelOptions::default()
    };
    let options = options.with_kv_type(KvType::F32);
    let options = match kind {
        Some(kind) => options.with_backend(kind),
        None => options,
    };
    options
        .open(format!("{MODELS}/stories-llama-f16.gguf"))
        .unwrap()
}

fn greedy(n_predict: usize) -> GenerateOptions {
    GenerateOptions {
        sampler: SamplerConfig::greedy(),
        n_predict: Some(n_predict),
        ..GenerateOptions::default()
    }
}

#[test]
fn a_model_on_a_backend_of_the_callers_writes_the_same() {
    let backend = open_backend(BackendOptions::default()).unwrap();
    let options = ModelOptions::default()
        .with_kv_type(KvType::F32)
        .with_context(64)
        .with_threads(NonZeroUsize::MIN);
    let path = format!("{MODELS}/stories-llama-f16.gguf");
    let mut on_mine = Model::open_on(path, backend, options).unwrap();
    let mut chosen = open(None, EngineConfig::default());
    assert_eq!(on_mine.engine().settings().n_ctx, 64);
    let [mine, its] = [&mut on_mine, &mut chosen].map(|model| {
        let text = model.generate("Once upon a time", greedy(20)).unwrap();
        text.finish().unwrap()
    });
    assert_eq!(mine, its);
}

fn timings_of(model: &mut Model, prompt: &str, n_predict: usize) -> Timings {
    let mut text = model.generate(prompt, greedy(n_predict)).unwrap();
    text.by_ref().for_each(|piece| drop(piece.unwrap()));
    text.usage().timings()
}

#[test]
fn greedy_text_is_the_reference_s_on_every_backend() {
    let candle = BackendKind::Candle;
    for kind in [None, Some(BackendKind::Cpu), Some(candle)] {
        let mut model = open(kind, EngineConfig::default());
        for reference in references() {
            let n = reference.greedy_ids.len();
            let mut text = model.generate(&reference.prompt, greedy(n)).unwrap();
            let pieces: Result<String, Error> = text.by_ref().collect();
            assert_eq!(pieces.unwrap(), reference.continuation);
            assert_eq!(text.text(), reference.continuation);
            assert_eq!(text.finish_reason(), Some(&FinishReason::Length));
            let text = model.generate(&reference.prompt, greedy(n)).unwrap();
            assert_eq!(text.finish().unwrap(), reference.continuation);
        }
    }
}

#[test]
fn only_new_tokens_of_a_prompt_are_computed() {
    let mut model = open(None, EngineConfig::default());
    let reference = &references()[0];
    let text = model.generate(&reference.prompt, greedy(10)).unwrap();
    let longer = reference.prompt.clone() + &text.finish().unwrap() + " and she was";
    // The answer is known, but for its last token, which was not computed; three words are new.
    let n_longer = encode(&model, &longer).len();
    let known = reference.ids.len() + 9;
    let first = timings_of(&mut model, &longer, 0);
    assert_eq!(first.prompt.n_tokens, n_longer - known);
    // Its last token again, for its logits.
    let again = timings_of(&mut model, &longer, 10);
    assert_eq!(again.prompt.n_tokens, 1);
    let fresh = open(None, EngineConfig::default())
        .generate(&longer, greedy(10))
        .unwrap()
        .finish();
    let text = model.generate(&longer, greedy(10)).unwrap();
    assert_eq!(text.finish().unwrap(), fresh.unwrap());
    model.clear();
    let after = timings_of(&mut model, &longer, 1);
    assert_eq!(after.prompt.n_tokens, n_longer);
}

#[test]
fn a_text_whose_context_was_shifted_is_not_taken_for_known() {
    let config = EngineConfig {
        n_ctx: Some(24),
        ..EngineConfig::default()
    };
    let mut model = open(None, config);
    let reference = &references()[0];
    let options = GenerateOptions {
        long_context: LongContext::Shift { n_keep: 2 },
        ..greedy(40)
    };
    let text = model.generate(&reference.prompt, options).unwrap();
    text.finish().unwrap();
    let after = timings_of(&mut model, &reference.prompt, 1);
    assert_eq!(after.prompt.n_tokens, reference.ids.len());
}

/// As many texts as there are sequences, and more.
#[test]
fn texts_take_turns() {
    for n_seqs in [1, 2] {
        let config = EngineConfig {
            n_seqs,
            ..EngineConfig::default()
        };
        let mut model = open(None, config);
        let references = references();
        let mut texts: Vec<TextState> = (0..2)
            .map(|at| {
                let reference = &references[at];
                let prompt = encode(&model, &reference.prompt);
                let options = greedy(reference.greedy_ids.len());
                model.begin(options.request(prompt)).unwrap()
            })
            .collect();
        let mut n_live = 2;
        while n_live > 0 {
            let go_on = |text: &mut TextState| text.next_piece(&mut model).unwrap().is_some();
            n_live = texts.iter_mut().map(go_on).filter(|&live| live).count();
        }
        for (text, reference) in texts.iter().zip(&references) {
            assert_eq!(text.text(), reference.continuation);
            assert_eq!(text.finish_reason(), Some(&FinishReason::Length));
        }
    }
}

#[test]
fn a_cancelled_text_goes_on_once_its_flag_is_reset() {
    let mut model = open(None, EngineConfig::default());
    let reference = &references()[0];
    let cancel = CancelFlag::default();
    let options = GenerateOptions {
        cancel: cancel.clone(),
        ..greedy(reference.greedy_ids.len())
    };
    let prompt = encode(&model, &reference.prompt);
    let mut text = model.begin(options.request(prompt)).unwrap();
    text.next_piece(&mut model).unwrap();
    cancel.cancel();
    while text.next_piece(&mut model).unwrap().is_some() {}
    assert_eq!(text.finish_reason(), Some(&FinishReason::Cancelled));
    cancel.reset();
    while text.next_piece(&mut model).unwrap().is_some() {}
    assert_eq!(text.text(), reference.continuation);
}

#[test]
fn a_text_can_be_saved_and_restored() {
    let mut model = open(None, EngineConfig::default());
    let reference = &references()[0];
    let (prompt, n) = (
        encode(&model, &reference.prompt),
        reference.greedy_ids.len(),
    );
    let mut text = model.begin(greedy(n).request(prompt.clone())).unwrap();
    while text.tokens().len() < 12 {
        text.next_piece(&mut model).unwrap();
    }
    let mut state = Vec::new();
    model.save(&text, &mut state).unwrap();
    // It goes on where it was saved.
    while text.next_piece(&mut model).unwrap().is_some() {}
    assert_eq!(text.text(), reference.continuation);

    let mut restored = open(None, EngineConfig::default());
    let known = restored.restore(&state).unwrap();
    let all = [&reference.ids[..], &reference.greedy_ids[..]].concat();
    let all: Vec<TokenId> = all.into_iter().map(TokenId).collect();
    assert!(known.len() >= prompt.len() + 11 && all.starts_with(&known));
    let n_left = all.len() - known.len();
    let begun = restored.begin(greedy(n_left).request(known.clone()));
    let mut text = begun.unwrap();
    assert_eq!(
        text.usage().timings().prompt.n_tokens,
        1,
        "the rest is known"
    );
    while text.next_piece(&mut restored).unwrap().is_some() {}
    assert_eq!([&known[..], text.tokens()].concat(), all);
    let half = &state[..state.len() / 2];
    assert!(matches!(restored.restore(half), Err(Error::Engine(_))));
}

/// Whatever is done meanwhile, a text is what it would be alone.
#[test]
fn a_text_goes_on_whatever_else_is_done() {
    type Change = fn(&mut Model);
    let changes: [(&str, Change); 5] = [
        ("restore", |model| {
            let mut other = open(None, EngineConfig::default());
            let prompt = encode(&other, &references()[1].prompt);
            let text = other.begin(greedy(5).request(prompt)).unwrap();
            let mut state = Vec::new();
            other.save(&text, &mut state).unwrap();
            model.restore(&state).map(drop).unwrap();
        }),
        ("begin", |model| {
            let prompt = encode(model, &references()[1].prompt);
            model.begin(greedy(5).request(prompt)).map(drop).unwrap();
        }),
        ("clear", Model::clear),
        ("logits", |model| {
            let prompt = encode(model, &references()[1].prompt);
            let cancel = CancelFlag::default();
            model.logits(&prompt, &cancel).map(drop).unwrap();
        }),
        ("finish_all", |model| {
            let prompts = references();
            let requests = prompts.iter().map(|reference| {
                let prompt = reference.ids.iter().copied().map(TokenId).collect();
                greedy(5).request(prompt)
            });
            let cancel = CancelFlag::default();
            let finished = model.finish_all(requests.collect::<Vec<_>>(), &cancel);
            for (text, reference) in finished.unwrap().unwrap().iter().zip(&prompts) {
                let ids: Vec<u32> = text.tokens.iter().map(|token| token.0).collect();
                assert_eq!(ids, reference.greedy_ids[..5]);
            }
        }),
    ];
    for (what, change) in changes {
        let mut model = open(None, EngineConfig::default());
        let reference = &references()[0];
        let options = greedy(reference.greedy_ids.len());
        let request = options.request(encode(&model, &reference.prompt));
        let mut text = model.begin(request).unwrap();
        text.next_piece(&mut model).unwrap();
        change(&mut model);
        while text.next_piece(&mut model).unwrap().is_some() {}
        assert_eq!(text.text(), reference.continuation, "{what}");
    }
}

#[test]
fn what_was_cancelled_together_gives_nothing() {
    let mut model = open(None, EngineConfig::default());
    let cancel = CancelFlag::default();
    cancel.cancel();
    let prompt = encode(&model, "Once upon a time");
    let finished = model.finish_all([greedy(5).request(prompt)], &cancel);
    assert!(finished.unwrap().is_none());
}

/// The largest logits are the reference's tokens.
#[test]
fn logits_are_those_that_choose_the_reference() {
    let mut model = open(None, EngineConfig::default());
    let reference = &references()[0];
    let tokens = [&reference.ids[..], &reference.greedy_ids[..4]].concat();
    let tokens: Vec<TokenId> = tokens.into_iter().map(TokenId).collect();
    let logits = model.logits(&tokens, &CancelFlag::default()).unwrap();
    let n_vocab = logits.len() / tokens.len();
    let best = |row: &[f32]| (0..).zip(row).max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0;
    let rows = logits.chunks_exact(n_vocab).skip(reference.ids.len() - 1);
    let chosen: Vec<u32> = rows.map(best).collect();
    assert_eq!(chosen, reference.greedy_ids[..5]);
    assert_eq!(model.engine().memory().n_used(), 0);
    let too_long = vec![TokenId(5); model.engine().settings().n_ctx as usize + 1];
    let error = model.logits(&too_long, &CancelFlag::default()).unwrap_err();
    assert!(matches!(
        error,
        Error::Engine(EngineError::PromptTooLong { .. })
    ));
    let cancelled = CancelFlag::default();
    cancelled.cancel();
    let error = model.logits(&tokens, &cancelled).unwrap_err();
    assert!(matches!(error, Error::Engine(EngineError::Cancelled)));
}

#[test]
fn a_dropped_text_leaves_a_usable_model() {
    let mut model = open(None, EngineConfig::default());
    let reference = &references()[0];
    let mut text = model.generate(&reference.prompt, greedy(20)).unwrap();
    text.next().unwrap().unwrap();
    drop(text);
    let n = reference.greedy_ids.len();
    let text = model.generate(&reference.prompt, greedy(n)).unwrap();
    assert_eq!(text.finish().unwrap(), reference.continuation);
}

#[test]
fn a_file_that_is_not_there_is_named() {
    let error = Model::open("no-such-model.gguf").unwrap_err().to_string();
    assert!(error.contains("no-such-model.gguf"), "{error}");
}

fn encode(model: &Model, text: &str) -> Vec<TokenId> {
    use cellar::model_core::tokenizer::EncodeOptions;
    let tokenizer = model.file().tokenizer();
    tokenizer.encode(text, EncodeOptions::PROMPT)
}

/// The story model with this chat template, or with none.
fn chat_model(template: Option<&str>) -> Model {
    use cellar::model_core::gguf::{GgufFile, GgufWriter};

    let file = GgufFile::open(format!("{MODELS}/stories-llama-f16.gguf")).unwrap();
    let mut writer = GgufWriter::with_metadata(file.metadata().clone());
    for tensor in file.tensors() {
        writer.add(file.weight(tensor.name()).unwrap()).unwrap();
    }
    template.map(|text| writer.set("tokenizer.chat_template", text));
    let bytes = SharedBytes::new(Arc::new(writer.to_bytes().unwrap()));
    let file = ModelFile::from_bytes(bytes, &architectures()).unwrap();
    Model::load(file, ModelOptions::default()).unwrap()
}

#[test]
fn a_chat_evaluates_only_what_is_new() {
    let template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:";
    let mut model = chat_model(Some(template));
    let mut messages = vec![ChatMessage::new("user", "Who is Lily?")];
    let text = model.chat(&messages, greedy(8)).unwrap();
    let answer = text.finish().unwrap();
    let prompt = "user: Who is Lily?\nassistant:";
    let mut fresh = chat_model(None);
    let text = fresh.generate(prompt, greedy(8)).unwrap();
    assert_eq!(text.finish().unwrap(), answer);

    messages.push(ChatMessage::new("assistant", &answer));
    messages.push(ChatMessage::new("user", "And Tom?"));
    let mut text = model.chat(&messages, greedy(8)).unwrap();
    text.by_ref().for_each(|piece| drop(piece.unwrap()));
    let whole = format!("{prompt} {answer}\nuser: And Tom?\nassistant:");
    let n_whole = encode(&fresh, &whole).len();
    let n_first = encode(&fresh, prompt).len();
    assert!(text.usage().timings().prompt.n_tokens <= n_whole - n_first);
}

#[test]
fn messages_that_cannot_be_rendered_are_refused() {
    let chat = |template| {
        let mut model = chat_model(template);
        let messages = [ChatMessage::new("user", "Hello")];
        model.chat(&messages, greedy(8)).map(drop).unwrap_err()
    };
    assert!(matches!(chat(None), Error::NoChatTemplate));
    assert!(matches!(
        chat(Some("{{ raise_exception('no') }}")),
        Error::Template(_)
    ));
    assert!(matches!(chat(Some("{{ nothing }}")), Error::EmptyChat));
}

/// A file that is cut short or written over under an open model: an error of the text that reads
/// it, with the memory as before, and no signal; with weights in the file and with copies of them.
#[cfg(unix)]
#[test]
fn a_model_file_that_changes_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    for repack in [Repack::Never, Repack::Auto] {
        for n_left in [0, 4096, 1 << 20] {
            std::fs::copy(format!("{MODELS}/stories-llama-f16.gguf"), &path).unwrap();
            let options = ModelOptions {
                backend: BackendOptions {
                    repack,
                    ..BackendOptions::default()
                },
                ..ModelOptions::default()
            };
            let mut model = Model::open_with(&path, options).unwrap();
            let before = model.generate("Once", greedy(2)).unwrap().finish().unwrap();
            assert!(!before.is_empty());
            let file = std::fs::OpenOptions::new().write(true).open(&path);
            file.unwrap().set_len(n_left).unwrap();
            for _ in 0..2 {
                let text = model.generate("One day, a dog", greedy(2));
                let error = text.and_then(|text| text.finish()).unwrap_err().to_string();
                assert!(error.contains("has changed since it was opened"), "{error}");
            }
        }
    }
}
