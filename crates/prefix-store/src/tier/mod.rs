//! [`Tier`]: a store on threads of its own. Jobs go in, outcomes come out; nobody waits.
//!
//! Reads go before writes: a request waits for a read, and nobody for a write. What is read is
//! opened here, and what is written is sealed here: hashing is off the caller's thread, too.
//!
//! Invariants: every read that was submitted and not cancelled has exactly one outcome, also where
//! the store hangs (once its deadline is over), is down or panics; so has every pin, once the store
//! answers; bytes of prefixes that wait to be written are within their limit; a store that is down
//! is left alone for a while, and its reads, puts and new pins fail at once. Times are monotonic: a
//! clock that jumps changes nothing.

mod state;

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use self::state::{NextJob, Read, ReadKind, State, Write};
use crate::counts::TierCounts;
use crate::error::StoreError;
use crate::frame::{FrameFault, Group, SealedPayload};
use crate::job::{Busy, Job, JobId, Outcome};
use crate::key::{GroupName, StoreKey};
use crate::rates::Rates;
use crate::store::{GroupStore, Kept};
use crate::sync::{Condvar, JoinHandle, Mutex, MutexGuard, ThreadBuilder};

/// Groups that are asked for at once: between two such, a deadline is looked at.
const READ_BATCH: usize = 8;

/// Groups of which it is asked at once whether they are there.
const PROBE_BATCH: usize = 64;

/// Limits of a tier.
#[derive(Clone, Copy, Debug)]
pub struct TierConfig {
    /// Bytes of [`Job::Put`] that may wait; pins do not count.
    pub max_waiting_bytes: u64,
    /// Reads that may wait.
    pub max_waiting_reads: usize,
    /// How long a store that is down is left alone.
    pub retry_after: Duration,
}

impl Default for TierConfig {
    fn default() -> Self {
        Self {
            max_waiting_bytes: 256 << 20,
            max_waiting_reads: 1024,
            retry_after: Duration::from_secs(5),
        }
    }
}

/// A store on threads of its own. Dropping it ends all jobs; puts that wait are lost, unless
/// [`Tier::flush`] is called before, and pins always.
#[derive(Debug)]
pub struct Tier {
    shared: Arc<TierState>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct TierState {
    key: StoreKey,
    config: TierConfig,
    state: Mutex<State>,
    /// Notified when a job comes, or the tier ends.
    jobs: Condvar,
    /// Notified when an outcome comes, or a write ends.
    outcomes: Condvar,
}

/// Ends the jobs of a thread that panics: the one that it does, and all where it is the last.
struct PanicGuard<'a> {
    tier: &'a TierState,
    /// The job that somebody waits for.
    id: Option<JobId>,
}

impl Drop for PanicGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let mut state = self.tier.lock();
            state.lose_thread(self.id);
            drop(state);
            self.tier.outcomes.notify_all();
        }
    }
}

impl Tier {
    /// Starts a tier with a thread for each of these handles of one store.
    ///
    /// # Errors
    /// [`StoreError::System`]: a thread could not start.
    pub fn start(
        key: StoreKey,
        stores: Vec<Box<dyn GroupStore>>,
        config: TierConfig,
    ) -> Result<Self, StoreError> {
        let shared = Arc::new(TierState {
            key,
            config,
            state: Mutex::new(State {
                n_threads: stores.len(),
                ..State::default()
            }),
            jobs: Condvar::new(),
            outcomes: Condvar::new(),
        });
        let mut tier = Self {
            shared,
            threads: Vec::new(),
        };
        for store in stores {
            let shared = Arc::clone(&tier.shared);
            let thread = ThreadBuilder::new().name("cellar-tier".to_owned());
            let thread = thread.spawn(move || shared.work(store));
            let thread = thread.map_err(|source| StoreError::System {
                what: "no thread starts".to_owned(),
                source,
            })?;
            tier.threads.push(thread);
        }
        Ok(tier)
    }

