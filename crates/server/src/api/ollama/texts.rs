//! `POST /api/chat` and `POST /api/generate`.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use axum::extract::{Extension, Request, State};
use axum::response::Response;
use axum::routing::MethodRouter;
use cellar_engine::serve::{Choices, Usage};
use cellar_engine::{FinishReason, Logprobs, TokenLogprobs};
use model_core::tokenizer::Tokenizer;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{KeepAlive, error_json, keep_as_asked};
use crate::adapters::AdapterChoice;
use crate::api::constraints::json_schema;
use crate::api::openai::messages::messages as read_messages;
use crate::api::openai::tools::Tools;
use crate::api::openapi::fields::OPTIONS;
use crate::api::params::SamplingParams;
use crate::api::params::rfc3339;
use crate::api::{logprobs, on_post};
use crate::app::App;
use crate::auth::Tenant;
use crate::error::ApiError;
use crate::field_rule::{FieldRule, Neutral};
use crate::fim::{self, Gap};
use crate::generate::{
    ChatPrompt, Constraint, GenerateRequest, Generating, Output, Piece, Prompt, ToolCall,
};
use crate::json::{self, Body};
use crate::model::{Job, ServedModel};
use crate::models::KeepLoaded;
use crate::skips::Skips;
use crate::stream::{self, Encoder};
use crate::whole;

/// Parameters that are not done.
pub(in crate::api) const LIMITED: [FieldRule; 2] = [
    FieldRule::new(
        "template",
        Neutral::Empty,
        "the template is the model's, or the server's --chat-template",
    )
    .not_implemented(),
    FieldRule::new(
        "context",
        Neutral::Empty,
        "send the conversation as messages to /api/chat",
    )
    .not_implemented(),
];

/// Ollama's word for a type of body that is lines of JSON.
const NDJSON: &str = "application/x-ndjson";

/// The fields of both endpoints.
#[derive(Clone, Debug, Deserialize)]
struct Fields {
    model: String,
    messages: Option<Vec<Message>>,
    prompt: Option<String>,
    suffix: Option<String>,
    system: Option<String>,
    images: Option<Vec<String>>,
    raw: Option<bool>,
    format: Option<Value>,
    stream: Option<bool>,
    think: Option<Value>,
    keep_alive: Option<KeepAlive>,
    logprobs: Option<bool>,
    top_logprobs: Option<usize>,
}

#[derive(Clone, Debug, Deserialize)]
struct Message {
    role: String,
    content: Option<String>,
    thinking: Option<String>,
    images: Option<Vec<String>>,
    tool_calls: Option<Vec<Value>>,
    tool_name: Option<String>,
    tool_call_id: Option<String>,
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
    let body = Body::read(request).await?;
    let fields: Fields = body.get()?;
    let at = app.find_model(&fields.model).await?;
    let keep = fields.keep_alive.as_ref().map(KeepAlive::keep);
    let keep = keep.transpose()?;
    let mut lines = Lines {
        endpoint,
        model: fields.model.clone(),
        came,
        load_time: Duration::ZERO,
        done_reason: "stop",
        calls: Vec::new(),
        logprobs: None,
        skips: body.skips().clone(),
    };
    let is_empty = match endpoint {
        Endpoint::Chat => fields.messages.as_ref().is_none_or(Vec::is_empty),
        Endpoint::Generate => fields.prompt.as_ref().is_none_or(String::is_empty),
    };
    // How Ollama's clients unload a model, and load one.
    if is_empty && keep == Some(KeepLoaded::For(Duration::ZERO)) {
        tenant.check_admin()?;
        app.registry().unload(at).await?;
        return Ok(json::respond(&lines.empty("unload")));
    }
    let model = app.model_for(Some(&fields.model), Job::Texts).await?;
    lines.load_time = came.elapsed();
    keep_as_asked(&model, &tenant, keep);
    if is_empty {
        return Ok(json::respond(&lines.empty("load")));
    }
    let tools = match endpoint {
        Endpoint::Chat => Tools::read(&body)?,
        Endpoint::Generate => Tools::default(),
    };
    let request = read(endpoint, &body, &fields, &tools, &model)?;
    lines.logprobs = (request.logprobs != Logprobs::Off)
        .then(|| PendingLogprobs::new(Arc::clone(model.tokenizer())));
    let generating = app.generate(&model, tenant, request).await?;
    drop(body);
    match fields.stream {
        Some(false) => Ok(json::respond(&lines.whole(generating).await?)),
        _ => Ok(stream::respond(vec![generating], lines)),
    }
}

