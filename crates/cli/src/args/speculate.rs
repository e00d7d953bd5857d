//! The flags of speculative decoding.
//!
//! Invariant: numbers are in the range that engines take. Knows no model.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use cellar::architectures;
use cellar_engine::{MAX_DRAFT, Speculation};
use clap::{Args, ValueEnum};
use kv_graph::weights::WeightSource;
use model_core::architecture::{Model, ModelError, with_draft_head};
use model_core::head_file::HeadFile;
use model_core::model_file::{ModelFile, OpenModel};
use serde::Deserialize;

use crate::by_name::locate;
use crate::failure::{usage, warn};

/// Speculative decoding.
#[derive(Clone, Debug, Args)]
pub(crate) struct SpeculationArgs {
    /// Draft tokens and verify several in one step. The text stays the same (on the cpu backend, to
    /// the byte). lookup drafts from an earlier occurrence of the last tokens in prompt or text;
    /// draft takes drafts of --draft-model; head those of a head in the file (MTP) or in that of
    /// --draft-model (EAGLE-3); auto is lookup and head where there is a head, else off
    #[arg(long, value_name = "HOW", value_enum, default_value_t)]
    speculate: SpeculationName,
    /// Most tokens that --speculate drafts at once
    #[arg(long, value_name = "N", default_value_t = 16,
          value_parser = clap::value_parser!(u32).range(1..=MAX_DRAFT as i64))]
    draft_max: u32,
    /// A smaller model with the same vocabulary, which drafts with --speculate draft, or a head for
    /// the model (EAGLE-3, an assistant of Gemma 4): GGUF file, directory or name
    #[arg(long, visible_alias = "model-draft", value_name = "MODEL")]
    draft_model: Option<PathBuf>,
}

/// How tokens are drafted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum SpeculationName {
    #[default]
    Auto,
    Off,
    Lookup,
    Draft,
    Head,
}

impl SpeculationName {
    fn with_max(self, n_max: u32) -> Speculation {
        let n_max = n_max as usize;
        match self {
            Self::Off => Speculation::Off,
            Self::Lookup => Speculation::Lookup { n_max },
            Self::Draft => Speculation::Draft { n_max },
            Self::Head => Speculation::Head { n_max },
            Self::Auto => Speculation::Auto { n_max },
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
            (_, speculate) if speculate == name => {}
            (SpeculationName::Draft, _) => {
                return Err("there is no draft model: add --speculate draft --draft-model MODEL");
            }
            (SpeculationName::Head, speculate) if speculate != SpeculationName::Auto => {
                return Err("the model was loaded without its head: add --speculate head");
            }
            _ => {}
        }
        Ok(name.with_max(self.draft_max))
    }

    /// The model that drafts, where one is to.
    ///
    /// # Errors
    /// A usage error where one is named and nothing is to be drafted with it, or the other way
    /// round.
    pub(crate) fn draft_model(&self) -> anyhow::Result<Option<&Path>> {
        match (self.speculate, self.draft_model.as_deref()) {
            (SpeculationName::Draft, None) => {
                usage("--speculate draft needs a model that drafts: give --draft-model MODEL")
            }
            (SpeculationName::Draft, model) => Ok(model),
            // It has to be a head.
            (SpeculationName::Auto | SpeculationName::Head, _) | (_, None) => Ok(None),
            (_, Some(model)) => unused_draft_model(model),
        }
    }

    /// The file that is to draft, where one is named.
    pub(crate) fn file(&self) -> Option<&Path> {
        self.draft_model.as_deref()
    }

    /// True if such a file has to be a head.
    pub(crate) fn names_head(&self) -> bool {
        self.takes_head() && self.file().is_some()
    }

