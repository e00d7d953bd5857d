//! Where the time of a phase went: what each kind of steps took, and what was outside of all steps.
//! Knows no backend: a [`kv_backend::Profile`] did the measuring.

use std::io::Write;
use std::time::Duration;

use cellar_engine::Pace;
use kv_backend::{StepKind, StepTime};
use serde::Serialize;

/// What was measured of a phase: its tokens and time, and what the backend profiled meanwhile.
#[derive(Clone, Debug, Default)]
pub(super) struct Measured {
    pub(super) pace: Pace,
    pub(super) steps: Vec<(StepKind, StepTime)>,
}

impl Measured {
    /// Adds what was measured of the same phase again.
    pub(super) fn add(&mut self, other: Self) {
        self.pace.add(other.pace.n_tokens, other.pace.time);
        for (kind, time) in other.steps {
            match self.steps.iter_mut().find(|(k, _)| *k == kind) {
                Some((_, sum)) => {
                    sum.time += time.time;
                    sum.weight_bytes += time.weight_bytes;
                }
                None => self.steps.push((kind, time)),
            }
        }
    }

    /// What each kind took, the most first, and what is left of the time; nothing where no steps
    /// were profiled.
    pub(super) fn report(&self) -> Option<Vec<KindReport>> {
        if self.steps.is_empty() {
            return None;
        }
        let inside: Duration = self.steps.iter().map(|(_, t)| t.time).sum();
        let outside = StepTime {
            time: self.pace.time.saturating_sub(inside),
            weight_bytes: 0,
        };
        let kinds = self.steps.iter().map(|(kind, t)| (kind.to_string(), *t));
        let mut all: Vec<_> = kinds
            .chain([("outside".to_owned(), outside)])
            .map(|(kind, time)| self.kind(kind, time))
            .collect();
        all.sort_by(|a, b| b.share.total_cmp(&a.share));
        Some(all)
    }

    fn kind(&self, kind: String, StepTime { time, weight_bytes }: StepTime) -> KindReport {
        let seconds = time.as_secs_f64();
        KindReport {
            kind,
            us_per_token: seconds * 1e6 / self.pace.n_tokens.max(1) as f64,
            share: seconds / self.pace.time.as_secs_f64().max(f64::MIN_POSITIVE),
            weight_gb_per_second: (weight_bytes > 0 && !time.is_zero())
                .then(|| weight_bytes as f64 / 1e9 / seconds),
        }
    }
}

/// One kind of steps, or `outside` of all.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct KindReport {
    kind: String,
    us_per_token: f64,
    /// Of the whole time of the phase.
    share: f64,
    /// How fast matrices were read, where a kind has any.
    #[serde(skip_serializing_if = "Option::is_none")]
    weight_gb_per_second: Option<f64>,
}

/// A line for each kind.
pub(super) fn print(
    phase: &str,
    kinds: &[KindReport],
    out: &mut impl Write,
) -> std::io::Result<()> {
    writeln!(out, "{phase}, µs a token:")?;
    for report in kinds {
        let KindReport { kind, share, .. } = report;
        let (time, share) = (report.us_per_token, share * 100.0);
        write!(out, "  {kind:11} {time:10.1}  {share:5.1} %")?;
        match report.weight_gb_per_second {
            Some(speed) => writeln!(out, "  {speed:.1} GB/s of weights")?,
            None => writeln!(out)?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn time(milliseconds: u64, weight_bytes: u64) -> StepTime {
        StepTime {
            time: Duration::from_millis(milliseconds),
            weight_bytes,
        }
    }

    fn measured(n_tokens: usize, milliseconds: u64, steps: &[(StepKind, StepTime)]) -> Measured {
        let time = Duration::from_millis(milliseconds);
        let pace = Pace { n_tokens, time };
        let steps = steps.to_vec();
        Measured { pace, steps }
    }

    #[test]
    fn kinds_and_the_rest_are_all_of_the_time() {
        let mut all = Measured::default();
        assert_eq!(all.report(), None);
        all.add(measured(1, 10, &[(StepKind::Attention, time(2, 0))]));
        let second = [
            (StepKind::Matmul, time(5, 10_000_000)),
            (StepKind::Attention, time(1, 0)),
        ];
        all.add(measured(3, 10, &second));
        let kind = |kind: &str, us_per_token, share, weight_gb_per_second| KindReport {
            kind: kind.to_owned(),
            us_per_token,
            share,
            weight_gb_per_second,
        };
        let expected = vec![
            kind("outside", 3000.0, 0.6, None),
            kind("matmul", 1250.0, 0.25, Some(2.0)),
            kind("attention", 750.0, 0.15, None),
        ];
        assert_eq!(all.report(), Some(expected));
    }
}
