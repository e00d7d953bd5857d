//! [`RunningSet`]: the requests that have a sequence, the step that is being computed of them, and
//! the texts that wait for a copy of one.
//!
//! Invariant: the requests are in the order of precedence: of a higher rank first, then those that
//! came first. A request of a step that is cancelled is kept until the step is done. Knows nothing
//! of memory.

use crate::data::active::{ActiveRequest, PendingFeed};
use crate::data::event::{End, Outcome, Progress, RowReport};
use crate::data::ids::{RequestId, TenantId};
use crate::data::state::{Fork, Rank, RequestState};
use crate::data::step::Feed;

/// The requests that have a sequence.
#[derive(Clone, Debug, Default)]
pub(crate) struct RunningSet {
    requests: Vec<ActiveRequest>,
    /// The step that is being computed: tokens of each request.
    in_flight: Vec<PendingFeed>,
    /// Requests of this step that were cancelled meanwhile: what the memory holds of them is known
    /// after it, and kept.
    cancelled: Vec<ActiveRequest>,
    /// Texts that wait for a copy of their prompt, until the next step.
    forks: Vec<Fork>,
    /// There was no room to move the tokens of a text that is full.
    shift_is_short: bool,
}

/// The start of the texts of one prompt.
#[derive(Debug)]
pub(crate) struct TextStart {
    pub(crate) outcomes: Vec<Outcome>,
    /// The request that keeps the sequence though none of its texts goes on.
    pub(crate) finished: Option<RequestId>,
}

