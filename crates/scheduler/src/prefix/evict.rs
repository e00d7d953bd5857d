//! Which cached prefix is evicted, and how many bytes cached prefixes hold.
//!
//! The value of a prefix is the number of tokens that it saves for each byte that its eviction
//! frees, times its expected uses. Tokens that another prefix would save as well do not count, and
//! neither do rows that others share. Values age as in GreedyDual-Size-Frequency: the value of a
//! used prefix is raised by the inflation, the value of the prefix that was evicted last.
//! Invariant: the same cache and memory give the same prefix. The memory is only asked.

use std::collections::BTreeMap;

use kv_core::memory::{Memory, OwnedRows, RowsOf};
use kv_core::{SeqId, SeqSet};

use super::tree::Cut;
use super::{Line, PrefixCache};
use crate::config::EvictionPolicy;
use crate::request::Micros;

/// Bytes of the rows of a memory. The [default](RowBytes::default) counts each row as one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RowBytes {
    /// Of a cell, over all layers of its part, by number of the part.
    pub cells: Vec<u64>,
    /// Of a recurrent state, over all layers; `None` counts one.
    pub state: Option<u64>,
}

impl RowBytes {
    fn of(&self, owned: &OwnedRows) -> u64 {
        let bytes = match owned.rows {
            RowsOf::Part(part) => self.cells.get(part.as_usize()).copied(),
            RowsOf::States => self.state,
        };
        bytes.unwrap_or(1).saturating_mul(u64::from(owned.n_rows))
    }
}

/// What values of prefixes depend on.
#[derive(Debug)]
pub(crate) struct EvictionContext<'a, M> {
    pub(crate) policy: EvictionPolicy,
    pub(crate) cut: Cut,
    pub(crate) memory: &'a M,
}

impl<M> Clone for EvictionContext<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M> Copy for EvictionContext<'_, M> {}

/// How often a prefix is expected to be used, next to others.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Weights {
    /// Uses of what it continues, and one.
    n_expected: u32,
    /// Its own uses.
    n_used: u32,
    /// From where its value counts.
    base: f64,
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

    fn frequency(&self) -> f64 {
        // Any prefix may be used again, an edited conversation for example.
        const LEAST: f64 = 0.125;
        LEAST + f64::from(self.n_expected) + f64::from(self.n_used.saturating_sub(1))
    }
}

/// What an eviction would bring and lose.
#[derive(Clone, Copy, Debug, Default)]
struct Stake {
    /// Bytes of rows that nothing else has.
    n_bytes: u64,
    /// Tokens that no other prefix would save.
    n_saved: usize,
}

impl PrefixCache {
    /// Bytes of rows that cached prefixes alone have.
    pub(crate) fn n_bytes<M: Memory>(&self, memory: &M) -> u64 {
        let own: SeqSet = self.lines.keys().copied().collect();
        let owned = memory.owned_rows().into_iter();
        let owned = owned.filter(|owned| owned.seqs.is_subset(&own));
        owned.fold(0, |sum, owned| {
            sum.saturating_add(self.row_bytes.of(&owned))
        })
    }

    /// Evicts the line that is worth least: its sequence is the caller's.
    pub(crate) fn evict<M: Memory>(
        &mut self,
        now: Micros,
        weighing: EvictionContext<'_, M>,
    ) -> Option<Line> {
        let (seq, value) = match weighing.policy {
            EvictionPolicy::Value => {
                let stakes = self.stakes(weighing);
                let value = |line: &&Line| {
                    let stake = stakes.get(&line.seq).copied().unwrap_or_default();
                    let saved = stake.n_saved as f64 / stake.n_bytes.max(1) as f64;
                    line.weights.base + line.weights.frequency() * saved
                };
                let candidates = self.probation().map(|line| (value(&line), line));
                let least = candidates.min_by(|(a, line), (b, other)| {
                    let order = |line: &Line| (line.last_used, line.seq);
                    a.total_cmp(b).then(order(line).cmp(&order(other)))
                });
                least.map(|(value, line)| (line.seq, value))?
            }
            EvictionPolicy::SegmentedLru => (oldest(self.probation())?, 0.0),
            EvictionPolicy::Lru => (oldest(self.lines.values())?, 0.0),
        };
        self.inflation = self.inflation.max(value);
        let line = self.take(seq)?;
        self.remember(now, &line);
        Some(line)
    }

    /// Evicts a line that alone has more bytes than that, where there is one.
    pub(crate) fn evict_larger<M: Memory>(
        &mut self,
        now: Micros,
        n_bytes: u64,
        weighing: EvictionContext<'_, M>,
    ) -> Option<Line> {
        let stakes = self.stakes(weighing);
        let larger = stakes.iter().find(|(_, stake)| stake.n_bytes > n_bytes);
        let line = self.take(*larger?.0)?;
        self.remember(now, &line);
        Some(line)
    }

