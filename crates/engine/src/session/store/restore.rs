//! Fetched groups become tokens of a sequence again, a few at a time.
//!
//! Invariant: what is restored is stored as it is here, to the bit; after a group that is not what
//! it should be, nothing more is restored, and the rest is computed.

use std::time::{Duration, Instant};

use cellar_prefix_store::{Group, GroupKind};
use cellar_scheduler::{Event, RequestId, StoredPrefix, StoredRows};
use kv_backend::Backend;
use kv_backend::state::{SavedState, StateError};
use kv_core::SeqId;
use kv_core::memory::{Memory, Refusal, RestoreInto};

use super::NEW;
use super::names::Piece;
use crate::decode::Engine;
use crate::error::EngineError;
use crate::session::Session;

/// The time that groups are restored before steps go on.
const AT_ONCE: Duration = Duration::from_millis(20);

/// Groups of a prompt that are here.
#[derive(Debug)]
pub(super) struct FetchedPrefix {
    pub(super) pieces: Vec<(Piece, Group)>,
}

impl FetchedPrefix {
    /// The first token that is here, and the one behind the last.
    pub(super) fn range(&self) -> Option<(usize, usize)> {
        let first = self.pieces.first()?.0.first;
        let end = self.pieces.last()?.0.end;
        Some((first, end))
    }
}

impl<B: Backend, M: Memory + Clone> Session<B, M> {
    /// Restores tokens of a request that were fetched, some of them where it takes long.
    pub(in crate::session) fn restore_stored(&mut self, prefix: StoredPrefix) {
        let StoredPrefix {
            request,
            seq,
            copy,
            n_held,
            n_tokens,
        } = prefix;
        self.recorder.set_stale();
        let copied = copy.map_or(Ok(()), |edit| self.engine.edit(edit).map(drop));
        let (n_held, result) = match copied {
            Ok(()) => self.restore_pieces(request, seq, n_held, n_tokens),
            Err(error) => {
                self.note_lost_device(&error);
                tracing::warn!(%error, "a cached prefix could not be copied");
                (
                    self.engine.memory().next_pos(seq).as_usize(),
                    StoredRows::Failed,
                )
            }
        };
        if result == StoredRows::Failed
            && let Some(store) = &mut self.store
        {
            store.fetched.remove(&request);
        }
        let n_tokens = n_held;
        self.handle(Event::Restored { n_tokens, result });
        self.notice_change();
    }

    /// Returns how many tokens the sequence holds then.
    fn restore_pieces(
        &mut self,
        request: RequestId,
        seq: SeqId,
        mut n_held: usize,
        n_tokens: usize,
    ) -> (usize, StoredRows) {
        let Some(store) = &mut self.store else {
            return (n_held, StoredRows::Failed);
        };
        let Some(fetched) = store.fetched.get(&request) else {
            return (n_held, StoredRows::Failed);
        };
        let (begun, n_before) = (Instant::now(), n_held);
        let mut result = StoredRows::Written;
        for (piece, group) in &fetched.pieces {
            let follows = match piece.kind {
                GroupKind::Rows => piece.first == n_held,
                GroupKind::End | GroupKind::Mark => n_held == 0,
            };
            if piece.end <= n_held {
                continue;
            }
            let restored = if follows {
                restore_group(&mut self.engine, seq, *piece, group)
            } else {
                Ok(RestoredGroup::Refused)
            };
            match restored {
                Ok(RestoredGroup::Whole) => n_held = piece.end,
                Ok(RestoredGroup::NoRoom) => {
                    result = StoredRows::NoRoom;
                    break;
                }
                Ok(RestoredGroup::Refused) => {
                    tracing::warn!(name = %piece.name, "a stored group is not what it should be");
                    result = StoredRows::Failed;
                    break;
                }
                Err(error) => {
                    tracing::warn!(%error, "a stored group cannot be restored");
                    result = StoredRows::Failed;
                    break;
                }
            }
            if n_held < n_tokens && begun.elapsed() >= AT_ONCE {
                break;
            }
        }
        if n_held > n_before {
            let new = begun.elapsed().as_secs_f64() / (n_held - n_before) as f64;
            store.restore_per_token += (new - store.restore_per_token) * NEW;
        }
        if n_held < n_tokens && n_held == n_before && result == StoredRows::Written {
            result = StoredRows::Failed; // nothing follows what is held
        }
        (n_held, result)
    }
}

enum RestoredGroup {
    Whole,
    NoRoom,
    /// It is another model's, or stored in another way, or of other tokens.
    Refused,
}

fn restore_group<B: Backend, M: Memory + Clone>(
    engine: &mut Engine<B, M>,
    to: SeqId,
    piece: Piece,
    group: &Group,
) -> Result<RestoredGroup, EngineError> {
    let state = SavedState::parse(group.payload())?;
    let Some(saved) = state.tokens().first() else {
        return Ok(RestoredGroup::Refused);
    };
    if saved.evaluated.len() != piece.end - piece.first || !engine.stores_as(&state) {
        return Ok(RestoredGroup::Refused);
    }
    let from = saved.seq;
    let into = match piece.kind {
        GroupKind::Rows => RestoreInto::Behind { from, to },
        GroupKind::End | GroupKind::Mark => RestoreInto::One { from, to },
    };
    match engine.restore_state(&state, into) {
        Ok(_) => Ok(RestoredGroup::Whole),
        Err(EngineError::State(StateError::Refused(
            Refusal::NoRoom(_) | Refusal::NoStateRoom(_),
        ))) => Ok(RestoredGroup::NoRoom),
        Err(error) => Err(error),
    }
}
