//! The convenient interface against the reference texts: greedy text, and what is evaluated again.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::sync::Arc;

use cellar::engine::{EngineError, Timings};
use cellar::kv_core::batch::Batch;
use cellar::kv_core::memory::{Memory, Seqs};
use cellar::kv_core::weights::SharedBytes;
use cellar::kv_core::{Pos, PosRange};
use cellar::{
    BackendKind, BackendOptions, CancelFlag, ChatMessage, EngineConfig, Error, FinishReason,
    GenerateOptions, KvType, KvTypes, LongContext, Model, ModelFile, ModelOptions, Repack,
    SamplerConfig, SeqId, TextState, TokenId, architectures,
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
        backend: BackendOptions {
            kind,
            ..BackendOptions::default()
        },
        engine: EngineConfig {
            kv_types: KvTypes::from(KvType::F32),
            ..engine
        },
        ..ModelOptions::default()
    };
    Model::open_with(format!("{MODELS}/stories-llama-f16.gguf"), options).unwrap()
}

fn greedy(n_predict: usize) -> GenerateOptions {
    GenerateOptions {
        sampler: SamplerConfig::greedy(),
        n_predict: Some(n_predict),
        ..GenerateOptions::default()
    }
}

fn timings_of(model: &mut Model, prompt: &str, n_predict: usize) -> Timings {
    let mut text = model.generate(prompt, greedy(n_predict)).unwrap();
    text.by_ref().for_each(|piece| drop(piece.unwrap()));
    text.timings()
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
fn only_new_tokens_of_a_prompt_are_evaluated() {
    let mut model = open(None, EngineConfig::default());
    let reference = &references()[0];
    let n_prompt = reference.ids.len();
    let first = timings_of(&mut model, &reference.prompt, 10);
    assert_eq!(first.prompt.n_tokens, n_prompt);
    // Its last token again, for its logits.
    let again = timings_of(&mut model, &reference.prompt, 10);
    assert_eq!(again.prompt.n_tokens, 1);
    // The answer is known, but for its last token, which was not evaluated; three words are new.
    let text = model.generate(&reference.prompt, greedy(10)).unwrap();
    let longer = reference.prompt.clone() + &text.finish().unwrap() + " and she was";
    let n_longer = encode(&model, &longer).len();
    let known = n_prompt + 9;
    let went_on = timings_of(&mut model, &longer, 0);
    assert_eq!(went_on.prompt.n_tokens, n_longer - known);
    let fresh = open(None, EngineConfig::default())
        .generate(&longer, greedy(10))
        .unwrap()
        .finish();
    let text = model.generate(&longer, greedy(10)).unwrap();
    assert_eq!(text.finish().unwrap(), fresh.unwrap());
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

#[test]
fn texts_in_two_sequences_take_turns() {
    let config = EngineConfig {
        n_seqs: 2,
        ..EngineConfig::default()
    };
    let mut model = open(None, config);
    let references = references();
    let mut texts: Vec<TextState> = (0..2)
        .map(|seq| {
            let reference = &references[seq as usize];
            let options = GenerateOptions {
                seq: SeqId(seq),
                ..greedy(reference.greedy_ids.len())
            };
            let prompt = encode(&model, &reference.prompt);
            model.begin(&prompt, options).unwrap()
        })
        .collect();
    let mut n_live = 2;
    while n_live > 0 {
        let go_on = |text: &mut TextState| text.next_piece(&mut model).unwrap().is_some();
        n_live = texts.iter_mut().map(go_on).filter(|&live| live).count();
    }
    for (text, reference) in texts.iter().zip(&references) {
        assert_eq!(text.text(), reference.continuation);
    }
    // Each sequence has kept its own text.
    let prompt = encode(&model, &references[1].prompt);
    let options = GenerateOptions {
        seq: SeqId(1),
        ..greedy(1)
    };
    let again = model.begin(&prompt, options.clone()).unwrap();
    assert_eq!(again.timings().prompt.n_tokens, 1);
    let options = GenerateOptions {
        seq: SeqId(2),
        ..options
    };
    let error = model.begin(&prompt, options).unwrap_err().to_string();
    assert!(error.contains("sequence 2"), "{error}");
}

#[test]
fn a_sequence_can_be_copied_saved_and_restored() {
    let config = EngineConfig {
        n_seqs: 2,
        ..EngineConfig::default()
    };
    let mut model = open(None, config.clone());
    let reference = &references()[0];
    let n = reference.greedy_ids.len();
    let prompt = encode(&model, &reference.prompt);
    model.begin(&prompt, greedy(0)).unwrap();
    let (first, other) = (SeqId(0), SeqId(1));
    assert_eq!(model.copy(first, other).unwrap() as usize, prompt.len());
    let mut state = Vec::new();
    model.save(other, &mut state).unwrap();

    let mut restored = open(None, config);
    assert_eq!(restored.restore(other, &state).unwrap(), prompt);
    for (model, seq) in [(&mut model, other), (&mut restored, other)] {
        let options = GenerateOptions { seq, ..greedy(n) };
        let mut text = model.begin(&prompt, options).unwrap();
        assert_eq!(text.timings().prompt.n_tokens, 1, "the rest is known");
        while text.next_piece(model).unwrap().is_some() {}
        assert_eq!(text.text(), reference.continuation);
    }
    let half = &state[..state.len() / 2];
    assert!(matches!(
        restored.restore(first, half),
        Err(Error::Engine(_))
    ));
}

#[test]
fn a_memory_that_was_cleared_is_noted() {
    let mut model = open(None, EngineConfig::default());
    let reference = &references()[0];
    timings_of(&mut model, &reference.prompt, 10);
    let _ = model.engine_mut().clear();
    let after = timings_of(&mut model, &reference.prompt, 10);
    assert_eq!(after.prompt.n_tokens, reference.ids.len());
    let again = timings_of(&mut model, &reference.prompt, 10);
    assert_eq!(again.prompt.n_tokens, 1);
}

/// A change of a sequence under a text ends the text with an error that names it;
/// what was done instead is right.
#[test]
fn a_text_whose_sequence_was_changed_is_refused() {
    type Change = fn(&mut Model, &[u8]);
    let changes: [(&str, Change); 7] = [
        ("begin", |model, _| {
            let prompt = encode(model, &references()[1].prompt);
            model.begin(&prompt, greedy(5)).map(drop).unwrap();
        }),
        ("clear", |model, _| {
            let _ = model.engine_mut().clear();
        }),
        ("remove", |model, _| {
            let range = PosRange::from(Pos(1)..Pos(3));
            let seqs = Seqs::One(SeqId(0));
            model.engine_mut().remove(seqs, range).map(drop).unwrap();
        }),
        ("keep only another", |model, _| {
            model.engine_mut().keep_only(SeqId(1)).map(drop).unwrap();
        }),
        ("copy into", |model, _| {
            model.copy(SeqId(1), SeqId(0)).map(drop).unwrap();
        }),
        ("restore", |model, state| {
            model.restore(SeqId(0), state).map(drop).unwrap();
        }),
        ("decode", |model, _| {
            let batch = Batch::prompt(SeqId(0), [TokenId(5)]);
            model.engine_mut().decode(&batch).map(drop).unwrap();
        }),
    ];
    for (what, change) in changes {
        let config = EngineConfig {
            n_seqs: 2,
            ..EngineConfig::default()
        };
        let mut model = open(None, config);
        let references = references();
        let prompt = encode(&model, &references[0].prompt);
        let options = GenerateOptions {
            seq: SeqId(1),
            ..greedy(0)
        };
        model.begin(&prompt, options).unwrap();
        let mut state = Vec::new();
        model.save(SeqId(1), &mut state).unwrap();
        let mut stale = model.begin(&prompt, greedy(20)).unwrap();
        stale.next_piece(&mut model).unwrap();
        stale.next_piece(&mut model).unwrap();
        change(&mut model, &state);
        let held = |model: &Model| model.engine().memory().positions(SeqId(0));
        let before = (held(&model), stale.text().to_owned());
        for _ in 0..2 {
            let error = stale.next_piece(&mut model).unwrap_err();
            let changed = matches!(
                &error,
                Error::Engine(EngineError::SequenceChanged { seq: SeqId(0) })
            );
            assert!(changed, "{what}: {error}");
            let error = error.to_string();
            assert!(
                error.starts_with("another text has been begun in sequence 0"),
                "{error}"
            );
        }
        assert_eq!(before, (held(&model), stale.text().to_owned()), "{what}");
        // Tokens that are no longer there are not taken for known.
        for reference in &references {
            let n = reference.greedy_ids.len();
            let text = model.generate(&reference.prompt, greedy(n)).unwrap();
            assert_eq!(text.finish().unwrap(), reference.continuation, "{what}");
        }
    }
}

#[test]
fn of_two_texts_in_one_sequence_the_later_is_as_alone() {
    let mut model = open(None, EngineConfig::default());
    let references = references();
    let n = references[1].greedy_ids.len();
    let [a, b] = [0, 1].map(|at: usize| encode(&model, &references[at].prompt));
    let mut a = model.begin(&a, greedy(12)).unwrap();
    a.next_piece(&mut model).unwrap();
    let mut b = model.begin(&b, greedy(n)).unwrap();
    while b.next_piece(&mut model).unwrap().is_some() {
        a.next_piece(&mut model).unwrap_err();
    }
    assert_eq!(b.text(), references[1].continuation);
    // A text that has ended needs its sequence no more.
    let c = encode(&model, &references[0].prompt);
    model.begin(&c, greedy(1)).unwrap();
    assert_eq!(b.next_piece(&mut model).unwrap(), None);
}

#[test]
fn an_empty_sequence_is_not_saved() {
    let model = open(None, EngineConfig::default());
    let mut state = Vec::new();
    let error = model.save(SeqId(0), &mut state).unwrap_err().to_string();
    assert!(error.contains("sequence 0 is empty"), "{error}");
    assert!(state.is_empty());
}

/// The largest logits are the reference's tokens, and the sequence goes on from there.
#[test]
fn after_logits_the_sequence_holds_their_tokens() {
    let mut model = open(None, EngineConfig::default());
    let references = references();
    let reference = &references[0];
    let mut stale = model.generate(&references[1].prompt, greedy(20)).unwrap();
    stale.next().unwrap().unwrap();
    let prompt = encode(&model, &reference.prompt);
    let logits = model
        .logits(SeqId(0), &prompt, &CancelFlag::default())
        .unwrap();
    let n_vocab = model.file().tokenizer().n_tokens();
    assert_eq!(logits.len(), prompt.len() * n_vocab);
    let last = &logits[logits.len() - n_vocab..];
    let best = (0..n_vocab).max_by(|&a, &b| last[a].total_cmp(&last[b]));
    assert_eq!(best, Some(reference.greedy_ids[0] as usize));
    let n = reference.greedy_ids.len();
    let mut text = model.generate(&reference.prompt, greedy(n)).unwrap();
    text.by_ref().for_each(|piece| drop(piece.unwrap()));
    assert_eq!(text.text(), reference.continuation);
    assert_eq!(text.timings().prompt.n_tokens, 1);
    let cancel = CancelFlag::default();
    cancel.cancel();
    let error = model.logits(SeqId(0), &prompt, &cancel).unwrap_err();
    assert!(matches!(error, Error::Engine(EngineError::Cancelled)));
    assert_eq!(model.engine().memory().positions(SeqId(0)), None);
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
    assert!(text.timings().prompt.n_tokens <= n_whole - n_first);
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
