//! `POST /completion`.

use axum::extract::{Extension, Request, State};
use axum::response::Response;
use axum::routing::MethodRouter;
use engine::FinishReason;
use engine::serve::Usage;
use kv_core::TokenId;
use model_core::tokenizer::{EncodeOptions, Tokenizer};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::api::on_post;
use crate::api::params::SamplingParams;
use crate::app::App;
use crate::auth::Tenant;
use crate::error::ApiError;
use crate::generate::{Answer, Constraint, Finish, GenerateRequest, Output, Piece, Prompt};
use crate::json::{self, Body, Neutral, Refused};
use crate::stream::{self, Encoder, event};

const fn refused(name: &'static str, neutral: Neutral, hint: &'static str) -> Refused {
    Refused {
        name,
        neutral,
        hint,
    }
}

/// Parameters that would change the result.
const REFUSED: [Refused; 11] = [
    refused("n_probs", Neutral::Number(0.0), "leave it out"),
    refused("n_cmpl", Neutral::Number(1.0), "send several requests"),
    refused("logit_bias", Neutral::Empty, "leave it out"),
    refused("ignore_eos", Neutral::False, "leave it out"),
    refused("grammar", Neutral::Empty, "use json_schema"),
    refused("typical_p", Neutral::Number(1.0), "use top_p or min_p"),
    refused("mirostat", Neutral::Number(0.0), "use top_p or min_p"),
    refused("dry_multiplier", Neutral::Number(0.0), "use repeat_penalty"),
    refused("xtc_probability", Neutral::Number(0.0), "leave it out"),
    refused("dynatemp_range", Neutral::Number(0.0), "use temperature"),
    refused("lora", Neutral::Empty, "this server has no adapters"),
];

/// The fields of this endpoint alone.
#[derive(Clone, Debug, Deserialize)]
struct Fields {
    model: Option<String>,
    prompt: PromptField,
    /// -1 goes on until the model or the context ends.
    n_predict: Option<i64>,
    max_tokens: Option<i64>,
    stream: Option<bool>,
    return_tokens: Option<bool>,
    json_schema: Option<Value>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "expected a text, or a list of tokens and texts")]
enum PromptField {
    Text(String),
    Mixed(Vec<Part>),
}

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum Part {
    Token(u32),
    Text(String),
}

impl PromptField {
    fn prompt(self, tokenizer: &Tokenizer) -> Prompt {
        let parts = match self {
            Self::Text(text) => return Prompt::Text(text),
            Self::Mixed(parts) => parts,
        };
        let mut tokens = Vec::new();
        for part in parts {
            match part {
                Part::Token(id) => tokens.push(TokenId(id)),
                // A first text begins the prompt, as a text alone does.
                Part::Text(text) if tokens.is_empty() => {
                    tokens.extend(tokenizer.encode(&text, EncodeOptions::PROMPT));
                }
                Part::Text(text) => tokens.extend(tokenizer.encode(&text, super::tokens::PARSED)),
            }
        }
        Prompt::Tokens(tokens)
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
    let fields: Fields = body.get()?;
    let model = app.model(fields.model.as_deref())?;
    body.refuse(&REFUSED)?;
    let sampling: SamplingParams = body.get()?;
    let max_tokens = match fields.n_predict.or(fields.max_tokens) {
        None | Some(-1) => None,
        Some(n) => Some(
            usize::try_from(n)
                .map_err(|_| ApiError::invalid_param("n_predict", "'n_predict' is below -1"))?,
        ),
    };
    let schema = fields.json_schema.filter(|schema| !schema.is_null());
    let request = GenerateRequest {
        prompt: fields.prompt.prompt(model.tokenizer()),
        sampler: sampling.sampler(model.settings())?,
        max_tokens,
        stop: sampling.stop()?,
        constraint: schema.map(|schema| Constraint::JsonSchema {
            schema,
            param: "json_schema",
        }),
        priority: sampling.priority(),
        cache_salt: sampling.cache_salt(),
        output: Output::Text,
    };
    let generating = app.generate(model, tenant, request).await?;
    let format = CompletionFormat {
        model: model.id().to_owned(),
        with_tokens: fields.return_tokens == Some(true),
        finish: None,
    };
    if fields.stream == Some(true) {
        return Ok(stream::respond(vec![generating], format));
    }
    let Answer {
        text,
        finish,
        usage,
        ..
    } = generating.answer().await?;
    Ok(json::respond(&format.last(&text, &finish, &usage)))
}

/// llama-server's objects.
struct CompletionFormat {
    model: String,
    with_tokens: bool,
    finish: Option<Finish>,
}

impl CompletionFormat {
    /// The object that ends an answer.
    fn last(&self, text: &str, finish: &Finish, usage: &Usage) -> Value {
        let (stop_type, word) = match &finish.reason {
            FinishReason::StopString { text } => ("word", text.as_str()),
            FinishReason::Length | FinishReason::ContextFull => ("limit", ""),
            _ => ("eos", ""),
        };
        let tokens: Vec<u32> = match self.with_tokens {
            true => finish.tokens.iter().map(|id| id.0).collect(),
            false => Vec::new(),
        };
        let reused = usage.reuse.map_or(0, |reuse| reuse.n_tokens);
        json!({
            "index": 0,
            "content": text,
            "tokens": tokens,
            "id_slot": 0,
            "stop": true,
            "model": self.model,
            "tokens_predicted": usage.n_tokens,
            "tokens_evaluated": usage.n_prompt,
            "tokens_cached": reused,
            "truncated": finish.reason == FinishReason::ContextFull,
            "stop_type": stop_type,
            "stopping_word": word,
            "timings": timings(usage, reused),
        })
    }
}

/// Times and speeds, in milliseconds and tokens per second.
fn timings(usage: &Usage, reused: usize) -> Value {
    let first = usage.first_token.unwrap_or(usage.total);
    let prompt = first.saturating_sub(usage.queued).as_secs_f64();
    let predicted = usage.total.saturating_sub(first).as_secs_f64();
    let (n_prompt, n_predicted) = (usage.n_prompt - reused, usage.n_tokens);
    let speed = |n: usize, seconds: f64| match seconds > 0.0 {
        true => n as f64 / seconds,
        false => 0.0,
    };
    json!({
        "cache_n": reused,
        "prompt_n": n_prompt,
        "prompt_ms": prompt * 1e3,
        "prompt_per_second": speed(n_prompt, prompt),
        "predicted_n": n_predicted,
        "predicted_ms": predicted * 1e3,
        // The first token belongs to the prompt's time.
        "predicted_per_second": speed(n_predicted.saturating_sub(1), predicted),
    })
}

impl Encoder for CompletionFormat {
    fn piece(&mut self, index: usize, piece: Piece) -> String {
        match piece {
            Piece::Text(text) => event(&json!({
                "index": index, "content": text, "tokens": [], "stop": false, "id_slot": 0,
            })),
            // A text that is no chat has no other pieces.
            Piece::Reasoning(_) | Piece::ToolStart { .. } | Piece::ToolArguments { .. } => {
                String::new()
            }
            Piece::Finish(finish) => {
                self.finish = Some(finish);
                String::new()
            }
            Piece::Usage(usage) => match &self.finish {
                Some(finish) => event(&self.last("", finish, &usage)),
                None => String::new(),
            },
        }
    }

    fn error(&mut self, error: &ApiError) -> String {
        event(&error.openai())
    }
}
