//! [`App`]: the state that all handlers share, and the life of a server: open, draining, closing.
//!
//! Invariant: a request counts as active from the moment it is submitted until its last piece was
//! taken or it was dropped, and the server closes only when none is active, or no longer waits.

use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use cellar_engine::FinishReason;
use cellar_engine::serve::Usage;
use tokio::sync::{Semaphore, watch};

use crate::auth::{Keys, Tenant};
use crate::batches::Batches;
use crate::body_worker::{self, BodyWorker};
use crate::branches::{self, Branch};
use crate::conversations::Conversation;
use crate::cors::Origins;
use crate::error::ApiError;
use crate::files::Files;
use crate::hosts::HostCheck;
use crate::kept::KeptDir;
use crate::metrics::{Ended, Metrics};
use crate::model::{Job, ServedModel};
use crate::models::{FindModels, MemoryBudget, ModelEntry, ModelInUse, ModelStatus, Models};
use crate::places::{NoPlace, Place, PlaceLimits, Places};
use crate::report::{ObserveRequests, Recorder, TextEnd, TextReport};
use crate::shelves::{ShelfLimits, Shelves};
use crate::verify::Verifier;
use crate::view::MAX_VIEWERS;

/// The limits of a server.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Who may use it.
    pub keys: Keys,
    /// Whose requests a server on a loopback address takes.
    pub hosts: HostCheck,
    /// The web pages whose scripts may use it.
    pub origins: Origins,
    /// Bytes of a request's body. Eight times as many are held of large bodies at once.
    pub max_body: usize,
    /// Connections of one client; `None` for any number.
    pub max_client_connections: Option<NonZeroUsize>,
    /// How long a server that ends waits for texts.
    pub drain: Duration,
    /// How long a client may read nothing of what it is sent, before it is cut off.
    pub write_time: Duration,
    /// The longest silence of a stream, while its prompt is computed for example.
    pub longest_silence: Duration,
    /// How long a viewer keeps its place; the page comes again at once, and misses nothing.
    pub view_time: Duration,
    /// How much is kept for requests that go on from an earlier answer.
    pub conversations: ShelfLimits,
    /// Take reports of what requests did.
    pub observers: Vec<Arc<dyn ObserveRequests>>,
    /// The directory in which `/slots/{id}` keeps cached prefixes; `None` keeps none.
    pub slot_save_path: Option<PathBuf>,
    /// True if requests are refused for fields that would otherwise be skipped, and for names of
    /// models that there are not.
    pub strict: bool,
    /// The part of texts, from 0 to 1, that are computed again when nothing else is, and compared.
    pub verify: f64,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            keys: Keys::none(),
            hosts: HostCheck::default(),
            origins: Origins::default(),
            max_body: 6 << 20,
            max_client_connections: NonZeroUsize::new(512),
            drain: Duration::from_secs(30),
            write_time: Duration::from_secs(30),
            longest_silence: Duration::from_secs(15),
            view_time: Duration::from_secs(3600),
            conversations: ShelfLimits::default(),
            observers: Vec::new(),
            slot_save_path: None,
            strict: false,
            verify: 0.0,
        }
    }
}

/// The life of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// It takes requests.
    Open,
    /// It takes none, and finishes those it has.
    Draining,
    /// It waits for nothing.
    Closing,
}

/// What all handlers share.
#[derive(Clone, Debug)]
pub struct App(Arc<State>);

#[derive(Debug)]
struct State {
    models: Models,
    conversations: Shelves<Conversation>,
    branches: Shelves<Branch>,
    files: Files,
    batches: Batches,
    config: ServerConfig,
    metrics: Metrics,
    verifier: Verifier,
    phase: watch::Sender<Phase>,
    running: watch::Sender<BTreeMap<u64, Running>>,
    next_id: AtomicU64,
    /// The viewers.
    viewers: Places<Tenant>,
    /// The bytes that large bodies may still take.
    bodies: Arc<Semaphore>,
    /// Started with the first large body; `None` where that failed.
    body_worker: OnceLock<Option<BodyWorker>>,
}

