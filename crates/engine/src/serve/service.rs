//! [`Service`]: a [`Session`] on a thread of its own, and the way of requests to it.
//!
//! Invariant: what can be refused without the thread is refused before anything is queued, so a
//! stream that was handed out is of a request that will be computed.

use std::num::NonZeroU32;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use cellar_scheduler::{Counters, PromptLimits, SpeculationOff};
use kv_backend::state::Fingerprint;
use kv_backend::{Backend, ExpertMeter};
use kv_core::memory::{Composite, Memory};
use model_core::tokenizer::Tokenizer;

use super::prefixes::PrefixCommand;
use crate::decode::Engine;
use crate::draft_model::DraftModel;
use crate::sampler::Step;
use crate::session::{
    Activity, Intake, MemoryLayout, ServiceConfig, ServiceError, ServiceExtras, ServiceStatus,
    Session, Submission, TextRequest, TextStream, WatchHub, Watcher,
};

/// An engine that serves many requests, on a thread of its own. Dropping it ends all requests.
#[derive(Debug)]
pub struct Service<B: Backend, M: Memory + Clone = Composite> {
    commands: SyncSender<Command>,
    thread: Option<JoinHandle<Engine<B, M>>>,
    intake: Arc<Intake>,
    keeps_checkpoints: bool,
    status: Arc<Mutex<ServiceStatus>>,
    hub: Arc<WatchHub>,
    /// The meter of experts, where they are read as they are needed.
    expert_meter: Option<Arc<ExpertMeter>>,
    layout: MemoryLayout,
    fingerprint: Fingerprint,
}

/// A command of a service to its thread.
#[derive(Debug)]
pub(crate) enum Command {
    Submit(Box<Submission>),
    Prefixes(PrefixCommand),
    Stop,
}

impl<B: Backend, M: Memory + Clone + Send + 'static> Service<B, M> {
    /// Starts a service. What the engine remembered goes.
    ///
    /// # Errors
    /// As [`Session::new`]; [`ServiceError::NoThread`].
    pub fn start(
        engine: Engine<B, M>,
        tokenizer: &Arc<Tokenizer>,
        config: &ServiceConfig,
    ) -> Result<Self, ServiceError> {
        Self::start_with(engine, tokenizer, config, ServiceExtras::default())
    }

    /// As [`Service::start`], with a trace, a draft model, an observer of blocks and a disk, where
    /// there are such.
    ///
    /// # Errors
    /// As [`Session::with`]; [`ServiceError::NoThread`].
    pub fn start_with(
        engine: Engine<B, M>,
        tokenizer: &Arc<Tokenizer>,
        config: &ServiceConfig,
        extras: ServiceExtras,
    ) -> Result<Self, ServiceError> {
        let session = Session::with(engine, tokenizer, config, extras)?;
        let layout = session.memory_layout();
        let fingerprint = session.engine().fingerprint().clone();
        let keeps_checkpoints = session.scheduler().keeps_checkpoints();
        let expert_meter = session.expert_meter();
        let (intake, hub) = (Arc::clone(session.intake()), Arc::clone(session.hub()));
        // Every request in the channel has a place in the queue; one command more saves or restores
        // prefixes, and one stops it.
        let (commands, received) = sync_channel(config.max_queued.saturating_add(2));
        let status = Arc::default();
        let worker = Worker {
            session,
            commands: received,
            status: Arc::clone(&status),
            is_stopping: false,
        };
        let thread = std::thread::Builder::new().name("cellar-service".to_owned());
        let thread = thread.spawn(move || worker.run());
        let thread = thread.map_err(|error| ServiceError::NoThread {
            reason: error.to_string(),
        })?;
        Ok(Self {
            commands,
            thread: Some(thread),
            intake,
            keeps_checkpoints,
            status,
            hub,
            expert_meter,
            layout,
            fingerprint,
        })
    }
}

impl<B: Backend, M: Memory + Clone> Service<B, M> {
    /// Submits a request, from any thread. Never waits.
    ///
    /// # Errors
    /// [`ServiceError::Refused`] with the numbers, where the prompt is empty, can never fit, or too
    /// much waits; [`ServiceError::Engine`] where an option is out of range;
    /// [`ServiceError::Stopped`].
    pub fn submit(&self, request: TextRequest) -> Result<TextStream, ServiceError> {
        let mut streams = self.submit_texts(request, NonZeroU32::MIN, Vec::new)?;
        streams.pop().ok_or(ServiceError::Stopped)
    }

    /// Submits a request for `n` texts of its prompt, which is computed once. Text number `i`,
    /// counted from 0, is what the request alone gives with `i` added to its seed. `more_steps`
    /// gives the own steps of each text but the first, as [`TextRequest::steps`] has those of the
    /// first.
    ///
    /// # Errors
    /// As [`Service::submit`].
    pub fn submit_texts(
        &self,
        request: TextRequest,
        n: NonZeroU32,
        more_steps: impl FnMut() -> Vec<Box<dyn Step>>,
    ) -> Result<Vec<TextStream>, ServiceError> {
        let (submitted, streams) = self.intake.take(request, n, more_steps)?;
        let sent = self.commands.try_send(Command::Submit(Box::new(submitted)));
        sent.map_err(|_| ServiceError::Stopped)?;
        Ok(streams)
    }

