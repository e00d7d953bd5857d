//! The work of a [`Session`] for the plans of its scheduler: edits of the memory, sources, shifts
//! and steps.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use cellar_scheduler::{
    Event, RequestId, RowReport, RowUse, Shift, ShiftResult, Step, StepFailure,
};
use kv_backend::{Backend, BackendError, CancelFlag};
use kv_core::batch::Batch;
use kv_core::memory::{Edit, Memory, PlannedBatch, Refusal};
use kv_core::{Pos, SeqId};

use super::Session;
use super::config::micros;
use super::drafts::{DraftKnowledge, learn_from_drafts};
use super::frame::EventKind;
use super::text::LiveText;
use crate::completion::OutputRow;
use crate::error::EngineError;
use crate::rows_out::StepRows;

/// The most candidates that a device is asked for; with more, rows of logits are read back.
pub(crate) const MAX_CANDIDATES: usize = 512;

impl<B: Backend, M: Memory + Clone> Session<B, M> {
    pub(super) fn edit(&mut self, edits: Vec<Edit>) {
        self.recorder.set_stale();
        self.publish_evicted();
        for edit in edits {
            let edited = self.engine.edit(edit);
            if let Err(error) = &edited {
                self.note_lost_device(error);
            }
            match (edited, edit) {
                (Ok(_), _) => {}
                // The sequence that was to get tokens, or to move them, has none then.
                (Err(error), Edit::Copy { .. } | Edit::Reposition { .. }) => {
                    tracing::warn!(%error, "tokens could not be copied or moved");
                    self.handle(Event::StepFailed(StepFailure::Computation));
                }
                // A scheduler that disagrees with its memory cannot go on.
                (Err(error), _) => self.fail_all(&Arc::new(error)),
            }
        }
    }

    /// Encodes the source of a request.
    pub(super) fn encode(&mut self, request: RequestId, seq: SeqId) {
        let live = self.texts.get(&request);
        let source = live
            .and_then(|live| live.source.clone())
            .unwrap_or_default();
        let cancel = self.cancel_flag(std::iter::once(request));
        let batch = Batch::source(seq, source.iter().copied());
        match self.engine.encode_until(&batch, &cancel) {
            Ok(_) => {
                self.handle(Event::Encoded(request));
                if let Some(live) = self.texts.get_mut(&request) {
                    live.computed(0);
                }
            }
            Err(EngineError::Cancelled) => {
                self.handle(Event::Encoded(request));
                self.handle(Event::Cancel(request));
            }
            Err(error) => {
                self.note_lost_device(&error);
                self.set_error(request, &Arc::new(error));
                self.handle(Event::Fail(request));
            }
        }
    }

    /// Drops tokens of a text that is full.
    pub(super) fn shift(&mut self, shift: Shift) {
        let request = shift.request;
        let result = match self.engine.shift(&shift) {
            Ok(()) => ShiftResult::Done,
            Err(EngineError::Refused(Refusal::NoRoom(_))) => ShiftResult::NoRoom,
            Err(error) => {
                self.note_lost_device(&error);
                tracing::warn!(%error, "a text that is full cannot go on");
                ShiftResult::Refused
            }
        };
        self.handle(Event::Shifted { request, result });
    }

    /// Lets older tokens share positions, of the texts that want it.
    pub(super) fn group_positions(&mut self) {
        if self.texts.values().all(|live| live.group.is_none()) {
            return;
        }
        let running: Vec<(RequestId, SeqId)> =
            self.scheduler.running().map(|r| (r.id, r.seq)).collect();
        for (request, seq) in running {
            let Some(live) = self.texts.get_mut(&request) else {
                continue;
            };
            let Some(group) = live.group else {
                continue;
            };
            let (mut to, mut failed) = (live.grouped_to, None);
            while self.engine.memory().next_pos(seq).0 >= to.0.saturating_add(group.width())
                && failed.is_none()
            {
                failed = self.engine.group(seq, to, group).err();
                to = Pos(to.0 + group.n_positions());
            }
            live.grouped_to = to;
            if let Some(error) = failed {
                self.note_lost_device(&error);
                self.set_error(request, &Arc::new(error));
                self.handle(Event::Fail(request));
            }
        }
    }

    /// How many of the most likely tokens of each row are enough for all texts of a step, where the
    /// device finds them; `None` where rows of logits are read back.
    fn n_candidates(&self, step: &Step) -> Option<usize> {
        if !self.engine.backend().prefers_candidates() {
            return None;
        }
        let mut n = 1;
        for request in step.texts() {
            let live = self.texts.get(&request)?;
            if !live.prompt.is_empty() {
                return None; // the rows of its prompt are wanted
            }
            n = n.max(live.completion.n_candidates()?);
        }
        // Few numbers, so that few programs are compiled.
        let n = n.next_power_of_two();
        let n_vocab = self.engine.settings().rules.n_vocab as usize;
        (n <= MAX_CANDIDATES.min(n_vocab)).then_some(n)
    }

