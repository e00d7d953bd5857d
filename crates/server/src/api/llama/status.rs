//! `GET /health`, `/readyz`, `/livez`, `/props`, `/slots`, `/metrics` and `/version`.
//!
//! Invariant: no text of any request is in any answer.

use std::collections::BTreeMap;

use axum::extract::{Extension, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::MethodRouter;
use model_core::media::MediaKind;
use serde_json::{Value, json};

use crate::api::on_get;
use crate::app::{App, Phase};
use crate::auth::Tenant;
use crate::error::ApiError;
use crate::json;
use crate::memory_use::MemoryUse;
use crate::model::{Job, Work};
use crate::models::{ModelFacts, n_ctx};
use crate::query::ModelQuery;

/// Whether requests are taken, and can be computed.
pub(crate) fn health() -> MethodRouter<App> {
    on_get(async |State(app): State<App>| match app.phase() {
        Phase::Open => match without_device(&app) {
            None => json::respond(&json!({"status": "ok"})),
            Some(id) => unavailable(&format!(
                "the device of model '{id}' is lost: restart the server"
            )),
        },
        Phase::Draining | Phase::Closing => unavailable("shutting down"),
    })
}

fn unavailable(message: &str) -> Response {
    let status = StatusCode::SERVICE_UNAVAILABLE;
    let error = json!({"code": status.as_u16(), "message": message, "type": "unavailable_error"});
    (status, json::respond(&json!({"error": error}))).into_response()
}

/// A loaded model whose device is lost.
fn without_device(app: &App) -> Option<String> {
    let models = app.models().into_iter().filter_map(|status| status.model);
    let mut lost = models.filter(|model| match model.work() {
        Work::Texts(service) => service.status().has_lost_device,
        Work::Embeddings(_) | Work::Scores(_) => false,
    });
    lost.next().map(|model| model.id().to_owned())
}

/// That the process answers, also while it ends.
pub(crate) fn alive() -> MethodRouter<App> {
    on_get(async || json::respond(&json!({"status": "ok"})))
}

/// The version.
pub(crate) fn version() -> MethodRouter<App> {
    on_get(async || json::respond(&json!({"version": env!("CARGO_PKG_VERSION")})))
}

/// Counters as Prometheus reads them.
pub(crate) fn metrics() -> MethodRouter<App> {
    on_get(async |State(app): State<App>| {
        let plain = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
        let models = app.models();
        let mut uses = BTreeMap::new();
        for model in models.iter().filter_map(|status| status.model.as_ref()) {
            if let Work::Texts(service) = model.work()
                && let Some(found) = MemoryUse::of(service).await
            {
                uses.insert(model.id().to_owned(), found);
            }
        }
        ([(CONTENT_TYPE, plain)], app.metrics().text(&models, &uses))
    })
}

/// The settings of a loaded model that continues texts: the one that is named, or else the first.
/// It loads none.
pub(crate) fn props() -> MethodRouter<App> {
    on_get(async |State(app): State<App>, query: ModelQuery| {
        let name = query.model.as_deref();
        if name.is_none() && app.registry().first_loaded(Job::Texts).is_none() {
            return Ok(json::respond(&without_model()));
        }
        if let Some(name) = name {
            let status = app.registry().status(app.registry().find_now(name).await?);
            if let Some(status) = status.filter(|status| status.model.is_none()) {
                return Err(ApiError::not_loaded(&status.id));
            }
        }
        let model = app.model_for(name, Job::Texts).await?;
        let sampler = &model.settings().sampler;
        let takes_tools = ModelFacts::of(&model).takes_tools();
        let text_of = |id: Option<kv_core::TokenId>| {
            id.and_then(|id| model.tokenizer().token_text(id).map(str::to_owned))
        };
        let ids = model.tokenizer().special_ids();
        Ok::<Response, ApiError>(json::respond(&json!({
            "default_generation_settings": {
                "n_ctx": n_ctx(&model),
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
            "modalities": {
                "vision": model.takes(MediaKind::Picture), "audio": model.takes(MediaKind::Sound),
            },
            "chat_template_caps": {
                "supports_tools": takes_tools, "supports_tool_calls": takes_tools,
            },
        })))
    })
}

/// What llama-server's router answers while no model is loaded.
fn without_model() -> Value {
    json!({
        "role": "router",
        "default_generation_settings": {"n_ctx": 0, "params": {}},
        "total_slots": 0,
        "model_alias": "",
        "chat_template": "",
        "build_info": concat!("cellar-", env!("CARGO_PKG_VERSION")),
        "modalities": {"vision": false, "audio": false},
    })
}

/// The requests that have not ended, each as a slot of its model; the others are idle. Models that
/// are not loaded have none. A key that is no admin sees the slots of its own requests alone.
pub(crate) fn slots() -> MethodRouter<App> {
    on_get(
        async |State(app): State<App>, Extension(tenant): Extension<Tenant>| {
            let mut running = app.running();
            if !tenant.is_admin() {
                running.retain(|(_, one)| one.tenant == tenant);
            }
            let mut slots: Vec<Value> = Vec::new();
            let models = app.models().into_iter().filter_map(|status| status.model);
            for model in models.filter(|model| model.does(Job::Texts)) {
                let n_ctx = n_ctx(&model);
                let first = slots.len();
                for (task, one) in running.iter().filter(|(_, one)| one.model == model.id()) {
                    let slot = slots.len();
                    slots.push(json!({
                    "id": slot, "id_task": task, "n_ctx": n_ctx, "is_processing": true,
                    "model": one.model, "n_prompt_tokens": one.n_prompt, "has_text": one.has_text,
                    "seconds": one.since.elapsed().as_secs_f64(),
                }));
                }
                let n_slots = if tenant.is_admin() {
                    model.n_parallel()
                } else {
                    0
                };
                for slot in slots.len()..first + n_slots {
                    slots.push(json!({
                        "id": slot, "n_ctx": n_ctx, "is_processing": false, "model": model.id(),
                    }));
                }
            }
            json::respond(&json!(slots))
        },
    )
}
