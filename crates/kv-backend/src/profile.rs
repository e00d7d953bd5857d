//! [`Profile`]: where the time of a backend's runs goes, by kinds of steps.
//!
//! Whoever opens a backend may give it a [`Profile`] to add to; each run measures its steps with a
//! [`Profiler`]. Invariant: every moment of a profiled run counts for exactly one kind; it is the
//! time of the thread that leads the run, so waiting for other threads counts for the step that is
//! waited for. A run without a profile reads no clock. Does not know what is computed.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The kind of work that a step does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StepKind {
    /// Matrix products: GEMV and GEMM.
    Matmul,
    /// Quantizing activations for matrix products, with the norm or gate that is fused into it.
    Quantize,
    /// Attention.
    Attention,
    /// Storing K and V rows in their cells.
    StoreKv,
    /// Convolutions and scans of recurrent layers.
    Recurrent,
    /// Routing, products and sums of experts.
    Experts,
    /// Looking up rows of the embedding.
    Embedding,
    /// Norms, rotations, sums and the like that were not fused into another step.
    Elementwise,
    /// Custom operations.
    Custom,
}

impl StepKind {
    /// All kinds.
    pub const ALL: [Self; 9] = [
        Self::Matmul,
        Self::Quantize,
        Self::Attention,
        Self::StoreKv,
        Self::Recurrent,
        Self::Experts,
        Self::Embedding,
        Self::Elementwise,
        Self::Custom,
    ];
}

impl fmt::Display for StepKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Matmul => "matmul",
            Self::Quantize => "quantize",
            Self::Attention => "attention",
            Self::StoreKv => "store kv",
            Self::Recurrent => "recurrent",
            Self::Experts => "experts",
            Self::Embedding => "embedding",
            Self::Elementwise => "elementwise",
            Self::Custom => "custom",
        })
    }
}

/// The time of all steps of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTime {
    /// Their time.
    pub time: Duration,
    /// Bytes of the weight matrices that they read, each matrix counted once a step. Matrices of
    /// experts are not counted.
    pub weight_bytes: u64,
}

/// The times of all runs of the backends that were given this profile, added up.
#[derive(Debug, Default)]
pub struct Profile([Sums; StepKind::ALL.len()]);

#[derive(Debug, Default)]
struct Sums {
    nanoseconds: AtomicU64,
    weight_bytes: AtomicU64,
}

impl Profile {
    /// Takes what was measured since the last call, without kinds of which there was nothing.
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

    /// Adds one step.
    pub fn add(&self, kind: StepKind, step: StepTime) {
        let sums = &self.0[kind as usize];
        let nanoseconds = u64::try_from(step.time.as_nanos()).unwrap_or(u64::MAX);
        sums.nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
        sums.weight_bytes
            .fetch_add(step.weight_bytes, Ordering::Relaxed);
    }
}

/// Measures the steps of one run, where there is a profile to add them to.
#[derive(Debug)]
pub struct Profiler<'a>(Option<(&'a Profile, Instant)>);

impl<'a> Profiler<'a> {
    /// Starts the clock.
    pub fn start(profile: Option<&'a Profile>) -> Self {
        Self(profile.map(|profile| (profile, Instant::now())))
    }

    /// Adds the time since the last call (or the start) to a kind of steps, with the bytes of
    /// weight matrices that were read in it.
    pub fn record(&mut self, step: impl FnOnce() -> (StepKind, usize)) {
        if let Some((profile, last)) = &mut self.0 {
            let now = Instant::now();
            let (kind, weight_bytes) = step();
            let time = StepTime {
                time: now - *last,
                weight_bytes: weight_bytes as u64,
            };
            profile.add(kind, time);
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
    fn take_empties_the_profile() {
        let time = |nanoseconds, weight_bytes| StepTime {
            time: Duration::from_nanos(nanoseconds),
            weight_bytes,
        };
        let profile = Profile::default();
        assert_eq!(profile.take(), []);
        profile.add(StepKind::Attention, time(5, 0));
        profile.add(StepKind::Matmul, time(7, 64));
        profile.add(StepKind::Matmul, time(2, 36));
        let expected = [
            (StepKind::Matmul, time(9, 100)),
            (StepKind::Attention, time(5, 0)),
        ];
        assert_eq!(profile.take(), expected);
        assert_eq!(profile.take(), []);
    }

    #[test]
    fn a_run_without_a_profile_measures_nothing() {
        let mut measured = false;
        Profiler::start(None).record(|| {
            measured = true;
            (StepKind::Custom, 1)
        });
        assert!(!measured);
    }
}
