//! [`KvType`]: how one K or V row is stored, and the scalar code that says what its bytes mean.
//!
//! Invariant: a row of `n` values takes exactly [`KvType::row_bytes`] bytes, and decoding what was
//! encoded gives the nearest representable values. Knows nothing of cells or devices.

use std::fmt;
use std::str::FromStr;

use half::f16;
use serde::{Deserialize, Serialize};

/// Element type of stored K and V rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum KvType {
    /// 32-bit floats: what was computed is what is stored.
    F32,
    /// 16-bit IEEE floats, rounded to nearest even.
    F16,
}

/// A name that is no [`KvType`].
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("unknown KV type '{0}': this version stores f32 or f16")]
pub struct UnknownKvType(pub String);

impl KvType {
    /// All types, in order.
    pub const ALL: [Self; 2] = [Self::F32, Self::F16];

    /// Bytes of a row of `n` values.
    pub const fn row_bytes(self, n: usize) -> usize {
        match self {
            Self::F32 => n * 4,
            Self::F16 => n * 2,
        }
    }

    /// Stores `values` in `row`. Both must describe the same number of values: what does not fit
    /// is left out (and is a failed assertion in debug builds).
    pub fn encode_row(self, values: &[f32], row: &mut [u8]) {
        debug_assert_eq!(row.len(), self.row_bytes(values.len()));
        match self {
            Self::F32 => {
                for (out, v) in row.chunks_exact_mut(4).zip(values) {
                    out.copy_from_slice(&v.to_le_bytes());
                }
            }
            Self::F16 => {
                for (out, v) in row.chunks_exact_mut(2).zip(values) {
                    out.copy_from_slice(&f16::from_f32(*v).to_le_bytes());
                }
            }
        }
    }

    /// Reads `row` into `values`; the mirror of [`KvType::encode_row`].
    pub fn decode_row(self, row: &[u8], values: &mut [f32]) {
        debug_assert_eq!(row.len(), self.row_bytes(values.len()));
        match self {
            Self::F32 => {
                for (v, bytes) in values.iter_mut().zip(row.as_chunks::<4>().0) {
                    *v = f32::from_le_bytes(*bytes);
                }
            }
            Self::F16 => {
                for (v, bytes) in values.iter_mut().zip(row.as_chunks::<2>().0) {
                    *v = f16::from_le_bytes(*bytes).to_f32();
                }
            }
        }
    }
}

impl fmt::Display for KvType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
        })
    }
}

impl FromStr for KvType {
    type Err = UnknownKvType;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        let known = Self::ALL
            .into_iter()
            .find(|t| t.to_string() == s.to_lowercase());
        known.ok_or_else(|| UnknownKvType(s.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f32_rows_keep_every_bit() {
        let values = [0.0, -0.0, 1.5e-42, f32::MAX, -3.25, f32::MIN_POSITIVE];
        let mut row = vec![0; KvType::F32.row_bytes(values.len())];
        KvType::F32.encode_row(&values, &mut row);
        let mut back = [9.0; 6];
        KvType::F32.decode_row(&row, &mut back);
        assert_eq!(values.map(f32::to_bits), back.map(f32::to_bits));
    }

    #[test]
    fn f16_rows_round_to_nearest_even() {
        // 2049 lies half-way between 2048 and 2050: even mantissa wins. 65520 overflows to inf.
        let values = [2049.0, 2051.0, 1.0 / 3.0, 65520.0, 5.0e-8];
        let mut row = vec![0; KvType::F16.row_bytes(values.len())];
        KvType::F16.encode_row(&values, &mut row);
        let mut back = [0.0; 5];
        KvType::F16.decode_row(&row, &mut back);
        assert_eq!(
            back,
            [2048.0, 2052.0, 0.333_251_95, f32::INFINITY, 5.960_464_5e-8]
        );
    }

    #[test]
    fn names_parse_back() {
        for t in KvType::ALL {
            assert_eq!(t.to_string().parse(), Ok(t));
        }
        assert_eq!("q9".parse::<KvType>(), Err(UnknownKvType("q9".into())));
    }
}
