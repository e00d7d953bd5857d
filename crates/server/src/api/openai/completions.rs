//! `POST /v1/completions`: one prompt or several, each a text or tokens.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::{Extension, Request, State};
use axum::response::Response;
use axum::routing::MethodRouter;
use cellar_engine::serve::{Choices, Usage};
use cellar_engine::{Logprobs, TokenLogprobs};
use kv_core::TokenId;
use model_core::tokenizer::Tokenizer;
use serde::Deserialize;
use serde_json::{Value, json};

use super::chat::StreamOptions;
use super::transfer::{Handover, ReadRequest, TransferParams};
use super::{Specific, finish_reason, generate_request, usage_json};
use crate::api::{logprobs, on_post};
use crate::app::App;
use crate::auth::Tenant;
use crate::error::ApiError;
use crate::fim::{self, Gap};
use crate::generate::{Answer, EchoedPrompt, GenerateRequest, Output, Piece, Prompt};
use crate::ids::{now, random_id};
use crate::json::Body;
use crate::model::{Job, ServedModel};
use crate::skips::Skips;
use crate::stream::{self, Encoder, event};

/// What OpenAI generates where a request gives no number.
const DEFAULT_MAX_TOKENS: usize = 16;

/// Prompts of one request.
const MAX_PROMPTS: usize = 128;

