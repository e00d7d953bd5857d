//! [`Names`]: how the groups of a prefix are called in a store, and which tokens each has.
//!
//! Where every layer that remembers sees all tokens, a prefix is whole groups of tokens, then small
//! ones; up to 15 tokens at its end are in none. Where windows or states forget, it is one group of
//! all that is kept after its last token, and a mark that tells where to look for it. Invariant:
//! a name depends on all that the bits of its group depend on. Knows no tier.

use std::collections::BTreeMap;

use cellar_prefix_store::{
    GROUP_TOKENS, GroupKind, GroupName, GroupNamer, Identity, StoreKey, TAIL_TOKENS,
};
use cellar_scheduler::Salt;
use kv_backend::Backend;
use kv_core::{TokenId, memory::Memory};
use kv_rows::RowLayout;

use crate::decode::Engine;

/// Namers that are remembered, one for each salt.
const MAX_NAMERS: usize = 1024;

/// Small groups that may follow the last whole one.
const N_TAIL: usize = GROUP_TOKENS / TAIL_TOKENS - 1;

/// A group of a prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) name: GroupName,
    /// Its first token; 0 where it stands for all.
    pub(super) first: usize,
    /// The token behind its last one.
    pub(super) end: usize,
    pub(super) kind: GroupKind,
}

/// The names of groups.
#[derive(Debug)]
pub(super) struct Names {
    key: StoreKey,
    backend: String,
    fingerprint: Vec<u8>,
    kv_types: String,
    namers: BTreeMap<Salt, GroupNamer>,
}

impl Names {
    pub(super) fn of<B: Backend, M: Memory + Clone>(key: StoreKey, engine: &Engine<B, M>) -> Self {
        Self {
            key,
            backend: engine.backend().info().name,
            // A fingerprint is plain data, which JSON can tell.
            fingerprint: serde_json::to_vec(engine.fingerprint()).unwrap_or_default(),
            kv_types: stored_types(&engine.settings().layout),
            namers: BTreeMap::new(),
        }
    }

    fn namer(&mut self, salt: Salt) -> GroupNamer {
        if self.namers.len() >= MAX_NAMERS {
            self.namers.clear();
        }
        let identity = Identity {
            version: env!("CARGO_PKG_VERSION"),
            backend: &self.backend,
            fingerprint: &self.fingerprint,
            kv_types: &self.kv_types,
            adapters: "",
        };
        let new = || GroupNamer::new(&self.key, &identity, salt.0);
        self.namers.entry(salt).or_insert_with(new).clone()
    }

    /// The whole groups of these tokens.
    pub(super) fn whole(&mut self, salt: Salt, tokens: &[TokenId]) -> Vec<Piece> {
        let names = self.namer(salt).names(&numbers(tokens), GroupKind::Rows);
        pieces(names, 0, GROUP_TOKENS)
    }

    /// The small groups of these tokens behind the first `n_whole` whole ones: up to the next whole
    /// one, which is not there.
    pub(super) fn tail(&mut self, salt: Salt, tokens: &[TokenId], n_whole: usize) -> Vec<Piece> {
        let first = n_whole * GROUP_TOKENS;
        let tokens = numbers(tokens);
        let (before, rest) = tokens.split_at(first.min(tokens.len()));
        let mut namer = self.namer(salt);
        before
            .chunks(GROUP_TOKENS)
            .for_each(|group| namer.push(group));
        let rest = rest.get(..N_TAIL * TAIL_TOKENS).unwrap_or(rest);
        pieces(namer.tail_names(rest, GroupKind::Rows), first, TAIL_TOKENS)
    }

    /// All groups of these tokens, but for less than a small one at the end.
    pub(super) fn ranges(&mut self, salt: Salt, tokens: &[TokenId]) -> Vec<Piece> {
        let mut all = self.whole(salt, tokens);
        all.extend(self.tail(salt, tokens, all.len()));
        all
    }

    /// The group of what is kept after these tokens, and the mark for it.
    pub(super) fn end(&mut self, salt: Salt, tokens: &[TokenId]) -> [Piece; 2] {
        let end = tokens.len();
        let tokens = numbers(tokens);
        let (before, rest) = tokens.split_at(end - end % GROUP_TOKENS);
        let mut namer = self.namer(salt);
        before
            .chunks(GROUP_TOKENS)
            .for_each(|group| namer.push(group));
        let mark = namer.name(GroupKind::Mark);
        [
            end_piece(namer, rest, end),
            Piece {
                name: mark,
                first: before.len(),
                end: before.len(),
                kind: GroupKind::Mark,
            },
        ]
    }

    /// The marks within these tokens.
    pub(super) fn marks(&mut self, salt: Salt, tokens: &[TokenId]) -> Vec<GroupName> {
        let mut namer = self.namer(salt);
        let mut marks = vec![namer.name(GroupKind::Mark)];
        for group in numbers(tokens).as_chunks::<GROUP_TOKENS>().0 {
            namer.push(group);
            marks.push(namer.name(GroupKind::Mark));
        }
        marks
    }

    /// The beginnings of these tokens that may be kept behind a mark: the shortest first.
    pub(super) fn ends(&mut self, salt: Salt, tokens: &[TokenId], mark: usize) -> Vec<Piece> {
        let tokens = numbers(tokens);
        let first = (mark * GROUP_TOKENS).min(tokens.len());
        let (before, rest) = tokens.split_at(first);
        let mut namer = self.namer(salt);
        before
            .chunks(GROUP_TOKENS)
            .for_each(|group| namer.push(group));
        let n = rest.len().min(GROUP_TOKENS - 1);
        let ends = (0..=n).filter(|n| first + n > 0);
        ends.map(|n| end_piece(namer.clone(), &rest[..n], first + n))
            .collect()
    }
}

fn end_piece(mut namer: GroupNamer, rest: &[u32], end: usize) -> Piece {
    if !rest.is_empty() {
        namer.push(rest);
    }
    Piece {
        name: namer.name(GroupKind::End),
        first: 0,
        end,
        kind: GroupKind::End,
    }
}

fn pieces(names: Vec<GroupName>, first: usize, n_tokens: usize) -> Vec<Piece> {
    let firsts = (first..).step_by(n_tokens);
    let pieces = names.into_iter().zip(firsts).map(|(name, first)| Piece {
        name,
        first,
        end: first + n_tokens,
        kind: GroupKind::Rows,
    });
    pieces.collect()
}

fn numbers(tokens: &[TokenId]) -> Vec<u32> {
    tokens.iter().map(|token| token.0).collect()
}

/// The types in which each layer stores its rows and states: their number does not matter.
fn stored_types(layout: &RowLayout) -> String {
    let rows = layout.layers().iter().map(|rows| {
        let (layer, k, v) = (rows.layer, rows.k, rows.stored_v());
        format!("{layer:?} {k:?} {v:?};")
    });
    let states = layout.states().iter().map(|states| {
        let (layer, row, state_type) = (states.layer, states.row, states.state_type);
        format!("{layer:?} {row:?} {state_type:?};")
    });
    rows.chain(states).collect()
}
