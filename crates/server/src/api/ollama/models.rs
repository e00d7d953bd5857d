//! `GET /api/tags`, `/api/ps`, `/api/version` and `POST /api/show`.

use std::time::{Duration, UNIX_EPOCH};

use axum::extract::{Request, State};
use axum::response::Response;
use axum::routing::MethodRouter;
use serde::Deserialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::rfc3339;
use crate::api::{on_get, on_post};
use crate::app::App;
use crate::error::ApiError;
use crate::fim;
use crate::json::{self, Body};
use crate::model::{ServedModel, Work};

/// When a model is unloaded: never, which Ollama writes as a time far away.
const NEVER: &str = "9999-12-31T23:59:59Z";

#[derive(Clone, Debug, Deserialize)]
struct ShowFields {
    model: Option<String>,
    /// An older name of `model`.
    name: Option<String>,
}

/// The models.
pub(crate) fn tags() -> MethodRouter<App> {
    on_get(async |State(app): State<App>| {
        let models: Vec<Value> = app.models().iter().map(|model| entry(model)).collect();
        json::respond(&json!({ "models": models }))
    })
}

/// The models in memory: all.
pub(crate) fn ps() -> MethodRouter<App> {
    on_get(async |State(app): State<App>| {
        let running = app.models().iter().map(|model| {
            let mut entry = entry(model);
            entry["expires_at"] = json!(NEVER);
            entry["size_vram"] = json!(0);
            entry
        });
        json::respond(&json!({ "models": running.collect::<Vec<_>>() }))
    })
}

/// The version.
pub(crate) fn version() -> MethodRouter<App> {
    on_get(async || json::respond(&json!({ "version": env!("CARGO_PKG_VERSION") })))
}

/// One model.
pub(crate) fn show() -> MethodRouter<App> {
    on_post(async |State(app): State<App>, request: Request| {
        let body = Body::read(request, app.config().max_body).await?;
        let fields: ShowFields = body.get()?;
        let Some(name) = fields.model.or(fields.name) else {
            return Err(ApiError::invalid_param("model", "'model' is missing"));
        };
        let model = app.model(Some(&name))?;
        let mut info = json!({
            "general.architecture": model.architecture(),
            "tokenizer.ggml.n_tokens": model.tokenizer().n_tokens(),
        });
        if let Ok(service) = model.service() {
            // Ollama's clients look for the length under the name of the architecture.
            let key = format!("{}.context_length", model.architecture());
            info[key] = json!(service.prompt_limits().n_tokens);
        }
        Ok::<Response, ApiError>(json::respond(&json!({
            "modelfile": "",
            "parameters": "",
            "template": model.template_source().unwrap_or_default(),
            "details": details(model),
            "model_info": info,
            "capabilities": capabilities(model),
            "modified_at": rfc3339(UNIX_EPOCH + Duration::from_secs(model.created())),
        })))
    })
}

/// What a model can do, in Ollama's words.
fn capabilities(model: &ServedModel) -> Vec<&'static str> {
    match model.work() {
        Work::Texts(_) => {
            let template = model.template_source().unwrap_or_default();
            let more = [
                ("tools", template.contains("tools")),
                ("insert", fim::is_known(model.tokenizer())),
                (
                    "thinking",
                    template.contains("thinking") || template.contains("<think>"),
                ),
            ];
            let more = more.into_iter().filter(|(_, is_there)| *is_there);
            let more = more.map(|(name, _)| name);
            std::iter::once("completion").chain(more).collect()
        }
        Work::Embeddings(_) => vec!["embedding"],
        Work::Scores(_) => vec!["rerank"],
    }
}

/// A model in a list. Sizes are not known to the server, and a digest is that of the name.
fn entry(model: &ServedModel) -> Value {
    let digest: String = Sha256::digest(model.id().as_bytes())
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    json!({
        "name": model.id(),
        "model": model.id(),
        "modified_at": rfc3339(UNIX_EPOCH + Duration::from_secs(model.created())),
        "size": 0,
        "digest": digest,
        "details": details(model),
    })
}

fn details(model: &ServedModel) -> Value {
    json!({
        "parent_model": "",
        "format": "",
        "family": model.architecture(),
        "families": [model.architecture()],
        "parameter_size": "",
        "quantization_level": "",
    })
}