/// Seconds after which a viewer without a place may try again.
const VIEW_RETRY_SECONDS: u64 = 10;

/// A request that has not ended, as `/slots` shows it.
#[derive(Clone, Debug)]
pub struct Running {
    /// The model.
    pub model: String,
    /// Whose it is.
    pub tenant: Tenant,
    /// Tokens of its prompt.
    pub n_prompt: usize,
    /// Whether text has come.
    pub has_text: bool,
    /// When it came.
    pub since: Instant,
}

/// Counts a request as active until it is dropped.
#[derive(Debug)]
pub(crate) struct Active {
    app: App,
    id: u64,
    ended: Ended,
    /// When a piece of the text came last.
    last_piece: Option<Instant>,
    /// What its text took so far.
    usage: Usage,
    pending: Option<PendingReport>,
}

/// The report of a text that is being computed.
#[derive(Debug)]
struct PendingReport {
    recorder: Recorder,
    report: TextReport,
}

impl App {
    /// The state of a server with these models.
    pub fn new(models: Vec<ServedModel>, config: ServerConfig) -> Self {
        let entries = models.into_iter().map(ModelEntry::fixed);
        Self::with_models(entries.collect(), MemoryBudget::default(), config)
    }

    /// The state of a server with these models, of which some are loaded when they are needed,
    /// within a budget of memory.
    pub fn with_models(
        models: Vec<ModelEntry>,
        budget: MemoryBudget,
        config: ServerConfig,
    ) -> Self {
        Self(Arc::new(State {
            models: Models::new(models, budget),
            conversations: Shelves::new(config.conversations),
            branches: Shelves::new(branches::LIMITS),
            files: Files::new(config.keys.n_keys()),
            batches: Batches::default(),
            bodies: Arc::new(Semaphore::new(body_worker::body_budget(config.max_body))),
            body_worker: OnceLock::new(),
            verifier: Verifier::new(config.verify),
            config,
            metrics: Metrics::default(),
            phase: watch::Sender::new(Phase::Open),
            running: watch::Sender::default(),
            next_id: AtomicU64::new(0),
            viewers: Places::default(),
        }))
    }

    /// Serves the models of a finder, too: those that are there now, and from now on those that
    /// come.
    ///
    /// # Errors
    /// Those of [`FindModels::find`].
    pub fn set_finder(&self, finder: Arc<dyn FindModels>) -> Result<(), ApiError> {
        self.0.models.set_finder(finder)
    }

    /// Keeps the files and batches of clients in a directory, and takes those that an earlier
    /// server left there. To be called before the first request.
    ///
    /// # Errors
    /// Where the directory cannot be made, read or written, or another server uses it.
    pub fn keep_files_in(&self, dir: &Path) -> io::Result<()> {
        let dir = Arc::new(KeptDir::open(dir)?);
        self.0.files.keep_in(&dir)?;
        self.0.batches.keep_in(&dir)
    }

    /// The models, in the order of `/v1/models`, as they were found last.
    pub fn models(&self) -> Vec<ModelStatus> {
        self.0.models.list()
    }

    /// What loads and unloads them.
    pub(crate) fn registry(&self) -> &Models {
        &self.0.models
    }

    /// The model of this name, once it is loaded; the only one, where it is loaded, has every name
    /// unless the server is strict. Where no name is given, the first loaded one that does what is
    /// wanted, else the first that does.
    ///
    /// # Errors
    /// [`ApiError::unknown_model`], 400 where it is known to do something else, 503 where the
    /// server ends, and why it cannot be loaded: [`ApiError::load_failed`],
    /// [`ApiError::no_memory`].
    pub async fn model_for(&self, name: Option<&str>, job: Job) -> Result<ModelInUse, ApiError> {
        let models = &self.0.models;
        let at = match name {
            Some(name) => self.find_model(name).await?,
            None => models.first_for(job)?,
        };
        match models.job(at) {
            Some((does, id)) if does != job => Err(does.is_not(job, &id)),
            _ => {
                let model = self.load(at).await?;
                if let Some(recorder) = Recorder::current() {
                    recorder.uses(model.id());
                }
                Ok(model)
            }
        }
    }

