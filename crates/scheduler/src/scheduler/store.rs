//! Answers of a store of prefixes, and what becomes of them in the memory.
//!
//! Invariant: an answer for a request that does not wait for it changes nothing.

use std::sync::Arc;

use kv_core::memory::{Edit, Memory};
use kv_core::{SeqId, TokenId};

use super::Scheduler;
use crate::data::active::SharedPrefix;
use crate::data::event::StoredRows;
use crate::data::ids::{Micros, RequestId};
use crate::data::note::DropReason;
use crate::data::reuse::{Missed, PrefixUse};
use crate::data::state::RequestState;
use crate::data::stored::{StoreWait, StoredTokens};
use crate::data::view::{CachedPrefix, EvictedPrefix};
use crate::data::work::{StoredPrefix, Work};
use crate::decide::store::n_held;
use crate::parts::prefix::MIN_REUSED;
use crate::parts::prefix::line::{CachedLine, Weights};
use crate::parts::store::RestoringLine;

impl Scheduler {
    /// The same scheduler, whose evicted prefixes are handed out
    /// ([`Scheduler::take_evicted`]).
    #[must_use]
    pub fn with_store(mut self) -> Self {
        self.store.wants_evicted = true;
        self
    }

    /// The prefixes that were evicted since the call before, before the edits that remove their
    /// tokens.
    pub fn take_evicted(&mut self) -> Vec<EvictedPrefix> {
        self.store.take_evicted()
    }

    /// Number of the first of these tokens that the memory holds for such a request.
    pub fn n_held<M: Memory>(&self, memory: &M, prefix: PrefixUse, tokens: &[TokenId]) -> usize {
        n_held(self.parts(Micros(0), memory), prefix, tokens)
    }

    /// The cached prefix that a sequence is.
    pub fn cached_in(&self, seq: SeqId) -> Option<CachedPrefix<'_>> {
        self.prefix.line(seq).map(view)
    }

    pub(super) fn asked(&mut self, id: RequestId) {
        if let Some(waiting) = self.queue.get_mut(id).filter(|r| !r.was_admitted) {
            waiting.store = StoreWait::Asked;
        }
    }

    pub(super) fn probed(&mut self, id: RequestId, result: Result<StoredTokens, Missed>) {
        let asked = |waiting: &&mut RequestState| waiting.store == StoreWait::Asked;
        if let Some(waiting) = self.queue.get_mut(id).filter(asked) {
            answer(waiting, result, StoreWait::Found);
        }
    }

    pub(super) fn fetched(&mut self, id: RequestId, result: Result<StoredTokens, Missed>) {
        let fetching = |waiting: &&mut RequestState| waiting.store == StoreWait::Fetching;
        if let Some(waiting) = self.queue.get_mut(id).filter(fetching) {
            let n_tries = 0;
            answer(waiting, result, |stored| StoreWait::Here {
                stored,
                n_tries,
            });
        }
    }

    /// Stored tokens are to be restored into a sequence, which nobody else has meanwhile.
    pub(super) fn begin_restoring<S>(&mut self, now: Micros, prefix: StoredPrefix) -> Work<S> {
        let StoredPrefix {
            request: id,
            seq,
            n_tokens,
            n_held,
            ..
        } = prefix;
        let waiting = self.queue.get(id);
        let (salt, tokens) = match waiting.map(|waiting| (waiting.prefix, &waiting.tokens)) {
            Some((PrefixUse::Within(salt), tokens)) => {
                (salt, tokens.get(..n_tokens).unwrap_or(tokens))
            }
            _ => return Work::Idle,
        };
        let tokens: Arc<[TokenId]> = tokens.into();
        let line = match self.prefix.take(seq) {
            Some(line) => line,
            None => {
                self.sequences.take(seq);
                let shared = match prefix.copy {
                    Some(Edit::Copy { from, .. }) => self.root_of(from),
                    _ => None,
                };
                CachedLine {
                    seq,
                    n_prompt: tokens.len(),
                    tokens: Arc::clone(&tokens),
                    salt,
                    request: id,
                    last_used: now,
                    n_hits: 0,
                    shared: match shared {
                        Some(shared) => shared.cut(n_held),
                        None => self.prefix.new_root(),
                    },
                    weights: Weights::default(),
                }
            }
        };
        self.store.restoring = Some(RestoringLine {
            request: id,
            line,
            tokens,
            n_held,
        });
        Work::Restore(prefix)
    }

    /// A sequence holds so many tokens of the ones that were to be restored: they are a cached
    /// prefix.
    pub(super) fn restored(&mut self, now: Micros, n_tokens: usize, result: StoredRows) {
        let Some(restoring) = self.store.restoring.take() else {
            return;
        };
        let RestoringLine {
            request: id,
            line,
            tokens,
            n_held,
        } = restoring;
        let (seq, salt) = (line.seq, line.salt);
        let tokens: Arc<[TokenId]> = tokens.get(..n_tokens).unwrap_or(&tokens).into();
        if tokens.len() < MIN_REUSED {
            self.sequences.drop_tokens(seq);
        } else {
            if !self.room.is_cut_only_at_ends() {
                let covered = self.prefix.take_covered(seq, &tokens, salt);
                self.drop_lines(now, covered, DropReason::Covered);
            }
            let line = CachedLine {
                n_prompt: tokens.len(),
                tokens,
                last_used: now,
                ..line
            };
            self.notes.push(line.cached());
            self.prefix.restore(line);
            self.prefix.check_budget();
        }
        self.counters.n_restored_tokens += n_tokens.saturating_sub(n_held) as u64;
        self.store.restored(self.counters.n_steps);
        match result {
            StoredRows::Written => {}
            StoredRows::NoRoom => self.store.is_short = true,
            StoredRows::Failed => {
                if let Some(waiting) = self.queue.get_mut(id) {
                    waiting.store = StoreWait::No;
                }
            }
        }
    }

    /// The cells of a sequence that has tokens of others, or is a cached prefix.
    fn root_of(&self, seq: SeqId) -> Option<SharedPrefix> {
        let of_line = self.prefix.line(seq).map(|line| line.shared);
        let running = self.running.iter().find(|active| active.seq == seq);
        of_line.or_else(|| running.map(|active| active.shared))
    }
}

/// A request that waited has its answer.
fn answer(
    waiting: &mut RequestState,
    result: Result<StoredTokens, Missed>,
    next: impl FnOnce(StoredTokens) -> StoreWait,
) {
    waiting.store = match result {
        Ok(stored) => next(stored),
        Err(missed) => {
            waiting.store_missed = Some(missed);
            StoreWait::No
        }
    };
}

/// A cached prefix, to look at.
pub(super) fn view(line: &CachedLine) -> CachedPrefix<'_> {
    CachedPrefix {
        seq: line.seq,
        salt: line.salt,
        request: line.request,
        tokens: &line.tokens,
        n_prompt: line.n_prompt,
        n_hits: line.n_hits,
        last_used: line.last_used,
    }
}