    /// Has a model computed with the head of its file, or that of the file that is named, where
    /// that may draft. Where it cannot, a warning says why, unless the head is asked for.
    ///
    /// # Errors
    /// A usage error where the head is asked for and there is none, or the file that is named is
    /// none; [`ModelError`] where it is incomplete or does not fit the model.
    pub(crate) fn use_head(&self, file: &mut ModelFile) -> anyhow::Result<()> {
        if !self.takes_head() {
            return Ok(());
        }
        match self.head_file()? {
            None => {
                let has_head = file.use_draft_head();
                self.check_head(has_head, file.label())
            }
            Some(head) => self.check_joined(file.use_head_of(&head, &architectures()), &head),
        }
    }

    /// The same for a model without its tokenizer.
    ///
    /// # Errors
    /// As [`SpeculationArgs::use_head`].
    pub(crate) fn use_head_of_open(&self, open: &mut OpenModel) -> anyhow::Result<()> {
        match self.head_file()? {
            None => Ok(()),
            Some(head) => self.check_joined(open.use_head_of(&head, &architectures()), &head),
        }
    }

    /// The model with the head of its file in the same way, of which only that is open.
    ///
    /// # Errors
    /// As [`SpeculationArgs::use_head`].
    pub(crate) fn with_head(
        &self,
        model: Arc<dyn Model>,
        weights: &dyn WeightSource,
        label: &str,
    ) -> anyhow::Result<Arc<dyn Model>> {
        if !self.takes_head() || self.names_head() {
            return Ok(model);
        }
        let (has_head, with) = match with_draft_head(&*model, weights) {
            Ok(with) => (Ok(with.is_some()), with),
            Err(error) => (Err(error), None),
        };
        self.check_head(has_head, label)?;
        Ok(with.unwrap_or(model))
    }

    fn takes_head(&self) -> bool {
        matches!(
            self.speculate,
            SpeculationName::Auto | SpeculationName::Head
        )
    }

    /// The head in the file that is named.
    fn head_file(&self) -> anyhow::Result<Option<HeadFile>> {
        let Some(path) = self.draft_model.as_deref().filter(|_| self.takes_head()) else {
            return Ok(None);
        };
        let head = locate(path).and_then(|path| Ok(HeadFile::open(&path, &architectures())?));
        match head.context("--draft-model")? {
            None => unused_draft_model(path),
            head => Ok(head),
        }
    }

    fn check_head(&self, has_head: Result<bool, ModelError>, label: &str) -> anyhow::Result<()> {
        match (self.speculate, has_head) {
            (SpeculationName::Head, Ok(false)) => usage(format!(
                "--speculate head needs a file with a head that drafts, and {label} has none: choose \
                 lookup, or draft with --draft-model MODEL"
            )),
            (SpeculationName::Head, Err(error)) => {
                Err(anyhow::Error::new(error).context(format!("the head of {label}")))
            }
            (_, Err(error)) => {
                warn(&format!("the head that drafts is not used: {error}"));
                Ok(())
            }
            (_, Ok(_)) => Ok(()),
        }
    }

    /// A head that was named and does not fit is a mistake; one that is incomplete is not used.
    fn check_joined(&self, used: Result<(), ModelError>, head: &HeadFile) -> anyhow::Result<()> {
        match (self.speculate, used) {
            (_, Ok(())) => Ok(()),
            (SpeculationName::Auto, Err(error @ ModelError::MissingTensor { .. })) => {
                let label = head.label();
                warn(&format!("the head {label} is not used: {error}"));
                Ok(())
            }
            (_, Err(error)) => {
                Err(anyhow::Error::new(error).context(format!("the head {}", head.label())))
            }
        }
    }

    /// The most tokens that are drafted at once.
    pub(crate) fn draft_max(&self) -> u32 {
        self.draft_max
    }
}

/// A file that drafts, where nothing says what for.
fn unused_draft_model<T>(model: &Path) -> anyhow::Result<T> {
    usage(format!(
        "--draft-model '{}' needs --speculate draft: give both",
        model.display()
    ))
}
