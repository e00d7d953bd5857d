//! Values of flags, with their limits and the conventions of llama.cpp: `-c 0`, `-n -1`,
//! `--seed -1`, `-ngl 0`.
//!
//! Invariant: an error states what is wanted; the parser adds the flag and the value. Knows no
//! model.

use std::str::FromStr;

/// The largest context that is taken.
const MAX_TOKENS: u32 = 1 << 30;

/// How many tokens the memory holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ContextSize {
    /// As many as the model was trained with.
    Trained,
    /// So many, at least 1.
    Tokens(u32),
}

impl FromStr for ContextSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(0) => Ok(Self::Trained),
            Ok(n @ 1..=MAX_TOKENS) => Ok(Self::Tokens(n)),
            _ => Err(format!(
                "a number of tokens from 1 to {MAX_TOKENS} is needed, or 0 for the trained length"
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

/// Layers on a GPU: none, as there is no backend for one.
///
/// # Errors
/// What to do instead.
pub(super) fn gpu_layers(text: &str) -> Result<u32, String> {
    match text.parse::<i64>() {
        Ok(0) => Ok(0),
        _ => Err(
            "layers cannot be split between GPU and CPU; leave the flag out and choose with \
             --backend, or give 0 for the CPU"
                .to_owned(),
        ),
    }
}

/// A number of at least 0.
///
/// # Errors
/// Where it is none.
pub(super) fn non_negative(text: &str) -> Result<f32, String> {
    number(text, "a number of at least 0 is needed", |n| n >= 0.0)
}

/// A number above 0.
///
/// # Errors
/// Where it is none.
pub(super) fn positive(text: &str) -> Result<f32, String> {
    number(text, "a number above 0 is needed", |n| n > 0.0)
}

/// A number between 0 and 1.
///
/// # Errors
/// Where it is none.
pub(super) fn probability(text: &str) -> Result<f32, String> {
    let is_one = |n| (0.0..=1.0).contains(&n);
    number(text, "a number between 0 and 1 is needed", is_one)
}

/// Any number.
///
/// # Errors
/// Where it is none.
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
    fn llama_cpps_conventions_are_known() {
        assert_eq!("0".parse(), Ok(ContextSize::Trained));
        assert_eq!("4096".parse(), Ok(ContextSize::Tokens(4096)));
        assert!("-1".parse::<ContextSize>().is_err());
        assert!("1073741825".parse::<ContextSize>().is_err());
        assert_eq!("-1".parse(), Ok(PredictLimit::None));
        assert_eq!("0".parse(), Ok(PredictLimit::Tokens(0)));
        assert!("-3".parse::<PredictLimit>().is_err());
        assert_eq!("-1".parse(), Ok(Seed::Random));
        assert_eq!("18446744073709551615".parse(), Ok(Seed::Fixed(u64::MAX)));
        assert_eq!((gpu_layers("0"), gpu_layers("99").is_err()), (Ok(0), true));
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
