//! `POST /completion` and `POST /infill`.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Extension, Request, State};
use axum::response::Response;
use axum::routing::MethodRouter;
use cellar_engine::serve::{Choices, Usage};
use cellar_engine::{FinishReason, Logprobs, TokenLogprobs};
use kv_core::TokenId;
use model_core::tokenizer::{EncodeOptions, Tokenizer};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::api::constraints::constraint;
use crate::api::openai::SAMPLERS;
use crate::api::params::SamplingParams;
use crate::api::timings::{prompt_progress, timings};
use crate::api::{logprobs, on_post};
use crate::app::App;
use crate::auth::Tenant;
use crate::error::ApiError;
use crate::field_rule::{FieldRule, Neutral};
use crate::fim::{self, Gap, GapFile};
use crate::generate::{Answer, Finish, GenerateRequest, MarkedText, Output, Piece, Prompt, Stop};
use crate::json::{self, Body};
use crate::model::Job;
use crate::models::ModelInUse;
use crate::skips::Skips;
use crate::stream::{self, Encoder, event};

/// Parameters that are not done.
pub(in crate::api) const LIMITED: [FieldRule; 6] = [
    FieldRule::new(
        "n_cmpl",
        Neutral::Number(1.0),
        "use /v1/completions with 'n'",
    ),
    FieldRule::new("n", Neutral::Number(1.0), "use /v1/completions"),
    FieldRule::new("dynatemp_range", Neutral::Number(0.0), "use temperature"),
    SAMPLERS,
    FieldRule::new(
        "n_indent",
        Neutral::NotPositive,
        "lines begin as the model begins them",
    )
    .skipped(),
    FieldRule::new(
        "post_sampling_probs",
        Neutral::False,
        "probabilities are those of the untouched logits",
    ),
];

/// The fields of this endpoint alone.
#[derive(Clone, Debug, Deserialize)]
struct Fields {
    model: Option<String>,
    prompt: Option<PromptField>,
    /// The id of a request whose text, as far as it is, comes before the prompt.
    fork_of: Option<String>,
    /// -1 goes on until the model or the context ends.
    stream: Option<bool>,
    return_tokens: Option<bool>,
    return_progress: Option<bool>,
    /// How many of the likeliest tokens are given with each; 0 gives none.
    n_probs: Option<usize>,
    /// Milliseconds; none that is not above 0 counts.
    t_max_predict_ms: Option<i64>,
    /// The members that an answer has; a path such as `timings/predicted_n` is a member of one.
    response_fields: Option<Vec<String>>,
}

/// Prompts of one request.
const MAX_PROMPTS: usize = 128;

#[derive(Clone, Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a text, a list of tokens and texts, a list of these, or an object with 'prompt_string' and \
                 'multimodal_data'"
)]
enum PromptField {
    One(String),
    Marked(MarkedFields),
    List(Vec<Item>),
}

/// A part of a prompt, or one of several prompts.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum Item {
    Token(u32),
    Text(String),
    Parts(Vec<Part>),
    Marked(MarkedFields),
}

/// A text with marks for its pictures.
#[derive(Clone, Debug, Deserialize)]
struct MarkedFields {
    prompt_string: String,
    #[serde(default)]
    multimodal_data: Vec<String>,
}

impl MarkedFields {
    fn prompt(self) -> Prompt {
        if self.multimodal_data.is_empty() {
            return Prompt::Text(self.prompt_string);
        }
        Prompt::Marked(MarkedText {
            text: self.prompt_string,
            pictures: self.multimodal_data,
        })
    }
}

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum Part {
    Token(u32),
    Text(String),
}

