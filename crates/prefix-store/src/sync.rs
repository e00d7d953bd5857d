//! Locks and threads of a [tier](crate::tier): those of the standard library.
//!
//! Its test in all orders of threads (`tests/tier_orders.rs`) compiles the tier with another module
//! of this name, which has loom's in their places. Nothing here adds anything to what is compiled.

pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
pub(crate) use std::thread::{Builder as ThreadBuilder, JoinHandle};
