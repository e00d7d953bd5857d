//! [`Service`]: starts the thread, takes requests, and stops it.
//!
//! Invariant: what can be refused without the thread is refused before anything is queued, so a
//! stream that was handed out is of a request that will be computed. Knows nothing of steps.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use cellar_scheduler::{
    Counters, PrefixUse, Priority, PromptLimits, PromptRows, RequestError, RequestId, Scheduler,
    SchedulerConfig, Speculation, SpeculationOff, Tenant, TenantId, TenantLimits, Waiting,
};
use kv_core::TokenId;
use kv_core::backend::Backend;
use kv_core::memory::{Memory, UnifiedConfig};
use kv_core::memory_plan::MemoryPlan;
use kv_core::state::Fingerprint;
use model_core::tokenizer::Tokenizer;

use super::blocks::{BlockObserver, BlockTable};
use super::config::ServiceConfig;
use super::record::Recorder;
use super::stream::{StepGuests, TextSender, TextStream};
use super::swap_store::{SwapDisk, SwapStore};
use super::watch::{WatchHub, Watcher};
use super::worker::{Command, Submitted, SubmittedText, Worker};
use crate::completion::{Completion, CompletionOptions};
use crate::decode::Engine;
use crate::draft_model::DraftModel;
use crate::error::EngineError;
use crate::logprobs::Logprobs;
use crate::sampler::Step;
use crate::speculate::{self, DraftSource};
use crate::trace::TraceWriter;

/// A prompt, and how it is continued.
#[derive(Debug, Default)]
pub struct TextRequest {
    /// The tokens to continue.
    pub prompt: Vec<TokenId>,
    /// Which requests go before it.
    pub priority: Priority,
    /// Whose it is: tenants share what is computed by their weights.
    pub tenant: TenantId,
    /// What that tenant gets from now on; `None` takes [`ServiceConfig::tenant_limits`].
    pub tenant_limits: Option<TenantLimits>,
    /// With whom it shares cached prefixes: with all requests, unless they have other salts. With
    /// none where log probabilities of the prompt are wanted.
    pub prefix: PrefixUse,
    /// After so many tokens of the prompt others are likely to part from it: where messages end.
    pub checkpoints: Vec<usize>,
    /// How the text is chosen, and where it ends.
    pub options: CompletionOptions,
    /// Steps of the sampler before all others: a grammar, a bias.
    pub steps: Vec<Box<dyn Step>>,
    /// Whether tokens of the text are drafted, so that a step verifies several. The text is the same.
    pub speculation: Speculation,
}

/// What a service may have besides its engine.
#[derive(Debug, Default)]
pub struct ServiceExtras {
    /// What happens is written to it.
    pub trace: Option<TraceWriter>,
    /// Drafts for the requests that want [`Speculation::Draft`]. Its engine should have a sequence for
    /// each request that runs; it computes on the service's thread, between steps.
    pub draft_model: Option<DraftModel>,
    /// Gets an event when blocks of tokens come and go.
    pub blocks: Option<BlockObserver>,
    /// Takes states of preempted requests that are beyond half of
    /// [`EngineConfig::swap_bytes`](crate::EngineConfig::swap_bytes).
    pub swap_disk: Option<SwapDisk>,
}

/// Why a request is refused or has failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServiceError {
    /// The request, or a limit of the service, is refused.
    #[error(transparent)]
    Refused(#[from] RequestError),
    /// An option makes no sense, no token could be chosen, or the step of this request failed when
    /// it was computed alone.
    #[error(transparent)]
    Engine(Arc<EngineError>),
    /// The thread could not be started.
    #[error("the service cannot start a thread: {reason}")]
    NoThread {
        /// Why, in the system's words.
        reason: String,
    },
    /// A trace cannot be written, or is none that can be read.
    #[error("the trace is wrong at byte {at}: {what}")]
    Trace {
        /// The place in the file, in bytes.
        at: u64,
        /// What is wrong.
        what: String,
    },
    /// Saved prefixes are not what would be computed here.
    #[error("the cached prefixes are not restored: {reason}")]
    PrefixesRefused {
        /// What is different.
        reason: String,
    },
    /// The service has ended before the request did.
    #[error("the service has ended")]
    Stopped,
}

impl From<EngineError> for ServiceError {
    fn from(error: EngineError) -> Self {
        Self::Engine(Arc::new(error))
    }
}

