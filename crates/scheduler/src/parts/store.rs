//! [`StoreParts`]: the restoration of stored tokens that is under way, and the prefixes that go to
//! the store when they are evicted.
//!
//! Invariant: at most one sequence is being restored, and it is nobody else's meanwhile.

use std::sync::Arc;

use kv_core::TokenId;

use super::prefix::line::CachedLine;
use crate::data::ids::RequestId;
use crate::data::view::EvictedPrefix;

/// A sequence that is being restored.
#[derive(Clone, Debug)]
pub(crate) struct RestoringLine {
    pub(crate) request: RequestId,
    /// Its value when it holds nothing more.
    pub(crate) line: CachedLine,
    /// The tokens that it may hold.
    pub(crate) tokens: Arc<[TokenId]>,
    pub(crate) n_held: usize,
}

/// The requests of a scheduler that ask a store of prefixes.
#[derive(Clone, Debug, Default)]
pub(crate) struct StoreParts {
    /// Evicted prefixes are kept until they are taken.
    pub(crate) wants_evicted: bool,
    evicted: Vec<EvictedPrefix>,
    pub(crate) restoring: Option<RestoringLine>,
    /// The memory had no room for what was to be restored.
    pub(crate) is_short: bool,
    /// Steps before the last restoration.
    restored_at: Option<u64>,
}

impl StoreParts {
    /// Remembers a prefix that was evicted, until it is taken.
    pub(crate) fn evicted(&mut self, line: &CachedLine) {
        if self.wants_evicted {
            self.evicted.push(EvictedPrefix {
                seq: line.seq,
                tokens: Arc::clone(&line.tokens),
                n_prompt: line.n_prompt,
                salt: line.salt,
            });
        }
    }

    pub(crate) fn take_evicted(&mut self) -> Vec<EvictedPrefix> {
        std::mem::take(&mut self.evicted)
    }

    /// Notes that something was restored after so many steps.
    pub(crate) fn restored(&mut self, n_steps: u64) {
        self.restored_at = Some(n_steps);
    }

    /// True if a step is due before more is restored, where there are texts that go on.
    pub(crate) fn is_due_a_step(&self, n_steps: u64) -> bool {
        self.restored_at == Some(n_steps)
    }
}
