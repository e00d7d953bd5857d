//! [`Worker`]: the loop of a service's thread. Takes requests in, carries plans out, gives pieces
//! out.
//!
//! Invariant: the scheduler knows every request that this thread holds, and the other way round.
//! Decides nothing about order or memory: that is the scheduler's.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use kv_core::TokenId;
use kv_core::backend::{Backend, BackendError};
use kv_core::memory::Edit;
use scheduler::{
    Drafter, End, Event, Micros, Outcome, PrefixUse, Priority, Progress, PromptRows, Request,
    RequestId, RowReport, RowUse, Scheduler, Speculated, SpeculationOff, Step, StepFailure, Work,
};

use super::config::micros;
use super::frame::EventKind;
use super::record::{Admission, Recorder, event_of};
use super::service::{QueuePlace, ServiceError, ServiceStatus};
use super::stream::{StepGuests, TextSender, Usage};
use crate::completion::{Completion, FinishReason, OutputRow};
use crate::decode::Engine;
use crate::error::EngineError;
use crate::rows_out::Logits;

/// A command of a service to its thread.
#[derive(Debug)]
pub(crate) enum Command {
    Submit(Box<Submitted>),
    Stop,
}

/// A request on its way to the thread.
#[derive(Debug)]
pub(crate) struct Submitted {
    /// At least one.
    pub(crate) texts: Vec<SubmittedText>,
    pub(crate) prompt: Vec<TokenId>,
    pub(crate) priority: Priority,
    pub(crate) prefix: PrefixUse,
    pub(crate) prompt_rows: PromptRows,
    /// Why nothing is drafted, where that was wanted.
    pub(crate) speculation_off: Option<SpeculationOff>,
    pub(crate) place: QueuePlace,
    pub(crate) submitted_at: Instant,
}

/// One text of a request.
#[derive(Debug)]
pub(crate) struct SubmittedText {
    pub(crate) id: RequestId,
    pub(crate) completion: Completion,
    pub(crate) sender: TextSender,
    /// With the tokens of the prompt.
    pub(crate) drafter: Option<Drafter>,
}

/// A request that has not ended.
#[derive(Debug)]
struct Live {
    completion: Completion,
    /// The prompt, where the rows of its tokens are wanted.
    prompt: Vec<TokenId>,
    /// Log probabilities that were given out.
    n_logprobs: usize,
    sender: TextSender,
    drafter: Option<Drafter>,
    /// Until it is admitted; all texts of a request have one together.
    place: Option<Arc<QueuePlace>>,
    submitted_at: Instant,
    usage: Usage,
    /// Why the last step that failed did, or why no token could be chosen.
    error: Option<Arc<EngineError>>,
    /// Why a row of its prompt cannot be used: no text begins after it.
    prompt_error: Option<Arc<EngineError>>,
    /// Watchers know that it has a first token.
    is_announced: bool,
}

/// The state of a service's thread.
#[derive(Debug)]
pub(crate) struct Worker<B: Backend> {
    engine: Engine<B>,
    scheduler: Scheduler,
    commands: Receiver<Command>,
    live: BTreeMap<RequestId, Live>,
    step: Arc<StepGuests>,
    status: Arc<Mutex<ServiceStatus>>,
    recorder: Recorder,
    started: Instant,
    is_stopping: bool,
}

impl<B: Backend> Worker<B> {
    pub(crate) fn new(
        engine: Engine<B>,
        scheduler: Scheduler,
        commands: Receiver<Command>,
        recorder: Recorder,
    ) -> Self {
        Self {
            engine,
            scheduler,
            commands,
            live: BTreeMap::new(),
            step: Arc::default(),
            status: Arc::default(),
            recorder,
            started: Instant::now(),
            is_stopping: false,
        }
    }

    /// The same with what the service looks at.
    pub(crate) fn with_shared(
        self,
        step: Arc<StepGuests>,
        status: Arc<Mutex<ServiceStatus>>,
    ) -> Self {
        Self {
            step,
            status,
            ..self
        }
    }

