//! Values of flags, with their limits and the conventions of llama.cpp: `-c 0`, `-n -1`,
//! `--seed -1`, `-ngl 0`.
//!
//! Invariant: an error states what is wanted; the parser adds the flag and the value. Knows no
//! model.

use std::str::FromStr;

use cellar_engine::sampler::{Bias, LogitBias, MAX_BIAS, MAX_LAST_N};
use kv_core::TokenId;

/// The largest context that is taken.
const MAX_TOKENS: u32 = 1 << 30;

/// How many tokens the memory holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ContextSize {
    /// As many as the model was trained with.
    Trained,
    /// As many as fit, up to that.
    Auto,
    /// So many, at least 1.
    Tokens(u32),
}

impl FromStr for ContextSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        match text.parse() {
            Ok(0) => Ok(Self::Trained),
            Ok(n @ 1..=MAX_TOKENS) => Ok(Self::Tokens(n)),
            _ => Err(format!(
                "a number of tokens from 1 to {MAX_TOKENS} is needed, 0 for the trained length, or auto \
                 for what fits"
            )),
        }
    }
}

/// How many tokens are generated at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PredictLimit {
    /// So many.
    Tokens(u32),
    /// Until the model ends, or the context is full.
    None,
}

impl PredictLimit {
    /// The number, where there is one.
    pub(crate) fn tokens(self) -> Option<usize> {
        match self {
            Self::Tokens(n) => Some(n as usize),
            Self::None => None,
        }
    }
}

impl FromStr for PredictLimit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // llama.cpp: -1 is without end, -2 until the context is full.
        if ["-1", "-2"].contains(&text) {
            return Ok(Self::None);
        }
        text.parse().map(Self::Tokens).map_err(|_| {
            "a number of at least 0 is needed, or -1 for as many as the context holds".to_owned()
        })
    }
}

/// How many tokens an answer has at most.
///
/// # Errors
/// Where it is no number of at least 1, nor -1.
pub(crate) fn answer_limit(text: &str) -> Result<PredictLimit, String> {
    match text.parse() {
        Ok(PredictLimit::Tokens(0)) | Err(_) => Err(
            "a number of at least 1 is needed, or -1 for as many as the context holds".to_owned(),
        ),
        Ok(limit) => Ok(limit),
    }
}

/// A part of something, from 0 to 1: `1%` or `0.01`.
///
/// # Errors
/// If it is none.
pub(crate) fn part(text: &str) -> Result<f64, String> {
    let (number, whole) = match text.strip_suffix('%') {
        Some(number) => (number, 100.0),
        None => (text, 1.0),
    };
    let part = number.trim().parse::<f64>().map(|number| number / whole);
    let part = part.ok().filter(|part| (0.0..=1.0).contains(part));
    part.ok_or_else(|| "a part is needed, as 1% or 0.01".to_owned())
}

/// The most tokens of thinking in an answer.
///
/// # Errors
/// If it is no number, nor -1.
pub(crate) fn thinking_limit(text: &str) -> Result<PredictLimit, String> {
    match text.parse() {
        Ok(limit) if text != "-2" => Ok(limit),
        _ => Err("a number of at least 0 is needed, or -1 for no limit".to_owned()),
    }
}

/// The number of most likely tokens that are kept: 0 is all, and so is -1, as in llama.cpp.
///
/// # Errors
/// Where it is another negative number, or none.
pub(crate) fn top_k(text: &str) -> Result<u32, String> {
    if text == "-1" {
        return Ok(0);
    }
    let wrong = |_| "a number of at least 1 is needed, or 0 or -1 for all tokens".to_owned();
    text.parse().map_err(wrong)
}

/// The seed of sampling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seed {
    /// Another one in each run.
    Random,
    /// This one.
    Fixed(u64),
}

impl FromStr for Seed {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "-1" {
            return Ok(Self::Random);
        }
        text.parse()
            .map(Self::Fixed)
            .map_err(|_| "a number of at least 0 is needed, or -1 for a random one".to_owned())
    }
}

/// How many tokens back a step of the sampler looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LookBack {
    /// All of the text.
    All,
    /// So many.
    Tokens(usize),
}

impl LookBack {
    /// The number, where there is one.
    pub(crate) fn tokens(self) -> Option<usize> {
        match self {
            Self::All => None,
            Self::Tokens(n) => Some(n),
        }
    }
}

impl FromStr for LookBack {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(n @ 0..=MAX_LAST_N) => Ok(Self::Tokens(n)),
            _ if text == "-1" => Ok(Self::All),
            _ => Err(format!(
                "a number of tokens up to {MAX_LAST_N} is needed, or -1 for the whole text"
            )),
        }
    }
}

/// Which Mirostat chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MirostatVersion {
    /// None.
    Off,
    /// The second.
    Two,
}

impl FromStr for MirostatVersion {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "0" => Ok(Self::Off),
            "2" => Ok(Self::Two),
            _ => Err("2 is needed (Mirostat 2), or 0 for none; there is no other".to_owned()),
        }
    }
}

/// A token and what is added to its logit, as llama.cpp writes it: `15043+1`, `15043-inf`.
///
/// # Errors
/// If it is none.
pub(super) fn logit_bias(text: &str) -> Result<LogitBias, String> {
    let wanted = || {
        format!(
            "a token's id, + or -, and a number up to {MAX_BIAS} are needed, as in 15043+1, or -inf \
             for a token that is never chosen"
        )
    };
    let sign_at = text.find(['+', '-']).ok_or_else(wanted)?;
    let (token, bias) = text.split_at(sign_at);
    let token = token.trim().parse().map(TokenId).map_err(|_| wanted())?;
    let bias = match bias {
        "-inf" => Bias::Ban,
        bias => {
            let is_signed_twice = bias[1..].starts_with(['+', '-']);
            let bias = bias.parse().ok().filter(|_| !is_signed_twice);
            let in_range = |bias: &f32| (-MAX_BIAS..=MAX_BIAS).contains(bias);
            Bias::Add(bias.filter(in_range).ok_or_else(wanted)?)
        }
    };
    Ok(LogitBias { token, bias })
}

