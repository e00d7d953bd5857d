//! [`Timings`]: how long a generation took. Plain numbers; measures nothing itself.

use std::time::Duration;

/// Tokens and the time that they took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pace {
    /// Number of tokens evaluated.
    pub n_tokens: usize,
    /// The time for all of them.
    pub time: Duration,
}

impl Pace {
    /// Adds tokens and their time.
    pub fn add(&mut self, n_tokens: usize, time: Duration) {
        self.n_tokens += n_tokens;
        self.time += time;
    }

    /// Tokens per second; `None` where nothing was measured.
    pub fn tokens_per_second(self) -> Option<f64> {
        let measured = self.n_tokens > 0 && !self.time.is_zero();
        measured.then(|| self.n_tokens as f64 / self.time.as_secs_f64())
    }
}

/// How long one generation took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timings {
    /// Evaluating the prompt.
    pub prompt: Pace,
    /// Choosing tokens and evaluating those that were continued. The last token of a text is
    /// usually not evaluated any more, and does not count.
    pub generation: Pace,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_measured_has_no_pace() {
        let mut pace = Pace::default();
        assert_eq!(pace.tokens_per_second(), None);
        pace.add(3, Duration::from_millis(500));
        pace.add(1, Duration::from_millis(1500));
        assert_eq!(pace.tokens_per_second(), Some(2.0));
    }
}
