//! [`TextStream`]: the text of one request, as it comes from the service's thread.
//!
//! The two sides share a buffer that holds what was not taken yet: at most one text, so a reader
//! that is slow, or never reads, neither stops the service nor grows without bound. Invariant: the
//! pieces concatenated are the text, and a stream ends exactly once, also where the service ends.

use std::collections::BTreeSet;
use std::sync::{Arc, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use cellar_scheduler::{RequestId, Reuse, Speculated};
use kv_backend::CancelFlag;
use kv_core::TokenId;

use super::error::ServiceError;
use super::pieces::{PromptProgress, TokenPiece, logprobs_of, text_of};
use super::sync::{Condvar, Mutex, MutexGuard};
use crate::completion::FinishReason;
use crate::logprobs::TokenLogprobs;
use crate::timings::{Pace, Timings};

/// The text of one request. Dropping it cancels the request.
///
/// As an iterator it gives the pieces of the text, and an error as the last item where the request
/// failed. Pieces are never empty.
#[derive(Debug)]
pub struct TextStream {
    id: RequestId,
    shared: Arc<TextChannel>,
    step: Arc<StepGuests>,
    /// The caller's own.
    flag: Option<CancelFlag>,
    has_ended: bool,
}

/// What one request took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub n_prompt: usize,
    /// Tokens of the prompt that were cached, or are computed so far.
    pub n_prompt_done: usize,
    /// Tokens of the text.
    pub n_tokens: usize,
    /// How many of them were cached, and why not more; `None` where it was never admitted.
    pub reuse: Option<Reuse>,
    /// How often the request had to wait in the middle, because memory ran short.
    pub n_preemptions: u32,
    /// What speculation did, see [`TextRequest::speculation`](super::TextRequest::speculation).
    pub speculated: Speculated,
    /// Until it was admitted for the first time.
    pub queued: Duration,
    /// From submitting it to its first token; `None` where there was none.
    pub first_token: Option<Duration>,
    /// From submitting it to its last token, or to its end.
    pub total: Duration,
}

impl Usage {
    /// Tokens of the prompt that were cached.
    pub fn n_reused(&self) -> usize {
        self.reuse.map_or(0, |reuse| reuse.n_tokens)
    }

    /// How much of the prompt is computed.
    pub fn progress(&self) -> PromptProgress {
        PromptProgress {
            n_done: self.n_prompt_done,
            n_tokens: self.n_prompt,
            n_reused: self.n_reused(),
        }
    }

    /// The times of the prompt and of the text, and what was computed in them.
    pub fn timings(&self) -> Timings {
        let prompt_end = self.first_token.unwrap_or(self.total);
        Timings {
            prompt: Pace {
                n_tokens: self.n_prompt_done.saturating_sub(self.n_reused()),
                time: prompt_end.saturating_sub(self.queued),
            },
            generation: Pace {
                n_tokens: self.n_tokens.saturating_sub(1),
                time: self.total.saturating_sub(prompt_end),
            },
        }
    }
}

/// A text that has ended.
#[derive(Clone, Debug, PartialEq)]
pub struct FinishedText {
    /// All of the text that was not taken from the stream before.
    pub text: String,
    /// All of its tokens.
    pub tokens: Vec<TokenId>,
    /// The log probabilities of its tokens, where such are wanted, but those that were taken from
    /// the stream before.
    pub logprobs: Vec<TokenLogprobs>,
    /// Those of the prompt's tokens but the first, where they are wanted and were not taken from
    /// the stream before.
    pub prompt_logprobs: Vec<TokenLogprobs>,
    /// Why it ended.
    pub finish: FinishReason,
    /// What it took.
    pub usage: Usage,
}

/// How a text ended.
pub(crate) type TextEnd = Result<(Vec<TokenId>, FinishReason, Usage), ServiceError>;

#[derive(Debug, Default)]
struct TextChannel {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// What was not taken yet.
    pieces: Vec<TokenPiece>,
    /// Pieces whose text was taken.
    taken: Vec<TokenPiece>,
    prompt_logprobs: Vec<TokenLogprobs>,
    /// As of the last step.
    usage: Usage,
    end: Option<TextEnd>,
    /// The reader is gone, or has cancelled the request.
    is_cancelled: bool,
    /// The reader is gone.
    is_dropped: bool,
    /// The task that polled last and found nothing.
    waker: Option<Waker>,
}

