//! Locks and counters of [streams](super::stream) and [watchers](super::watch): those of the
//! standard library.
//!
//! Their test in all orders of threads (`tests/stream_orders.rs`) compiles both with another module
//! of this name, which has loom's in their places.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicUsize};
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
