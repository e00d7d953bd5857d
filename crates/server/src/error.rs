//! [`ApiError`]: why a request is refused or has failed, and its JSON in the shape of each API.
//!
//! Invariant: every error of the server is one of these, with a status, a type, and a message that
//! says what to do. Knows nothing of handlers.

use std::fmt;

use axum::http::header::{ALLOW, RETRY_AFTER};
use axum::http::{HeaderValue, Method, StatusCode};
use axum::response::{IntoResponse, Response};
use cellar_engine::sampler::SampleError;
use cellar_engine::serve::{RequestError, ServiceError};
use cellar_engine::{ConfigError, EngineError};
use cellar_grammar::GrammarError;
use model_core::chat_template::ChatTemplateError;
use model_core::picture::PictureError;
use serde_json::{Value, json};

/// Why a request is refused or has failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// The status of the answer.
    pub status: StatusCode,
    /// OpenAI's `type`, for example `invalid_request_error`.
    pub kind: &'static str,
    /// OpenAI's `code`, for example `context_length_exceeded`.
    pub code: Option<&'static str>,
    /// The field of the request that is wrong, as a path (`messages[0].content`).
    pub param: Option<String>,
    /// What is wrong, and what to do.
    pub message: String,
    /// What few errors have besides.
    pub(crate) more: Option<Box<More>>,
}

/// What few errors have besides.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct More {
    /// Seconds after which it is worth trying again.
    retry_after: Option<u64>,
    /// The methods that the address takes, after a wrong one.
    allow: Option<String>,
    /// More numbers, as members of the error object.
    details: Vec<(&'static str, Value)>,
}

