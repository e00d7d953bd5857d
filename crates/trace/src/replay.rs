//! [`replay`]: the requests of a trace under another memory or eviction policy, and
//! [`replay_fleet`]: the same over several services behind a router.
//!
//! Invariant: the schedulers and memories are those of a service; only the model is missing. A
//! text goes on with the tokens that it had, and a request comes no earlier than in the trace, and
//! not before the texts have ended that had ended when it came: so the next message of a
//! conversation follows its answer. Drafted tokens are not replayed.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;

use cellar_scheduler::PrefixCaching;
use serde::Serialize;

use crate::error::TraceError;
use crate::fleet::{Fleet, Router};
use crate::layout::TracedPolicy;
use crate::reader::Trace;
use crate::record::{TraceEvent, TracedDrop, TracedWay};
use crate::step_cost::{Measured, StepCost};
use cellar_scheduler::EvictionPolicy;

/// What is different in a replay; the [default](ReplayConfig::default) is as in the trace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplayConfig {
    /// Tokens of the context; `None` as in the trace. [`Trace::n_ctx_within`] gives those of a
    /// budget.
    pub n_ctx: Option<u32>,
    /// Whether prefixes are kept; `None` as in the trace.
    pub prefix_cache: Option<PrefixCaching>,
    /// Which prefix is evicted first; `None` as in the trace.
    pub eviction: Option<EvictionPolicy>,
    /// Bytes of the host for preempted requests; `None` as in the trace.
    pub swap_bytes: Option<u64>,
    /// Bytes of a disk for them, beyond half of the host's; `None` as in the trace.
    pub swap_disk_bytes: Option<u64>,
}

/// What came of the requests of a trace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct ReplayReport {
    /// Tokens of the context.
    pub n_ctx: u32,
    /// Bytes of the memory.
    pub memory_bytes: u64,
    /// The most bytes of rows that were in use at once; `None` for the trace itself.
    pub peak_bytes: Option<u64>,
    /// Requests, each with one prompt.
    pub n_requests: usize,
    /// Of these, those that could not be taken.
    pub n_refused: usize,
    /// Tokens of the prompts that were admitted.
    pub n_prompt: usize,
    /// Of these, those that were there already.
    pub n_reused: usize,
    /// Of these, those that were not there, and that the shared tier had.
    pub n_fetched: usize,
    /// Tokens that steps computed, of prompts and texts. A replay computes what it would fetch.
    pub n_computed: usize,
    /// Of these, those that had been computed before, and were dropped by preemptions.
    pub n_recomputed: usize,
    /// Bytes of preempted requests that went to the host, and came back or were dropped.
    pub n_swapped_bytes: u64,
    /// Of these, bytes that went on to the disk.
    pub n_spilled_bytes: u64,
    /// Prefixes that were dropped for requests.
    pub n_evicted: usize,
    /// Tokens of these.
    pub n_evicted_tokens: usize,
    /// Running requests that had to wait.
    pub n_preemptions: usize,
    /// Steps.
    pub n_steps: usize,
    /// Microseconds from the start to the last step.
    pub micros: u64,
}

impl ReplayReport {
    /// The part of the prompts' tokens that was reused, 0 to 1.
    pub fn hit_rate(&self) -> f64 {
        self.n_reused as f64 / self.n_prompt.max(1) as f64
    }

    /// The part of the prompts' tokens that was reused or fetched, 0 to 1.
    pub fn hit_rate_with_tier(&self) -> f64 {
        (self.n_reused + self.n_fetched) as f64 / self.n_prompt.max(1) as f64
    }

    /// Tokens of prompts that had to be computed.
    pub fn n_prompt_computed(&self) -> usize {
        let saved = self.n_reused + self.n_fetched;
        self.n_prompt.saturating_sub(saved)
    }

    /// The same in tokens, where the numbers are those of larger units.
    pub(crate) fn scaled(self, n_tokens: u32) -> Self {
        let n = n_tokens as usize;
        Self {
            n_ctx: self.n_ctx.saturating_mul(n_tokens),
            n_prompt: self.n_prompt * n,
            n_reused: self.n_reused * n,
            n_fetched: self.n_fetched * n,
            n_computed: self.n_computed * n,
            n_recomputed: self.n_recomputed * n,
            n_evicted_tokens: self.n_evicted_tokens * n,
            ..self
        }
    }
}

