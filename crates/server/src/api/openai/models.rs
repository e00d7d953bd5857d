//! `GET /v1/models` and `GET /v1/models/{id}`.

use std::time::UNIX_EPOCH;

use axum::extract::{Path, State};
use axum::response::Response;
use axum::routing::MethodRouter;
use model_core::adapters::Adapter;
use serde_json::{Value, json};

use crate::api::on_get;
use crate::app::App;
use crate::error::ApiError;
use crate::json;
use crate::models::{Expiry, LoadState, ModelFacts, ModelStatus};

/// All models.
pub(crate) fn list() -> MethodRouter<App> {
    on_get(async |State(app): State<App>| {
        app.registry().refresh().await;
        let models = app.models();
        let models = models.iter().flat_map(|status| {
            let model = status.model.as_ref();
            let served = model.and_then(|model| model.adapters());
            let all = served.into_iter().flat_map(|served| served.all().all());
            let named = all.map(|adapter| of_adapter(status, adapter));
            std::iter::once(object(status)).chain(named)
        });
        json::respond(&json!({"object": "list", "data": models.collect::<Vec<_>>()}))
    })
}

/// One model.
pub(crate) fn one() -> MethodRouter<App> {
    on_get(async |State(app): State<App>, Path(id): Path<String>| {
        let registry = app.registry();
        let status = registry.status(registry.find_now(&id).await?);
        let status = status.ok_or_else(|| ApiError::unknown_model(&id, &[]))?;
        Ok::<Response, ApiError>(json::respond(&object(&status)))
    })
}

/// OpenAI's object, with the members of llama-server's.
fn object(status: &ModelStatus) -> Value {
    let facts = match &status.model {
        Some(model) => &ModelFacts::of(model),
        None => &status.facts,
    };
    let file = status.facts.modified.and_then(|time| {
        let since = time.duration_since(UNIX_EPOCH).ok()?;
        Some(since.as_secs())
    });
    let created = status.model.as_ref().map(|model| model.created());
    json!({
        "id": status.id,
        "object": "model",
        "created": created.or(file).unwrap_or(0),
        "owned_by": "cellar",
        "aliases": status.aliases,
        "max_model_len": facts.n_ctx,
        "meta": {
            "architecture": facts.architecture, "n_vocab": facts.n_vocab, "n_ctx": facts.n_ctx,
        },
        "status": load_status(status),
    })
}

/// vLLM's object of an adapter, whose name picks it.
fn of_adapter(status: &ModelStatus, adapter: &Adapter) -> Value {
    json!({
        "id": adapter.name(),
        "object": "model",
        "created": status.model.as_ref().map_or(0, |model| model.created()),
        "owned_by": "cellar",
        "root": adapter.path(),
        "parent": status.id,
    })
}

/// Whether a model is in memory, as llama-server's router tells it, with what it holds.
fn load_status(status: &ModelStatus) -> Value {
    let value = match status.state {
        LoadState::Unloaded => "unloaded",
        LoadState::Loading => "loading",
        LoadState::Loaded => "loaded",
        LoadState::Unloading => "unloading",
    };
    let mut object = json!({"value": value});
    if status.state == LoadState::Loaded {
        object["bytes"] = json!(status.bytes.total());
        object["requests"] = json!(status.n_uses);
        object["unloads_in_seconds"] = match status.expiry {
            Expiry::Never => Value::Null,
            Expiry::In(time) => json!(time.as_secs_f64()),
        };
    }
    if let (LoadState::Unloaded, Some(error)) = (status.state, &status.error) {
        object["failed"] = json!(true);
        object["error"] = json!(error);
    }
    object
}
