//! `GET /api/tags`, `/api/ps`, `/api/version` and `POST /api/show`.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::extract::{Request, State};
use axum::response::Response;
use axum::routing::MethodRouter;
use model_core::media::MediaKind;
use serde::Deserialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::api::params::rfc3339;
use crate::api::{on_get, on_post};
use crate::app::App;
use crate::error::ApiError;
use crate::fim;
use crate::json::{self, Body};
use crate::model::{Job, ServedModel};
use crate::models::{Expiry, LoadState, ModelFacts, ModelStatus, n_ctx};

/// The version of Ollama whose API this is: clients refuse older ones (GitHub Copilot those before
/// 0.6.4), and `logprobs` came with this one.
const VERSION: &str = "0.12.11";

/// When a model is unloaded that stays, which Ollama writes as a time far away.
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
        app.registry().refresh().await;
        let models: Vec<Value> = app.models().iter().map(entry).collect();
        json::respond(&json!({ "models": models }))
    })
}

/// The models in memory.
pub(crate) fn ps() -> MethodRouter<App> {
    on_get(async |State(app): State<App>| {
        let models = app.models().into_iter();
        let loaded = models.filter(|model| model.state == LoadState::Loaded);
        let running = loaded.map(|model| {
            let mut entry = entry(&model);
            entry["size"] = json!(model.bytes.total());
            entry["size_vram"] = json!(model.bytes.device);
            entry["expires_at"] = match model.expiry {
                Expiry::Never => json!(NEVER),
                Expiry::In(time) => match SystemTime::now().checked_add(time) {
                    Some(at) => json!(rfc3339(at)),
                    None => json!(NEVER),
                },
            };
            let n_ctx = model.model.as_deref().and_then(n_ctx);
            entry["context_length"] = json!(n_ctx.or(model.facts.n_ctx));
            entry
        });
        json::respond(&json!({ "models": running.collect::<Vec<_>>() }))
    })
}

/// The version, and in a member of its own that of this server.
pub(crate) fn version() -> MethodRouter<App> {
    on_get(async || {
        json::respond(&json!({ "version": VERSION, "cellar": env!("CARGO_PKG_VERSION") }))
    })
}

/// One model.
pub(crate) fn show() -> MethodRouter<App> {
    on_post(async |State(app): State<App>, request: Request| {
        let body = Body::read(request).await?;
        let fields: ShowFields = body.get()?;
        let Some(name) = fields.model.or(fields.name) else {
            return Err(ApiError::invalid_param("model", "'model' is missing"));
        };
        let registry = app.registry();
        let status = registry.status(registry.find_now(&name).await?);
        let Some(status) = status else {
            return Err(ApiError::unknown_model(&name, &[]));
        };
        let model = status.model.as_deref();
        let facts = match model {
            Some(model) => &ModelFacts::of(model),
            None => &status.facts,
        };
        // Some clients show the name.
        let mut info = json!({
            "general.architecture": facts.architecture, "general.basename": status.id,
        });
        if let Some(n_vocab) = facts.n_vocab {
            info["tokenizer.ggml.n_tokens"] = json!(n_vocab);
        }
        if facts.weights.n_values > 0 {
            info["general.parameter_count"] = json!(facts.weights.n_values);
        }
        // Ollama's clients look for these under the name of the architecture.
        for (name, value) in [
            ("context_length", facts.n_ctx),
            ("embedding_length", facts.n_embd),
        ] {
            if let Some(value) = value {
                info[format!("{}.{name}", facts.architecture)] = json!(value);
            }
        }
        Ok::<Response, ApiError>(json::respond(&json!({
            "modelfile": "",
            "parameters": "",
            "template": facts.template.as_deref().unwrap_or_default(),
            "details": details(&status.facts),
            "model_info": info,
            "capabilities": capabilities(facts, model),
            "modified_at": rfc3339(modified(&status)),
        })))
    })
}

/// What a model can do, in Ollama's words. Whether it fills gaps is known once it is loaded.
fn capabilities(facts: &ModelFacts, model: Option<&ServedModel>) -> Vec<&'static str> {
    match facts.job {
        Some(Job::Texts) => {
            let template = facts.template.as_deref().unwrap_or_default();
            let has_marks = model.is_some_and(|model| fim::is_known(model.tokenizer()));
            let more = [
                ("tools", facts.takes_tools()),
                ("insert", has_marks),
                (
                    "vision",
                    model.is_some_and(|model| model.takes(MediaKind::Picture)),
                ),
                (
                    "thinking",
                    template.contains("thinking") || template.contains("<think>"),
                ),
            ];
            let more = more.into_iter().filter(|(_, is_there)| *is_there);
            let more = more.map(|(name, _)| name);
            std::iter::once("completion").chain(more).collect()
        }
        Some(Job::Embeddings) => vec!["embedding"],
        Some(Job::Scores) => vec!["rerank"],
        None => Vec::new(),
    }
}

/// When its file was written, or else when it was loaded.
fn modified(status: &ModelStatus) -> SystemTime {
    let created = status.model.as_ref().map_or(0, |model| model.created());
    let loaded = UNIX_EPOCH + Duration::from_secs(created);
    status.facts.modified.unwrap_or(loaded)
}

/// A model in a list. The size is that of its file, and the digest that of its name.
fn entry(status: &ModelStatus) -> Value {
    let digest: String = Sha256::digest(status.id.as_bytes())
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    json!({
        "name": status.id,
        "model": status.id,
        "modified_at": rfc3339(modified(status)),
        "size": status.facts.file_bytes,
        "digest": digest,
        "details": details(&status.facts),
    })
}

fn details(facts: &ModelFacts) -> Value {
    json!({
        "parent_model": "",
        "format": facts.format,
        "family": facts.architecture,
        "families": [facts.architecture],
        "parameter_size": human_number(facts.weights.n_values),
        "quantization_level": facts.weights.quantization,
    })
}

/// A number of weights as Ollama writes it; empty where it is not known.
fn human_number(n: u64) -> String {
    let of = |unit: u64, decimals: usize, name: char| {
        let decimals = if n.is_multiple_of(unit) { 0 } else { decimals };
        format!("{:.decimals$}{name}", n as f64 / unit as f64)
    };
    match n {
        0 => String::new(),
        1..1_000 => n.to_string(),
        1_000..1_000_000 => of(1_000, 0, 'K'),
        1_000_000..1_000_000_000 => of(1_000_000, 2, 'M'),
        _ => of(1_000_000_000, 1, 'B'),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_weights_are_written_as_ollama_does() {
        for (n, wanted) in [
            (0, ""),
            (999, "999"),
            (1_600, "2K"),
            (494_032_768, "494.03M"),
            (137_000_000, "137M"),
            (7_615_616_512, "7.6B"),
            (70_000_000_000, "70B"),
        ] {
            assert_eq!(human_number(n), wanted, "{n}");
        }
    }
}
