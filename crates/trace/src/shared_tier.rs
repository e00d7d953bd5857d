//! [`SharedTier`]: the store of prefixes that the services of a replay share.
//!
//! Invariant: groups have the names and sizes of a real store, and go in the same order. Not its
//! times: what is there is found at once, and what ended is there at once.

use cellar_prefix_store::{
    GROUP_TOKENS, GroupKind, GroupName, GroupNamer, Identity, Ledger, MIN_SECRET, StoreKey,
    TAIL_TOKENS,
};
use cellar_scheduler::{PrefixUse, Request};
use kv_core::TokenId;
use kv_core::Window;

use crate::error::TraceError;
use crate::reader::Trace;
use crate::replica::EndedText;

/// A store that the services of a replay share.
pub(crate) struct SharedTier {
    key: StoreKey,
    ledger: Ledger,
    max_bytes: u64,
    /// Bytes of a token of the trace.
    token_bytes: u64,
    /// Tokens of the trace in a whole group, and in a small one; 0 where it has no small ones.
    whole: usize,
    tail: usize,
}

impl SharedTier {
    /// An empty store for the model of a trace.
    ///
    /// # Errors
    /// [`TraceError::Refused`] where layers of the model have windows or states, whose
    /// prefixes begin at kept ends only.
    pub(crate) fn new(trace: &Trace, max_bytes: u64) -> Result<Self, TraceError> {
        let memory = &trace.header.memory;
        let parts = memory.layers.parts();
        if memory.state_bytes > 0 || parts.iter().any(|part| part.window != Window::Full) {
            return Err(TraceError::Refused {
                reason:
                    "a tier is replayed for models whose layers all see all tokens, and this one \
                         has windows or recurrent states"
                        .to_owned(),
            });
        }
        // Names are compared with each other alone, and a replay is the same each time.
        let key = StoreKey::new(&[0; MIN_SECRET]).map_err(|error| TraceError::Refused {
            reason: error.to_string(),
        })?;
        let unit = trace.unit as usize;
        Ok(Self {
            key,
            ledger: Ledger::default(),
            max_bytes,
            token_bytes: memory.cell_bytes.iter().sum(),
            whole: (GROUP_TOKENS / unit).max(1),
            tail: TAIL_TOKENS / unit,
        })
    }

    /// Number of the first tokens of a request's prompt that are there. They count as used.
    pub(crate) fn find(&mut self, request: &Request) -> usize {
        let most = request.prompt.len().saturating_sub(1);
        let groups = self.groups(request.prefix, &request.prompt[..most]);
        let n_found = self.n_there(&groups.whole);
        let mut n_tokens = n_found * self.whole;
        // Behind the last whole group that is there, in groups of the small size.
        let rest = &request.prompt[n_tokens..most.min(n_tokens + self.whole)];
        let tail = match groups.namers.get(n_found) {
            Some(namer) => names(namer.clone(), rest, self.tail).0,
            None => Vec::new(),
        };
        let n_small = self.n_there(&tail);
        n_tokens += n_small * self.tail;
        let used = groups.whole[..n_found].iter().chain(&tail[..n_small]);
        // The first ones are those that most others begin with: they go last.
        used.rev().for_each(|name| self.ledger.touch(*name));
        n_tokens
    }

    /// Keeps what is cached of a text that ended.
    pub(crate) fn publish(&mut self, text: &EndedText<'_>) {
        let request = &text.request.request;
        let tokens = [&request.prompt[..], text.chosen].concat();
        let groups = self.groups(request.prefix, &tokens);
        let rest = &tokens[groups.whole.len() * self.whole..];
        let tail = match groups.namers.last() {
            Some(namer) => names(namer.clone(), rest, self.tail).0,
            None => Vec::new(),
        };
        let small = tail.iter().map(|name| (*name, self.tail));
        let whole = groups.whole.iter().map(|name| (*name, self.whole));
        let all: Vec<(GroupName, usize)> = whole.chain(small).collect();
        for (name, n_tokens) in all.into_iter().rev() {
            self.ledger.insert(name, self.token_bytes * n_tokens as u64);
        }
        while self.ledger.n_bytes() > self.max_bytes
            && let Some(oldest) = self.ledger.oldest()
        {
            self.ledger.remove(oldest);
        }
    }

    fn n_there(&self, names: &[GroupName]) -> usize {
        let is_there = |name: &&GroupName| self.ledger.bytes_of(**name).is_some();
        names.iter().take_while(is_there).count()
    }

    /// The whole groups of these tokens, with the namers before and after each.
    fn groups(&self, prefix: PrefixUse, tokens: &[TokenId]) -> Groups {
        let PrefixUse::Within(salt) = prefix else {
            return Groups::default();
        };
        let identity = Identity {
            version: "",
            backend: "",
            fingerprint: &[],
            kv_types: "",
            adapters: "",
        };
        let namer = GroupNamer::new(&self.key, &identity, salt.0);
        let (whole, namers) = names(namer, tokens, self.whole);
        Groups { whole, namers }
    }
}

/// The whole groups of a text.
#[derive(Default)]
struct Groups {
    whole: Vec<GroupName>,
    /// The namer behind so many of them.
    namers: Vec<GroupNamer>,
}

/// The names of groups of a size, and the namers before the first and after each.
fn names(namer: GroupNamer, tokens: &[TokenId], size: usize) -> (Vec<GroupName>, Vec<GroupNamer>) {
    let mut namers = vec![namer.clone()];
    let mut names = Vec::new();
    if size > 0 {
        let mut namer = namer;
        for group in tokens.chunks_exact(size) {
            let numbers: Vec<u32> = group.iter().map(|token| token.0).collect();
            namer.push(&numbers);
            names.push(namer.name(GroupKind::Rows));
            namers.push(namer.clone());
        }
    }
    (names, namers)
}
