//! Computing off the interpreter: the GIL is free, and Ctrl-C is noticed while it goes on.
//!
//! Invariant: a call that returns has no thread left behind. Knows no models.

use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::{Builder, scope};
use std::time::Duration;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

/// Time between two looks for signals such as Ctrl-C.
const SIGNAL_TIME: Duration = Duration::from_millis(50);

/// Does `work` on a thread of its own. Where a signal's handler raises meanwhile, `interrupt` is
/// called, which should make `work` return soon, and what the handler raised is returned.
pub(crate) fn interruptible<R: Send>(
    py: Python<'_>,
    interrupt: impl Fn(),
    work: impl FnOnce() -> R + Send,
) -> PyResult<R> {
    scope(|scope| {
        let (done, mut waiting) = channel::<()>();
        let worker = Builder::new().spawn_scoped(scope, move || {
            let _done = done; // dropped at the end, also of a panic
            work()
        })?;
        let mut raised = None;
        loop {
            let (ended, receiver) = py.detach(move || wait(waiting));
            waiting = receiver;
            if ended {
                break;
            }
            if let Err(error) = py.check_signals() {
                interrupt();
                raised.get_or_insert(error);
            }
        }
        let result = py.detach(|| worker.join());
        match (raised, result) {
            (Some(error), _) => Err(error),
            (None, Ok(result)) => Ok(result),
            (None, Err(_)) => Err(PyRuntimeError::new_err(
                "a computation panicked; see stderr",
            )),
        }
    })
}

/// True if the other end is gone within [`SIGNAL_TIME`].
fn wait(receiver: Receiver<()>) -> (bool, Receiver<()>) {
    let waited = receiver.recv_timeout(SIGNAL_TIME);
    (waited != Err(RecvTimeoutError::Timeout), receiver)
}
