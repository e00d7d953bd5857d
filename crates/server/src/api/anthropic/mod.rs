//! Anthropic's API: `POST /v1/messages` and `/v1/messages/count_tokens`.
//!
//! Invariant: a stream has the events of Anthropic's documentation in their order, each with its
//! name, or ends with an `error` event. Content that the model would not see is refused with its
//! path, but in results of tools, where a note takes its place. Knows the wire and nothing of how
//! texts are generated.

mod blocks;

use axum::extract::{Extension, Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::MethodRouter;
use cellar_engine::serve::{Choices, Usage};
use cellar_engine::{FinishReason, Logprobs};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use self::blocks::{Content, Message};
use crate::api::constraints::json_schema;
use crate::api::on_post;
use crate::api::openai::messages::messages;
use crate::api::openai::tools::Tools;
use crate::api::params::SamplingParams;
use crate::app::App;
use crate::auth::Tenant;
use crate::error::ApiError;
use crate::generate::{
    Answer, ChatPrompt, Constraint, Finish, GenerateRequest, Output, Piece, Prompt, Stop,
};
use crate::ids::random_id;

use crate::field_rule::{FieldRule, Neutral};
use crate::json::{self, Body, MaxTokens};
use crate::model::{Job, ServedModel};
use crate::skips::Skips;
use crate::stream::{self, Encoder};

/// Parameters that are not done.
pub(in crate::api) const LIMITED: [FieldRule; 3] = [
    FieldRule::new(
        "mcp_servers",
        Neutral::Empty,
        "this server calls no others: give their tools in 'tools'",
    )
    .skipped(),
    FieldRule::new("container", Neutral::Empty, "this server runs no code").skipped(),
    FieldRule::new(
        "context_management",
        Neutral::Empty,
        "the model sees all messages, without the thoughts of earlier turns",
    )
    .skipped(),
];

/// The fields of both endpoints.
#[derive(Clone, Debug, Deserialize)]
struct Fields {
    model: Option<String>,
    messages: Vec<Message>,
    system: Option<Content>,
    stop_sequences: Option<Vec<String>>,
    stream: Option<bool>,
    thinking: Option<Thinking>,
    output_config: Option<OutputConfig>,
    /// The older place of `output_config.format`.
    output_format: Option<Value>,
}

#[derive(Clone, Debug, Deserialize)]
struct OutputConfig {
    format: Option<Value>,
    effort: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
struct Thinking {
    #[serde(rename = "type")]
    kind: String,
    budget_tokens: Option<usize>,
}

/// The route of answers.
pub(crate) fn route() -> MethodRouter<App> {
    on_post(answer)
}

/// The route that counts the tokens of a prompt.
pub(crate) fn count_tokens() -> MethodRouter<App> {
    on_post(count)
}

async fn answer(
    State(app): State<App>,
    Extension(tenant): Extension<Tenant>,
    request: Request,
) -> Result<Response, ApiError> {
    let body = Body::read(request).await?;
    let fields: Fields = body.get()?;
    let model = app.model_for(fields.model.as_deref(), Job::Texts).await?;
    let request = read(&body, &fields, &model)?;
    let generating = app.generate(&model, tenant, request).await?;
    let skips = body.skips().clone();
    drop(body);
    let header = Header::new(model.id());
    if fields.stream == Some(true) {
        let encoder = MessageStream::new(header, generating.n_prompt(), skips);
        return Ok(stream::respond(vec![generating], encoder));
    }
    Ok(skips.respond(header.answer(&generating.answer().await?)))
}

async fn count(State(app): State<App>, request: Request) -> Result<Response, ApiError> {
    let body = Body::read(request).await?;
    let fields: Fields = body.get()?;
    let model = app.model_for(fields.model.as_deref(), Job::Texts).await?;
    model.service()?;
    // They add nothing to the prompt, and are checked as they are for the answer.
    constraint(&fields)?;
    body.max_tokens("max_tokens")?;
    let prompt = Prompt::Chat(chat(&body, &fields, &blocks::tools(&body)?)?);
    let tokens = app.prompt_tokens(&model, prompt, None).await?;
    Ok(json::respond(&json!({ "input_tokens": tokens.len() })))
}

/// From the JSON of a request to what is generated.
///
/// # Errors
/// [`ApiError`] 400 where a parameter is wrong or not supported.
fn read(body: &Body, fields: &Fields, model: &ServedModel) -> Result<GenerateRequest, ApiError> {
    let sampling: SamplingParams = body.get()?;
    let max_tokens = match body.max_tokens("max_tokens")? {
        MaxTokens::NotGiven | MaxTokens::These(0) => {
            let message = "'max_tokens' is needed: the largest number of tokens, at least 1, or -1 for any number";
            return Err(ApiError::invalid_param("max_tokens", message));
        }
        given => given.or(None),
    };
    let mut stop = Stop {
        strings: fields.stop_sequences.clone().unwrap_or_default(),
        ..sampling.stop(model.settings())?
    };
    let budget = fields
        .thinking
        .as_ref()
        .and_then(|thinking| thinking.budget_tokens);
    stop.reasoning_tokens = budget.or(stop.reasoning_tokens);
    stop.check("stop_sequences")?;
    let tools = blocks::tools(body)?;
    Ok(GenerateRequest {
        prompt: Prompt::Chat(chat(body, fields, &tools)?),
        sampler: sampling.sampler(model.settings())?,
        max_tokens,
        stop,
        // A format binds the final text, which an answer that has to call a tool has not.
        constraint: tools.constraint().or(constraint(fields)?),
        output: Output::Chat(tools.used()),
        logprobs: Logprobs::Off,
        choices: Choices::default(),
        echo: false,
        priority: sampling.priority(),
        cache_salt: sampling.cache_salt(),
        adapters: sampling.adapters(),
        speculate: sampling.speculate(),
        skips: body.skips().clone(),
    })
}

/// `output_config.format`, or `output_format`.
fn constraint(fields: &Fields) -> Result<Option<Constraint>, ApiError> {
    let config = fields.output_config.as_ref();
    let new = config.and_then(|config| config.format.as_ref());
    let (format, at) = match (new, &fields.output_format) {
        (Some(_), Some(_)) => {
            let message = "'output_format' is 'output_config.format': give one of them";
            return Err(ApiError::invalid_param("output_format", message));
        }
        (Some(format), None) => (
            format,
            ["output_config.format", "output_config.format.schema"],
        ),
        (None, Some(format)) => (format, ["output_format", "output_format.schema"]),
        (None, None) => return Ok(None),
    };
    let [param, schema] = at;
    match format.get("type").and_then(Value::as_str) {
        Some("json_schema") => json_schema(format.get("schema"), schema).map(Some),
        _ => {
            let message = format!("'{param}.type' must be json_schema");
            Err(ApiError::invalid_param(format!("{param}.type"), message))
        }
    }
}

/// The prompt of the messages, with the tools that the template describes.
fn chat(body: &Body, fields: &Fields, tools: &Tools) -> Result<ChatPrompt, ApiError> {
    let mut variables = thinking(fields)?;
    let config = fields.output_config.as_ref();
    if let Some(effort) = config.and_then(|config| config.effort.as_ref()) {
        variables.insert("reasoning_effort".to_owned(), json!(effort));
    }
    tools.add_to(&mut variables);
    let list = blocks::messages(fields.system.as_ref(), &fields.messages, body.skips())?;
    Ok(ChatPrompt {
        messages: messages(&list, body.skips())?,
        variables,
    })
}

/// What templates of models that think know of it.
fn thinking(fields: &Fields) -> Result<Map<String, Value>, ApiError> {
    let mut variables = Map::new();
    if let Some(thinking) = &fields.thinking {
        let is_on = match thinking.kind.as_str() {
            "enabled" | "adaptive" => true,
            "disabled" => false,
            other => {
                let message =
                    format!("'thinking.type' is '{other}': it must be enabled or disabled");
                return Err(ApiError::invalid_param("thinking.type", message));
            }
        };
        variables.insert("enable_thinking".to_owned(), json!(is_on));
    }
    Ok(variables)
}

/// Anthropic's word for why a text ended, and the stop sequence that ended it.
fn stop_reason(finish: &Finish) -> Value {
    match &finish.reason {
        FinishReason::EndOfGeneration { .. } | FinishReason::StopToken { .. }
            if finish.has_calls =>
        {
            json!({"stop_reason": "tool_use", "stop_sequence": null})
        }
        FinishReason::Length => json!({"stop_reason": "max_tokens", "stop_sequence": null}),
        FinishReason::ContextFull => {
            json!({"stop_reason": "model_context_window_exceeded", "stop_sequence": null})
        }
        FinishReason::StopString { text } => {
            json!({"stop_reason": "stop_sequence", "stop_sequence": text})
        }
        _ => json!({"stop_reason": "end_turn", "stop_sequence": null}),
    }
}

/// Anthropic counts what was cached apart. Prefixes are cached by themselves, and nothing is
/// charged for it, so none is "created".
fn usage_json(usage: &Usage) -> Value {
    let cached = usage.n_reused();
    json!({
        "input_tokens": usage.n_prompt.saturating_sub(cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.n_tokens,
    })
}

/// An error in Anthropic's shape.
pub(crate) fn error_json(error: &ApiError) -> Value {
    let kind = match error.status {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        status if status.is_client_error() => "invalid_request_error",
        _ => "api_error",
    };
    json!({"type": "error", "error": {"type": kind, "message": error.message}})
}

/// What all objects of one answer have.
#[derive(Clone, Debug)]
struct Header {
    id: String,
    model: String,
}

impl Header {
    fn new(model: &str) -> Self {
        Self {
            id: random_id("msg_"),
            model: model.to_owned(),
        }
    }

    fn message(&self, content: Value, stop: Value, usage: Value) -> Value {
        let mut message = json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": null,
            "stop_sequence": null,
            "usage": usage,
        });
        if let (Value::Object(message), Value::Object(stop)) = (&mut message, stop) {
            message.extend(stop);
        }
        message
    }

    /// The whole answer.
    fn answer(&self, answer: &Answer) -> Value {
        let mut content = Vec::new();
        if !answer.reasoning.is_empty() {
            let thinking = &answer.reasoning;
            content.push(json!({"type": "thinking", "thinking": thinking, "signature": ""}));
        }
        if !answer.text.is_empty() {
            content.push(json!({"type": "text", "text": answer.text}));
        }
        for call in &answer.calls {
            // Arguments that were cut off are no JSON: they are given as they are.
            let input = serde_json::from_str(&call.arguments);
            let input = input.unwrap_or_else(|_| json!(call.arguments));
            content.push(json!({
                "type": "tool_use", "id": call.id, "name": call.name, "input": input,
            }));
        }
        let usage = usage_json(&answer.usage);
        self.message(json!(content), stop_reason(&answer.finish), usage)
    }
}

/// The stream: `message_start`, `ping`, for each block `content_block_start`, one
/// `content_block_delta` for each piece and `content_block_stop`, then `message_delta` with the
/// reason and all numbers, and `message_stop`.
struct MessageStream {
    header: Header,
    n_prompt: usize,
    /// The block that is open.
    block: Option<Block>,
    /// Blocks that were opened.
    n_blocks: usize,
    stop: Value,
    /// Named in `message_delta`.
    skips: Skips,
}

/// What a content block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Block {
    Text,
    Thinking,
    Tool,
}

