//! `POST /api/chat` and `POST /api/generate`.

use std::time::{Duration, Instant, SystemTime};

use axum::extract::{Extension, Request, State};
use axum::response::Response;
use axum::routing::MethodRouter;
use engine::serve::{Choices, Usage};
use engine::{FinishReason, Logprobs};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{KeepAlive, error_json, not_implemented, rfc3339};
use crate::api::on_post;
use crate::api::params::SamplingParams;
use crate::app::App;
use crate::auth::Tenant;
use crate::error::ApiError;
use crate::generate::{
    ChatPrompt, Constraint, GenerateRequest, Generating, Output, Piece, Prompt, ToolUse,
};
use crate::json::{self, Body};
use crate::model::ServedModel;
use crate::stream::{self, Encoder};

/// Ollama's word for a type of body that is lines of JSON.
const NDJSON: &str = "application/x-ndjson";

/// The fields of both endpoints.
#[derive(Clone, Debug, Deserialize)]
struct Fields {
    model: String,
    messages: Option<Vec<Message>>,
    prompt: Option<String>,
    system: Option<String>,
    raw: Option<bool>,
    format: Option<Value>,
    options: Option<Map<String, Value>>,
    stream: Option<bool>,
    think: Option<Value>,
    keep_alive: Option<KeepAlive>,
}

#[derive(Clone, Debug, Deserialize)]
struct Message {
    role: String,
    #[serde(default)]
    content: String,
    images: Option<Vec<Value>>,
    tool_calls: Option<Vec<Value>>,
}

/// Which of the endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Endpoint {
    Chat,
    Generate,
}

/// The route that answers messages.
pub(crate) fn chat() -> MethodRouter<App> {
    on_post(
        async |app: State<App>, tenant: Extension<Tenant>, request: Request| {
            handle(Endpoint::Chat, app, tenant, request).await
        },
    )
}

/// The route that continues a text.
pub(crate) fn generate() -> MethodRouter<App> {
    on_post(
        async |app: State<App>, tenant: Extension<Tenant>, request: Request| {
            handle(Endpoint::Generate, app, tenant, request).await
        },
    )
}

async fn handle(
    endpoint: Endpoint,
    State(app): State<App>,
    Extension(tenant): Extension<Tenant>,
    request: Request,
) -> Result<Response, ApiError> {
    let came = Instant::now();
    let body = Body::read(request, app.config().max_body).await?;
    let fields: Fields = body.get()?;
    let model = app.model(Some(&fields.model))?;
    model.service()?;
    refuse(&body)?;
    let unloads = fields
        .keep_alive
        .as_ref()
        .map_or(Ok(false), KeepAlive::is_zero)?;
    let lines = Lines {
        endpoint,
        model: fields.model.clone(),
        came,
        done_reason: "stop",
    };
    let is_empty = match endpoint {
        Endpoint::Chat => fields.messages.as_ref().is_none_or(Vec::is_empty),
        Endpoint::Generate => fields.prompt.as_ref().is_none_or(String::is_empty),
    };
    match (is_empty, unloads) {
        (true, true) => {
            return Err(not_implemented(
                "a model cannot be unloaded: this server keeps it until it ends",
            ));
        }
        // How Ollama's clients load a model.
        (true, false) => return Ok(json::respond(&lines.loaded())),
        (false, _) => {}
    }
    let request = read(endpoint, &fields, model)?;
    let generating = app.generate(model, tenant, request).await?;
    match fields.stream {
        Some(false) => Ok(json::respond(&lines.whole(generating).await?)),
        _ => Ok(stream::respond(vec![generating], lines)),
    }
}

/// Fields that would change the result, and are not supported.
fn refuse(body: &Body) -> Result<(), ApiError> {
    for (name, why) in [
        ("tools", "tools are called over /v1/chat/completions"),
        ("images", "this model takes text only"),
        ("suffix", "this model continues texts at their end only"),
        (
            "template",
            "the template is the model's, or the server's --chat-template",
        ),
        ("context", "send the conversation as messages to /api/chat"),
    ] {
        let is_empty = |value: &Value| match value {
            Value::Array(list) => list.is_empty(),
            Value::String(text) => text.is_empty(),
            _ => false,
        };
        if body.field(name).is_some_and(|value| !is_empty(value)) {
            return Err(not_implemented(format!("'{name}' is not supported: {why}")));
        }
    }
    Ok(())
}

/// From the JSON of a request to what is generated.
///
/// # Errors
/// [`ApiError`] 400 where a field is wrong, 501 where it is not supported.
fn read(
    endpoint: Endpoint,
    fields: &Fields,
    model: &ServedModel,
) -> Result<GenerateRequest, ApiError> {
    let options = Body::from(fields.options.clone().unwrap_or_default());
    let within = |error: ApiError| ApiError {
        param: error.param.as_ref().map(|param| format!("options.{param}")),
        ..error
    };
    let sampling: SamplingParams = options.get().map_err(within)?;
    let limit: Limit = options.get().map_err(within)?;
    Ok(GenerateRequest {
        prompt: prompt(endpoint, fields, model)?,
        sampler: sampling.sampler(model.settings()).map_err(within)?,
        // Ollama: -1 goes on without end, -2 until the context is full.
        max_tokens: limit.num_predict.and_then(|n| usize::try_from(n).ok()),
        stop: sampling.stop().map_err(within)?,
        constraint: constraint(fields)?,
        priority: sampling.priority(),
        cache_salt: sampling.cache_salt(),
        output: match endpoint {
            Endpoint::Chat => Output::Chat(ToolUse::None),
            Endpoint::Generate => Output::Text,
        },
        logprobs: Logprobs::Off,
        choices: Choices::default(),
    })
}

