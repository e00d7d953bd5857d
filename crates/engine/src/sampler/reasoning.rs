//! [`ReasoningBudget`]: ends the reasoning of a model after so many tokens.
//!
//! Invariant: a token is forced only inside of reasoning, and what is forced is the mark that ends
//! it, and what begins the answer. Knows no template: the caller says which marks there are.

use std::sync::Arc;

use kv_core::TokenId;
use model_core::tokenizer::{AddSpecial, EncodeOptions, SpecialPieces, SpecialText, Tokenizer};

use super::candidates::Candidates;
use super::steps::{Step, TokenOrigin};

/// The marks around reasoning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReasoningMarks {
    /// The mark before it.
    pub open: String,
    /// The mark behind it.
    pub close: String,
    /// The header of the answer behind that mark, where the answer is a message of its own; empty
    /// where it is the text that follows.
    pub answer: String,
}

/// The place of the next token in a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Before anything but white space, at the beginning or behind reasoning.
    Start,
    /// In reasoning with the marks of this number.
    Reasoning { marks: usize },
    /// In the mark of this number, of which so many tokens are forced.
    Closing { marks: usize, n_forced: usize },
    /// In the answer.
    Answer,
}

/// Ends reasoning after a number of tokens.
#[derive(Clone, Debug)]
pub struct ReasoningBudget {
    n_tokens: usize,
    marks: Vec<ReasoningMarks>,
    /// The tokens of each closing mark, with what begins the answer.
    closing: Vec<Vec<TokenId>>,
    tokenizer: Arc<Tokenizer>,
    first: Place,
    place: Place,
    /// Tokens of reasoning so far.
    n_used: usize,
    /// The text of the section, as far as a mark may begin in it.
    text: Vec<u8>,
}

impl ReasoningBudget {
    /// Reasoning of at most so many tokens between any of these marks, behind a prompt that may end
    /// with one that begins it.
    pub fn new(
        n_tokens: usize,
        marks: Vec<ReasoningMarks>,
        prompt: &str,
        tokenizer: &Arc<Tokenizer>,
    ) -> Self {
        let options = EncodeOptions {
            add: AddSpecial::Continuation,
            special: SpecialText::Parse,
        };
        let closing = marks
            .iter()
            .map(|marks| tokenizer.encode(&format!("{}{}", marks.close, marks.answer), options));
        let prompt = prompt.trim_end();
        let begun = marks.iter().position(|marks| prompt.ends_with(&marks.open));
        let first = begun.map_or(Place::Start, |marks| Place::Reasoning { marks });
        Self {
            n_tokens,
            closing: closing.collect(),
            marks,
            tokenizer: Arc::clone(tokenizer),
            first,
            place: first,
            n_used: 0,
            text: Vec::new(),
        }
    }

    /// The token that has to come next; `None` where any may.
    fn forced(&self) -> Option<TokenId> {
        let (marks, at) = match self.place {
            Place::Reasoning { marks } if self.n_used >= self.n_tokens => (marks, 0),
            Place::Closing { marks, n_forced } => (marks, n_forced),
            _ => return None,
        };
        self.closing.get(marks)?.get(at).copied()
    }

    /// Takes a token that the model chose.
    fn take(&mut self, token: TokenId) {
        let piece = self.tokenizer.piece(token, SpecialPieces::Render);
        self.text.extend(piece.unwrap_or_default());
        if let Place::Reasoning { marks } = self.place {
            let close = self.marks.get(marks).map_or("", |marks| &marks.close);
            let Some(end) = end_of(&self.text, close.as_bytes()) else {
                let n_kept = close.len().saturating_sub(1);
                self.text.drain(..self.text.len().saturating_sub(n_kept));
                self.n_used += 1;
                return;
            };
            self.text.drain(..end);
            self.place = Place::Start;
        }
        let begun = self.text.trim_ascii_start();
        let open = |marks: &ReasoningMarks| marks.open.trim_start().to_owned();
        let is_open = |marks: &ReasoningMarks| begun.starts_with(open(marks).as_bytes());
        let may_open = |marks: &ReasoningMarks| open(marks).as_bytes().starts_with(begun);
        if let Some(marks) = self.marks.iter().position(is_open) {
            self.text.clear();
            self.place = Place::Reasoning { marks };
        } else if !self.marks.iter().any(may_open) {
            self.place = Place::Answer;
        }
    }
}

/// Behind the first such mark in the text.
fn end_of(text: &[u8], mark: &[u8]) -> Option<usize> {
    if mark.is_empty() {
        return Some(0);
    }
    let at = text.windows(mark.len()).position(|part| part == mark)?;
    Some(at + mark.len())
}

impl Step for ReasoningBudget {
    fn apply(&mut self, candidates: &mut Candidates<'_>) {
        if let Some(forced) = self.forced() {
            candidates.retain(|candidate| candidate.token == forced);
        }
    }

    fn accept(&mut self, token: TokenId, origin: TokenOrigin) {
        if origin == TokenOrigin::Prompt || self.place == Place::Answer {
            return;
        }
        let n_forced = match self.place {
            Place::Reasoning { .. } if self.forced() == Some(token) => 1,
            Place::Closing { n_forced, .. } => n_forced + 1,
            _ => return self.take(token),
        };
        if let Place::Reasoning { marks } | Place::Closing { marks, .. } = self.place {
            let n_closing = self.closing.get(marks).map_or(0, Vec::len);
            self.place = if n_forced >= n_closing {
                Place::Answer
            } else {
                Place::Closing { marks, n_forced }
            };
        }
    }

    fn reset(&mut self) {
        self.place = self.first;
        self.n_used = 0;
        self.text.clear();
    }
}
