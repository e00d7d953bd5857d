//! [`Responder`]: the model's side of a conversation.
//!
//! Invariant: the model evaluates the conversation as its template renders it; the part of it that
//! is in the memory is not evaluated again, and other tokens are removed. Where the context is
//! full, the oldest turns are dropped and what is left is evaluated again. Knows nothing of
//! terminals.

use cellar::{GenerateOptions, Model, TextState};
use cellar_engine::{
    CancelFlag, DraftModel, EngineError, FinishReason, PromptProgress, Speculated, Speculation,
    Timings,
};
use kv_core::{SeqId, TokenId};
use model_core::tokenizer::{EncodeOptions, TokenKind};

use super::conversation::Conversation;
use super::settings::Settings;
use crate::commands::answer::{Answer, Section, Splitter, ThinkingFormat};
use crate::constraint::{self, Constraint, Failure};
use crate::progress::PromptBar;

const SEQ: SeqId = SeqId(0);

/// The model, and what it remembers.
pub(super) struct Responder {
    model: Model,
    format: ThinkingFormat,
    cancel: CancelFlag,
    stop: Vec<String>,
    /// What each answer is held to, from its first token on.
    constraint: Option<Constraint>,
    /// Whether tokens are drafted.
    speculation: Speculation,
    /// The model that drafts them, where one does.
    draft_model: Option<DraftModel>,
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
    /// Tokens of the prompt that were in the memory already.
    pub(super) n_known: usize,
    /// Tokens generated.
    pub(super) n_generated: usize,
    /// How long it took.
    pub(super) timings: Timings,
    /// What speculation did.
    pub(super) speculated: Speculated,
}

impl Responder {
    /// A model that remembers nothing yet.
    pub(super) fn new(model: Model, template: &str, cancel: CancelFlag, stop: Vec<String>) -> Self {
        Self {
            model,
            format: ThinkingFormat::of_template(template),
            cancel,
            stop,
            constraint: None,
            speculation: Speculation::Off,
            draft_model: None,
        }
    }

    /// The same with speculative decoding.
    pub(super) fn speculating(mut self, speculation: Speculation) -> Self {
        self.speculation = speculation;
        self
    }

