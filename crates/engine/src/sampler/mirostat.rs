//! Mirostat 2: leaves out tokens that are too surprising, by a limit that follows the text.
//!
//! Invariant: at least one candidate stays, and the limit depends only on the settings, the logits
//! and the tokens that were chosen. Comes after the temperature, and last.

use kv_core::TokenId;

use super::candidates::{Candidate, Candidates, weight};
use super::options::Mirostat;
use super::steps::{Step, TokenOrigin};

/// The limit, and what the last candidates' surprises were.
///
/// The surprise of a token is `-log2 p`. Tokens above the limit `mu` are left out; after a token
/// with the surprise `s` among those that stayed, `mu -= eta * (s - tau)`. It begins at `2 tau`
/// (arXiv:2007.14966, algorithm 2).
#[derive(Clone, Debug)]
pub struct MirostatStep {
    config: Mirostat,
    mu: f64,
    /// Candidates that stayed the last time, by id, with their surprises.
    stayed: Vec<Surprise>,
}

#[derive(Clone, Copy, Debug)]
struct Surprise {
    token: TokenId,
    bits: f64,
}

impl MirostatStep {
    /// For an empty text.
    pub fn new(config: Mirostat) -> Self {
        Self {
            config,
            mu: 2.0 * f64::from(config.tau),
            stayed: Vec::new(),
        }
    }
}

impl Step for MirostatStep {
    fn apply(&mut self, candidates: &mut Candidates<'_>) {
        let Some(best) = candidates.best() else {
            return;
        };
        let best_logit = f64::from(best.logit);
        let total: f64 = candidates.weights().map(|(_, w)| w).sum();
        let bits = |c: &Candidate, total: f64| libm::log2(total / weight(c.logit, best_logit));
        let mu = self.mu;
        candidates.retain(|c| c.token == best.token || bits(c, total) <= mu);
        let total: f64 = candidates.weights().map(|(_, w)| w).sum();
        self.stayed.clear();
        self.stayed.extend(candidates.iter().map(|c| Surprise {
            token: c.token,
            bits: bits(&c, total),
        }));
        self.stayed.sort_unstable_by_key(|s| s.token);
    }

    fn accept(&mut self, token: TokenId, origin: TokenOrigin) {
        if origin == TokenOrigin::Prompt {
            return;
        }
        if let Ok(at) = self.stayed.binary_search_by_key(&token, |s| s.token) {
            let Mirostat { tau, eta } = self.config;
            self.mu -= f64::from(eta) * (self.stayed[at].bits - f64::from(tau));
        }
    }

    fn reset(&mut self) {
        *self = Self::new(self.config);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::sampler::CandidateBuffers;

    fn tokens_after(step: &mut MirostatStep, logits: &[f32]) -> Vec<u32> {
        let mut buffers = CandidateBuffers::default();
        let mut candidates = Candidates::new(logits, &mut buffers).unwrap();
        step.apply(&mut candidates);
        candidates.iter().map(|c| c.token.0).collect()
    }

    fn accept(step: &mut MirostatStep, token: u32) {
        step.accept(TokenId(token), TokenOrigin::Generated);
    }

    /// Surprises of 1, 2, 3 and 3 bits.
    fn halves() -> [f32; 4] {
        [0.5f32, 0.25, 0.125, 0.125].map(f32::ln)
    }

    #[test]
    fn the_limit_by_hand() {
        let config = Mirostat {
            tau: 1.25,
            eta: 0.5,
        };
        let mut step = MirostatStep::new(config);
        // mu = 2.5: tokens of 1 and 2 bits stay, with the probabilities 2/3 and 1/3.
        assert_eq!(tokens_after(&mut step, &halves()), [0, 1]);
        accept(&mut step, 1);
        // The surprise was log2 3 = 1.585; mu = 2.5 - 0.5 (1.585 - 1.25) = 2.3325.
        assert!((step.mu - 2.332_518_75).abs() < 1e-6, "{}", step.mu);
        assert_eq!(tokens_after(&mut step, &halves()), [0, 1]);
        accept(&mut step, 0);
        // log2 1.5 = 0.585; mu = 2.3325 + 0.5 * 0.665 = 2.665.
        assert!((step.mu - 2.665_037_5).abs() < 1e-6, "{}", step.mu);
        // A token of a prompt, and one that was no candidate, change nothing.
        step.accept(TokenId(0), TokenOrigin::Prompt);
        accept(&mut step, 3);
        assert!((step.mu - 2.665_037_5).abs() < 1e-6, "{}", step.mu);
        step.reset();
        assert!((step.mu - 2.5).abs() < 1e-12);
    }

    #[test]
    fn the_likeliest_stays_below_every_limit() {
        let mut step = MirostatStep::new(Mirostat { tau: 0.1, eta: 0.0 });
        assert_eq!(tokens_after(&mut step, &halves()), [0]);
        let out = f32::NEG_INFINITY;
        assert_eq!(tokens_after(&mut step, &[out, 0.0, 0.0]), [1]);
    }

    #[test]
    fn a_token_at_the_limit_stays() {
        let mut step = MirostatStep::new(Mirostat { tau: 0.5, eta: 0.1 });
        assert_eq!(tokens_after(&mut step, &[0.0; 2]), [0, 1]);
    }

    #[test]
    fn the_limit_follows_tokens_in_any_order() {
        let (logits, mut buffers) = ([0.0, 1.0, 2.0, 3.0], CandidateBuffers::default());
        let mut step = MirostatStep::new(Mirostat { tau: 5.0, eta: 0.1 });
        let mut candidates = Candidates::new(&logits, &mut buffers).unwrap();
        candidates.keep_top(3);
        step.apply(&mut candidates);
        for token in 1..4 {
            let before = step.mu;
            accept(&mut step, token);
            assert!(step.mu > before, "token {token}");
        }
    }

    proptest! {
        /// Algorithm 2 as it is written, on probabilities.
        #[test]
        fn mirostat_is_its_definition(
            texts in prop::collection::vec((prop::collection::vec(-6f32..6.0, 8), 0usize..8), 1..20),
            tau in 0.5f32..4.0,
            eta in 0f32..1.0,
        ) {
            let mut step = MirostatStep::new(Mirostat { tau, eta });
            let mut mu = 2.0 * f64::from(tau);
            for (logits, choice) in texts {
                let total: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
                let p = |i: usize| f64::from(logits[i]).exp() / total;
                prop_assume!((0..8).all(|i| (-p(i).log2() - mu).abs() > 1e-6));
                let mut kept: Vec<usize> = (0..8).filter(|&i| -p(i).log2() <= mu).collect();
                if kept.is_empty() {
                    let best = (0..8).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
                    kept.push(best);
                }
                let got = tokens_after(&mut step, &logits);
                prop_assert_eq!(&got, &kept.iter().map(|&i| i as u32).collect::<Vec<_>>());
                let chosen = kept[choice % kept.len()];
                let kept_total: f64 = kept.iter().map(|&i| p(i)).sum();
                mu -= f64::from(eta) * (-(p(chosen) / kept_total).log2() - f64::from(tau));
                accept(&mut step, chosen as u32);
                prop_assert!((step.mu - mu).abs() < 1e-9, "{} {}", step.mu, mu);
            }
        }
    }
}
