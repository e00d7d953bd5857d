//! [`CachedLine`]: a cached prefix, and [`Weights`]: its expected uses.
//!
//! Invariant: the memory holds exactly the tokens of a line in its sequence.

use std::sync::Arc;

use kv_core::{SeqId, TokenId};

use crate::data::active::{ActiveRequest, SharedPrefix};
use crate::data::ids::{Micros, RequestId, Salt};
use crate::data::note::{DropReason, Note};
use crate::data::view::RestoredPrefix;

/// A cached prefix.
#[derive(Clone, Debug)]
pub(crate) struct CachedLine {
    pub(crate) seq: SeqId,
    pub(crate) tokens: Arc<[TokenId]>,
    /// Number of them that were the prompt of the request.
    pub(crate) n_prompt: usize,
    pub(crate) salt: Salt,
    /// The request whose tokens they were.
    pub(crate) request: RequestId,
    pub(crate) last_used: Micros,
    pub(crate) n_hits: u32,
    /// The cells of its first tokens.
    pub(crate) shared: SharedPrefix,
    /// Its expected uses, next to others.
    pub(crate) weights: Weights,
}

impl CachedLine {
    /// The tokens of a request, kept from now on.
    pub(crate) fn new(now: Micros, active: &ActiveRequest, seq: SeqId, salt: Salt) -> Self {
        Self {
            seq,
            tokens: active.held().into(),
            n_prompt: active.request.n_prompt.min(active.n_done),
            salt,
            request: active.id(),
            last_used: now,
            n_hits: 0,
            shared: active.shared.cut(active.n_done),
            weights: Weights::default(),
        }
    }

    /// A prefix that the memory holds again.
    pub(crate) fn restored(
        last_used: Micros,
        prefix: RestoredPrefix,
        shared: SharedPrefix,
    ) -> Self {
        Self {
            seq: prefix.seq,
            n_prompt: prefix.tokens.len(),
            tokens: prefix.tokens.into(),
            salt: prefix.salt,
            request: prefix.request,
            last_used,
            n_hits: prefix.n_hits,
            shared,
            weights: Weights::default(),
        }
    }

    /// The note that it is kept.
    pub(crate) fn cached(&self) -> Note {
        Note::Cached {
            seq: self.seq,
            request: self.request,
            n_tokens: self.tokens.len(),
        }
    }

    /// The note that it was dropped.
    pub(crate) fn dropped(&self, now: Micros, why: DropReason) -> Note {
        Note::Dropped {
            seq: self.seq,
            n_tokens: self.tokens.len(),
            n_hits: self.n_hits,
            idle: Micros(now.0.saturating_sub(self.last_used.0)),
            why,
        }
    }
}

/// The expected uses of a prefix, next to others.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Weights {
    /// Uses of what it continues, and one.
    pub(super) n_expected: u32,
    /// Its own uses.
    n_used: u32,
    /// The inflation when it was used last: its value counts from there.
    pub(super) base: f64,
}

impl Weights {
    /// Those of a prefix that is kept now.
    pub(super) fn new(inflation: f64) -> Self {
        Self {
            n_expected: 1,
            n_used: 0,
            base: inflation,
        }
    }

    pub(super) fn hit(&mut self, inflation: f64) {
        self.n_used = self.n_used.saturating_add(1);
        self.base = inflation;
    }

    /// Takes over what is expected of a prefix that this one continues: the next turn of a
    /// conversation begins with the last one. What other texts begin with, too, goes on being used.
    pub(super) fn continue_from(&mut self, before: &mut Self) {
        let moved = std::mem::take(&mut before.n_expected) + before.n_used.min(1);
        self.n_expected = self.n_expected.saturating_add(moved);
    }

    pub(super) fn frequency(&self) -> f64 {
        // Any prefix may be used again, an edited conversation for example.
        const LEAST: f64 = 0.125;
        LEAST + f64::from(self.n_expected) + f64::from(self.n_used.saturating_sub(1))
    }
}
