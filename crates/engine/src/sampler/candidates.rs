//! [`Candidates`]: the tokens that may still be chosen, and the selections that steps make of them.
//!
//! Until a step selects, the logits are read where they are: nothing of the vocabulary's size is
//! copied, and changed logits (penalties) are kept in a short list. Invariant: no logit is NaN or
//! plus infinity; candidates are in order of id, or in order of falling logit (ties: smaller id
//! first), and [`Candidates::order`] tells which. Both orders follow from the logits alone, so a
//! draw does not depend on how a selection was computed. [`CandidateBuffers`] keep their capacity:
//! after the first token nothing is allocated.

use std::cmp::Ordering;
use std::mem;

use kv_core::TokenId;
use kv_graph::TopK;

use super::SampleError;

/// One token with its logit as the steps so far have left it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// The token.
    pub token: TokenId,
    /// Its logit.
    pub logit: f32,
}

/// The order of the candidates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// By id: candidate `i` of a full vocabulary is token `i`.
    #[default]
    ById,
    /// By falling logit, ties by id.
    ByLogit,
}

/// Memory of [`Candidates`], kept from one token to the next.
#[derive(Clone, Debug, Default)]
pub struct CandidateBuffers {
    /// Logits that a step changed before any selection, by id.
    changed: Vec<Candidate>,
    /// The selection, once there is one.
    selected: Vec<Candidate>,
    /// Room for a selection from a selection.
    spare: Vec<Candidate>,
}

/// The tokens that may still be chosen.
#[derive(Debug)]
pub struct Candidates<'a> {
    /// All logits, `[vocab]`: the candidates, as long as there is no selection.
    logits: &'a [f32],
    /// The token with the largest of them.
    likeliest: Candidate,
    buffers: &'a mut CandidateBuffers,
    stage: Stage,
    order: Order,
}

/// Where the candidates are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// In the logits, but for the changed ones.
    Logits,
    /// In the selection.
    Selected,
}

/// A selection in chunks starts with so many of the most likely tokens.
const FIRST_CHUNK: usize = 128;
/// The most changes in a list; with more, all logits are copied and changed in place.
const MAX_CHANGED: usize = 1024;
/// Logits that are compared at once.
const LANES: usize = 16;
/// Logits that are skipped at once.
const CHUNK: usize = 64;

/// Falling logit, ties by id: total, because no logit is NaN.
pub(super) fn likeliest_first(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token))
}

/// The more likely of two; of equal ones `a`, whose id is smaller.
fn likelier(a: Candidate, b: Candidate) -> Candidate {
    if b.logit > a.logit { b } else { a }
}

impl<'a> Candidates<'a> {
    /// The tokens of a whole vocabulary; `logits[i]` belongs to token `i`. Minus infinity excludes
    /// a token.
    ///
    /// # Errors
    /// [`SampleError::NotANumber`] where a logit is NaN or plus infinity,
    /// [`SampleError::NothingLeft`] where no token can be chosen.
    pub fn new(logits: &'a [f32], buffers: &'a mut CandidateBuffers) -> Result<Self, SampleError> {
        let likeliest = likeliest(logits)?;
        buffers.changed.clear();
        buffers.selected.clear();
        Ok(Self {
            logits,
            likeliest,
            buffers,
            stage: Stage::Logits,
            order: Order::ById,
        })
    }

    /// The tokens that were found to have the largest logits, with those.
    ///
    /// # Errors
    /// As [`Candidates::new`].
    pub fn of_top(top: TopK<'_>, buffers: &'a mut CandidateBuffers) -> Result<Self, SampleError> {
        if top.log_sum_exp.is_nan() {
            return Err(SampleError::NotNumbers);
        }
        let CandidateBuffers {
            changed, selected, ..
        } = buffers;
        changed.clear();
        selected.clear();
        let candidate = |(column, logit): (u32, f32)| Candidate {
            token: TokenId(column),
            // As everywhere: one zero.
            logit: logit + 0.0,
        };
        selected.extend(top.iter().map(candidate));
        selected.sort_unstable_by_key(|candidate| candidate.token);
        let likeliest = selected.iter().copied().reduce(likelier);
        let n_tokens = selected.len();
        Ok(Self {
            logits: &[],
            likeliest: likeliest.ok_or(SampleError::NothingLeft { n_tokens })?,
            buffers,
            stage: Stage::Selected,
            order: Order::ById,
        })
    }

