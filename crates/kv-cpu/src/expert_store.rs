//! [`ExpertStore`]: the experts of mixtures within a budget of memory, read from the model's file
//! by threads of their own.
//!
//! A step tells what a router chose, takes the matrices that are there, computes with
//! them while others are read, and returns them. Which experts stay is [`ExpertCache`]'s to decide.
//!
//! Invariant: a matrix that was taken does not change until it is returned; a read that fails ends
//! one step, and nothing else. Knows neither graphs nor rows.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use expert_cache::{
    Acquisition, Choice, ExpertCache, ExpertId, ReadEnd, RouteStep, RouteTrace, Stack,
    smallest_budget,
};
use kv_backend::{BackendError, ExpertMeter};
use memmap2::MmapMut;

use crate::machine;
use crate::repack::{ExpertLayout, FileCache, PackedRows, RowReader};

/// Threads that read. Disks answer several requests faster than one after the other.
const N_READERS: usize = 4;

/// The most reads under way while reads ahead of need are begun.
const MAX_AHEAD: usize = 2 * N_READERS;

/// The time between two looks whether a run that waits was cancelled.
const LOOK: Duration = Duration::from_millis(50);

/// How experts are held in memory.
#[derive(Clone, Debug)]
pub(crate) struct ExpertOptions {
    /// The most bytes.
    pub(crate) budget: u64,
    /// Counts hits and reads.
    pub(crate) meter: Arc<ExpertMeter>,
}

/// An expert that is to be read.
struct Job {
    id: ExpertId,
    layout: Arc<ExpertLayout>,
    /// Memory of the right size, where another expert left it.
    memory: Option<MmapMut>,
}

struct State {
    cache: ExpertCache,
    /// By the numbers that the cache has for them.
    stacks: Vec<(Stack, Arc<ExpertLayout>)>,
    by_name: HashMap<String, u32>,
    loaded: HashMap<ExpertId, PackedRows>,
    /// Reads, those first that somebody waits for.
    queue: VecDeque<Job>,
    /// Reads that are queued or under way.
    n_reading: usize,
    /// What this step will use, in its order, and was absent when it began.
    ahead: VecDeque<ExpertId>,
    /// What the next layer will use, likely.
    likely: VecDeque<ExpertId>,
    failed: HashMap<ExpertId, BackendError>,
    /// The system's cache of files, for what is read.
    cache_of_files: FileCache,
    is_closed: bool,
}

struct SharedStore {
    state: Mutex<State>,
    /// For readers: there is something to read.
    queued: Condvar,
    /// For steps: a read has ended, or a matrix was returned.
    changed: Condvar,
    options: ExpertOptions,
}

/// The experts of a model.
pub(crate) struct ExpertStore {
    shared: Arc<SharedStore>,
    threads: Vec<JoinHandle<()>>,
}

/// An expert's number with its rows, taken from a store.
pub(crate) type TakenExpert = (usize, PackedRows);

impl ExpertStore {
    /// Starts the threads.
    ///
    /// # Errors
    /// [`BackendError::Device`] where one cannot be started.
    pub(crate) fn new(options: ExpertOptions) -> Result<Self, BackendError> {
        let state = State {
            cache: ExpertCache::new(options.budget),
            stacks: Vec::new(),
            by_name: HashMap::new(),
            loaded: HashMap::new(),
            queue: VecDeque::new(),
            n_reading: 0,
            ahead: VecDeque::new(),
            likely: VecDeque::new(),
            failed: HashMap::new(),
            cache_of_files: FileCache::Used,
            is_closed: false,
        };
        let mut store = Self {
            shared: Arc::new(SharedStore {
                state: Mutex::new(state),
                queued: Condvar::new(),
                changed: Condvar::new(),
                options,
            }),
            threads: Vec::new(),
        };
        for at in 0..N_READERS {
            let shared = Arc::clone(&store.shared);
            let thread = thread::Builder::new()
                .name(format!("cellar-experts-{at}"))
                .spawn(move || shared.read_all());
            store.threads.push(thread.map_err(|e| BackendError::Device {
                backend: "cpu",
                reason: format!("a thread that reads experts could not be started: {e}"),
            })?);
        }
        Ok(store)
    }

