//! The APIs, one module each, and the router over them.
//!
//! An API is two pure functions over the internal pair: from its JSON to a
//! [`GenerateRequest`](crate::GenerateRequest), and from [`Piece`](crate::Piece)s to its JSON or
//! stream ([`Encoder`](crate::Encoder)). Invariant: every route but `/`, the files of its page,
//! `/health`, `/v1/health`, `/readyz` and `/livez` needs a key where there are keys, and every
//! error has a body.

pub mod anthropic;
mod constraints;
pub mod llama;
pub mod lm_studio;
pub mod logprobs;
pub mod ollama;
pub mod openai;
pub mod openapi;
mod others;
pub mod params;
pub mod rerank;
pub mod tei;
mod timings;

use std::collections::BTreeMap;

use axum::extract::{Request, State};
use axum::http::header::{CONTENT_TYPE, VARY};
use axum::http::{HeaderMap, HeaderValue, Method};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, delete, get, post};
use axum::{Extension, Router};

use tracing::Instrument;

use self::openapi::fields::{self, RequestBody, RequestFields};
use crate::app::App;
use crate::error::ApiError;
use crate::report::{self, Recorder};
use crate::skips::SkipPolicy;
use crate::{body_worker, cors, trace, view};

/// An endpoint, as `GET /` lists it.
#[derive(Debug)]
pub struct Endpoint {
    /// GET, POST or DELETE.
    pub method: Method,
    /// Its path, as [`axum::Router::route`] takes it.
    pub path: &'static str,
    /// What it does.
    pub what: &'static str,
    /// What it reads, where it is a POST.
    body: Option<RequestBody>,
    route: fn() -> MethodRouter<App>,
}

const fn endpoint(
    method: Method,
    path: &'static str,
    what: &'static str,
    route: fn() -> MethodRouter<App>,
) -> Endpoint {
    Endpoint {
        method,
        path,
        what,
        body: None,
        route,
    }
}

const fn post_endpoint(
    path: &'static str,
    what: &'static str,
    route: fn() -> MethodRouter<App>,
    body: RequestBody,
) -> Endpoint {
    Endpoint {
        method: Method::POST,
        path,
        what,
        body: Some(body),
        route,
    }
}

const GET: Method = Method::GET;
const DELETE: Method = Method::DELETE;

/// All endpoints.
pub fn endpoints() -> impl Iterator<Item = Endpoint> {
    let more = openai::batches::ENDPOINTS.into_iter().chain(others::OTHERS);
    ENDPOINTS.into_iter().chain(more)
}

