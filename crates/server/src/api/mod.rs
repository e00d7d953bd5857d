//! The APIs, one module each, and the router over them.
//!
//! An API is two pure functions over the internal pair: from its JSON to a
//! [`GenerateRequest`](crate::GenerateRequest), and from [`Piece`](crate::Piece)s to its JSON or stream
//! ([`Encoder`](crate::Encoder)). Invariant: every route but `/` and `/health` needs a key where there
//! are keys, and every error has a body.

pub mod anthropic;
pub mod llama;
pub mod ollama;
pub mod openai;
pub mod params;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderValue, Method};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get, post};

use tracing::Instrument;

use crate::app::App;
use crate::error::ApiError;
use crate::trace;

/// All endpoints, for `GET /`: method, path, and what it does.
pub const ENDPOINTS: [(&str, &str, &str); 26] = [
    ("POST", "/v1/chat/completions", "answers messages (OpenAI)"),
    ("POST", "/v1/completions", "continues a text (OpenAI)"),
    ("POST", "/v1/embeddings", "vectors of texts (OpenAI)"),
    ("POST", "/v1/rerank", "scores documents (Jina, Cohere)"),
    ("GET", "/v1/models", "the models (OpenAI)"),
    ("GET", "/v1/models/{id}", "one model (OpenAI)"),
    ("POST", "/completion", "continues a text (llama-server)"),
    ("POST", "/tokenize", "the tokens of a text"),
    ("POST", "/detokenize", "the text of tokens"),
    (
        "POST",
        "/apply-template",
        "messages as the model reads them",
    ),
    ("POST", "/v1/messages", "answers messages (Anthropic)"),
    (
        "POST",
        "/v1/messages/count_tokens",
        "the number of a prompt's tokens (Anthropic)",
    ),
    ("POST", "/api/chat", "answers messages (Ollama)"),
    ("POST", "/api/generate", "continues a text (Ollama)"),
    ("POST", "/api/embed", "vectors of texts (Ollama)"),
    ("GET", "/api/tags", "the models (Ollama)"),
    ("GET", "/api/ps", "the models in memory (Ollama)"),
    ("POST", "/api/show", "one model (Ollama)"),
    ("GET", "/api/version", "the version (Ollama)"),
    ("GET", "/props", "the settings of the model"),
    ("GET", "/slots", "the requests that are computed"),
    ("GET", "/health", "whether it takes requests"),
    ("GET", "/metrics", "counters as Prometheus reads them"),
    ("GET", "/version", "the version"),
    ("GET", "/models", "as /v1/models"),
    ("GET", "/", "this list"),
];

/// The routes of a server.
pub fn router(app: App) -> Router {
    let post = |route: MethodRouter<App>| route.fallback(only_post);
    let get = |route: MethodRouter<App>| route.fallback(only_get);
    Router::new()
        .route("/v1/chat/completions", post(openai::chat::route()))
        .route("/v1/completions", post(openai::completions::route()))
        .route("/v1/embeddings", post(openai::embeddings::embeddings()))
        .route("/v1/rerank", post(openai::embeddings::rerank()))
        .route("/v1/models", get(openai::models::list()))
        .route("/v1/models/{*id}", get(openai::models::one()))
        .route("/models", get(openai::models::list()))
        .route("/completion", post(llama::completion::route()))
        .route("/tokenize", post(llama::tokens::tokenize()))
        .route("/detokenize", post(llama::tokens::detokenize()))
        .route("/apply-template", post(llama::tokens::apply_template()))
        .route("/props", get(llama::status::props()))
        .route("/slots", get(llama::status::slots()))
        .route("/health", get(llama::status::health()))
        .route("/metrics", get(llama::status::metrics()))
        .route("/version", get(llama::status::version()))
        .route("/v1/messages", post(anthropic::route()))
        .route("/v1/messages/count_tokens", post(anthropic::count_tokens()))
        .route("/api/chat", post(ollama::texts::chat()))
        .route("/api/generate", post(ollama::texts::generate()))
        .route("/api/embed", post(ollama::embed::route()))
        .route("/api/tags", get(ollama::models::tags()))
        .route("/api/ps", get(ollama::models::ps()))
        .route("/api/show", post(ollama::models::show()))
        .route("/api/version", get(ollama::models::version()))
        .route("/api/pull", ollama::no_changes())
        .route("/api/push", ollama::no_changes())
        .route("/api/create", ollama::no_changes())
        .route("/api/copy", ollama::no_changes())
        .route("/api/delete", ollama::no_changes())
        .route("/api/blobs/{digest}", ollama::no_changes())
        .route("/", get(index()))
        .fallback(no_route)
        .layer(from_fn_with_state(app.clone(), guard))
        .layer(from_fn(errors_of_api))
        .with_state(app)
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

fn index() -> MethodRouter<App> {
    let lines = ENDPOINTS.map(|(method, path, what)| format!("{method:<5} {path:<22} {what}\n"));
    let text = format!("Cellar {}\n\n{}", env!("CARGO_PKG_VERSION"), lines.concat());
    on_get(async move || {
        let plain = HeaderValue::from_static("text/plain; charset=utf-8");
        ([(CONTENT_TYPE, plain)], text)
    })
}

/// Checks host and key before every handler, and tells handlers whose request it is.
async fn guard(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let config = app.config();
    if let Err(error) = config.hosts.check(request.headers()) {
        return refuse(&app, error);
    }
    let is_open = matches!(request.uri().path(), "/" | "/health");
    match config.keys.tenant(request.headers()) {
        Ok(tenant) => {
            request.extensions_mut().insert(tenant);
        }
        Err(_) if is_open => {}
        Err(error) => return refuse(&app, error),
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
        _ => return next.run(request).await,
    };
    let response = next.run(request).await;
    match response.extensions().get::<ApiError>() {
        Some(error) => error.response_with(&shape(error)),
        None => response,
    }
}

fn refuse(app: &App, error: ApiError) -> Response {
    app.metrics().refused(&error);
    error.into_response()
}

async fn no_route(request: Request) -> ApiError {
    ApiError::no_route(request.method(), request.uri().path())
}

async fn only_post(method: Method, request: Request) -> ApiError {
    ApiError::wrong_method(&method, request.uri().path(), "POST")
}

async fn only_get(method: Method, request: Request) -> ApiError {
    ApiError::wrong_method(&method, request.uri().path(), "GET")
}
