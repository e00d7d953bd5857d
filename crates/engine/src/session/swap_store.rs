//! [`SwapStore`]: the saved states of preempted requests, in the memory of the host and in files.
//!
//! Files are written and read by a thread of their own, so that steps do not wait for a disk. A
//! state is in memory until its file is complete, and again before it is needed, where the
//! scheduler can tell. Invariant: states that are in memory and not in a file have at most the
//! bytes of the budget; of those in files, one is in memory in addition. A file that cannot be
//! written leaves its state in memory; one that cannot be read is a state that is lost, and its
//! request is computed again. Knows no scheduler.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::mem;
use std::sync::Arc;

use cellar_scheduler::RequestId;
use kv_core::SeqId;

use super::swap_files::{FileThread, Finished, Job, SwapFiles};

/// A place for the states that the memory of the host has no room for.
#[derive(Debug)]
pub struct SwapDisk {
    /// Where they are written.
    pub files: Box<dyn SwapFiles>,
    /// Bytes that they may have together.
    pub n_bytes: u64,
}

/// States, by request.
#[derive(Debug)]
pub(super) struct SwapStore {
    /// Bytes that states may have in memory.
    n_bytes: u64,
    states: BTreeMap<RequestId, Stored>,
    files: Option<FileThread>,
    /// Bytes on their way to files, also of states that are not wanted any more.
    n_writing: u64,
    /// The state of a file that is in memory, or being read into it.
    ahead: Option<RequestId>,
    /// States that no file has, though one should.
    failed: Vec<RequestId>,
    /// States that were saved.
    n_saved: u64,
    has_warned: bool,
}

#[derive(Debug)]
struct Stored {
    /// Tells it from every other state of this store.
    number: u64,
    seq: SeqId,
    n_bytes: u64,
    bytes: Option<Arc<Vec<u8>>>,
    file: StateFile,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StateFile {
    None,
    BeingWritten,
    Complete,
    BeingRead,
    Unreadable,
}

/// A state in memory.
#[derive(Debug)]
pub(super) struct StateBytes {
    /// The sequence that it was saved of.
    pub(super) seq: SeqId,
    pub(super) bytes: Arc<Vec<u8>>,
    /// What its note has to be.
    pub(super) note: String,
}

/// Takes the bytes of a state, as many as there is room for.
pub(super) struct StateWriter<'s> {
    store: &'s mut SwapStore,
    bytes: Vec<u8>,
    limit: u64,
}

impl SwapStore {
    /// A store of so many bytes in memory.
    ///
    /// # Errors
    /// Where a thread for the files cannot be started.
    pub(super) fn new(n_bytes: u64, files: Option<Box<dyn SwapFiles>>) -> io::Result<Self> {
        Ok(Self {
            n_bytes,
            states: BTreeMap::new(),
            files: files.map(FileThread::start).transpose()?,
            n_writing: 0,
            ahead: None,
            failed: Vec::new(),
            n_saved: 0,
            has_warned: false,
        })
    }

    /// The note of the state that is saved next.
    pub(super) fn next_note(&self) -> String {
        note(self.n_saved)
    }

