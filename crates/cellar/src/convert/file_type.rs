//! [`FileType`]: the formats in which models are written, by llama.cpp's names.

use std::str::FromStr;

use kv_block::BlockFormat;

/// A type of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileType {
    /// Its name.
    pub name: &'static str,
    /// How most matrices are stored.
    pub format: BlockFormat,
    /// Which matrices are stored otherwise.
    pub mix: Mix,
    /// Its number in `general.file_type`.
    pub number: u32,
}

/// The name of no type: each tensor keeps its format.
pub const AS_STORED: &str = "as_stored";

/// Which matrices are stored in larger formats than others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mix {
    /// None but the output matrix.
    Uniform,
    /// Those of llama.cpp's types `_M`.
    Medium,
    /// Those of a type of few bits.
    Low(LowMix),
    /// Those of an IQ type.
    Iq(IqMix),
}

/// The types of few bits that differ in which matrices are larger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LowMix {
    /// `q3_k_m`
    Q3KM,
    /// `q2_k`
    Q2K,
    /// `q2_k_s`
    Q2KS,
}

/// The IQ types, which differ in which matrices are larger, or smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // named as the types
pub enum IqMix {
    IQ4NL,
    IQ4XS,
    IQ3M,
    IQ3S,
    IQ3XS,
    IQ3XXS,
    IQ2M,
    IQ2S,
    IQ2XS,
    IQ2XXS,
    IQ1M,
    IQ1S,
}

/// All types.
pub const FILE_TYPES: [FileType; 33] = {
    use BlockFormat::*;
    const fn of(name: &'static str, format: BlockFormat, number: u32) -> FileType {
        FileType {
            name,
            format,
            mix: Mix::Uniform,
            number,
        }
    }
    const fn medium(name: &'static str, format: BlockFormat, number: u32) -> FileType {
        FileType {
            mix: Mix::Medium,
            ..of(name, format, number)
        }
    }
    const fn low(name: &'static str, format: BlockFormat, number: u32, mix: LowMix) -> FileType {
        FileType {
            mix: Mix::Low(mix),
            ..of(name, format, number)
        }
    }
    const fn iq(name: &'static str, format: BlockFormat, number: u32, mix: IqMix) -> FileType {
        FileType {
            mix: Mix::Iq(mix),
            ..of(name, format, number)
        }
    }
    [
        of("f32", F32, 0),
        of("f16", F16, 1),
        of("bf16", BF16, 32),
        of("q8_0", Q8_0, 7),
        of("q6_k", Q6_K, 18),
        medium("q5_k_m", Q5_K, 17),
        of("q5_k", Q5_K, 16),
        of("q5_0", Q5_0, 8),
        of("q5_1", Q5_1, 9),
        medium("q4_k_m", Q4_K, 15),
        of("q4_k", Q4_K, 14),
        of("q4_0", Q4_0, 2),
        of("q4_1", Q4_1, 3),
        low("q3_k_m", Q3_K, 12, LowMix::Q3KM),
        of("q3_k", Q3_K, 11),
        low("q2_k", Q2_K, 10, LowMix::Q2K),
        low("q2_k_s", Q2_K, 21, LowMix::Q2KS),
        iq("iq4_nl", IQ4_NL, 25, IqMix::IQ4NL),
        iq("iq4_xs", IQ4_XS, 30, IqMix::IQ4XS),
        iq("iq3_m", IQ3_S, 27, IqMix::IQ3M),
        iq("iq3_s", IQ3_S, 26, IqMix::IQ3S),
        iq("iq3_xs", IQ3_S, 22, IqMix::IQ3XS),
        iq("iq3_xxs", IQ3_XXS, 23, IqMix::IQ3XXS),
        iq("iq2_m", IQ2_S, 29, IqMix::IQ2M),
        iq("iq2_s", IQ2_XS, 28, IqMix::IQ2S),
        iq("iq2_xs", IQ2_XS, 20, IqMix::IQ2XS),
        iq("iq2_xxs", IQ2_XXS, 19, IqMix::IQ2XXS),
        iq("iq1_m", IQ1_M, 31, IqMix::IQ1M),
        iq("iq1_s", IQ1_S, 24, IqMix::IQ1S),
        of("tq2_0", TQ2_0, 37),
        of("tq1_0", TQ1_0, 36),
        of("q2_0", Q2_0, 41),
        of("q1_0", Q1_0, 40),
    ]
};

impl FromStr for FileType {
    type Err = String;

    /// # Errors
    /// The names of all types.
    fn from_str(name: &str) -> Result<Self, String> {
        let is = |t: &&FileType| t.name.eq_ignore_ascii_case(name);
        FILE_TYPES.iter().find(is).copied().ok_or_else(|| {
            let known = FILE_TYPES.map(|t| t.name);
            format!("known are {}", known.join(", "))
        })
    }
}
