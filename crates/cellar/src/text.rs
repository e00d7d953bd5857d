//! [`Text`]: a text that a model is writing, as an iterator of pieces; [`TextState`], the same
//! without a borrowed model.
//!
//! Invariant: the model notes every token that was evaluated, whenever the text is dropped. Knows
//! nothing of how tokens are chosen.

use cellar_engine::sampler::Step;
use cellar_engine::{FinishReason, Generation, Speculated, Timings, TokenLogprobs, TokenPiece};
use kv_core::{SeqId, TokenId};

use crate::error::Error;
use crate::model::Model;

/// The state of a text in one sequence of a [`Model`], which each call borrows.
#[derive(Debug)]
pub struct TextState {
    generation: Generation,
    seq: SeqId,
    /// Tokens of the text that the model has noted.
    n_noted: usize,
}

impl TextState {
    pub(crate) fn new(generation: Generation, seq: SeqId) -> Self {
        Self {
            generation,
            seq,
            n_noted: 0,
        }
    }

    /// The same with a step of the caller's before all others of the sampler, such as a grammar.
    #[must_use]
    pub fn with_step(mut self, step: Box<dyn Step>) -> Self {
        self.generation = self.generation.with_step(step);
        self
    }

    /// The next piece of text, of whole characters; `None` when it has ended. Pieces may be empty.
    ///
    /// # Errors
    /// [`Error`], as [`Generation::next_piece`]: among others where another text was begun in the
    /// sequence since.
    pub fn next_piece(&mut self, model: &mut Model) -> Result<Option<String>, Error> {
        let (seq, n_noted) = (self.seq, self.n_noted);
        let piece = model.evaluate_in(seq, |engine| {
            let piece = self.generation.next_piece(engine);
            (piece, self.evaluated().get(n_noted..).unwrap_or(&[]))
        });
        self.n_noted = self.evaluated().len().max(n_noted);
        Ok(piece?)
    }

    /// Goes on where its sequence was changed on purpose, and holds the text so far as before,
    /// perhaps behind another prompt.
    pub fn accept_changes(&mut self, model: &Model) {
        self.generation.accept_changes(model.engine());
    }

    /// The tokens of the text that were evaluated: all but the last, which is evaluated when the
    /// next one is chosen.
    pub fn evaluated(&self) -> &[TokenId] {
        let tokens = self.generation.tokens();
        match self.generation.pending().and(tokens.split_last()) {
            Some((_, evaluated)) => evaluated,
            None => tokens,
        }
    }

    /// The last token where it was chosen but not evaluated yet.
    pub fn pending(&self) -> Option<TokenId> {
        self.generation.pending()
    }

    /// The text so far.
    pub fn text(&self) -> &str {
        self.generation.text()
    }

    /// Its tokens so far; a token that ended it is not among them.
    pub fn tokens(&self) -> &[TokenId] {
        self.generation.tokens()
    }

    /// The log probabilities of its tokens; empty where none are wanted
    /// ([`GenerateOptions::logprobs`](crate::GenerateOptions::logprobs)).
    pub fn logprobs(&self) -> &[TokenLogprobs] {
        self.generation.logprobs()
    }

    /// Why it ended; `None` while it goes on.
    pub fn finish_reason(&self) -> Option<&FinishReason> {
        self.generation.finish_reason()
    }

    /// The piece that was returned last, token by token.
    pub fn last_pieces(&self) -> &[TokenPiece] {
        self.generation.last_pieces()
    }

    /// What speculation did.
    pub fn speculated(&self) -> Speculated {
        self.generation.speculated()
    }

    /// How long it has taken.
    pub fn timings(&self) -> Timings {
        self.generation.timings()
    }
}

/// A text that a [`Model`] is writing: an iterator of its pieces, each of whole characters. Pieces
/// may be empty.
#[derive(Debug)]
pub struct Text<'m> {
    model: &'m mut Model,
    state: TextState,
}

impl<'m> Text<'m> {
    pub(crate) fn new(model: &'m mut Model, state: TextState) -> Self {
        Self { model, state }
    }

    /// Writes to the end and returns the whole text.
    ///
    /// # Errors
    /// [`Error`], as [`Generation::next_piece`].
    pub fn finish(mut self) -> Result<String, Error> {
        while self.state.next_piece(self.model)?.is_some() {}
        Ok(self.text().to_owned())
    }
}

/// What is known of the text so far.
impl std::ops::Deref for Text<'_> {
    type Target = TextState;

    fn deref(&self) -> &TextState {
        &self.state
    }
}

impl Iterator for Text<'_> {
    type Item = Result<String, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        self.state.next_piece(self.model).transpose()
    }
}
