//! [`PrefixCache`]: sequences of no running request, kept for prompts with the same prefix.
//!
//! A cached prefix is a sequence of the memory: a copy of it shares its cells. It is found in a
//! radix tree of tokens, so a prompt may part from it anywhere. Running requests are sources, too.
//! Invariant: the memory holds exactly the tokens of each cached prefix, the tree has exactly the
//! cached prefixes, and requests of different salts never share one. Which is dropped first is
//! decided in `evict.rs`, whether any is by the scheduler.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use cellar_prefix_store::EvictionDuel;
use kv_core::memory::{Memory, Refusal};
use kv_core::{MAX_SEQS, Pos, SeqId, TokenId};

use self::line::{CachedLine, Weights};
use self::tree::{Cut, PrefixTree, TreeMatch};
use crate::data::active::SharedPrefix;
use crate::data::config::RowBytes;
use crate::data::ids::{Micros, Salt};
use crate::data::reuse::{Missed, n_common};

pub(crate) mod evict;
pub(crate) mod line;
pub(crate) mod tree;

/// Shorter beginnings are computed again.
pub(crate) const MIN_REUSED: usize = 8;

/// Dropped prefixes that are remembered to say so; of those that the other rule of the
/// [`EvictionDuel`] would have kept, as many as there may be sequences.
const N_REMEMBERED: usize = 64;

/// A prefix that was evicted.
#[derive(Clone, Debug)]
struct EvictedPrefix {
    /// Number of prefixes that were evicted before it.
    number: u64,
    tokens: Arc<[TokenId]>,
    salt: Salt,
    at: Micros,
    /// Its number in the duel, where that evicted it.
    ghost: Option<u64>,
}

/// The holder of tokens that others may share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Holder {
    /// A cached prefix.
    Line,
    /// A request that runs.
    Running,
}

/// A sequence that a prompt may begin with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source<'a> {
    pub(crate) holder: Holder,
    pub(crate) seq: SeqId,
    /// The tokens that the memory holds of it.
    pub(crate) tokens: &'a [TokenId],
    pub(crate) shared: SharedPrefix,
}

/// The result of looking a prompt up.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Lookup<'a> {
    /// The source that it can begin with, and the number of tokens of it.
    pub(crate) found: Option<(Source<'a>, usize)>,
    /// Why not with more.
    pub(crate) missed: Option<Missed>,
    /// The most tokens in common with a prefix that is cached, or was.
    pub(crate) n_common: usize,
}

/// The first `n` tokens without rows of pictures at their end that go on behind it. Names of single
/// rows are short, so two pictures may have one in common; those of all rows of a picture are not.
fn whole_pictures(tokens: &[TokenId], n: usize) -> usize {
    let is_inside = |at: &usize| {
        let row = |at: usize| tokens.get(at).is_some_and(|token| token.names_row());
        *at > 0 && row(*at - 1) && row(*at)
    };
    let mut ends = (0..=n).rev().skip_while(is_inside);
    ends.next().unwrap_or(0)
}

/// The cached prefixes.
#[derive(Clone, Debug, Default)]
pub(crate) struct PrefixCache {
    /// By sequence.
    lines: BTreeMap<SeqId, CachedLine>,
    tree: PrefixTree<SeqId>,
    /// Those that were evicted, the last one last.
    dropped: VecDeque<EvictedPrefix>,
    dropped_tree: PrefixTree<u64>,
    n_dropped: u64,
    duel: EvictionDuel<SeqId>,
    /// The highest value of a prefix that was evicted: those that are used from now on count from
    /// here.
    inflation: f64,
    row_bytes: RowBytes,
    /// They may have more bytes than they may since the last step.
    budget_is_due: bool,
    /// Sequences that were begun without tokens of others.
    n_roots: u64,
}

impl PrefixCache {
    pub(crate) fn row_bytes(&self) -> &RowBytes {
        &self.row_bytes
    }

    pub(crate) fn set_row_bytes(&mut self, row_bytes: RowBytes) {
        self.row_bytes = row_bytes;
    }

    /// Their bytes are to be compared with their budget before the next step.
    pub(crate) fn check_budget(&mut self) {
        self.budget_is_due = true;
    }

