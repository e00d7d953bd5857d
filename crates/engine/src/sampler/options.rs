//! The settings of the steps that are off by default, as plain data: logit bias, DRY, XTC and
//! mirostat.
//!
//! Invariant: the defaults change nothing, and each setting states its range. Knows nothing of
//! logits.

use kv_core::TokenId;
use serde::{Deserialize, Serialize};

use crate::config::{ConfigError, MAX_BIAS, MAX_LAST_N};

/// A change of one token's logit, whatever the text is.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogitBias {
    /// The token.
    pub token: TokenId,
    /// The change.
    pub bias: Bias,
}

/// How a logit changes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Bias {
    /// This is added to it, in `-100..=100`.
    Add(f32),
    /// The token is never chosen.
    Ban,
}

/// DRY ("don't repeat yourself"): a penalty on tokens that would continue a repetition, which grows
/// with its length. After a repetition of `n` tokens, `multiplier * base^(n - allowed_length)` is
/// subtracted from the logit of the token that followed it the last time.
///
/// Proposed by p-e-w in text-generation-webui's pull request 5677; the defaults and the limit by
/// breakers are llama.cpp's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Dry {
    /// Penalty of the shortest repetition that is penalised; 0 turns the step off.
    pub multiplier: f32,
    /// By how much the penalty grows for each further token, at least 1.
    pub base: f32,
    /// Repetitions shorter than this are free, at least 1.
    pub allowed_length: usize,
    /// How many tokens back repetitions are looked for; `None` looks at the whole text, and 0 turns
    /// the step off.
    pub last_n: Option<usize>,
    /// Repetitions do not reach over a token that completes one of these texts.
    pub breakers: Vec<String>,
}

/// XTC ("exclude top choices"): of the tokens that are at least this probable, only the least
/// probable stays; with a chance, at each token of the text.
///
/// Proposed by p-e-w in text-generation-webui's pull request 6335.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Xtc {
    /// How often tokens are excluded, in `0..=1`; 0 turns the step off.
    pub probability: f32,
    /// The probability from which on a token is excluded, in `0..=1`. Above 0.5 none is, as no two
    /// tokens can have it.
    pub threshold: f32,
}

/// Mirostat 2: leaves out tokens that are too surprising, so that the surprise of the text stays
/// near a target (arXiv:2007.14966, algorithm 2). Replaces top-nσ, top-k, typical-p, top-p, min-p
/// and XTC.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Mirostat {
    /// The target, in bits a token: above 0.
    pub tau: f32,
    /// How fast the limit follows the surprise of each token, in `0..=1`.
    pub eta: f32,
}

impl Default for Dry {
    fn default() -> Self {
        Self {
            multiplier: 0.0,
            base: 1.75,
            allowed_length: 2,
            last_n: None,
            breakers: ["\n", ":", "\"", "*"].map(str::to_owned).to_vec(),
        }
    }
}

impl Default for Xtc {
    fn default() -> Self {
        Self {
            probability: 0.0,
            threshold: 0.1,
        }
    }
}

impl Default for Mirostat {
    fn default() -> Self {
        Self { tau: 5.0, eta: 0.1 }
    }
}

impl LogitBias {
    /// Whether it can make a token more likely.
    pub(super) fn raises(&self) -> bool {
        matches!(self.bias, Bias::Add(bias) if bias > 0.0)
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        match self.bias {
            Bias::Add(got) if !(-MAX_BIAS..=MAX_BIAS).contains(&got) => {
                let token = self.token;
                Err(ConfigError::LogitBias { token, got })
            }
            Bias::Add(_) | Bias::Ban => Ok(()),
        }
    }
}

impl Dry {
    /// Whether any logit can change.
    pub fn is_active(&self) -> bool {
        self.multiplier > 0.0 && self.last_n != Some(0)
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let Self {
            multiplier,
            base,
            allowed_length,
            last_n,
            breakers,
        } = self;
        at_least("the DRY multiplier", *multiplier, 0)?;
        at_least("the DRY base", *base, 1)?;
        let in_range = |name, got: usize| match got {
            1..=MAX_LAST_N => Ok(()),
            got => Err(ConfigError::OutOfRange {
                name,
                got,
                max: MAX_LAST_N,
            }),
        };
        in_range("the DRY allowed length", *allowed_length)?;
        if let Some(last_n) = last_n.filter(|&n| n > 0) {
            in_range("the number of tokens that DRY looks back at", last_n)?;
        }
        match breakers.iter().position(String::is_empty) {
            Some(index) => Err(ConfigError::EmptyBreaker { index }),
            None => Ok(()),
        }
    }
}

impl Xtc {
    /// Whether any token can be excluded.
    pub fn is_active(&self) -> bool {
        self.probability > 0.0
    }

    /// The settings with their names.
    pub(super) fn probabilities(&self) -> [(&'static str, f32); 2] {
        [
            ("XTC probability", self.probability),
            ("XTC threshold", self.threshold),
        ]
    }
}

impl Mirostat {
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let Self { tau, eta } = *self;
        if !(tau.is_finite() && tau > 0.0) {
            return Err(ConfigError::MirostatTarget(tau));
        }
        if !(0.0..=1.0).contains(&eta) {
            let name = "mirostat learning rate";
            return Err(ConfigError::Probability { name, got: eta });
        }
        Ok(())
    }
}

fn at_least(name: &'static str, got: f32, least: u8) -> Result<(), ConfigError> {
    if got.is_finite() && got >= f32::from(least) {
        Ok(())
    } else {
        Err(ConfigError::BelowLeast { name, got, least })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_llama_cpps_and_change_nothing() {
        assert_eq!(
            (Dry::default().base, Dry::default().allowed_length),
            (1.75, 2)
        );
        assert_eq!(
            (Mirostat::default().tau, Mirostat::default().eta),
            (5.0, 0.1)
        );
        assert!(!Dry::default().is_active() && !Xtc::default().is_active());
    }

    #[test]
    fn no_tokens_turn_dry_off() {
        let looking_back = |n| Dry {
            multiplier: 1.0,
            last_n: Some(n),
            ..Dry::default()
        };
        assert_eq!(looking_back(0).check(), Ok(()));
        assert!(!looking_back(0).is_active() && looking_back(1).is_active());
    }

    #[test]
    fn only_positive_biases_raise() {
        let raises = |bias| {
            let token = TokenId(0);
            LogitBias { token, bias }.raises()
        };
        assert!(raises(Bias::Add(0.5)));
        assert!(!raises(Bias::Add(0.0)) && !raises(Bias::Add(-0.5)) && !raises(Bias::Ban));
    }
}
