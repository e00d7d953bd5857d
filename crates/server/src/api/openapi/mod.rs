//! `GET /openapi.json`: a description of every endpoint.
//!
//! Invariant: it is made from the table of endpoints, so it has each of them and nothing else.
//! Knows requests by their fields, and answers by their types only.

pub(crate) mod fields;

use axum::routing::MethodRouter;
use serde_json::{Map, Value, json};

use self::fields::{Field, Form, SAMPLING, WITHOUT_EFFECT};
use super::{Endpoint, GET, endpoints, on_get};
use crate::app::App;
use crate::json;

/// The route.
pub(crate) fn route() -> MethodRouter<App> {
    on_get(async || json::respond(&document()))
}

/// The description, in OpenAPI 3.1.
pub fn document() -> Value {
    let mut paths = Map::new();
    for endpoint in endpoints() {
        let path = endpoint.path.replace('*', "");
        let operations = paths.entry(path).or_insert_with(|| json!({}));
        operations[endpoint.method.as_str().to_lowercase()] = operation(&endpoint);
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Cellar",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "A language model over HTTP: the APIs of OpenAI, Anthropic, Ollama and \
                            llama-server. `x-skipped` and `x-refused` have the fields that are not done, and why; \
                            those that are not listed are skipped, too.",
        },
        "x-without-effect": WITHOUT_EFFECT,
        "paths": paths,
        "security": [{}, {"bearer": []}, {"key": []}],
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
            "schemas": {
                "Sampling": object(SAMPLING),
                "Error": error("error", json!({
                    "type": "object",
                    "required": ["message", "type", "param", "code"],
                    "properties": {
                        "message": {"type": "string"},
                        "type": {"type": "string"},
                        "param": {"type": ["string", "null"]},
                        "code": {"type": ["string", "null"]},
                    },
                })),
                "AnthropicError": error("error", json!({
                    "type": "object",
                    "required": ["type", "message"],
                    "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
                })),
                "OllamaError": error("error", json!({"type": "string"})),
            },
        },
    })
}

fn error(name: &str, schema: Value) -> Value {
    json!({"type": "object", "required": [name], "properties": {name: schema}})
}

fn object(fields: &[Field]) -> Value {
    let properties = fields.iter().map(|field| {
        let schema = field.kind.schema();
        (field.name.to_owned(), schema)
    });
    let required = fields.iter().filter(|field| field.is_required);
    let required: Vec<&str> = required.map(|field| field.name).collect();
    json!({
        "type": "object",
        "properties": properties.collect::<Map<String, Value>>(),
        "required": required,
    })
}

fn operation(endpoint: &Endpoint) -> Value {
    let Endpoint {
        path, what, body, ..
    } = endpoint;
    let mut operation = json!({
        "summary": what,
        "tags": [tag(path)],
        "responses": {
            "200": {"description": "the answer", "content": content(endpoint)},
            "default": {"description": "why not", "content": {
                "application/json": {"schema": {"$ref": error_of(path)}},
            }},
        },
    });
    if path.contains('{') {
        operation["parameters"] = json!([
            {"name": "id", "in": "path", "required": true, "schema": {"type": "string"}},
        ]);
    }
    let in_query: &[&str] = match (endpoint.method == GET, *path) {
        (true, "/props" | "/view/events") => &["model"],
        (true, "/v1/files") => &["limit", "after", "order", "purpose"],
        (true, "/v1/batches") => &["limit", "after", "order"],
        _ => &[],
    };
    if !in_query.is_empty() {
        let parameter = |name: &&str| json!({"name": name, "in": "query", "required": false, "schema": {"type": "string"}});
        operation["parameters"] = in_query.iter().map(parameter).collect();
    }
    if let Some(body) = body {
        let fields = object(body.fields);
        let schema = if body.has_sampling {
            json!({"allOf": [fields, {"$ref": "#/components/schemas/Sampling"}]})
        } else {
            fields
        };
        let (media, schema) = match body.form {
            Form::Object => ("application/json", schema),
            Form::List => (
                "application/json",
                json!({"type": "array", "items": schema}),
            ),
            Form::Multipart => ("multipart/form-data", schema),
        };
        operation["requestBody"] = json!({
            "required": true,
            "content": {media: {"schema": schema}},
        });
        for (name, is_skipped) in [("x-skipped", true), ("x-refused", false)] {
            let limited = body.limited_fields();
            let limited = limited.filter(|field| field.is_skipped() == is_skipped);
            let fields = limited.map(|field| (field.name.to_owned(), json!(field.hint)));
            operation[name] = Value::Object(fields.collect());
        }
    }
    operation
}

fn tag(path: &str) -> &'static str {
    match path {
        _ if path.starts_with("/v1/messages") => "Anthropic",
        "/v1/rerank" | "/v1/reranking" => "Jina",
        "/v2/rerank" => "Cohere",
        "/rerank" | "/embed" => "text-embeddings-inference",
        "/v1/score" | "/score" => "vLLM",
        _ if path.starts_with("/api/v0/") || path.starts_with("/api/v1/") => "LM Studio",
        _ if path.starts_with("/v1/") => "OpenAI",
        _ if path.starts_with("/api/") => "Ollama",
        "/lora-adapters" | "/completion" | "/completions" | "/embedding" | "/embeddings"
        | "/reranking" | "/slots/{id}" | "/infill" | "/tokenize" | "/detokenize"
        | "/apply-template" | "/props" | "/slots" | "/models/load" | "/models/unload" => {
            "llama-server"
        }
        _ => "Server",
    }
}

fn error_of(path: &str) -> &'static str {
    match tag(path) {
        "Anthropic" => "#/components/schemas/AnthropicError",
        "Ollama" => "#/components/schemas/OllamaError",
        _ => "#/components/schemas/Error",
    }
}

/// The types of an answer: a stream has another than a whole one, and browsers get a page.
fn content(endpoint: &Endpoint) -> Value {
    let mut fields = endpoint.body.iter().flat_map(|body| body.fields);
    let has_stream = fields.any(|field| field.name == "stream");
    let stream = match endpoint.path {
        "/" => Some("text/html"),
        "/api/chat" | "/api/generate" => Some("application/x-ndjson"),
        path if path.ends_with("/render") => None,
        _ if has_stream => Some("text/event-stream"),
        _ => None,
    };
    let whole = match endpoint.path {
        "/" | "/metrics" => "text/plain",
        "/view/events" => "text/event-stream",
        _ => "application/json",
    };
    let types = std::iter::once(whole).chain(stream);
    let types = types.map(|name| (name.to_owned(), json!({"schema": {}})));
    Value::Object(types.collect())
}
