//! The sampler: from the logits of one row to the next token.
//!
//! A chain of small [`Step`]s narrows the [`Candidates`] down, then a seeded draw picks one. The
//! order is penalties, top-k, top-p, min-p, temperature, as llama.cpp's default. Invariant: the
//! same configuration, text and logits give the same token on every platform. Knows nothing of
//! models, text or memory.

mod candidates;
mod config;
mod penalties;
mod steps;

pub use candidates::{Candidate, Candidates, Order};
pub use config::{MAX_LAST_N, Penalties, SamplerConfig, SamplerConfigError};
pub use penalties::PenaltyStep;
pub use steps::{MinP, Step, Temperature, TopK, TopP};

use kv_core::TokenId;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// Why no token could be chosen.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SampleError {
    /// A logit is NaN or plus infinity: the computation went wrong.
    #[error("the logit of token {token} is {logit}")]
    NotANumber {
        /// The token.
        token: usize,
        /// Its logit.
        logit: f32,
    },
    /// Every token is excluded.
    #[error("none of {n_tokens} tokens can be chosen")]
    NothingLeft {
        /// Number of tokens that logits were given for.
        n_tokens: usize,
    },
}

/// How the last token is picked from what the steps leave.
#[derive(Clone, Debug)]
enum Pick {
    /// The most likely one.
    Best,
    /// By its probability.
    Draw(Box<ChaCha8Rng>),
}

/// Chooses tokens; remembers the text as far as its steps need it.
///
/// ```
/// use engine::sampler::{Sampler, SamplerConfig};
///
/// let mut sampler = Sampler::new(SamplerConfig { seed: 7, ..SamplerConfig::default() })?;
/// let token = sampler.sample(&[0.1, 2.5, -1.0])?;
/// sampler.accept(token);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Sampler {
    config: SamplerConfig,
    steps: Vec<Box<dyn Step>>,
    pick: Pick,
    candidates: Candidates,
}

impl Sampler {
    /// A sampler over an empty text.
    ///
    /// # Errors
    /// [`SamplerConfigError`] where a choice makes no sense.
    pub fn new(config: SamplerConfig) -> Result<Self, SamplerConfigError> {
        config.check()?;
        let mut steps: Vec<Box<dyn Step>> = Vec::new();
        if config.penalties.are_active() {
            steps.push(Box::new(PenaltyStep::new(config.penalties.clone())));
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
            candidates: Candidates::default(),
        })
    }

    /// What it was made with.
    pub fn config(&self) -> &SamplerConfig {
        &self.config
    }

    /// Puts a step of one's own before all others.
    pub fn push_front(&mut self, step: Box<dyn Step>) {
        self.steps.insert(0, step);
    }

    /// Learns that `token` was added to the text. Call it for the tokens of the prompt, too: the
    /// penalties look at the whole text.
    pub fn accept(&mut self, token: TokenId) {
        for step in &mut self.steps {
            step.accept(token);
        }
    }

    /// Forgets the text and starts the draws anew from the seed.
    pub fn reset(&mut self) {
        self.steps.iter_mut().for_each(|s| s.reset());
        if let Pick::Draw(rng) = &mut self.pick {
            **rng = ChaCha8Rng::seed_from_u64(self.config.seed);
        }
    }

    /// Chooses a token. The caller says with [`Sampler::accept`] that it was used.
    ///
    /// # Errors
    /// [`SampleError`] where a logit is no number or every token is excluded.
    pub fn sample(&mut self, logits: &[f32]) -> Result<TokenId, SampleError> {
        self.narrow(logits)?;
        let nothing = SampleError::NothingLeft {
            n_tokens: logits.len(),
        };
        match &mut self.pick {
            Pick::Best => self.candidates.best().map(|c| c.token).ok_or(nothing),
            Pick::Draw(rng) => draw(&self.candidates, unit(rng)).ok_or(nothing),
        }
    }

    /// The tokens that could be chosen with their probabilities, which add up to 1. Draws nothing.
    ///
    /// # Errors
    /// As [`Sampler::sample`].
    pub fn probabilities(&mut self, logits: &[f32]) -> Result<Vec<(TokenId, f64)>, SampleError> {
        self.narrow(logits)?;
        if let (Pick::Best, Some(best)) = (&self.pick, self.candidates.best()) {
            return Ok(vec![(best.token, 1.0)]);
        }
        let total: f64 = self.candidates.weights().map(|(_, w)| w).sum();
        let possible = self.candidates.weights().filter(|&(_, w)| w > 0.0);
        Ok(possible.map(|(token, w)| (token, w / total)).collect())
    }

    fn narrow(&mut self, logits: &[f32]) -> Result<(), SampleError> {
        self.candidates.load(logits)?;
        for step in &mut self.steps {
            step.apply(&mut self.candidates);
        }
        match self.candidates.best() {
            Some(best) if best.logit > f32::NEG_INFINITY => Ok(()),
            _ => Err(SampleError::NothingLeft {
                n_tokens: logits.len(),
            }),
        }
    }
}

fn narrowing_steps(config: &SamplerConfig, steps: &mut Vec<Box<dyn Step>>) {
    if let Some(k) = config.top_k {
        steps.push(Box::new(TopK(k)));
    }
    if config.top_p < 1.0 {
        steps.push(Box::new(TopP(config.top_p)));
    }
    if config.min_p > 0.0 {
        steps.push(Box::new(MinP(config.min_p)));
    }
    if config.temperature != 1.0 {
        steps.push(Box::new(Temperature(config.temperature)));
    }
}

/// A number in `0..1` with 53 random bits.
fn unit(rng: &mut ChaCha8Rng) -> f64 {
    (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

/// The candidate in whose share of the total weight `unit` falls.
fn draw(candidates: &Candidates, unit: f64) -> Option<TokenId> {
    let total: f64 = candidates.weights().map(|(_, w)| w).sum();
    let mut left = unit * total;
    let mut last = None;
    for (token, weight) in candidates.weights().filter(|&(_, w)| w > 0.0) {
        last = Some(token);
        left -= weight;
        if left < 0.0 {
            break;
        }
    }
    last
}

#[cfg(test)]
mod tests;
