//! [`ExpertMemory`]: one budget of memory for the experts of all models of a process, and the
//! threads that read them from the models' files.
//!
//! Invariant: decisions are made under the lock, and no file is read under it. Knows no steps.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use expert_cache::{ExpertCache, ExpertId, ReadEnd, Stack};
use kv_backend::{BackendError, ExpertMeter};
use memmap2::MmapMut;

use crate::machine;
use crate::repack::{ExpertLayout, FileCache, PackedRows, RowReader};

/// Threads that read. Disks answer several requests faster than one after the other.
const N_READERS: usize = 4;

/// The most reads under way while reads ahead of need are begun.
const MAX_AHEAD: usize = 2 * N_READERS;

/// An expert that is to be read.
pub(super) struct Job {
    pub(super) id: ExpertId,
    layout: Arc<ExpertLayout>,
    /// Memory of the right size, where another expert left it.
    memory: Option<MmapMut>,
}

/// A model: its experts that are in memory, and those to be read.
pub(super) struct StoredModel {
    /// By the numbers that the cache has for them.
    pub(super) stacks: Vec<(Stack, Arc<ExpertLayout>)>,
    pub(super) by_name: HashMap<String, u32>,
    pub(super) loaded: HashMap<ExpertId, PackedRows>,
    /// Its reads that are queued or under way.
    pub(super) n_reading: usize,
    /// The experts that its step will use, in its order, and that were absent when it began.
    pub(super) ahead: VecDeque<ExpertId>,
    /// The experts that the next layer will likely use.
    pub(super) likely: VecDeque<ExpertId>,
    pub(super) failed: HashMap<ExpertId, BackendError>,
    pub(super) meter: Arc<ExpertMeter>,
    /// The bytes in memory that the meter knows of.
    metered: u64,
}

pub(super) struct State {
    pub(super) cache: ExpertCache,
    /// By the numbers that the cache has for them.
    pub(super) models: BTreeMap<u32, StoredModel>,
    /// Reads, those first that a step waits for.
    pub(super) queue: VecDeque<Job>,
    /// Reads of all models that are queued or under way.
    pub(super) n_reading: usize,
    /// The system's cache of files, for what is read.
    cache_of_files: FileCache,
    is_closed: bool,
}

pub(super) struct SharedStore {
    state: Mutex<State>,
    /// For readers: there is something to read.
    pub(super) queued: Condvar,
    /// For steps: a read has ended, or a matrix was returned.
    pub(super) changed: Condvar,
    pub(super) budget: u64,
}

/// The threads of a store, which end with it.
pub(super) struct Readers {
    shared: Arc<SharedStore>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// Memory for the experts of models, which all share: whose experts are needed last gives them up
/// for the others. Copies are the same memory.
#[derive(Clone)]
pub struct ExpertMemory {
    readers: Arc<Readers>,
}

impl ExpertMemory {
    /// So many bytes. Threads are started when a model with experts comes.
    pub fn new(budget: u64) -> Self {
        let state = State {
            cache: ExpertCache::new(budget),
            models: BTreeMap::new(),
            queue: VecDeque::new(),
            n_reading: 0,
            cache_of_files: FileCache::Used,
            is_closed: false,
        };
        let shared = Arc::new(SharedStore {
            state: Mutex::new(state),
            queued: Condvar::new(),
            changed: Condvar::new(),
            budget,
        });
        let threads = Mutex::default();
        Self {
            readers: Arc::new(Readers { shared, threads }),
        }
    }

    /// The shared store, with threads that read.
    ///
    /// # Errors
    /// [`BackendError::Device`] where a thread cannot be started.
    pub(super) fn open(&self) -> Result<Arc<SharedStore>, BackendError> {
        self.readers.start()?;
        Ok(Arc::clone(&self.readers.shared))
    }

    /// The most bytes.
    pub fn budget(&self) -> u64 {
        self.readers.shared.budget
    }

    /// Bytes that experts of all models take, or will as soon as their reads end.
    pub fn n_bytes(&self) -> u64 {
        self.readers.shared.lock().cache.n_bytes()
    }
}

impl Readers {
    fn start(&self) -> Result<(), BackendError> {
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        for at in threads.len()..N_READERS {
            let shared = Arc::clone(&self.shared);
            let thread = thread::Builder::new()
                .name(format!("cellar-experts-{at}"))
                .spawn(move || shared.read_all());
            threads.push(thread.map_err(|e| BackendError::Device {
                backend: "cpu",
                reason: format!("a thread that reads experts could not be started: {e}"),
            })?);
        }
        Ok(())
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        self.shared.lock().is_closed = true;
        self.shared.queued.notify_all();
        let threads = self.threads.get_mut();
        for thread in threads.unwrap_or_else(PoisonError::into_inner).drain(..) {
            // A reader does not panic; if it did, there is nothing left to do for it.
            let _ended = thread.join();
        }
    }
}

impl std::fmt::Debug for ExpertMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (n_bytes, budget) = (self.n_bytes(), self.budget());
        write!(f, "ExpertMemory({n_bytes} of {budget} bytes)")
    }
}

