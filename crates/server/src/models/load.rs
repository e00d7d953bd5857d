//! Loading a model: plan, room, load; and freeing one.
//!
//! Invariant: the bytes of a plan are counted before anything of it is allocated, and a load that
//! fails leaves the model as it was before, unloaded. A model that cannot fit makes no other go.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_core::BinaryUnits;
use tokio::sync::{oneshot, watch};

use super::budget::{MemoryBudget, Short, Shortage};
use super::entry::{KeepLoaded, LoadModel, ModelBytes};
use super::{Held, ModelInUse, Models, Phase, State};
use crate::error::{ApiError, Holder};
use crate::model::ServedModel;

/// How long a handler may look at a model that is unloaded.
const LOOK_TIME: Duration = Duration::from_secs(1);

/// Where the room for a model comes from.
enum BodyPermit {
    /// It is there, and counted.
    Taken,
    /// From a model that is being unloaded.
    Await(watch::Receiver<()>),
}

impl Models {
    /// Loads a model, and gives the outcome to all who wait.
    pub(super) async fn load(
        self,
        at: usize,
        done: watch::Sender<Option<Result<ModelInUse, ApiError>>>,
    ) {
        let started = Instant::now();
        let loaded = self.try_load(at).await;
        let outcome = {
            let mut states = self.lock();
            let Some(state) = states.get_mut(at) else {
                return;
            };
            let known = Arc::clone(&state.known);
            match loaded {
                Ok(model) => {
                    let model = Arc::new(model);
                    let mut held = Held::new(Arc::clone(&model), known.keep, 1);
                    // It went while it was loaded: the requests that wait are its last.
                    held.is_draining = !state.is_there();
                    state.phase = Phase::Loaded(held);
                    state.error = None;
                    state.counts.n_loads += 1;
                    let seconds = started.elapsed().as_secs_f64();
                    tracing::info!(
                        model = known.id,
                        bytes = state.bytes.total(),
                        seconds,
                        "loaded"
                    );
                    Ok(ModelInUse::new(&self, at, model))
                }
                Err(error) => {
                    state.hold_nothing();
                    state.error = Some(error.message.clone());
                    state.counts.n_failures += 1;
                    tracing::warn!(model = known.id, %error, "not loaded");
                    Err(error)
                }
            }
        };
        self.changed();
        done.send_replace(Some(outcome));
    }

    async fn try_load(&self, at: usize) -> Result<ServedModel, ApiError> {
        let _turn = self.0.turn.lock().await;
        let loader = self
            .lock()
            .get(at)
            .and_then(|state| state.known.loader.clone());
        let loader = loader.ok_or_else(|| ApiError::load_failed("it cannot be loaded again"))?;
        let planned = computed(move || loader.plan()).await??;
        loop {
            match self.make_room(at, planned.bytes)? {
                BodyPermit::Taken => break,
                BodyPermit::Await(mut changed) => {
                    let _changed = changed.changed().await;
                }
            }
        }
        computed(planned.load).await?
    }

    /// Counts the bytes of a model, or has one unloaded that is in the way.
    ///
    /// # Errors
    /// [`ApiError`] 507 with the numbers, where models that are used are in the way, or nothing is.
    fn make_room(&self, at: usize, needed: ModelBytes) -> Result<BodyPermit, ApiError> {
        let budget = &self.0.budget;
        let mut states = self.lock();
        let Some(short) = budget.shortage(needed, held(&states, |_| true)) else {
            if let Some(state) = states.get_mut(at) {
                state.bytes = needed;
            }
            return Ok(BodyPermit::Taken);
        };
        let changed = self.0.changed.subscribe();
        if states
            .iter()
            .any(|state| matches!(state.phase, Phase::Unloading))
        {
            return Ok(BodyPermit::Await(changed));
        }
        let can_go = |state: &State| {
            state.known.loader.is_some()
                && matches!(&state.phase, Phase::Loaded(held) if held.n_uses == 0)
        };
        let staying = held(&states, |at| {
            states.get(at).is_some_and(|state| !can_go(state))
        });
        let never_fits = MemoryBudget::without_machine(budget).shortage(needed, staying);
        let oldest = states.iter().enumerate().filter(|(_, state)| {
            never_fits.is_none() && can_go(state) && short.of.of(state.bytes) > 0
        });
        let oldest = oldest
            .min_by_key(|(_, state)| age_key(state))
            .map(|(at, _)| at);
        match oldest.and_then(|at| Some((at, states.get_mut(at)?))) {
            Some((at, state)) => {
                self.start_unload(at, state);
                Ok(BodyPermit::Await(changed))
            }
            None => Err(no_room(at, never_fits.unwrap_or(short), &states)),
        }
    }
}

