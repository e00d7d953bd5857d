//! What `cellar bench` computes: sequences that take a prompt, and apart from it, tokens one by
//! one.
//!
//! Invariant: prompt and generation begin at the same depth. Knows nothing of reports.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cellar_engine::{Engine, EngineError, Pace};
use kv_backend::{BoxedBackend, Profile};
use kv_core::batch::Batch;
use kv_core::memory::Seqs;
use kv_core::{Pos, PosRange, SeqId, TokenId};
use serde::Serialize;

use super::profile::Measured;
use crate::args::BenchArgs;

/// Whose tokens are in the memory before the measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Depth {
    /// Each sequence has its own.
    Own,
    /// All sequences have the same, stored once.
    Shared,
}

/// The measurement, and the ids that it feeds.
pub(super) struct Load<'a> {
    args: &'a BenchArgs,
    /// Tokens of each sequence before the measurement.
    depth: u32,
    tokens: Tokens,
    /// What the backend adds its steps to, where it profiles.
    profile: Option<Arc<Profile>>,
}

impl<'a> Load<'a> {
    pub(super) fn new(args: &'a BenchArgs, profile: Option<Arc<Profile>>) -> Self {
        Self {
            args,
            depth: args.depth,
            tokens: Tokens::new(1),
            profile,
        }
    }

    pub(super) fn depth_tokens(&self) -> Depth {
        if self.args.share_depth {
            Depth::Shared
        } else {
            Depth::Own
        }
    }

    /// Cells that a sequence takes up that has a stream of its own.
    pub(super) fn cells_of_one(&self) -> u64 {
        u64::from(self.depth) + self.longest()
    }

    /// Cells that all sequences take up together.
    pub(super) fn cells_of_all(&self) -> u64 {
        let n_seqs = u64::from(self.args.seqs);
        let depths = match self.depth_tokens() {
            Depth::Own => n_seqs,
            Depth::Shared => 1,
        };
        depths * u64::from(self.depth) + n_seqs * self.longest()
    }

    fn longest(&self) -> u64 {
        self.args.prompt.max(self.args.predict).into()
    }

    /// A repetition from an empty memory, so that programs are compiled and weights have been read.
    pub(super) fn warm_up(&mut self, engine: &mut Engine<BoxedBackend>) -> anyhow::Result<()> {
        let depth = std::mem::take(&mut self.depth);
        self.repetition(engine)?;
        self.depth = depth;
        Ok(())
    }

    /// How fast a prompt and generation were.
    pub(super) fn repetition(
        &mut self,
        engine: &mut Engine<BoxedBackend>,
    ) -> anyhow::Result<[Measured; 2]> {
        let (n_prompt, n_predict) = (self.args.prompt, self.args.predict);
        let mut phases = [Measured::default(), Measured::default()];
        self.tokens.n_vocab = engine.settings().rules.n_vocab.max(1).into();
        self.sink(engine)?;
        if n_prompt > 0 {
            self.reset_profile();
            let time = self.feed(engine, self.args.seqs, n_prompt)?;
            phases[0] = self.measured(n_prompt, time);
            let above = PosRange::from(Pos(self.depth)..);
            // A recurrent state cannot go back so far: it is made again.
            if engine.remove(Seqs::All, above).is_err() {
                self.sink(engine)?;
            }
        }
        self.reset_profile();
        let started = Instant::now();
        for _ in 0..n_predict {
            let mut batch = Batch::new();
            for seq in (0..self.args.seqs).map(SeqId) {
                batch
                    .push_token(self.tokens.next())
                    .in_sequence(seq)
                    .with_output();
            }
            engine.decode(&batch)?;
        }
        phases[1] = self.measured(n_predict, started.elapsed());
        Ok(phases)
    }

    /// What was measured since the profile was reset, of so many tokens of each sequence.
    fn measured(&self, of_each: u32, time: Duration) -> Measured {
        let n_tokens = self.args.seqs as usize * of_each as usize;
        Measured {
            pace: Pace { n_tokens, time },
            steps: self.profile.as_ref().map_or_else(Vec::new, |p| p.take()),
        }
    }

    fn reset_profile(&self) {
        if let Some(profile) = &self.profile {
            profile.take();
        }
    }

    /// Forgets everything, and brings all sequences to the depth.
    fn sink(&mut self, engine: &mut Engine<BoxedBackend>) -> Result<(), EngineError> {
        engine.clear();
        let depth = self.depth;
        if self.depth_tokens() == Depth::Own {
            return self.feed(engine, self.args.seqs, depth).map(drop);
        }
        self.feed(engine, 1, depth)?;
        for seq in (1..self.args.seqs).map(SeqId) {
            engine.copy(SeqId(0), seq, PosRange::ALL)?;
        }
        Ok(())
    }

    /// Evaluates so many tokens of each of the first sequences, one sequence after the other, and
    /// wants the logits of the last of each.
    fn feed(
        &mut self,
        engine: &mut Engine<BoxedBackend>,
        n_seqs: u32,
        n_tokens: u32,
    ) -> Result<Duration, EngineError> {
        let n_batch = engine.settings().rules.n_batch as usize;
        let mut time = Duration::ZERO;
        let mut batch = Batch::new();
        let mut decode = |batch: &mut Batch| {
            let started = Instant::now();
            engine.decode(&std::mem::take(batch))?;
            time += started.elapsed();
            Ok::<_, EngineError>(())
        };
        for (seq, at) in (0..n_seqs).flat_map(|seq| (1..=n_tokens).map(move |at| (seq, at))) {
            let entry = batch.push_token(self.tokens.next()).in_sequence(SeqId(seq));
            if at == n_tokens {
                entry.with_output();
            }
            if batch.len() == n_batch {
                decode(&mut batch)?;
            }
        }
        if !batch.is_empty() {
            decode(&mut batch)?;
        }
        Ok(time)
    }
}

/// Ids that look nothing like each other.
#[derive(Clone, Debug)]
pub(super) struct Tokens {
    state: u64,
    n_vocab: u64,
}

impl Tokens {
    /// Ids of a vocabulary of so many.
    pub(super) fn new(n_vocab: u32) -> Self {
        Self {
            state: 1,
            n_vocab: n_vocab.max(1).into(),
        }
    }

    /// The next `n`.
    pub(super) fn take(&mut self, n: u32) -> Vec<TokenId> {
        (0..n).map(|_| self.next()).collect()
    }

    /// The next number of a 64-bit linear congruential generator (Knuth's MMIX), as a token.
    fn next(&mut self) -> TokenId {
        self.state = self
            .state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        TokenId(((self.state >> 33) % self.n_vocab) as u32)
    }
}
