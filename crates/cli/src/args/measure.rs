//! The flags of the commands that measure: `kl`, `bench` and `perplexity`.
//!
//! Invariant: each can print one JSON object, and takes its model and engine as all commands do.
//! Knows neither what is measured nor how: that is [`crate::commands`]'.

use std::path::PathBuf;

use clap::Args;

use super::{EngineArgs, ModelArgs, count, count_or_none};

/// `cellar kl`
#[derive(Debug, Args)]
#[command(after_help = "\
Takes the text once with K and V as they were computed (f32) and once as --kv-type and its relatives
say, and compares what is predicted at every token: the Kullback-Leibler divergence in nats, how often
the most likely token is the same, and both perplexities.

Examples:
  cellar kl -m MODEL.gguf -f TEXT.md --kv-type q8_0
  cellar kl -m MODEL.gguf -f TEXT.md --kv-type-k q8_0 --kv-type-v q4_0 --kv-rotation off --json")]
pub(crate) struct KlArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// The text
    pub(crate) text: Option<String>,
    /// Read the text from a file
    #[arg(short, long, value_name = "FILE", conflicts_with = "text")]
    pub(crate) file: Option<PathBuf>,
    /// One JSON object
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}

/// `cellar bench`
#[derive(Debug, Args)]
#[command(after_help = "\
Each repetition evaluates a prompt of -p tokens, and then, apart from it, -n tokens one by one; both
after --depth tokens that are not counted. One repetition before the first, from no depth, is not
counted either. Of several --seqs the tokens of all are counted, and a step generates one for each.
With --times what is outside of all steps is the engine's: choosing cells, preparing inputs.

Examples:
  cellar bench -m MODEL.gguf -p 512 -n 64 -t 8
  cellar bench -m MODEL.gguf -p 0 -n 128 --depth 4096 -r 3 --json
  cellar bench -m MODEL.gguf --times
  cellar bench -m MODEL.gguf -p 0 -n 32 --depth 2048 --seqs 16 --share-depth")]
pub(crate) struct BenchArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Tokens of the prompt; 0 leaves it out
    #[arg(short = 'p', long, value_name = "N", default_value_t = 512,
          allow_negative_numbers = true, value_parser = count_or_none())]
    pub(crate) prompt: u32,
    /// Tokens to generate; 0 leaves it out
    #[arg(short = 'n', long, value_name = "N", default_value_t = 64,
          allow_negative_numbers = true, value_parser = count_or_none())]
    pub(crate) predict: u32,
    /// Repetitions
    #[arg(short, long, value_name = "N", default_value_t = 5,
          allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) reps: u32,
    /// Tokens in the memory before
    #[arg(long, value_name = "N", default_value_t = 0,
          allow_negative_numbers = true, value_parser = count_or_none())]
    pub(crate) depth: u32,
    /// Sequences side by side, each with a prompt, a depth and a token a step of its own
    #[arg(long, value_name = "N", default_value_t = 1,
          allow_negative_numbers = true, value_parser = count())]
    pub(crate) seqs: u32,
    /// Let all sequences share the tokens of --depth, as they do a system prompt
    #[arg(long, requires_all = ["seqs", "depth"])]
    pub(crate) share_depth: bool,
    /// Print where the time goes, by kinds of steps: matmul, attention, …
    #[arg(long)]
    pub(crate) times: bool,
    /// One JSON object
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}

/// `cellar perplexity`
#[derive(Debug, Args)]
#[command(after_help = "\
The text is cut into chunks of --ctx tokens [default: 512]; the second half of each is scored, as
llama-perplexity does it, so that figures compare.

Examples:
  cellar perplexity -m MODEL.gguf -f notes.txt
  cellar perplexity -m MODEL.gguf -f notes.txt -c 2048 --json")]
pub(crate) struct PerplexityArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// The text
    #[arg(short, long, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// Stop after this many chunks [default: all]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = count())]
    pub(crate) chunks: Option<u32>,
    /// One JSON object
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}
