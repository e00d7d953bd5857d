//! The command line: flags, their documentation, and the limits of each flag alone.
//!
//! Knows neither defaults that depend on the model or machine nor most conflicts between flags:
//! [`crate::resolve`] does.

mod adapters;
mod arrivals;
mod batch;
mod byte_size;
mod chat;
mod convert;
mod describe;
mod diffusion;
mod embed;
mod experts;
#[cfg(feature = "hub")]
mod hub;
#[cfg(feature = "serve")]
#[cfg(feature = "kv-events")]
mod kv_events;
mod measure;
mod model_words;
mod overrides;
mod parallel;
mod rerank;
mod run;
mod sampler;
mod serve;
mod speculate;
mod state;
mod store;
mod swap;
mod texts;
mod trace;
mod values;

use std::path::{Path, PathBuf};

use clap::builder::RangedI64ValueParser;
use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};

use cellar_engine::MAX_TOP_LOGPROBS;
use kv_rows::KvType;

use crate::backends::{ActivationsName, BackendName, RepackName};
use crate::kv_args::KvArgs;

pub(crate) use adapters::{AdapterArgs, LoraFlag};
pub(crate) use arrivals::Arrivals;
pub(crate) use batch::BatchArgs;
pub(crate) use chat::ChatArgs;
pub(crate) use convert::{ConvertArgs, OutputType};
pub(crate) use describe::{CompletionsArgs, ManArgs};
pub(crate) use embed::EmbedArgs;
pub(crate) use experts::{ExpertArgs, RamArgs};
#[cfg(feature = "hub")]
pub(crate) use hub::{ListArgs, PullArgs, RmArgs};
pub(crate) use measure::{BenchArgs, ImatrixArgs, KlArgs, PerplexityArgs};
pub(crate) use model_words::ModelTextArgs;
pub(crate) use overrides::OverrideArgs;
pub(crate) use parallel::ParallelArgs;
pub(crate) use rerank::RerankArgs;
pub(crate) use run::RunArgs;
pub(crate) use sampler::SamplerArgs;
#[cfg(feature = "serve")]
pub(crate) use serve::{LogFormat, LogLevel, ServeArgs};
pub(crate) use speculate::{SpeculationArgs, SpeculationName};
pub(crate) use state::{StateArgs, StateCommand, StateInspectArgs};
#[cfg(feature = "serve")]
pub(crate) use store::StoreArgs;
pub(crate) use swap::SwapArgs;
pub(crate) use texts::TextArgs;
pub(crate) use trace::{ReplayArgs, TraceArgs, TraceFormat};
pub(crate) use values::{
    ContextSize, MirostatVersion, PredictLimit, Seed, answer_limit, thinking_limit,
};

/// Parses a number of at least 1.
fn count() -> RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=1 << 30)
}

/// Parses a number of at least 0.
fn count_or_none() -> RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(0..=1 << 28)
}

/// Parses how many of the likeliest tokens log probabilities are given of.
fn top_logprobs() -> RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(0..=MAX_TOP_LOGPROBS as i64)
}

/// Runs language models from GGUF files and safetensors directories.
#[derive(Debug, Parser)]
#[command(name = "cellar", version, long_version = env!("CELLAR_VERSION"), max_term_width = 100)]
#[command(after_help = "\
Examples:
  cellar run                                    generate a story with the built-in model
  cellar run MODEL.gguf \"What is 2+2?\"          answer a message
  cellar MODEL.gguf                             chat with a model
  cellar inspect MODEL.gguf -c 8192             show the model and the size of its memory
  cellar bench -m MODEL.gguf -p 512 -n 64

Where a file is read or written, - stands for stdin or stdout. A file that is written is replaced
when it is complete, following links and keeping its mode. Devices, pipes, answers of a batch
and traces are written directly.