/// A loaded model that another has no room next to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Holder {
    pub(crate) model: String,
    pub(crate) n_bytes: u64,
    /// Requests that use it.
    pub(crate) n_requests: usize,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            kind,
            code: None,
            param: None,
            message: message.into(),
            more: None,
        }
    }

    /// 400: a request that makes no sense.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// 400: a field of the request that makes no sense.
    pub fn invalid_param(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            param: Some(param.into()),
            ..Self::invalid(message)
        }
    }

    /// 400: a parameter that would change the result, and is not supported.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            code: Some("unsupported_parameter"),
            ..Self::invalid_param(param, message)
        }
    }

    /// 400: a part of a message that the model cannot read.
    pub fn unsupported_content(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            code: Some("unsupported_content"),
            ..Self::invalid_param(param, message)
        }
    }

    /// 401: no key, or a wrong one.
    pub fn unauthorized() -> Self {
        Self {
            code: Some("invalid_api_key"),
            ..Self::new(
                StatusCode::UNAUTHORIZED,
                "authentication_error",
                "a valid API key is needed: send 'Authorization: Bearer KEY'",
            )
        }
    }

    /// 403: the request comes from a place that this server does not serve.
    pub fn forbidden(message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, "permission_error", message)
    }

    /// 404: there is nothing at this address.
    pub fn no_route(method: &Method, path: &str) -> Self {
        let message = format!("there is nothing at {method} {path}; GET / lists the endpoints");
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message)
    }

    /// 404: a model that is not served.
    pub fn unknown_model(name: &str, known: &[String]) -> Self {
        let known = known.join("', '");
        let message = format!("there is no model '{name}'; this server has '{known}'");
        Self {
            code: Some("model_not_found"),
            param: Some("model".to_owned()),
            ..Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message)
        }
    }

    /// 404: a file or a batch that is not kept, or is another tenant's.
    pub(crate) fn unknown_id(what: &str, id: &str) -> Self {
        let message =
            format!("there is no {what} '{id}': it was deleted, or the server was started again");
        Self {
            param: Some(format!("{what}_id")),
            ..Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message)
        }
    }

    /// 404: a response that is not kept, or is another tenant's.
    pub(crate) fn unknown_response(id: &str) -> Self {
        let message = format!(
            "there is no response '{id}': it was not stored, or had to make room, or the server was \
             started again"
        );
        Self {
            param: Some("response_id".to_owned()),
            ..Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message)
        }
    }

    /// 400, as OpenAI: a request goes on from such a response.
    pub(crate) fn unknown_previous_response(id: &str) -> Self {
        let unknown = Self::unknown_response(id);
        Self {
            status: StatusCode::BAD_REQUEST,
            code: Some("previous_response_not_found"),
            param: Some("previous_response_id".to_owned()),
            message: format!("{unknown}; send the conversation as 'input'"),
            ..unknown
        }
    }

    /// 404: a text to branch off from that is not kept, or is another tenant's.
    pub(crate) fn unknown_branch(id: &str) -> Self {
        let message = format!(
            "there is no text of a request '{id}': it had to make room, or the server was started again; \
             a request's id is its header x-request-id, or the one of its answer"
        );
        Self {
            param: Some("fork_of".to_owned()),
            ..Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message)
        }
    }

    /// 405: the address takes other methods.
    pub fn wrong_method(method: &Method, path: &str, allow: &str) -> Self {
        let status = StatusCode::METHOD_NOT_ALLOWED;
        let message = format!("{path} takes {allow}, not {method}");
        Self {
            more: Some(Box::new(More {
                allow: Some(allow.to_owned()),
                ..More::default()
            })),
            ..Self::new(status, "invalid_request_error", message)
        }
    }

    /// 408: the body did not come in time.
    pub fn too_slow(seconds: u64) -> Self {
        let message = format!("the body of the request did not come within {seconds} s");
        Self::new(
            StatusCode::REQUEST_TIMEOUT,
            "invalid_request_error",
            message,
        )
    }

    /// 413: a body that is too large.
    pub fn too_large(limit: usize) -> Self {
        let status = StatusCode::PAYLOAD_TOO_LARGE;
        let message = format!("the body of a request may have {limit} bytes at most");
        Self::new(status, "invalid_request_error", message)
    }

    /// 415: a body that is compressed.
    pub(crate) fn compressed(encoding: &str) -> Self {
        let message = format!(
            "the body is compressed ('content-encoding: {encoding}'), and this server reads plain JSON: \
             send it without compression"
        );
        let status = StatusCode::UNSUPPORTED_MEDIA_TYPE;
        Self::new(status, "invalid_request_error", message)
    }

    /// 409: what is asked is known of loaded models alone, and asking loads none.
    pub(crate) fn not_loaded(model: &str) -> Self {
        let message = format!(
            "the model '{model}' is not loaded: POST /models/load with {{\"model\": \"{model}\"}} loads it"
        );
        Self {
            code: Some("model_not_loaded"),
            param: Some("model".to_owned()),
            ..Self::new(StatusCode::CONFLICT, "invalid_request_error", message)
        }
    }

    /// 429: too much waits.
    pub fn busy(message: impl Into<String>, retry_after: u64) -> Self {
        let message = format!("{}; try again in {retry_after} s", message.into());
        Self {
            code: Some("rate_limit_exceeded"),
            more: Some(Box::new(More {
                retry_after: Some(retry_after),
                ..More::default()
            })),
            ..Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message)
        }
    }

    /// 500: the computation failed.
    pub fn internal(message: impl Into<String>) -> Self {
        let status = StatusCode::INTERNAL_SERVER_ERROR;
        Self::new(status, "server_error", message)
    }

    /// 500: a model that cannot be loaded; a later request tries again.
    pub fn load_failed(message: impl Into<String>) -> Self {
        Self {
            code: Some("model_load_failed"),
            ..Self::internal(message)
        }
    }

    /// 507: a model for which there is not enough memory.
    pub fn no_memory(message: impl Into<String>) -> Self {
        let status = StatusCode::INSUFFICIENT_STORAGE;
        Self {
            code: Some("insufficient_memory"),
            ..Self::new(status, "server_error", message)
        }
    }

    /// 507: a file for which there is no room.
    pub(crate) fn no_room_for_file(message: impl Into<String>) -> Self {
        Self {
            code: Some("insufficient_storage"),
            ..Self::no_memory(message)
        }
    }

    /// The same with what is needed and what is there, in bytes.
    #[must_use]
    pub fn of_bytes(self, needed: u64, available: u64) -> Self {
        self.with_shortage(needed, available, &[])
    }

    /// The same with what is needed, what is there, and who holds the rest, in bytes.
    pub(crate) fn with_shortage(self, needed: u64, available: u64, holders: &[Holder]) -> Self {
        let holders = holders.iter().map(|holder| {
            json!({
                "model": holder.model, "bytes": holder.n_bytes, "requests": holder.n_requests,
            })
        });
        Self {
            more: Some(Box::new(More {
                details: vec![
                    ("needed_bytes", needed.into()),
                    ("available_bytes", available.into()),
                    ("held_by", holders.collect::<Vec<_>>().into()),
                ],
                ..More::default()
            })),
            ..self
        }
    }

    /// 501: what this server, or its model, cannot do.
    pub fn not_implemented(message: impl Into<String>) -> Self {
        Self {
            code: Some("not_implemented"),
            ..Self::new(
                StatusCode::NOT_IMPLEMENTED,
                "invalid_request_error",
                message,
            )
        }
    }

    /// 503: the server ends.
    pub fn shutting_down() -> Self {
        let message = "the server is shutting down";
        Self {
            code: Some("shutting_down"),
            ..Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message)
        }
    }

    /// The same with a seconds to wait, where it says that too much waits.
    pub(crate) fn with_retry_after(self, seconds: u64) -> Self {
        match self.status {
            StatusCode::TOO_MANY_REQUESTS => Self::busy(self.message, seconds),
            _ => self,
        }
    }

    /// Whether it is about the prompt as a whole, in whichever field that is.
    pub(crate) fn is_of_prompt(&self) -> bool {
        matches!(
            self.code,
            Some("context_length_exceeded" | "no_chat_template" | "chat_template" | "empty_prompt")
        )
    }

    /// OpenAI's error object.
    pub fn openai(&self) -> Value {
        let mut error = json!({
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        });
        if let Value::Object(members) = &mut error {
            let details = self
                .more
                .iter()
                .flat_map(|more| more.details.iter().cloned());
            members.extend(details.map(|(name, value)| (name.to_owned(), value)));
        }
        json!({ "error": error })
    }

    /// The answer with this body.
    pub(crate) fn response_with(&self, body: &Value) -> Response {
        let json = HeaderValue::from_static("application/json");
        let mut response = (self.status, body.to_string()).into_response();
        let headers = response.headers_mut();
        headers.insert(axum::http::header::CONTENT_TYPE, json);
        let more = self.more.as_deref();
        if let Some(seconds) = more.and_then(|more| more.retry_after) {
            headers.insert(RETRY_AFTER, seconds.into());
        }
        let allow = more.and_then(|more| more.allow.as_deref());
        if let Some(Ok(allow)) = allow.map(HeaderValue::from_str) {
            headers.insert(ALLOW, allow);
        }
        if self.status == StatusCode::UNAUTHORIZED {
            let bearer = HeaderValue::from_static("Bearer");
            headers.insert(axum::http::header::WWW_AUTHENTICATE, bearer);
        }
        response
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.message.fmt(f)
    }
}

