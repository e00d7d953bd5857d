//! The flags of `cellar serve`.
//!
//! Invariant: a server that other machines reach needs keys, or the flag that says otherwise. Knows
//! neither models nor HTTP. Each flag can come from a file or a variable, too: see
//! `crate::settings`.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::{ArgAction, Args, ValueEnum};
#[cfg(feature = "serve")]
use model_core::adapters::AdapterSpec;

#[cfg(feature = "serve")]
use crate::adapters::ModelChanges;

use super::adapters::LoraModule;
use super::byte_size::ByteSize;
use super::store::StoreArgs;
use super::{
    EngineArgs, ParallelArgs, PredictLimit, SamplerArgs, SpeculationArgs, TraceArgs, VisionArgs,
    count, values,
};

/// `cellar serve`
#[derive(Debug, Args)]
#[command(after_help = "\
Serves models over HTTP, to clients of OpenAI's API (/v1/chat/completions, /v1/completions,
/v1/models; an encoder: /v1/embeddings; a reranker: /v1/rerank), of Anthropic's (/v1/messages),
of Ollama (/api/chat, /api/generate) and of llama-server (/completion, /tokenize, /props, /slots,
/health, /metrics). GET / is a chat and the live view of the memory for browsers, and lists the
endpoints to others. One line on stderr gives the address when the server is ready.

Requests are computed together, as many as --parallel allows and the memory (-c, of all together)
holds; more wait. The text of each request is the same as alone (on the cpu backend, to the byte). A
prompt reuses the prefix that it shares with cached ones of its key. A client that leaves frees its
place. Sampling flags are the defaults of requests.

Several models (-m A -m B) have the names of their files; -c and --parallel are those of each.
What they take together is checked before the first is loaded. Those of --models DIR are loaded
when a request names one, and unloaded after --idle-unload seconds without requests, or before
when another needs their memory (--memory); a model that does not fit is refused with the numbers
(507). A request without a name gets the first loaded model of the right kind.

Only this machine reaches 127.0.0.1, the default. Another --host needs --api-key-file, --api-key
or --no-auth: clients send a key as 'Authorization: Bearer KEY'. For TLS give --tls-cert and
--tls-key, or put a proxy in front, whose name is --allow-host. Web pages of other origins need
--allow-origin.

Each flag can be in a TOML file (--config FILE, 'port = 8000') or in a variable
(CELLAR_PORT=8000). The command line wins, then variables, then the file.

Ctrl-C or SIGTERM: new requests are refused (503), running ones get --drain seconds to end. A second
Ctrl-C ends at once. With --cache-dir DIR, cached prefixes outlive a restart.

Examples:
  cellar serve
  cellar serve -m MODEL.gguf -c 32768 --parallel 32
  cellar serve -m MODEL.gguf -m all-MiniLM-L6-v2/
  cellar serve --models ~/models --memory 16G --alias gpt-4o=MODEL
  cellar serve -m OWNER/NAME:Q4_K_M --host 0.0.0.0 --api-key-file keys.txt
  cellar serve OWNER/NAME --pull --allow-origin https://app.example.org
  curl http://127.0.0.1:8080/v1/completions -d '{\"prompt\": \"Once upon a time\", \"max_tokens\": 32}'")]