/// The endpoints at their usual addresses.
const ENDPOINTS: [Endpoint; 42] = [
    post_endpoint(
        "/v1/chat/completions",
        "answers messages (OpenAI)",
        openai::chat::route,
        fields::sampled(fields::CHAT).limited(&[&openai::chat::LIMITED, &openai::LIMITED]),
    ),
    post_endpoint(
        "/v1/completions",
        "continues a text (OpenAI)",
        openai::completions::route,
        fields::sampled(fields::COMPLETIONS).limited(&[&openai::LIMITED]),
    ),
    post_endpoint(
        "/v1/responses",
        "answers items, and keeps the answer (OpenAI)",
        openai::responses::create,
        fields::sampled(fields::RESPONSES)
            .limited(&[&openai::responses::LIMITED, &openai::LIMITED]),
    ),
    post_endpoint(
        "/v1/responses/input_tokens",
        "counts the tokens of a prompt (OpenAI)",
        openai::responses::compact::input_tokens,
        fields::sampled(fields::RESPONSES)
            .limited(&[&openai::responses::LIMITED, &openai::LIMITED]),
    ),
    post_endpoint(
        "/v1/responses/compact",
        "makes a conversation short (OpenAI)",
        openai::responses::compact::compact,
        fields::sampled(fields::RESPONSES)
            .limited(&[&openai::responses::LIMITED, &openai::LIMITED]),
    ),
    endpoint(
        GET,
        "/v1/responses/{id}",
        "an answer that is kept (OpenAI)",
        openai::responses::retrieve,
    ),
    endpoint(
        DELETE,
        "/v1/responses/{id}",
        "forgets an answer (OpenAI)",
        openai::responses::forget,
    ),
    post_endpoint(
        "/v1/completions/render",
        "the tokens of prompts (vLLM)",
        openai::render::completions,
        fields::sampled(fields::COMPLETIONS).limited(&[&openai::LIMITED]),
    ),
    post_endpoint(
        "/v1/chat/completions/render",
        "the tokens of messages (vLLM)",
        openai::render::chat,
        fields::sampled(fields::CHAT).limited(&[&openai::chat::LIMITED, &openai::LIMITED]),
    ),
    post_endpoint(
        "/v1/responses/render",
        "the tokens of items (vLLM)",
        openai::render::responses,
        fields::sampled(fields::RESPONSES)
            .limited(&[&openai::responses::LIMITED, &openai::LIMITED]),
    ),
    post_endpoint(
        "/v1/embeddings",
        "vectors of texts (OpenAI)",
        openai::embeddings::embeddings,
        fields::body(fields::EMBEDDINGS).limited(&[&openai::embeddings::LIMITED]),
    ),
    post_endpoint(
        "/v1/rerank",
        "scores documents (Jina, Cohere)",
        rerank::jina,
        fields::body(fields::RERANK),
    ),
    endpoint(
        GET,
        "/v1/models",
        "the models (OpenAI)",
        openai::models::list,
    ),
    endpoint(
        GET,
        "/v1/models/{*id}",
        "one model (OpenAI)",
        openai::models::one,
    ),
    post_endpoint(
        "/completion",
        "continues a text (llama-server)",
        llama::completion::route,
        fields::sampled(fields::COMPLETION).limited(&[&llama::completion::LIMITED]),
    ),
    post_endpoint(
        "/infill",
        "fills the gap between two texts (llama-server)",
        llama::completion::infill,
        fields::sampled(fields::INFILL).limited(&[&llama::completion::LIMITED]),
    ),
    post_endpoint(
        "/tokenize",
        "the tokens of a text",
        llama::tokens::tokenize,
        fields::body(fields::TOKENIZE).limited(&[&llama::tokens::LIMITED]),
    ),
    post_endpoint(
        "/detokenize",
        "the text of tokens",
        llama::tokens::detokenize,
        fields::body(fields::DETOKENIZE),
    ),
    post_endpoint(
        "/apply-template",
        "messages as the model reads them",
        llama::tokens::apply_template,
        fields::body(fields::TEMPLATE),
    ),
    post_endpoint(
        "/v1/messages",
        "answers messages (Anthropic)",
        anthropic::route,
        fields::sampled(fields::MESSAGES).limited(&[&anthropic::LIMITED]),
    ),
    post_endpoint(
        "/v1/messages/count_tokens",
        "the number of a prompt's tokens (Anthropic)",
        anthropic::count_tokens,
        fields::body(fields::MESSAGES).limited(&[&anthropic::LIMITED]),
    ),
    post_endpoint(
        "/api/chat",
        "answers messages (Ollama)",
        ollama::texts::chat,
        fields::body(fields::OLLAMA_CHAT).limited(&[&ollama::texts::LIMITED]),
    ),
    post_endpoint(
        "/api/generate",
        "continues a text (Ollama)",
        ollama::texts::generate,
        fields::body(fields::OLLAMA_GENERATE).limited(&[&ollama::texts::LIMITED]),
    ),
    post_endpoint(
        "/api/embed",
        "vectors of texts (Ollama)",
        ollama::embed::route,
        fields::body(fields::OLLAMA_EMBED),
    ),
    post_endpoint(
        "/api/embeddings",
        "the vector of a text (Ollama)",
        ollama::embed::one,
        fields::body(fields::OLLAMA_EMBEDDINGS),
    ),
    endpoint(
        GET,
        "/api/tags",
        "the models (Ollama)",
        ollama::models::tags,
    ),
    endpoint(
        GET,
        "/api/ps",
        "the models in memory (Ollama)",
        ollama::models::ps,
    ),
    post_endpoint(
        "/api/show",
        "one model (Ollama)",
        ollama::models::show,
        fields::body(fields::OLLAMA_SHOW),
    ),
    endpoint(
        GET,
        "/api/version",
        "the version (Ollama)",
        ollama::models::version,
    ),
    endpoint(
        GET,
        "/props",
        "the settings of the model",
        llama::status::props,
    ),
    endpoint(
        GET,
        "/slots",
        "the requests that are computed",
        llama::status::slots,
    ),
    endpoint(
        GET,
        "/health",
        "whether it takes requests",
        llama::status::health,
    ),
    endpoint(GET, "/readyz", "as /health", llama::status::health),
    endpoint(GET, "/livez", "whether it answers", llama::status::alive),
    endpoint(
        GET,
        "/metrics",
        "counters as Prometheus reads them",
        llama::status::metrics,
    ),
    endpoint(GET, "/version", "the version", llama::status::version),
    endpoint(
        GET,
        "/openapi.json",
        "a description of all endpoints",
        openapi::route,
    ),
    endpoint(GET, "/models", "as /v1/models", openai::models::list),
    post_endpoint(
        "/models/load",
        "loads a model (llama-server)",
        llama::models::load,
        fields::body(fields::LOAD),
    ),
    post_endpoint(
        "/models/unload",
        "unloads a model (llama-server)",
        llama::models::unload,
        fields::body(fields::UNLOAD),
    ),
    endpoint(
        GET,
        "/view/events",
        "the memory as it changes",
        view::events,
    ),
    endpoint(GET, "/", "the live view, or this list", index),
];