impl PromptField {
    /// The prompts: a list with a token in it is one, any other list has one in each place.
    fn prompts(self, tokenizer: &Tokenizer) -> Result<Vec<Prompt>, ApiError> {
        let items = match self {
            Self::One(text) => return Ok(vec![Prompt::Text(text)]),
            Self::Marked(fields) => return Ok(vec![fields.prompt()]),
            Self::List(items) => items,
        };
        if !(1..=MAX_PROMPTS).contains(&items.len()) && !Item::are_parts(&items) {
            let n = items.len();
            let message = format!("there are {n} prompts: 1 to {MAX_PROMPTS} are taken");
            return Err(ApiError::invalid_param("prompt", message));
        }
        if !Item::are_parts(&items) {
            let prompt = |item| match item {
                Item::Text(text) => Prompt::Text(text),
                Item::Token(id) => Prompt::Tokens(vec![TokenId(id)]),
                Item::Parts(parts) => Part::prompt(parts, tokenizer),
                Item::Marked(fields) => fields.prompt(),
            };
            return Ok(items.into_iter().map(prompt).collect());
        }
        let parts: Result<Vec<Part>, ApiError> = items.into_iter().map(Item::part).collect();
        Ok(vec![Part::prompt(parts?, tokenizer)])
    }
}

impl Item {
    fn are_parts(items: &[Self]) -> bool {
        items.iter().any(|item| matches!(item, Self::Token(_)))
    }

    fn part(self) -> Result<Part, ApiError> {
        match self {
            Self::Token(id) => Ok(Part::Token(id)),
            Self::Text(text) => Ok(Part::Text(text)),
            Self::Parts(_) | Self::Marked(_) => Err(ApiError::invalid_param(
                "prompt",
                "a list with tokens is one prompt, and has no list or object in it",
            )),
        }
    }
}

impl Part {
    /// One prompt of these parts.
    fn prompt(parts: impl IntoIterator<Item = Self>, tokenizer: &Tokenizer) -> Prompt {
        let mut tokens = Vec::new();
        for part in parts {
            match part {
                Self::Token(id) => tokens.push(TokenId(id)),
                // A first text begins the prompt, as a text alone does.
                Self::Text(text) if tokens.is_empty() => {
                    tokens.extend(tokenizer.encode(&text, EncodeOptions::PROMPT));
                }
                Self::Text(text) => tokens.extend(tokenizer.encode(&text, super::tokens::PARSED)),
            }
        }
        Prompt::Tokens(tokens)
    }
}

/// The fields of `/infill` alone.
#[derive(Clone, Debug, Deserialize)]
struct GapFields {
    input_prefix: String,
    input_suffix: String,
    input_extra: Option<Vec<Extra>>,
    /// What the answer goes on from, at the end of `input_prefix`.
    prompt: Option<String>,
}

/// Another text of the project.
#[derive(Clone, Debug, Deserialize)]
struct Extra {
    text: String,
    filename: Option<String>,
}

impl GapFields {
    fn gap(self) -> Gap {
        let file = |extra: Extra| GapFile {
            name: extra.filename.unwrap_or_else(|| "tmp".to_owned()),
            text: extra.text,
        };
        Gap {
            prefix: self.input_prefix + &self.prompt.unwrap_or_default(),
            suffix: self.input_suffix,
            files: self.input_extra.into_iter().flatten().map(file).collect(),
        }
    }
}

/// The route that continues a text.
pub(crate) fn route() -> MethodRouter<App> {
    on_post(
        async |State(app): State<App>, Extension(tenant): Extension<Tenant>, request: Request| {
            let body = Body::read(request).await?;
            let fields: Fields = body.get()?;
            let prompt = fields.prompt.clone().ok_or_else(|| {
                ApiError::invalid_param("prompt", "the request is wrong: missing field `prompt`")
            })?;
            let model = app.model_for(fields.model.as_deref(), Job::Texts).await?;
            let prompts = match &fields.fork_of {
                Some(id) => vec![fork(&app, tenant, &model, id, prompt)?],
                None => prompt.prompts(model.tokenizer())?,
            };
            generate(&app, tenant, &model, body, prompts).await
        },
    )
}

