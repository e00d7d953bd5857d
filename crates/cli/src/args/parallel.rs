//! Flags of commands that compute many requests together. Knows nothing of what the requests are.

use std::time::Duration;

use clap::ArgAction;
use engine::EngineConfig;
use engine::serve::{PrefixCaching, ServiceConfig};
use kv_core::memory::Streams;

use super::{count, count_or_none};

/// How many requests run at once, and what is kept of those that have ended.
#[derive(Debug, clap::Args)]
pub(crate) struct ParallelArgs {
    /// Requests that are computed together
    #[arg(long, value_name = "N", default_value_t = 16,
          allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) parallel: u32,
    /// Tokens of all requests in one step: fewer make prompts slower and texts steadier [default: as
    /// --ubatch]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = count())]
    pub(crate) step_tokens: Option<u32>,
    /// Milliseconds that a step may take while texts go on: prompts are computed in chunks so small;
    /// 0 for any time [default: 200 to serve, 0 for a batch]
    #[arg(long, value_name = "MS", allow_negative_numbers = true, value_parser = count_or_none())]
    pub(crate) step_ms: Option<u32>,
    /// Prefixes that are kept of requests that have ended, at most, where there is room
    #[arg(long, value_name = "N", default_value_t = 128,
          allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(0..=2048))]
    pub(crate) prefixes: u32,
    /// Prefixes for whose sliding windows and recurrent states there is room even while --parallel
    /// requests run
    #[arg(long, value_name = "N", default_value_t = 0,
          allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(0..=1024))]
    pub(crate) prefix_room: u32,
    /// Compute every prompt anew, also where others share its prefix
    #[arg(long, action = ArgAction::SetTrue, conflicts_with_all = ["prefixes", "prefix_room"])]
    pub(crate) no_prefix_cache: bool,
}

impl ParallelArgs {
    /// The engine with a sequence for each request and each prefix.
    pub(crate) fn engine_config(&self, config: EngineConfig) -> EngineConfig {
        let n_prefixes = match (self.no_prefix_cache, config.streams) {
            (false, Streams::Shared) => self.prefixes.max(self.prefix_room),
            // Every sequence would have cells of its own.
            (false, Streams::PerSequence) => self.prefix_room,
            (true, _) => 0,
        };
        EngineConfig {
            n_seqs: self.parallel + n_prefixes,
            n_active: Some(self.parallel + self.prefix_room),
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
            prefix_cache: match self.no_prefix_cache {
                true => PrefixCaching::Off,
                false => PrefixCaching::On,
            },
            ..ServiceConfig::default()
        }
    }
}
