//! [`Team`]: the thread pool of the CPU backend, a leader (the calling thread) and helper threads.
//!
//! Invariant: helpers only ever *help*. The leader alone could finish every job; tasks are claimed
//! one by one from counters, so a helper that the system preempts delays a job by its present task
//! at most, and one that has not entered does not delay it at all. Helpers spin for [`SPIN`] after
//! a job, then sleep: an idle team uses no CPU. Knows nothing of what is computed.
//!
//! Each thread has a counter of its own over a contiguous range of tasks: what a task prefetches is
//! what the thread's next task reads. A thread that has finished its range steals from the others'.
//!
//! # Why this is sound
//!
//! A job is published in [`TeamState::job`] and opened by [`TeamState::state`], one word of three
//! fields: the number of the job, an *open* bit, and the number of helpers inside.
//!
//! - A helper enters by a compare-and-swap on an open word that adds 1; it leaves by subtracting 1.
//!   So it reads `job` only between entering and leaving.
//! - The leader closes the word when the counters have run out, then waits until no helper is
//!   inside; only then does it return, and only then may the next `job` be written. No helper can
//!   enter a closed word. So `job` is never written while it is read, and what a job borrows
//!   outlives every access.
//! - Entering acquires what the leader released by opening; the leader's last load of the word
//!   acquires what leaving helpers released. (Both are read-modify-writes or the store that heads
//!   their release sequence.) So tasks see what was written before the job, and the leader sees
//!   what tasks wrote.
//! - The job's number wraps after 2³² jobs: a helper that slept through exactly that many takes
//!   the new job for one it has done and stays out, which costs help, not correctness.
//! - No lost wake-up: a helper increments `n_sleeping`, then loads `state` once more, then parks;
//!   the leader opens `state`, then loads `n_sleeping`. All four are sequentially consistent, so
//!   at least one of the two sees the other. Unparking a helper that does not sleep only makes its
//!   next park return at once, and it checks again.
//!
//! `tests/team.rs` tries this in all orders of the threads' accesses, as far as its bounds go.

use std::any::Any;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::PoisonError;
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

use kv_backend::BackendError;

use crate::kernels::prefetch::prefetch_l2;
use crate::storage::LINE;
use crate::sync::{
    Arc, AtomicBool, AtomicU64, AtomicUsize, JoinHandle, Mutex, MutexGuard, Ordering, SharedSlot,
    ThreadBuilder, park, spin_loop, total_order, yield_now,
};

/// The time that a helper spins for the next job before it sleeps: longer than the gaps between the
/// steps of a run, too short to be noticed as CPU load.
pub(crate) const SPIN: Duration = Duration::from_micros(40);

/// The largest part of a thread's share that is prefetched while it waits: it has to stay in the L2
/// cache together with what the present job reads.
const MAX_PREFETCH_BYTES: usize = 128 * 1024;
/// Bytes that are prefetched between two checks for a job.
const PREFETCH_STEP_BYTES: usize = 8 * LINE;

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

/// On a cache line of its own (two, as the hardware prefetcher fetches pairs).
#[repr(align(128))]
struct OwnLine<T>(T);

/// Prefetch hint for the next large job: the weights that it reads, of which each thread takes a
/// share.
///
/// Threads that wait prefetch their share meanwhile. No result depends on these numbers and any
/// address may be prefetched, so they need no ordering.
#[derive(Default)]
struct PrefetchHint {
    start: AtomicUsize,
    share: AtomicUsize,
}

/// The part of its share that a thread has prefetched.
#[derive(Default)]
struct PrefetchProgress {
    /// The hint's `start` that this belongs to.
    start: usize,
    n_bytes: usize,
}

impl PrefetchHint {
    /// Prefetches the next [`PREFETCH_STEP_BYTES`] of a thread's share; returns whether there were
    /// any left.
    fn prefetch_step(&self, thread: usize, progress: &mut PrefetchProgress) -> bool {
        let start = self.start.load(Ordering::Relaxed);
        if progress.start != start {
            *progress = PrefetchProgress { start, n_bytes: 0 };
        }
        let share = self.share.load(Ordering::Relaxed);
        let is_left = progress.n_bytes < share.min(MAX_PREFETCH_BYTES);
        if is_left {
            let at = start + thread * share + progress.n_bytes;
            for line in (0..PREFETCH_STEP_BYTES).step_by(LINE) {
                prefetch_l2(at.wrapping_add(line) as *const u8);
            }
            progress.n_bytes += PREFETCH_STEP_BYTES;
        }
        is_left
    }
}

