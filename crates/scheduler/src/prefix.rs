//! [`PrefixCache`]: sequences of no running request, kept for prompts with the same prefix, and
//! [`Reuse`]: how much of them a request took, and why not more.
//!
//! A cached prefix is a sequence of the memory: a copy of it shares its cells. It is found by
//! comparing tokens, so a prompt may part from it anywhere. Running requests are sources, too. Invariant: the memory holds exactly the
//! tokens of each cached prefix, and requests of different salts never share one. Decides which is
//! dropped first; whether any is, is decided by the scheduler.

use std::collections::VecDeque;

use kv_core::memory::{Composite, Edit, Memory, Refusal};
use kv_core::{Pos, PosRange, SeqId, TokenId};

use crate::config::EvictionPolicy;
use crate::note::{DropReason, Note};
use crate::request::{Micros, RequestId};
use crate::room::Trunk;
use crate::state::Running;

/// Shorter beginnings are computed again.
pub(crate) const MIN_REUSED: usize = 8;

/// Dropped prefixes that are remembered to say so.
const N_REMEMBERED: usize = 64;

/// Who may share cached prefixes: only requests with the same salt do. How long a first token takes
/// shows what was cached, so requests of people who must not learn of each other need different
/// salts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Salt(pub u64);

/// Whether a request takes part in the cache of prefixes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefixUse {
    /// With all requests of this salt.
    Within(Salt),
    /// It neither takes nor leaves anything.
    Off,
}

impl Default for PrefixUse {
    fn default() -> Self {
        Self::Within(Salt::default())
    }
}

/// How many tokens of a request were there already, of cached prefixes or of running requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reuse {
    /// Tokens that need not be computed.
    pub n_tokens: usize,
    /// Why they are not all but the last; `None` where they are, or where everything cached that
    /// shares its prefix was taken.
    pub missed: Option<Missed>,
}

/// Why fewer tokens were reused than the prompt has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missed {
    /// The cached prefix with the longest common prefix has another token here.
    Differs {
        /// The first position whose tokens differ.
        at: usize,
    },
    /// A sliding window has forgotten what the next token would see.
    WindowForgotten {
        /// The first position that would be needed.
        from: Pos,
        /// Tokens of the common prefix.
        common: usize,
    },
    /// The recurrent state after the common tokens is not kept.
    StateGone {
        /// Tokens of the common prefix.
        common: usize,
    },
    /// It was cached, and dropped for others.
    Evicted {
        /// How long ago, in microseconds.
        age: Micros,
        /// Tokens of the common prefix.
        common: usize,
    },
    /// Prompts of so few tokens are computed again.
    TooShort {
        /// Tokens of the prompt.
        n_prompt: usize,
        /// The fewest that are reused.
        least: usize,
    },
    /// The request, or the scheduler, does not take part.
    Disabled,
    /// Nothing that was cached begins so.
    NeverSeen,
    /// The memory refused for another reason.
    Refused {
        /// Tokens of the common prefix.
        common: usize,
    },
}

impl Missed {
    /// The reason in one word.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Differs { .. } => "differs",
            Self::WindowForgotten { .. } => "window_forgotten",
            Self::StateGone { .. } => "state_gone",
            Self::Evicted { .. } => "evicted",
            Self::TooShort { .. } => "too_short",
            Self::Disabled => "disabled",
            Self::NeverSeen => "never_seen",
            Self::Refused { .. } => "refused",
        }
    }
}

/// A cached prefix.
#[derive(Clone, Debug)]
pub(crate) struct Line {
    pub(crate) seq: SeqId,
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) salt: Salt,
    /// Whose tokens they were.
    pub(crate) request: RequestId,
    pub(crate) last_used: Micros,
    pub(crate) n_hits: u32,
    /// Whose cells its first tokens are in.
    pub(crate) trunk: Trunk,
}

impl Line {
    /// The tokens of a request, kept from now on.
    pub(crate) fn new(now: Micros, running: &Running, seq: SeqId, salt: Salt) -> Self {
        Self {
            seq,
            tokens: running.held().to_vec(),
            salt,
            request: running.request.id,
            last_used: now,
            n_hits: 0,
            trunk: running.trunk.cut(running.n_done),
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

/// A prefix that was evicted.
#[derive(Clone, Debug)]
struct Dropped {
    line: Line,
    at: Micros,
}

/// Who has tokens that others may share.
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
    pub(crate) trunk: Trunk,
}

/// What a prompt finds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Match<'a> {
    pub(crate) source: Source<'a>,
    pub(crate) n_tokens: usize,
}

/// The cached prefixes.
#[derive(Clone, Debug, Default)]
pub(crate) struct PrefixCache {
    lines: Vec<Line>,
    dropped: VecDeque<Dropped>,
}

impl PrefixCache {
    pub(crate) fn lines(&self) -> &[Line] {
        &self.lines
    }