impl std::error::Error for ApiError {}

impl IntoResponse for ApiError {
    /// OpenAI's shape. The error travels with the answer, so that a layer can render it in the
    /// shape of another API.
    fn into_response(self) -> Response {
        let mut response = self.response_with(&self.openai());
        response.extensions_mut().insert(self);
        response
    }
}

/// The numbers of a text that is too long.
fn too_long(n_prompt: usize, limit: usize) -> Option<Box<More>> {
    Some(Box::new(More {
        details: vec![
            ("n_prompt_tokens", n_prompt.into()),
            ("n_ctx", limit.into()),
        ],
        ..More::default()
    }))
}

impl From<RequestError> for ApiError {
    fn from(error: RequestError) -> Self {
        let message = error.to_string();
        match error {
            RequestError::EmptyPrompt => Self {
                code: Some("empty_prompt"),
                ..Self::invalid_param("prompt", message)
            },
            RequestError::TooLong { n_prompt, limit } => Self {
                code: Some("context_length_exceeded"),
                more: too_long(n_prompt, limit),
                ..Self::invalid_param(
                    "prompt",
                    // Clients that know the wording of OpenAI shorten the conversation then.
                    format!(
                        "the prompt has {n_prompt} tokens, and this model's maximum context length is \
                         {limit} tokens, of prompt and answer together: cut off at least {}, or start \
                         the server with a larger --ctx",
                        n_prompt - limit
                    ),
                )
            },
            RequestError::TokenOutOfRange { .. } => Self::invalid_param("prompt", message),
            RequestError::Busy { .. }
            | RequestError::BusyTokens { .. }
            | RequestError::TenantBusy { .. } => Self {
                code: Some("rate_limit_exceeded"),
                ..Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message)
            },
            _ => Self::internal(message),
        }
    }
}

impl From<ServiceError> for ApiError {
    fn from(error: ServiceError) -> Self {
        match error {
            ServiceError::Refused(why) => why.into(),
            ServiceError::Engine(why) => (&*why).into(),
            ServiceError::Stopped => Self::shutting_down(),
            other => Self::internal(other.to_string()),
        }
    }
}

impl From<&EngineError> for ApiError {
    fn from(error: &EngineError) -> Self {
        match error {
            EngineError::Config(why) => Self {
                param: match why {
                    ConfigError::BiasToken { .. } => Some("logit_bias".to_owned()),
                    ConfigError::StopToken { .. } => Some("stop_token_ids".to_owned()),
                    _ => None,
                },
                ..Self::invalid(why.to_string())
            },
            EngineError::Sample(SampleError::NothingLeft { n_tokens }) => Self::invalid(format!(
                "no token can come next: 'logit_bias', 'min_tokens' and what the answer is held to exclude \
                 all {n_tokens} tokens together"
            )),
            EngineError::TextTooLong {
                index,
                n_tokens,
                limit,
            } => Self {
                code: Some("context_length_exceeded"),
                more: too_long(*n_tokens, *limit),
                ..Self::invalid_param(
                    format!("input[{index}]"),
                    format!(
                        "the text has {n_tokens} tokens, and the model takes {limit}: make it shorter"
                    ),
                )
            },
            other => Self::internal(other.to_string()),
        }
    }
}

impl From<PictureError> for ApiError {
    fn from(error: PictureError) -> Self {
        Self::invalid_param("messages", error.to_string())
    }
}

impl From<GrammarError> for ApiError {
    fn from(error: GrammarError) -> Self {
        Self {
            code: Some("invalid_schema"),
            ..Self::invalid_param("response_format", error.to_string())
        }
    }
}

impl From<ChatTemplateError> for ApiError {
    fn from(error: ChatTemplateError) -> Self {
        Self {
            code: Some("chat_template"),
            ..Self::invalid_param("messages", error.to_string())
        }
    }
}
