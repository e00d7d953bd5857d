//! Replays what routers chose, under any budget and rule.
//!
//! Knows no time: each matrix is read when it is needed, and only then.

use std::collections::BTreeSet;

use serde::Serialize;

use crate::cache::{Acquisition, Choice, ExpertCache, ExpertId, ReadEnd, Stack};

/// The choices of one layer's router in one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouteStep {
    /// The layer, as in [`Stack::layer`].
    pub layer: u32,
    /// Rows of the step.
    pub n_rows: u32,
    /// The chosen experts, in ascending order.
    pub choices: Vec<Choice>,
}

/// What routers chose, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RouteTrace {
    /// The stacks of the model.
    pub stacks: Vec<Stack>,
    /// Bytes that its experts had.
    pub budget: u64,
    /// The choices.
    pub steps: Vec<RouteStep>,
}

/// What is given up where the budget is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplayRule {
    /// As [`ExpertCache`] does.
    Value,
    /// What was not used for the longest time.
    Recency,
    /// What was used least often so far.
    Frequency,
    /// What will not be used for the longest time: the fewest misses that any rule can have where
    /// all matrices are of one size. It knows the future.
    Future,
}

/// What a replay counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ReplayCounts {
    /// Matrices that were in memory when they were needed.
    pub n_hits: u64,
    /// Those that were not.
    pub n_misses: u64,
    /// Bytes of those.
    pub bytes_read: u64,
    /// The most bytes that were in memory.
    pub most_bytes: u64,
}

impl ReplayRule {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Value, Self::Recency, Self::Frequency, Self::Future];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Value => "value",
            Self::Recency => "recency",
            Self::Frequency => "frequency",
            Self::Future => "future",
        }
    }
}

impl ReplayCounts {
    /// Hits of a hundred uses; 0 without uses.
    pub fn hit_percent(&self) -> f64 {
        let n = self.n_hits + self.n_misses;
        100.0 * self.n_hits as f64 / (n.max(1)) as f64
    }
}

impl RouteTrace {
    /// Counts hits and reads with so many bytes for experts. A matrix that is larger than the
    /// budget is read at every use.
    pub fn replay(&self, budget: u64, rule: ReplayRule) -> ReplayCounts {
        let mut counts = ReplayCounts::default();
        if rule == ReplayRule::Value {
            let mut cache = ExpertCache::with_stacks(budget, &self.stacks);
            for step in &self.steps {
                cache.routed(0, step.layer, &step.choices, step.n_rows);
                for id in self.uses(step) {
                    match cache.acquire(id) {
                        Acquisition::Ready => counts.n_hits += 1,
                        Acquisition::Read { .. } => {
                            self.count_read(id, &mut counts);
                            cache.read_ended(id, ReadEnd::Done);
                        }
                        Acquisition::Reading | Acquisition::NoRoom => {
                            self.count_read(id, &mut counts)
                        }
                    }
                    counts.most_bytes = counts.most_bytes.max(cache.n_bytes());
                    cache.release(id);
                }
            }
            return counts;
        }
        let uses: Vec<_> = self.steps.iter().flat_map(|step| self.uses(step)).collect();
        let mut ranked = RankedExperts::new(self, budget);
        let next_uses = match rule {
            ReplayRule::Future => self.next_uses(&uses),
            _ => Vec::new(),
        };
        for (now, &id) in uses.iter().enumerate() {
            let now = now as u64;
            let rank = match rule {
                ReplayRule::Frequency => (ranked.count(id), now),
                ReplayRule::Future => {
                    let next = next_uses.get(now as usize).copied().unwrap_or(u64::MAX);
                    (u64::MAX - next, now)
                }
                _ => (0, now),
            };
            if ranked.use_one(id, rank) {
                counts.n_hits += 1;
            } else {
                self.count_read(id, &mut counts);
            }
            counts.most_bytes = counts.most_bytes.max(ranked.n_bytes);
        }
        counts
    }

    /// All bytes of the experts.
    pub fn total_bytes(&self) -> u64 {
        let of = |s: &Stack| s.n_bytes * u64::from(s.n_experts);
        self.stacks.iter().map(of).sum()
    }

