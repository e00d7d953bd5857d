//! Encoders and encoder-decoders from outside the repository against their references: every
//! directory of the folder that `CELLAR_FIXTURES` names, llama.cpp's GGUF file in it, and the whole
//! way from texts.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a check fails

use std::path::Path;
use std::sync::Arc;

use crate::common::registry;
use crate::common::subject::{Subject, TOLERANCE, VECTOR_TOLERANCE, assert_close};
use cellar_engine::{Engine, EngineConfig, Normalization};
use cellar_tasks::{Embedder, EmbedderConfig, Reranker, RerankerConfig};
use kv_backend::Backend;
use kv_candle::CandleBackend;
use kv_core::{PosRange, SeqId, TokenId, batch::Batch, memory::Seqs};
use kv_rows::KvType;
use model_core::architecture::OutputKind;
use model_core::directory::HfDirectory;
use model_core::model_file::ModelFile;
use model_core::sentence::Pooling;
use model_core::tokenizer::{EncodeOptions, SpecialText};
use model_tests::{Reference, best, cpu, outside};
use serde::Deserialize;

/// The whole way from texts.
#[derive(Deserialize)]
struct TextCases {
    texts: Vec<TextCase>,
    pairs: Vec<PairCase>,
}

#[derive(Deserialize)]
struct TextCase {
    text: String,
    ids: Vec<u32>,
    mean: Option<Vec<f32>>,
    cls: Option<Vec<f32>>,
}

#[derive(Deserialize)]
struct PairCase {
    a: String,
    b: String,
    ids: Vec<u32>,
    type_ids: Option<Vec<u32>>,
    scores: Option<Vec<f32>>,
}

/// Why a directory is not checked, where it is not.
fn left_out(path: &Path) -> Option<String> {
    let reference = Reference::open(&path.join("reference.safetensors"));
    if reference.values("hidden_0").is_none() {
        return Some("no encoder".to_owned());
    }
    outside::unsupported(path, &registry())
}

fn text_cases_agree(path: &Path) {
    let Ok(cases) = std::fs::read(path.join("text_cases.json")) else {
        return;
    };
    let cases: TextCases = serde_json::from_slice(&cases).unwrap();
    let file = ModelFile::open(path, &registry()).unwrap();
    for case in &cases.texts {
        let got = file.tokenizer().encode(&case.text, EncodeOptions::PROMPT);
        let got: Vec<u32> = got.iter().map(|id| id.0).collect();
        assert_eq!(got, case.ids, "{}: {:?}", path.display(), case.text);
    }
    let is_pair = |case: &&PairCase| case.scores.is_some() || case.type_ids.is_some();
    for PairCase {
        a,
        b,
        ids,
        type_ids,
        ..
    } in cases.pairs.iter().filter(is_pair)
    {
        let pair = file.tokenizer().encode_pair(a, b, SpecialText::Parse);
        let got: Vec<u32> = pair.tokens.iter().map(|id| id.0).collect();
        assert_eq!(&got, ids, "{}: {a:?}, {b:?}", path.display());
        let second = type_ids
            .as_ref()
            .and_then(|types| types.iter().position(|&of| of == 1));
        if let Some(second) = second {
            assert_eq!(pair.second, second, "{}: {a:?}, {b:?}", path.display());
        }
    }
    match file.model().output() {
        OutputKind::Scores { n_labels: 1 } => {
            let mut reranker = Reranker::new(cpu(), &file, &RerankerConfig::default()).unwrap();
            for case in &cases.pairs {
                let scores = reranker
                    .scores(file.tokenizer(), &case.a, &[&case.b])
                    .unwrap();
                assert_close(&case.a, &scores, case.scores.as_ref().unwrap(), TOLERANCE);
            }
        }
        OutputKind::Scores { .. } => {}
        _ => vectors_agree(&file, &cases.texts),
    }
}

