//! [`Models`]: the models of a server, which are loaded when a request needs them and unloaded when
//! none has for a while, or another needs the memory.
//!
//! Invariant: a model that is used is never unloaded; what all hold together, models that are being
//! loaded or unloaded included, is within the budget; of requests that need the same model one
//! loads it, and all others wait for that. A model whose files were written to is loaded again.
//! Loads follow one another, on threads of their own. A model keeps its number, also when it is
//! gone. Knows no API.

mod budget;
mod entry;
mod found;
mod in_use;
mod load;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use crate::error::ApiError;
use crate::model::{Job, ServedModel, is_called, is_meant};

pub use budget::MemoryBudget;
pub(crate) use entry::n_ctx;
pub use entry::{
    Expiry, FinishLoad, KeepLoaded, LoadCounts, LoadModel, LoadState, ModelBytes, ModelEntry,
    ModelFacts, ModelStatus, PlannedModel,
};
pub use found::FindModels;
pub use in_use::ModelInUse;

/// The models of a server. Clones are the same.
#[derive(Clone, Debug)]
pub(crate) struct Models(Arc<ModelTable>);

#[derive(Debug)]
struct ModelTable {
    /// By the number of the model.
    states: Mutex<Vec<State>>,
    /// What finds models that come and go.
    finder: OnceLock<Arc<dyn FindModels>>,
    scans: found::Scans,
    /// Sent to after each change of a state.
    changed: watch::Sender<()>,
    /// Whose turn it is to load.
    turn: tokio::sync::Mutex<()>,
    budget: MemoryBudget,
    /// Whether a task unloads idle models.
    has_janitor: AtomicBool,
}

/// What is known of a model. It changes only where its file does.
#[derive(Debug)]
struct Known {
    id: String,
    aliases: Vec<String>,
    facts: ModelFacts,
    loader: Option<Arc<dyn LoadModel>>,
    keep: KeepLoaded,
}

/// Where a model comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    /// The caller named it: it is there as long as the server.
    Given,
    /// The finder found it, and finds it still.
    Found,
    /// The finder does not find it any more.
    Gone,
}

#[derive(Debug)]
struct State {
    known: Arc<Known>,
    origin: Origin,
    phase: Phase,
    /// Zero where it is unloaded; from the plan on, what it will take.
    bytes: ModelBytes,
    error: Option<String>,
    counts: LoadCounts,
}

#[derive(Debug)]
enum Phase {
    Unloaded,
    /// What requests wait for.
    Loading(Loading),
    Loaded(Held),
    Unloading,
}

/// The end of a load; `None` before.
type Loading = watch::Receiver<Option<Result<ModelInUse, ApiError>>>;

#[derive(Debug)]
struct Held {
    model: Arc<ServedModel>,
    keep: KeepLoaded,
    n_uses: usize,
    last_used: Instant,
    /// Whether it is to be unloaded once no request uses it; requests that come wait for that.
    is_draining: bool,
}

/// What a request has to do.
enum Next {
    Use(ModelInUse),
    AwaitLoad(Loading),
    AwaitChange(watch::Receiver<()>),
}

impl Models {
    pub(crate) fn new(entries: Vec<ModelEntry>, budget: MemoryBudget) -> Self {
        let states = entries
            .into_iter()
            .map(|entry| State::new(entry, Origin::Given));
        Self(Arc::new(ModelTable {
            states: Mutex::new(states.collect()),
            finder: OnceLock::new(),
            scans: found::Scans::default(),
            changed: watch::Sender::new(()),
            turn: tokio::sync::Mutex::default(),
            budget,
            has_janitor: AtomicBool::new(false),
        }))
    }

    /// The number of the model of this name.
    ///
    /// # Errors
    /// [`ApiError::unknown_model`].
    pub(crate) fn find(&self, name: &str) -> Result<usize, ApiError> {
        let states = self.lock();
        let position = |is_it: fn(&Known, &str) -> bool| {
            let mut states = states.iter();
            states.position(|state| state.is_there() && is_it(&state.known, name))
        };
        let called = position(|known, name| is_called(&known.id, &known.aliases, name));
        let found = called.or_else(|| position(|known, name| is_meant(&known.aliases, name)));
        found.ok_or_else(|| unknown(name, &states))
    }

