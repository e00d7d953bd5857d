//! The steps that narrow the candidates down: top-nσ, top-k, top-p, min-p and temperature.
//!
//! Each is a line of arithmetic over [`Candidates`]; none can leave them empty.

use std::fmt::Debug;
use std::num::NonZeroU32;

use kv_core::TokenId;

use super::candidates::{Candidates, weight};

/// Where a token of the text comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenOrigin {
    /// It was given: by the prompt, or by a text that is continued.
    Prompt,
    /// The sampler chose it.
    Generated,
}

/// One step of a chain: changes logits or takes candidates out, and leaves at least one.
pub trait Step: Debug + Send {
    /// Changes or selects the candidates for one token.
    fn apply(&mut self, candidates: &mut Candidates<'_>);

    /// Called for each `token` that is added to the text.
    fn accept(&mut self, _token: TokenId, _origin: TokenOrigin) {}

    /// Forgets the text.
    fn reset(&mut self) {}
}

/// Keeps the most likely tokens.
#[derive(Clone, Copy, Debug)]
pub struct TopK(pub NonZeroU32);

impl Step for TopK {
    fn apply(&mut self, candidates: &mut Candidates<'_>) {
        candidates.keep_top(self.0.get() as usize);
    }
}

/// Keeps tokens whose logit is at most so many standard deviations below the largest (top-nσ,
/// arXiv:2411.07641, section 3). Tokens that are excluded do not count.
#[derive(Clone, Copy, Debug)]
pub struct TopNSigma(pub f32);

impl Step for TopNSigma {
    fn apply(&mut self, candidates: &mut Candidates<'_>) {
        let Some(best) = candidates.best().map(|c| f64::from(c.logit)) else {
            return;
        };
        let logits = || {
            candidates
                .iter()
                .map(|c| f64::from(c.logit))
                .filter(|l| l.is_finite())
        };
        let (mut n, mut sum) = (0.0, 0.0);
        logits().for_each(|logit| {
            n += 1.0;
            sum += logit;
        });
        let mean = sum / n;
        let squares: f64 = logits().map(|logit| (logit - mean) * (logit - mean)).sum();
        let floor = best - f64::from(self.0) * libm::sqrt(squares / n);
        // Where no logit is finite, nothing is compared with a number.
        candidates.retain(|c| f64::from(c.logit) >= floor || f64::from(c.logit) == best);
    }
}

/// Keeps the most likely tokens whose probabilities together reach this (nucleus sampling,
/// arXiv:1904.09751, section 3.1).
#[derive(Clone, Copy, Debug)]
pub struct TopP(pub f32);

impl Step for TopP {
    fn apply(&mut self, candidates: &mut Candidates<'_>) {
        let Some(best) = candidates.best().map(|c| f64::from(c.logit)) else {
            return;
        };
        let total: f64 = candidates.weights().map(|(_, w)| w).sum();
        let wanted = f64::from(self.0) * total;
        let mut sum = 0.0;
        candidates.keep_prefix(|c| {
            sum += weight(c.logit, best);
            sum >= wanted
        });
    }
}

/// Keeps tokens with at least this probability, relative to the most likely one's
/// (arXiv:2407.01082, section 3).
#[derive(Clone, Copy, Debug)]
pub struct MinP(pub f32);

impl Step for MinP {
    fn apply(&mut self, candidates: &mut Candidates<'_>) {
        let Some(best) = candidates.best().map(|c| f64::from(c.logit)) else {
            return;
        };
        let wanted = f64::from(self.0);
        candidates.retain(|c| weight(c.logit, best) >= wanted);
    }
}

/// Divides the logits.
#[derive(Clone, Copy, Debug)]
pub struct Temperature(pub f32);

impl Step for Temperature {
    fn apply(&mut self, candidates: &mut Candidates<'_>) {
        // Relative to the best, so that a tiny temperature cannot make logits infinite.
        let Some(best) = candidates.best().map(|c| c.logit) else {
            return;
        };
        let temperature = self.0;
        candidates.scale(|logit| (logit - best) / temperature);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampler::CandidateBuffers;

    /// Logits of the probabilities 0.5, 0.25, 0.125, 0.125, in another order.
    fn halves() -> [f32; 4] {
        [0.125f32, 0.5, 0.125, 0.25].map(f32::ln)
    }

    fn tokens_after(mut step: impl Step) -> Vec<u32> {
        let (logits, mut buffers) = (halves(), CandidateBuffers::default());
        let mut candidates = Candidates::new(&logits, &mut buffers).unwrap();
        step.apply(&mut candidates);
        candidates.iter().map(|c| c.token.0).collect()
    }

    fn weights_after(mut step: impl Step, logits: &[f32]) -> Vec<f64> {
        let mut buffers = CandidateBuffers::default();
        let mut candidates = Candidates::new(logits, &mut buffers).unwrap();
        step.apply(&mut candidates);
        candidates.weights().map(|(_, w)| w).collect()
    }

    #[test]
    fn top_k_keeps_the_likeliest() {
        assert_eq!(tokens_after(TopK(NonZeroU32::new(1).unwrap())), [1]);
        assert_eq!(tokens_after(TopK(NonZeroU32::new(3).unwrap())), [1, 3, 0]);
        assert_eq!(
            tokens_after(TopK(NonZeroU32::new(9).unwrap())),
            [0, 1, 2, 3]
        );
    }

    #[test]
    fn top_p_keeps_what_reaches_it() {
        assert_eq!(tokens_after(TopP(0.0)), [1]);
        assert_eq!(tokens_after(TopP(0.49)), [1]);
        assert_eq!(tokens_after(TopP(0.51)), [1, 3]);
        assert_eq!(tokens_after(TopP(0.74)), [1, 3]);
        assert_eq!(tokens_after(TopP(0.76)), [1, 3, 0]);
        assert_eq!(tokens_after(TopP(0.88)), [1, 3, 0, 2]);
    }

    #[test]
    fn top_p_keeps_what_reaches_it_exactly() {
        let (logits, mut buffers) = ([0.0; 4], CandidateBuffers::default());
        let mut candidates = Candidates::new(&logits, &mut buffers).unwrap();
        TopP(0.5).apply(&mut candidates);
        assert_eq!(candidates.iter().count(), 2);
    }

    /// The logits 0, 1, 2, 5 have the mean 2 and the standard deviation sqrt(14 / 4) = 1.87.
    #[test]
    fn top_n_sigma_keeps_what_is_near_the_largest_logit() {
        let kept = |sigmas: f32| {
            let (logits, mut buffers) = (
                [0.0, 5.0, f32::NEG_INFINITY, 2.0, 1.0],
                CandidateBuffers::default(),
            );
            let mut candidates = Candidates::new(&logits, &mut buffers).unwrap();
            TopNSigma(sigmas).apply(&mut candidates);
            candidates.iter().map(|c| c.token.0).collect::<Vec<u32>>()
        };
        assert_eq!(kept(0.01), [1]);
        assert_eq!(kept(1.6), [1]);
        assert_eq!(kept(1.61), [1, 3]);
        assert_eq!(kept(2.13), [1, 3]);
        assert_eq!(kept(2.14), [1, 3, 4]);
        assert_eq!(kept(2.7), [0, 1, 3, 4]);
    }

    #[test]
    fn min_p_is_relative_to_the_likeliest() {
        assert_eq!(tokens_after(MinP(0.0)), [0, 1, 2, 3]);
        assert_eq!(tokens_after(MinP(0.24)), [0, 1, 2, 3]);
        assert_eq!(tokens_after(MinP(0.26)), [1, 3]);
        assert_eq!(tokens_after(MinP(0.51)), [1]);
        assert_eq!(tokens_after(MinP(1.0)), [1]);
    }

    #[test]
    fn a_temperature_of_a_half_squares_the_odds() {
        let weights = weights_after(Temperature(0.5), &halves());
        for (got, wanted) in weights.iter().zip([1.0 / 16.0, 1.0, 1.0 / 16.0, 0.25]) {
            assert!((got - wanted).abs() < 1e-6, "{got} {wanted}");
        }
    }

    #[test]
    fn a_tiny_temperature_keeps_numbers() {
        let logits = [f32::MAX, 1.0, f32::NEG_INFINITY];
        let weights = weights_after(Temperature(f32::MIN_POSITIVE), &logits);
        assert_eq!(weights, [1.0, 0.0, 0.0]);
    }
}
