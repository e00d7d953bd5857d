//! The one internal pair of all APIs: a [`GenerateRequest`] goes in, [`Piece`]s come out.
//!
//! Invariant: the text pieces of a request concatenated are its text, then come [`Piece::Finish`]
//! and [`Piece::Usage`], or one error and nothing else. Dropping [`Generating`] cancels the
//! request. Knows no API and no connection.

mod echo;
mod form;
mod prepare;
mod reasoning;
mod request;
mod time_limit;

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use cellar_chat::{ChatSplitter, Part};
use cellar_engine::serve::{Choices, TextRequest, TextStream, Usage};
use cellar_engine::{FinishReason, TokenLogprobs};
use cellar_grammar::GrammarFailure;
use kv_core::TokenId;

use self::prepare::{PreparedRequest, PreparedText, prepare, special_pieces};
use self::reasoning::n_tokens_of;
use crate::app::{Active, App};
use crate::auth::Tenant;
use crate::body_worker::run_blocking;
use crate::branches::Branch;
use crate::encode::encode;
use crate::error::ApiError;
use crate::ids::random_id;
use crate::models::ModelInUse;
use crate::report::request_id;
use crate::verify::Sample;

use time_limit::TimeLimit;

pub use cellar_chat::{Arguments, CallNumber, Tool, ToolPaths};
pub use echo::EchoedPrompt;
pub(crate) use form::AnswerForm;
pub use request::{
    ChatPrompt, Constraint, Form, GenerateRequest, MarkedText, Output, Prompt, Stop, ToolUse,
    UnheldKeywords,
};

/// A part of an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Piece {
    /// The prompt, where it is wanted; the first piece.
    Prompt(EchoedPrompt),
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

/// A text as it is generated.
pub struct Generating {
    stream: Option<TextStream>,
    failure: Option<GrammarFailure>,
    splitter: Option<ChatSplitter>,
    ready: VecDeque<Piece>,
    /// Given out before all else.
    echo: Option<EchoedPrompt>,
    /// Ends it where it takes too long.
    time_limit: Option<TimeLimit>,
    longest_silence: Duration,
    /// Comes when the server does not wait for texts any longer.
    closing: Pin<Box<dyn Future<Output = ()> + Send>>,
    n_prompt: usize,
    /// Tokens of the prompt that were said to be computed.
    n_shown: usize,
    /// What it takes to compute it again, where it is chosen for that.
    sample: Option<Sample>,
    /// What others can branch off from.
    branch: Option<Arc<Branch>>,
    active: Active,
    /// Dropped last: the model may be unloaded then.
    model: ModelInUse,
}

/// A text that is complete.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The prompt, where it is wanted.
    pub prompt: Option<EchoedPrompt>,
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
        let time_limit = request.stop.max_time.map(TimeLimit::new);
        let prepare = {
            let model = model.shared();
            move || prepare(&model, tenant, request)
        };
        let prepared = run_blocking(prepare).await?;
        let PreparedRequest {
            mut request,
            form,
            texts,
            echo,
        } = prepared?;
        let n_prompt = request.prompt.len();
        let mut steps = Vec::with_capacity(texts.len());
        let mut others = Vec::with_capacity(texts.len());
        for PreparedText { held, splitter } in texts {
            others.push((held.failure, splitter));
            steps.push(held.steps);
        }
        let mut steps = steps.into_iter();
        request.steps = steps.next().unwrap_or_default();
        let more_steps = || steps.next().unwrap_or_default();
        let shared = model.shared();
        let branch = self.branch(model, tenant, &request);
        let sample = |number| {
            let verifier = self.verifier();
            verifier.sample(&shared, &request, &form, number)
        };
        let samples: Vec<Option<Sample>> = (0..u64::from(n.get())).map(sample).collect();
        let streams = service.submit_texts(request, n, more_steps);
        let streams = streams.map_err(|error| {
            let seconds = self
                .metrics()
                .retry_after(service.n_queued(), model.n_parallel());
            let error = ApiError::from(error).with_retry_after(seconds);
            self.metrics().refused(&error);
            error
        })?;
        let mut branch = branch;
        let generating = |((stream, sample), (failure, splitter))| Generating {
            sample,
            branch: branch.take(),
            active: self.begin(model, tenant, n_prompt),
            stream: Some(stream),
            failure,
            splitter,
            model: model.clone(),
            ready: VecDeque::new(),
            echo: echo.clone(),
            time_limit,
            longest_silence: self.config().longest_silence,
            closing: Box::pin(self.closing()),
            n_prompt,
            n_shown: 0,
        };
        Ok(streams
            .into_iter()
            .zip(samples)
            .zip(others)
            .map(generating)
            .collect())
    }

    /// Keeps the first text of a request for those that branch off from it.
    fn branch(
        &self,
        model: &ModelInUse,
        tenant: Tenant,
        request: &TextRequest,
    ) -> Option<Arc<Branch>> {
        let id = request_id()?;
        let branch = Arc::new(Branch::new(model.id(), request));
        let n_most = model.service().ok()?.prompt_limits().n_tokens;
        let room = n_most.saturating_sub(request.prompt.len());
        let n_more = request.options.n_predict.map_or(room, |n| n.min(room));
        let n_bytes = branch.n_bytes(n_more);
        self.branches()
            .keep(&id, tenant, Arc::clone(&branch), n_bytes);
        Some(branch)
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
        run_blocking(encode).await?
    }
}

