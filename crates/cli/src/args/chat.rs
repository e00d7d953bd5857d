//! The flags of `cellar chat`.
//!
//! Invariant: a conversation has the sampling, memory and computation flags of `cellar run`. Knows
//! nothing of how messages are read.

use std::path::PathBuf;

use clap::Args;

use crate::commands::answer::ShowThinking;
use crate::constraint::ConstraintArgs;

use super::{
    EngineArgs, FileArgs, LongContextArgs, PredictLimit, SamplerArgs, SpeculationArgs, VisionArgs,
    values,
};

/// `cellar chat`
#[derive(Debug, Args)]
#[command(after_help = "\
Each line is a message; a line that ends with \\ continues on the next one, lines between \"\"\" and
\"\"\" are one message, and lines that are pasted belong together. The conversation stays in the
memory: for each answer, only the new message is evaluated. When the context is full, the model no
longer sees the oldest messages.

  /clear             begin again with the system message alone
  /undo, /regen      forget the last message and its answer; answer it again
  /system [TEXT]     show or change the system message
  /image FILE        show the model a picture, with the next message
  /audio FILE        play the model a sound, with the next message
  /save, /load FILE  save the conversation as JSON; continue a saved one
  /set [NAME VALUE]  show or change settings such as temp
  /show, /stats      show messages, prompt or template; show sizes and speeds
  /help, /exit       show all commands; end the program, as Ctrl-D does

Ctrl-C ends an answer or clears a line; twice on an empty line it ends the program. Without a
terminal, messages are the lines of standard input, and only answers are printed.

Lines typed at a terminal are kept in $XDG_STATE_HOME/cellar/history (by default in ~/.local/state);
CELLAR_HISTORY names another file, and --no-history or an empty CELLAR_HISTORY keeps none.

With --schema or --grammar each answer is one text that the schema or grammar allows, printed
without thinking. An answer that --predict, --stop or a full context ends too early is an error and
no part of the conversation.

Examples:
  cellar chat -m MODEL.gguf
  cellar chat -m MODEL.gguf --system \"Answer in one sentence.\" -c 8192 --kv-type q8_0
  cellar chat -m MODEL.gguf --schema person.json
  printf 'Hello!\\nAnd in French?\\n' | cellar chat -m MODEL.gguf --temp 0")]
#[command(mut_arg("draft_max", |arg| arg.requires("speculate")))]
#[command(mut_arg("mirostat_lr", |arg| arg.requires("mirostat")))]
#[command(mut_arg("mirostat_ent", |arg| arg.requires("mirostat")))]
pub(crate) struct ChatArgs {
    #[command(flatten)]
    pub(crate) model: FileArgs,
    #[command(flatten)]
    pub(crate) vision: VisionArgs,
    /// Show the model a picture (PNG, JPEG, WebP, GIF or BMP) before the first message; once per
    /// picture
    #[arg(long, value_name = "FILE")]
    pub(crate) image: Vec<PathBuf>,
    /// Play the model a sound (WAV, MP3 or FLAC) before the first message; once per sound
    #[arg(long, value_name = "FILE")]
    pub(crate) audio: Vec<PathBuf>,
    /// System message before the first message
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,
    /// Maximum tokens per answer; -1 takes as many as the context holds [default: -1]
    #[arg(short = 'n', long, visible_alias = "n-predict", value_name = "N", value_parser = values::answer_limit)]
    pub(crate) predict: Option<PredictLimit>,
    /// Stop an answer before this string; may be given several times
    #[arg(long, value_name = "TEXT")]
    pub(crate) stop: Vec<String>,
    /// Print the thinking of reasoning models: auto dims it on a terminal and hides it elsewhere
    #[arg(long, value_name = "WHEN", value_enum, default_value_t,
          num_args = 0..=1, require_equals = true, default_missing_value = "always")]
    pub(crate) show_thinking: ShowThinking,
    /// Tokens of thinking after which a reasoning model has to answer; 0 is none, and -1 no limit
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = values::thinking_limit,
          conflicts_with_all = ["schema", "grammar"])]
    pub(crate) reasoning_budget: Option<PredictLimit>,
    /// Print no notes
    #[arg(short, long)]
    pub(crate) quiet: bool,
    /// Neither read nor keep the lines typed at a terminal
    #[arg(long)]
    pub(crate) no_history: bool,
    #[command(flatten)]
    pub(crate) long_context: LongContextArgs,
    #[command(flatten)]
    pub(crate) constraint: ConstraintArgs,
    #[command(flatten)]
    pub(crate) sampler: SamplerArgs,
    #[command(flatten, next_help_heading = "Speculative decoding")]
    pub(crate) speculation: SpeculationArgs,
    #[command(flatten, next_help_heading = "Computation and memory")]
    pub(crate) engine: EngineArgs,
}
