//! [`Team`]: a leader (whoever calls) and helper threads that share the tasks of a job.
//!
//! Invariant: helpers are only ever *help*. The leader alone could finish every job; tasks are
//! taken one by one from counters, so a helper that the system has put aside delays a job by its
//! present task at most, and one that has not begun does not delay it at all. Helpers spin for
//! [`SPIN`] after a job, then sleep: an idle team burns nothing. Knows nothing of what is computed.
//!
//! Each thread has a counter of its own, over neighbouring tasks: what one asks the memory for ahead of time is what
//! the next one reads. Who has none left takes what others have not begun.
//!
//! # Why this is right
//!
//! A job is published in [`Shared::job`] and opened by [`Shared::state`], one word of three fields:
//! the number of the job, an *open* bit, and the number of helpers inside.
//!
//! - A helper enters by a compare-and-swap on an open word that adds 1; it leaves by subtracting 1.
//!   So it reads `job` only between entering and leaving.
//! - The leader closes the word when the counters have run out, then waits until nobody is inside;
//!   only then does it return, and only then may the next `job` be written. Nobody can enter a
//!   closed word. So `job` is never written while somebody reads it, and what a job borrows
//!   outlives every access.
//! - Entering acquires what the leader released by opening; the leader's last look at the word
//!   acquires what leaving helpers released. (Both are read-modify-writes or the store that heads
//!   their release sequence.) So tasks see what was written before the job, and the leader sees
//!   what tasks wrote.
//! - The job's number wraps after 2³² jobs: a helper that slept through exactly that many takes
//!   the new job for one it has seen and stays out, which costs help, not correctness.
//! - No lost wake-up: a helper counts itself in `n_sleeping`, then looks at `state` once more, then
//!   parks; the leader opens `state`, then looks at `n_sleeping`. All four are sequentially
//!   consistent, so at least one of the two sees the other. Unparking a helper that does not
//!   sleep only makes its next park return at once, and it looks again.

use std::any::Any;
use std::cell::UnsafeCell;
use std::hint::spin_loop;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use kv_core::backend::BackendError;

use crate::kernels::fetch::fetch_to_second;
use crate::storage::LINE;

/// How long a helper looks for the next job before it sleeps: longer than the pauses between the
/// steps of one run, shorter than anybody would notice.
const SPIN: Duration = Duration::from_micros(40);

/// Bytes of a share that are asked for at most (some stay in the second-level cache beside all that a
/// job works on), and between two looks for a job.
const MOST_ASKED: usize = 128 * 1024;
const ASKED_AT_ONCE: usize = 8 * LINE;

const OPEN: u64 = 1 << 31;
const INSIDE: u64 = OPEN - 1;
const JOB: u64 = 1 << 32;

/// One task of a job: `(thread, task)`, with the thread's number below [`Team::n_threads`].
type Task<'a> = dyn Fn(usize, usize) -> Result<(), BackendError> + Sync + 'a;

#[derive(Clone, Copy)]
struct Job {
    task: *const Task<'static>,
    n_tasks: usize,
}

/// On a cache line of its own (two, for the prefetcher that fetches pairs).
#[repr(align(128))]
struct OwnLine<T>(T);

/// What the next job but small ones reads: weights, of which each thread takes a share.
///
/// Whoever waits asks for its share meanwhile. Nothing depends on these numbers, so they need no order:
/// any address may be asked for.
#[derive(Default)]
struct Soon {
    start: AtomicUsize,
    share: AtomicUsize,
}

/// How much of its share a thread has asked for.
#[derive(Default)]
struct Asked {
    /// Of which memory.
    start: usize,
    n_bytes: usize,
}

impl Soon {
    /// Asks for a little more of a thread's share; says whether there was more.
    fn ask(&self, thread: usize, asked: &mut Asked) -> bool {
        let start = self.start.load(Ordering::Relaxed);
        if asked.start != start {
            *asked = Asked { start, n_bytes: 0 };
        }
        let share = self.share.load(Ordering::Relaxed);
        let is_more = asked.n_bytes < share.min(MOST_ASKED);
        if is_more {
            let at = start + thread * share + asked.n_bytes;
            for line in (0..ASKED_AT_ONCE).step_by(LINE) {
                fetch_to_second(at.wrapping_add(line) as *const u8);
            }
            asked.n_bytes += ASKED_AT_ONCE;
        }
        is_more
    }
}

