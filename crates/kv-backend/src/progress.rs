//! How far loading weights has come ([`OnProgress`]), and how far a run has ([`RunProgress`]).
//! Knows nothing of weights and graphs.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The progress of loading weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadProgress {
    /// Bytes of stored weights that are loaded.
    pub done: u64,
    /// Bytes of stored weights that will be, as far as is known.
    pub total: u64,
}

type Observer = dyn Fn(LoadProgress) + Send + Sync;

/// Takes reports of progress; the default ignores them.
#[derive(Clone, Default)]
pub struct OnProgress(Option<Arc<Observer>>);

impl OnProgress {
    /// Calls `observer` with each report, from whichever thread loads.
    pub fn new(observer: impl Fn(LoadProgress) + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(observer)))
    }

    /// Reports progress.
    pub fn report(&self, progress: LoadProgress) {
        if let Some(observer) = &self.0 {
            observer(progress);
        }
    }
}

/// The progress of the present run, for another thread to read. Clones share it.
#[derive(Clone, Debug)]
pub struct RunProgress {
    /// The bits of an `f64` between 0 and 1.
    fraction: Arc<AtomicU64>,
    /// The share of the run that is reported.
    part: Range<f64>,
}

impl Default for RunProgress {
    fn default() -> Self {
        Self {
            fraction: Arc::default(),
            part: 0.0..1.0,
        }
    }
}

impl RunProgress {
    /// For what computes a part of the run alone: all of its steps are this part of the whole.
    pub fn of_part(&self, part: Range<f64>) -> Self {
        Self {
            fraction: Arc::clone(&self.fraction),
            part,
        }
    }

    /// Reports that so many of a run's steps are done.
    pub fn report(&self, done: u32, total: u32) {
        let done = match total {
            0 => 0.0,
            total => (f64::from(done) / f64::from(total)).min(1.0),
        };
        let fraction = self.part.start + done * (self.part.end - self.part.start);
        self.fraction.store(fraction.to_bits(), Ordering::Relaxed);
    }

    /// The part of the run that is done, between 0 and 1; 0 before the first report.
    pub fn fraction(&self) -> f64 {
        f64::from_bits(self.fraction.load(Ordering::Relaxed))
    }
}

impl fmt::Debug for OnProgress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Some(_) => "OnProgress(observed)",
            None => "OnProgress(ignored)",
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn a_run_is_somewhere_between_its_beginning_and_its_end() {
        let progress = RunProgress::default();
        assert_eq!(progress.fraction(), 0.0);
        progress.clone().report(3, 4);
        assert_eq!(progress.fraction(), 0.75);
        progress.report(5, 4);
        assert_eq!(progress.fraction(), 1.0);
        let second = progress.of_part(0.5..1.0);
        second.report(0, 2);
        assert_eq!(progress.fraction(), 0.5);
        second.report(1, 2);
        assert_eq!(progress.fraction(), 0.75);
    }

    #[test]
    fn reports_reach_the_observer() {
        let seen = Arc::<Mutex<Vec<LoadProgress>>>::default();
        let to = Arc::clone(&seen);
        let on_progress = OnProgress::new(move |progress| to.lock().unwrap().push(progress));
        let half = LoadProgress { done: 1, total: 2 };
        on_progress.clone().report(half);
        OnProgress::default().report(half);
        assert_eq!(*seen.lock().unwrap(), [half]);
    }
}