struct TeamState {
    hint: PrefetchHint,
    state: OwnLine<AtomicU64>,
    /// The next task of each thread's range, `[threads]`.
    next: Box<[OwnLine<AtomicUsize>]>,
    job: SharedSlot<Option<Job>>,
    n_sleeping: AtomicUsize,
    stop: AtomicBool,
    failure: Mutex<Option<BackendError>>,
}

// SAFETY: `job` is the only field that is not `Sync`; it is written by the leader while no helper
// is inside and read by threads inside (see the module's head). The task it points to is `Sync`.
unsafe impl Sync for TeamState {}
// SAFETY: as above.
unsafe impl Send for TeamState {}

/// The thread pool.
pub(crate) struct Team {
    shared: Arc<TeamState>,
    helpers: Vec<JoinHandle<()>>,
    leading: Mutex<()>,
}

/// The right to run jobs on the team, which one thread has at a time.
pub(crate) struct TeamGuard<'a> {
    team: &'a Team,
    _leading: MutexGuard<'a, ()>,
}

impl Team {
    /// A team of `n_threads`, the leader included.
    pub(crate) fn new(n_threads: NonZeroUsize) -> Result<Self, BackendError> {
        // If threads outnumber cores, spinning would take cores from threads that compute.
        let n_cores = available_parallelism().map_or(1, NonZeroUsize::get);
        let spin = if n_threads.get() > n_cores {
            Duration::ZERO
        } else {
            SPIN
        };
        Self::with_spin(n_threads, spin)
    }

    /// The same with helpers that spin for so long before they sleep.
    pub(crate) fn with_spin(n_threads: NonZeroUsize, spin: Duration) -> Result<Self, BackendError> {
        let shared = Arc::new(TeamState {
            hint: PrefetchHint::default(),
            state: OwnLine(AtomicU64::new(0)),
            next: (0..n_threads.get())
                .map(|_| OwnLine(AtomicUsize::new(0)))
                .collect(),
            job: SharedSlot::new(None),
            n_sleeping: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            failure: Mutex::new(None),
        });
        let mut team = Self {
            shared,
            helpers: Vec::new(),
            leading: Mutex::new(()),
        };
        for number in 1..n_threads.get() {
            let shared = Arc::clone(&team.shared);
            let named = ThreadBuilder::new().name(format!("kv-cpu-{number}"));
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

    /// Waits until no other thread leads, and wakes the helpers: jobs are about to come.
    pub(crate) fn lead(&self) -> TeamGuard<'_> {
        let leading = self.leading.lock().unwrap_or_else(PoisonError::into_inner);
        self.wake();
        TeamGuard {
            team: self,
            _leading: leading,
        }
    }

    fn wake(&self) {
        total_order();
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
            // Panics of tasks are caught, so a helper does not panic; if it did, it has ended too.
            let _ = helper.join();
        }
    }
}

