//! [`SwapStore`]: the saved states of preempted requests, in the memory of the host and pinned in a
//! tier of the store of prefixes.
//!
//! The tier writes and reads on a thread of its own, so that steps do not wait for a disk. A state
//! is in memory until it is pinned, and again before it is needed, where the scheduler can tell.
//! Invariant: states that are in memory and not pinned have at most the bytes of the budget, which
//! are those of the host's tier where they are to be; of the pinned ones, one is in memory in
//! addition. One that cannot be pinned stays in memory; one that cannot be read, or is not what was
//! written, is lost, and its request is computed again. Knows no scheduler.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::mem;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cellar_prefix_store::{
    DirectoryConfig, DirectoryStore, HostStore, Job, JobId, Outcome, ReservedBytes, StoreError,
    StoreKey, Tier, TierConfig,
};
use cellar_scheduler::RequestId;
use kv_core::SeqId;

use super::swap_state::{HeldState, Pin, SavedBytes, StateBytes, StoredState};

/// The longest time that a step waits for one answer of a tier, without that of a slow disk.
const PATIENCE: Duration = Duration::from_secs(30);

/// Bytes that a slow disk writes or reads in a second.
const SLOW_DISK: u64 = 8 << 20;

/// A place for the states that the memory of the host has no room for.
#[derive(Debug)]
pub struct SwapDisk {
    /// The tier that pins them: of one handle of a store that can do that, as
    /// [`DirectoryStore`].
    pub tier: Tier,
    /// Bytes that they may have together.
    pub n_bytes: u64,
}

impl SwapDisk {
    /// `n_bytes` of a directory, as files that only this process reads.
    ///
    /// # Errors
    /// The directory cannot be used, or no thread starts.
    pub fn open(directory: DirectoryConfig, n_bytes: u64) -> Result<Self, StoreError> {
        let store = DirectoryStore::open(directory)?;
        let key = StoreKey::random()?;
        let tier = Tier::start(key, vec![Box::new(store)], TierConfig::default())?;
        Ok(Self { tier, n_bytes })
    }
}

/// States, by request.
#[derive(Debug)]
pub(super) struct SwapStore {
    /// Bytes that states may have in memory.
    n_bytes: u64,
    /// Cached prefixes that have the same bytes.
    host: Option<HostStore>,
    states: BTreeMap<RequestId, StoredState>,
    disk: Option<Tier>,
    /// Bytes on their way to the disk by number of the state, also of those that are not wanted any
    /// more.
    writing: BTreeMap<JobId, PendingWrite>,
    /// The pinned state that is in memory, or being read into it.
    ahead: Option<RequestId>,
    /// States that are not pinned, though they should be.
    failed: Vec<RequestId>,
    /// States that were saved: the number of the next one.
    n_saved: u64,
    has_warned: bool,
}

/// Bytes on their way to the disk.
#[derive(Debug)]
struct PendingWrite {
    n_bytes: u64,
    reserved: Option<ReservedBytes>,
}

/// Takes the bytes of a state, as many as there is room for.
pub(super) struct StateWriter<'s> {
    store: &'s mut SwapStore,
    saved: SavedBytes,
    limit: u64,
}

impl SwapStore {
    /// A store of so many bytes in memory, which are of the host's tier where there is one.
    pub(super) fn new(n_bytes: u64, host: Option<HostStore>, disk: Option<Tier>) -> Self {
        Self {
            n_bytes,
            host,
            states: BTreeMap::new(),
            disk,
            writing: BTreeMap::new(),
            ahead: None,
            failed: Vec::new(),
            n_saved: 0,
            has_warned: false,
        }
    }

