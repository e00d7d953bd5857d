//! [`Session`]: the texts of one engine, and the loop that carries them from prompt to token.
//!
//! A session owns an [`Engine`] and a [`Scheduler`]. Requests go in ([`Session::submit`]), each
//! comes back as a stream of pieces ([`TextStream`]), and [`Session::step`] does what the scheduler
//! plans next: it edits the memory, swaps, encodes a source, or computes a step and chooses a token
//! from each row. It has no thread of its own: a [`Service`](crate::serve::Service) runs one on a
//! thread, a program with one text steps it itself. Invariant: the scheduler knows every request
//! that the session holds, and the other way round.
//!
//! ```
//! use std::sync::Arc;
//!
//! use cellar_engine::session::{ServiceConfig, ServiceError, Session, TextRequest};
//! use cellar_engine::{CompletionOptions, Engine};
//! use kv_backend::Backend;
//! use model_core::tokenizer::{EncodeOptions, Tokenizer};
//!
//! fn generate(
//!     engine: Engine<impl Backend>,
//!     tokenizer: &Arc<Tokenizer>,
//! ) -> Result<(), ServiceError> {
//!     let mut session = Session::new(engine, tokenizer, &ServiceConfig::default())?;
//!     let mut text = session.submit(TextRequest {
//!         prompt: tokenizer.encode("Once upon a time", EncodeOptions::PROMPT),
//!         options: CompletionOptions { n_predict: Some(40), ..CompletionOptions::default() },
//!         ..TextRequest::default()
//!     })?;
//!     while let Some(piece) = session.next_piece(&mut text)? {
//!         print!("{piece}");
//!     }
//!     Ok(())
//! }
//! ```

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

use cellar_prefix_store::HostStore;
use cellar_scheduler::{Event, Micros, Outcome, RequestId, Scheduler, SchedulerConfig, Work};
use cellar_trace::{TraceWriter, TracedMemory};
use kv_backend::{Backend, RunProgress};
use kv_core::memory::{Composite, Memory};
use model_core::tokenizer::Tokenizer;

use crate::decode::Engine;
use crate::draft_model::DraftModel;
use crate::error::EngineError;
use crate::pictures::Tower;
use crate::sampler;

mod blocks;
mod choices;
mod config;
mod draft_times;
mod drafts;
mod error;
mod frame;
mod inspect;
mod intake;
mod parked;
mod pictures;
mod pieces;
mod prefixes;
mod record;
mod store;
mod stream;
#[cfg(test)]
mod stream_tests;
mod swap;
mod swap_state;
mod swap_store;
mod sync;
mod text;
mod watch;
#[cfg(test)]
mod watch_tests;
mod work;

pub use cellar_scheduler::{RequestError, Retention};

pub use blocks::{Block, BlockEvent, BlockHash, BlockObserver};
pub use choices::{Choices, MAX_CHOICES};
pub use config::{DraftCostSource, ExcerptLen, ServiceConfig};
pub use error::ServiceError;
pub use frame::{
    CachedText, EventKind, Excerpt, ExpertFrame, Frame, RunningText, ServiceEvent, WaitingText,
};
pub use inspect::{MemoryLayout, ServiceStatus};
pub use intake::TextRequest;
pub use pieces::{PromptProgress, TokenPiece};
pub use prefixes::PrefixCounts;
pub use store::{FetchPolicy, PrefixTiers};
pub use stream::{FinishedText, TextStream, Usage};
pub use swap_store::SwapDisk;
pub use watch::{FRAME_TIME, MAX_EVENTS, Update, Watcher};

use blocks::BlockTable;
pub(crate) use config::micros;
use drafts::DraftKnowledge;
pub(crate) use intake::{Intake, Submission};
use intake::{LongContextLimits, QueueSize};
pub(crate) use pieces::text_of;
pub(crate) use prefixes::{LiveRequests, PresentPrefixes};
use record::{Recorder, event_of};
use store::{Eagerness, SessionStore};
use swap::SwappedTypes;
use swap_store::SwapStore;
use text::LiveText;
pub(crate) use watch::WatchHub;
pub(crate) use work::MAX_CANDIDATES;

