//! Which cached prefix is evicted, and how many bytes cached prefixes hold.
//!
//! The value of a prefix is the number of tokens that it saves for each byte that its eviction
//! frees, times its expected uses. Tokens that another prefix would save as well do not count, and
//! neither do rows that others share. Values age as in GreedyDual-Size-Frequency: the value of a
//! used prefix is raised by the inflation, the value of the prefix that was evicted last. Whether
//! value or age decides is the [`EvictionDuel`]'s to say, unless one was asked for.
//! Invariant: the same cache and memory give the same prefix. The memory is only asked.

use std::collections::BTreeMap;

use cellar_prefix_store::{Candidate, Eviction, EvictionDuel, EvictionRule};
use kv_core::memory::Memory;
use kv_core::{SeqId, SeqSet};

use super::PrefixCache;
use super::line::CachedLine;
use super::tree::Cut;
use crate::data::config::EvictionPolicy;
use crate::data::ids::Micros;

/// The things that values of prefixes depend on.
#[derive(Debug)]
pub(crate) struct EvictionContext<'a, M> {
    pub(crate) policy: EvictionPolicy,
    pub(crate) cut: Cut,
    pub(crate) memory: &'a M,
    /// The prefix that does not go: a request is to begin with it.
    pub(crate) kept: Option<SeqId>,
}

impl<M> Clone for EvictionContext<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M> Copy for EvictionContext<'_, M> {}

/// The bytes that an eviction frees, and the tokens that it costs.
#[derive(Clone, Copy, Debug, Default)]
struct EvictionEffect {
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
        context: EvictionContext<'_, M>,
    ) -> Option<CachedLine> {
        let (seq, value, ghost) = match context.policy {
            EvictionPolicy::Adaptive => {
                let lines = self.candidates(context);
                let rule = self.duel.active();
                let Eviction { key, number } = self.duel.evict(&lines)?;
                (key, value_of(&lines, key, rule), Some(number))
            }
            // A duel without a past evicts by value.
            EvictionPolicy::Value => {
                let lines = self.candidates(context);
                let Eviction { key, .. } = EvictionDuel::new().evict(&lines)?;
                (key, value_of(&lines, key, EvictionRule::Value), None)
            }
            EvictionPolicy::SegmentedLru => (oldest(self.probation(context.kept))?, 0.0, None),
            EvictionPolicy::Lru => (oldest(self.others(context.kept))?, 0.0, None),
        };
        self.inflation = self.inflation.max(value);
        let line = self.take(seq)?;
        self.remember(now, &line, ghost);
        Some(line)
    }

    /// The lines as the rules of evictions see them.
    fn candidates<M: Memory>(&self, context: EvictionContext<'_, M>) -> Vec<Candidate<SeqId>> {
        let effects = self.effects(context);
        let lines = self.others(context.kept).map(|line| {
            let effect = effects.get(&line.seq).copied().unwrap_or_default();
            let saved = effect.n_saved as f64 / effect.n_bytes.max(1) as f64;
            Candidate {
                key: line.seq,
                last_used: line.last_used.0,
                value: line.weights.base + line.weights.frequency() * saved,
                n_hits: line.n_hits,
                n_saved: effect.n_saved as u64,
            }
        });
        lines.collect()
    }

    /// Evicts a line that alone has more bytes than that, where there is one.
    fn evict_larger<M: Memory>(
        &mut self,
        now: Micros,
        n_bytes: u64,
        context: EvictionContext<'_, M>,
    ) -> Option<CachedLine> {
        let effects = self.effects(context);
        let larger = effects.iter().find(|(_, effect)| effect.n_bytes > n_bytes);
        let line = self.take(*larger?.0)?;
        self.remember(now, &line, None);
        Some(line)
    }

    /// Evicts a line where all together have more bytes than `limit`, if that is to be checked: one
    /// that alone has more, as it would push all others out first, or else the one of least value.
    pub(crate) fn keep_budget<M: Memory>(
        &mut self,
        now: Micros,
        limit: u64,
        context: EvictionContext<'_, M>,
    ) -> Option<CachedLine> {
        let is_due = std::mem::take(&mut self.budget_is_due);
        if !is_due || self.n_bytes(context.memory) <= limit {
            return None;
        }
        self.budget_is_due = true;
        let larger = self.evict_larger(now, limit, context);
        larger.or_else(|| self.evict(now, context))
    }

    /// The lines of which one is evicted next: those that were never used again, so that a scan
    /// over documents evicts no conversations. Where those with hits are more than three quarters,
    /// these: conversations that have ended make room for new ones.
    fn probation(&self, kept: Option<SeqId>) -> impl Iterator<Item = &CachedLine> {
        let n_hit = self.others(kept).filter(|line| line.n_hits > 0).count();
        let is_hit = 4 * n_hit > 3 * self.others(kept).count();
        let lines = self.others(kept);
        lines.filter(move |line| (line.n_hits > 0) == is_hit)
    }

    /// All lines but the one that is kept.
    fn others(&self, kept: Option<SeqId>) -> impl Iterator<Item = &CachedLine> {
        let lines = self.lines.values();
        lines.filter(move |line| Some(line.seq) != kept)
    }

    fn effects<M: Memory>(
        &self,
        context: EvictionContext<'_, M>,
    ) -> BTreeMap<SeqId, EvictionEffect> {
        let mut effects: BTreeMap<SeqId, EvictionEffect> = BTreeMap::new();
        for owned in context.memory.owned_rows() {
            if let (Some(seq), 1) = (owned.seqs.first(), owned.seqs.len())
                && self.lines.contains_key(&seq)
            {
                effects.entry(seq).or_default().n_bytes += self.row_bytes.of(&owned);
            }
        }
        self.tree.for_each_saved(context.cut, |seq, n_saved| {
            effects.entry(seq).or_default().n_saved = n_saved;
        });
        effects
    }
}

