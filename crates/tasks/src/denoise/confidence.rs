//! How sure a model is of the token for a mask.
//!
//! Invariant: a larger number is surer. Sums are in f64. Knows no text.

use kv_core::TokenId;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::Rng;

use super::options::FillOrder;

impl FillOrder {
    /// How sure the model is that `token` is behind a mask with these logits, `[vocab]`, whatever
    /// the temperature is that it was chosen with.
    pub(super) fn confidence(self, logits: &[f32], token: TokenId, rng: &mut ChaCha8Rng) -> f64 {
        match self {
            Self::Random => rng.next_u32().into(),
            Self::Confidence => {
                let chosen = logits.get(token.as_usize()).copied();
                Softmax::new(logits).probability(chosen.unwrap_or(f32::NEG_INFINITY))
            }
            Self::Margin => {
                let softmax = Softmax::new(logits);
                let [first, second] = two_largest(logits).map(|logit| softmax.probability(logit));
                first - second
            }
            Self::Entropy => {
                let softmax = Softmax::new(logits);
                let probabilities = logits.iter().map(|&logit| softmax.probability(logit));
                probabilities.filter(|&p| p > 0.0).map(|p| p * p.ln()).sum()
            }
        }
    }
}

/// The softmax of a row.
struct Softmax {
    largest: f64,
    sum: f64,
}

impl Softmax {
    fn new(logits: &[f32]) -> Self {
        let largest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        let sum = logits
            .iter()
            .map(|&logit| (f64::from(logit) - largest).exp())
            .sum();
        Self { largest, sum }
    }

    fn probability(&self, logit: f32) -> f64 {
        (f64::from(logit) - self.largest).exp() / self.sum
    }
}

fn two_largest(logits: &[f32]) -> [f32; 2] {
    let mut two = [f32::NEG_INFINITY; 2];
    for &logit in logits {
        if logit > two[0] {
            two = [logit, two[0]];
        } else if logit > two[1] {
            two[1] = logit;
        }
    }
    two
}

#[cfg(test)]
mod tests {
    use rand_chacha::rand_core::SeedableRng;

    use super::*;

    /// Probabilities 1/2, 1/4, 1/8, 1/8.
    #[test]
    fn orders_measure_what_they_say() {
        let logits = [3.0f32, 2.0, 1.0, 1.0].map(|power| power * std::f32::consts::LN_2);
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let mut of = |order: FillOrder, token| order.confidence(&logits, TokenId(token), &mut rng);
        assert!((of(FillOrder::Confidence, 1) - 0.25).abs() < 1e-6);
        assert!((of(FillOrder::Margin, 3) - 0.25).abs() < 1e-6);
        // 1/2 + 1/2 + 3/8 + 3/8 bits.
        let nats = -1.75 * std::f64::consts::LN_2;
        assert!((of(FillOrder::Entropy, 0) - nats).abs() < 1e-6);
        assert_ne!(of(FillOrder::Random, 0), of(FillOrder::Random, 0));
    }
}
