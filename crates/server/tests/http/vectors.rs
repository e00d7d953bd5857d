//! Vectors and scores in the forms of all APIs, against the references of the encoders.

use cellar_server::{App, ModelSettings, ServedModel, ServerConfig};
use cellar_tasks::{Embedder, EmbedderConfig, Reranker, RerankerConfig};
use kv_backend::BoxedBackend;
use model_core::architecture::Registry;
use model_core::model_file::ModelFile;
use model_tests::fixture;
use model_tests::http::post;
use serde_json::{Value, json};

use crate::support::Server;

struct Encoders {
    server: Server,
    vectors: Value,
    scores: Value,
}

impl Encoders {
    /// An embedder and a reranker.
    fn start() -> Self {
        let app = App::new(vec![embedder(), reranker()], ServerConfig::default());
        Self {
            server: Server::start(app),
            vectors: reference("bert_tiny"),
            scores: reference("bert_rerank_tiny"),
        }
    }

    #[track_caller]
    fn ask(&self, path: &str, body: Value) -> Value {
        let reply = post(self.server.address, path, &body);
        assert_eq!(reply.status, 200, "{path} {body}: {}", reply.body);
        reply.json()
    }

    /// The error of a request, and its status.
    #[track_caller]
    fn refused(&self, path: &str, body: Value, status: u16) -> String {
        let reply = post(self.server.address, path, &body);
        assert_eq!(reply.status, status, "{path} {body}: {}", reply.body);
        reply.body
    }

    /// The score of each document as a probability.
    fn expected_scores(&self) -> Vec<f64> {
        let scores = self.scores["scores"].as_array().unwrap().iter();
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        scores
            .map(|score| sigmoid(score[0].as_f64().unwrap()))
            .collect()
    }
}

fn settings(id: &str) -> ModelSettings {
    ModelSettings {
        id: id.to_owned(),
        ..ModelSettings::default()
    }
}

/// A BERT for vectors, `vectors`.
pub(crate) fn embedder() -> ServedModel {
    let file = open("bert_tiny");
    let backend = BoxedBackend::new(model_tests::cpu());
    let embedder = Embedder::new(backend, &file, &EmbedderConfig::default()).unwrap();
    ServedModel::embeddings(&file, embedder, settings("vectors")).unwrap()
}

/// A BERT that scores pairs, `scores`.
pub(crate) fn reranker() -> ServedModel {
    let file = open("bert_rerank_tiny");
    let backend = BoxedBackend::new(model_tests::cpu());
    let reranker = Reranker::new(backend, &file, &RerankerConfig::default()).unwrap();
    ServedModel::scores(&file, reranker, settings("scores")).unwrap()
}

fn open(name: &str) -> ModelFile {
    let mut registry = Registry::new();
    model_bert::register(&mut registry);
    ModelFile::open(fixture("encoders").join(name), &registry).unwrap()
}

