//! [`TokenLogprobs`]: how likely a token was in its row of logits, and which were likelier.
//!
//! Invariant: a log probability is the log-softmax of the untouched row, before any step of the
//! sampler, summed in f64 in order of the ids, so it does not depend on what was computed together.
//! Knows no text.

use kv_core::TokenId;
use serde::{Deserialize, Serialize};

use crate::config::{ConfigError, MAX_TOP_LOGPROBS};

/// Which log probabilities are wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Logprobs {
    /// None.
    #[default]
    Off,
    /// Of each token, and of so many of the likeliest in its place, at most [`MAX_TOP_LOGPROBS`].
    Top(usize),
}

/// A token and its log probability.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprob {
    /// The token.
    pub token: TokenId,
    /// The natural logarithm of its probability; minus infinity where it is impossible.
    pub logprob: f64,
}

/// The log probabilities of one place of a text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprobs {
    /// Of the token that is there.
    pub chosen: TokenLogprob,
    /// Of the likeliest tokens by falling probability, of equal ones the smaller id first; may
    /// contain the chosen one.
    pub top: Vec<TokenLogprob>,
}

impl Logprobs {
    /// How many of the likeliest tokens are wanted; `None` where no log probabilities are.
    pub fn n_top(self) -> Option<usize> {
        match self {
            Self::Off => None,
            Self::Top(n) => Some(n),
        }
    }

    /// Checks the number.
    ///
    /// # Errors
    /// [`ConfigError::TopLogprobs`] where it is too large.
    pub fn check(self) -> Result<(), ConfigError> {
        match self {
            Self::Top(got) if got > MAX_TOP_LOGPROBS => Err(ConfigError::TopLogprobs { got }),
            Self::Off | Self::Top(_) => Ok(()),
        }
    }
}

impl TokenLogprobs {
    /// Those of `token` and of the `n_top` likeliest in a row of logits, `[vocab]`, of which none
    /// is NaN or plus infinity. A token outside of the row is impossible.
    pub fn of(row: &[f32], token: TokenId, n_top: usize) -> Self {
        let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let largest = f64::from(largest);
        let sum: f64 = row.iter().map(|&l| libm::exp(f64::from(l) - largest)).sum();
        let log_sum = largest + libm::log(sum);
        let of = |token: TokenId, logit: f32| TokenLogprob {
            token,
            logprob: f64::from(logit) - log_sum,
        };
        let logit = row.get(token.as_usize()).copied();
        Self {
            chosen: of(token, logit.unwrap_or(f32::NEG_INFINITY)),
            top: likeliest(row, n_top)
                .into_iter()
                .map(|(t, l)| of(t, l))
                .collect(),
        }
    }
}

/// The `n` tokens with the largest logits, by falling logit.
fn likeliest(row: &[f32], n: usize) -> Vec<(TokenId, f32)> {
    let mut top: Vec<(TokenId, f32)> = Vec::with_capacity(n + 1);
    for (id, &logit) in (0..).zip(row) {
        let is_in = top.len() < n || top.last().is_some_and(|&(_, least)| logit > least);
        if is_in && logit > f32::NEG_INFINITY {
            let at = top.partition_point(|&(_, l)| l >= logit);
            top.insert(at, (TokenId(id), logit));
            top.truncate(n);
        }
    }
    top
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn log_probabilities_by_hand() {
        // Odds 1 : 4 : 2 : 1.
        let row = [1f32, 4.0, 2.0, 1.0].map(f32::ln);
        let got = TokenLogprobs::of(&row, TokenId(2), 3);
        assert!((got.chosen.logprob - 0.25f64.ln()).abs() < 1e-6, "{got:?}");
        let top: Vec<u32> = got.top.iter().map(|t| t.token.0).collect();
        assert_eq!(top, [1, 2, 0]);
        assert!((got.top[0].logprob - 0.5f64.ln()).abs() < 1e-6, "{got:?}");
        assert_eq!(got.top[1], got.chosen);
    }

    #[test]
    fn of_equal_ones_the_smaller_id_is_first() {
        let row = [1f32, 4.0, 2.0, 1.0, 4.0].map(f32::ln);
        let top = |n| -> Vec<u32> {
            let top = TokenLogprobs::of(&row, TokenId(0), n).top;
            top.iter().map(|t| t.token.0).collect()
        };
        assert_eq!(top(5), [1, 4, 2, 0, 3]);
        assert_eq!(top(4), [1, 4, 2, 0]);
        assert_eq!(top(1), [1]);
        assert_eq!(top(0), [0; 0]);
    }

    #[test]
    fn what_is_impossible_is_not_among_the_likeliest() {
        let row = [f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY];
        let got = TokenLogprobs::of(&row, TokenId(0), 20);
        assert_eq!(got.chosen.logprob, f64::NEG_INFINITY);
        let only = TokenLogprob {
            token: TokenId(1),
            logprob: 0.0,
        };
        assert_eq!(got.top, [only]);
        assert_eq!(
            TokenLogprobs::of(&row, TokenId(9), 0).chosen.logprob,
            f64::NEG_INFINITY
        );
    }

    #[test]
    fn more_than_twenty_are_refused() {
        assert_eq!(Logprobs::Top(20).check(), Ok(()));
        assert_eq!(
            Logprobs::Top(21).check().unwrap_err().to_string(),
            "log probabilities of the 21 likeliest tokens: at most 20 can be given"
        );
    }

    proptest! {
        #[test]
        fn they_are_the_log_softmax(row in prop::collection::vec(-30f32..30.0, 1..200), n in 0usize..=20) {
            let sum: f64 = row.iter().map(|&l| f64::from(l).exp()).sum();
            let mut sorted: Vec<usize> = (0..row.len()).collect();
            sorted.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
            let got = TokenLogprobs::of(&row, TokenId(0), n);
            prop_assert_eq!(got.top.len(), n.min(row.len()));
            for (top, &wanted) in got.top.iter().zip(&sorted) {
                prop_assert_eq!(top.token.as_usize(), wanted);
                let logprob = (f64::from(row[wanted]).exp() / sum).ln();
                prop_assert!((top.logprob - logprob).abs() < 1e-9);
            }
        }
    }
}