impl TeamGuard<'_> {
    /// Parallel for: calls `task(thread, i)` once for every `i < n_tasks`, on any threads, and
    /// waits for all.
    ///
    /// # Errors
    /// The first error of a task; [`BackendError::Device`] if a task panicked. Other tasks may have
    /// been skipped then.
    pub(crate) fn each(&mut self, n_tasks: usize, task: &Task<'_>) -> Result<(), BackendError> {
        let shared = &*self.team.shared;
        if n_tasks <= 1 || self.team.helpers.is_empty() {
            shared.guard(|| (0..n_tasks).try_for_each(|i| task(0, i)));
        } else {
            self.run_shared(n_tasks, task);
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

    /// Hints what the next job reads, so that waiting threads prefetch it: thread `i` begins about
    /// `i * share` bytes after `start`.
    pub(crate) fn hint_next_job(&self, start: *const u8, share: usize) {
        let hint = &self.team.shared.hint;
        hint.share.store(share, Ordering::Relaxed);
        hint.start.store(start as usize, Ordering::Relaxed);
    }

    /// Runs a job on all threads.
    fn run_shared(&mut self, n_tasks: usize, task: &Task<'_>) {
        let shared = &*self.team.shared;
        // SAFETY: only the lifetime changes. The pointer is used by threads inside the job, and
        // this function does not return before all have left and the job is closed.
        let task: *const Task<'static> =
            unsafe { std::mem::transmute::<*const Task<'_>, *const Task<'static>>(task) };
        // SAFETY: the last job is closed and no thread is inside; only the leader opens jobs, and
        // the guard in `self` makes this the only leader.
        unsafe { shared.job.write(Some(Job { task, n_tasks })) };
        for (thread, next) in shared.next.iter().enumerate() {
            let first = task_range(n_tasks, thread, shared.next.len()).start;
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
        let (mut n_checks, mut progress) = (0u32, PrefetchProgress::default());
        while shared.state.0.load(Ordering::Acquire) & INSIDE != 0 {
            n_checks += 1;
            match n_checks {
                0..4096 if shared.hint.prefetch_step(0, &mut progress) => {}
                0..4096 => spin_loop(),
                // A helper was preempted inside a task: yield the core to it.
                _ => yield_now(),
            }
        }
    }
}

impl TeamState {
    /// Claims and runs tasks until there are none; the caller is the leader or inside.
    fn work(&self, thread: usize) {
        // SAFETY: the job is not written while its leader or a thread inside works on it.
        let Some(Job { task, n_tasks }) = (unsafe { self.job.read() }) else {
            return;
        };
        // SAFETY: the leader does not return before all have left, so the task is still there.
        let task = unsafe { &*task };
        let n_threads = self.next.len();
        self.guard(|| {
            // First the thread's own range, then what is left of the others'.
            for owner in (thread..n_threads).chain(0..thread) {
                let next = &self.next[owner].0;
                let end = task_range(n_tasks, owner, n_threads).end;
                // Checked first, so that no thread writes to a counter that is used up.
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

    /// Stores an error or a panic of `work` for the leader.
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

    /// Enters the open job whose word is `seen`; returns whether that succeeded.
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

/// The tasks that a thread takes first: contiguous, because a task prefetches what the next reads.
pub(crate) fn task_range(n_tasks: usize, thread: usize, n_threads: usize) -> Range<usize> {
    thread * n_tasks / n_threads..(thread + 1) * n_tasks / n_threads
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("no message")
}

/// The loop of a helper thread.
fn help(shared: &TeamState, number: usize, spin: Duration) {
    let (mut done, mut progress) = (0, PrefetchProgress::default());
    let mut idle_since = Instant::now();
    let mut n_checks = 0u32;
    while !shared.stop.load(Ordering::Relaxed) {
        let word = shared.state.0.load(Ordering::Acquire);
        if word & OPEN != 0 && word / JOB != done {
            done = word / JOB;
            if shared.enter(word) {
                shared.work(number);
                shared.state.0.fetch_sub(1, Ordering::Release);
            }
            (idle_since, n_checks) = (Instant::now(), 0);
            continue;
        }
        if !shared.hint.prefetch_step(number, &mut progress) {
            spin_loop();
        }
        n_checks += 1;
        if (n_checks.is_multiple_of(32) || spin.is_zero()) && idle_since.elapsed() >= spin {
            sleep(shared, done);
            (idle_since, n_checks) = (Instant::now(), 0);
        }
    }
}

/// Parks until unparked, unless there is something to do.
fn sleep(shared: &TeamState, done: u64) {
    shared.n_sleeping.fetch_add(1, Ordering::SeqCst);
    total_order();
    let word = shared.state.0.load(Ordering::SeqCst);
    let work = word & OPEN != 0 && word / JOB != done;
    if !work && !shared.stop.load(Ordering::SeqCst) {
        park();
    }
    shared.n_sleeping.fetch_sub(1, Ordering::SeqCst);
}