/// The optional parts of a session.
#[derive(Debug, Default)]
pub struct ServiceExtras {
    /// What happens is written to it.
    pub trace: Option<TraceWriter>,
    /// Drafts for the requests that want
    /// [`Speculation::Draft`](cellar_scheduler::Speculation::Draft). Its engine should have a
    /// sequence for each request that runs; it computes between steps.
    pub draft_model: Option<DraftModel>,
    /// Computes the pictures of prompts, between steps; `None` where the model sees none.
    pub tower: Option<Tower>,
    /// Gets an event when blocks of tokens come and go.
    pub blocks: Option<BlockObserver>,
    /// Takes states of preempted requests that are beyond half of
    /// [`ServiceConfig::swap_bytes`].
    pub swap_disk: Option<SwapDisk>,
    /// The tier in whose bytes states of preempted requests are: cached prefixes go for them.
    /// `None` where [`ServiceConfig::swap_bytes`] are in addition to all tiers.
    pub swap_host: Option<HostStore>,
    /// Keeps what is cached beyond the memory and the life of the session.
    pub prefix_tiers: Option<PrefixTiers>,
}

/// The state of a session after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activity {
    /// It did something, and may have more to do.
    Busy,
    /// It waits for a request.
    Idle,
}

/// The texts of one engine. See the [module](self).
#[derive(Debug)]
pub struct Session<B: Backend, M: Memory + Clone = Composite> {
    engine: Engine<B, M>,
    scheduler: Scheduler,
    texts: BTreeMap<RequestId, LiveText>,
    /// Those that have ended and may go on.
    parked: BTreeMap<RequestId, LiveText>,
    /// What was saved of preempted requests.
    swapped: SwapStore,
    swapped_types: SwappedTypes,
    store: Option<SessionStore>,
    intake: Arc<Intake>,
    tower: Option<Tower>,
    recorder: Recorder,
    started: Instant,
    /// The costs and gains of drafts.
    drafts: DraftKnowledge,
}

impl<B: Backend, M: Memory + Clone> Session<B, M> {
    /// A session of an engine. What the engine remembered goes.
    ///
    /// # Errors
    /// [`ServiceError::Refused`] where a limit is 0, or the model takes whole sequences only;
    /// [`ServiceError::Engine`] where its rows cannot be swapped as
    /// [`ServiceConfig::swap_type`], or texts cannot go on as [`ServiceConfig::long_context`].
    pub fn new(
        engine: Engine<B, M>,
        tokenizer: &Arc<Tokenizer>,
        config: &ServiceConfig,
    ) -> Result<Self, ServiceError> {
        Self::with(engine, tokenizer, config, ServiceExtras::default())
    }

    /// As [`Session::new`], with a trace, a draft model, an observer of blocks and a disk, where
    /// there are such.
    ///
    /// # Errors
    /// As [`Session::new`]; [`ServiceError::TraceUnwritable`] where the first line cannot be
    /// written. When a later one cannot, a warning says so, and the session goes on.
    pub fn with(
        mut engine: Engine<B, M>,
        tokenizer: &Arc<Tokenizer>,
        config: &ServiceConfig,
        extras: ServiceExtras,
    ) -> Result<Self, ServiceError> {
        let ServiceExtras {
            mut trace,
            draft_model,
            tower,
            blocks,
            swap_disk,
            swap_host,
            prefix_tiers,
        } = extras;
        config.check(engine.settings()).map_err(EngineError::from)?;
        let swapped_types = SwappedTypes::new(config.swap_type, &engine)?;
        let long_context = LongContextLimits {
            default: config.long_context,
            refused: engine.check_can_move().err().map(Arc::new),
            n_first: engine.n_first(),
        };
        long_context.check(config.long_context)?;
        let _removed = engine.clear();
        let limits = SchedulerConfig {
            swap_disk_bytes: swap_disk.as_ref().map_or(0, |disk| disk.n_bytes),
            ..config.scheduler(engine.settings())
        };
        let scheduler = Scheduler::new(limits, engine.memory())?
            .with_row_bytes(engine.settings().row_bytes())
            .with_notes();
        let store = SessionStore::new(prefix_tiers, &engine);
        let scheduler = match store {
            Some(_) => scheduler.with_store(),
            None => scheduler,
        };
        if let Some(trace) = &mut trace {
            let (layers, config) = engine.settings().memory_config();
            let memory = TracedMemory {
                layers,
                config,
                row_bytes: &engine.settings().row_bytes(),
            };
            let begun = trace.begin(&memory, &limits);
            begun.map_err(|error| ServiceError::TraceUnwritable {
                reason: error.to_string(),
            })?;
        }
        let start = engine.model().source_encoder().map(|encoder| encoder.start);
        let intake = Intake {
            tokenizer: Arc::clone(tokenizer),
            limits: scheduler.prompt_limits(),
            draft_limit: scheduler.draft_limit(),
            draft_model,
            adapters: engine.model().adapters().cloned(),
            has_head: engine.has_head(),
            tenant_limits: config.tenant_limits,
            queue: Arc::new(QueueSize::new(limits)),
            next_id: AtomicU64::new(0),
            guests: Arc::default(),
            start,
            long_context,
            has_lost_device: AtomicBool::new(false),
            sees_nothing: match tower {
                Some(_) => None,
                None => Some(engine.model().architecture().to_owned()),
            },
        };
        let recorder = Recorder::new(Arc::default(), config.excerpts)
            .with_trace(trace)
            .with_blocks(blocks.map(BlockTable::new));
        let swapped = SwapStore::new(
            limits.swap_bytes,
            swap_host,
            swap_disk.map(|disk| disk.tier),
        );
        Ok(Self {
            engine,
            scheduler,
            texts: BTreeMap::new(),
            parked: BTreeMap::new(),
            swapped,
            swapped_types,
            store,
            intake: Arc::new(intake),
            tower,
            recorder,
            started: Instant::now(),
            drafts: DraftKnowledge::new(config.draft_costs),
        })
    }

