//! `POST /v1/completions/render`, `/v1/chat/completions/render` and `/v1/responses/render`: the
//! tokens of a request's prompt, and how they would be sampled, in the words of vLLM's
//! `GenerateRequest`. A router asks for them, to send the request where most of its prompt is
//! cached.
//!
//! Invariant: a request is read as by the endpoint that answers it, so the tokens are those that it
//! would compute, and what it would refuse of them is refused in the same way. Nothing is computed,
//! and nothing waits.

use axum::extract::{Request, State};
use axum::response::Response;
use axum::routing::MethodRouter;
use serde_json::{Value, json};

use super::{chat, completions, responses};
use crate::api::on_post;
use crate::app::App;
use crate::error::ApiError;
use crate::generate::GenerateRequest;
use crate::ids::random_id;
use crate::json::{self, Body};
use crate::model::Job;
use crate::models::ModelInUse;

/// Members of a request that a rendered one repeats.
const REPEATED: [&str; 4] = ["stream", "stream_options", "cache_salt", "priority"];

/// The route of prompts: a list, one for each.
pub(crate) fn completions() -> MethodRouter<App> {
    on_post(async |State(app): State<App>, request: Request| {
        let body = Body::read(request).await?;
        let fields: completions::CompletionFields = body.get()?;
        let model = app.model_for(fields.model.as_deref(), Job::Texts).await?;
        let requests = completions::read(&body, &fields, &model)?;
        let mut rendered = Vec::with_capacity(requests.len());
        for request in requests {
            rendered.push(render(&app, &model, &body, request, "cmpl-").await?);
        }
        Ok::<Response, ApiError>(json::respond(&json!(rendered)))
    })
}

/// The route of messages.
pub(crate) fn chat() -> MethodRouter<App> {
    on_post(async |State(app): State<App>, request: Request| {
        let body = Body::read(request).await?;
        let fields: chat::ChatFields = body.get()?;
        let model = app.model_for(fields.model.as_deref(), Job::Texts).await?;
        let request = chat::read(&body, &fields, model.settings())?;
        let rendered = render(&app, &model, &body, request, "chatcmpl-").await?;
        Ok::<Response, ApiError>(json::respond(&rendered))
    })
}

/// The route of items, without those of a response before.
pub(crate) fn responses() -> MethodRouter<App> {
    on_post(async |State(app): State<App>, request: Request| {
        let body = Body::read(request).await?;
        let fields: responses::Fields = body.get()?;
        let model = app.model_for(fields.model.as_deref(), Job::Texts).await?;
        let request = responses::read_alone(&body, &fields, &model)?;
        let rendered = render(&app, &model, &body, request, "resp_").await?;
        Ok::<Response, ApiError>(json::respond(&rendered))
    })
}

async fn render(
    app: &App,
    model: &ModelInUse,
    body: &Body,
    request: GenerateRequest,
    id_prefix: &str,
) -> Result<Value, ApiError> {
    let mut sampling_params = sampling_params(&request);
    sampling_params["seed"] = body.field("seed").cloned().unwrap_or_default();
    let tokens = app
        .prompt_tokens(model, request.prompt, request.max_tokens)
        .await?;
    let limits = model.service()?.prompt_limits();
    limits.check(&tokens)?;
    let ids: Vec<u32> = tokens.iter().map(|token| token.0).collect();
    let mut rendered = json!({
        "request_id": random_id(id_prefix),
        "model": model.id(),
        "token_ids": ids,
        "sampling_params": sampling_params,
    });
    for name in REPEATED {
        if let Some(value) = body.field(name) {
            rendered[name] = value.clone();
        }
    }
    Ok(rendered)
}

/// How a text would be sampled, under vLLM's names.
fn sampling_params(request: &GenerateRequest) -> Value {
    // The shortest decimal of a number: 0.8 and not 0.800000012.
    let short = |number: f32| json!(number.to_string().parse::<f64>().unwrap_or_default());
    let sampler = &request.sampler;
    json!({
        "n": request.choices.n_computed(),
        "max_tokens": request.max_tokens,
        "min_tokens": sampler.min_tokens,
        "stop": request.stop.strings,
        "stop_token_ids": request.stop.tokens.iter().map(|token| token.0).collect::<Vec<_>>(),
        "include_stop_str_in_output": request.stop.is_included,
        "ignore_eos": request.stop.ignore_eos,
        "temperature": short(sampler.temperature),
        // vLLM's 0 keeps all.
        "top_k": sampler.top_k.map_or(0, |n| n.get()),
        "top_p": short(sampler.top_p),
        "min_p": short(sampler.min_p),
        "presence_penalty": short(sampler.penalties.presence),
        "frequency_penalty": short(sampler.penalties.frequency),
        "repetition_penalty": short(sampler.penalties.repeat),
    })
}
