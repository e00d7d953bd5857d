//! Vectors of tiny encoders are those that an independent implementation computed in float64: on
//! both backends, alone and with others.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::path::Path;

use crate::common::{BERT, MODERN, Reference, copy, data, edit_json, registry};
use cellar_engine::{EngineError, Normalization};
use cellar_tasks::{Embedder, EmbedderConfig, LongTexts};
use kv_backend::Backend;
use kv_candle::CandleBackend;
use kv_core::batch::Batch;
use kv_core::{SeqId, TokenId};
use model_core::model_file::{ModelFile, OpenModel};
use model_core::sentence::Pooling;
use model_tests::cpu;
use serde_json::json;

/// Largest difference of a value of a vector of length 1.
const TOLERANCE: f32 = 2e-6;

fn assert_close(what: &str, got: &[f32], wanted: &[f32], tolerance: f32) {
    assert_eq!(got.len(), wanted.len(), "{what}");
    for (at, (got, wanted)) in got.iter().zip(wanted).enumerate() {
        // Not `> tolerance`: NaN must fail.
        let near = (got - wanted).abs() <= tolerance;
        assert!(near, "{what}, value {at}: {got}, not {wanted}");
    }
}

fn tokens(reference: &Reference) -> Vec<Vec<TokenId>> {
    let ids: Vec<Vec<u32>> = reference.get("ids");
    let of = |ids: Vec<u32>| ids.into_iter().map(TokenId).collect();
    ids.into_iter().map(of).collect()
}

fn with_pooling(pooling: Pooling) -> EmbedderConfig {
    EmbedderConfig {
        pooling: Some(pooling),
        ..EmbedderConfig::default()
    }
}

/// All vectors, in batches of every size.
fn check<B: Backend>(name: &str, backend: impl Fn() -> B) {
    let reference = Reference::of(name);
    let texts = tokens(&reference);
    let file = OpenModel::open(data(name), &registry()).unwrap();
    for (pooling, key) in [
        (Pooling::Mean, "mean"),
        (Pooling::Cls, "cls"),
        (Pooling::Last, "last"),
    ] {
        let wanted: Vec<Vec<f32>> = reference.get(key);
        // One text at a time, two or three, and all in one batch.
        for n_batch in [1, 30, 2048] {
            let config = EmbedderConfig {
                n_batch,
                ..with_pooling(pooling)
            };
            let mut embedder = Embedder::new(backend(), &file, &config).unwrap();
            let vectors = embedder.embed_tokens(&texts).unwrap();
            assert_eq!(vectors.len(), wanted.len());
            for (at, (got, wanted)) in vectors.iter().zip(&wanted).enumerate() {
                let what = format!("{name}, {key}, {n_batch} at once, text {at}");
                assert_close(&what, got, wanted, TOLERANCE);
            }
        }
    }
}

#[test]
fn bert_on_the_cpu() {
    check(BERT, cpu);
}

#[test]
fn bert_on_candle() {
    check(BERT, CandleBackend::cpu);
}

#[test]
fn a_symmetric_window_on_the_cpu() {
    check(MODERN, cpu);
}

#[test]
fn a_symmetric_window_on_candle() {
    check(MODERN, CandleBackend::cpu);
}

#[test]
fn on_the_cpu_neighbours_change_no_bit() {
    for name in [BERT, MODERN] {
        let texts = tokens(&Reference::of(name));
        let file = OpenModel::open(data(name), &registry()).unwrap();
        let config = with_pooling(Pooling::Mean);
        let mut embedder = Embedder::new(cpu(), &file, &config).unwrap();
        let together = embedder.embed_tokens(&texts).unwrap();
        for (text, wanted) in texts.iter().zip(&together).rev() {
            assert_eq!(&embedder.embed_tokens(&[text]).unwrap()[0], wanted);
        }
    }
}

#[test]
fn every_row_of_a_text() {
    for name in [BERT, MODERN] {
        let reference = Reference::of(name);
        let wanted: Vec<Vec<f32>> = reference.get("rows_0");
        let text = tokens(&reference).swap_remove(0);
        let mut batch = Batch::new();
        for &token in &text {
            let entry = batch.push_token(token).in_sequence(SeqId(0));
            entry.with_output();
        }
        let file = OpenModel::open(data(name), &registry()).unwrap();
        let embedder = Embedder::new(cpu(), &file, &with_pooling(Pooling::Cls)).unwrap();
        let config = cellar_engine::EngineConfig::default();
        let (model, weights) = (file.model().clone(), file.weights());
        let mut engine = cellar_engine::Engine::new(cpu(), model, weights, &config).unwrap();
        let rows = engine.embed(&batch).unwrap();
        assert_eq!(rows.dim(), embedder.dim());
        for (got, wanted) in rows.rows().zip(&wanted) {
            assert_close(name, got, wanted, 2e-5);
        }
    }
}

