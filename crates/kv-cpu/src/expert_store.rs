//! [`ExpertStore`]: the experts of a model within the [`ExpertMemory`] of its process.
//!
//! A step tells what a router chose, takes the matrices that are there, computes with
//! them while others are read, and returns them. Which experts stay is
//! [`ExpertCache`](expert_cache::ExpertCache)'s to decide.
//!
//! Invariant: a matrix that was taken does not change until it is returned; a read that fails ends
//! one step, and nothing else. Knows neither graphs nor rows.

mod memory;

use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant};

use expert_cache::{
    Acquisition, Choice, ExpertId, ExpertState, RouteStep, RouteTrace, Stack, smallest_budget,
};
use kv_backend::{BackendError, ExpertCell, ExpertMap, ExpertMeter};

pub use self::memory::ExpertMemory;
use self::memory::{SharedStore, State, StoredModel};
use crate::repack::{ExpertLayout, PackedRows};

/// The time between two looks whether a run that waits was cancelled.
const LOOK: Duration = Duration::from_millis(50);

/// The experts of a model.
pub(crate) struct ExpertStore {
    memory: ExpertMemory,
    shared: Arc<SharedStore>,
    /// Its number.
    mixture: u32,
    /// Its map locks the store, so it is set while the store is not locked.
    meter: Arc<ExpertMeter>,
}

/// An expert's number with its rows, taken from a store.
pub(crate) type TakenExpert = (usize, PackedRows);

impl ExpertStore {
    /// A model without weights yet, whose use of the memory the meter counts.
    ///
    /// # Errors
    /// [`BackendError::Device`] where a thread cannot be started.
    pub(crate) fn new(memory: ExpertMemory, meter: Arc<ExpertMeter>) -> Result<Self, BackendError> {
        let shared = memory.open()?;
        let mut state = shared.lock();
        let mixture = state.cache.add_mixture();
        let model = StoredModel::new(Arc::clone(&meter));
        state.models.insert(mixture, model);
        drop(state);
        Ok(Self {
            memory,
            shared,
            mixture,
            meter,
        })
    }

    /// The number of a weight's experts; `None` where it is not one of these.
    pub(crate) fn stack(&self, name: &str) -> Option<u32> {
        let state = self.shared.lock();
        state.models.get(&self.mixture)?.by_name.get(name).copied()
    }

