//! Preempted requests leave and come back: what the memory held of them becomes a saved state, and
//! again rows of the memory.
//!
//! Invariant: a state is given back to the bit, or not at all; where
//! [`ServiceConfig::swap_type`](super::ServiceConfig::swap_type) says so, rounded to that type.
//! Decides nothing: what goes and what comes back is the scheduler's; where the bytes are meanwhile
//! is the [store](super::swap_store)'s.

use cellar_scheduler::{Event, Swap, SwappedIn};
use kv_backend::Backend;
use kv_backend::state::{SavedState, StateError};
use kv_core::memory::{Memory, Refusal, RestoreInto, Seqs};
use kv_rows::KvType;

use super::Session;
use super::swap_state::HeldState;
use crate::decode::Engine;
use crate::error::EngineError;
use crate::state::SaveOptions;

/// The types in which preempted requests keep what they have; `None` as it is stored.
#[derive(Clone, Copy, Debug)]
pub(super) struct SwappedTypes {
    rows: Option<KvType>,
    states: Option<KvType>,
}

impl SwappedTypes {
    /// Those of [`ServiceConfig::swap_type`](super::ServiceConfig::swap_type).
    ///
    /// # Errors
    /// [`EngineError::State`] for the first layer whose rows or states are no whole blocks.
    pub(super) fn new<B: Backend, M: Memory + Clone>(
        rows: Option<KvType>,
        engine: &Engine<B, M>,
    ) -> Result<Self, EngineError> {
        let states = rows.and_then(|kv_type| engine.settings().swapped_state_type(kv_type));
        if let Some(kv_type) = rows {
            engine.check_save_type(kv_type)?;
        }
        if let Some(kv_type) = states {
            engine.check_save_state_type(kv_type)?;
        }
        Ok(Self { rows, states })
    }
}

impl<B: Backend, M: Memory + Clone> Session<B, M> {
    /// Saves a state to the host, where it has no more bytes than it may.
    pub(super) fn swap_out(&mut self, swap: Swap, limit: u64) {
        let saved = self.save_swapped(&swap, limit);
        self.edit(swap.at_the_end().into_iter().collect());
        let n_bytes = saved.unwrap_or_else(|error| {
            tracing::debug!(%error, "a state is not swapped");
            None
        });
        let request = swap.request;
        self.handle(Event::SwappedOut { request, n_bytes });
    }

    fn save_swapped(&mut self, swap: &Swap, limit: u64) -> Result<Option<u64>, EngineError> {
        if let Some(edit) = swap.before_saving() {
            self.engine.edit(edit)?;
        }
        let seq = swap.swapped_seq();
        let options = SaveOptions {
            seqs: Seqs::One(seq),
            tokens: &[],
            kv_type: self.swapped_types.rows,
            state_type: self.swapped_types.states,
        };
        let mut out = self.swapped.writer(limit);
        self.engine.complete_rows()?;
        self.engine.save_state_with_note(&options, "", &mut out)?;
        let saved = out.into_saved();
        Ok(Some(self.swapped.insert(swap.request, seq, saved)))
    }

    /// Takes a state back, where the memory has room for it.
    pub(super) fn swap_in(&mut self, swap: Swap) {
        let request = swap.request;
        let result = match self.swapped.fetch(request) {
            None => SwappedIn::Lost,
            Some(state) => match self.restore_swapped(&swap, &state) {
                Ok(()) => SwappedIn::Restored,
                Err(EngineError::State(StateError::Refused(
                    Refusal::NoRoom(_) | Refusal::NoStateRoom(_),
                ))) => SwappedIn::NoRoom,
                Err(error) => {
                    tracing::warn!(%error, "a saved state is lost, and computed again");
                    SwappedIn::Lost
                }
            },
        };
        if result != SwappedIn::NoRoom {
            self.swapped.remove(request);
        }
        if let (SwappedIn::Lost, Some(live)) = (result, self.texts.get_mut(&request)) {
            live.forget_positions();
        }
        self.edit(swap.at_the_end().into_iter().collect());
        self.handle(Event::SwappedIn { request, result });
    }

    fn restore_swapped(&mut self, swap: &Swap, state: &HeldState) -> Result<(), EngineError> {
        let saved = SavedState::parse(state.bytes.as_slice())?;
        let into = RestoreInto::One {
            from: state.seq,
            to: swap.swapped_seq(),
        };
        self.engine.restore_state(&saved, into)?;
        if let Some(edit) = swap.after_restoring() {
            self.engine.edit(edit)?;
        }
        Ok(())
    }

    /// Takes in what could not be pinned, and begins to read the state that comes back next.
    pub(super) fn watch_swapped(&mut self) {
        for request in self.swapped.take_failed() {
            self.handle(Event::SpillFailed(request));
        }
        if let Some(request) = self.scheduler.next_from_disk(self.now()) {
            self.swapped.read_ahead(request);
        }
    }
}