/// The text of another request, as far as it is, and this prompt behind it.
fn fork(
    app: &App,
    tenant: Tenant,
    model: &ModelInUse,
    id: &str,
    prompt: PromptField,
) -> Result<Prompt, ApiError> {
    let wrong = |message: String| ApiError::invalid_param("fork_of", message);
    let branch = app.branches().get(id, tenant);
    let branch = branch.ok_or_else(|| ApiError::unknown_branch(id))?;
    if branch.model() != model.id() {
        let (its, ours) = (branch.model(), model.id());
        return Err(wrong(format!(
            "'{id}' is a text of '{its}', not of '{ours}'"
        )));
    }
    if branch.has_pictures() {
        return Err(wrong(format!(
            "'{id}' has pictures, which cannot be gone on from"
        )));
    }
    let parts = match prompt {
        PromptField::One(text) => vec![Part::Text(text)],
        PromptField::List(items) if Item::are_parts(&items) => items
            .into_iter()
            .map(Item::part)
            .collect::<Result<_, _>>()?,
        PromptField::List(_) | PromptField::Marked(_) => {
            let message = "goes with one 'prompt': a text, or a list of tokens and texts";
            return Err(wrong(message.to_owned()));
        }
    };
    let before = branch
        .tokens()
        .into_iter()
        .map(|token| Part::Token(token.0));
    Ok(Part::prompt(before.chain(parts), model.tokenizer()))
}

/// The route that fills the gap of a text.
pub(crate) fn infill() -> MethodRouter<App> {
    on_post(
        async |State(app): State<App>, Extension(tenant): Extension<Tenant>, request: Request| {
            let body = Body::read(request).await?;
            let gap: GapFields = body.get()?;
            let fields: Fields = body.get()?;
            let model = app.model_for(fields.model.as_deref(), Job::Texts).await?;
            if !fim::is_known(model.tokenizer()) {
                return Err(model.has_no_gaps());
            }
            let prompts = vec![Prompt::Gap(gap.gap())];
            generate(&app, tenant, &model, body, prompts).await
        },
    )
}

async fn generate(
    app: &App,
    tenant: Tenant,
    model: &ModelInUse,
    body: Body,
    prompts: Vec<Prompt>,
) -> Result<Response, ApiError> {
    let fields: Fields = body.get()?;
    let sampling: SamplingParams = body.get()?;
    let max_tokens = body.max_tokens("n_predict")?;
    let max_tokens = max_tokens.or_of(body.max_tokens("max_tokens")?).or(None);
    let wanted = match fields.n_probs {
        None | Some(0) => Logprobs::Off,
        Some(n) => Logprobs::Top(n),
    };
    let wanted = logprobs::check(wanted, "n_probs")?;
    let stop = Stop {
        max_time: fields
            .t_max_predict_ms
            .and_then(|ms| u64::try_from(ms).ok())
            .filter(|ms| *ms > 0)
            .map(Duration::from_millis),
        ..sampling.stop(model.settings())?
    };
    let constraint = constraint(&body)?;
    let request = |prompt| -> Result<GenerateRequest, ApiError> {
        Ok(GenerateRequest {
            prompt,
            sampler: sampling.sampler(model.settings())?,
            max_tokens,
            stop: stop.clone(),
            constraint: constraint.clone(),
            priority: sampling.priority(),
            cache_salt: sampling.cache_salt(),
            adapters: sampling.adapters(),
            speculate: sampling.speculate(),
            logprobs: wanted,
            choices: Choices::default(),
            echo: false,
            output: Output::Text,
            skips: body.skips().clone(),
        })
    };
    let mut texts = Vec::with_capacity(prompts.len());
    for prompt in prompts {
        texts.push(app.generate(model, tenant, request(prompt)?).await?);
    }
    let skips = body.skips().clone();
    drop(body);
    let wanted_members = fields.response_fields.unwrap_or_default();
    let mut format = CompletionFormat {
        model: model.id().to_owned(),
        with_tokens: fields.return_tokens == Some(true),
        shows_progress: fields.return_progress == Some(true),
        tokenizer: Arc::clone(model.tokenizer()),
        with_probabilities: wanted != Logprobs::Off,
        texts: texts.iter().map(|_| TextState::default()).collect(),
        skips,
    };
    if fields.stream == Some(true) {
        return Ok(stream::respond(texts, format));
    }
    let mut results = Vec::with_capacity(texts.len());
    for (index, text) in texts.into_iter().enumerate() {
        let answer = text.answer().await?;
        let mut result = chosen_members(format.whole(index, answer), &wanted_members);
        format.skips.add_to(&mut result);
        results.push(result);
    }
    Ok(match results.as_mut_slice() {
        [one] => json::respond(one),
        several => json::respond(&json!(several)),
    })
}