/// Services of the same kind behind a router; the [default](FleetConfig::default) is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FleetConfig {
    /// How many. Each has the memory of the [`ReplayConfig`].
    pub n_replicas: NonZeroUsize,
    /// Which of them a request goes to.
    pub router: Router,
    /// Bytes of a store that all share, which keeps the prefixes of ended requests.
    pub tier_bytes: Option<u64>,
}

impl Default for FleetConfig {
    fn default() -> Self {
        Self {
            n_replicas: NonZeroUsize::MIN,
            router: Router::Longest,
            tier_bytes: None,
        }
    }
}

/// What came of the requests of a trace in several services.
#[derive(Clone, Debug, PartialEq)]
pub struct FleetReport {
    /// Of each service.
    pub replicas: Vec<ReplayReport>,
}

impl FleetReport {
    /// All together: sums, but for the time, which is the longest.
    pub fn total(&self) -> ReplayReport {
        let mut replicas = self.replicas.iter().copied();
        let first = replicas.next().unwrap_or_default();
        replicas.fold(first, |sum, one| ReplayReport {
            n_ctx: sum.n_ctx.saturating_add(one.n_ctx),
            memory_bytes: sum.memory_bytes.saturating_add(one.memory_bytes),
            peak_bytes: sum
                .peak_bytes
                .zip(one.peak_bytes)
                .map(|(sum, one)| sum.saturating_add(one)),
            n_requests: sum.n_requests + one.n_requests,
            n_refused: sum.n_refused + one.n_refused,
            n_prompt: sum.n_prompt + one.n_prompt,
            n_reused: sum.n_reused + one.n_reused,
            n_fetched: sum.n_fetched + one.n_fetched,
            n_computed: sum.n_computed + one.n_computed,
            n_recomputed: sum.n_recomputed + one.n_recomputed,
            n_swapped_bytes: sum.n_swapped_bytes + one.n_swapped_bytes,
            n_spilled_bytes: sum.n_spilled_bytes + one.n_spilled_bytes,
            n_evicted: sum.n_evicted + one.n_evicted,
            n_evicted_tokens: sum.n_evicted_tokens + one.n_evicted_tokens,
            n_preemptions: sum.n_preemptions + one.n_preemptions,
            n_steps: sum.n_steps + one.n_steps,
            micros: sum.micros.max(one.micros),
        })
    }

    /// Prompt tokens that the busiest service computes, for each that they compute on average.
    pub fn imbalance(&self) -> f64 {
        let computed = self.replicas.iter().map(ReplayReport::n_prompt_computed);
        let busiest = computed.clone().max().unwrap_or(0);
        let all: usize = computed.sum();
        busiest as f64 * self.replicas.len() as f64 / all.max(1) as f64
    }
}

impl Trace {
    /// The longest context whose memory takes at most so many bytes.
    ///
    /// # Errors
    /// [`TraceError::Refused`] where not even one token fits.
    pub fn n_ctx_within(&self, n_bytes: u64) -> Result<u32, TraceError> {
        let memory = &self.header.memory;
        let n_cells = memory.largest_n_ctx(n_bytes);
        let n_tokens = n_cells.map(|n| n.saturating_mul(self.unit));
        n_tokens.ok_or_else(|| {
            let least = memory.with_n_ctx(1).bytes().unwrap_or(u64::MAX);
            TraceError::Refused {
                reason: format!(
                    "the memory of this model takes at least {least} bytes, and {n_bytes} are given"
                ),
            }
        })
    }

