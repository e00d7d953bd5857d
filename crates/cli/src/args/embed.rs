//! The flags of `cellar embed`.
//!
//! Invariant: what comes out is JSON. Knows neither models nor how vectors are made.

use std::path::PathBuf;

use clap::{ArgAction, Args, ValueEnum};
use model_core::sentence::Pooling;

use super::count;
use crate::backends::{ActivationsName, BackendName, RepackName};

/// `cellar embed`
#[derive(Debug, Args)]
#[command(after_help = "\
Prints a JSON list with a vector for each text, in their order, one vector a line. Texts are the
arguments, or the lines of -f or of a pipe, empty ones too. They are computed many at a time; the
vector of a text does not depend on the others.

Vectors have length 1, so that the dot product of two is their cosine similarity: 1 for texts of the
same meaning, about 0 for unrelated ones. How the rows of a text become one vector is what the model
says: 1_Pooling/config.json of a sentence-transformers directory, or pooling_type of a GGUF file.

A text of more tokens than the model takes is an error that says how many; --truncate cuts its end
off, as sentence-transformers does. Prefixes that some models want (\"query: \") are part of the text.

Examples:
  cellar embed -m all-MiniLM-L6-v2/ \"How is the weather today?\" \"Is it raining?\"
  cellar embed -m MODEL.gguf -f lines.txt > vectors.json
  cellar embed -m MODEL.gguf -f lines.txt --truncate | jq '.[0] | length'")]
pub(crate) struct EmbedArgs {
    /// An encoder: a GGUF file, or a directory with config.json and safetensors
    #[arg(short, long, value_name = "FILE")]
    pub(crate) model: PathBuf,
    /// Texts, each an argument
    #[arg(value_name = "TEXT")]
    pub(crate) texts: Vec<String>,
    /// Read texts from a file, one a line
    #[arg(short, long, value_name = "FILE", conflicts_with = "texts")]
    pub(crate) file: Option<PathBuf>,
    /// Cut off what a text has too many of, instead of failing
    #[arg(long, action = ArgAction::SetTrue)]
    pub(crate) truncate: bool,
    /// How the rows of a text become one vector [default: as the model says]
    #[arg(long, value_enum)]
    pub(crate) pooling: Option<PoolingName>,
    /// Leave vectors as long as pooling made them
    #[arg(long, action = ArgAction::SetTrue)]
    pub(crate) no_normalize: bool,
    /// What computes
    #[arg(long, value_enum, default_value_t)]
    pub(crate) backend: BackendName,
    /// How the cpu backend keeps activations that meet quantised weights
    #[arg(long, value_enum, default_value_t)]
    pub(crate) activations: ActivationsName,
    /// Whether the cpu backend brings weights into the order in which it reads them
    #[arg(long, value_enum, default_value_t)]
    pub(crate) repack: RepackName,
    /// Threads that compute [default: one for each physical core]
    #[arg(short, long, value_name = "N",
          allow_negative_numbers = true, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) threads: Option<u16>,
    /// Tokens of several texts computed at once; a longer text is computed alone
    #[arg(short, long, value_name = "N", default_value_t = 2048,
          allow_negative_numbers = true, value_parser = count())]
    pub(crate) batch: u32,
}

/// How rows become one, as it is called on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PoolingName {
    /// The mean of all rows
    Mean,
    /// The row of the mark before the text
    Cls,
    /// The row of the last token
    Last,
}

impl From<PoolingName> for Pooling {
    fn from(name: PoolingName) -> Self {
        match name {
            PoolingName::Mean => Self::Mean,
            PoolingName::Cls => Self::Cls,
            PoolingName::Last => Self::Last,
        }
    }
}
