//! Admission: which waiting request gets a sequence, and what of its tokens is cached.
//!
//! Invariant: a request is admitted with the tokens that the memory holds for it after the edit
//! that comes with it.

use kv_core::memory::{Composite, Edit, Memory, Seqs};
use kv_core::{Pos, PosRange, SeqId};

use crate::event::Outcome;
use crate::note::Note;
use crate::prefix::{Line, Missed, PrefixUse, Reuse, copy};
use crate::queue::Rank;
use crate::request::{Micros, RequestId};
use crate::room::Demand;
use crate::scheduler::Scheduler;
use crate::state::{RequestState, Running};

/// What came of admitting the next request.
pub(crate) enum Admission {
    /// It has a sequence.
    Admitted,
    /// This request has to make room for it.
    Preempt(RequestId),
    /// A cached prefix has to make room for it.
    Evict,
    /// None can be admitted now.
    Full,
}

/// A sequence for a request, and what it holds by then.
struct Place {
    seq: SeqId,
    n_done: usize,
    edit: Option<Edit>,
    missed: Option<Missed>,
}

impl Scheduler {
    /// Gives a sequence to the next request that waits, where there is room.
    pub(crate) fn admit(
        &mut self,
        now: Micros,
        memory: &Composite,
        outcomes: &mut Vec<Outcome>,
    ) -> Admission {
        let Some((id, rank)) = self.queue.next(now, self.config.aging) else {
            return Admission::Full;
        };
        let Some(waiting) = self.queue.iter().find(|request| request.id == id) else {
            return Admission::Full;
        };
        let n_tokens = waiting.tokens.len();
        let demand = Demand {
            n_tokens,
            n_shared: 0,
        };
        if !self.has_room_for(demand, &self.running) {
            let victim = self.victim_below(rank, demand);
            return victim.map_or(Admission::Full, Admission::Preempt);
        }
        let Some(place) = self.place(now, waiting, memory) else {
            return match self.cache.lines().is_empty() {
                true => Admission::Full,
                false => Admission::Evict,
            };
        };
        let Some(mut request) = self.queue.take(id) else {
            return Admission::Full;
        };
        let Place {
            seq,
            n_done,
            edit,
            missed,
        } = place;
        match edit {
            Some(Edit::Copy { from, .. }) => {
                self.cache.hit(now, from);
                self.note_shared(id, seq, from, n_done);
            }
            Some(_) => {
                self.cache.take(seq);
                self.note_shared(id, seq, seq, n_done);
            }
            None => {}
        }
        self.free.retain(|&free| free != seq);
        self.edits.extend(edit);
        let is_first = !std::mem::replace(&mut request.was_admitted, true);
        let wants_checkpoint = is_first && self.room.is_cut_only_at_ends();
        if is_first {
            self.counters.n_prompt_tokens += n_tokens as u64;
            self.counters.n_reused_tokens += n_done as u64;
        }
        let n_tokens = n_done;
        let running = Running {
            wants_checkpoint: wants_checkpoint && request.n_prompt > n_done + 1,
            request,
            seq,
            rank,
            n_done,
            reuse: Reuse { n_tokens, missed },
            draft: Vec::new(),
        };
        outcomes.push(running.admitted(id));
        self.insert_running(running);
        Admission::Admitted
    }

    pub(crate) fn note_shared(&mut self, request: RequestId, seq: SeqId, from: SeqId, n: usize) {
        self.notes.push(Note::Shared {
            request,
            seq,
            from,
            n_tokens: n,
        });
    }

    /// In the order of precedence.
    pub(crate) fn insert_running(&mut self, running: Running) {
        let precedence = running.precedence();
        let is_before = |r: &Running| r.precedence() < precedence;
        let at = self.running.partition_point(is_before);
        self.running.insert(at, running);
    }