fn vectors_agree(file: &ModelFile, cases: &[TextCase]) {
    for (pooling, normalization, tolerance) in [
        (Pooling::Mean, Normalization::Unit, VECTOR_TOLERANCE),
        (Pooling::Cls, Normalization::None, TOLERANCE),
    ] {
        let config = EmbedderConfig {
            pooling: Some(pooling),
            normalization: Some(normalization),
            ..EmbedderConfig::default()
        };
        let mut embedder = Embedder::new(cpu(), file, &config).unwrap();
        for case in cases {
            let got = embedder.embed(file.tokenizer(), &[&case.text]).unwrap();
            let wanted = match pooling {
                Pooling::Mean => case.mean.as_ref(),
                _ => case.cls.as_ref(),
            };
            assert_close(&case.text, &got[0], wanted.unwrap(), tolerance);
        }
    }
}

fn agrees(path: &Path) {
    let reference = path.join("reference.safetensors");
    let subject = Subject::file(path, &reference);
    subject.check("kv-cpu", cpu);
    subject.check("kv-candle", CandleBackend::cpu);
    text_cases_agree(path);
    let gguf = path.join("model-f32.gguf");
    if gguf.exists() {
        let subject = Subject::file(&gguf, &reference);
        subject.check("kv-cpu", cpu);
        subject.check("kv-candle", CandleBackend::cpu);
    }
}

#[test]
fn encoders_agree_with_their_references() {
    outside::check_all(left_out, agrees);
}

/// Why a directory is not checked as an encoder-decoder, where it is not.
fn has_no_source(path: &Path) -> Option<String> {
    let reference = Reference::open(&path.join("reference.safetensors"));
    match reference.values("enc_hidden_0") {
        None => Some("no encoder-decoder".to_owned()),
        Some(_) => outside::unsupported(path, &registry()),
    }
}

fn sources_agree<B: Backend>(path: &Path, backend: impl Fn() -> B) {
    let directory = HfDirectory::open(path, &registry()).unwrap();
    let reference = Reference::open(&path.join("reference.safetensors"));
    let (model, seq) = (directory.model(), SeqId(0));
    let ids = |name: &str| -> Vec<TokenId> {
        let ids = reference.ids(name).unwrap();
        ids.into_iter().map(TokenId).collect()
    };
    for at in 0..3 {
        let (model, weights) = (Arc::clone(model), directory.weights().clone());
        let config = EngineConfig {
            n_ctx: Some(128),
            kv_types: KvType::F32.into(),
            ..EngineConfig::default()
        };
        let mut engine = Engine::new(backend(), Arc::clone(&model), weights, &config).unwrap();
        let encode = |engine: &mut Engine<B>| {
            let source = Batch::source(seq, ids(&format!("enc_ids_{at}")));
            engine.encode(&source).unwrap();
        };
        encode(&mut engine);
        let mut text = Batch::new();
        for id in ids(&format!("dec_ids_{at}")) {
            text.push_token(id).in_sequence(seq).with_output();
        }
        let logits = engine.decode(&text).unwrap().values().to_vec();
        let name = format!("logits_{at}");
        assert_close(&name, &logits, &reference.values(&name).unwrap().1, 2e-4);
        engine.remove(Seqs::One(seq), PosRange::ALL).unwrap();
        encode(&mut engine);
        let [mut next] = model.source_encoder().unwrap().start[..] else {
            panic!("texts begin with one token");
        };
        for wanted in ids(&format!("greedy_{at}")) {
            let logits = engine.decode(&Batch::prompt(seq, [next])).unwrap();
            next = TokenId(best(logits.last().unwrap()));
            assert_eq!(next, wanted, "{}, {at}", path.display());
        }
    }
}

#[test]
fn encoder_decoders_agree_with_their_references() {
    outside::check_all(has_no_source, |path| {
        sources_agree(path, cpu);
        sources_agree(path, CandleBackend::cpu);
    });
}
