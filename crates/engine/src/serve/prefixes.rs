//! Cached prefixes of a service as bytes, so that they outlive its process.
//!
//! A saved state of all cached prefixes, which share cells in it as they do in the memory, with a note of
//! who may share each. Invariant: what is restored is what would be computed here, to the bit. So a
//! state of another version, backend, model or type of K and V is refused, before anything changes.
//! Knows no files.

use std::io::{self, BufWriter, Write};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use cellar_scheduler::{Event, RequestId, RestoredPrefix, Salt, Work};
use kv_core::SeqId;
use kv_core::backend::Backend;
use kv_core::memory::{Memory, RestoreInto, Seqs};
use kv_core::state::{SavedState, SeqTokens, StateError};
use serde::{Deserialize, Serialize};

use super::service::{Service, ServiceError};
use super::worker::{Command, Worker};
use crate::error::EngineError;
use crate::state::SaveOptions;

/// Bytes that are handed from thread to thread at once.
const PIECE: usize = 1 << 20;

/// Pieces that wait to be written.
const N_PIECES: usize = 2;

/// What was saved or restored of cached prefixes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixCounts {
    /// Prefixes.
    pub n_prefixes: usize,
    /// Their tokens; what several share counts for each.
    pub n_tokens: usize,
    /// Prefixes of the bytes for which the memory has no room.
    pub n_left_out: usize,
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

/// The end of what is saved, or why it could not be.
type Saved = Result<PrefixCounts, ServiceError>;

/// The fate of the requests that are computed when prefixes are saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LiveRequests {
    /// They end.
    End,
    /// They go on, and nothing is saved.
    Keep,
}

/// What to do with cached prefixes.
#[derive(Debug)]
pub(crate) enum PrefixCommand {
    Save {
        live: LiveRequests,
        pieces: SyncSender<Vec<u8>>,
        done: SyncSender<Saved>,
    },
    Clear {
        done: SyncSender<Saved>,
    },
    Restore {
        bytes: Vec<u8>,
        /// The number of the first; those of the others follow.
        first: RequestId,
        done: SyncSender<Saved>,
    },
}

impl<B: Backend> Service<B> {
    /// Ends all requests, and writes the cached prefixes, theirs included. Nothing is written where there
    /// are none.
    ///
    /// # Errors
    /// [`ServiceError::Engine`] where rows cannot be read, or `out` does not take them; what was
    /// written by then cannot be restored. [`ServiceError::Stopped`].
    pub fn save_prefixes(&self, out: &mut dyn Write) -> Result<PrefixCounts, ServiceError> {
        self.save(LiveRequests::End, out)
    }

    /// As [`Service::save_prefixes`], where no request has to end for it.
    ///
    /// # Errors
    /// [`ServiceError::PrefixesRefused`] where there are requests, and those of
    /// [`Service::save_prefixes`].
    pub fn save_idle_prefixes(&self, out: &mut dyn Write) -> Result<PrefixCounts, ServiceError> {
        self.save(LiveRequests::Keep, out)
    }

    /// Forgets all cached prefixes.
    ///
    /// # Errors
    /// [`ServiceError::PrefixesRefused`] where there are requests, which may share some;
    /// [`ServiceError::Stopped`].
    pub fn clear_prefixes(&self) -> Result<PrefixCounts, ServiceError> {
        let (done, cleared) = sync_channel(1);
        self.command(Command::Prefixes(PrefixCommand::Clear { done }))?;
        cleared.recv().map_err(|_| ServiceError::Stopped)?
    }

    fn save(&self, live: LiveRequests, out: &mut dyn Write) -> Result<PrefixCounts, ServiceError> {
        let (pieces, received) = sync_channel(N_PIECES);
        let (done, saved) = sync_channel(1);
        self.command(Command::Prefixes(PrefixCommand::Save {
            live,
            pieces,
            done,
        }))?;
        let written = write_all(received, out);
        let saved = saved.recv().map_err(|_| ServiceError::Stopped)?;
        written.map_err(|error| EngineError::State(StateError::Write(error)))?;
        saved
    }