impl MessageStream {
    fn new(header: Header, n_prompt: usize, skips: Skips) -> Self {
        Self {
            skips,
            header,
            n_prompt,
            block: None,
            n_blocks: 0,
            stop: Value::Null,
        }
    }

    /// Opens a block, after the one that is open was closed.
    fn open(&mut self, block: Block, content: &Value) -> String {
        let closed = self.close();
        let index = self.n_blocks;
        self.n_blocks += 1;
        self.block = Some(block);
        let start = json!({
            "type": "content_block_start", "index": index, "content_block": content,
        });
        closed + &event(&start)
    }

    fn close(&mut self) -> String {
        match self.block.take() {
            Some(_) => event(&json!({"type": "content_block_stop", "index": self.n_blocks - 1})),
            None => String::new(),
        }
    }

    /// A part of a block, which is opened where another is open.
    fn delta(&mut self, block: Block, content: &Value, delta: &Value) -> String {
        let opened = if self.block == Some(block) {
            String::new()
        } else {
            self.open(block, content)
        };
        let index = self.n_blocks.saturating_sub(1);
        opened + &event(&json!({"type": "content_block_delta", "index": index, "delta": delta}))
    }
}

/// An event with its name, which is also the type of its data.
fn event(data: &Value) -> String {
    let name = data.get("type").and_then(Value::as_str).unwrap_or_default();
    stream::named_event(name, data)
}