impl RunningSet {
    pub(crate) fn as_slice(&self) -> &[ActiveRequest] {
        &self.requests
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &ActiveRequest> {
        self.requests.iter()
    }

    /// The same, without their sequences.
    pub(crate) fn requests(&self) -> impl Iterator<Item = &RequestState> {
        self.iter().map(|active| &active.request)
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut ActiveRequest> {
        self.requests.iter_mut()
    }

    pub(crate) fn len(&self) -> usize {
        self.requests.len()
    }

    pub(crate) fn get(&self, id: RequestId) -> Option<&ActiveRequest> {
        self.iter().find(|active| active.id() == id)
    }

    pub(crate) fn get_mut(&mut self, id: RequestId) -> Option<&mut ActiveRequest> {
        self.iter_mut().find(|active| active.id() == id)
    }

    /// The last request, where it is not the only one.
    pub(crate) fn last_of_several(&self) -> Option<RequestId> {
        let last = self.requests.get(1..)?.last()?;
        Some(last.id())
    }

    /// Number of running texts of a tenant.
    pub(crate) fn n_of_tenant(&self, tenant: TenantId) -> usize {
        let own = self.iter().filter(|active| active.request.tenant == tenant);
        own.count()
    }

    /// Adds a request at its place in the order of precedence.
    pub(crate) fn insert(&mut self, active: ActiveRequest) {
        let precedence = active.precedence();
        let is_before = |other: &ActiveRequest| other.precedence() < precedence;
        let at = self.requests.partition_point(is_before);
        self.requests.insert(at, active);
    }

    /// Raises a request to this rank, where its own is lower.
    pub(crate) fn raise(&mut self, id: RequestId, rank: Rank) {
        if self.get(id).is_some_and(|active| active.rank < rank)
            && let Some(mut active) = self.take(id)
        {
            active.rank = rank;
            self.insert(active);
        }
    }

    /// Takes a request out.
    pub(crate) fn take(&mut self, id: RequestId) -> Option<ActiveRequest> {
        let at = self.requests.iter().position(|active| active.id() == id)?;
        Some(self.requests.remove(at))
    }

    /// Takes all requests out, and those that were cancelled after them.
    pub(crate) fn take_all(&mut self) -> Vec<ActiveRequest> {
        let mut all = std::mem::take(&mut self.requests);
        all.append(&mut self.cancelled);
        all
    }

    /// These tokens of its requests are computed now.
    pub(crate) fn begin_step(&mut self, feeds: &[Feed]) {
        self.in_flight = feeds.iter().map(PendingFeed::of).collect();
        self.iter_mut().for_each(|active| active.draft.clear());
    }

    /// The step is over, computed or not.
    pub(crate) fn end_step(&mut self) -> Vec<PendingFeed> {
        std::mem::take(&mut self.in_flight)
    }

    /// True if a step is being computed.
    pub(crate) fn has_step(&self) -> bool {
        !self.in_flight.is_empty()
    }

    /// True if the step that is being computed has tokens of a request.
    pub(crate) fn is_in_flight(&self, id: RequestId) -> bool {
        self.in_flight.iter().any(|feed| feed.request == id)
    }

    /// Cancels a request of the step that is being computed, which adds tokens that are not counted
    /// yet. Returns whether it was not cancelled before.
    pub(crate) fn cancel(&mut self, id: RequestId) -> bool {
        let active = self.take(id);
        let is_new = active.is_some();
        self.cancelled.extend(active);
        is_new
    }

    /// Takes a request out that was cancelled during the step.
    pub(crate) fn take_cancelled(&mut self, id: RequestId) -> Option<ActiveRequest> {
        let mut cancelled = self.cancelled.iter();
        let at = cancelled.position(|active| active.id() == id)?;
        Some(self.cancelled.remove(at))
    }

    /// Takes all of these out.
    pub(crate) fn take_all_cancelled(&mut self) -> Vec<ActiveRequest> {
        std::mem::take(&mut self.cancelled)
    }

    pub(crate) fn forks(&self) -> &[Fork] {
        &self.forks
    }

    /// Takes the texts out that wait for a copy of their prompt.
    pub(crate) fn take_forks(&mut self) -> Vec<Fork> {
        std::mem::take(&mut self.forks)
    }

    /// Takes the first of these out.
    pub(crate) fn take_fork(&mut self) -> Option<Fork> {
        (!self.forks.is_empty()).then(|| self.forks.remove(0))
    }

    /// Takes a text out that waits for its copy. Returns whether there was one.
    pub(crate) fn cancel_fork(&mut self, id: RequestId) -> bool {
        let n_before = self.forks.len();
        self.forks.retain(|fork| fork.request.id != id);
        self.forks.len() < n_before
    }

    /// Takes a text out whose prompt is computed for others, too. The next one takes its place;
    /// where it was the first, the outcome says who has its sequence now. `None` where no request
    /// has such a text.
    pub(crate) fn cancel_sibling(&mut self, id: RequestId) -> Option<Option<Outcome>> {
        let mut requests = self.requests.iter_mut();
        let active = requests.find(|active| active.request.is_shared_by(id))?;
        let was_first = active.id() == id;
        active.request.drop_text(id);
        if !was_first {
            return Some(None);
        }
        let next = active.id();
        if let Some(feed) = self.in_flight.iter_mut().find(|feed| feed.request == id) {
            feed.request = next;
        }
        Some(Some(active.admitted(next)))
    }

    /// The prompt of a request is complete: each of its texts begins with what was chosen from the
    /// row, or ends. The first that goes on keeps the sequence, the others wait for a copy.
    pub(crate) fn begin_texts(
        &mut self,
        id: RequestId,
        rows: &[RowReport],
        capacity: usize,
    ) -> TextStart {
        let mut start = TextStart {
            outcomes: Vec::new(),
            finished: None,
        };
        let mut requests = self.requests.iter_mut();
        let Some(active) = requests.find(|active| active.id() == id) else {
            return start;
        };
        let prompt = &active.request;
        let has_room = prompt.tokens.len() < capacity || prompt.can_shift();
        let mut begun = Vec::new();
        for (number, request) in (0..).zip(prompt.texts()) {
            let row = rows.iter().find(|row| row.request == request);
            let end = match row.map_or(Progress::Failed, |row| row.progress) {
                Progress::Token(token) if has_room => {
                    begun.push(prompt.text(number, request, token));
                    continue;
                }
                Progress::Token(_) => End::ContextFull,
                Progress::Ended => End::Complete,
                Progress::Failed => End::Failed,
            };
            start.outcomes.push(Outcome::Ended { request, end });
        }
        let mut begun = begun.into_iter();
        let (from, rank) = (active.seq, active.rank);
        match begun.next() {
            Some(text) => {
                if text.id != id {
                    start.outcomes.push(active.admitted(text.id));
                }
                active.request = text;
            }
            None => start.finished = Some(id),
        }
        let fork = |request: RequestState| Fork {
            request,
            from,
            rank,
        };
        self.forks.extend(begun.map(fork));
        start
    }

    /// There was no room to move the tokens of a text that is full.
    pub(crate) fn note_short_shift(&mut self) {
        self.shift_is_short = true;
    }

    /// Room is made, or no more is needed.
    pub(crate) fn end_short_shift(&mut self) {
        self.shift_is_short = false;
    }

    pub(crate) fn shift_is_short(&self) -> bool {
        self.shift_is_short
    }
}

#[cfg(test)]
mod tests {
    use kv_core::{SeqId, TokenId};

    use super::*;
    use crate::data::active::SharedPrefix;
    use crate::data::ids::Micros;
    use crate::data::request::{Priority, Request};
    use crate::data::reuse::Reuse;

    fn rank(priority: Priority) -> Rank {
        Rank::of(priority, 0, Micros(1))
    }

    /// A request with three texts, whose number is its arrival.
    fn active(number: u64, priority: Priority) -> ActiveRequest {
        let request = Request {
            id: RequestId(number),
            prompt: vec![TokenId(7); 4],
            siblings: vec![RequestId(number + 100), RequestId(number + 200)],
            ..Request::default()
        };
        let reuse = Reuse {
            n_tokens: 3,
            missed: None,
        };
        ActiveRequest::new(
            RequestState::new(Micros(0), number, request),
            SeqId(number as u32),
            rank(priority),
            SharedPrefix::new(number),
            reuse,
        )
    }

    fn filled() -> RunningSet {
        let mut running = RunningSet::default();
        running.insert(active(3, Priority::Batch));
        running.insert(active(2, Priority::Interactive));
        running.insert(active(1, Priority::Batch));
        running
    }

    fn ids(running: &RunningSet) -> Vec<u64> {
        running.iter().map(|active| active.id().0).collect()
    }

    #[test]
    fn a_higher_rank_and_then_who_came_first_goes_first() {
        let mut running = filled();
        assert_eq!(ids(&running), [2, 1, 3]);
        running.raise(RequestId(3), rank(Priority::Normal));
        assert_eq!(ids(&running), [2, 3, 1]);
        running.raise(RequestId(2), rank(Priority::Normal));
        assert_eq!(ids(&running), [2, 3, 1], "none sinks");
        assert_eq!(running.last_of_several(), Some(RequestId(1)));
    }

    #[test]
    fn a_text_that_is_cancelled_hands_the_prompt_and_the_step_on() {
        let mut running = filled();
        running.begin_step(&[active(1, Priority::Batch).feed(1)]);
        assert_eq!(running.cancel_sibling(RequestId(101)), Some(None));
        let admitted = running.cancel_sibling(RequestId(1)).flatten();
        assert!(matches!(
            admitted,
            Some(Outcome::Admitted {
                request: RequestId(201),
                seq: SeqId(1),
                ..
            })
        ));
        assert!(running.is_in_flight(RequestId(201)) && !running.is_in_flight(RequestId(1)));
        assert_eq!(
            running.cancel_sibling(RequestId(201)),
            None,
            "it is the only one"
        );
    }

    #[test]
    fn the_first_text_that_goes_on_keeps_the_sequence() {
        let report = |request, progress| RowReport {
            request: RequestId(request),
            progress,
        };
        let token = Progress::Token(TokenId(9));
        let mut running = filled();
        let rows = [
            report(1, Progress::Ended),
            report(101, token),
            report(201, token),
        ];
        let start = running.begin_texts(RequestId(1), &rows, 10);
        assert_eq!(
            start.outcomes.len(),
            2,
            "one has ended, and one has its sequence"
        );
        assert_eq!((ids(&running), start.finished), (vec![2, 101, 3], None));
        assert_eq!(running.forks().len(), 1);
        assert!(running.cancel_fork(RequestId(201)) && !running.cancel_fork(RequestId(201)));
        // A text that has no room for its token ends; where all have, the sequence is left over.
        let rows = [3, 103, 203].map(|id| report(id, token));
        let start = running.begin_texts(RequestId(3), &rows, 4);
        assert_eq!(
            (start.outcomes.len(), start.finished),
            (3, Some(RequestId(3)))
        );
    }
}