    /// Serves until it is stopped, and returns the engine with an empty memory.
    pub(crate) fn run(mut self) -> Engine<B> {
        let mut is_idle = true;
        self.publish_status();
        while !self.is_stopping {
            if is_idle {
                self.wait_for_command();
            }
            self.take_commands();
            self.cancel_unwanted();
            self.draft();
            let plan = self.scheduler.next(self.now(), self.engine.memory());
            self.take_outcomes(plan.outcomes);
            self.record_notes();
            is_idle = matches!(plan.work, Work::Idle);
            match plan.work {
                Work::Idle => {}
                Work::Edit(edits) => self.edit(edits),
                Work::Decode(step) => {
                    // All edits are done: each cell in use is of a request or a cached prefix.
                    if self.recorder.is_due() {
                        self.publish_frame();
                    }
                    self.decode(&step);
                }
            }
            self.publish_status();
        }
        self.give_back()
    }

    fn publish_status(&self) {
        let parts = self.engine.memory().parts();
        let largest = parts.iter().max_by_key(|part| part.n_cells());
        let running = self.live.values().filter(|live| live.place.is_none());
        let status = ServiceStatus {
            counters: self.scheduler.counters(),
            n_running: running.count(),
            n_cells: largest.map_or(0, |part| part.n_cells()),
            n_cells_used: largest.map_or(0, |part| part.n_used()),
        };
        *self.status.lock().unwrap_or_else(PoisonError::into_inner) = status;
    }

    /// Takes everything out of the memory again, as requests that end do.
    fn give_back(mut self) -> Engine<B> {
        for id in std::mem::take(&mut self.live).into_keys() {
            self.handle(Event::Cancel(id));
        }
        self.handle(Event::ClearPrefixes);
        while let Work::Edit(edits) = self.scheduler.next(self.now(), self.engine.memory()).work {
            self.edit(edits);
        }
        self.engine
    }

    fn publish_frame(&mut self) {
        let now = self.now();
        self.recorder
            .publish(now, self.engine.memory(), &self.scheduler);
    }

    fn record_notes(&mut self) {
        let now = self.now();
        for note in self.scheduler.take_notes() {
            self.recorder.record(now, EventKind::Cache(note));
        }
    }

    fn edit(&mut self, edits: Vec<Edit>) {
        self.recorder.set_stale();
        for edit in edits {
            match (self.engine.edit(edit), edit) {
                (Ok(_), _) => {}
                // The sequence that was to get tokens has none then.
                (Err(error), Edit::Copy { .. }) => {
                    tracing::warn!(%error, "a cached prefix could not be taken");
                    self.handle(Event::StepFailed(StepFailure::Computation));
                }
                // A scheduler that disagrees with its memory cannot go on.
                (Err(error), _) => self.fail_all(&Arc::new(error)),
            }
        }
    }

    fn now(&self) -> Micros {
        micros(self.started.elapsed())
    }

    fn wait_for_command(&mut self) {
        // The last state before a pause is handed over, whoever watches later.
        let command = match self.recorder.idle_time() {
            Some(time) => self.commands.recv_timeout(time),
            None => (self.commands.recv()).map_err(|_| RecvTimeoutError::Disconnected),
        };
        match command {
            Ok(command) => self.take_command(command),
            Err(RecvTimeoutError::Timeout) => self.publish_frame(),
            Err(RecvTimeoutError::Disconnected) => self.is_stopping = true,
        }
    }

    /// Takes the commands that are there.
    fn take_commands(&mut self) {
        loop {
            match self.commands.try_recv() {
                Ok(command) => self.take_command(command),
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => {
                    self.is_stopping = true;
                    return;
                }
            }
        }
    }

