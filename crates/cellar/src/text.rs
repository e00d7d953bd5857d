//! [`Text`]: a text that a model is writing, as an iterator of pieces.
//!
//! Invariant: the model notes every token that was evaluated, whenever the text is dropped. Knows
//! nothing of how tokens are chosen.

use engine::{EngineError, FinishReason, GenerateOptions, Generation, Timings};
use kv_core::TokenId;

use crate::error::Error;
use crate::model::Model;

/// A text that a [`Model`] is writing: an iterator of its pieces, each of whole characters. Pieces
/// may be empty.
#[derive(Debug)]
pub struct Text<'m> {
    model: &'m mut Model,
    generation: Generation,
    /// Tokens of the text that the model has noted.
    n_noted: usize,
}

impl<'m> Text<'m> {
    /// Evaluates the tokens of the prompt that are new.
    pub(crate) fn begin(
        model: &'m mut Model,
        new: &[TokenId],
        options: GenerateOptions,
    ) -> Result<Self, Error> {
        let tokenizer = model.file().tokenizer();
        let mut generation = Generation::new(model.engine(), tokenizer, options)?;
        let mut n_done = 0;
        let fed = generation.feed(model.engine_mut(), new, |progress| n_done = progress.n_done);
        model.evaluated.extend(&new[..n_done]);
        fed?;
        Ok(Self {
            model,
            generation,
            n_noted: 0,
        })
    }

    /// The text so far.
    pub fn text(&self) -> &str {
        self.generation.text()
    }

    /// Its tokens so far; a token that ended it is not among them.
    pub fn tokens(&self) -> &[TokenId] {
        self.generation.tokens()
    }

    /// Why it ended; `None` while it goes on.
    pub fn finish_reason(&self) -> Option<&FinishReason> {
        self.generation.finish_reason()
    }

    /// How long it has taken.
    pub fn timings(&self) -> Timings {
        self.generation.timings()
    }

    /// Writes to the end and returns the whole text.
    ///
    /// # Errors
    /// [`Error`], as [`Generation::next_piece`].
    pub fn finish(mut self) -> Result<String, Error> {
        while self.next_piece()?.is_some() {}
        Ok(self.text().to_owned())
    }

    fn next_piece(&mut self) -> Result<Option<String>, EngineError> {
        let piece = self.generation.next_piece(self.model.engine_mut());
        let tokens = self.generation.tokens();
        let n_pending = usize::from(self.generation.pending().is_some());
        let n_evaluated = tokens.len().saturating_sub(n_pending);
        if let Some(new) = tokens.get(self.n_noted..n_evaluated) {
            self.model.evaluated.extend(new);
            self.n_noted = n_evaluated;
        }
        piece
    }
}

impl Iterator for Text<'_> {
    type Item = Result<String, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_piece().map_err(Error::from).transpose()
    }
}
