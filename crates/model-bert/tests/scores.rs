//! Scores of tiny rerankers are those of independent implementations: from texts, of numpy in
//! float64; from tokens, of transformers. On both backends, alone and with others.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use crate::common::{BERT, Reference, copy, data, edit_json, registry};
use cellar_engine::{Engine, EngineConfig, EngineError};
use cellar_tasks::{Embedder, EmbedderConfig, LongTexts, Ranked, Reranker, RerankerConfig};
use kv_backend::Backend;
use kv_candle::CandleBackend;
use kv_core::batch::Batch;
use kv_core::{SeqId, TokenId};
use model_core::model_file::{ModelFile, OpenModel};
use model_core::sentence::Pooling;
use model_core::tokenizer::EncodeOptions;
use model_tests::{Recipe, cpu};
use serde_json::{Value, json};

const BERT_RERANKER: &str = "bert_rerank_tiny";
const XLM_RERANKER: &str = "xlm_roberta_rerank_tiny";

/// Largest difference of a score.
const TOLERANCE: f32 = 5e-6;

#[track_caller]
fn assert_close(what: &str, got: &[f32], wanted: &[f32]) {
    assert_eq!(got.len(), wanted.len(), "{what}");
    for (got, wanted) in got.iter().zip(wanted) {
        // Not `> tolerance`: NaN must fail.
        assert!(
            (got - wanted).abs() <= TOLERANCE,
            "{what}: {got}, not {wanted}"
        );
    }
}

fn ids(tokens: &[TokenId]) -> Vec<u32> {
    tokens.iter().map(|id| id.0).collect()
}

/// Tokens, types and scores of every document, in batches of every size.
fn check<B: Backend>(name: &str, backend: impl Fn() -> B) {
    let reference = Reference::of(name);
    let (query, documents): (String, Vec<String>) =
        (reference.get("query"), reference.get("documents"));
    let wanted: Vec<Vec<f32>> = reference.get("scores");
    let file = ModelFile::open(data(name), &registry()).unwrap();
    for n_batch in [1, 40, 2048] {
        let config = RerankerConfig {
            n_batch,
            ..RerankerConfig::default()
        };
        let mut reranker = Reranker::new(backend(), &file, &config).unwrap();
        let pairs = reranker
            .pairs(file.tokenizer(), &query, &documents)
            .unwrap();
        let got: Vec<Vec<u32>> = pairs.iter().map(|pair| ids(&pair.tokens)).collect();
        assert_eq!(got, reference.get::<Vec<Vec<u32>>>("ids"), "{name}");
        if name == BERT_RERANKER {
            let types: Vec<Vec<u32>> = reference.get("types");
            for (pair, types) in pairs.iter().zip(types) {
                let second = types.iter().take_while(|&&of| of == 0).count();
                assert_eq!(pair.second, second, "{name}");
            }
        }
        let scores = reranker
            .scores(file.tokenizer(), &query, &documents)
            .unwrap();
        assert_close(name, &scores, &wanted.concat());
        let ranked = reranker.rank(file.tokenizer(), &query, &documents).unwrap();
        assert!(ranked.windows(2).all(|two| two[0].score >= two[1].score));
        assert!(ranked.iter().all(|one| one.score == scores[one.index]));
    }
}

#[test]
fn bert_on_the_cpu() {
    check(BERT_RERANKER, cpu);
}

#[test]
fn bert_on_candle() {
    check(BERT_RERANKER, CandleBackend::cpu);
}

#[test]
fn xlm_roberta_on_the_cpu() {
    check(XLM_RERANKER, cpu);
}

#[test]
fn xlm_roberta_on_candle() {
    check(XLM_RERANKER, CandleBackend::cpu);
}

