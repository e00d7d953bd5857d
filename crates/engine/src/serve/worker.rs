//! [`Worker`]: the loop of a service's thread. Takes requests in, carries plans out, and reports
//! steps.
//!
//! Invariant: the scheduler knows every request that this thread holds, and the other way round.
//! Decides nothing about order or memory: that is the scheduler's.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use cellar_scheduler::{
    Event, Micros, Outcome, PrefixUse, Priority, PromptRows, Request, RequestId, RowReport, RowUse,
    Scheduler, SpeculationOff, Step, StepFailure, Tenant, Work,
};
use kv_core::TokenId;
use kv_core::backend::{Backend, BackendError};
use kv_core::memory::Edit;

use super::config::micros;
use super::drafts::learn_from_drafts;
use super::frame::EventKind;
use super::live_text::LiveText;
use super::prefixes::PrefixCommand;
use super::record::{Recorder, event_of};
use super::service::{QueuePlace, ServiceStatus};
use super::stream::{StepGuests, TextSender};
use super::swap_store::SwapStore;
use crate::completion::Completion;
use crate::decode::Engine;
use crate::error::EngineError;
use crate::rows_out::Logits;
use crate::speculate::DraftSource;

/// A command of a service to its thread.
#[derive(Debug)]
pub(crate) enum Command {
    Submit(Box<Submitted>),
    Prefixes(PrefixCommand),
    Stop,
}

/// A request on its way to the thread.
#[derive(Debug)]
pub(crate) struct Submitted {
    /// At least one.
    pub(crate) texts: Vec<SubmittedText>,
    pub(crate) prompt: Vec<TokenId>,
    pub(crate) priority: Priority,
    pub(crate) tenant: Tenant,
    pub(crate) prefix: PrefixUse,
    pub(crate) prompt_rows: PromptRows,
    pub(crate) checkpoints: Vec<usize>,
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
    pub(crate) drafter: Option<DraftSource>,
}

/// The state of a service's thread.
#[derive(Debug)]
pub(crate) struct Worker<B: Backend> {
    pub(super) engine: Engine<B>,
    pub(super) scheduler: Scheduler,
    commands: Receiver<Command>,
    pub(super) live: BTreeMap<RequestId, LiveText>,
    /// What was saved of preempted requests.
    pub(super) swapped: SwapStore,
    pub(super) step: Arc<StepGuests>,
    status: Arc<Mutex<ServiceStatus>>,
    recorder: Recorder,
    started: Instant,
    is_stopping: bool,
    has_lost_device: bool,
}

