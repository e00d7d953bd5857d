//! [`MemoryShape`]: what a trace says of the memory, so that a replay can make one of another size,
//! and [`TraceLimits`]: what it says of the scheduler.
//!
//! Invariant: bytes are counted as an engine counts those of its memory. Knows no weights.

use std::num::NonZeroU32;

use cellar_scheduler::{EvictionPolicy, Micros, PrefixCaching, RowBytes, SchedulerConfig};
use kv_core::{
    batch::BatchRules,
    layers::LayerMap,
    memory::{BYTES_PER_CELL, Composite, MemoryConfig, MemoryConfigError, Snapshot},
};
use kv_rows::largest_n_ctx;
use serde::{Deserialize, Serialize};

use crate::record::MAX_HASH;

/// The memory of an engine that is traced.
#[derive(Clone, Copy, Debug)]
pub struct TracedMemory<'a> {
    /// What each layer remembers.
    pub layers: &'a LayerMap,
    /// Its sizes.
    pub config: &'a MemoryConfig,
    /// Bytes of a row of each kind, over all layers.
    pub row_bytes: &'a RowBytes,
}

/// The memory of a trace, as far as its size matters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct MemoryShape {
    /// What each layer remembers.
    pub(crate) layers: LayerMap,
    pub(crate) config: MemoryConfig,
    /// Bytes of the rows of a cell, over all layers of its part, by number of the part.
    pub(crate) cell_bytes: Vec<u64>,
    /// Bytes of a state, over all layers.
    pub(crate) state_bytes: u64,
}

impl MemoryShape {
    pub(crate) fn new(memory: &TracedMemory<'_>) -> Self {
        Self {
            layers: memory.layers.clone(),
            config: *memory.config,
            cell_bytes: memory.row_bytes.cells.clone(),
            state_bytes: memory.row_bytes.state.unwrap_or(0),
        }
    }

    /// What a row of each kind takes.
    pub(crate) fn row_bytes(&self) -> RowBytes {
        RowBytes {
            cells: self.cell_bytes.clone(),
            state: Some(self.state_bytes),
        }
    }

    /// The same with another length of the context.
    pub(crate) fn with_n_ctx(&self, n_ctx: u32) -> Self {
        let config = MemoryConfig {
            n_ctx,
            ..self.config
        };
        Self {
            config,
            ..self.clone()
        }
    }

    /// The longest context whose memory takes at most so many bytes; `None` where none does.
    pub(crate) fn largest_n_ctx(&self, n_bytes: u64) -> Option<u32> {
        largest_n_ctx(|n_ctx| {
            let bytes = self.with_n_ctx(n_ctx).bytes();
            bytes.is_ok_and(|bytes| bytes <= n_bytes)
        })
    }

    /// An empty memory.
    pub(crate) fn memory(&self) -> Result<Composite, MemoryConfigError> {
        Composite::new(&self.layers, &self.config)
    }

    /// Bytes of all rows and of what is kept of the cells.
    pub(crate) fn bytes(&self) -> Result<u64, MemoryConfigError> {
        let cells = self.config.cells_per_part(&self.layers)?;
        let of_parts = cells.iter().zip(&self.cell_bytes);
        let of_parts =
            of_parts.map(|(&n, bytes)| (bytes + BYTES_PER_CELL).saturating_mul(n as u64));
        let of_states = self.state_bytes.saturating_mul(self.n_states() as u64);
        Ok(of_parts.fold(of_states, u64::saturating_add))
    }

    fn n_states(&self) -> usize {
        match self.state_bytes {
            0 => 0,
            _ => self.config.n_state_rows(),
        }
    }

    /// Bytes of the rows of a snapshot.
    pub(crate) fn bytes_of(&self, snapshot: &Snapshot) -> u64 {
        let of_parts = snapshot.parts().iter().map(|part| {
            let bytes = self.cell_bytes.get(part.part.as_usize());
            bytes.copied().unwrap_or(0) * part.cells.len() as u64
        });
        of_parts.sum::<u64>() + self.state_bytes * snapshot.state_rows().len() as u64
    }

    /// Bytes of the rows that are in use.
    pub(crate) fn bytes_used(&self, memory: &Composite) -> u64 {
        let of_parts = memory.parts().iter().map(|part| {
            let bytes = self.cell_bytes.get(part.config().part.as_usize());
            bytes.copied().unwrap_or(0) * u64::from(part.n_used())
        });
        let n_states = memory.states().map_or(0, |states| states.n_used());
        of_parts.sum::<u64>() + self.state_bytes * u64::from(n_states)
    }
}

