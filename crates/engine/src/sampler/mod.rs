//! The sampler: from one logits row to the next token.
//!
//! A chain of [`Step`]s narrows the [`Candidates`] down, then a seeded draw picks one. The order is
//! that of llama.cpp's default, see [`SamplerConfig`]. The logits row is borrowed, never copied
//! whole by the default chain. Invariant: the same configuration, text and logits give the same
//! token on every platform. Knows nothing of models or memory, and of text only what DRY's breakers
//! are.

mod bias;
mod candidates;
mod config;
mod dry;
mod mirostat;
mod options;
mod penalties;
mod reasoning;
mod steps;
mod typical;

pub use bias::{BiasStep, MinTokensStep};
pub(crate) use candidates::likeliest;
pub use candidates::{Candidate, CandidateBuffers, Candidates, Order};
pub use config::{Penalties, SamplerConfig, random_seed};
pub use dry::DryStep;
pub use mirostat::MirostatStep;
pub use options::{Bias, Dry, LogitBias, Mirostat, Xtc};
pub use penalties::PenaltyStep;
pub use reasoning::{ReasoningBudget, ReasoningMarks};
pub use steps::{MinP, Step, Temperature, TokenOrigin, TopK, TopNSigma, TopP};
pub use typical::{Typical, XtcStep};

use std::sync::Arc;

use kv_core::TokenId;
use model_core::tokenizer::Tokenizer;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use crate::config::ConfigError;
pub use crate::config::{MAX_BIAS, MAX_LAST_N};

/// Why no token could be chosen.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SampleError {
    /// A logit is NaN or plus infinity: the computation failed.
    #[error("the logit of token {token} is {logit}")]
    NotANumber {
        /// The token.
        token: usize,
        /// Its logit.
        logit: f32,
    },
    /// Some logit is NaN or plus infinity; which is not known where candidates were found
    /// elsewhere.
    #[error("a logit is not a number, or infinite")]
    NotNumbers,
    /// Every token is excluded.
    #[error("none of {n_tokens} tokens can be chosen")]
    NothingLeft {
        /// Number of tokens that logits were given for.
        n_tokens: usize,
    },
}

/// How a token is picked from the candidates that the steps leave.
#[derive(Clone, Debug)]
enum Pick {
    /// The most likely one.
    Best,
    /// By its probability.
    Draw(Box<ChaCha8Rng>),
}

/// Chooses tokens, and remembers the text as far as its steps need it.
///
/// ```
/// use cellar_engine::sampler::{Sampler, SamplerConfig, TokenOrigin};
///
/// let mut sampler = Sampler::new(SamplerConfig { seed: 7, ..SamplerConfig::default() })?;
/// let token = sampler.sample(&[0.1, 2.5, -1.0])?;
/// sampler.accept(token, TokenOrigin::Generated);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Sampler {
    config: SamplerConfig,
    steps: Vec<Box<dyn Step>>,
    pick: Pick,
    /// Whether the caller added steps.
    has_own_steps: bool,
    /// Tokens that `min_tokens` excludes at first.
    n_ends: usize,
    buffers: CandidateBuffers,
}

impl Sampler {
    /// A sampler over an empty text, of options that need no tokenizer.
    ///
    /// # Errors
    /// [`ConfigError`] where a value is out of range; [`ConfigError::NeedsTokenizer`] with a least
    /// number of tokens, or DRY.
    pub fn new(config: SamplerConfig) -> Result<Self, ConfigError> {
        config.check()?;
        Self::build(config, None)
    }

    /// A sampler over an empty text of this tokenizer.
    ///
    /// # Errors
    /// [`ConfigError`] where a value is out of range, or a token is not in the vocabulary.
    pub fn for_tokenizer(
        config: SamplerConfig,
        tokenizer: &Arc<Tokenizer>,
    ) -> Result<Self, ConfigError> {
        config.check_for(tokenizer)?;
        Self::build(config, Some(tokenizer))
    }