/// Layers on a GPU, of which there may be fewer.
///
/// # Errors
/// What a number of layers is.
pub(super) fn gpu_layers(text: &str) -> Result<u32, String> {
    match text.parse::<i64>() {
        Ok(-1) => Ok(u32::MAX),
        Ok(n) if n >= 0 => Ok(u32::try_from(n).unwrap_or(u32::MAX)),
        _ => Err("a number of layers is needed, or -1 for all".to_owned()),
    }
}

/// A number of at least 0.
///
/// # Errors
/// If it is none.
pub(super) fn non_negative(text: &str) -> Result<f32, String> {
    number(text, "a number of at least 0 is needed", |n| n >= 0.0)
}

/// A number of standard deviations; llama.cpp's -1 is 0.
///
/// # Errors
/// It is no number.
pub(super) fn top_nsigma(text: &str) -> Result<f32, String> {
    let sigmas = number(
        text,
        "a number is needed, of which 0 keeps all tokens",
        |_| true,
    )?;
    Ok(sigmas.max(0.0))
}

/// A number above 0.
///
/// # Errors
/// If it is none.
pub(super) fn positive(text: &str) -> Result<f32, String> {
    number(text, "a number above 0 is needed", |n| n > 0.0)
}

/// A number of at least 1.
///
/// # Errors
/// If it is none.
pub(super) fn at_least_one(text: &str) -> Result<f32, String> {
    number(text, "a number of at least 1 is needed", |n| n >= 1.0)
}

/// A number between 0 and 1.
///
/// # Errors
/// If it is none.
pub(super) fn probability(text: &str) -> Result<f32, String> {
    let is_one = |n| (0.0..=1.0).contains(&n);
    number(text, "a number between 0 and 1 is needed", is_one)
}

/// Any number.
///
/// # Errors
/// If it is none.
pub(super) fn finite(text: &str) -> Result<f32, String> {
    number(text, "a number is needed", |_| true)
}

fn number(text: &str, wanted: &str, fits: impl Fn(f32) -> bool) -> Result<f32, String> {
    let number = text
        .parse()
        .ok()
        .filter(|n: &f32| n.is_finite() && fits(*n));
    number.ok_or_else(|| wanted.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn top_k_of_minus_one_keeps_all() {
        assert_eq!(top_k("-1"), Ok(0));
        assert_eq!(top_k("0"), Ok(0));
        assert_eq!(top_k("40"), Ok(40));
        for wrong in ["-2", "x", ""] {
            assert!(top_k(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn llama_cpps_conventions_are_known() {
        assert_eq!("0".parse(), Ok(ContextSize::Trained));
        assert_eq!("auto".parse(), Ok(ContextSize::Auto));
        assert_eq!("4096".parse(), Ok(ContextSize::Tokens(4096)));
        assert!("-1".parse::<ContextSize>().is_err());
        assert!("1073741825".parse::<ContextSize>().is_err());
        assert_eq!("-1".parse(), Ok(PredictLimit::None));
        assert_eq!("0".parse(), Ok(PredictLimit::Tokens(0)));
        assert!("-3".parse::<PredictLimit>().is_err());
        assert_eq!("-1".parse(), Ok(Seed::Random));
        assert_eq!("18446744073709551615".parse(), Ok(Seed::Fixed(u64::MAX)));
        let layers = ["0", "12", "-1", "9999999999999"].map(gpu_layers);
        assert_eq!(layers, [Ok(0), Ok(12), Ok(u32::MAX), Ok(u32::MAX)]);
        assert!(
            ["-2", "all", "1.5", ""]
                .into_iter()
                .all(|text| gpu_layers(text).is_err())
        );
    }

    #[test]
    fn biases_are_written_as_llama_cpp_reads_them() {
        let bias = |token, bias| {
            Ok(LogitBias {
                token: TokenId(token),
                bias,
            })
        };
        assert_eq!(logit_bias("15043+1"), bias(15043, Bias::Add(1.0)));
        assert_eq!(logit_bias("15043-2.5"), bias(15043, Bias::Add(-2.5)));
        assert_eq!(logit_bias("7-inf"), bias(7, Bias::Ban));
        assert_eq!(logit_bias("7+100"), bias(7, Bias::Add(100.0)));
        for text in [
            "7", "+1", "7=1", "7+101", "7+inf", "7+nan", "7--1", "x+1", "-1+1", "7+", "",
        ] {
            assert!(logit_bias(text).is_err(), "{text}");
        }
    }

    #[test]
    fn numbers_that_stand_for_something_are_known() {
        assert_eq!("-1".parse(), Ok(LookBack::All));
        assert_eq!("0".parse(), Ok(LookBack::Tokens(0)));
        assert!("-2".parse::<LookBack>().is_err() && "9999999".parse::<LookBack>().is_err());
        assert_eq!("2".parse(), Ok(MirostatVersion::Two));
        assert!("1".parse::<MirostatVersion>().is_err());
    }

    #[test]
    fn numbers_that_are_none_are_refused() {
        for text in ["nan", "inf", "-inf", "", "1e999", "0,5"] {
            assert!(finite(text).is_err(), "{text}");
        }
        assert_eq!(probability("1"), Ok(1.0));
        assert!(probability("1.01").is_err() && positive("0").is_err());
        assert!(non_negative("-0.1").is_err());
    }
}
