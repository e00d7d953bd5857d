//! [`Scheduler`]: what happened goes in ([`Scheduler::handle`], in `events.rs`), what to compute
//! comes out ([`Scheduler::next`], in `phases.rs`).
//!
//! Invariant: every request that is taken ends exactly once, and none ends because memory ran
//! short. Nothing in here reads a clock, starts a thread, waits or draws random numbers: the same
//! events and memories give the same plans. Knows no backend and no text.

use kv_core::SeqId;
use kv_core::memory::Memory;

use crate::data::config::{RowBytes, SchedulerConfig};
use crate::data::counters::Counters;
use crate::data::error::RequestError;
use crate::data::ids::{Micros, RequestId};
use crate::data::note::{Note, Notes};
use crate::data::request::PromptLimits;
use crate::data::state::{RequestState, Tier};
use crate::data::view::{CachedPrefix, RestoredPrefix, RunningRequest, WaitingRequest};
use crate::decide::restore::next_from_disk;
use crate::decide::room::Room;
use crate::decide::view::PartsView;
use crate::parts::drafts::Drafts;
use crate::parts::pace::Pace;
use crate::parts::parked::ParkedSet;
use crate::parts::prefix::PrefixCache;
use crate::parts::prefix::line::CachedLine;
use crate::parts::queue::Queue;
use crate::parts::running::RunningSet;
use crate::parts::sequences::Sequences;
use crate::parts::store::StoreParts;
use crate::parts::swap::{Swaps, saved_bytes};
use crate::speculate::SpeculationOff;

mod events;
mod park;
mod phases;
mod release;
mod store;

/// Decides which tokens of which requests each step computes. See the [crate](crate).
#[derive(Clone, Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    room: Room,
    queue: Queue,
    running: RunningSet,
    sequences: Sequences,
    prefix: PrefixCache,
    parked: ParkedSet,
    swaps: Swaps,
    store: StoreParts,
    drafts: Drafts,
    pace: Pace,
    /// A step failed: how much of it the memory holds is not known.
    recount: bool,
    /// The source that is being encoded, or the text that is being shifted.
    in_work: Option<RequestId>,
    /// Evictions of the memory in a row before a step.
    n_evicting: u32,
    /// Steps before the last preemption of [`SchedulerConfig::preempt_every`].
    forced_at: u64,
    counters: Counters,
    notes: Notes,
}

impl Scheduler {
    /// A scheduler of an empty memory, all of whose sequences are its own.
    ///
    /// # Errors
    /// [`RequestError`] where a limit is 0, the memory takes whole sequences only, or is not empty.
    pub fn new<M: Memory>(config: SchedulerConfig, memory: &M) -> Result<Self, RequestError> {
        config.check()?;
        if memory.split_policy() == kv_core::batch::SplitPolicy::WholeSequences {
            return Err(RequestError::WholeSequences);
        }
        let mut held = (0..memory.n_seqs()).map(|seq| memory.n_tokens(SeqId(seq)));
        if let Some(n_tokens) = held.find(|&n| n > 0) {
            return Err(RequestError::NotEmpty { n_tokens });
        }
        Ok(Self {
            config,
            room: Room::of(memory),
            queue: Queue::default(),
            running: RunningSet::default(),
            sequences: Sequences::all_of(memory),
            prefix: PrefixCache::default(),
            parked: ParkedSet::default(),
            swaps: Swaps::default(),
            store: StoreParts::default(),
            drafts: Drafts::new(&config, memory),
            pace: Pace::default(),
            recount: false,
            in_work: None,
            n_evicting: 0,
            forced_at: 0,
            counters: Counters::default(),
            notes: Notes::default(),
        })
    }

    /// The same for a memory whose rows have these sizes: they decide what cached prefixes are
    /// worth, and how many [`SchedulerConfig::prefix_bytes`] are.
    #[must_use]
    pub fn with_row_bytes(mut self, row_bytes: RowBytes) -> Self {
        self.prefix.set_row_bytes(row_bytes);
        self
    }

    /// The same scheduler, which takes notes from now on.
    #[must_use]
    pub fn with_notes(mut self) -> Self {
        self.notes.switch_on();
        self
    }

    /// The notes since the call before, in their order.
    pub fn take_notes(&mut self) -> Vec<Note> {
        self.notes.take()
    }

