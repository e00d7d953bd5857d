//! llama-server's own API, and what its clients and routers ask of a server.
//!
//! Knows the wire and nothing of how texts are generated.

pub mod adapters;
pub mod completion;
pub mod embeddings;
pub mod models;
pub mod slots;
pub mod status;
pub mod tokens;

use serde_json::{Value, json};

use crate::error::ApiError;

/// The addresses of llama-server.
pub(crate) const PATHS: [&str; 18] = [
    "/completion",
    "/completions",
    "/embedding",
    "/embeddings",
    "/reranking",
    "/lora-adapters",
    "/v1/health",
    "/infill",
    "/tokenize",
    "/detokenize",
    "/apply-template",
    "/props",
    "/slots",
    "/health",
    "/readyz",
    "/livez",
    "/models/load",
    "/models/unload",
];

/// An error in llama-server's shape, with OpenAI's `param`.
pub(crate) fn error_json(error: &ApiError) -> Value {
    let kind = match (error.status.as_u16(), error.code) {
        (_, Some("context_length_exceeded")) => "exceed_context_size_error",
        (401, _) => "authentication_error",
        (403, _) => "permission_error",
        (404, _) => "not_found_error",
        (501, _) => "not_supported_error",
        (429 | 503, _) => "unavailable_error",
        (400..=499, _) => "invalid_request_error",
        _ => "server_error",
    };
    let mut body = error.openai();
    body["error"]["code"] = json!(error.status.as_u16());
    body["error"]["type"] = json!(kind);
    body
}
