//! [`ExpertMeter`]: what reading experts of a mixture as they are needed takes.
//!
//! Whoever opens a backend may give it a meter to add to, and reads it from any thread. Does not
//! know which experts stay.

use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde::Serialize;

/// What was counted so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ExpertUse {
    /// The most bytes that experts may take in memory: those of all models that share it.
    pub budget: u64,
    /// Bytes that they take, or will as soon as their reads end.
    pub resident: u64,
    /// Bytes of all experts, as they would lie in memory.
    pub total: u64,
    /// Matrices of chosen experts that were in memory.
    pub hits: u64,
    /// Those that were not.
    pub misses: u64,
    /// Bytes that were read from the file.
    pub read: u64,
    /// Nanoseconds that computing waited for reads.
    pub waited_ns: u64,
}

impl ExpertUse {
    /// Hits of a hundred uses; `None` where nothing was used.
    pub fn hit_percent(&self) -> Option<f64> {
        let n_uses = self.hits + self.misses;
        (n_uses > 0).then(|| 100.0 * self.hits as f64 / n_uses as f64)
    }

    /// How long computing waited for reads.
    pub fn waited(&self) -> Duration {
        Duration::from_nanos(self.waited_ns)
    }
}

/// An expert of a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpertCell {
    /// Its matrices that are in memory.
    pub resident: u32,
    /// All of its matrices.
    pub matrices: u32,
    /// Steps in which its router chose it.
    pub uses: u64,
    /// Those of them at which all its matrices were in memory, or being read.
    pub hits: u64,
}

/// The experts of each layer that has any.
pub type ExpertMap = Vec<Vec<ExpertCell>>;

/// A source of the states of all experts, as long as there are any.
type MapSource = Box<dyn Fn() -> Option<ExpertMap> + Send + Sync>;

/// Counts what all backends that were given it do with experts.
#[derive(Default)]
pub struct ExpertMeter {
    budget: AtomicU64,
    resident: AtomicU64,
    total: AtomicU64,
    hits: AtomicU64,
    misses: AtomicU64,
    read: AtomicU64,
    waited: AtomicU64,
    /// Where what routers choose is written down.
    log: Mutex<Option<Box<dyn Write + Send>>>,
    map: Mutex<Option<MapSource>>,
}

impl ExpertMeter {
    /// One that also writes what routers choose to `out`, a line of JSON each.
    pub fn with_log(out: impl Write + Send + 'static) -> Self {
        Self {
            log: Mutex::new(Some(Box::new(out))),
            ..Self::default()
        }
    }

    /// What was counted so far.
    pub fn get(&self) -> ExpertUse {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ExpertUse {
            budget: of(&self.budget),
            resident: of(&self.resident),
            total: of(&self.total),
            hits: of(&self.hits),
            misses: of(&self.misses),
            read: of(&self.read),
            waited_ns: of(&self.waited),
        }
    }

    /// Takes what tells of each expert: of the last model that came.
    pub fn set_map(&self, source: Box<dyn Fn() -> Option<ExpertMap> + Send + Sync>) {
        *self.map.lock().unwrap_or_else(PoisonError::into_inner) = Some(source);
    }

    /// Each expert of each layer; `None` where no model reads them as they are needed.
    pub fn map(&self) -> Option<ExpertMap> {
        let source = self.map.lock().unwrap_or_else(PoisonError::into_inner);
        source.as_ref()?()
    }

    /// Adds the budget of a model, and the bytes of all its experts.
    pub fn add_model(&self, budget: u64, total: u64) {
        self.budget.fetch_add(budget, Ordering::Relaxed);
        self.total.fetch_add(total, Ordering::Relaxed);
    }

    /// Adds what a router's choices found in memory.
    pub fn add_uses(&self, hits: u64, misses: u64) {
        self.hits.fetch_add(hits, Ordering::Relaxed);
        self.misses.fetch_add(misses, Ordering::Relaxed);
    }

    /// Adds bytes that were read.
    pub fn add_read(&self, n_bytes: u64) {
        self.read.fetch_add(n_bytes, Ordering::Relaxed);
    }

    /// Adds a wait for reads.
    pub fn add_wait(&self, time: Duration) {
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.waited.fetch_add(nanoseconds, Ordering::Relaxed);
    }

    /// Takes a change of the bytes in memory.
    pub fn change_resident(&self, before: u64, now: u64) {
        if now >= before {
            self.resident.fetch_add(now - before, Ordering::Relaxed);
        } else {
            self.resident.fetch_sub(before - now, Ordering::Relaxed);
        }
    }

    /// Writes a line, where there is a log. After a failure, which is the writer's to report,
    /// nothing more is written.
    pub fn log(&self, line: impl FnOnce() -> String) {
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(out) = log.as_mut()
            && writeln!(out, "{}", line()).is_err()
        {
            *log = None;
        }
    }
}

impl std::fmt::Debug for ExpertMeter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("ExpertMeter").field(&self.get()).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    /// A disk that is full after some bytes.
    struct Full(usize);

    impl Write for Full {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let n = bytes.len().min(self.0);
            self.0 -= n;
            if n == 0 {
                return Err(io::ErrorKind::StorageFull.into());
            }
            Ok(n)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_meter_adds_up_and_its_log_ends_where_it_fails() {
        let meter = ExpertMeter::with_log(Full(12));
        assert_eq!(meter.get().hit_percent(), None);
        meter.add_model(100, 400);
        meter.add_uses(3, 1);
        meter.change_resident(0, 90);
        meter.change_resident(90, 70);
        meter.add_read(25);
        meter.add_wait(Duration::from_nanos(7));
        let found = meter.get();
        let wanted = ExpertUse {
            budget: 100,
            resident: 70,
            total: 400,
            hits: 3,
            misses: 1,
            read: 25,
            waited_ns: 7,
        };
        assert_eq!(found, wanted);
        assert_eq!(found.hit_percent(), Some(75.0));
        let mut n_lines = 0;
        for _ in 0..5 {
            meter.log(|| {
                n_lines += 1;
                "12345".to_owned()
            });
        }
        // Two lines fit, and the third fails.
        assert_eq!(n_lines, 3);
    }
}
