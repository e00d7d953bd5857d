//! [`Generation`]: one text, from its prompt to the reason why it ended.
//!
//! Invariant: the pieces concatenated are the decoded text up to the stop, each of whole
//! characters; after the end there are none. The state of the text ([`Completion`]) is separate
//! from the engine, which each call borrows: texts in different sequences of one engine can take
//! turns. Knows nothing of chat messages.

mod next_token;

use std::sync::Arc;
use std::time::Instant;

use cellar_scheduler::{MAX_PROMPT_ROWS, Speculated, Speculation};
use kv_core::backend::{Backend, CancelFlag};
use kv_core::batch::Batch;
use kv_core::graph::TopK;
use kv_core::memory::Memory;
use kv_core::{Pos, SeqId, TokenId};
use model_core::tokenizer::Tokenizer;

use crate::completion::{Completion, CompletionOptions, FinishReason, OutputRow};
use crate::context::LongContext;
use crate::decode::Engine;
use crate::draft_model::DraftModel;
use crate::error::EngineError;
use crate::logprobs::{Logprobs, TokenLogprobs};
use crate::sampler::{SamplerConfig, Step};
use crate::speculate::{Speculating, SpeculationOptions};
use crate::timings::Timings;

/// The settings of a generation.
#[derive(Clone, Debug, Default)]
pub struct GenerateOptions {
    /// The sequence to continue.
    pub seq: SeqId,
    /// How tokens are sampled.
    pub sampler: SamplerConfig,
    /// Largest number of tokens; `None` goes on until the model or the context ends.
    pub n_predict: Option<usize>,
    /// Stop strings; they are not part of the result.
    pub stop: Vec<String>,
    /// Tokens that end the text where they are chosen; they are not part of the result.
    pub stop_tokens: Vec<TokenId>,
    /// Which log probabilities of its tokens are wanted.
    pub logprobs: Logprobs,
    /// Which log probabilities of the prompt's tokens are wanted: of each prompt that is fed, all
    /// but the first.
    pub prompt_logprobs: Logprobs,
    /// Cancels it.
    pub cancel: CancelFlag,
    /// What happens when it gets longer than the context.
    pub long_context: LongContext,
    /// Tokens that the sequence has already, for penalties and prompt lookup.
    pub history: Vec<TokenId>,
    /// Whether tokens are drafted and verified several at once. The text is the same, byte for byte
    /// on the CPU backend; only pieces are longer.
    pub speculation: Speculation,
    /// The model that drafts with [`Speculation::Draft`].
    pub draft_model: Option<DraftModel>,
}

/// Which rows of the tokens that are evaluated are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PieceRows {
    /// None.
    None,
    /// That of the last token.
    Last,
    /// All.
    All,
}

/// How much of the prompt is evaluated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptProgress {
    /// Tokens evaluated.
    pub n_done: usize,
    /// All tokens of the prompt.
    pub n_tokens: usize,
}

/// A text that is being generated, in one sequence of an engine.
///
/// Every call takes the engine that the generation was made for. Several generations, each with
/// its own sequence, can take turns on one engine.
///
/// ```
/// use cellar_engine::{
///     Engine, EngineConfig, EngineError, GenerateOptions, Generation, PromptProgress,
/// };
/// use cellar_engine::sampler::SamplerConfig;
/// use kv_core::backend::{Backend, CancelFlag};
/// use model_core::model_file::ModelFile;
/// use model_core::tokenizer::EncodeOptions;
///
/// fn generate(backend: impl Backend, file: &ModelFile) -> Result<String, EngineError> {
///     let config = EngineConfig { n_ctx: Some(256), ..EngineConfig::default() };
///     let mut engine = Engine::new(backend, file.model().clone(), file.weights(), &config)?;
///     let prompt = file.tokenizer().encode("Once upon a time", EncodeOptions::PROMPT);
///     let options = GenerateOptions {
///         sampler: SamplerConfig { seed: 7, ..SamplerConfig::default() },
///         n_predict: Some(20),
///         stop: vec!["The end".to_owned()],
///         ..GenerateOptions::default()
///     };
///     let mut text = Generation::new(&engine, file.tokenizer(), options)?;
///     let on_progress = |p: PromptProgress| println!("{} of {}", p.n_done, p.n_tokens);
///     text.feed(&mut engine, &prompt, on_progress)?;
///     while let Some(piece) = text.next_piece(&mut engine)? {
///         print!("{piece}");
///     }
///     println!("\n{:?} {:?}", text.finish_reason(), text.timings());
///     Ok(text.text().to_owned())
/// }
/// ```
#[derive(Debug)]
pub struct Generation {
    completion: Completion,
    seq: SeqId,
    cancel: CancelFlag,
    long_context: LongContext,
    /// Passed to the sampler before the first prompt.
    history: Vec<TokenId>,
    batch: Batch,
    next: Next,
    timings: Timings,
    speculating: Speculating,
    /// What the last piece is of.
    last_pieces: Vec<TokenPiece>,
    /// Up to which position tokens share positions, with [`LongContext::Group`].
    grouped_to: Pos,
    /// [`Engine::n_changes`] of its sequence when it left it; `None` before a prompt.
    n_changes: Option<u64>,
}

