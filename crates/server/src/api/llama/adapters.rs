//! `GET /lora-adapters`, which lists none, and `POST`, which sets the scales of none.

use axum::extract::Request;
use axum::response::Response;
use axum::routing::MethodRouter;
use http_body_util::BodyExt;
use serde_json::{Value, json};

use crate::api::{on_get, on_post};
use crate::app::App;
use crate::error::ApiError;
use crate::json;

/// The adapters.
pub(crate) fn list() -> MethodRouter<App> {
    on_get(async || json::respond(&json!([])))
}

/// Sets their scales: an empty list changes nothing.
pub(crate) fn set() -> MethodRouter<App> {
    on_post(async |request: Request| {
        let read = request.into_body().collect().await;
        let read = read.map_err(|error| ApiError::invalid(error.to_string()))?;
        match serde_json::from_slice(&read.to_bytes()) {
            Ok(Value::Array(adapters)) if adapters.is_empty() => {
                Ok::<Response, ApiError>(json::respond(&json!({"success": true})))
            }
            Ok(Value::Array(adapters)) => {
                let n = adapters.len();
                let message = format!("the list has {n} adapters, and this server has none");
                Err(ApiError::unsupported("lora", message))
            }
            Ok(_) => Err(ApiError::invalid("the body is not a JSON list")),
            Err(error) => Err(ApiError::invalid(format!(
                "the body is not valid JSON: {error}"
            ))),
        }
    })
}
