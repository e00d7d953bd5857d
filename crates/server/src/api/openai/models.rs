//! `GET /v1/models` and `GET /v1/models/{id}`.

use axum::extract::{Path, State};
use axum::response::Response;
use axum::routing::MethodRouter;
use serde_json::{Value, json};

use crate::api::on_get;
use crate::app::App;
use crate::error::ApiError;
use crate::json;
use crate::model::{ServedModel, Work};

/// All models.
pub(crate) fn list() -> MethodRouter<App> {
    on_get(async |State(app): State<App>| {
        let models = app.models().iter().map(|model| object(model));
        json::respond(&json!({"object": "list", "data": models.collect::<Vec<_>>()}))
    })
}

/// One model.
pub(crate) fn one() -> MethodRouter<App> {
    on_get(async |State(app): State<App>, Path(id): Path<String>| {
        let model = app.model(Some(&id))?;
        Ok::<Response, ApiError>(json::respond(&object(model)))
    })
}

fn object(model: &ServedModel) -> Value {
    let limit = match model.work() {
        Work::Texts(service) => Some(service.prompt_limits().n_tokens),
        _ => None,
    };
    json!({
        "id": model.id(),
        "object": "model",
        "created": model.created(),
        "owned_by": "cellar",
        "aliases": model.settings().aliases,
        "max_model_len": limit,
        "meta": {"architecture": model.architecture(), "n_vocab": model.tokenizer().n_tokens()},
    })
}