#[test]
fn texts_become_the_tokens_and_vectors_of_the_reference() {
    let reference = Reference::of(BERT);
    let texts: Vec<String> = reference.get("texts");
    let file = ModelFile::open(data(BERT), &registry()).unwrap();
    // The directory says that rows are averaged.
    let mut embedder = Embedder::new(cpu(), &file, &EmbedderConfig::default()).unwrap();
    assert_eq!(embedder.pooling(), Pooling::Mean);
    let encoded = embedder.tokens(file.tokenizer(), &texts).unwrap();
    assert_eq!(encoded, tokens(&reference));
    let vectors = embedder.embed(file.tokenizer(), &texts).unwrap();
    for (got, wanted) in vectors.iter().zip(&reference.get::<Vec<Vec<f32>>>("mean")) {
        assert_close("mean", got, wanted, TOLERANCE);
    }
    let no_texts: [&str; 0] = [];
    assert!(
        embedder
            .embed(file.tokenizer(), &no_texts)
            .unwrap()
            .is_empty()
    );
}

#[test]
fn vectors_stay_as_long_as_they_are_where_that_is_asked() {
    let reference = Reference::of(BERT);
    let file = OpenModel::open(data(BERT), &registry()).unwrap();
    let config = EmbedderConfig {
        normalization: Some(Normalization::None),
        ..EmbedderConfig::default()
    };
    let mut embedder = Embedder::new(cpu(), &file, &config).unwrap();
    let got = embedder.embed_tokens(&tokens(&reference)[..1]).unwrap();
    let wanted: Vec<f32> = reference.get("mean_as_it_is_0");
    assert_close("mean", &got[0], &wanted, 2e-5);
}

#[test]
fn a_long_text_is_refused_with_numbers_or_cut_as_asked() {
    let reference = Reference::of(BERT);
    let text: String = reference.get("long_text");
    let file = ModelFile::open(data(BERT), &registry()).unwrap();
    let mut embedder = Embedder::new(cpu(), &file, &EmbedderConfig::default()).unwrap();
    let texts = ["a cat", text.as_str()];
    let error = embedder.embed(file.tokenizer(), &texts).unwrap_err();
    assert_eq!(
        error.to_string(),
        "text 2 has 42 tokens, but the model takes 24"
    );
    let too_many = [vec![TokenId(1); 25]];
    let error = embedder.embed_tokens(&too_many).unwrap_err();
    assert!(matches!(
        error,
        EngineError::TextTooLong {
            index: 0,
            n_tokens: 25,
            limit: 24
        }
    ));
    let config = EmbedderConfig {
        long_texts: LongTexts::Truncate,
        ..EmbedderConfig::default()
    };
    let mut embedder = Embedder::new(cpu(), &file, &config).unwrap();
    let vectors = embedder.embed(file.tokenizer(), &texts).unwrap();
    let wanted: Vec<f32> = reference.get("mean_of_long_text_cut");
    assert_close("cut", &vectors[1], &wanted, TOLERANCE);
}

#[test]
fn the_context_bounds_a_text_where_nothing_else_does() {
    let copy = copy(BERT);
    std::fs::remove_file(copy.path().join("sentence_bert_config.json")).unwrap();
    let file = OpenModel::open(copy.path(), &registry()).unwrap();
    let mut embedder = Embedder::new(cpu(), &file, &EmbedderConfig::default()).unwrap();
    assert_eq!(embedder.max_tokens(), 32);
    assert!(embedder.embed_tokens(&[vec![TokenId(9); 32]]).is_ok());
    let error = embedder.embed_tokens(&[vec![TokenId(9); 33]]).unwrap_err();
    assert!(error.to_string().ends_with("takes 32"), "{error}");
}

#[test]
fn the_tanh_form_of_gelu_is_another() {
    let copy = copy(BERT);
    edit_json(&copy.path().join("config.json"), |config| {
        config["hidden_act"] = json!("gelu_new");
    });
    let reference = Reference::of(BERT);
    let vector = |path: &Path, backend: &str| {
        let file = OpenModel::open(path, &registry()).unwrap();
        let config = EmbedderConfig::default();
        let text = &tokens(&reference)[..1];
        match backend {
            "cpu" => Embedder::new(cpu(), &file, &config)
                .unwrap()
                .embed_tokens(text),
            _ => Embedder::new(CandleBackend::cpu(), &file, &config)
                .unwrap()
                .embed_tokens(text),
        }
        .unwrap()
        .swap_remove(0)
    };
    let wanted: Vec<f32> = reference.get("mean_gelu_new_0");
    for backend in ["cpu", "candle"] {
        let got = vector(copy.path(), backend);
        assert_close(backend, &got, &wanted, TOLERANCE);
        let other = vector(&data(BERT), backend);
        assert!(got.iter().zip(&other).any(|(a, b)| (a - b).abs() > 3e-5));
    }
}

#[test]
fn many_texts_are_more_than_one_batch_of_sequences() {
    let texts = tokens(&Reference::of(BERT));
    let file = OpenModel::open(data(BERT), &registry()).unwrap();
    let config = EmbedderConfig {
        n_batch: 1 << 20,
        ..EmbedderConfig::default()
    };
    let mut embedder = Embedder::new(cpu(), &file, &config).unwrap();
    let many: Vec<_> = texts.iter().cycle().take(600).cloned().collect();
    assert_eq!(embedder.n_together(&many), 256);
    let vectors = embedder.embed_tokens(&many).unwrap();
    assert_eq!(vectors.len(), 600);
    for (at, vector) in vectors.iter().enumerate() {
        assert_eq!(vector, &vectors[at % texts.len()], "text {at}");
    }
}
