//! Logit bias and the least number of tokens: steps that change the same logits whatever the text
//! says.
//!
//! Invariant: a banned token stays banned, whatever later steps add. Knows no tokenizer: which
//! tokens end generation is given.

use kv_core::TokenId;

use super::candidates::Candidates;
use super::options::{Bias, LogitBias};
use super::steps::{Step, TokenOrigin};

/// Adds to the logits of some tokens; a sum of minus infinity excludes a token.
#[derive(Clone, Debug)]
pub struct BiasStep(pub Vec<LogitBias>);

impl Step for BiasStep {
    fn apply(&mut self, candidates: &mut Candidates<'_>) {
        for &LogitBias { token, bias } in &self.0 {
            candidates.adjust(token, |logit| match bias {
                Bias::Add(bias) => logit + bias,
                Bias::Ban => f32::NEG_INFINITY,
            });
        }
    }
}

/// Excludes the tokens that end generation until the text has so many tokens.
#[derive(Clone, Debug)]
pub struct MinTokensStep {
    min_tokens: usize,
    ends: Vec<TokenId>,
    n_generated: usize,
}

impl MinTokensStep {
    /// At least `min_tokens` before any of `ends`, for an empty text.
    pub fn new(min_tokens: usize, ends: Vec<TokenId>) -> Self {
        Self {
            min_tokens,
            ends,
            n_generated: 0,
        }
    }
}

impl Step for MinTokensStep {
    fn apply(&mut self, candidates: &mut Candidates<'_>) {
        if self.n_generated >= self.min_tokens {
            return;
        }
        for &end in &self.ends {
            candidates.adjust(end, |_| f32::NEG_INFINITY);
        }
    }

    fn accept(&mut self, _token: TokenId, origin: TokenOrigin) {
        self.n_generated += usize::from(origin == TokenOrigin::Generated);
    }

    fn reset(&mut self) {
        self.n_generated = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampler::CandidateBuffers;

    fn logits_after(step: &mut dyn Step, logits: &[f32]) -> Vec<f32> {
        let mut buffers = CandidateBuffers::default();
        let mut candidates = Candidates::new(logits, &mut buffers).unwrap();
        step.apply(&mut candidates);
        candidates.iter().map(|c| c.logit).collect()
    }

    #[test]
    fn biases_add_up_and_bans_win() {
        let bias = |token, bias| LogitBias {
            token: TokenId(token),
            bias,
        };
        let mut step = BiasStep(vec![
            bias(0, Bias::Add(1.5)),
            bias(0, Bias::Add(-0.5)),
            bias(2, Bias::Ban),
            bias(2, Bias::Add(100.0)),
            bias(99, Bias::Add(1.0)),
        ]);
        let got = logits_after(&mut step, &[1.0, 2.0, 3.0, -4.0]);
        assert_eq!(got, [2.0, 2.0, f32::NEG_INFINITY, -4.0]);
    }

    #[test]
    fn ends_are_excluded_until_the_text_is_long_enough() {
        let mut step = MinTokensStep::new(2, vec![TokenId(1), TokenId(3)]);
        let (masked, free) = (
            [5.0, f32::NEG_INFINITY, 5.0, f32::NEG_INFINITY],
            [5.0, 6.0, 5.0, 6.0],
        );
        // The prompt is not part of the text.
        step.accept(TokenId(0), TokenOrigin::Prompt);
        step.accept(TokenId(0), TokenOrigin::Prompt);
        assert_eq!(logits_after(&mut step, &free), masked);
        step.accept(TokenId(0), TokenOrigin::Generated);
        assert_eq!(logits_after(&mut step, &free), masked);
        step.accept(TokenId(2), TokenOrigin::Generated);
        assert_eq!(logits_after(&mut step, &free), free);
        step.reset();
        step.accept(TokenId(0), TokenOrigin::Generated);
        assert_eq!(logits_after(&mut step, &free), masked);
    }
}