/// An engine that serves many requests, on a thread of its own. Dropping it ends all requests.
#[derive(Debug)]
pub struct Service<B: Backend> {
    commands: SyncSender<Command>,
    thread: Option<JoinHandle<Engine<B>>>,
    tokenizer: Arc<Tokenizer>,
    limits: PromptLimits,
    draft_limit: Result<usize, SpeculationOff>,
    draft_model: Option<DraftModel>,
    keeps_checkpoints: bool,
    tenant_limits: TenantLimits,
    queue: Arc<QueueSize>,
    next_id: AtomicU64,
    step: Arc<StepGuests>,
    status: Arc<Mutex<ServiceStatus>>,
    hub: Arc<WatchHub>,
    layout: MemoryLayout,
    fingerprint: Fingerprint,
}

/// What the memory of a service consists of.
#[derive(Clone, Debug)]
pub struct MemoryLayout {
    /// Its parts, without that of sources.
    pub parts: Vec<UnifiedConfig>,
    /// Rows of each layer and kind, in bytes.
    pub plan: MemoryPlan,
    /// Requests and cached prefixes that can be in it.
    pub n_seqs: u32,
}

/// The state of a service after its last step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServiceStatus {
    /// What the scheduler has done.
    pub counters: Counters,
    /// Requests that were admitted and have not ended.
    pub n_running: usize,
    /// KV cells of the memory's largest part; 0 where no layer has attention.
    pub n_cells: u32,
    /// Of these, the cells that hold tokens: of running requests and of cached prefixes.
    pub n_cells_used: u32,
    /// Bytes that preempted requests have in the memory of the host.
    pub swapped_bytes: u64,
    /// Bytes that they have in files.
    pub spilled_bytes: u64,
    /// Whether the engine's device is lost
    /// ([`BackendError::DeviceLost`](kv_core::backend::BackendError::DeviceLost)): no later step can be computed.
    pub has_lost_device: bool,
}

/// What waits, and how much may.
#[derive(Debug)]
struct QueueSize {
    waiting: Mutex<WaitingRequests>,
    limits: SchedulerConfig,
}

/// The requests that wait, all and by tenant.
#[derive(Debug, Default)]
struct WaitingRequests {
    all: Waiting,
    of: BTreeMap<TenantId, usize>,
}

impl QueueSize {
    fn lock(&self) -> MutexGuard<'_, WaitingRequests> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for a prompt.
    fn enter(
        self: &Arc<Self>,
        n_prompt: usize,
        tenant: Tenant,
    ) -> Result<QueuePlace, RequestError> {
        let mut waiting = self.lock();
        self.limits.check_queue(waiting.all, n_prompt)?;
        let own = waiting.of.get(&tenant.id).copied().unwrap_or(0);
        tenant.limits.check_queue(own)?;
        waiting.all.n_requests += 1;
        waiting.all.n_tokens += n_prompt;
        waiting.of.insert(tenant.id, own + 1);
        drop(waiting);
        Ok(QueuePlace {
            queue: Arc::clone(self),
            n_prompt,
            tenant: tenant.id,
        })
    }
}

/// A place in the queue, until it is dropped.
#[derive(Debug)]
pub(crate) struct QueuePlace {
    queue: Arc<QueueSize>,
    n_prompt: usize,
    tenant: TenantId,
}

impl Drop for QueuePlace {
    fn drop(&mut self) {
        let mut waiting = self.queue.lock();
        waiting.all.n_requests = waiting.all.n_requests.saturating_sub(1);
        waiting.all.n_tokens = waiting.all.n_tokens.saturating_sub(self.n_prompt);
        if let Some(own) = waiting.of.get_mut(&self.tenant) {
            *own = own.saturating_sub(1);
            if *own == 0 {
                waiting.of.remove(&self.tenant);
            }
        }
    }
}

impl<B: Backend> Service<B> {
    /// Starts a service. What the engine remembered goes.
    ///
    /// # Errors
    /// [`ServiceError::Refused`] where a limit is 0, or the model takes whole sequences only;
    /// [`ServiceError::Engine`] where it encodes a source before each text, or its rows cannot be swapped as
    /// [`EngineConfig::swap_type`](crate::EngineConfig::swap_type);
    /// [`ServiceError::NoThread`].
    pub fn start(
        engine: Engine<B>,
        tokenizer: &Arc<Tokenizer>,
        config: &ServiceConfig,
    ) -> Result<Self, ServiceError> {
        Self::start_with(engine, tokenizer, config, ServiceExtras::default())
    }

