//! The flags of speculative decoding.
//!
//! Invariant: numbers are in the range that engines take. Knows no model.

use std::path::{Path, PathBuf};

use cellar_engine::{MAX_DRAFT, Speculation};
use clap::{Args, ValueEnum};
use serde::Deserialize;

use crate::failure::usage;

/// Speculative decoding.
#[derive(Clone, Debug, Args)]
pub(crate) struct SpeculationArgs {
    /// Draft tokens and verify several in one step. The text stays the same (on the cpu backend, to
    /// the byte). lookup drafts from an earlier occurrence of the last tokens in prompt or text;
    /// draft takes drafts of --draft-model
    #[arg(long, value_name = "HOW", value_enum, default_value_t)]
    speculate: SpeculationName,
    /// Most tokens that --speculate drafts at once
    #[arg(long, value_name = "N", default_value_t = 16,
          value_parser = clap::value_parser!(u32).range(1..=MAX_DRAFT as i64))]
    draft_max: u32,
    /// A smaller model with the same vocabulary, which drafts with --speculate draft: GGUF file,
    /// directory or name
    #[arg(long, visible_alias = "model-draft", value_name = "MODEL")]
    draft_model: Option<PathBuf>,
}

/// How tokens are drafted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum SpeculationName {
    #[default]
    Off,
    Lookup,
    Draft,
}

impl SpeculationName {
    fn with_max(self, n_max: u32) -> Speculation {
        let n_max = n_max as usize;
        match self {
            Self::Off => Speculation::Off,
            Self::Lookup => Speculation::Lookup { n_max },
            Self::Draft => Speculation::Draft { n_max },
        }
    }
}

impl SpeculationArgs {
    /// As an engine takes it.
    pub(crate) fn speculation(&self) -> Speculation {
        self.speculate.with_max(self.draft_max)
    }

    /// The same for a request that chooses.
    ///
    /// # Errors
    /// What is wrong where a model is to draft, and there is none.
    pub(crate) fn of_request(&self, name: SpeculationName) -> Result<Speculation, &'static str> {
        match (name, self.speculate) {
            (SpeculationName::Draft, SpeculationName::Off | SpeculationName::Lookup) => {
                Err("there is no draft model: add --speculate draft --draft-model MODEL")
            }
            (name, _) => Ok(name.with_max(self.draft_max)),
        }
    }

    /// The model that drafts, where one is to.
    ///
    /// # Errors
    /// A usage error where one is named and nothing says that it drafts, or the other way round.
    pub(crate) fn draft_model(&self) -> anyhow::Result<Option<&Path>> {
        match (self.speculate, self.draft_model.as_deref()) {
            (SpeculationName::Draft, None) => {
                usage("--speculate draft needs a model that drafts: give --draft-model MODEL")
            }
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
}
