//! Drafts of a session's texts: who drafts before a step, and what drafters learn from it.
//!
//! Invariant: a text whose drafts found no room in a step, or no room in the draft model's memory,
//! drafts none for a while. Decides nothing about the texts: what is wrong of a draft is dropped.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use cellar_scheduler::{DraftTimes, Event, RequestId, RowReport, Step};
use kv_backend::Backend;
use kv_core::memory::Memory;
use kv_core::{SeqId, TokenId};

use super::Session;
use super::text::LiveText;
use crate::draft_model::{Drafted, Turn, draft_together};
use crate::error::EngineError;
use crate::head::HeadTurn;
use crate::speculate::{DraftSource, HeadDraft};

/// The times that steps and drafts of the head took of late.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct HeadTimes {
    /// A step without drafts, in seconds.
    plain: Option<f64>,
    /// Texts of that step.
    n_texts: usize,
    /// Steps with drafts since then.
    n_drafted: usize,
    /// Steps since the last one with drafts of the head.
    n_without: usize,
    /// So many before the next trial.
    wait: usize,
    /// A further row of each text in a step, relative to that.
    row: Option<f64>,
    /// A token of each draft, in seconds.
    draft: Option<f64>,
}

/// The weight of a new time.
const NEWEST: f64 = 0.15;

/// Steps with drafts until one without is measured again.
const MAX_AGE: usize = 200;

/// The same where the number of texts has changed.
const MIN_AGE: usize = 16;

/// Steps without drafts between trials, while drafts do not pay: first, and at most.
const FIRST_WAIT: usize = 32;
const MAX_WAIT: usize = 1024;

/// Steps of more tokens for each text read a prompt.
const MAX_ROWS: usize = 1 + cellar_scheduler::MAX_DRAFT;

fn average(old: &mut Option<f64>, new: f64) {
    *old = Some(old.map_or(new, |old| old + NEWEST * (new - old)));
}

impl HeadTimes {
    /// A step took so long.
    pub(super) fn take_step(&mut self, step: &Step, took: Duration) {
        let n_texts = step.feeds.len();
        let n_draft: usize = step.feeds.iter().map(|feed| feed.n_draft).sum();
        let n_tokens: usize = step.feeds.iter().map(|feed| feed.tokens.len()).sum();
        if n_texts == 0 || n_tokens - n_draft > n_texts || n_tokens > n_texts * MAX_ROWS {
            return;
        }
        let took = took.as_secs_f64();
        self.n_drafted += usize::from(n_draft > 0);
        self.n_without += 1;
        match (n_draft, self.plain) {
            (0, _) => {
                if self.has_other_texts(n_texts) {
                    self.plain = None;
                }
                average(&mut self.plain, took);
                (self.n_texts, self.n_drafted) = (n_texts, 0);
            }
            // Of few rows, what others take says more.
            (_, Some(plain)) if plain > 0.0 && 2 * n_draft > n_texts => {
                let n_rows = n_draft as f64 / n_texts as f64;
                average(&mut self.row, ((took / plain - 1.0) / n_rows).max(0.0));
            }
            _ => {}
        }
    }

    /// True if a step without drafts is to be measured, where so many texts are drafted for.
    fn wants_plain_step(self, n_texts: usize) -> bool {
        let is_old = self.n_drafted >= MAX_AGE;
        let is_other = self.has_other_texts(n_texts) && self.n_drafted >= MIN_AGE;
        self.plain.is_none() || is_old || is_other
    }

    fn has_other_texts(self, n_texts: usize) -> bool {
        2 * n_texts > 3 * self.n_texts || 3 * n_texts < 2 * self.n_texts
    }

    /// The least number of tokens that is drafted where drafts do not pay: 1 from time to time, for
    /// all texts together, to measure whether they do now.
    fn n_least(self) -> usize {
        usize::from(self.n_without >= self.wait)
    }

    /// A draft took so long, whose longest was of so many tokens.
    fn take_draft(&mut self, n_tokens: usize, took: Duration) {
        self.wait = if self.n_without >= self.wait {
            (2 * self.wait).clamp(FIRST_WAIT, MAX_WAIT)
        } else {
            FIRST_WAIT
        };
        self.n_without = 0;
        average(&mut self.draft, took.as_secs_f64() / n_tokens as f64);
    }

    /// Relative to a step without drafts.
    fn relative(self) -> DraftTimes {
        let usual = DraftTimes::default();
        DraftTimes {
            row: self.row.unwrap_or(usual.row),
            draft: match (self.draft, self.plain) {
                (Some(draft), Some(plain)) if plain > 0.0 => draft / plain,
                _ => usual.draft,
            },
        }
    }
}

