//! Unigram: a word is cut into the pieces whose scores add up to the most (Kudo,
//! arXiv 1804.10959).
//!
//! Invariant: every character is in exactly one token; characters that are in no piece are the
//! unknown token, of which one stands for a whole run. Of equal sums the one whose last piece
//! begins first wins.

use std::num::NonZeroU32;

use std::borrow::Cow;

use kv_core::TokenId;

use super::char_map::CharMap;
use super::spm::SpacePrefix;
use super::vocab::{SPM_SPACE, SPM_SPACE_TEXT, Vocab, check_len};
use super::{TokenKind, TokenizerError};

/// The distance of an unknown character from the least likely piece, as logarithms.
const UNKNOWN_PENALTY: f64 = 10.0;

/// The outcome for runs of white space, and of that at the ends of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExtraSpace {
    /// One of each run stays, and none at the ends.
    Remove,
    /// All stays.
    Keep,
}

/// The place of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TextStart {
    /// At the start of all, or after a mark.
    Beginning,
    /// After other text.
    Continuation,
}

#[derive(Clone, Debug)]
pub(super) struct Unigram {
    scores: Vec<f32>,
    unknown: TokenId,
    unknown_score: f64,
    table: Option<CharMap>,
    prefix: SpacePrefix,
    extra_space: ExtraSpace,
}

/// The preparation of a text before it is cut.
#[derive(Clone, Debug)]
pub(super) struct Preparation {
    pub(super) table: Option<CharMap>,
    pub(super) prefix: SpacePrefix,
    pub(super) extra_space: ExtraSpace,
}

/// The best way to a place in a word.
#[derive(Clone, Copy, Debug)]
struct BestPath {
    score: f64,
    /// The length of its last piece, in bytes.
    len: NonZeroU32,
    token: TokenId,
}

impl Unigram {
    pub(super) fn new(
        vocab: &Vocab,
        scores: &[f32],
        unknown: Option<TokenId>,
        preparation: Preparation,
    ) -> Result<Self, TokenizerError> {
        check_len("tokenizer.ggml.scores", scores.len(), vocab.n_tokens())?;
        if let Some(id) = scores.iter().position(|score| score.is_nan()) {
            return Err(TokenizerError::ScoreNotANumber { id });
        }
        let unknown = unknown.ok_or(TokenizerError::MissingSpecial { name: "unknown" })?;
        let normal = vocab.iter().filter(|(.., kind)| *kind == TokenKind::Normal);
        let scores_of = normal.filter_map(|(id, ..)| scores.get(id.as_usize()));
        let least = scores_of.copied().fold(0.0, f32::min);
        Ok(Self {
            scores: scores.to_vec(),
            unknown,
            unknown_score: f64::from(least) - UNKNOWN_PENALTY,
            table: preparation.table,
            prefix: preparation.prefix,
            extra_space: preparation.extra_space,
        })
    }

    /// Appends the tokens of `text`.
    pub(super) fn encode(
        &self,
        vocab: &Vocab,
        text: &str,
        start: TextStart,
        out: &mut Vec<TokenId>,
    ) {
        let text = self.prepared(text, start);
        let mut rest = text.as_str();
        while let Some(first) = rest.chars().next() {
            // A word is a space and what follows.
            let after = rest.get(first.len_utf8()..).unwrap_or_default();
            let len = after
                .find(SPM_SPACE)
                .map_or(rest.len(), |at| at + first.len_utf8());
            let (word, next) = rest.split_at(len);
            self.encode_word(vocab, word, out);
            rest = next;
        }
    }

    /// The text as pieces spell it.
    fn prepared(&self, text: &str, start: TextStart) -> String {
        let text = match &self.table {
            Some(table) => Cow::Owned(table.apply(text)),
            None => Cow::Borrowed(text),
        };
        let mut spelt = String::with_capacity(text.len() + 8);
        match self.extra_space {
            ExtraSpace::Keep => spelt.push_str(&text),
            ExtraSpace::Remove => {
                let mut first = match start {
                    TextStart::Beginning => "",
                    TextStart::Continuation if text.starts_with(' ') => " ",
                    TextStart::Continuation => "",
                };
                for word in text.split(' ').filter(|word| !word.is_empty()) {
                    spelt.push_str(std::mem::replace(&mut first, " "));
                    spelt.push_str(word);
                }
            }
        }
        let prefix = match start {
            TextStart::Beginning => self.prefix,
            TextStart::Continuation => SpacePrefix::None,
        };
        if prefix == SpacePrefix::Add && !spelt.is_empty() && !spelt.starts_with(' ') {
            spelt.insert(0, ' ');
        }
        spelt.replace(' ', SPM_SPACE_TEXT)
    }

    /// Appends the pieces of one word.
    fn encode_word(&self, vocab: &Vocab, word: &str, out: &mut Vec<TokenId>) {
        let mut best: Vec<Option<BestPath>> = vec![None; word.len() + 1];
        for (start, first) in word.char_indices() {
            let so_far = match best.get(start) {
                Some(Some(best)) => best.score,
                _ => 0.0,
            };
            let mut offer = |end: usize, token: TokenId, score: f64| {
                let score = so_far + score;
                let len = u32::try_from(end - start).ok().and_then(NonZeroU32::new);
                if let (Some(slot), Some(len)) = (best.get_mut(end), len)
                    && slot.is_none_or(|other| score > other.score)
                {
                    *slot = Some(BestPath { score, len, token });
                }
            };
            let after_first = start + first.len_utf8();
            let mut has_piece_of_one = false;
            let longest = word.len().min(start + vocab.max_len());
            for end in (after_first..=longest).filter(|&end| word.is_char_boundary(end)) {
                let piece = word.get(start..end).and_then(|text| vocab.id(text));
                let normal = |id: &TokenId| vocab.kind(*id) == Some(TokenKind::Normal);
                let Some(token) = piece.filter(normal) else {
                    continue;
                };
                has_piece_of_one |= end == after_first;
                let score = self.scores.get(token.as_usize()).copied();
                offer(end, token, f64::from(score.unwrap_or(0.0)));
            }
            if !has_piece_of_one {
                offer(after_first, self.unknown, self.unknown_score);
            }
        }
        let from = out.len();
        let mut end = word.len();
        while let Some(Some(last)) = best.get(end).filter(|_| end > 0) {
            // One unknown token stands for a run of them.
            if last.token != self.unknown || out[from..].last() != Some(&self.unknown) {
                out.push(last.token);
            }
            end -= last.len.get() as usize;
        }
        out[from..].reverse();
    }
}