struct Shared {
    soon: Soon,
    state: OwnLine<AtomicU64>,
    /// For each thread, the next task of its share.
    next: Box<[OwnLine<AtomicUsize>]>,
    job: UnsafeCell<Option<Job>>,
    n_sleeping: AtomicUsize,
    stop: AtomicBool,
    failure: Mutex<Option<BackendError>>,
}

// SAFETY: `job` is the only field that is not `Sync`; it is written by the leader while nobody is
// inside and read by those inside (see the module's head). The task that it points to is `Sync`.
unsafe impl Sync for Shared {}
// SAFETY: as above.
unsafe impl Send for Shared {}

/// Threads that work together.
pub(crate) struct Team {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
    leading: Mutex<()>,
}

/// The right to give jobs to the team, which one thread has at a time.
pub(crate) struct Lead<'a> {
    team: &'a Team,
    _leading: MutexGuard<'a, ()>,
}

impl Team {
    /// A team of `n_threads`, the leader included.
    pub(crate) fn new(n_threads: NonZeroUsize) -> Result<Self, BackendError> {
        let shared = Arc::new(Shared {
            soon: Soon::default(),
            state: OwnLine(AtomicU64::new(0)),
            next: (0..n_threads.get())
                .map(|_| OwnLine(AtomicUsize::new(0)))
                .collect(),
            job: UnsafeCell::new(None),
            n_sleeping: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            failure: Mutex::new(None),
        });
        // Where threads outnumber cores, spinning would take the core from those who work.
        let n_cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let spin = if n_threads.get() > n_cores {
            Duration::ZERO
        } else {
            SPIN
        };
        let mut team = Self {
            shared,
            helpers: Vec::new(),
            leading: Mutex::new(()),
        };
        for number in 1..n_threads.get() {
            let shared = Arc::clone(&team.shared);
            let named = thread::Builder::new().name(format!("kv-cpu-{number}"));
            let handle = named.spawn(move || help(&shared, number, spin));
            team.helpers.push(handle.map_err(|e| BackendError::Device {
                backend: "cpu",
                reason: format!("thread {number} of {n_threads} did not start: {e}"),
            })?);
        }
        Ok(team)
    }

    /// Threads, the leader included.
    pub(crate) fn n_threads(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Waits until nobody else leads, and wakes the helpers: work is about to come.
    pub(crate) fn lead(&self) -> Lead<'_> {
        let leading = self.leading.lock().unwrap_or_else(PoisonError::into_inner);
        self.wake();
        Lead {
            team: self,
            _leading: leading,
        }
    }

    fn wake(&self) {
        if self.shared.n_sleeping.load(Ordering::SeqCst) > 0 {
            self.helpers.iter().for_each(|h| h.thread().unpark());
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for helper in self.helpers.drain(..) {
            helper.thread().unpark();
            // A helper cannot panic: tasks are caught. If it did, it is gone, which is the aim.
            let _ = helper.join();
        }
    }
}

impl Lead<'_> {
    /// Calls `task(thread, i)` once for every `i < n_tasks`, on whatever threads, and waits for all.
    ///
    /// # Errors
    /// The first error of a task; [`BackendError::Device`] where a task panicked. Other tasks may
    /// have been left out then.
    pub(crate) fn each(&mut self, n_tasks: usize, task: &Task<'_>) -> Result<(), BackendError> {
        let shared = &*self.team.shared;
        if n_tasks <= 1 || self.team.helpers.is_empty() {
            shared.guard(|| (0..n_tasks).try_for_each(|i| task(0, i)));
        } else {
            self.share(n_tasks, task);
        }
        let mut failure = shared
            .failure
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        failure.take().map_or(Ok(()), Err)
    }

    /// Threads, the leader included.
    pub(crate) fn n_threads(&self) -> usize {
        self.team.n_threads()
    }

    /// Says what is read soon: thread `i` begins about `i * share` bytes from `start` on.
    pub(crate) fn soon(&self, start: *const u8, share: usize) {
        let soon = &self.team.shared.soon;
        soon.share.store(share, Ordering::Relaxed);
        soon.start.store(start as usize, Ordering::Relaxed);
    }