/// The value of a line that a rule evicts; by age, values do not matter.
fn value_of(lines: &[Candidate<SeqId>], key: SeqId, rule: EvictionRule) -> f64 {
    let line = lines.iter().find(|line| line.key == key);
    match rule {
        EvictionRule::Value => line.map_or(0.0, |line| line.value),
        EvictionRule::Recency => 0.0,
    }
}

/// The line that was not used for the longest time.
fn oldest<'a>(lines: impl Iterator<Item = &'a CachedLine>) -> Option<SeqId> {
    let oldest = lines.min_by_key(|line| (line.last_used, line.seq))?;
    Some(oldest.seq)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use kv_core::batch::{Batch, BatchRules, validate};
    use kv_core::memory::{Composite, MemoryInputs, Streams, UnifiedConfig};
    use kv_core::{Causality, PartIdx, TokenId, Window};

    use super::*;
    use crate::data::active::SharedPrefix;
    use crate::data::config::RowBytes;
    use crate::data::ids::{RequestId, Salt};
    use crate::parts::prefix::line::Weights;

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
            cache.restore(CachedLine {
                seq: SeqId(number),
                n_prompt: tokens.len(),
                tokens: tokens.into(),
                salt: Salt(0),
                request: RequestId(u64::from(number)),
                last_used: Micros(u64::from(number)),
                n_hits,
                shared: SharedPrefix::new(u64::from(number)),
                weights,
            });
        }
        (cache, memory)
    }

    fn first(lines: &[(u32, u32)], policy: EvictionPolicy) -> Option<u32> {
        let (mut cache, memory) = cache(lines);
        let context = EvictionContext {
            policy,
            cut: Cut::Anywhere,
            memory: &memory,
            kept: None,
        };
        let evicted = cache.evict(Micros(100), context);
        evicted.map(|line| line.seq.0)
    }

    #[test]
    fn hits_protect_three_quarters() {
        for policy in [
            EvictionPolicy::SegmentedLru,
            EvictionPolicy::Value,
            EvictionPolicy::Adaptive,
        ] {
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
        let copy = crate::data::edits::copy(SeqId(0), SeqId(2), 30);
        assert!(memory.apply(copy).unwrap().row_copies.is_empty());
        let line = cache.lines.get(&SeqId(0)).unwrap();
        let part = CachedLine {
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
        let context = |cut| EvictionContext {
            policy: EvictionPolicy::Value,
            cut,
            memory: &memory,
            kept: None,
        };
        let effects = |cut| -> Vec<(u64, usize)> {
            let effects = cache.effects(context(cut));
            effects.values().map(|s| (s.n_bytes, s.n_saved)).collect()
        };
        assert_eq!(effects(Cut::Anywhere), [(100, 10), (400, 40), (0, 0)]);
        assert_eq!(effects(Cut::AtEnds), [(100, 10), (400, 40), (0, 30)]);
        let evicted = cache.evict(Micros(9), context(Cut::Anywhere)).unwrap();
        assert_eq!(evicted.seq, SeqId(2));
        // What alone has more than may be goes first.
        let larger = cache.evict_larger(Micros(9), 399, context(Cut::Anywhere));
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
        let context = EvictionContext {
            policy: EvictionPolicy::Value,
            cut: Cut::Anywhere,
            memory: &memory,
            kept: None,
        };
        let evicted = cache.evict(Micros(100), context).unwrap();
        assert_eq!(evicted.seq, SeqId(0));
        // What is kept from now on counts from there; so does what is used again.
        assert_eq!(cache.inflation, 1.125 * 0.1);
        cache.inflation = 7.0;
        cache.hit(Micros(101), SeqId(1));
        let line = cache.lines.get(&SeqId(1)).unwrap();
        assert_eq!((line.weights.base, line.last_used), (7.0, Micros(101)));
        cache.evict(Micros(102), context).unwrap();
        assert!(cache.inflation > 7.0);
    }

    #[test]
    fn orders_of_use_need_no_values() {
        for policy in [EvictionPolicy::Lru, EvictionPolicy::SegmentedLru] {
            let (mut cache, memory) = cache_with_bytes(&[(0, 40), (0, 20)]);
            let context = EvictionContext {
                policy,
                cut: Cut::Anywhere,
                memory: &memory,
                kept: None,
            };
            assert_eq!(cache.evict(Micros(9), context).unwrap().seq, SeqId(0));
            assert_eq!(cache.inflation, 0.0);
        }
    }

    #[test]
    fn a_line_that_is_too_large_goes_and_is_remembered() {
        let (mut cache, memory) = cache_with_bytes(&[(0, 20), (0, 40)]);
        let context = EvictionContext {
            policy: EvictionPolicy::Lru,
            cut: Cut::Anywhere,
            memory: &memory,
            kept: None,
        };
        assert!(cache.evict_larger(Micros(9), 400, context).is_none());
        let larger = cache.evict_larger(Micros(9), 399, context).unwrap();
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
            cache.insert(CachedLine {
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