    /// The number of a weight's experts; `None` where it is not one of these.
    pub(crate) fn stack(&self, name: &str) -> Option<u32> {
        self.shared.lock().by_name.get(name).copied()
    }

    /// Takes the weights of layers, in the order in which a step uses them; those of one layer have
    /// one router. Weights that are there already are not taken again.
    ///
    /// # Errors
    /// [`BackendError::Input`] where one of them is in no file, or larger than the budget.
    pub(crate) fn add(&self, layers: Vec<Vec<ExpertLayout>>) -> Result<(), BackendError> {
        let budget = self.shared.options.budget;
        let mut state = self.shared.lock();
        let mut taken = Vec::new();
        let n_layers = state.stacks.iter().map(|(s, _)| s.layer + 1).max();
        for (layer, layouts) in (n_layers.unwrap_or(0)..).zip(layers) {
            for layout in layouts {
                if state.by_name.contains_key(layout.name()) {
                    continue;
                }
                if !layout.is_in_file() {
                    return Err(refused(format!(
                        "'{}' is computed when the model is loaded, so its experts cannot be read \
                         one by one: convert the model to GGUF, with its adapters merged",
                        layout.name()
                    )));
                }
                let stack = Stack {
                    layer,
                    n_experts: u32::try_from(layout.n_experts()).unwrap_or(u32::MAX),
                    n_bytes: layout.n_bytes() as u64,
                };
                taken.push((stack, Arc::new(layout)));
            }
        }
        let stacks: Vec<_> = taken.iter().map(|(stack, _)| *stack).collect();
        let least = smallest_budget(&stacks);
        if least > budget {
            let largest = taken.iter().find(|(stack, _)| stack.n_bytes == least);
            let name = largest.map_or("", |(_, layout)| layout.name());
            return Err(refused(format!(
                "{budget} bytes do not hold one expert of '{name}', which takes {least}: give at \
                 least that much"
            )));
        }
        let total = |s: &Stack| s.n_bytes * u64::from(s.n_experts);
        let total: u64 = stacks.iter().map(total).sum();
        let is_first = state.stacks.is_empty();
        self.shared
            .options
            .meter
            .add_model(if is_first { budget } else { 0 }, total);
        for (stack, layout) in taken {
            let number = state.cache.add(stack);
            state.by_name.insert(layout.name().to_owned(), number);
            state.stacks.push((stack, layout));
        }
        state.cache_of_files = cache_for(&state.stacks, budget);
        let stacks: Vec<_> = state.stacks.iter().map(|(stack, _)| *stack).collect();
        self.shared
            .options
            .meter
            .log(|| RouteTrace::stacks_line(&stacks, budget));
        Ok(())
    }

    /// Takes what the router of a stack's layer chose for a step, where it is the layer's first
    /// stack, and begins to read what is absent.
    pub(crate) fn routed(&self, stack: u32, choices: &[Choice], n_rows: u32) {
        let mut guard = self.shared.lock();
        let state = &mut *guard;
        let Some(layer) = state.layer_that_begins_with(stack) else {
            return;
        };
        let meter = &self.shared.options.meter;
        meter.log(|| RouteStep::line(layer, choices, n_rows));
        let routed = state.cache.routed(layer, choices, n_rows);
        meter.add_uses(routed.n_hits, routed.n_misses);
        state.failed.clear();
        state.ahead = state.cache.wanted(layer).into();
        state.likely.clear();
        // A prompt uses almost all: what is read for the next layer would go before it is used.
        let n_experts = state.stacks.get(stack as usize).map(|(s, _)| s.n_experts);
        if choices.len() * 2 <= n_experts.unwrap_or(0) as usize {
            let next = state.cache.layer_after(layer);
            state.likely.extend(state.cache.likely(next));
        }
        self.shared.read_ahead(state);
    }

