//! `GET /api/v0/models`, `/api/v0/models/{id}` and `/api/v1/models`: the models as LM Studio lists
//! them.

use axum::extract::{Path, State};
use axum::response::Response;
use axum::routing::MethodRouter;
use model_core::media::MediaKind;
use serde_json::{Value, json};

use crate::api::on_get;
use crate::app::App;
use crate::error::ApiError;
use crate::json;
use crate::model::Job;
use crate::models::{LoadState, ModelFacts, ModelStatus, n_ctx};

/// All models, in the form of the first version.
pub(crate) fn list_v0() -> MethodRouter<App> {
    on_get(async |State(app): State<App>| {
        app.registry().refresh().await;
        let models: Vec<Value> = app.models().iter().map(entry_v0).collect();
        json::respond(&json!({"object": "list", "data": models}))
    })
}

/// One model.
pub(crate) fn one_v0() -> MethodRouter<App> {
    on_get(async |State(app): State<App>, Path(id): Path<String>| {
        let registry = app.registry();
        let status = registry.status(registry.find_now(&id).await?);
        let status = status.ok_or_else(|| ApiError::unknown_model(&id, &[]))?;
        Ok::<Response, ApiError>(json::respond(&entry_v0(&status)))
    })
}

/// All models, in the form of the second version.
pub(crate) fn list_v1() -> MethodRouter<App> {
    on_get(async |State(app): State<App>| {
        app.registry().refresh().await;
        let models: Vec<Value> = app.models().iter().map(entry_v1).collect();
        json::respond(&json!({ "models": models }))
    })
}

fn entry_v0(status: &ModelStatus) -> Value {
    let facts = &facts(status);
    let mut entry = json!({
        "id": status.id,
        "object": "model",
        "type": kind(facts, ["llm", "embeddings"]),
        "publisher": "cellar",
        "arch": facts.architecture,
        "compatibility_type": format(facts),
        "quantization": facts.weights.quantization,
        "state": match status.state {
            LoadState::Loaded => "loaded",
            LoadState::Unloaded | LoadState::Loading | LoadState::Unloading => "not-loaded",
        },
        "max_context_length": facts.n_ctx,
        "capabilities": if facts.takes_tools() { json!(["tool_use"]) } else { json!([]) },
    });
    if let Some(n_ctx) = loaded_context(status) {
        entry["loaded_context_length"] = json!(n_ctx);
    }
    entry
}

fn entry_v1(status: &ModelStatus) -> Value {
    let facts = &facts(status);
    let instances = match status.state {
        LoadState::Loaded => json!([{
            "id": status.id, "config": {"context_length": loaded_context(status)},
        }]),
        LoadState::Unloaded | LoadState::Loading | LoadState::Unloading => json!([]),
    };
    json!({
        "type": kind(facts, ["llm", "embedding"]),
        "publisher": "cellar",
        "key": status.id,
        "display_name": status.id,
        "architecture": facts.architecture,
        "quantization": {"name": facts.weights.quantization, "bits_per_weight": null},
        "size_bytes": status.facts.file_bytes,
        "params_string": null,
        "loaded_instances": instances,
        "max_context_length": facts.n_ctx,
        "format": format(facts),
        "capabilities": {
            "vision": status.model.as_ref().is_some_and(|model| model.takes(MediaKind::Picture)),
            "trained_for_tool_use": facts.takes_tools(),
        },
        "description": null,
    })
}

/// The facts of a model: of a loaded one its own, otherwise those of its file.
fn facts(status: &ModelStatus) -> ModelFacts {
    match &status.model {
        Some(model) => ModelFacts {
            format: status.facts.format,
            ..ModelFacts::of(model)
        },
        None => status.facts.clone(),
    }
}

/// LM Studio's word for the format: it has two, and its clients refuse a list with others.
fn format(facts: &ModelFacts) -> &'static str {
    if facts.format == "safetensors" {
        "mlx"
    } else {
        "gguf"
    }
}

/// LM Studio's word for what continues texts, or for what gives vectors.
fn kind(facts: &ModelFacts, [texts, vectors]: [&'static str; 2]) -> &'static str {
    match facts.job {
        Some(Job::Embeddings | Job::Scores) => vectors,
        Some(Job::Texts) | None => texts,
    }
}

fn loaded_context(status: &ModelStatus) -> Option<usize> {
    status.model.as_deref().and_then(n_ctx)
}