    /// The number of the only model, where it is loaded.
    pub(crate) fn only_loaded(&self) -> Option<usize> {
        let states = self.lock();
        let mut there = states
            .iter()
            .enumerate()
            .filter(|(_, state)| state.is_there());
        let (at, state) = there.next()?;
        let is_only = there.next().is_none() && matches!(state.phase, Phase::Loaded(_));
        is_only.then_some(at)
    }

    /// The number of the model for requests without a name: the first loaded one that does what is
    /// wanted, else the first that does, else the first.
    ///
    /// # Errors
    /// [`ApiError::unknown_model`] where there is none at all.
    pub(crate) fn first_for(&self, job: Job) -> Result<usize, ApiError> {
        if let Some(at) = self.first_loaded(job) {
            return Ok(at);
        }
        let states = self.lock();
        let does = |state: &State| state.is_there() && state.known.facts.job == Some(job);
        let first = states.iter().position(does);
        let first = first.or_else(|| states.iter().position(State::is_there));
        first.ok_or_else(|| unknown("", &states))
    }

    /// The number of the first loaded model that does what is wanted.
    pub(crate) fn first_loaded(&self, job: Job) -> Option<usize> {
        let states = self.lock();
        states.iter().position(|state| match &state.phase {
            Phase::Loaded(held) => state.is_there() && held.model.does(job),
            _ => false,
        })
    }

    /// What a model does, where that is known without loading it, and its name.
    pub(crate) fn job(&self, at: usize) -> Option<(Job, String)> {
        let states = self.lock();
        let known = &states.get(at)?.known;
        Some((known.facts.job?, known.id.clone()))
    }

    /// The model, once it is loaded.
    ///
    /// # Errors
    /// [`ApiError`] where it cannot be loaded; a later request tries again.
    pub(crate) async fn acquire(&self, at: usize) -> Result<ModelInUse, ApiError> {
        self.start_janitor();
        loop {
            match self.next(at)? {
                Next::Use(model) => return Ok(model),
                Next::AwaitLoad(mut loading) => {
                    let loaded = loading.wait_for(Option::is_some).await;
                    // Without a sender, the runtime of the load has ended.
                    let loaded = loaded.map_err(|_| ApiError::shutting_down())?;
                    return loaded
                        .clone()
                        .unwrap_or_else(|| Err(ApiError::shutting_down()));
                }
                // The sender is ours.
                Next::AwaitChange(mut changed) => {
                    let _changed = changed.changed().await;
                }
            }
        }
    }

    fn next(&self, at: usize) -> Result<Next, ApiError> {
        // Before anything changes.
        let changed = self.0.changed.subscribe();
        let mut states = self.lock();
        let Some(state) = states.get_mut(at).filter(|state| state.is_there()) else {
            let name = states.get(at).map_or("", |state| &state.known.id);
            return Err(unknown(name, &states));
        };
        Ok(match &mut state.phase {
            Phase::Loaded(held)
                if !held.is_draining && state.known.loader.is_some() && held.model.is_stale() =>
            {
                tracing::warn!(
                    model = state.known.id,
                    "its files have changed: loading it again"
                );
                held.is_draining = true;
                if held.n_uses == 0 {
                    self.start_unload(at, state);
                }
                Next::AwaitChange(changed)
            }
            Phase::Loaded(held) if !held.is_draining => {
                held.n_uses += 1;
                held.last_used = Instant::now();
                Next::Use(ModelInUse::new(self, at, Arc::clone(&held.model)))
            }
            Phase::Loaded(_) | Phase::Unloading => Next::AwaitChange(changed),
            Phase::Loading(loading) => Next::AwaitLoad(loading.clone()),
            Phase::Unloaded => {
                let (done, loading) = watch::channel(None);
                state.phase = Phase::Loading(loading.clone());
                tokio::spawn(self.clone().load(at, done));
                Next::AwaitLoad(loading)
            }
        })
    }

