//! [`Responder`]: the model's side of a conversation.
//!
//! Invariant: the model sees the conversation as its template renders it; what is cached of it is
//! not computed again. Where the context is full, the oldest turns are dropped and what is left is
//! computed again, unless the context is shifted. Knows nothing of terminals.

use std::sync::Arc;

use cellar::{
    LongContext, Model, PictureChat, PictureReader, PreparedPicture, PromptTokens, TextState,
};
use cellar_engine::sampler::Step;
use cellar_engine::serve::{PromptProgress, RequestError, ServiceError, TextRequest, Usage};
use cellar_engine::{CancelFlag, CompletionOptions, FinishReason, MAX_DRAFT, Speculation};
use kv_core::TokenId;
use model_core::chat_template::ChatMessage;
use model_core::model_file::ModelFile;
use model_core::tokenizer::{EncodeOptions, TokenKind};
use serde_json::{Map, Value, json};

use super::conversation::{Conversation, SeenMessage, UserMessage};
use super::settings::Settings;
use crate::commands::answer::{Answer, Section, Splitter, ThinkingFormat};
use crate::constraint::{self, Constraint, Failure};
use crate::progress::PromptBar;

/// The model, and what it remembers.
pub(super) struct Responder {
    model: Model,
    /// The reader of its pictures; `None` where it sees none.
    reader: Option<Arc<PictureReader>>,
    format: ThinkingFormat,
    cancel: CancelFlag,
    stop: Vec<String>,
    /// What each answer is held to, from its first token on.
    constraint: Option<Constraint>,
    /// Whether tokens are drafted.
    speculation: Speculation,
    /// What becomes of an answer that is longer than the context.
    long_context: LongContext,
    /// Tokens of the last prompt and its answer.
    n_seen: usize,
}

/// How long a prompt may be.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// The most tokens before turns are dropped.
    most: usize,
    /// The most tokens after that: less, because what is left is evaluated again each time.
    after_drop: usize,
}

/// How an answer went.
#[derive(Clone, Debug)]
pub(super) struct Response {
    /// What the model wrote.
    pub(super) answer: Answer,
    /// Why it ended.
    pub(super) finish: Option<FinishReason>,
    /// What it took.
    pub(super) usage: Usage,
}

impl Responder {
    /// A model that remembers nothing yet.
    pub(super) fn new(model: Model, template: &str, cancel: CancelFlag, stop: Vec<String>) -> Self {
        Self {
            model,
            reader: None,
            format: ThinkingFormat::of_template(template),
            cancel,
            stop,
            constraint: None,
            speculation: Speculation::Off,
            long_context: LongContext::Stop,
            n_seen: 0,
        }
    }

    /// The same for a model that sees pictures.
    pub(super) fn seeing(mut self, reader: Option<Arc<PictureReader>>) -> Self {
        self.reader = reader;
        self
    }

    /// The same with speculative decoding.
    pub(super) fn speculating(mut self, speculation: Speculation) -> Self {
        self.speculation = speculation;
        self
    }

    /// The same where answers may be longer than the context.
    pub(super) fn with_long_context(mut self, long_context: LongContext) -> Self {
        self.long_context = long_context;
        self
    }

    /// The same where every answer is held to a schema or grammar.
    pub(super) fn constrained(mut self, constraint: Option<Constraint>) -> Self {
        self.constraint = constraint;
        self
    }

    /// Whether answers are held to a schema or grammar.
    pub(super) fn is_constrained(&self) -> bool {
        self.constraint.is_some()
    }

    /// Tokens of the last prompt and its answer, as far as they are in the memory.
    pub(super) fn n_seen(&self) -> usize {
        self.n_seen
    }

    /// Tokens that the memory holds.
    pub(super) fn n_ctx(&self) -> usize {
        self.model.engine().settings().n_ctx as usize
    }