    /// Keeps the tokens of a sequence. They inherit the hits of a line that is at least half of them:
    /// the next turn of a conversation is worth as much as the one before.
    pub(crate) fn insert(&mut self, line: Line) {
        let is_continued = |before: &&Line| {
            before.salt == line.salt
                && 2 * before.tokens.len() >= line.tokens.len()
                && line.tokens.starts_with(&before.tokens)
        };
        let continued = self.lines.iter().filter(is_continued);
        let n_hits = continued.map(|before| before.n_hits).max().unwrap_or(0);
        self.lines.push(Line { n_hits, ..line });
    }

    /// Keeps a line that was kept before, with the hits that it had.
    pub(crate) fn restore(&mut self, line: Line) {
        self.lines.push(line);
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
    ) -> (Option<Match<'a>>, Option<Missed>) {
        let most = tokens.len().saturating_sub(1);
        if most < MIN_REUSED {
            let (n_prompt, least) = (tokens.len(), MIN_REUSED);
            return (None, Some(Missed::TooShort { n_prompt, least }));
        }
        let own = self.lines.iter().filter(|line| line.salt == salt);
        let lines = own.map(|line| Source {
            holder: Holder::Line,
            seq: line.seq,
            tokens: &line.tokens,
            trunk: line.trunk,
        });
        let sources = lines.chain(running);
        let found = sources.map(|source| (n_common(source.tokens, tokens), source));
        let mut found: Vec<(usize, Source<'a>)> = found.collect();
        found.sort_by_key(|(common, source)| {
            let worst = std::cmp::Reverse(*common);
            (worst, source.holder, source.tokens.len(), source.seq)
        });
        let longest = found.first().copied();
        let mut missed = match longest {
            Some((common, source)) if common > 0 && common < source.tokens.len().min(most) => {
                Some(Missed::Differs { at: common })
            }
            Some((common, _)) if common > 0 => None,
            _ => Some(Missed::NeverSeen),
        };
        let longest = longest.map_or(0, |(common, _)| common);
        if let Some(evicted) = self.evicted(tokens, salt, now, longest.max(MIN_REUSED)) {
            missed = Some(evicted);
        }
        for (common, source) in found {
            let n_tokens = common.min(most);
            if n_tokens < MIN_REUSED {
                break;
            }
            match is_refused(&source, n_tokens) {
                None => {
                    let missed = missed.filter(|_| n_tokens < most);
                    return (Some(Match { source, n_tokens }), missed);
                }
                Some(refusal) if n_tokens == longest.min(most) => {
                    missed = Some(missed_by(&refusal, common));
                }
                Some(_) => {}
            }
        }
        (None, missed)
    }

    /// A prefix that was dropped and has more than `than` tokens in common.
    fn evicted(&self, tokens: &[TokenId], salt: Salt, now: Micros, than: usize) -> Option<Missed> {
        let own = self.dropped.iter();
        let own = own.filter(|dropped| dropped.line.salt == salt);
        let common = own.map(|dropped| (n_common(&dropped.line.tokens, tokens), dropped));
        let (common, dropped) = common.max_by_key(|(common, _)| *common)?;
        let age = Micros(now.0.saturating_sub(dropped.at.0));
        (common > than).then_some(Missed::Evicted { age, common })
    }

    /// Notes that a line was taken over by a request.
    pub(crate) fn hit(&mut self, now: Micros, seq: SeqId) {
        if let Some(line) = self.lines.iter_mut().find(|line| line.seq == seq) {
            line.last_used = now;
            line.n_hits += 1;
        }
    }

    /// The line that is evicted next. Where those with hits are more than three quarters, conversations
    /// that have ended make room for new ones.
    fn least_worth(&self, policy: EvictionPolicy) -> Option<&Line> {
        let n_hit = self.lines.iter().filter(|line| line.n_hits > 0).count();
        let is_hit = 4 * n_hit > 3 * self.lines.len();
        let is_candidate = |line: &&Line| match policy {
            EvictionPolicy::SegmentedLru => (line.n_hits > 0) == is_hit,
            EvictionPolicy::Lru => true,
        };
        let candidates = self.lines.iter().filter(is_candidate);
        candidates.min_by_key(|line| (line.last_used, line.seq))
    }

    /// Evicts the line that is worth least: its sequence is the caller's.
    pub(crate) fn evict(&mut self, now: Micros, policy: EvictionPolicy) -> Option<&Line> {
        let seq = self.least_worth(policy)?.seq;
        let line = self.take(seq)?;
        self.dropped.truncate(N_REMEMBERED - 1);
        self.dropped.push_front(Dropped { line, at: now });
        self.dropped.front().map(|dropped| &dropped.line)
    }

    /// Takes a line out: its sequence is the caller's.
    pub(crate) fn take(&mut self, seq: SeqId) -> Option<Line> {
        let at = self.lines.iter().position(|line| line.seq == seq)?;
        Some(self.lines.swap_remove(at))
    }

    /// Takes the lines out whose tokens the memory does not hold any more.
    pub(crate) fn take_broken(&mut self, memory: &Composite) -> Vec<Line> {
        let n_held = |seq| {
            memory
                .positions(seq)
                .map_or(0, |held| held.last.as_usize() + 1)
        };
        let is_broken = |line: &mut Line| n_held(line.seq) != line.tokens.len();
        self.lines.extract_if(.., is_broken).collect()
    }

    /// Takes all lines out.
    pub(crate) fn clear(&mut self) -> Vec<Line> {
        self.dropped.clear();
        std::mem::take(&mut self.lines)
    }

    /// Takes the lines out that the tokens of sequence `by` begin with: where a sequence can be cut
    /// anywhere, the longer line serves as well.
    pub(crate) fn take_covered(&mut self, by: SeqId, tokens: &[TokenId], salt: Salt) -> Vec<Line> {
        let is_covered = |line: &mut Line| {
            line.seq != by && line.salt == salt && tokens.starts_with(&line.tokens)
        };
        self.lines.extract_if(.., is_covered).collect()
    }

    /// Whether a line of this salt begins with these tokens.
    pub(crate) fn covers(&self, tokens: &[TokenId], salt: Salt) -> bool {
        let mut lines = self.lines.iter();
        lines.any(|line| line.salt == salt && line.tokens.starts_with(tokens))
    }
}

/// The first `n` positions.
pub(crate) fn first(n: usize) -> PosRange {
    let last = u32::try_from(n).unwrap_or(u32::MAX).saturating_sub(1);
    PosRange::new(Pos(0), Pos(last))
}

/// The edit that gives `to` the first `n` tokens of a line.
pub(crate) fn copy(from: SeqId, to: SeqId, n: usize) -> Edit {
    let range = first(n);
    Edit::Copy { from, to, range }
}

/// How many tokens both begin with.
pub(crate) fn n_common(a: &[TokenId], b: &[TokenId]) -> usize {
    // Whole blocks are compared much faster than single tokens.
    const BLOCK: usize = 64;
    let blocks = a.chunks_exact(BLOCK).zip(b.chunks_exact(BLOCK));
    let n = BLOCK * blocks.take_while(|(a, b)| a == b).count();
    let rest = a[n..].iter().zip(&b[n..]);
    n + rest.take_while(|(a, b)| a == b).count()
}

fn missed_by(refusal: &Refusal, common: usize) -> Missed {
    match refusal {
        Refusal::WindowForgotten(forgotten) => Missed::WindowForgotten {
            from: forgotten.needed_from,
            common,
        },
        Refusal::StateGone { .. } | Refusal::StateIndivisible { .. } => {
            Missed::StateGone { common }
        }
        _ => Missed::Refused { common },
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    fn cache(hits: &[u32]) -> PrefixCache {
        let mut cache = PrefixCache::default();
        for (number, &n_hits) in (0..).zip(hits) {
            cache.lines.push(Line {
                seq: SeqId(number),
                tokens: vec![TokenId(number); 20],
                salt: Salt(0),
                request: RequestId(u64::from(number)),
                last_used: Micros(u64::from(number)),
                n_hits,
                trunk: Trunk::new(u64::from(number)),
            });
        }
        cache
    }

    #[test]
    fn common_tokens_are_counted_in_blocks_and_after_them() {
        let tokens: Vec<TokenId> = (0..200).map(TokenId).collect();
        for n in [0, 1, 63, 64, 65, 128, 199] {
            let mut other = tokens.clone();
            other[n].0 = 999;
            assert_eq!(n_common(&tokens, &other), n);
            assert_eq!(n_common(&tokens[..n], &tokens), n);
        }
        assert_eq!(n_common(&tokens, &tokens), 200);
    }

    #[test]
    fn hits_protect_three_quarters() {
        let first = |hits: &[u32], policy| cache(hits).least_worth(policy).map(|line| line.seq.0);
        let evicted = |hits: &[u32]| first(hits, EvictionPolicy::SegmentedLru);
        assert_eq!(evicted(&[]), None);
        assert_eq!(evicted(&[0, 0, 0]), Some(0));
        assert_eq!(evicted(&[1, 0, 2, 0]), Some(1));
        assert_eq!(evicted(&[1, 3, 2, 0]), Some(3));
        // A new conversation has no hit yet.
        assert_eq!(evicted(&[1, 3, 2, 1, 0]), Some(0));
        assert_eq!(evicted(&[5]), Some(0));
        // Without segments hits do not matter.
        assert_eq!(first(&[1, 0, 2, 0], EvictionPolicy::Lru), Some(0));
    }
}
