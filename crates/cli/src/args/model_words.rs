//! The model and the texts of commands whose arguments are texts: `tokenize`, `kl`, `embed`,
//! `rerank`.
//!
//! Invariant: an argument is the model only where `-m` gives none. Knows nothing of what texts are
//! for.

use std::path::{Path, PathBuf};

use clap::Args;

use super::ModelArgs;
use crate::failure::usage;
use crate::shortcut::{is_model_here, names_model};

/// The model and one text.
#[derive(Debug, Args)]
pub(crate) struct ModelTextArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// The model, where -m gives none. An only argument is the text, unless it ends in .gguf or is
    /// a directory with config.json
    #[arg(value_name = "MODEL")]
    first: Option<String>,
    /// The text
    #[arg(value_name = "TEXT")]
    second: Option<String>,
    /// Read the text from a file
    #[arg(short, long, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
}

impl ModelTextArgs {
    /// Finds out which of the arguments is the model and which the text.
    ///
    /// # Errors
    /// A usage error where there are two texts.
    pub(crate) fn assign(&mut self) -> anyhow::Result<()> {
        let words = [self.first.take(), self.second.take()];
        let mut words: Vec<String> = words.into_iter().flatten().collect();
        let is_pair = words.len() == 2;
        take_model(&mut self.model.model, &mut words, |first| {
            is_pair || is_model_here(first)
        });
        if let [first, second] = &words[..] {
            return usage(format!(
                "two texts and -m: put the text in quotes, \"{first} {second}\""
            ));
        }
        self.second = words.pop();
        check_file(self.second.as_deref(), self.file.as_deref())
    }

    /// The model, where the command line has one.
    pub(crate) fn model(&self) -> Option<&Path> {
        self.model.model.as_deref()
    }

    /// The text, where it is an argument.
    pub(crate) fn text(&self) -> Option<&str> {
        self.second.as_deref()
    }
}

/// The model and any number of texts.
#[derive(Debug, Args)]
pub(crate) struct ModelTextsArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Texts, one per argument. Without -m, the first is the model where it ends in .gguf or is a
    /// directory with config.json, or where it is OWNER/NAME and others follow
    #[arg(value_name = "TEXT")]
    texts: Vec<String>,
    /// Read texts from a file, one per line
    #[arg(short, long, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
}

impl ModelTextsArgs {
    /// Finds out whether the first of the arguments is the model.
    ///
    /// # Errors
    /// A usage error where there are texts and a file of texts.
    pub(crate) fn assign(&mut self) -> anyhow::Result<()> {
        let has_more = self.texts.len() > 1 || self.file.is_some();
        take_model(&mut self.model.model, &mut self.texts, |first| {
            is_model_here(first) || has_more && names_model(first)
        });
        check_file(self.texts.first().map(String::as_str), self.file.as_deref())
    }

    /// The model, where the command line has one.
    pub(crate) fn model(&self) -> Option<&Path> {
        self.model.model.as_deref()
    }

    /// The texts that are arguments.
    pub(crate) fn texts(&self) -> &[String] {
        &self.texts
    }
}

/// Makes the first of the words the model where there is none and it is one.
fn take_model(
    model: &mut Option<PathBuf>,
    words: &mut Vec<String>,
    is_model: impl Fn(&str) -> bool,
) {
    if model.is_none() && words.first().is_some_and(|first| is_model(first)) {
        *model = Some(PathBuf::from(words.remove(0)));
    }
}

/// Checks that a text and a file of texts are not both given.
fn check_file(text: Option<&str>, file: Option<&Path>) -> anyhow::Result<()> {
    match (text, file) {
        (Some(text), Some(file)) => usage(format!(
            "-f '{}' cannot be used with the text '{text}': leave out one of them",
            file.display()
        )),
        _ => Ok(()),
    }
}
