//! `POST /embed`: vectors as text-embeddings-inference gives them. Its `/rerank` is in
//! [`rerank`](super::rerank).

use axum::extract::{Request, State};
use axum::routing::MethodRouter;
use cellar_tasks::LongTexts;
use serde::Deserialize;

use crate::api::on_post;
use crate::api::openai::embeddings::{Input, check_texts};
use crate::app::App;
use crate::body_worker::run_blocking;
use crate::field_rule::{FieldRule, Neutral};
use crate::json::{self, Body};
use crate::model::Job;
use crate::texts::{EmbedJob, long_texts};

/// Parameters that would change the vectors.
pub(in crate::api) const LIMITED: [FieldRule; 3] = [
    FieldRule::new(
        "normalize",
        Neutral::True,
        "the length of vectors is the model's choice",
    ),
    FieldRule::new(
        "prompt_name",
        Neutral::Empty,
        "write the prompt before the text",
    ),
    FieldRule::new(
        "truncation_direction",
        Neutral::Text("Right"),
        "texts are cut off at the right",
    ),
];

#[derive(Clone, Debug, Deserialize)]
struct Fields {
    model: Option<String>,
    inputs: Input,
    truncate: Option<bool>,
    dimensions: Option<usize>,
}

/// The route: a list of vectors.
pub(crate) fn embed() -> MethodRouter<App> {
    on_post(async |State(app): State<App>, request: Request| {
        let body = Body::read(request).await?;
        let fields: Fields = body.get()?;
        drop(body);
        let model = app
            .model_for(fields.model.as_deref(), Job::Embeddings)
            .await?;
        app.check_open()?;
        let texts = fields.inputs.texts();
        check_texts("inputs", &texts, &model)?;
        let job = EmbedJob {
            texts,
            long_texts: long_texts(fields.truncate, LongTexts::Refuse),
        };
        let embedded = model.embedder()?.embed(job).await?.cut(fields.dimensions)?;
        run_blocking(move || json::respond(&embedded.vectors)).await
    })
}
