//! `POST /v1/rerank` (Jina), `/v2/rerank` (Cohere), `/rerank` (text-embeddings-inference, or Jina),
//! and `/v1/score` (vLLM): how well documents answer a query.
//!
//! Invariant: a score is the sigmoid of what the model gives, between 0 and 1 as those APIs say,
//! unless a request asks for the raw one.

use axum::extract::{Request, State};
use axum::response::Response;
use axum::routing::MethodRouter;
use cellar_engine::{LongTexts, Ranked};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::api::on_post;
use crate::api::openai::embeddings::check_number;
use crate::app::App;
use crate::error::ApiError;
use crate::ids::{now, random_id};
use crate::json::{self, Body, FieldRule, Neutral};
use crate::model::Job;
use crate::models::ModelInUse;
use crate::texts::{RerankJob, long_texts};

/// Parameters of Cohere's API that would change the scores.
pub(in crate::api) const COHERE_LIMITED: [FieldRule; 1] = [FieldRule::new(
    "max_tokens_per_doc",
    Neutral::Empty,
    "documents are cut off where the model takes no more",
)];

/// Parameters of text-embeddings-inference that would change the scores.
pub(in crate::api) const TEI_LIMITED: [FieldRule; 1] = [FieldRule::new(
    "truncation_direction",
    Neutral::Text("Right"),
    "documents are cut off at the right",
)];

/// The fields of Jina's and Cohere's APIs.
#[derive(Clone, Debug, Deserialize)]
struct RerankFields {
    model: Option<String>,
    query: String,
    documents: Vec<Document>,
    top_n: Option<usize>,
    return_documents: Option<bool>,
}

/// The fields of text-embeddings-inference.
#[derive(Clone, Debug, Deserialize)]
struct TeiFields {
    model: Option<String>,
    query: String,
    texts: Vec<String>,
    top_n: Option<usize>,
    raw_scores: Option<bool>,
    return_text: Option<bool>,
    truncate: Option<bool>,
}

/// The fields of vLLM's API, under its present and its earlier names.
#[derive(Clone, Debug, Deserialize)]
struct ScoreFields {
    model: Option<String>,
    #[serde(alias = "queries", alias = "data_1")]
    text_1: Texts,
    #[serde(alias = "documents", alias = "items", alias = "data_2")]
    text_2: Texts,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "expected a text or a list of texts")]
enum Texts {
    One(String),
    Many(Vec<String>),
}

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "expected a text, or an object with a text")]
enum Document {
    Text(String),
    Object { text: String },
}

impl Document {
    fn into_text(self) -> String {
        match self {
            Self::Text(text) | Self::Object { text } => text,
        }
    }
}

impl Texts {
    fn list(self) -> Vec<String> {
        match self {
            Self::One(text) => vec![text],
            Self::Many(texts) => texts,
        }
    }
}

/// Documents in the order of their scores.
struct RankedDocuments {
    model: ModelInUse,
    ranked: Vec<Ranked>,
    /// As they came; empty where they are not wanted.
    documents: Vec<String>,
    n_tokens: usize,
}

/// Jina's route.
pub(crate) fn jina() -> MethodRouter<App> {
    on_post(async |State(app): State<App>, request: Request| {
        let body = Body::read(request).await?;
        answer_jina(&app, &body).await
    })
}

/// The route of llama-server, which has the fields of text-embeddings-inference where there are
/// `texts`.
pub(crate) fn tei_or_jina() -> MethodRouter<App> {
    on_post(async |State(app): State<App>, request: Request| {
        let body = Body::read(request).await?;
        match body.field("texts") {
            Some(_) => answer_tei(&app, &body).await,
            None => answer_jina(&app, &body).await,
        }
    })
}

/// Cohere's route.
pub(crate) fn cohere() -> MethodRouter<App> {
    on_post(async |State(app): State<App>, request: Request| {
        let body = Body::read(request).await?;
        let ranked = rank(&app, body.get()?, LongTexts::Truncate).await?;
        Ok::<Response, ApiError>(json::respond(&json!({
            "id": random_id("rerank-"),
            "results": ranked.results(),
            "meta": {"api_version": {"version": "2"}, "tokens": {"input_tokens": ranked.n_tokens}},
        })))
    })
}

