//! The flags of `cellar pull`, `list` and `rm`.
//!
//! Invariant: a name is one that the hub could have. Opens no connection.

use cellar_hub::ModelName;
use clap::Args;

/// `cellar pull`
#[derive(Debug, Args)]
#[command(after_help = "\
Downloads a model from the Hugging Face Hub and prints the path of its file or directory. A name is
OWNER/NAME, with a quantization where the repository has several: OWNER/NAME:Q8_0. Without one,
Q4_K_M or the nearest type is taken, and the others are listed. A repository without GGUF files
gives its safetensors files with config.json and the tokenizer.

Models are kept in the cache that Hugging Face's tools share. Sizes and hashes are verified. A
download that ends early, by Ctrl-C too, is continued by the same command.

Variables: HF_TOKEN (or the file HF_HOME/token) for gated and private models; HF_ENDPOINT, another
server; HF_HOME or HF_HUB_CACHE, the place of the cache; HF_HUB_OFFLINE=1 forbids downloads;
SSL_CERT_FILE, a PEM file of the certificates to trust instead of this machine's.

Examples:
  cellar pull OWNER/NAME-GGUF
  cellar pull OWNER/NAME-GGUF:Q8_0
  cellar run -m OWNER/NAME-GGUF:Q8_0 \"Once upon a time\"")]
pub(crate) struct PullArgs {
    /// Repository, and quantization: OWNER/NAME or OWNER/NAME:QUANT
    pub(crate) name: ModelName,
}

/// `cellar list`
#[derive(Debug, Args)]
#[command(after_help = "\
Models that other tools downloaded into the same cache are shown, too. Every name can be given to
-m.

Examples:
  cellar list
  cellar list --json")]
pub(crate) struct ListArgs {
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// `cellar rm`
#[derive(Debug, Args)]
#[command(after_help = "\
Without a quantization, everything of the repository is removed: all its models, files that other
tools downloaded of it into the same cache, and interrupted downloads.

Examples:
  cellar rm OWNER/NAME-GGUF:Q8_0
  cellar rm OWNER/NAME-GGUF")]
pub(crate) struct RmArgs {
    /// Model or repository, as 'cellar list' shows it
    pub(crate) name: ModelName,
}
