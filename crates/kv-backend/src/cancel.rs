//! [`CancelFlag`]: ends runs that are under way, from another thread or a signal handler.
//!
//! Invariant: setting and reading the flag never block. Knows nothing of what is cancelled.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Ends a run or a generation from another thread or a signal handler. Clones share one flag.
#[derive(Clone, Debug, Default)]
pub struct CancelFlag(Arc<AtomicBool>);

impl CancelFlag {
    /// Cancels what polls the flag.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Resets the flag for the next run or generation.
    pub fn reset(&self) {
        self.0.store(false, Ordering::Relaxed);
    }

    /// True if it is cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clones_share_one_flag() {
        let flag = CancelFlag::default();
        let clone = flag.clone();
        clone.cancel();
        assert!(flag.is_cancelled());
        flag.reset();
        assert!(!clone.is_cancelled());
    }
}
