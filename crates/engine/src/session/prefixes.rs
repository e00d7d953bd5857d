//! Cached prefixes of a session as bytes, so that they outlive its process.
//!
//! A saved state of all cached prefixes, which share cells in it as they do in the memory, with a
//! note of who may share each. Invariant: what is restored is what would be computed here, to the
//! bit. So a state of another version, backend, model or type of K and V is refused, before
//! anything changes. Knows no files.

use std::io::{self, BufWriter, Write};

use cellar_scheduler::{Event, RequestId, RestoredPrefix, Salt};
use kv_backend::Backend;
use kv_backend::state::{SavedState, SeqTokens, StateError};
use kv_core::SeqId;
use kv_core::memory::{Memory, RestoreInto, Seqs};
use serde::{Deserialize, Serialize};

use super::Session;
use super::error::ServiceError;
use crate::error::EngineError;
use crate::state::SaveOptions;

/// Bytes that are handed from thread to thread at once.
pub(crate) const PIECE: usize = 1 << 20;

/// What was saved or restored of cached prefixes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixCounts {
    /// Prefixes.
    pub n_prefixes: usize,
    /// Their tokens; what several share counts for each.
    pub n_tokens: usize,
    /// Prefixes of the bytes for which the memory has no room.
    pub n_left_out: usize,
    /// Groups that a store could not keep: it is full or gone. It is not asked for more then.
    pub n_lost: u64,
}

/// What a state does not tell: the JSON of its note.
#[derive(Debug, Serialize, Deserialize)]
struct PrefixNote {
    /// The version that computed it: another may compute other bits.
    version: String,
    backend: String,
    /// The least recently used first.
    prefixes: Vec<PrefixEntry>,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct PrefixEntry {
    seq: u32,
    salt: u64,
    n_hits: u32,
}

/// The fate of the requests that are computed when prefixes are saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LiveRequests {
    /// They end.
    End,
    /// They go on, and nothing is saved.
    Keep,
}

/// The fate of the prefixes that are cached when others are restored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PresentPrefixes {
    /// Nothing is restored where there are some.
    Keep,
    /// They go.
    Replace,
}

impl<B: Backend, M: Memory + Clone> Session<B, M> {
    /// Ends all requests, or refuses while there are any, and writes the cached prefixes. Nothing
    /// is written where there are none.
    ///
    /// # Errors
    /// [`ServiceError::RequestsLive`] where requests are to be kept and there are some;
    /// [`ServiceError::Engine`] where rows cannot be read, or `out` does not take them.
    pub(crate) fn save_prefixes(
        &mut self,
        live: LiveRequests,
        out: &mut dyn Write,
    ) -> Result<PrefixCounts, ServiceError> {
        match live {
            LiveRequests::End => self.pause_all(),
            LiveRequests::Keep => self.check_idle()?,
        }
        self.finish_edits();
        let mut cached: Vec<_> = self.scheduler.cached().collect();
        cached.sort_by_key(|prefix| (prefix.last_used, prefix.seq));
        if cached.is_empty() {
            return Ok(PrefixCounts::default());
        }
        let entries = cached.iter().map(|prefix| PrefixEntry {
            seq: prefix.seq.0,
            salt: prefix.salt.0,
            n_hits: prefix.n_hits,
        });
        let note = PrefixNote {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            backend: self.engine.backend().info().name,
            prefixes: entries.collect(),
        };
        let note = serde_json::to_string(&note).map_err(io::Error::from);
        let note = note.map_err(|error| EngineError::State(StateError::Write(error)))?;
        let tokens = cached.iter().map(|prefix| SeqTokens {
            seq: prefix.seq,
            evaluated: prefix.tokens.to_vec(),
            pending: Vec::new(),
        });
        let tokens: Vec<SeqTokens> = tokens.collect();
        let options = SaveOptions {
            seqs: Seqs::All,
            tokens: &tokens,
            kv_type: None,
            state_type: None,
        };
        let mut out = BufWriter::with_capacity(PIECE, out);
        self.engine.complete_rows()?;
        self.engine
            .save_state_with_note(&options, &note, &mut out)?;
        let flushed = out.flush();
        flushed.map_err(|error| EngineError::State(StateError::Write(error)))?;
        Ok(PrefixCounts {
            n_prefixes: tokens.len(),
            n_tokens: tokens.iter().map(|tokens| tokens.evaluated.len()).sum(),
            n_left_out: 0,
            n_lost: 0,
        })
    }

    fn check_idle(&self) -> Result<(), ServiceError> {
        match self.texts.len() {
            0 => Ok(()),
            n_requests => Err(ServiceError::RequestsLive { n_requests }),
        }
    }