    /// As [`Service::start`], with a trace, a draft model, an observer of blocks and a disk, where there are
    /// such.
    ///
    /// # Errors
    /// As [`Service::start`]; [`ServiceError::Trace`] where the first line cannot be written. When a
    /// later one cannot, a warning says so, and the service goes on.
    pub fn start_with(
        mut engine: Engine<B>,
        tokenizer: &Arc<Tokenizer>,
        config: &ServiceConfig,
        extras: ServiceExtras,
    ) -> Result<Self, ServiceError> {
        let ServiceExtras {
            mut trace,
            draft_model,
            blocks,
            swap_disk,
        } = extras;
        if engine.model().source_encoder().is_some() {
            let architecture = engine.model().architecture().to_owned();
            return Err(EngineError::SourcesUnsupported { architecture }.into());
        }
        if let Some(kv_type) = engine.settings().swap_type {
            engine.check_save_type(kv_type)?;
        }
        if let Some(kv_type) = engine.settings().swapped_state_type() {
            engine.check_save_state_type(kv_type)?;
        }
        let _removed = engine.clear();
        let queue_limits = SchedulerConfig {
            swap_disk_bytes: swap_disk.as_ref().map_or(0, |disk| disk.n_bytes),
            ..config.scheduler(engine.settings())
        };
        let scheduler = Scheduler::new(queue_limits, engine.memory())?
            .with_row_bytes(engine.settings().row_bytes())
            .with_notes();
        if let Some(trace) = &mut trace {
            let begun = trace.begin(engine.settings(), &queue_limits);
            begun.map_err(|error| ServiceError::Trace {
                at: 0,
                what: error.to_string(),
            })?;
        }
        let layout = MemoryLayout::of(&engine);
        let fingerprint = engine.fingerprint().clone();
        let limits = scheduler.prompt_limits();
        let draft_limit = scheduler.draft_limit();
        let keeps_checkpoints = scheduler.keeps_checkpoints();
        // Every request in the channel has a place in the queue; one command more saves or restores
        // prefixes, and one stops it.
        let (commands, received) = sync_channel(config.max_queued.saturating_add(2));
        let (step, status) = (Arc::default(), Arc::default());
        let hub = Arc::<WatchHub>::default();
        let recorder = Recorder::new(Arc::clone(&hub), config.excerpts)
            .with_trace(trace)
            .with_blocks(blocks.map(BlockTable::new));
        let no_thread = |error: std::io::Error| ServiceError::NoThread {
            reason: error.to_string(),
        };
        let files = swap_disk.map(|disk| disk.files);
        let swapped = SwapStore::new(queue_limits.swap_bytes, files).map_err(no_thread)?;
        let worker = Worker::new(engine, scheduler, received, recorder, swapped)
            .with_shared(Arc::clone(&step), Arc::clone(&status));
        let thread = std::thread::Builder::new().name("cellar-service".to_owned());
        let thread = thread.spawn(move || worker.run()).map_err(no_thread)?;
        Ok(Self {
            commands,
            thread: Some(thread),
            tokenizer: Arc::clone(tokenizer),
            limits,
            draft_limit,
            draft_model,
            keeps_checkpoints,
            tenant_limits: config.tenant_limits,
            queue: Arc::new(QueueSize {
                waiting: Mutex::default(),
                limits: queue_limits,
            }),
            next_id: AtomicU64::new(0),
            step,
            status,
            hub,
            layout,
            fingerprint,
        })
    }

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
    /// counted from 0, is what the request alone gives with `i` added to its seed. `more_steps` gives
    /// the own steps of each text but the first, as [`TextRequest::steps`] has those of the first.
    ///
    /// # Errors
    /// As [`Service::submit`].
    pub fn submit_texts(
        &self,
        request: TextRequest,
        n: NonZeroU32,
        mut more_steps: impl FnMut() -> Vec<Box<dyn Step>>,
    ) -> Result<Vec<TextStream>, ServiceError> {
        let submitted_at = Instant::now();
        let TextRequest {
            prompt,
            priority,
            tenant,
            tenant_limits,
            prefix,
            checkpoints,
            options,
            steps,
            speculation,
        } = request;
        self.limits.check(&prompt)?;
        speculate::check(speculation).map_err(EngineError::from)?;
        // What is reused has no rows.
        let (prefix, prompt_rows) = match options.prompt_logprobs {
            Logprobs::Off => (prefix, PromptRows::Last),
            Logprobs::Top(_) => (PrefixUse::Off, PromptRows::All),
        };
        let mut steps = Some(steps);
        let mut completions = Vec::with_capacity(n.get() as usize);
        for number in 0..u64::from(n.get()) {
            let mut options = options.clone();
            options.sampler.seed = options.sampler.seed.wrapping_add(number);
            let mut completion = Completion::new(&self.tokenizer, options)?;
            let steps = steps.take().unwrap_or_else(&mut more_steps);
            steps
                .into_iter()
                .for_each(|step| completion.push_step(step));
            completion.accept_prompt(&prompt);
            completions.push(completion);
        }
        let tenant = Tenant {
            id: tenant,
            limits: tenant_limits.unwrap_or(self.tenant_limits),
        };
        let place = self.queue.enter(prompt.len(), tenant)?;
        let first_id = self.reserve_ids(u64::from(n.get()));
        let (mut texts, mut streams) = (Vec::new(), Vec::new());
        let mut speculation_off = None;
        for (id, completion) in (first_id.0..).map(RequestId).zip(completions) {
            let (sender, stream) = TextSender::new(id, &self.step);
            let mut drafter = self.drafter(speculation).unwrap_or_else(|off| {
                speculation_off = Some(off);
                None
            });
            if let Some(drafter) = &mut drafter {
                drafter.push(&prompt);
            }
            texts.push(SubmittedText {
                id,
                completion,
                sender,
                drafter,
            });
            streams.push(stream);
        }
        let submitted = Submitted {
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
        };
        let sent = self.commands.try_send(Command::Submit(Box::new(submitted)));
        sent.map_err(|_| ServiceError::Stopped)?;
        Ok(streams)
    }

