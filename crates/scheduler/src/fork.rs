//! Several texts of one prompt: it is computed once, then each text but the first starts with a
//! copy of the sequence.
//!
//! Until the prompt is complete, the request stands for all its texts; one that is cancelled hands
//! it to the next. A copy shares the cells of the prompt. A text for which there is no sequence or
//! no room waits, as after a preemption. Invariant: a copy is made before its original goes on, so
//! it holds the prompt and nothing else, also where windows and states can only be copied at their
//! ends.

use kv_core::memory::Memory;
use kv_core::{SeqId, TokenId};

use crate::event::{End, Outcome, Progress, RowReport};
use crate::prefix::{Reuse, copy};
use crate::queue::Rank;
use crate::request::{Micros, PromptRows, RequestId};
use crate::room::Need;
use crate::scheduler::{Keep, Scheduler};
use crate::state::{RequestState, Running};

/// A text whose prompt another one computed, and which has no sequence yet.
#[derive(Clone, Debug)]
pub(crate) struct Fork {
    pub(crate) request: RequestState,
    /// The sequence that holds the prompt.
    from: SeqId,
    rank: Rank,
}

impl RequestState {
    /// The texts that it stands for.
    pub(crate) fn texts(&self) -> impl Iterator<Item = RequestId> + '_ {
        std::iter::once(self.id).chain(self.siblings.iter().copied())
    }

    /// The state of one of its texts, with its first token.
    fn text(&self, number: u64, id: RequestId, token: TokenId) -> Self {
        let mut tokens = self.tokens.clone();
        tokens.push(token);
        Self {
            id,
            arrival: self.arrival + number,
            siblings: Vec::new(),
            prompt_rows: PromptRows::Last,
            group: Some(self.group.unwrap_or(self.id)),
            tokens,
            ..self.clone()
        }
    }

    /// Takes one of its texts out, of several; the next one takes the place of the first.
    fn drop_text(&mut self, id: RequestId) {
        if self.id == id && !self.siblings.is_empty() {
            self.id = self.siblings.remove(0);
        } else {
            self.siblings.retain(|&sibling| sibling != id);
        }
    }
}

impl Scheduler {
    /// Whether a text has not ended.
    pub(crate) fn knows(&self, id: RequestId) -> bool {
        let running = self.running.iter().map(|r| &r.request);
        let forks = self.forks.iter().map(|fork| &fork.request);
        let mut all = running.chain(self.queue.iter()).chain(forks);
        all.any(|request| request.texts().any(|text| text == id))
    }

    /// Cancels a text whose prompt is computed for others, too, or that waits for its copy. `None`
    /// where it is none of these.
    pub(crate) fn cancel_sibling(&mut self, id: RequestId) -> Option<Vec<Outcome>> {
        let is_one_of_several = |request: &RequestState| {
            !request.siblings.is_empty() && request.texts().any(|text| text == id)
        };
        let mut outcomes = vec![Outcome::Ended {
            request: id,
            end: End::Cancelled,
        }];
        if let Some(at) = self.forks.iter().position(|fork| fork.request.id == id) {
            self.forks.remove(at);
            return Some(outcomes);
        }
        let mut running = self.running.iter_mut();
        if let Some(running) = running.find(|r| is_one_of_several(&r.request)) {
            let was_first = running.request.id == id;
            running.request.drop_text(id);
            if was_first {
                let request = running.request.id;
                let fed = self.in_flight.iter_mut().find(|fed| fed.request == id);
                if let Some(fed) = fed {
                    fed.request = request;
                }
                outcomes.push(running.admitted(request));
            }
            return Some(outcomes);
        }
        let waiting = self.queue.find(is_one_of_several)?;
        waiting.drop_text(id);
        Some(outcomes)
    }

    /// The prompt of the running request number `at` is complete: each of its texts begins with
    /// what was chosen from the row, or ends. The first that goes on keeps the sequence.
    pub(crate) fn begin_texts(
        &mut self,
        now: Micros,
        at: usize,
        rows: &[RowReport],
    ) -> Vec<Outcome> {
        let capacity = self.capacity();
        let running = &self.running[at];
        let (first, from, rank) = (running.request.id, running.seq, running.rank);
        let (mut outcomes, mut begun) = (Vec::new(), Vec::new());
        for (number, request) in (0..).zip(running.request.texts()) {
            let row = rows.iter().find(|row| row.request == request);
            let end = match row.map_or(Progress::Failed, |row| row.progress) {
                Progress::Token(token)
                    if running.request.tokens.len() < capacity || running.request.can_shift() =>
                {
                    begun.push(running.request.text(number, request, token));
                    continue;
                }
                Progress::Token(_) => End::ContextFull,
                Progress::Ended => End::Complete,
                Progress::Failed => End::Failed,
            };
            outcomes.push(Outcome::Ended { request, end });
        }
        let mut begun = begun.into_iter();
        match begun.next() {
            Some(text) => {
                let running = &mut self.running[at];
                if text.id != first {
                    outcomes.push(running.admitted(text.id));
                }
                running.request = text;
            }
            None => drop(self.take_running(first, Keep::Prefix(now))),
        }
        let forks = begun.map(|request| Fork {
            request,
            from,
            rank,
        });
        self.forks.extend(forks);
        outcomes
    }

    /// Gives the next text that waits for its copy a sequence with it, or else lets it wait.
    /// Returns whether there was one.
    pub(crate) fn fork<M: Memory>(
        &mut self,
        now: Micros,
        memory: &M,
        outcomes: &mut Vec<Outcome>,
    ) -> bool {
        let Some(fork) = self.forks.first() else {
            return false;
        };
        let (from, n_prompt) = (fork.from, fork.request.n_prompt);
        let is_original = |r: &Running| {
            r.seq == from && r.n_done == n_prompt && r.request.group == fork.request.group
        };
        let original = self.running.iter().find(|r| is_original(r));
        let trunk = original.map(|r| r.trunk.cut(n_prompt));
        let need = Need {
            n_tokens: fork.request.tokens.len(),
            trunk,
        };
        let may_run = self.tenant_may_run(fork.request.tenant);
        let trunk = trunk.filter(|_| may_run && self.has_room_for(&[need], &self.running));
        let can_run = trunk.is_some();
        let edit = self.free.last().map(|&to| copy(from, to, n_prompt));
        let edit = edit.filter(|edit| memory.check(edit).is_ok());
        if can_run && edit.is_none() && !self.cache.is_empty() {
            self.evict(now, memory);
            return true;
        }
        let Fork {
            mut request, rank, ..
        } = self.forks.remove(0);
        match (edit, self.free.last().copied(), trunk) {
            (Some(edit), Some(seq), Some(trunk)) => {
                self.free.pop();
                self.edits.push(edit);
                let n_tokens = n_prompt;
                self.note_shared(request.id, seq, from, n_tokens);
                let running = Running {
                    request,
                    seq,
                    rank,
                    n_done: n_prompt,
                    checkpoints: Vec::new(),
                    trunk,
                    reuse: Reuse {
                        n_tokens,
                        missed: None,
                    },
                    draft: Vec::new(),
                    is_rounded: false,
                    awaits_source: false,
                };
                outcomes.push(running.admitted(running.request.id));
                self.insert_running(running);
            }
            _ => {
                request.group = None;
                request.waits_since = now;
                self.queue.push(request);
            }
        }
        true
    }
}
