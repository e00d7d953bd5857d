//! [`State`]: the jobs of a tier and their outcomes. Its threads and its callers share it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use super::TierConfig;
use crate::counts::TierCounts;
use crate::error::StoreError;
use crate::job::{Busy, JobId, Outcome};
use crate::key::GroupName;
use crate::rates::Rates;

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) reads: VecDeque<Read>,
    pub(super) writes: VecDeque<Write>,
    /// Names of puts that wait or are under way.
    pub(super) writing: BTreeSet<GroupName>,
    pub(super) waiting_bytes: u64,
    /// Reads without an outcome, and the time from which no request waits for them.
    pub(super) pending: BTreeMap<JobId, Instant>,
    /// Pins without an outcome.
    pub(super) pins: BTreeSet<JobId>,
    pub(super) outcomes: VecDeque<Outcome>,
    pub(super) rates: Rates,
    pub(super) counts: TierCounts,
    pub(super) down_until: Option<Instant>,
    /// The last group could not be stored: that was said.
    pub(super) is_failing: bool,
    /// Threads that have not panicked.
    pub(super) n_threads: usize,
    pub(super) is_closed: bool,
}

#[derive(Debug)]
pub(super) struct Read {
    pub(super) id: JobId,
    pub(super) names: Vec<GroupName>,
    pub(super) what: ReadKind,
    pub(super) deadline: Instant,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum ReadKind {
    Probe,
    Find,
    Get,
}

#[derive(Debug)]
pub(super) enum Write {
    Put {
        name: GroupName,
        payload: Arc<[u8]>,
    },
    Pin {
        id: JobId,
        names: Vec<GroupName>,
        payload: Arc<Vec<u8>>,
    },
    Evict {
        names: Vec<GroupName>,
    },
}

pub(super) enum NextJob {
    Read(Read),
    Write(Write),
}

impl State {
    pub(super) fn push_read(&mut self, read: Read, config: &TierConfig) -> Result<(), Busy> {
        if self.reads.len() >= config.max_waiting_reads || self.is_closed {
            return Err(Busy);
        }
        self.pending.insert(read.id, read.deadline);
        self.reads.push_back(read);
        Ok(())
    }

    pub(super) fn push_put(
        &mut self,
        name: GroupName,
        payload: Arc<[u8]>,
        config: &TierConfig,
    ) -> Result<(), Busy> {
        if self.writing.contains(&name) {
            return Ok(());
        }
        let n_bytes = self.waiting_bytes + payload.len() as u64;
        if n_bytes > config.max_waiting_bytes || self.is_gone(Instant::now()) {
            self.counts.n_not_stored += 1;
            return Err(Busy);
        }
        self.waiting_bytes = n_bytes;
        self.writing.insert(name);
        self.writes.push_back(Write::Put { name, payload });
        Ok(())
    }

    pub(super) fn push_pin(
        &mut self,
        id: JobId,
        names: Vec<GroupName>,
        payload: Arc<Vec<u8>>,
    ) -> Result<(), Busy> {
        if self.is_gone(Instant::now()) {
            return Err(Busy);
        }
        self.pins.insert(id);
        self.writes.push_back(Write::Pin { id, names, payload });
        Ok(())
    }

    /// A thread panicked while it did this job.
    pub(super) fn lose_thread(&mut self, id: Option<JobId>) {
        let mut ids: Vec<JobId> = id.into_iter().collect();
        self.n_threads = self.n_threads.saturating_sub(1);
        if self.n_threads == 0 {
            self.is_closed = true;
            self.reads.clear();
            self.writes.clear();
            self.writing.clear();
            self.waiting_bytes = 0;
            ids.extend(self.pending.keys());
            ids.extend(&self.pins);
        }
        for id in ids {
            let reason = "its thread panicked".to_owned();
            self.end(id, Err(StoreError::Unreachable { reason }));
        }
    }

    /// True if nothing would be written now.
    pub(super) fn is_gone(&self, now: Instant) -> bool {
        self.is_closed || self.is_down(now)
    }

    pub(super) fn is_down(&self, now: Instant) -> bool {
        self.down_until.is_some_and(|until| now < until)
    }

    /// The next outcome; a read whose time is over has failed, also where its store hangs.
    pub(super) fn next_outcome(&mut self, now: Instant) -> Option<Outcome> {
        let late = |(_, deadline): &(&JobId, &Instant)| **deadline <= now;
        if self.outcomes.is_empty()
            && let Some((&id, _)) = self.pending.iter().find(late)
        {
            self.reads.retain(|read| read.id != id);
            self.end(id, Err(StoreError::TimedOut));
        }
        self.outcomes.pop_front()
    }

    /// Adds the outcome of a job, unless it had one or was given up.
    pub(super) fn end(&mut self, id: JobId, outcome: Result<Outcome, StoreError>) {
        if self.pending.remove(&id).is_none() && !self.pins.remove(&id) {
            return;
        }
        self.outcomes.push_back(outcome.unwrap_or_else(|error| {
            self.counts.n_failed += 1;
            Outcome::Failed { id, error }
        }));
    }

    /// Leaves a store that does not work alone for a while.
    pub(super) fn note_failure(&mut self, error: &StoreError, config: &TierConfig) {
        if error.is_down() && !self.is_down(Instant::now()) {
            self.down_until = Some(Instant::now() + config.retry_after);
            self.counts.n_down += 1;
            tracing::warn!(%error, "a tier of the prefix store is down");
        }
    }
}