    /// For the bytes of the state that is saved next.
    pub(super) fn writer(&mut self, limit: u64) -> StateWriter<'_> {
        let saved = SavedBytes {
            bytes: Vec::new(),
            reserved: self.host.as_ref().and_then(|host| host.reserve(0)),
        };
        StateWriter {
            store: self,
            saved,
            limit,
        }
    }

    /// Keeps a state, and returns how many bytes it has.
    pub(super) fn insert(&mut self, request: RequestId, seq: SeqId, saved: SavedBytes) -> u64 {
        let SavedBytes { bytes, reserved } = saved;
        let n_bytes = bytes.len() as u64;
        let state = StoredState {
            job: JobId(self.n_saved),
            seq,
            n_bytes,
            bytes: Some(StateBytes::Saved(Arc::new(bytes))),
            reserved,
            pin: Pin::None,
        };
        self.n_saved += 1;
        self.states.insert(request, state);
        n_bytes
    }

    /// Begins to pin a state; in memory it is until that is done.
    pub(super) fn spill(&mut self, request: RequestId) {
        let Some(state) = self.states.get_mut(&request) else {
            return;
        };
        let (Some(disk), Some(StateBytes::Saved(bytes))) = (&self.disk, &state.bytes) else {
            self.failed.push(request);
            return;
        };
        let job = Job::Pin {
            id: state.job,
            names: state.names(),
            payload: Arc::clone(bytes),
        };
        if disk.submit(job).is_ok() {
            state.pin = Pin::BeingWritten;
            let writing = PendingWrite {
                n_bytes: state.n_bytes,
                reserved: state.reserved.take(),
            };
            self.writing.insert(state.job, writing);
        } else {
            self.failed.push(request);
        }
    }

    /// The states that are in memory still, though they were to be pinned.
    pub(super) fn take_failed(&mut self) -> Vec<RequestId> {
        while let Some(outcome) = self.disk.as_ref().and_then(Tier::next) {
            self.finish(outcome);
        }
        mem::take(&mut self.failed)
    }

    /// Begins to read the state that comes back next, where it is pinned, and no other was read.
    pub(super) fn read_ahead(&mut self, request: RequestId) {
        if self.ahead.is_none() {
            self.begin_to_read(request);
        }
    }

    fn begin_to_read(&mut self, request: RequestId) {
        let writing = self.writing_bytes();
        let state = self.states.get_mut(&request);
        let Some(state) = state.filter(|state| state.pin == Pin::Complete) else {
            return;
        };
        let patience = patience(writing + state.n_bytes);
        let job = Job::Get {
            id: state.job,
            names: state.names(),
            deadline: Instant::now() + patience,
        };
        if (self.disk.as_ref()).is_some_and(|disk| disk.submit(job).is_ok()) {
            state.pin = Pin::BeingRead;
            // One state may be beyond what there is: otherwise none could come back.
            let host = self.host.as_ref();
            state.reserved = host.and_then(|host| host.reserve(state.n_bytes));
            self.ahead = Some(request);
        } else {
            state.pin = Pin::Unreadable;
        }
    }

    /// A state in memory; read, and waited for, where it is pinned. `None` where it is lost.
    pub(super) fn fetch(&mut self, request: RequestId) -> Option<HeldState> {
        loop {
            let state = self.states.get(&request)?;
            if let Some(bytes) = &state.bytes {
                return Some(HeldState {
                    seq: state.seq,
                    bytes: bytes.clone(),
                });
            }
            if state.pin == Pin::Unreadable {
                return None;
            }
            if self.ahead != Some(request) && !self.is_reading() {
                self.forget_ahead();
                self.begin_to_read(request);
            } else if !self.wait() {
                return None;
            }
        }
    }

    /// Forgets a state, wherever it is.
    pub(super) fn remove(&mut self, request: RequestId) {
        let Some(state) = self.states.remove(&request) else {
            return;
        };
        if self.ahead == Some(request) {
            self.ahead = None;
        }
        let names = state.names();
        drop(state.bytes); // a pin that has not begun is not written then; `cancel` is for reads
        if let (true, Some(disk)) = (state.pin != Pin::None, &self.disk) {
            disk.cancel(state.job);
            // Where the tier takes no jobs any more, nothing is pinned.
            let _taken = disk.submit(Job::Evict { names });
        }
    }

    fn is_reading(&self) -> bool {
        let ahead = self.ahead.and_then(|ahead| self.states.get(&ahead));
        ahead.is_some_and(|state| state.pin == Pin::BeingRead)
    }

    fn forget_ahead(&mut self) {
        let ahead = self.ahead.take().and_then(|id| self.states.get_mut(&id));
        if let Some(state) = ahead.filter(|state| state.pin == Pin::Complete) {
            state.bytes = None;
            state.reserved = None;
        }
    }

    /// Waits for the next job to be finished. Returns whether one was.
    fn wait(&mut self) -> bool {
        let ahead = self.ahead.and_then(|ahead| self.states.get(&ahead));
        let reading = ahead.filter(|state| state.pin == Pin::BeingRead);
        let is_asked = !self.writing.is_empty() || reading.is_some();
        let patience = patience(self.writing_bytes() + reading.map_or(0, |state| state.n_bytes));
        let disk = self.disk.as_ref().filter(|_| is_asked);
        match disk.and_then(|disk| disk.next_within(patience)) {
            Some(outcome) => {
                self.finish(outcome);
                true
            }
            None => false,
        }
    }

    fn finish(&mut self, outcome: Outcome) {
        let id = outcome.id();
        let mut states = self.states.iter_mut();
        let found = states.find(|(_, state)| state.job == id);
        if let Some(writing) = self.writing.remove(&id) {
            match outcome {
                Outcome::Failed { error, .. } => {
                    if let Some((&request, state)) = found {
                        state.pin = Pin::None;
                        state.reserved = writing.reserved;
                        self.failed.push(request);
                    }
                    if !mem::replace(&mut self.has_warned, true) {
                        tracing::warn!(
                            %error,
                            "states of requests that wait cannot be written to files, and stay in \
                             memory or are computed again"
                        );
                    }
                }
                _ => {
                    self.has_warned = false;
                    if let Some((_, state)) = found {
                        state.pin = Pin::Complete;
                        state.bytes = None;
                    }
                }
            }
            return;
        }
        let Some((_, state)) = found else {
            return; // it has ended meanwhile
        };
        let bytes = match outcome {
            Outcome::Got { groups, .. } => state.joined(groups),
            _ => None,
        };
        state.pin = if bytes.is_some() {
            Pin::Complete
        } else {
            tracing::warn!("a saved state cannot be read, and is computed again");
            state.reserved = None;
            Pin::Unreadable
        };
        state.bytes = bytes;
    }

    /// Bytes that a further state may have.
    fn room(&self) -> u64 {
        let in_memory = |state: &&StoredState| state.pin == Pin::None;
        let held = self.states.values().filter(in_memory);
        let held: u64 = held.map(|state| state.n_bytes).sum();
        let taken = held.saturating_add(self.writing_bytes());
        self.n_bytes.saturating_sub(taken)
    }

    fn writing_bytes(&self) -> u64 {
        self.writing.values().map(|state| state.n_bytes).sum()
    }
}

