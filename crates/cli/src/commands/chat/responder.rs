//! [`Responder`]: the model's side of a conversation.
//!
//! Invariant: the model evaluates the conversation as its template renders it; the part of it that
//! is in the memory is not evaluated again, and other tokens are removed. Where the context is full,
//! the oldest turns are dropped and what is left is evaluated again. Knows nothing of terminals.

use engine::{CancelFlag, Engine, EngineError, FinishReason, GenerateOptions, Generation, Timings};
use kv_core::backend::BoxedBackend;
use kv_core::batch::Batch;
use kv_core::memory::Seqs;
use kv_core::{Pos, PosRange, SeqId, TokenId};
use model_core::model_file::ModelFile;
use model_core::tokenizer::{EncodeOptions, TokenKind};

use super::conversation::Conversation;
use super::settings::Settings;
use crate::commands::answer::{Answer, Section, ThinkingFormat};
use crate::progress::{Progress, PromptBar};

const SEQ: SeqId = SeqId(0);

/// The model, and what it remembers.
pub(super) struct Responder<'f> {
    file: &'f ModelFile,
    engine: Engine<BoxedBackend>,
    format: ThinkingFormat,
    cancel: CancelFlag,
    stop: Vec<String>,
    /// Tokens in the memory.
    evaluated: Vec<TokenId>,
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
}

impl<'f> Responder<'f> {
    /// A model that remembers nothing yet.
    pub(super) fn new(
        file: &'f ModelFile,
        engine: Engine<BoxedBackend>,
        template: &str,
        cancel: CancelFlag,
        stop: Vec<String>,
    ) -> Self {
        Self {
            file,
            engine,
            format: ThinkingFormat::of_template(template),
            cancel,
            stop,
            evaluated: Vec::new(),
        }
    }

    /// Tokens in the memory.
    pub(super) fn n_evaluated(&self) -> usize {
        self.evaluated.len()
    }

    /// Tokens that the memory holds.
    pub(super) fn n_ctx(&self) -> usize {
        self.engine.settings().n_ctx as usize
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
        Ok(cellar::render_chat(self.file, &messages)?.unwrap_or_default())
    }