#[derive(Clone, Copy, Debug, Deserialize)]
struct Limit {
    num_predict: Option<i64>,
}

fn prompt(endpoint: Endpoint, fields: &Fields, model: &ServedModel) -> Result<Prompt, ApiError> {
    let mut messages = Vec::new();
    if endpoint == Endpoint::Generate {
        let text = fields.prompt.clone().unwrap_or_default();
        if fields.raw == Some(true) || model.template_source().is_none() {
            return Ok(Prompt::Text(text));
        }
        if let Some(system) = fields.system.as_ref().filter(|text| !text.is_empty()) {
            messages.push(json!({"role": "system", "content": system}));
        }
        messages.push(json!({"role": "user", "content": text}));
    }
    let given = fields.messages.iter().flatten();
    for (at, message) in given.enumerate().filter(|_| endpoint == Endpoint::Chat) {
        let Message {
            role,
            content,
            images,
            tool_calls,
        } = message;
        for (name, list) in [("images", images), ("tool_calls", tool_calls)] {
            if list.as_ref().is_some_and(|list| !list.is_empty()) {
                let message = format!("'messages[{at}].{name}' is not supported");
                return Err(not_implemented(message));
            }
        }
        messages.push(json!({"role": role, "content": content}));
    }
    let mut variables = Map::new();
    match &fields.think {
        None | Some(Value::Null) => {}
        Some(Value::Bool(is_on)) => {
            variables.insert("enable_thinking".to_owned(), json!(is_on));
        }
        Some(Value::String(effort)) => {
            variables.insert("enable_thinking".to_owned(), json!(true));
            variables.insert("reasoning_effort".to_owned(), json!(effort));
        }
        Some(_) => {
            let message = "'think' must be true, false, or one of low, medium, high";
            return Err(ApiError::invalid_param("think", message));
        }
    }
    Ok(Prompt::Chat(ChatPrompt {
        messages,
        variables,
    }))
}

/// `format`.
fn constraint(fields: &Fields) -> Result<Option<Constraint>, ApiError> {
    match &fields.format {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) if text.is_empty() => Ok(None),
        Some(Value::String(text)) if text == "json" => Ok(Some(Constraint::JsonObject)),
        Some(schema @ Value::Object(_)) => Ok(Some(Constraint::JsonSchema {
            schema: schema.clone(),
            param: "format",
        })),
        Some(_) => {
            let message = "'format' must be \"json\" or a JSON schema";
            Err(ApiError::invalid_param("format", message))
        }
    }
}

/// Writes the lines of one answer.
struct Lines {
    endpoint: Endpoint,
    /// As the client calls it.
    model: String,
    came: Instant,
    done_reason: &'static str,
}

impl Lines {
    fn line(&self, text: &str, rest: Value) -> Value {
        let mut line = json!({
            "model": self.model,
            "created_at": rfc3339(SystemTime::now()),
        });
        match self.endpoint {
            Endpoint::Chat => line["message"] = json!({"role": "assistant", "content": text}),
            Endpoint::Generate => line["response"] = json!(text),
        }
        if let (Value::Object(line), Value::Object(rest)) = (&mut line, rest) {
            line.extend(rest);
        }
        line
    }

    /// The answer to a request without a prompt.
    fn loaded(&self) -> Value {
        self.line("", json!({"done": true, "done_reason": "load"}))
    }

    /// The last line, with all numbers.
    fn last(&self, text: &str, usage: &Usage) -> Value {
        let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let first = usage.first_token.unwrap_or(usage.total);
        let rest = json!({
            "done": true,
            "done_reason": self.done_reason,
            "total_duration": ns(self.came.elapsed()),
            "load_duration": 0,
            "prompt_eval_count": usage.n_prompt,
            "prompt_eval_duration": ns(first.saturating_sub(usage.queued)),
            "eval_count": usage.n_tokens,
            "eval_duration": ns(usage.total.saturating_sub(first)),
        });
        self.line(text, rest)
    }

    /// The whole answer in one object.
    async fn whole(mut self, generating: Generating) -> Result<Value, ApiError> {
        let answer = generating.answer().await?;
        self.done_reason = done_reason(&answer.finish.reason);
        let mut line = self.last(&answer.text, &answer.usage);
        if !answer.reasoning.is_empty() {
            self.add_thinking(&mut line, &answer.reasoning);
        }
        Ok(line)
    }

    fn add_thinking(&self, line: &mut Value, text: &str) {
        match self.endpoint {
            Endpoint::Chat => line["message"]["thinking"] = json!(text),
            Endpoint::Generate => line["thinking"] = json!(text),
        }
    }
}

fn done_reason(reason: &FinishReason) -> &'static str {
    match reason {
        FinishReason::Length | FinishReason::ContextFull => "length",
        _ => "stop",
    }
}

impl Encoder for Lines {
    fn content_type(&self) -> &'static str {
        NDJSON
    }

    fn piece(&mut self, _choice: usize, piece: Piece) -> String {
        let line = match piece {
            Piece::Text(text) => self.line(&text, json!({"done": false})),
            Piece::Reasoning(text) => {
                let mut line = self.line("", json!({"done": false}));
                self.add_thinking(&mut line, &text);
                line
            }
            // None were asked for.
            Piece::Logprobs(_) | Piece::ToolStart { .. } | Piece::ToolArguments { .. } => {
                return String::new();
            }
            Piece::Finish(finish) => {
                self.done_reason = done_reason(&finish.reason);
                return String::new();
            }
            Piece::Usage(usage) => self.last("", &usage),
        };
        format!("{line}\n")
    }

    fn error(&mut self, error: &ApiError) -> String {
        format!("{}\n", error_json(error))
    }
}
