//! [`RelativeBias`]: what attention scores get added by the distance of query and key, in buckets.
//!
//! Biases of buckets as in T5 (Raffel et al., arXiv 1910.10683), and scores of queries and keys
//! with buckets as in DeBERTa (He et al., arXiv 2006.03654). Knows nothing of how scores are
//! computed.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The bias on scores by the distance of query and key.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RelativeBias {
    /// The distances that share a bucket.
    pub buckets: DistanceBuckets,
    /// The bias of a bucket.
    pub scores: RelativeScores,
}

/// The bias that a bucket adds to the score of a query and a key.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RelativeScores {
    /// A number for each head, the same for all tokens: weight `[buckets, heads]`.
    Weight(String),
    /// The sum of a number of the query's and one of the key's: operands
    /// `[n, heads, buckets]` and `[n, kv_heads, buckets]`.
    Tables,
}

/// The assignment of distances between a query's and a key's position to buckets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum DistanceBuckets {
    /// As in T5, for both directions: a quarter of the buckets are single distances to earlier
    /// keys, a quarter grow with the logarithm up to `max_distance`, and as many are for later
    /// keys.
    Halves {
        /// Number of buckets; a multiple of 4.
        n: usize,
        /// From which distance on all share the last bucket.
        max_distance: usize,
    },
    /// As in T5's decoder, for earlier keys alone: half of the buckets are single distances, the
    /// others grow with the logarithm up to `max_distance`. Later keys share the first.
    Earlier {
        /// Number of buckets; a multiple of 2.
        n: usize,
        /// From which distance on all share the last bucket.
        max_distance: usize,
    },
    /// As in DeBERTa: of `2 span` buckets in the order of distances, those of less than half a span
    /// are single distances, and the others grow with the logarithm up to `max_distance`.
    Signed {
        /// Buckets of either direction; at least 4.
        span: usize,
        /// The distance at which the last bucket begins.
        max_distance: usize,
    },
    /// The same with single distances alone.
    Single {
        /// Buckets of either direction.
        span: usize,
    },
}

/// The bucket of every distance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketTable {
    /// Beyond this, distances of one sign share a bucket.
    reach: u32,
    /// Of the distances `-reach..=reach`.
    buckets: Vec<u32>,
}

impl fmt::Display for DistanceBuckets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Halves { n, max_distance } => write!(f, "halves({n}, {max_distance})"),
            Self::Earlier { n, max_distance } => write!(f, "earlier({n}, {max_distance})"),
            Self::Signed { span, max_distance } => write!(f, "signed({span}, {max_distance})"),
            Self::Single { span } => write!(f, "single({span})"),
        }
    }
}

impl DistanceBuckets {
    /// Number of buckets.
    pub fn n(self) -> usize {
        match self {
            Self::Halves { n, .. } | Self::Earlier { n, .. } => n,
            Self::Signed { span, .. } | Self::Single { span } => span.saturating_mul(2),
        }
    }

    /// True if the numbers fit together.
    pub fn is_sound(self) -> bool {
        // The table of all distances stays small.
        const MAX_REACH: usize = 1 << 20;
        match self {
            Self::Halves { n, max_distance } => {
                n >= 4 && n.is_multiple_of(4) && (n / 4 + 1..=MAX_REACH).contains(&max_distance)
            }
            Self::Earlier { n, max_distance } => {
                n >= 2 && n.is_multiple_of(2) && (n / 2 + 1..=MAX_REACH).contains(&max_distance)
            }
            Self::Signed { span, max_distance } => {
                span >= 4 && (span / 2 + 2..=MAX_REACH).contains(&max_distance)
            }
            Self::Single { span } => (1..=MAX_REACH).contains(&span),
        }
    }

    /// The bucket of a query's position less a key's.
    pub fn of(self, distance: i64) -> usize {
        let size = distance.unsigned_abs() as usize;
        match self {
            Self::Halves { n, max_distance } => {
                let first = if distance < 0 { n / 2 } else { 0 };
                first + growing(size, n / 2, max_distance)
            }
            Self::Earlier { n, max_distance } => {
                if distance < 0 {
                    0
                } else {
                    growing(size, n, max_distance)
                }
            }
            Self::Signed { span, max_distance } => {
                let middle = span / 2;
                let bucket = if size <= middle {
                    size as i64
                } else {
                    let of = |x: f32| (x / middle as f32).ln();
                    let grown = of(size as f32) / of((max_distance - 1) as f32);
                    (grown * (middle - 1) as f32).ceil() as i64 + middle as i64
                };
                clamped(distance.signum() * bucket, span)
            }
            Self::Single { span } => clamped(distance, span),
        }
    }

    /// The bucket of every distance.
    pub fn table(self) -> BucketTable {
        let reach = match self {
            Self::Halves { max_distance, .. }
            | Self::Earlier { max_distance, .. }
            | Self::Signed { max_distance, .. } => max_distance,
            Self::Single { span } => span,
        };
        let reach = u32::try_from(reach).unwrap_or(u32::MAX);
        let distances = -i64::from(reach)..=i64::from(reach);
        BucketTable {
            reach,
            buckets: distances.map(|d| self.of(d) as u32).collect(),
        }
    }
}