/// From the JSON of a request to what is generated.
///
/// # Errors
/// [`ApiError`] 400 where a field is wrong, 501 where it is not supported.
fn read(
    endpoint: Endpoint,
    body: &Body,
    fields: &Fields,
    tools: &Tools,
    model: &ServedModel,
) -> Result<GenerateRequest, ApiError> {
    let options = body.part("options", OPTIONS)?;
    let within = |error: ApiError| ApiError {
        param: error.param.as_ref().map(|param| format!("options.{param}")),
        ..error
    };
    let sampling: SamplingParams = options.get().map_err(within)?;
    Ok(GenerateRequest {
        prompt: prompt(endpoint, body, fields, tools, model)?,
        sampler: sampling.sampler(model.settings()).map_err(within)?,
        max_tokens: max_tokens(&options).map_err(within)?,
        stop: sampling.stop(model.settings()).map_err(within)?,
        // A format binds the final text, which an answer that has to call a tool has not.
        constraint: tools.constraint().or(constraint(fields)?),
        priority: sampling.priority(),
        cache_salt: sampling.cache_salt(),
        adapters: AdapterChoice {
            model: Some(fields.model.clone()),
            ..sampling.adapters()
        },
        speculate: sampling.speculate(),
        output: match endpoint {
            Endpoint::Chat => Output::Chat(tools.used()),
            Endpoint::Generate => Output::Text,
        },
        logprobs: wanted_logprobs(fields)?,
        choices: Choices::default(),
        echo: false,
        skips: body.skips().clone(),
    })
}

/// `logprobs` and `top_logprobs`.
fn wanted_logprobs(fields: &Fields) -> Result<Logprobs, ApiError> {
    let wanted = match (fields.logprobs, fields.top_logprobs) {
        (Some(true), n) => Logprobs::Top(n.unwrap_or(0)),
        (_, None | Some(0)) => Logprobs::Off,
        (_, Some(_)) => {
            let message = "'top_logprobs' needs 'logprobs' to be true";
            return Err(ApiError::invalid_param("top_logprobs", message));
        }
    };
    logprobs::check(wanted, "top_logprobs")
}

/// `num_predict`, of which -1 goes on without end, and -2 until the context is full: that is the
/// same here.
fn max_tokens(options: &Body) -> Result<Option<usize>, ApiError> {
    match options.field("num_predict").and_then(whole::integer) {
        Some(-2) => Ok(None),
        _ => Ok(options.max_tokens("num_predict")?.or(None)),
    }
}