    /// What the model sees before its answer to `next`, or without it what it has seen.
    ///
    /// # Errors
    /// Where the template refuses the messages.
    pub(super) fn prompt(
        &self,
        conversation: &Conversation,
        next: Option<&UserMessage>,
    ) -> anyhow::Result<PictureChat> {
        let file = self.model.file();
        let messages = conversation.messages(&self.format, next);
        let pictures: Vec<PreparedPicture> = messages
            .iter()
            .flat_map(|seen| seen.pictures)
            .map(|picture| picture.prepared.clone())
            .collect();
        if let (Some(reader), false) = (&self.reader, pictures.is_empty()) {
            let messages: Vec<Value> = messages.iter().map(as_json).collect();
            let chat = cellar::picture_chat(file, reader, &messages, &Map::new(), &pictures);
            return Ok(chat?);
        }
        let messages: Vec<ChatMessage> = messages.into_iter().map(|seen| seen.message).collect();
        let text = cellar::render_chat(file, &messages)?.unwrap_or_default();
        let prompt = PromptTokens {
            tokens: file.tokenizer().encode(&text, EncodeOptions::CHAT),
            pictures: Vec::new(),
        };
        Ok(PictureChat { text, prompt })
    }

    /// Answers a message, calling `on_part` for each part of the answer. `None` where it was
    /// cancelled before the message was read. Turns that do not fit any more are dropped from
    /// `conversation`.
    ///
    /// # Errors
    /// Where the message does not fit the context, `on_part` fails, or the engine does; where the
    /// answer ended before the schema or grammar did.
    pub(super) fn answer(
        &mut self,
        conversation: &mut Conversation,
        user: &UserMessage,
        settings: &Settings,
        mut on_part: impl FnMut(Section, &str) -> anyhow::Result<()>,
    ) -> anyhow::Result<Option<Response>> {
        let room = settings
            .n_predict
            .unwrap_or(usize::MAX)
            .min(self.n_ctx() / 4);
        let limits = Limits {
            most: self.n_ctx() - room,
            after_drop: self.n_ctx() / 2,
        };
        let PictureChat { text, prompt } = self.fit(conversation, user, limits)?;
        let shows_pictures = !prompt.pictures.is_empty();
        let mut steps: Vec<Box<dyn Step>> = Vec::new();
        let failure = self.constraint.as_ref().map(|constraint| {
            let (step, failure) = constraint.step();
            steps.push(step);
            failure
        });
        if let (Some(n_tokens), None) = (settings.reasoning_tokens, &failure) {
            let tokenizer = self.model.file().tokenizer();
            steps.push(Box::new(self.format.budget(n_tokens, &text, tokenizer)));
        }
        let request = TextRequest {
            prompt: prompt.tokens,
            pictures: prompt.pictures,
            options: CompletionOptions {
                sampler: settings.sampler.clone(),
                n_predict: settings.n_predict,
                stop: self.stop.clone(),
                ..CompletionOptions::default()
            },
            steps,
            cancel: Some(self.cancel.clone()),
            speculation: self.speculation,
            // A text with pictures does not get longer than the context.
            long_context: Some(self.long_context).filter(|_| !shows_pictures),
            ..TextRequest::default()
        };
        // What a grammar allows is the answer itself.
        let mut splitter = failure.is_none().then(|| self.format.splitter(&text));
        let begun = self.begin(request);
        let mut text = begun.map_err(|error| with_reason(error, failure.as_ref()))?;
        if text.finish_reason() == Some(&FinishReason::Cancelled) {
            return Ok(None);
        }
        let (n_known, n_prompt) = (text.usage().n_reused(), text.usage().n_prompt);
        tracing::debug!(n_known, n_new = n_prompt - n_known, "reading a message");
        let mut answer = Answer::default();
        loop {
            if !shows_pictures && self.is_full(&text) {
                self.make_room(conversation, user, &mut text)?;
            }
            let piece = text.next_piece(&mut self.model);
            let piece = piece.map_err(|error| with_reason(error, failure.as_ref()))?;
            if piece.is_none() {
                break;
            }
            for piece in text.last_pieces() {
                let control = piece.token.and_then(|id| control(self.model.file(), id));
                let parts = match &mut splitter {
                    Some(splitter) => splitter.push(&piece.text, control),
                    None => vec![(Section::Answer, piece.text.clone())],
                };
                for (section, part) in parts {
                    answer.push(section, &part);
                    on_part(section, &part)?;
                }
            }
        }
        for (section, part) in splitter.map(Splitter::finish).unwrap_or_default() {
            answer.push(section, &part);
            on_part(section, &part)?;
        }
        if failure.is_some() {
            constraint::check_complete(text.finish_reason())?;
        }
        let usage = text.usage();
        self.n_seen = usage.n_prompt + usage.n_tokens;
        Ok(Some(Response {
            answer,
            finish: text.finish_reason().cloned(),
            usage,
        }))
    }