    /// Forgets all cached prefixes.
    ///
    /// # Errors
    /// [`ServiceError::RequestsLive`] where there are requests, which may share some.
    pub(crate) fn clear_prefixes(&mut self) -> Result<PrefixCounts, ServiceError> {
        self.check_idle()?;
        self.finish_edits();
        let cached = self.scheduler.cached();
        let counts = cached.fold(PrefixCounts::default(), |counts, prefix| PrefixCounts {
            n_prefixes: counts.n_prefixes + 1,
            n_tokens: counts.n_tokens + prefix.tokens.len(),
            ..counts
        });
        self.handle(Event::ClearPrefixes);
        self.finish_edits();
        self.notice_change();
        Ok(counts)
    }

    /// Takes cached prefixes back, whose numbers begin with `first`.
    ///
    /// # Errors
    /// [`ServiceError::PrefixesRefused`] and [`ServiceError::Engine`]; nothing has changed then.
    pub(crate) fn restore_prefixes(
        &mut self,
        present: PresentPrefixes,
        bytes: &[u8],
        first: RequestId,
    ) -> Result<PrefixCounts, ServiceError> {
        let is_used = !self.texts.is_empty() || self.scheduler.cached().next().is_some();
        match present {
            PresentPrefixes::Replace => self.check_idle()?,
            PresentPrefixes::Keep if is_used => {
                let reason = "the service has been used already".to_owned();
                return Err(ServiceError::PrefixesRefused { reason });
            }
            PresentPrefixes::Keep => {}
        }
        let state = SavedState::parse(bytes).map_err(EngineError::State)?;
        let fingerprint = self.engine.fingerprint();
        let same = fingerprint.check(state.fingerprint());
        same.map_err(EngineError::State)?;
        let note = self.check_note(&state)?;
        // The bytes are good: from here on it changes.
        self.clear_prefixes()?;
        let restored = self.restore_rows(&state, &note)?;
        let n_tokens = restored.iter().map(|prefix| prefix.tokens.len()).sum();
        let numbered = restored.into_iter().zip(first.0..);
        let numbered = numbered.map(|(prefix, number)| RestoredPrefix {
            request: RequestId(number),
            ..prefix
        });
        let memory = self.engine.memory();
        let n_prefixes = self.scheduler.restore_prefixes(memory, numbered.collect());
        self.finish_edits();
        self.notice_change();
        Ok(PrefixCounts {
            n_prefixes,
            n_tokens,
            n_left_out: note.prefixes.len().saturating_sub(n_prefixes),
            n_lost: 0,
        })
    }

    /// The note of a state that would have been computed here, to the bit.
    fn check_note(&self, state: &SavedState<'_>) -> Result<PrefixNote, ServiceError> {
        let refused = |reason: String| ServiceError::PrefixesRefused { reason };
        let note: PrefixNote = serde_json::from_str(state.note())
            .map_err(|_| refused("this is a saved text, not cached prefixes".to_owned()))?;
        let here = env!("CARGO_PKG_VERSION");
        if note.version != here {
            let there = &note.version;
            return Err(refused(format!(
                "version {there} computed them, this is {here}"
            )));
        }
        let here = self.engine.backend().info().name;
        if note.backend != here {
            let there = &note.backend;
            return Err(refused(format!(
                "the backend {there} computed them, this is {here}"
            )));
        }
        if !self.engine.stores_as(state) {
            let reason = "their K and V are stored as other types, or otherwise rotated";
            return Err(refused(reason.to_owned()));
        }
        Ok(note)
    }

    /// All prefixes into the sequences that they had, where they share cells; else, where there is
    /// less room than there was, one after the other. Returns them in the order of the note.
    fn restore_rows(
        &mut self,
        state: &SavedState<'_>,
        note: &PrefixNote,
    ) -> Result<Vec<RestoredPrefix>, ServiceError> {
        let n_seqs = self.engine.memory().n_seqs();
        let prefix = |entry: &PrefixEntry, to: SeqId| {
            let mut all = state.tokens().iter();
            let tokens = all.find(|tokens| tokens.seq.0 == entry.seq)?;
            Some(RestoredPrefix {
                seq: to,
                tokens: tokens.evaluated.clone(),
                salt: Salt(entry.salt),
                request: RequestId(0),
                n_hits: entry.n_hits,
            })
        };
        match self.engine.restore_state(state, RestoreInto::All) {
            Ok(_) => {
                let entries = note.prefixes.iter();
                return Ok(entries
                    .filter_map(|entry| prefix(entry, SeqId(entry.seq)))
                    .collect());
            }
            // It does not fit, and nothing has changed.
            Err(EngineError::State(_)) => {}
            Err(error) => return Err(error.into()),
        }
        let mut restored = Vec::new();
        let mut free = (0..n_seqs).map(SeqId);
        let mut next = free.next();
        for entry in note.prefixes.iter().rev() {
            let Some(to) = next else {
                break;
            };
            let from = SeqId(entry.seq);
            match self
                .engine
                .restore_state(state, RestoreInto::One { from, to })
            {
                Ok(_) => {
                    restored.extend(prefix(entry, to));
                    next = free.next();
                }
                Err(EngineError::State(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        restored.reverse();
        Ok(restored)
    }
}
