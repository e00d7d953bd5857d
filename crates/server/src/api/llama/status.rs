//! `GET /health`, `/props`, `/slots`, `/metrics` and `/version`.
//!
//! Invariant: no text of any request is in any answer.

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::MethodRouter;
use serde_json::{Value, json};

use crate::api::on_get;
use crate::app::{App, Phase};
use crate::error::ApiError;
use crate::json;
use crate::model::{Job, Work};

/// Whether requests are taken.
pub(crate) fn health() -> MethodRouter<App> {
    on_get(async |State(app): State<App>| match app.phase() {
        Phase::Open => json::respond(&json!({"status": "ok"})),
        Phase::Draining | Phase::Closing => {
            let status = StatusCode::SERVICE_UNAVAILABLE;
            let error = json!({"code": status.as_u16(), "message": "shutting down",
                               "type": "unavailable_error"});
            (status, json::respond(&json!({"error": error}))).into_response()
        }
    })
}

/// The version.
pub(crate) fn version() -> MethodRouter<App> {
    on_get(async || json::respond(&json!({"version": env!("CARGO_PKG_VERSION")})))
}

/// Counters as Prometheus reads them.
pub(crate) fn metrics() -> MethodRouter<App> {
    on_get(async |State(app): State<App>| {
        let plain = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
        ([(CONTENT_TYPE, plain)], app.metrics().text(app.models()))
    })
}

/// The settings of the first model that continues texts.
pub(crate) fn props() -> MethodRouter<App> {
    on_get(async |State(app): State<App>| {
        let model = app.model_for(None, Job::Texts)?;
        let sampler = &model.settings().sampler;
        let text_of = |id: Option<kv_core::TokenId>| {
            id.and_then(|id| model.tokenizer().token_text(id).map(str::to_owned))
        };
        let ids = model.tokenizer().special_ids();
        Ok::<Response, ApiError>(json::respond(&json!({
            "default_generation_settings": {
                "n_ctx": n_ctx(model.work()),
                "params": {
                    "temperature": sampler.temperature,
                    "top_k": sampler.top_k.map_or(0, |k| k.get()),
                    "top_p": sampler.top_p,
                    "min_p": sampler.min_p,
                    "repeat_penalty": sampler.penalties.repeat,
                    "repeat_last_n": sampler.penalties.last_n,
                    "presence_penalty": sampler.penalties.presence,
                    "frequency_penalty": sampler.penalties.frequency,
                },
            },
            "total_slots": model.n_parallel(),
            "model_alias": model.id(),
            "chat_template": model.template_source().unwrap_or_default(),
            "bos_token": text_of(ids.bos).unwrap_or_default(),
            "eos_token": text_of(ids.eos).unwrap_or_default(),
            "build_info": concat!("cellar-", env!("CARGO_PKG_VERSION")),
            "modalities": {"vision": false, "audio": false},
        })))
    })
}

fn n_ctx(work: &Work) -> Option<usize> {
    match work {
        Work::Texts(service) => Some(service.prompt_limits().n_tokens),
        Work::Embeddings(_) | Work::Scores(_) => None,
    }
}

/// The requests that have not ended, each as a slot of its model; the others are idle.
pub(crate) fn slots() -> MethodRouter<App> {
    on_get(async |State(app): State<App>| {
        let running = app.running();
        let mut slots: Vec<Value> = Vec::new();
        for model in app.models().iter().filter(|model| model.does(Job::Texts)) {
            let n_ctx = n_ctx(model.work());
            let first = slots.len();
            for (task, one) in running.iter().filter(|(_, one)| one.model == model.id()) {
                let slot = slots.len();
                slots.push(json!({
                    "id": slot, "id_task": task, "n_ctx": n_ctx, "is_processing": true,
                    "model": one.model, "n_prompt_tokens": one.n_prompt, "has_text": one.has_text,
                    "seconds": one.since.elapsed().as_secs_f64(),
                }));
            }
            for slot in slots.len()..first + model.n_parallel() {
                slots.push(json!({
                    "id": slot, "n_ctx": n_ctx, "is_processing": false, "model": model.id(),
                }));
            }
        }
        json::respond(&json!(slots))
    })
}
