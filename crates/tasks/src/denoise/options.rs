//! [`DenoiseOptions`]: how the masks of a text are filled. Plain data, its limits, and the engine
//! that it needs.

use model_core::architecture::Model;

use cellar_engine::CancelFlag;
use cellar_engine::sampler::SamplerConfig;
use cellar_engine::{ConfigError, EngineConfig};

/// How the masks behind a prompt are filled.
#[derive(Clone, Debug)]
pub struct DenoiseOptions {
    /// Masks behind the prompt: the longest text.
    pub n_tokens: usize,
    /// How often the model computes the text, at most: a step that would fill no mask is left out.
    /// More steps are slower and fill fewer masks at once, so that more of the text is known when a
    /// token is chosen.
    pub n_steps: usize,
    /// How many masks each step fills, and where.
    pub schedule: FillSchedule,
    /// Which masks are filled first.
    pub order: FillOrder,
    /// Strength of guidance: logits move away, by this factor, from those of the same text with its
    /// prompt masked, which is computed as well. 0 is none (Nie et al., arXiv 2410.18514).
    pub guidance: f32,
    /// How tokens are chosen. What depends on earlier tokens (penalties, DRY, mirostat, a smallest
    /// length) is refused.
    pub sampler: SamplerConfig,
    /// Ends the step that is computed.
    pub cancel: CancelFlag,
}

/// How many masks each step fills, and where.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FillSchedule {
    /// Blocks of so many tokens one after the other, the masks of a block in equal parts; a single
    /// block is the whole text (LLaDA, arXiv 2502.09992, appendix B.4).
    Blocks {
        /// Tokens of a block.
        n_tokens: usize,
    },
    /// Anywhere: times fall evenly from 1 to `end`, and a step from time `t` to `s` fills the
    /// fraction `1 - s / t` of the masks, the last step all (Dream, arXiv 2508.15487).
    Times {
        /// The last time, between 0 and 1.
        end: f32,
    },
}

/// Which masks are filled first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FillOrder {
    /// Those whose token has the largest probability.
    #[default]
    Confidence,
    /// Those whose two likeliest tokens are furthest apart.
    Margin,
    /// Those whose probabilities have the least entropy.
    Entropy,
    /// Any, by chance.
    Random,
}

impl Default for DenoiseOptions {
    fn default() -> Self {
        Self {
            n_tokens: 128,
            n_steps: 128,
            schedule: FillSchedule::Times { end: 1e-3 },
            order: FillOrder::Confidence,
            guidance: 0.0,
            sampler: SamplerConfig {
                temperature: 0.0,
                ..SamplerConfig::default()
            },
            cancel: CancelFlag::default(),
        }
    }
}

impl DenoiseOptions {
    /// Sequences that a step computes: the text, and with guidance the same without its prompt.
    pub fn n_seqs(&self) -> u32 {
        if self.guidance > 0.0 { 2 } else { 1 }
    }

    /// The configuration of an engine for texts behind prompts of at most `n_prompt` tokens.
    pub fn engine_config(&self, model: &dyn Model, n_prompt: usize) -> EngineConfig {
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let n_seqs = self.n_seqs();
        let n_batch = count(n_prompt.saturating_add(self.n_tokens)).saturating_mul(n_seqs);
        EngineConfig {
            n_ctx: Some(count(model.context_length())),
            n_batch,
            n_ubatch: n_batch,
            n_seqs,
            ..EngineConfig::default()
        }
    }

    /// Whether the values make sense.
    ///
    /// # Errors
    /// [`ConfigError`], the first one that does not.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.sampler.check()?;
        let sampler = &self.sampler;
        for (is_given, option) in [
            (
                sampler.penalties.are_active(),
                "a penalty for the last tokens",
            ),
            (sampler.dry.is_active(), "DRY"),
            (sampler.mirostat.is_some(), "mirostat"),
            (sampler.min_tokens > 0, "a smallest length"),
        ] {
            if is_given {
                return Err(ConfigError::OrderOfMasks { option });
            }
        }
        for (name, got) in [
            ("the text's length", self.n_tokens),
            ("steps", self.n_steps),
        ] {
            if got == 0 {
                let max = usize::MAX;
                return Err(ConfigError::OutOfRange { name, got, max });
            }
        }
        match self.schedule {
            FillSchedule::Blocks { n_tokens: got } if got == 0 || got > self.n_tokens => {
                return Err(ConfigError::OutOfRange {
                    name: "the block's length",
                    got,
                    max: self.n_tokens,
                });
            }
            FillSchedule::Blocks { n_tokens }
                if self.n_steps < self.n_tokens.div_ceil(n_tokens) =>
            {
                return Err(ConfigError::TooFewSteps {
                    n_steps: self.n_steps,
                    n_blocks: self.n_tokens.div_ceil(n_tokens),
                });
            }
            FillSchedule::Times { end: got } if !(got > 0.0 && got < 1.0) => {
                let name = "the last time";
                return Err(ConfigError::Probability { name, got });
            }
            FillSchedule::Blocks { .. } | FillSchedule::Times { .. } => {}
        }
        if self.guidance.is_finite() && self.guidance >= 0.0 {
            Ok(())
        } else {
            Err(ConfigError::Guidance(self.guidance))
        }
    }
}
