//! [`Pace`]: how many prefill tokens a step with decode rows may have, so that it takes about as
//! long as [`SchedulerConfig::step_time`](crate::SchedulerConfig::step_time).
//!
//! Learns from steps that were measured: the time of a step without prompts, and what a token of a
//! prompt adds, by its position (attention over the depth makes later ones slower). What is slower
//! than expected counts at once, what is faster by half, so that a step that was disturbed is
//! forgotten within a few. Invariant: knows times only as they are reported. Decides nothing else.

use crate::compose::MIN_CHUNK;
use crate::event::Feed;
use crate::request::Micros;
use crate::state::Running;

/// Positions below this cost the same; above, each doubling has a rate of its own.
const SHALLOW: usize = 256;
const N_DEPTHS: usize = 24;
/// A chunk before anything was measured.
const FIRST_CHUNK: usize = 64;
/// The part of a step's time that prompts get, however long texts take: they always go on.
const LEAST_SHARE: f64 = 0.25;
/// A depth that was not measured costs so much more a token than half of it.
const DEEPER: f64 = 1.5;

/// What was learned, and the step whose time is expected.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pace {
    /// Microseconds of a step of texts alone.
    decode: Option<f64>,
    /// Microseconds of a token of a prompt, by [`depth_of`] its position.
    prefill: [Option<f64>; N_DEPTHS],
    planned: Option<PlannedStep>,
}

/// What a step was planned with.
#[derive(Clone, Debug)]
struct PlannedStep {
    has_texts: bool,
    chunks: Vec<Chunk>,
}

/// Tokens of a prompt in one step.
#[derive(Clone, Copy, Debug)]
struct Chunk {
    depth: usize,
    n_tokens: f64,
}

fn depth_of(position: usize) -> usize {
    let n_doublings = (position / SHALLOW).checked_ilog2().map_or(0, |n| n + 1);
    (n_doublings as usize).min(N_DEPTHS - 1)
}

impl Pace {
    /// Notes what is computed next.
    pub(crate) fn begin(&mut self, feeds: &[Feed]) {
        let is_text = |feed: &Feed| feed.tokens.len() - feed.n_draft == 1;
        let prompts = feeds.iter().filter(|feed| !is_text(feed));
        let chunks = prompts.map(|feed| Chunk {
            depth: depth_of(feed.first.as_usize() + feed.tokens.len() / 2),
            n_tokens: feed.tokens.len() as f64,
        });
        self.planned = Some(PlannedStep {
            has_texts: feeds.iter().any(is_text),
            chunks: chunks.collect(),
        });
    }

    /// A step whose time says nothing.
    pub(crate) fn forget_step(&mut self) {
        self.planned = None;
    }

    /// Learns how long the last step took.
    pub(crate) fn learn(&mut self, took: Micros) {
        let Some(PlannedStep { has_texts, chunks }) = self.planned.take() else {
            return;
        };
        let took = took.0 as f64;
        if chunks.is_empty() {
            self.decode = Some(follow(self.decode, took));
            return;
        }
        let texts = match has_texts {
            true => self.decode.unwrap_or(0.0),
            false => 0.0,
        };
        let prompts = (took - texts).max(took / 8.0);
        let n_tokens: f64 = chunks.iter().map(|chunk| chunk.n_tokens).sum();
        let mean = prompts / n_tokens;
        let rates = chunks.iter().map(|c| self.rate(c.depth).unwrap_or(mean));
        let rates: Vec<f64> = rates.collect();
        let expected = rates.iter().zip(&chunks).map(|(rate, c)| rate * c.n_tokens);
        let ratio = prompts / expected.sum::<f64>().max(1e-3);
        for (rate, chunk) in rates.into_iter().zip(chunks) {
            let measured = rate * ratio.clamp(0.125, 8.0);
            self.prefill[chunk.depth] = Some(follow(Some(rate), measured).max(1e-3));
        }
    }

    /// How many tokens of these prompts fit in a step of `time` with texts: at least a small chunk,
    /// at most `most`.
    pub(crate) fn n_prefill<'a>(
        &self,
        time: Micros,
        most: usize,
        prompts: impl Iterator<Item = &'a Running>,
    ) -> usize {
        let time = time.0 as f64;
        let mut left = (time - self.decode.unwrap_or(0.0)).max(time * LEAST_SHARE);
        let mut n = 0;
        for prompt in prompts {
            let Some(rate) = self.rate(depth_of(prompt.n_done)) else {
                return most.min(FIRST_CHUNK);
            };
            let fits = (left / rate) as usize;
            let taken = fits.min(prompt.n_left());
            n += taken;
            left -= taken as f64 * rate;
            if taken < prompt.n_left() || n >= most {
                break;
            }
        }
        n.max(MIN_CHUNK).min(most)
    }

    /// What a token at this depth takes, from the nearest depth that was measured.
    fn rate(&self, depth: usize) -> Option<f64> {
        let below = (0..=depth).rev().find_map(|d| {
            let n_doublings = i32::try_from(depth - d).unwrap_or(i32::MAX);
            Some(self.prefill[d]? * DEEPER.powi(n_doublings))
        });
        let above = || self.prefill[depth..].iter().find_map(|rate| *rate);
        below.or_else(above)
    }
}

/// Follows what is slower at once, what is faster by half.
fn follow(before: Option<f64>, measured: f64) -> f64 {
    match before {
        Some(before) if measured < before => (before + measured) / 2.0,
        _ => measured,
    }
}
