//! Atomics, locks and threads of the [team](crate::team): those of the standard library.
//!
//! Its test in all orders of threads (`tests/team.rs`) compiles the team with another module of
//! this name, which has loom's in their places. Nothing here adds anything to what is compiled.

use std::cell::UnsafeCell;

pub(crate) use std::hint::spin_loop;
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
pub(crate) use std::sync::{Arc, Mutex, MutexGuard};
pub(crate) use std::thread::{Builder as ThreadBuilder, JoinHandle, park, yield_now};

/// A value that threads share, each at its time.
pub(crate) struct SharedSlot<T>(UnsafeCell<T>);

impl<T: Copy> SharedSlot<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(UnsafeCell::new(value))
    }

    /// # Safety
    /// No thread writes it meanwhile.
    pub(crate) unsafe fn read(&self) -> T {
        // SAFETY: no thread writes, which is the caller's promise.
        unsafe { *self.0.get() }
    }

    /// # Safety
    /// No other thread reads or writes it meanwhile.
    pub(crate) unsafe fn write(&self, value: T) {
        // SAFETY: no other thread reads or writes, which is the caller's promise.
        unsafe { *self.0.get() = value }
    }
}

/// Between a write and a read that are both sequentially consistent: nothing is needed there. Loom
/// takes such accesses for weaker ones, and needs a fence.
#[inline(always)]
pub(crate) fn total_order() {}
