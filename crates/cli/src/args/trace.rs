//! `--trace` of the commands that run a service, and the flags of `cellar replay`. Knows nothing of
//! what is in a trace.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use anyhow::Context;
use cellar_engine::serve::{EvictionPolicy, PrefixCaching};
use cellar_trace::{FleetConfig, MooncakeFormat, Router, TraceWriter};
use clap::{Args, ValueEnum};

use super::byte_size::ByteSize;
use super::count;
use crate::output_file::{self, InPlace};

/// Whether a service writes what it does to a file.
#[derive(Debug, Args)]
pub(crate) struct TraceArgs {
    /// Write a trace of all requests and steps to a file, for 'cellar replay'. It has hashes of
    /// tokens with a key that is not kept, no tokens and no text
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
}

impl TraceArgs {
    /// Whether it goes to standard output.
    pub(crate) fn is_on_stdout(&self) -> bool {
        self.trace.as_deref().is_some_and(output_file::is_stdout)
    }

    /// The trace, empty.
    ///
    /// # Errors
    /// Where the file cannot be written.
    pub(crate) fn writer(&self) -> anyhow::Result<Option<TraceWriter>> {
        let Some(path) = &self.trace else {
            return Ok(None);
        };
        let file = match output_file::open_in_place(path)? {
            InPlace::Direct(file) => file,
            InPlace::Regular(file) => {
                let cannot = || format!("cannot write '{}'", path.display());
                file.set_len(0).with_context(cannot)?;
                file
            }
        };
        Ok(Some(TraceWriter::new(file)))
    }
}

/// `cellar replay`
#[derive(Debug, Args)]
#[command(after_help = "\
Sends the requests of a trace, which --trace of 'cellar serve', 'batch' and 'bench --clients'
writes, through the scheduler and the memory of a service, without a model: each text has the
tokens of the trace. The memory can have another size, and prefixes can be evicted in another
order. Prints how many tokens of prompts are reused, computed and computed again, and the
evictions, next to the numbers of the trace. A step takes the average time of steps with as many
tokens in the trace. A request comes no earlier than in the trace, and not before the texts have
ended that had ended when it came. Tokens that speculation drafted are not replayed.

In place of each token a trace has a hash of it and of all tokens before it, with a random key
that is not kept: it shows common prefixes, but no token.

With --replicas the requests go to several servers, each with that memory, by --router; --tier is
a store of prefixes that all share, which has what ended requests computed. How long a fetch would
take is left out: what it has counts as fetched, where a server does not have it itself.

--trace-format mooncake reads traces in the format of Mooncake's, which are public: JSON lines
with 'timestamp', 'input_length' and 'hash_ids', a number for each block of the prompt. They tell
of no model and no times, so --ctx or --budget is needed, and requests come one after the other.

A trace of --expert-trace is replayed with --budget for experts, by four rules: what is worth most
stays, as in a run; the most recently used; the most often used; and, for comparison, what will be
used soonest, which only who knows the future can keep.

Examples:
  cellar serve -m MODEL.gguf --trace day.jsonl
  cellar replay day.jsonl
  cellar replay day.jsonl --budget 2G
  cellar replay day.jsonl --ctx 65536 --policy lru --json
  cellar replay day.jsonl --replicas 4 --router hash --tier 64G
  cellar replay conversation.jsonl --trace-format mooncake --budget 90G --replicas 16
  cellar run -m MIXTURE.gguf --expert-memory 4G --expert-trace experts.jsonl
  cellar replay experts.jsonl --budget 6G")]