    /// The cells of a sequence that begins with nothing of others.
    pub(crate) fn new_root(&mut self) -> SharedPrefix {
        self.n_roots += 1;
        SharedPrefix::new(self.n_roots)
    }

    pub(crate) fn lines(&self) -> impl Iterator<Item = &CachedLine> {
        self.lines.values()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// Keeps the tokens of a sequence. They inherit the hits of a line that is at least half of
    /// them: the next turn of a conversation is worth as much as the one before, which is worth
    /// little then.
    pub(crate) fn insert(&mut self, line: CachedLine) {
        let ends = self.tree.ends_within(line.salt, &line.tokens);
        let continued = ends
            .iter()
            .filter(|end| 2 * end.n_tokens >= line.tokens.len());
        let (mut n_hits, mut weights) = (0, Weights::new(self.inflation));
        for end in continued {
            if let Some(before) = self.lines.get_mut(&end.entry) {
                n_hits = n_hits.max(before.n_hits);
                weights.continue_from(&mut before.weights);
            }
        }
        self.restore(CachedLine {
            n_hits,
            weights,
            ..line
        });
    }

    /// Keeps a line that was kept before, with the hits that it had.
    pub(crate) fn restore(&mut self, line: CachedLine) {
        self.tree.insert(line.salt, &line.tokens, line.seq);
        self.lines.insert(line.seq, line);
    }

    /// The line or running request of this salt that lets a request with these tokens begin latest,
    /// and why not later. `is_refused` takes how many tokens of a source would be copied.
    pub(crate) fn find<'a>(
        &'a self,
        tokens: &[TokenId],
        salt: Salt,
        now: Micros,
        running: impl Iterator<Item = Source<'a>>,
        is_refused: impl Fn(&Source<'_>, usize) -> Option<Refusal>,
    ) -> Lookup<'a> {
        let most = tokens.len().saturating_sub(1);
        if most < MIN_REUSED {
            let (n_prompt, least) = (tokens.len(), MIN_REUSED);
            let missed = Some(Missed::TooShort { n_prompt, least });
            return Lookup {
                missed,
                ..Lookup::default()
            };
        }
        let found = self.sources(tokens, salt, running);
        let longest = found.first().copied();
        let mut missed = match longest {
            Some((common, source)) if common > 0 && common < source.tokens.len().min(most) => {
                Some(Missed::Differs { at: common })
            }
            Some((common, _)) if common > 0 => None,
            _ => Some(Missed::NeverSeen),
        };
        let longest = longest.map_or(0, |(common, _)| common);
        let mut n_common = longest;
        if let Some((age, common)) = self.evicted(tokens, salt, now)
            && common > longest.max(MIN_REUSED)
        {
            n_common = common;
            missed = Some(Missed::Evicted { age, common });
        }
        let mut lookup = Lookup {
            n_common,
            ..Lookup::default()
        };
        for (common, source) in found {
            let n_tokens = whole_pictures(tokens, common.min(most));
            if n_tokens < MIN_REUSED {
                break;
            }
            match is_refused(&source, n_tokens) {
                None => {
                    lookup.found = Some((source, n_tokens));
                    lookup.missed = missed.filter(|_| n_tokens < most);
                    if let Some(Missed::StateGone { nearest, .. }) = &mut lookup.missed {
                        *nearest = n_tokens;
                    }
                    return lookup;
                }
                Some(refusal) if n_tokens == whole_pictures(tokens, longest.min(most)) => {
                    missed = Some(missed_by(&refusal, common, missed));
                }
                Some(_) => {}
            }
        }
        Lookup { missed, ..lookup }
    }

