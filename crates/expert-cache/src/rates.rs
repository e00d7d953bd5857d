//! [`UseRates`]: how often each expert of a layer is chosen, as far as its past tells.
//!
//! Routers have favourites that stay, and favourites of a topic that go. Each horizon averages over
//! another length of the past, and those count most that foretold the layer's last choices best:
//! a long one is as good as counting, a short one as good as recency.
//!
//! Invariant: the same choices give the same rates, each between 0 and 1. Knows no bytes.

/// Steps that averages reach back over.
const HORIZONS: [f32; 5] = [3.0, 12.0, 48.0, 256.0, 2048.0];

/// The part of earlier errors that is left after a step.
const KEPT: f32 = 0.99;

/// A horizon counts with this power of the smallest error's part of its own.
const SHARPNESS: i32 = 32;

/// The rates of one layer.
#[derive(Clone, Debug)]
pub(crate) struct UseRates {
    /// `[horizons, experts]`.
    averages: Vec<f32>,
    /// All horizons together, `[experts]`.
    mixed: Vec<f32>,
    /// What each horizon foretold wrongly of the last steps, squared.
    errors: [f32; HORIZONS.len()],
    n_steps: u32,
}

impl UseRates {
    pub(crate) fn new(n_experts: usize) -> Self {
        Self {
            averages: vec![0.0; HORIZONS.len() * n_experts],
            mixed: vec![0.0; n_experts],
            errors: [0.0; HORIZONS.len()],
            n_steps: 0,
        }
    }

    /// The part of the next step's rows that will go through an expert.
    pub(crate) fn of(&self, expert: usize) -> f32 {
        self.mixed.get(expert).copied().unwrap_or(0.0)
    }

    /// Takes the part of a step's rows that went through each expert.
    pub(crate) fn learn(&mut self, parts: &[f32]) {
        self.n_steps = self.n_steps.saturating_add(1);
        let n_experts = self.mixed.len().max(1);
        let horizons = HORIZONS.iter().zip(&mut self.errors);
        for (averages, (horizon, error)) in self.averages.chunks_exact_mut(n_experts).zip(horizons)
        {
            // The mean of all steps, until there are as many as the horizon has.
            let share = 1.0 / horizon.min(self.n_steps as f32);
            *error *= KEPT;
            for (average, part) in averages.iter_mut().zip(parts) {
                let missed = part - *average;
                *error += missed * missed;
                *average += share * missed;
            }
        }
        self.mix(n_experts);
    }

    fn mix(&mut self, n_experts: usize) {
        let least = self.errors.iter().copied().fold(f32::INFINITY, f32::min);
        let weights = self.errors.map(|error| {
            if error > least {
                (least / error).powi(SHARPNESS)
            } else {
                1.0
            }
        });
        let sum: f32 = weights.iter().sum();
        self.mixed.fill(0.0);
        for (averages, weight) in self.averages.chunks_exact(n_experts).zip(weights) {
            for (mixed, average) in self.mixed.iter_mut().zip(averages) {
                *mixed += weight / sum * average;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_follow_what_lasts_and_what_changes() {
        let mut rates = UseRates::new(4);
        for step in 0..3000 {
            let second = if step % 4 == 0 { 1.0 } else { 0.0 };
            rates.learn(&[1.0, second, 0.0, 0.0]);
        }
        assert!(rates.of(0) > 0.99, "{}", rates.of(0));
        assert!((rates.of(1) - 0.25).abs() < 0.1, "{}", rates.of(1));
        assert!(rates.of(2) < 0.01 && rates.of(4) == 0.0);
        // Another topic: the long horizons are wrong from now on.
        for _ in 0..40 {
            rates.learn(&[0.0, 0.0, 1.0, 0.5]);
        }
        assert!(rates.of(0) < 0.1, "{}", rates.of(0));
        assert!(rates.of(2) > 0.9, "{}", rates.of(2));
        assert!((rates.of(3) - 0.5).abs() < 0.1, "{}", rates.of(3));
    }
}