    /// Answers a message, calling `on_part` for each part of the answer. `None` where it was
    /// cancelled before the message was read. Turns that do not fit any more are dropped from
    /// `conversation`.
    ///
    /// # Errors
    /// Where the message does not fit the context, `on_part` fails, or the engine does; the memory
    /// is empty then.
    pub(super) fn answer(
        &mut self,
        conversation: &mut Conversation,
        user: &str,
        settings: &Settings,
        on_part: impl FnMut(Section, &str) -> anyhow::Result<()>,
    ) -> anyhow::Result<Option<Response>> {
        let answered = self.try_answer(conversation, user, settings, on_part);
        if answered.is_err() {
            self.forget();
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
        self.recall(&ids)?;
        let n_known = self.evaluated.len();
        tracing::debug!(n_known, n_new = ids.len() - n_known, "reading a message");
        let options = GenerateOptions {
            seq: SEQ,
            sampler: settings.sampler.clone(),
            n_predict: settings.n_predict,
            stop: self.stop.clone(),
            cancel: self.cancel.clone(),
            history: self.evaluated.clone(),
            ..GenerateOptions::default()
        };
        let mut generation = Generation::new(&self.engine, self.file.tokenizer(), options)?;
        if !self.read_prompt(&mut generation, &ids)? {
            return Ok(None);
        }
        let n_before = self.evaluated.len();
        let mut n_prompt = n_before;
        let mut splitter = self.format.splitter(&prompt);
        let mut answer = Answer::default();
        let mut n_tokens = 0;
        loop {
            let is_full = generation.pending().is_some() && self.evaluated.len() >= self.n_ctx();
            if is_full {
                n_prompt = self.make_room(conversation, user, &generation)?;
            }
            let Some(piece) = generation.next_piece(&mut self.engine)? else {
                break;
            };
            let tokens = generation.tokens();
            let is_new = tokens.len() > n_tokens;
            n_tokens = tokens.len();
            let control = tokens
                .last()
                .filter(|_| is_new)
                .and_then(|&id| self.control(id));
            self.note_evaluated(&generation, n_prompt);
            for (section, part) in splitter.push(&piece, control) {
                answer.push(section, &part);
                on_part(section, &part)?;
            }
        }
        self.note_evaluated(&generation, n_prompt);
        if let Some((section, part)) = splitter.finish() {
            answer.push(section, &part);
            on_part(section, &part)?;
        }
        Ok(Some(Response {
            answer,
            finish: generation.finish_reason().cloned(),
            n_known,
            n_generated: generation.tokens().len(),
            timings: generation.timings(),
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
            let ids = self.file.tokenizer().encode(&prompt, EncodeOptions::CHAT);
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
    /// so far. Returns the length of the new prompt. Where there is nothing to drop, nothing
    /// changes.
    fn make_room(
        &mut self,
        conversation: &mut Conversation,
        user: &str,
        generation: &Generation,
    ) -> anyhow::Result<usize> {
        let tokens = generation.tokens();
        let answer = &tokens[..tokens.len() - n_pending(generation)];
        let n_prompt = self.evaluated.len() - answer.len();
        if !conversation.drop_oldest() {
            return Ok(n_prompt);
        }
        let limit = (3 * self.n_ctx() / 4).saturating_sub(answer.len());
        let limits = Limits {
            most: limit,
            after_drop: limit,
        };
        let (_, mut ids) = self.fit(conversation, user, limits)?;
        let n_prompt = ids.len();
        ids.extend(answer);
        self.recall(&ids)?;
        let rest = &ids[self.evaluated.len()..];
        let reading = Progress::tokens("reading again", rest.len());
        let mut batch = Batch::new();
        for (piece, n) in rest
            .chunks(self.engine.settings().n_ubatch.max(1) as usize)
            .zip(1..)
        {
            if self.cancel.is_cancelled() {
                break;
            }
            batch.clear();
            for &token in piece {
                batch.push_token(token).in_sequence(SEQ);
            }
            self.engine.decode(&batch)?;
            self.evaluated.extend(piece);
            reading.set(n * piece.len());
        }
        Ok(n_prompt)
    }

    /// Evaluates what is new of the prompt; returns whether all of it was.
    fn read_prompt(
        &mut self,
        generation: &mut Generation,
        ids: &[TokenId],
    ) -> anyhow::Result<bool> {
        let new = &ids[self.evaluated.len()..];
        let n_ubatch = self.engine.settings().n_ubatch as usize;
        let reading = PromptBar::new("reading", new.len(), n_ubatch);
        self.engine.set_run_progress(Some(reading.run()));
        let mut n_read = 0;
        let fed = generation.feed(&mut self.engine, new, |progress| {
            n_read = progress.n_done;
            reading.set(n_read);
        });
        self.engine.set_run_progress(None);
        drop(reading);
        fed.map_err(with_advice)?;
        self.evaluated.extend(&new[..n_read]);
        Ok(n_read == new.len())
    }

    /// Brings `evaluated` up to what the generation has evaluated after `n_prompt` tokens.
    fn note_evaluated(&mut self, generation: &Generation, n_prompt: usize) {
        let tokens = generation.tokens();
        let n_evaluated = tokens.len() - n_pending(generation);
        let n_noted = self.evaluated.len().saturating_sub(n_prompt);
        if let Some(new) = tokens.get(n_noted..n_evaluated) {
            self.evaluated.extend(new);
        }
    }

    /// The text of a control token.
    fn control(&self, id: TokenId) -> Option<&'f str> {
        let tokenizer = self.file.tokenizer();
        match tokenizer.token_kind(id) {
            Some(TokenKind::Control) => tokenizer.token_text(id),
            _ => None,
        }
    }

    /// Removes everything after the common prefix with `ids` from the memory. The last of `ids` is
    /// always evaluated again: the answer begins with its logits.
    fn recall(&mut self, ids: &[TokenId]) -> Result<(), EngineError> {
        let both = ids.iter().zip(&self.evaluated);
        let n_same = both.take_while(|(new, old)| new == old).count();
        let n_same = n_same.min(ids.len().saturating_sub(1));
        if n_same == self.evaluated.len() {
            return Ok(());
        }
        let first = u32::try_from(n_same).unwrap_or(u32::MAX);
        let range = PosRange::from(Pos(first)..);
        match self.engine.remove(Seqs::One(SEQ), range) {
            Ok(_) => self.evaluated.truncate(n_same),
            // A recurrent state does not go back so far.
            Err(EngineError::Refused(_)) => self.forget(),
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn forget(&mut self) {
        let _ = self.engine.clear();
        self.evaluated.clear();
    }
}

/// Tokens of the text that are not evaluated: none or one.
fn n_pending(generation: &Generation) -> usize {
    usize::from(generation.pending().is_some()).min(generation.tokens().len())
}

fn with_advice(error: EngineError) -> anyhow::Error {
    match error {
        EngineError::PromptTooLong { .. } => anyhow::anyhow!(
            "{error}, even without earlier messages; a larger --ctx or a shorter message is needed"
        ),
        error => error.into(),
    }
}