    /// The matrices that a step uses, in their order.
    fn uses(&self, step: &RouteStep) -> Vec<ExpertId> {
        let stacks = (0..).zip(&self.stacks);
        let stacks = stacks.filter(|(_, s)| s.layer == step.layer);
        let of_stack = |(stack, s): (u32, &Stack)| {
            let n_experts = s.n_experts;
            let chosen = step.choices.iter().map(|choice| choice.expert);
            let chosen = chosen.filter(move |&expert| expert < n_experts);
            let id = move |expert| ExpertId {
                mixture: 0,
                stack,
                expert,
            };
            chosen.map(id)
        };
        stacks.flat_map(of_stack).collect()
    }

    fn count_read(&self, id: ExpertId, counts: &mut ReplayCounts) {
        counts.n_misses += 1;
        counts.bytes_read += self.stacks.get(id.stack as usize).map_or(0, |s| s.n_bytes);
    }

    /// For each use, when the same matrix is used next.
    fn next_uses(&self, uses: &[ExpertId]) -> Vec<u64> {
        let of_stack = |s: &Stack| vec![u64::MAX; s.n_experts as usize];
        let mut last: Vec<Vec<u64>> = self.stacks.iter().map(of_stack).collect();
        let mut next = vec![u64::MAX; uses.len()];
        for ((now, id), next) in uses.iter().enumerate().zip(&mut next).rev() {
            let now = now as u64;
            let place = last.get_mut(id.stack as usize);
            if let Some(place) = place.and_then(|s| s.get_mut(id.expert as usize)) {
                *next = std::mem::replace(place, now);
            }
        }
        next
    }
}

/// What goes first among what is in memory: the lowest.
type Rank = (u64, u64);

/// A matrix as a rule that ranks sees it.
#[derive(Clone, Copy, Default)]
struct RankedUse {
    /// Of what is in memory.
    rank: Option<Rank>,
    /// How often it was used.
    count: u64,
}

/// What is in memory by a rule that ranks.
struct RankedExperts<'a> {
    trace: &'a RouteTrace,
    budget: u64,
    n_bytes: u64,
    /// What is in memory by rank.
    order: BTreeSet<(Rank, ExpertId)>,
    /// `[stacks][experts]`.
    uses: Vec<Vec<RankedUse>>,
}

impl<'a> RankedExperts<'a> {
    fn new(trace: &'a RouteTrace, budget: u64) -> Self {
        let of_stack = |s: &Stack| vec![RankedUse::default(); s.n_experts as usize];
        Self {
            trace,
            budget,
            n_bytes: 0,
            order: BTreeSet::new(),
            uses: trace.stacks.iter().map(of_stack).collect(),
        }
    }

    fn of(&mut self, id: ExpertId) -> Option<&mut RankedUse> {
        let stack = self.uses.get_mut(id.stack as usize)?;
        stack.get_mut(id.expert as usize)
    }

    fn count(&mut self, id: ExpertId) -> u64 {
        self.of(id).map_or(0, |of| of.count)
    }

    /// Uses a matrix, which has this rank from now on. Returns whether it was in memory.
    fn use_one(&mut self, id: ExpertId, rank: Rank) -> bool {
        let n_bytes = |id: ExpertId, trace: &RouteTrace| {
            trace.stacks.get(id.stack as usize).map_or(0, |s| s.n_bytes)
        };
        let wanted = n_bytes(id, self.trace);
        let Some(of) = self.of(id) else {
            return false;
        };
        of.count += 1;
        let old = of.rank.replace(rank);
        let was_there = match old {
            Some(old) => self.order.remove(&(old, id)),
            None => false,
        };
        if !was_there {
            while self.n_bytes + wanted > self.budget
                && let Some((_, gone)) = self.order.pop_first()
            {
                self.n_bytes -= n_bytes(gone, self.trace);
                if let Some(of) = self.of(gone) {
                    of.rank = None;
                }
            }
            if self.n_bytes + wanted > self.budget {
                if let Some(of) = self.of(id) {
                    of.rank = None;
                }
                return false;
            }
            self.n_bytes += wanted;
        }
        self.order.insert((rank, id));
        was_there
    }
}
