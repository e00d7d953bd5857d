//! The flags of `cellar run`.
//!
//! Invariant: flags that contradict each other are refused here where neither model nor files are
//! needed to know it. Knows nothing of how prompts are read.

use std::path::PathBuf;

use clap::{ArgGroup, Args};

use super::diffusion::DiffusionArgs;
use super::{
    EngineArgs, LongContextArgs, ModelArgs, PredictLimit, SamplerArgs, SessionArgs,
    SpeculationArgs, VisionArgs, top_logprobs, values,
};
use crate::commands::answer::ShowThinking;
use crate::constraint::ConstraintArgs;
use crate::failure::usage;
use crate::models::default_model;
use crate::shortcut::names_model;

/// `cellar run`
#[derive(Debug, Args)]
#[command(after_help = "\
A model with a chat template answers: the prompt is a message, and only the answer is printed. With
--raw, or with a model that has no template, the text of the prompt continues: the prompt is printed
before its continuation.

The prompt is the argument (with or without -p), the file given with -f, or standard input; one line
break at the end of a file or of standard input is dropped. The text of -f, or of a pipe or a file
on standard input, comes before the argument, with an empty line between them. Next to an
argument a pipe has a second to bring something, and a file of which another program read a part is
left to it; -f - waits for all of standard input, and --no-stdin leaves it alone:
  while read -r q; do cellar run MODEL.gguf \"$q\"; done < questions.txt
  cat questions.txt | while read -r q; do cellar run MODEL.gguf --no-stdin \"$q\"; done
Without a model and a prompt, the built-in model generates a story.

Examples:
  cellar run MODEL.gguf \"Why is the sky blue?\"
  cellar run \"Once upon a time\" --temp 0
  cellar run -m MODEL.gguf -f question.txt --seed 7
  cat notes.txt | cellar run -m MODEL.gguf \"Summarise this.\"
  echo \"One day\" | cellar run -n 40 --json
  cellar run -m MODEL.gguf --schema person.json \"Who was Ada Lovelace?\"
  cellar run MODEL --image cat.jpg \"What is this?\"
  cellar run -m MODEL.gguf --raw -f book.txt -n 0 --save-state book.state
  cellar run -m MODEL.gguf --raw --load-state book.state \" In short,\"
  cellar run -m MODEL.gguf --load-state chat.state --save-state chat.state \"And then?\"

A saved state holds the tokens, their keys and values, and recurrent states. It holds no options:
sampling, seed, --stop and the context size are those of each run. With -n 0 the prompt is
evaluated and nothing is generated. Without a prompt, a loaded text continues where it ended.
Where a model with a chat template loads a state, the prompt is the message after the loaded
answer (with --raw: it follows the text); the template sees no earlier messages.

With --schema or --grammar only the generated text is printed, and it is complete, or the exit
code is 1. Keywords of a schema that are not supported are errors. Objects have the properties
that the schema names and no others, as in OpenAI's strict mode; \"additionalProperties\": true lets
others in.

A diffusion model (Dream, LLaDA) fills a text of -n masks [default: 128] in several steps, and
prints it when all are filled.