/// vLLM's route.
pub(crate) fn score() -> MethodRouter<App> {
    on_post(async |State(app): State<App>, request: Request| {
        let body = Body::read(request).await?;
        let fields: ScoreFields = body.get()?;
        drop(body);
        let model = app.model_for(fields.model.as_deref(), Job::Scores).await?;
        app.check_open()?;
        let (queries, documents) = (fields.text_1.list(), fields.text_2.list());
        check_number("text_2", documents.len())?;
        let (mut scores, mut n_tokens) = (Vec::with_capacity(documents.len()), 0);
        for job in jobs(queries, documents)? {
            let scored = model.reranker()?.score(job).await?;
            scores.extend(scored.scores);
            n_tokens += scored.n_tokens;
        }
        let data = scores.iter().enumerate().map(|(index, &score)| {
            json!({"index": index, "object": "score", "score": Ranked::probability(score)})
        });
        Ok::<Response, ApiError>(json::respond(&json!({
            "id": random_id("score-"),
            "object": "list",
            "created": now(),
            "model": model.id(),
            "data": data.collect::<Vec<_>>(),
            "usage": usage(n_tokens),
        })))
    })
}

/// One query for all documents, or one for each.
fn jobs(mut queries: Vec<String>, documents: Vec<String>) -> Result<Vec<RerankJob>, ApiError> {
    let job = |query: String, documents: Vec<String>| RerankJob {
        query,
        documents,
        long_texts: LongTexts::Refuse,
    };
    match (queries.len(), documents.len()) {
        (1, _) => Ok(queries
            .pop()
            .map(|query| job(query, documents))
            .into_iter()
            .collect()),
        (n, m) if n == m => {
            let pairs = queries.into_iter().zip(documents);
            Ok(pairs
                .map(|(query, document)| job(query, vec![document]))
                .collect())
        }
        (n, m) => {
            let message = format!(
                "'text_1' has {n} texts and 'text_2' {m}: give 1 and any number, or as many"
            );
            Err(ApiError::invalid_param("text_1", message))
        }
    }
}

async fn answer_jina(app: &App, body: &Body) -> Result<Response, ApiError> {
    let ranked = rank(app, body.get()?, LongTexts::Refuse).await?;
    Ok(json::respond(&json!({
        "id": random_id("rerank-"),
        "object": "list",
        "model": ranked.model.id(),
        "results": ranked.results(),
        "usage": usage(ranked.n_tokens),
    })))
}

async fn answer_tei(app: &App, body: &Body) -> Result<Response, ApiError> {
    let fields: TeiFields = body.get()?;
    check_number("texts", fields.texts.len())?;
    let long_texts = long_texts(fields.truncate, LongTexts::Refuse);
    let fields_of_all = RerankFields {
        model: fields.model,
        query: fields.query,
        documents: fields.texts.into_iter().map(Document::Text).collect(),
        top_n: fields.top_n,
        return_documents: fields.return_text,
    };
    let ranked = rank(app, fields_of_all, long_texts).await?;
    let results = ranked.ranked.iter().map(|one| {
        let score = match fields.raw_scores {
            Some(true) => one.score,
            Some(false) | None => Ranked::probability(one.score),
        };
        let mut result = json!({"index": one.index, "score": score});
        if let Some(text) = ranked.documents.get(one.index) {
            result["text"] = json!(text);
        }
        result
    });
    Ok(json::respond(&results.collect::<Vec<Value>>()))
}

async fn rank(
    app: &App,
    fields: RerankFields,
    long_texts: LongTexts,
) -> Result<RankedDocuments, ApiError> {
    let model = app.model_for(fields.model.as_deref(), Job::Scores).await?;
    app.check_open()?;
    check_number("documents", fields.documents.len())?;
    let documents = fields.documents.into_iter().map(Document::into_text);
    let job = RerankJob {
        query: fields.query,
        documents: documents.collect(),
        long_texts,
    };
    let documents = match fields.return_documents {
        Some(true) => job.documents.clone(),
        _ => Vec::new(),
    };
    let scored = model.reranker()?.score(job).await?;
    let mut ranked = Ranked::sorted(scored.scores);
    ranked.truncate(fields.top_n.unwrap_or(usize::MAX));
    Ok(RankedDocuments {
        model,
        ranked,
        documents,
        n_tokens: scored.n_tokens,
    })
}

impl RankedDocuments {
    /// As Jina and Cohere list them.
    fn results(&self) -> Vec<Value> {
        let results = self.ranked.iter().map(|one| {
            let score = Ranked::probability(one.score);
            let mut result = json!({"index": one.index, "relevance_score": score});
            if let Some(text) = self.documents.get(one.index) {
                result["document"] = json!({"text": text});
            }
            result
        });
        results.collect()
    }
}

fn usage(n_tokens: usize) -> Value {
    json!({"prompt_tokens": n_tokens, "total_tokens": n_tokens})
}