#[test]
fn on_the_cpu_other_documents_change_no_bit() {
    for name in [BERT_RERANKER, XLM_RERANKER] {
        let reference = Reference::of(name);
        let (query, documents): (String, Vec<String>) =
            (reference.get("query"), reference.get("documents"));
        let file = ModelFile::open(data(name), &registry()).unwrap();
        let mut reranker = Reranker::new(cpu(), &file, &RerankerConfig::default()).unwrap();
        let together = reranker
            .scores(file.tokenizer(), &query, &documents)
            .unwrap();
        for (document, wanted) in documents.iter().zip(together) {
            let alone = reranker
                .scores(file.tokenizer(), &query, &[document])
                .unwrap();
            assert_eq!(alone, [wanted], "{name}");
        }
    }
}

/// The types of tokens are part of what BERT reads.
#[test]
fn the_second_text_has_another_type() {
    let reference = Reference::of(BERT_RERANKER);
    let (query, documents): (String, Vec<String>) =
        (reference.get("query"), reference.get("documents"));
    let file = ModelFile::open(data(BERT_RERANKER), &registry()).unwrap();
    let mut reranker = Reranker::new(cpu(), &file, &RerankerConfig::default()).unwrap();
    let mut pairs = reranker
        .pairs(file.tokenizer(), &query, &documents)
        .unwrap();
    let scores = reranker.score_pairs(&pairs).unwrap();
    for pair in &mut pairs {
        pair.second = pair.tokens.len();
    }
    let of_one_type = reranker.score_pairs(&pairs).unwrap();
    assert!(
        scores
            .iter()
            .zip(of_one_type)
            .all(|(a, b)| (a - b).abs() > 1e-3)
    );
}

#[test]
fn unigram_pieces_are_those_of_the_reference() {
    let reference = Reference::of(XLM_RERANKER);
    let texts: Vec<String> = reference.get("texts");
    let file = ModelFile::open(data(XLM_RERANKER), &registry()).unwrap();
    for (text, wanted) in texts.iter().zip(reference.get::<Vec<Vec<u32>>>("text_ids")) {
        let got = file.tokenizer().encode(text, EncodeOptions::PROMPT);
        assert_eq!(ids(&got), wanted, "{text:?}");
    }
}

/// Tokens and scores of transformers, of one label and of three.
#[test]
fn scores_of_given_tokens_are_those_of_transformers() {
    for (name, n_labels) in [("xlm_roberta_reranker", 1), ("roberta_classifier", 3)] {
        let recipe = Recipe::open(&data(name));
        let directory = recipe.directory(&registry()).unwrap();
        let config = EngineConfig {
            n_seqs: 3,
            ..EngineConfig::default()
        };
        let (model, weights) = (directory.model().clone(), directory.weights().clone());
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
        let mut engine = Engine::new(cpu(), model.clone(), weights.clone(), &config).unwrap();
        let on_cpu = engine.embed(&batch).unwrap().values().to_vec();
        let backend = CandleBackend::cpu();
        let mut engine = Engine::new(backend, model, weights, &config).unwrap();
        let on_candle = engine.embed(&batch).unwrap();
        assert_eq!(on_candle.dim(), n_labels);
        let wanted = (0..3).map(|at| reference.values(&format!("scores_{at}")).unwrap().1);
        let wanted: Vec<f32> = wanted.flatten().collect();
        assert_close(name, &on_cpu, &wanted);
        assert_close(name, on_candle.values(), &wanted);
    }
}

#[test]
fn a_long_document_is_refused_with_numbers_or_cut() {
    for name in [BERT_RERANKER, XLM_RERANKER] {
        let reference = Reference::of(name);
        let (query, documents): (String, Vec<String>) =
            (reference.get("query"), reference.get("documents"));
        let file = ModelFile::open(data(name), &registry()).unwrap();
        let config = RerankerConfig {
            max_tokens: Some(16),
            ..RerankerConfig::default()
        };
        let mut refusing = Reranker::new(cpu(), &file, &config).unwrap();
        assert_eq!(refusing.max_tokens(), 16);
        let error = refusing.scores(file.tokenizer(), &query, &documents[4..]);
        let error = error.unwrap_err().to_string();
        assert!(error.ends_with("tokens, but the model takes 16"), "{error}");
        let config = RerankerConfig {
            long_texts: LongTexts::Truncate,
            ..config
        };
        let mut cutting = Reranker::new(cpu(), &file, &config).unwrap();
        let pairs = cutting
            .pairs(file.tokenizer(), &query, &documents[4..])
            .unwrap();
        assert_eq!(
            ids(&pairs[0].tokens),
            reference.get::<Vec<u32>>("cut_ids"),
            "{name}"
        );
        let scores = cutting.score_pairs(&pairs).unwrap();
        assert_close(name, &scores, &reference.get::<Vec<f32>>("cut_score"));
        // A query alone is not cut.
        let long = query.repeat(9);
        let error = cutting
            .scores(file.tokenizer(), &long, &documents)
            .unwrap_err();
        assert!(
            matches!(error, EngineError::TextTooLong { index: 0, .. }),
            "{error}"
        );
    }
}

