//! [`OnProgress`]: who is told how far loading weights has come. Knows nothing of weights.

use std::fmt;
use std::sync::Arc;

/// How far loading weights has come.
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