    pub(super) fn intake(&self) -> &Intake {
        &self.intake
    }

    /// Sends a command to the thread, and waits where others are before it.
    pub(super) fn command(&self, command: Command) -> Result<(), ServiceError> {
        self.commands
            .send(command)
            .map_err(|_| ServiceError::Stopped)
    }

    /// What every prompt must comply with.
    pub fn prompt_limits(&self) -> PromptLimits {
        self.intake.prompt_limits()
    }

    /// Whether it keeps copies at [`TextRequest::checkpoints`]: with full attention, none are
    /// needed.
    pub fn keeps_checkpoints(&self) -> bool {
        self.keeps_checkpoints
    }

    /// The most tokens that can be drafted after a text.
    ///
    /// # Errors
    /// [`SpeculationOff`], why none can; requests that want it are then computed token by token.
    pub fn draft_limit(&self) -> Result<usize, SpeculationOff> {
        self.intake.draft_limit()
    }

    /// The model that drafts with [`Speculation::Draft`](cellar_scheduler::Speculation::Draft),
    /// where there is one.
    pub fn draft_model(&self) -> Option<&DraftModel> {
        self.intake.draft_model()
    }

    /// True if the model was loaded with a head that drafts
    /// ([`Speculation::Head`](cellar_scheduler::Speculation::Head)).
    pub fn has_head(&self) -> bool {
        self.intake.has_head()
    }

    /// Requests that wait to be admitted.
    pub fn n_queued(&self) -> usize {
        self.intake.n_queued()
    }

    /// What the scheduler has done up to its last step.
    pub fn counters(&self) -> Counters {
        self.status().counters
    }

    /// What runs, and how full the memory is, as of the last step.
    pub fn status(&self) -> ServiceStatus {
        let status = *self.status.lock().unwrap_or_else(PoisonError::into_inner);
        ServiceStatus {
            // A request that failed for it is not the first to tell.
            has_lost_device: self.intake.has_lost_device(),
            // Other models may have taken memory of its experts since.
            experts: self.expert_meter.as_ref().map(|meter| meter.get()),
            ..status
        }
    }

    /// Looks at the memory and the requests from now on. Any number of watchers may.
    pub fn watch(&self) -> Watcher {
        self.hub.watch(self.hub.n_events())
    }

    /// As [`Service::watch`], from an event on:
    /// [`Update::next_event`](crate::session::Update::next_event) of a watcher before.
    pub fn watch_from(&self, event: u64) -> Watcher {
        self.hub.watch(event)
    }

    /// Which model it computes.
    pub fn fingerprint(&self) -> &Fingerprint {
        &self.fingerprint
    }

    /// The parts and rows of the memory.
    pub fn memory_layout(&self) -> &MemoryLayout {
        &self.layout
    }

    /// Ends all requests, and returns the engine with an empty memory.
    ///
    /// # Errors
    /// [`ServiceError::Stopped`] where the thread has panicked.
    pub fn stop(mut self) -> Result<Engine<B, M>, ServiceError> {
        let engine = self.join();
        engine.ok_or(ServiceError::Stopped)
    }

    fn join(&mut self) -> Option<Engine<B, M>> {
        // The thread takes commands after each step, so this waits for a step at most. An
        // error means that the thread is gone.
        let _gone = self.commands.send(Command::Stop);
        self.thread.take()?.join().ok() // a panic was printed by its thread
    }
}

impl<B: Backend, M: Memory + Clone> Drop for Service<B, M> {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.join();
        }
    }
}

/// The thread of a service: it steps its session, and takes commands between steps.
struct Worker<B: Backend, M: Memory + Clone> {
    session: Session<B, M>,
    commands: Receiver<Command>,
    status: Arc<Mutex<ServiceStatus>>,
    is_stopping: bool,
}

impl<B: Backend, M: Memory + Clone> Worker<B, M> {
    /// Serves until it is stopped, and returns the engine with an empty memory.
    fn run(mut self) -> Engine<B, M> {
        let mut activity = Activity::Idle;
        self.publish_status();
        while !self.is_stopping {
            if activity == Activity::Idle {
                self.wait_for_command();
            }
            self.take_commands();
            activity = self.session.step();
            self.publish_status();
        }
        self.session.into_engine()
    }

    fn publish_status(&mut self) {
        self.session.update_blocks();
        let status = self.session.status();
        *self.status.lock().unwrap_or_else(PoisonError::into_inner) = status;
    }

    fn wait_for_command(&mut self) {
        // The last state before a pause is handed over, for watchers that come later.
        let command = match self.session.idle_time() {
            Some(time) => self.commands.recv_timeout(time),
            None => (self.commands.recv()).map_err(|_| RecvTimeoutError::Disconnected),
        };
        match command {
            Ok(command) => self.take_command(command),
            Err(RecvTimeoutError::Timeout) => self.session.publish_frame(),
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
        match command {
            Command::Submit(submitted) => self.session.enter(*submitted),
            Command::Prefixes(command) => {
                command.run(&mut self.session);
                self.publish_status();
            }
            Command::Stop => self.is_stopping = true,
        }
    }
}
