//! The thread team in all orders of its threads' accesses that a weak memory allows, by loom: up to
//! so many preemptions, which find almost all faults.
//!
//! The team's own source is compiled here once more, with loom's atomics, locks and threads in the
//! place of the standard library's. `LOOM_MAX_PREEMPTIONS=4` tries more.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::num::NonZeroUsize;
use std::time::Duration;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, Ordering};
use thread_orders::in_all_orders;

#[path = "../src/team.rs"]
#[allow(dead_code)] // what the backend asks of it besides
mod team;

/// Loom's, by the names of the module that the team uses.
mod sync {
    pub(crate) use loom::hint::spin_loop;
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
    pub(crate) use loom::sync::{Arc, Mutex, MutexGuard};
    pub(crate) use loom::thread::{Builder as ThreadBuilder, JoinHandle, park, yield_now};

    pub(crate) struct SharedSlot<T>(loom::cell::UnsafeCell<T>);

    impl<T: Copy> SharedSlot<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(loom::cell::UnsafeCell::new(value))
        }

        /// # Safety
        /// As the one that it stands for; loom fails where that does not hold.
        pub(crate) unsafe fn read(&self) -> T {
            // SAFETY: loom looks for a write at the same time.
            self.0.with(|value| unsafe { *value })
        }

        /// # Safety
        /// As the one that it stands for; loom fails where that does not hold.
        pub(crate) unsafe fn write(&self, value: T) {
            // SAFETY: loom looks for other accesses at the same time.
            self.0.with_mut(|own| unsafe { *own = value });
        }
    }

    pub(crate) fn total_order() {
        loom::sync::atomic::fence(Ordering::SeqCst);
    }
}

/// What is not tried here.
mod kernels {
    pub(crate) mod prefetch {
        pub(crate) fn prefetch_l2(_: *const u8) {}
    }
}

mod storage {
    pub(crate) const LINE: usize = 64;
}

/// A team whose helpers sleep as soon as there is nothing to do.
fn team(n_threads: usize) -> team::Team {
    team::Team::with_spin(NonZeroUsize::new(n_threads).unwrap(), Duration::ZERO).unwrap()
}

/// A result of a task, which is no atomic: loom fails where two threads have it at one time, or one
/// reads what it need not see yet.
struct Cell(UnsafeCell<usize>);

// SAFETY: loom looks at each access.
unsafe impl Sync for Cell {}

impl Cell {
    fn add(&self, n: usize) {
        // SAFETY: as above.
        self.0.with_mut(|value| unsafe { *value += n });
    }

    fn get(&self) -> usize {
        // SAFETY: as above.
        self.0.with(|value| unsafe { *value })
    }
}

/// Each task is done once, by one thread, before the leader goes on; tasks see what was written
/// before their job, and the leader what they wrote. What a job borrows is gone after it.
#[test]
fn jobs_end_before_what_they_borrow() {
    in_all_orders(2, || {
        let team = team(2);
        for job in 1..=2 {
            let input = Cell(UnsafeCell::new(0));
            input.add(job);
            let results = [(); 2].map(|()| Cell(UnsafeCell::new(0)));
            let task = |_, at: usize| {
                results[at].add(10 * at + input.get());
                Ok(())
            };
            team.lead().each(2, &task).unwrap();
            assert_eq!([0, 1].map(|at| results[at].get()), [job, 10 + job]);
        }
    });
}

/// A helper that is about to sleep, or sleeps, comes to a job that waits for it.
#[test]
fn no_wake_up_is_lost() {
    in_all_orders(2, || {
        let team = team(2);
        let has_helped = Arc::new(AtomicBool::new(false));
        let both = |thread: usize, _| {
            while thread == 0 && !has_helped.load(Ordering::Acquire) {
                loom::thread::yield_now();
            }
            has_helped.store(true, Ordering::Release);
            Ok(())
        };
        team.lead().each(2, &both).unwrap();
    });
}

/// A team that is dropped ends its helpers, whatever they do then.
#[test]
fn helpers_end_with_their_team() {
    in_all_orders(3, || drop(team(2)));
    in_all_orders(2, || drop(team(3)));
}
