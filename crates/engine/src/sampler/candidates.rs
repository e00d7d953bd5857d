//! [`Candidates`]: the tokens that may still be chosen, and what every step asks of them.
//!
//! Invariant: no logit is NaN or plus infinity; the tokens are in order of id, or in order of
//! falling logit (ties: smaller id first), and [`Candidates::order`] says which. Both orders follow
//! from the logits alone, so what is drawn does not depend on how a selection was computed.
//! The buffer keeps its capacity: after the first token nothing is allocated.

use std::cmp::Ordering;

use kv_core::TokenId;

use super::SampleError;

/// One token with its logit as the steps so far have left it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// The token.
    pub token: TokenId,
    /// Its logit.
    pub logit: f32,
}

/// The order in which candidates lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// By id: candidate `i` of a full vocabulary is token `i`.
    #[default]
    ById,
    /// By falling logit, ties by id.
    ByLogit,
}

/// The tokens that may still be chosen.
#[derive(Clone, Debug, Default)]
pub struct Candidates {
    entries: Vec<Candidate>,
    order: Order,
}

/// A selection in chunks starts with so many of the most likely tokens.
const FIRST_CHUNK: usize = 128;

/// Falling logit, ties by id: total, because no logit is NaN.
fn likeliest_first(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token))
}

impl Candidates {
    /// Takes over the logits of a whole vocabulary; `logits[i]` belongs to token `i`. Minus
    /// infinity excludes a token.
    ///
    /// # Errors
    /// [`SampleError::NotANumber`] where a logit is NaN or plus infinity,
    /// [`SampleError::NothingLeft`] where no token can be chosen.
    pub fn load(&mut self, logits: &[f32]) -> Result<(), SampleError> {
        self.entries.clear();
        self.entries.reserve(logits.len());
        self.order = Order::ById;
        // `+ 0.0` makes one zero of both, so that their order is the ids'.
        let numbered = (0u32..).zip(logits);
        self.entries.extend(numbered.map(|(id, &l)| Candidate {
            token: TokenId(id),
            logit: l + 0.0,
        }));
        let is_bad = |l: &f32| l.is_nan() || *l == f32::INFINITY;
        if let Some(at) = logits.iter().position(is_bad) {
            return Err(SampleError::NotANumber {
                token: at,
                logit: logits[at],
            });
        }
        if logits.iter().all(|&l| l == f32::NEG_INFINITY) {
            return Err(SampleError::NothingLeft {
                n_tokens: logits.len(),
            });
        }
        Ok(())
    }

    /// The candidates, in [`Candidates::order`].
    pub fn as_slice(&self) -> &[Candidate] {
        &self.entries
    }

    /// How they lie.
    pub fn order(&self) -> Order {
        self.order
    }

    /// Changes the logit of one token, if it is still a candidate. To be used before any step has
    /// sorted the candidates; what `change` makes NaN becomes an exclusion.
    pub fn adjust(&mut self, token: TokenId, change: impl FnOnce(f32) -> f32) {
        debug_assert_eq!(self.order, Order::ById);
        let Ok(at) = self.entries.binary_search_by_key(&token, |c| c.token) else {
            return;
        };
        let logit = change(self.entries[at].logit);
        let unusable = logit.is_nan() || logit == f32::INFINITY;
        self.entries[at].logit = if unusable {
            f32::NEG_INFINITY
        } else {
            logit + 0.0
        };
    }

    /// Changes every logit; `change` must not decrease, so that the order stays right.
    pub fn scale(&mut self, change: impl Fn(f32) -> f32) {
        for candidate in &mut self.entries {
            candidate.logit = change(candidate.logit);
        }
    }

    /// The most likely candidate; of equal ones that with the smallest id.
    pub fn best(&self) -> Option<Candidate> {
        match self.order {
            Order::ByLogit => self.entries.first().copied(),
            Order::ById => {
                let better = |a: Candidate, b: Candidate| if b.logit > a.logit { b } else { a };
                self.entries.iter().copied().reduce(better)
            }
        }
    }

    /// Keeps the `k` most likely candidates, by falling logit. One pass that keeps the best `2 k`
    /// so far, so the vocabulary is never sorted.
    pub fn keep_top(&mut self, k: usize) {
        if self.order == Order::ByLogit || k == 0 {
            self.entries.truncate(k);
            return;
        }
        if k >= self.entries.len() {
            return;
        }
        let room = (2 * k).min(self.entries.len());
        let mut floor: Option<Candidate> = None;
        let mut n_kept = 0;
        for at in 0..self.entries.len() {
            let candidate = self.entries[at];
            if floor.is_some_and(|f| likeliest_first(&f, &candidate).is_lt()) {
                continue;
            }
            self.entries[n_kept] = candidate;
            n_kept += 1;
            if n_kept == room {
                let kept = &mut self.entries[..n_kept];
                let (_, last, _) = kept.select_nth_unstable_by(k - 1, likeliest_first);
                floor = Some(*last);
                n_kept = k;
            }
        }
        self.entries.truncate(n_kept);
        if n_kept > k {
            self.entries.select_nth_unstable_by(k - 1, likeliest_first);
            self.entries.truncate(k);
        }
        self.entries.sort_unstable_by(likeliest_first);
        self.order = Order::ByLogit;
    }

