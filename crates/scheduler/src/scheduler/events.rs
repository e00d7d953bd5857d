//! [`Scheduler::handle`]: what each event changes.
//!
//! Invariant: an event for a request that is unknown, or has ended, changes nothing.

use super::Scheduler;
use crate::data::active::{ActiveRequest, Keep, PendingFeed};
use crate::data::config::SwapRows;
use crate::data::error::RequestError;
use crate::data::event::{End, Event, Outcome, RowReport, ShiftResult, StepFailure, SwappedIn};
use crate::data::ids::{Micros, RequestId};
use crate::data::note::Note;
use crate::data::request::{Overflow, Request, Retention};
use crate::data::state::{RequestState, SavedState, Tier};
use crate::decide::save::states_to_spill;
use crate::parts::drafts::{RejectedDraft, take_tokens};
use crate::parts::swap::SwapOut;

impl Scheduler {
    /// Takes an event in, at any time, also while a step is being computed. Returns what became of
    /// requests by it.
    pub fn handle(&mut self, now: Micros, event: Event) -> Vec<Outcome> {
        match event {
            Event::Submit(request) => self.submit(now, request),
            Event::ClearPrefixes => {
                self.clear_prefixes(now);
                Vec::new()
            }
            Event::Draft { request, tokens } => {
                let n_vocab = self.config.rules.n_vocab;
                let n_valid = tokens.iter().take_while(|t| t.0 < n_vocab).count();
                let n = self.draft_room(request).min(n_valid);
                let active = self.running.get_mut(request);
                if let Some(active) = active.filter(|active| active.takes_drafts()) {
                    active.draft = tokens;
                    active.draft.truncate(n);
                }
                Vec::new()
            }
            Event::Cancel(id) => self.cancel(now, id),
            Event::Fail(id) => {
                self.in_work.take_if(|&mut work| work == id);
                self.end(id, End::Failed, Keep::Nothing)
            }
            Event::Resume { request, tokens } => self.resume(now, request, tokens),
            Event::Release(id) => {
                self.release_parked(now, id);
                Vec::new()
            }
            Event::Encoded(id) => {
                self.in_work.take_if(|&mut work| work == id);
                if let Some(active) = self.running.get_mut(id) {
                    active.awaits_source = false;
                }
                Vec::new()
            }
            Event::Shifted { request, result } => {
                self.in_work.take_if(|&mut work| work == request);
                self.shifted(request, result)
            }
            Event::StepDone(rows) => self.step_done(now, &rows),
            Event::SwappedOut { request, n_bytes } => self.swapped_out(now, request, n_bytes),
            Event::SwappedIn { request, result } => {
                self.swapped_in(request, result);
                Vec::new()
            }
            Event::Asked(request) => {
                self.asked(request);
                Vec::new()
            }
            Event::Probed { request, result } => {
                self.probed(request, result);
                Vec::new()
            }
            Event::Fetched { request, result } => {
                self.fetched(request, result);
                Vec::new()
            }
            Event::Restored { n_tokens, result } => {
                self.restored(now, n_tokens, result);
                Vec::new()
            }
            Event::SpillFailed(request) => {
                self.spill_failed(request);
                Vec::new()
            }
            Event::StepTime(took) => {
                self.pace.learn(took);
                Vec::new()
            }
            Event::StepFailed(failure) => self.step_failed(now, failure),
            Event::Hold(request) => {
                if let Some(active) = self.running.get_mut(request) {
                    active.is_held = true;
                }
                Vec::new()
            }
            Event::Ready(text) => {
                let has_it =
                    |active: &&mut ActiveRequest| active.request.texts().any(|t| t == text);
                if let Some(active) = self.running.iter_mut().find(has_it) {
                    active.is_held = false;
                }
                Vec::new()
            }
        }
    }

    /// Takes a request that comes, or refuses all its texts.
    fn submit(&mut self, now: Micros, request: Request) -> Vec<Outcome> {
        let texts = [&[request.id], request.siblings.as_slice()].concat();
        let checked = self.check_request(&texts, &request);
        let is_running = |tenant| self.running.n_of_tenant(tenant) > 0;
        let taken =
            checked.and_then(|()| (self.queue).submit(now, request, &self.config, is_running));
        let Err(why) = taken else {
            return Vec::new();
        };
        let refused = texts.into_iter().map(|request| Outcome::Refused {
            request,
            why: why.clone(),
        });
        refused.collect()
    }

    /// # Errors
    /// [`RequestError`] where its prompt cannot be computed, or one of its texts is not new.
    fn check_request(&self, texts: &[RequestId], request: &Request) -> Result<(), RequestError> {
        self.prompt_limits().check(&request.prompt)?;
        for (number, &id) in texts.iter().enumerate() {
            if texts[..number].contains(&id) || self.has_text(id) {
                return Err(RequestError::Duplicate { id });
            }
        }
        Ok(())
    }

