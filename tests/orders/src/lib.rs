//! What tests in all orders of threads share: [`in_all_orders`], and loom's [`Condvar`] with what
//! the standard library's has.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LockResult};
use std::time::Duration;

use loom::sync::{MutexGuard, WaitTimeoutResult};

/// Tries a model in all orders of threads with at most so many preemptions, which
/// `LOOM_MAX_PREEMPTIONS` may change.
///
/// # Panics
/// Where the model does, where its threads wait for ever, and where there was one order alone: a
/// model that ends at once has looked at nothing.
pub fn in_all_orders(n_preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    // Not one of loom's: it counts all its runs.
    let n_orders = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&n_orders);
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(n_preemptions));
    builder.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        model();
    });
    let n_orders = n_orders.load(Ordering::Relaxed);
    println!("{n_orders} orders");
    assert!(n_orders > 1);
}

/// Loom's condition variable, in which no time passes.
#[derive(Default)]
pub struct Condvar(loom::sync::Condvar);

impl std::fmt::Debug for Condvar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Condvar")
    }
}

type Waited<'a, T> = LockResult<(MutexGuard<'a, T>, WaitTimeoutResult)>;

impl Condvar {
    /// Nobody waits yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// As the standard library's.
    ///
    /// # Errors
    /// As the standard library's.
    pub fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> LockResult<MutexGuard<'a, T>> {
        self.0.wait(guard)
    }

    /// The same: it never times out.
    ///
    /// # Errors
    /// As the standard library's.
    pub fn wait_timeout<'a, T>(&self, guard: MutexGuard<'a, T>, time: Duration) -> Waited<'a, T> {
        self.0.wait_timeout(guard, time)
    }

    /// The one that loom does not have; false, as it never times out.
    ///
    /// # Errors
    /// As the standard library's.
    pub fn wait_timeout_while<'a, T>(
        &self,
        mut guard: MutexGuard<'a, T>,
        time: Duration,
        mut is_waiting: impl FnMut(&mut T) -> bool,
    ) -> LockResult<(MutexGuard<'a, T>, bool)> {
        while is_waiting(&mut guard) {
            guard = match self.0.wait_timeout(guard, time) {
                Ok((guard, _)) => guard,
                Err(error) => error.into_inner().0,
            };
        }
        Ok((guard, false))
    }

    /// As the standard library's.
    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    /// As the standard library's.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }
}