    /// For the bytes of that state.
    pub(super) fn writer(&mut self, limit: u64) -> StateWriter<'_> {
        StateWriter {
            store: self,
            bytes: Vec::new(),
            limit,
        }
    }

    /// Keeps a state, and returns how many bytes it has.
    pub(super) fn insert(&mut self, request: RequestId, seq: SeqId, bytes: Vec<u8>) -> u64 {
        let n_bytes = bytes.len() as u64;
        let state = Stored {
            number: self.n_saved,
            seq,
            n_bytes,
            bytes: Some(Arc::new(bytes)),
            file: StateFile::None,
        };
        self.n_saved += 1;
        self.states.insert(request, state);
        n_bytes
    }

    /// Begins to write a state to a file; in memory it is until that is done.
    pub(super) fn spill(&mut self, request: RequestId) {
        let Some(state) = self.states.get_mut(&request) else {
            return;
        };
        let (Some(files), Some(bytes)) = (&self.files, &state.bytes) else {
            self.failed.push(request);
            return;
        };
        let job = Job::Write {
            number: state.number,
            bytes: Arc::clone(bytes),
        };
        if files.send(job) {
            state.file = StateFile::BeingWritten;
            self.n_writing += state.n_bytes;
        } else {
            self.failed.push(request);
        }
    }

    /// The states that are in memory still, though they were to go to files.
    pub(super) fn take_failed(&mut self) -> Vec<RequestId> {
        while let Some(finished) = self.files.as_ref().and_then(FileThread::try_next) {
            self.finish(finished);
        }
        mem::take(&mut self.failed)
    }

    /// Begins to read the state that comes back next, where it is in a file, and no other was read.
    pub(super) fn read_ahead(&mut self, request: RequestId) {
        if self.ahead.is_none() {
            self.begin_to_read(request);
        }
    }

    fn begin_to_read(&mut self, request: RequestId) {
        let state = self.states.get_mut(&request);
        let Some(state) = state.filter(|state| state.file == StateFile::Complete) else {
            return;
        };
        let job = Job::Read {
            number: state.number,
            n_bytes: state.n_bytes,
        };
        if self.files.as_ref().is_some_and(|files| files.send(job)) {
            state.file = StateFile::BeingRead;
            self.ahead = Some(request);
        }
    }

    /// A state in memory; read, and waited for, where it is in a file. `None` where it is lost.
    pub(super) fn fetch(&mut self, request: RequestId) -> Option<StateBytes> {
        loop {
            let state = self.states.get(&request)?;
            if let Some(bytes) = &state.bytes {
                return Some(StateBytes {
                    seq: state.seq,
                    bytes: Arc::clone(bytes),
                    note: note(state.number),
                });
            }
            if state.file == StateFile::Unreadable {
                return None;
            }
            if self.ahead != Some(request) && !self.is_reading() {
                self.forget_ahead();
                self.begin_to_read(request);
            }
            if !self.wait() {
                return None;
            }
        }
    }

    /// Forgets a state, and removes its file.
    pub(super) fn remove(&mut self, request: RequestId) {
        let Some(state) = self.states.remove(&request) else {
            return;
        };
        if self.ahead == Some(request) {
            self.ahead = None;
        }
        let number = state.number;
        drop(state.bytes); // a file that is not begun yet is not written then
        if let (true, Some(files)) = (state.file != StateFile::None, &self.files) {
            // Where the thread is gone, so are its files.
            let _sent = files.send(Job::Remove { number });
        }
    }

    fn is_reading(&self) -> bool {
        let ahead = self.ahead.and_then(|ahead| self.states.get(&ahead));
        ahead.is_some_and(|state| state.file == StateFile::BeingRead)
    }

    fn forget_ahead(&mut self) {
        let ahead = self.ahead.take().and_then(|id| self.states.get_mut(&id));
        if let Some(state) = ahead.filter(|state| state.file == StateFile::Complete) {
            state.bytes = None;
        }
    }

    /// Waits for the next job to be finished. Returns whether one was.
    fn wait(&mut self) -> bool {
        match self.files.as_ref().and_then(FileThread::next) {
            Some(finished) => {
                self.finish(finished);
                true
            }
            None => false,
        }
    }

    fn finish(&mut self, finished: Finished) {
        let mut states = self.states.iter_mut();
        let found = states.find(|(_, state)| state.number == finished.number());
        match finished {
            Finished::Write {
                n_bytes, result, ..
            } => {
                self.n_writing = self.n_writing.saturating_sub(n_bytes);
                match (result, found) {
                    (Ok(()), found) => {
                        self.has_warned = false;
                        if let Some((_, state)) = found {
                            state.file = StateFile::Complete;
                            state.bytes = None;
                        }
                    }
                    (Err(error), found) => {
                        if let Some((&request, state)) = found {
                            state.file = StateFile::None;
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
                }
            }
            Finished::Read { result, .. } => {
                let Some((_, state)) = found else {
                    return; // it has ended meanwhile
                };
                match result {
                    Ok(bytes) => {
                        state.file = StateFile::Complete;
                        state.bytes = Some(Arc::new(bytes));
                    }
                    Err(error) => {
                        tracing::warn!(%error, "a saved state cannot be read, and is computed again");
                        state.file = StateFile::Unreadable;
                    }
                }
            }
        }
    }

    /// Bytes that a further state may have.
    fn room(&self) -> u64 {
        let in_memory = |state: &&Stored| state.file == StateFile::None;
        let held = self.states.values().filter(in_memory);
        let held: u64 = held.map(|state| state.n_bytes).sum();
        self.n_bytes
            .saturating_sub(held.saturating_add(self.n_writing))
    }
}

impl StateWriter<'_> {
    pub(super) fn into_bytes(mut self) -> Vec<u8> {
        self.bytes.shrink_to_fit();
        self.bytes
    }
}

