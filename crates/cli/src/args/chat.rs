//! The flags of `cellar chat`.
//!
//! Invariant: a conversation has the sampling, memory and computation flags of `cellar run`. Knows
//! nothing of how messages are read.

use clap::Args;

use super::{EngineArgs, ModelArgs, SamplerArgs, count};

/// `cellar chat`
#[derive(Debug, Args)]
#[command(after_help = "\
Each line is a message; a line that ends with \\ continues on the next one. The conversation stays in
the memory: for each answer, only the new message is evaluated.

  /clear   forget the conversation except the system message
  /help    show these commands
  /exit    end the program, as Ctrl-D does

Ctrl-C ends an answer; at the prompt it ends the program. Without a terminal, messages are the lines
of standard input, and only answers are printed.

Examples:
  cellar chat -m MODEL.gguf
  cellar chat -m MODEL.gguf --system \"Answer in one sentence.\" -c 8192 --kv-type q8_0
  printf 'Hello!\\nAnd in French?\\n' | cellar chat -m MODEL.gguf --temp 0")]
pub(crate) struct ChatArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// System message before the first message
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,
    /// Maximum tokens per answer [default: as many as the context holds]
    #[arg(short = 'n', long, value_name = "N",
          allow_negative_numbers = true, value_parser = count())]
    pub(crate) predict: Option<u32>,
    /// Stop an answer before this string; may be given several times
    #[arg(long, value_name = "TEXT")]
    pub(crate) stop: Vec<String>,
    #[command(flatten)]
    pub(crate) sampler: SamplerArgs,
    #[command(flatten, next_help_heading = "Computation and memory")]
    pub(crate) engine: EngineArgs,
}