    /// True if a text has not ended, or is parked.
    pub(super) fn has_text(&self, id: RequestId) -> bool {
        let forks = self.running.forks().iter().map(|fork| &fork.request);
        let mut all = self.requests().chain(forks);
        all.any(|request| request.texts().any(|text| text == id)) || self.parked.contains(id)
    }

    fn cancel(&mut self, now: Micros, id: RequestId) -> Vec<Outcome> {
        let end = End::Cancelled;
        let mut outcomes = vec![Outcome::Ended { request: id, end }];
        if self.running.cancel_fork(id) {
            return outcomes;
        }
        if let Some(admitted) = self.running.cancel_sibling(id) {
            outcomes.extend(admitted);
            return outcomes;
        }
        if let Some(waiting) = self.queue.find(|request| request.is_shared_by(id)) {
            waiting.drop_text(id);
            return outcomes;
        }
        if !self.running.is_in_flight(id) {
            return self.end(id, end, Keep::Prefix(now));
        }
        let running = self.running.get(id);
        if running.is_some_and(|active| active.request.retention == Retention::Park) {
            return Vec::new(); // it is parked between steps
        }
        if self.running.cancel(id) {
            outcomes
        } else {
            Vec::new() // it was cancelled before
        }
    }

    fn step_done(&mut self, now: Micros, rows: &[RowReport]) -> Vec<Outcome> {
        let mut outcomes = Vec::new();
        let capacity = self.capacity();
        if self.room.is_cut_only_at_ends() {
            // States and windows that a request shared with a copy of it are the copy's when it has
            // gone on.
            self.prefix.check_budget();
        }
        for feed in self.running.end_step() {
            let id = feed.request;
            let Some(active) = self.running.get_mut(id) else {
                self.keep_cancelled(now, &feed);
                continue;
            };
            active.n_done += feed.n_tokens;
            active.request.is_suspect = false;
            if active.n_left() > 0 {
                continue; // a chunk of its prompt, from which nothing is chosen
            }
            if !active.request.siblings.is_empty() {
                let start = self.running.begin_texts(id, rows, capacity);
                outcomes.extend(start.outcomes);
                if let Some(finished) = start.finished {
                    self.take_running(finished, Keep::Prefix(now));
                }
                continue;
            }
            let reports = rows.iter().filter(|row| row.request == id);
            let progress = take_tokens(active, &feed.draft, reports, capacity);
            self.counters.n_accepted_tokens += progress.n_accepted as u64;
            if progress.n_accepted < feed.draft.len() {
                self.drafts.reject(RejectedDraft {
                    seq: active.seq,
                    n_tokens: active.n_done,
                });
            }
            if let Some(end) = progress.end {
                outcomes.extend(self.end(id, end, Keep::Prefix(now)));
            }
        }
        outcomes
    }

    /// Keeps what a step computed of a request that was cancelled meanwhile.
    fn keep_cancelled(&mut self, now: Micros, feed: &PendingFeed) {
        let Some(mut active) = self.running.take_cancelled(feed.request) else {
            return;
        };
        active.n_done += feed.n_tokens;
        if !feed.draft.is_empty() {
            self.drafts.reject(RejectedDraft {
                seq: active.seq,
                n_tokens: active.n_done,
            });
        }
        self.release(&active, Keep::Prefix(now));
    }

    fn step_failed(&mut self, now: Micros, failure: StepFailure) -> Vec<Outcome> {
        let in_flight = self.running.end_step();
        self.pace.forget_step();
        if failure == StepFailure::PutOff {
            self.uncount_step(&in_flight);
            for active in self.running.take_all_cancelled() {
                self.release(&active, Keep::Prefix(now));
            }
            return Vec::new();
        }
        self.recount = true;
        if failure == StepFailure::DeviceLost {
            return self.end_all(now);
        }
        if failure == StepFailure::Cancelled {
            return Vec::new();
        }
        let is_alone = in_flight.len() == 1;
        let mut failed = None;
        for active in self.running.iter_mut() {
            let id = active.id();
            if in_flight.iter().any(|feed| feed.request == id) {
                failed = failed.or((is_alone && active.request.is_suspect).then_some(id));
                active.request.is_suspect = true;
            }
        }
        let ended = failed.map(|id| self.end(id, End::Failed, Keep::Nothing));
        ended.unwrap_or_default()
    }