    /// Keeps the candidates for which `keep` holds.
    pub fn retain(&mut self, keep: impl Fn(&Candidate) -> bool) {
        self.entries.retain(keep);
    }

    /// Keeps the shortest prefix, by falling logit, at the end of which `is_enough` says so, and
    /// at least one candidate. `is_enough` is asked for each candidate in turn, once. Sorts only as
    /// much as it needs, in chunks that double.
    pub fn keep_prefix(&mut self, mut is_enough: impl FnMut(&Candidate) -> bool) {
        let len = self.entries.len();
        let mut n_sorted = if self.order == Order::ByLogit { len } else { 0 };
        let mut at = 0;
        while at < len {
            if at == n_sorted {
                let end = (2 * n_sorted).max(FIRST_CHUNK).min(len);
                let rest = &mut self.entries[n_sorted..];
                let n_chunk = end - n_sorted;
                if n_chunk < rest.len() {
                    rest.select_nth_unstable_by(n_chunk - 1, likeliest_first);
                }
                rest[..n_chunk].sort_unstable_by(likeliest_first);
                n_sorted = end;
            }
            at += 1;
            if is_enough(&self.entries[at - 1]) {
                break;
            }
        }
        self.entries.truncate(at);
        self.order = Order::ByLogit;
    }

    /// What each candidate weighs beside the most likely one: `exp(logit - best)`, in order. The
    /// sum of these turns them into probabilities.
    pub fn weights(&self) -> impl Iterator<Item = (TokenId, f64)> + '_ {
        let best = self.best().map_or(0.0, |c| f64::from(c.logit));
        self.entries
            .iter()
            .map(move |c| (c.token, weight(c.logit, best)))
    }
}

/// `exp(logit - best)`, the same on every platform.
pub(super) fn weight(logit: f32, best: f64) -> f64 {
    libm::exp(f64::from(logit) - best)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn loaded(logits: &[f32]) -> Candidates {
        let mut candidates = Candidates::default();
        candidates.load(logits).unwrap();
        candidates
    }

    fn ids(candidates: &Candidates) -> Vec<u32> {
        candidates.as_slice().iter().map(|c| c.token.0).collect()
    }

    #[test]
    fn bad_logits_are_errors_with_the_token() {
        let load = |logits: &[f32]| Candidates::default().load(logits).unwrap_err().to_string();
        assert_eq!(load(&[0.0, f32::NAN]), "the logit of token 1 is NaN");
        assert_eq!(load(&[f32::INFINITY]), "the logit of token 0 is inf");
        assert_eq!(
            load(&[f32::NEG_INFINITY; 2]),
            "none of 2 tokens can be chosen"
        );
        assert_eq!(load(&[]), "none of 0 tokens can be chosen");
    }

    #[test]
    fn ties_go_to_the_smaller_id() {
        let mut candidates = loaded(&[1.0, 3.0, -0.0, 3.0, 0.0]);
        assert_eq!(candidates.best().map(|c| c.token), Some(TokenId(1)));
        candidates.keep_top(4);
        assert_eq!(ids(&candidates), [1, 3, 0, 2]);
        assert_eq!(candidates.order(), Order::ByLogit);
    }

    proptest! {
        #[test]
        fn selections_agree_with_a_full_sort(
            logits in prop::collection::vec(-4i8..4, 1..600),
            k in 1usize..700,
        ) {
            let logits: Vec<f32> = logits.into_iter().map(f32::from).collect();
            let mut sorted = loaded(&logits).entries;
            sorted.sort_by(likeliest_first);
            let mut top = loaded(&logits);
            top.keep_top(k);
            if k < logits.len() {
                prop_assert_eq!(top.as_slice(), &sorted[..k]);
            } else {
                prop_assert_eq!(top.order(), Order::ById);
            }
            let mut prefix = loaded(&logits);
            let mut asked = Vec::new();
            prefix.keep_prefix(|c| { asked.push(*c); asked.len() == k });
            prop_assert_eq!(prefix.as_slice(), &sorted[..k.min(sorted.len())]);
            prop_assert_eq!(prefix.as_slice(), asked.as_slice());
        }
    }
}
