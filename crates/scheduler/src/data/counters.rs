//! [`Counters`]: what a scheduler has done so far. Plain data.

/// The work that a scheduler has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Steps that were planned.
    pub n_steps: u64,
    /// Tokens of these steps.
    pub n_tokens: u64,
    /// Preemptions, also those of
    /// [`SchedulerConfig::preempt_every`](crate::SchedulerConfig::preempt_every).
    pub n_preemptions: u64,
    /// Tokens that had been computed and were dropped by preemptions.
    pub n_dropped_tokens: u64,
    /// Tokens of the requests that were admitted.
    pub n_prompt_tokens: u64,
    /// Tokens of these that were there already: of cached prefixes, or of requests that run.
    pub n_reused_tokens: u64,
    /// Tokens of these that were of requests that run.
    pub n_shared_tokens: u64,
    /// Number of times a request waited for a prefix that another one was computing.
    pub n_waits: u64,
    /// Preempted requests whose state went to the host.
    pub n_swapped_out: u64,
    /// Of these, those whose state came back.
    pub n_swapped_in: u64,
    /// Bytes of the states that went to the host.
    pub n_swapped_bytes: u64,
    /// Bytes of these that went on to the disk.
    pub n_spilled_bytes: u64,
    /// Saved states that could not be restored, and were computed again.
    pub n_swap_lost: u64,
    /// Tokens that a store of prefixes gave.
    pub n_restored_tokens: u64,
    /// Cached prefixes that were dropped for others.
    pub n_evicted: u64,
    /// Tokens that were drafted and computed.
    pub n_drafted_tokens: u64,
    /// Number of these that were right.
    pub n_accepted_tokens: u64,
    /// Steps that were planned again, because a larger one did not fit.
    pub n_replanned: u64,
}