Flags of llama.cpp work (-c 0, -n -1, -sys TEXT, -ngl 0, -fa on, -no-cnv, …); for others the error
says what to write.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 ended by Ctrl-C.
Set CELLAR_MODEL=MODEL.gguf to make it the model of commands without -m.
Set CELLAR_LOG=debug to log on stderr. CELLAR_PORT=8000 and the like are flags of 'cellar serve'.
Set CELLAR_ISA=NAME to force an instruction set; an unknown name lists those of this machine,
and an empty one is the default.")]
pub(crate) struct Cli {
    /// The command to run.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Answer a message, or continue a text.
    Run(RunArgs),
    /// Chat with a model, one message per line.
    Chat(ChatArgs),
    /// Answer a file of requests, many at once.
    Batch(BatchArgs),
    /// Serve models over HTTP: the APIs of OpenAI, Anthropic, Ollama and llama-server.
    #[cfg(feature = "serve")]
    Serve(Box<ServeArgs>),
    /// Show the contents of a model file and the size of its memory.
    Inspect(InspectArgs),
    /// Show how much memory a model would need, without loading it.
    Plan(PlanArgs),
    /// List what can compute on this machine, and why the rest cannot.
    Devices(DevicesArgs),
    /// Print the compute graph of a model, or compare two.
    Graph(GraphArgs),
    /// Show the tokens of a text.
    Tokenize(TokenizeArgs),
    /// Write the logits of given tokens to a safetensors file.
    Logits(LogitsArgs),
    /// Measure how much the storage types of K and V change a model's predictions.
    Kl(KlArgs),
    /// Measure prompt and generation speed.
    Bench(BenchArgs),
    /// Replay a trace: how much requests would reuse with another memory or policy.
    Replay(ReplayArgs),
    /// Examine saved states.
    State(StateArgs),
    /// Measure how well a model predicts a text.
    Perplexity(PerplexityArgs),
    /// Print embedding vectors of texts.
    Embed(EmbedArgs),
    /// Order documents by how well they answer a query.
    Rerank(RerankArgs),
    /// Write a model directory as a GGUF file.
    Convert(ConvertArgs),
    /// Measure which columns of weight matrices matter, for 'convert --imatrix'.
    Imatrix(ImatrixArgs),
    /// Download a model from the Hugging Face Hub.
    #[cfg(feature = "hub")]
    Pull(PullArgs),
    /// List the downloaded models.
    #[cfg(feature = "hub")]
    List(ListArgs),
    /// Remove a downloaded model.
    #[cfg(feature = "hub")]
    Rm(RmArgs),
    /// Print a completion script for a shell.
    Completions(CompletionsArgs),
    /// Write manual pages.
    #[command(hide = true)]
    Man(ManArgs),
}

/// The model.
#[derive(Debug, Args)]
pub(crate) struct ModelArgs {
    /// GGUF file (the first part of a split model), a directory with config.json and safetensors,
    /// or the name of a downloaded model: OWNER/NAME:QUANT [default: $CELLAR_MODEL, or else the
    /// built-in model]
    #[arg(short, long, value_name = "FILE")]
    pub(crate) model: Option<PathBuf>,
}

/// The model of a command that is about nothing else.
#[derive(Debug, Args)]
pub(crate) struct FileArgs {
    /// GGUF file, model directory or name of a downloaded model [default: $CELLAR_MODEL, or else
    /// the built-in model]
    #[arg(value_name = "MODEL")]
    named: Option<PathBuf>,
    /// The same, as a flag
    #[arg(short, long, value_name = "FILE", conflicts_with = "named")]
    model: Option<PathBuf>,
}

impl FileArgs {
    pub(crate) fn path(&self) -> Option<&Path> {
        self.named.as_deref().or(self.model.as_deref())
    }
}

