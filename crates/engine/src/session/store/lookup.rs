//! [`Lookup`]: what the tiers of a store have of one prompt, asked step by step.
//!
//! Invariant: every lookup ends, since each job of a tier has an outcome in time. Decides nothing:
//! which tier is fetched from, if any, is the [store](super)'s choice.

use std::time::Instant;

use cellar_prefix_store::{GroupName, JobId, Outcome, TAIL_TOKENS};
use cellar_scheduler::{Salt, StoredCuts};
use kv_core::TokenId;

use super::names::{Names, Piece};

/// Marks behind which a tier is searched, the last ones.
const MAX_MARKS: usize = 4;

/// A prompt that is looked up.
#[derive(Debug)]
pub(super) struct Lookup {
    pub(super) salt: Salt,
    /// All but the last token of the prompt, which is computed in any case.
    pub(super) tokens: Vec<TokenId>,
    /// The tokens of them that the memory has.
    pub(super) n_held: usize,
    pub(super) cuts: StoredCuts,
    /// The time from which no request waits for it.
    pub(super) deadline: Instant,
    /// By number of the tier.
    pub(super) tiers: Vec<TierLookup>,
}

/// The progress of a tier with it.
#[derive(Clone, Debug)]
pub(super) enum TierLookup {
    /// Its whole groups are counted.
    Whole(Vec<Piece>),
    /// Of the small groups behind them, too.
    Tail(Vec<Piece>, Vec<Piece>),
    /// Its marks are looked for.
    Marks,
    /// An end is looked for, then behind these marks.
    Ends(Vec<Piece>, Vec<usize>),
    /// It has these groups.
    Has(Vec<Piece>),
    /// It gave no answer.
    Down,
}

/// The next question to a tier.
#[derive(Clone, Debug)]
pub(super) enum Question {
    /// The number of these that are there, from the first on.
    HowMany(Vec<GroupName>),
    /// Those of these that are there.
    Which(Vec<GroupName>),
}

impl Lookup {
    /// The first question to each tier.
    pub(super) fn begin(&mut self, names: &mut Names, n_tiers: usize) -> Question {
        let (state, question) = match self.cuts {
            StoredCuts::Groups => {
                let whole = names.whole(self.salt, &self.tokens);
                if whole.is_empty() {
                    self.tail(names, Vec::new())
                } else {
                    let question = Question::HowMany(names_of(&whole));
                    (TierLookup::Whole(whole), question)
                }
            }
            StoredCuts::Nowhere => {
                let marks = names.marks(self.salt, &self.tokens);
                (TierLookup::Marks, Question::Which(marks))
            }
        };
        self.tiers = vec![state; n_tiers];
        question
    }

    /// True if a tier will answer.
    pub(super) fn is_asked(&self) -> bool {
        let mut tiers = self.tiers.iter();
        tiers.any(|tier| !matches!(tier, TierLookup::Down | TierLookup::Has(_)))
    }

    /// A tier gives no answer.
    pub(super) fn give_up(&mut self, tier: usize) {
        if let Some(tier) = self.tiers.get_mut(tier) {
            *tier = TierLookup::Down;
        }
    }

    fn tail(&self, names: &mut Names, whole: Vec<Piece>) -> (TierLookup, Question) {
        let tail = names.tail(self.salt, &self.tokens, whole.len());
        let question = Question::HowMany(names_of(&tail));
        (TierLookup::Tail(whole, tail), question)
    }

    /// Takes the answer of a tier in, and returns what it is asked next.
    pub(super) fn answer(
        &mut self,
        tier: usize,
        outcome: Outcome,
        names: &mut Names,
    ) -> Option<Question> {
        let state = self.tiers.get(tier).cloned()?;
        let (next, question) = match (state, outcome) {
            (TierLookup::Whole(mut whole), Outcome::Probed { n_found, .. }) => {
                whole.truncate(n_found);
                let (next, question) = self.tail(names, whole);
                (next, Some(question))
            }
            (TierLookup::Tail(whole, mut tail), Outcome::Probed { n_found, .. }) => {
                tail.truncate(n_found);
                (TierLookup::Has([whole, tail].concat()), None)
            }
            (TierLookup::Marks, Outcome::Found { is_there, .. }) => {
                let marks = is_there.iter().enumerate();
                let marks = marks.filter(|(_, is_there)| **is_there).map(|(at, _)| at);
                let marks: Vec<usize> = marks.collect();
                let n_old = marks.len().saturating_sub(MAX_MARKS);
                self.ends(names, marks[n_old..].to_vec())
            }
            (TierLookup::Ends(ends, marks), Outcome::Found { is_there, .. }) => {
                let mut found = ends.iter().zip(is_there).rev();
                match found.find(|(_, is_there)| *is_there) {
                    Some((end, _)) => (TierLookup::Has(vec![*end]), None),
                    None => self.ends(names, marks),
                }
            }
            _ => (TierLookup::Down, None),
        };
        self.tiers[tier] = next;
        // A question of nothing has its answer.
        match question {
            Some(Question::HowMany(asked)) if asked.is_empty() => {
                let id = JobId(0);
                self.answer(tier, Outcome::Probed { id, n_found: 0 }, names)
            }
            question => question,
        }
    }

    fn ends(&self, names: &mut Names, mut marks: Vec<usize>) -> (TierLookup, Option<Question>) {
        let Some(mark) = marks.pop() else {
            return (TierLookup::Has(Vec::new()), None);
        };
        let ends = names.ends(self.salt, &self.tokens, mark);
        let question = Question::Which(names_of(&ends));
        (TierLookup::Ends(ends, marks), Some(question))
    }

    /// The tier that has most, and its groups, once all have answered, or one has all.
    pub(super) fn result(&self) -> Option<LookupResult> {
        let mut best: Option<(usize, &Vec<Piece>)> = None;
        let mut is_down = false;
        let mut is_over = true;
        for (number, tier) in self.tiers.iter().enumerate() {
            match tier {
                TierLookup::Has(pieces) => {
                    let is_more = |(_, other): &(usize, &Vec<Piece>)| end(pieces) > end(other);
                    if best.as_ref().is_none_or(is_more) {
                        best = Some((number, pieces));
                    }
                }
                TierLookup::Down => is_down = true,
                _ => is_over = false,
            }
        }
        let has_all = best.is_some_and(|(_, pieces)| end(pieces) + TAIL_TOKENS > self.tokens.len());
        let found = best.map(|(tier, pieces)| (tier, pieces.clone()));
        (is_over || has_all).then_some(LookupResult { found, is_down })
    }
}

/// The groups that all tiers together have.
#[derive(Debug)]
pub(super) struct LookupResult {
    /// The tier, and its groups.
    pub(super) found: Option<(usize, Vec<Piece>)>,
    /// A tier gave no answer.
    pub(super) is_down: bool,
}

/// Tokens that the memory can hold with these.
pub(super) fn end(pieces: &[Piece]) -> usize {
    pieces.last().map_or(0, |piece| piece.end)
}

pub(super) fn names_of(pieces: &[Piece]) -> Vec<GroupName> {
    pieces.iter().map(|piece| piece.name).collect()
}