    /// The candidates, in [`Candidates::order`].
    pub fn iter(&self) -> impl Iterator<Item = Candidate> + '_ {
        let logits = match self.stage {
            Stage::Logits => self.logits,
            Stage::Selected => &[],
        };
        with_changes(0, logits, &self.buffers.changed).chain(self.buffers.selected.iter().copied())
    }

    /// In which order they are.
    pub fn order(&self) -> Order {
        self.order
    }

    /// Changes the logit of one token, if it is still a candidate. To be used before any step has
    /// sorted the candidates; what `change` makes NaN becomes an exclusion.
    pub fn adjust(&mut self, token: TokenId, change: impl FnOnce(f32) -> f32) {
        debug_assert_eq!(self.order, Order::ById);
        if self.stage == Stage::Logits && self.buffers.changed.len() >= MAX_CHANGED {
            self.select_all();
        }
        let list = match self.stage {
            Stage::Logits => &mut self.buffers.changed,
            Stage::Selected => &mut self.buffers.selected,
        };
        let at = match list.binary_search_by_key(&token, |c| c.token) {
            Ok(at) => at,
            Err(at) => {
                let unchanged = match self.stage {
                    Stage::Logits => self.logits.get(token.as_usize()),
                    Stage::Selected => None,
                };
                let Some(&logit) = unchanged else {
                    return;
                };
                let logit = logit + 0.0;
                list.insert(at, Candidate { token, logit });
                at
            }
        };
        let logit = change(list[at].logit);
        let unusable = logit.is_nan() || logit == f32::INFINITY;
        list[at].logit = if unusable {
            f32::NEG_INFINITY
        } else {
            logit + 0.0
        };
    }

    /// Changes every logit; `change` must not decrease, so that the order stays right.
    pub fn scale(&mut self, change: impl Fn(f32) -> f32) {
        self.select_all();
        for candidate in &mut self.buffers.selected {
            candidate.logit = change(candidate.logit);
        }
    }

    /// The most likely candidate; of equal ones that with the smallest id.
    pub fn best(&self) -> Option<Candidate> {
        let CandidateBuffers {
            changed, selected, ..
        } = &*self.buffers;
        match (self.stage, self.order) {
            (Stage::Selected, Order::ByLogit) => selected.first().copied(),
            (Stage::Selected, Order::ById) => selected.iter().copied().reduce(likelier),
            (Stage::Logits, _) if changed.is_empty() => Some(self.likeliest),
            (Stage::Logits, _) => {
                let mut best = None;
                visit_above_floor(self.logits, changed, |candidate| {
                    let likeliest = best.map_or(candidate, |best| likelier(best, candidate));
                    best = Some(likeliest);
                    Some(likeliest.logit)
                });
                best
            }
        }
    }

    /// Keeps the `k` most likely candidates, by falling logit. One pass that keeps the best `2 k`
    /// so far, so the vocabulary is neither copied nor sorted.
    pub fn keep_top(&mut self, k: usize) {
        if self.order == Order::ByLogit {
            self.buffers.selected.truncate(k);
            return;
        }
        let n_candidates = match self.stage {
            Stage::Logits => self.logits.len(),
            Stage::Selected => self.buffers.selected.len(),
        };
        if k >= n_candidates {
            return;
        }
        let spare = mem::take(&mut self.buffers.spare);
        let CandidateBuffers {
            changed, selected, ..
        } = &*self.buffers;
        let mut top = TopSelection::new(k, spare);
        match self.stage {
            _ if k == 0 => {}
            Stage::Logits => visit_above_floor(self.logits, changed, |c| top.offer(c)),
            Stage::Selected => selected.iter().for_each(|&c| {
                top.offer(c);
            }),
        }
        let top = top.finish();
        self.replace_selection(top);
        self.order = Order::ByLogit;
    }

    /// Keeps the candidates for which `keep` holds.
    pub fn retain(&mut self, keep: impl Fn(&Candidate) -> bool) {
        if self.stage == Stage::Selected {
            self.buffers.selected.retain(keep);
            return;
        }
        let mut kept = mem::take(&mut self.buffers.spare);
        kept.clear();
        kept.extend(self.iter().filter(keep));
        self.replace_selection(kept);
    }

    /// Keeps the shortest prefix, by falling logit, at the end of which `is_enough` holds, and at
    /// least one candidate. `is_enough` is called for each candidate in turn, once. Sorts only as
    /// much as it needs, in chunks that double.
    pub fn keep_prefix(&mut self, mut is_enough: impl FnMut(&Candidate) -> bool) {
        self.select_all();
        let entries = &mut self.buffers.selected;
        let len = entries.len();
        let mut n_sorted = if self.order == Order::ByLogit { len } else { 0 };
        let mut at = 0;
        while at < len {
            if at == n_sorted {
                let end = (2 * n_sorted).max(FIRST_CHUNK).min(len);
                let rest = &mut entries[n_sorted..];
                let n_chunk = end - n_sorted;
                if n_chunk < rest.len() {
                    rest.select_nth_unstable_by(n_chunk - 1, likeliest_first);
                }
                rest[..n_chunk].sort_unstable_by(likeliest_first);
                n_sorted = end;
            }
            at += 1;
            if is_enough(&entries[at - 1]) {
                break;
            }
        }
        entries.truncate(at);
        self.order = Order::ByLogit;
    }

    /// The weight of each candidate relative to the most likely one: `exp(logit - best)`, in
    /// order. Divided by their sum they are probabilities.
    pub fn weights(&self) -> impl Iterator<Item = (TokenId, f64)> + '_ {
        let best = self.best().map_or(0.0, |c| f64::from(c.logit));
        self.iter().map(move |c| (c.token, weight(c.logit, best)))
    }

    /// Copies all candidates into the selection, for steps that change or sort all of them.
    fn select_all(&mut self) {
        if self.stage == Stage::Logits {
            let mut all = mem::take(&mut self.buffers.spare);
            all.clear();
            all.extend(self.iter());
            self.replace_selection(all);
        }
    }

    fn replace_selection(&mut self, selection: Vec<Candidate>) {
        self.buffers.spare = mem::replace(&mut self.buffers.selected, selection);
        self.buffers.changed.clear();
        self.stage = Stage::Selected;
    }
}