/// The backend and what it computes with: what every command that runs a model has.
#[derive(Debug, Args)]
pub(crate) struct ComputeArgs {
    /// Backend that computes [default: auto]
    #[arg(long, value_enum)]
    pub(crate) backend: Option<BackendName>,
    /// Type of the activations that are multiplied with quantised weights
    #[arg(long, value_enum, default_value_t)]
    pub(crate) activations: ActivationsName,
    /// Whether the cpu backend repacks weights into an interleaved SIMD layout
    #[arg(long, value_enum, default_value_t)]
    pub(crate) repack: RepackName,
    /// How attention is computed
    #[arg(long, value_enum, default_value_t)]
    pub(crate) attention: AttentionName,
    /// Threads that compute [default: one per physical core]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) threads: Option<u16>,
    /// How many layers a GPU computes, counted from the last, while the CPU computes those before:
    /// 0 is --backend cpu, -1 is all [default: all, or as many as fit where no backend is named]
    #[arg(long, visible_alias = "n-gpu-layers", value_name = "N", hide_short_help = true, value_parser = values::gpu_layers)]
    pub(crate) gpu_layers: Option<u32>,
    #[command(flatten)]
    pub(crate) experts: ExpertArgs,
    /// Context size: tokens that the memory holds; 0 takes the trained length, auto as much of it
    /// as fits [default: the trained length, at most 4096; for 'cellar serve' at most half of the
    /// free memory]
    #[arg(short, long, visible_alias = "ctx-size", value_name = "N")]
    pub(crate) ctx: Option<ContextSize>,
    /// Maximum tokens computed at once
    #[arg(long, alias = "ubatch-size", value_name = "N", default_value_t = 512, value_parser = count())]
    pub(crate) ubatch: u32,
    #[command(flatten)]
    pub(crate) kv: KvArgs,
    #[command(flatten)]
    pub(crate) adapters: AdapterArgs,
    #[command(flatten)]
    pub(crate) overrides: OverrideArgs,
    /// Allocate the memory even if it may not fit this machine
    #[arg(long, action = ArgAction::SetTrue)]
    pub(crate) no_memory_check: bool,
}

/// The tower of a model that sees pictures or hears sounds.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct VisionArgs {
    /// GGUF file of the model's vision or audio tower [default: the model's directory, or the one
    /// mmproj file next to it]
    #[arg(long, value_name = "FILE")]
    pub(crate) mmproj: Option<PathBuf>,
}

/// The size of a batch.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct BatchSize {
    /// Maximum tokens of all sequences per call
    #[arg(short, long, alias = "batch-size", value_name = "N", default_value_t = 2048, value_parser = count())]
    pub(crate) batch: u32,
}

/// Cells of each sequence alone, or of all.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct StreamArgs {
    /// Give each sequence its own cells instead of sharing one pool
    #[arg(long, action = ArgAction::SetTrue)]
    pub(crate) streams: bool,
}

/// The backend, and all that can be said of the memory.
#[derive(Debug, Args)]
pub(crate) struct EngineArgs {
    #[command(flatten)]
    pub(crate) compute: ComputeArgs,
    #[command(flatten)]
    pub(crate) size: BatchSize,
    #[command(flatten)]
    pub(crate) streams: StreamArgs,
    /// Give layers with a sliding window as many cells as other layers
    #[arg(long, action = ArgAction::SetTrue)]
    pub(crate) swa_full: bool,
    /// Earlier states that recurrent layers keep per sequence, for going back
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1 << 16))]
    pub(crate) snapshots: u32,
}

/// How attention is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum AttentionName {
    /// In one step, over the visible cells of each token
    #[default]
    Fused,
    /// Scores, softmax and weighted sum as separate steps over all used cells: slow, for comparison
    Plain,
}

/// Texts that get longer than the context.
#[derive(Clone, Copy, Debug, Args)]
#[command(next_help_heading = "Texts longer than the context")]
pub(crate) struct LongContextArgs {
    /// When the memory is full, drop the older half of the tokens after the first --keep
    #[arg(long, conflicts_with = "group_attention_factor")]
    pub(crate) context_shift: bool,
    /// Tokens at the beginning that are never dropped, not counting a begin-of-sequence token
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = count_or_none(), requires = "context_shift")]
    pub(crate) keep: u32,
    /// Self-extend: groups of N older tokens share one position [default: no groups]
    #[arg(long, value_name = "N", value_parser = count())]
    pub(crate) group_attention_factor: Option<u32>,
    /// Self-extend: tokens grouped at once, a multiple of the factor
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = count(), requires = "group_attention_factor")]
    pub(crate) group_attention_width: u32,
}

