//! `GET /lora-adapters`, which lists the adapters of the model, and `POST`, which sets the scales
//! of requests that do not say any.

use axum::extract::{Request, State};
use axum::response::Response;
use axum::routing::MethodRouter;
use http_body_util::BodyExt;
use serde_json::{Value, json};

use crate::adapters::{AdapterScale, ServedAdapters};
use crate::api::{on_get, on_post};
use crate::app::App;
use crate::error::ApiError;
use crate::json;
use crate::model::Job;

/// The adapters.
pub(crate) fn list() -> MethodRouter<App> {
    on_get(async |State(app): State<App>| {
        let model = app.model_for(None, Job::Texts).await?;
        let list = model.adapters().map_or(json!([]), listed);
        Ok::<Response, ApiError>(json::respond(&list))
    })
}

fn listed(served: &ServedAdapters) -> Value {
    let scales = served.scales();
    let all = served.all().all().iter().zip(scales.iter()).enumerate();
    all.map(|(id, (adapter, scale))| {
        let invocation = adapter.invocation().iter().map(|token| token.0);
        let mut object = json!({
            "id": id,
            "path": adapter.path(),
            "name": adapter.name(),
            "scale": scale,
        });
        if !adapter.invocation().is_empty() {
            object["alora_invocation_tokens"] = json!(invocation.collect::<Vec<_>>());
        }
        object
    })
    .collect()
}

/// Sets their scales: those that are not in the list get 0.
pub(crate) fn set() -> MethodRouter<App> {
    on_post(async |State(app): State<App>, request: Request| {
        let read = request.into_body().collect().await;
        let read = read.map_err(|error| ApiError::invalid(error.to_string()))?;
        let bytes = read.to_bytes();
        let body: Value = serde_json::from_slice(&bytes)
            .map_err(|error| ApiError::invalid(format!("the body is not valid JSON: {error}")))?;
        if !body.is_array() {
            return Err(ApiError::invalid("the body is not a JSON list"));
        }
        let list: Vec<AdapterScale> = serde_json::from_value(body).map_err(|error| {
            ApiError::invalid(format!(
                "the list is not one of objects with 'id' and 'scale': {error}"
            ))
        })?;
        let model = app.model_for(None, Job::Texts).await?;
        match (model.adapters(), list.len()) {
            (Some(served), _) => served.set(&list)?,
            (None, 0) => {}
            (None, n) => {
                let message = format!("the list has {n} adapters, and this server has none");
                return Err(ApiError::unsupported("lora", message));
            }
        }
        Ok::<Response, ApiError>(json::respond(&json!({"success": true})))
    })
}
