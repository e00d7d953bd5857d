//! The flags of speculative decoding.
//!
//! Invariant: numbers are in the range that engines take. Knows no model.

use clap::{Args, ValueEnum};
use engine::{MAX_DRAFT, Speculation};

/// Speculative decoding.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct SpeculationArgs {
    /// Draft tokens and verify several in one step, which gives the same text (on the cpu backend, to
    /// the byte): lookup drafts what followed the last tokens where they occurred before, in prompt
    /// or text
    #[arg(long, value_name = "HOW", value_enum, default_value_t)]
    speculate: SpeculationName,
    /// Most tokens that --speculate drafts at once
    #[arg(long, value_name = "N", default_value_t = 16, allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..=MAX_DRAFT as i64))]
    draft_max: u32,
}

/// How tokens are drafted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum SpeculationName {
    #[default]
    Off,
    Lookup,
}

impl SpeculationArgs {
    /// As an engine takes it.
    pub(crate) fn speculation(self) -> Speculation {
        match self.speculate {
            SpeculationName::Off => Speculation::Off,
            SpeculationName::Lookup => Speculation::Lookup {
                n_max: self.draft_max as usize,
            },
        }
    }
}
