//! [`SamplerConfig`]: the sampler's settings as plain data, and the range of each.
//!
//! Invariant: a configuration that passes [`SamplerConfig::check`] makes every step of the chain
//! well defined. Knows nothing of logits.

use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};

use crate::config::{ConfigError, MAX_LAST_N};

/// How the next token is chosen from the logits.
///
/// The defaults are those of llama.cpp, and so is the order of the steps: penalties, top-k, top-p,
/// min-p, temperature, draw.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SamplerConfig {
    /// Logits are divided by this before the draw. 0 always takes the most likely token (of equal
    /// ones the smallest id) and draws nothing.
    pub temperature: f32,
    /// Keeps only this many of the most likely tokens; `None` keeps all.
    pub top_k: Option<NonZeroU32>,
    /// Only the most likely tokens stay whose probabilities together reach this, in `0..=1`;
    /// 1 keeps all. At least one token stays.
    pub top_p: f32,
    /// Keeps tokens whose probability, relative to the most likely one's, is at least this, in
    /// `0..=1`; 0 keeps all.
    pub min_p: f32,
    /// Penalties on tokens that occurred recently.
    pub penalties: Penalties,
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
            top_k: NonZeroU32::new(40),
            top_p: 0.95,
            min_p: 0.05,
            penalties: Penalties::default(),
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
        for (name, got) in [("top-p", self.top_p), ("min-p", self.min_p)] {
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
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_limit_is_named_with_its_value() {
        let refused = |edit: fn(&mut SamplerConfig)| {
            let mut config = SamplerConfig::default();
            assert_eq!(config.check(), Ok(()));
            edit(&mut config);
            config.check().unwrap_err().to_string()
        };
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
    fn a_configuration_can_be_written_and_read_in_part() {
        let config: SamplerConfig =
            serde_json::from_str(r#"{"temperature": 0, "top_k": 5}"#).unwrap();
        assert_eq!(config.top_k, NonZeroU32::new(5));
        assert_eq!(config.top_p, SamplerConfig::default().top_p);
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(
            serde_json::from_str::<SamplerConfig>(&text).unwrap(),
            config
        );
        assert!(serde_json::from_str::<SamplerConfig>(r#"{"top_q": 1}"#).is_err());
    }
}
