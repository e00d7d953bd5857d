//! [`LiveText`]: the text of a request that has not ended: chooses its tokens, gives its pieces
//! out, and counts what it took.
//!
//! Invariant: each log probability is given out once, with the text of its token. Knows nothing of
//! other texts, of steps and of memory.

use std::sync::Arc;
use std::time::Instant;

use cellar_scheduler::{End, Progress, RequestId, Reuse};
use kv_core::{Pos, TokenId};
use model_core::picture::PictureRun;

use super::error::ServiceError;
use super::intake::QueuePlace;
use super::pieces::TokenPiece;
use super::stream::{TextSender, Usage};
use crate::adapters::TextAdapters;
use crate::completion::{Completion, FinishReason, OutputRow};
use crate::context::GroupAttention;
use crate::error::EngineError;
use crate::pictures::{SeenPicture, Viewers};
use crate::speculate::DraftSource;

/// The text of a request that has not ended.
#[derive(Debug)]
pub(super) struct LiveText {
    pub(super) completion: Completion,
    /// The prompt, where the rows of its tokens are wanted; empty once their log probabilities were
    /// given out.
    pub(super) prompt: Vec<TokenId>,
    pub(super) sender: TextSender,
    pub(super) drafter: Option<DraftSource>,
    /// Tokens were drafted for its next step.
    pub(super) has_drafted: bool,
    /// Its adapters, where the model has any.
    pub(super) adapters: Option<TextAdapters>,
    /// Until it is admitted; all texts of a request have one together.
    pub(super) place: Option<Arc<QueuePlace>>,
    /// The tokens that layers attend over in addition to its own, with a model that has an encoder.
    pub(super) source: Option<Arc<[TokenId]>>,
    /// The pictures of its prompt.
    pub(super) pictures: Vec<PictureRun>,
    /// Those of them whose rows are there and whose tokens are not computed yet.
    pub(super) seen: Vec<SeenPicture>,
    /// The texts that may find its pictures' rows kept.
    pub(super) viewers: Viewers,
    /// Its older tokens share positions.
    pub(super) group: Option<GroupAttention>,
    /// Up to which position tokens share positions.
    pub(super) grouped_to: Pos,
    /// The last token of a text that is complete with it: it is not computed.
    pub(super) pending: Option<TokenId>,
    submitted_at: Instant,
    /// Since when it is parked.
    parked_at: Option<Instant>,
    pub(super) usage: Usage,
    /// Why the last step that failed did, or why no token could be chosen.
    pub(super) error: Option<Arc<EngineError>>,
    /// Why a row of its prompt cannot be used: no text begins after it.
    prompt_error: Option<Arc<EngineError>>,
}

impl LiveText {
    /// A text without tokens.
    pub(super) fn new(completion: Completion, sender: TextSender, submitted_at: Instant) -> Self {
        Self {
            completion,
            prompt: Vec::new(),
            sender,
            drafter: None,
            has_drafted: false,
            adapters: None,
            place: None,
            source: None,
            pictures: Vec::new(),
            seen: Vec::new(),
            viewers: Viewers::Alone(RequestId(0)),
            group: None,
            grouped_to: Pos(0),
            pending: None,
            submitted_at,
            parked_at: None,
            usage: Usage::default(),
            error: None,
            prompt_error: None,
        }
    }

    /// Whether it was given a sequence before.
    pub(super) fn was_admitted(&self) -> bool {
        self.place.is_none()
    }

    /// It is given a sequence. What was cached counts when that is for the first time.
    pub(super) fn admit(&mut self, reuse: Reuse) {
        if self.place.take().is_some() {
            self.usage.queued = self.submitted_at.elapsed();
            self.usage.reuse = Some(reuse);
            self.computed(reuse.n_tokens);
        }
    }

    /// It gives its sequence back, and that of a draft model, until it goes on. Of its tokens,
    /// `n_lost` are computed again.
    pub(super) fn preempt(&mut self, n_lost: usize) {
        self.usage.n_preemptions += 1;
        if n_lost > 0 {
            self.forget_positions();
        }
        if let Some(DraftSource::Model(drafter)) = &self.drafter {
            drafter.release();
        }
    }

    /// Its tokens are computed again: none of them share positions.
    pub(super) fn forget_positions(&mut self) {
        self.grouped_to = Pos(0);
    }

    /// So many of its tokens are computed, perhaps with some of its text.
    pub(super) fn computed(&mut self, n_tokens: usize) {
        let n_source = self.source.as_ref().map_or(0, |source| source.len());
        let n_done = (n_source + n_tokens).min(self.usage.n_prompt);
        if n_done > self.usage.n_prompt_done {
            self.usage.n_prompt_done = n_done;
            self.send(Vec::new());
        }
    }

    /// Shows what it has taken so far.
    pub(super) fn publish(&mut self) {
        self.send(Vec::new());
    }

    /// The row of a token of the prompt, where such are wanted.
    pub(super) fn take_prompt_row(&mut self, index: usize, row: &[f32]) {
        let Some(&next) = self.prompt.get(index + 1) else {
            return;
        };
        if let Err(error) = self.completion.take_prompt_row(index, next, row) {
            self.prompt_error.get_or_insert(Arc::new(error));
        }
    }