/// Of `n` buckets, the first half of which are single distances, that of `size`.
fn growing(size: usize, n: usize, max_distance: usize) -> usize {
    let exact = n / 2;
    if size < exact {
        return size;
    }
    // In the arithmetic of the published code, whose rounding decides.
    let scale = (max_distance as f64 / exact as f64).ln() as f32;
    let grown = (size as f32 / exact as f32).ln() / scale * (n - exact) as f32;
    (exact + grown as usize).min(n - 1)
}

fn clamped(bucket: i64, span: usize) -> usize {
    let last = 2 * span as i64 - 1;
    (bucket + span as i64).clamp(0, last) as usize
}

impl BucketTable {
    /// Beyond this, distances of one sign share a bucket.
    pub fn reach(&self) -> u32 {
        self.reach
    }

    /// The buckets of the distances from `-reach` to `reach`.
    pub fn buckets(&self) -> &[u32] {
        &self.buckets
    }

    /// The bucket of a query and a key.
    #[inline]
    pub fn of(&self, query: u32, key: u32) -> usize {
        let distance = i64::from(query) - i64::from(key);
        let reach = i64::from(self.reach);
        let at = distance.clamp(-reach, reach) + reach;
        self.buckets.get(at as usize).map_or(0, |&b| b as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_are_those_of_the_published_code() {
        let buckets = DistanceBuckets::Halves {
            n: 32,
            max_distance: 128,
        };
        let of = |distances: &[i64]| -> Vec<usize> {
            distances.iter().map(|&d| buckets.of(d)).collect()
        };
        assert_eq!(of(&[0, 1, 7, 8, 11, 12, 16]), [0, 1, 7, 8, 8, 9, 10]);
        assert_eq!(of(&[64, 90, 91, 127, 128, 9999]), [14, 14, 15, 15, 15, 15]);
        assert_eq!(of(&[-1, -7, -8, -64, -128]), [17, 23, 24, 30, 31]);
    }

    #[test]
    fn those_of_earlier_keys_are_all_for_one_direction() {
        let buckets = DistanceBuckets::Earlier {
            n: 32,
            max_distance: 128,
        };
        let all: Vec<usize> = [0, 1, 15, 16, 18, 19, 64, 113, 127, 128, 9999]
            .map(|d| buckets.of(d))
            .into();
        assert_eq!(all, [0, 1, 15, 16, 16, 17, 26, 31, 31, 31, 31]);
        assert_eq!([-1, -100].map(|d| buckets.of(d)), [0, 0]);
    }

    #[test]
    fn signed_ones_too() {
        let buckets = DistanceBuckets::Signed {
            span: 8,
            max_distance: 64,
        };
        let of = |d: i64| buckets.of(d) as i64 - 8;
        let all: Vec<i64> = [0, 1, 4, 5, 10, 11, 25, 26, 63].map(of).into();
        assert_eq!(all, [0, 1, 4, 5, 5, 6, 6, 7, 7]);
        assert_eq!([-1, -4, -5, -63, -64].map(of), [-1, -4, -5, -7, -8]);
        assert_eq!([64, 1000, -1000].map(of), [7, 7, -8]);
    }

    #[test]
    fn a_table_says_the_same() {
        for buckets in [
            DistanceBuckets::Halves {
                n: 8,
                max_distance: 20,
            },
            DistanceBuckets::Earlier {
                n: 6,
                max_distance: 20,
            },
            DistanceBuckets::Signed {
                span: 8,
                max_distance: 64,
            },
            DistanceBuckets::Single { span: 5 },
        ] {
            assert!(buckets.is_sound());
            let table = buckets.table();
            for distance in -200i64..200 {
                let (query, key) = (500, (500 - distance) as u32);
                assert_eq!(table.of(query, key), buckets.of(distance), "{buckets}");
                assert!(buckets.of(distance) < buckets.n());
            }
        }
    }

    #[test]
    fn numbers_that_do_not_fit() {
        for buckets in [
            DistanceBuckets::Halves {
                n: 30,
                max_distance: 128,
            },
            DistanceBuckets::Halves {
                n: 32,
                max_distance: 8,
            },
            DistanceBuckets::Earlier {
                n: 7,
                max_distance: 20,
            },
            DistanceBuckets::Signed {
                span: 2,
                max_distance: 64,
            },
            DistanceBuckets::Signed {
                span: 8,
                max_distance: 5,
            },
            DistanceBuckets::Single { span: 0 },
        ] {
            assert!(!buckets.is_sound(), "{buckets}");
        }
    }

    #[test]
    fn the_fewest_buckets_and_the_shortest_distances() {
        let halves = |n, max_distance| DistanceBuckets::Halves { n, max_distance }.is_sound();
        let earlier = |n, max_distance| DistanceBuckets::Earlier { n, max_distance }.is_sound();
        let signed = |span, max_distance| DistanceBuckets::Signed { span, max_distance }.is_sound();
        assert!(halves(4, 2) && halves(8, 3) && !halves(8, 2) && !halves(0, 5));
        assert!(earlier(2, 2) && earlier(8, 5) && !earlier(8, 4) && !earlier(0, 5));
        assert!(signed(4, 4) && signed(8, 6) && !signed(8, 5) && !signed(3, 9));
        assert!(DistanceBuckets::Single { span: 1 }.is_sound());
        let single = DistanceBuckets::Single { span: 5 };
        assert_eq!(single.table().reach(), 5);
    }
}
