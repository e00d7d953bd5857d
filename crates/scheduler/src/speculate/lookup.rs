//! [`NgramLookup`]: what followed the last tokens of a text where they occurred in it before.
//!
//! An index from each run of [`NgramLookup::MIN_MATCH`] tokens to where it occurred, newest first:
//! adding a token is one entry, and a search compares a bounded number of places. Invariant: the
//! place that is chosen has the longest match of those, and of equal ones it is the newest. Knows
//! nothing of how many tokens are worth drafting.

use std::collections::HashMap;

use kv_core::TokenId;

/// Places that a search compares, the newest.
const MAX_PLACES: usize = 16;

/// Tokens of a match that are counted.
const MAX_MATCH: usize = 64;

/// The tokens of a text, with an index of the runs in it.
///
/// ```
/// use kv_core::TokenId;
/// use cellar_scheduler::NgramLookup;
///
/// let mut text = NgramLookup::default();
/// text.extend([1, 2, 3, 4, 5, 9, 1, 2, 3].map(TokenId));
/// let found = text.find().unwrap();
/// assert_eq!(found.n_match(), 3);
/// assert_eq!(found.draft(4), [4, 5, 9, 1].map(TokenId));
/// ```
#[derive(Clone, Debug, Default)]
pub struct NgramLookup {
    tokens: Vec<TokenId>,
    /// Behind the newest occurrence of each run.
    newest: HashMap<[TokenId; NgramLookup::MIN_MATCH], u32>,
    /// For each place behind a run, that behind the occurrence before; itself where there is none.
    before: Vec<u32>,
}

/// A place of a text that its end repeats.
#[derive(Clone, Copy, Debug)]
pub struct Repetition<'a> {
    tokens: &'a [TokenId],
    /// The token that followed.
    next: usize,
    n_match: usize,
}

impl NgramLookup {
    /// Tokens that must be the same.
    pub const MIN_MATCH: usize = 3;

    /// Adds the next token.
    pub fn push(&mut self, token: TokenId) {
        self.tokens.push(token);
        let end = self.tokens.len();
        let Ok(end) = u32::try_from(end) else {
            return; // positions are 32 bits wide: no text gets here
        };
        let before = match self.tokens.last_chunk::<{ Self::MIN_MATCH }>() {
            Some(run) => self.newest.insert(*run, end),
            None => None,
        };
        self.before.push(before.unwrap_or(end));
    }

    /// All tokens so far.
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// The place whose tokens before it match the end of the text best; `None` where fewer than
    /// [`NgramLookup::MIN_MATCH`] tokens do.
    pub fn find(&self) -> Option<Repetition<'_>> {
        let end = self.tokens.len();
        if end < Self::MIN_MATCH {
            return None;
        }
        let before = |place: usize| {
            let before = *self.before.get(place.checked_sub(1)?)? as usize;
            (before < place).then_some(before)
        };
        let places = std::iter::successors(before(end), |&place| before(place));
        let mut best = None;
        for place in places.take(MAX_PLACES) {
            let n_match = self.n_match(place);
            if best.is_none_or(|(n_best, _)| n_match > n_best) {
                best = Some((n_match, place));
            }
            if n_match >= MAX_MATCH {
                break;
            }
        }
        best.map(|(n_match, next)| Repetition {
            tokens: &self.tokens,
            next,
            n_match,
        })
    }

    /// Number of tokens before a place that are those at the end.
    fn n_match(&self, place: usize) -> usize {
        let (there, here) = (self.tokens[..place].iter(), self.tokens.iter());
        let pairs = there.rev().zip(here.rev());
        pairs.take(MAX_MATCH).take_while(|(a, b)| a == b).count()
    }
}

impl Extend<TokenId> for NgramLookup {
    fn extend<T: IntoIterator<Item = TokenId>>(&mut self, tokens: T) {
        tokens.into_iter().for_each(|token| self.push(token));
    }
}

impl Repetition<'_> {
    /// Number of tokens that are the same, counted up to 64.
    pub fn n_match(&self) -> usize {
        self.n_match
    }

    /// The `n` tokens that follow if the text goes on as it did there. One that repeats what it is
    /// about to say goes on repeating.
    pub fn draft(&self, n: usize) -> Vec<TokenId> {
        let period = self.tokens.get(self.next..).unwrap_or_default();
        period.iter().copied().cycle().take(n).collect()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use rand_chacha::ChaCha8Rng;
    use rand_chacha::rand_core::{Rng, SeedableRng};

    use super::*;

    fn text(tokens: &[u32]) -> NgramLookup {
        let mut text = NgramLookup::default();
        text.extend(tokens.iter().copied().map(TokenId));
        text
    }

    fn found(tokens: &[u32], n: usize) -> Option<(usize, Vec<u32>)> {
        let text = text(tokens);
        let found = text.find()?;
        let draft = found.draft(n).iter().map(|token| token.0).collect();
        Some((found.n_match(), draft))
    }

    #[test]
    fn nothing_is_found_where_nothing_repeats() {
        assert!(found(&[], 4).is_none());
        assert!(found(&[1, 2], 4).is_none());
        assert!(found(&[1, 2, 3], 4).is_none());
        assert!(found(&[1, 2, 3, 9, 2, 3], 4).is_none());
    }

    #[test]
    fn the_longest_match_wins_and_then_the_newest() {
        // After 1 2 3 came 4, then after 0 1 2 3 came 5, then after 1 2 3 came 6.
        let before = [1, 2, 3, 4, 0, 1, 2, 3, 5, 8, 1, 2, 3, 6];
        let with = |end: &[u32]| [&before, end].concat();
        assert_eq!(found(&with(&[0, 1, 2, 3]), 1).unwrap(), (4, vec![5]));
        assert_eq!(found(&with(&[7, 1, 2, 3]), 1).unwrap(), (3, vec![6]));
    }

    #[test]
    fn a_loop_goes_on() {
        assert_eq!(found(&[7; 5], 3).unwrap(), (4, vec![7; 3]));
        assert_eq!(found(&[7; 100], 1).unwrap().0, MAX_MATCH);
        let (n_match, draft) = found(&[1, 2, 1, 2, 1], 4).unwrap();
        assert_eq!((n_match, draft), (3, vec![2, 1, 2, 1]));
    }

    /// The same as comparing the end with every place.
    #[test]
    fn the_index_finds_what_a_scan_finds() {
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        for n_vocab in [2, 3, 10] {
            let mut text = NgramLookup::default();
            for _ in 0..400 {
                text.push(TokenId(rng.next_u32() % n_vocab));
                let tokens = text.tokens();
                let n_match = |place: usize| {
                    let pairs = tokens[..place].iter().rev().zip(tokens.iter().rev());
                    pairs.take(MAX_MATCH).take_while(|(a, b)| a == b).count()
                };
                let places = (1..tokens.len()).rev();
                let matched = places.map(|place| (n_match(place), place));
                let matched = matched.filter(|(n, _)| *n >= NgramLookup::MIN_MATCH);
                // `max_by_key` takes the last of equal ones: the oldest first.
                let newest: Vec<_> = matched.take(MAX_PLACES).collect();
                let best = newest.into_iter().rev().max_by_key(|(n, _)| *n);
                let found = text.find().map(|found| (found.n_match, found.next));
                assert_eq!(found, best);
            }
        }
    }
}