impl Generating {
    /// Tokens of the prompt.
    pub fn n_prompt(&self) -> usize {
        self.n_prompt
    }

    /// The longest silence of a stream.
    pub(crate) fn longest_silence(&self) -> Duration {
        self.longest_silence
    }

    /// The next piece; `None` after the last.
    pub async fn next(&mut self) -> Option<Result<Piece, ApiError>> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    /// What the text took so far, where more of its prompt is computed than at the call before.
    pub(crate) fn new_progress(&mut self) -> Option<Usage> {
        let usage = self.stream.as_ref()?.usage();
        let is_new = usage.n_prompt_done > self.n_shown;
        self.n_shown = usage.n_prompt_done;
        is_new.then_some(usage)
    }

    /// The next piece, where it is there.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Piece, ApiError>>> {
        if let Some(piece) = self.ready.pop_front() {
            return Poll::Ready(Some(Ok(piece)));
        }
        let Some(stream) = &mut self.stream else {
            return Poll::Ready(None);
        };
        let polled = stream.poll_piece(cx);
        self.active.took(stream.usage());
        if matches!(polled, Poll::Ready(Ok(_)))
            && let Some(mut prompt) = self.echo.take()
        {
            prompt.logprobs = stream.take_prompt_logprobs();
            self.ready.push_back(Piece::Prompt(prompt));
        }
        match polled {
            Poll::Ready(Ok(Some(piece))) => {
                self.active.piece();
                if let Some(limit) = &mut self.time_limit
                    && limit.ends_with(&piece)
                {
                    stream.cancel();
                }
                let tokens = stream.take_tokens();
                if let Some(branch) = &self.branch {
                    branch.extend(tokens.iter().filter_map(|piece| piece.token));
                }
                let logprobs: Vec<_> = tokens.into_iter().filter_map(|t| t.logprobs).collect();
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
        let mut finished = stream.finish()?;
        if let Some(sample) = self.sample.take() {
            let app = self.active.app();
            app.verify(sample, &finished.tokens, &finished.finish);
        }
        if finished.finish == FinishReason::Cancelled {
            if !self.time_limit.is_some_and(|limit| limit.is_over) {
                return Err(ApiError::shutting_down());
            }
            finished.finish = FinishReason::Length;
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
                special_pieces(&self.model, splitter),
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
        let (mut prompt, mut finish, mut logprobs) = (None, None, Vec::new());
        while let Some(piece) = self.next().await {
            match piece? {
                Piece::Prompt(echoed) => prompt = Some(echoed),
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
                        prompt,
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
        Part::ToolStart { index, name, id } => Piece::ToolStart {
            index,
            id: id.unwrap_or_else(|| random_id("call_")),
            name,
        },
        Part::ToolArguments { index, text } => Piece::ToolArguments { index, text },
    }
}