    /// True if its model was loaded with a head that drafts.
    pub fn has_head(&self) -> bool {
        self.engine.has_head()
    }

    /// Takes a request.
    ///
    /// # Errors
    /// [`ServiceError::Refused`] with the numbers, where the prompt is empty, can never fit, or too
    /// much waits; [`ServiceError::Engine`] where an option is out of range.
    pub fn submit(&mut self, request: TextRequest) -> Result<TextStream, ServiceError> {
        let mut streams = self.submit_texts(request, NonZeroU32::MIN, Vec::new)?;
        streams.pop().ok_or(ServiceError::Stopped)
    }

    /// Takes a request for `n` texts of its prompt, which is computed once. Text number `i`,
    /// counted from 0, is what the request alone gives with `i` added to its seed. `more_steps`
    /// gives the own steps of each text but the first, as [`TextRequest::steps`] has those of the
    /// first.
    ///
    /// # Errors
    /// As [`Session::submit`].
    pub fn submit_texts(
        &mut self,
        request: TextRequest,
        n: NonZeroU32,
        more_steps: impl FnMut() -> Vec<Box<dyn sampler::Step>>,
    ) -> Result<Vec<TextStream>, ServiceError> {
        let (submitted, streams) = Arc::clone(&self.intake).take(request, n, more_steps)?;
        self.enter(submitted);
        Ok(streams)
    }

    /// Takes the texts of a request, which was checked.
    pub(crate) fn enter(&mut self, submitted: Submission) {
        self.texts.extend(submitted.texts);
        for request in submitted.requests {
            let now = self.now();
            self.recorder.submit(now, &request);
            let (id, waits) = (request.id, self.look_up(&request));
            self.handle(Event::Submit(request));
            if waits {
                self.handle(Event::Asked(id));
            }
        }
    }

    /// Does what the scheduler plans next.
    pub fn step(&mut self) -> Activity {
        self.cancel_unwanted();
        self.watch_swapped();
        self.watch_store();
        self.draft();
        self.group_positions();
        let has_seen = self.see();
        let plan = self.scheduler.next(self.now(), self.engine.memory());
        self.take_outcomes(plan.outcomes);
        self.record_notes();
        if !matches!(plan.work, Work::Edit(_) | Work::Decode { .. }) {
            self.drafts.times.interrupt();
        }
        match plan.work {
            Work::Idle if self.serve_store() || has_seen => {}
            Work::Idle => return Activity::Idle,
            Work::Fetch(request) => self.fetch(request),
            Work::Restore(prefix) => self.restore_stored(prefix),
            Work::Edit(edits) => self.edit(edits),
            Work::SwapOut { swap, limit } => self.swap_out(swap, limit),
            Work::SwapIn(swap) => self.swap_in(swap),
            Work::Encode { request, seq } => self.encode(request, seq),
            Work::Shift(shift) => self.shift(shift),
            Work::Decode { step, planned } => {
                self.decode(&step, planned);
                self.publish(Eagerness::Due);
            }
        }
        Activity::Busy
    }

    /// The next piece of a text of this session, which is stepped until there is one; `None` when
    /// the text has ended.
    ///
    /// # Errors
    /// [`ServiceError`], once, where the request failed.
    pub fn next_piece(&mut self, text: &mut TextStream) -> Result<Option<String>, ServiceError> {
        loop {
            if let Some(piece) = text.try_next_piece() {
                return piece;
            }
            if self.step() == Activity::Idle {
                // A text that has not ended always has a next step, unless it is another session's.
                return text.try_next_piece().unwrap_or(Err(ServiceError::Stopped));
            }
        }
    }

