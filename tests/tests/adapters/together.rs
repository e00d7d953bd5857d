//! Texts with different adapters in the same steps: each is what it is alone, byte for byte.

use std::num::NonZeroU32;
use std::sync::Arc;

use cellar_engine::sampler::SamplerConfig;
use cellar_engine::session::{ServiceConfig, Session, TextRequest};
use cellar_engine::{
    CompletionOptions, Engine, EngineConfig, EngineError, SaveOptions, Speculation, TextAdapters,
};
use kv_backend::Backend;
use kv_backend::state::SavedState;
use kv_core::batch::Batch;
use kv_core::memory::{RestoreInto, Seqs};
use kv_core::{SeqId, TokenId};
use kv_cpu::CpuBackend;
use model_core::adapters::Adapters;
use model_core::model_file::{OpenModel, open_tokenizer};
use model_core::tokenizer::Tokenizer;
use model_tests::{cpu, fixture};

use super::{Files, engine, logits};

const ADAPTERS: [(&str, f32); 3] = [("all_linear", 0.0), ("patterns", 0.0), ("ends", 0.0)];

fn open(files: &Files) -> OpenModel {
    files.open_with(&files.model("llama_gqa_untied"), &ADAPTERS)
}

/// Scales that texts have, of one adapter, of none, of several.
fn scales(number: usize) -> Arc<[f32]> {
    let all: [[f32; 3]; 5] = [
        [0.0, 0.0, 0.0],
        [1.0, 0.0, 0.0],
        [0.0, 0.7, 0.0],
        [0.0, 0.0, 1.0],
        [0.5, 0.0, -0.5],
    ];
    Arc::from(all[number % all.len()])
}

fn adapters<B: Backend>(engine: &Engine<B>) -> &Arc<Adapters> {
    engine.model().adapters().unwrap()
}

fn prompt(number: usize) -> Vec<TokenId> {
    let length = 5 + number % 4;
    // All begin alike.
    let rest = (0..length).map(|at| TokenId(3 + ((number * 31 + at * 7) % 500) as u32));
    (0..8).map(|at| TokenId(40 + at)).chain(rest).collect()
}

fn one(engine: &mut Engine<CpuBackend>, seq: SeqId, number: usize) -> Vec<f32> {
    let text = TextAdapters::new(adapters(engine), &scales(number), &[]).unwrap();
    engine.set_adapters(seq, Some(text));
    let logits = engine.decode(&Batch::prompt(seq, prompt(number))).unwrap();
    logits.values().to_vec()
}

#[test]
fn a_row_is_the_same_bits_alone_and_among_others() {
    let files = Files::new();
    let file = open(&files);
    let config = EngineConfig {
        n_seqs: 8,
        ..EngineConfig::default()
    };
    let mut alone = engine(cpu(), &file, config.clone());
    let wanted: Vec<Vec<f32>> = (0..8)
        .map(|number| {
            alone.clear();
            one(&mut alone, SeqId(0), number)
        })
        .collect();
    let mut together = engine(cpu(), &file, config);
    let mut batch = Batch::new();
    for number in 0..8usize {
        let seq = SeqId(number as u32);
        let text = TextAdapters::new(adapters(&together), &scales(number), &[]).unwrap();
        together.set_adapters(seq, Some(text));
        let prompt = prompt(number);
        for (at, &token) in prompt.iter().enumerate() {
            let entry = batch.push_token(token).in_sequence(seq);
            if at + 1 == prompt.len() {
                let _entry = entry.with_output();
            }
        }
    }
    let got = together.decode(&batch).unwrap().values().to_vec();
    assert_eq!(got, wanted.concat());
    // Texts without adapters are those of a model without any.
    let bare = files.open(&files.path("llama_gqa_untied"));
    let mut bare = engine(cpu(), &bare, EngineConfig::default());
    let logits = bare.decode(&Batch::prompt(SeqId(0), prompt(0))).unwrap();
    assert_eq!(logits.values(), wanted[0]);
    assert_ne!(wanted[0], wanted[5], "the prompts differ");
}

fn tokenizer() -> Arc<Tokenizer> {
    Arc::new(open_tokenizer(fixture("tokenizers/spm512")).unwrap())
}

fn request(number: usize) -> TextRequest {
    TextRequest {
        prompt: prompt(number),
        adapters: Some(scales(number)),
        speculation: if number.is_multiple_of(3) {
            Speculation::Lookup { n_max: 4 }
        } else {
            Speculation::Off
        },
        options: CompletionOptions {
            sampler: SamplerConfig {
                temperature: if number.is_multiple_of(2) { 0.0 } else { 0.8 },
                seed: number as u64,
                ..SamplerConfig::default()
            },
            n_predict: Some(12),
            ..CompletionOptions::default()
        },
        ..TextRequest::default()
    }
}

fn session(file: &OpenModel, config: EngineConfig) -> Session<CpuBackend> {
    let engine = engine(cpu(), file, config);
    let config = ServiceConfig {
        // Texts make way for others, wherever there are others.
        preempt_every: NonZeroU32::new(5),
        swap_bytes: 1 << 20,
        ..ServiceConfig::default()
    };
    Session::new(engine, &tokenizer(), &config).unwrap()
}