    /// Computes a step, and reports it.
    pub(super) fn decode(&mut self, step: &Step, planned: PlannedBatch<M::Slot>) {
        // All edits are done: each cell in use is of a request or a cached prefix.
        if self.recorder.is_due() {
            self.publish_frame();
        }
        for feed in &step.feeds {
            let text = feed.texts.first().and_then(|text| self.texts.get(text));
            let adapters = text.and_then(|live| live.adapters.clone());
            self.engine.set_adapters(feed.seq, adapters);
        }
        let n_candidates = self.n_candidates(step);
        let Some(pictures) = self.pictures_of(step) else {
            return;
        };
        let cancel = self.cancel_flag(step.texts());
        // Pictures do not count: tokens of other prompts take no longer for them.
        let began = Instant::now();
        let computed = (self.engine).decode_planned(planned, pictures, n_candidates, &cancel);
        let computed = computed.map(|rows| {
            let on_first_token = |request| {
                let now = micros(self.started.elapsed());
                self.recorder.record(now, EventKind::FirstToken { request });
            };
            choose_tokens(
                step,
                rows,
                &mut self.texts,
                &mut self.drafts,
                on_first_token,
            )
        });
        match computed {
            Ok(rows) => {
                for feed in &step.feeds {
                    let n_computed = feed.first.as_usize() + feed.tokens.len();
                    for text in &feed.texts {
                        if let Some(live) = self.texts.get_mut(text) {
                            live.computed(n_computed);
                        }
                    }
                }
                let by = self.drafts.last;
                self.drafts.times.take_step(step, by, Instant::now());
                let took = micros(began.elapsed());
                if let Some(store) = &mut self.store {
                    store.learn_step(step.batch.len(), began.elapsed());
                }
                let now = self.now();
                self.recorder.step(now, step, &rows, took);
                self.handle(Event::StepDone(rows));
                self.handle(Event::StepTime(micros(began.elapsed())));
            }
            // All requests of the step were cancelled.
            Err(EngineError::Cancelled) => {
                step.texts().for_each(|id| self.handle(Event::Cancel(id)));
                self.handle(Event::StepFailed(StepFailure::Cancelled));
            }
            Err(error) => self.fail_step(step, error),
        }
    }

    /// Notes that a step could not be computed, for the requests that this concerns.
    fn fail_step(&mut self, step: &Step, error: EngineError) {
        self.note_lost_device(&error);
        let failure = if self.intake.has_lost_device() {
            StepFailure::DeviceLost
        } else {
            StepFailure::Computation
        };
        tracing::warn!(%error, n_requests = step.feeds.len(), "a step failed");
        let error = Arc::new(error);
        let is_concerned = |id: &RequestId| {
            failure == StepFailure::DeviceLost || step.texts().any(|text| text == *id)
        };
        let concerned = self.texts.iter_mut().filter(|(id, _)| is_concerned(id));
        concerned.for_each(|(_, live)| live.error = Some(Arc::clone(&error)));
        self.handle(Event::StepFailed(failure));
    }

    /// What cancels work for these texts: one alone may have a flag of its own.
    pub(super) fn cancel_flag(&self, texts: impl Iterator<Item = RequestId>) -> CancelFlag {
        let texts: Vec<RequestId> = texts.collect();
        let common = self.intake.guests.enter(texts.iter().copied());
        let own = match texts[..] {
            [alone] => self.texts.get(&alone).and_then(|live| live.sender.flag()),
            _ => None,
        };
        own.unwrap_or(common).clone()
    }

    pub(super) fn note_lost_device(&self, error: &EngineError) {
        if matches!(error, EngineError::Backend(BackendError::DeviceLost { .. })) {
            self.intake.note_lost_device();
        }
    }

    pub(super) fn set_error(&mut self, request: RequestId, error: &Arc<EngineError>) {
        if let Some(live) = self.texts.get_mut(&request) {
            live.error = Some(Arc::clone(error));
        }
    }

    pub(super) fn fail_all(&mut self, error: &Arc<EngineError>) {
        for live in self.texts.values_mut() {
            live.error = Some(Arc::clone(error));
        }
        self.handle(Event::StepFailed(StepFailure::DeviceLost));
    }
}

/// Chooses a token from the row of each request that has one, and further ones where drafted ones
/// are right.
fn choose_tokens(
    step: &Step,
    rows: StepRows<'_>,
    texts: &mut BTreeMap<RequestId, LiveText>,
    drafts: &mut DraftKnowledge,
    mut on_first_token: impl FnMut(RequestId),
) -> Vec<RowReport> {
    let reports = step.report(|row| {
        let live = texts.get_mut(&row.request)?;
        let output = rows.row(row.row)?;
        if let OutputRow::Logits(logits) = output {
            live.take_prompt_row(row.token, logits);
        }
        match row.use_of {
            RowUse::Prompt => None,
            RowUse::NextToken | RowUse::AfterDraft(_) => {
                let had_token = live.usage.first_token.is_some();
                let progress = live.take_row(output);
                if !had_token && live.usage.first_token.is_some() {
                    on_first_token(row.request);
                }
                Some(progress)
            }
        }
    });
    learn_from_drafts(step, &reports, texts, drafts);
    reports
}
