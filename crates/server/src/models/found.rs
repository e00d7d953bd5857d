//! Models that come and go: what a [`FindModels`] finds, looked for when a list of models is
//! wanted, or a model that is not loaded.
//!
//! Invariant: a request to a loaded model looks for nothing; many that look at the same time look
//! once. Knows no files.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::entry::ModelEntry;
use super::load::computed;
use super::{Models, Origin, Phase, State};
use crate::error::ApiError;

/// Finds the models that are there, any number of times.
pub trait FindModels: fmt::Debug + Send + Sync {
    /// All that are there now, none of them loaded. Names that other models of the server have are
    /// passed over. Runs on a thread of its own.
    ///
    /// # Errors
    /// Where it cannot look; the server keeps what it knows then.
    fn find(&self) -> Result<Vec<ModelEntry>, ApiError>;
}

/// How often was looked, and whose turn it is.
#[derive(Debug, Default)]
pub(super) struct Scans {
    n_begun: AtomicU64,
    turn: tokio::sync::Mutex<()>,
}

impl Models {
    /// Takes the models of a finder in, too, from now on. The first finder stays.
    ///
    /// # Errors
    /// Those of [`FindModels::find`].
    pub(crate) fn set_finder(&self, finder: Arc<dyn FindModels>) -> Result<(), ApiError> {
        let found = finder.find()?;
        if self.0.finder.set(finder).is_ok() {
            self.take_found(found);
        }
        Ok(())
    }

    /// The number of the model of this name, which may have come only now.
    ///
    /// # Errors
    /// [`ApiError::unknown_model`].
    pub(crate) async fn find_now(&self, name: &str) -> Result<usize, ApiError> {
        if let Ok(at) = self.find(name)
            && self.is_in_use_or_given(at)
        {
            return Ok(at);
        }
        self.refresh().await;
        self.find(name)
    }

    /// Looks which models have come and gone.
    pub(crate) async fn refresh(&self) {
        let Some(finder) = self.0.finder.get() else {
            return;
        };
        let scans = &self.0.scans;
        let n_begun = scans.n_begun.load(Ordering::Acquire);
        let _turn = scans.turn.lock().await;
        // One that began after this call has seen what is there.
        if scans.n_begun.load(Ordering::Acquire) > n_begun {
            return;
        }
        scans.n_begun.fetch_add(1, Ordering::AcqRel);
        let finder = Arc::clone(finder);
        match computed(move || finder.find()).await {
            Ok(Ok(found)) => self.take_found(found),
            Ok(Err(error)) | Err(error) => tracing::warn!(%error, "cannot look for models"),
        }
    }

    fn is_in_use_or_given(&self, at: usize) -> bool {
        let states = self.lock();
        states.get(at).is_some_and(|state| {
            state.origin == Origin::Given || matches!(state.phase, Phase::Loaded(_))
        })
    }

    fn take_found(&self, found: Vec<ModelEntry>) {
        let mut states = self.lock();
        for at in 0..states.len() {
            let Some(state) = states.get_mut(at) else {
                continue;
            };
            let is_found = found.iter().any(|entry| entry.id == state.known.id);
            if state.origin == Origin::Found && !is_found {
                tracing::info!(model = state.known.id, "gone");
                state.origin = Origin::Gone;
                if let Phase::Loaded(held) = &mut state.phase {
                    held.is_draining = true;
                    if held.n_uses == 0 {
                        self.start_unload(at, state);
                    }
                }
            }
        }
        for entry in found {
            let same = states.iter_mut().find(|state| state.known.id == entry.id);
            match same {
                None => {
                    tracing::info!(model = entry.id, "found");
                    states.push(State::new(entry, Origin::Found));
                }
                Some(state) if state.origin == Origin::Given => {}
                Some(state) => state.take_found(entry),
            }
        }
        drop(states);
        self.changed();
    }
}

impl State {
    /// It is there, as it is now: its file may be another one.
    fn take_found(&mut self, entry: ModelEntry) {
        let is_back = self.origin == Origin::Gone;
        let (before, now) = (&self.known.facts, &entry.facts);
        let is_changed = (before.modified, before.file_bytes) != (now.modified, now.file_bytes);
        self.origin = Origin::Found;
        if is_back || is_changed {
            self.error = entry.facts.error.clone();
            let State { known, .. } = Self::new(entry, Origin::Found);
            self.known = known;
        }
    }
}
