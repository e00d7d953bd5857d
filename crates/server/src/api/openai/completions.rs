//! `POST /v1/completions`: one prompt or several, each a text or tokens.

use axum::extract::{Extension, Request, State};
use axum::response::Response;
use axum::routing::MethodRouter;
use engine::serve::Usage;
use kv_core::TokenId;
use serde::Deserialize;
use serde_json::{Value, json};

use super::chat::StreamOptions;
use super::{Neutral, Refused, Specific, finish_reason, generate_request, refused, usage_json};
use crate::api::on_post;
use crate::api::params::{now, random_id};
use crate::app::App;
use crate::auth::Tenant;
use crate::error::ApiError;
use crate::generate::{Answer, Output, Piece, Prompt};
use crate::json::{self, Body};
use crate::stream::{self, Encoder, event};

/// What OpenAI generates where a request gives no number.
const DEFAULT_MAX_TOKENS: usize = 16;

/// Prompts of one request.
const MAX_PROMPTS: usize = 128;

/// Parameters of this endpoint alone that would change the result.
const COMPLETION_REFUSED: [Refused; 3] = [
    refused("logprobs", Neutral::AtMost(0.0), "leave it out"),
    refused("echo", Neutral::False, "add the prompt to the answer"),
    refused("suffix", Neutral::Empty, "leave it out"),
];

/// The fields of this endpoint alone.
#[derive(Clone, Debug, Deserialize)]
struct CompletionFields {
    model: Option<String>,
    prompt: Prompts,
    max_tokens: Option<usize>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
}

/// All forms of a prompt.
#[derive(Clone, Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a text, a list of texts, a list of tokens, or a list of these"
)]
enum Prompts {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    TokenLists(Vec<Vec<u32>>),
}

impl Prompts {
    fn list(self) -> Vec<Prompt> {
        let tokens = |ids: Vec<u32>| Prompt::Tokens(ids.into_iter().map(TokenId).collect());
        match self {
            Self::Text(text) => vec![Prompt::Text(text)],
            Self::Tokens(ids) => vec![tokens(ids)],
            Self::Texts(texts) => texts.into_iter().map(Prompt::Text).collect(),
            Self::TokenLists(lists) => lists.into_iter().map(tokens).collect(),
        }
    }
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
    let body = Body::read(request, app.config().max_body).await?;
    let fields: CompletionFields = body.get()?;
    let model = app.model(fields.model.as_deref())?;
    body.refuse(&COMPLETION_REFUSED)?;
    let prompts = fields.prompt.list();
    if prompts.is_empty() || prompts.len() > MAX_PROMPTS {
        let message = format!(
            "there are {} prompts: 1 to {MAX_PROMPTS} are taken",
            prompts.len()
        );
        return Err(ApiError::invalid_param("prompt", message));
    }
    let mut texts = Vec::with_capacity(prompts.len());
    for prompt in prompts {
        let specific = Specific {
            prompt,
            max_tokens: Some(fields.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS)),
            output: Output::Text,
            forced: None,
        };
        let request = generate_request(&body, model.settings(), specific)?;
        texts.push(app.generate(model, tenant, request).await?);
    }
    let header = Header::new(model.id());
    if fields.stream == Some(true) {
        let options = fields.stream_options.unwrap_or_default();
        let encoder = CompletionStream {
            header,
            include_usage: options.include_usage == Some(true),
            usages: Vec::new(),
        };
        return Ok(stream::respond(texts, encoder));
    }
    let mut answers = Vec::with_capacity(texts.len());
    for text in texts {
        answers.push(text.answer().await?);
    }
    Ok(json::respond(&header.answer(&answers)))
}

/// What all objects of one answer have.
#[derive(Clone, Debug)]
struct Header {
    id: String,
    created: u64,
    model: String,
}

impl Header {
    fn new(model: &str) -> Self {
        Self {
            id: random_id("cmpl-"),
            created: now(),
            model: model.to_owned(),
        }
    }

    fn object(&self, choices: &[Value]) -> Value {
        json!({
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        })
    }

    fn answer(&self, answers: &[Answer]) -> Value {
        let choices = answers.iter().enumerate();
        let choices = choices.map(|(index, answer)| {
            choice(index, &answer.text, Some(finish_reason(&answer.finish)))
        });
        let mut object = self.object(&choices.collect::<Vec<_>>());
        let usages: Vec<Usage> = answers.iter().map(|answer| answer.usage).collect();
        object["usage"] = usage_json(&usages);
        object
    }
}

fn choice(index: usize, text: &str, finish: Option<&str>) -> Value {
    json!({"index": index, "text": text, "logprobs": null, "finish_reason": finish})
}

struct CompletionStream {
    header: Header,
    include_usage: bool,
    usages: Vec<Usage>,
}

impl CompletionStream {
    fn event(&self, choices: &[Value], usage: Value) -> String {
        let mut object = self.header.object(choices);
        if self.include_usage {
            object["usage"] = usage;
        }
        event(&object)
    }
}

impl Encoder for CompletionStream {
    fn piece(&mut self, index: usize, piece: Piece) -> String {
        match piece {
            Piece::Text(text) => self.event(&[choice(index, &text, None)], Value::Null),
            // A text that is no chat has no other pieces.
            Piece::Reasoning(_) | Piece::ToolStart { .. } | Piece::ToolArguments { .. } => {
                String::new()
            }
            Piece::Finish(finish) => {
                let reason = finish_reason(&finish);
                self.event(&[choice(index, "", Some(reason))], Value::Null)
            }
            Piece::Usage(usage) => {
                self.usages.push(usage);
                String::new()
            }
        }
    }

    fn end(&mut self) -> String {
        let usage = match self.include_usage {
            true => self.event(&[], usage_json(&self.usages)),
            false => String::new(),
        };
        usage + "data: [DONE]\n\n"
    }

    fn error(&mut self, error: &ApiError) -> String {
        event(&error.openai())
    }
}