    /// Takes over prefixes that were restored into sequences of the memory that no request has, the
    /// least recently used first, and returns how many. One that the memory does not hold as it
    /// should, or all where prefixes are not cached, are removed by the next edits.
    pub fn restore_prefixes<M: Memory>(
        &mut self,
        memory: &M,
        prefixes: Vec<RestoredPrefix>,
    ) -> usize {
        let mut n_restored = 0;
        // Times before all of this scheduler's keep their order.
        for (order, prefix) in (0..).zip(prefixes) {
            if !self.sequences.take(prefix.seq) {
                continue;
            }
            let n_held = memory.next_pos(prefix.seq).as_usize();
            if n_held != prefix.tokens.len() || !self.config.prefix_cache.is_on() {
                self.sequences.drop_tokens(prefix.seq);
                continue;
            }
            let line = CachedLine::restored(Micros(order), prefix, self.prefix.new_root());
            self.notes.push(line.cached());
            self.prefix.restore(line);
            n_restored += 1;
            self.prefix.check_budget();
        }
        n_restored
    }

    /// The parts, to decide by.
    fn parts<'a, M>(&'a self, now: Micros, memory: &'a M) -> PartsView<'a, M> {
        PartsView {
            now,
            memory,
            config: &self.config,
            room: &self.room,
            queue: &self.queue,
            running: &self.running,
            prefix: &self.prefix,
            parked: &self.parked,
            swaps: &self.swaps,
            free: self.sequences.next(),
        }
    }

    fn requests(&self) -> impl Iterator<Item = &RequestState> {
        self.running.requests().chain(self.queue.iter())
    }

    /// Its limits.
    pub fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    /// The most tokens that one request can have, prompt and text together.
    pub fn capacity(&self) -> usize {
        self.room.capacity(self.config.n_ctx)
    }

    /// The limits of every prompt, whatever else is computed.
    pub fn prompt_limits(&self) -> PromptLimits {
        PromptLimits {
            n_tokens: self.capacity(),
            n_vocab: self.config.rules.n_vocab,
        }
    }

    /// The most tokens that it computes after a text where they are drafted
    /// ([`Event::Draft`](crate::Event::Draft)).
    ///
    /// # Errors
    /// [`SpeculationOff`], why the memory takes none.
    pub fn draft_limit(&self) -> Result<usize, SpeculationOff> {
        self.drafts.limit()
    }

    /// The most tokens that can be drafted for the next step of a request, which must have begun
    /// its text; those that are beyond it would be dropped.
    pub fn draft_room(&self, id: RequestId) -> usize {
        match self.running.get(id).filter(|active| active.takes_drafts()) {
            Some(active) if !self.running.is_in_flight(id) => {
                self.drafts.room(active, self.capacity())
            }
            _ => 0,
        }
    }

    /// True if it keeps copies at the checkpoints of requests: where cached prefixes can be cut
    /// anywhere, none are needed.
    pub fn keeps_checkpoints(&self) -> bool {
        self.config.prefix_cache.is_on() && self.room.is_cut_only_at_ends()
    }

    /// Its actions so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Bytes of rows that cached prefixes alone have in the memory.
    pub fn cached_bytes<M: Memory>(&self, memory: &M) -> u64 {
        self.prefix.n_bytes(memory)
    }

    /// Bytes that preempted requests have on the host.
    pub fn swapped_bytes(&self) -> u64 {
        saved_bytes(self.requests(), Tier::Host)
    }

    /// Bytes that they have on the disk.
    pub fn spilled_bytes(&self) -> u64 {
        saved_bytes(self.requests(), Tier::Disk)
    }

    /// The request whose state comes back next, where that is on the disk: to be read ahead. A
    /// hint; nothing depends on it.
    pub fn next_from_disk(&self, now: Micros) -> Option<RequestId> {
        next_from_disk(self.parts(now, &()))
    }

    /// Number of requests that wait.
    pub fn n_waiting(&self) -> usize {
        self.queue.iter().count()
    }

    /// The requests that wait, those that were preempted, too.
    pub fn waiting(&self) -> impl Iterator<Item = WaitingRequest<'_>> {
        self.queue.iter().map(|request| WaitingRequest {
            id: request.id,
            priority: request.priority,
            tokens: &request.tokens,
            since: request.waits_since,
            was_admitted: request.was_admitted,
        })
    }

    /// The requests that have a sequence, in the order of precedence.
    pub fn running(&self) -> impl Iterator<Item = RunningRequest<'_>> {
        self.running.iter().map(|r| RunningRequest {
            id: r.id(),
            seq: r.seq,
            tokens: &r.request.tokens,
            n_done: r.n_done,
            n_prompt: r.request.n_prompt,
            prefix: r.request.prefix,
            group: r.request.group.unwrap_or(r.id()),
            tenant: r.request.tenant,
        })
    }

    /// The cached prefixes.
    pub fn cached(&self) -> impl Iterator<Item = CachedPrefix<'_>> {
        self.prefix.lines().map(store::view)
    }
}
