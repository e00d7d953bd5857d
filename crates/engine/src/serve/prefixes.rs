//! Saving, restoring and clearing the cached prefixes of a [`Service`], whose thread has them.

use std::io::{self, Write};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use cellar_scheduler::{PrefixUse, RequestId};
use kv_backend::Backend;
use kv_backend::state::StateError;
use kv_core::TokenId;
use kv_core::memory::Memory;

use super::service::{Command, Service};
use crate::error::EngineError;
use crate::session::{LiveRequests, PrefixCounts, PresentPrefixes, ServiceError, Session};

/// Pieces that wait to be written.
const N_PIECES: usize = 2;

/// The end of what is saved, or why it could not be.
type Saved = Result<PrefixCounts, ServiceError>;

/// What to do with cached prefixes.
#[derive(Debug)]
pub(crate) enum PrefixCommand {
    Save {
        live: LiveRequests,
        pieces: SyncSender<Vec<u8>>,
        done: SyncSender<Saved>,
    },
    Publish {
        done: SyncSender<PrefixCounts>,
    },
    Store {
        prefix: PrefixUse,
        prompt: Vec<TokenId>,
        done: SyncSender<Option<usize>>,
    },
    Clear {
        done: SyncSender<Saved>,
    },
    Restore {
        present: PresentPrefixes,
        bytes: Vec<u8>,
        /// The number of the first; those of the others follow.
        first: RequestId,
        done: SyncSender<Saved>,
    },
}

impl PrefixCommand {
    pub(super) fn run<B: Backend, M: Memory + Clone>(self, session: &mut Session<B, M>) {
        // Who asked may have gone.
        match self {
            Self::Save { live, pieces, done } => {
                let saved = session.save_prefixes(live, &mut PieceWriter(pieces));
                let _gone = done.send(saved);
            }
            Self::Publish { done } => {
                let _gone = done.send(session.publish_all());
            }
            Self::Store {
                prefix,
                prompt,
                done,
            } => session.store_prompt(prefix, &prompt, done),
            Self::Clear { done } => {
                let _gone = done.send(session.clear_prefixes());
            }
            Self::Restore {
                present,
                bytes,
                first,
                done,
            } => {
                let restored = session.restore_prefixes(present, &bytes, first);
                drop(bytes);
                let _gone = done.send(restored);
            }
        }
    }
}

impl<B: Backend, M: Memory + Clone> Service<B, M> {
    /// Ends all requests, and writes the cached prefixes, theirs included. Nothing is written where
    /// there are none.
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
    /// [`ServiceError::RequestsLive`] where there are requests, and those of
    /// [`Service::save_prefixes`].
    pub fn save_idle_prefixes(&self, out: &mut dyn Write) -> Result<PrefixCounts, ServiceError> {
        self.save(LiveRequests::Keep, out)
    }

    /// Ends all requests, and puts all cached prefixes, theirs included, into the tiers of
    /// [`ServiceExtras::prefix_tiers`](super::ServiceExtras::prefix_tiers), where there are some.
    ///
    /// # Errors
    /// [`ServiceError::Stopped`].
    pub fn publish_prefixes(&self) -> Result<PrefixCounts, ServiceError> {
        let (done, published) = sync_channel(1);
        self.command(Command::Prefixes(PrefixCommand::Publish { done }))?;
        published.recv().map_err(|_| ServiceError::Stopped)
    }

    /// Puts what is cached of a prompt into the tiers, before all else that waits to be stored.
    /// Returns the number of its first tokens that are there, once they are written or after ten
    /// seconds; `None` where there are no tiers. Requests go on meanwhile.
    ///
    /// # Errors
    /// [`ServiceError::Stopped`].
    pub fn store_prompt(
        &self,
        prefix: PrefixUse,
        prompt: Vec<TokenId>,
    ) -> Result<Option<usize>, ServiceError> {
        let (done, stored) = sync_channel(1);
        self.command(Command::Prefixes(PrefixCommand::Store {
            prefix,
            prompt,
            done,
        }))?;
        stored.recv().map_err(|_| ServiceError::Stopped)
    }

    /// Forgets all cached prefixes.
    ///
    /// # Errors
    /// [`ServiceError::RequestsLive`]; [`ServiceError::Stopped`].
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

    /// Takes cached prefixes back that [`Service::save_prefixes`] wrote, as far as the memory has
    /// room: those that were used last go first. To be called before the first request.
    ///
    /// # Errors
    /// [`ServiceError::PrefixesRefused`] where they are of another version, backend or type of K
    /// and V, or the service has been used; [`ServiceError::Engine`] where they are of another
    /// model, damaged or truncated. The service is as before then. [`ServiceError::Stopped`].
    pub fn restore_prefixes(&self, bytes: Vec<u8>) -> Result<PrefixCounts, ServiceError> {
        self.restore(PresentPrefixes::Keep, bytes)
    }

    /// As [`Service::restore_prefixes`], in place of all prefixes that are cached now, at any time
    /// when there are no requests.
    ///
    /// # Errors
    /// [`ServiceError::RequestsLive`] where there are requests, and those of
    /// [`Service::restore_prefixes`]. The prefixes that are cached stay then.
    pub fn replace_prefixes(&self, bytes: Vec<u8>) -> Result<PrefixCounts, ServiceError> {
        self.restore(PresentPrefixes::Replace, bytes)
    }

    fn restore(
        &self,
        present: PresentPrefixes,
        bytes: Vec<u8>,
    ) -> Result<PrefixCounts, ServiceError> {
        let first = self
            .intake()
            .reserve_ids(u64::from(self.memory_layout().n_seqs));
        let (done, restored) = sync_channel(1);
        self.command(Command::Prefixes(PrefixCommand::Restore {
            present,
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