fn prompt(
    endpoint: Endpoint,
    body: &Body,
    fields: &Fields,
    tools: &Tools,
    model: &ServedModel,
) -> Result<Prompt, ApiError> {
    let mut messages = Vec::new();
    if endpoint == Endpoint::Generate {
        let text = fields.prompt.clone().unwrap_or_default();
        if let Some(suffix) = fields.suffix.as_ref().filter(|suffix| !suffix.is_empty()) {
            return if fim::is_known(model.tokenizer()) {
                Ok(Prompt::Gap(Gap {
                    prefix: text,
                    suffix: suffix.clone(),
                    files: Vec::new(),
                }))
            } else {
                Err(model.has_no_gaps())
            };
        }
        let images = fields.images.as_deref().unwrap_or_default();
        if fields.raw == Some(true) || model.template_source().is_none() {
            if !images.is_empty() {
                let message = "'images' need the model's chat template: leave 'raw' out";
                return Err(ApiError::invalid_param("images", message));
            }
            return Ok(Prompt::Text(text));
        }
        if let Some(system) = fields.system.as_ref().filter(|text| !text.is_empty()) {
            messages.push(json!({"role": "system", "content": system}));
        }
        messages.push(json!({"role": "user", "content": with_images(&text, images)}));
    }
    let given = fields.messages.iter().flatten();
    if endpoint == Endpoint::Chat {
        messages.extend(given.map(Message::as_openai));
    }
    let messages = read_messages(&json!(messages), body.skips())?;
    let mut variables = Map::new();
    tools.add_to(&mut variables);
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

/// A text behind pictures in base64, as OpenAI's content.
fn with_images(text: &str, images: &[String]) -> Value {
    if images.is_empty() {
        return json!(text);
    }
    let images = images.iter();
    let mut parts: Vec<Value> = images
        .map(|image| json!({"type": "image_url", "image_url": {"url": image}}))
        .collect();
    parts.push(json!({"type": "text", "text": text}));
    json!(parts)
}

impl Message {
    fn as_openai(&self) -> Value {
        let content = self.content.as_deref().unwrap_or_default();
        let content = with_images(content, self.images.as_deref().unwrap_or_default());
        let mut message = json!({"role": self.role, "content": content});
        let calls = self.tool_calls.as_ref().filter(|calls| !calls.is_empty());
        for (name, value) in [
            ("reasoning_content", json!(self.thinking)),
            ("tool_calls", json!(calls)),
            ("name", json!(self.tool_name)),
            ("tool_call_id", json!(self.tool_call_id)),
        ] {
            if !value.is_null() {
                message[name] = value;
            }
        }
        message
    }
}

/// `format`.
fn constraint(fields: &Fields) -> Result<Option<Constraint>, ApiError> {
    match &fields.format {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) if text.is_empty() => Ok(None),
        Some(Value::String(text)) if text == "json" => Ok(Some(Constraint::JsonObject)),
        Some(schema @ Value::Object(_)) => json_schema(Some(schema), "format").map(Some),
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
    /// How long the request waited for the model.
    load_time: Duration,
    done_reason: &'static str,
    /// Calls of tools, which are given out once their arguments are complete.
    calls: Vec<ToolCall>,
    /// Set where they are wanted.
    logprobs: Option<PendingLogprobs>,
    /// Named in the last line.
    skips: Skips,
}

/// Log probabilities of the next line.
struct PendingLogprobs {
    tokenizer: Arc<Tokenizer>,
    places: Vec<TokenLogprobs>,
}

impl PendingLogprobs {
    fn new(tokenizer: Arc<Tokenizer>) -> Self {
        let places = Vec::new();
        Self { tokenizer, places }
    }

    fn add(&mut self, places: Vec<TokenLogprobs>) {
        self.places.extend(places);
    }

    /// Gives them to a line.
    fn give(&mut self, line: &mut Value) {
        let places = std::mem::take(&mut self.places);
        if !places.is_empty() {
            line["logprobs"] = json!(logprobs::places(&self.tokenizer, &places));
        }
    }
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
    fn empty(&self, done_reason: &str) -> Value {
        self.line("", json!({"done": true, "done_reason": done_reason}))
    }

    /// The last line, with all numbers.
    fn last(&self, text: &str, usage: &Usage) -> Value {
        let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let first = usage.first_token.unwrap_or(usage.total);
        let rest = json!({
            "done": true,
            "done_reason": self.done_reason,
            "total_duration": ns(self.came.elapsed()),
            "load_duration": ns(self.load_time),
            "prompt_eval_count": usage.n_prompt,
            "prompt_eval_duration": ns(first.saturating_sub(usage.queued)),
            "eval_count": usage.n_tokens,
            "eval_duration": ns(usage.total.saturating_sub(first)),
        });
        let mut line = self.line(text, rest);
        self.skips.add_to(&mut line);
        line
    }

    /// The whole answer in one object.
    async fn whole(mut self, generating: Generating) -> Result<Value, ApiError> {
        let answer = generating.answer().await?;
        self.done_reason = done_reason(&answer.finish.reason);
        let mut line = self.last(&answer.text, &answer.usage);
        if !answer.reasoning.is_empty() {
            self.add_thinking(&mut line, &answer.reasoning);
        }
        let calls = calls_json(&answer.calls);
        if !calls.is_empty() {
            line["message"]["tool_calls"] = json!(calls);
        }
        if let Some(pending) = &mut self.logprobs {
            pending.add(answer.logprobs);
            pending.give(&mut line);
        }
        Ok(line)
    }

    /// A line with the calls that are complete.
    fn calls(&mut self) -> String {
        let calls = calls_json(&std::mem::take(&mut self.calls));
        if calls.is_empty() {
            return String::new();
        }
        let mut line = self.line("", json!({"done": false}));
        line["message"]["tool_calls"] = json!(calls);
        format!("{line}\n")
    }

    fn add_thinking(&self, line: &mut Value, text: &str) {
        match self.endpoint {
            Endpoint::Chat => line["message"]["thinking"] = json!(text),
            Endpoint::Generate => line["thinking"] = json!(text),
        }
    }
}

/// Calls in Ollama's words. One whose arguments were cut off is none.
fn calls_json(calls: &[ToolCall]) -> Vec<Value> {
    let call = |(index, call): (usize, &ToolCall)| {
        let arguments: Value = serde_json::from_str(&call.arguments).ok()?;
        let is_complete = arguments.is_object();
        let function = json!({"index": index, "name": call.name, "arguments": arguments});
        is_complete.then(|| json!({"id": call.id, "function": function}))
    };
    calls.iter().enumerate().filter_map(call).collect()
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

    /// Its clients read every line as a part of the answer.
    fn alive(&mut self) -> String {
        String::new()
    }

    fn piece(&mut self, _choice: usize, piece: Piece) -> String {
        let mut line = match piece {
            Piece::Text(text) => self.line(&text, json!({"done": false})),
            Piece::Reasoning(text) => {
                let mut line = self.line("", json!({"done": false}));
                self.add_thinking(&mut line, &text);
                line
            }
            Piece::Prompt(_) => return String::new(),
            Piece::Logprobs(places) => {
                if let Some(pending) = &mut self.logprobs {
                    pending.add(places);
                }
                return String::new();
            }
            Piece::ToolStart { id, name, .. } => {
                self.calls.push(ToolCall {
                    id,
                    name,
                    arguments: String::new(),
                });
                return String::new();
            }
            Piece::ToolArguments { text, .. } => {
                if let Some(call) = self.calls.last_mut() {
                    call.arguments.push_str(&text);
                }
                return String::new();
            }
            Piece::Finish(finish) => {
                self.done_reason = done_reason(&finish.reason);
                return self.calls();
            }
            Piece::Usage(usage) => self.last("", &usage),
        };
        if let Some(pending) = &mut self.logprobs {
            pending.give(&mut line);
        }
        format!("{line}\n")
    }

    fn error(&mut self, error: &ApiError) -> String {
        format!("{}\n", error_json(error))
    }
}
