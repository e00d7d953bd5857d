//! Words of vocabularies that treat upper and lower case differently: GPT-4o's and Tekken's.
//!
//! The expressions need backtracking; here every character is read a bounded number of times.

use super::char_class::{CharClass, LetterCase};
use super::words::{WordSplitter, any_case, contraction, run};

/// The traits of one such expression.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CaseExpression {
    /// Most digits of one word.
    pub(super) digits: usize,
    /// The place of `'s`, `'ll` …: apart, or in the word before them.
    pub(super) contractions: Contractions,
}

/// The place of contractions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Contractions {
    Apart,
    WithWord,
}

impl WordSplitter {
    /// The first word by
    /// `[^\r\n\p{L}\p{N}]?U*L+C?|[^\r\n\p{L}\p{N}]?U+L*C?|\p{N}{1,D}| ?[^\s\p{L}\p{N}]+[\r\n/]*|…`,
    /// where `U` is `[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]`, `L` is `[\p{Ll}\p{Lm}\p{Lo}\p{M}]` and `C`
    /// are the contractions, and what follows is as in Llama 3's.
    pub(super) fn cased_word(&self, text: &str, cased: CaseExpression) -> usize {
        if let Some(letters) = self.cased_letters(text) {
            let behind = match cased.contractions {
                Contractions::WithWord => contraction(&text[letters..], any_case),
                Contractions::Apart => None,
            };
            return letters + behind.unwrap_or(0);
        }
        if text.starts_with(|c| self.classes.of(c) == CharClass::Number) {
            return self.digits(text, cased.digits);
        }
        let is_symbol = |c| matches!(self.classes.of(c), CharClass::Mark | CharClass::Other);
        self.symbols_or_spaces(text, is_symbol, &['\r', '\n', '/'])
    }

    /// Letters with at most one other character before them.
    fn cased_letters(&self, text: &str) -> Option<usize> {
        let first = text.chars().next()?;
        let leads = !matches!(first, '\r' | '\n')
            && !matches!(
                self.classes.of(first),
                CharClass::Letter | CharClass::Number
            );
        let starts = [leads.then(|| first.len_utf8()), Some(0)];
        let ends: [fn(&Self, &str) -> Option<usize>; 2] = [Self::small_end, Self::capital_end];
        ends.iter().find_map(|end| {
            let mut found = starts.iter().flatten();
            found.find_map(|&start| end(self, &text[start..]).map(|len| start + len))
        })
    }

    /// `U*L+`
    fn small_end(&self, text: &str) -> Option<usize> {
        let case = |c| self.classes.case(c);
        let capitals = run(text, |c| {
            matches!(case(c), Some(LetterCase::Upper | LetterCase::Both))
        });
        let rest = &text[capitals..];
        if rest.starts_with(|c| case(c) == Some(LetterCase::Lower)) {
            let small = run(rest, |c| {
                matches!(case(c), Some(LetterCase::Lower | LetterCase::Both))
            });
            return Some(capitals + small);
        }
        // `U*` gives back until `L+` finds one: the last character that is both.
        let both = |&(_, c): &(usize, char)| case(c) == Some(LetterCase::Both);
        let last = text[..capitals].char_indices().rfind(both);
        last.map(|(at, c)| at + c.len_utf8())
    }

    /// `U+L*`, where `U*L+` found nothing: no small letter follows.
    fn capital_end(&self, text: &str) -> Option<usize> {
        let is_capital = |c| {
            let case = self.classes.case(c);
            matches!(case, Some(LetterCase::Upper | LetterCase::Both))
        };
        Some(run(text, is_capital)).filter(|&len| len > 0)
    }
}
