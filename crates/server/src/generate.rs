//! The one internal pair of all APIs: a [`GenerateRequest`] goes in, [`Piece`]s come out.
//!
//! Invariant: the text pieces of a request concatenated are its text, then come [`Piece::Finish`]
//! and [`Piece::Usage`], or one error and nothing else. Dropping [`Generating`] cancels the request.
//! Knows no API and no connection.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll};

use cellar_grammar::{Grammar, GrammarFailure, GrammarStep};
use engine::sampler::{SamplerConfig, Step};
use engine::serve::{Choices, PrefixUse, Priority, TextRequest, TextStream, Usage};
use engine::{CompletionOptions, FinishReason, Logprobs, TokenLogprobs};
use kv_core::TokenId;
use model_core::tokenizer::{DecodeFrom, DecodeStream, SpecialPieces, Tokenizer};
use serde_json::{Map, Value};

use crate::api::params::random_id;
use crate::app::{Active, App};
use crate::auth::Tenant;
use crate::chat::{ChatSplitter, Part, ToolFormat};
use crate::constrain::grammar_of;
use crate::encode::encode;
use crate::error::ApiError;
use crate::fim::Gap;
use crate::model::ServedModel;
use crate::models::ModelInUse;
use crate::speculate::Speculate;

/// What is to be continued.
#[derive(Clone, Debug)]
pub enum Prompt {
    /// A text, encoded as a whole prompt.
    Text(String),
    /// Tokens as they are.
    Tokens(Vec<TokenId>),
    /// Messages, rendered by the model's chat template.
    Chat(ChatPrompt),
    /// A gap in a text, for models whose vocabulary has marks for it.
    Gap(Gap),
}

/// Messages for a chat template.
#[derive(Clone, Debug, Default)]
pub struct ChatPrompt {
    /// The messages: JSON objects with `role` and `content`.
    pub messages: Vec<Value>,
    /// What the template knows besides, for example `enable_thinking`.
    pub variables: Map<String, Value>,
}

/// What a text is held to.
#[derive(Clone, Debug)]
pub enum Constraint {
    /// A JSON object.
    JsonObject,
    /// JSON that a schema allows.
    JsonSchema {
        /// The schema.
        schema: Value,
        /// Where it stands in the request, for errors.
        param: &'static str,
    },
    /// Calls of these tools, and nothing else.
    Calls {
        /// The tools.
        tools: Vec<Tool>,
        /// How many calls.
        number: CallNumber,
    },
}

/// How many calls an answer may have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CallNumber {
    /// One at most.
    One,
    /// As many as the model likes.
    #[default]
    Several,
}

/// A request in the words of no API.
#[derive(Clone, Debug)]
pub struct GenerateRequest {
    /// What is to be continued.
    pub prompt: Prompt,
    /// How tokens are sampled.
    pub sampler: SamplerConfig,
    /// Largest number of tokens; `None` goes on until the model or the context ends.
    pub max_tokens: Option<usize>,
    /// Stop strings; they are not part of the text.
    pub stop: Vec<String>,
    /// What the text is held to.
    pub constraint: Option<Constraint>,
    /// Which requests go before it.
    pub priority: Priority,
    /// Narrows who shares cached prefixes with this request.
    pub cache_salt: Option<String>,
    /// How its tokens are drafted; `None` as the model's settings say.
    pub speculate: Option<Speculate>,
    /// Which log probabilities of its tokens are wanted.
    pub logprobs: Logprobs,
    /// How many texts are computed, and how many of them are given.
    pub choices: Choices,
    /// What the pieces of the text are.
    pub output: Output,
}

/// What the pieces of a text are.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Output {
    /// All of it is text.
    #[default]
    Text,
    /// Reasoning is apart from the text, and so are calls of tools where there are any.
    Chat(ToolUse),
}

/// Which tools an answer may call.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum ToolUse {
    /// None.
    #[default]
    None,
    /// These, as the model likes.
    Auto {
        /// The tools.
        tools: Vec<Tool>,
        /// How many calls; later ones are dropped.
        number: CallNumber,
    },
    /// The text is held to a grammar by which it is calls and nothing else.
    Forced,
}

/// A tool that an answer may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// The JSON schema of its arguments; null where none is given.
    pub parameters: Value,
    /// Whether free calls are held to it.
    pub arguments: Arguments,
    /// Where its parts stand in the request.
    pub paths: ToolPaths,
}

/// Where the parts of a tool stand in a request, for errors.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ToolPaths {
    /// For example `tools[0].function.strict`.
    pub strict: String,
    /// For example `tools[0].function.parameters`.
    pub parameters: String,
}

