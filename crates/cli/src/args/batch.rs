//! The flags of `cellar batch`.
//!
//! Invariant: input and output are JSON lines. Knows neither models nor how requests are computed.

use std::path::PathBuf;

use clap::{ArgAction, Args};

use super::{
    EngineArgs, FileArgs, ParallelArgs, PredictLimit, SamplerArgs, SpeculationArgs, TraceArgs,
    VisionArgs, top_logprobs,
};

/// `cellar batch`
#[derive(Debug, Args)]
#[command(after_help = "\
Each line of the input is a JSON object with \"prompt\" (a text to continue) or \"messages\" (a list
of {\"role\", \"content\"}, rendered by the model's chat template), and perhaps \"id\", \"max_tokens\",
\"min_tokens\", \"temperature\", \"top_k\", \"top_p\", \"min_p\", \"top_n_sigma\", \"typical_p\",
\"repeat_penalty\", \"presence_penalty\", \"frequency_penalty\", \"dry_multiplier\", \"xtc_probability\",
\"xtc_threshold\", \"logit_bias\" (an object: numbers by token id), \"logprobs\", \"prompt_logprobs\" (at
most 20), \"n\" (texts of the prompt, with seeds that follow each other), \"best_of\" (compute so
many, give the \"n\" with the highest mean log probability), \"seed\", \"stop\" (a text or a list),
\"schema\" (a JSON schema for the text) and \"speculate\" (off, lookup, draft, head or auto). Flags
give the values that a line leaves out. All lines are checked before anything is computed.

The \"content\" of a message may be a list of parts, {\"type\": \"text\", \"text\"} and
{\"type\": \"image_url\", \"image_url\": {\"url\"}}, for models with a vision tower, or
{\"type\": \"input_audio\", \"input_audio\": {\"data\"}} in base64 and {\"type\": \"audio_url\",
\"audio_url\": {\"url\"}}, for models with an audio tower. The address of a picture or a sound is a
data: URL in base64 or the name of a file.

Each line of the output is a JSON object with \"index\" (from 0), \"id\", \"text\", \"tokens\",
\"prompt_tokens\", \"finish_reason\" and \"reuse\" (how many tokens of the prompt were computed for
another request, and why not more), in the order of the input; \"logprobs\" and \"prompt_logprobs\"
where a request asks for them; the first token of a prompt has none. With several texts, \"texts\" is
a list of objects with their \"text\", \"tokens\", \"finish_reason\" and \"logprobs\". A request that
fails, because its prompt does not fit for example, has \"error\" instead, and the exit code is 1.

Lines of OpenAI's Batch API ({\"custom_id\", \"url\", \"body\"}) are answered in its form, with \"index\" in
addition. The model that they name is ignored.

Requests are computed together, as many as --parallel allows and the memory (-c, of all together)
holds. The text of each request is the same as alone (on the cpu backend, to the byte). A prompt
reuses the prefix that it shares with cached ones.

Examples:
  cellar batch -m MODEL.gguf -f prompts.jsonl > answers.jsonl
  cellar batch -m MODEL.gguf -f prompts.jsonl -o answers.jsonl --resume
  cellar batch -m MODEL.gguf -f prompts.jsonl --parallel 32 -c 32768 --temp 0
  jq -c '{prompt: .question, id: .id}' questions.jsonl | cellar batch -m MODEL.gguf -f -")]
#[command(mut_arg("mirostat_lr", |arg| arg.requires("mirostat")))]
#[command(mut_arg("mirostat_ent", |arg| arg.requires("mirostat")))]
pub(crate) struct BatchArgs {
    #[command(flatten)]
    pub(crate) model: FileArgs,
    #[command(flatten)]
    pub(crate) vision: VisionArgs,
    /// JSON lines with the requests
    #[arg(short, long, value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// Write the answers to a file under its own name, line by line, for --resume [default: stdout]
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Continue an output file: requests whose lines it has are not computed again
    #[arg(long, action = ArgAction::SetTrue, requires = "output")]
    pub(crate) resume: bool,
    #[command(flatten)]
    pub(crate) parallel: ParallelArgs,
    #[command(flatten)]
    pub(crate) trace: TraceArgs,
    /// Tokens to generate at most for each request; -1 as many as the context holds
    #[arg(
        short = 'n',
        long,
        visible_alias = "n-predict",
        value_name = "N",
        default_value = "256"
    )]
    pub(crate) predict: PredictLimit,
    /// Give the log probability of each token, and of the N likeliest in its place, at most 20
    #[arg(long, value_name = "N", value_parser = top_logprobs())]
    pub(crate) logprobs: Option<u32>,
    #[command(flatten)]
    pub(crate) sampler: SamplerArgs,
    #[command(flatten, next_help_heading = "Speculative decoding")]
    pub(crate) speculation: SpeculationArgs,
    #[command(flatten, next_help_heading = "Computation and memory")]
    pub(crate) engine: EngineArgs,
}
