//! [`SchedulerConfig`]: the limits of a scheduler. Plain data.

use std::num::NonZeroU32;

use kv_core::batch::BatchRules;
use kv_core::memory::{OwnedRows, RowsOf};

use super::error::RequestError;
use super::ids::Micros;

/// The use of tokens of requests that have ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PrefixCaching {
    /// In the sequences and cells that no running request needs.
    #[default]
    On,
    /// No request takes tokens of another.
    Off,
}

impl PrefixCaching {
    pub(crate) fn is_on(self) -> bool {
        self == Self::On
    }
}

/// The order in which cached prefixes are dropped, where requests need their cells or sequences.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EvictionPolicy {
    /// By value or by age, whichever has lost fewer tokens lately: one evicts, and what the other
    /// would have kept is remembered.
    #[default]
    Adaptive,
    /// The one of least value: tokens that it saves for each byte that becomes free, times how
    /// often it is expected to be used. Of those that were never used again, so that a scan over
    /// many documents does not evict what conversations use; but where those that were are more
    /// than three quarters, of these.
    Value,
    /// Segmented LRU: the same with the one that was not used for the longest time.
    SegmentedLru,
    /// The one that was not used for the longest time.
    Lru,
}

/// The way in which states come back that went to the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SwapRows {
    /// To the bit.
    #[default]
    Exact,
    /// Rounded: the text of their request may be another one from then on. No other request takes
    /// its tokens, so all others are as they are alone.
    Rounded,
}

/// The limits of a scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// The limits of a batch; at most `n_batch` tokens are computed in a step.
    pub rules: BatchRules,
    /// Tokens that are computed at once: as many as the engine's.
    pub n_ubatch: u32,
    /// Tokens of a step: one for each text that goes on, the rest for prompts. A smaller number
    /// makes the gaps between tokens shorter, a larger one prompts faster.
    pub step_tokens: u32,
    /// About how long a step with decode rows may take: chunks of prompts are made small enough.
    /// Where decode rows take much of this time, prefill gets longer, up to twice this time: as
    /// much for each request in prefill as each request in decode has. A step without decode rows
    /// has as many tokens as fit. `None` for any time. Needs
    /// [`Event::StepTime`](crate::Event::StepTime).
    pub step_time: Option<Micros>,
    /// The most tokens of one request, prompt and text together.
    pub n_ctx: u32,
    /// Requests that run at once, at most. The other sequences hold cached prefixes.
    pub max_running: usize,
    /// Requests that may wait to be admitted.
    pub max_queued: usize,
    /// Tokens that the prompts of waiting requests may have together.
    pub max_queued_tokens: usize,
    /// A request that waits rises by one priority after each such time.
    pub aging: Micros,
    /// Tokens by which each running request should be able to grow when another is admitted: a
    /// larger number admits later and preempts less.
    pub headroom: u32,
    /// The use of tokens of requests that have ended, for prompts with the same prefix.
    pub prefix_cache: PrefixCaching,
    /// The order in which these are dropped.
    pub eviction: EvictionPolicy,
    /// Bytes of rows that cached prefixes alone may have, as
    /// [`Scheduler::with_row_bytes`](crate::Scheduler::with_row_bytes) counts them: KV rows, those
    /// of windows, and states together. `None` for all that requests leave.
    pub prefix_bytes: Option<u64>,
    /// Bytes that the states of preempted requests may have on the host; 0 computes them again.
    pub swap_bytes: u64,
    /// Bytes that these states may have on a disk in addition: those beyond half of `swap_bytes` go
    /// there ([`Outcome::Spilled`](crate::Outcome::Spilled)); 0 keeps all on the host.
    pub swap_disk_bytes: u64,
    /// The way in which they come back.
    pub swap_rows: SwapRows,
    /// Preempts a running request after every so many steps, to test that texts stay the same.
    pub preempt_every: Option<NonZeroU32>,
}

/// The requests that wait for their first admission.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waiting {
    /// Number of requests.
    pub n_requests: usize,
    /// Tokens of their prompts.
    pub n_tokens: usize,
}

impl SchedulerConfig {
    /// Limits for an engine that takes such batches.
    pub fn new(rules: BatchRules, n_ubatch: u32, n_ctx: u32) -> Self {
        Self {
            rules,
            n_ubatch,
            step_tokens: n_ubatch.min(rules.n_batch),
            step_time: None,
            n_ctx,
            max_running: rules.n_seqs as usize,
            max_queued: 256,
            max_queued_tokens: 1 << 20,
            aging: Micros(30_000_000),
            headroom: 16,
            prefix_cache: PrefixCaching::On,
            eviction: EvictionPolicy::Adaptive,
            prefix_bytes: None,
            swap_bytes: 0,
            swap_disk_bytes: 0,
            swap_rows: SwapRows::Exact,
            preempt_every: None,
        }
    }

    /// # Errors
    /// [`RequestError::Zero`], the first limit that is 0.
    pub(crate) fn check(&self) -> Result<(), RequestError> {
        let limits = [
            ("n_batch", self.rules.n_batch as usize),
            ("n_ubatch", self.n_ubatch as usize),
            ("step_tokens", self.step_tokens as usize),
            ("n_ctx", self.n_ctx as usize),
            ("max_running", self.max_running),
            ("max_queued", self.max_queued),
            ("max_queued_tokens", self.max_queued_tokens),
        ];
        match limits.into_iter().find(|(_, limit)| *limit == 0) {
            Some((name, _)) => Err(RequestError::Zero { name }),
            None => Ok(()),
        }
    }

    /// Checks that a prompt of so many tokens may wait with these.
    ///
    /// # Errors
    /// [`RequestError::Busy`] and [`RequestError::BusyTokens`], with the numbers. A single prompt
    /// may always wait.
    pub fn check_queue(&self, waiting: Waiting, n_prompt: usize) -> Result<(), RequestError> {
        let (queued, limit) = (waiting.n_requests, self.max_queued);
        if queued >= limit {
            return Err(RequestError::Busy { queued, limit });
        }
        let (queued, limit) = (waiting.n_tokens, self.max_queued_tokens);
        if queued > 0 && queued + n_prompt > limit {
            return Err(RequestError::BusyTokens {
                queued,
                n_prompt,
                limit,
            });
        }
        Ok(())
    }

    /// The most requests that run at once.
    pub(crate) fn n_slots(&self) -> usize {
        self.n_step().min(self.max_running)
    }

    /// Tokens of a step.
    pub(crate) fn n_step(&self) -> usize {
        self.step_tokens.min(self.rules.n_batch) as usize
    }
}

/// Bytes of the rows of a memory. The [default](RowBytes::default) counts each row as one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RowBytes {
    /// Of a cell, over all layers of its part, by number of the part.
    pub cells: Vec<u64>,
    /// Of a recurrent state, over all layers; `None` counts one.
    pub state: Option<u64>,
}

impl RowBytes {
    pub(crate) fn of(&self, owned: &OwnedRows) -> u64 {
        let bytes = match owned.rows {
            RowsOf::Part(part) => self.cells.get(part.as_usize()).copied(),
            RowsOf::States => self.state,
        };
        bytes.unwrap_or(1).saturating_mul(u64::from(owned.n_rows))
    }
}
