//! Pictures of texts: a tower computes them between steps, piece by piece, while their own texts
//! wait and others go on.
//!
//! Invariant: a text that is held waits for a picture that is being computed.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use cellar_scheduler::{Event, RequestId, Step, StepFailure};
use kv_backend::Backend;
use kv_core::memory::Memory;

use super::Session;
use super::config::micros;
use crate::error::EngineError;
use crate::picture_rows::StepPictures;
use crate::pictures::FinishedPicture;

impl<B: Backend, M: Memory + Clone> Session<B, M> {
    /// The rows of pictures that a step needs. Where some of them are not computed, the step is put
    /// off, and the requests that need them are held until they are.
    pub(super) fn pictures_of(&mut self, step: &Step) -> Option<StepPictures> {
        let mut pictures = StepPictures::default();
        let Some(tower) = &mut self.tower else {
            return Some(pictures);
        };
        let mut held = Vec::new();
        for feed in &step.feeds {
            let live = self.texts.get_mut(&feed.request);
            let Some(live) = live.filter(|live| !live.pictures.is_empty()) else {
                continue;
            };
            let first = feed.first.as_usize();
            let places = first..first + feed.tokens.len();
            match tower.of_step(&live.pictures, live.viewers, places, &mut live.seen) {
                Ok(runs) => {
                    pictures.insert(feed.seq, runs);
                }
                Err(missing) => {
                    for picture in missing {
                        tower.want(picture, live.viewers, feed.texts.iter().copied());
                    }
                    held.push(feed.request);
                }
            }
        }
        if held.is_empty() {
            return Some(pictures);
        }
        self.handle(Event::StepFailed(StepFailure::PutOff));
        for request in held {
            self.handle(Event::Hold(request));
        }
        None
    }

    /// Computes pieces of pictures that texts wait for, for as long as a step may take, and one
    /// where steps have no limit. Returns whether there was one.
    pub(super) fn see(&mut self) -> bool {
        let limit = self.scheduler.config().step_time;
        let (began, mut n_pieces) = (Instant::now(), 0u32);
        while self.see_piece() {
            n_pieces += 1;
            let took = began.elapsed();
            let next = took + took / n_pieces;
            if limit.is_none_or(|limit| micros(next) > limit) {
                break;
            }
        }
        if n_pieces > 0 {
            self.drafts.times.interrupt();
        }
        n_pieces > 0
    }

    /// Computes the next piece of pictures, until all their texts are cancelled. False where there
    /// is none.
    fn see_piece(&mut self) -> bool {
        let texts = &self.texts;
        let waits = |text: RequestId| texts.contains_key(&text);
        let Some(tower) = &mut self.tower else {
            return false;
        };
        let waiting = tower.next_texts(waits);
        if waiting.is_empty() {
            return false;
        }
        let cancel = self.cancel_flag(waiting.iter().copied());
        let Some(tower) = &mut self.tower else {
            return false;
        };
        match tower.advance(&cancel) {
            Ok(finished) => {
                let mut ready = BTreeSet::new();
                for FinishedPicture { seen, texts } in finished {
                    for text in texts {
                        if let Some(live) = self.texts.get_mut(&text) {
                            live.seen.push(seen.clone());
                        }
                        ready.insert(text);
                    }
                }
                ready.retain(|&text| !tower.is_awaited_by(text));
                for text in ready {
                    self.handle(Event::Ready(text));
                }
            }
            Err(error) => self.fail_picture(waiting.into_iter().collect(), error),
        }
        true
    }

    /// Gives up the texts that wait for pictures which were not computed.
    fn fail_picture(&mut self, texts: Vec<RequestId>, error: EngineError) {
        self.note_lost_device(&error);
        if matches!(error, EngineError::Cancelled) {
            for text in texts {
                self.handle(Event::Cancel(text));
            }
            return;
        }
        tracing::warn!(%error, "a picture could not be computed");
        let error = Arc::new(error);
        if self.intake.has_lost_device() {
            return self.fail_all(&error);
        }
        for text in texts {
            self.set_error(text, &error);
            self.handle(Event::Fail(text));
        }
    }
}
