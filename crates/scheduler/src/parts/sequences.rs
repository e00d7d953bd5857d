//! [`Sequences`]: the sequences that no request has, and the edits that come before the next step.
//!
//! Invariant: a free sequence holds nothing, or will after the edits; one that is dropped is free
//! after the edits that remove its tokens.

use kv_core::memory::{Edit, Memory, Seqs};
use kv_core::{PosRange, SeqId};

/// The sequences that no request has.
#[derive(Clone, Debug)]
pub(crate) struct Sequences {
    /// Those that hold nothing; the last is given next.
    free: Vec<SeqId>,
    /// Those whose tokens are to be removed.
    dropped: Vec<SeqId>,
    /// Edits that come before the next step.
    edits: Vec<Edit>,
}

impl Sequences {
    /// All sequences of an empty memory.
    pub(crate) fn all_of<M: Memory>(memory: &M) -> Self {
        Self {
            free: (0..memory.n_seqs()).map(SeqId).rev().collect(),
            dropped: Vec::new(),
            edits: Vec::new(),
        }
    }

    /// The sequence that is given next.
    pub(crate) fn next(&self) -> Option<SeqId> {
        self.free.last().copied()
    }

    /// True if no sequence is free, now or after the edits.
    pub(crate) fn has_none(&self) -> bool {
        self.free.is_empty() && self.dropped.is_empty()
    }

    /// Gives a sequence away. Returns whether it was free.
    pub(crate) fn take(&mut self, seq: SeqId) -> bool {
        let n_before = self.free.len();
        self.free.retain(|&free| free != seq);
        self.free.len() < n_before
    }

    /// The tokens of a sequence are to be removed, and it is free then.
    pub(crate) fn drop_tokens(&mut self, seq: SeqId) {
        self.dropped.push(seq);
    }

    /// True if the tokens of a sequence are to be removed.
    pub(crate) fn is_dropped(&self, seq: SeqId) -> bool {
        self.dropped.contains(&seq)
    }

    /// Adds an edit that comes before the next step.
    pub(crate) fn edit(&mut self, edit: Edit) {
        self.edits.push(edit);
    }

    /// True if there are edits before the next step.
    pub(crate) fn has_edits(&self) -> bool {
        !self.edits.is_empty() || !self.dropped.is_empty()
    }

    /// The edits that come before the next step, if any: copies and cuts, then the removal of what
    /// was dropped.
    pub(crate) fn take_edits(&mut self) -> Option<Vec<Edit>> {
        let mut edits = std::mem::take(&mut self.edits);
        let dropped = std::mem::take(&mut self.dropped);
        let remove = |&seq: &SeqId| Edit::Remove {
            seqs: Seqs::One(seq),
            range: PosRange::ALL,
        };
        edits.extend(dropped.iter().map(remove));
        self.free.extend(dropped.iter().rev());
        (!edits.is_empty()).then_some(edits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::edits::cut;

    #[test]
    fn a_sequence_is_free_again_after_the_edit_that_empties_it() {
        let mut sequences = Sequences {
            free: vec![SeqId(1), SeqId(0)],
            dropped: Vec::new(),
            edits: Vec::new(),
        };
        assert_eq!(sequences.next(), Some(SeqId(0)));
        assert!(sequences.take(SeqId(0)) && !sequences.take(SeqId(0)));
        sequences.drop_tokens(SeqId(0));
        sequences.edit(cut(SeqId(7), 3));
        assert!(sequences.is_dropped(SeqId(0)));
        assert_eq!(sequences.next(), Some(SeqId(1)));
        let edits = sequences.take_edits().unwrap_or_default();
        let remove = Edit::Remove {
            seqs: Seqs::One(SeqId(0)),
            range: PosRange::ALL,
        };
        assert_eq!(edits, [cut(SeqId(7), 3), remove], "cuts come first");
        assert_eq!(sequences.next(), Some(SeqId(0)));
        assert_eq!(sequences.take_edits(), None);
    }
}