/// The fields of this endpoint alone.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct CompletionFields {
    pub(super) model: Option<String>,
    prompt: Prompts,
    /// Whether the answer begins with the prompt.
    echo: Option<bool>,
    /// What comes after the text that is generated.
    suffix: Option<String>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    /// How many of the likeliest tokens are given with each.
    logprobs: Option<usize>,
    /// Whether another server goes on with the prompt.
    kv_transfer_params: Option<TransferParams>,
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
    fn list(&self) -> Vec<Prompt> {
        let tokens = |ids: &Vec<u32>| Prompt::Tokens(ids.iter().copied().map(TokenId).collect());
        match self {
            Self::Text(text) => vec![Prompt::Text(text.clone())],
            Self::Tokens(ids) => vec![tokens(ids)],
            Self::Texts(texts) => texts.iter().cloned().map(Prompt::Text).collect(),
            Self::TokenLists(lists) => lists.iter().map(tokens).collect(),
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
    let body = Body::read(request).await?;
    let fields: CompletionFields = body.get()?;
    let model = app.model_for(fields.model.as_deref(), Job::Texts).await?;
    let requests = read(&body, &fields, &model)?;
    let read = ReadRequest {
        body: &body,
        requests: &requests,
        stream: fields.stream,
        transfer: fields.kv_transfer_params,
    };
    let handover = Handover::of(&app, &model, tenant, read).await?;
    let (mut choices, mut wanted) = (Choices::default(), Logprobs::Off);
    let mut texts = Vec::with_capacity(requests.len());
    for request in requests {
        (choices, wanted) = (request.choices, request.logprobs);
        texts.extend(app.generate_texts(&model, tenant, request).await?);
    }
    let skips = body.skips().clone();
    drop(body);
    let n_of_prompt = choices.n_computed().get() as usize;
    let header = Header {
        id: random_id("cmpl-"),
        created: now(),
        model: model.id().to_owned(),
        tokenizer: Arc::clone(model.tokenizer()),
        with_logprobs: wanted != Logprobs::Off,
        n_of_prompt,
    };
    if fields.stream == Some(true) {
        let options = fields.stream_options.unwrap_or_default();
        let encoder = CompletionStream {
            header,
            include_usage: options.include_usage == Some(true),
            usages: BTreeMap::new(),
            skips,
            choices: vec![ChoiceState::default(); texts.len()],
        };
        return Ok(stream::respond(texts, encoder));
    }
    let mut answers = Vec::with_capacity(texts.len());
    for text in texts {
        answers.push(text.answer().await?);
    }
    let usages: Vec<Usage> = answers.iter().map(|answer| answer.usage).collect();
    let mut chosen = Vec::with_capacity(answers.len());
    while !answers.is_empty() {
        let rest = answers.split_off(n_of_prompt.min(answers.len()));
        chosen.extend(choices.choose(answers, |answer| &answer.logprobs));
        answers = rest;
    }
    let mut object = header.answer(&chosen);
    object["usage"] = usage_json(&usages, n_of_prompt, 0);
    if let Some(handover) = handover {
        object["kv_transfer_params"] = handover.finish(&model).await?;
    }
    Ok(skips.respond(object))
}

/// From the JSON of a request to what is generated, for each prompt.
///
/// # Errors
/// [`ApiError`] 400 where a parameter is wrong or not supported.
pub(super) fn read(
    body: &Body,
    fields: &CompletionFields,
    model: &ServedModel,
) -> Result<Vec<GenerateRequest>, ApiError> {
    let suffix = fields.suffix.as_deref().filter(|suffix| !suffix.is_empty());
    let echo = fields.echo == Some(true);
    if echo && suffix.is_some() {
        let message = "'echo' is not supported with 'suffix': the prompt of a gap is no text";
        return Err(ApiError::unsupported("echo", message));
    }
    let prompts = with_suffix(fields.prompt.list(), suffix, model)?;
    if prompts.is_empty() || prompts.len() > MAX_PROMPTS {
        let message = format!(
            "there are {} prompts: 1 to {MAX_PROMPTS} are taken",
            prompts.len()
        );
        return Err(ApiError::invalid_param("prompt", message));
    }
    let wanted = fields.logprobs.map_or(Logprobs::Off, Logprobs::Top);
    let wanted = logprobs::check(wanted, "logprobs")?;
    let max_tokens = body.max_tokens("max_tokens")?;
    let max_tokens = max_tokens.or(Some(DEFAULT_MAX_TOKENS));
    let request = |prompt| {
        let specific = Specific {
            prompt,
            echo,
            max_tokens,
            logprobs: wanted,
            output: Output::Text,
            forced: None,
        };
        let request = generate_request(body, model.settings(), specific)?;
        if request.choices.are_ranked() && fields.stream == Some(true) {
            let message = "the best of several texts cannot be streamed: leave out 'stream'";
            return Err(ApiError::invalid_param("best_of", message));
        }
        // Each choice would have them again, and compute them.
        if echo && wanted != Logprobs::Off && request.choices.n_computed().get() > 1 {
            let message = "'echo' is not supported with 'logprobs' where 'n' or 'best_of' is above 1: those of the \
                           prompt are the same in each choice; ask for them with 'max_tokens': 0";
            return Err(ApiError::unsupported("echo", message));
        }
        Ok(request)
    };
    prompts.into_iter().map(request).collect()
}

/// Prompts before a gap, with what comes after it.
fn with_suffix(
    prompts: Vec<Prompt>,
    suffix: Option<&str>,
    model: &ServedModel,
) -> Result<Vec<Prompt>, ApiError> {
    let Some(suffix) = suffix else {
        return Ok(prompts);
    };
    if !fim::is_known(model.tokenizer()) {
        let message = format!("'suffix' is not supported: {}", model.has_no_gaps());
        return Err(ApiError::unsupported("suffix", message));
    }
    let gap = |prompt| match prompt {
        Prompt::Text(prefix) => Ok(Prompt::Gap(Gap {
            prefix,
            suffix: suffix.to_owned(),
            files: Vec::new(),
        })),
        _ => Err(ApiError::invalid_param(
            "prompt",
            "a prompt with a 'suffix' is a text, not tokens",
        )),
    };
    prompts.into_iter().map(gap).collect()
}

/// What all objects of one answer have.
#[derive(Clone, Debug)]
struct Header {
    id: String,
    created: u64,
    model: String,
    tokenizer: Arc<Tokenizer>,
    with_logprobs: bool,
    /// Texts of each prompt.
    n_of_prompt: usize,
}

/// What is kept of a choice while it is streamed.
#[derive(Clone, Debug, Default)]
struct ChoiceState {
    /// Those of the next chunk.
    logprobs: Vec<TokenLogprobs>,
    /// Characters of its tokens.
    offset: usize,
}

impl Header {
    /// Those of a prompt and of tokens behind it.
    fn logprobs(
        &self,
        prompt: Option<&EchoedPrompt>,
        places: &[TokenLogprobs],
        offset: &mut usize,
    ) -> Value {
        if self.with_logprobs {
            logprobs::completion(&self.tokenizer, prompt, places, offset)
        } else {
            Value::Null
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
            let finish = Some(finish_reason(&answer.finish));
            let prompt = answer.prompt.as_ref();
            let before = prompt.map_or("", |prompt| &prompt.text);
            let mut choice = choice(index, &format!("{before}{}", answer.text), finish);
            choice["logprobs"] = self.logprobs(prompt, &answer.logprobs, &mut 0);
            choice
        });
        self.object(&choices.collect::<Vec<_>>())
    }
}

