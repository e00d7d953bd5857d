//! [`KvType`]: how one K or V row is stored, and the scalar code that says what its bytes mean.
//!
//! Invariant: a row of `n` values takes exactly [`KvType::row_bytes`] bytes. The bytes are those of
//! [`kv_block`], whose functions are used and not repeated. Knows nothing of heads, rotations,
//! cells or devices.

use std::fmt;
use std::str::FromStr;

use kv_block::{BlockFormat, dequantize, quantize_into};
use serde::{Deserialize, Serialize};

use crate::StateType;

/// Element type of stored K and V rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(non_camel_case_types)] // the names are those of the formats
#[non_exhaustive]
pub enum KvType {
    /// 32-bit floats: what was computed is what is stored.
    F32,
    /// 16-bit IEEE floats, rounded to nearest even.
    F16,
    /// The upper halves of 32-bit floats, rounded to nearest even.
    BF16,
    /// 8-bit integers with one scale for 32 values.
    Q8_0,
    /// 4-bit integers with one scale for 32 values.
    Q4_0,
    /// 4-bit integers with one scale and one minimum for 32 values.
    Q4_1,
    /// 5-bit integers with one scale for 32 values.
    Q5_0,
    /// 5-bit integers with one scale and one minimum for 32 values.
    Q5_1,
    /// 4-bit indices into a table of 16 values, with one scale for 32 values.
    IQ4_NL,
}

/// A text that names no KV type, or no layers with their types.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum KvTypeError {
    /// A name that is no [`KvType`].
    #[error("unknown KV type '{name}': choose one of {known}", name = .0, known = names())]
    Unknown(String),
    /// A name that is no [`StateType`].
    #[error("states cannot be stored as '{name}': choose one of {known}", name = .0, known = state_names())]
    UnknownState(String),
    /// A text that is no [`LayerKvTypes`](crate::LayerKvTypes).
    #[error("'{0}' is not of the form LAYERS=TYPE, such as 0-3=f16 or 5=q8_0/q4_0")]
    Form(String),
}

fn names() -> String {
    KvType::ALL.map(|t| t.to_string()).join(", ")
}

fn state_names() -> String {
    StateType::ALL.map(|t| t.to_string()).join(", ")
}

impl KvType {
    /// All types: floats from wide to narrow, then blocks.
    pub const ALL: [Self; 9] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Q8_0,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::IQ4_NL,
    ];

    /// The block format of rows of this type.
    pub const fn format(self) -> BlockFormat {
        match self {
            Self::F32 => BlockFormat::F32,
            Self::F16 => BlockFormat::F16,
            Self::BF16 => BlockFormat::BF16,
            Self::Q8_0 => BlockFormat::Q8_0,
            Self::Q4_0 => BlockFormat::Q4_0,
            Self::Q4_1 => BlockFormat::Q4_1,
            Self::Q5_0 => BlockFormat::Q5_0,
            Self::Q5_1 => BlockFormat::Q5_1,
            Self::IQ4_NL => BlockFormat::IQ4_NL,
        }
    }

    /// Values that share a scale: 1 where every value stands for itself.
    pub const fn block_len(self) -> usize {
        self.format().block_len()
    }

    /// True if values share a scale.
    pub const fn is_quantised(self) -> bool {
        self.block_len() > 1
    }

    /// Bytes of a row of `n` values, a whole number of blocks.
    pub const fn row_bytes(self, n: usize) -> usize {
        n.div_ceil(self.block_len()) * self.format().block_bytes()
    }

    /// Stores `values` in `row`, as [`quantize_into`] does. Both must describe the same number of
    /// whole blocks: otherwise nothing is stored (and it is a failed assertion in debug builds).
    pub fn encode_row(self, values: &[f32], row: &mut [u8]) {
        let stored = quantize_into(self.format(), values, row);
        debug_assert_eq!(stored, Ok(()));
    }

    /// Reads `row` into `values`; the mirror of [`KvType::encode_row`].
    pub fn decode_row(self, row: &[u8], values: &mut [f32]) {
        debug_assert_eq!(row.len(), self.row_bytes(values.len()));
        dequantize(self.format(), row, values);
    }
}

impl fmt::Display for KvType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::Q8_0 => "q8_0",
            Self::Q4_0 => "q4_0",
            Self::Q4_1 => "q4_1",
            Self::Q5_0 => "q5_0",
            Self::Q5_1 => "q5_1",
            Self::IQ4_NL => "iq4_nl",
        })
    }
}

impl FromStr for KvType {
    type Err = KvTypeError;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        let known = Self::ALL
            .into_iter()
            .find(|t| t.to_string() == s.to_lowercase());
        known.ok_or_else(|| KvTypeError::Unknown(s.to_owned()))
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
    fn a_row_of_64_values_takes_this_many_bytes() {
        let bytes = KvType::ALL.map(|t| t.row_bytes(64));
        assert_eq!(bytes, [256, 128, 128, 68, 36, 40, 44, 48, 36]);
        let formats = KvType::ALL.map(|t| t.format().row_bytes(64));
        assert_eq!(bytes.map(Some), formats);
    }

    #[test]
    fn names_parse_back() {
        for t in KvType::ALL {
            assert_eq!(t.to_string().parse(), Ok(t));
            assert_eq!(t.to_string().to_uppercase().parse(), Ok(t));
            assert_eq!(t.format().name(), t.to_string().to_uppercase());
            let json = serde_json::to_string(&t).unwrap();
            assert_eq!(json, format!("\"{t}\""));
        }
        let error = "q9".parse::<KvType>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "unknown KV type 'q9': choose one of f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, iq4_nl"
        );
    }
}