/// A part of a piece of text: what one token released, or at the end what was held back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenPiece {
    /// The token; `None` at the end of the text.
    pub token: Option<TokenId>,
    /// Its text.
    pub text: String,
}

/// What the next token is chosen from.
#[derive(Debug)]
enum Next {
    /// There was no prompt.
    Prompt,
    /// The prompt's last row. A copy, as another text may use the engine before the token is
    /// chosen.
    Row(LastRow),
    /// The logits of this token, which was chosen but not evaluated yet.
    Pending(TokenId),
    /// Nothing: choosing a token failed, or it ended the text.
    Nothing,
}

/// A copy of what a token is chosen from.
#[derive(Debug)]
enum LastRow {
    /// Logits, `[vocab]`.
    Logits(Vec<f32>),
    /// The largest of them, a row of [`TopK`].
    Candidates(Vec<f32>),
}

impl LastRow {
    fn of<B: Backend, M: Memory + Clone>(engine: &Engine<B, M>) -> Result<Self, EngineError> {
        match engine.last_candidates() {
            Some(top) => Ok(Self::Candidates(top.to_row())),
            None => Ok(Self::Logits(last_row(engine)?.to_vec())),
        }
    }

    fn as_output(&self) -> Result<OutputRow<'_>, EngineError> {
        Ok(match self {
            Self::Logits(logits) => OutputRow::Logits(logits),
            Self::Candidates(row) => {
                OutputRow::Candidates(TopK::read(row).ok_or(EngineError::NoLogits)?)
            }
        })
    }
}

impl Generation {
    /// A generation that continues the sequence of the options. It needs a prompt before the first
    /// piece of text.
    ///
    /// # Errors
    /// [`EngineError::Config`] where an option is out of range; as [`Engine::check_long_context`]
    /// where this model's context cannot be shifted or grouped.
    pub fn new<B: Backend, M: Memory + Clone>(
        engine: &Engine<B, M>,
        tokenizer: &Arc<Tokenizer>,
        options: GenerateOptions,
    ) -> Result<Self, EngineError> {
        engine.check_long_context(options.long_context)?;
        let GenerateOptions {
            seq,
            sampler,
            n_predict,
            stop,
            stop_tokens,
            logprobs,
            prompt_logprobs,
            cancel,
            long_context,
            history,
            speculation,
            draft_model,
        } = options;
        let drafting = SpeculationOptions {
            speculation,
            draft_model: draft_model.as_ref(),
        };
        let text = CompletionOptions {
            sampler,
            n_predict,
            stop,
            stop_tokens,
            logprobs,
            prompt_logprobs,
            ..CompletionOptions::default()
        };
        Ok(Self {
            completion: Completion::new(tokenizer, text)?,
            seq,
            cancel,
            long_context,
            history,
            batch: Batch::new(),
            next: Next::Prompt,
            timings: Timings::default(),
            speculating: Speculating::new(engine, drafting, long_context)?,
            last_pieces: Vec::new(),
            grouped_to: engine.memory().next_pos(seq),
            n_changes: None,
        })
    }

    /// The same with a step of the caller's before all others of the sampler: a grammar, a bias, a
    /// list of tokens that are never chosen.
    #[must_use]
    pub fn with_step(mut self, step: Box<dyn Step>) -> Self {
        self.completion.push_step(step);
        self
    }

    /// Evaluates a prompt ubatch by ubatch, calling `on_progress` after each. A text that was
    /// cancelled goes on once the flag is reset. With a model that has an encoder, the first prompt
    /// of a sequence is its source: it is encoded, and the text begins with the model's start
    /// token.
    ///
    /// # Errors
    /// [`EngineError::EmptyPrompt`], [`EngineError::PromptTooLong`] and, where it is not the first
    /// prompt, [`EngineError::SequenceChanged`] before anything is evaluated; others from
    /// [`Engine::decode`], where the pieces before stay evaluated.
    pub fn feed<B: Backend, M: Memory + Clone>(
        &mut self,
        engine: &mut Engine<B, M>,
        prompt: &[TokenId],
        on_progress: impl FnMut(PromptProgress),
    ) -> Result<(), EngineError> {
        self.check_prompt(engine, prompt)?;
        self.check_unchanged(engine)?;
        let fed = self.feed_checked(engine, prompt, on_progress);
        self.accept_changes(engine);
        fed
    }