/// The limits of a scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TraceLimits {
    n_batch: u32,
    step_tokens: u32,
    /// In microseconds.
    step_time: Option<u64>,
    max_running: usize,
    /// In microseconds.
    aging: u64,
    headroom: u32,
    preempt_every: Option<NonZeroU32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    prefix_bytes: Option<u64>,
    #[serde(default, skip_serializing_if = "is_zero")]
    swap_bytes: u64,
    #[serde(default, skip_serializing_if = "is_zero")]
    swap_disk_bytes: u64,
    pub(crate) policy: TracedPolicy,
}

/// Which prefixes are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum TracedPolicy {
    Adaptive,
    Value,
    Slru,
    Lru,
    Off,
}

impl TracedPolicy {
    pub(crate) fn new(caching: PrefixCaching, eviction: EvictionPolicy) -> Self {
        match (caching, eviction) {
            (PrefixCaching::Off, _) => Self::Off,
            (PrefixCaching::On, EvictionPolicy::Adaptive) => Self::Adaptive,
            (PrefixCaching::On, EvictionPolicy::Value) => Self::Value,
            (PrefixCaching::On, EvictionPolicy::SegmentedLru) => Self::Slru,
            (PrefixCaching::On, EvictionPolicy::Lru) => Self::Lru,
        }
    }
}

impl TraceLimits {
    /// Tokens of a step of [`TraceLimits::alone`].
    pub(crate) const ALONE_TOKENS: u32 = 1 << 16;

    /// Limits for requests that come one after the other.
    pub(crate) fn alone(max_running: usize) -> Self {
        Self {
            n_batch: Self::ALONE_TOKENS,
            step_tokens: Self::ALONE_TOKENS,
            step_time: None,
            max_running,
            aging: 30_000_000,
            headroom: 0,
            preempt_every: None,
            prefix_bytes: None,
            swap_bytes: 0,
            swap_disk_bytes: 0,
            policy: TracedPolicy::Adaptive,
        }
    }

    pub(crate) fn of(config: &SchedulerConfig) -> Self {
        Self {
            n_batch: config.rules.n_batch,
            step_tokens: config.step_tokens,
            step_time: config.step_time.map(|time| time.0),
            max_running: config.max_running,
            aging: config.aging.0,
            headroom: config.headroom,
            preempt_every: config.preempt_every,
            prefix_bytes: config.prefix_bytes,
            swap_bytes: config.swap_bytes,
            swap_disk_bytes: config.swap_disk_bytes,
            policy: TracedPolicy::new(config.prefix_cache, config.eviction),
        }
    }

    /// A scheduler with these limits over another memory. Its queue takes everything: what was
    /// refused because too much waited is not in a trace.
    pub(crate) fn scheduler(&self, memory: &MemoryConfig, policy: TracedPolicy) -> SchedulerConfig {
        let rules = BatchRules {
            n_batch: self.n_batch,
            n_seqs: memory.n_seqs,
            // Hashes take the place of tokens.
            n_vocab: MAX_HASH + 1,
            n_embd: 1,
        };
        let (prefix_cache, eviction) = match policy {
            TracedPolicy::Adaptive => (PrefixCaching::On, EvictionPolicy::Adaptive),
            TracedPolicy::Value => (PrefixCaching::On, EvictionPolicy::Value),
            TracedPolicy::Slru => (PrefixCaching::On, EvictionPolicy::SegmentedLru),
            TracedPolicy::Lru => (PrefixCaching::On, EvictionPolicy::Lru),
            TracedPolicy::Off => (PrefixCaching::Off, EvictionPolicy::Adaptive),
        };
        SchedulerConfig {
            step_tokens: self.step_tokens,
            step_time: self.step_time.map(Micros),
            max_running: self.max_running,
            max_queued: usize::MAX,
            max_queued_tokens: usize::MAX,
            aging: Micros(self.aging),
            headroom: self.headroom,
            preempt_every: self.preempt_every,
            prefix_bytes: self.prefix_bytes,
            swap_bytes: self.swap_bytes,
            swap_disk_bytes: self.swap_disk_bytes,
            prefix_cache,
            eviction,
            ..SchedulerConfig::new(rules, memory.n_ubatch, memory.n_ctx)
        }
    }
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}