    /// Takes a job, at once.
    ///
    /// # Errors
    /// [`Busy`]: the job is not taken, and has no outcome.
    pub fn submit(&self, job: Job) -> Result<(), Busy> {
        let mut state = self.shared.lock();
        let config = &self.shared.config;
        let read = |id, names, deadline, what| Read {
            id,
            names,
            what,
            deadline,
        };
        match job {
            Job::Probe {
                id,
                names,
                deadline,
            } => state.push_read(read(id, names, deadline, ReadKind::Probe), config)?,
            Job::Find {
                id,
                names,
                deadline,
            } => state.push_read(read(id, names, deadline, ReadKind::Find), config)?,
            Job::Get {
                id,
                names,
                deadline,
            } => state.push_read(read(id, names, deadline, ReadKind::Get), config)?,
            Job::Put { name, payload } => state.push_put(name, payload, config)?,
            Job::Pin { id, names, payload } => state.push_pin(id, names, payload)?,
            Job::Evict { names } => state.writes.push_back(Write::Evict { names }),
        }
        drop(state);
        self.shared.jobs.notify_one();
        Ok(())
    }

    /// Gives up a read that has no outcome yet; it gets none any more.
    pub fn cancel(&self, id: JobId) {
        let mut state = self.shared.lock();
        state.pending.remove(&id);
        state.reads.retain(|read| read.id != id);
    }

    /// The next outcome, where there is one.
    pub fn next(&self) -> Option<Outcome> {
        self.shared.lock().next_outcome(Instant::now())
    }

    /// The next outcome, as soon as there is one; `None` after this time.
    pub fn next_within(&self, time: Duration) -> Option<Outcome> {
        let until = Instant::now() + time;
        let mut state = self.shared.lock();
        loop {
            let now = Instant::now();
            if let Some(outcome) = state.next_outcome(now) {
                return Some(outcome);
            }
            let first = state.pending.values().min().copied();
            let wake = first.map_or(until, |first| first.min(until));
            if now >= until {
                return None;
            }
            let wait = wake.saturating_duration_since(now);
            let waited = self.shared.outcomes.wait_timeout(state, wait);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Waits until there may be an outcome, at most for this time.
    pub fn wait_for_outcome(&self, time: Duration) {
        let state = self.shared.lock();
        let is_waiting = |state: &mut State| state.outcomes.is_empty();
        let _waited = self
            .shared
            .outcomes
            .wait_timeout_while(state, time, is_waiting);
    }

    /// Waits until no [`Job::Put`] waits or is under way; true if that is so before this time is
    /// over.
    pub fn flush(&self, time: Duration) -> bool {
        let state = self.shared.lock();
        let is_writing = |state: &mut State| !state.writing.is_empty();
        let waited = self
            .shared
            .outcomes
            .wait_timeout_while(state, time, is_writing);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.writing.is_empty()
    }

    /// True if none of these groups waits to be written.
    pub fn has_written(&self, names: &[GroupName]) -> bool {
        let writing = &self.shared.lock().writing;
        names.iter().all(|name| !writing.contains(name))
    }

    /// How fast it is, as far as is known.
    pub fn rates(&self) -> Rates {
        self.shared.lock().rates
    }

    /// What it did.
    pub fn counts(&self) -> TierCounts {
        self.shared.lock().counts
    }

    /// True while its store is left alone, because it does not work.
    pub fn is_down(&self) -> bool {
        let state = self.shared.lock();
        state.is_down(Instant::now())
    }
}

impl Drop for Tier {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.is_closed = true;
        state.reads.clear();
        state.writes.clear();
        drop(state);
        self.shared.jobs.notify_all();
        for thread in self.threads.drain(..) {
            let _panicked = thread.join(); // its message was printed
        }
    }
}

impl TierState {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The thread of a handle of the store.
    fn work(&self, mut store: Box<dyn GroupStore>) {
        while let Some(next) = self.next() {
            let _guard = PanicGuard {
                tier: self,
                id: match &next {
                    NextJob::Read(Read { id, .. }) | NextJob::Write(Write::Pin { id, .. }) => {
                        Some(*id)
                    }
                    NextJob::Write(Write::Put { .. } | Write::Evict { .. }) => None,
                },
            };
            match next {
                NextJob::Read(read) => self.read(&mut *store, &read),
                NextJob::Write(Write::Put { name, payload }) => {
                    self.put(&mut *store, name, &payload)
                }
                NextJob::Write(Write::Pin { id, names, payload }) => {
                    let pinned = self.pin(&mut *store, &names, &payload);
                    drop(payload); // the bytes are out of memory when somebody reads the outcome
                    self.end(id, pinned.map(|()| Outcome::Pinned { id }));
                }
                NextJob::Write(Write::Evict { names }) => evict(&mut *store, &names),
            }
        }
    }