    /// Takes those of a stack's experts that are in memory and removes them from `missing`; waits
    /// until there is one. What is absent is read meanwhile, as far as there is room.
    ///
    /// # Errors
    /// Where one could not be read, and of `check`, which is asked during waits.
    pub(crate) fn take(
        &self,
        stack: u32,
        missing: &mut Vec<usize>,
        check: &dyn Fn() -> Result<(), BackendError>,
    ) -> Result<Vec<TakenExpert>, BackendError> {
        let mut state = self.shared.lock();
        let mut waited = None;
        loop {
            let found = self.shared.take_ready(&mut state, stack, missing);
            if !matches!(&found, Ok(taken) if taken.is_empty()) || missing.is_empty() {
                if let Some(since) = waited {
                    let since: Instant = since;
                    self.shared.options.meter.add_wait(since.elapsed());
                }
                return found;
            }
            waited.get_or_insert_with(Instant::now);
            let woken = self.shared.changed.wait_timeout(state, LOOK);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
            check()?;
        }
    }

    /// Returns experts that were taken.
    pub(crate) fn release(&self, stack: u32, experts: &[usize]) {
        let mut guard = self.shared.lock();
        let state = &mut *guard;
        for &expert in experts {
            state.cache.release(id_of(stack, expert));
        }
        self.shared.read_ahead(state);
        drop(guard);
        self.shared.changed.notify_all();
    }
}

impl Drop for ExpertStore {
    fn drop(&mut self) {
        {
            let mut state = self.shared.lock();
            state.is_closed = true;
            state.queue.clear();
            let resident = state.cache.n_bytes();
            self.shared.options.meter.change_resident(resident, 0);
        }
        self.shared.queued.notify_all();
        for thread in self.threads.drain(..) {
            // A reader does not panic; if it did, there is nothing left to do for it.
            let _ended = thread.join();
        }
    }
}

impl std::fmt::Debug for ExpertStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.shared.lock();
        let (n_stacks, n_bytes) = (state.stacks.len(), state.cache.n_bytes());
        let budget = self.shared.options.budget;
        write!(
            f,
            "ExpertStore({n_stacks} stacks, {n_bytes} of {budget} bytes)"
        )
    }
}

impl State {
    fn layer_that_begins_with(&self, stack: u32) -> Option<u32> {
        let at = stack as usize;
        let layer = self.stacks.get(at)?.0.layer;
        let before = at.checked_sub(1).and_then(|at| self.stacks.get(at));
        before
            .is_none_or(|(before, _)| before.layer != layer)
            .then_some(layer)
    }

    /// What is read next though nobody waits for it, and what goes for it. In the order of the
    /// step: what is used later never takes the room of what is used before.
    fn next_ahead(&mut self) -> Option<(ExpertId, Vec<ExpertId>)> {
        while let Some(&id) = self.ahead.front() {
            if self.cache.needs(id) {
                let evicted = self.cache.foresee(id)?;
                self.ahead.pop_front();
                return Some((id, evicted));
            }
            // It was read, and used perhaps.
            self.ahead.pop_front();
        }
        while let Some(id) = self.likely.pop_front() {
            if let Some(evicted) = self.cache.foresee(id) {
                return Some((id, evicted));
            }
        }
        None
    }

    /// Queues a read into the place of others.
    fn begin(&mut self, id: ExpertId, evicted: &[ExpertId]) -> Option<Job> {
        let (stack, layout) = self.stacks.get(id.stack as usize)?;
        let mut memory = None;
        for gone in evicted {
            let rows = self.loaded.remove(gone);
            let left = rows.and_then(PackedRows::into_memory);
            let fits = |left: &MmapMut| left.len() as u64 == stack.n_bytes;
            memory = memory.or(left.filter(fits));
        }
        self.n_reading += 1;
        self.failed.remove(&id);
        Some(Job {
            id,
            layout: Arc::clone(layout),
            memory,
        })
    }
}

