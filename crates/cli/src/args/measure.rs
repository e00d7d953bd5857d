//! The flags of the commands that measure: `kl`, `bench`, `perplexity` and `imatrix`.
//!
//! Invariant: each has those flags of model, backend and memory that have an effect on it.
//! Knows nothing of how things are measured: [`crate::commands`] does.

use std::path::PathBuf;

use clap::Args;

use super::{
    Arrivals, BatchSize, ComputeArgs, EngineArgs, FileArgs, ModelTextArgs, SpeculationArgs,
    TraceArgs, count, count_or_none,
};

/// `cellar kl`
#[derive(Debug, Args)]
#[command(after_help = "\
Evaluates the text twice, with K and V stored as f32 and as --kv-type selects, and compares the
predictions at every token: the Kullback-Leibler divergence in nats, how often the most likely token
is the same, and both perplexities.

Examples:
  cellar kl MODEL.gguf -f TEXT.md --kv-type q8_0
  cellar kl -m MODEL.gguf -f TEXT.md --kv-type-k q8_0 --kv-type-v q4_0 --kv-rotation off --json")]
pub(crate) struct KlArgs {
    #[command(flatten)]
    pub(crate) input: ModelTextArgs,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten, next_help_heading = "Computation and memory")]
    pub(crate) compute: ComputeArgs,
}

/// `cellar bench`
#[derive(Debug, Args)]
#[command(after_help = "\
Each repetition evaluates a prompt of -p tokens and then, separately, -n tokens one by one; both
after --depth tokens that are not counted. A warm-up repetition without depth is not counted
either. With several --seqs the tokens of all are counted, and each step generates one token per
sequence. With --clients one request warms up, which --trace writes, too. Each request has a
prompt of --depth and -p tokens and a text of -n tokens. The time to first token begins when a
request is sent, and inter-token latency is between pieces of text as a client sees them. With
--arrivals, requests come at a rate, as with the --request-rate of 'vllm bench serve'. A request
that finds N others running waits, and its times count from its arrival. With --times, \"outside\"
is the time between the backend's steps: finding cells, preparing inputs.

Examples:
  cellar bench -m MODEL.gguf -p 512 -n 64 -t 8
  cellar bench -m MODEL.gguf -p 0 -n 128 --depth 4096 -r 3 --json
  cellar bench -m MODEL.gguf --times
  cellar bench -m MODEL.gguf -p 0 -n 32 --depth 2048 --seqs 16 --share-depth
  cellar bench -m MODEL.gguf -p 32 -n 32 --depth 2048 --share-depth --clients 16 -r 1
  cellar bench -m MODEL.gguf -p 512 -n 64 --clients 16 -r 4 --arrivals 0.5/s --json")]
#[command(mut_arg("draft_max", |arg| arg.requires("speculate")))]
pub(crate) struct BenchArgs {
    #[command(flatten)]
    pub(crate) model: FileArgs,
    /// Tokens of the prompt; 0 skips it
    #[arg(short = 'p', long, value_name = "N", default_value_t = 512, value_parser = count_or_none())]
    pub(crate) prompt: u32,
    /// Tokens to generate; 0 skips generation
    #[arg(short = 'n', long, visible_alias = "n-predict", value_name = "N", default_value_t = 64, value_parser = count_or_none())]
    pub(crate) predict: u32,
    /// Repetitions
    #[arg(short, long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) reps: u32,
    /// Tokens in the memory before each measurement
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = count_or_none())]
    pub(crate) depth: u32,
    /// Concurrent sequences, each with its own prompt, depth and one token per step
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = count())]
    pub(crate) seqs: u32,
    /// Share the tokens of --depth among all sequences, like a system prompt
    #[arg(long, requires = "depth")]
    pub(crate) share_depth: bool,
    /// Clients of a service in this process, each of which sends -r requests one after the other
    #[arg(long, value_name = "N", conflicts_with_all = ["seqs", "times"], value_parser = clap::value_parser!(u32).range(1..=512))]
    pub(crate) clients: Option<u32>,
    /// With --clients: N times -r requests come over time, and N run at once: at random (a Poisson
    /// process) with 2/s or 30/min, at fixed intervals with 500ms or 2s, all at once with inf
    #[arg(long, value_name = "RATE", requires = "clients")]
    pub(crate) arrivals: Option<Arrivals>,
    /// Seed of the random times of --arrivals
    #[arg(long, value_name = "N", default_value_t = 1, requires = "arrivals")]
    pub(crate) seed: u64,
    /// With --clients: milliseconds that a step may take while tokens are generated; 0 is no limit
    #[arg(long, value_name = "MS", default_value_t = 200, value_parser = count_or_none(), requires = "clients")]
    pub(crate) step_ms: u32,
    #[command(flatten)]
    pub(crate) trace: TraceArgs,
    #[command(flatten, next_help_heading = "Speculative decoding, with --clients")]
    pub(crate) speculation: SpeculationArgs,
    /// Show where the time goes, by kind of step: matmul, attention, …
    #[arg(long)]
    pub(crate) times: bool,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten, next_help_heading = "Computation and memory")]
    pub(crate) engine: EngineArgs,
}

/// `cellar perplexity`
#[derive(Debug, Args)]
#[command(after_help = "\
The text is cut into chunks of --ctx tokens [default: 512], and the second half of each is scored,
as in llama-perplexity, so results are comparable.

Examples:
  cellar perplexity MODEL.gguf -f notes.txt
  cellar perplexity -m MODEL.gguf -f notes.txt -c 2048 --json")]
pub(crate) struct PerplexityArgs {
    #[command(flatten)]
    pub(crate) model: FileArgs,
    /// The text
    #[arg(short, long, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// Stop after this many chunks [default: all]
    #[arg(long, value_name = "N", value_parser = count())]
    pub(crate) chunks: Option<u32>,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten, next_help_heading = "Computation and memory")]
    pub(crate) compute: ComputeArgs,
    #[command(flatten)]
    pub(crate) size: BatchSize,
}

/// `cellar imatrix`
#[derive(Debug, Args)]
#[command(after_help = "\
Evaluates the text in chunks of --ctx tokens [default: 512] and sums, for each weight matrix of
the layers, the squares of the columns that it multiplies; for matrices of experts by expert.
'cellar convert --imatrix' and llama-quantize read the file. Take a text of the kind that the
model will see, of some hundred chunks.

Examples:
  cellar imatrix -m MODEL.gguf -f calibration.txt
  cellar imatrix -m DIRECTORY -f calibration.txt -o model.imatrix.gguf --chunks 100
  cellar convert DIRECTORY model.gguf --type q4_k_m --imatrix imatrix.gguf")]
pub(crate) struct ImatrixArgs {
    #[command(flatten)]
    pub(crate) model: FileArgs,
    /// The text
    #[arg(short, long, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// Output file, in GGUF form
    #[arg(
        short,
        long,
        visible_alias = "output",
        value_name = "FILE",
        default_value = "imatrix.gguf"
    )]
    pub(crate) out: PathBuf,
    /// Stop after this many chunks [default: all]
    #[arg(long, value_name = "N", value_parser = count())]
    pub(crate) chunks: Option<u32>,
    /// Also record the output matrix, and others outside of layers
    #[arg(long)]
    pub(crate) process_output: bool,
    #[command(flatten, next_help_heading = "Computation and memory")]
    pub(crate) compute: ComputeArgs,
    #[command(flatten)]
    pub(crate) size: BatchSize,
}
