//! [`Pace`]: how many prefill tokens a step with decode rows may have, so that it takes about as
//! long as [`SchedulerConfig::step_time`](crate::SchedulerConfig::step_time).
//!
//! Learns from steps that were measured: the time of a step of decode rows alone, by how many they
//! are, and what a token of a prompt adds, by its position (attention over the depth makes later
//! ones slower). A step that is slower than expected corrects the estimate at once, a faster one by
//! half, so a disturbed step is forgotten within a few.
//!
//! Where decode rows leave prompts little of the time, a step takes longer, within a limit: each
//! request in its prompt then gets as much of the machine as each request that decodes.
//!
//! Invariant: knows times only as they are reported. Decides nothing else.

use crate::data::active::ActiveRequest;
use crate::data::ids::Micros;
use crate::data::step::Feed;

/// The smallest chunk of a prompt that the first request is given while others could make room.
pub(crate) const MIN_CHUNK: usize = 16;

/// Positions below this cost the same; above, each doubling has a rate of its own.
const SHALLOW: usize = 256;
const N_DEPTHS: usize = 24;
/// A chunk before anything was measured.
const FIRST_CHUNK: usize = 64;
/// The part of a step's time that prompts get, however long texts take: they always go on.
const LEAST_SHARE: f64 = 0.25;
/// Prompts get no more than so many times a step's time because many of them wait.
const MOST_SHARE: f64 = 2.0;
const N_TEXTS: usize = 16;
/// Twice as many decode rows, not measured, take so much longer.
const MORE_TEXTS: f64 = 1.25;
/// A depth that was not measured costs so much more a token than half of it.
const DEEPER: f64 = 1.5;

/// The times that were learned, and the step whose time is expected.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pace {
    /// Microseconds of a step of texts alone, by the doublings of their number.
    decode: [Option<f64>; N_TEXTS],
    /// Microseconds of a token of a prompt, by [`depth_of`] its position.
    prefill: [Option<f64>; N_DEPTHS],
    planned: Option<TimedStep>,
}

/// The texts and chunks of a step.
#[derive(Clone, Debug)]
struct TimedStep {
    n_texts: usize,
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

/// The index in [`Pace::decode`] of so many texts, at least one.
fn decode_of(n_texts: usize) -> usize {
    let n_doublings = n_texts.next_power_of_two().ilog2();
    (n_doublings as usize).min(N_TEXTS - 1)
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
        self.planned = Some(TimedStep {
            n_texts: feeds.iter().filter(|feed| is_text(feed)).count(),
            chunks: chunks.collect(),
        });
    }

    /// A step whose time says nothing.
    pub(crate) fn forget_step(&mut self) {
        self.planned = None;
    }

    /// Learns how long the last step took.
    pub(crate) fn learn(&mut self, took: Micros) {
        let Some(TimedStep { n_texts, chunks }) = self.planned.take() else {
            return;
        };
        let took = took.0 as f64;
        if chunks.is_empty() {
            let decode = &mut self.decode[decode_of(n_texts)];
            *decode = Some(follow(*decode, took));
            return;
        }
        let prompts = (took - self.texts(n_texts)).max(took / 8.0);
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

    /// Number of tokens of these prompts that fit in a step of `time` with `n_texts` texts: at
    /// least a small chunk, at most `most`.
    pub(crate) fn n_prefill<'a>(
        &self,
        time: Micros,
        n_texts: usize,
        most: usize,
        prompts: impl Iterator<Item = &'a ActiveRequest> + Clone,
    ) -> usize {
        let mut left = self.left(time, n_texts, prompts.clone().count());
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

    /// The time for prompts in a step of about `time`.
    fn left(&self, time: Micros, n_texts: usize, n_prompts: usize) -> f64 {
        let time = time.0 as f64;
        let texts = self.texts(n_texts);
        let equal = texts * n_prompts as f64 / n_texts.max(1) as f64;
        let shared = equal.clamp(time * LEAST_SHARE, time * MOST_SHARE);
        (time - texts).max(shared)
    }

    /// The time of a step of so many texts, from the nearest number that was measured; nothing
    /// before any was.
    fn texts(&self, n_texts: usize) -> f64 {
        if n_texts == 0 {
            return 0.0;
        }
        let at = decode_of(n_texts);
        nearest(&self.decode, at, MORE_TEXTS).unwrap_or(0.0)
    }

    /// The time of a token at this depth, from the nearest depth that was measured.
    fn rate(&self, depth: usize) -> Option<f64> {
        nearest(&self.prefill, depth, DEEPER)
    }
}

/// The value at `at`, or else the nearest below it times `factor` for each step up, or else the
/// nearest above.
fn nearest(measured: &[Option<f64>], at: usize, factor: f64) -> Option<f64> {
    let below = (0..=at).rev().find_map(|below| {
        let n_steps = i32::try_from(at - below).unwrap_or(i32::MAX);
        Some(measured[below]? * factor.powi(n_steps))
    });
    let above = || measured[at..].iter().find_map(|value| *value);
    below.or_else(above)
}

/// Follows what is slower at once, what is faster by half.
fn follow(before: Option<f64>, measured: f64) -> f64 {
    match before {
        Some(before) if measured < before => (before + measured) / 2.0,
        _ => measured,
    }
}

#[cfg(test)]
mod tests {
    use kv_core::batch::Output;
    use kv_core::{Pos, SeqId, TokenId};

    use super::*;
    use crate::data::ids::RequestId;
    use crate::data::request::PromptRows;