pub(crate) struct ServeArgs {
    /// GGUF file (the first part of a split model), a directory with config.json and safetensors,
    /// or the name of a downloaded model: OWNER/NAME:QUANT; once per model [default: $CELLAR_MODEL,
    /// or else the built-in model]
    #[arg(short, long, value_name = "FILE")]
    model: Vec<PathBuf>,
    /// The same, without -m
    #[arg(value_name = "MODEL")]
    files: Vec<PathBuf>,
    /// Serve every GGUF file and every directory of a model in DIR too; each is loaded when a
    /// request names it
    #[arg(long, visible_alias = "models-dir", value_name = "DIR")]
    pub(crate) models: Option<PathBuf>,
    /// Memory that all models together may take: 8G, 512M [default: what the machine has free]
    #[arg(long, value_name = "SIZE", conflicts_with = "no_memory_check")]
    pub(crate) memory: Option<ByteSize>,
    /// Seconds without requests after which a model of --models is unloaded; -1 is never
    #[arg(long, visible_alias = "sleep-idle-seconds", value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(i64).range(-1..=1 << 31))]
    pub(crate) idle_unload: i64,
    /// IP address to listen on, or localhost
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", value_parser = address)]
    pub(crate) host: IpAddr,
    /// Port to listen on; 0 takes a free one
    #[arg(long, value_name = "N", default_value_t = 8080)]
    pub(crate) port: u16,
    /// Listen on a Unix socket instead, which only this user reaches
    #[cfg(unix)]
    #[arg(long, value_name = "PATH", conflicts_with_all = ["host", "port", "tls_cert"])]
    pub(crate) socket: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) parallel: ParallelArgs,
    /// Requests that may wait; more are refused (429)
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = count())]
    pub(crate) max_queued: u32,
    /// Name of the only model in the API, or NAME=MODEL for another name of a model, in which * is
    /// any text (gpt-*=MODEL); several with commas, or once per name [default: the file's name]
    #[arg(long, value_name = "NAME")]
    pub(crate) alias: Vec<String>,
    /// Refuse fields that would otherwise be skipped because no text depends on them, and unknown
    /// names of models
    #[arg(long, action = ArgAction::SetTrue)]
    pub(crate) strict: bool,
    /// Compute a part of the answered texts again when nothing else is computed, as 1% or 0.01, and
    /// compare: /metrics counts them, and the log has those that differ
    #[arg(long, value_name = "PART", value_parser = values::part)]
    pub(crate) verify: Option<f64>,
    /// LoRA adapters under names of their own, as NAME=PATH: a request that names one as its model
    /// is answered with it
    #[arg(long, value_name = "NAME=PATH", num_args = 1..)]
    pub(crate) lora_modules: Vec<LoraModule>,
    /// Use the chat template in a file instead of the only model's
    #[arg(long, visible_alias = "chat-template-file", value_name = "FILE")]
    pub(crate) chat_template: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) vision: VisionArgs,
    /// Fetch pictures that requests name by http and https addresses: from public addresses alone,
    /// at most 32 MiB in 10 s each
    #[cfg(feature = "hub")]
    #[arg(long, action = ArgAction::SetTrue)]
    pub(crate) allow_image_urls: bool,
    /// Take requests with a key of this file only: one key a line, perhaps with weight=N,
    /// max_running=N, max_queued=N and role=admin after it. Of several keys, only admins load and
    /// unload models by hand and see what others do
    #[arg(long, value_name = "FILE")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// Take requests with this key; once per key. Other users of the machine may see it in the list
    /// of processes: CELLAR_API_KEY and --api-key-file keep it from them
    #[arg(long, value_name = "KEY")]
    pub(crate) api_key: Vec<String>,
    /// Let everybody who reaches --host use the server
    #[arg(long, action = ArgAction::SetTrue, conflicts_with_all = ["api_key_file", "api_key"])]
    pub(crate) no_auth: bool,
    /// Let web pages of this origin use the server: SCHEME://NAME (app://obsidian.md), SCHEME://*
    /// or * for all; once per origin
    #[arg(long, value_name = "ORIGIN")]
    pub(crate) allow_origin: Vec<String>,
    /// Take requests to this name without keys too, as a proxy on this machine sends them on; once
    /// per name
    #[arg(long, value_name = "NAME")]
    pub(crate) allow_host: Vec<String>,
    /// Encrypt connections (TLS) with the certificate in a PEM file, and those that signed it after
    /// it
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// The key of --tls-cert, in a PEM file
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub(crate) tls_key: Option<PathBuf>,
    /// Flags from a TOML file, where neither the command line nor a variable has them
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Lines that are written on stderr
    #[arg(long, value_enum, value_name = "LEVEL", default_value_t)]
    pub(crate) log: LogLevel,
    /// The form of the lines of requests
    #[arg(long, value_enum, value_name = "FORM", default_value_t)]
    pub(crate) log_format: LogFormat,
    /// Download models of -m that are not there, without asking
    #[cfg(feature = "hub")]
    #[arg(long, action = ArgAction::SetTrue)]
    pub(crate) pull: bool,
    /// Bytes of a request's body; all large bodies together may have eight times as many
    #[arg(long, value_name = "SIZE", default_value = "6M")]
    pub(crate) max_body: ByteSize,
    /// Connections of one client (an IPv4 address, or the first 64 bits of an IPv6 address); 0 is
    /// any number, for a server behind a proxy
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub(crate) max_client_connections: u32,
    /// Seconds that running requests get to end, when the server ends
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub(crate) drain: u32,
    /// Directory for the files of POST /slots/N?action=save and restore: all cached prefixes of a
    /// model
    #[arg(long, value_name = "DIR", conflicts_with = "trace")]
    pub(crate) slot_save_path: Option<PathBuf>,
    /// Keep files of /v1/files and batches in DIR, so that they are there when the server starts
    /// again
    #[arg(long, value_name = "DIR")]
    pub(crate) files_dir: Option<PathBuf>,
    /// Show the first and last words of prompts and texts in the live view, to every viewer
    #[arg(long, action = ArgAction::SetTrue)]
    pub(crate) show_text: bool,
    #[command(flatten)]
    pub(crate) trace: TraceArgs,
    #[cfg(feature = "kv-events")]
    #[command(flatten, next_help_heading = "KV events")]
    pub(crate) kv_events: super::kv_events::KvEventArgs,
    /// Tokens of thinking after which a reasoning model has to answer, of requests that do not say
    /// it; 0 is none, and -1 no limit
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = values::thinking_limit)]
    pub(crate) reasoning_budget: Option<PredictLimit>,
    #[command(flatten)]
    pub(crate) sampler: SamplerArgs,
    #[command(flatten, next_help_heading = "Speculative decoding")]
    pub(crate) speculation: SpeculationArgs,
    #[command(flatten, next_help_heading = "Computation and memory")]
    pub(crate) engine: EngineArgs,
    #[command(flatten, next_help_heading = "Store of cached prefixes")]
    pub(crate) store: StoreArgs,
    /// The tiers of that store.
    #[cfg(feature = "serve")]
    #[arg(skip)]
    pub(crate) tiers: Option<crate::prefix_tiers::SharedTiers>,
    /// The memory by which contexts are chosen where there is no --ctx.
    #[cfg(feature = "serve")]
    #[arg(skip)]
    pub(crate) room: crate::model_room::ModelRoom,
}

