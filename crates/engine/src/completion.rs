//! [`Completion`]: from rows of logits to the text of one request, apart from any engine.
//!
//! Holds the sampler, the stop strings, the detokenizer, the tokens and the reason why the text
//! ended. A [`Session`](crate::session::Session) drives many. Invariant: the pieces concatenated
//! are the decoded text up to the stop, each of whole characters, and depend only on the options,
//! the prompt and the rows. Knows nothing of memories, batches or time.

use std::sync::Arc;

use kv_core::TokenId;
use kv_graph::TopK;
use model_core::tokenizer::{DecodeFrom, DecodeStream, SpecialPieces, Tokenizer};
use serde::{Deserialize, Serialize};

use crate::config::ConfigError;
use crate::error::EngineError;
use crate::logprobs::{Logprobs, TokenLogprobs};
use crate::sampler::{MinTokensStep, SampleError, Sampler, SamplerConfig, Step, TokenOrigin};
use crate::session::{TokenPiece, text_of};
use crate::stop::StopStrings;

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
    /// A token of [`CompletionOptions::stop_tokens`] was chosen.
    StopToken {
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

/// How the text of a [`Completion`] is chosen, and where it ends.
#[derive(Clone, Debug, Default)]
pub struct CompletionOptions {
    /// How tokens are sampled.
    pub sampler: SamplerConfig,
    /// Largest number of tokens; `None` goes on until the model or the context ends.
    pub n_predict: Option<usize>,
    /// Stop strings.
    pub stop: Vec<String>,
    /// Whether the stop string that ends the text is part of it.
    pub includes_stop: bool,
    /// Tokens that end the text where they are chosen, as those do that end generation; they are
    /// not part of the result.
    pub stop_tokens: Vec<TokenId>,
    /// Which log probabilities of its tokens are wanted. Any need whole rows of logits.
    pub logprobs: Logprobs,
    /// Which log probabilities of the prompt's tokens are wanted. Any need a row of logits for each
    /// token of the prompt, and that nothing of it is reused.
    pub prompt_logprobs: Logprobs,
    /// Whether control tokens, which some models write around calls of tools, are part of the text.
    pub special: SpecialPieces,
}

/// Log probabilities of the places of a text so far.
#[derive(Debug)]
struct Collected {
    wanted: Logprobs,
    places: Vec<TokenLogprobs>,
}

impl Collected {
    fn new(wanted: Logprobs) -> Self {
        let places = Vec::new();
        Self { wanted, places }
    }

    fn add(&mut self, row: &[f32], token: TokenId) {
        if let Some(n_top) = self.wanted.n_top() {
            self.places.push(TokenLogprobs::of(row, token, n_top));
        }
    }
}

impl CompletionOptions {
    /// Checks the options that no tokenizer is needed for.
    ///
    /// # Errors
    /// [`ConfigError`] for the first option that is out of range, or contradicts another.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.sampler.check()?;
        self.logprobs.check()?;
        self.prompt_logprobs.check()?;
        let min_tokens = self.sampler.min_tokens;
        match self.n_predict {
            Some(n_predict) if n_predict < min_tokens => Err(ConfigError::MinTokens {
                min_tokens,
                n_predict,
            }),
            _ => Ok(()),
        }
    }

    /// The same, and that the vocabulary has every token that is named.
    ///
    /// # Errors
    /// As [`CompletionOptions::check`]; [`ConfigError::BiasToken`], [`ConfigError::StopToken`].
    pub fn check_for(&self, tokenizer: &Tokenizer) -> Result<(), ConfigError> {
        self.check()?;
        let n_tokens = tokenizer.n_tokens();
        let mut stop_tokens = self.stop_tokens.iter();
        if let Some(&token) = stop_tokens.find(|token| token.as_usize() >= n_tokens) {
            return Err(ConfigError::StopToken { token, n_tokens });
        }
        self.sampler.check_for(tokenizer)
    }
}

