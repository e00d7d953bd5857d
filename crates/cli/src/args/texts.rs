//! What the commands that compute whole texts have in common: backend, batch and length.
//!
//! Knows nothing of what is computed of them.

use clap::{ArgAction, Args};

use super::{ContextSize, count};
use crate::backends::{ActivationsName, BackendName, RepackName};

/// How whole texts are computed.
#[derive(Debug, Args)]
pub(crate) struct TextArgs {
    /// Cut off tokens beyond the model's limit instead of failing
    #[arg(long, action = ArgAction::SetTrue)]
    pub(crate) truncate: bool,
    /// Longest text in tokens, at most the trained length; 0 takes that [default: the length that
    /// the model was made for; for a decoder at most 4096]
    #[arg(short, long, visible_alias = "ctx-size", value_name = "N")]
    pub(crate) ctx: Option<ContextSize>,
    /// Backend that computes [default: auto]
    #[arg(long, value_enum)]
    pub(crate) backend: Option<BackendName>,
    /// Type of the activations that are multiplied with quantised weights
    #[arg(long, value_enum, default_value_t)]
    pub(crate) activations: ActivationsName,
    /// Whether the cpu backend repacks weights into an interleaved SIMD layout
    #[arg(long, value_enum, default_value_t)]
    pub(crate) repack: RepackName,
    /// Threads that compute [default: one per physical core]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) threads: Option<u16>,
    /// Tokens of several texts computed at once; a longer text is computed alone
    #[arg(short, long, value_name = "N", default_value_t = 2048, value_parser = count())]
    pub(crate) batch: u32,
}