/// Texts that continue in another process.
#[derive(Debug, Args)]
#[command(next_help_heading = "Saved states")]
pub(crate) struct SessionArgs {
    /// Continue from a saved state: the prompt, if any, is the next message, or follows the text
    #[arg(long, value_name = "FILE")]
    pub(crate) load_state: Option<PathBuf>,
    /// Save the state at the end, also after Ctrl-C; with - the text goes to stderr
    #[arg(long, value_name = "FILE")]
    pub(crate) save_state: Option<PathBuf>,
    /// Type in which K and V are saved [default: as they are stored]
    #[arg(long, value_name = "TYPE", requires = "save_state")]
    pub(crate) save_kv_type: Option<KvType>,
    /// Type in which recurrent states are saved, q8_0 for example; the continuation may differ
    /// slightly [default: as they are stored]
    #[arg(long, value_name = "TYPE", requires = "save_state")]
    pub(crate) save_state_type: Option<KvType>,
}

/// `cellar inspect`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cellar inspect MODEL.gguf
  cellar inspect MODEL.gguf -c 32768 --kv-type f16 --json")]
pub(crate) struct InspectArgs {
    #[command(flatten)]
    pub(crate) file: FileArgs,
    /// Context size: tokens that the memory would hold [default: the trained length]
    #[arg(short, long, visible_alias = "ctx-size", value_name = "N")]
    pub(crate) ctx: Option<ContextSize>,
    #[command(flatten)]
    pub(crate) kv: KvArgs,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// `cellar plan`
#[derive(Debug, Args)]
#[command(after_help = "\
Reads only the header of the file. Counts the bytes of KV rows and recurrent states, layer by
layer, and the additions of the cpu backend: packed weights, and scratch memory for prompts of two
ubatches or more. The total is the memory of a process whose context is full. It leaves out
matrices of which only the rows of tokens are read (untied embeddings): these rows come from the
file as tokens need them, few for a text, nearly all for 'cellar bench', and the system may take
them away again.

Examples:
  cellar plan MODEL.gguf -c 32768
  cellar plan MODEL.gguf -c 8192 --seqs 4 --streams --kv-type f32 --json")]
#[command(mut_arg("draft_max", |arg| arg.requires("speculate")))]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    pub(crate) file: FileArgs,
    /// Sequences in memory at the same time
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) seqs: u32,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) ram: RamArgs,
    #[command(flatten)]
    pub(crate) swap: SwapArgs,
    #[command(flatten, next_help_heading = "Speculative decoding")]
    pub(crate) speculation: SpeculationArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}

/// `cellar devices`
#[derive(Debug, Args)]
#[command(after_help = "\
Lists every backend with its devices and their memory, or the reason why it cannot be used. A GPU
needs NVIDIA's driver only. CUDA_VISIBLE_DEVICES hides GPUs or changes their order: the first one
that can be used computes.

Examples:
  cellar devices
  cellar devices --json")]
pub(crate) struct DevicesArgs {
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// How a graph is printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum GraphFormat {
    /// One node per line.
    #[default]
    Text,
    /// Graphviz.
    Dot,
    /// The form that `graph diff` reads.
    Json,
}

/// The shape of a graph.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct ShapeArgs {
    /// Tokens of the ubatch
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = count())]
    pub(crate) tokens: u32,
    /// Tokens whose logits are computed
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = count_or_none())]
    pub(crate) outputs: u32,
}

/// `cellar graph`
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
#[command(after_help = "\
Examples:
  cellar graph --arch llama
  cellar graph MODEL.gguf --tokens 32 --format dot | dot -Tsvg > graph.svg
  cellar graph -m MODEL.gguf --format json -o OLD.json
  cellar graph diff llama qwen2
  cellar graph diff OLD.json MODEL.gguf --tokens 32 --structure")]
pub(crate) struct GraphArgs {
    #[command(subcommand)]
    pub(crate) command: Option<GraphCommand>,
    #[command(flatten)]
    pub(crate) model: FileArgs,
    /// Use a small example of this architecture instead of a file; its name alone is enough
    #[arg(long, value_name = "NAME", conflicts_with_all = ["model", "named"])]
    pub(crate) arch: Option<String>,
    #[command(flatten)]
    pub(crate) shape: ShapeArgs,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    pub(crate) format: GraphFormat,
    /// Output file [default: stdout]
    #[arg(
        short,
        long,
        visible_alias = "output",
        value_name = "FILE",
        default_value = "-",
        hide_default_value = true
    )]
    pub(crate) out: PathBuf,
}