impl SharedStore {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What of `missing` is there. Begins to read what is not.
    fn take_ready(
        &self,
        state: &mut State,
        stack: u32,
        missing: &mut Vec<usize>,
    ) -> Result<Vec<TakenExpert>, BackendError> {
        let failed = missing.iter().map(|&expert| id_of(stack, expert));
        let failed = failed.filter(|id| state.failed.contains_key(id)).min();
        if let Some(error) = failed.and_then(|id| state.failed.remove(&id)) {
            return Err(error);
        }
        // Before others are read, so that those do not take their places.
        let mut taken = Vec::new();
        missing.retain(|&expert| {
            let id = id_of(stack, expert);
            let Some(rows) = state.loaded.get(&id) else {
                return true;
            };
            if state.cache.acquire(id) != Acquisition::Ready {
                return true;
            }
            taken.push((expert, rows.clone()));
            false
        });
        let before = state.cache.n_bytes();
        for &expert in missing.iter() {
            let id = id_of(stack, expert);
            match state.cache.acquire(id) {
                Acquisition::Read { evicted } => {
                    let job = state.begin(id, &evicted);
                    state.queue.extend(job);
                    self.queued.notify_one();
                }
                // It is at the end of the queue if nobody waited for it before.
                Acquisition::Reading => {
                    let at = state.queue.iter().position(|job| job.id == id);
                    if let Some(job) = at.and_then(|at| state.queue.remove(at)) {
                        state.queue.push_front(job);
                    }
                }
                Acquisition::NoRoom => break,
                Acquisition::Ready => state.cache.release(id),
            }
        }
        let now = state.cache.n_bytes();
        self.options.meter.change_resident(before, now);
        Ok(taken)
    }

    /// Begins reads that nobody waits for, while few are under way.
    fn read_ahead(&self, state: &mut State) {
        let before = state.cache.n_bytes();
        while state.n_reading < MAX_AHEAD
            && let Some((id, evicted)) = state.next_ahead()
        {
            let job = state.begin(id, &evicted);
            state.queue.extend(job);
            self.queued.notify_one();
        }
        let now = state.cache.n_bytes();
        self.options.meter.change_resident(before, now);
    }

    /// Reads what is queued until the store is closed.
    fn read_all(&self) {
        let mut reader = RowReader::default();
        let mut state = self.lock();
        loop {
            if state.is_closed {
                return;
            }
            let Some(job) = state.queue.pop_front() else {
                let woken = self.queued.wait(state);
                state = woken.unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            reader.cache = state.cache_of_files;
            drop(state);
            let (id, n_bytes) = (job.id, job.layout.stored_bytes());
            let read = read(job, &mut reader);
            state = self.lock();
            self.read_ended(&mut state, id, read);
            self.options.meter.add_read(n_bytes as u64);
            self.changed.notify_all();
        }
    }

    fn read_ended(&self, state: &mut State, id: ExpertId, read: Result<PackedRows, BackendError>) {
        state.n_reading -= 1;
        match read {
            Ok(rows) => {
                state.loaded.insert(id, rows);
                state.cache.read_ended(id, ReadEnd::Done);
            }
            Err(error) => {
                let before = state.cache.n_bytes();
                state.cache.read_ended(id, ReadEnd::Failed);
                let now = state.cache.n_bytes();
                self.options.meter.change_resident(before, now);
                tracing::warn!("an expert could not be read: {error}");
                state.failed.insert(id, error);
            }
        }
        self.read_ahead(state);
    }
}

/// The cache is used where memory holds the file and the budget: a second read is faster then.
fn cache_for(stacks: &[(Stack, Arc<ExpertLayout>)], budget: u64) -> FileCache {
    let of_file = |(_, layout): &(_, Arc<ExpertLayout>)| layout.stored_bytes() * layout.n_experts();
    let n_bytes = stacks.iter().map(of_file).fold(0, usize::saturating_add);
    let budget = usize::try_from(budget).unwrap_or(usize::MAX);
    if machine::has_room_for(n_bytes.saturating_add(budget)) {
        FileCache::Used
    } else {
        FileCache::Passed
    }
}

fn read(job: Job, reader: &mut RowReader) -> Result<PackedRows, BackendError> {
    let n_bytes = job.layout.n_bytes();
    let memory = match job.memory {
        Some(memory) => memory,
        None => MmapMut::map_anon(n_bytes).map_err(|_| BackendError::OutOfMemory {
            backend: "cpu",
            wanted: n_bytes,
            what: format!("an expert of '{}'", job.layout.name()),
        })?,
    };
    job.layout.read(job.id.expert as usize, memory, reader)
}

fn id_of(stack: u32, expert: usize) -> ExpertId {
    let expert = u32::try_from(expert).unwrap_or(u32::MAX);
    ExpertId { stack, expert }
}

fn refused(reason: String) -> BackendError {
    BackendError::Input {
        input: "memory for experts",
        reason,
    }
}
