//! Penalties on recent tokens: repetition, frequency and presence.
//!
//! Invariant: the counts are those of the last `last_n` accepted tokens. Memory is allocated once.

use std::collections::{HashMap, VecDeque};

use kv_core::TokenId;

use super::candidates::Candidates;
use super::config::Penalties;
use super::steps::{Step, TokenOrigin};

/// The last tokens of the text and their penalties.
#[derive(Clone, Debug)]
pub struct PenaltyStep {
    config: Penalties,
    recent: VecDeque<TokenId>,
    counts: HashMap<TokenId, u32>,
}

impl PenaltyStep {
    /// Penalties over an empty text.
    pub fn new(config: Penalties) -> Self {
        let recent = VecDeque::with_capacity(config.last_n);
        // Twice the capacity needed: a table that is at most half full rehashes in place.
        let counts = HashMap::with_capacity(2 * config.last_n + 2);
        Self {
            config,
            recent,
            counts,
        }
    }

    fn forget_oldest(&mut self) {
        let Some(oldest) = self.recent.pop_front() else {
            return;
        };
        if let Some(count) = self.counts.get_mut(&oldest) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&oldest);
            }
        }
    }
}

impl Step for PenaltyStep {
    fn apply(&mut self, candidates: &mut Candidates<'_>) {
        let Penalties {
            repeat,
            frequency,
            presence,
            ..
        } = self.config;
        for (&token, &count) in &self.counts {
            candidates.adjust(token, |logit| {
                let repeated = if logit > 0.0 {
                    logit / repeat
                } else {
                    logit * repeat
                };
                repeated - count as f32 * frequency - presence
            });
        }
    }

    fn accept(&mut self, token: TokenId, _origin: TokenOrigin) {
        if self.config.last_n == 0 {
            return;
        }
        if self.recent.len() == self.config.last_n {
            self.forget_oldest();
        }
        self.recent.push_back(token);
        *self.counts.entry(token).or_insert(0) += 1;
    }

    fn reset(&mut self) {
        self.recent.clear();
        self.counts.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampler::CandidateBuffers;

    fn penalised(config: Penalties, text: &[u32], logits: &[f32]) -> Vec<f32> {
        let mut step = PenaltyStep::new(config);
        text.iter()
            .for_each(|&t| step.accept(TokenId(t), TokenOrigin::Prompt));
        let mut buffers = CandidateBuffers::default();
        let mut candidates = Candidates::new(logits, &mut buffers).unwrap();
        step.apply(&mut candidates);
        candidates.iter().map(|c| c.logit).collect()
    }

    #[test]
    fn each_penalty_does_its_own_arithmetic() {
        let off = Penalties {
            last_n: 4,
            ..Penalties::default()
        };
        let logits = [4.0, -4.0, 2.0, 1.0];
        assert_eq!(penalised(off.clone(), &[0, 1], &logits), logits);
        let repeat = Penalties {
            repeat: 2.0,
            ..off.clone()
        };
        assert_eq!(
            penalised(repeat, &[0, 0, 1], &logits),
            [2.0, -8.0, 2.0, 1.0]
        );
        let frequency = Penalties {
            frequency: 0.5,
            ..off.clone()
        };
        assert_eq!(
            penalised(frequency, &[0, 0, 3], &logits),
            [3.0, -4.0, 2.0, 0.5]
        );
        let presence = Penalties {
            presence: 1.5,
            ..off.clone()
        };
        assert_eq!(
            penalised(presence, &[0, 0, 3], &logits),
            [2.5, -4.0, 2.0, -0.5]
        );
        let all = Penalties {
            last_n: 4,
            repeat: 2.0,
            frequency: 0.5,
            presence: 1.0,
        };
        assert_eq!(penalised(all, &[0, 0], &logits), [0.0, -4.0, 2.0, 1.0]);
    }

    #[test]
    fn small_positive_logits_are_divided() {
        let config = Penalties {
            repeat: 2.0,
            ..Penalties::default()
        };
        assert_eq!(penalised(config, &[0], &[0.5]), [0.25]);
    }

    #[test]
    fn windows_of_any_size_count_each_of_their_tokens() {
        let presence = |last_n, text: &[u32]| {
            let config = Penalties {
                last_n,
                presence: 1.0,
                ..Penalties::default()
            };
            penalised(config, text, &[5.0; 3])
        };
        assert_eq!(presence(0, &[0]), [5.0, 5.0, 5.0]);
        assert_eq!(presence(1, &[1, 0]), [4.0, 5.0, 5.0]);
        // One of two equal tokens has left the window.
        assert_eq!(presence(3, &[0, 0, 1, 2]), [4.0, 4.0, 4.0]);
    }

    #[test]
    fn a_text_begins_with_an_empty_window() {
        let mut step = PenaltyStep::new(Penalties {
            last_n: 3,
            presence: 1.0,
            ..Penalties::default()
        });
        let accept_all = |step: &mut PenaltyStep, text: [u32; 3]| {
            for token in text {
                step.accept(TokenId(token), TokenOrigin::Generated);
            }
        };
        accept_all(&mut step, [0, 1, 2]);
        step.reset();
        accept_all(&mut step, [2, 3, 4]);
        let mut counted: Vec<u32> = step.counts.keys().map(|t| t.0).collect();
        counted.sort_unstable();
        assert_eq!(counted, [2, 3, 4]);
    }

    #[test]
    fn only_the_window_counts_and_strange_ids_do_not() {
        let config = Penalties {
            last_n: 2,
            presence: 1.0,
            ..Penalties::default()
        };
        assert_eq!(
            penalised(config, &[0, 1, 2, 99], &[5.0; 4]),
            [5.0, 5.0, 4.0, 5.0]
        );
    }

    #[test]
    fn a_text_much_longer_than_the_window_takes_no_more_memory() {
        let mut step = PenaltyStep::new(Penalties {
            last_n: 64,
            ..Penalties::default()
        });
        let room = (step.recent.capacity(), step.counts.capacity());
        (0..10_000).for_each(|t| step.accept(TokenId(t * 7919 % 1021), TokenOrigin::Prompt));
        // A hash table counts slots of removed keys as used until it rehashes, at a random time.
        assert_eq!(step.recent.capacity(), room.0);
        assert!(
            step.counts.capacity() <= room.1,
            "{}",
            step.counts.capacity()
        );
        assert_eq!(step.counts.values().sum::<u32>(), 64);
    }
}
