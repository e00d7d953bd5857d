//! [`Choices`]: how many texts of a prompt are computed, and which of them are given.
//!
//! Invariant: the best are those with the highest mean log probability, and the order of equal ones
//! is that of their seeds. Computes no text.

use std::num::NonZeroU32;

use crate::config::ConfigError;
use crate::logprobs::TokenLogprobs;

/// The most texts of one prompt.
pub const MAX_CHOICES: u32 = 128;

/// How many texts of one prompt are computed, and how many of them are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choices {
    n: NonZeroU32,
    best_of: NonZeroU32,
}

impl Default for Choices {
    fn default() -> Self {
        Self {
            n: NonZeroU32::MIN,
            best_of: NonZeroU32::MIN,
        }
    }
}

impl Choices {
    /// The best `n` of `best_of` texts; without `best_of`, `n` texts.
    ///
    /// # Errors
    /// [`ConfigError::OutOfRange`] where one is 0 or above [`MAX_CHOICES`], [`ConfigError::BestOf`]
    /// where fewer are computed than wanted.
    pub fn new(n: u32, best_of: Option<u32>) -> Result<Self, ConfigError> {
        let in_range = |name, got: u32| match NonZeroU32::new(got) {
            Some(count) if got <= MAX_CHOICES => Ok(count),
            _ => Err(ConfigError::OutOfRange {
                name,
                got: got as usize,
                max: MAX_CHOICES as usize,
            }),
        };
        let n = in_range("n", n)?;
        let best_of = best_of.map_or(Ok(n), |best_of| in_range("best_of", best_of))?;
        if best_of < n {
            Err(ConfigError::BestOf {
                n: n.get(),
                best_of: best_of.get(),
            })
        } else {
            Ok(Self { n, best_of })
        }
    }

    /// Texts to compute.
    pub fn n_computed(self) -> NonZeroU32 {
        self.best_of
    }

    /// Whether the best are chosen, for which each text needs its log probabilities, see
    /// [`CompletionOptions::logprobs`](crate::CompletionOptions::logprobs).
    pub fn are_ranked(self) -> bool {
        self.best_of > self.n
    }

    /// The texts that are wanted, the best first where there are more; else as they are.
    pub fn choose<T>(self, mut texts: Vec<T>, logprobs: impl Fn(&T) -> &[TokenLogprobs]) -> Vec<T> {
        if self.are_ranked() {
            let mean = |text: &T| mean_logprob(logprobs(text));
            texts.sort_by(|a, b| mean(b).total_cmp(&mean(a)));
        }
        texts.truncate(self.n.get() as usize);
        texts
    }
}

/// The mean log probability of the chosen tokens; minus infinity where there are none, so that an
/// empty text comes last.
fn mean_logprob(places: &[TokenLogprobs]) -> f64 {
    let sum: f64 = places.iter().map(|place| place.chosen.logprob).sum();
    match places.len() {
        0 => f64::NEG_INFINITY,
        n => sum / n as f64,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use kv_core::TokenId;

    use super::*;
    use crate::logprobs::TokenLogprob;

    fn places(logprobs: &[f64]) -> Vec<TokenLogprobs> {
        let place = |&logprob: &f64| TokenLogprobs {
            chosen: TokenLogprob {
                token: TokenId(0),
                logprob,
            },
            top: Vec::new(),
        };
        logprobs.iter().map(place).collect()
    }

    #[test]
    fn the_best_have_the_highest_mean_and_not_the_highest_sum() {
        let texts = vec![
            ("short", places(&[-1.0])),
            ("long", places(&[-0.5, -0.5, -0.5])),
            ("none", places(&[])),
            ("same", places(&[-1.0, -1.0])),
        ];
        let chosen = |n, best_of| {
            let choices = Choices::new(n, best_of).unwrap();
            let chosen = choices.choose(texts.clone(), |(_, places)| places);
            chosen.into_iter().map(|(name, _)| name).collect::<Vec<_>>()
        };
        assert_eq!(chosen(2, Some(4)), ["long", "short"]);
        assert_eq!(chosen(3, Some(4)), ["long", "short", "same"]);
        assert_eq!(chosen(4, None), ["short", "long", "none", "same"]);
    }

    #[test]
    fn numbers_that_make_no_sense_are_refused_by_name() {
        let refused = |n, best_of| Choices::new(n, best_of).unwrap_err().to_string();
        assert_eq!(refused(0, None), "n is 0: it must be between 1 and 128");
        assert_eq!(refused(129, None), "n is 129: it must be between 1 and 128");
        assert_eq!(
            refused(1, Some(0)),
            "best_of is 0: it must be between 1 and 128"
        );
        assert_eq!(
            refused(3, Some(2)),
            "best_of is 2: it must be at least n, which is 3"
        );
        assert_eq!(Choices::new(1, None).unwrap(), Choices::default());
    }
}