    /// The prompt, after the oldest turns were dropped where it was too long.
    fn fit(
        &self,
        conversation: &mut Conversation,
        user: &UserMessage,
        limits: Limits,
    ) -> anyhow::Result<PictureChat> {
        let mut limit = limits.most;
        loop {
            let chat = self.prompt(conversation, Some(user))?;
            let n_tokens = chat.prompt.tokens.len();
            if n_tokens == 0 {
                anyhow::bail!("the chat template makes nothing of this message");
            }
            if n_tokens <= limit || !conversation.drop_oldest() {
                return Ok(chat);
            }
            limit = limits.after_drop;
        }
    }

    /// True if the context has no room for more of an answer, and nothing else makes some.
    fn is_full(&self, text: &TextState) -> bool {
        let n_ahead = match self.speculation {
            Speculation::Off => 0,
            Speculation::Auto { .. } if !self.model.has_head() => 0,
            _ => MAX_DRAFT,
        };
        let usage = text.usage();
        let n_tokens = usage.n_prompt + usage.n_tokens + n_ahead;
        self.long_context == LongContext::Stop && n_tokens >= self.n_ctx()
    }

    /// Drops the oldest turns in the middle of an answer, and computes what is left and the answer
    /// so far. Where there is nothing to drop, nothing changes.
    fn make_room(
        &mut self,
        conversation: &mut Conversation,
        user: &UserMessage,
        text: &mut TextState,
    ) -> anyhow::Result<()> {
        if !conversation.drop_oldest() {
            return Ok(());
        }
        let limit = (3 * self.n_ctx() / 4).saturating_sub(text.usage().n_tokens);
        let limits = Limits {
            most: limit,
            after_drop: limit,
        };
        let chat = self.fit(conversation, user, limits)?;
        // The line on the terminal has half of the answer, so there is no place for a bar.
        Ok(self.model.rebase(text, chat.prompt.tokens)?)
    }

    /// Computes what is new of the prompt.
    fn begin(&mut self, request: TextRequest) -> Result<TextState, cellar::Error> {
        let n_ubatch = self.model.engine().settings().n_ubatch as usize;
        let reading = PromptBar::new("reading", request.prompt.len(), n_ubatch);
        self.model.session().set_run_progress(Some(reading.run()));
        let on_progress = |progress: PromptProgress| reading.set(progress.n_done);
        let begun = self.model.begin_with(request, on_progress);
        self.model.session().set_run_progress(None);
        begun
    }
}

/// A message as JSON, with its pictures and sounds before its text.
fn as_json(seen: &SeenMessage<'_>) -> Value {
    let ChatMessage { role, content } = &seen.message;
    // No model takes both.
    match seen.pictures.first() {
        None => json!({"role": role, "content": content}),
        Some(shown) => cellar::media_message(shown.media, content, seen.pictures.len()),
    }
}

/// The text of a control token.
fn control(file: &ModelFile, id: TokenId) -> Option<&str> {
    let tokenizer = file.tokenizer();
    match tokenizer.token_kind(id) {
        Some(TokenKind::Control) => tokenizer.token_text(id),
        _ => None,
    }
}

/// An error with the reason why the grammar left no token, where that is the cause, or with what
/// can be done about it.
fn with_reason(error: cellar::Error, failure: Option<&Failure>) -> anyhow::Error {
    match (failure.and_then(Failure::reason), error) {
        (Some(reason), error) => anyhow::Error::from(error).context(reason),
        (
            None,
            cellar::Error::Text(ServiceError::Refused(RequestError::TooLong { n_prompt, limit })),
        ) => anyhow::anyhow!(
            "the prompt of {n_prompt} tokens does not fit the context of {limit}, even without \
             earlier messages; a larger --ctx or a shorter message is needed"
        ),
        (None, error) => error.into(),
    }
}
