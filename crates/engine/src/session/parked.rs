//! Texts that have ended and may go on: they were cancelled, or are followed by more tokens,
//! perhaps in another process.
//!
//! Invariant: a text that goes on is the text that it would have been without the pause, to the
//! bit, as long as the memory has had room for it.

use cellar_scheduler::{
    Event, PrefixUse, PromptRows, Request, RequestError, RequestId, Retention, Reuse,
};
use kv_backend::Backend;
use kv_backend::state::{SavedState, SeqTokens};
use kv_core::memory::{Memory, RestoreInto, Seqs};
use kv_core::{PosRange, SeqId, TokenId};
use model_core::picture::PictureRun;

use super::error::ServiceError;
use super::intake::{TextRequest, together};
use super::stream::TextStream;
use super::text::LiveText;
use super::{Activity, Session};
use crate::decode::Engine;
use crate::error::EngineError;

impl<B: Backend, M: Memory + Clone> Session<B, M> {
    /// Lets a text go on that was cancelled, or that has ended and is followed by `tokens`, of a
    /// request with [`Retention::Park`]. Its stream gives the pieces from there on.
    ///
    /// # Errors
    /// [`ServiceError::NotParked`]; [`EngineError::EmptyPrompt`] where the text is complete and
    /// nothing follows; [`RequestError::TooLong`]. Nothing has changed then.
    pub fn resume(
        &mut self,
        text: &mut TextStream,
        tokens: Vec<TokenId>,
    ) -> Result<(), ServiceError> {
        let id = text.id();
        let Some(live) = self.parked.get(&id) else {
            return Err(ServiceError::NotParked { request: id });
        };
        let known = self.scheduler.parked(id);
        let n_known = known.map_or(0, |known| known.tokens.len());
        let n_used = n_known + usize::from(live.pending.is_some());
        let is_computed = known.is_some_and(|known| known.n_done == n_known);
        if tokens.is_empty() && live.pending.is_none() && is_computed {
            return Err(EngineError::EmptyPrompt.into());
        }
        self.check_room(tokens.len(), n_used)?;
        self.intake.check_pictures(&tokens, &[])?;
        let Some(mut live) = self.parked.remove(&id) else {
            return Err(ServiceError::NotParked { request: id });
        };
        let tokens = live.resume(tokens);
        text.reopen();
        self.texts.insert(id, live);
        let request = id;
        self.handle(Event::Resume { request, tokens });
        Ok(())
    }

    /// Ends a text as if it were cancelled; of a request with [`Retention::Park`] it may go on.
    pub fn pause(&mut self, text: &TextStream) {
        self.handle(Event::Cancel(text.id()));
    }

    /// Pauses all other texts where this one waits for the place of one.
    pub fn make_way(&mut self, text: &TextStream) {
        let id = text.id();
        let waits = |session: &Self| {
            let mut waiting = session.scheduler.waiting();
            waiting.any(|request| request.id == id)
        };
        if waits(self) {
            self.step();
        }
        if waits(self) {
            let running: Vec<RequestId> = self.scheduler.running().map(|text| text.id).collect();
            for other in running {
                self.handle(Event::Cancel(other));
            }
        }
    }

    /// Does something with the engine while it remembers nothing, and lets it forget that, too.
    /// Texts of requests with [`Retention::Park`] are paused, and computed again when they go on;
    /// all others end as cancelled.
    pub fn with_engine<R>(&mut self, work: impl FnOnce(&mut Engine<B, M>) -> R) -> R {
        self.pause_all();
        self.handle(Event::ClearPrefixes);
        self.finish_edits();
        let result = work(&mut self.engine);
        let _removed = self.engine.clear();
        self.notice_change();
        result
    }

    /// Lets a text go on that was cancelled, behind another prompt: what was chosen so far, and how
    /// the next token is chosen, stay.
    ///
    /// # Errors
    /// [`ServiceError::NotParked`]; [`RequestError::TooLong`] where prompt and text do not fit.
    /// Nothing has changed then.
    pub fn rebase(
        &mut self,
        text: &mut TextStream,
        mut prompt: Vec<TokenId>,
    ) -> Result<(), ServiceError> {
        let id = text.id();
        let live = self.parked.get(&id);
        let live = live.ok_or(ServiceError::NotParked { request: id })?;
        let n_text = live.completion.tokens().len();
        self.check_room(prompt.len(), n_text)?;
        self.intake.check_pictures(&prompt, &live.pictures)?;
        let together = together(&live.pictures);
        let parting = self.intake.parting(&live.pictures, &prompt);
        let Some(mut live) = self.parked.remove(&id) else {
            return Err(ServiceError::NotParked { request: id });
        };
        let prefix = PrefixUse::default();
        let prefix = match &live.adapters {
            Some(adapters) => adapters.share(prefix),
            None => prefix,
        };
        live.usage.n_prompt = prompt.len();
        prompt.extend_from_slice(live.completion.tokens());
        live.pending = None;
        // What was chosen is known: nothing follows.
        let _pending = live.resume(Vec::new());
        text.reopen();
        self.texts.insert(id, live);
        self.handle(Event::Release(id));
        self.handle(Event::Submit(Request {
            id,
            parting,
            prompt,
            prefix,
            together,
            retention: Retention::Park,
            ..Request::default()
        }));
        Ok(())
    }