pub(crate) struct ReplayArgs {
    /// The trace; - is stdin
    pub(crate) trace: PathBuf,
    /// What wrote the trace
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = TraceFormat::Cellar)]
    pub(crate) trace_format: TraceFormat,
    /// Tokens of a block of a trace of Mooncake's format
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = count())]
    pub(crate) tokens_per_block: u32,
    /// Bytes of a token in the memory, for a trace of Mooncake's format: those of Llama 3 8B with K
    /// and V in f16, unless others are given
    #[arg(long, value_name = "SIZE", default_value = "128K")]
    pub(crate) token_bytes: ByteSize,
    /// Servers that share the requests
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) replicas: u32,
    /// Which of them a request goes to
    #[arg(long, value_name = "ROUTER", value_enum, default_value_t = RouterName::Longest)]
    pub(crate) router: RouterName,
    /// Tokens of the beginning of a prompt by which --router hash chooses
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = count())]
    pub(crate) hash_tokens: u32,
    /// Bytes of a store of prefixes that all servers share [default: none]
    #[arg(long, value_name = "SIZE")]
    pub(crate) tier: Option<ByteSize>,
    /// Bytes that the memory may take: as many tokens as fit; or bytes for experts
    #[arg(long, value_name = "SIZE", conflicts_with = "ctx")]
    pub(crate) budget: Option<ByteSize>,
    /// Tokens that the memory holds [default: as in the trace]
    #[arg(short, long, visible_alias = "ctx-size", value_name = "N", value_parser = count())]
    pub(crate) ctx: Option<u32>,
    /// Which cached prefixes are dropped first [default: as in the trace]
    #[arg(long, value_name = "POLICY", value_enum)]
    pub(crate) policy: Option<PolicyName>,
    /// Bytes of the host's memory for preempted requests [default: as in the trace]
    #[arg(long, value_name = "SIZE")]
    pub(crate) swap_memory: Option<ByteSize>,
    /// Bytes of files, once half of --swap-memory is used [default: as in the trace]
    #[arg(long, value_name = "SIZE")]
    pub(crate) swap_disk: Option<ByteSize>,
    /// Read a trace that was cut off up to its last whole line, instead of refusing it
    #[arg(long)]
    pub(crate) partial: bool,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

impl ReplayArgs {
    /// The servers of the replay.
    pub(crate) fn fleet(&self) -> FleetConfig {
        let router = match self.router {
            RouterName::Rr => Router::RoundRobin,
            RouterName::Hash => Router::Hash {
                n_tokens: self.hash_tokens as usize,
            },
            RouterName::Longest => Router::Longest,
        };
        FleetConfig {
            n_replicas: NonZeroUsize::new(self.replicas as usize).unwrap_or(NonZeroUsize::MIN),
            router,
            tier_bytes: self.tier.map(|size| size.0),
        }
    }

    /// What a trace of Mooncake's format does not say.
    pub(crate) fn mooncake(&self) -> MooncakeFormat {
        MooncakeFormat {
            tokens_per_block: self.tokens_per_block,
            token_bytes: self.token_bytes.0,
        }
    }
}

/// What wrote a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum TraceFormat {
    /// --trace of this program
    Cellar,
    /// Mooncake, or a program that writes its format
    Mooncake,
}

/// Which of several servers a request goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum RouterName {
    /// One after the other
    Rr,
    /// By consistent hashing of the beginning of its prompt
    Hash,
    /// The one that has most of its prompt, as far as it has not much more to do than others
    Longest,
}

/// Which prefixes are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PolicyName {
    /// By value or by age, whichever loses less
    Adaptive,
    /// The one of the least value: the tokens that it saves for each byte, times its expected uses
    Value,
    /// The oldest that were never used again, then the oldest
    Slru,
    /// The oldest
    Lru,
    /// None are kept
    Off,
}

impl PolicyName {
    /// As a replay takes it.
    pub(crate) fn caching(self) -> PrefixCaching {
        match self {
            Self::Adaptive | Self::Value | Self::Slru | Self::Lru => PrefixCaching::On,
            Self::Off => PrefixCaching::Off,
        }
    }

    /// As a replay takes it; `None` where nothing is evicted.
    pub(crate) fn eviction(self) -> Option<EvictionPolicy> {
        match self {
            Self::Adaptive => Some(EvictionPolicy::Adaptive),
            Self::Value => Some(EvictionPolicy::Value),
            Self::Slru => Some(EvictionPolicy::SegmentedLru),
            Self::Lru => Some(EvictionPolicy::Lru),
            Self::Off => None,
        }
    }
}
