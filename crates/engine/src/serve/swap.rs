//! States of preempted requests in the memory of the host, as saved states.
//!
//! Invariant: a state is given back to the bit, or not at all; one is freed when it was restored, or its
//! request has ended. Decides nothing: what goes and what comes back is the scheduler's.

use std::io::{self, Write};

use kv_core::SeqId;
use kv_core::backend::Backend;
use kv_core::memory::{Refusal, RestoreInto, Seqs};
use kv_core::state::{SavedState, StateError};
use scheduler::{Event, Swap, SwappedIn};

use super::worker::Worker;
use crate::error::EngineError;
use crate::state::SaveOptions;

/// The state of a request.
#[derive(Debug)]
pub(super) struct SwappedState {
    /// The sequence that it was saved of.
    seq: SeqId,
    bytes: Vec<u8>,
}

/// Takes so many bytes and no more.
struct Limited {
    bytes: Vec<u8>,
    limit: u64,
}

impl Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if (self.bytes.len() + bytes.len()) as u64 > self.limit {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let room = self.bytes.try_reserve(bytes.len());
        room.map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<B: Backend> Worker<B> {
    /// Saves a state to the host, where it has no more bytes than it may.
    pub(super) fn swap_out(&mut self, swap: Swap, limit: u64) {
        let request = swap.request;
        let saved = self.save_swapped(&swap, limit);
        self.edit(swap.at_the_end().into_iter().collect());
        let n_bytes = match saved {
            Ok(state) => {
                let n_bytes = state.bytes.len() as u64;
                self.swapped.insert(request, state);
                Some(n_bytes)
            }
            Err(error) => {
                tracing::debug!(%error, "a state is not swapped");
                None
            }
        };
        self.handle(Event::SwappedOut { request, n_bytes });
    }

    fn save_swapped(&mut self, swap: &Swap, limit: u64) -> Result<SwappedState, EngineError> {
        if let Some(edit) = swap.before_saving() {
            self.engine.edit(edit)?;
        }
        let seq = swap.swapped_seq();
        let options = SaveOptions {
            seqs: Seqs::One(seq),
            tokens: &[],
            kv_type: None,
        };
        let bytes = Vec::new();
        let mut out = Limited { bytes, limit };
        self.engine.save_state(&options, &mut out)?;
        let bytes = out.bytes;
        Ok(SwappedState { seq, bytes })
    }

    /// Takes a state back, where the memory has room for it.
    pub(super) fn swap_in(&mut self, swap: Swap) {
        let request = swap.request;
        let result = match self.swapped.remove(&request) {
            None => SwappedIn::Lost,
            Some(state) => match self.restore_swapped(&swap, &state) {
                Ok(()) => SwappedIn::Restored,
                Err(EngineError::State(StateError::Refused(
                    Refusal::NoRoom(_) | Refusal::NoStateRoom(_),
                ))) => {
                    self.swapped.insert(request, state);
                    SwappedIn::NoRoom
                }
                Err(error) => {
                    tracing::warn!(%error, "a swapped state is lost, and computed again");
                    SwappedIn::Lost
                }
            },
        };
        self.edit(swap.at_the_end().into_iter().collect());
        self.handle(Event::SwappedIn { request, result });
    }

    fn restore_swapped(&mut self, swap: &Swap, state: &SwappedState) -> Result<(), EngineError> {
        let saved = SavedState::parse(&state.bytes)?;
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
}