    /// The sequence of a text that has ended, of a request with [`Retention::Park`], and its
    /// tokens: what [`Engine::save_state`](crate::Engine::save_state) of [`Session::engine`] takes.
    /// Other texts are stepped until the memory holds no more than that.
    ///
    /// # Errors
    /// [`ServiceError::NotParked`]; also where others needed its room.
    pub fn parked(&mut self, text: &TextStream) -> Result<SeqTokens, ServiceError> {
        self.finish_all_edits();
        // The caller reads rows.
        self.engine.complete_rows()?;
        let request = text.id();
        let live = self.parked.get(&request);
        match (live, self.scheduler.parked(request)) {
            (Some(live), Some(known)) => {
                let (evaluated, rest) = known.tokens.split_at(known.n_done);
                Ok(SeqTokens {
                    seq: known.seq,
                    evaluated: evaluated.to_vec(),
                    pending: rest.iter().copied().chain(live.pending).collect(),
                })
            }
            _ => Err(ServiceError::NotParked { request }),
        }
    }

    /// A text that goes on behind the sequence `from` of a state: the prompt of the request follows
    /// the tokens that the state has computed. Without a prompt it waits for
    /// [`Session::resume`].
    ///
    /// # Errors
    /// [`ServiceError::Engine`] where the state is another model's, damaged, or does not fit;
    /// [`ServiceError::RequestsLive`] where no sequence is free; as [`Session::submit`].
    pub fn restore(
        &mut self,
        state: &SavedState<'_>,
        from: SeqId,
        request: TextRequest,
    ) -> Result<TextStream, ServiceError> {
        let known = state.tokens().iter().find(|tokens| tokens.seq == from);
        let evaluated = known.map_or(Vec::new(), |known| known.evaluated.clone());
        self.intake
            .check_pictures(&request.prompt, &request.pictures)?;
        let has_names = evaluated.iter().any(|token| token.names_row());
        if has_names && self.engine.takes_grids() {
            let what =
                "cannot go on from a saved state: where its tokens lie is not known without them";
            return Err(EngineError::WithPictures { what }.into());
        }
        let seq = self.free_seq()?;
        let into = RestoreInto::One { from, to: seq };
        let scales = request.adapters.clone();
        let adapters = self.intake.text_adapters(scales, &evaluated)?;
        self.engine.set_adapters(seq, adapters);
        self.engine.restore_state(state, into)?;
        // Where a context was shifted, the memory has the last tokens.
        let n_held = self.engine.memory().next_pos(seq).as_usize();
        let held = evaluated.get(evaluated.len().saturating_sub(n_held)..);
        let prompt = request.prompt.clone();
        let behind = |run: &PictureRun| PictureRun {
            at: run.at + evaluated.len(),
            ..run.clone()
        };
        let request = TextRequest {
            prompt: [held.unwrap_or_default(), &prompt].concat(),
            pictures: request.pictures.iter().map(behind).collect(),
            retention: Retention::Park,
            ..request
        };
        let room = self.check_room(prompt.len(), n_held);
        let taken = room.and_then(|()| self.intake.take_without_source(request));
        let (submitted, mut streams) = match taken {
            Ok(taken) => taken,
            Err(error) => {
                self.engine.remove(Seqs::One(seq), PosRange::ALL)?;
                return Err(error);
            }
        };
        for mut request in submitted.requests {
            request.prompt.clone_from(&evaluated);
            if request.prompt_rows == PromptRows::All && prompt.is_empty() {
                request.prompt_rows = PromptRows::Last;
            }
            self.scheduler.adopt(self.engine.memory(), seq, request)?;
        }
        let n_tokens = n_held;
        for (id, mut live) in submitted.texts {
            live.admit(Reuse {
                n_tokens,
                missed: None,
            });
            if prompt.is_empty() {
                live.park();
                self.parked.insert(id, live);
            } else {
                self.texts.insert(id, live);
                let tokens = prompt.clone();
                let request = id;
                self.handle(Event::Resume { request, tokens });
            }
        }
        streams.pop().ok_or(ServiceError::Stopped)
    }

    /// A text has ended: it stays where it may go on.
    pub(super) fn park(&mut self, id: RequestId, mut live: LiveText) {
        if self.scheduler.is_parked(id) {
            live.park();
            self.parked.insert(id, live);
        }
    }

    /// Gives up texts that nobody can let go on any more.
    pub(super) fn release_dropped(&mut self) {
        let parked = self.parked.iter();
        let dropped = parked.filter(|(_, live)| live.sender.is_dropped());
        let dropped: Vec<RequestId> = dropped.map(|(&id, _)| id).collect();
        for id in dropped {
            self.parked.remove(&id);
            self.handle(Event::Release(id));
        }
    }

    /// Steps until the memory needs no edits.
    fn finish_all_edits(&mut self) {
        while self.scheduler.has_edits() {
            if self.step() == Activity::Idle {
                return;
            }
        }
    }

    /// A sequence that holds nothing.
    fn free_seq(&mut self) -> Result<SeqId, ServiceError> {
        loop {
            self.finish_all_edits();
            let now = self.now();
            let free = self.scheduler.free_seq(now, self.engine.memory());
            if let Some(seq) = free {
                return Ok(seq);
            }
            if !self.scheduler.has_edits() {
                let n_requests = self.texts.len();
                return Err(ServiceError::RequestsLive { n_requests });
            }
        }
    }

    /// Checks that so many tokens fit behind those that a text has.
    fn check_room(&self, n_prompt: usize, n_used: usize) -> Result<(), ServiceError> {
        let limit = self.intake.prompt_limits().n_tokens;
        if n_prompt > 0 && n_prompt + n_used > limit {
            let n_prompt = n_prompt + n_used;
            return Err(RequestError::TooLong { n_prompt, limit }.into());
        }
        Ok(())
    }
}
