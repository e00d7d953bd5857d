//! [`Note`]: what a scheduler did with cached prefixes, for a live view.
//!
//! Invariant: notes decide nothing; a scheduler that takes none plans the same. Knows no tokens:
//! only how many there are.

use std::collections::VecDeque;

use kv_core::SeqId;

use super::ids::{Micros, RequestId};

/// The most notes that wait to be taken; older ones are lost.
const MAX_NOTES: usize = 1024;

/// A thing that happened to cached tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Note {
    /// A request begins with tokens that are there already. With other sequences it shares their
    /// cells.
    Shared {
        /// The request.
        request: RequestId,
        /// Its sequence.
        seq: SeqId,
        /// The sequence that has the tokens: a cached prefix, or a running request. The request's
        /// own where it took a cached prefix over.
        from: SeqId,
        /// Number of these tokens.
        n_tokens: usize,
    },
    /// Tokens of a request stay for others.
    Cached {
        /// The sequence that holds them from now on.
        seq: SeqId,
        /// The request whose tokens they were.
        request: RequestId,
        /// Number of these tokens.
        n_tokens: usize,
    },
    /// The state of a request that is preempted went to the host.
    SwappedOut {
        /// The request.
        request: RequestId,
        /// Tokens of the state, without those that others have.
        n_tokens: usize,
        /// Its bytes.
        n_bytes: u64,
    },
    /// It went on to the disk.
    Spilled {
        /// The request.
        request: RequestId,
        /// Tokens of the state.
        n_tokens: usize,
        /// Its bytes.
        n_bytes: u64,
    },
    /// It came back.
    SwappedIn {
        /// The request.
        request: RequestId,
        /// Tokens of the state.
        n_tokens: usize,
        /// Its bytes.
        n_bytes: u64,
    },
    /// A cached prefix was dropped.
    Dropped {
        /// Its sequence.
        seq: SeqId,
        /// Tokens that it had.
        n_tokens: usize,
        /// Requests that it was used for.
        n_hits: u32,
        /// For how long it was not used.
        idle: Micros,
        /// Why.
        why: DropReason,
    },
}

/// Why a cached prefix was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DropReason {
    /// Its cells, or its sequence, were needed for requests.
    Evicted,
    /// A longer one serves for it.
    Covered,
    /// The caller cleared the cache, or the device is lost.
    Cleared,
    /// The memory does not hold it any more, as a step failed, or could not take rejected tokens
    /// back.
    Broken,
}

/// The notes that wait to be taken.
#[derive(Clone, Debug, Default)]
pub(crate) enum Notes {
    #[default]
    Off,
    On(VecDeque<Note>),
}

impl Notes {
    pub(crate) fn push(&mut self, note: Note) {
        if let Self::On(notes) = self {
            if notes.len() == MAX_NOTES {
                notes.pop_front();
            }
            notes.push_back(note);
        }
    }

    /// Takes notes from now on.
    pub(crate) fn switch_on(&mut self) {
        *self = Self::On(VecDeque::new());
    }

    /// The notes since the call before, in their order.
    pub(crate) fn take(&mut self) -> Vec<Note> {
        match self {
            Self::Off => Vec::new(),
            Self::On(notes) => notes.drain(..).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_notes_go_where_nobody_takes_them() {
        let mut notes = Notes::default();
        notes.switch_on();
        let note = |seq| Note::Dropped {
            seq: SeqId(seq),
            n_tokens: 1,
            n_hits: 0,
            idle: Micros(0),
            why: DropReason::Evicted,
        };
        (0..MAX_NOTES as u32 + 3).for_each(|seq| notes.push(note(seq)));
        let taken = notes.take();
        assert_eq!((taken.len(), &taken[0]), (MAX_NOTES, &note(3)));
        assert_eq!(notes.take(), []);
    }
}