/// The members of an answer that a request wants: all, where it names none. A path gives the member
/// under the last of its names.
fn chosen_members(answer: Value, wanted: &[String]) -> Value {
    if wanted.is_empty() {
        return answer;
    }
    let members = wanted.iter().filter_map(|path| {
        let value = answer.pointer(&format!("/{path}"))?;
        let name = path.rsplit('/').next()?;
        Some((name.to_owned(), value.clone()))
    });
    Value::Object(members.collect())
}

/// llama-server's objects.
struct CompletionFormat {
    model: String,
    tokenizer: Arc<Tokenizer>,
    with_probabilities: bool,
    with_tokens: bool,
    shows_progress: bool,
    texts: Vec<TextState>,
    /// Named in the last object of each text.
    skips: Skips,
}

/// What the next objects of a text need.
#[derive(Default)]
struct TextState {
    logprobs: Vec<TokenLogprobs>,
    finish: Option<Finish>,
}

impl CompletionFormat {
    /// The only object of an answer.
    fn whole(&mut self, index: usize, answer: Answer) -> Value {
        if let Some(state) = self.texts.get_mut(index) {
            state.logprobs = answer.logprobs;
        }
        let mut object = self.last(index, &answer.finish, &answer.usage);
        object["content"] = json!(answer.text);
        object
    }

    /// The object that ends an answer.
    fn last(&mut self, index: usize, finish: &Finish, usage: &Usage) -> Value {
        let (stop_type, word) = match &finish.reason {
            FinishReason::StopString { text } => ("word", text.as_str()),
            FinishReason::Length | FinishReason::ContextFull => ("limit", ""),
            _ => ("eos", ""),
        };
        let tokens: Vec<u32> = if self.with_tokens {
            finish.tokens.iter().map(|id| id.0).collect()
        } else {
            Vec::new()
        };
        let reused = usage.n_reused();
        let object = json!({
            "index": index,
            "content": "",
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
            "timings": timings(usage),
        });
        self.with_logprobs(index, object)
    }

    /// An object with the probabilities of its tokens, where they are wanted.
    fn with_logprobs(&mut self, index: usize, mut object: Value) -> Value {
        if let Some(state) = self
            .texts
            .get_mut(index)
            .filter(|_| self.with_probabilities)
        {
            let places = std::mem::take(&mut state.logprobs);
            object["completion_probabilities"] = logprobs::llama(&self.tokenizer, &places);
        }
        object
    }
}

impl Encoder for CompletionFormat {
    fn progress(&mut self, index: usize, usage: &Usage) -> String {
        if !self.shows_progress {
            return String::new();
        }
        event(&json!({
            "index": index, "content": "", "tokens": [], "stop": false, "id_slot": 0,
            "prompt_progress": prompt_progress(usage),
        }))
    }

    fn piece(&mut self, index: usize, piece: Piece) -> String {
        match piece {
            Piece::Prompt(_) => String::new(),
            Piece::Logprobs(new) => {
                if let Some(state) = self.texts.get_mut(index) {
                    state.logprobs.extend(new);
                }
                String::new()
            }
            Piece::Text(text) => {
                let object = json!({
                    "index": index, "content": text, "tokens": [], "stop": false, "id_slot": 0,
                });
                event(&self.with_logprobs(index, object))
            }
            // A text that is no chat has no other pieces.
            Piece::Reasoning(_) | Piece::ToolStart { .. } | Piece::ToolArguments { .. } => {
                String::new()
            }
            Piece::Finish(finish) => {
                if let Some(state) = self.texts.get_mut(index) {
                    state.finish = Some(finish);
                }
                String::new()
            }
            Piece::Usage(usage) => {
                let state = self.texts.get_mut(index);
                match state.and_then(|state| state.finish.take()) {
                    Some(finish) => {
                        let mut last = self.last(index, &finish, &usage);
                        self.skips.add_to(&mut last);
                        event(&last)
                    }
                    None => String::new(),
                }
            }
        }
    }

    fn error(&mut self, error: &ApiError) -> String {
        event(&super::error_json(error))
    }
}