/// What the arguments of a call may be that the model makes of its own accord.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Arguments {
    /// Any object.
    #[default]
    Free,
    /// What the tool's schema allows (`strict`).
    Strict,
}

/// A part of an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Piece {
    /// Log probabilities, where they are wanted, of the tokens of the piece that comes next.
    Logprobs(Vec<TokenLogprobs>),
    /// Text, never empty.
    Text(String),
    /// What the model thinks before it answers.
    Reasoning(String),
    /// A call of a tool begins.
    ToolStart {
        /// Which call of the answer, from 0 on.
        index: usize,
        /// The call's name for its result.
        id: String,
        /// The tool.
        name: String,
    },
    /// The next part of the arguments of the call that began last.
    ToolArguments {
        /// Which call of the answer.
        index: usize,
        /// A part of a JSON object.
        text: String,
    },
    /// The text has ended.
    Finish(Finish),
    /// What it took; the last piece.
    Usage(Usage),
}

/// How a text ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finish {
    /// Why.
    pub reason: FinishReason,
    /// All of its tokens.
    pub tokens: Vec<TokenId>,
    /// Whether the answer calls tools.
    pub has_calls: bool,
    /// How many of its tokens are reasoning.
    pub n_reasoning: usize,
}

/// A request that is ready to be computed.
struct Prepared {
    request: TextRequest,
    texts: Vec<PreparedText>,
}

/// What one of the texts of a request has of its own.
#[derive(Default)]
struct PreparedText {
    step: Option<GrammarStep>,
    splitter: Option<ChatSplitter>,
}

/// A text as it is generated.
pub struct Generating {
    stream: Option<TextStream>,
    failure: Option<GrammarFailure>,
    splitter: Option<ChatSplitter>,
    ready: VecDeque<Piece>,
    /// Comes when the server does not wait for texts any longer.
    closing: Pin<Box<dyn Future<Output = ()> + Send>>,
    n_prompt: usize,
    active: Active,
    /// Dropped last: the model may be unloaded then.
    model: ModelInUse,
}

/// A text that is complete.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The text.
    pub text: String,
    /// What the model thought before; empty where nothing.
    pub reasoning: String,
    /// Calls of tools.
    pub calls: Vec<ToolCall>,
    /// The log probabilities of its tokens, where they are wanted.
    pub logprobs: Vec<TokenLogprobs>,
    /// How it ended.
    pub finish: Finish,
    /// What it took.
    pub usage: Usage,
}

/// A call of a tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    /// The call's name for its result.
    pub id: String,
    /// The tool.
    pub name: String,
    /// A JSON object.
    pub arguments: String,
}

impl App {
    /// Begins to generate one text. The template, the tokenizer and the grammar run on a thread of
    /// their own.
    ///
    /// # Errors
    /// As [`App::generate_texts`].
    pub async fn generate(
        &self,
        model: &ModelInUse,
        tenant: Tenant,
        request: GenerateRequest,
    ) -> Result<Generating, ApiError> {
        let request = GenerateRequest {
            choices: Choices::default(),
            ..request
        };
        let mut texts = self.generate_texts(model, tenant, request).await?;
        texts.pop().ok_or_else(ApiError::shutting_down)
    }

    /// Begins to generate the texts of a request, whose prompt is computed once.
    ///
    /// # Errors
    /// [`ApiError`]: the server ends, the model generates no texts or has no template, the schema
    /// cannot be compiled, the prompt is too long, or too much waits.
    pub async fn generate_texts(
        &self,
        model: &ModelInUse,
        tenant: Tenant,
        request: GenerateRequest,
    ) -> Result<Vec<Generating>, ApiError> {
        self.check_open()?;
        let service = model.service()?;
        let n = request.choices.n_computed();
        let prepare = {
            let model = model.shared();
            move || prepare(&model, tenant, request)
        };
        let prepared = tokio::task::spawn_blocking(prepare).await;
        let prepared = prepared.map_err(|error| ApiError::internal(error.to_string()))?;
        let Prepared { mut request, texts } = prepared?;
        let n_prompt = request.prompt.len();
        let mut steps = Vec::with_capacity(texts.len());
        let mut others = Vec::with_capacity(texts.len());
        for PreparedText { step, splitter } in texts {
            others.push((step.as_ref().map(GrammarStep::failure), splitter));
            let step = step.map(|step| -> Box<dyn Step> { Box::new(step) });
            steps.push(step.into_iter().collect::<Vec<_>>());
        }
        let mut steps = steps.into_iter();
        request.steps = steps.next().unwrap_or_default();
        let more_steps = || steps.next().unwrap_or_default();
        let streams = service.submit_texts(request, n, more_steps);
        let streams = streams.map_err(|error| {
            let seconds = self
                .metrics()
                .retry_after(service.n_queued(), model.n_parallel());
            let error = ApiError::from(error).with_retry_after(seconds);
            self.metrics().refused(&error);
            error
        })?;
        let generating = |(stream, (failure, splitter))| Generating {
            active: self.begin(model, n_prompt),
            stream: Some(stream),
            failure,
            splitter,
            model: model.clone(),
            ready: VecDeque::new(),
            closing: Box::pin(self.closing()),
            n_prompt,
        };
        Ok(streams.into_iter().zip(others).map(generating).collect())
    }