    /// All requests are given up, and nothing of the memory is kept.
    fn end_all(&mut self, now: Micros) -> Vec<Outcome> {
        let running = self.running.requests().flat_map(RequestState::texts);
        let waiting = self.queue.take_all();
        let waiting = waiting.iter().flat_map(RequestState::texts);
        let mut all: Vec<RequestId> = running.chain(waiting).collect();
        let forks = self.running.take_forks().into_iter();
        all.extend(forks.map(|fork| fork.request.id));
        for active in self.running.take_all() {
            self.sequences.drop_tokens(active.seq);
        }
        for seq in self.parked.clear() {
            self.sequences.drop_tokens(seq);
        }
        self.clear_prefixes(now);
        let end = End::Failed;
        let ended = all
            .into_iter()
            .map(|request| Outcome::Ended { request, end });
        ended.collect()
    }

    /// The state of a request that leaves was saved in so many bytes, or not.
    fn swapped_out(&mut self, now: Micros, id: RequestId, n_bytes: Option<u64>) -> Vec<Outcome> {
        let Some(SwapOut { swap, keep }) = self.swaps.end(id) else {
            return Vec::new();
        };
        let Some(n_bytes) = n_bytes else {
            return self.preempt(now, id, keep).into_iter().collect();
        };
        if let Some(active) = self.running.get_mut(id) {
            let saved = SavedState {
                first: swap.first,
                n_tokens: swap.n_tokens,
                n_bytes,
                tier: Tier::Host,
            };
            active.request.saved = Some(saved);
            self.counters.n_swapped_out += 1;
            self.counters.n_swapped_bytes += n_bytes;
            self.notes.push(Note::SwappedOut {
                request: id,
                n_tokens: saved.n_saved(),
                n_bytes,
            });
        }
        let mut outcomes: Vec<Outcome> = self.preempt(now, id, Keep::Nothing).into_iter().collect();
        for request in states_to_spill(self.parts(now, &())) {
            self.spill(request);
            outcomes.push(Outcome::Spilled { request });
        }
        outcomes
    }

    /// The saved state of a request that waits goes on to the disk.
    fn spill(&mut self, request: RequestId) {
        let waiting = self.queue.get_mut(request);
        let Some(state) = waiting.and_then(|waiting| waiting.saved.as_mut()) else {
            return;
        };
        state.tier = Tier::Disk;
        self.counters.n_spilled_bytes += state.n_bytes;
        self.notes.push(Note::Spilled {
            request,
            n_tokens: state.n_saved(),
            n_bytes: state.n_bytes,
        });
    }

    /// The host keeps a state that the disk did not take.
    fn spill_failed(&mut self, id: RequestId) {
        let request = match self.running.get_mut(id) {
            Some(active) => Some(&mut active.request),
            None => self.queue.get_mut(id),
        };
        if let Some(state) = request.and_then(|request| request.saved.as_mut()) {
            state.tier = Tier::Host;
        }
    }

    /// The result for a state that was to come back.
    fn swapped_in(&mut self, id: RequestId, result: SwappedIn) {
        let Some(active) = self.running.get_mut(id) else {
            return;
        };
        match (result, active.request.saved) {
            (SwappedIn::NoRoom, _) => self.swaps.note_shortage(),
            (SwappedIn::Restored, Some(saved)) => {
                active.request.saved = None;
                active.n_done = saved.n_tokens;
                active.is_rounded |= self.config.swap_rows == SwapRows::Rounded;
                self.counters.n_swapped_in += 1;
                self.notes.push(Note::SwappedIn {
                    request: id,
                    n_tokens: saved.n_saved(),
                    n_bytes: saved.n_bytes,
                });
            }
            (SwappedIn::Lost, Some(saved)) => {
                active.request.saved = None;
                self.counters.n_swap_lost += 1;
                self.counters.n_dropped_tokens += saved.n_saved() as u64;
            }
            (SwappedIn::Restored | SwappedIn::Lost, None) => {}
        }
    }

    /// The result for a text that was to drop tokens.
    fn shifted(&mut self, id: RequestId, result: ShiftResult) -> Vec<Outcome> {
        let capacity = self.capacity();
        let is_full = |active: &&mut ActiveRequest| active.is_full(capacity);
        let Some(active) = self.running.get_mut(id).filter(is_full) else {
            return Vec::new();
        };
        match (result, active.request.overflow) {
            (ShiftResult::NoRoom, _) => self.running.note_short_shift(),
            (ShiftResult::Done, Overflow::Shift { n_keep }) => active.drop_tokens(n_keep),
            (ShiftResult::Done, Overflow::End) | (ShiftResult::Refused, _) => {
                return self.end(id, End::ContextFull, Keep::Nothing);
            }
        }
        Vec::new()
    }
}
