//! [`Random`]: random numbers as C++'s standard library makes them from a seed.
//!
//! Invariant: a seed gives the numbers that it gives llama.cpp: a Mersenne Twister, and libstdc++'s
//! distributions over it.

use cellar_engine::sampler::random_seed;
use rand_mt::Mt;

use crate::abi::{DEFAULT_SEED, TokenData};

/// A stream of random numbers.
#[derive(Clone)]
pub(super) struct Random {
    wanted: u32,
    seed: u32,
    twister: Mt,
}

impl Random {
    /// From a seed; [`DEFAULT_SEED`] takes another one each time.
    pub(super) fn new(wanted: u32) -> Self {
        let seed = match wanted {
            DEFAULT_SEED => random_seed() as u32,
            seed => seed,
        };
        Self {
            wanted,
            seed,
            twister: Mt::new(seed),
        }
    }

    /// Begins anew.
    pub(super) fn reset(&mut self) {
        *self = Self::new(self.wanted);
    }

    /// The seed that is in use.
    pub(super) fn seed(&self) -> u32 {
        self.seed
    }

    /// A number in `0..1`.
    pub(super) fn unit(&mut self) -> f64 {
        let low = f64::from(self.twister.next_u32());
        let high = f64::from(self.twister.next_u32());
        let unit = (low + high * 4_294_967_296.0) / 18_446_744_073_709_551_616.0;
        unit.min(1.0_f64.next_down())
    }

    /// A number in `0..1`, of half the width.
    pub(super) fn unit_f32(&mut self) -> f32 {
        let unit = self.twister.next_u32() as f32 / 4_294_967_296.0;
        unit.min(1.0_f32.next_down())
    }

    /// The index of a candidate, by its probability.
    pub(super) fn draw(&mut self, tokens: &[TokenData]) -> usize {
        if tokens.len() < 2 {
            return 0;
        }
        let total: f64 = tokens.iter().map(|token| f64::from(token.p)).sum();
        let unit = self.unit();
        let mut sum = 0.0;
        let reached = tokens.iter().position(|token| {
            sum += f64::from(token.p) / total;
            sum >= unit
        });
        reached.unwrap_or(tokens.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_numbers_of_libstdcxx() {
        // The 10,000th number of the seed 5489 is fixed by the C++ standard.
        let mut twister = Mt::new(5489);
        let last = (0..10_000).map(|_| twister.next_u32()).last();
        assert_eq!(last, Some(4_123_659_995));
        // `std::uniform_real_distribution<double>(0, 1)` over `std::mt19937(5489)`.
        let mut random = Random::new(5489);
        assert!((random.unit() - 0.135_477_004_296_780_5).abs() < 1e-15);
        assert_eq!(random.seed(), 5489);
    }
}
