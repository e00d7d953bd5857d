//! `POST /v1/chat/completions`.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::{Extension, Request, State};
use axum::response::Response;
use axum::routing::MethodRouter;
use cellar_engine::serve::Usage;
use cellar_engine::{Logprobs, TokenLogprobs};
use model_core::tokenizer::Tokenizer;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::transfer::{Handover, ReadRequest, TransferParams};
use super::{
    FieldRule, Neutral, Specific, finish_reason, generate_request, messages, tools, usage_json,
};
use crate::api::timings::{prompt_progress, timings};
use crate::api::{logprobs, on_post};
use crate::app::App;
use crate::auth::Tenant;
use crate::error::ApiError;
use crate::generate::{Answer, ChatPrompt, GenerateRequest, Output, Piece, Prompt};
use crate::ids::{now, random_id};
use crate::json::Body;
use crate::model::{Job, ModelSettings};
use crate::skips::Skips;
use crate::stream::{self, Encoder, event};

/// Parameters of this endpoint alone that are not done.
pub(in crate::api) const LIMITED: [FieldRule; 9] = [
    FieldRule::new(
        "best_of",
        Neutral::Number(1.0),
        "use /v1/completions, or 'n' with 'logprobs'",
    ),
    FieldRule::new("functions", Neutral::Empty, "use 'tools'"),
    FieldRule::new(
        "modalities",
        Neutral::Text("text"),
        "this model writes text",
    ),
    FieldRule::new("audio", Neutral::Empty, "this model writes text"),
    FieldRule::new("web_search_options", Neutral::Empty, "there is no search").skipped(),
    FieldRule::new("verbosity", Neutral::Text("medium"), "the model decides").skipped(),
    FieldRule::new("echo", Neutral::False, "the messages are yours"),
    FieldRule::new(
        "chat_template",
        Neutral::Empty,
        "the template is the model's, or the server's --chat-template",
    ),
    FieldRule::new(
        "documents",
        Neutral::Empty,
        "give them in 'messages' or 'chat_template_kwargs'",
    ),
];

/// The fields of this endpoint alone.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct ChatFields {
    pub(super) model: Option<String>,
    messages: Value,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    chat_template_kwargs: Option<Map<String, Value>>,
    reasoning_effort: Option<String>,
    return_progress: Option<bool>,
    logprobs: Option<bool>,
    top_logprobs: Option<usize>,
    /// Whether another server goes on with the prompt.
    kv_transfer_params: Option<TransferParams>,
}

/// What a stream has besides the text.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub(super) struct StreamOptions {
    pub(super) include_usage: Option<bool>,
}

/// The route.
pub(crate) fn route() -> MethodRouter<App> {
    on_post(handle)
}

async fn handle(
    State(app): State<App>,
    Extension(tenant): Extension<Tenant>,
    request: Request,
) -> Result<Response, ApiError> {
    let body = Body::read(request).await?;
    let fields: ChatFields = body.get()?;
    let model = app.model_for(fields.model.as_deref(), Job::Texts).await?;
    let request = read(&body, &fields, model.settings())?;
    let logprobs = request.logprobs;
    let read = ReadRequest {
        body: &body,
        requests: std::slice::from_ref(&request),
        stream: fields.stream,
        transfer: fields.kv_transfer_params,
    };
    let handover = Handover::of(&app, &model, tenant, read).await?;
    let texts = app.generate_texts(&model, tenant, request).await?;
    let skips = body.skips().clone();
    drop(body);
    let header = Header::new(model.id(), model.tokenizer());
    if fields.stream == Some(true) {
        let options = fields.stream_options.unwrap_or_default();
        let encoder = ChatStream {
            header,
            include_usage: options.include_usage == Some(true),
            shows_progress: fields.return_progress == Some(true),
            usages: BTreeMap::new(),
            reasons: BTreeMap::new(),
            n_reasoning: 0,
            skips,
            logprobs: vec![Vec::new(); texts.len()],
        };
        return Ok(stream::respond(texts, encoder));
    }
    let mut answers = Vec::with_capacity(texts.len());
    for text in texts {
        answers.push(text.answer().await?);
    }
    let mut object = header.answer(&answers, logprobs);
    if let Some(handover) = handover {
        object["kv_transfer_params"] = handover.finish(&model).await?;
    }
    Ok(skips.respond(object))
}