    /// The next tokens of a text of this session, which is stepped until there are some; `None`
    /// when the text has ended.
    ///
    /// # Errors
    /// [`ServiceError`], once, where the request failed.
    pub fn next_tokens(
        &mut self,
        text: &mut TextStream,
    ) -> Result<Option<Vec<TokenPiece>>, ServiceError> {
        loop {
            if let Some(pieces) = text.try_next_tokens() {
                return pieces;
            }
            if self.step() == Activity::Idle {
                return text.try_next_tokens().unwrap_or(Err(ServiceError::Stopped));
            }
        }
    }

    /// Reports to `progress` how far each step has come, for another thread that shows it.
    pub fn set_run_progress(&mut self, progress: Option<RunProgress>) {
        self.engine.set_run_progress(progress);
    }

    /// Takes everything out of the memory, as requests that end do, and gives the engine back.
    /// Texts that have not ended end as [`ServiceError::Stopped`].
    pub fn into_engine(mut self) -> Engine<B, M> {
        for id in std::mem::take(&mut self.texts).into_keys() {
            self.handle(Event::Cancel(id));
        }
        for id in std::mem::take(&mut self.parked).into_keys() {
            self.handle(Event::Release(id));
        }
        self.publish_all();
        self.handle(Event::ClearPrefixes);
        self.finish_edits();
        self.recorder.update_blocks(&self.scheduler);
        let now = self.now();
        self.recorder.stop(now);
        self.engine
    }

    pub(crate) fn intake(&self) -> &Arc<Intake> {
        &self.intake
    }

    pub(crate) fn hub(&self) -> &Arc<WatchHub> {
        self.recorder.hub()
    }

    /// How long it may wait for a request before watchers are shown the last state; `None` for
    /// ever.
    pub(crate) fn idle_time(&self) -> Option<Duration> {
        self.recorder.idle_time()
    }

    pub(crate) fn update_blocks(&mut self) {
        self.recorder.update_blocks(&self.scheduler);
    }

    pub(crate) fn publish_frame(&mut self) {
        let now = self.now();
        self.recorder.publish(now, &self.engine, &self.scheduler);
    }

    /// Something changed that no event of a request tells.
    fn notice_change(&mut self) {
        self.recorder.set_stale();
        self.record_notes();
    }

    fn record_notes(&mut self) {
        let now = self.now();
        for note in self.scheduler.take_notes() {
            if let Some(store) = &mut self.store {
                store.notice(&note);
            }
            self.recorder.record(now, EventKind::Cache(note));
        }
    }

    /// Ends all texts as if they were cancelled; those of requests with [`Retention::Park`] may go
    /// on.
    pub fn pause_all(&mut self) {
        let ids: Vec<RequestId> = self.texts.keys().copied().collect();
        ids.into_iter()
            .for_each(|id| self.handle(Event::Cancel(id)));
    }

    /// Does the edits that the scheduler wants, where nothing runs.
    fn finish_edits(&mut self) {
        loop {
            let plan = self.scheduler.next(self.now(), self.engine.memory());
            self.take_outcomes(plan.outcomes);
            let Work::Edit(edits) = plan.work else {
                return;
            };
            self.edit(edits);
        }
    }

    fn now(&self) -> Micros {
        micros(self.started.elapsed())
    }

    fn cancel_unwanted(&mut self) {
        let texts = self.texts.iter();
        let unwanted = texts.filter(|(_, live)| live.sender.is_cancelled());
        let unwanted: Vec<RequestId> = unwanted.map(|(&id, _)| id).collect();
        for id in unwanted {
            self.handle(Event::Cancel(id));
        }
        self.release_dropped();
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
                    self.forget_stored(request);
                    if let Some(live) = self.texts.get_mut(&request) {
                        live.admit(reuse);
                    }
                }
                Outcome::Preempted { request, n_tokens } => {
                    if let Some(live) = self.texts.get_mut(&request) {
                        live.preempt(n_tokens);
                    }
                }
                Outcome::Refused { request, why } => {
                    self.forget_stored(request);
                    if let Some(live) = self.texts.remove(&request) {
                        live.sender.end(Err(why.into()));
                    }
                }
                Outcome::Spilled { request } => self.swapped.spill(request),
                Outcome::SwapDropped { request, .. } => {
                    self.swapped.remove(request);
                    if let Some(live) = self.texts.get_mut(&request) {
                        live.forget_positions();
                    }
                }
                Outcome::Ended { request, end } => {
                    self.forget_stored(request);
                    self.swapped.remove(request);
                    if let Some(mut live) = self.texts.remove(&request) {
                        live.end(end);
                        self.park(request, live);
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
        if let Some(event) = event_of(outcome, self.texts.get(request)) {
            self.recorder.record(now, event);
        }
    }
}