impl Write for StateWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let wanted = (self.bytes.len() + bytes.len()) as u64;
        // What is being written makes room when it is done.
        while wanted > self.store.room() && self.store.n_writing > 0 && self.store.wait() {}
        if wanted > self.limit.min(self.store.room()) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let room = self.bytes.try_reserve(bytes.len());
        room.map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What the state of a number says of itself.
fn note(number: u64) -> String {
    format!("swapped {number} of process {}", std::process::id())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    /// Files that are written once that is allowed.
    #[derive(Debug)]
    struct Gated {
        allowed: Receiver<io::Result<()>>,
        files: BTreeMap<u64, Vec<u8>>,
    }

    impl SwapFiles for Gated {
        fn write(&mut self, number: u64, bytes: &[u8]) -> io::Result<()> {
            self.allowed.recv().unwrap()?;
            self.files.insert(number, bytes.to_vec());
            Ok(())
        }

        fn read(&mut self, number: u64, _n_bytes: u64) -> io::Result<Vec<u8>> {
            let file = self.files.get(&number).cloned();
            file.ok_or_else(|| io::ErrorKind::NotFound.into())
        }

        fn remove(&mut self, number: u64) {
            self.files.remove(&number);
        }
    }

    fn store(n_bytes: u64) -> (SwapStore, Sender<io::Result<()>>) {
        let (allow, allowed) = channel();
        let files = BTreeMap::new();
        let files = Box::new(Gated { allowed, files });
        (SwapStore::new(n_bytes, Some(files)).unwrap(), allow)
    }

    fn save(store: &mut SwapStore, request: u64, bytes: &[u8]) -> io::Result<()> {
        let mut out = store.writer(u64::MAX);
        out.write_all(bytes)?;
        let bytes = out.into_bytes();
        store.insert(RequestId(request), SeqId(0), bytes);
        Ok(())
    }

    fn bytes_of(store: &mut SwapStore, request: u64) -> Option<Vec<u8>> {
        let state = store.fetch(RequestId(request))?;
        Some(state.bytes.to_vec())
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
        allow.send(Err(io::ErrorKind::StorageFull.into())).unwrap();
        assert!(save(&mut store, 2, &[2; 50]).is_err());
        assert_eq!(store.take_failed(), [RequestId(1)]);
        assert_eq!(store.room(), 40);
        assert_eq!(bytes_of(&mut store, 1), Some(vec![1; 60]));
    }

    /// A state that is not wanted any more is not written.
    #[test]
    fn a_request_that_ends_has_no_file() {
        let (mut store, allow) = store(100);
        for request in [1, 2] {
            save(&mut store, request, &[1; 10]).unwrap();
            store.spill(RequestId(request));
        }
        store.remove(RequestId(2));
        // Once for the first: the second asks for nothing.
        allow.send(Ok(())).unwrap();
        while store.n_writing > 0 {
            assert!(store.wait());
        }
        assert_eq!(bytes_of(&mut store, 1), Some(vec![1; 10]));
    }

    /// One state of a file is in memory at a time.
    #[test]
    fn one_state_is_read_ahead() {
        let (mut store, allow) = store(100);
        for request in [1, 2, 3] {
            save(&mut store, request, &[request as u8; 30]).unwrap();
            store.spill(RequestId(request));
            allow.send(Ok(())).unwrap();
        }
        while store.n_writing > 0 {
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
        // Without its file, a state is lost.
        assert!(
            store
                .files
                .as_ref()
                .unwrap()
                .send(Job::Remove { number: 1 })
        );
        assert_eq!(bytes_of(&mut store, 2), None);
        assert_eq!(bytes_of(&mut store, 2), None);
    }
}
