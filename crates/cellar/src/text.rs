//! [`Text`]: a text that a model is writing, as an iterator of pieces; [`TextState`], the same
//! without a borrowed model.
//!
//! Invariant: the pieces concatenated are the text. Knows nothing of how tokens are chosen.

use cellar_engine::serve::{TextStream, TokenPiece, Usage};
use cellar_engine::{CancelFlag, FinishReason, TokenLogprobs};
use kv_backend::{Backend, BoxedBackend};
use kv_core::TokenId;
use kv_core::memory::{Composite, Memory};

use crate::error::Error;
use crate::model::Model;

/// The state of a text of a [`Model`], which each call borrows.
#[derive(Debug)]
pub struct TextState {
    stream: TextStream,
    cancel: CancelFlag,
    text: String,
    tokens: Vec<TokenId>,
    logprobs: Vec<TokenLogprobs>,
    last: Vec<TokenPiece>,
    finish: Option<FinishReason>,
}

impl TextState {
    /// A text whose prompt is computed.
    pub(crate) fn begun(mut stream: TextStream, cancel: CancelFlag) -> Result<Self, Error> {
        if stream.has_failed()
            && let Some(Err(error)) = stream.try_next_tokens()
        {
            return Err(error.into());
        }
        let mut state = Self {
            finish: None,
            stream,
            cancel,
            text: String::new(),
            tokens: Vec::new(),
            logprobs: Vec::new(),
            last: Vec::new(),
        };
        if state.stream.usage().n_tokens == 0 {
            state.finish = state.stream.finish_reason();
        }
        Ok(state)
    }

    /// The next piece of text, of whole characters; `None` when it has ended. Pieces may be empty.
    /// A text that was cancelled goes on once its flag is reset.
    ///
    /// # Errors
    /// [`Error::Text`] where the text failed.
    pub fn next_piece<B: Backend, M: Memory + Clone>(
        &mut self,
        model: &mut Model<B, M>,
    ) -> Result<Option<String>, Error> {
        self.last.clear();
        let session = model.session();
        let was_paused = self.stream.finish_reason() == Some(FinishReason::Cancelled);
        if was_paused && !self.stream.has_tokens() && !self.cancel.is_cancelled() {
            self.finish = None;
            session.resume(&mut self.stream, Vec::new())?;
        }
        session.make_way(&self.stream);
        match session.next_tokens(&mut self.stream)? {
            Some(pieces) => self.last = pieces,
            None => self.finish = self.stream.finish_reason(),
        }
        for piece in &self.last {
            self.text.push_str(&piece.text);
            self.tokens.extend(piece.token);
            self.logprobs.extend(piece.logprobs.clone());
        }
        let texts = self.last.iter().map(|piece| piece.text.as_str());
        Ok((!self.last.is_empty()).then(|| texts.collect()))
    }

    /// The text so far.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Its tokens so far; a token that ended it is not among them.
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// The log probabilities of its tokens; empty where none are wanted
    /// ([`GenerateOptions::logprobs`](crate::GenerateOptions::logprobs)).
    pub fn logprobs(&self) -> &[TokenLogprobs] {
        &self.logprobs
    }

    /// Why it ended; `None` before the last piece was taken.
    pub fn finish_reason(&self) -> Option<&FinishReason> {
        self.finish.as_ref()
    }

    /// The piece that was returned last, token by token.
    pub fn last_pieces(&self) -> &[TokenPiece] {
        &self.last
    }

    /// What it took so far: its times are [`Usage::timings`].
    pub fn usage(&self) -> Usage {
        self.stream.usage()
    }

    pub(crate) fn stream(&self) -> &TextStream {
        &self.stream
    }

    pub(crate) fn stream_mut(&mut self) -> &mut TextStream {
        &mut self.stream
    }
}

/// A text that a [`Model`] is writing: an iterator of its pieces, each of whole characters. Pieces
/// may be empty.
#[derive(Debug)]
pub struct Text<'m, B: Backend = BoxedBackend, M: Memory + Clone = Composite> {
    model: &'m mut Model<B, M>,
    state: TextState,
}

impl<'m, B: Backend, M: Memory + Clone> Text<'m, B, M> {
    pub(crate) fn new(model: &'m mut Model<B, M>, state: TextState) -> Self {
        Self { model, state }
    }

    /// Writes to the end and returns the whole text.
    ///
    /// # Errors
    /// [`Error::Text`] where the text failed.
    pub fn finish(mut self) -> Result<String, Error> {
        while self.state.next_piece(self.model)?.is_some() {}
        Ok(self.text().to_owned())
    }
}

/// What is known of the text so far.
impl<B: Backend, M: Memory + Clone> std::ops::Deref for Text<'_, B, M> {
    type Target = TextState;

    fn deref(&self) -> &TextState {
        &self.state
    }
}

impl<B: Backend, M: Memory + Clone> Iterator for Text<'_, B, M> {
    type Item = Result<String, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        self.state.next_piece(self.model).transpose()
    }
}