    /// Unloads a model once no request uses it. Requests that come meanwhile load it again.
    ///
    /// # Errors
    /// [`ApiError`] 501 where it cannot be loaded again.
    pub(crate) async fn unload(&self, at: usize) -> Result<(), ApiError> {
        self.start_janitor();
        let counts = self.lock().get(at).map(|state| {
            let can_unload = state.known.loader.is_some();
            can_unload.then_some(state.counts.n_unloads)
        });
        let Some(before) = counts.flatten() else {
            return Err(ApiError::not_implemented(
                "a model cannot be unloaded: this server keeps it until it ends",
            ));
        };
        loop {
            let mut changed = self.0.changed.subscribe();
            let loading = {
                let mut states = self.lock();
                let Some(state) = states.get_mut(at) else {
                    return Ok(());
                };
                if state.counts.n_unloads > before {
                    return Ok(());
                }
                match &mut state.phase {
                    Phase::Unloaded => return Ok(()),
                    Phase::Unloading => None,
                    Phase::Loading(loading) => Some(loading.clone()),
                    Phase::Loaded(held) => {
                        held.is_draining = true;
                        if held.n_uses == 0 {
                            self.start_unload(at, state);
                        }
                        None
                    }
                }
            };
            match loading {
                Some(mut loading) => {
                    let _loaded = loading.wait_for(Option::is_some).await;
                }
                None => {
                    let _changed = changed.changed().await;
                }
            }
        }
    }

    fn set_keep(&self, at: usize, keep: KeepLoaded) {
        if let Some(state) = self.lock().get_mut(at)
            && state.known.loader.is_some()
            && let Phase::Loaded(held) = &mut state.phase
        {
            held.keep = keep;
        }
        self.changed();
    }

    fn release(&self, at: usize) {
        if let Some(state) = self.lock().get_mut(at)
            && let Phase::Loaded(held) = &mut state.phase
        {
            held.n_uses = held.n_uses.saturating_sub(1);
            held.last_used = Instant::now();
        }
        self.changed();
    }

    /// All models: in the order in which they were given, then those that were found, by name.
    pub(crate) fn list(&self) -> Vec<ModelStatus> {
        let states = self.lock();
        let of = |origin| states.iter().filter(move |state| state.origin == origin);
        let given = of(Origin::Given).map(status);
        let mut found: Vec<ModelStatus> = of(Origin::Found).map(status).collect();
        found.sort_by(|a, b| a.id.cmp(&b.id));
        given.chain(found).collect()
    }

    /// One of them.
    pub(crate) fn status(&self, at: usize) -> Option<ModelStatus> {
        let states = self.lock();
        states.get(at).map(status)
    }