    /// Goes on where others changed its sequence on purpose, which holds its tokens but the pending
    /// one as before: perhaps with other tokens in front of them.
    pub fn accept_changes<B: Backend, M: Memory + Clone>(&mut self, engine: &Engine<B, M>) {
        self.n_changes = Some(engine.n_changes(self.seq));
    }

    /// Checks that the sequence is as this text left it.
    fn check_unchanged<B: Backend, M: Memory + Clone>(
        &self,
        engine: &Engine<B, M>,
    ) -> Result<(), EngineError> {
        let seq = self.seq;
        match self.n_changes {
            Some(n) if n != engine.n_changes(seq) => Err(EngineError::SequenceChanged { seq }),
            _ => Ok(()),
        }
    }

    fn feed_checked<B: Backend, M: Memory + Clone>(
        &mut self,
        engine: &mut Engine<B, M>,
        prompt: &[TokenId],
        mut on_progress: impl FnMut(PromptProgress),
    ) -> Result<(), EngineError> {
        let started = Instant::now();
        let history = std::mem::take(&mut self.history);
        self.completion.accept_prompt(&history);
        self.speculating.push(&history);
        let start = match engine.encode_prompt(self.seq, prompt, &self.cancel) {
            Err(EngineError::Cancelled) => {
                self.completion.set_finish(Some(FinishReason::Cancelled));
                return Ok(());
            }
            start => start?,
        };
        let n_source = start.as_ref().map_or(0, |_| prompt.len());
        let prompt = start.as_deref().unwrap_or(prompt);
        let (n_tokens, mut n_done) = (prompt.len(), 0);
        let n_before = self.completion.prompt_logprobs().len();
        let n_ubatch = engine.settings().n_ubatch.max(1) as usize;
        let n_piece = if self.completion.wants_prompt_rows() {
            n_ubatch.min(MAX_PROMPT_ROWS)
        } else {
            n_ubatch
        };
        for piece in prompt.chunks(n_piece) {
            if self.is_cancelled() {
                break;
            }
            let output = match n_done + piece.len() < n_tokens {
                _ if self.completion.wants_prompt_rows() => PieceRows::All,
                true => PieceRows::None,
                false => PieceRows::Last,
            };
            let fed = self.feed_piece(engine, piece, output);
            let fed = fed.and_then(|()| {
                let after = &prompt[n_done + 1..];
                self.take_prompt_rows(engine, n_before + n_done, after)
            });
            match fed {
                Err(EngineError::Cancelled) => {
                    self.completion.set_finish(Some(FinishReason::Cancelled));
                    break;
                }
                fed => fed?,
            }
            n_done += piece.len();
            on_progress(PromptProgress {
                n_done: n_source + n_done,
                n_tokens: n_source + n_tokens,
            });
        }
        self.timings
            .prompt
            .add(n_source + n_done, started.elapsed());
        Ok(())
    }

    /// Takes the rows of the piece that was evaluated last, which began with the token before
    /// `after`: its token number `first` of all prompts.
    fn take_prompt_rows<B: Backend, M: Memory + Clone>(
        &mut self,
        engine: &Engine<B, M>,
        first: usize,
        after: &[TokenId],
    ) -> Result<(), EngineError> {
        if !self.completion.wants_prompt_rows() {
            return Ok(());
        }
        let logits = engine.last_logits();
        let rows = (0..logits.n_rows()).filter_map(|number| logits.row(number));
        for ((index, &next), row) in (first..).zip(after).zip(rows) {
            self.completion.take_prompt_row(index, next, row)?;
        }
        Ok(())
    }

    /// Evaluates a piece of a prompt that fits a ubatch, after the pending token.
    fn feed_piece<B: Backend, M: Memory + Clone>(
        &mut self,
        engine: &mut Engine<B, M>,
        piece: &[TokenId],
        rows: PieceRows,
    ) -> Result<(), EngineError> {
        if let Next::Pending(token) = self.next {
            self.evaluate(engine, &[token], PieceRows::None)?;
        }
        self.next = Next::Nothing;
        self.evaluate(engine, piece, rows)?;
        if rows != PieceRows::None {
            self.next = Next::Row(LastRow::of(engine)?);
        }
        self.completion.accept_prompt(piece);
        self.speculating.push(piece);
        Ok(())
    }

