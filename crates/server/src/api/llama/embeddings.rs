//! `POST /embeddings` and `/embedding`: vectors in llama-server's form, a list of lists for each
//! text.

use axum::extract::{Request, State};
use axum::routing::MethodRouter;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::api::on_post;
use crate::api::openai::embeddings::{Input, check_texts};
use crate::app::App;
use crate::body_worker::run_blocking;
use crate::field_rule::{FieldRule, Neutral};
use crate::json::{self, Body};
use crate::model::Job;

/// Parameters that would change the vectors. 2 is a length of 1, as they have.
pub(in crate::api) const LIMITED: [FieldRule; 1] = [FieldRule::new(
    "embd_normalize",
    Neutral::Number(2.0),
    "the length of vectors is the model's choice",
)];

#[derive(Clone, Debug, Deserialize)]
struct Fields {
    model: Option<String>,
    #[serde(alias = "content")]
    input: Input,
    dimensions: Option<usize>,
}

/// The route.
pub(crate) fn route() -> MethodRouter<App> {
    on_post(async |State(app): State<App>, request: Request| {
        let body = Body::read(request).await?;
        let fields: Fields = body.get()?;
        drop(body);
        let model = app
            .model_for(fields.model.as_deref(), Job::Embeddings)
            .await?;
        app.check_open()?;
        let texts = fields.input.texts();
        check_texts("input", &texts, &model)?;
        let embedded = model
            .embedder()?
            .embed(texts)
            .await?
            .cut(fields.dimensions)?;
        let answer = move || {
            let vectors = embedded.vectors.iter().enumerate();
            let list =
                vectors.map(|(index, vector)| json!({"index": index, "embedding": [vector]}));
            json::respond(&list.collect::<Vec<Value>>())
        };
        run_blocking(answer).await
    })
}