/// The subcommands of `cellar graph`.
#[derive(Debug, Subcommand)]
pub(crate) enum GraphCommand {
    /// Show the nodes in which two graphs differ
    Diff(GraphDiffArgs),
}

/// `cellar graph diff`
#[derive(Debug, Args)]
#[command(after_help = "\
Layers with the same differences are one block. A line that begins with - is only in LEFT, with + only
in RIGHT, with ~ in both: {a | b} is a in LEFT and b in RIGHT. 'prev' is the layer before, 'last' the
last one. The exit code is 0 where the graphs are alike and 1 where they differ.

Examples:
  cellar graph diff llama qwen2
  cellar graph diff OLD.txt MODEL.gguf --tokens 32
  cellar graph diff SMALL.gguf LARGE.gguf --structure")]
pub(crate) struct GraphDiffArgs {
    /// A model, a graph that 'cellar graph' wrote as text or JSON (- reads it from stdin), or the
    /// name of an architecture
    pub(crate) left: String,
    /// The graph to compare it with: also a file, JSON or a name
    pub(crate) right: String,
    #[command(flatten)]
    pub(crate) shape: ShapeArgs,
    /// Compare operations and weights, not sizes and other numbers, nor how many layers are alike
    #[arg(long)]
    pub(crate) structure: bool,
    /// Compare this layer alone, counted from 0
    #[arg(long, value_name = "N")]
    pub(crate) layer: Option<usize>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// `cellar tokenize`
#[derive(Debug, Args)]
#[command(after_help = "\
Prints one token per line: its id, and the text that it writes; bytes that are no UTF-8 by
themselves as <0xF0>. The text is the argument, the file given with -f, or standard input,
unchanged.

Examples:
  cellar tokenize \"Hello world\"
  cellar tokenize MODEL.gguf \"Hello world\"
  cellar tokenize -m MODEL.gguf -f notes.txt --json")]
pub(crate) struct TokenizeArgs {
    #[command(flatten)]
    pub(crate) input: ModelTextArgs,
    /// Do not add the model's tokens at the beginning and end
    #[arg(long)]
    pub(crate) no_bos: bool,
    /// Treat the names of special tokens as plain text
    #[arg(long)]
    pub(crate) no_special: bool,
    /// Print one JSON object: tokens (ids), pieces (the text of each; null where it is not UTF-8),
    /// and not_utf8 (index and bytes of these)
    #[arg(long)]
    pub(crate) json: bool,
}

/// `cellar logits`
#[derive(Debug, Args)]
#[command(after_help = "\
The file holds f32 tensors [tokens, vocabulary]: 'logits' for one sequence; 'logits_0',
'logits_1', … for several, which are evaluated in one batch. K and V are stored as f32 unless
--kv-type is given.

--chunks evaluates every sequence in chunks of these sizes, repeating the list: --chunks 1 goes
token by token, --chunks 5,2 takes 5, 2, 5, 2, … tokens.

Examples:
  cellar logits -m MODEL.gguf --tokens 1,15043,3186 --out logits.safetensors
  cellar logits -m MODEL.gguf --tokens 1,2,3 --tokens 1,7,9,4 --out both.safetensors --ubatch 2")]
pub(crate) struct LogitsArgs {
    #[command(flatten)]
    pub(crate) model: FileArgs,
    /// Token ids of a sequence, separated by commas; once per sequence
    #[arg(long, value_name = "IDS")]
    pub(crate) tokens: Vec<String>,
    /// Token ids from a file, separated by commas or spaces, one sequence per line
    #[arg(long, value_name = "FILE", conflicts_with = "tokens")]
    pub(crate) tokens_file: Option<PathBuf>,
    /// Output file
    #[arg(short, long, value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// Evaluate the tokens in chunks of these sizes
    #[arg(long, value_name = "SIZES", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) chunks: Vec<u32>,
    #[command(flatten)]
    pub(crate) streams: StreamArgs,
    #[command(flatten)]
    pub(crate) compute: ComputeArgs,
}
