//! [`ReasoningBudget`]: ends the reasoning of a model after so many tokens.
//!
//! Invariant: a token is forced only inside of reasoning, and what is forced is the mark that ends
//! it. Knows no template: the caller says which marks there are.

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
}

/// The place of the next token in a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Before anything but white space.
    Start,
    /// In reasoning with the marks of this number, which has so many tokens.
    Reasoning {
        marks: usize,
        n_tokens: usize,
    },
    /// In the mark of this number, of which so many tokens are forced.
    Closing {
        marks: usize,
        n_forced: usize,
    },
    Answer,
}

/// Ends reasoning after a number of tokens.
#[derive(Clone, Debug)]
pub struct ReasoningBudget {
    n_tokens: usize,
    marks: Vec<ReasoningMarks>,
    /// The tokens of each closing mark.
    closing: Vec<Vec<TokenId>>,
    tokenizer: Arc<Tokenizer>,
    first: Place,
    place: Place,
    /// The text of the section, as far as a mark may begin in it.
    text: Vec<u8>,
}

impl ReasoningBudget {
    /// Reasoning of at most so many tokens between any of these marks. The first marks are those
    /// that `begun` says the prompt ends in.
    pub fn new(
        n_tokens: usize,
        marks: Vec<ReasoningMarks>,
        begun: Option<&str>,
        tokenizer: &Arc<Tokenizer>,
    ) -> Self {
        let options = EncodeOptions {
            add: AddSpecial::Never,
            special: SpecialText::Parse,
        };
        let closing = marks.iter().map(|m| tokenizer.encode(&m.close, options));
        let begun = begun.and_then(|open| marks.iter().position(|m| m.open == open));
        let first = match begun {
            Some(marks) => Place::Reasoning { marks, n_tokens: 0 },
            None => Place::Start,
        };
        Self {
            n_tokens,
            closing: closing.collect(),
            marks,
            tokenizer: Arc::clone(tokenizer),
            first,
            place: first,
            text: Vec::new(),
        }
    }

    /// The token that has to come next; `None` where any may.
    fn forced(&self) -> Option<TokenId> {
        let (marks, at) = match self.place {
            Place::Reasoning { marks, n_tokens } if n_tokens >= self.n_tokens => (marks, 0),
            Place::Closing { marks, n_forced } => (marks, n_forced),
            _ => return None,
        };
        self.closing.get(marks)?.get(at).copied()
    }

    /// The place after a token that the model chose.
    fn after(&mut self, token: TokenId) -> Place {
        let piece = self.tokenizer.piece(token, SpecialPieces::Render);
        self.text.extend(piece.unwrap_or_default());
        match self.place {
            Place::Start => {
                let begun = self.text.trim_ascii_start();
                let open = |marks: &ReasoningMarks| begun.starts_with(marks.open.as_bytes());
                if let Some(marks) = self.marks.iter().position(open) {
                    self.text.clear();
                    return Place::Reasoning { marks, n_tokens: 0 };
                }
                let may_open = |marks: &ReasoningMarks| marks.open.as_bytes().starts_with(begun);
                if self.marks.iter().any(may_open) {
                    Place::Start
                } else {
                    Place::Answer
                }
            }
            Place::Reasoning { marks, n_tokens } => {
                let close = self.marks.get(marks).map_or("", |marks| &marks.close);
                let is_closed = contains(&self.text, close.as_bytes());
                let n_kept = close.len().saturating_sub(1);
                self.text.drain(..self.text.len().saturating_sub(n_kept));
                if is_closed {
                    Place::Answer
                } else {
                    let n_tokens = n_tokens + 1;
                    Place::Reasoning { marks, n_tokens }
                }
            }
            place => place,
        }
    }
}

/// True if the mark is in the text.
fn contains(text: &[u8], mark: &[u8]) -> bool {
    mark.is_empty() || text.windows(mark.len()).any(|part| part == mark)
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
        let forced = self.forced();
        self.place = match self.place {
            Place::Reasoning { marks, .. } if forced == Some(token) => {
                Place::Closing { marks, n_forced: 1 }
            }
            Place::Closing { marks, n_forced } => Place::Closing {
                marks,
                n_forced: n_forced + 1,
            },
            _ => self.after(token),
        };
        if let Place::Closing { marks, n_forced } = self.place
            && self
                .closing
                .get(marks)
                .is_none_or(|tokens| n_forced >= tokens.len())
        {
            self.place = Place::Answer;
        }
    }

    fn reset(&mut self) {
        self.place = self.first;
        self.text.clear();
    }
}