    fn take_command(&mut self, command: Command) {
        let submitted = match command {
            Command::Submit(submitted) => *submitted,
            Command::Stop => {
                self.is_stopping = true;
                return;
            }
        };
        let Submitted {
            texts,
            prompt,
            priority,
            prefix,
            prompt_rows,
            speculation_off,
            place,
            submitted_at,
        } = submitted;
        let place = Arc::new(place);
        let mut ids = Vec::with_capacity(texts.len());
        for text in texts {
            let SubmittedText {
                id,
                completion,
                sender,
                drafter,
            } = text;
            ids.push(id);
            let live = Live {
                prompt: match prompt_rows {
                    PromptRows::All => prompt.clone(),
                    PromptRows::Last => Vec::new(),
                },
                n_logprobs: 0,
                completion,
                sender,
                drafter,
                place: Some(Arc::clone(&place)),
                submitted_at,
                usage: Usage {
                    n_prompt: prompt.len(),
                    speculated: Speculated {
                        off: speculation_off,
                        ..Speculated::default()
                    },
                    ..Usage::default()
                },
                error: None,
                prompt_error: None,
                is_announced: false,
            };
            self.live.insert(id, live);
        }
        let mut ids = ids.into_iter();
        let Some(id) = ids.next() else {
            return;
        };
        let request = Request {
            id,
            priority,
            prompt,
            prefix,
            prompt_rows,
            siblings: ids.collect(),
        };
        let submitted = EventKind::Submitted {
            request: id,
            n_texts: 1 + request.siblings.len(),
            n_prompt: request.prompt.len(),
        };
        self.recorder.record(self.now(), submitted);
        self.handle(Event::Submit(request));
    }

    fn cancel_unwanted(&mut self) {
        let live = self.live.iter();
        let unwanted = live.filter(|(_, live)| live.sender.is_cancelled());
        let unwanted: Vec<RequestId> = unwanted.map(|(&id, _)| id).collect();
        for id in unwanted {
            self.handle(Event::Cancel(id));
        }
    }

    /// Drafts tokens for the texts that go on.
    fn draft(&mut self) {
        let limit = self.scheduler.draft_limit().unwrap_or(0);
        let drafting = self.live.iter().filter(|(_, live)| live.place.is_none());
        let drafted = drafting.filter_map(|(&request, live)| {
            let tokens = live.drafter.as_ref()?.draft(limit);
            (!tokens.is_empty()).then_some(Event::Draft { request, tokens })
        });
        let drafted: Vec<Event> = drafted.collect();
        drafted.into_iter().for_each(|event| self.handle(event));
    }

    fn handle(&mut self, event: Event) {
        self.recorder.set_stale();
        let outcomes = self.scheduler.handle(self.now(), event);
        self.take_outcomes(outcomes);
    }

    fn take_outcomes(&mut self, outcomes: Vec<Outcome>) {
        for outcome in outcomes {
            self.record_outcome(&outcome);
            match outcome {
                Outcome::Admitted { request, reuse, .. } => {
                    if let Some(live) = self.live.get_mut(&request)
                        && live.place.take().is_some()
                    {
                        live.usage.queued = live.submitted_at.elapsed();
                        live.usage.reuse = Some(reuse);
                    }
                }
                Outcome::Preempted { request, .. } => {
                    if let Some(live) = self.live.get_mut(&request) {
                        live.usage.n_preemptions += 1;
                    }
                }
                Outcome::Refused { request, why } => {
                    if let Some(live) = self.live.remove(&request) {
                        live.sender.end(Err(why.into()));
                    }
                }
                Outcome::Ended { request, end } => {
                    if let Some(live) = self.live.remove(&request) {
                        live.end(end);
                    }
                }
            }
        }
    }

    fn record_outcome(&mut self, outcome: &Outcome) {
        self.record_notes(); // what led to it comes first
        let (Outcome::Refused { request, .. }
        | Outcome::Admitted { request, .. }
        | Outcome::Preempted { request, .. }
        | Outcome::Ended { request, .. }) = outcome;
        let live = self.live.get(request);
        let admission = match live.is_some_and(|live| live.place.is_some()) {
            true => Admission::First,
            false => Admission::Again,
        };
        let n_text = live.map_or(0, |live| live.completion.tokens().len());
        let event = event_of(outcome, admission, n_text);
        self.recorder.record(self.now(), event);
    }