impl StoredModel {
    /// Without weights yet.
    pub(super) fn new(meter: Arc<ExpertMeter>) -> Self {
        Self {
            stacks: Vec::new(),
            by_name: HashMap::new(),
            loaded: HashMap::new(),
            n_reading: 0,
            ahead: VecDeque::new(),
            likely: VecDeque::new(),
            failed: HashMap::new(),
            meter,
            metered: 0,
        }
    }

    pub(super) fn layer_that_begins_with(&self, stack: u32) -> Option<u32> {
        let at = stack as usize;
        let layer = self.stacks.get(at)?.0.layer;
        let before = at.checked_sub(1).and_then(|at| self.stacks.get(at));
        before
            .is_none_or(|(before, _)| before.layer != layer)
            .then_some(layer)
    }

    /// The next read that no step waits for, and the experts that go for it. In the order of the
    /// step: one that is used later never takes the room of one that is used before.
    fn next_ahead(&mut self, cache: &mut ExpertCache) -> Option<(ExpertId, Vec<ExpertId>)> {
        while let Some(&id) = self.ahead.front() {
            if cache.needs(id) {
                let evicted = cache.foresee(id)?;
                self.ahead.pop_front();
                return Some((id, evicted));
            }
            // It was read, and used perhaps.
            self.ahead.pop_front();
        }
        while let Some(id) = self.likely.pop_front() {
            if let Some(evicted) = cache.foresee(id) {
                return Some((id, evicted));
            }
        }
        None
    }
}

impl State {
    /// The system's cache is used where memory holds the files and the budget: a second read is
    /// faster then.
    pub(super) fn choose_file_cache(&mut self) {
        let layouts = self.models.values().flat_map(|model| &model.stacks);
        let of_file = layouts.map(|(_, layout)| layout.stored_bytes() * layout.n_experts());
        let n_bytes = of_file.fold(0, usize::saturating_add);
        let budget = usize::try_from(self.cache.budget()).unwrap_or(usize::MAX);
        self.cache_of_files = if machine::has_room_for(n_bytes.saturating_add(budget)) {
            FileCache::Used
        } else {
            FileCache::Passed
        };
    }

    /// Queues a read into the place of others.
    pub(super) fn begin(&mut self, id: ExpertId, evicted: &[ExpertId]) {
        let of_stack = self.models.get(&id.mixture);
        let of_stack = of_stack.and_then(|model| model.stacks.get(id.stack as usize));
        let Some((n_bytes, layout)) = of_stack.map(|(s, layout)| (s.n_bytes, Arc::clone(layout)))
        else {
            return;
        };
        let mut memory = None;
        for gone in evicted {
            let model = self.models.get_mut(&gone.mixture);
            let rows = model.and_then(|model| model.loaded.remove(gone));
            let left = rows.and_then(PackedRows::into_memory);
            let fits = |left: &MmapMut| left.len() as u64 == n_bytes;
            memory = memory.or(left.filter(fits));
        }
        self.n_reading += 1;
        if let Some(model) = self.models.get_mut(&id.mixture) {
            model.n_reading += 1;
            model.failed.remove(&id);
        }
        self.queue.push_back(Job { id, layout, memory });
    }

    /// Tells meters what their models take: first those that take less than before, so that all
    /// together never seem to take more than there is.
    pub(super) fn meter(&mut self) {
        for is_less in [true, false] {
            for (number, model) in &mut self.models {
                let now = self.cache.bytes_of_mixture(*number);
                if (now < model.metered) == is_less {
                    model.meter.change_resident(model.metered, now);
                    model.metered = now;
                }
            }
        }
    }
}

impl SharedStore {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins reads that no step waits for, while few are under way.
    pub(super) fn read_ahead(&self, state: &mut State) {
        let numbers: Vec<u32> = state.models.keys().copied().collect();
        for number in numbers {
            while state.n_reading < MAX_AHEAD
                && let Some(model) = state.models.get_mut(&number)
                && let Some((id, evicted)) = model.next_ahead(&mut state.cache)
            {
                state.begin(id, &evicted);
                self.queued.notify_one();
            }
        }
        state.meter();
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
            if let Some(model) = state.models.get(&id.mixture) {
                model.meter.add_read(n_bytes as u64);
            }
            self.read_ended(&mut state, id, read);
            self.changed.notify_all();
        }
    }

    fn read_ended(&self, state: &mut State, id: ExpertId, read: Result<PackedRows, BackendError>) {
        state.n_reading -= 1;
        if let Some(model) = state.models.get_mut(&id.mixture) {
            model.n_reading -= 1;
            match read {
                Ok(rows) => {
                    model.loaded.insert(id, rows);
                    state.cache.read_ended(id, ReadEnd::Done);
                }
                Err(error) => {
                    state.cache.read_ended(id, ReadEnd::Failed);
                    tracing::warn!("an expert could not be read: {error}");
                    model.failed.insert(id, error);
                }
            }
        }
        self.read_ahead(state);
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
