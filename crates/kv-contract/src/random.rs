//! [`Random`]: a small generator with a seed, so that every failure can be repeated.
//!
//! SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).

/// A stream of pseudorandom numbers.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The stream of this seed.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// 64 random bits.
    pub const fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`; 0 where `n` is 0.
    pub const fn below(&mut self, n: usize) -> usize {
        match n {
            0 => 0,
            _ => (self.bits() % n as u64) as usize,
        }
    }

    /// A value in `[-1, 1)`.
    pub const fn value(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    }

    /// `n` values in `[-1, 1)`.
    pub fn values(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.value()).collect()
    }

    /// The numbers below `n` in random order.
    pub fn permutation(&mut self, n: usize) -> Vec<u32> {
        let mut numbers: Vec<u32> = (0..n as u32).collect();
        for at in (1..n).rev() {
            numbers.swap(at, self.below(at + 1));
        }
        numbers
    }
}
