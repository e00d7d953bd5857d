//! Sources of sequences: what encoder-decoder models attend over.
//!
//! The oracle keeps the tokens of each sequence's source. Every token of a sequence sees its whole
//! source, and no other.

use kv_core::batch::{Batch, BatchError, TokensOf, ValidBatch, validate};
use kv_core::memory::{MemoryInputs, Streams};
use kv_core::{Pos, PosRange, SeqId, TokenId};

use super::batches::{RULES, batch};
use super::ops::Attempt;
use super::world::World;
use super::{MemoryUnderTest, PartView};

/// Gives a sequence a source of one token.
pub(crate) fn take<M: MemoryUnderTest>(memory: &mut M, seq: SeqId) {
    let source = Batch::source(seq, [TokenId(0)]);
    let valid = validate(&source, &RULES, |seq| memory.source_positions(seq)).unwrap();
    let mut steps = memory.begin(&valid, 1).unwrap();
    assert!(steps.next(&mut MemoryInputs::default()).is_some());
    let first = PosRange::new(Pos(0), Pos(0));
    assert_eq!(memory.source_positions(seq), Some(first));
    assert_eq!(memory.positions(seq), None);
}

impl<M: MemoryUnderTest> World<M> {
    /// Gives sequences their sources. One that has a source is not given another.
    pub(crate) fn sources(&mut self, entries: &[(u32, bool)], attempt: Attempt) {
        let Some(mut batch) = batch(entries, |_| None) else {
            return;
        };
        batch.set_tokens_of(TokensOf::Source);
        match validate(&batch, &RULES, |seq| self.memory.source_positions(seq)) {
            Ok(valid) => self.batch(&valid, attempt),
            Err(BatchError::HasSource { seq, .. }) => {
                assert_ne!(self.sources[seq.as_usize()], []);
            }
            // Sequences that cannot be together.
            Err(_) => {}
        }
    }

    /// Gives the sequences of a batch their sources, of `n_tokens` each, as far as they have none.
    /// Those that share tokens share a source where they can.
    pub(crate) fn give_sources(&mut self, entries: &[(u32, bool)], n_tokens: u32) {
        if !self.memory.takes_sources() {
            return;
        }
        let attempt = Attempt {
            n_ubatch: n_tokens,
            failure: None,
            n_source: 0,
        };
        for &(seqs, _) in entries {
            let has_source = |seq: usize| !self.sources[seq].is_empty();
            let without = (0..self.sources.len()).filter(|&seq| !has_source(seq));
            let seqs = seqs & without.map(|seq| 1 << seq).sum::<u32>();
            self.sources(&vec![(seqs, false); n_tokens as usize], attempt);
        }
    }

    /// The sequences of a token that was taken attend over the same source.
    pub(crate) fn check_sources_agree(&self, batch: &ValidBatch) {
        for entry in batch.entries() {
            let first = &self.sources[entry.first_seq.as_usize()];
            for seq in &entry.seqs {
                let other = &self.sources[seq.as_usize()];
                assert_eq!(first, other, "{} and {seq}", entry.first_seq);
            }
        }
    }

    /// A copy of any tokens brings the source, which both sequences share where they can.
    pub(crate) fn copy_source(&mut self, from: SeqId, to: SeqId, range: PosRange) {
        let Some(source) = self.memory.source() else {
            return;
        };
        if from == to || range.is_empty() {
            return;
        }
        let new = self.sources[from.as_usize()].clone();
        if new != self.sources[to.as_usize()] {
            for part in self.memory.parts() {
                let kept = part.held(to).into_iter().find(|t| !range.contains(t.1));
                assert_eq!(kept, None, "attends over the source of another sequence");
            }
        }
        self.sources[to.as_usize()] = new;
        if source.config().streams == Streams::Shared {
            assert_eq!(source.held(from), source.held(to), "a copy is not shared");
        }
    }

    /// Two sequences do not share their sources.
    pub(crate) fn check_other_source(&self, seq: SeqId, other: SeqId) {
        let source = self.memory.source().unwrap();
        assert_ne!(source.held(seq), source.held(other));
    }

    /// A sequence has its source, with keys that were not rotated since, and no tokens without one.
    pub(crate) fn check_source(&self, source: Option<&PartView>, seq: SeqId) {
        let wanted = &self.sources[seq.as_usize()];
        assert_eq!(source.is_some(), self.memory.takes_sources());
        let Some(source) = source else {
            assert_eq!(self.memory.source_positions(seq), None);
            return assert_eq!(*wanted, []);
        };
        let held = self.held(source.config().part, source.held(seq).into_iter());
        assert_eq!(held, *wanted, "the source of sequence {seq}");
        assert_eq!(self.memory.source_positions(seq), source.positions(seq));
        let n_tokens = self.model[seq.as_usize()].len();
        assert!(n_tokens == 0 || !wanted.is_empty(), "sequence {seq}");
    }
}
