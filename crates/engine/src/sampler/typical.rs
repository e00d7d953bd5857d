//! Locally typical sampling and XTC: selections that do not keep the most probable tokens.
//!
//! Invariant: at least one candidate stays, and the same logits leave the same tokens on every
//! platform. XTC's chance is drawn once for each token of the text, not each time the step is
//! applied.

use kv_core::TokenId;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

use super::candidates::{Candidate, Candidates, likeliest_first, weight};
use super::options::Xtc;
use super::steps::{Step, TokenOrigin};
use super::unit;

/// The stream of random numbers that XTC draws from; the draws of tokens take stream 0.
const XTC_STREAM: u64 = 1;

/// Keeps the tokens whose surprise `-ln p` is nearest to the entropy `H = -Σ p ln p`, until their
/// probabilities together reach this (locally typical sampling, arXiv:2202.00666, section 4).
#[derive(Clone, Debug)]
pub struct Typical {
    p: f32,
    /// Kept from one token to the next.
    atypical: Vec<Distance>,
    kept: Vec<TokenId>,
}

/// How far a candidate is from being typical.
#[derive(Clone, Copy, Debug)]
struct Distance {
    candidate: Candidate,
    probability: f64,
    /// `|-ln p - H|`.
    distance: f64,
}

impl Typical {
    /// Keeps this part of the probability.
    pub fn new(p: f32) -> Self {
        Self {
            p,
            atypical: Vec::new(),
            kept: Vec::new(),
        }
    }
}

impl Step for Typical {
    fn apply(&mut self, candidates: &mut Candidates<'_>) {
        let total: f64 = candidates.weights().map(|(_, w)| w).sum();
        let Some(best) = candidates.best().map(|c| f64::from(c.logit)) else {
            return;
        };
        // -ln p = ln Σw - ln w, and ln w = logit - best.
        let ln_total = libm::log(total);
        let surprise = |c: &Candidate| ln_total - (f64::from(c.logit) - best);
        self.atypical.clear();
        let mut entropy = 0.0;
        for candidate in candidates.iter() {
            let probability = weight(candidate.logit, best) / total;
            if probability > 0.0 {
                let distance = surprise(&candidate);
                entropy += probability * distance;
                self.atypical.push(Distance {
                    candidate,
                    probability,
                    distance,
                });
            }
        }
        for entry in &mut self.atypical {
            entry.distance = (entry.distance - entropy).abs();
        }
        self.atypical.sort_unstable_by(|a, b| {
            let by_distance = a.distance.total_cmp(&b.distance);
            by_distance.then(likeliest_first(&a.candidate, &b.candidate))
        });
        self.kept.clear();
        let (wanted, mut sum) = (f64::from(self.p), 0.0);
        for entry in &self.atypical {
            self.kept.push(entry.candidate.token);
            sum += entry.probability;
            if sum >= wanted {
                break;
            }
        }
        self.kept.sort_unstable();
        candidates.retain(|c| self.kept.binary_search(&c.token).is_ok());
    }
}

/// Now and then excludes the most probable tokens, see [`Xtc`].
#[derive(Clone, Debug)]
pub struct XtcStep {
    config: Xtc,
    seed: u64,
    rng: ChaCha8Rng,
    /// Drawn for the next token of the text, in `0..1`.
    chance: f64,
}

impl XtcStep {
    /// For an empty text. The chances depend on the seed alone, and not on the draws of tokens.
    pub fn new(config: Xtc, seed: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(XTC_STREAM);
        let chance = unit(&mut rng);
        Self {
            config,
            seed,
            rng,
            chance,
        }
    }
}

impl Step for XtcStep {
    fn apply(&mut self, candidates: &mut Candidates<'_>) {
        if self.chance >= f64::from(self.config.probability) {
            return;
        }
        let Some(best) = candidates.best().map(|c| f64::from(c.logit)) else {
            return;
        };
        let total: f64 = candidates.weights().map(|(_, w)| w).sum();
        let wanted = f64::from(self.config.threshold) * total;
        let is_top = |c: &Candidate| {
            let weight = weight(c.logit, best);
            weight > 0.0 && weight >= wanted
        };
        let Some(stays) = candidates.iter().filter(is_top).max_by(likeliest_first) else {
            return;
        };
        candidates.retain(|c| c.token == stays.token || !is_top(c));
    }

