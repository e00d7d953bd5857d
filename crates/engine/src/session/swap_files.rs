//! [`SwapFiles`]: where states of preempted requests are written, and the thread that writes and
//! reads them.
//!
//! Invariant: jobs are done in their order, and each but a removal is answered once. Knows nothing
//! of what is in the files.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

/// Files by number, for one service at a time. What is left when it is dropped, it removes.
pub trait SwapFiles: Send + fmt::Debug {
    /// Writes a file, which is complete then, or not there.
    ///
    /// # Errors
    /// Those of the system: a full disk, a directory that is gone.
    fn write(&mut self, number: u64, bytes: &[u8]) -> io::Result<()>;

    /// Reads a file of so many bytes.
    ///
    /// # Errors
    /// Those of the system, and where it has another length.
    fn read(&mut self, number: u64, n_bytes: u64) -> io::Result<Vec<u8>>;

    /// Removes a file, where it is there.
    fn remove(&mut self, number: u64);
}

/// What the thread is to do.
#[derive(Debug)]
pub(super) enum Job {
    /// Write a file, unless the store has dropped the bytes by then.
    Write {
        number: u64,
        bytes: Arc<Vec<u8>>,
    },
    Read {
        number: u64,
        n_bytes: u64,
    },
    Remove {
        number: u64,
    },
}

/// What it has done.
#[derive(Debug)]
pub(super) enum Finished {
    Write {
        number: u64,
        n_bytes: u64,
        result: io::Result<()>,
    },
    Read {
        number: u64,
        result: io::Result<Vec<u8>>,
    },
}

impl Finished {
    pub(super) fn number(&self) -> u64 {
        let (Self::Write { number, .. } | Self::Read { number, .. }) = self;
        *number
    }
}

/// A thread that owns files.
#[derive(Debug)]
pub(super) struct FileThread {
    /// `None` once it is to end.
    jobs: Option<Sender<Job>>,
    finished: Receiver<Finished>,
    thread: Option<JoinHandle<()>>,
}

impl FileThread {
    /// # Errors
    /// Where the system starts no thread.
    pub(super) fn start(files: Box<dyn SwapFiles>) -> io::Result<Self> {
        let (jobs, received) = channel();
        let (sender, finished) = channel();
        let thread = std::thread::Builder::new().name("cellar-swap".to_owned());
        let thread = thread.spawn(move || work(files, &received, &sender))?;
        Ok(Self {
            jobs: Some(jobs),
            finished,
            thread: Some(thread),
        })
    }

    /// Sends a job; returns whether the thread is there to do it.
    pub(super) fn send(&self, job: Job) -> bool {
        (self.jobs.as_ref()).is_some_and(|jobs| jobs.send(job).is_ok())
    }

    /// What was finished next, where something was.
    pub(super) fn try_next(&self) -> Option<Finished> {
        self.finished.try_recv().ok()
    }

    /// The same, waited for. `None` where the thread is gone.
    pub(super) fn next(&self) -> Option<Finished> {
        self.finished.recv().ok()
    }
}

impl Drop for FileThread {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _panicked = thread.join(); // a panic was printed by its thread
        }
    }
}

fn work(mut files: Box<dyn SwapFiles>, jobs: &Receiver<Job>, finished: &Sender<Finished>) {
    for job in jobs {
        let answer = match job {
            Job::Write { number, bytes } => {
                let n_bytes = bytes.len() as u64;
                let result = match Arc::strong_count(&bytes) {
                    1 => Ok(()),
                    _ => files.write(number, &bytes),
                };
                drop(bytes); // they are out of memory when the store reads the answer
                Finished::Write {
                    number,
                    n_bytes,
                    result,
                }
            }
            Job::Read { number, n_bytes } => Finished::Read {
                number,
                result: files.read(number, n_bytes),
            },
            Job::Remove { number } => {
                files.remove(number);
                continue;
            }
        };
        // The store may have been dropped.
        let _gone = finished.send(answer);
    }
}