impl TextChannel {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A reader that panicked leaves a text that is as good as before.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state, then wakes the thread or the task that waits for a change.
    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.lock();
        change(&mut state);
        let waker = state.waker.take();
        drop(state);
        self.changed.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl TextStream {
    /// The number of the request.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// Waits for the next piece; `None` when the text has ended.
    ///
    /// # Errors
    /// [`ServiceError`], once, where the request failed.
    pub fn next_piece(&mut self) -> Result<Option<String>, ServiceError> {
        let mut state = self.shared.lock();
        loop {
            if let Some(taken) = take(&mut state, &mut self.has_ended) {
                return taken;
            }
            let waited = self.shared.changed.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// As [`TextStream::next_piece`], but never waits: `None` where no piece is there.
    pub fn try_next_piece(&mut self) -> Option<Result<Option<String>, ServiceError>> {
        take(&mut self.shared.lock(), &mut self.has_ended)
    }

    /// The tokens that were chosen since the call before, each with its text, which may be empty;
    /// `Ok(None)` when the text has ended, and `None` where there are none now. Never waits. Not to
    /// be mixed with the other ways to take pieces.
    pub fn try_next_tokens(&mut self) -> Option<Result<Option<Vec<TokenPiece>>, ServiceError>> {
        let mut state = self.shared.lock();
        if !state.pieces.is_empty() {
            return Some(Ok(Some(std::mem::take(&mut state.pieces))));
        }
        let ended = take(&mut state, &mut self.has_ended)?;
        Some(ended.map(|_| None))
    }

    /// As [`TextStream::next_piece`], but waits at most so long: an empty piece where none came.
    ///
    /// # Errors
    /// As [`TextStream::next_piece`].
    pub fn next_piece_within(&mut self, time: Duration) -> Result<Option<String>, ServiceError> {
        let until = Instant::now() + time;
        let mut state = self.shared.lock();
        loop {
            if let Some(taken) = take(&mut state, &mut self.has_ended) {
                return taken;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(Some(String::new()));
            }
            let waited = self.shared.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// As [`TextStream::next_piece`] for asynchronous code: where no piece is there, the task of
    /// `cx` is woken when one comes. Only the task that polled last is.
    ///
    /// After the end, [`TextStream::finish`] does not wait.
    ///
    /// # Errors
    /// As [`TextStream::next_piece`].
    pub fn poll_piece(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<String>, ServiceError>> {
        let mut state = self.shared.lock();
        match take(&mut state, &mut self.has_ended) {
            Some(taken) => Poll::Ready(taken),
            None => {
                state.waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }

    /// The log probabilities, where such are wanted, of the tokens up to the end of the piece that
    /// was returned last, and since the call before. Tokens whose text is held back come with later
    /// pieces.
    pub fn take_logprobs(&mut self) -> Vec<TokenLogprobs> {
        logprobs_of(self.take_tokens())
    }

    /// The same tokens, each with its text.
    pub fn take_tokens(&mut self) -> Vec<TokenPiece> {
        std::mem::take(&mut self.shared.lock().taken)
    }

    /// How much of the prompt is computed. It changes before the first piece comes: a task that
    /// polls is woken for it, too.
    pub fn progress(&self) -> PromptProgress {
        self.usage().progress()
    }

    /// True if nothing more comes than what is there to be taken.
    pub fn has_ended(&self) -> bool {
        self.shared.lock().end.is_some()
    }

    /// True if its request failed, and no tokens are there to be taken.
    pub fn has_failed(&self) -> bool {
        let state = self.shared.lock();
        state.pieces.is_empty() && matches!(state.end, Some(Err(_)))
    }

    /// True if tokens are there to be taken.
    pub fn has_tokens(&self) -> bool {
        !self.shared.lock().pieces.is_empty()
    }

    /// True if all of the prompt is computed, or the text has ended before.
    pub fn has_read_prompt(&self) -> bool {
        let state = self.shared.lock();
        state.end.is_some() || state.usage.n_prompt_done >= state.usage.n_prompt
    }

    /// What it took up to its last step.
    pub fn usage(&self) -> Usage {
        self.shared.lock().usage
    }

    /// Why it ended; `None` while it goes on, and where it failed.
    pub fn finish_reason(&self) -> Option<FinishReason> {
        match &self.shared.lock().end {
            Some(Ok((_, finish, _))) => Some(finish.clone()),
            _ => None,
        }
    }

    /// What it ended with is taken back: it goes on.
    pub(super) fn reopen(&mut self) {
        let mut state = self.shared.lock();
        state.end = None;
        state.is_cancelled = false;
        self.has_ended = false;
    }

    /// The log probabilities of the prompt's tokens but the first, where they are wanted, once:
    /// they are there from the first piece of the text on.
    pub fn take_prompt_logprobs(&mut self) -> Vec<TokenLogprobs> {
        std::mem::take(&mut self.shared.lock().prompt_logprobs)
    }

    /// Asks the service to end the request. What was computed by then still comes, and the reason
    /// to end is [`FinishReason::Cancelled`], unless it ended before.
    pub fn cancel(&self) {
        self.shared.lock().is_cancelled = true;
        if let Some(flag) = &self.flag {
            flag.cancel();
        }
        self.step.leave(self.id);
    }

    /// Waits for the end of the text.
    ///
    /// # Errors
    /// [`ServiceError`] where the request failed.
    pub fn finish(mut self) -> Result<FinishedText, ServiceError> {
        let mut text = String::new();
        while let Some(piece) = self.next_piece()? {
            text.push_str(&piece);
        }
        let mut state = self.shared.lock();
        let logprobs = logprobs_of(std::mem::take(&mut state.taken));
        let prompt_logprobs = std::mem::take(&mut state.prompt_logprobs);
        match state.end.take() {
            Some(Ok((tokens, finish, usage))) => Ok(FinishedText {
                text,
                tokens,
                logprobs,
                prompt_logprobs,
                finish,
                usage,
            }),
            Some(Err(error)) => Err(error),
            None => Err(ServiceError::Stopped),
        }
    }
}

/// A piece, the end, or `None` where neither is there.
fn take(state: &mut State, has_ended: &mut bool) -> Option<Result<Option<String>, ServiceError>> {
    // Tokens whose text is held back come with the piece that releases it.
    let n_ready = match state.end {
        Some(_) => state.pieces.len(),
        None => {
            let last = state
                .pieces
                .iter()
                .rposition(|piece| !piece.text.is_empty());
            last.map_or(0, |last| last + 1)
        }
    };
    let text = text_of(&state.pieces[..n_ready]);
    state.taken.extend(state.pieces.drain(..n_ready));
    if !text.is_empty() {
        return Some(Ok(Some(text)));
    }
    match state.end.as_ref()? {
        Err(error) if !*has_ended => {
            *has_ended = true;
            Some(Err(error.clone()))
        }
        _ => Some(Ok(None)),
    }
}

impl Iterator for TextStream {
    type Item = Result<String, ServiceError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_piece().transpose()
    }
}

impl Drop for TextStream {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.is_cancelled = true;
        state.is_dropped = true;
        drop(state);
        self.step.leave(self.id);
    }
}

/// The service's side of a stream. Where it is dropped without an end, the service is gone.
#[derive(Debug)]
pub(crate) struct TextSender {
    shared: Arc<TextChannel>,
    flag: Option<CancelFlag>,
}

impl TextSender {
    /// Both sides of a stream, which a flag of the caller's may cancel.
    pub(crate) fn new(
        id: RequestId,
        step: &Arc<StepGuests>,
        flag: Option<CancelFlag>,
    ) -> (Self, TextStream) {
        let shared = Arc::new(TextChannel::default());
        let stream = TextStream {
            id,
            shared: Arc::clone(&shared),
            step: Arc::clone(step),
            flag: flag.clone(),
            has_ended: false,
        };
        (Self { shared, flag }, stream)
    }

    /// The flag of the caller's.
    pub(crate) fn flag(&self) -> Option<&CancelFlag> {
        self.flag.as_ref()
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        let by_flag = self.flag.as_ref().is_some_and(CancelFlag::is_cancelled);
        by_flag || self.shared.lock().is_cancelled
    }

    /// True if there is no reader any more.
    pub(crate) fn is_dropped(&self) -> bool {
        self.shared.lock().is_dropped
    }

    pub(crate) fn set_prompt_logprobs(&self, logprobs: &[TokenLogprobs]) {
        self.shared.lock().prompt_logprobs = logprobs.to_vec();
    }

    /// Pieces, which may be none, and what the text took so far.
    pub(crate) fn push(&self, pieces: Vec<TokenPiece>, usage: Usage) {
        self.shared.change(|state| {
            state.pieces.extend(pieces);
            state.usage = usage;
        });
    }

    /// The end, with what the text took. Only the first counts.
    pub(crate) fn end(&self, end: TextEnd) {
        self.shared.change(|state| {
            state.end.get_or_insert(end);
        });
    }
}

impl Drop for TextSender {
    fn drop(&mut self) {
        self.shared.change(|state| {
            state.end.get_or_insert(Err(ServiceError::Stopped));
        });
    }
}

/// The requests whose tokens a step computes: when the last of them is cancelled, so is the step.
#[derive(Debug, Default)]
pub(crate) struct StepGuests {
    guests: Mutex<BTreeSet<RequestId>>,
    flag: CancelFlag,
}

impl StepGuests {
    fn lock(&self) -> MutexGuard<'_, BTreeSet<RequestId>> {
        self.guests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a step of these requests. Returns the flag that cancels it.
    pub(crate) fn enter(&self, requests: impl Iterator<Item = RequestId>) -> &CancelFlag {
        let mut guests = self.lock();
        *guests = requests.collect();
        self.flag.reset();
        &self.flag
    }

    fn leave(&self, request: RequestId) {
        let mut guests = self.lock();
        if guests.remove(&request) && guests.is_empty() {
            self.flag.cancel();
        }
    }
}