/// What a token is chosen from.
#[derive(Clone, Copy, Debug)]
pub enum OutputRow<'a> {
    /// The logits of all tokens, `[vocab]`.
    Logits(&'a [f32]),
    /// The most likely tokens, as many as [`Completion::n_candidates`] asks for.
    Candidates(TopK<'a>),
}

/// The text of one request: what was chosen so far, and how the next token is chosen.
///
/// ```
/// use std::sync::Arc;
///
/// use cellar_engine::{Completion, CompletionOptions, EngineError, OutputRow};
/// use model_core::tokenizer::Tokenizer;
///
/// fn first_piece(tokenizer: &Arc<Tokenizer>, logits: &[f32]) -> Result<String, EngineError> {
///     let mut completion = Completion::new(tokenizer, CompletionOptions::default())?;
///     completion.take(OutputRow::Logits(logits))
/// }
/// ```
#[derive(Debug)]
pub struct Completion {
    tokenizer: Arc<Tokenizer>,
    sampler: Sampler,
    stop: StopStrings,
    stop_tokens: Vec<TokenId>,
    n_predict: Option<usize>,
    /// `None` once the text has ended and its rest was given out.
    decoder: Option<DecodeStream>,
    tokens: Vec<TokenId>,
    logprobs: Collected,
    prompt_logprobs: Collected,
    text: String,
    finish: Option<FinishReason>,
}

impl Completion {
    /// An empty text.
    ///
    /// # Errors
    /// [`EngineError::Config`] where an option is out of range.
    pub fn new(
        tokenizer: &Arc<Tokenizer>,
        options: CompletionOptions,
    ) -> Result<Self, EngineError> {
        options.check_for(tokenizer)?;
        let min_tokens = options.sampler.min_tokens;
        let mut sampler = Sampler::for_tokenizer(options.sampler, tokenizer)?;
        if min_tokens > 0 && !options.stop_tokens.is_empty() {
            let ends = options.stop_tokens.clone();
            sampler.push_front(Box::new(MinTokensStep::new(min_tokens, ends)));
        }
        Ok(Self {
            tokenizer: Arc::clone(tokenizer),
            sampler,
            stop: if options.includes_stop {
                StopStrings::new(options.stop)?.included()
            } else {
                StopStrings::new(options.stop)?
            },
            stop_tokens: options.stop_tokens,
            n_predict: options.n_predict,
            decoder: Some(DecodeStream::new(DecodeFrom::Continuation, options.special)),
            tokens: Vec::new(),
            logprobs: Collected::new(options.logprobs),
            prompt_logprobs: Collected::new(options.prompt_logprobs),
            text: String::new(),
            finish: None,
        })
    }

    /// Adds a step of the caller's before all others of the sampler: a grammar, a bias, a list of
    /// tokens that are never chosen.
    pub fn push_step(&mut self, step: Box<dyn Step>) {
        self.sampler.push_front(step);
    }

    /// Passes the tokens before the text to the sampler's steps: penalties look back at them.
    pub fn accept_prompt(&mut self, tokens: &[TokenId]) {
        for &token in tokens.iter().filter(|token| !token.names_row()) {
            self.sampler.accept(token, TokenOrigin::Prompt);
        }
    }

    /// How many of the most likely tokens are enough to choose from, see
    /// [`Sampler::n_candidates`]; `None` where it takes whole rows of logits.
    pub fn n_candidates(&self) -> Option<usize> {
        match self.logprobs.wanted {
            Logprobs::Off => self.sampler.n_candidates(),
            Logprobs::Top(_) => None,
        }
    }

    /// Whether the rows of the prompt's tokens are wanted, see [`Completion::take_prompt_row`].
    pub fn wants_prompt_rows(&self) -> bool {
        self.prompt_logprobs.wanted != Logprobs::Off
    }

    /// Takes the row of the prompt's token number `index`, counted from 0: it says how likely the
    /// next one was. Rows come in order; one that was taken before is passed over, so a prompt may
    /// be computed again.
    ///
    /// # Errors
    /// [`EngineError::Sample`] where a logit is not a number.
    pub fn take_prompt_row(
        &mut self,
        index: usize,
        next: TokenId,
        row: &[f32],
    ) -> Result<(), EngineError> {
        if index < self.prompt_logprobs.places.len() {
            return Ok(());
        }
        if row.iter().any(|l| l.is_nan() || *l == f32::INFINITY) {
            return Err(SampleError::NotNumbers.into());
        }
        self.prompt_logprobs.add(row, next);
        Ok(())
    }

    /// Chooses a token from a row and returns the text that it releases: with the last piece, also
    /// what was held back. A piece may be empty: a token may end inside a character, or begin a
    /// stop string. Once the text has ended ([`Completion::finish_reason`]), nothing is chosen.
    ///
    /// # Errors
    /// [`EngineError::Sample`] where no token can be chosen, [`EngineError::Tokenizer`] where it
    /// has no text.
    pub fn take(&mut self, row: OutputRow<'_>) -> Result<String, EngineError> {
        Ok(text_of(&self.take_pieces(row)?))
    }

    /// As [`Completion::take`], token by token.
    ///
    /// # Errors
    /// As [`Completion::take`].
    pub(crate) fn take_pieces(
        &mut self,
        row: OutputRow<'_>,
    ) -> Result<Vec<TokenPiece>, EngineError> {
        let mut pieces = Vec::new();
        if !self.is_at_length()
            && let Some(token) = self.choose(row)?
        {
            pieces.push(TokenPiece {
                token: Some(token),
                text: self.decode(token)?,
                logprobs: self.logprobs.places.last().cloned(),
            });
        }
        if self.is_at_length() {
            let rest = self.last_piece();
            pieces.extend((!rest.is_empty()).then_some(TokenPiece {
                token: None,
                text: rest,
                logprobs: None,
            }));
        }
        Ok(pieces)
    }

    /// Lets a text go on that was cancelled.
    pub(crate) fn reopen(&mut self) {
        self.finish
            .take_if(|finish| *finish == FinishReason::Cancelled);
    }

    /// Ends the text for a reason from outside, unless it has ended, and returns what was held
    /// back.
    pub fn end(&mut self, reason: FinishReason) -> String {
        self.finish.get_or_insert(reason);
        self.last_piece()
    }

    /// The tokens of the text so far; a token that ended it is not among them.
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// The log probabilities of each of [`Completion::tokens`]; empty where none are wanted.
    pub fn logprobs(&self) -> &[TokenLogprobs] {
        &self.logprobs.places
    }

    /// The log probabilities of the prompt's tokens but the first; empty where none are wanted.
    pub fn prompt_logprobs(&self) -> &[TokenLogprobs] {
        &self.prompt_logprobs.places
    }

    /// The text so far, as far as it was returned.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Why it ended; `None` while it goes on.
    pub fn finish_reason(&self) -> Option<&FinishReason> {
        self.finish.as_ref()
    }

    /// Whether the text has ended; it has when it is as long as it may get.
    pub(crate) fn is_at_length(&mut self) -> bool {
        let n_predict = self.n_predict;
        if self.finish.is_none() && n_predict.is_some_and(|n| self.tokens.len() >= n) {
            self.finish = Some(FinishReason::Length);
        }
        self.finish.is_some()
    }

    /// Chooses the next token; `None` where it ends the text.
    pub(crate) fn choose(&mut self, row: OutputRow<'_>) -> Result<Option<TokenId>, EngineError> {
        let token = match row {
            OutputRow::Logits(logits) => self.sampler.sample(logits)?,
            OutputRow::Candidates(_) if self.logprobs.wanted != Logprobs::Off => {
                return Err(EngineError::NoLogits);
            }
            OutputRow::Candidates(top) => self.sampler.sample_top(top)?,
        };
        if self.tokenizer.is_end_of_generation(token) {
            self.finish = Some(FinishReason::EndOfGeneration { token });
            return Ok(None);
        }
        if self.stop_tokens.contains(&token) {
            self.finish = Some(FinishReason::StopToken { token });
            return Ok(None);
        }
        self.sampler.accept(token, TokenOrigin::Generated);
        self.tokens.push(token);
        if let OutputRow::Logits(logits) = row {
            self.logprobs.add(logits, token);
        }
        Ok(Some(token))
    }

    /// The text that a chosen token releases.
    pub(crate) fn decode(&mut self, token: TokenId) -> Result<String, EngineError> {
        let Some(decoder) = &mut self.decoder else {
            return Ok(String::new());
        };
        let decoded = decoder.push(&self.tokenizer, token)?;
        Ok(self.release(&decoded))
    }

    /// The text that decoder and stop strings still hold back, once; nothing where the text was
    /// cancelled, so that it can go on.
    pub(crate) fn last_piece(&mut self) -> String {
        if self.finish == Some(FinishReason::Cancelled) {
            return String::new();
        }
        let Some(decoder) = self.decoder.take() else {
            return String::new();
        };
        let rest = decoder.finish();
        let finish = self.finish.take();
        let mut piece = self.release(&rest);
        let held = self.stop.finish();
        self.text.push_str(&held);
        piece.push_str(&held);
        self.finish = self.finish.take().or(finish);
        piece
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
}