    /// The same with a model that drafts.
    pub(super) fn with_draft_model(mut self, draft_model: Option<DraftModel>) -> Self {
        self.draft_model = draft_model;
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

    /// Tokens in the memory.
    pub(super) fn n_evaluated(&self) -> usize {
        self.model.evaluated(SEQ).len()
    }

    /// Tokens that the memory holds.
    pub(super) fn n_ctx(&self) -> usize {
        self.model.engine().settings().n_ctx as usize
    }

    /// The text that the model sees before its answer to `next`, or without it what it has seen.
    ///
    /// # Errors
    /// Where the template refuses the messages.
    pub(super) fn prompt(
        &self,
        conversation: &Conversation,
        next: Option<&str>,
    ) -> anyhow::Result<String> {
        let messages = conversation.messages(&self.format, next);
        Ok(cellar::render_chat(self.model.file(), &messages)?.unwrap_or_default())
    }

    /// Answers a message, calling `on_part` for each part of the answer. `None` where it was
    /// cancelled before the message was read. Turns that do not fit any more are dropped from
    /// `conversation`.
    ///
    /// # Errors
    /// Where the message does not fit the context, `on_part` fails, or the engine does; where the
    /// answer ended before the schema or grammar did. The memory is empty then.
    pub(super) fn answer(
        &mut self,
        conversation: &mut Conversation,
        user: &str,
        settings: &Settings,
        on_part: impl FnMut(Section, &str) -> anyhow::Result<()>,
    ) -> anyhow::Result<Option<Response>> {
        let answered = self.try_answer(conversation, user, settings, on_part);
        if answered.is_err() {
            let _ = self.model.engine_mut().clear();
        }
        answered
    }

    fn try_answer(
        &mut self,
        conversation: &mut Conversation,
        user: &str,
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
        let (prompt, ids) = self.fit(conversation, user, limits)?;
        let n_known = self.model.keep_prefix(SEQ, &ids)?;
        tracing::debug!(n_known, n_new = ids.len() - n_known, "reading a message");
        let options = GenerateOptions {
            seq: SEQ,
            sampler: settings.sampler.clone(),
            n_predict: settings.n_predict,
            stop: self.stop.clone(),
            cancel: self.cancel.clone(),
            speculation: self.speculation,
            draft_model: self.draft_model.clone(),
            ..GenerateOptions::default()
        };
        let mut text = self.begin(&ids, ids.len() - n_known, options)?;
        if text.finish_reason() == Some(&FinishReason::Cancelled) {
            return Ok(None);
        }
        let failure = match self.constraint.as_ref().map(Constraint::step) {
            Some((step, failure)) => {
                text = text.with_step(step);
                Some(failure)
            }
            None => None,
        };
        if let (Some(n_tokens), None) = (settings.reasoning_tokens, &failure) {
            let tokenizer = self.model.file().tokenizer();
            let budget = self.format.budget(n_tokens, &prompt, tokenizer);
            text = text.with_step(Box::new(budget));
        }
        // What a grammar allows is the answer itself.
        let mut splitter = failure.is_none().then(|| self.format.splitter(&prompt));
        let mut answer = Answer::default();
        loop {
            if text.pending().is_some() && self.n_evaluated() >= self.n_ctx() {
                self.make_room(conversation, user, text.evaluated())?;
                text.accept_changes(&self.model);
            }
            let piece = text.next_piece(&mut self.model);
            let piece = piece.map_err(|error| with_reason(error, failure.as_ref()))?;
            if piece.is_none() {
                break;
            }
            for piece in text.last_pieces() {
                let control = piece.token.and_then(|id| self.control(id));
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
        Ok(Some(Response {
            answer,
            finish: text.finish_reason().cloned(),
            n_known,
            n_generated: text.tokens().len(),
            timings: text.timings(),
            speculated: text.speculated(),
        }))
    }

    /// The prompt and its tokens, after the oldest turns were dropped where it was too long.
    fn fit(
        &self,
        conversation: &mut Conversation,
        user: &str,
        limits: Limits,
    ) -> anyhow::Result<(String, Vec<TokenId>)> {
        let mut limit = limits.most;
        loop {
            let prompt = self.prompt(conversation, Some(user))?;
            let ids = self
                .model
                .file()
                .tokenizer()
                .encode(&prompt, EncodeOptions::CHAT);
            if ids.is_empty() {
                anyhow::bail!("the chat template makes nothing of this message");
            }
            if ids.len() <= limit || !conversation.drop_oldest() {
                return Ok((prompt, ids));
            }
            limit = limits.after_drop;
        }
    }

    /// Drops the oldest turns in the middle of an answer, and evaluates what is left and the answer
    /// so far. Where there is nothing to drop, nothing changes.
    fn make_room(
        &mut self,
        conversation: &mut Conversation,
        user: &str,
        answer: &[TokenId],
    ) -> anyhow::Result<()> {
        if !conversation.drop_oldest() {
            return Ok(());
        }
        let limit = (3 * self.n_ctx() / 4).saturating_sub(answer.len());
        let limits = Limits {
            most: limit,
            after_drop: limit,
        };
        let (_, mut ids) = self.fit(conversation, user, limits)?;
        ids.extend(answer);
        self.model.keep_prefix(SEQ, &ids)?;
        let options = GenerateOptions {
            seq: SEQ,
            cancel: self.cancel.clone(),
            ..GenerateOptions::default()
        };
        // The line on the terminal has half of the answer, so there is no place for a bar.
        self.model.begin_with(&ids, options, |_| {})?;
        Ok(())
    }

    /// Evaluates what is new of the prompt: so many tokens.
    fn begin(
        &mut self,
        ids: &[TokenId],
        n_new: usize,
        options: GenerateOptions,
    ) -> anyhow::Result<TextState> {
        let n_ubatch = self.model.engine().settings().n_ubatch as usize;
        let reading = PromptBar::new("reading", n_new, n_ubatch);
        self.model
            .engine_mut()
            .set_run_progress(Some(reading.run()));
        let on_progress = |progress: PromptProgress| reading.set(progress.n_done);
        let begun = self.model.begin_with(ids, options, on_progress);
        self.model.engine_mut().set_run_progress(None);
        begun.map_err(with_advice)
    }

    /// The text of a control token.
    fn control(&self, id: TokenId) -> Option<&str> {
        let tokenizer = self.model.file().tokenizer();
        match tokenizer.token_kind(id) {
            Some(TokenKind::Control) => tokenizer.token_text(id),
            _ => None,
        }
    }
}

/// An error with the reason why the grammar left no token, where that is the cause.
fn with_reason(error: cellar::Error, failure: Option<&Failure>) -> anyhow::Error {
    match failure.and_then(Failure::reason) {
        Some(reason) => anyhow::Error::from(error).context(reason),
        None => error.into(),
    }
}

fn with_advice(error: cellar::Error) -> anyhow::Error {
    match error {
        cellar::Error::Engine(error @ EngineError::PromptTooLong { .. }) => anyhow::anyhow!(
            "{error}, even without earlier messages; a larger --ctx or a shorter message is needed"
        ),
        error => error.into(),
    }
}