/// Addresses of Ollama that change the models, which this server does not.
const CHANGES: [&str; 6] = [
    "/api/pull",
    "/api/push",
    "/api/create",
    "/api/copy",
    "/api/delete",
    "/api/blobs/{digest}",
];

/// The routes of a server.
pub fn router(app: App) -> Router {
    handlers(&app)
        .layer(from_fn_with_state(app.clone(), guard))
        .layer(from_fn(errors_of_api))
        .layer(from_fn_with_state(app.clone(), cors::mark))
        .layer(from_fn_with_state(app.clone(), report::observe))
        .with_state(app)
}

/// The routes for requests that were let in: with their [`Tenant`](crate::Tenant).
pub(crate) fn routes(app: &App) -> Router {
    handlers(app)
        .layer(from_fn(errors_of_api))
        .with_state(app.clone())
}

fn handlers(app: &App) -> Router<App> {
    let mut paths: BTreeMap<&str, (Vec<Method>, MethodRouter<App>)> = BTreeMap::new();
    let policy = if app.config().strict {
        SkipPolicy::Refused
    } else {
        SkipPolicy::Named
    };
    for Endpoint {
        method,
        path,
        route,
        body,
        ..
    } in endpoints()
    {
        let (methods, merged) = paths.entry(path).or_default();
        let mut route = route();
        if let Some(body) = body {
            let fields = RequestFields { body, policy };
            route = route
                .route_layer(Extension(fields))
                .route_layer(from_fn_with_state(app.clone(), body_worker::read_body));
        }
        methods.push(method);
        *merged = std::mem::take(merged).merge(route);
    }
    let mut router = Router::new();
    for (path, (methods, route)) in paths {
        let allow = methods.iter().map(Method::as_str);
        let allow = allow.collect::<Vec<_>>().join(", ");
        let wrong = move |method: Method, request: Request| {
            let error = ApiError::wrong_method(&method, request.uri().path(), &allow);
            async move { error }
        };
        router = router.route(path, route.fallback(wrong));
    }
    for path in CHANGES {
        router = router.route(path, ollama::no_changes());
    }
    router
        .route("/view/{file}", view::asset().fallback(no_route))
        .fallback(no_route)
}