    /// The number of the model that a request means by this name: the only one, where it is loaded,
    /// has every name unless the server is strict.
    ///
    /// # Errors
    /// [`ApiError::unknown_model`].
    pub(crate) async fn find_model(&self, name: &str) -> Result<usize, ApiError> {
        let models = &self.0.models;
        match (models.find_now(name).await, self.0.config.strict) {
            // Clients of llama-server name any model where there is one.
            (Err(unknown), false) => models.only_loaded().ok_or(unknown),
            (found, _) => found,
        }
    }

    /// The model of this number, once it is loaded.
    pub(crate) async fn load(&self, at: usize) -> Result<ModelInUse, ApiError> {
        let mut phase = self.0.phase.subscribe();
        tokio::select! {
            biased;
            loaded = self.0.models.acquire(at) => loaded,
            _ending = phase.wait_for(|&phase| phase != Phase::Open) => Err(ApiError::shutting_down()),
        }
    }

    /// The limits.
    pub fn config(&self) -> &ServerConfig {
        &self.0.config
    }

    /// The bytes that large bodies may still take.
    pub(crate) fn bodies(&self) -> &Arc<Semaphore> {
        &self.0.bodies
    }

    /// Where requests with large bodies are handled; `None` where its thread cannot be started.
    pub(crate) fn body_worker(&self) -> Option<&BodyWorker> {
        let start = || match BodyWorker::start() {
            Ok(worker) => Some(worker),
            Err(error) => {
                tracing::warn!(%error, "no thread for large bodies: they hold up other requests");
                None
            }
        };
        self.0.body_worker.get_or_init(start).as_ref()
    }

    /// The answers that are kept.
    pub(crate) fn conversations(&self) -> &Shelves<Conversation> {
        &self.0.conversations
    }

    /// The texts that others can branch off from.
    pub(crate) fn branches(&self) -> &Shelves<Branch> {
        &self.0.branches
    }

    /// The files that are kept.
    pub(crate) fn files(&self) -> &Files {
        &self.0.files
    }

    /// The batches that are kept.
    pub(crate) fn batches(&self) -> &Batches {
        &self.0.batches
    }

    /// What is counted.
    pub fn metrics(&self) -> &Metrics {
        &self.0.metrics
    }

    /// What computes texts again.
    pub(crate) fn verifier(&self) -> &Verifier {
        &self.0.verifier
    }

    /// The requests that have not ended, by their number.
    pub fn running(&self) -> Vec<(u64, Running)> {
        let running = self.0.running.borrow();
        running.iter().map(|(id, one)| (*id, one.clone())).collect()
    }

    /// Whether requests are taken.
    pub fn phase(&self) -> Phase {
        *self.0.phase.borrow()
    }

    /// # Errors
    /// [`ApiError::shutting_down`] where none are taken any more.
    pub fn check_open(&self) -> Result<(), ApiError> {
        match self.phase() {
            Phase::Open => Ok(()),
            Phase::Draining | Phase::Closing => Err(ApiError::shutting_down()),
        }
    }

    /// Takes no requests any more, waits until none is active, at most as long as configured, then
    /// ends the rest.
    pub async fn drain(&self) {
        self.0.phase.send_replace(Phase::Draining);
        let mut running = self.0.running.subscribe();
        let idle = running.wait_for(BTreeMap::is_empty);
        // The sender is ours, so the wait ends by an idle server or by the time.
        let _idle = tokio::time::timeout(self.0.config.drain, idle).await;
        self.0.phase.send_replace(Phase::Closing);
    }

