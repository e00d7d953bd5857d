//! Swapping: what the memory held of a request that is preempted goes to the host, and comes back
//! when the request goes on, in place of computing it again.
//!
//! The scheduler decides what goes and when it comes back; the caller has the bytes. Tokens that
//! others have, too, stay where they are: the bytes begin behind them, and where they have gone by
//! then, they alone are computed again. A disk takes what is beyond half of the host's bytes, so
//! that the other half is free when the next request has to go. Invariant: the bytes on the host
//! are at most [`SchedulerConfig::swap_bytes`](crate::SchedulerConfig::swap_bytes), those on the
//! disk [`SchedulerConfig::swap_disk_bytes`](crate::SchedulerConfig::swap_disk_bytes), and each is
//! given back once. Knows no format and no file.

use kv_core::memory::{Edit, Memory, Seqs};
use kv_core::{Pos, PosRange, SeqId};

use crate::config::SwapRows;
use crate::event::{Outcome, Work};
use crate::note::Note;
use crate::prefix::{MIN_REUSED, PrefixUse, n_common};
use crate::request::{Micros, RequestId, SourceUse};
use crate::scheduler::{Keep, Scheduler};
use crate::state::Running;

/// What is saved of a request, or comes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Swap {
    /// The request.
    pub request: RequestId,
    /// Its sequence.
    pub seq: SeqId,
    /// A sequence that holds nothing, where only a part of the tokens is swapped: it has that part
    /// in between. `None` for all of them.
    pub part: Option<SeqId>,
    /// The first token that is swapped.
    pub first: usize,
    /// Tokens of the request when it is complete in the memory.
    pub n_tokens: usize,
}

impl Swap {
    /// The sequence whose state is saved or restored.
    pub fn swapped_seq(&self) -> SeqId {
        self.part.unwrap_or(self.seq)
    }

    /// To be done before it is saved.
    pub fn before_saving(&self) -> Option<Edit> {
        let to = self.part?;
        let from = self.seq;
        let range = self.range();
        Some(Edit::Copy { from, to, range })
    }

    /// To be done after it was restored.
    pub fn after_restoring(&self) -> Option<Edit> {
        let (from, to) = (self.part?, self.seq);
        let range = self.range();
        Some(Edit::Copy { from, to, range })
    }

    /// To be done at the end: the sequence in between holds nothing again.
    pub fn at_the_end(&self) -> Option<Edit> {
        Some(Edit::Remove {
            seqs: Seqs::One(self.part?),
            range: PosRange::ALL,
        })
    }

    fn range(&self) -> PosRange {
        PosRange::from(Pos(u32::try_from(self.first).unwrap_or(u32::MAX))..)
    }
}

/// What became of a state that was to come back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SwappedIn {
    /// The memory holds it.
    Restored,
    /// The memory has no room for it now, and is as before; the bytes are kept.
    NoRoom,
    /// It could not be restored, the memory is as before, and the bytes are gone.
    Lost,
}

/// Where a state is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tier {
    Host,
    Disk,
}

/// What was saved of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Swapped {
    first: usize,
    n_tokens: usize,
    n_bytes: u64,
    tier: Tier,
}

impl Swapped {
    /// How many of its tokens have to be in the memory when it comes back.
    pub(crate) fn first(self) -> usize {
        self.first
    }

    /// Whether nothing is lost of a request of which the memory held so many tokens.
    pub(crate) fn is_all_of(self, n_done: usize) -> bool {
        self.n_tokens == n_done
    }
}

/// A request that leaves the memory, until it is known whether the host has its state.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Leaving {
    swap: Swap,
    keep: Keep,
}

impl Scheduler {
    /// Bytes that preempted requests have on the host.
    pub fn swapped_bytes(&self) -> u64 {
        self.bytes_in(Tier::Host)
    }

    /// Bytes that they have on the disk.
    pub fn spilled_bytes(&self) -> u64 {
        self.bytes_in(Tier::Disk)
    }

    fn bytes_in(&self, tier: Tier) -> u64 {
        let running = self.running.iter().map(|r| &r.request);
        let all = running.chain(self.queue.iter());
        let states = all.filter_map(|request| request.swapped);
        let states = states.filter(|state| state.tier == tier);
        states.map(|state| state.n_bytes).sum()
    }

