//! [`Arrivals`]: when requests of a load test come. Knows nothing of what they are.

use std::str::FromStr;
use std::time::Duration;

use serde::Serialize;

/// The largest rate, per second.
const MAX_RATE: f64 = 1e6;

/// When requests come, whatever became of those before: an open loop.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", tag = "process")]
pub(crate) enum Arrivals {
    /// All at once.
    AtOnce,
    /// At random, independent of each other: a Poisson process.
    Poisson {
        /// The mean.
        per_second: f64,
    },
    /// One after each such time.
    Fixed {
        /// The time between two, in seconds.
        seconds: f64,
    },
}

impl FromStr for Arrivals {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "inf" {
            return Ok(Self::AtOnce);
        }
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.');
        let (number, unit) = text.split_at(end.unwrap_or(text.len()));
        let number = number.parse::<f64>().ok();
        let arrivals = number.and_then(|n| match unit {
            "" | "/s" => Some(Self::Poisson { per_second: n }),
            "/min" | "/m" => Some(Self::Poisson {
                per_second: n / 60.0,
            }),
            "s" => Some(Self::Fixed { seconds: n }),
            "ms" => Some(Self::Fixed { seconds: n / 1e3 }),
            _ => None,
        });
        arrivals.filter(Self::is_in_range).ok_or_else(|| {
            format!(
                "a rate is needed, as in 2/s or 30/min (at random, up to {MAX_RATE:.0}/s), the time \
                 between two requests, as in 500ms or 2s, or inf for all at once"
            )
        })
    }
}

impl Arrivals {
    fn is_in_range(&self) -> bool {
        let (Self::Poisson { per_second: n } | Self::Fixed { seconds: n }) = *self else {
            return true;
        };
        (1.0 / MAX_RATE..=MAX_RATE).contains(&n)
    }

    /// The time from one request to the next. `uniform` is random, between 0 and 1.
    pub(crate) fn next_after(&self, uniform: f64) -> Duration {
        match *self {
            Self::AtOnce => Duration::ZERO,
            // Waiting times of a Poisson process are exponentially distributed.
            Self::Poisson { per_second } => {
                Duration::from_secs_f64(-(-uniform.clamp(0.0, 1.0 - 1e-12)).ln_1p() / per_second)
            }
            Self::Fixed { seconds } => Duration::from_secs_f64(seconds),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_and_intervals_have_units() {
        let poisson = |per_second| Ok(Arrivals::Poisson { per_second });
        let fixed = |seconds| Ok(Arrivals::Fixed { seconds });
        assert_eq!("2".parse(), poisson(2.0));
        assert_eq!("0.5/s".parse(), poisson(0.5));
        assert_eq!("30/min".parse(), poisson(0.5));
        assert_eq!("500ms".parse(), fixed(0.5));
        assert_eq!("2s".parse(), fixed(2.0));
        assert_eq!("inf".parse(), Ok(Arrivals::AtOnce));
        for wrong in [
            "",
            "0",
            "-1",
            "0s",
            "1e9",
            "2/h",
            "s",
            "/s",
            "1.2.3",
            "9999999/s",
            "nan",
        ] {
            assert!(wrong.parse::<Arrivals>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn intervals_of_a_poisson_process_are_exponential() {
        let arrivals = Arrivals::Poisson { per_second: 4.0 };
        let half = arrivals.next_after(0.5).as_secs_f64();
        assert!((half - 2f64.ln() / 4.0).abs() < 1e-9, "{half}");
        assert_eq!(arrivals.next_after(0.0), Duration::ZERO);
        assert!(arrivals.next_after(1.0) < Duration::from_secs(10));
    }
}