    /// Takes cached prefixes back that [`Service::save_prefixes`] wrote, as far as the memory has room:
    /// those that were used last go first. To be called before the first request.
    ///
    /// # Errors
    /// [`ServiceError::PrefixesRefused`] where they are of another version, backend or type of K and V, or
    /// the service has been used; [`ServiceError::Engine`] where they are of another model, damaged or
    /// truncated. The service is as before then. [`ServiceError::Stopped`].
    pub fn restore_prefixes(&self, bytes: Vec<u8>) -> Result<PrefixCounts, ServiceError> {
        let first = self.reserve_ids(u64::from(self.memory_layout().n_seqs));
        let (done, restored) = sync_channel(1);
        self.command(Command::Prefixes(PrefixCommand::Restore {
            bytes,
            first,
            done,
        }))?;
        restored.recv().map_err(|_| ServiceError::Stopped)?
    }
}

/// Writes pieces until there are no more. An error ends the thread that sends them, too.
fn write_all(pieces: Receiver<Vec<u8>>, out: &mut dyn Write) -> io::Result<()> {
    for piece in pieces {
        out.write_all(&piece)?;
    }
    out.flush()
}

/// Hands bytes to another thread.
struct PieceWriter(SyncSender<Vec<u8>>);

impl Write for PieceWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.0.send(bytes.to_vec()) {
            Ok(()) => Ok(bytes.len()),
            Err(_) => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<B: Backend> Worker<B> {
    pub(super) fn take_prefix_command(&mut self, command: PrefixCommand) {
        // Who asked may have gone.
        match command {
            PrefixCommand::Save { live, pieces, done } => {
                let is_idle = match live {
                    LiveRequests::End => Ok(()),
                    LiveRequests::Keep => self.check_idle(),
                };
                let saved = is_idle.and_then(|()| self.save_prefixes(pieces));
                let _gone = done.send(saved);
            }
            PrefixCommand::Clear { done } => {
                let _gone = done.send(self.clear_prefixes());
            }
            PrefixCommand::Restore { bytes, first, done } => {
                let restored = self.restore_prefixes(&bytes, first);
                drop(bytes);
                let _gone = done.send(restored);
            }
        }
    }

    fn save_prefixes(&mut self, pieces: SyncSender<Vec<u8>>) -> Saved {
        let requests: Vec<RequestId> = self.live.keys().copied().collect();
        for id in requests {
            self.handle(Event::Cancel(id));
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
        let mut out = BufWriter::with_capacity(PIECE, PieceWriter(pieces));
        self.engine
            .save_state_with_note(&options, &note, &mut out)?;
        let flushed = out.flush();
        flushed.map_err(|error| EngineError::State(StateError::Write(error)))?;
        Ok(PrefixCounts {
            n_prefixes: tokens.len(),
            n_tokens: tokens.iter().map(|tokens| tokens.evaluated.len()).sum(),
            n_left_out: 0,
        })
    }

    fn check_idle(&self) -> Result<(), ServiceError> {
        match self.live.len() {
            0 => Ok(()),
            n => {
                let reason = format!("{n} requests are computed: wait until none is");
                Err(ServiceError::PrefixesRefused { reason })
            }
        }
    }

    fn clear_prefixes(&mut self) -> Saved {
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

    fn restore_prefixes(&mut self, bytes: &[u8], first: RequestId) -> Saved {
        if !self.live.is_empty() || self.scheduler.cached().next().is_some() {
            let reason = "the service has been used already".to_owned();
            return Err(ServiceError::PrefixesRefused { reason });
        }
        self.finish_edits();
        let state = SavedState::parse(bytes).map_err(EngineError::State)?;
        let fingerprint = self.engine.fingerprint();
        let same = fingerprint.check(state.fingerprint());
        same.map_err(EngineError::State)?;
        let note = self.check_note(&state)?;
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

    /// All prefixes into the sequences that they had, where they share cells; else, where there is less
    /// room than there was, one after the other. Returns them in the order of the note.
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

    /// Does the edits that the scheduler wants, where nothing runs.
    fn finish_edits(&mut self) {
        while let Work::Edit(edits) = self.next_work() {
            self.edit(edits);
        }
    }
}