    fn accept(&mut self, _token: TokenId, origin: TokenOrigin) {
        if origin == TokenOrigin::Generated {
            self.chance = unit(&mut self.rng);
        }
    }

    fn reset(&mut self) {
        *self = Self::new(self.config, self.seed);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::sampler::CandidateBuffers;

    fn tokens_after(step: &mut dyn Step, logits: &[f32]) -> Vec<u32> {
        let mut buffers = CandidateBuffers::default();
        let mut candidates = Candidates::new(logits, &mut buffers).unwrap();
        step.apply(&mut candidates);
        candidates.iter().map(|c| c.token.0).collect()
    }

    fn xtc(probability: f32, threshold: f32) -> XtcStep {
        let config = Xtc {
            probability,
            threshold,
        };
        XtcStep::new(config, 7)
    }

    #[test]
    fn typical_tokens_by_hand() {
        // Probabilities 0.5, 0.25, 0.125, 0.125: H = 0.5 ln 2 + 0.25 ln 4 + 0.25 ln 8 = 1.75 ln 2.
        // Surprises in units of ln 2: 1, 2, 3, 3; distances from 1.75: 0.75, 0.25, 1.25, 1.25.
        let logits = [0.5f32, 0.25, 0.125, 0.125].map(f32::ln);
        let kept = |p| tokens_after(&mut Typical::new(p), &logits);
        assert_eq!(kept(0.0), [1]);
        assert_eq!(kept(0.24), [1]);
        assert_eq!(kept(0.26), [0, 1]);
        assert_eq!(kept(0.74), [0, 1]);
        assert_eq!(kept(0.76), [0, 1, 2]);
        assert_eq!(kept(0.88), [0, 1, 2, 3]);
    }

    #[test]
    fn typical_keeps_one_of_one_and_ignores_what_is_excluded() {
        let out = f32::NEG_INFINITY;
        assert_eq!(tokens_after(&mut Typical::new(0.5), &[out, 1.0, out]), [1]);
        assert_eq!(tokens_after(&mut Typical::new(0.0), &[2.0]), [0]);
    }

    #[test]
    fn xtc_leaves_the_least_probable_of_the_top_choices() {
        let logits = [0.4f32, 0.3, 0.2, 0.1].map(f32::ln);
        let kept = |threshold| tokens_after(&mut xtc(1.0, threshold), &logits);
        assert_eq!(kept(0.19), [2, 3]);
        assert_eq!(kept(0.29), [1, 2, 3]);
        // A single top choice stays.
        assert_eq!(kept(0.35), [0, 1, 2, 3]);
        assert_eq!(kept(0.5), [0, 1, 2, 3]);
        assert_eq!(kept(0.0), [3]);
        // Of equal ones the larger id is the less likely, as everywhere.
        assert_eq!(tokens_after(&mut xtc(1.0, 0.1), &[0.0; 4]), [3]);
        assert_eq!(tokens_after(&mut xtc(0.0, 0.1), &logits), [0, 1, 2, 3]);
    }

    #[test]
    fn shares_that_are_reached_exactly_count() {
        let equal = [0.0; 4];
        let mut typical = Typical::new(0.5);
        assert_eq!(tokens_after(&mut typical, &equal), [0, 1]);
        // The tokens before do not count.
        let out = f32::NEG_INFINITY;
        assert_eq!(tokens_after(&mut typical, &[out, out, 0.0, out]), [2]);
        assert_eq!(tokens_after(&mut typical, &equal), [0, 1]);
        assert_eq!(tokens_after(&mut xtc(1.0, 0.25), &equal), [3]);
        // An excluded token is no top choice.
        assert_eq!(tokens_after(&mut xtc(1.0, 0.0), &[1.0, 0.5, out]), [1, 2]);
    }

    #[test]
    fn xtc_draws_from_a_stream_of_its_own() {
        let mut step = xtc(0.25, 0.1);
        assert_ne!(step.chance, unit(&mut ChaCha8Rng::seed_from_u64(7)));
        step.chance = 0.25;
        assert_eq!(tokens_after(&mut step, &[0.0; 2]), [0, 1]);
    }

    #[test]
    fn xtc_acts_as_often_as_its_probability_once_for_each_token() {
        let mut step = xtc(0.25, 0.1);
        let logits = [0.6f32, 0.4].map(f32::ln);
        let (mut n_acted, n) = (0, 4_000);
        let mut pattern = Vec::new();
        for _ in 0..n {
            let first = tokens_after(&mut step, &logits);
            assert_eq!(tokens_after(&mut step, &logits), first, "the same token");
            n_acted += usize::from(first == [1]);
            pattern.push(first);
            step.accept(TokenId(0), TokenOrigin::Generated);
        }
        // Five standard deviations of a fair count are 137.
        assert!(n_acted.abs_diff(n / 4) < 137, "{n_acted}");
        step.reset();
        for first in &pattern[..64] {
            assert_eq!(&tokens_after(&mut step, &logits), first);
            step.accept(TokenId(1), TokenOrigin::Prompt);
            assert_eq!(
                &tokens_after(&mut step, &logits),
                first,
                "a token of a prompt"
            );
            step.accept(TokenId(1), TokenOrigin::Generated);
        }
    }

    /// Probabilities of small whole odds, which are exact enough to compare.
    fn odds() -> impl Strategy<Value = Vec<u32>> {
        prop::collection::vec(0u32..20, 2..40)
            .prop_filter("one is possible", |odds| odds.iter().any(|&o| o > 0))
    }

    fn logits_of(odds: &[u32]) -> Vec<f32> {
        odds.iter().map(|&o| (o as f32).ln()).collect()
    }

    proptest! {
        /// The definition: sort by distance from the entropy, take the shortest prefix.
        #[test]
        fn typical_is_its_definition(odds in odds(), p in 0f32..1.0) {
            let total: f64 = odds.iter().map(|&o| f64::from(o)).sum();
            let p_of = |i: usize| f64::from(odds[i]) / total;
            let possible: Vec<usize> = (0..odds.len()).filter(|&i| odds[i] > 0).collect();
            let entropy: f64 = possible.iter().map(|&i| -p_of(i) * p_of(i).ln()).sum();
            let mut sorted = possible.clone();
            sorted.sort_by(|&a, &b| {
                let distance = |i: usize| (-p_of(i).ln() - entropy).abs();
                distance(a).partial_cmp(&distance(b)).unwrap()
            });
            let got = tokens_after(&mut Typical::new(p), &logits_of(&odds));
            // Where sums or distances are too near to tell, two answers are right.
            let mut sum = 0.0;
            let mut n = 0;
            while n < sorted.len() && sum < f64::from(p) {
                sum += p_of(sorted[n]);
                n += 1;
            }
            let n = n.max(1);
            prop_assume!((sum - f64::from(p)).abs() > 1e-6);
            let before = sum - p_of(sorted[n - 1]);
            prop_assume!((before - f64::from(p)).abs() > 1e-6);
            let distance = |i: usize| (-p_of(i).ln() - entropy).abs();
            prop_assume!(n == sorted.len() || distance(sorted[n]) - distance(sorted[n - 1]) > 1e-5);
            let mut wanted: Vec<u32> = sorted[..n].iter().map(|&i| i as u32).collect();
            wanted.sort_unstable();
            prop_assert_eq!(got, wanted);
        }

        /// The definition: sort by probability, drop the top choices but the last.
        #[test]
        fn xtc_is_its_definition(odds in odds(), threshold in 0.01f32..0.6) {
            let total: f64 = odds.iter().map(|&o| f64::from(o)).sum();
            let share = |i: usize| f64::from(odds[i]) / total;
            let near = (0..odds.len()).any(|i| (share(i) - f64::from(threshold)).abs() < 1e-6);
            prop_assume!(!near);
            let mut sorted: Vec<usize> = (0..odds.len()).collect();
            sorted.sort_by(|&a, &b| odds[b].cmp(&odds[a]).then(a.cmp(&b)));
            let n_top = sorted.iter().filter(|&&i| share(i) >= f64::from(threshold)).count();
            let mut wanted: Vec<u32> = sorted[n_top.max(1) - 1..].iter().map(|&i| i as u32).collect();
            wanted.sort_unstable();
            prop_assert_eq!(tokens_after(&mut xtc(1.0, threshold), &logits_of(&odds)), wanted);
        }
    }
}