impl<B: Backend, M: Memory + Clone> Session<B, M> {
    /// Drafts tokens for the texts that go on; those of a draft model, and those of a head, in
    /// common batches.
    pub(super) fn draft(&mut self) {
        let mut drafted: Vec<(RequestId, Vec<TokenId>)> = Vec::new();
        let (mut requests, mut turns) = (Vec::new(), Vec::new());
        let (mut of_head, mut head_turns) = (Vec::new(), Vec::new());
        let times = self.head_times.relative();
        let n_least = self.head_times.n_least();
        // A head reads what the memory holds: nothing that is to be taken back.
        let is_due = !self.scheduler.has_edits();
        let seqs: BTreeMap<RequestId, SeqId> =
            self.scheduler.running().map(|r| (r.id, r.seq)).collect();
        for (&request, live) in &mut self.texts {
            live.has_drafted = false;
            let Some(drafter) = &mut live.drafter else {
                continue;
            };
            let n_max = self.scheduler.draft_room(request);
            match drafter {
                _ if n_max == 0 => {}
                DraftSource::Lookup(drafter) => drafted.push((request, drafter.draft(n_max))),
                DraftSource::Model(drafter) => {
                    requests.push(request);
                    turns.push(Turn { drafter, n_max });
                }
                DraftSource::Head(_) if !is_due => {}
                DraftSource::Head(drafter) => {
                    let found = drafter.draft_by_lookup(n_max);
                    if !found.is_empty() {
                        drafted.push((request, found));
                    } else if let Some(&seq) = seqs.get(&request) {
                        let HeadDraft { after, n } = drafter.turn(n_max, n_least, times);
                        if n > 0 {
                            of_head.push(request);
                            let token = after;
                            head_turns.push(HeadTurn { seq, token, n });
                        }
                    }
                }
            }
        }
        if !turns.is_empty() {
            let cancel = self.intake.guests.enter(requests.iter().copied());
            let of_model = draft_together(turns, cancel)
                .into_iter()
                .map(|drafted| match drafted {
                    Drafted::Tokens(tokens) => tokens,
                    Drafted::Behind | Drafted::NoRoom | Drafted::Off(_) => Vec::new(),
                });
            drafted.extend(requests.into_iter().zip(of_model));
        }
        if !self.head_times.wants_plain_step(head_turns.len()) {
            drafted.extend(self.draft_with_head(of_head, &head_turns));
        }
        for (request, tokens) in drafted {
            let Some(live) = self.texts.get_mut(&request).filter(|_| !tokens.is_empty()) else {
                continue;
            };
            live.has_drafted = true;
            self.handle(Event::Draft { request, tokens });
        }
    }

    /// The drafts of the head for these requests, which want some.
    fn draft_with_head(
        &mut self,
        requests: Vec<RequestId>,
        turns: &[HeadTurn],
    ) -> Vec<(RequestId, Vec<TokenId>)> {
        if turns.is_empty() {
            return Vec::new();
        }
        let began = Instant::now();
        let cancel = self.intake.guests.enter(requests.iter().copied());
        match self.engine.draft_with_head(turns, cancel) {
            Ok(drafted) => {
                let longest = drafted.iter().map(Vec::len).max().unwrap_or(0);
                if longest > 0 {
                    self.head_times.take_draft(longest, began.elapsed());
                }
                requests.into_iter().zip(drafted).collect()
            }
            Err(EngineError::Cancelled) => Vec::new(),
            Err(error) => {
                self.note_lost_device(&error);
                tracing::warn!(%error, "the head that drafts failed");
                for request in requests {
                    let live = self.texts.get_mut(&request);
                    let drafter = live.and_then(|live| live.drafter.as_mut());
                    if let Some(DraftSource::Head(drafter)) = drafter {
                        drafter.fail();
                    }
                }
                Vec::new()
            }
        }
    }
}

/// Drafters learn what became of their tokens in a step whose rows were used.
pub(super) fn learn_from_drafts(
    step: &Step,
    reports: &[RowReport],
    live: &mut BTreeMap<RequestId, LiveText>,
) {
    for feed in &step.feeds {
        let Some(live) = live.get_mut(&feed.request) else {
            continue;
        };
        let has_drafted = std::mem::take(&mut live.has_drafted);
        let Some(drafter) = &mut live.drafter else {
            continue;
        };
        let own = reports.iter().filter(|row| row.request == feed.request);
        let n_accepted = own.count().saturating_sub(1).min(feed.n_draft);
        match drafter {
            _ if feed.n_draft > 0 => drafter.learn(feed.n_draft, n_accepted),
            // Drafting by a model for nothing would cost as much in each step to come.
            DraftSource::Model(drafter) if has_drafted => drafter.pause(),
            DraftSource::Lookup(_) | DraftSource::Model(_) | DraftSource::Head(_) => {}
        }
        live.usage.speculated = drafter.speculated();
    }
}
