//! `POST /api/embed`, and its older form `/api/embeddings`.

use std::time::Instant;

use axum::extract::{Extension, Request, State};
use axum::response::Response;
use axum::routing::MethodRouter;
use cellar_tasks::LongTexts;
use serde::Deserialize;
use serde_json::json;

use super::{KeepAlive, keep_as_asked};
use crate::api::on_post;
use crate::app::App;
use crate::auth::Tenant;
use crate::body_worker::run_blocking;
use crate::error::ApiError;
use crate::json::{self, Body};
use crate::model::Job;
use crate::texts::{EmbedJob, EmbedTexts, long_texts};

#[derive(Clone, Debug, Deserialize)]
struct Fields {
    model: String,
    input: Input,
    /// False if a text that is too long is refused; otherwise its end is cut off.
    truncate: Option<bool>,
    dimensions: Option<usize>,
    keep_alive: Option<KeepAlive>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "expected a text or a list of texts")]
enum Input {
    One(String),
    Many(Vec<String>),
}

/// The fields of `/api/embeddings`.
#[derive(Clone, Debug, Deserialize)]
struct OneField {
    model: String,
    prompt: String,
    keep_alive: Option<KeepAlive>,
}

/// The route of one vector.
pub(crate) fn one() -> MethodRouter<App> {
    on_post(
        async |State(app): State<App>, Extension(tenant): Extension<Tenant>, request: Request| {
            let body = Body::read(request).await?;
            let fields: OneField = body.get()?;
            app.check_open()?;
            let keep = fields.keep_alive.as_ref().map(KeepAlive::keep);
            let keep = keep.transpose()?;
            let model = app.model_for(Some(&fields.model), Job::Embeddings).await?;
            keep_as_asked(&model, &tenant, keep);
            let job = EmbedJob {
                texts: EmbedTexts::Texts(vec![fields.prompt]),
                long_texts: LongTexts::Truncate,
            };
            let mut embedded = model.embedder()?.embed(job).await?;
            let vector = embedded.vectors.pop().unwrap_or_default();
            Ok::<Response, ApiError>(json::respond(&json!({ "embedding": vector })))
        },
    )
}

/// The route of vectors.
pub(crate) fn route() -> MethodRouter<App> {
    on_post(embed)
}

async fn embed(
    State(app): State<App>,
    Extension(tenant): Extension<Tenant>,
    request: Request,
) -> Result<Response, ApiError> {
    let came = Instant::now();
    let body = Body::read(request).await?;
    let fields: Fields = body.get()?;
    app.check_open()?;
    let keep = fields.keep_alive.as_ref().map(KeepAlive::keep);
    let keep = keep.transpose()?;
    let model = app.model_for(Some(&fields.model), Job::Embeddings).await?;
    let load_time = came.elapsed();
    keep_as_asked(&model, &tenant, keep);
    let texts = match fields.input {
        Input::One(text) => vec![text],
        Input::Many(texts) => texts,
    };
    let embedder = model.embedder()?;
    let embedded = if texts.is_empty() {
        None
    } else {
        let job = EmbedJob {
            texts: EmbedTexts::Texts(texts),
            long_texts: long_texts(fields.truncate, LongTexts::Truncate),
        };
        Some(embedder.embed(job).await?.cut(fields.dimensions)?)
    };
    let n_tokens = embedded.as_ref().map_or(0, |embedded| embedded.n_tokens);
    let vectors = embedded.map_or_else(Vec::new, |embedded| embedded.vectors);
    let answer = move || {
        json::respond(&json!({
            "model": fields.model,
            "embeddings": vectors,
            "total_duration": u64::try_from(came.elapsed().as_nanos()).unwrap_or(u64::MAX),
            "load_duration": u64::try_from(load_time.as_nanos()).unwrap_or(u64::MAX),
            "prompt_eval_count": n_tokens,
        }))
    };
    run_blocking(answer).await
}
