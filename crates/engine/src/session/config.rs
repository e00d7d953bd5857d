//! [`ServiceConfig`]: the limits of a service. Plain data.

use std::num::NonZeroU32;
use std::time::Duration;

use cellar_scheduler::{
    EvictionPolicy, Micros, PrefixCaching, SchedulerConfig, SwapRows, TenantLimits,
};
use kv_rows::KvType;

use crate::config::{ConfigError, Settings};
use crate::context::LongContext;

/// The limits of a service; the [default](ServiceConfig::default) suits an engine with a few dozen
/// sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceConfig {
    /// Requests that run at once, at most; `None` takes [`EngineConfig::n_active`]. The other
    /// sequences of the engine hold cached prefixes.
    ///
    /// [`EngineConfig::n_active`]: crate::EngineConfig::n_active
    pub max_running: Option<u32>,
    /// Tokens of a step; `None` takes the ubatch of the engine. A smaller number makes the gaps
    /// between tokens shorter while prompts are computed, a larger one prompts faster.
    pub step_tokens: Option<u32>,
    /// About how long a step may take while texts go on: chunks of prompts are so small, learned
    /// from measured steps, and get a quarter of the time at least. A step without texts is not
    /// limited. `None` for any time.
    pub step_time: Option<Duration>,
    /// Requests that may wait; more are refused with [`RequestError::Busy`].
    ///
    /// [`RequestError::Busy`]: cellar_scheduler::RequestError::Busy
    pub max_queued: usize,
    /// Tokens that the prompts of waiting requests may have together.
    pub max_queued_tokens: usize,
    /// A request that waits rises by one priority after each such time.
    pub aging: Duration,
    /// Tokens by which each running request should be able to grow when another is admitted.
    pub headroom: u32,
    /// Whether tokens of requests that have ended are kept for prompts with the same prefix: in the
    /// sequences and cells that no running request needs.
    pub prefix_cache: PrefixCaching,
    /// Which of these prefixes is dropped first.
    pub eviction: EvictionPolicy,
    /// Bytes that these prefixes may take: the rows that no request has, of KV, windows and states
    /// together. `None` leaves them all that requests do not need. Their windows and states have
    /// room in [`EngineConfig::idle_bytes`].
    ///
    /// [`EngineConfig::idle_bytes`]: crate::EngineConfig::idle_bytes
    pub prefix_bytes: Option<u64>,
    /// Bytes of the host's memory for requests that are preempted: their KV rows and states are
    /// kept there and restored, not computed again. They are allocated when they are needed, in
    /// addition to the memory; 0 for none.
    pub swap_bytes: u64,
    /// Type in which preempted requests keep K and V, and recurrent states (at least q8_0); `None`
    /// keeps the stored type, to the bit. A narrower type rounds them: **the text of a preempted
    /// request may then differ from the one that it gets alone.** No other request reuses rounded
    /// rows.
    pub swap_type: Option<KvType>,
    /// What a tenant gets whose requests name no limits of its own.
    pub tenant_limits: TenantLimits,
    /// The way in which a text goes on beyond the context, if its request does not say it.
    pub long_context: LongContext,
    /// Preempts a running request after every so many steps, to test that texts stay the same.
    pub preempt_every: Option<NonZeroU32>,
    /// The source of the costs of drafts, which decide how many tokens a head drafts.
    pub draft_costs: DraftCostSource,
    /// Whether frames for watchers have tokens of requests and cached prefixes.
    pub excerpts: ExcerptLen,
}

/// The source of the costs of drafts. Texts are the same with both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DraftCostSource {
    /// Measured from step to step: heads draft as much as pays on this machine at this moment.
    #[default]
    Measured,
    /// Fixed numbers, as they usually are: the same requests are drafted for in the same way,
    /// however fast the machine is.
    Usual,
}

/// How many tokens of requests and cached prefixes are in a [`Frame`](super::Frame).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExcerptLen {
    /// None: a frame shows nothing of what users write.
    #[default]
    None,
    /// So many from the beginning, and as many from the end.
    Tokens(NonZeroU32),
}

impl Default for ServiceConfig {
    fn default() -> Self {
        Self {
            max_running: None,
            step_tokens: None,
            step_time: None,
            max_queued: 256,
            max_queued_tokens: 1 << 20,
            aging: Duration::from_secs(30),
            headroom: 16,
            prefix_cache: PrefixCaching::On,
            eviction: EvictionPolicy::Adaptive,
            prefix_bytes: None,
            swap_bytes: 0,
            swap_type: None,
            tenant_limits: TenantLimits::default(),
            long_context: LongContext::Stop,
            preempt_every: None,
            draft_costs: DraftCostSource::Measured,
            excerpts: ExcerptLen::None,
        }
    }
}

impl ServiceConfig {
    /// Checks what depends on the model, before its weights are read. A service checks it, too.
    ///
    /// # Errors
    /// [`ConfigError::SwapType`] or [`ConfigError::NothingToSwap`], where a
    /// [`swap_type`](Self::swap_type) saves no bytes.
    pub fn check(&self, settings: &Settings) -> Result<(), ConfigError> {
        (self.swap_type).map_or(Ok(()), |kv_type| settings.check_swap_type(kv_type))
    }

    /// The scheduler's limits for an engine.
    pub(crate) fn scheduler(&self, settings: &Settings) -> SchedulerConfig {
        let (rules, n_ubatch) = (settings.rules, settings.n_ubatch);
        SchedulerConfig {
            step_tokens: self.step_tokens.unwrap_or(n_ubatch.min(rules.n_batch)),
            step_time: self.step_time.map(micros),
            max_running: self.max_running.unwrap_or(settings.n_active()) as usize,
            max_queued: self.max_queued,
            max_queued_tokens: self.max_queued_tokens,
            aging: micros(self.aging),
            headroom: self.headroom,
            prefix_cache: self.prefix_cache,
            eviction: self.eviction,
            prefix_bytes: self.prefix_bytes,
            swap_bytes: self.swap_bytes,
            swap_rows: match self.swap_type {
                Some(_) => SwapRows::Rounded,
                None => SwapRows::Exact,
            },
            preempt_every: self.preempt_every,
            ..SchedulerConfig::new(rules, n_ubatch, settings.n_ctx)
        }
    }
}

/// A duration as the scheduler counts it.
pub(crate) fn micros(duration: Duration) -> Micros {
    Micros(u64::try_from(duration.as_micros()).unwrap_or(u64::MAX))
}
