//! Encoders, whose tokens see later ones: vectors and scores are those of independent
//! implementations.

use cellar_engine::{Engine, EngineConfig};
use cellar_tasks::{Embedder, EmbedderConfig};
use kv_backend::Backend;
use kv_core::batch::Batch;
use kv_core::{SeqId, TokenId};
use model_core::architecture::Registry;
use model_core::model_file::OpenModel;
use model_core::sentence::Pooling;
use model_tests::{Recipe, distance, fixture};

use super::register;

pub(super) fn registry() -> Registry {
    let mut registry = Registry::new();
    register(&mut registry);
    registry
}

/// Vectors of length 1 of all texts of an encoder, in one batch, are the reference's.
pub(crate) fn vectors_agree<B: Backend>(backend: B, name: &str, tolerance: f32) {
    let folder = fixture("encoders");
    let json = std::fs::read(folder.join(format!("{name}.reference.json"))).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
    let texts: Vec<Vec<u32>> = serde_json::from_value(json["ids"].clone()).unwrap();
    let wanted: Vec<Vec<f32>> = serde_json::from_value(json["mean"].clone()).unwrap();
    let texts = texts.into_iter();
    let texts: Vec<Vec<TokenId>> = texts
        .map(|ids| ids.into_iter().map(TokenId).collect())
        .collect();
    let file = OpenModel::open(folder.join(name), &registry()).unwrap();
    let config = EmbedderConfig {
        pooling: Some(Pooling::Mean),
        ..EmbedderConfig::default()
    };
    let mut embedder = Embedder::new(backend, &file, &config).unwrap();
    let vectors = embedder.embed_tokens(&texts).unwrap();
    assert_eq!(vectors.len(), wanted.len());
    for (got, wanted) in vectors.iter().zip(&wanted) {
        let off = distance(got, wanted);
        assert!(off < tolerance, "{name}: off by {off}");
    }
}

/// Rows of three texts, in one batch, are the reference's, where the kernels compute the encoder.
pub(crate) fn rows_agree<B: Backend>(backend: B, name: &str, tolerance: f32) {
    let recipe = Recipe::open(&fixture("encoders").join(name));
    let directory = recipe.directory(&registry()).unwrap();
    let config = EngineConfig {
        n_seqs: 3,
        ..EngineConfig::default()
    };
    let reference = recipe.reference();
    let (mut batch, mut wanted) = (Batch::new(), Vec::new());
    for (at, ids) in reference.prompts().iter().enumerate() {
        let types = reference.ids(&format!("type_ids_{at}"));
        let kept = reference.ids(&format!("rows_{at}")).unwrap();
        for (i, &id) in ids.iter().enumerate() {
            let seq = SeqId(u32::try_from(at).unwrap());
            let entry = batch.push_token(TokenId(id)).in_sequence(seq);
            let entry = entry.of_type(types.as_ref().map_or(0, |types| types[i]));
            if kept.contains(&u32::try_from(i).unwrap()) {
                entry.with_output();
            }
        }
        wanted.extend(reference.values(&format!("hidden_{at}")).unwrap().1);
    }
    let (model, weights) = (directory.model().clone(), directory.weights().clone());
    let mut engine = Engine::new(backend, model, weights, &config).unwrap();
    let off = distance(engine.embed(&batch).unwrap().values(), &wanted);
    assert!(off < tolerance, "{name}: off by {off}");
}

/// Scores of three texts by a classification head are those of transformers.
pub(crate) fn scores_agree<B: Backend>(backend: B, name: &str, tolerance: f32) {
    let recipe = Recipe::open(&fixture("encoders").join(name));
    let directory = recipe.directory(&registry()).unwrap();
    let config = EngineConfig {
        n_seqs: 3,
        ..EngineConfig::default()
    };
    let reference = recipe.reference();
    let mut batch = Batch::new();
    for (seq, ids) in (0..).map(SeqId).zip(reference.prompts()) {
        for (at, &id) in ids.iter().enumerate() {
            let entry = batch.push_token(TokenId(id)).in_sequence(seq);
            if at == 0 {
                entry.with_output();
            }
        }
    }
    let (model, weights) = (directory.model().clone(), directory.weights().clone());
    let mut engine = Engine::new(backend, model, weights, &config).unwrap();
    let scores = engine.embed(&batch).unwrap();
    let wanted = (0..3).flat_map(|at| reference.values(&format!("scores_{at}")).unwrap().1);
    let off = distance(scores.values(), &wanted.collect::<Vec<f32>>());
    assert!(off < tolerance, "{name}: off by {off}");
}