    /// The request whose state comes back next, where that is on the disk: to be read ahead. A
    /// hint; nothing depends on it.
    pub fn next_from_disk(&self, now: Micros) -> Option<RequestId> {
        if self.config.swap_disk_bytes == 0 || self.spilled_bytes() == 0 {
            return None;
        }
        let mut running = self.running.iter().map(|r| &r.request);
        let next = running.find(|request| request.swapped.is_some());
        let next = next.map(|request| (request.id, request.swapped));
        let next = next.or_else(|| {
            let order = (self.queue).in_order(now, self.config.aging, &self.tenants);
            let state = |id| self.queue.iter().find(|r| r.id == id)?.swapped;
            let mut order = order.into_iter().map(|(id, _)| (id, state(id)));
            order.find(|(_, state)| state.is_some())
        });
        let (id, state) = next?;
        (state?.tier == Tier::Disk).then_some(id)
    }

    /// Takes the sequence from a request: returns what is to be saved of it before, where the host
    /// has room.
    pub(crate) fn preempt_for_room<S>(
        &mut self,
        now: Micros,
        id: RequestId,
        keep: Keep,
        outcomes: &mut Vec<Outcome>,
    ) -> Option<Work<S>> {
        if let Some((swap, limit)) = self.swap_of(id) {
            self.leaving = Some(Leaving { swap, keep });
            return Some(Work::SwapOut { swap, limit });
        }
        outcomes.extend(self.preempt(now, id, keep));
        None
    }

    /// What would be saved of a running request, and in how many bytes at most.
    fn swap_of(&self, id: RequestId) -> Option<(Swap, u64)> {
        let limit = self.config.swap_bytes.saturating_sub(self.swapped_bytes());
        let running = self.running.iter().find(|r| r.request.id == id)?;
        let request = &running.request;
        // The prompt of several texts goes on under the name of any of them.
        let is_one = request.siblings.is_empty();
        let is_sound = is_one
            && !request.is_suspect
            && !request.wants_prompt_rows()
            && request.source == SourceUse::None;
        if limit == 0 || !is_sound || request.swapped.is_some() {
            return None;
        }
        let n_tokens = running.n_done;
        let part = self.free.last().copied();
        let n_shared = match part {
            Some(_) => self.n_held_by_others(running),
            None => 0,
        };
        let (first, part) = if n_shared >= MIN_REUSED {
            (n_shared, part)
        } else {
            (0, None)
        };
        // So few are computed sooner.
        if n_tokens < first + MIN_REUSED {
            return None;
        }
        let least = match self.config.swap_rows {
            SwapRows::Exact => {
                let row_bytes = self.cache.row_bytes();
                self.room.least_bytes(n_tokens - first, row_bytes)
            }
            // How much smaller is not known here.
            SwapRows::Rounded => 1,
        };
        let swap = Swap {
            request: id,
            seq: running.seq,
            part,
            first,
            n_tokens,
        };
        (least <= limit).then_some((swap, limit))
    }

    /// How many of the first tokens of a request others have, too, where a copy of these alone is
    /// of use.
    fn n_held_by_others(&self, running: &Running) -> usize {
        if running.request.is_shifted {
            return 0;
        }
        let PrefixUse::Within(salt) = running.request.prefix else {
            return 0;
        };
        if self.room.is_cut_only_at_ends()
            || self.room.has_streams()
            || !self.config.prefix_cache.is_on()
        {
            return 0;
        }
        let held = running.held();
        let lines = self.cache.lines().filter(|line| line.salt == salt);
        let lines = lines.map(|line| n_common(&line.tokens, held));
        let others = self.running_sources(running.request.prefix);
        let others = others.filter(|source| source.seq != running.seq);
        let others = others.map(|source| n_common(source.tokens, held));
        lines.chain(others).max().unwrap_or(0)
    }

    /// The state of a request that leaves was saved in so many bytes, or not.
    pub(crate) fn swapped_out(
        &mut self,
        now: Micros,
        id: RequestId,
        n_bytes: Option<u64>,
    ) -> Vec<Outcome> {
        let Some(Leaving { swap, keep }) =
            self.leaving.take_if(|leaving| leaving.swap.request == id)
        else {
            return Vec::new();
        };
        let Some(n_bytes) = n_bytes else {
            return self.preempt(now, id, keep).into_iter().collect();
        };
        let mut running = self.running.iter_mut();
        if let Some(running) = running.find(|r| r.request.id == id) {
            let Swap {
                first, n_tokens, ..
            } = swap;
            running.request.swapped = Some(Swapped {
                first,
                n_tokens,
                n_bytes,
                tier: Tier::Host,
            });
            self.counters.n_swapped_out += 1;
            self.counters.n_swapped_bytes += n_bytes;
            self.notes.push(Note::SwappedOut {
                request: id,
                n_tokens: n_tokens - first,
                n_bytes,
            });
        }
        let mut outcomes: Vec<Outcome> = self.preempt(now, id, Keep::Nothing).into_iter().collect();
        self.spill(now, &mut outcomes);
        outcomes
    }