Ctrl-C ends the text, prints the statistics and exits with 130; a second one exits at once.")]
#[command(group(ArgGroup::new("objects").args(["json", "jsonl"]).multiple(true)))]
#[command(mut_arg("draft_max", |arg| arg.requires("speculate")))]
#[command(mut_arg("mirostat_lr", |arg| arg.requires("mirostat")))]
#[command(mut_arg("mirostat_ent", |arg| arg.requires("mirostat")))]
#[command(mut_arg("xtc_threshold", |arg| arg.requires("xtc_probability")))]
#[command(mut_arg("dry_base", |arg| arg.requires("dry_multiplier")))]
#[command(mut_arg("dry_allowed_length", |arg| arg.requires("dry_multiplier")))]
#[command(mut_arg("dry_penalty_last_n", |arg| arg.requires("dry_multiplier")))]
#[command(mut_arg("dry_sequence_breaker", |arg| arg.requires("dry_multiplier")))]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// The model, where -m gives none: as for -m. One text with a space is the prompt
    #[arg(value_name = "MODEL")]
    first: Option<String>,
    /// Text to continue, or the message to answer
    #[arg(value_name = "PROMPT")]
    second: Option<String>,
    /// The prompt, as an option
    #[arg(short, long, value_name = "PROMPT")]
    prompt: Option<String>,
    /// Read the text before the prompt, or the prompt itself, from a file; - waits for all of stdin
    #[arg(short, long, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// Show the model a picture (PNG, JPEG, WebP, GIF or BMP) before the prompt; once per picture
    #[arg(long, value_name = "FILE", conflicts_with_all = ["raw", "no_bos", "load_state"])]
    pub(crate) image: Vec<PathBuf>,
    /// Play the model a sound (WAV, MP3 or FLAC) before the prompt; once per sound
    #[arg(long, value_name = "FILE", conflicts_with_all = ["raw", "no_bos", "load_state"])]
    pub(crate) audio: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) vision: VisionArgs,
    /// Do not read standard input
    #[arg(long)]
    pub(crate) no_stdin: bool,
    /// Print no statistics, and no notes
    #[arg(short, long)]
    pub(crate) quiet: bool,
    /// Maximum tokens to generate; -1 takes as many as the context holds [default: 256; for an
    /// answer, as many as the context holds]
    #[arg(short = 'n', long, visible_alias = "n-predict", value_name = "N")]
    pub(crate) predict: Option<PredictLimit>,
    /// Require a chat template: the prompt is a message (the default where the model has one)
    #[arg(long)]
    pub(crate) chat: bool,
    /// Continue the prompt as it is, without the model's chat template
    #[arg(long, conflicts_with = "chat")]
    pub(crate) raw: bool,
    /// System message before the prompt
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["raw", "no_bos"])]
    pub(crate) system: Option<String>,
    /// Continue the prompt (--raw) without the model's begin-of-sequence token
    #[arg(long, conflicts_with = "chat")]
    pub(crate) no_bos: bool,
    /// Stop the text before this string; may be given several times
    #[arg(long, value_name = "TEXT")]
    pub(crate) stop: Vec<String>,
    #[command(flatten)]
    pub(crate) long_context: LongContextArgs,
    #[command(flatten)]
    pub(crate) session: SessionArgs,
    /// Print only the generated text, not the prompt that it continues
    #[arg(long)]
    pub(crate) no_echo: bool,
    /// Print one JSON object instead of the text: text (generated), tokens (its ids),
    /// prompt_tokens (their number), timings, …
    #[arg(long)]
    pub(crate) json: bool,
    /// Print a JSON object per piece of text while it is generated (piece, token), and last the
    /// object of --json
    #[arg(long, conflicts_with = "json")]
    pub(crate) jsonl: bool,
    /// With --json or --jsonl, give the log probability of each token, and of the N likeliest in
    /// its place, at most 20
    #[arg(long, value_name = "N", value_parser = top_logprobs(), requires = "objects")]
    pub(crate) logprobs: Option<u32>,
    /// With --json or --jsonl, the same for the tokens of the prompt
    #[arg(long, value_name = "N", value_parser = top_logprobs(), requires = "objects")]
    pub(crate) prompt_logprobs: Option<u32>,
    /// Print the thinking of reasoning models: auto dims it on a terminal and hides it elsewhere
    #[arg(long, value_name = "WHEN", value_enum, default_value_t,
          num_args = 0..=1, require_equals = true, default_missing_value = "always")]
    pub(crate) show_thinking: ShowThinking,
    /// Tokens of thinking after which a reasoning model has to answer; 0 is none, and -1 no limit
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = values::thinking_limit,
          conflicts_with_all = ["raw", "no_bos", "schema", "grammar"])]
    pub(crate) reasoning_budget: Option<PredictLimit>,
    #[command(flatten)]
    pub(crate) constraint: ConstraintArgs,
    #[command(flatten)]
    pub(crate) sampler: SamplerArgs,
    #[command(flatten, next_help_heading = "Speculative decoding")]
    pub(crate) speculation: SpeculationArgs,
    #[command(flatten)]
    pub(crate) diffusion: DiffusionArgs,
    #[command(flatten, next_help_heading = "Computation and memory")]
    pub(crate) engine: EngineArgs,
}

impl RunArgs {
    /// The prompt on the command line, with -p or without.
    pub(crate) fn prompt(&self) -> Option<&str> {
        self.prompt.as_deref()
    }

    /// Finds out which of the arguments is the model and which the prompt.
    ///
    /// # Errors
    /// A usage error with the line to write.
    pub(crate) fn assign_words(&mut self) -> anyhow::Result<()> {
        let mut words = [self.first.take(), self.second.take()]
            .into_iter()
            .flatten();
        let Some(first) = words.next() else {
            return Ok(());
        };
        let second = words.next();
        let is_named = self.model.model.is_some();
        let takes_prompt = self.prompt.is_none();
        let is_model = !is_named && (second.is_some() || !takes_prompt || names_model(&first));
        let prompt = match (is_model, second) {
            (true, second) => {
                self.model.model = Some(PathBuf::from(first));
                second
            }
            (false, None) => {
                let is_text = first.is_empty() || first.contains(char::is_whitespace);
                let has_model = is_named || default_model().is_some();
                if !is_text && !has_model && self.session.load_state.is_none() {
                    return usage(format!(
                        "'{first}' is no model that is here, and a prompt needs a model: 'cellar run \
                         OWNER/NAME \"{first}\"' answers it, 'cellar list' and 'cellar pull' give \
                         models; 'cellar run -p {first}' continues it with the built-in model"
                    ));
                }
                Some(first)
            }
            (false, Some(second)) => {
                return usage(format!(
                    "two texts and -m: put the prompt in quotes, \"{first} {second}\""
                ));
            }
        };
        match (prompt, takes_prompt) {
            (Some(prompt), false) => usage(format!("two prompts: leave out -p or '{prompt}'")),
            (Some(prompt), true) => {
                self.prompt = Some(prompt);
                Ok(())
            }
            (None, _) => Ok(()),
        }
    }
}