/// The time that a disk may take for so many bytes.
fn patience(n_bytes: u64) -> Duration {
    PATIENCE + Duration::from_secs(n_bytes / SLOW_DISK)
}

impl StateWriter<'_> {
    pub(super) fn into_saved(mut self) -> SavedBytes {
        self.saved.bytes.shrink_to_fit();
        self.saved
    }
}

impl Write for StateWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let saved = &mut self.saved;
        let wanted = (saved.bytes.len() + bytes.len()) as u64;
        // What is being written makes room when it is done.
        while wanted > self.store.room() && !self.store.writing.is_empty() && self.store.wait() {}
        if wanted > self.limit.min(self.store.room()) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let reserved = saved.reserved.as_mut();
        if reserved.is_some_and(|reserved| !reserved.grow(bytes.len() as u64)) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let room = saved.bytes.try_reserve(bytes.len());
        room.map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        saved.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use cellar_prefix_store::{
        GroupName, GroupStore, Kept, MIN_SECRET, SealedPayload, StoreError, StoreKey, TierConfig,
    };

    use super::*;

    /// A store that pins once that is allowed.
    #[derive(Debug)]
    struct Gated {
        allowed: Receiver<Result<(), StoreError>>,
        groups: BTreeMap<GroupName, Arc<[u8]>>,
    }

    impl GroupStore for Gated {
        fn has(&mut self, names: &[GroupName]) -> Result<Vec<bool>, StoreError> {
            Ok(vec![false; names.len()])
        }

        fn get(&mut self, names: &[GroupName]) -> Result<Vec<Option<Arc<[u8]>>>, StoreError> {
            Ok(names
                .iter()
                .map(|name| self.groups.get(name).cloned())
                .collect())
        }

        fn put(&mut self, _name: GroupName, _frame: &Arc<[u8]>) -> Result<Kept, StoreError> {
            panic!("states are pinned")
        }

        fn pin(&mut self, name: GroupName, sealed: &SealedPayload<'_>) -> Result<(), StoreError> {
            self.allowed.recv().unwrap()?;
            self.groups.insert(name, sealed.parts().concat().into());
            Ok(())
        }

        fn evict(&mut self, name: GroupName) -> Result<(), StoreError> {
            self.groups.remove(&name);
            Ok(())
        }
    }

    fn store(n_bytes: u64) -> (SwapStore, Sender<Result<(), StoreError>>) {
        let (allow, allowed) = channel();
        let groups = BTreeMap::new();
        let store = Box::new(Gated { allowed, groups });
        let key = StoreKey::new(&[1; MIN_SECRET]).unwrap();
        let tier = Tier::start(key, vec![store], TierConfig::default()).unwrap();
        (SwapStore::new(n_bytes, None, Some(tier)), allow)
    }

    fn save(store: &mut SwapStore, request: u64, bytes: &[u8]) -> io::Result<()> {
        let mut out = store.writer(u64::MAX);
        out.write_all(bytes)?;
        let saved = out.into_saved();
        store.insert(RequestId(request), SeqId(0), saved);
        Ok(())
    }

    fn bytes_of(store: &mut SwapStore, request: u64) -> Option<Vec<u8>> {
        let state = store.fetch(RequestId(request))?;
        Some(state.bytes.as_slice().to_vec())
    }

    /// A state waits until the one before is written, where only that makes room.
    #[test]
    fn what_is_being_written_counts_until_it_is_done() {
        let (mut store, allow) = store(100);
        save(&mut store, 1, &[1; 60]).unwrap();
        let refused = save(&mut store, 2, &[2; 50]).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::StorageFull);
        store.spill(RequestId(1));
        assert_eq!(store.room(), 40);
        // In memory still.
        assert_eq!(bytes_of(&mut store, 1), Some(vec![1; 60]));
        let later = std::thread::spawn(move || {
            std::thread::sleep(std::time::Duration::from_millis(20));
            allow.send(Ok(())).unwrap();
            allow
        });
        save(&mut store, 2, &[2; 50]).unwrap();
        let _allow = later.join().unwrap();
        assert_eq!(store.room(), 50);
        assert_eq!(bytes_of(&mut store, 1), Some(vec![1; 60]));
        assert_eq!(bytes_of(&mut store, 2), Some(vec![2; 50]));
        store.remove(RequestId(1));
        assert_eq!(bytes_of(&mut store, 1), None);
    }

    /// What a full disk does not take is in memory, counts there, and is reported.
    #[test]
    fn what_is_not_written_stays() {
        let (mut store, allow) = store(100);
        save(&mut store, 1, &[1; 60]).unwrap();
        store.spill(RequestId(1));
        allow.send(Err(StoreError::Full)).unwrap();
        assert!(save(&mut store, 2, &[2; 50]).is_err());
        assert_eq!(store.take_failed(), [RequestId(1)]);
        assert_eq!(store.room(), 40);
        assert_eq!(bytes_of(&mut store, 1), Some(vec![1; 60]));
    }

    /// A state that is not wanted any more is not written.
    #[test]
    fn a_request_that_ends_is_not_pinned() {
        let (mut store, allow) = store(100);
        for request in [1, 2] {
            save(&mut store, request, &[1; 10]).unwrap();
            store.spill(RequestId(request));
        }
        store.remove(RequestId(2));
        // Once for the first: the second asks for nothing.
        allow.send(Ok(())).unwrap();
        while !store.writing.is_empty() {
            assert!(store.wait());
        }
        assert_eq!(bytes_of(&mut store, 1), Some(vec![1; 10]));
    }

    /// One pinned state is in memory at a time.
    #[test]
    fn one_state_is_read_ahead() {
        let (mut store, allow) = store(100);
        for request in [1, 2, 3] {
            save(&mut store, request, &[request as u8; 30]).unwrap();
            store.spill(RequestId(request));
            allow.send(Ok(())).unwrap();
        }
        while !store.writing.is_empty() {
            assert!(store.wait());
        }
        store.read_ahead(RequestId(1));
        store.read_ahead(RequestId(2)); // the first stays
        assert!(store.wait());
        let in_memory = |store: &SwapStore| -> Vec<u64> {
            let states = store.states.iter().filter(|(_, s)| s.bytes.is_some());
            states.map(|(id, _)| id.0).collect()
        };
        assert_eq!(in_memory(&store), [1]);
        assert_eq!(bytes_of(&mut store, 3), Some(vec![3; 30]));
        assert_eq!(in_memory(&store), [3]);
        store.remove(RequestId(3));
        assert_eq!(bytes_of(&mut store, 1), Some(vec![1; 30]));
        // Without its group, a state is lost.
        let names = store.states[&RequestId(2)].names();
        let disk = store.disk.as_ref().unwrap();
        disk.submit(Job::Evict { names }).unwrap();
        // Reads go before writes: the next write is done after it.
        save(&mut store, 4, &[4; 10]).unwrap();
        store.spill(RequestId(4));
        allow.send(Ok(())).unwrap();
        while !store.writing.is_empty() {
            assert!(store.wait());
        }
        assert_eq!(bytes_of(&mut store, 2), None);
        assert_eq!(bytes_of(&mut store, 2), None);
    }

    /// States in the host's tier take the place of prefixes, and give it back: when they are
    /// pinned, and when they are not wanted any more.
    #[test]
    fn states_and_prefixes_have_the_same_bytes() {
        let (mut store, allow) = store(100);
        let mut host = HostStore::new(120);
        store.host = Some(host.clone());
        let prefixes = [1, 2, 3].map(|n| GroupName([n; 32]));
        for name in prefixes {
            host.put(name, &[0; 40].into()).unwrap();
        }
        save(&mut store, 1, &[1; 50]).unwrap();
        assert_eq!(host.has(&prefixes).unwrap(), [false, false, true]);
        assert_eq!(host.n_bytes(), 90);
        // Another model has the rest: a second state has no room, and nothing is left of it.
        let other = host.reserve(60).unwrap();
        save(&mut store, 2, &[2; 20]).unwrap_err();
        assert_eq!(host.n_bytes(), 110);
        store.spill(RequestId(1));
        // One that cannot be pinned keeps its bytes.
        allow.send(Err(StoreError::Full)).unwrap();
        assert!(store.wait());
        assert_eq!(host.n_bytes(), 110);
        store.spill(RequestId(1));
        allow.send(Ok(())).unwrap();
        assert!(store.wait());
        assert_eq!(host.n_bytes(), 60);
        assert_eq!(bytes_of(&mut store, 1), Some(vec![1; 50]));
        assert_eq!(host.n_bytes(), 110);
        store.remove(RequestId(1));
        drop(other);
        assert_eq!(host.n_bytes(), 0);
    }
}