    /// The lines of which one is evicted next: those that were never used again, so that a scan
    /// over documents evicts no conversations. Where those with hits are more than three quarters,
    /// these: conversations that have ended make room for new ones.
    fn probation(&self) -> impl Iterator<Item = &Line> {
        let n_hit = self.lines.values().filter(|line| line.n_hits > 0).count();
        let is_hit = 4 * n_hit > 3 * self.lines.len();
        let lines = self.lines.values();
        lines.filter(move |line| (line.n_hits > 0) == is_hit)
    }

    fn stakes<M: Memory>(&self, weighing: EvictionContext<'_, M>) -> BTreeMap<SeqId, Stake> {
        let mut stakes: BTreeMap<SeqId, Stake> = BTreeMap::new();
        for owned in weighing.memory.owned_rows() {
            if let (Some(seq), 1) = (owned.seqs.first(), owned.seqs.len())
                && self.lines.contains_key(&seq)
            {
                stakes.entry(seq).or_default().n_bytes += self.row_bytes.of(&owned);
            }
        }
        self.tree.for_each_saved(weighing.cut, |seq, n_saved| {
            stakes.entry(seq).or_default().n_saved = n_saved;
        });
        stakes
    }
}

/// The line that was not used for the longest time.
fn oldest<'a>(lines: impl Iterator<Item = &'a Line>) -> Option<SeqId> {
    let oldest = lines.min_by_key(|line| (line.last_used, line.seq))?;
    Some(oldest.seq)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use kv_core::batch::{Batch, BatchRules, validate};
    use kv_core::memory::{Composite, MemoryInputs, Streams, UnifiedConfig};
    use kv_core::{Causality, PartIdx, TokenId, Window};

    use super::super::Salt;
    use super::*;
    use crate::request::RequestId;
    use crate::room::Trunk;

    /// A cache whose lines have these hits and lengths, and the memory that holds them.
    fn cache(lines: &[(u32, u32)]) -> (PrefixCache, Composite) {
        let n_seqs = 16;
        let mut memory = Composite::unified(UnifiedConfig {
            part: PartIdx(0),
            n_seqs,
            n_cells: 1000,
            streams: Streams::Shared,
            window: Window::Full,
            causality: Causality::Causal,
        })
        .unwrap();
        let rules = BatchRules {
            n_batch: 1000,
            n_seqs,
            n_vocab: 1000,
            n_embd: 1,
        };
        let mut cache = PrefixCache::default();
        for (number, &(n_hits, n_tokens)) in (0..).zip(lines) {
            let tokens: Vec<TokenId> = vec![TokenId(number); n_tokens as usize];
            let batch = Batch::prompt(SeqId(number), tokens.iter().copied());
            let batch = validate(&batch, &rules, |seq| memory.positions(seq)).unwrap();
            let mut steps = memory.begin(&batch, 1000).unwrap();
            while steps.next(&mut MemoryInputs::default()).is_some() {}
            let mut weights = Weights::new(0.0);
            (0..n_hits).for_each(|_| weights.hit(0.0));
            cache.restore(Line {
                seq: SeqId(number),
                tokens: tokens.into(),
                salt: Salt(0),
                request: RequestId(u64::from(number)),
                last_used: Micros(u64::from(number)),
                n_hits,
                trunk: Trunk::new(u64::from(number)),
                weights,
            });
        }
        (cache, memory)
    }

    fn first(lines: &[(u32, u32)], policy: EvictionPolicy) -> Option<u32> {
        let (mut cache, memory) = cache(lines);
        let weighing = EvictionContext {
            policy,
            cut: Cut::Anywhere,
            memory: &memory,
        };
        let evicted = cache.evict(Micros(100), weighing);
        evicted.map(|line| line.seq.0)
    }

    #[test]
    fn hits_protect_three_quarters() {
        for policy in [EvictionPolicy::SegmentedLru, EvictionPolicy::Value] {
            let evicted = |hits: &[u32]| {
                let lines: Vec<(u32, u32)> = hits.iter().map(|&n| (n, 20)).collect();
                first(&lines, policy)
            };
            assert_eq!(evicted(&[]), None);
            assert_eq!(evicted(&[0, 0, 0]), Some(0));
            assert_eq!(evicted(&[2, 0, 2, 0]), Some(1));
            assert_eq!(evicted(&[1, 3, 2, 0]), Some(3));
            // A new conversation has no hit yet.
            assert_eq!(evicted(&[1, 3, 2, 1, 0]), Some(0));
            assert_eq!(evicted(&[5]), Some(0));
        }
        // Without segments hits do not matter.
        let lines = [(1, 20), (0, 20), (2, 20), (0, 20)];
        assert_eq!(first(&lines, EvictionPolicy::Lru), Some(0));
    }

    /// Of two prefixes that share rows, the longer one costs what it has alone and saves as much;
    /// one that another covers saves nothing.
    #[test]
    fn values_count_what_no_other_has() {
        let (mut cache, mut memory) = cache(&[(0, 40), (0, 40)]);
        // A third is a part of the first.
        let copy = super::super::copy(SeqId(0), SeqId(2), 30);
        assert!(memory.apply(copy).unwrap().row_copies.is_empty());
        let line = cache.lines.get(&SeqId(0)).unwrap();
        let part = Line {
            seq: SeqId(2),
            tokens: line.tokens[..30].into(),
            ..line.clone()
        };
        cache.restore(part);
        cache.row_bytes = RowBytes {
            cells: vec![10],
            state: None,
        };
        assert_eq!(cache.n_bytes(&memory), 800);
        let weighing = |cut| EvictionContext {
            policy: EvictionPolicy::Value,
            cut,
            memory: &memory,
        };
        let stakes = |cut| -> Vec<(u64, usize)> {
            let stakes = cache.stakes(weighing(cut));
            stakes.values().map(|s| (s.n_bytes, s.n_saved)).collect()
        };
        assert_eq!(stakes(Cut::Anywhere), [(100, 10), (400, 40), (0, 0)]);
        assert_eq!(stakes(Cut::AtEnds), [(100, 10), (400, 40), (0, 30)]);
        let evicted = cache.evict(Micros(9), weighing(Cut::Anywhere)).unwrap();
        assert_eq!(evicted.seq, SeqId(2));
        // What alone has more than may be goes first.
        let larger = cache.evict_larger(Micros(9), 399, weighing(Cut::Anywhere));
        assert!(larger.is_some());
    }

    /// The same where a cell takes ten bytes.
    fn cache_with_bytes(lines: &[(u32, u32)]) -> (PrefixCache, Composite) {
        let (mut cache, memory) = cache(lines);
        cache.row_bytes = RowBytes {
            cells: vec![10],
            state: None,
        };
        (cache, memory)
    }

    #[test]
    fn a_value_is_what_a_byte_saves() {
        // Equal for all lines without rows in common: the oldest goes, not the shortest.
        let (mut cache, memory) = cache_with_bytes(&[(0, 40), (0, 20)]);
        let weighing = EvictionContext {
            policy: EvictionPolicy::Value,
            cut: Cut::Anywhere,
            memory: &memory,
        };
        let evicted = cache.evict(Micros(100), weighing).unwrap();
        assert_eq!(evicted.seq, SeqId(0));
        // What is kept from now on counts from there; so does what is used again.
        assert_eq!(cache.inflation, 1.125 * 0.1);
        cache.inflation = 7.0;
        cache.hit(Micros(101), SeqId(1));
        let line = cache.lines.get(&SeqId(1)).unwrap();
        assert_eq!((line.weights.base, line.last_used), (7.0, Micros(101)));
        cache.evict(Micros(102), weighing).unwrap();
        assert!(cache.inflation > 7.0);
    }

    #[test]
    fn orders_of_use_need_no_values() {
        for policy in [EvictionPolicy::Lru, EvictionPolicy::SegmentedLru] {
            let (mut cache, memory) = cache_with_bytes(&[(0, 40), (0, 20)]);
            let weighing = EvictionContext {
                policy,
                cut: Cut::Anywhere,
                memory: &memory,
            };
            assert_eq!(cache.evict(Micros(9), weighing).unwrap().seq, SeqId(0));
            assert_eq!(cache.inflation, 0.0);
        }
    }

    #[test]
    fn a_line_that_is_too_large_goes_and_is_remembered() {
        let (mut cache, memory) = cache_with_bytes(&[(0, 20), (0, 40)]);
        let weighing = EvictionContext {
            policy: EvictionPolicy::Lru,
            cut: Cut::Anywhere,
            memory: &memory,
        };
        assert!(cache.evict_larger(Micros(9), 400, weighing).is_none());
        let larger = cache.evict_larger(Micros(9), 399, weighing).unwrap();
        assert_eq!(larger.seq, SeqId(1));
        let found = cache.evicted(&larger.tokens, larger.salt, Micros(12));
        assert_eq!(found, Some((Micros(3), 40)));
    }

    #[test]
    fn a_line_inherits_the_hits_of_what_it_continues_by_half() {
        let inherited = |n_tokens: usize| {
            let (mut cache, _) = cache(&[(2, 20)]);
            let before = cache.lines.get(&SeqId(0)).unwrap().clone();
            let tokens = vec![TokenId(0); n_tokens].into();
            let seq = SeqId(1);
            cache.insert(Line {
                seq,
                tokens,
                n_hits: 9,
                ..before
            });
            let line = cache.lines.get(&seq).unwrap();
            (line.n_hits, line.weights.n_expected)
        };
        assert_eq!(inherited(40), (2, 3));
        assert_eq!(inherited(41), (0, 1));
    }

    #[test]
    fn a_continuation_takes_over_what_is_expected() {
        let mut first = Weights::new(0.0);
        first.hit(0.0);
        first.hit(0.0);
        let mut next = Weights::new(1.0);
        next.continue_from(&mut first);
        assert_eq!((first.frequency(), next.frequency()), (1.125, 3.125));
        // What several texts begin with goes on being used.
        first.hit(2.0);
        first.hit(2.0);
        assert_eq!((first.frequency(), first.base), (3.125, 2.0));
    }
}