    /// What the trace itself shows.
    pub fn recorded(&self) -> ReplayReport {
        let memory = &self.header.memory;
        let mut report = ReplayReport {
            n_ctx: memory.config.n_ctx,
            memory_bytes: memory.bytes().unwrap_or(u64::MAX),
            n_requests: self.requests.len(),
            micros: self.micros,
            ..ReplayReport::default()
        };
        let mut lengths = BTreeMap::new();
        for request in &self.requests {
            lengths.insert(request.request.id.0, request.request.prompt.len());
        }
        let mut held: BTreeMap<u64, usize> = BTreeMap::new();
        for event in &self.events {
            match event {
                TraceEvent::Refuse { request } => {
                    report.n_refused += usize::from(lengths.contains_key(request));
                }
                TraceEvent::Admit(admitted) => {
                    // A text of several has no prompt of its own.
                    if let Some(n_prompt) = lengths.get(&admitted.request) {
                        report.n_prompt += n_prompt;
                        report.n_reused += admitted.n_reused;
                    }
                }
                TraceEvent::Resume(admitted) => {
                    let had = held.remove(&admitted.request).unwrap_or(0);
                    report.n_recomputed += had.saturating_sub(admitted.n_reused);
                }
                TraceEvent::Preempt { request, n_tokens } => {
                    report.n_preemptions += 1;
                    held.insert(*request, *n_tokens);
                }
                TraceEvent::Drop {
                    n_tokens,
                    why: TracedDrop::Evicted,
                    ..
                } => {
                    report.n_evicted += 1;
                    report.n_evicted_tokens += n_tokens;
                }
                TraceEvent::Step(step) => {
                    report.n_steps += 1;
                    report.n_computed += step.n_tokens;
                }
                TraceEvent::Swap {
                    way: TracedWay::Out,
                    n_bytes,
                    ..
                } => report.n_swapped_bytes += n_bytes,
                TraceEvent::Swap {
                    way: TracedWay::Disk,
                    n_bytes,
                    ..
                } => report.n_spilled_bytes += n_bytes,
                TraceEvent::Submit(_)
                | TraceEvent::Swap { .. }
                | TraceEvent::Share { .. }
                | TraceEvent::Cache { .. }
                | TraceEvent::Drop { .. }
                | TraceEvent::End { .. }
                | TraceEvent::Stop => {}
            }
        }
        report
    }

    /// Whether tokens were drafted, which a replay does not do.
    pub fn has_drafts(&self) -> bool {
        let mut events = self.events.iter();
        events.any(|event| matches!(event, TraceEvent::Step(step) if step.n_drafted > 0))
    }

    pub(crate) fn step_cost(&self) -> StepCost {
        StepCost::fit(self.events.iter().filter_map(|event| match event {
            TraceEvent::Step(step) => Some(Measured {
                n_tokens: step.n_tokens,
                took: step.took,
            }),
            _ => None,
        }))
    }
}

/// Sends the requests of a trace through a scheduler and a memory.
///
/// # Errors
/// As [`replay_fleet`], but for those of the tier.
pub fn replay(trace: &Trace, config: &ReplayConfig) -> Result<ReplayReport, TraceError> {
    replay_fleet(trace, config, &FleetConfig::default()).map(|report| report.total())
}

/// Sends the requests of a trace through several schedulers and memories, whose clocks go on
/// together.
///
/// # Errors
/// [`TraceError::MemorySize`] where there is no memory of this size; [`TraceError::Memory`] where
/// it refuses what the scheduler planned, which no sound trace leads to; [`TraceError::Scheduler`]
/// where the limits of the trace suit no scheduler; [`TraceError::Refused`] where there is a tier
/// and layers of the model have windows or states.
pub fn replay_fleet(
    trace: &Trace,
    config: &ReplayConfig,
    fleet: &FleetConfig,
) -> Result<FleetReport, TraceError> {
    let mut replayed = Fleet::new(trace, config, fleet)?;
    replayed.run()?;
    let reports = replayed.reports();
    let replicas = reports.map(|report| report.scaled(trace.unit)).collect();
    Ok(FleetReport { replicas })
}

impl TracedPolicy {
    /// The same with what is chosen.
    pub(crate) fn with(
        self,
        caching: Option<PrefixCaching>,
        eviction: Option<EvictionPolicy>,
    ) -> Self {
        let own = match self {
            Self::Lru => EvictionPolicy::Lru,
            Self::Slru => EvictionPolicy::SegmentedLru,
            Self::Value => EvictionPolicy::Value,
            Self::Adaptive | Self::Off => EvictionPolicy::Adaptive,
        };
        let is_off = match caching {
            Some(caching) => caching == PrefixCaching::Off,
            None => self == Self::Off && eviction.is_none(),
        };
        if is_off {
            Self::Off
        } else {
            Self::new(PrefixCaching::On, eviction.unwrap_or(own))
        }
    }
}
