//! [`StateType`]: how the matrix state of a recurrent layer is stored.
//!
//! Invariant: a state is rounded to its type after every token, and each token begins with the
//! rounded one; the outputs of a token read the state before it is rounded. So the bits depend
//! neither on how a prompt is cut nor on what else is in a batch. The inputs of convolutions are
//! always `f32`. Knows no operation, layer or device.

use std::fmt;
use std::str::FromStr;

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

use crate::{KvType, KvTypeError};

/// Element type of stored recurrent states.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum StateType {
    /// 32-bit floats: what was computed is what is stored.
    #[default]
    F32,
    /// 16-bit IEEE floats, rounded to nearest even: up to 65504.
    F16,
    /// The upper halves of 32-bit floats, rounded to nearest even.
    BF16,
}

impl StateType {
    /// All types, from wide to narrow.
    pub const ALL: [Self; 3] = [Self::F32, Self::F16, Self::BF16];

    /// The type of rows with the same bytes.
    pub const fn kv_type(self) -> KvType {
        match self {
            Self::F32 => KvType::F32,
            Self::F16 => KvType::F16,
            Self::BF16 => KvType::BF16,
        }
    }

    /// Bytes of one value.
    pub const fn value_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
        }
    }

    /// A value of a state as the next token reads it.
    pub fn round(self, value: f32) -> f32 {
        match self {
            Self::F32 => value,
            Self::F16 => f16::from_f32(value).to_f32(),
            Self::BF16 => bf16::from_f32(value).to_f32(),
        }
    }
}

impl fmt::Display for StateType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.kv_type().fmt(f)
    }
}

impl FromStr for StateType {
    type Err = KvTypeError;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        let mut all = Self::ALL.into_iter();
        let known = all.find(|t| t.to_string() == s.to_lowercase());
        known.ok_or_else(|| KvTypeError::UnknownState(s.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_rounded_as_a_row_of_its_type_stores_it() {
        let values = [0.0, -0.0, 1.0 / 3.0, 2049.0, 65520.0, -5.0e-8, 1.5e-42];
        for state_type in StateType::ALL {
            let kv_type = state_type.kv_type();
            let mut row = vec![0; kv_type.row_bytes(values.len())];
            assert_eq!(row.len(), values.len() * state_type.value_bytes());
            kv_type.encode_row(&values, &mut row);
            let mut back = [9.0; 7];
            kv_type.decode_row(&row, &mut back);
            let rounded = values.map(|value| state_type.round(value).to_bits());
            assert_eq!(rounded, back.map(f32::to_bits), "{state_type}");
        }
    }

    #[test]
    fn names_parse_back() {
        for state_type in StateType::ALL {
            assert_eq!(
                state_type.to_string().to_uppercase().parse(),
                Ok(state_type)
            );
            let json = serde_json::to_string(&state_type).unwrap();
            assert_eq!(json, format!("\"{state_type}\""));
        }
        let error = "q8_0".parse::<StateType>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "states cannot be stored as 'q8_0': choose one of f32, f16, bf16"
        );
    }
}
