//! `POST /v1/rerank` (Jina), `/v2/rerank` (Cohere), `/rerank` (text-embeddings-inference, or Jina),
//! and `/v1/score` (vLLM): how well documents answer a query.
//!
//! Invariant: a score is the sigmoid of what the model gives, between 0 and 1 as those APIs say,
//! unless a request asks for the raw one; vLLM's is the cosine of vectors where a model gives such.

use axum::extract::{Request, State};
use axum::response::Response;
use axum::routing::MethodRouter;
use cellar_tasks::{LongTexts, Ranked};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::api::on_post;
use crate::api::openai::embeddings::check_number;
use crate::app::App;
use crate::error::ApiError;
use crate::field_rule::{FieldRule, Neutral};
use crate::ids::{now, random_id};
use crate::json::{self, Body};
use crate::model::Job;
use crate::models::ModelInUse;
use crate::texts::{EmbedTexts, Embedded, RerankJob, Scored, long_texts};

/// Parameters of Cohere's API that save time there.
pub(in crate::api) const COHERE_LIMITED: [FieldRule; 1] = [FieldRule::new(
    "max_tokens_per_doc",
    Neutral::Empty,
    "documents are cut off where the model takes no more",
)
.skipped()];

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
        Ok::<Response, ApiError>(body.skips().respond(json!({
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
        let model = scoring_model(&app, fields.model.as_deref()).await?;
        app.check_open()?;
        let (queries, documents) = (fields.text_1.list(), fields.text_2.list());
        check_number("text_2", documents.len())?;
        check_pairs(queries.len(), documents.len())?;
        let Scored { scores, n_tokens } = if model.does(Job::Scores) {
            reranked(&model, queries, documents).await?
        } else {
            compared(&model, queries, documents).await?
        };
        let data = scores
            .iter()
            .enumerate()
            .map(|(index, &score)| json!({"index": index, "object": "score", "score": score}));
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

/// The model that scores pairs: a reranker, or else one that gives vectors.
async fn scoring_model(app: &App, name: Option<&str>) -> Result<ModelInUse, ApiError> {
    match app.model_for(name, Job::Scores).await {
        Ok(model) => Ok(model),
        Err(error) => {
            let model = app.model_for(name, Job::Embeddings).await;
            model.map_err(|_| error)
        }
    }
}

/// What a reranker says of pairs.
async fn reranked(
    model: &ModelInUse,
    queries: Vec<String>,
    documents: Vec<String>,
) -> Result<Scored, ApiError> {
    let (mut scores, mut n_tokens) = (Vec::with_capacity(documents.len()), 0);
    for job in jobs(queries, documents) {
        let scored = model.reranker()?.score(job).await?;
        scores.extend(scored.scores.into_iter().map(Ranked::probability));
        n_tokens += scored.n_tokens;
    }
    Ok(Scored { scores, n_tokens })
}

/// The cosines of the vectors of pairs.
async fn compared(
    model: &ModelInUse,
    queries: Vec<String>,
    documents: Vec<String>,
) -> Result<Scored, ApiError> {
    let n_queries = queries.len();
    let texts = EmbedTexts::Texts([queries, documents].concat());
    let Embedded { vectors, n_tokens } = model.embedder()?.embed(texts).await?;
    let (queries, documents) = vectors.split_at(n_queries.min(vectors.len()));
    let pairs = queries.iter().cycle().zip(documents);
    let scores = pairs.map(|(query, document)| cosine(query, document));
    Ok(Scored {
        scores: scores.collect(),
        n_tokens,
    })
}

/// The cosine of the angle between two vectors.
fn cosine(a: &[f32], b: &[f32]) -> f32 {
    let dot = |a: &[f32], b: &[f32]| -> f32 { a.iter().zip(b).map(|(x, y)| x * y).sum() };
    let lengths = (dot(a, a) * dot(b, b)).sqrt();
    if lengths > 0.0 {
        dot(a, b) / lengths
    } else {
        0.0
    }
}

/// Checks that each document has a query: one for all, or one for each.
///
/// # Errors
/// [`ApiError`] 400 with both numbers.
fn check_pairs(n_queries: usize, n_documents: usize) -> Result<(), ApiError> {
    if n_queries == 1 || n_queries == n_documents {
        return Ok(());
    }
    let message = format!(
        "'text_1' has {n_queries} texts and 'text_2' {n_documents}: give 1 and any number, or as many"
    );
    Err(ApiError::invalid_param("text_1", message))
}

/// One query for all documents, or one for each.
fn jobs(queries: Vec<String>, documents: Vec<String>) -> Vec<RerankJob> {
    let job = |query: String, documents: Vec<String>| RerankJob {
        query,
        documents,
        long_texts: LongTexts::Refuse,
    };
    let mut queries = queries.into_iter();
    if queries.len() == 1 {
        let one = queries.next();
        return one.map(|query| job(query, documents)).into_iter().collect();
    }
    let pairs = queries.zip(documents);
    pairs
        .map(|(query, document)| job(query, vec![document]))
        .collect()
}

async fn answer_jina(app: &App, body: &Body) -> Result<Response, ApiError> {
    let ranked = rank(app, body.get()?, LongTexts::Refuse).await?;
    Ok(body.skips().respond(json!({
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
