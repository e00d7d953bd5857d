//! [`SamplerConfig`]: the sampler's settings as plain data, and the range of each.
//!
//! Invariant: a configuration that passes [`SamplerConfig::check`] makes every step of the chain
//! well defined. Knows nothing of logits.

use std::num::NonZeroU32;

use model_core::tokenizer::Tokenizer;
use serde::{Deserialize, Serialize};

use super::options::{Dry, LogitBias, Mirostat, Xtc};
use crate::config::{ConfigError, MAX_LAST_N};

/// How the next token is chosen from the logits.
///
/// The defaults are those of llama.cpp, and so is the order of the steps: logit bias, penalties,
/// DRY, top-nσ, top-k, typical-p, top-p, min-p, XTC, temperature, draw. With mirostat it is logit
/// bias, penalties, DRY, temperature, mirostat, draw. `min_tokens` goes before all of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SamplerConfig {
    /// Logits are divided by this before the draw. 0 always takes the most likely token (of equal
    /// ones the smallest id) and draws nothing.
    pub temperature: f32,
    /// Keeps tokens whose logit is at most so many standard deviations of all logits below the
    /// largest (top-nσ, arXiv:2411.07641); 0 keeps all.
    pub top_n_sigma: f32,
    /// Keeps only this many of the most likely tokens; `None` keeps all.
    pub top_k: Option<NonZeroU32>,
    /// Only the most likely tokens stay whose probabilities together reach this, in `0..=1`;
    /// 1 keeps all. At least one token stays.
    pub top_p: f32,
    /// Keeps tokens whose probability, relative to the most likely one's, is at least this, in
    /// `0..=1`; 0 keeps all.
    pub min_p: f32,
    /// Locally typical sampling (arXiv:2202.00666): keeps the tokens whose surprise is nearest to
    /// the expected one until their probabilities together reach this, in `0..=1`; 1 keeps all. At
    /// least one token stays.
    pub typical_p: f32,
    /// Excludes the most probable tokens now and then.
    pub xtc: Xtc,
    /// Keeps the surprise of the text near a target, instead of the steps that select tokens.
    pub mirostat: Option<Mirostat>,
    /// Penalties on tokens that occurred recently.
    pub penalties: Penalties,
    /// Penalties on tokens that would continue a repetition.
    pub dry: Dry,
    /// Changes of single logits; those of the same token add up.
    pub logit_bias: Vec<LogitBias>,
    /// Tokens that end generation are not chosen before the text has so many tokens.
    pub min_tokens: usize,
    /// Seed of the draws: the same seed and logits give the same tokens on every platform.
    pub seed: u64,
}

/// Penalties on tokens that occurred among the last ones, prompt included.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Penalties {
    /// How many tokens back penalties look; 0 turns them off.
    pub last_n: usize,
    /// Positive logits are divided by this and others multiplied by it; 1 does nothing
    /// (CTRL, arXiv:1909.05858, section 4.1).
    pub repeat: f32,
    /// Subtracted from the logit for each occurrence of the token.
    pub frequency: f32,
    /// Subtracted from the logit of every token that occurred.
    pub presence: f32,
}

impl Default for SamplerConfig {
    fn default() -> Self {
        Self {
            temperature: 0.8,
            top_n_sigma: 0.0,
            top_k: NonZeroU32::new(40),
            top_p: 0.95,
            min_p: 0.05,
            typical_p: 1.0,
            xtc: Xtc::default(),
            mirostat: None,
            penalties: Penalties::default(),
            dry: Dry::default(),
            logit_bias: Vec::new(),
            min_tokens: 0,
            seed: 0,
        }
    }
}

impl Default for Penalties {
    fn default() -> Self {
        Self {
            last_n: 64,
            repeat: 1.0,
            frequency: 0.0,
            presence: 0.0,
        }
    }
}

impl Penalties {
    /// Whether any logit can change.
    pub fn are_active(&self) -> bool {
        self.last_n > 0 && (self.repeat != 1.0 || self.frequency != 0.0 || self.presence != 0.0)
    }
}

/// A seed that differs from call to call, short enough to be typed again.
pub fn random_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    // Every `RandomState` is seeded by the system.
    RandomState::new().build_hasher().finish() & u64::from(u32::MAX)
}