    /// The next job; `None` once the tier ends.
    fn next(&self) -> Option<NextJob> {
        let mut state = self.lock();
        loop {
            if state.is_closed {
                return None;
            }
            if let Some(read) = state.reads.pop_front() {
                return Some(NextJob::Read(read));
            }
            if let Some(write) = state.writes.pop_front() {
                return Some(NextJob::Write(write));
            }
            let waited = self.jobs.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn read(&self, store: &mut dyn GroupStore, read: &Read) {
        let outcome = self.check_is_up().and_then(|()| match read.what {
            ReadKind::Probe => self.probe(store, read),
            ReadKind::Find => self.find(store, read),
            ReadKind::Get => self.get(store, read),
        });
        if let Err(error) = &outcome {
            self.lock().note_failure(error, &self.config);
        }
        self.end(read.id, outcome);
    }

    /// An error while the store is left alone.
    fn check_is_up(&self) -> Result<(), StoreError> {
        if self.lock().is_down(Instant::now()) {
            let reason = "it did not work a moment ago".to_owned();
            return Err(StoreError::Unreachable { reason });
        }
        Ok(())
    }

    /// Gives a job its outcome.
    fn end(&self, id: JobId, outcome: Result<Outcome, StoreError>) {
        self.lock().end(id, outcome);
        self.outcomes.notify_all();
    }

    fn probe(&self, store: &mut dyn GroupStore, read: &Read) -> Result<Outcome, StoreError> {
        let (mut n_found, mut n_asked) = (0, 1);
        // More and more of them, so that what is not there at all costs a question.
        while let Some(rest) = read.names.get(n_found..).filter(|rest| !rest.is_empty()) {
            let names = rest.get(..n_asked).unwrap_or(rest);
            let Some(has) = self.timed(read, || store.has(names), |_| 0)? else {
                break;
            };
            let n = has.iter().take_while(|is_there| **is_there).count();
            n_found += n;
            if n < names.len() {
                break;
            }
            n_asked = PROBE_BATCH.min(2 * n_asked);
        }
        let id = read.id;
        Ok(Outcome::Probed { id, n_found })
    }

    fn find(&self, store: &mut dyn GroupStore, read: &Read) -> Result<Outcome, StoreError> {
        let mut is_there = Vec::with_capacity(read.names.len());
        for names in read.names.chunks(PROBE_BATCH) {
            let Some(has) = self.timed(read, || store.has(names), |_| 0)? else {
                break;
            };
            is_there.extend(has);
        }
        is_there.resize(read.names.len(), false);
        let id = read.id;
        Ok(Outcome::Found { id, is_there })
    }

    fn get(&self, store: &mut dyn GroupStore, read: &Read) -> Result<Outcome, StoreError> {
        let mut groups = Vec::new();
        'all: for names in read.names.chunks(READ_BATCH) {
            let n_bytes = |frames: &Vec<Option<Arc<[u8]>>>| {
                let frames = frames.iter().flatten();
                frames.map(|frame| frame.len() as u64).sum()
            };
            let Some(frames) = self.timed(read, || store.get(names), n_bytes)? else {
                break;
            };
            for (name, frame) in names.iter().zip(frames) {
                let group = frame.and_then(|frame| self.open(store, *name, frame));
                let Some(group) = group else {
                    break 'all;
                };
                groups.push(group);
            }
        }
        let mut state = self.lock();
        state.counts.n_fetched += groups.len() as u64;
        let bytes = groups.iter().map(|group| group.frame().len() as u64);
        state.counts.fetched_bytes += bytes.sum::<u64>();
        let id = read.id;
        Ok(Outcome::Got { id, groups })
    }

    /// Asks the store, and learns how long that takes; `None` where nobody waits any more.
    fn timed<T>(
        &self,
        read: &Read,
        ask: impl FnOnce() -> Result<T, StoreError>,
        n_bytes: impl FnOnce(&T) -> u64,
    ) -> Result<Option<T>, StoreError> {
        let begun = Instant::now();
        if begun >= read.deadline || !self.lock().pending.contains_key(&read.id) {
            return Ok(None);
        }
        let answer = ask()?;
        self.lock().rates.learn(n_bytes(&answer), begun.elapsed());
        Ok(Some(answer))
    }

    /// A group that is what it should be. Others go, so that the right one can take their place.
    fn open(&self, store: &mut dyn GroupStore, name: GroupName, frame: Arc<[u8]>) -> Option<Group> {
        let fault = match Group::open(&self.key, name, frame) {
            Ok(group) => return Some(group),
            Err(StoreError::Refused { fault, .. }) => fault,
            Err(_) => return None,
        };
        tracing::warn!(%name, %fault, "a group of the prefix store is refused");
        let mut state = self.lock();
        state.counts.n_refused += 1;
        if fault == FrameFault::Forged {
            state.counts.n_forged += 1;
        }
        drop(state);
        evict(store, &[name]);
        None
    }

    /// Keeps bytes as groups, all or none.
    fn pin(
        &self,
        store: &mut dyn GroupStore,
        names: &[GroupName],
        payload: &Arc<Vec<u8>>,
    ) -> Result<(), StoreError> {
        if Arc::strong_count(payload) == 1 {
            return Ok(());
        }
        let len = payload.len().div_ceil(names.len().max(1));
        let pieces = (0..names.len()).map(|at| {
            let end = payload.len().min((at + 1) * len);
            payload.get(at * len..end).unwrap_or_default()
        });
        for (name, piece) in names.iter().zip(pieces) {
            let sealed = SealedPayload::new(&self.key, *name, piece);
            if let Err(error) = sealed.and_then(|sealed| store.pin(*name, &sealed)) {
                evict(store, names);
                return Err(error);
            }
        }
        Ok(())
    }

    fn put(&self, store: &mut dyn GroupStore, name: GroupName, payload: &[u8]) {
        let sealed = self
            .check_is_up()
            .and_then(|()| Group::seal(&self.key, name, payload));
        let kept = sealed.and_then(|group| store.put(name, group.frame()));
        let mut state = self.lock();
        state.writing.remove(&name);
        state.waiting_bytes -= payload.len() as u64;
        match kept {
            Ok(Kept::New) => {
                state.is_failing = false;
                state.counts.n_stored += 1;
                state.counts.stored_bytes += payload.len() as u64;
            }
            Ok(Kept::Known) => state.counts.n_known += 1,
            Err(error) => {
                state.counts.n_not_stored += 1;
                state.counts.n_lost += 1;
                let is_down = error.is_down();
                state.note_failure(&error, &self.config);
                if !is_down && !std::mem::replace(&mut state.is_failing, true) {
                    tracing::warn!(%error, "groups are not stored");
                }
                tracing::debug!(%name, %error, "a group is not stored");
            }
        }
        drop(state);
        self.outcomes.notify_all();
    }
}

fn evict(store: &mut dyn GroupStore, names: &[GroupName]) {
    for name in names {
        if let Err(error) = store.evict(*name) {
            tracing::debug!(%name, %error, "it stays");
        }
    }
}
