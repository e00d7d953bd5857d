//! [`Generation`]: one text, from its prompt to the reason why it ended.
//!
//! Invariant: the pieces concatenated are the decoded text up to the stop, each of whole
//! characters; after the end there are none. Knows nothing of chat messages.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use kv_core::backend::Backend;
use kv_core::batch::{Batch, Output};
use kv_core::memory::{Memory, Refusal};
use kv_core::{Pos, SeqId, TokenId};
use model_core::tokenizer::{DecodeFrom, DecodeStream, SpecialPieces, Tokenizer};
use serde::{Deserialize, Serialize};

use crate::context::{GroupAttention, LongContext};
use crate::decode::Engine;
use crate::error::EngineError;
use crate::sampler::{Sampler, SamplerConfig};
use crate::stop::StopStrings;
use crate::timings::Timings;

/// Ends a generation from another thread or a signal handler.
#[derive(Clone, Debug, Default)]
pub struct CancelFlag(Arc<AtomicBool>);

impl CancelFlag {
    /// Cancels the generation.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Resets the flag for the next generation.
    pub fn reset(&self) {
        self.0.store(false, Ordering::Relaxed);
    }

    /// Whether it is cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

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
    /// Cancels it.
    pub cancel: CancelFlag,
    /// What happens when it gets longer than the context.
    pub long_context: LongContext,
    /// Tokens that the sequence has already, for penalties.
    pub history: Vec<TokenId>,
}

/// Why a text ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reason", rename_all = "snake_case")]
#[non_exhaustive]
pub enum FinishReason {
    /// The model chose a token that ends generation.
    EndOfGeneration {
        /// The token; it is not among the tokens of the text.
        token: TokenId,
    },
    /// A stop string was complete.
    StopString {
        /// The string.
        text: String,
    },
    /// The requested number of tokens was reached.
    Length,
    /// The memory has no room for another token.
    ContextFull,
    /// It was cancelled.
    Cancelled,
}

/// How much of the prompt is evaluated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptProgress {
    /// Tokens evaluated.
    pub n_done: usize,
    /// All tokens of the prompt.
    pub n_tokens: usize,
}

/// A text that is being generated.
///
/// ```
/// use engine::{Engine, EngineConfig, GenerateOptions, Generation};
/// use engine::sampler::SamplerConfig;
/// use kv_core::backend::Backend;
/// use model_core::model_file::ModelFile;
/// use model_core::tokenizer::EncodeOptions;
///
/// fn generate(backend: impl Backend, file: &ModelFile) -> Result<String, engine::EngineError> {
///     let config = EngineConfig { n_ctx: Some(256), ..EngineConfig::default() };
///     let mut engine = Engine::new(backend, file.model().clone(), file.weights(), &config)?;
///     let prompt = file.tokenizer().encode("Once upon a time", EncodeOptions::PROMPT);
///     let options = GenerateOptions {
///         sampler: SamplerConfig { seed: 7, ..SamplerConfig::default() },
///         n_predict: Some(20),
///         stop: vec!["The end".to_owned()],
///         ..GenerateOptions::default()
///     };
///     let mut text = Generation::new(&mut engine, file.tokenizer(), options)?;
///     text.feed(&prompt, |progress| println!("{} of {}", progress.n_done, progress.n_tokens))?;
///     while let Some(piece) = text.next_piece()? {
///         print!("{piece}");
///     }
///     println!("\n{:?} {:?}", text.finish_reason(), text.timings());
///     Ok(text.text().to_owned())
/// }
/// ```
#[derive(Debug)]
pub struct Generation<'e, B: Backend> {
    engine: &'e mut Engine<B>,
    tokenizer: &'e Tokenizer,
    options: GenerateOptions,
    sampler: Sampler,
    stop: StopStrings,
    decoder: Option<DecodeStream>,
    batch: Batch,
    /// Whether the engine's last logits are those of this text.
    has_logits: bool,
    /// Chosen, but not evaluated yet.
    pending: Option<TokenId>,
    tokens: Vec<TokenId>,
    text: String,
    finish: Option<FinishReason>,
    timings: Timings,
    /// Up to which position tokens share positions, with [`LongContext::Group`].
    grouped_to: Pos,
}

