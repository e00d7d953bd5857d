//! A tensor's entry in a file's header, and the numbers of tensor types.
//!
//! Types that cannot be computed with are kept with their number, so that any file can be listed;
//! only taking such a weight is an error.

use std::fmt;
use std::ops::Range;

use kv_block::BlockFormat;

/// The way a tensor is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorType {
    /// A format that weights can have.
    Supported(BlockFormat),
    /// The number of a type that cannot be read.
    Unsupported(u32),
}

/// Numbers of the supported formats (source: `ggml_type` in the GGUF specification).
const SUPPORTED: [(u32, BlockFormat); 28] = [
    (0, BlockFormat::F32),
    (1, BlockFormat::F16),
    (2, BlockFormat::Q4_0),
    (3, BlockFormat::Q4_1),
    (6, BlockFormat::Q5_0),
    (7, BlockFormat::Q5_1),
    (8, BlockFormat::Q8_0),
    (10, BlockFormat::Q2_K),
    (11, BlockFormat::Q3_K),
    (12, BlockFormat::Q4_K),
    (13, BlockFormat::Q5_K),
    (14, BlockFormat::Q6_K),
    (16, BlockFormat::IQ2_XXS),
    (17, BlockFormat::IQ2_XS),
    (18, BlockFormat::IQ3_XXS),
    (19, BlockFormat::IQ1_S),
    (20, BlockFormat::IQ4_NL),
    (21, BlockFormat::IQ3_S),
    (22, BlockFormat::IQ2_S),
    (23, BlockFormat::IQ4_XS),
    (29, BlockFormat::IQ1_M),
    (30, BlockFormat::BF16),
    (34, BlockFormat::TQ1_0),
    (35, BlockFormat::TQ2_0),
    (39, BlockFormat::MXFP4),
    (40, BlockFormat::NVFP4),
    (41, BlockFormat::Q1_0),
    (42, BlockFormat::Q2_0),
];

/// The facts of one tensor type.
struct KnownType {
    code: u32,
    name: &'static str,
    block_len: u64,
    block_bytes: u64,
}

const fn known(code: u32, name: &'static str, block_len: u64, block_bytes: u64) -> KnownType {
    KnownType {
        code,
        name,
        block_len,
        block_bytes,
    }
}

/// Types that cannot be computed with, but whose size is known (same source).
const UNSUPPORTED: [KnownType; 10] = [
    known(9, "Q8_1", 32, 36),
    known(15, "Q8_K", 256, 292),
    known(24, "I8", 1, 1),
    known(25, "I16", 1, 2),
    known(26, "I32", 1, 4),
    known(27, "I64", 1, 8),
    known(28, "F64", 1, 8),
    // Interleaved rows, which files no longer have.
    known(31, "Q4_0_4_4", 32, 18),
    known(32, "Q4_0_4_8", 32, 18),
    known(33, "Q4_0_8_8", 32, 18),
];

impl TensorType {
    /// The type with this number.
    pub fn from_code(code: u32) -> Self {
        let supported = SUPPORTED.iter().find(|(known, _)| *known == code);
        supported.map_or(Self::Unsupported(code), |&(_, format)| {
            Self::Supported(format)
        })
    }

    /// The type's number, or `None` for a format that GGUF has no number for.
    pub fn code(self) -> Option<u32> {
        match self {
            Self::Supported(wanted) => SUPPORTED
                .iter()
                .find(|(_, format)| *format == wanted)
                .map(|(code, _)| *code),
            Self::Unsupported(code) => Some(code),
        }
    }

    /// The format of a weight of this type, if there is one.
    pub fn format(self) -> Option<BlockFormat> {
        match self {
            Self::Supported(format) => Some(format),
            Self::Unsupported(_) => None,
        }
    }

    /// Values and bytes of a block, or `None` for a type that nothing is known of.
    pub(super) fn block(self) -> Option<(u64, u64)> {
        match self {
            Self::Supported(format) => {
                Some((format.block_len() as u64, format.block_bytes() as u64))
            }
            Self::Unsupported(code) => {
                let known = UNSUPPORTED.iter().find(|known| known.code == code)?;
                Some((known.block_len, known.block_bytes))
            }
        }
    }
}

/// The name (`Q4_K`), or for a type that nothing is known of its number (`type 99`).
impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Supported(format) => format.fmt(f),
            Self::Unsupported(code) => match UNSUPPORTED.iter().find(|known| known.code == *code) {
                Some(known) => f.pad(known.name),
                None => f.pad(&format!("type {code}")),
            },
        }
    }
}

/// One tensor of a file: name, shape, type, and where its bytes lie.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorInfo {
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    pub(super) stored: TensorType,
    /// The part of a split file that it is in.
    pub(super) part: usize,
    /// Its bytes in that part, from the start of the file; empty where the size is unknown.
    pub(super) data: Range<u64>,
}

impl TensorInfo {
    /// The tensor's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Dimensions, outermost first: a matrix is `[rows, columns]`. (The file has them the other
    /// way round.)
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Product of all dimensions.
    pub fn n_values(&self) -> u64 {
        self.shape.iter().map(|&dim| dim as u64).product()
    }

    /// The way the values are stored.
    pub fn stored(&self) -> TensorType {
        self.stored
    }

    /// Bytes that the tensor takes, or `None` for a type that nothing is known of.
    pub fn n_bytes(&self) -> Option<u64> {
        let n_bytes = self.data.end - self.data.start;
        self.stored.block().map(|_| n_bytes)
    }

    /// The start of the bytes, from the start of the tensor's file.
    pub fn file_offset(&self) -> u64 {
        self.data.start
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_has_a_number_and_every_number_one_meaning() {
        for format in BlockFormat::ALL {
            let code = TensorType::Supported(format).code().unwrap();
            assert_eq!(TensorType::from_code(code), TensorType::Supported(format));
        }
        for known in &UNSUPPORTED {
            let stored = TensorType::from_code(known.code);
            assert_eq!(stored, TensorType::Unsupported(known.code));
            assert_eq!(stored.to_string(), known.name);
        }
        assert_eq!(TensorType::from_code(99).to_string(), "type 99");
    }
}