    /// The steps in their order, for a configuration that was checked.
    fn build(
        config: SamplerConfig,
        tokenizer: Option<&Arc<Tokenizer>>,
    ) -> Result<Self, ConfigError> {
        let tokenizer_for = |name| tokenizer.ok_or(ConfigError::NeedsTokenizer { name });
        let mut steps: Vec<Box<dyn Step>> = Vec::new();
        let mut n_ends = 0;
        if config.min_tokens > 0 {
            let ends = tokenizer_for("min_tokens")?.end_of_generation();
            let ends: Vec<TokenId> = ends.collect();
            n_ends = ends.len();
            steps.push(Box::new(MinTokensStep::new(config.min_tokens, ends)));
        }
        if !config.logit_bias.is_empty() {
            steps.push(Box::new(BiasStep(config.logit_bias.clone())));
        }
        if config.penalties.are_active() {
            steps.push(Box::new(PenaltyStep::new(config.penalties.clone())));
        }
        if config.dry.is_active() {
            let tokenizer = tokenizer_for("dry")?;
            steps.push(Box::new(DryStep::new(config.dry.clone(), tokenizer)));
        }
        let pick = if config.temperature == 0.0 {
            Pick::Best
        } else {
            narrowing_steps(&config, &mut steps);
            Pick::Draw(Box::new(ChaCha8Rng::seed_from_u64(config.seed)))
        };
        Ok(Self {
            config,
            steps,
            pick,
            has_own_steps: false,
            n_ends,
            buffers: CandidateBuffers::default(),
        })
    }

    /// What it was made with.
    pub fn config(&self) -> &SamplerConfig {
        &self.config
    }

    /// Adds a step before all others.
    pub fn push_front(&mut self, step: Box<dyn Step>) {
        self.steps.insert(0, step);
        self.has_own_steps = true;
    }

    /// Adds `token` to the text. Call it for the tokens of the prompt, too: penalties look back at
    /// the whole text.
    pub fn accept(&mut self, token: TokenId, origin: TokenOrigin) {
        for step in &mut self.steps {
            step.accept(token, origin);
        }
    }

    /// Forgets the text and restarts the random numbers from the seed.
    pub fn reset(&mut self) {
        self.steps.iter_mut().for_each(|s| s.reset());
        if let Pick::Draw(rng) = &mut self.pick {
            **rng = ChaCha8Rng::seed_from_u64(self.config.seed);
        }
    }

    /// Chooses a token. Where it is used, the caller reports it with [`Sampler::accept`].
    ///
    /// # Errors
    /// [`SampleError`] where a logit is not a number or every token is excluded.
    pub fn sample(&mut self, logits: &[f32]) -> Result<TokenId, SampleError> {
        let candidates = Candidates::new(logits, &mut self.buffers)?;
        pick(
            &mut self.pick,
            narrow(candidates, &mut self.steps, logits.len())?,
        )
    }

    /// How many of the most likely tokens are enough to choose the same token as from all; `None`
    /// where it may take all: without top-k, with top-nσ or mirostat, with steps of the caller's,
    /// with penalties or biases that can raise a logit, with DRY.
    pub fn n_candidates(&self) -> Option<usize> {
        let Penalties {
            last_n,
            repeat,
            frequency,
            presence,
        } = self.config.penalties;
        let lowers = repeat >= 1.0 && frequency >= 0.0 && presence >= 0.0;
        let n_penalised = if !self.config.penalties.are_active() {
            0
        } else if lowers {
            last_n
        } else {
            return None;
        };
        let biases = &self.config.logit_bias;
        let n_lowered = n_penalised
            .checked_add(self.n_ends)?
            .checked_add(biases.len())?;
        let n_kept = match (&self.pick, self.config.top_k) {
            _ if self.has_own_steps || self.config.dry.is_active() => return None,
            _ if biases.iter().any(LogitBias::raises) => return None,
            (Pick::Draw(_), _) if self.config.mirostat.is_some() => return None,
            // How far logits are from each other is known from all of them.
            (Pick::Draw(_), _) if self.config.top_n_sigma > 0.0 => return None,
            (Pick::Best, _) => 1,
            (Pick::Draw(_), Some(k)) => k.get() as usize,
            (Pick::Draw(_), None) => return None,
        };
        // One more, so that top-k still has something to leave out, and sorts.
        n_kept.checked_add(n_lowered)?.checked_add(1)
    }