    /// Ends with the next change: a model that comes or goes, a request that begins or ends.
    pub(crate) fn next_change(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut changed = self.0.changed.subscribe();
        async move {
            // Without a sender nothing changes any more.
            if changed.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<State>> {
        self.0.states.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn changed(&self) {
        self.0.changed.send_replace(());
    }

    /// Starts the task that unloads idle models, once.
    fn start_janitor(&self) {
        if self.0.has_janitor.swap(true, Ordering::Relaxed) {
            return;
        }
        let (shared, mut changed) = (Arc::downgrade(&self.0), self.0.changed.subscribe());
        tokio::spawn(async move {
            loop {
                let Some(shared) = shared.upgrade() else {
                    return;
                };
                let wait = Models(shared).unload_expired();
                let is_gone = match wait {
                    Some(wait) => {
                        let changed = tokio::time::timeout(wait, changed.changed()).await;
                        matches!(changed, Ok(Err(_)))
                    }
                    None => changed.changed().await.is_err(),
                };
                if is_gone {
                    return;
                }
            }
        });
    }

    /// Unloads the models that no request has used for as long as they are kept; gives how long the
    /// next stays.
    fn unload_expired(self) -> Option<Duration> {
        let mut next = None;
        let mut states = self.lock();
        for (at, state) in states.iter_mut().enumerate() {
            let Phase::Loaded(held) = &state.phase else {
                continue;
            };
            if held.n_uses > 0 {
                continue;
            }
            match held.expiry() {
                _ if held.is_draining => self.start_unload(at, state),
                Expiry::In(Duration::ZERO) => self.start_unload(at, state),
                Expiry::In(wait) => {
                    next = Some(next.map_or(wait, |other: Duration| other.min(wait)))
                }
                Expiry::Never => {}
            }
        }
        next
    }

    /// Ends when no model is being unloaded.
    pub(crate) async fn unloads_end(&self) {
        let mut changed = self.0.changed.subscribe();
        let is_unloading = |state: &State| matches!(state.phase, Phase::Unloading);
        while self.lock().iter().any(is_unloading) {
            // The sender is ours.
            let _changed = changed.changed().await;
        }
    }

    /// Takes the model away, and frees it on a thread: that waits for the step that is computed.
    fn start_unload(&self, at: usize, state: &mut State) {
        let phase = std::mem::replace(&mut state.phase, Phase::Unloading);
        let Phase::Loaded(held) = phase else {
            state.phase = phase;
            return;
        };
        let models = self.clone();
        let loader = state.known.loader.clone();
        let is_started = load::on_thread("cellar-unload", move || {
            if let Some(loader) = loader {
                load::keep(&*loader, &held.model);
            }
            load::free(held.model);
            if let Some(state) = models.lock().get_mut(at) {
                state.end_unload();
                tracing::info!(model = state.known.id, "unloaded");
            }
            models.changed();
        });
        if !is_started {
            // The model went with the thread.
            state.end_unload();
        }
        self.changed();
    }
}

impl State {
    fn new(entry: ModelEntry, origin: Origin) -> Self {
        let mut state = Self {
            origin,
            phase: Phase::Unloaded,
            bytes: ModelBytes::default(),
            error: entry.facts.error.clone(),
            counts: LoadCounts::default(),
            known: Arc::new(Known {
                id: entry.id,
                aliases: entry.aliases,
                facts: entry.facts,
                loader: entry.loader,
                keep: entry.keep,
            }),
        };
        if let Some((model, bytes)) = entry.loaded {
            state.phase = Phase::Loaded(Held::new(Arc::new(model), entry.keep, 0));
            state.bytes = bytes;
            state.counts.n_loads = 1;
        }
        state
    }

    fn is_there(&self) -> bool {
        self.origin != Origin::Gone
    }

    /// It is unloaded, and takes nothing.
    fn hold_nothing(&mut self) {
        self.phase = Phase::Unloaded;
        self.bytes = ModelBytes::default();
    }

    fn end_unload(&mut self) {
        self.hold_nothing();
        self.counts.n_unloads += 1;
    }
}

impl Held {
    fn new(model: Arc<ServedModel>, keep: KeepLoaded, n_uses: usize) -> Self {
        Self {
            model,
            keep,
            n_uses,
            last_used: Instant::now(),
            is_draining: false,
        }
    }

    /// When it is unloaded, if no request comes.
    fn expiry(&self) -> Expiry {
        match (self.keep, self.n_uses) {
            (KeepLoaded::Forever, _) => Expiry::Never,
            (KeepLoaded::For(time), 0) => Expiry::In(time.saturating_sub(self.last_used.elapsed())),
            (KeepLoaded::For(time), _) => Expiry::In(time),
        }
    }
}

fn unknown(name: &str, states: &[State]) -> ApiError {
    let there = states.iter().filter(|state| state.is_there());
    let known: Vec<String> = there.map(|state| state.known.id.clone()).collect();
    ApiError::unknown_model(name, &known)
}

fn status(state: &State) -> ModelStatus {
    let known = &state.known;
    let held = match &state.phase {
        Phase::Loaded(held) => Some(held),
        _ => None,
    };
    ModelStatus {
        id: known.id.clone(),
        aliases: known.aliases.clone(),
        facts: known.facts.clone(),
        state: match state.phase {
            Phase::Unloaded => LoadState::Unloaded,
            Phase::Loading(_) => LoadState::Loading,
            Phase::Loaded(_) => LoadState::Loaded,
            Phase::Unloading => LoadState::Unloading,
        },
        error: state.error.clone(),
        bytes: state.bytes,
        expiry: held.map_or(Expiry::Never, Held::expiry),
        n_uses: held.map_or(0, |held| held.n_uses),
        counts: state.counts,
        model: held.map(|held| Arc::clone(&held.model)),
    }
}
