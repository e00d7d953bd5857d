//! Drafts of a session's texts: who drafts before a step, and what drafters learn from it.
//!
//! Invariant: a text whose drafts found no room in a step, or no room in the draft model's memory,
//! drafts none for a while. Decides nothing about the texts: what is wrong of a draft is dropped.

use std::collections::BTreeMap;

use cellar_scheduler::{Event, RequestId, RowReport, Step};
use kv_backend::Backend;
use kv_core::TokenId;
use kv_core::memory::Memory;

use super::Session;
use super::text::LiveText;
use crate::draft_model::{Drafted, Turn, draft_together};
use crate::speculate::DraftSource;

impl<B: Backend, M: Memory + Clone> Session<B, M> {
    /// Drafts tokens for the texts that go on; those of a draft model in common batches.
    pub(super) fn draft(&mut self) {
        let mut drafted: Vec<(RequestId, Vec<TokenId>)> = Vec::new();
        let (mut requests, mut turns) = (Vec::new(), Vec::new());
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
        for (request, tokens) in drafted {
            let Some(live) = self.texts.get_mut(&request).filter(|_| !tokens.is_empty()) else {
                continue;
            };
            live.has_drafted = true;
            self.handle(Event::Draft { request, tokens });
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
        match drafter {
            _ if feed.n_draft > 0 => {
                let own = reports.iter().filter(|row| row.request == feed.request);
                drafter.learn(feed.n_draft, own.count().saturating_sub(1));
            }
            // Drafting by a model for nothing would cost as much in each step to come.
            DraftSource::Model(drafter) if has_drafted => drafter.pause(),
            DraftSource::Lookup(_) | DraftSource::Model(_) => {}
        }
        live.usage.speculated = drafter.speculated();
    }
}