/// `logprobs` and `top_logprobs`.
///
/// # Errors
/// [`ApiError`] 400 where the second is there without the first, or too large.
fn wanted_logprobs(fields: &ChatFields) -> Result<Logprobs, ApiError> {
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

/// From the JSON of a request to what is generated.
///
/// # Errors
/// [`ApiError`] 400 where a parameter is wrong or not supported.
pub(super) fn read(
    body: &Body,
    fields: &ChatFields,
    settings: &ModelSettings,
) -> Result<GenerateRequest, ApiError> {
    let mut variables = fields.chat_template_kwargs.clone().unwrap_or_default();
    if let Some(effort) = &fields.reasoning_effort {
        variables.insert("reasoning_effort".to_owned(), json!(effort));
    }
    let tools = tools::Tools::read(body)?;
    tools.add_to(&mut variables);
    let chat = ChatPrompt {
        messages: messages::messages(&fields.messages, body.skips())?,
        variables,
    };
    messages::check_end(body, &chat)?;
    let specific = Specific {
        prompt: Prompt::Chat(chat),
        echo: false,
        max_tokens: body
            .max_tokens("max_completion_tokens")?
            .or_of(body.max_tokens("max_tokens")?)
            .or(None),
        output: Output::Chat(tools.used()),
        forced: tools.constraint(),
        logprobs: wanted_logprobs(fields)?,
    };
    generate_request(body, settings, specific)
}

/// What all objects of one answer have.
#[derive(Clone, Debug)]
struct Header {
    id: String,
    created: u64,
    model: String,
    tokenizer: Arc<Tokenizer>,
}

impl Header {
    fn new(model: &str, tokenizer: &Arc<Tokenizer>) -> Self {
        Self {
            tokenizer: Arc::clone(tokenizer),
            id: random_id("chatcmpl-"),
            created: now(),
            model: model.to_owned(),
        }
    }

    fn object(&self, kind: &str, choices: Value) -> Value {
        json!({
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": concat!("cellar-", env!("CARGO_PKG_VERSION")),
            "choices": choices,
        })
    }

    /// The whole answer.
    fn answer(&self, answers: &[Answer], wanted: Logprobs) -> Value {
        let choices = answers.iter().enumerate().map(|(index, answer)| {
            let mut choice = Self::choice(index, answer);
            if wanted != Logprobs::Off {
                choice["logprobs"] = logprobs::chat(&self.tokenizer, &answer.logprobs);
            }
            choice
        });
        let mut object = self.object("chat.completion", choices.collect());
        let usages: Vec<Usage> = answers.iter().map(|answer| answer.usage).collect();
        let n_reasoning = answers.iter().map(|answer| answer.finish.n_reasoning).sum();
        object["usage"] = usage_json(&usages, usages.len(), n_reasoning);
        if let [only] = usages.as_slice() {
            object["timings"] = timings(only);
        }
        object
    }

    fn choice(index: usize, answer: &Answer) -> Value {
        let mut message = json!({"role": "assistant", "content": answer.text, "refusal": null});
        if !answer.reasoning.is_empty() {
            message["reasoning_content"] = json!(answer.reasoning);
        }
        if !answer.calls.is_empty() {
            if answer.text.is_empty() {
                message["content"] = Value::Null;
            }
            let calls = answer.calls.iter().map(|call| {
                let function = json!({"name": call.name, "arguments": call.arguments});
                json!({"id": call.id, "type": "function", "function": function})
            });
            message["tool_calls"] = calls.collect();
        }
        json!({
            "index": index,
            "message": message,
            "logprobs": null,
            "finish_reason": finish_reason(&answer.finish),
        })
    }
}

/// The stream: a chunk with the role, chunks with text, one with the reason, perhaps one with the
/// usage, and `[DONE]`.
struct ChatStream {
    header: Header,
    include_usage: bool,
    shows_progress: bool,
    usages: BTreeMap<usize, Usage>,
    /// Why choices have ended whose last chunk has not been given out.
    reasons: BTreeMap<usize, &'static str>,
    /// Tokens of reasoning, of all choices that have ended.
    n_reasoning: usize,
    /// Named in the last chunk of the choice that ends last.
    skips: Skips,
    /// Those of the next chunk of each choice.
    logprobs: Vec<Vec<TokenLogprobs>>,
}

impl ChatStream {
    fn chunk(&mut self, choice: usize, delta: &Value) -> String {
        let choices = self.choices(choice, delta, None);
        self.event(choices, Value::Null)
    }

    fn choices(&mut self, choice: usize, delta: &Value, finish: Option<&str>) -> Value {
        let places = self.logprobs.get_mut(choice).map(std::mem::take);
        let logprobs = match places.unwrap_or_default() {
            none if none.is_empty() => Value::Null,
            places => logprobs::chat(&self.header.tokenizer, &places),
        };
        let choice = json!({
            "index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish,
        });
        json!([choice])
    }

    /// The last chunk of a choice, with the times that it took.
    fn last_chunk(&mut self, choice: usize, usage: &Usage) -> String {
        let reason = self.reasons.remove(&choice);
        let choices = self.choices(choice, &json!({}), reason);
        let mut object = self.object(choices, Value::Null);
        object["timings"] = timings(usage);
        if self.usages.len() == self.logprobs.len() {
            self.skips.add_to(&mut object);
        }
        event(&object)
    }

    fn event(&self, choices: Value, usage: Value) -> String {
        event(&self.object(choices, usage))
    }

    fn object(&self, choices: Value, usage: Value) -> Value {
        let mut object = self.header.object("chat.completion.chunk", choices);
        if self.include_usage {
            object["usage"] = usage;
        }
        object
    }
}

impl Encoder for ChatStream {
    fn begin(&mut self) -> String {
        let delta = json!({"role": "assistant", "content": ""});
        let choices = 0..self.logprobs.len();
        let chunks = choices.map(|choice| self.chunk(choice, &delta));
        chunks.collect()
    }

    fn progress(&mut self, choice: usize, usage: &Usage) -> String {
        if !self.shows_progress {
            return String::new();
        }
        let choices = self.choices(choice, &json!({}), None);
        let mut object = self.object(choices, Value::Null);
        object["prompt_progress"] = prompt_progress(usage);
        event(&object)
    }

    fn piece(&mut self, choice: usize, piece: Piece) -> String {
        match piece {
            Piece::Logprobs(new) => {
                if let Some(places) = self.logprobs.get_mut(choice) {
                    places.extend(new);
                }
                String::new()
            }
            Piece::Prompt(_) => String::new(),
            Piece::Text(text) => self.chunk(choice, &json!({"content": text})),
            Piece::Reasoning(text) => self.chunk(choice, &json!({"reasoning_content": text})),
            Piece::ToolStart { index, id, name } => {
                let function = json!({"name": name, "arguments": ""});
                let call = json!({
                    "index": index, "id": id, "type": "function", "function": function,
                });
                self.chunk(choice, &json!({"tool_calls": [call]}))
            }
            Piece::ToolArguments { index, text } => {
                let call = json!({"index": index, "function": {"arguments": text}});
                self.chunk(choice, &json!({"tool_calls": [call]}))
            }
            Piece::Finish(finish) => {
                self.n_reasoning += finish.n_reasoning;
                self.reasons.insert(choice, finish_reason(&finish));
                String::new()
            }
            Piece::Usage(usage) => {
                self.usages.insert(choice, usage);
                self.last_chunk(choice, &usage)
            }
        }
    }

    fn end(&mut self) -> String {
        let usage = if self.include_usage {
            let usages: Vec<Usage> = self.usages.values().copied().collect();
            let usage = usage_json(&usages, usages.len(), self.n_reasoning);
            self.event(json!([]), usage)
        } else {
            String::new()
        };
        usage + "data: [DONE]\n\n"
    }

    fn error(&mut self, error: &ApiError) -> String {
        event(&error.openai())
    }
}