    /// The tokens of a prompt, whose answer may have so many.
    ///
    /// # Errors
    /// [`ApiError`] where the model has no template, or it refuses the messages.
    pub async fn prompt_tokens(
        &self,
        model: &ModelInUse,
        prompt: Prompt,
        max_tokens: Option<usize>,
    ) -> Result<Vec<TokenId>, ApiError> {
        let model = model.shared();
        let encode = move || encode(&model, prompt, max_tokens).map(|encoded| encoded.tokens);
        let encoded = tokio::task::spawn_blocking(encode).await;
        encoded.map_err(|error| ApiError::internal(error.to_string()))?
    }
}

fn prepare(
    model: &ServedModel,
    tenant: Tenant,
    request: GenerateRequest,
) -> Result<Prepared, ApiError> {
    let speculation = match request.speculate {
        Some(speculate) => speculate.of(model)?,
        None => model.settings().speculation,
    };
    let encoded = encode(model, request.prompt, request.max_tokens)?;
    let checkpoints = encoded.checkpoints(model)?;
    let rendered = encoded.rendered();
    let grammar = grammar_of(model, request.constraint.as_ref(), &request.output)?;
    let text = |_| PreparedText {
        step: grammar.as_ref().map(Grammar::step),
        splitter: rendered.and_then(|text| splitter_of(model, text, request.output.clone())),
    };
    let texts: Vec<PreparedText> = (0..request.choices.n_computed().get()).map(text).collect();
    let first = texts.first().and_then(|text| text.splitter.as_ref());
    let logprobs = match request.logprobs {
        // What ranks the texts.
        Logprobs::Off if request.choices.are_ranked() => Logprobs::Top(0),
        wanted => wanted,
    };
    let request = TextRequest {
        prompt: encoded.tokens,
        priority: tenant.priority(request.priority),
        tenant: tenant.id(),
        tenant_limits: Some(tenant.limits()),
        prefix: PrefixUse::Within(tenant.salt(request.cache_salt.as_deref())),
        checkpoints,
        options: CompletionOptions {
            sampler: request.sampler,
            n_predict: request.max_tokens,
            stop: request.stop,
            logprobs,
            prompt_logprobs: Logprobs::Off,
            special: first.map_or(SpecialPieces::Skip, special_pieces),
        },
        steps: Vec::new(),
        speculation,
    };
    Ok(Prepared { request, texts })
}

/// Whether control tokens are text: some models write them around calls.
fn special_pieces(splitter: &ChatSplitter) -> SpecialPieces {
    match splitter.has_tools() {
        true => SpecialPieces::Render,
        false => SpecialPieces::Skip,
    }
}

/// How many tokens of a text begin in these parts of it, of which the first come first.
fn n_tokens_of(
    tokenizer: &Tokenizer,
    tokens: &[TokenId],
    special: SpecialPieces,
    parts: &[Range<usize>],
) -> usize {
    let mut decoder = DecodeStream::new(DecodeFrom::Continuation, special);
    let mut written = 0;
    let is_in_parts = |id: &&TokenId| {
        let is_inside = parts.iter().any(|part| part.contains(&written));
        // A token that is not in the vocabulary was not generated.
        written += decoder.push(tokenizer, **id).unwrap_or_default().len();
        is_inside
    };
    tokens.iter().filter(is_in_parts).count()
}

fn splitter_of(model: &ServedModel, prompt: &str, output: Output) -> Option<ChatSplitter> {
    let Output::Chat(tools) = output else {
        return None;
    };
    let template = model.template_source().unwrap_or_default();
    let tools = match tools {
        ToolUse::None => None,
        ToolUse::Auto { tools, number } => {
            let format = ToolFormat::of_template(template);
            let splitter = ChatSplitter::new(template, prompt, Some((format, tools)));
            return Some(splitter.with_calls(number));
        }
        ToolUse::Forced => Some((ToolFormat::Forced, Vec::new())),
    };
    Some(ChatSplitter::new(template, prompt, tools))
}

impl Generating {
    /// Tokens of the prompt.
    pub fn n_prompt(&self) -> usize {
        self.n_prompt
    }