    /// The lines and running requests that have tokens in common with these, by how many.
    fn sources<'a>(
        &'a self,
        tokens: &[TokenId],
        salt: Salt,
        running: impl Iterator<Item = Source<'a>>,
    ) -> Vec<(usize, Source<'a>)> {
        let lines = self.tree.matches(salt, tokens).into_iter();
        let lines = lines.filter_map(|found| {
            let line = self.lines.get(&found.entry)?;
            let source = Source {
                holder: Holder::Line,
                seq: line.seq,
                tokens: &line.tokens,
                shared: line.shared,
            };
            Some((found.n_common, source))
        });
        let running = running.map(|source| (n_common(source.tokens, tokens), source));
        let mut found: Vec<(usize, Source<'a>)> = lines.chain(running).collect();
        found.sort_by_key(|(common, source)| {
            let worst = std::cmp::Reverse(*common);
            (worst, source.holder, source.tokens.len(), source.seq)
        });
        found
    }

    /// Number of the first of these tokens that a line of this salt has.
    pub(crate) fn longest(&self, tokens: &[TokenId], salt: Salt) -> usize {
        let matches = self.tree.matches(salt, tokens);
        matches.first().map_or(0, |found| found.n_common)
    }

    /// Tokens of the longest line of this salt that is the beginning of these.
    pub(crate) fn longest_end(&self, tokens: &[TokenId], salt: Salt) -> usize {
        let ends = self.tree.ends_within(salt, tokens);
        ends.last().map_or(0, |end| end.n_tokens)
    }

    /// Tokens of a line.
    pub(crate) fn n_tokens(&self, seq: SeqId) -> Option<usize> {
        self.lines.get(&seq).map(|line| line.tokens.len())
    }

    /// A line.
    pub(crate) fn line(&self, seq: SeqId) -> Option<&CachedLine> {
        self.lines.get(&seq)
    }

    /// Of the prefixes that were dropped the one with most tokens in common: how long ago, and how
    /// many.
    fn evicted(&self, tokens: &[TokenId], salt: Salt, now: Micros) -> Option<(Micros, usize)> {
        let matches = self.dropped_tree.matches(salt, tokens).into_iter();
        let found = matches.max_by_key(|found| (found.n_common, found.entry))?;
        let mut dropped = self.dropped.iter();
        let dropped = dropped.find(|dropped| dropped.number == found.entry)?;
        let age = Micros(now.0.saturating_sub(dropped.at.0));
        Some((age, found.n_common))
    }

    /// Notes that a line was taken over by a request.
    pub(crate) fn hit(&mut self, now: Micros, seq: SeqId) {
        if let Some(line) = self.lines.get_mut(&seq) {
            line.last_used = now;
            line.n_hits += 1;
            line.weights.hit(self.inflation);
        }
    }

    /// Takes a line out: its sequence is the caller's.
    pub(crate) fn take(&mut self, seq: SeqId) -> Option<CachedLine> {
        let line = self.lines.remove(&seq)?;
        self.duel.line_gone(seq);
        self.tree.remove(line.salt, &line.tokens, seq);
        Some(line)
    }

    /// Remembers a line that was evicted, in place of the one before so many others.
    fn remember(&mut self, now: Micros, line: &CachedLine, ghost: Option<u64>) {
        let is_ghost = |dropped: &EvictedPrefix| {
            let number = dropped.ghost;
            number.is_some_and(|number| self.duel.is_ghost(number))
        };
        let mut at = None;
        if self.dropped.len() >= N_REMEMBERED {
            let all_ghosts = (self.dropped.len() >= MAX_SEQS).then_some(0);
            at = self
                .dropped
                .iter()
                .position(|d| !is_ghost(d))
                .or(all_ghosts);
        }
        if let Some(first) = at.and_then(|at| self.dropped.remove(at)) {
            let tree = &mut self.dropped_tree;
            tree.remove(first.salt, &first.tokens, first.number);
        }
        let (number, salt) = (self.n_dropped, line.salt);
        self.n_dropped += 1;
        self.dropped_tree.insert(salt, &line.tokens, number);
        self.dropped.push_back(EvictedPrefix {
            number,
            tokens: Arc::clone(&line.tokens),
            salt,
            at: now,
            ghost,
        });
    }

    /// A request comes that begins with so many tokens of a line: what the rules of evictions save
    /// and lose by it.
    pub(crate) fn judge(&mut self, tokens: &[TokenId], salt: Salt, n_found: usize, cut: Cut) {
        let most = tokens.len().saturating_sub(1);
        let lines = matches(&self.tree, cut, salt, tokens);
        let unmarked = lines.iter().filter(|line| !self.duel.is_marked(line.entry));
        let n_unmarked = unmarked.map(|line| line.n_common).max().unwrap_or(0);
        let mut n_more = n_found.saturating_sub(n_unmarked) as u64;
        for line in lines.iter().filter(|line| line.n_common >= n_found.max(1)) {
            if self.duel.is_marked(line.entry) {
                self.duel.line_used(line.entry, n_more);
                n_more = 0;
            }
        }
        let dropped = matches(&self.dropped_tree, cut, salt, tokens).into_iter();
        let ghosts = dropped.filter_map(|found| {
            let at = (self.dropped).binary_search_by_key(&found.entry, |dropped| dropped.number);
            let number = self.dropped.get(at.ok()?)?.ghost?;
            let n_common = found.n_common.min(most);
            // Shorter beginnings would be computed again.
            let is_lost = n_common > n_found && n_common >= MIN_REUSED;
            let n_more = n_common.saturating_sub(n_found) as u64;
            (is_lost && self.duel.is_ghost(number)).then_some((n_more, number))
        });
        if let Some((n_more, number)) = ghosts.max() {
            self.duel.ghost_asked(number, n_more);
        }
    }

    /// Takes the lines out whose tokens the memory does not hold any more.
    pub(crate) fn take_broken<M: Memory>(&mut self, memory: &M) -> Vec<CachedLine> {
        let lines = self.lines.values();
        let broken = lines.filter(|line| memory.next_pos(line.seq).as_usize() != line.tokens.len());
        let broken: Vec<SeqId> = broken.map(|line| line.seq).collect();
        self.take_all(broken)
    }

    fn take_all(&mut self, seqs: Vec<SeqId>) -> Vec<CachedLine> {
        let taken = seqs.into_iter().filter_map(|seq| self.take(seq));
        taken.collect()
    }

    /// Takes all lines out.
    pub(crate) fn clear(&mut self) -> Vec<CachedLine> {
        self.dropped.clear();
        self.duel = EvictionDuel::new();
        self.dropped_tree = PrefixTree::default();
        self.tree = PrefixTree::default();
        std::mem::take(&mut self.lines).into_values().collect()
    }

    /// Takes the lines out that the tokens of sequence `by` begin with: where a sequence can be cut
    /// anywhere, the longer line serves as well.
    pub(crate) fn take_covered(
        &mut self,
        by: SeqId,
        tokens: &[TokenId],
        salt: Salt,
    ) -> Vec<CachedLine> {
        let covered = self.tree.ends_within(salt, tokens).into_iter();
        let covered = covered.map(|end| end.entry).filter(|&seq| seq != by);
        self.take_all(covered.collect())
    }

    /// True if a line of this salt begins with these tokens.
    pub(crate) fn covers(&self, tokens: &[TokenId], salt: Salt) -> bool {
        self.tree.covers(salt, tokens)
    }

    /// True if a line of this salt has these tokens and no others.
    pub(crate) fn has(&self, tokens: &[TokenId], salt: Salt) -> bool {
        let ends = self.tree.ends_within(salt, tokens);
        ends.last().is_some_and(|end| end.n_tokens == tokens.len())
    }
}

/// The entries that have tokens in common with these, where they can be cut so.
fn matches<T: Copy + Eq>(
    tree: &PrefixTree<T>,
    cut: Cut,
    salt: Salt,
    tokens: &[TokenId],
) -> Vec<TreeMatch<T>> {
    match cut {
        Cut::Anywhere => tree.matches(salt, tokens),
        Cut::AtEnds => tree.ends_within(salt, tokens),
    }
}

/// Why tokens in common cannot be taken, after what was so of another text with as many.
fn missed_by(refusal: &Refusal, common: usize, other: Option<Missed>) -> Missed {
    let state_after = |last: Pos| Missed::StateGone {
        nearest: match other {
            Some(Missed::StateGone { nearest, .. }) => nearest.min(last.as_usize() + 1),
            _ => last.as_usize() + 1,
        },
        common,
    };
    match refusal {
        Refusal::WindowForgotten(forgotten) => Missed::WindowForgotten {
            from: forgotten.needed_from,
            common,
        },
        Refusal::StateGone { oldest, .. } => state_after(*oldest),
        Refusal::StateIndivisible { has, .. } => state_after(has.last),
        _ => Missed::Refused { common },
    }
}
