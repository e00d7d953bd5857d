//! Prefixes that were cached before: the memory has them already, restored from a saved state.
//!
//! Invariant: a sequence of the memory that no prefix is taken over for is removed before the next
//! step.

use kv_core::memory::Memory;
use kv_core::{SeqId, TokenId};

use crate::prefix::{Line, Salt, Weights};
use crate::request::{Micros, RequestId};
use crate::scheduler::Scheduler;

/// A cached prefix that a memory holds again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RestoredPrefix {
    /// The sequence that holds exactly its tokens.
    pub seq: SeqId,
    /// Its tokens.
    pub tokens: Vec<TokenId>,
    /// Who may share it.
    pub salt: Salt,
    /// Under which number it is shown.
    pub request: RequestId,
    /// Requests that it was used for.
    pub n_hits: u32,
}

impl Scheduler {
    /// Takes over prefixes that were restored into sequences of the memory that no request has, the
    /// least recently used first, and returns how many. One that the memory does not hold as it
    /// should, or all where prefixes are not cached, are removed by the next edits.
    pub fn restore_prefixes<M: Memory>(
        &mut self,
        memory: &M,
        prefixes: Vec<RestoredPrefix>,
    ) -> usize {
        let mut n_restored = 0;
        // Times before all of this scheduler's keep their order.
        for (order, prefix) in (0..).zip(prefixes) {
            let Some(at) = self.free.iter().position(|&seq| seq == prefix.seq) else {
                continue;
            };
            self.free.remove(at);
            let n_held = memory.next_pos(prefix.seq).as_usize();
            if n_held != prefix.tokens.len() || !self.config.prefix_cache.is_on() {
                self.dropped.push(prefix.seq);
                continue;
            }
            let line = Line {
                seq: prefix.seq,
                tokens: prefix.tokens.into(),
                salt: prefix.salt,
                request: prefix.request,
                last_used: Micros(order),
                n_hits: prefix.n_hits,
                trunk: self.new_trunk(),
                weights: Weights::default(),
            };
            self.notes.push(line.cached());
            self.cache.restore(line);
            n_restored += 1;
            self.budget_is_due = true;
        }
        n_restored
    }
}