    fn share(&mut self, n_tasks: usize, task: &Task<'_>) {
        let shared = &*self.team.shared;
        // SAFETY: only the lifetime changes. The pointer is used by those inside the job, and this
        // function does not return before all have left and the job is closed.
        let task: *const Task<'static> =
            unsafe { std::mem::transmute::<*const Task<'_>, *const Task<'static>>(task) };
        // SAFETY: the last job is closed and nobody is inside; only the leader opens jobs, and the
        // guard in `self` makes this the only leader.
        unsafe { *shared.job.get() = Some(Job { task, n_tasks }) };
        for (thread, next) in shared.next.iter().enumerate() {
            let first = share_of(n_tasks, (thread, shared.next.len())).start;
            next.0.store(first, Ordering::Relaxed);
        }
        let number = shared.state.0.load(Ordering::Relaxed) & !(OPEN | INSIDE);
        shared
            .state
            .0
            .store(number.wrapping_add(JOB) | OPEN, Ordering::SeqCst);
        self.team.wake();
        shared.work(0);
        shared.state.0.fetch_and(!OPEN, Ordering::AcqRel);
        let (mut n_looks, mut asked) = (0u32, Asked::default());
        while shared.state.0.load(Ordering::Acquire) & INSIDE != 0 {
            n_looks += 1;
            match n_looks {
                0..4096 if shared.soon.ask(0, &mut asked) => {}
                0..4096 => spin_loop(),
                // Somebody was put aside inside a task: leave the core to whoever needs it.
                _ => thread::yield_now(),
            }
        }
    }
}

impl Shared {
    /// Takes tasks until there are none; the caller is the leader or inside.
    fn work(&self, thread: usize) {
        // SAFETY: the job is not written while its leader or somebody inside works on it.
        let Some(Job { task, n_tasks }) = (unsafe { *self.job.get() }) else {
            return;
        };
        // SAFETY: the leader does not return before all have left, so the task is still there.
        let task = unsafe { &*task };
        let n_threads = self.next.len();
        self.guard(|| {
            // First its own share, then what others have left of theirs.
            for of in (thread..n_threads).chain(0..thread) {
                let (next, end) = (&self.next[of].0, share_of(n_tasks, (of, n_threads)).end);
                // A look first: of what is used up nothing is written.
                while next.load(Ordering::Relaxed) < end {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    if at < end {
                        task(thread, at)?;
                    }
                }
            }
            Ok(())
        });
    }

    /// Keeps errors and panics for the leader.
    fn guard(&self, work: impl FnOnce() -> Result<(), BackendError>) {
        let error = match catch_unwind(AssertUnwindSafe(work)) {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error,
            Err(panic) => {
                let reason = format!("a thread panicked: {}", message(&*panic));
                BackendError::Device {
                    backend: "cpu",
                    reason,
                }
            }
        };
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.get_or_insert(error);
    }

    /// Enters the open job whose word is `seen`; says whether that succeeded.
    fn enter(&self, seen: u64) -> bool {
        let state = &self.state.0;
        let mut word = seen;
        while word & OPEN != 0 && word / JOB == seen / JOB {
            match state.compare_exchange_weak(word, word + 1, Ordering::Acquire, Ordering::Relaxed)
            {
                Ok(_) => return true,
                Err(now) => word = now,
            }
        }
        false
    }
}

/// The tasks that a thread takes first: neighbours, because one asks for what the next one reads.
fn share_of(n_tasks: usize, (thread, n_threads): (usize, usize)) -> Range<usize> {
    thread * n_tasks / n_threads..(thread + 1) * n_tasks / n_threads
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("no message")
}

/// A helper's life.
fn help(shared: &Shared, number: usize, spin: Duration) {
    let (mut done, mut asked) = (0, Asked::default());
    let mut idle_since = Instant::now();
    let mut n_looks = 0u32;
    while !shared.stop.load(Ordering::Relaxed) {
        let word = shared.state.0.load(Ordering::Acquire);
        if word & OPEN != 0 && word / JOB != done {
            done = word / JOB;
            if shared.enter(word) {
                shared.work(number);
                shared.state.0.fetch_sub(1, Ordering::Release);
            }
            (idle_since, n_looks) = (Instant::now(), 0);
            continue;
        }
        if !shared.soon.ask(number, &mut asked) {
            spin_loop();
        }
        n_looks += 1;
        if (n_looks.is_multiple_of(32) || spin.is_zero()) && idle_since.elapsed() >= spin {
            sleep(shared, done);
            (idle_since, n_looks) = (Instant::now(), 0);
        }
    }
}

