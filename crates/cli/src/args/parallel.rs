//! Flags of commands that compute many requests together. Knows nothing of what the requests are.

use std::time::Duration;

use cellar_engine::EngineConfig;
use cellar_engine::serve::{EvictionPolicy, PrefixCaching, ServiceConfig};
use clap::{ArgAction, ValueEnum};
use kv_core::MAX_SEQS;
use kv_core::memory::Streams;

use super::byte_size::ByteSize;
use super::swap::SwapArgs;
use super::{LongContextArgs, count, count_or_none};

/// Requests that run at once, and prefixes that are kept after they end.
#[derive(Debug, clap::Args)]
pub(crate) struct ParallelArgs {
    /// Requests that are computed together
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) parallel: u32,
    /// Tokens of all requests in one step: fewer make prompts slower and gaps between tokens
    /// shorter [default: as --ubatch]
    #[arg(long, value_name = "N", value_parser = count())]
    pub(crate) step_tokens: Option<u32>,
    /// Milliseconds that a step may take while tokens are generated: prompts are split into chunks
    /// of this time; 0 is no limit [default: 200 to serve, 0 for a batch]
    #[arg(long, value_name = "MS", value_parser = count_or_none())]
    pub(crate) step_ms: Option<u32>,
    /// Bytes for cached prefixes: their KV rows, sliding windows and recurrent states. As many are
    /// allocated in addition for windows and states [default: the room that requests leave]
    #[arg(long, value_name = "SIZE")]
    pub(crate) prefix_memory: Option<ByteSize>,
    #[command(flatten)]
    pub(crate) swap: SwapArgs,
    /// Which cached prefix makes room
    #[arg(long, value_name = "POLICY", value_enum, default_value_t = EvictionName::Adaptive)]
    pub(crate) eviction: EvictionName,
    /// Compute every prompt anew, also where others share its prefix
    #[arg(long, action = ArgAction::SetTrue, conflicts_with_all = ["prefix_memory", "eviction"])]
    pub(crate) no_prefix_cache: bool,
    #[command(flatten)]
    pub(crate) long_context: LongContextArgs,
}

/// Which cached prefix makes room for others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum EvictionName {
    /// By value or by age, whichever has lost fewer tokens lately
    Adaptive,
    /// The one of the least value: the tokens that it saves for each byte, times its expected uses.
    /// A prefix that was used again goes only where most were
    Value,
    /// The oldest that was never used again; where most were used again, the oldest of those
    Slru,
    /// The oldest
    Lru,
}

impl EvictionName {
    pub(crate) fn policy(self) -> EvictionPolicy {
        match self {
            Self::Adaptive => EvictionPolicy::Adaptive,
            Self::Value => EvictionPolicy::Value,
            Self::Slru => EvictionPolicy::SegmentedLru,
            Self::Lru => EvictionPolicy::Lru,
        }
    }
}

impl ParallelArgs {
    /// The engine with a sequence for each request and each prefix.
    pub(crate) fn engine_config(&self, config: EngineConfig) -> EngineConfig {
        let n_seqs = match (self.no_prefix_cache, config.streams) {
            // Each is an id: what limits prefixes is their bytes.
            (false, Streams::Shared) => MAX_SEQS as u32,
            // Every sequence would have cells of its own.
            (false, Streams::PerSequence) | (true, _) => self.parallel,
        };
        EngineConfig {
            n_seqs,
            n_active: Some(self.parallel),
            idle_bytes: self.prefix_memory.map_or(0, |size| size.0),
            ..config
        }
    }

    /// The service, with a queue of the default length. `step_ms` is the default of the flag.
    pub(crate) fn service_config(&self, step_ms: u32) -> ServiceConfig {
        let step_ms = self.step_ms.unwrap_or(step_ms);
        ServiceConfig {
            max_running: Some(self.parallel),
            step_tokens: self.step_tokens,
            step_time: (step_ms > 0).then(|| Duration::from_millis(step_ms.into())),
            prefix_cache: if self.no_prefix_cache {
                PrefixCaching::Off
            } else {
                PrefixCaching::On
            },
            eviction: self.eviction.policy(),
            prefix_bytes: self.prefix_memory.map(|size| size.0),
            swap_bytes: self.swap.memory_bytes(),
            swap_type: self.swap.swap_type,
            ..ServiceConfig::default()
        }
    }
}