fn reference(name: &str) -> Value {
    let path = fixture("encoders").join(format!("{name}.reference.json"));
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn numbers(list: &Value) -> Vec<f64> {
    let list = list.as_array().unwrap_or_else(|| panic!("no list: {list}"));
    list.iter().map(|x| x.as_f64().unwrap()).collect()
}

#[track_caller]
fn assert_close(given: &Value, expected: &[f64]) {
    let given = numbers(given);
    assert_eq!(given.len(), expected.len());
    for (a, b) in given.iter().zip(expected) {
        assert!((a - b).abs() < 2e-5, "{a}, not {b}");
    }
}

/// The first values of a vector, of length 1 again.
fn cut(vector: &Value, n: usize) -> Vec<f64> {
    let mut first = numbers(vector);
    first.truncate(n);
    let length = first.iter().map(|x| x * x).sum::<f64>().sqrt();
    first.iter().map(|x| x / length).collect()
}

#[test]
fn every_api_gives_the_vectors_of_the_reference() {
    let encoders = Encoders::start();
    let (texts, vectors) = (&encoders.vectors["texts"], &encoders.vectors["mean"]);
    let whole = |at: usize| cut(&vectors[at], 32);
    let openai = encoders.ask(
        "/v1/embeddings",
        json!({"model": "vectors", "input": texts}),
    );
    let ollama = encoders.ask("/api/embed", json!({"model": "vectors", "input": texts}));
    let tei = encoders.ask("/embed", json!({"inputs": texts}));
    let llama = encoders.ask("/embeddings", json!({"content": texts}));
    for at in 0..texts.as_array().unwrap().len() {
        assert_close(&openai["data"][at]["embedding"], &whole(at));
        assert_close(&ollama["embeddings"][at], &whole(at));
        assert_close(&tei[at], &whole(at));
        assert_eq!(llama[at]["index"], at);
        assert_close(&llama[at]["embedding"][0], &whole(at));
    }
    let one = encoders.ask("/embedding", json!({"input": texts[0]}));
    assert_eq!(one, json!([llama[0]]));
    let one = encoders.ask("/embed", json!({"inputs": texts[0]}));
    assert_eq!(one, json!([tei[0]]));
    for (body, field) in [
        (json!({"inputs": "a", "normalize": false}), "normalize"),
        (
            json!({"inputs": "a", "prompt_name": "query"}),
            "prompt_name",
        ),
        (json!({"inputs": []}), "inputs"),
        (json!({"inputs": [[70_000]]}), "inputs"),
        (json!({"inputs": "a", "model": "scores"}), "model"),
    ] {
        let error = encoders.refused("/embed", body, 400);
        assert!(error.contains(field), "{error}");
    }
}

#[test]
fn vectors_are_cut_to_dimensions_and_normalized() {
    let encoders = Encoders::start();
    let text = &encoders.vectors["texts"][0];
    let vector = &encoders.vectors["mean"][0];
    for n in [1, 8, 31, 32] {
        let expected = cut(vector, n);
        let openai = encoders.ask("/v1/embeddings", json!({"input": text, "dimensions": n}));
        assert_close(&openai["data"][0]["embedding"], &expected);
        let ollama = encoders.ask(
            "/api/embed",
            json!({"model": "vectors", "input": text, "dimensions": n as f64}),
        );
        assert_close(&ollama["embeddings"][0], &expected);
        let tei = encoders.ask("/embed", json!({"inputs": text, "dimensions": n}));
        assert_close(&tei[0], &expected);
        let llama = encoders.ask("/embeddings", json!({"input": text, "dimensions": n}));
        assert_close(&llama[0]["embedding"][0], &expected);
    }
    for n in [0, 33] {
        let body = json!({"input": text, "dimensions": n});
        let error = encoders.refused("/v1/embeddings", body, 400);
        assert!(error.contains("have 32"), "{error}");
    }
}

#[test]
fn long_texts_are_cut_off_where_the_api_says_so() {
    let encoders = Encoders::start();
    // More than the 24 tokens of the model, and as many of them as it takes.
    let [long, cut] = [60, 11].map(|n| "a cat ".repeat(n));
    let expected = encoders.ask("/embed", json!({"inputs": cut}))[0].clone();
    let expected = numbers(&expected);
    for truncate in [json!(true), json!(null)] {
        let body = json!({"model": "vectors", "input": long, "truncate": truncate});
        let given = encoders.ask("/api/embed", body);
        assert_close(&given["embeddings"][0], &expected);
        assert_eq!(given["prompt_eval_count"], 24);
    }
    let old = encoders.ask(
        "/api/embeddings",
        json!({"model": "vectors", "prompt": long}),
    );
    assert_close(&old["embedding"], &expected);
    let tei = encoders.ask("/embed", json!({"inputs": long, "truncate": true}));
    assert_close(&tei[0], &expected);
    let strict = json!({"model": "vectors", "input": long, "truncate": false});
    for (path, body) in [
        ("/api/embed", strict),
        ("/v1/embeddings", json!({"input": long})),
        ("/embed", json!({"inputs": long})),
        ("/embeddings", json!({"input": long})),
    ] {
        let error = encoders.refused(path, body, 400);
        assert!(error.contains("24"), "{error}");
    }
    // The setting of one request is none of the next.
    encoders.refused("/embed", json!({"inputs": long}), 400);
}

#[test]
fn scores_are_probabilities_in_every_api() {
    let encoders = Encoders::start();
    let (query, documents) = (&encoders.scores["query"], &encoders.scores["documents"]);
    let expected = encoders.expected_scores();
    let mut order: Vec<usize> = (0..expected.len()).collect();
    order.sort_by(|&a, &b| expected[b].total_cmp(&expected[a]));
    let check = |results: &Value, name: &str, n: usize| {
        let results = results.as_array().unwrap();
        assert_eq!(results.len(), n);
        for (result, &at) in results.iter().zip(&order) {
            assert_eq!(result["index"], at, "{results:?}");
            assert!((result[name].as_f64().unwrap() - expected[at]).abs() < 1e-5);
        }
    };
    let jina = json!({"query": query, "documents": documents, "top_n": 3});
    for path in [
        "/v1/rerank",
        "/v1/reranking",
        "/rerank",
        "/reranking",
        "/v2/rerank",
    ] {
        let answer = encoders.ask(path, jina.clone());
        check(&answer["results"], "relevance_score", 3);
        assert_eq!(
            answer["meta"]["api_version"]["version"] == "2",
            path == "/v2/rerank"
        );
    }
    let tei = json!({"query": query, "texts": documents, "return_text": true});
    let answer = encoders.ask("/rerank", tei.clone());
    check(&answer, "score", expected.len());
    assert_eq!(answer[0]["text"], documents[order[0]]);
    let mut raw = tei;
    raw["raw_scores"] = json!(true);
    let answer = encoders.ask("/rerank", raw);
    let best = answer[0]["score"].as_f64().unwrap();
    let logit = encoders.scores["scores"][order[0]][0].as_f64().unwrap();
    assert!((best - logit).abs() < 1e-4, "{best}, not {logit}");

    let score = |one: &Value, two: &Value| {
        let answer = encoders.ask("/score", json!({"text_1": one, "text_2": two}));
        let data = answer["data"].as_array().unwrap();
        json!(
            data.iter()
                .map(|one| one["score"].clone())
                .collect::<Vec<_>>()
        )
    };
    assert_close(&score(query, documents), &expected);
    let queries = json!(vec![query; expected.len()]);
    assert_close(&score(&queries, documents), &expected);
    let names = json!({"queries": query, "documents": documents});
    assert_eq!(
        encoders.ask("/v1/score", names)["data"]
            .as_array()
            .unwrap()
            .len(),
        expected.len()
    );
    // A model of vectors compares them.
    let (one, two) = (json!(["the bird", "a cat"]), json!(["a dog sat", "a cat"]));
    let vectors = |texts: &Value| {
        let body = json!({"model": "vectors", "input": texts});
        let answer = encoders.ask("/v1/embeddings", body);
        [0, 1].map(|at| cut(&answer["data"][at]["embedding"], usize::MAX))
    };
    let (first, second) = (vectors(&one), vectors(&two));
    let cosine = |at: usize| -> f64 { first[at].iter().zip(&second[at]).map(|(x, y)| x * y).sum() };
    let body = json!({"model": "vectors", "text_1": one, "text_2": two});
    let answer = encoders.ask("/v1/score", body);
    let scores: Value = answer["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["score"].clone())
        .collect();
    assert_close(&scores, &[cosine(0), 1.0]);
    assert!(cosine(0) < 0.999, "{scores}");
    let uneven = json!({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]});
    let error = encoders.refused("/score", uneven, 400);
    assert!(error.contains("has 2 texts and 'text_2' 3"), "{error}");
}

#[test]
fn documents_are_cut_off_where_the_api_says_so() {
    let encoders = Encoders::start();
    let long = "the bird sang on the mat ".repeat(60);
    let body = json!({"query": "bird", "documents": [long], "texts": [long]});
    encoders.refused("/v1/rerank", body.clone(), 400);
    encoders.refused("/rerank", body.clone(), 400);
    let cohere = encoders.ask("/v2/rerank", body.clone());
    let mut tei = body;
    tei["truncate"] = json!(true);
    let tei = encoders.ask("/rerank", tei);
    assert_eq!(tei[0]["score"], cohere["results"][0]["relevance_score"]);
    let tokens = json!({"query": "bird", "documents": [long], "max_tokens_per_doc": 4096});
    let skipped = encoders.ask("/v2/rerank", tokens);
    assert_eq!(skipped["results"], cohere["results"]);
    assert_eq!(skipped["warnings"][0]["param"], "max_tokens_per_doc");
}
