//! The flags of `cellar embed`.
//!
//! Invariant: the output is JSON. Knows neither models nor how embeddings are computed.

use std::path::PathBuf;

use clap::{ArgAction, Args, ValueEnum};
use model_core::sentence::Pooling;

use super::count;
use crate::backends::{ActivationsName, BackendName, RepackName};

/// `cellar embed`
#[derive(Debug, Args)]
#[command(after_help = "\
Prints a JSON list with one vector per text, in order, one vector per line. Texts are the arguments,
or the lines of -f or of standard input, including empty ones. Several texts are computed at once;
the vector of a text does not depend on the others.

Vectors have length 1, so the dot product of two is their cosine similarity: near 1 for texts of the
same meaning, near 0 for unrelated ones. Pooling (how the rows of all tokens become one vector) is
read from the model: 1_Pooling/config.json of a sentence-transformers directory, or pooling_type of a
GGUF file.

A text with more tokens than the model takes is an error that reports both numbers; --truncate cuts
off its end, as sentence-transformers does. Prefixes that some models expect (\"query: \") are part of
the text.

Examples:
  cellar embed -m all-MiniLM-L6-v2/ \"How is the weather today?\" \"Is it raining?\"
  cellar embed -m MODEL.gguf -f lines.txt > vectors.json
  cellar embed -m MODEL.gguf -f lines.txt --truncate | jq '.[0] | length'")]
pub(crate) struct EmbedArgs {
    /// Encoder: a GGUF file, a directory with config.json and safetensors, or the name of a
    /// downloaded model
    #[arg(short, long, value_name = "FILE")]
    pub(crate) model: PathBuf,
    /// Texts, one per argument
    #[arg(value_name = "TEXT")]
    pub(crate) texts: Vec<String>,
    /// Read texts from a file, one per line
    #[arg(short, long, value_name = "FILE", conflicts_with = "texts")]
    pub(crate) file: Option<PathBuf>,
    /// Cut off tokens beyond the model's limit instead of failing
    #[arg(long, action = ArgAction::SetTrue)]
    pub(crate) truncate: bool,
    /// How the rows of a text become one vector [default: as in the model's files]
    #[arg(long, value_enum)]
    pub(crate) pooling: Option<PoolingName>,
    /// Do not scale vectors to length 1
    #[arg(long, action = ArgAction::SetTrue)]
    pub(crate) no_normalize: bool,
    /// Backend that computes
    #[arg(long, value_enum, default_value_t)]
    pub(crate) backend: BackendName,
    /// Type of the activations that the cpu backend multiplies with quantised weights
    #[arg(long, value_enum, default_value_t)]
    pub(crate) activations: ActivationsName,
    /// Whether the cpu backend repacks weights into an interleaved SIMD layout
    #[arg(long, value_enum, default_value_t)]
    pub(crate) repack: RepackName,
    /// Threads that compute [default: one per physical core]
    #[arg(short, long, value_name = "N",
          allow_negative_numbers = true, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) threads: Option<u16>,
    /// Tokens of several texts computed at once; a longer text is computed alone
    #[arg(short, long, value_name = "N", default_value_t = 2048,
          allow_negative_numbers = true, value_parser = count())]
    pub(crate) batch: u32,
}

/// [`Pooling`] on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PoolingName {
    /// The mean of all rows
    Mean,
    /// The row of the first token (CLS)
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