#[test]
fn texts_are_what_they_are_alone_with_reuse_preemption_and_drafts() {
    let files = Files::new();
    let file = open(&files);
    let texts = |config: EngineConfig, numbers: &[usize]| {
        let mut session = session(&file, config);
        let streams = numbers
            .iter()
            .map(|&number| session.submit(request(number)));
        let streams: Vec<_> = streams.collect::<Result<_, _>>().unwrap();
        let mut reused = 0;
        let texts: Vec<Vec<TokenId>> = streams
            .into_iter()
            .map(|mut stream| {
                let mut tokens = Vec::new();
                while let Some(pieces) = session.next_tokens(&mut stream).unwrap() {
                    tokens.extend(pieces.into_iter().filter_map(|piece| piece.token));
                }
                reused += stream.usage().reuse.map_or(0, |reuse| reuse.n_tokens);
                tokens
            })
            .collect();
        (texts, reused, session.status().counters)
    };
    let all: Vec<usize> = (0..32).collect();
    let small = EngineConfig {
        // Room for fewer texts than there are.
        n_ctx: Some(96),
        n_seqs: 12,
        n_active: Some(8),
        ..EngineConfig::default()
    };
    let (together, reused, counters) = texts(small, &all);
    assert!(reused > 0, "prefixes are reused");
    assert!(counters.n_preemptions > 0, "texts make way for others");
    for number in all {
        let (alone, ..) = texts(EngineConfig::default(), &[number]);
        assert_eq!(together[number], alone[0], "text {number}");
    }
}

/// The same prompt with another scale finds nothing in the cache.
#[test]
fn cached_prefixes_are_of_the_same_adapters_and_scales() {
    let files = Files::new();
    let config = EngineConfig {
        n_seqs: 8,
        ..EngineConfig::default()
    };
    let mut session = session(&open(&files), config);
    let mut reused = |scales: [f32; 3]| {
        let request = TextRequest {
            adapters: Some(Arc::from(scales)),
            ..request(1)
        };
        let mut stream = session.submit(request).unwrap();
        while session.next_piece(&mut stream).unwrap().is_some() {}
        stream.usage().reuse.unwrap().n_tokens
    };
    assert_eq!(reused([1.0, 0.0, 0.0]), 0);
    assert_eq!(reused([0.5, 0.0, 0.0]), 0);
    assert_eq!(reused([0.0, 1.0, 0.0]), 0);
    assert_eq!(reused([0.0; 3]), 0);
    assert!(reused([1.0, 0.0, 0.0]) > 0);
    assert!(reused([0.0; 3]) > 0);
}

#[test]
fn states_name_their_adapters_and_refuse_others() {
    let files = Files::new();
    let mut engine = engine(cpu(), &open(&files), EngineConfig::default());
    let with = |engine: &Engine<CpuBackend>, number| {
        TextAdapters::new(adapters(engine), &scales(number), &[]).unwrap()
    };
    let seq = SeqId(0);
    one(&mut engine, seq, 1);
    let mut bytes = Vec::new();
    let options = SaveOptions {
        seqs: Seqs::One(seq),
        tokens: &[],
        kv_type: None,
        state_type: None,
    };
    engine.save_state(&options, &mut bytes).unwrap();
    let state = SavedState::parse(&bytes).unwrap();
    let into = RestoreInto::One { from: seq, to: seq };
    engine.clear();
    let refused = engine.restore_state(&state, into).unwrap_err().to_string();
    assert!(
        refused.contains("adapters are all_linear (") && refused.contains("here they are none"),
        "{refused}"
    );
    let other = with(&engine, 2);
    engine.set_adapters(seq, Some(other));
    assert!(engine.restore_state(&state, into).is_err());
    let same = with(&engine, 1);
    engine.set_adapters(seq, Some(same));
    engine.restore_state(&state, into).unwrap();
    let next = Batch::prompt(seq, [TokenId(9)]);
    let after = engine.decode(&next).unwrap().values().to_vec();
    let mut whole = prompt(1);
    whole.push(TokenId(9));
    engine.clear();
    let same = with(&engine, 1);
    engine.set_adapters(seq, Some(same));
    let wanted = engine.decode(&Batch::prompt(seq, whole)).unwrap();
    assert_eq!(after, wanted.values());
}

#[test]
fn scales_that_do_not_fit_are_refused() {
    let files = Files::new();
    let mut session = session(&open(&files), EngineConfig::default());
    let mut refused = |scales: &[f32]| {
        let request = TextRequest {
            adapters: Some(Arc::from(scales)),
            ..request(0)
        };
        session.submit(request).unwrap_err().to_string()
    };
    assert_eq!(refused(&[1.0]), "1 scales, and there are 3 adapters");
    let no_number = refused(&[0.0, f32::NAN, 0.0]);
    assert!(no_number.contains("'patterns' is NaN"), "{no_number}");
    let bare = files.open(&files.path("llama_gqa_untied"));
    let mut bare = self::session(&bare, EngineConfig::default());
    let request = TextRequest {
        adapters: Some(Arc::from([1.0])),
        ..request(0)
    };
    let error = bare.submit(request).unwrap_err();
    assert_eq!(error.to_string(), EngineError::NoAdapters.to_string());
}

/// Default scales are those of texts that do not say any.
#[test]
fn default_scales_count_where_none_are_said() {
    let files = Files::new();
    let model = files.model("llama_gqa_untied");
    let on = files.open_with(&model, &[("all_linear", 1.0)]);
    let off = files.open_with(&model, &[("all_linear", 0.0)]);
    let ids: Vec<u32> = prompt(1).into_iter().map(|token| token.0).collect();
    let of = |file: &OpenModel| logits(&mut engine(cpu(), file, EngineConfig::default()), &ids);
    let bare = of(&files.open(&model));
    assert_eq!(of(&off), bare);
    assert_ne!(of(&on), bare);
}