    fn record_first_tokens(&mut self, rows: &[RowReport]) {
        let now = self.now();
        for &RowReport { request, .. } in rows {
            if let Some(live) = self.live.get_mut(&request)
                && live.usage.first_token.is_some()
                && !std::mem::replace(&mut live.is_announced, true)
            {
                self.recorder.record(now, EventKind::FirstToken { request });
            }
        }
    }

    /// Computes a step, and reports it.
    fn decode(&mut self, step: &Step) {
        let requests = step.texts();
        let cancel = self.step.enter(step.texts());
        let computed = match self.engine.decode_until(&step.batch, cancel) {
            Ok(logits) => Ok(rows(step, logits, &mut self.live)),
            Err(error) => Err(error),
        };
        match computed {
            Ok(rows) => {
                self.record_first_tokens(&rows);
                self.handle(Event::StepDone(rows));
            }
            // All requests of the step were cancelled.
            Err(EngineError::Cancelled) => {
                requests.for_each(|id| self.handle(Event::Cancel(id)));
                self.handle(Event::StepFailed(StepFailure::Computation));
            }
            Err(error) => {
                let failure = match &error {
                    EngineError::Backend(BackendError::DeviceLost { .. }) => {
                        StepFailure::DeviceLost
                    }
                    _ => StepFailure::Computation,
                };
                tracing::warn!(%error, n_requests = step.feeds.len(), "a step failed");
                let error = Arc::new(error);
                let is_concerned = |id: &RequestId| {
                    failure == StepFailure::DeviceLost || step.texts().any(|text| text == *id)
                };
                let concerned = self.live.iter_mut().filter(|(id, _)| is_concerned(id));
                concerned.for_each(|(_, live)| live.error = Some(Arc::clone(&error)));
                self.handle(Event::StepFailed(failure));
            }
        }
    }

    fn fail_all(&mut self, error: &Arc<EngineError>) {
        for live in self.live.values_mut() {
            live.error = Some(Arc::clone(error));
        }
        self.handle(Event::StepFailed(StepFailure::DeviceLost));
    }
}

/// Chooses a token from the row of each request that has one, and further ones where drafted ones are
/// right.
fn rows(step: &Step, logits: Logits<'_>, live: &mut BTreeMap<RequestId, Live>) -> Vec<RowReport> {
    let reports = step.report(|row| {
        let live = live.get_mut(&row.request)?;
        let logits = logits.row(row.row)?;
        live.take_prompt_row(row.token, logits);
        match row.use_of {
            RowUse::Prompt => None,
            RowUse::NextToken | RowUse::AfterDraft(_) => Some(live.take_row(logits)),
        }
    });
    for feed in step.feeds.iter().filter(|feed| feed.n_draft > 0) {
        if let Some(live) = live.get_mut(&feed.request)
            && let Some(drafter) = &mut live.drafter
        {
            let own = reports.iter().filter(|row| row.request == feed.request);
            drafter.learn(feed.n_draft, own.count().saturating_sub(1));
            live.usage.speculated = drafter.speculated();
        }
    }
    reports
}

impl Live {
    /// The row of a token of the prompt, where such are wanted.
    fn take_prompt_row(&mut self, index: usize, row: &[f32]) {
        let Some(&next) = self.prompt.get(index + 1) else {
            return;
        };
        if let Err(error) = self.completion.take_prompt_row(index, next, row) {
            self.prompt_error.get_or_insert(Arc::new(error));
        }
    }

    fn take_row(&mut self, row: &[f32]) -> Progress {
        if let Some(error) = self.prompt_error.take() {
            self.error = Some(error);
            return Progress::Failed;
        }
        match self.completion.take(OutputRow::Logits(row)) {
            Ok(piece) => {
                // Tokens whose text is held back come with the piece that releases it.
                if !piece.is_empty() {
                    self.send(&piece);
                }
                let first = self.submitted_at.elapsed();
                self.usage.first_token.get_or_insert(first);
                match (self.completion.finish_reason(), self.completion.tokens()) {
                    (None, &[.., token]) => {
                        if let Some(drafter) = &mut self.drafter {
                            drafter.push(&[token]);
                        }
                        Progress::Token(token)
                    }
                    _ => Progress::Ended,
                }
            }
            Err(error) => {
                self.error = Some(Arc::new(error));
                Progress::Failed
            }
        }
    }