    /// As [`Sampler::sample`], from the [`Sampler::n_candidates`] most likely tokens.
    ///
    /// # Errors
    /// [`SampleError`] where a logit is not a number or every token is excluded.
    pub fn sample_top(&mut self, top: kv_graph::TopK<'_>) -> Result<TokenId, SampleError> {
        let candidates = Candidates::of_top(top, &mut self.buffers)?;
        let n_tokens = top.iter().count();
        pick(
            &mut self.pick,
            narrow(candidates, &mut self.steps, n_tokens)?,
        )
    }

    /// The tokens that could be chosen with their probabilities, which add up to 1. Draws nothing.
    ///
    /// # Errors
    /// As [`Sampler::sample`].
    pub fn probabilities(&mut self, logits: &[f32]) -> Result<Vec<(TokenId, f64)>, SampleError> {
        let candidates = Candidates::new(logits, &mut self.buffers)?;
        let (candidates, best) = narrow(candidates, &mut self.steps, logits.len())?;
        if matches!(self.pick, Pick::Best) {
            return Ok(vec![(best.token, 1.0)]);
        }
        let total: f64 = candidates.weights().map(|(_, w)| w).sum();
        let possible = candidates.weights().filter(|&(_, w)| w > 0.0);
        Ok(possible.map(|(token, w)| (token, w / total)).collect())
    }
}

/// What the steps leave of `n_tokens` tokens, and the most likely of these.
fn narrow<'a>(
    mut candidates: Candidates<'a>,
    steps: &mut [Box<dyn Step>],
    n_tokens: usize,
) -> Result<(Candidates<'a>, Candidate), SampleError> {
    for step in steps {
        step.apply(&mut candidates);
    }
    match candidates.best() {
        Some(best) if best.logit > f32::NEG_INFINITY => Ok((candidates, best)),
        _ => Err(SampleError::NothingLeft { n_tokens }),
    }
}

/// The token that is chosen from what the steps left.
fn pick(
    how: &mut Pick,
    (candidates, best): (Candidates<'_>, Candidate),
) -> Result<TokenId, SampleError> {
    match how {
        Pick::Best => Ok(best.token),
        // Some candidate has a weight, as the best has one.
        Pick::Draw(rng) => Ok(draw(&candidates, unit(rng)).unwrap_or(best.token)),
    }
}

fn narrowing_steps(config: &SamplerConfig, steps: &mut Vec<Box<dyn Step>>) {
    if config.mirostat.is_none() {
        selecting_steps(config, steps);
    }
    if config.temperature != 1.0 {
        steps.push(Box::new(Temperature(config.temperature)));
    }
    if let Some(mirostat) = config.mirostat {
        steps.push(Box::new(MirostatStep::new(mirostat)));
    }
}

fn selecting_steps(config: &SamplerConfig, steps: &mut Vec<Box<dyn Step>>) {
    if config.top_n_sigma > 0.0 {
        steps.push(Box::new(TopNSigma(config.top_n_sigma)));
    }
    if let Some(k) = config.top_k {
        steps.push(Box::new(TopK(k)));
    }
    if config.typical_p < 1.0 {
        steps.push(Box::new(Typical::new(config.typical_p)));
    }
    if config.top_p < 1.0 {
        steps.push(Box::new(TopP(config.top_p)));
    }
    if config.min_p > 0.0 {
        steps.push(Box::new(MinP(config.min_p)));
    }
    if config.xtc.is_active() {
        steps.push(Box::new(XtcStep::new(config.xtc, config.seed)));
    }
}

/// A number in `0..1` with 53 random bits.
fn unit(rng: &mut ChaCha8Rng) -> f64 {
    (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

/// The candidate in whose share of the total weight `unit` falls.
fn draw(candidates: &Candidates<'_>, unit: f64) -> Option<TokenId> {
    let total: f64 = candidates.weights().map(|(_, w)| w).sum();
    let (mut left, mut last) = (unit * total, None);
    let mut possible = candidates.weights().filter(|&(_, w)| w > 0.0);
    possible.find(|&(token, weight)| {
        last = Some(token);
        left -= weight;
        left < 0.0
    });
    last
}

#[cfg(test)]
mod tests;