/// The lines that a server writes on stderr.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogLevel {
    /// The address, and failures of the server itself
    Off,
    /// Also a line for each request, except good answers to probes
    #[default]
    Requests,
    /// All requests, and steps of the program (as CELLAR_LOG=debug)
    Debug,
}

/// The form of a log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// For people
    #[default]
    Text,
    /// JSON, an object a line
    Json,
}

/// An IP address, also by the name that every machine has for itself.
fn address(text: &str) -> Result<IpAddr, String> {
    if text == "localhost" {
        return Ok(IpAddr::from([127, 0, 0, 1]));
    }
    let address = text.parse();
    address.map_err(|_| "an IP address is needed, such as 127.0.0.1 or 0.0.0.0".to_owned())
}

#[cfg(feature = "serve")]
impl ServeArgs {
    /// The models that are named, with -m or without.
    pub(crate) fn named(&self) -> Vec<&std::path::Path> {
        let both = self.files.iter().chain(&self.model);
        both.map(PathBuf::as_path).collect()
    }

    /// The changes of the model.
    pub(crate) fn changes(&self) -> ModelChanges {
        let mut changes = self.engine.compute.changes();
        let modules = self.lora_modules.iter().map(|module| AdapterSpec {
            path: module.path.clone(),
            name: Some(module.name.clone()),
            scale: 0.0,
        });
        changes.adapters.adapters.extend(modules);
        changes
    }

    /// The names of `--alias`, each with the model that it is for; `None` is the only one.
    pub(crate) fn aliases(&self) -> impl Iterator<Item = (&str, Option<&str>)> {
        self.alias.iter().flat_map(|given| {
            let (names, model) = match given.split_once('=') {
                Some((names, model)) => (names, Some(model)),
                None => (given.as_str(), None),
            };
            names.split(',').map(move |name| (name.trim(), model))
        })
    }
}