    /// The next piece of text, or `None` when it has ended. Pieces may be empty: a token may end
    /// inside a character, or begin a stop string. With [`GenerateOptions::speculation`] a piece
    /// may be of several tokens. What is held back for these reasons when the text is cancelled
    /// stays held back, so that the text can go on once the flag is reset.
    ///
    /// # Errors
    /// [`EngineError::SequenceChanged`] where others changed its sequence since: another text was
    /// begun there, or its memory was edited. [`EngineError::EmptyPrompt`] where no prompt was
    /// given, [`EngineError::NoLogits`] after a prompt that failed or was cancelled; otherwise as
    /// [`Engine::decode`] and [`Sampler::sample`](crate::sampler::Sampler::sample).
    pub fn next_piece<B: Backend, M: Memory + Clone>(
        &mut self,
        engine: &mut Engine<B, M>,
    ) -> Result<Option<String>, EngineError> {
        self.last_pieces.clear();
        let token = self.next_token(engine)?;
        let text = match token {
            Some(token) => self.completion.decode(token)?,
            None => self.completion.last_piece(),
        };
        if token.is_some() || !text.is_empty() {
            self.last_pieces.push(TokenPiece { token, text });
        }
        let has_more = !self.last_pieces.is_empty();
        let texts = self.last_pieces.iter().map(|piece| piece.text.as_str());
        Ok(has_more.then(|| texts.collect()))
    }

    /// The piece that was returned last, token by token.
    pub fn last_pieces(&self) -> &[TokenPiece] {
        &self.last_pieces
    }

    /// The tokens of the text so far; a token that ended it is not among them.
    pub fn tokens(&self) -> &[TokenId] {
        self.completion.tokens()
    }

    /// The log probabilities of [`Generation::tokens`]; empty where none are wanted.
    pub fn logprobs(&self) -> &[TokenLogprobs] {
        self.completion.logprobs()
    }

    /// The log probabilities of the prompt's tokens but the first, see
    /// [`GenerateOptions::prompt_logprobs`].
    pub fn prompt_logprobs(&self) -> &[TokenLogprobs] {
        self.completion.prompt_logprobs()
    }

    /// The last token of the text where it was chosen but not evaluated yet, so that it is not in
    /// the memory.
    pub fn pending(&self) -> Option<TokenId> {
        match self.next {
            Next::Pending(token) => Some(token),
            _ => None,
        }
    }

    /// The text so far, as far as it was returned.
    pub fn text(&self) -> &str {
        self.completion.text()
    }

    /// Why it ended; `None` while it goes on.
    pub fn finish_reason(&self) -> Option<&FinishReason> {
        self.completion.finish_reason()
    }

    /// How long it has taken.
    pub fn timings(&self) -> Timings {
        self.timings
    }

    /// What speculation did, see [`GenerateOptions::speculation`].
    pub fn speculated(&self) -> Speculated {
        self.speculating.speculated()
    }

    fn check_prompt<B: Backend, M: Memory + Clone>(
        &self,
        engine: &Engine<B, M>,
        prompt: &[TokenId],
    ) -> Result<(), EngineError> {
        let n_used = self.n_used(engine) + usize::from(self.pending().is_some());
        let (n_prompt, n_ctx) = (prompt.len(), engine.settings().n_ctx as usize);
        if n_prompt == 0 {
            return Err(EngineError::EmptyPrompt);
        }
        if n_prompt + n_used > n_ctx {
            return Err(EngineError::PromptTooLong {
                seq: self.seq,
                n_prompt,
                n_ctx,
                n_used,
            });
        }
        Ok(())
    }

    /// Whether the flag is set; says so in the reason why the text ended, and takes that back where
    /// the flag was reset.
    fn is_cancelled(&mut self) -> bool {
        let is_cancelled = self.cancel.is_cancelled();
        match self.completion.finish_reason() {
            None | Some(FinishReason::Cancelled) => {
                let finish = is_cancelled.then_some(FinishReason::Cancelled);
                self.completion.set_finish(finish);
                is_cancelled
            }
            Some(_) => false,
        }
    }

    /// How much of the context the sequence uses: its positions, or its tokens where several share
    /// one.
    fn n_used<B: Backend, M: Memory + Clone>(&self, engine: &Engine<B, M>) -> usize {
        let seq = self.seq;
        match self.long_context {
            LongContext::Group(_) => engine.memory().n_tokens(seq) as usize,
            _ => engine.memory().next_pos(seq).as_usize(),
        }
    }
}

/// The logits of the last token that was evaluated, `[vocab]`.
fn last_row<B: Backend, M: Memory + Clone>(engine: &Engine<B, M>) -> Result<&[f32], EngineError> {
    engine.last_logits().last().ok_or(EngineError::NoLogits)
}
