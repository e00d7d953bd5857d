//! [`Rates`]: how fast a tier is, learned from its answers; and whether a fetch pays.
//!
//! A fetch of `n` bytes takes a latency and `n` bytes at a rate. Both are averages in which the
//! last answers count most. Invariant: pure arithmetic; times that cannot be (a clock that jumped,
//! an answer in no time) never make a rate infinite, negative or not a number.

use std::time::Duration;

/// The weight of a new answer in an average.
const NEW: f64 = 0.25;

/// Answers of fewer bytes tell of the latency alone.
const MIN_BYTES: u64 = 64 << 10;

/// The shortest time that is believed, in seconds.
const SHORTEST: f64 = 1e-6;

/// What is believed of a tier that never answered: a disk or a fast network.
const FIRST_RATE: f64 = 500e6;
const FIRST_LATENCY: f64 = 1e-3;

/// How fast a tier is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Seconds until the first byte.
    latency: f64,
    /// Bytes a second after that.
    bytes_per_second: f64,
}

impl Default for Rates {
    fn default() -> Self {
        Self {
            latency: FIRST_LATENCY,
            bytes_per_second: FIRST_RATE,
        }
    }
}

impl Rates {
    /// Learns from an answer: so many bytes after so long.
    pub fn learn(&mut self, n_bytes: u64, took: Duration) {
        let took = took.as_secs_f64().max(SHORTEST);
        if n_bytes < MIN_BYTES {
            self.latency += (took - self.latency) * NEW;
            return;
        }
        // What the latency does not explain; some of it in any case, since the latency may be of
        // slower days.
        let moving = (took - self.latency).max(took / 16.0);
        let rate = n_bytes as f64 / moving;
        // The average of times, not of rates: a fetch is judged by how long it takes.
        let seconds_per_byte = 1.0 / self.bytes_per_second;
        self.bytes_per_second = 1.0 / (seconds_per_byte + (1.0 / rate - seconds_per_byte) * NEW);
        self.latency = self.latency.min(took);
    }

    /// How long a fetch of so many bytes would take.
    pub fn would_take(&self, n_bytes: u64) -> Duration {
        seconds(self.latency + n_bytes as f64 / self.bytes_per_second)
    }
}

/// What is known before groups are fetched.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FetchEstimate {
    /// Tokens that are there.
    pub n_tokens: u64,
    /// Bytes of them in the tier.
    pub n_bytes: u64,
    /// How fast the tier is.
    pub rates: Rates,
    /// Seconds that restoring a token takes once its bytes are here.
    pub restore_per_token: f64,
    /// Seconds that computing a token takes, behind what is cached already.
    pub compute_per_token: f64,
}

/// Whether groups are fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FetchChoice {
    /// They are; after this time computing would be done.
    Fetch {
        /// How long it should take.
        would_take: Duration,
        /// How long computing would take: the deadline of the fetch.
        deadline: Duration,
    },
    /// They are computed: that is faster.
    Compute {
        /// How long a fetch could have taken at most.
        needed: Duration,
        /// How long it would have taken.
        would_take: Duration,
    },
}

impl FetchEstimate {
    /// Decides whether a fetch is faster than computing.
    pub fn choose(&self) -> FetchChoice {
        let n_tokens = self.n_tokens as f64;
        let restore = seconds(n_tokens * self.restore_per_token);
        let would_take = self.rates.would_take(self.n_bytes).saturating_add(restore);
        let needed = seconds(n_tokens * self.compute_per_token);
        if would_take < needed {
            let deadline = needed;
            FetchChoice::Fetch {
                would_take,
                deadline,
            }
        } else {
            FetchChoice::Compute { needed, would_take }
        }
    }
}

/// A duration; what is negative or no number is zero, and what is endless the longest there is.
fn seconds(seconds: f64) -> Duration {
    if seconds > 0.0 {
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    } else {
        Duration::ZERO
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tier of this latency and rate, learned from 50 fetches of a mebibyte and 50 probes.
    fn learned(latency: f64, rate: f64) -> Rates {
        let mut rates = Rates::default();
        for _ in 0..50 {
            rates.learn(0, seconds(latency));
            rates.learn(1 << 20, seconds(latency + 1048576.0 / rate));
        }
        rates
    }

    #[test]
    fn rates_become_what_is_measured() {
        for (latency, rate) in [(50e-6, 5e9), (1e-3, 1.25e8), (20e-3, 1e8)] {
            let took = learned(latency, rate).would_take(100 << 20).as_secs_f64();
            let right = latency + 104857600.0 / rate;
            assert!((took / right - 1.0).abs() < 0.05, "{took} for {right}");
        }
    }

    /// Of a model of half a billion weights: a CPU computes 798 tokens of it in a second, and a
    /// token takes 12,288 bytes.
    #[test]
    fn a_fetch_is_chosen_where_it_is_faster() {
        let estimate = |rate, compute| FetchEstimate {
            n_tokens: 2560,
            n_bytes: 2560 * 12_288,
            rates: learned(1e-3, rate),
            restore_per_token: 13e-6,
            compute_per_token: 1.0 / compute,
        };
        let is_fetched =
            |rate, compute| matches!(estimate(rate, compute).choose(), FetchChoice::Fetch { .. });
        assert!(is_fetched(1.25e8, 798.0));
        // At 1 Gbit/s a machine that computes more than 8,970 tokens a second does not.
        assert!(is_fetched(1.25e8, 8_500.0));
        assert!(!is_fetched(1.25e8, 9_500.0));
        assert!(is_fetched(1.25e9, 9_500.0));
        match estimate(1.25e8, 1e9).choose() {
            FetchChoice::Compute { needed, would_take } => assert!(needed < would_take),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn impossible_times_leave_rates_finite() {
        let mut rates = Rates::default();
        for (n_bytes, took) in [
            (u64::MAX, Duration::ZERO),
            (0, Duration::ZERO),
            (1 << 20, Duration::MAX),
            (u64::MAX, Duration::MAX),
            (0, Duration::MAX),
        ] {
            rates.learn(n_bytes, took);
            assert!(
                rates.latency.is_finite() && rates.latency >= 0.0,
                "{rates:?}"
            );
            let rate = rates.bytes_per_second;
            assert!(rate.is_finite() && rate > 0.0, "{rates:?}");
            rates.would_take(u64::MAX);
        }
        let nothing = FetchEstimate {
            n_tokens: 0,
            n_bytes: 0,
            rates,
            restore_per_token: f64::NAN,
            compute_per_token: f64::INFINITY,
        };
        assert!(matches!(nothing.choose(), FetchChoice::Compute { .. }));
        // A tier that was slow once is believed again after a while.
        for _ in 0..200 {
            rates.learn(0, Duration::from_millis(1));
            rates.learn(1 << 20, Duration::from_millis(3));
        }
        assert!(
            rates.would_take(1 << 20) < Duration::from_millis(6),
            "{rates:?}"
        );
    }
}