impl<'e, B: Backend> Generation<'e, B> {
    /// A generation that continues the sequence of the options. It needs a prompt before the first
    /// piece of text.
    ///
    /// # Errors
    /// [`EngineError::Config`] where an option is out of range; as [`Engine::check_long_context`] where this model's context cannot be shifted or grouped.
    pub fn new(
        engine: &'e mut Engine<B>,
        tokenizer: &'e Tokenizer,
        options: GenerateOptions,
    ) -> Result<Self, EngineError> {
        engine.check_long_context(options.long_context)?;
        let grouped_to = next_pos(engine, options.seq);
        let mut sampler = Sampler::new(options.sampler.clone())?;
        options.history.iter().for_each(|&t| sampler.accept(t));
        Ok(Self {
            grouped_to,
            engine,
            tokenizer,
            sampler,
            stop: StopStrings::new(options.stop.iter().map(String::as_str))?,
            options,
            decoder: Some(DecodeStream::new(
                DecodeFrom::Continuation,
                SpecialPieces::Skip,
            )),
            batch: Batch::new(),
            has_logits: false,
            pending: None,
            tokens: Vec::new(),
            text: String::new(),
            finish: None,
            timings: Timings::default(),
        })
    }

    /// Evaluates a prompt ubatch by ubatch, calling `progress` after each.
    ///
    /// # Errors
    /// [`EngineError::EmptyPrompt`] and [`EngineError::PromptTooLong`] before anything is
    /// evaluated; others from [`Engine::decode`], where the pieces before stay evaluated.
    pub fn feed(
        &mut self,
        prompt: &[TokenId],
        mut progress: impl FnMut(PromptProgress),
    ) -> Result<(), EngineError> {
        let (n_prompt, n_used) = (prompt.len(), self.n_used());
        let n_ctx = self.engine.settings().n_ctx as usize;
        if n_prompt == 0 {
            return Err(EngineError::EmptyPrompt);
        }
        if n_prompt + n_used > n_ctx {
            let seq = self.options.seq;
            return Err(EngineError::PromptTooLong {
                seq,
                n_prompt,
                n_ctx,
                n_used,
            });
        }
        let started = Instant::now();
        let mut n_done = 0;
        for piece in prompt.chunks(self.engine.settings().n_ubatch.max(1) as usize) {
            if self.options.cancel.is_cancelled() {
                self.finish = Some(FinishReason::Cancelled);
                break;
            }
            n_done += piece.len();
            let output = if n_done == n_prompt {
                Output::Wanted
            } else {
                Output::Skip
            };
            self.evaluate(piece, output)?;
            piece.iter().for_each(|&token| self.sampler.accept(token));
            progress(PromptProgress {
                n_done,
                n_tokens: n_prompt,
            });
        }
        self.timings.prompt.add(n_done, started.elapsed());
        Ok(())
    }

    /// The next piece of text, or `None` when it has ended. Pieces may be empty: a token may end
    /// inside a character, or begin a stop string.
    ///
    /// # Errors
    /// [`EngineError::EmptyPrompt`] where no prompt was given, [`EngineError::NoLogits`] after a
    /// batch that failed; otherwise as [`Engine::decode`] and [`Sampler::sample`].
    pub fn next_piece(&mut self) -> Result<Option<String>, EngineError> {
        let Some(token) = self.next_token()? else {
            return Ok(self.last_piece());
        };
        let decoded = match &mut self.decoder {
            Some(decoder) => decoder.push(self.tokenizer, token)?,
            None => return Ok(None),
        };
        Ok(Some(self.release(&decoded)))
    }

    /// The tokens of the text so far; a token that ended it is not among them.
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// The last token of the text where it was chosen but not evaluated yet, so that it is not in
    /// the memory.
    pub fn pending(&self) -> Option<TokenId> {
        self.pending
    }

    /// The engine, to inspect or to save.
    pub fn engine(&self) -> &Engine<B> {
        self.engine
    }

    /// The text so far, as far as it was returned.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Why it ended; `None` while it goes on.
    pub fn finish_reason(&self) -> Option<&FinishReason> {
        self.finish.as_ref()
    }

    /// How long it has taken.
    pub fn timings(&self) -> Timings {
        self.timings
    }

