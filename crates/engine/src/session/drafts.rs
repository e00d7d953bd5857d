//! Drafts of a session's texts: who drafts before a step, and what drafters learn from it.
//!
//! Invariant: a text whose drafts found no room in a step, or no room in the draft model's memory,
//! drafts none for a while. Decides nothing about the texts: what is wrong of a draft is dropped.

use cellar_scheduler::{DraftedBy, Event, RequestId, RowReport, Step, USUAL_RATE};
use kv_backend::Backend;
use kv_core::memory::Memory;
use kv_core::{SeqId, TokenId};
use std::collections::BTreeMap;

use super::Session;
use super::config::DraftCostSource;
use super::draft_times::DraftTimes;
use super::text::LiveText;
use crate::draft_model::{Drafted, Turn, draft_together};
use crate::error::EngineError;
use crate::head::HeadTurn;
use crate::speculate::{DraftOffer, DraftReason, DraftSource, HeadDraft};

/// The costs of drafts, and the share of right ones, as a session has measured them.
#[derive(Clone, Debug)]
pub(super) struct DraftKnowledge {
    pub(super) times: DraftTimes,
    /// The share of the head's tokens that were right in all texts of late.
    rate: f64,
    /// The way in which the last step's tokens were drafted; `None` where not all in one that is
    /// measured.
    pub(super) last: Option<DraftedBy>,
}

/// The weight of what a step tells of that share.
const NEWEST: f64 = 0.05;

impl DraftKnowledge {
    pub(super) fn new(source: DraftCostSource) -> Self {
        Self {
            times: DraftTimes::new(source),
            rate: USUAL_RATE,
            last: None,
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
        // A head reads what the memory holds: nothing that is to be taken back.
        let is_due = !self.scheduler.has_edits();
        let seqs: BTreeMap<RequestId, SeqId> =
            self.scheduler.running().map(|r| (r.id, r.seq)).collect();
        let known = &mut self.drafts;
        let wants_plain_step = known.times.wants_plain_step(seqs.len());
        let reason = if known.times.is_time_for_trial() {
            DraftReason::Trial
        } else {
            DraftReason::Pays
        };
        let costs = known.times.costs(seqs.len());
        let offer = DraftOffer {
            n_max: 0,
            head: &costs.head,
            lookup: &costs.lookup,
            rate: known.rate,
            reason,
        };
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
                DraftSource::Head(_) if !is_due || wants_plain_step => {}
                DraftSource::Head(drafter) => {
                    let offer = DraftOffer { n_max, ..offer };
                    let found = drafter.draft_by_lookup(offer);
                    if !found.is_empty() {
                        drafted.push((request, found));
                    } else if let Some(&seq) = seqs.get(&request) {
                        let HeadDraft { after, n } = drafter.turn(offer);
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
        drafted.extend(self.draft_with_head(of_head, &head_turns));
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
        let cancel = self.intake.guests.enter(requests.iter().copied());
        match self.engine.draft_with_head(turns, cancel) {
            Ok(drafted) => requests.into_iter().zip(drafted).collect(),
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
    known: &mut DraftKnowledge,
) {
    let (mut n_tried, mut n_right) = (0, 0);
    known.last = Some(DraftedBy::Lookup);
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
            _ if feed.n_draft > 0 => {
                drafter.learn(feed.n_draft, n_accepted);
                known.last = match drafter {
                    DraftSource::Head(drafter) => {
                        let source = drafter.source();
                        if source == DraftedBy::Head {
                            known.rate += NEWEST * (drafter.rate() - known.rate);
                        }
                        match drafter.reason() {
                            DraftReason::Pays => known.times.learn_that_they_pay(),
                            DraftReason::Trial => {
                                n_tried += feed.n_draft;
                                n_right += n_accepted;
                            }
                        }
                        // A step with both takes what the head takes.
                        known.last.map(|last| match (last, source) {
                            (DraftedBy::Lookup, DraftedBy::Lookup) => DraftedBy::Lookup,
                            _ => DraftedBy::Head,
                        })
                    }
                    DraftSource::Lookup(_) => known.last,
                    DraftSource::Model(_) => None,
                };
            }
            // Drafting by a model for nothing would cost as much in each step to come.
            DraftSource::Model(drafter) if has_drafted => drafter.pause(),
            DraftSource::Lookup(_) | DraftSource::Model(_) | DraftSource::Head(_) => {}
        }
        live.usage.speculated = drafter.speculated();
    }
    if n_tried > 0 {
        let n_texts = step.feeds.len();
        known.times.learn_from_trial(n_texts, n_tried, n_right);
    }
}
