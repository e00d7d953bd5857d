//! [`Schedule`]: when each request of a load test is sent.
//!
//! Invariant: the same arrivals and seed give the same times. Reads no clock.

use std::time::Duration;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use crate::args::Arrivals;

/// When requests are sent.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Schedule {
    /// So many at once, and another one when one ends: a closed loop.
    Closed {
        /// Requests that have not ended, at most.
        n_clients: usize,
        /// Requests in all.
        n_requests: usize,
    },
    /// At these times since the start, whatever became of those before: an open loop.
    Open {
        /// In order.
        times: Vec<Duration>,
    },
}

impl Schedule {
    /// Times of so many requests, the first of which comes at the start.
    pub(super) fn open(arrivals: Arrivals, n_requests: usize, seed: u64) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut time = Duration::ZERO;
        let times = (0..n_requests).map(|_| {
            let this = time;
            time = time.saturating_add(arrivals.next_after(uniform(&mut random)));
            this
        });
        Self::Open {
            times: times.collect(),
        }
    }

    /// When the next request is sent, since the start; `None` where one has to end before. `n_sent`
    /// were sent so far, and of these `n_ended` have ended.
    pub(super) fn next_time(&self, n_sent: usize, n_ended: usize) -> Option<Duration> {
        match self {
            Self::Closed {
                n_clients,
                n_requests,
            } => {
                let n_wanted = (*n_requests).min(n_clients + n_ended);
                (n_sent < n_wanted).then_some(Duration::ZERO)
            }
            Self::Open { times } => times.get(n_sent).copied(),
        }
    }
}

/// A number from 0 to below 1.
fn uniform(random: &mut ChaCha8Rng) -> f64 {
    (random.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_times_of_the_wanted_rate() {
        let arrivals = Arrivals::Poisson { per_second: 5.0 };
        let schedule = Schedule::open(arrivals, 4001, 7);
        assert_eq!(schedule, Schedule::open(arrivals, 4001, 7));
        assert_ne!(schedule, Schedule::open(arrivals, 4001, 8));
        assert_eq!(schedule.next_time(0, 0), Some(Duration::ZERO));
        let last = schedule.next_time(4000, 0).unwrap_or_default();
        // 4,000 intervals of 0.2 s: the standard deviation of the sum is 1.6 % of it.
        let seconds = last.as_secs_f64();
        assert!((740.0..860.0).contains(&seconds), "{seconds}");
        assert_eq!(schedule.next_time(4001, 0), None);
        // The squares of exponential intervals have twice the mean of the square of the mean.
        let time = |n| schedule.next_time(n, 0).unwrap_or_default().as_secs_f64();
        let squares = (0..4000).map(|n| (time(n + 1) - time(n)).powi(2));
        let ratio = squares.sum::<f64>() / 4000.0 / 0.04;
        assert!((1.7..2.3).contains(&ratio), "{ratio}");
    }

    #[test]
    fn a_fixed_interval_is_kept_and_a_closed_loop_waits() {
        let fixed = Schedule::open(Arrivals::Fixed { seconds: 0.25 }, 3, 1);
        assert_eq!(fixed.next_time(2, 0), Some(Duration::from_millis(500)));
        let closed = Schedule::Closed {
            n_clients: 2,
            n_requests: 3,
        };
        assert_eq!(closed.next_time(1, 0), Some(Duration::ZERO));
        assert_eq!(closed.next_time(2, 0), None);
        assert_eq!(closed.next_time(2, 1), Some(Duration::ZERO));
        assert_eq!(closed.next_time(3, 2), None);
    }
}
