//! [`StepTimes`]: where the time of runs goes, by kinds of steps.
//!
//! Invariant: every moment of a run that is watched belongs to one kind, the time of the thread that leads it, so that
//! waiting for others counts for what is waited for. A run that nobody watches reads no clock. Does not know what is computed.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// What a step does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StepKind {
    /// Products of rows with matrices.
    Matrices,
    /// Rows made ready for such products: normed or gated where that was fused, and rounded to 8 bits.
    Rounding,
    /// Attention over what is stored.
    Attention,
    /// Keys and values put into their cells.
    Storing,
    /// Convolutions and scans of recurrent layers.
    Recurrence,
    /// Routing, products and sums of experts.
    Experts,
    /// Rows of the embedding.
    Embedding,
    /// Norms, rotations, sums and the like that were not fused with another step.
    Elementwise,
    /// Operations that were registered.
    Custom,
    /// Weights brought into another order.
    Repacking,
}

impl StepKind {
    /// All kinds.
    pub const ALL: [Self; 10] = [
        Self::Matrices,
        Self::Rounding,
        Self::Attention,
        Self::Storing,
        Self::Recurrence,
        Self::Experts,
        Self::Embedding,
        Self::Elementwise,
        Self::Custom,
        Self::Repacking,
    ];
}

impl fmt::Display for StepKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Matrices => "matrices",
            Self::Rounding => "rounding",
            Self::Attention => "attention",
            Self::Storing => "storing",
            Self::Recurrence => "recurrence",
            Self::Experts => "experts",
            Self::Embedding => "embedding",
            Self::Elementwise => "elementwise",
            Self::Custom => "custom",
            Self::Repacking => "repacking",
        })
    }
}

/// What all steps of one kind took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTime {
    /// The time.
    pub time: Duration,
    /// Bytes of the matrices that were read for it, each counted once a step. Those of experts are not counted.
    pub weight_bytes: u64,
}

/// Times of all runs of the backends that it was given to, added up.
#[derive(Debug, Default)]
pub struct StepTimes([Sums; StepKind::ALL.len()]);

#[derive(Debug, Default)]
struct Sums {
    nanoseconds: AtomicU64,
    weight_bytes: AtomicU64,
}

impl StepTimes {
    /// What was measured since the last time this was asked, without kinds of which there was nothing.
    pub fn take(&self) -> Vec<(StepKind, StepTime)> {
        let times = StepKind::ALL.into_iter().zip(&self.0).map(|(kind, sums)| {
            let time = StepTime {
                time: Duration::from_nanos(sums.nanoseconds.swap(0, Ordering::Relaxed)),
                weight_bytes: sums.weight_bytes.swap(0, Ordering::Relaxed),
            };
            (kind, time)
        });
        times.filter(|(_, t)| *t != StepTime::default()).collect()
    }

    fn add(&self, kind: StepKind, time: Duration, weight_bytes: usize) {
        let sums = &self.0[kind as usize];
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        sums.nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
        sums.weight_bytes
            .fetch_add(weight_bytes as u64, Ordering::Relaxed);
    }
}

/// Measures the steps of one run, where somebody wants to know.
pub(crate) struct Watch<'a>(Option<(&'a StepTimes, Instant)>);

impl<'a> Watch<'a> {
    /// Begins now.
    pub(crate) fn start(times: Option<&'a StepTimes>) -> Self {
        Self(times.map(|times| (times, Instant::now())))
    }

    /// Counts the time since the last call for a kind of steps, with bytes of matrices that were read in it.
    pub(crate) fn lap(&mut self, of: impl FnOnce() -> (StepKind, usize)) {
        if let Some((times, last)) = &mut self.0 {
            let now = Instant::now();
            let (kind, weight_bytes) = of();
            times.add(kind, now - *last, weight_bytes);
            *last = now;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_in_the_order_of_their_numbers() {
        for (i, kind) in StepKind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, i);
        }
    }

    #[test]
    fn what_was_taken_is_gone() {
        let times = StepTimes::default();
        assert_eq!(times.take(), []);
        times.add(StepKind::Attention, Duration::from_nanos(5), 0);
        times.add(StepKind::Matrices, Duration::from_nanos(7), 64);
        times.add(StepKind::Matrices, Duration::from_nanos(2), 36);
        let time = |nanoseconds, weight_bytes| StepTime {
            time: Duration::from_nanos(nanoseconds),
            weight_bytes,
        };
        let expected = [
            (StepKind::Matrices, time(9, 100)),
            (StepKind::Attention, time(5, 0)),
        ];
        assert_eq!(times.take(), expected);
        assert_eq!(times.take(), []);
    }

    #[test]
    fn an_unwatched_run_measures_nothing() {
        let mut asked = false;
        Watch::start(None).lap(|| {
            asked = true;
            (StepKind::Custom, 1)
        });
        assert!(!asked);
    }
}