    /// What drafts for a text, or why nothing does.
    fn drafter(&self, speculation: Speculation) -> Result<Option<DraftSource>, SpeculationOff> {
        match speculation {
            Speculation::Off => Ok(None),
            Speculation::Lookup { .. } | Speculation::Draft { .. } => {
                self.draft_limit?;
                DraftSource::new(speculation, self.draft_model.as_ref())
            }
        }
    }

    /// Numbers for so many texts; the first of them.
    pub(super) fn reserve_ids(&self, n: u64) -> RequestId {
        RequestId(self.next_id.fetch_add(n, Ordering::Relaxed))
    }

    /// Sends a command to the thread, and waits where others are before it.
    pub(super) fn command(&self, command: Command) -> Result<(), ServiceError> {
        self.commands
            .send(command)
            .map_err(|_| ServiceError::Stopped)
    }

    /// What every prompt must comply with.
    pub fn prompt_limits(&self) -> PromptLimits {
        self.limits
    }

    /// Whether it keeps copies at [`TextRequest::checkpoints`]: with full attention, none are needed.
    pub fn keeps_checkpoints(&self) -> bool {
        self.keeps_checkpoints
    }

    /// The most tokens that can be drafted after a text.
    ///
    /// # Errors
    /// [`SpeculationOff`], why none can; requests that want it are then computed token by token.
    pub fn draft_limit(&self) -> Result<usize, SpeculationOff> {
        self.draft_limit
    }

    /// The model that drafts with [`Speculation::Draft`], where there is one.
    pub fn draft_model(&self) -> Option<&DraftModel> {
        self.draft_model.as_ref()
    }

    /// Requests that wait to be admitted.
    pub fn n_queued(&self) -> usize {
        self.queue.lock().all.n_requests
    }

    /// What the scheduler has done up to its last step.
    pub fn counters(&self) -> Counters {
        self.status().counters
    }

    /// What runs, and how full the memory is, as of the last step.
    pub fn status(&self) -> ServiceStatus {
        *self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at the memory and the requests from now on. Any number of watchers may.
    pub fn watch(&self) -> Watcher {
        self.hub.watch(self.hub.n_events())
    }

    /// As [`Service::watch`], from an event on: [`Update::next_event`](super::Update::next_event) of
    /// a watcher before.
    pub fn watch_from(&self, event: u64) -> Watcher {
        self.hub.watch(event)
    }

    /// Which model it computes.
    pub fn fingerprint(&self) -> &Fingerprint {
        &self.fingerprint
    }

    /// What the memory consists of.
    pub fn memory_layout(&self) -> &MemoryLayout {
        &self.layout
    }

    /// Ends all requests, and returns the engine with an empty memory.
    ///
    /// # Errors
    /// [`ServiceError::Stopped`] where the thread has panicked.
    pub fn stop(mut self) -> Result<Engine<B>, ServiceError> {
        let engine = self.join();
        engine.ok_or(ServiceError::Stopped)
    }

    fn join(&mut self) -> Option<Engine<B>> {
        // The thread takes commands after each step, so this waits for a step at most. An
        // error means that the thread is gone.
        let _gone = self.commands.send(Command::Stop);
        self.thread.take()?.join().ok() // a panic was printed by its thread
    }
}

impl MemoryLayout {
    fn of(engine: &Engine<impl Backend>) -> Self {
        let memory = engine.memory();
        Self {
            parts: memory.parts().iter().map(|part| *part.config()).collect(),
            plan: engine.settings().memory_plan(),
            n_seqs: memory.n_seqs(),
        }
    }
}

impl<B: Backend> Drop for Service<B> {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.join();
        }
    }
}