/// Parks until somebody calls, unless there is something to do.
fn sleep(shared: &Shared, done: u64) {
    shared.n_sleeping.fetch_add(1, Ordering::SeqCst);
    let word = shared.state.0.load(Ordering::SeqCst);
    let work = word & OPEN != 0 && word / JOB != done;
    if !work && !shared.stop.load(Ordering::SeqCst) {
        thread::park();
    }
    shared.n_sleeping.fetch_sub(1, Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn team(n: usize) -> Team {
        Team::new(NonZeroUsize::new(n).unwrap()).unwrap()
    }

    #[test]
    fn every_task_is_done_once() {
        for n_threads in 1..=4 {
            let team = team(n_threads);
            assert_eq!(team.n_threads(), n_threads);
            let done: Vec<AtomicUsize> = (0..100).map(|_| AtomicUsize::new(0)).collect();
            for n_tasks in (0..300).map(|i| i % 101) {
                done.iter().for_each(|d| d.store(0, Ordering::Relaxed));
                let task = |thread: usize, i: usize| {
                    assert!(thread < n_threads);
                    done[i].fetch_add(1, Ordering::Relaxed);
                    Ok(())
                };
                team.lead().each(n_tasks, &task).unwrap();
                let once = |(i, d): (usize, &AtomicUsize)| {
                    d.load(Ordering::Relaxed) == usize::from(i < n_tasks)
                };
                assert!(done.iter().enumerate().all(once));
            }
        }
    }

    #[test]
    fn shares_are_neighbours_and_all_there_is() {
        for n_threads in 1..6 {
            for n_tasks in 0..40 {
                let shares = (0..n_threads).map(|thread| share_of(n_tasks, (thread, n_threads)));
                let shares: Vec<Range<usize>> = shares.collect();
                assert!(shares.iter().cloned().flatten().eq(0..n_tasks));
                let (least, most) = (n_tasks / n_threads, n_tasks.div_ceil(n_threads));
                assert!(shares.iter().all(|s| s.len() == least || s.len() == most));
            }
        }
    }

    #[test]
    fn what_others_have_not_begun_is_taken() {
        // Two helpers are kept in their first tasks until the leader has done all others.
        let team = team(3);
        let (n_tasks, n_kept) = (30, AtomicUsize::new(0));
        let by_leader = AtomicUsize::new(0);
        let task = |thread: usize, _| {
            let start = Instant::now();
            let is_open = || start.elapsed() < Duration::from_secs(20);
            if thread > 0 {
                n_kept.fetch_add(1, Ordering::SeqCst);
                while by_leader.load(Ordering::SeqCst) < n_tasks - 2 && is_open() {
                    thread::yield_now();
                }
            } else {
                while n_kept.load(Ordering::SeqCst) < 2 && is_open() {
                    thread::yield_now();
                }
                by_leader.fetch_add(1, Ordering::SeqCst);
            }
            Ok(())
        };
        team.lead().each(n_tasks, &task).unwrap();
        assert_eq!(by_leader.load(Ordering::SeqCst), n_tasks - 2);
    }

    #[test]
    fn helpers_that_sleep_wake_up() {
        let team = team(2);
        for _ in 0..3 {
            thread::sleep(SPIN * 20);
            let helped = AtomicBool::new(false);
            let both = |thread: usize, _| {
                // The leader waits in its first task until the helper has taken one.
                let start = Instant::now();
                while thread == 0 && !helped.load(Ordering::Relaxed) {
                    assert!(
                        start.elapsed() < Duration::from_secs(20),
                        "the helper sleeps on"
                    );
                    thread::yield_now();
                }
                helped.store(true, Ordering::Relaxed);
                Ok(())
            };
            team.lead().each(4, &both).unwrap();
        }
    }

    #[test]
    fn panics_and_errors_come_back_and_the_team_goes_on() {
        for n_threads in [1, 3] {
            let team = team(n_threads);
            let panics = |_, i| {
                if i == 7 {
                    panic!("task {i} fell over")
                } else {
                    Ok(())
                }
            };
            let error = team.lead().each(20, &panics).unwrap_err();
            assert!(error.to_string().contains("task 7 fell over"), "{error}");
            let refuses = |_, _| {
                Err(BackendError::WrongLength {
                    what: "values",
                    wanted: 1,
                    got: 2,
                })
            };
            let error = team.lead().each(20, &refuses).unwrap_err();
            assert!(matches!(error, BackendError::WrongLength { got: 2, .. }));
            team.lead().each(20, &|_, _| Ok(())).unwrap();
        }
    }

    #[test]
    fn several_threads_take_turns_in_leading() {
        let team = team(2);
        let sum = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        let add = |_, i| {
                            sum.fetch_add(i, Ordering::Relaxed);
                            Ok(())
                        };
                        team.lead().each(10, &add).unwrap();
                    }
                });
            }
        });
        assert_eq!(sum.into_inner(), 3 * 200 * 45);
    }
}