impl Encoder for MessageStream {
    fn begin(&mut self) -> String {
        // What is cached is known once it is admitted: `message_delta` says it.
        let usage = json!({
            "input_tokens": self.n_prompt,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
        });
        let message = self.header.message(json!([]), Value::Null, usage);
        event(&json!({"type": "message_start", "message": message})) + &self.alive()
    }

    fn alive(&mut self) -> String {
        event(&json!({"type": "ping"}))
    }

    fn piece(&mut self, _choice: usize, piece: Piece) -> String {
        match piece {
            Piece::Prompt(_) | Piece::Logprobs(_) => String::new(),
            Piece::Text(text) => {
                let block = json!({"type": "text", "text": ""});
                self.delta(
                    Block::Text,
                    &block,
                    &json!({"type": "text_delta", "text": text}),
                )
            }
            Piece::Reasoning(text) => {
                let block = json!({"type": "thinking", "thinking": "", "signature": ""});
                let delta = json!({"type": "thinking_delta", "thinking": text});
                self.delta(Block::Thinking, &block, &delta)
            }
            Piece::ToolStart { id, name, .. } => {
                let block = json!({"type": "tool_use", "id": id, "name": name, "input": {}});
                self.open(Block::Tool, &block)
            }
            Piece::ToolArguments { text, .. } => {
                let delta = json!({"type": "input_json_delta", "partial_json": text});
                self.delta(Block::Tool, &Value::Null, &delta)
            }
            Piece::Finish(finish) => {
                self.stop = stop_reason(&finish);
                self.close()
            }
            Piece::Usage(usage) => {
                let mut last = json!({
                    "type": "message_delta",
                    "delta": self.stop,
                    "usage": usage_json(&usage),
                });
                self.skips.add_to(&mut last);
                event(&last)
            }
        }
    }

    fn end(&mut self) -> String {
        event(&json!({"type": "message_stop"}))
    }

    fn error(&mut self, error: &ApiError) -> String {
        event(&error_json(error))
    }
}
