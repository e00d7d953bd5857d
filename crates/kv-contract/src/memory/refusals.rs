//! Batches that a memory refuses: the reason must be one.

use kv_core::batch::{BatchError, TokensOf, ValidBatch, ValidEntry};
use kv_core::memory::{Refusal, Streams};
use kv_core::{CellIdx, SeqSet, StreamIdx, Window};

use super::world::{World, all_parts};
use super::{MemoryUnderTest, PartView};

impl<M: MemoryUnderTest> World<M> {
    /// Why a batch was refused is so.
    pub(crate) fn check_refusal(&self, batch: &ValidBatch, error: &Refusal) {
        match error {
            Refusal::NoRoom(no_room) => {
                let config = self.config(no_room.part);
                let parts = all_parts(&self.memory);
                let part = parts.iter().find(|p| *p.config() == config).unwrap();
                assert_eq!(no_room.n_cells, config.n_cells);
                assert!(
                    no_room.n_wanted > no_room.n_free + no_room.n_recyclable,
                    "{no_room}"
                );
                if matches!(config.window, Window::Full | Window::Source) {
                    let StreamIdx(stream) = no_room.stream;
                    let n_wanted = batch
                        .entries()
                        .iter()
                        .filter(|e| config.streams == Streams::Shared || e.first_seq.0 == stream);
                    let first = CellIdx(stream * config.n_cells);
                    let cells = (0..config.n_cells).map(|i| first.offset(i));
                    let n_free = cells.filter(|&c| part.cell(c).is_none()).count();
                    assert!(n_wanted.count() > n_free, "{no_room}");
                }
            }
            Refusal::WindowForgotten(forgotten) => {
                // Only an image goes on at a position that was there already.
                let first = batch
                    .entries()
                    .iter()
                    .find(|e| e.seqs.contains(forgotten.seq));
                let first = first.unwrap();
                assert!(first.grid.is_some() && Some(first.pos) == self.last(forgotten.seq));
                assert_eq!(forgotten.next, first.pos);
                self.check_forgotten(*forgotten);
            }
            Refusal::CoupledStreams { set, .. } => {
                let parts = self.memory.parts();
                let mut streams = parts.iter().map(|part| part.config().streams);
                let per_sequence = streams.any(|streams| streams == Streams::PerSequence);
                assert!(per_sequence && set.len() > 1);
            }
            Refusal::Split(BatchError::SequenceTooLong { set, n_tokens, .. }) => {
                let is_causal = |p: &PartView| p.config().causality.is_causal();
                // Tokens of a source see each other, too.
                let of_source = batch.tokens_of() == TokensOf::Source;
                assert!(of_source || !self.memory.parts().iter().any(is_causal));
                let family = batch.entries().iter().filter(|e| e.seqs.intersects(set));
                assert_eq!(family.count(), *n_tokens);
            }
            Refusal::CoupledStates { a, b, .. } => {
                let memory = self.memory.recurrent().unwrap();
                let current = |seq| memory.states(seq).last().map(|s| s.row);
                assert_ne!(current(*a), current(*b));
            }
            Refusal::TakesNoSources { seq } => {
                assert!(!self.memory.takes_sources());
                assert_eq!(batch.tokens_of(), TokensOf::Source);
                assert!(batch.entries().iter().any(|e| e.seqs.contains(*seq)));
            }
            Refusal::TakesNoImages { seq, pos, grid } => {
                assert!(!self.memory.takes_images());
                let is_it = |e: &&ValidEntry| e.pos == *pos && e.grid == Some(*grid);
                let entry = batch.entries().iter().find(is_it);
                assert_eq!(entry.map(|e| e.first_seq), Some(*seq));
            }
            Refusal::NoSource { seq } => {
                assert!(self.memory.takes_sources() && self.sources[seq.as_usize()].is_empty());
                assert!(batch.entries().iter().any(|e| e.seqs.contains(*seq)));
            }
            Refusal::OtherSource { seq, other } => {
                self.check_other_source(*seq, *other);
                let both = |set: &SeqSet| set.contains(*seq) && set.contains(*other);
                assert!(batch.entries().iter().any(|e| both(&e.seqs)));
            }
            Refusal::Custom(_) => {}
            other => panic!("{other}"),
        }
    }
}