impl SamplerConfig {
    /// Always takes the most likely token.
    pub fn greedy() -> Self {
        Self {
            temperature: 0.0,
            ..Self::default()
        }
    }

    /// Checks that every value is in its range.
    ///
    /// # Errors
    /// [`ConfigError`] for the first value that is out of range.
    pub fn check(&self) -> Result<(), ConfigError> {
        let Penalties {
            last_n,
            repeat,
            frequency,
            presence,
        } = self.penalties;
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            return Err(ConfigError::Temperature(self.temperature));
        }
        if !(self.top_n_sigma.is_finite() && self.top_n_sigma >= 0.0) {
            return Err(ConfigError::TopNSigma(self.top_n_sigma));
        }
        let probabilities = [
            ("top-p", self.top_p),
            ("min-p", self.min_p),
            ("typical-p", self.typical_p),
        ];
        for (name, got) in probabilities.into_iter().chain(self.xtc.probabilities()) {
            if !(0.0..=1.0).contains(&got) {
                return Err(ConfigError::Probability { name, got });
            }
        }
        if !(repeat.is_finite() && repeat > 0.0) {
            return Err(ConfigError::RepeatPenalty(repeat));
        }
        for (name, got) in [("frequency", frequency), ("presence", presence)] {
            if !got.is_finite() {
                return Err(ConfigError::Penalty { name, got });
            }
        }
        if last_n > MAX_LAST_N {
            return Err(ConfigError::PenaltyWindow { got: last_n });
        }
        self.dry.check()?;
        self.logit_bias.iter().try_for_each(LogitBias::check)?;
        self.mirostat.as_ref().map_or(Ok(()), Mirostat::check)
    }

    /// The same, and that the vocabulary has every token that is named.
    ///
    /// # Errors
    /// As [`SamplerConfig::check`]; [`ConfigError::BiasToken`].
    pub fn check_for(&self, tokenizer: &Tokenizer) -> Result<(), ConfigError> {
        self.check()?;
        let n_tokens = tokenizer.n_tokens();
        let mut tokens = self.logit_bias.iter().map(|bias| bias.token);
        match tokens.find(|token| token.as_usize() >= n_tokens) {
            Some(token) => Err(ConfigError::BiasToken { token, n_tokens }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use kv_core::TokenId;

    use super::*;
    use crate::sampler::Bias;

    /// Why the defaults with this change are refused.
    fn refused(edit: fn(&mut SamplerConfig)) -> String {
        let mut config = SamplerConfig::default();
        assert_eq!(config.check(), Ok(()));
        edit(&mut config);
        config.check().unwrap_err().to_string()
    }

    #[test]
    fn every_limit_is_named_with_its_value() {
        assert_eq!(
            refused(|c| c.temperature = -1.0),
            "temperature -1 is not a number of at least 0"
        );
        assert_eq!(
            refused(|c| c.temperature = f32::NAN),
            "temperature NaN is not a number of at least 0"
        );
        assert_eq!(
            refused(|c| c.top_p = 1.5),
            "top-p 1.5 is not between 0 and 1"
        );
        assert_eq!(
            refused(|c| c.top_n_sigma = -1.0),
            "top-n-sigma -1 is not a number of at least 0"
        );
        assert_eq!(
            refused(|c| c.min_p = f32::NAN),
            "min-p NaN is not between 0 and 1"
        );
        assert_eq!(
            refused(|c| c.penalties.repeat = 0.0),
            "repetition penalty 0 is not a number above 0"
        );
        assert_eq!(
            refused(|c| c.penalties.presence = f32::INFINITY),
            "presence penalty inf is not a finite number"
        );
        assert_eq!(
            refused(|c| c.penalties.last_n = MAX_LAST_N + 1),
            "penalties over the last 1048577 tokens: at most 1048576 can be looked at"
        );
    }

    #[test]
    fn every_limit_of_the_optional_steps_is_named_with_its_value() {
        let biased = |c: &mut SamplerConfig, bias: f32| {
            c.logit_bias = vec![LogitBias {
                token: TokenId(7),
                bias: Bias::Add(bias),
            }];
        };
        let mut config = SamplerConfig::default();
        for allowed in [100.0, -100.0] {
            biased(&mut config, allowed);
            assert_eq!(config.check(), Ok(()));
        }
        biased(&mut config, 100.5);
        assert_eq!(
            config.check().unwrap_err().to_string(),
            "the bias of token 7 is 100.5: it must be between -100 and 100, or a ban"
        );
        biased(&mut config, f32::NAN);
        assert!(config.check().is_err());
        assert_eq!(
            refused(|c| c.typical_p = -0.1),
            "typical-p -0.1 is not between 0 and 1"
        );
        assert_eq!(
            refused(|c| c.xtc.probability = 1.5),
            "XTC probability 1.5 is not between 0 and 1"
        );
        assert_eq!(
            refused(|c| c.xtc.threshold = f32::NAN),
            "XTC threshold NaN is not between 0 and 1"
        );
        assert_eq!(
            refused(|c| c.dry.multiplier = -1.0),
            "the DRY multiplier is -1: it must be a number of at least 0"
        );
        assert_eq!(
            refused(|c| c.dry.base = 0.5),
            "the DRY base is 0.5: it must be a number of at least 1"
        );
        assert_eq!(
            refused(|c| c.dry.allowed_length = 0),
            "the DRY allowed length is 0: it must be between 1 and 1048576"
        );
        assert_eq!(
            refused(|c| c.dry.last_n = Some(MAX_LAST_N + 1)),
            "the number of tokens that DRY looks back at is 1048577: it must be between 1 and 1048576"
        );
        assert_eq!(
            refused(|c| c.dry.breakers = vec!["\n".into(), String::new()]),
            "DRY sequence breaker 1 is empty"
        );
        assert_eq!(
            refused(|c| c.mirostat = Some(Mirostat { tau: 0.0, eta: 0.1 })),
            "mirostat target 0 is not a number above 0"
        );
        assert_eq!(
            refused(|c| c.mirostat = Some(Mirostat { tau: 5.0, eta: 2.0 })),
            "mirostat learning rate 2 is not between 0 and 1"
        );
    }

    #[test]
    fn the_defaults_are_as_documented() {
        let defaults = SamplerConfig::default();
        assert_eq!(defaults.temperature, 0.8);
        assert_eq!(defaults.top_k, NonZeroU32::new(40));
        assert_eq!((defaults.min_tokens, defaults.seed), (0, 0));
        assert_eq!(defaults.penalties.last_n, 64);
    }

    #[test]
    fn random_seeds_differ_and_are_short() {
        let (one, other) = (random_seed(), random_seed());
        assert_ne!(one, other);
        assert!(one.max(other) <= u64::from(u32::MAX));
    }

    #[test]
    fn the_longest_window_is_allowed() {
        let mut config = SamplerConfig::default();
        config.penalties.last_n = MAX_LAST_N;
        assert_eq!(config.check(), Ok(()));
    }

    #[test]
    fn one_penalty_makes_penalties_active() {
        let active = |last_n, [repeat, frequency, presence]: [f32; 3]| {
            let penalties = Penalties {
                last_n,
                repeat,
                frequency,
                presence,
            };
            penalties.are_active()
        };
        assert!(!active(64, [1.0, 0.0, 0.0]));
        for one in [[2.0, 0.0, 0.0], [1.0, 1.0, 0.0], [1.0, 0.0, 1.0]] {
            assert!(active(1, one) && !active(0, one), "{one:?}");
        }
    }

    #[test]
    fn a_configuration_can_be_written_and_read_in_part() {
        let config: SamplerConfig =
            serde_json::from_str(r#"{"temperature": 0, "top_k": 5}"#).unwrap();
        assert_eq!(config.top_k, NonZeroU32::new(5));
        assert_eq!(config.top_p, SamplerConfig::default().top_p);
        let config: SamplerConfig = serde_json::from_str(
            r#"{"dry": {"multiplier": 0.8}, "xtc": {"probability": 0.5}, "mirostat": {"tau": 3},
                "logit_bias": [{"token": 5, "bias": "ban"}, {"token": 6, "bias": {"add": -2}}]}"#,
        )
        .unwrap();
        assert_eq!(config.dry.base, Dry::default().base);
        assert_eq!(config.mirostat, Some(Mirostat { tau: 3.0, eta: 0.1 }));
        assert_eq!(config.logit_bias[1].bias, Bias::Add(-2.0));
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(
            serde_json::from_str::<SamplerConfig>(&text).unwrap(),
            config
        );
        assert!(serde_json::from_str::<SamplerConfig>(r#"{"top_q": 1}"#).is_err());
    }
}