fn choice(index: usize, text: &str, finish: Option<&str>) -> Value {
    json!({"index": index, "text": text, "logprobs": null, "finish_reason": finish})
}

struct CompletionStream {
    header: Header,
    include_usage: bool,
    usages: BTreeMap<usize, Usage>,
    /// Named in the last chunk of the choice that ends last.
    skips: Skips,
    choices: Vec<ChoiceState>,
}

impl CompletionStream {
    fn chunk(&mut self, index: usize, text: &str, finish: Option<&str>) -> String {
        let mut choice = choice(index, text, finish);
        if let Some(state) = self.choices.get_mut(index)
            && !state.logprobs.is_empty()
        {
            let places = std::mem::take(&mut state.logprobs);
            choice["logprobs"] = self.header.logprobs(None, &places, &mut state.offset);
        }
        let mut object = self.object(&[choice], Value::Null);
        let is_last = finish.is_some() && self.usages.len() + 1 == self.choices.len();
        if is_last {
            self.skips.add_to(&mut object);
        }
        event(&object)
    }

    fn prompt(&mut self, index: usize, prompt: &EchoedPrompt) -> String {
        let mut choice = choice(index, &prompt.text, None);
        if let Some(state) = self.choices.get_mut(index) {
            choice["logprobs"] = self.header.logprobs(Some(prompt), &[], &mut state.offset);
        }
        event(&self.object(&[choice], Value::Null))
    }

    fn object(&self, choices: &[Value], usage: Value) -> Value {
        let mut object = self.header.object(choices);
        if self.include_usage {
            object["usage"] = usage;
        }
        object
    }
}

impl Encoder for CompletionStream {
    fn piece(&mut self, index: usize, piece: Piece) -> String {
        match piece {
            Piece::Logprobs(new) => {
                if let Some(state) = self.choices.get_mut(index) {
                    state.logprobs.extend(new);
                }
                String::new()
            }
            Piece::Prompt(prompt) => self.prompt(index, &prompt),
            Piece::Text(text) => self.chunk(index, &text, None),
            // A text that is no chat has no other pieces.
            Piece::Reasoning(_) | Piece::ToolStart { .. } | Piece::ToolArguments { .. } => {
                String::new()
            }
            Piece::Finish(finish) => {
                let reason = finish_reason(&finish);
                self.chunk(index, "", Some(reason))
            }
            Piece::Usage(usage) => {
                self.usages.insert(index, usage);
                String::new()
            }
        }
    }

    fn end(&mut self) -> String {
        let usage = if self.include_usage {
            let usages: Vec<Usage> = self.usages.values().copied().collect();
            let usage = usage_json(&usages, self.header.n_of_prompt, 0);
            event(&self.object(&[], usage))
        } else {
            String::new()
        };
        usage + "data: [DONE]\n\n"
    }

    fn error(&mut self, error: &ApiError) -> String {
        event(&error.openai())
    }
}