    /// Chooses a token from a row, and gives out what text is complete.
    pub(super) fn take_row(&mut self, row: OutputRow<'_>) -> Progress {
        if let Some(error) = self.prompt_error.take() {
            self.error = Some(error);
            return Progress::Failed;
        }
        if !std::mem::take(&mut self.prompt).is_empty() {
            let places = self.completion.prompt_logprobs();
            self.sender.set_prompt_logprobs(places);
        }
        match self.completion.take_pieces(row) {
            Ok(pieces) => {
                let first = self.submitted_at.elapsed();
                self.usage.first_token.get_or_insert(first);
                let chosen = pieces.iter().find_map(|piece| piece.token);
                self.send(pieces);
                match (self.completion.finish_reason(), self.completion.tokens()) {
                    (None, &[.., token]) => {
                        if let Some(drafter) = &mut self.drafter {
                            drafter.push(&[token]);
                        }
                        Progress::Token(token)
                    }
                    _ => {
                        self.pending = chosen;
                        Progress::Ended
                    }
                }
            }
            Err(error) => {
                self.error = Some(Arc::new(error));
                Progress::Failed
            }
        }
    }

    /// Gives pieces out.
    fn send(&mut self, pieces: Vec<TokenPiece>) {
        self.usage.total = self.submitted_at.elapsed();
        self.usage.n_tokens = self.completion.tokens().len();
        self.sender.push(pieces, self.usage);
    }

    /// It has ended, and may go on.
    pub(super) fn park(&mut self) {
        self.parked_at = Some(Instant::now());
        if let Some(DraftSource::Model(drafter)) = &self.drafter {
            drafter.release();
        }
    }

    /// It goes on, after more tokens that are none of its own. The time in between does not count.
    /// Returns all tokens that follow those that were computed or chosen before.
    pub(super) fn resume(&mut self, tokens: Vec<TokenId>) -> Vec<TokenId> {
        if let Some(parked_at) = self.parked_at.take() {
            self.submitted_at += parked_at.elapsed();
        }
        self.completion.reopen();
        self.completion.accept_prompt(&tokens);
        self.usage.n_prompt += tokens.len();
        let tokens: Vec<TokenId> = self.pending.take().into_iter().chain(tokens).collect();
        if let Some(drafter) = &mut self.drafter {
            drafter.push(&tokens);
        }
        tokens
    }

    /// Gives the rest out, with the reason why the text ended.
    pub(super) fn end(&mut self, end: End) {
        let rest = match end {
            End::Complete | End::Failed => String::new(),
            End::ContextFull => self.completion.end(FinishReason::ContextFull),
            End::Cancelled => self.completion.end(FinishReason::Cancelled),
        };
        let rest = TokenPiece {
            token: None,
            text: rest,
            logprobs: None,
        };
        let is_rest = !rest.text.is_empty();
        self.send(is_rest.then_some(rest).into_iter().collect());
        let finish = self.completion.finish_reason().cloned();
        let ended = match (end, finish, self.error.take()) {
            (End::Failed, _, Some(error)) => Err(ServiceError::Engine(error)),
            (_, Some(finish), _) => Ok((self.completion.tokens().to_vec(), finish, self.usage)),
            (_, None, _) => Err(ServiceError::from(EngineError::NoLogits)),
        };
        self.sender.end(ended);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use model_core::tokenizer::{Tokenizer, TokenizerModel, TokenizerSpec};

    use super::*;
    use crate::completion::CompletionOptions;
    use crate::logprobs::{Logprobs, TokenLogprobs};
    use crate::sampler::SamplerConfig;

    /// Tokens 3 to 5; those before are special in a vocabulary of this kind.
    const PIECES: [&str; 6] = ["<unk>", "<s>", "</s>", "a", "b", "c"];

    fn live() -> (LiveText, crate::session::TextStream) {
        let mut spec = TokenizerSpec::new(TokenizerModel::Spm, PIECES.map(str::to_owned).to_vec());
        spec.scores = vec![0.0; PIECES.len()];
        let tokenizer = Arc::new(Tokenizer::new(spec).unwrap());
        let options = CompletionOptions {
            sampler: SamplerConfig::greedy(),
            stop: vec!["bc".to_owned()],
            logprobs: Logprobs::Top(0),
            ..CompletionOptions::default()
        };
        let (sender, stream) = TextSender::new(RequestId(0), &Arc::default(), None);
        let completion = Completion::new(&tokenizer, options).unwrap();
        let live = LiveText::new(completion, sender, Instant::now());
        (live, stream)
    }

    fn choose(live: &mut LiveText, token: usize) {
        let mut row = [0.0; PIECES.len()];
        row[token] = 1.0;
        let chosen = TokenId(token as u32);
        assert_eq!(
            live.take_row(OutputRow::Logits(&row)),
            Progress::Token(chosen)
        );
    }

    fn tokens(places: &[TokenLogprobs]) -> Vec<u32> {
        places.iter().map(|place| place.chosen.token.0).collect()
    }

    #[test]
    fn log_probabilities_come_with_the_text_of_their_tokens() {
        let (mut live, mut stream) = live();
        choose(&mut live, 3);
        choose(&mut live, 4); // held back: a stop string may begin here
        assert_eq!(stream.next_piece().unwrap().unwrap(), "a");
        assert_eq!(tokens(&stream.take_logprobs()), [3]);
        choose(&mut live, 3);
        assert_eq!(stream.next_piece().unwrap().unwrap(), "ba");
        assert_eq!(tokens(&stream.take_logprobs()), [4, 3]);
        choose(&mut live, 4);
        live.end(End::ContextFull);
        let end = stream.finish().unwrap();
        assert_eq!((end.text.as_str(), tokens(&end.logprobs)), ("b", vec![4]));
    }
}