/// Why a model does not fit, with all that hold memory.
fn no_room(at: usize, short: Shortage, states: &[State]) -> ApiError {
    let holders = states.iter().filter_map(|state| {
        let n_bytes = short.of.of(state.bytes);
        let n_requests = match &state.phase {
            Phase::Loaded(held) => held.n_uses,
            _ => 0,
        };
        (n_bytes > 0).then(|| Holder {
            model: state.known.id.clone(),
            n_bytes,
            n_requests,
        })
    });
    let holders: Vec<Holder> = holders.collect();
    let id = states.get(at).map_or("", |state| &state.known.id);
    let on = match short.of {
        Short::Host => "",
        Short::Device => " of the GPU",
    };
    let held_by = holders.iter().map(|holder| {
        let requests = match holder.n_requests {
            0 => String::new(),
            1 => " (1 request)".to_owned(),
            n => format!(" ({n} requests)"),
        };
        format!(
            "'{}' {}{requests}",
            holder.model,
            BinaryUnits(holder.n_bytes)
        )
    });
    let held_by = held_by.collect::<Vec<_>>().join(", ");
    let held_by = if held_by.is_empty() {
        String::new()
    } else {
        format!("; loaded: {held_by}")
    };
    let message = format!(
        "the model '{id}' takes {}, and of the {} that models may take{on}, {} are left{held_by}: \
         try again when these are idle, or start the server with a larger --memory or a smaller \
         --ctx",
        BinaryUnits(short.needed),
        BinaryUnits(short.budget),
        BinaryUnits(short.available),
    );
    ApiError::no_memory(message).with_shortage(short.needed, short.available, &holders)
}

/// The order in which idle models go: those that are kept for a time first, then the least recently
/// used.
fn age_key(state: &State) -> (bool, Option<Instant>) {
    match &state.phase {
        Phase::Loaded(held) => (held.keep == KeepLoaded::Forever, Some(held.last_used)),
        _ => (true, None),
    }
}

fn held(states: &[State], counts: impl Fn(usize) -> bool) -> ModelBytes {
    let states = states.iter().enumerate().filter(|(at, _)| counts(*at));
    let bytes = states.map(|(_, state)| state.bytes);
    bytes.fold(ModelBytes::default(), ModelBytes::plus)
}

/// Runs something long on a thread of its own: threads of the runtime serve requests meanwhile.
/// Whether there is such a thread; without, it is not run.
#[must_use]
pub(super) fn on_thread(name: &str, run: impl FnOnce() + Send + 'static) -> bool {
    let thread = std::thread::Builder::new().name(name.to_owned());
    match thread.spawn(run) {
        Ok(_detached) => true,
        Err(error) => {
            tracing::error!(%error, "cannot start a thread");
            false
        }
    }
}

/// What `run` returns, from a thread of its own; a panic of it is an error of its model alone.
pub(super) async fn computed<T: Send + 'static>(
    run: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ApiError> {
    let (send, result) = oneshot::channel();
    let _is_started = on_thread("cellar-load", move || {
        // What it changed is dropped with it: nothing half done is seen again.
        let outcome = catch_unwind(AssertUnwindSafe(run));
        let outcome = outcome.map_err(|panic| {
            let reason = reason_of(&*panic);
            ApiError::load_failed(format!("loading it panicked, a bug of Cellar: {reason}"))
        });
        // Who waits may have gone.
        let _gone = send.send(outcome);
    });
    let not_run = |_| ApiError::load_failed("the thread that loads it could not start");
    result.await.map_err(not_run)?
}

fn reason_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("no reason given")
}

/// Keeps what should outlive a model; a panic of it is a line in the log, and the model still goes.
pub(super) fn keep(loader: &dyn LoadModel, model: &ServedModel) {
    let kept = catch_unwind(AssertUnwindSafe(|| loader.before_unload(model)));
    if let Err(panic) = kept {
        let (model, reason) = (model.id(), reason_of(&*panic));
        tracing::error!(
            model,
            reason,
            "a bug of Cellar: nothing of the model is kept"
        );
    }
}

/// Drops a model once no handler looks at it.
pub(super) fn free(model: Arc<ServedModel>) {
    let until = Instant::now() + LOOK_TIME;
    let mut model = model;
    loop {
        match Arc::try_unwrap(model) {
            Ok(last) => return drop(last),
            Err(shared) if Instant::now() < until => {
                model = shared;
                std::thread::sleep(Duration::from_millis(1));
            }
            // Who holds it frees it.
            Err(shared) => return drop(shared),
        }
    }
}
