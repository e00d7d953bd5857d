//! [`Histogram`]: times in buckets, as Prometheus reads them.

use std::time::Duration;

use super::line;

/// Upper bounds of the buckets of times, in seconds.
const BUCKETS: [f64; 12] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
];

/// Times, counted by their size.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Histogram {
    /// Of each bucket alone; what is above all has none.
    counts: [u64; BUCKETS.len()],
    pub(super) n: u64,
    pub(super) sum: f64,
}

impl Histogram {
    pub(super) fn add(&mut self, time: Duration) {
        let seconds = time.as_secs_f64();
        self.n += 1;
        self.sum += seconds;
        if let Some(at) = BUCKETS.iter().position(|&bound| seconds <= bound)
            && let Some(count) = self.counts.get_mut(at)
        {
            *count += 1;
        }
    }

    pub(super) fn write(&self, name: &str, out: &mut String) {
        let mut below = 0;
        for (bound, count) in BUCKETS.iter().zip(self.counts) {
            below += count;
            line(out, format_args!("{name}_bucket{{le=\"{bound}\"}} {below}"));
        }
        line(out, format_args!("{name}_bucket{{le=\"+Inf\"}} {}", self.n));
        line(out, format_args!("{name}_sum {}", self.sum));
        line(out, format_args!("{name}_count {}", self.n));
    }
}