impl<B: Backend> Worker<B> {
    pub(crate) fn new(
        engine: Engine<B>,
        scheduler: Scheduler,
        commands: Receiver<Command>,
        recorder: Recorder,
        swapped: SwapStore,
    ) -> Self {
        Self {
            engine,
            scheduler,
            commands,
            live: BTreeMap::new(),
            swapped,
            step: Arc::default(),
            status: Arc::default(),
            recorder,
            started: Instant::now(),
            is_stopping: false,
            has_lost_device: false,
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
            self.watch_files();
            self.draft();
            let plan = self.scheduler.next(self.now(), self.engine.memory());
            self.take_outcomes(plan.outcomes);
            self.record_notes();
            is_idle = matches!(plan.work, Work::Idle);
            match plan.work {
                Work::Idle => {}
                Work::Edit(edits) => self.edit(edits),
                Work::SwapOut { swap, limit } => self.swap_out(swap, limit),
                Work::SwapIn(swap) => self.swap_in(swap),
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

    fn publish_status(&mut self) {
        self.recorder.update_blocks(&self.scheduler);
        let parts = self.engine.memory().parts();
        let largest = parts.iter().max_by_key(|part| part.n_cells());
        let running = self.live.values().filter(|live| live.was_admitted());
        let status = ServiceStatus {
            counters: self.scheduler.counters(),
            n_running: running.count(),
            n_cells: largest.map_or(0, |part| part.n_cells()),
            n_cells_used: largest.map_or(0, |part| part.n_used()),
            swapped_bytes: self.scheduler.swapped_bytes(),
            spilled_bytes: self.scheduler.spilled_bytes(),
            has_lost_device: self.has_lost_device,
        };
        *self.status.lock().unwrap_or_else(PoisonError::into_inner) = status;
    }

    /// Takes everything out of the memory again, as requests that end do.
    fn give_back(mut self) -> Engine<B> {
        for id in std::mem::take(&mut self.live).into_keys() {
            self.handle(Event::Cancel(id));
        }
        self.handle(Event::ClearPrefixes);
        while let Work::Edit(edits) = self.next_work() {
            self.edit(edits);
        }
        self.recorder.update_blocks(&self.scheduler);
        let now = self.now();
        self.recorder.stop(now);
        self.engine
    }

    /// What is to be done where no request is left.
    pub(super) fn next_work(&mut self) -> Work {
        let plan = self.scheduler.next(self.now(), self.engine.memory());
        self.take_outcomes(plan.outcomes);
        plan.work
    }

    /// Something changed that no event of a request tells.
    pub(super) fn notice_change(&mut self) {
        self.recorder.set_stale();
        self.record_notes();
        self.publish_status();
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

    pub(super) fn edit(&mut self, edits: Vec<Edit>) {
        self.recorder.set_stale();
        for edit in edits {
            let edited = self.engine.edit(edit);
            if let Err(error) = &edited {
                self.note_lost_device(error);
            }
            match (edited, edit) {
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

    pub(super) fn now(&self) -> Micros {
        micros(self.started.elapsed())
    }

    fn wait_for_command(&mut self) {
        // The last state before a pause is handed over, for watchers that come later.
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
            Command::Prefixes(command) => {
                self.take_prefix_command(command);
                return;
            }
            Command::Stop => {
                self.is_stopping = true;
                return;
            }
        };
        let Submitted {
            texts,
            prompt,
            priority,
            tenant,
            prefix,
            prompt_rows,
            checkpoints,
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
            let place = Some(Arc::clone(&place));
            let mut live = LiveText::new(completion, sender, place, submitted_at);
            if prompt_rows == PromptRows::All {
                live.prompt.clone_from(&prompt);
            }
            live.drafter = drafter;
            live.usage.n_prompt = prompt.len();
            live.usage.speculated.off = speculation_off;
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
            checkpoints,
            siblings: ids.collect(),
            tenant,
        };
        let now = self.now();
        self.recorder.submit(now, &request);
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

    pub(super) fn handle(&mut self, event: Event) {
        self.recorder.set_stale();
        let outcomes = self.scheduler.handle(self.now(), event);
        self.take_outcomes(outcomes);
    }

    fn take_outcomes(&mut self, outcomes: Vec<Outcome>) {
        for outcome in outcomes {
            self.record_outcome(&outcome);
            match outcome {
                Outcome::Admitted { request, reuse, .. } => {
                    if let Some(live) = self.live.get_mut(&request) {
                        live.admit(reuse);
                    }
                }
                Outcome::Preempted { request, .. } => {
                    if let Some(live) = self.live.get_mut(&request) {
                        live.preempt();
                    }
                }
                Outcome::Refused { request, why } => {
                    if let Some(live) = self.live.remove(&request) {
                        live.sender.end(Err(why.into()));
                    }
                }
                Outcome::Spilled { request } => self.swapped.spill(request),
                Outcome::SwapDropped { request, .. } => self.swapped.remove(request),
                Outcome::Ended { request, end } => {
                    self.swapped.remove(request);
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
        | Outcome::Spilled { request }
        | Outcome::SwapDropped { request, .. }
        | Outcome::Ended { request, .. }) = outcome;
        let now = self.now();
        if let Some(event) = event_of(outcome, self.live.get(request)) {
            self.recorder.record(now, event);
        }
    }

    /// Computes a step, and reports it.
    fn decode(&mut self, step: &Step) {
        let requests = step.texts();
        let cancel = self.step.enter(step.texts());
        let began = Instant::now();
        let computed = match self.engine.decode_until(&step.batch, cancel) {
            Ok(logits) => {
                let on_first_token = |request| {
                    let now = micros(self.started.elapsed());
                    self.recorder.record(now, EventKind::FirstToken { request });
                };
                Ok(choose_tokens(step, logits, &mut self.live, on_first_token))
            }
            Err(error) => Err(error),
        };
        match computed {
            Ok(rows) => {
                let now = self.now();
                self.recorder
                    .step(now, step, &rows, micros(began.elapsed()));
                self.handle(Event::StepDone(rows));
                self.handle(Event::StepTime(micros(began.elapsed())));
            }
            // All requests of the step were cancelled.
            Err(EngineError::Cancelled) => {
                requests.for_each(|id| self.handle(Event::Cancel(id)));
                self.handle(Event::StepFailed(StepFailure::Computation));
            }
            Err(error) => {
                self.note_lost_device(&error);
                let failure = match self.has_lost_device {
                    true => StepFailure::DeviceLost,
                    false => StepFailure::Computation,
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

    fn note_lost_device(&mut self, error: &EngineError) {
        self.has_lost_device |=
            matches!(error, EngineError::Backend(BackendError::DeviceLost { .. }));
    }

    fn fail_all(&mut self, error: &Arc<EngineError>) {
        for live in self.live.values_mut() {
            live.error = Some(Arc::clone(error));
        }
        self.handle(Event::StepFailed(StepFailure::DeviceLost));
    }
}

/// Chooses a token from the row of each request that has one, and further ones where drafted ones
/// are right.
fn choose_tokens(
    step: &Step,
    logits: Logits<'_>,
    live: &mut BTreeMap<RequestId, LiveText>,
    mut on_first_token: impl FnMut(RequestId),
) -> Vec<RowReport> {
    let reports = step.report(|row| {
        let live = live.get_mut(&row.request)?;
        let logits = logits.row(row.row)?;
        live.take_prompt_row(row.token, logits);
        match row.use_of {
            RowUse::Prompt => None,
            RowUse::NextToken | RowUse::AfterDraft(_) => {
                let had_token = live.usage.first_token.is_some();
                let progress = live.take_row(logits);
                if !had_token && live.usage.first_token.is_some() {
                    on_first_token(row.request);
                }
                Some(progress)
            }
        }
    });
    learn_from_drafts(step, &reports, live);
    reports
}