    fn feed(first: u32, n_tokens: usize, n_draft: usize) -> Feed {
        Feed {
            request: RequestId(0),
            seq: SeqId(0),
            first: Pos(first),
            tokens: vec![TokenId(0); n_tokens],
            n_draft,
            output: Output::Wanted,
            prompt_rows: PromptRows::Last,
            together: Vec::new(),
            texts: Vec::new(),
        }
    }

    /// After steps with these feeds and times.
    fn learned(steps: &[(&[Feed], u64)]) -> Pace {
        let mut pace = Pace::default();
        for (feeds, took) in steps {
            pace.begin(feeds);
            pace.learn(Micros(*took));
        }
        pace
    }

    #[test]
    fn depths_and_numbers_of_texts_double() {
        let depths = [0, 255, 256, 511, 512, 1024, usize::MAX].map(depth_of);
        assert_eq!(depths, [0, 0, 1, 1, 2, 3, N_DEPTHS - 1]);
        let texts = [1, 2, 3, 4, 5, 1 << 20].map(decode_of);
        assert_eq!(texts, [0, 1, 2, 2, 3, N_TEXTS - 1]);
    }

    #[test]
    fn what_was_not_measured_follows_from_the_nearest() {
        let measured = [None, Some(2.0), None, None, Some(9.0), None];
        let values = [0, 1, 2, 3, 4, 5].map(|at| nearest(&measured, at, 1.5));
        assert_eq!(values, [2.0, 2.0, 3.0, 4.5, 9.0, 13.5].map(Some));
        assert_eq!(nearest(&[None, None], 1, 1.5), None);
    }

    #[test]
    fn slower_counts_at_once_and_faster_by_half() {
        let after = [5.0, 4.0, 2.0].map(|measured| follow(Some(4.0), measured));
        assert_eq!((after, follow(None, 2.0)), ([5.0, 4.0, 3.0], 2.0));
    }

    #[test]
    fn a_step_of_texts_alone_is_their_time() {
        // Drafted tokens make no prompt.
        let texts = [feed(7, 1, 0), feed(9, 4, 3)];
        let mut pace = learned(&[(&texts, 1000)]);
        assert_eq!((pace.texts(0), pace.texts(2)), (0.0, 1000.0));
        assert_eq!((pace.texts(1), pace.texts(4)), (1000.0, 1250.0));
        assert_eq!(pace.rate(0), None);
        pace.learn(Micros(9000));
        pace.begin(&texts);
        pace.forget_step();
        pace.learn(Micros(9000));
        assert_eq!(pace.texts(2), 1000.0, "no step was measured");
    }

    #[test]
    fn what_texts_do_not_take_is_of_prompts_at_their_depths() {
        let text: &[Feed] = &[feed(7, 1, 0)];
        let both: &[Feed] = &[feed(7, 1, 0), feed(0, 10, 0)];
        let rate = |more: &[(&[Feed], u64)]| {
            let steps = [&[(text, 1000), (both, 3000)], more].concat();
            learned(&steps).rate(0)
        };
        assert_eq!(rate(&[]), Some(200.0));
        assert_eq!(rate(&[(both, 4000)]), Some(300.0));
        assert_eq!(rate(&[(both, 2000)]), Some(150.0));
        // A rate changes by 8 at most.
        assert_eq!(rate(&[(both, 800)]), Some((200.0 + 25.0) / 2.0));
        assert_eq!(rate(&[(both, 100_000)]), Some(1600.0));
        // At least an eighth of the step is the prompt's.
        let fast = learned(&[(text, 1000), (both, 1200), (both, 1040)]);
        assert_eq!(fast.rate(0), Some((20.0 + 13.0) / 2.0));
        // The middle of a chunk counts.
        let deep = learned(&[(&[feed(240, 40, 0)], 1000)]);
        assert_eq!((deep.prefill[0], deep.prefill[1]), (None, Some(25.0)));
        assert!(learned(&[(&[feed(100, 200, 0)], 1000)]).prefill[0].is_some());
        // A known depth keeps its part of a step.
        let two = learned(&[
            (&[feed(0, 10, 0)], 1000),
            (&[feed(0, 10, 0), feed(256, 10, 0)], 2500),
        ]);
        assert_eq!((two.rate(0), two.rate(1)), (Some(100.0), Some(150.0)));
    }

    #[test]
    fn tokens_that_take_no_time_are_learned_from() {
        let two: &[Feed] = &[feed(0, 2, 0)];
        assert_eq!(learned(&[(two, 1)]).rate(0), Some(0.5));
        assert_eq!(learned(&[(two, 0)]).rate(0), Some(1e-3));
        assert_eq!(learned(&[(two, 0), (two, 1)]).rate(0), Some(8e-3));
    }

    #[test]
    fn prompts_get_what_is_left_or_their_share() {
        let left = |took: u64, n_texts: usize, n_prompts: usize| {
            let texts = vec![feed(7, 1, 0); n_texts];
            learned(&[(&texts, took)]).left(Micros(1000), n_texts, n_prompts)
        };
        assert_eq!(left(100, 1, 1), 900.0);
        assert_eq!(left(800, 1, 1), 800.0);
        assert_eq!(left(800, 2, 1), 400.0);
        assert_eq!(left(800, 4, 1), 250.0);
        assert_eq!(left(800, 2, 3), 1200.0);
        assert_eq!(left(5000, 1, 1), 2000.0);
        assert_eq!(Pace::default().left(Micros(1000), 1, 1), 1000.0);
    }
}
