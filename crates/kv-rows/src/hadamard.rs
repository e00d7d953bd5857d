//! [`HeadRotation`]: a rotation of the heads of stored rows, which spreads outliers over many
//! values before they are quantised.
//!
//! The rotation is a Walsh-Hadamard transform of groups of `2^k` values, divided by `sqrt(2^k)`:
//! orthogonal and its own inverse, so dot products of two rotated vectors are those of the vectors
//! themselves (QuaRot: Ashkboos et al., arXiv 2404.00456). Invariant: every sum is one of two
//! values in a fixed order, so the same bits come out whichever instructions compute it. Knows
//! nothing of storage types.

use serde::{Deserialize, Serialize};

/// The longest group: what a rotation needs of memory is bounded.
pub const MAX_GROUP: usize = 256;

/// The shortest group: a block of the quantised types.
const MIN_GROUP: usize = 32;

/// The way heads are rotated before they are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HeadRotation {
    /// Not at all.
    #[default]
    None,
    /// Groups of this many values of a head are transformed: a power of two that divides the head,
    /// at most [`MAX_GROUP`].
    Hadamard {
        /// Values of a group.
        group: usize,
    },
}

impl HeadRotation {
    /// The rotation that suits heads of `dim` values: groups as long as `dim` allows, or none where
    /// it has no power of two of at least 32 as a factor.
    pub const fn for_dim(dim: usize) -> Self {
        if dim == 0 {
            return Self::None;
        }
        let group = 1 << dim.trailing_zeros();
        match group {
            0..MIN_GROUP => Self::None,
            MIN_GROUP..=MAX_GROUP => Self::Hadamard { group },
            _ => Self::Hadamard { group: MAX_GROUP },
        }
    }

    /// Values that are transformed together; 1 where nothing is.
    pub const fn group(self) -> usize {
        match self {
            Self::None => 1,
            Self::Hadamard { group } => group,
        }
    }

    /// True if nothing is transformed.
    pub const fn is_none(self) -> bool {
        matches!(self, Self::None)
    }

    /// Rotates heads, or rotates them back: it is its own inverse. `values` are whole groups.
    pub fn apply(self, values: &mut [f32]) {
        let Self::Hadamard { group } = self else {
            return;
        };
        debug_assert!(group.is_power_of_two() && values.len().is_multiple_of(group));
        for values in values.chunks_exact_mut(group.max(1)) {
            transform(values);
        }
    }
}

/// `H x / sqrt(n)` in place, where `H` is the Hadamard matrix in Sylvester's order.
fn transform(values: &mut [f32]) {
    let n = values.len();
    let mut half = 1;
    while half < n {
        for pair in values.chunks_exact_mut(2 * half) {
            let (low, high) = pair.split_at_mut(half);
            for (low, high) in low.iter_mut().zip(high) {
                (*low, *high) = (*low + *high, *low - *high);
            }
        }
        half *= 2;
    }
    let scale = 1.0 / (n as f32).sqrt();
    values.iter_mut().for_each(|v| *v *= scale);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wave(n: usize) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * 1.7).sin() + 0.1).collect()
    }

    #[test]
    fn groups_are_the_powers_of_two_in_a_head() {
        let groups = [1, 16, 31, 32, 64, 80, 96, 128, 192, 256, 512, 576].map(|dim| {
            let rotation = HeadRotation::for_dim(dim);
            assert_eq!(rotation.is_none(), rotation.group() == 1);
            rotation.group()
        });
        assert_eq!(groups, [1, 1, 1, 32, 64, 1, 32, 128, 64, 256, 256, 64]);
        assert!(HeadRotation::for_dim(0).is_none());
    }

    /// Entry `(i, j)` of the matrix is `(-1)^popcount(i & j)`.
    #[test]
    fn it_is_the_hadamard_matrix() {
        for n in [32, 64, 256] {
            let x = wave(n);
            let mut got = x.clone();
            HeadRotation::Hadamard { group: n }.apply(&mut got);
            for (i, got) in got.iter().enumerate() {
                let sign = |j: usize| {
                    if (i & j).count_ones().is_multiple_of(2) {
                        1.0
                    } else {
                        -1.0
                    }
                };
                let sum: f64 = x
                    .iter()
                    .enumerate()
                    .map(|(j, x)| sign(j) * f64::from(*x))
                    .sum();
                let wanted = sum / (n as f64).sqrt();
                assert!(
                    (f64::from(*got) - wanted).abs() < 1e-5,
                    "{n}, {i}: {got} {wanted}"
                );
            }
        }
    }

    #[test]
    fn it_is_its_own_inverse_and_keeps_dot_products() {
        for dim in [32, 64, 96, 128, 576] {
            let rotation = HeadRotation::for_dim(dim);
            let (x, y) = (wave(dim), wave(2 * dim)[dim..].to_vec());
            let (mut rx, mut ry) = (x.clone(), y.clone());
            rotation.apply(&mut rx);
            rotation.apply(&mut ry);
            assert_ne!(x, rx);
            let dot = |a: &[f32], b: &[f32]| -> f64 {
                a.iter()
                    .zip(b)
                    .map(|(a, b)| f64::from(*a) * f64::from(*b))
                    .sum()
            };
            assert!((dot(&x, &y) - dot(&rx, &ry)).abs() < 1e-4, "{dim}");
            rotation.apply(&mut rx);
            for (back, x) in rx.iter().zip(&x) {
                assert!((back - x).abs() < 1e-6, "{dim}: {back}, not {x}");
            }
        }
    }

    #[test]
    fn an_outlier_is_spread() {
        let mut x = [0.0; 64];
        x[17] = 8.0;
        HeadRotation::for_dim(64).apply(&mut x);
        assert!(x.iter().all(|v| v.abs() == 1.0));
    }
}