    /// A sequence for a request: a free one with a copy of what is cached, or where none is free,
    /// that of the cached prefix itself.
    fn place(&self, now: Micros, request: &RequestState, memory: &Composite) -> Option<Place> {
        let free = self.free.last().copied();
        let salt = match request.prefix {
            PrefixUse::Within(salt) if self.config.prefix_cache.is_on() => salt,
            _ => {
                let missed = Some(Missed::Disabled);
                return free.map(|seq| Place {
                    seq,
                    n_done: 0,
                    edit: None,
                    missed,
                });
            }
        };
        let edit = |line: SeqId, n: usize| match free {
            Some(to) => copy(line, to, n),
            None => cut(line, n),
        };
        let is_refused = |line, n| memory.check(&edit(line, n)).err();
        let (found, missed) = self.cache.find(&request.tokens, salt, now, is_refused);
        match found {
            Some(found) => Some(Place {
                seq: free.unwrap_or(found.seq),
                n_done: found.n_tokens,
                edit: Some(edit(found.seq, found.n_tokens)),
                missed,
            }),
            None => free.map(|seq| Place {
                seq,
                n_done: 0,
                edit: None,
                missed,
            }),
        }
    }

    /// Whether a request can run with these.
    pub(crate) fn has_room_for(&self, demand: Demand, running: &[Running]) -> bool {
        if running.is_empty() {
            return true;
        }
        let n_slots = self.config.n_step().min(self.config.max_running);
        let mut groups = Vec::new();
        let of = |r: &Running| Demand {
            n_tokens: r.request.tokens.len(),
            // The first of a group counts for the cells that they share.
            n_shared: match r.request.group {
                Some(group) if groups.contains(&group) => r.request.n_prompt,
                group => {
                    groups.extend(group);
                    0
                }
            },
        };
        let mut demands: Vec<Demand> = running.iter().map(of).collect();
        demands.push(demand);
        running.len() < n_slots
            && self
                .room
                .fits(&demands, u64::from(self.config.headroom.max(1)))
    }

    /// The request of the lowest rank below this one that came last, where preempting those below
    /// makes enough room.
    fn victim_below(&self, rank: Rank, demand: Demand) -> Option<RequestId> {
        let n_kept = self.running.partition_point(|r| r.rank >= rank);
        let victim = self.running.get(n_kept..)?.last()?;
        let enough = self.has_room_for(demand, &self.running[..n_kept]);
        enough.then_some(victim.request.id)
    }

    /// Where windows or states can only be copied as they are: keeps a copy of a request one token
    /// before the end of its prompt, so that the same prompt finds it again. Returns whether there
    /// is something to do before the next step.
    pub(crate) fn take_checkpoint(&mut self, now: Micros, memory: &Composite) -> bool {
        let is_due = |r: &Running| r.wants_checkpoint && r.n_done + 1 == r.request.n_prompt;
        let Some(at) = self.running.iter().position(is_due) else {
            return false;
        };
        let running = &self.running[at];
        let tokens = running.request.tokens[..running.n_done].to_vec();
        let PrefixUse::Within(salt) = running.request.prefix else {
            self.running[at].wants_checkpoint = false;
            return true;
        };
        let is_useless = tokens.len() < crate::prefix::MIN_REUSED
            || !self.config.prefix_cache.is_on()
            || self
                .cache
                .lines()
                .iter()
                .any(|l| l.salt == salt && l.tokens == tokens);
        let edit = self
            .free
            .last()
            .map(|&to| copy(running.seq, to, tokens.len()));
        if is_useless || edit.is_none_or(|edit| memory.check(&edit).is_err()) {
            let can_evict = !is_useless && edit.is_none() && !self.cache.lines().is_empty();
            match can_evict {
                true => self.evict(now),
                false => self.running[at].wants_checkpoint = false,
            }
            return true;
        }
        self.running[at].wants_checkpoint = false;
        if let Some(to) = self.free.pop() {
            self.edits.extend(edit);
            let line = Line::new(now, &self.running[at], to, salt);
            self.notes.push(line.cached());
            self.cache.insert(line);
        }
        true
    }
}

/// The edit that leaves the first `n` tokens of a sequence.
pub(crate) fn cut(seq: SeqId, n: usize) -> Edit {
    let from = Pos(u32::try_from(n).unwrap_or(u32::MAX));
    Edit::Remove {
        seqs: Seqs::One(seq),
        range: PosRange::from(from..),
    }
}