/// The token with the largest logit, of equal ones the smallest id, in one pass over `logits`.
pub(crate) fn likeliest(logits: &[f32]) -> Result<Candidate, SampleError> {
    let (mut largest, mut bad) = ([f32::NEG_INFINITY; LANES], [false; LANES]);
    let mut look = |lane: usize, logit: f32| {
        bad[lane] |= logit.is_nan() || logit == f32::INFINITY;
        largest[lane] = if logit > largest[lane] {
            logit
        } else {
            largest[lane]
        };
    };
    let (chunks, rest) = logits.as_chunks::<LANES>();
    for chunk in chunks {
        (0..LANES).for_each(|lane| look(lane, chunk[lane]));
    }
    rest.iter().enumerate().for_each(|(lane, &l)| look(lane, l));
    if bad.contains(&true) {
        let is_bad = |l: &f32| l.is_nan() || *l == f32::INFINITY;
        let found = logits.iter().copied().enumerate().find(|(_, l)| is_bad(l));
        if let Some((token, logit)) = found {
            return Err(SampleError::NotANumber { token, logit });
        }
    }
    let n_tokens = logits.len();
    let largest = largest.into_iter().fold(f32::NEG_INFINITY, f32::max);
    let at = logits.iter().position(|&l| l == largest);
    match at.and_then(|at| u32::try_from(at).ok()) {
        Some(id) if largest > f32::NEG_INFINITY => Ok(Candidate {
            token: TokenId(id),
            logit: largest + 0.0,
        }),
        _ => Err(SampleError::NothingLeft { n_tokens }),
    }
}

/// The tokens from `first_id` on with their logits, some of them changed. `+ 0.0` makes one zero of
/// both, so that their order is the ids'.
fn with_changes<'l>(
    first_id: u32,
    logits: &'l [f32],
    changed: &'l [Candidate],
) -> impl Iterator<Item = Candidate> + 'l {
    let mut changed = changed.iter().copied().peekable();
    (first_id..).zip(logits).map(move |(id, &logit)| {
        let (token, logit) = (TokenId(id), logit + 0.0);
        let change = changed.next_if(|c| c.token == token);
        change.unwrap_or(Candidate { token, logit })
    })
}

/// Visits tokens by rising id. `visit` returns the floor: logits of at most that need not be
/// visited, and are skipped a chunk at a time.
fn visit_above_floor(
    logits: &[f32],
    changed: &[Candidate],
    mut visit: impl FnMut(Candidate) -> Option<f32>,
) {
    let (mut floor, mut changed, mut first_id) = (None, changed, 0u32);
    for chunk in logits.chunks(CHUNK) {
        let end = first_id.saturating_add(CHUNK as u32);
        let n_changed = changed.partition_point(|c| c.token.0 < end);
        let (changed_here, changed_after) = changed.split_at(n_changed);
        let is_below = |floor: f32| !chunk.iter().fold(false, |any, &l| any | (l > floor));
        if n_changed > 0 || !floor.is_some_and(is_below) {
            with_changes(first_id, chunk, changed_here).for_each(|c| floor = visit(c));
        }
        (changed, first_id) = (changed_after, end);
    }
}

/// Selects the `k` most likely of candidates that come by rising id; keeps at most `2 k` of them.
struct TopSelection {
    k: usize,
    kept: Vec<Candidate>,
    /// The smallest logit of the best `k`, once there are as many.
    floor: Option<f32>,
}

impl TopSelection {
    fn new(k: usize, mut room: Vec<Candidate>) -> Self {
        room.clear();
        Self {
            k,
            kept: room,
            floor: None,
        }
    }

    /// Considers one more candidate and returns the floor.
    fn offer(&mut self, candidate: Candidate) -> Option<f32> {
        // Of the same logit, a later candidate has the larger id.
        if self.floor.is_none_or(|floor| candidate.logit > floor) {
            self.kept.push(candidate);
            if self.kept.len() == 2 * self.k {
                self.cut();
            }
        }
        self.floor
    }

    fn cut(&mut self) {
        let (_, last, _) = self
            .kept
            .select_nth_unstable_by(self.k - 1, likeliest_first);
        self.floor = Some(last.logit);
        self.kept.truncate(self.k);
    }

    /// The selection, by falling logit.
    fn finish(mut self) -> Vec<Candidate> {
        if self.kept.len() > self.k {
            self.cut();
        }
        self.kept.sort_unstable_by(likeliest_first);
        self.kept
    }
}

/// `exp(logit - best)`, the same on every platform.
pub(super) fn weight(logit: f32, best: f64) -> f64 {
    libm::exp(f64::from(logit) - best)
}

#[cfg(test)]
mod tests;