    /// Gives a piece out, with the log probabilities of the tokens since the piece before.
    fn send(&mut self, piece: &str) {
        let all = self.completion.logprobs();
        let new = all.get(self.n_logprobs..).unwrap_or_default();
        self.sender.push(piece, new);
        self.n_logprobs = all.len();
    }

    fn end(mut self, end: End) {
        self.usage.total = self.submitted_at.elapsed();
        self.usage.n_tokens = self.completion.tokens().len();
        let rest = match end {
            End::Complete | End::Failed => String::new(),
            End::ContextFull => self.completion.end(FinishReason::ContextFull),
            End::Cancelled => self.completion.end(FinishReason::Cancelled),
        };
        self.send(&rest);
        self.sender
            .set_prompt_logprobs(self.completion.prompt_logprobs());
        let finish = self.completion.finish_reason().cloned();
        let ended = match (end, finish, self.error) {
            (End::Failed, _, Some(error)) => Err(ServiceError::Engine(error)),
            (_, Some(finish), _) => Ok((self.completion.tokens().to_vec(), finish, self.usage)),
            (_, None, _) => Err(ServiceError::from(EngineError::NoLogits)),
        };
        self.sender.end(ended);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use model_core::tokenizer::{Tokenizer, TokenizerModel, TokenizerSpec};

    use super::*;
    use crate::completion::CompletionOptions;
    use crate::logprobs::{Logprobs, TokenLogprobs};
    use crate::sampler::SamplerConfig;

    /// Tokens 3 to 5; those before are special in a vocabulary of this kind.
    const PIECES: [&str; 6] = ["<unk>", "<s>", "</s>", "a", "b", "c"];

    fn live() -> (Live, crate::serve::TextStream) {
        let mut spec = TokenizerSpec::new(TokenizerModel::Spm, PIECES.map(str::to_owned).to_vec());
        spec.scores = vec![0.0; PIECES.len()];
        let tokenizer = Arc::new(Tokenizer::new(spec).unwrap());
        let options = CompletionOptions {
            sampler: SamplerConfig::greedy(),
            stop: vec!["bc".to_owned()],
            logprobs: Logprobs::Top(0),
            ..CompletionOptions::default()
        };
        let (sender, stream) = TextSender::new(RequestId(0), &Arc::default());
        let live = Live {
            completion: Completion::new(&tokenizer, options).unwrap(),
            prompt: Vec::new(),
            n_logprobs: 0,
            sender,
            drafter: None,
            place: None,
            submitted_at: Instant::now(),
            usage: Usage::default(),
            error: None,
            prompt_error: None,
            is_announced: false,
        };
        (live, stream)
    }

    fn choose(live: &mut Live, token: usize) {
        let mut row = [0.0; PIECES.len()];
        row[token] = 1.0;
        let chosen = TokenId(token as u32);
        assert_eq!(live.take_row(&row), Progress::Token(chosen));
    }

    fn tokens(places: &[TokenLogprobs]) -> Vec<u32> {
        places.iter().map(|place| place.chosen.token.0).collect()
    }

    #[test]
    fn log_probabilities_come_with_the_text_of_their_tokens() {
        let (mut live, mut stream) = live();
        choose(&mut live, 3);
        choose(&mut live, 4); // held back: a stop string may begin here
        assert_eq!(stream.next_piece().unwrap().unwrap(), "a");
        assert_eq!(tokens(&stream.take_logprobs()), [3]);
        choose(&mut live, 3);
        assert_eq!(stream.next_piece().unwrap().unwrap(), "ba");
        assert_eq!(tokens(&stream.take_logprobs()), [4, 3]);
        choose(&mut live, 4);
        live.end(End::ContextFull);
        let end = stream.finish().unwrap();
        assert_eq!((end.text.as_str(), tokens(&end.logprobs)), ("b", vec![4]));
    }
}