    /// The next piece; `None` after the last.
    pub async fn next(&mut self) -> Option<Result<Piece, ApiError>> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    /// The next piece, where it is there.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Piece, ApiError>>> {
        if let Some(piece) = self.ready.pop_front() {
            return Poll::Ready(Some(Ok(piece)));
        }
        let Some(stream) = &mut self.stream else {
            return Poll::Ready(None);
        };
        match stream.poll_piece(cx) {
            Poll::Ready(Ok(Some(piece))) => {
                self.active.piece();
                let logprobs = stream.take_logprobs();
                if !logprobs.is_empty() {
                    self.ready.push_back(Piece::Logprobs(logprobs));
                }
                match &mut self.splitter {
                    Some(splitter) => {
                        let parts = splitter.push(&piece);
                        self.ready.extend(parts.into_iter().map(piece_of));
                    }
                    None => self.ready.push_back(Piece::Text(piece)),
                }
                self.poll_next(cx)
            }
            Poll::Ready(Ok(None)) => match self.finish() {
                Ok(()) => self.poll_next(cx),
                Err(error) => self.fail(error),
            },
            Poll::Ready(Err(error)) => {
                let reason = self.failure.as_ref().and_then(GrammarFailure::reason);
                let error = match reason {
                    Some(reason) => {
                        ApiError::internal(format!("the schema cannot go on: {reason}"))
                    }
                    None => ApiError::from(error),
                };
                self.fail(error)
            }
            Poll::Pending => match self.closing.as_mut().poll(cx) {
                Poll::Ready(()) => self.fail(ApiError::shutting_down()),
                Poll::Pending => Poll::Pending,
            },
        }
    }

    fn fail(&mut self, error: ApiError) -> Poll<Option<Result<Piece, ApiError>>> {
        self.stream = None;
        self.active.failed();
        Poll::Ready(Some(Err(error)))
    }

    /// Takes the end of the stream.
    fn finish(&mut self) -> Result<(), ApiError> {
        let Some(stream) = self.stream.take() else {
            return Ok(());
        };
        let finished = stream.finish()?;
        if finished.finish == FinishReason::Cancelled {
            return Err(ApiError::shutting_down());
        }
        self.active.finished(&finished.finish, finished.usage);
        let (mut has_calls, mut n_reasoning) = (false, 0);
        if let Some(splitter) = &mut self.splitter {
            let parts = splitter.finish();
            self.ready.extend(parts.into_iter().map(piece_of));
            has_calls = splitter.has_calls();
            n_reasoning = n_tokens_of(
                self.model.tokenizer(),
                &finished.tokens,
                special_pieces(splitter),
                &splitter.reasoning_bytes(),
            );
        }
        if !finished.logprobs.is_empty() {
            self.ready.push_back(Piece::Logprobs(finished.logprobs));
        }
        self.ready.push_back(Piece::Finish(Finish {
            reason: finished.finish,
            tokens: finished.tokens,
            has_calls,
            n_reasoning,
        }));
        self.ready.push_back(Piece::Usage(finished.usage));
        Ok(())
    }

    /// Waits for the end of the text.
    ///
    /// # Errors
    /// [`ApiError`] where it fails.
    pub async fn answer(mut self) -> Result<Answer, ApiError> {
        let (mut text, mut reasoning, mut calls) = (String::new(), String::new(), Vec::new());
        let (mut finish, mut logprobs) = (None, Vec::new());
        while let Some(piece) = self.next().await {
            match piece? {
                Piece::Logprobs(new) => logprobs.extend(new),
                Piece::Text(piece) => text.push_str(&piece),
                Piece::Reasoning(piece) => reasoning.push_str(&piece),
                Piece::ToolStart { id, name, .. } => calls.push(ToolCall {
                    id,
                    name,
                    arguments: String::new(),
                }),
                Piece::ToolArguments { text, .. } => {
                    if let Some(call) = calls.last_mut() {
                        call.arguments.push_str(&text);
                    }
                }
                Piece::Finish(end) => finish = Some(end),
                Piece::Usage(usage) => {
                    let finish = finish.ok_or_else(ApiError::shutting_down)?;
                    return Ok(Answer {
                        text,
                        reasoning,
                        calls,
                        logprobs,
                        finish,
                        usage,
                    });
                }
            }
        }
        Err(ApiError::shutting_down())
    }
}

fn piece_of(part: Part) -> Piece {
    match part {
        Part::Text(text) => Piece::Text(text),
        Part::Reasoning(text) => Piece::Reasoning(text),
        Part::ToolStart { index, name } => Piece::ToolStart {
            index,
            id: random_id("call_"),
            name,
        },
        Part::ToolArguments { index, text } => Piece::ToolArguments { index, text },
    }
}
