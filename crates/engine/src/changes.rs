//! [`Changes`]: how often each sequence was changed, so that a text notices what others do to its
//! own.
//!
//! Invariant: whatever changes what the next token of a sequence sees counts. Knows no texts.

use kv_core::SeqId;
use kv_core::memory::{Edit, Seqs};

/// The number of changes of each sequence of an engine.
#[derive(Clone, Debug, Default)]
pub(crate) struct Changes(Vec<u64>);

impl Changes {
    pub(crate) fn new(n_seqs: u32) -> Self {
        Self(vec![0; n_seqs as usize])
    }

    /// The count of a sequence; 0 where there is no such.
    pub(crate) fn of(&self, seq: SeqId) -> u64 {
        self.0.get(seq.as_usize()).copied().unwrap_or(0)
    }

    pub(crate) fn count(&mut self, seq: SeqId) {
        if let Some(n) = self.0.get_mut(seq.as_usize()) {
            *n += 1;
        }
    }

    pub(crate) fn count_all(&mut self) {
        self.0.iter_mut().for_each(|n| *n += 1);
    }

    /// Counts the sequences that an edit changes. A compaction changes none: tokens see the same.
    pub(crate) fn count_edit(&mut self, edit: Edit) {
        match edit {
            Edit::Remove {
                seqs: Seqs::One(seq),
                ..
            }
            | Edit::Copy { to: seq, .. }
            | Edit::Reposition { seq, .. } => self.count(seq),
            Edit::KeepOnly(seq) => {
                let n = self.of(seq);
                self.count_all();
                if let Some(kept) = self.0.get_mut(seq.as_usize()) {
                    *kept = n;
                }
            }
            Edit::Compact => {}
            // Removals from all, and edits of which nothing is known here.
            _ => self.count_all(),
        }
    }
}