    /// Sends states on to the disk until half of the host's bytes are free: first those that come
    /// back last.
    fn spill(&mut self, now: Micros, outcomes: &mut Vec<Outcome>) {
        if self.config.swap_disk_bytes == 0 {
            return;
        }
        let (mut n_host, mut n_disk) = (self.swapped_bytes(), self.spilled_bytes());
        let order = (self.queue).in_order(now, self.config.aging, &self.tenants);
        for (request, _) in order.into_iter().rev() {
            if n_host <= self.config.swap_bytes / 2 {
                return;
            }
            let room = self.config.swap_disk_bytes.saturating_sub(n_disk);
            let waiting = self.queue.find(|waiting| waiting.id == request);
            let Some(state) = waiting.and_then(|waiting| waiting.swapped.as_mut()) else {
                continue;
            };
            if state.tier == Tier::Disk || state.n_bytes > room {
                continue;
            }
            state.tier = Tier::Disk;
            n_host -= state.n_bytes;
            n_disk += state.n_bytes;
            self.counters.n_spilled_bytes += state.n_bytes;
            self.notes.push(Note::Spilled {
                request,
                n_tokens: state.n_tokens - state.first,
                n_bytes: state.n_bytes,
            });
            outcomes.push(Outcome::Spilled { request });
        }
    }

    /// The host keeps a state that the disk did not take.
    pub(crate) fn spill_failed(&mut self, id: RequestId) {
        let mut running = self.running.iter_mut().map(|r| &mut r.request);
        let request = match running.find(|request| request.id == id) {
            Some(request) => Some(request),
            None => self.queue.find(|request| request.id == id),
        };
        if let Some(state) = request.and_then(|request| request.swapped.as_mut()) {
            state.tier = Tier::Host;
        }
    }

    /// What is to come back before the next step, or to be done for it: `None` where nothing is.
    pub(crate) fn swap_in<M: Memory>(
        &mut self,
        now: Micros,
        memory: &M,
        outcomes: &mut Vec<Outcome>,
    ) -> Option<Option<Work<M::Slot>>> {
        let is_due = |r: &Running| r.request.swapped.is_some_and(|s| s.first == r.n_done);
        let at = self.running.iter().position(is_due)?;
        let running = &self.running[at];
        let Swapped {
            first, n_tokens, ..
        } = running.request.swapped?;
        let (request, seq) = (running.request.id, running.seq);
        let free = self.free.last().copied();
        let is_short = std::mem::take(&mut self.swap_is_short);
        if !is_short && (first == 0 || free.is_some()) {
            return Some(Some(Work::SwapIn(Swap {
                request,
                seq,
                part: free.filter(|_| first > 0),
                first,
                n_tokens,
            })));
        }
        if self.cache.is_empty() {
            // It fits as anything else does: token by token.

            self.running[at].request.swapped = None;
            let n_tokens = n_tokens - first;
            self.counters.n_dropped_tokens += n_tokens as u64;
            outcomes.push(Outcome::SwapDropped { request, n_tokens });
        } else {
            self.evict(now, memory);
        }
        Some(None)
    }

    /// What became of a state that was to come back.
    pub(crate) fn swapped_in(&mut self, id: RequestId, result: SwappedIn) {
        let mut running = self.running.iter_mut();
        let Some(running) = running.find(|r| r.request.id == id) else {
            return;
        };
        match (result, running.request.swapped) {
            (SwappedIn::NoRoom, _) => self.swap_is_short = true,
            (SwappedIn::Restored, Some(swapped)) => {
                running.request.swapped = None;
                running.n_done = swapped.n_tokens;
                running.is_rounded |= self.config.swap_rows == SwapRows::Rounded;
                self.counters.n_swapped_in += 1;
                self.notes.push(Note::SwappedIn {
                    request: id,
                    n_tokens: swapped.n_tokens - swapped.first,
                    n_bytes: swapped.n_bytes,
                });
            }
            (SwappedIn::Lost, Some(swapped)) => {
                running.request.swapped = None;
                self.counters.n_swap_lost += 1;
                self.counters.n_dropped_tokens += (swapped.n_tokens - swapped.first) as u64;
            }
            (SwappedIn::Restored | SwappedIn::Lost, None) => {}
        }
    }
}