    /// Chooses the next token, or sets the reason why there is none.
    fn next_token(&mut self) -> Result<Option<TokenId>, EngineError> {
        if self.finish.is_some() {
            return Ok(None);
        }
        if self.options.cancel.is_cancelled() {
            self.finish = Some(FinishReason::Cancelled);
            return Ok(None);
        }
        if self
            .options
            .n_predict
            .is_some_and(|n| self.tokens.len() >= n)
        {
            self.finish = Some(FinishReason::Length);
            return Ok(None);
        }
        let started = Instant::now();
        let n_evaluated = usize::from(self.pending.is_some());
        if let Some(token) = self.pending
            && !self.evaluate_pending(token)?
        {
            self.finish = Some(FinishReason::ContextFull);
            return Ok(None);
        }
        if !self.has_logits {
            return Err(EngineError::EmptyPrompt);
        }
        let logits = self.engine.last_logits().last();
        let token = self.sampler.sample(logits.ok_or(EngineError::NoLogits)?)?;
        self.timings.generation.add(n_evaluated, started.elapsed());
        if self.tokenizer.is_end_of_generation(token) {
            self.finish = Some(FinishReason::EndOfGeneration { token });
            return Ok(None);
        }
        self.sampler.accept(token);
        self.tokens.push(token);
        self.pending = Some(token);
        Ok(Some(token))
    }

    /// Evaluates the pending token; returns whether there was room for it.
    fn evaluate_pending(&mut self, token: TokenId) -> Result<bool, EngineError> {
        if self.try_evaluate_pending(token)? {
            return Ok(true);
        }
        let LongContext::Shift { n_keep } = self.options.long_context else {
            return Ok(false);
        };
        self.engine.shift_context(self.options.seq, n_keep)?;
        self.try_evaluate_pending(token)
    }

    fn try_evaluate_pending(&mut self, token: TokenId) -> Result<bool, EngineError> {
        if self.n_used() >= self.engine.settings().n_ctx as usize {
            return Ok(false);
        }
        match self.evaluate(&[token], Output::Wanted) {
            Ok(()) => {
                self.pending = None;
                Ok(true)
            }
            Err(EngineError::Refused(Refusal::NoRoom(_))) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Groups tokens while there are enough of them.
    fn group(&mut self, group: GroupAttention) -> Result<(), EngineError> {
        let seq = self.options.seq;
        while next_pos(self.engine, seq).0 >= self.grouped_to.0.saturating_add(group.width()) {
            self.engine.group(seq, self.grouped_to, group)?;
            self.grouped_to = Pos(self.grouped_to.0 + group.n_positions());
        }
        Ok(())
    }

    /// Evaluates tokens; `output` is that of the last.
    fn evaluate(&mut self, tokens: &[TokenId], output: Output) -> Result<(), EngineError> {
        if let LongContext::Group(group) = self.options.long_context {
            self.group(group)?;
        }
        self.batch.clear();
        for (at, &token) in tokens.iter().enumerate() {
            let entry = self.batch.push_token(token).in_sequence(self.options.seq);
            if output == Output::Wanted && at + 1 == tokens.len() {
                entry.with_output();
            }
        }
        self.has_logits |= self.engine.decode(&self.batch)?.n_rows() > 0;
        Ok(())
    }

    /// How much of the context the sequence uses: its positions, or its tokens where several share
    /// one.
    fn n_used(&self) -> usize {
        let seq = self.options.seq;
        match self.options.long_context {
            LongContext::Group(_) => self.engine.memory().n_tokens(seq) as usize,
            _ => next_pos(self.engine, seq).as_usize(),
        }
    }

    fn release(&mut self, decoded: &str) -> String {
        let released = self.stop.push(decoded);
        if let Some(index) = released.stopped_by {
            let text = self.stop.get(index).unwrap_or_default().to_owned();
            self.finish = Some(FinishReason::StopString { text });
            self.decoder = None;
        }
        self.text.push_str(&released.text);
        released.text
    }

    /// The text that decoder and stop strings still hold back, once.
    fn last_piece(&mut self) -> Option<String> {
        let rest = self.decoder.take()?.finish();
        let finish = self.finish.take();
        let mut piece = self.release(&rest);
        let held = self.stop.finish();
        self.text.push_str(&held);
        piece.push_str(&held);
        self.finish = self.finish.take().or(finish);
        (!piece.is_empty()).then_some(piece)
    }
}

/// The position of the next token.
fn next_pos<B: Backend>(engine: &Engine<B>, seq: SeqId) -> Pos {
    let positions = engine.memory().positions(seq);
    positions.map_or(Pos(0), |has| has.last.next())
}