    /// Ends when no model is being unloaded: what is to outlive it is kept then.
    pub async fn unloads_end(&self) {
        self.0.models.unloads_end().await;
    }

    /// Ends when the server closes.
    pub(crate) fn closing(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut phase = self.0.phase.subscribe();
        async move {
            // Without a sender there is no server.
            let _closing = phase.wait_for(|&phase| phase == Phase::Closing).await;
        }
    }

    /// A place for one that watches the memory. Of several keys, none has all places.
    ///
    /// # Errors
    /// [`ApiError::busy`].
    pub(crate) fn view(&self, tenant: Tenant) -> Result<Place<Tenant>, ApiError> {
        let of_one = match self.0.config.keys.n_keys() {
            0 | 1 => MAX_VIEWERS,
            _ => MAX_VIEWERS / 2,
        };
        let limits = PlaceLimits {
            of_one,
            of_all: MAX_VIEWERS,
        };
        self.0.viewers.take(tenant, limits).map_err(|reason| {
            let message = match reason {
                NoPlace::OfAll => format!("{MAX_VIEWERS} watch already"),
                NoPlace::OfOne => format!("{of_one} watch already with this key"),
            };
            ApiError::busy(message, VIEW_RETRY_SECONDS)
        })
    }

    pub(crate) fn begin(&self, model: &ServedModel, tenant: Tenant, n_prompt: usize) -> Active {
        let id = self.0.next_id.fetch_add(1, Ordering::Relaxed);
        let running = Running {
            model: model.id().to_owned(),
            tenant,
            n_prompt,
            has_text: false,
            since: Instant::now(),
        };
        let pending = Recorder::current().map(|recorder| PendingReport {
            report: TextReport {
                model: running.model.clone(),
                n_prompt,
                began: recorder.elapsed(),
                took: Duration::ZERO,
                usage: Usage::default(),
                end: TextEnd::Cancelled,
            },
            recorder,
        });
        self.0.running.send_modify(|requests| {
            requests.insert(id, running);
        });
        Active {
            app: self.clone(),
            id,
            ended: Ended::Cancelled,
            last_piece: None,
            usage: Usage::default(),
            pending,
        }
    }
}

impl Active {
    /// The server.
    pub(crate) fn app(&self) -> &App {
        &self.app
    }

    /// A piece of the text has come.
    pub(crate) fn piece(&mut self) {
        let now = Instant::now();
        if let Some(before) = self.last_piece.replace(now) {
            self.app.metrics().gap(now - before);
        } else {
            let id = self.id;
            self.app.0.running.send_modify(|requests| {
                if let Some(one) = requests.get_mut(&id) {
                    one.has_text = true;
                }
            });
        }
    }

    /// So much was computed of the text.
    pub(crate) fn took(&mut self, usage: Usage) {
        self.usage = usage;
    }

    pub(crate) fn finished(&mut self, reason: &FinishReason, usage: Usage) {
        self.ended = Ended::Finished;
        self.usage = usage;
        if let Some(pending) = &mut self.pending {
            let reason = reason.clone();
            pending.report.end = TextEnd::Finished { reason };
        }
    }

    pub(crate) fn failed(&mut self) {
        self.ended = Ended::Failed;
        if let Some(pending) = &mut self.pending {
            pending.report.end = TextEnd::Failed;
        }
    }
}

impl Drop for Active {
    fn drop(&mut self) {
        let id = self.id;
        self.app.metrics().ended(self.ended, &self.usage);
        if let Some(mut pending) = self.pending.take() {
            pending.report.usage = self.usage;
            pending.report.took = pending.recorder.elapsed() - pending.report.began;
            pending.recorder.text(pending.report);
        }
        self.app.0.running.send_modify(|requests| {
            requests.remove(&id);
        });
    }
}