    /// Takes the weights of layers, in the order in which a step uses them; those of one layer have
    /// one router. Weights that are there already are not taken again.
    ///
    /// # Errors
    /// [`BackendError::Input`] where one of them is in no file, or larger than the budget.
    pub(crate) fn add(&self, layers: Vec<Vec<ExpertLayout>>) -> Result<(), BackendError> {
        let budget = self.shared.budget;
        let mut guard = self.shared.lock();
        let State { cache, models, .. } = &mut *guard;
        let Some(model) = models.get_mut(&self.mixture) else {
            return Ok(());
        };
        let mut taken = Vec::new();
        let n_layers = model.stacks.iter().map(|(s, _)| s.layer + 1).max();
        for (layer, layouts) in (n_layers.unwrap_or(0)..).zip(layers) {
            for layout in layouts {
                if model.by_name.contains_key(layout.name()) {
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
        let is_first = model.stacks.is_empty();
        let meter = &model.meter;
        meter.add_model(if is_first { budget } else { 0 }, total);
        for (stack, layout) in taken {
            let number = cache.add(self.mixture, stack);
            model.by_name.insert(layout.name().to_owned(), number);
            model.stacks.push((stack, layout));
        }
        let stacks: Vec<_> = model.stacks.iter().map(|(stack, _)| *stack).collect();
        meter.log(|| RouteTrace::stacks_line(&stacks, budget));
        guard.choose_file_cache();
        drop(guard);
        if is_first {
            let shared = Arc::downgrade(&self.shared);
            self.meter.set_map(map_source(shared, self.mixture));
        }
        Ok(())
    }

    /// Takes what the router of a stack's layer chose for a step, where it is the layer's first
    /// stack, and begins to read what is absent.
    pub(crate) fn routed(&self, stack: u32, choices: &[Choice], n_rows: u32) {
        let mut guard = self.shared.lock();
        let State { cache, models, .. } = &mut *guard;
        let Some(model) = models.get_mut(&self.mixture) else {
            return;
        };
        let Some(layer) = model.layer_that_begins_with(stack) else {
            return;
        };
        let meter = &model.meter;
        meter.log(|| RouteStep::line(layer, choices, n_rows));
        let routed = cache.routed(self.mixture, layer, choices, n_rows);
        meter.add_uses(routed.n_hits, routed.n_misses);
        model.failed.clear();
        model.ahead = cache.wanted(self.mixture, layer).into();
        model.likely.clear();
        // A prompt uses almost all: what is read for the next layer would go before it is used.
        let n_experts = model.stacks.get(stack as usize).map(|(s, _)| s.n_experts);
        if choices.len() * 2 <= n_experts.unwrap_or(0) as usize {
            let next = cache.layer_after(self.mixture, layer);
            model.likely.extend(cache.likely(self.mixture, next));
        }
        self.shared.read_ahead(&mut guard);
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
        let found = loop {
            let found = self.take_ready(&mut state, stack, missing);
            if !matches!(&found, Ok(taken) if taken.is_empty()) || missing.is_empty() {
                break found;
            }
            if waited.is_none() {
                state.cache.wait_begins(self.mixture);
                waited = Some(Instant::now());
            }
            let woken = self.shared.changed.wait_timeout(state, LOOK);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
            if let Err(error) = check() {
                break Err(error);
            }
        };
        if let Some(since) = waited {
            state.cache.wait_ends(self.mixture);
            if let Some(model) = state.models.get(&self.mixture) {
                model.meter.add_wait(since.elapsed());
            }
            // Others may have what this one needs no more.
            self.shared.changed.notify_all();
        }
        found
    }

    /// Returns experts that were taken.
    pub(crate) fn release(&self, stack: u32, experts: &[usize]) {
        let mut guard = self.shared.lock();
        for &expert in experts {
            guard.cache.release(self.id_of(stack, expert));
        }
        self.shared.read_ahead(&mut guard);
        drop(guard);
        self.shared.changed.notify_all();
    }

    /// What of `missing` is there. Begins to read what is not.
    fn take_ready(
        &self,
        state: &mut State,
        stack: u32,
        missing: &mut Vec<usize>,
    ) -> Result<Vec<TakenExpert>, BackendError> {
        let State { cache, models, .. } = &mut *state;
        let Some(model) = models.get_mut(&self.mixture) else {
            return Ok(Vec::new());
        };
        let failed = missing.iter().map(|&expert| self.id_of(stack, expert));
        let failed = failed.filter(|id| model.failed.contains_key(id)).min();
        if let Some(error) = failed.and_then(|id| model.failed.remove(&id)) {
            return Err(error);
        }
        // Before others are read, so that those do not take their places.
        let mut taken = Vec::new();
        missing.retain(|&expert| {
            let id = self.id_of(stack, expert);
            let Some(rows) = model.loaded.get(&id) else {
                return true;
            };
            if cache.acquire(id) != Acquisition::Ready {
                return true;
            }
            taken.push((expert, rows.clone()));
            false
        });
        for &expert in missing.iter() {
            let id = self.id_of(stack, expert);
            match state.cache.acquire(id) {
                Acquisition::Read { evicted } => {
                    state.begin(id, &evicted);
                    self.shared.queued.notify_one();
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
        state.meter();
        Ok(taken)
    }

    fn id_of(&self, stack: u32, expert: usize) -> ExpertId {
        ExpertId {
            mixture: self.mixture,
            stack,
            expert: u32::try_from(expert).unwrap_or(u32::MAX),
        }
    }
}

impl Drop for ExpertStore {
    fn drop(&mut self) {
        let has_weights = |model: &StoredModel| !model.stacks.is_empty();
        let model = self
            .shared
            .lock()
            .models
            .get(&self.mixture)
            .map(has_weights);
        if model == Some(true) {
            self.meter.set_map(Box::new(|| None));
        }
        let mut guard = self.shared.lock();
        let state = &mut *guard;
        let n_queued = state.queue.len();
        state.queue.retain(|job| job.id.mixture != self.mixture);
        let n_dropped = n_queued - state.queue.len();
        state.n_reading -= n_dropped;
        if let Some(model) = state.models.get_mut(&self.mixture) {
            model.n_reading -= n_dropped;
            model.ahead.clear();
            model.likely.clear();
        }
        let is_read = |state: &State| {
            let model = state.models.get(&self.mixture);
            model.is_some_and(|model| model.n_reading > 0)
        };
        while is_read(&guard) {
            let woken = self.shared.changed.wait(guard);
            guard = woken.unwrap_or_else(PoisonError::into_inner);
        }
        guard.cache.remove_mixture(self.mixture);
        guard.meter();
        guard.models.remove(&self.mixture);
        // The others have its bytes.
        guard.choose_file_cache();
        self.shared.read_ahead(&mut guard);
        drop(guard);
        self.shared.changed.notify_all();
    }
}

impl std::fmt::Debug for ExpertStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ExpertStore({} of {:?})", self.mixture, self.memory)
    }
}

/// A source of the states of a model's experts, as long as there is a store.
fn map_source(
    shared: Weak<SharedStore>,
    mixture: u32,
) -> Box<dyn Fn() -> Option<ExpertMap> + Send + Sync> {
    let cell = |state: ExpertState| ExpertCell {
        resident: state.n_resident,
        matrices: state.n_matrices,
        uses: state.counts.n_uses,
        hits: state.counts.n_hits,
    };
    Box::new(move || {
        let states = shared.upgrade()?.lock().cache.states(mixture);
        let of_layer = |layer: Vec<ExpertState>| layer.into_iter().map(cell).collect();
        Some(states.into_iter().map(of_layer).collect())
    })
}

fn refused(reason: String) -> BackendError {
    BackendError::Input {
        input: "memory for experts",
        reason,
    }
}
