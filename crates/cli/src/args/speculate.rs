//! The flags of speculative decoding.
//!
//! Invariant: numbers are in the range that engines take. Knows no model.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use engine::{MAX_DRAFT, Speculation};

use crate::failure::usage;

/// Speculative decoding.
#[derive(Clone, Debug, Args)]
pub(crate) struct SpeculationArgs {
    /// Draft tokens and verify several in one step, which gives the same text (on the cpu backend, to
    /// the byte): lookup drafts what followed the last tokens where they occurred before, in prompt
    /// or text; draft lets --draft-model draft (of run and chat)
    #[arg(long, value_name = "HOW", value_enum, default_value_t)]
    speculate: SpeculationName,
    /// Most tokens that --speculate drafts at once
    #[arg(long, value_name = "N", default_value_t = 16, allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..=MAX_DRAFT as i64))]
    draft_max: u32,
    /// A smaller model with the same vocabulary, which drafts with --speculate draft: GGUF file,
    /// directory or name
    #[arg(
        long,
        visible_alias = "model-draft",
        value_name = "MODEL",
        required_if_eq("speculate", "draft")
    )]
    draft_model: Option<PathBuf>,
}

/// How tokens are drafted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum SpeculationName {
    #[default]
    Off,
    Lookup,
    Draft,
}

impl SpeculationArgs {
    /// As an engine takes it, but for a draft model.
    pub(crate) fn speculation(&self) -> Speculation {
        match self.speculate {
            SpeculationName::Off | SpeculationName::Draft => Speculation::Off,
            SpeculationName::Lookup => Speculation::Lookup {
                n_max: self.draft_max as usize,
            },
        }
    }

    /// The model that drafts, where one is to.
    ///
    /// # Errors
    /// A usage error where one is named, and nothing says that it drafts.
    pub(crate) fn draft_model(&self) -> anyhow::Result<Option<&Path>> {
        match (self.speculate, self.draft_model.as_deref()) {
            (SpeculationName::Draft, model) => Ok(model),
            (_, None) => Ok(None),
            (_, Some(model)) => usage(format!(
                "--draft-model '{}' needs --speculate draft: give both",
                model.display()
            )),
        }
    }

    /// The most tokens that are drafted at once.
    pub(crate) fn draft_max(&self) -> u32 {
        self.draft_max
    }

    /// Checks that requests that are computed together can have it.
    ///
    /// # Errors
    /// A usage error where a draft model is named.
    pub(crate) fn check_together(&self) -> anyhow::Result<()> {
        match self.draft_model()? {
            None => Ok(()),
            Some(_) => usage(
                "--speculate draft is for 'cellar run' and 'cellar chat', which compute one text: take \
                 --speculate lookup",
            ),
        }
    }
}