#[test]
fn models_of_the_other_kind_are_refused() {
    let open = |name: &str| OpenModel::open(data(name), &registry()).unwrap();
    let error = Reranker::new(cpu(), &open(BERT), &RerankerConfig::default()).unwrap_err();
    let wanted = "'bert' gives no scores of texts: it has no classification head";
    assert_eq!(error.to_string(), wanted);
    let config = EmbedderConfig {
        pooling: Some(Pooling::Cls),
        ..EmbedderConfig::default()
    };
    let error = Embedder::new(cpu(), &open(BERT_RERANKER), &config).unwrap_err();
    assert_eq!(error.to_string(), "'bert' gives no vectors of texts");
    let dir = tempfile::tempdir().unwrap();
    Recipe::open(&data("roberta_classifier")).expand(dir.path());
    let file = OpenModel::open(dir.path(), &registry()).unwrap();
    let error = Reranker::new(cpu(), &file, &RerankerConfig::default()).unwrap_err();
    let wanted = "'bert' is a classifier with 3 labels: a reranker has one";
    assert_eq!(error.to_string(), wanted);
}

#[test]
fn broken_rerankers_are_refused_by_name() {
    let refused = |name: &str, edit: &dyn Fn(&mut serde_json::Value)| {
        let copy = copy(name);
        edit_json(&copy.path().join("config.json"), edit);
        OpenModel::open(copy.path(), &registry())
            .unwrap_err()
            .to_string()
    };
    let error = refused(XLM_RERANKER, &|config| {
        config["max_position_embeddings"] = json!(2)
    });
    assert!(
        error.ends_with("'max_position_embeddings' is 2, not a number above 2"),
        "{error}"
    );
    // A head whose scores are missing.
    let error = refused(BERT, &|config| {
        config["architectures"] = json!(["BertForSequenceClassification"]);
    });
    assert!(
        error.contains("is missing") || error.contains("has no such tensor"),
        "{error}"
    );
}

#[test]
fn equal_scores_keep_their_order() {
    let ranked = Ranked::sorted(vec![0.5, 2.0, 0.5]);
    let order: Vec<_> = ranked.iter().map(|one| one.index).collect();
    assert_eq!(order, [1, 0, 2]);
}

#[test]
fn a_reranker_without_token_types_opens_with_its_tokenizer() {
    let dir = tempfile::tempdir().unwrap();
    Recipe::open(&data("deberta_v2_reranker")).expand(dir.path());
    let file = std::fs::read(data(BERT_RERANKER).join("tokenizer.json")).unwrap();
    let mut tokenizer: Value = serde_json::from_slice(&file).unwrap();
    let vocab = tokenizer["model"]["vocab"].as_object_mut().unwrap();
    for id in vocab.len()..480 {
        vocab.insert(format!("[unused{id}]"), id.into());
    }
    let path = dir.path().join("tokenizer.json");
    std::fs::write(path, tokenizer.to_string()).unwrap();
    let file = ModelFile::open(dir.path(), &registry()).unwrap();
    let mut reranker = Reranker::new(cpu(), &file, &RerankerConfig::default()).unwrap();
    let scores = reranker
        .scores(file.tokenizer(), "a b", &["c", "d"])
        .unwrap();
    assert!(scores.iter().all(|score| score.is_finite()), "{scores:?}");
}
