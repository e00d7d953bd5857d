//! [`Draft`]: tokens that may follow a text, and for some places the token that follows if that one does
//! not; and [`SecondChoices`], which learns where such a second choice is worth a row.
//!
//! With a second choice, one step gives a token more where the draft is wrong in that place. What it is
//! worth is what the draft model expects: that all tokens before it are right, and this one follows. How
//! far that is true is learned. Decides nothing about texts: what is wrong of a draft is dropped.

use kv_core::TokenId;

use crate::sampler::likeliest;

/// What may follow a text.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Draft {
    /// One after the other.
    pub(crate) tokens: Vec<TokenId>,
    /// In place of some of them, as leaves of a tree.
    pub(crate) seconds: Vec<Second>,
}

/// What may follow in place of a drafted token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Second {
    /// The number of that token.
    pub(crate) at: usize,
    pub(crate) token: TokenId,
    /// How likely it is, with all tokens before it.
    pub(crate) share: f32,
}

impl From<Vec<TokenId>> for Draft {
    fn from(tokens: Vec<TokenId>) -> Self {
        let seconds = Vec::new();
        Self { tokens, seconds }
    }
}

/// A draft that is being made.
#[derive(Debug)]
pub(super) struct PartialDraft {
    pub(super) draft: Draft,
    /// How likely all its tokens are.
    share: f32,
}

impl Default for PartialDraft {
    fn default() -> Self {
        Self {
            draft: Draft::default(),
            share: 1.0,
        }
    }
}

impl PartialDraft {
    /// Adds the likeliest token of a row, with the second one where such are wanted. Returns whether there
    /// is one.
    pub(super) fn push(&mut self, row: &[f32], choices: Choices) -> bool {
        let Ok(first) = likeliest(row) else {
            return false;
        };
        let token = first.token;
        if choices == Choices::Two {
            let two = TopTwo::of(row, token, first.logit);
            self.draft
                .seconds
                .extend(two.second.map(|(token, share)| Second {
                    at: self.draft.tokens.len(),
                    token,
                    share: share * self.share,
                }));
            self.share *= two.first;
        }
        self.draft.tokens.push(token);
        true
    }
}

/// Which tokens of a row are of use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Choices {
    #[default]
    One,
    Two,
}

/// How likely the two likeliest tokens of a row are.
struct TopTwo {
    first: f32,
    second: Option<(TokenId, f32)>,
}

impl TopTwo {
    fn of(row: &[f32], token: TokenId, largest: f32) -> Self {
        /// What is less likely by more than this, in nats, adds nothing that counts here.
        const NEGLIGIBLE: f32 = 15.0;
        let (mut sum, mut second) = (0.0, None);
        for (id, &logit) in (0..).map(TokenId).zip(row) {
            let below = largest - logit;
            // NaN and minus infinity are no tokens.
            let counts = below < NEGLIGIBLE;
            if !counts {
                continue;
            }
            sum += (-below).exp();
            if id != token && second.is_none_or(|(_, least)| below < least) {
                second = Some((id, below));
            }
        }
        Self {
            first: 1.0 / sum,
            second: second.map(|(id, below)| (id, (-below).exp() / sum)),
        }
    }
}

/// Learns how often second choices are right, next to what the draft model expects.
#[derive(Clone, Copy, Debug)]
pub(super) struct SecondChoices {
    /// The most at once.
    n_max: usize,
    n_expected: f32,
    n_right: f32,
}

impl SecondChoices {
    /// A row is worth so many tokens.
    const LEAST: f32 = 0.1;

    /// What was learned counts so much after each step.
    const KEPT: f32 = 0.95;

    pub(super) fn new(n_max: usize) -> Self {
        Self {
            n_max,
            n_expected: 0.0,
            n_right: 0.0,
        }
    }

    pub(super) fn are_wanted(&self) -> Choices {
        match self.n_max {
            0 => Choices::One,
            _ => Choices::Two,
        }
    }

    /// Keeps those that are worth a row.
    pub(super) fn select(&self, seconds: &mut Vec<Second>) {
        let factor = (1.0 + self.n_right) / (1.0 + self.n_expected);
        seconds.retain(|second| second.share * factor >= Self::LEAST);
        seconds.sort_by(|a, b| b.share.total_cmp(&a.share));
        seconds.truncate(self.n_max);
    }

    /// Of these, one was right or none.
    pub(super) fn learn(&mut self, seconds: &[Second], right: Option<usize>) {
        let expected: f32 = seconds.iter().map(|second| second.share).sum();
        self.n_expected = Self::KEPT * self.n_expected + expected;
        self.n_right = Self::KEPT * self.n_right + if right.is_some() { 1.0 } else { 0.0 };
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    #[test]
    fn shares_are_those_of_the_draft_model() {
        let mut growing = PartialDraft::default();
        // 1/2, 1/4, 1/4; of equal ones the first.
        let row = [0.0, 2f32.ln(), 0.0, f32::NEG_INFINITY];
        assert!(growing.push(&row, Choices::Two));
        assert!(growing.push(&row, Choices::Two));
        assert!(!growing.push(&[f32::NAN], Choices::Two));
        let Draft { tokens, seconds } = growing.draft;
        assert_eq!(tokens, [TokenId(1), TokenId(1)]);
        let ids: Vec<_> = seconds.iter().map(|s| (s.at, s.token.0)).collect();
        assert_eq!(ids, [(0, 0), (1, 0)]);
        assert!((seconds[0].share - 0.25).abs() < 1e-6);
        assert!((seconds[1].share - 0.125).abs() < 1e-6);
    }

    #[test]
    fn what_is_seldom_right_is_dropped_for_a_while() {
        let second = |share| Second {
            at: 0,
            token: TokenId(0),
            share,
        };
        let selected = |choices: &SecondChoices| {
            let mut seconds = vec![second(0.05), second(0.2), second(0.4), second(0.3)];
            choices.select(&mut seconds);
            seconds.iter().map(|s| s.share).collect::<Vec<_>>()
        };
        let mut choices = SecondChoices::new(2);
        assert_eq!(selected(&choices), [0.4, 0.3]);
        (0..20).for_each(|_| choices.learn(&[second(0.4)], None));
        assert_eq!(selected(&choices), [0.0; 0]);
        // Others may be right later on.
        (0..60).for_each(|_| choices.learn(&[], None));
        assert_eq!(selected(&choices), [0.4, 0.3]);
        (0..20).for_each(|_| choices.learn(&[second(0.2)], Some(0)));
        let mut rare = vec![second(0.05)];
        choices.select(&mut rare);
        assert_eq!(rare.len(), 1);
    }
}