/// A route for POST.
pub(crate) fn on_post<H, T>(handler: H) -> MethodRouter<App>
where
    H: axum::handler::Handler<T, App>,
    T: 'static,
{
    post(handler)
}

/// A route for GET.
pub(crate) fn on_get<H, T>(handler: H) -> MethodRouter<App>
where
    H: axum::handler::Handler<T, App>,
    T: 'static,
{
    get(handler)
}

/// A route for DELETE.
pub(crate) fn on_delete<H, T>(handler: H) -> MethodRouter<App>
where
    H: axum::handler::Handler<T, App>,
    T: 'static,
{
    delete(handler)
}

fn index() -> MethodRouter<App> {
    let line = |endpoint: Endpoint| {
        let Endpoint {
            method, path, what, ..
        } = endpoint;
        let path = path.replace('*', "");
        format!("{:<6} {path:<27} {what}\n", method.as_str())
    };
    let lines = endpoints().map(line).collect::<String>();
    let text = format!("Cellar {}\n\n{lines}", env!("CARGO_PKG_VERSION"));
    on_get(async move |headers: HeaderMap| {
        if view::is_for_browser(&headers) {
            return view::page();
        }
        let plain = HeaderValue::from_static("text/plain; charset=utf-8");
        let vary = HeaderValue::from_static("accept");
        ([(CONTENT_TYPE, plain), (VARY, vary)], text).into_response()
    })
}

/// Checks host and key before every handler, and tells handlers whose request it is.
async fn guard(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let config = app.config();
    if let Err(error) = config.hosts.check(request.headers(), &config.origins) {
        return refuse(&app, error);
    }
    if let Some(answer) = config.origins.preflight(&request) {
        return answer;
    }
    let path = request.uri().path();
    let is_open = matches!(path, "/" | "/health" | "/v1/health" | "/readyz" | "/livez")
        || view::is_asset(path);
    match config.keys.tenant(request.headers()) {
        Ok(tenant) => {
            request.extensions_mut().insert(tenant);
        }
        Err(_) if is_open => {}
        Err(error) => return refuse(&app, error),
    }
    if let Some(recorder) = Recorder::current() {
        recorder.let_in();
    }
    let span = trace::span(&request);
    next.run(request).instrument(span).await
}

/// Gives errors the shape of the API that was asked.
async fn errors_of_api(request: Request, next: Next) -> Response {
    let path = request.uri().path();
    let shape: fn(&ApiError) -> serde_json::Value = match path {
        _ if path.starts_with("/v1/messages") => anthropic::error_json,
        _ if path.starts_with("/api/") => ollama::error_json,
        _ if llama::PATHS.contains(&path) => llama::error_json,
        _ => ApiError::openai,
    };
    let field = prompt_field(path);
    let response = next.run(request).await;
    match response.extensions().get::<ApiError>() {
        Some(error) => {
            if let Some(recorder) = Recorder::current() {
                recorder.refused(error);
            }
            let error = match error.param.as_deref() {
                // What is generated knows a prompt, and no endpoint.
                Some("prompt" | "messages") if error.is_of_prompt() => &ApiError {
                    param: Some(field.to_owned()),
                    ..error.clone()
                },
                _ => error,
            };
            error.response_with(&shape(error))
        }
        None => response,
    }
}

/// The field of an endpoint that has the prompt.
fn prompt_field(path: &str) -> &'static str {
    match path {
        "/responses" => "input",
        _ if path.starts_with("/v1/responses") => "input",
        "/infill" => "input_prefix",
        "/tokenize" => "content",
        "/apply-template" | "/api/chat" => "messages",
        "/chat/completions" => "messages",
        _ if path.starts_with("/v1/chat/") || path.starts_with("/v1/messages") => "messages",
        _ => "prompt",
    }
}

fn refuse(app: &App, error: ApiError) -> Response {
    app.metrics().refused(&error);
    error.into_response()
}

async fn no_route(request: Request) -> ApiError {
    ApiError::no_route(request.method(), request.uri().path())
}
