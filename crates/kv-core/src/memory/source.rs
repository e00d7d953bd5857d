//! Sources: what a model with an encoder attends over in addition to a sequence's own tokens.
//!
//! The part of layers with [`Window::Source`] holds them. A sequence gets its source once, whole,
//! in a batch of its own, before its own tokens; the rows are computed then and never again. Copies
//! of the sequence share them, shifts of its tokens leave them, and the removal of all its
//! positions frees them. Invariant: tokens of a sequence never attend over two sources.

use super::Memory as _;
use super::composite::{Composite, CompositeSlot};
use super::edit::Edit;
use super::plan::{Plan, PlannedUBatch};
use super::refusal::Refusal;
use super::unified::Unified;
use crate::batch::{TokensOf, UBatch};
use crate::ids::SeqId;
use crate::window::{PosRange, Window};

/// True if a part holds sources.
pub(super) fn is_source(part: &Unified) -> bool {
    part.config().window == Window::Source
}

/// True if a ubatch's tokens are those of sources.
pub(super) fn is_of_source(ubatch: &UBatch) -> bool {
    ubatch.tokens_of == TokensOf::Source
}

/// The edit of the sources that goes with an edit of sequences, if any.
pub(super) fn edit_of_source(edit: Edit) -> Option<Edit> {
    match edit {
        Edit::Remove { range, .. } => (range == PosRange::ALL).then_some(edit),
        Edit::Copy { from, to, range } => (!range.is_empty()).then_some(Edit::Copy {
            from,
            to,
            range: PosRange::ALL,
        }),
        Edit::Reposition { .. } => None,
        Edit::KeepOnly(_) | Edit::Compact | Edit::Clear => Some(edit),
    }
}

impl Composite {
    /// Cells for tokens of sources.
    pub(super) fn find_source_slots(
        &self,
        ubatches: Vec<UBatch>,
    ) -> Result<Plan<CompositeSlot>, Refusal> {
        let Some(source) = &self.source else {
            let mut seqs = ubatches.iter().flat_map(|ubatch| &ubatch.first_seqs);
            let seq = seqs.next().copied().unwrap_or_default();
            return Err(Refusal::TakesNoSources { seq });
        };
        let found = source.find_cells(&ubatches)?;
        let planned = ubatches.into_iter().zip(found);
        let planned = planned.map(|(ubatch, cells)| PlannedUBatch {
            ubatch,
            slot: CompositeSlot::of_source(cells),
        });
        Ok(planned.collect())
    }

    /// Checks that the sequences of all tokens have sources, those of one token the same.
    pub(super) fn check_sources(&self, ubatches: &[UBatch]) -> Result<(), Refusal> {
        let Some(source) = &self.source else {
            return Ok(());
        };
        for (seqs, &first) in ubatches
            .iter()
            .flat_map(|u| u.seqs.iter().zip(&u.first_seqs))
        {
            for seq in seqs {
                self.check_seq(seq)?;
                if source.positions(seq).is_none() {
                    return Err(Refusal::NoSource { seq });
                }
                self.check_same_source(first, seq)?;
            }
        }
        Ok(())
    }

    /// Checks that an edit may be done to the sources of its sequences.
    pub(super) fn check_source_edit(&self, edit: &Edit) -> Result<(), Refusal> {
        let (Some(source), Some(of_source)) = (&self.source, edit_of_source(*edit)) else {
            return Ok(());
        };
        if let Edit::Copy { from, to, range } = *edit
            && from != to
        {
            let mut kept = self.parts.iter().flat_map(|part| part.runs(to));
            let is_kept =
                kept.any(|run| !(range.contains(run.pos) && range.contains(run.last_pos())));
            if is_kept {
                self.check_same_source(from, to)?;
            }
        }
        source.check(&of_source)
    }

    /// Checks that two sequences share their source. Those in streams of their own never do.
    fn check_same_source(&self, seq: SeqId, other: SeqId) -> Result<(), Refusal> {
        let runs = |seq| self.source.as_ref().map(|source| source.runs(seq));
        if seq == other || runs(seq) == runs(other) {
            Ok(())
        } else {
            Err(Refusal::OtherSource { seq, other })
        }
    }
}
