//! Plans that are committed and undone.

use kv_core::SeqId;
use kv_core::memory::{MemoryInputs, Plan, RowsWritten};

use super::MemoryUnderTest;
use super::batches::N_SEQS;
use super::world::{World, check_parts, numbers_of};

impl<M: MemoryUnderTest> World<M> {
    /// Commits a plan on a copy and undoes it step by step: exactly, and then as if rows had been
    /// written, as far back as no window forbids.
    pub(crate) fn undo_exactly(&self, plan: &Plan<M::Slot>) {
        for rows in [RowsWritten::No, RowsWritten::Perhaps] {
            let mut memory = self.memory.clone();
            let mut done = Vec::new();
            let mut inputs = MemoryInputs::default();
            for planned in plan {
                let before = memory.clone();
                let undo = memory.commit(planned);
                check_parts(&memory);
                memory.inputs(planned, &mut inputs);
                for part in numbers_of(&memory, planned.ubatch.tokens_of) {
                    let mut cells = inputs.parts[part.as_usize()].cells.clone();
                    cells.sort_unstable();
                    cells.dedup();
                    assert_eq!(
                        cells.len(),
                        planned.ubatch.entries.len(),
                        "a cell was given twice"
                    );
                }
                done.push((before, undo));
            }
            let mut is_last = true;
            for (before, undo) in done.into_iter().rev() {
                let refused = memory.check_rollback(&undo, rows).is_err();
                assert!(!(refused && (is_last || rows == RowsWritten::No)));
                if refused && memory.recurrent().is_some() {
                    break; // or its state was stored over, which is not looked at here
                }
                if refused {
                    let mut sound = memory;
                    sound.rollback(undo, rows);
                    let broken = sound.check_bookkeeping();
                    assert!(broken.is_err(), "refused without a reason");
                    break;
                }
                memory.rollback(undo, rows);
                check_parts(&memory);
                match rows {
                    RowsWritten::No => assert_eq!(memory, before),
                    RowsWritten::Perhaps => {
                        for seq in (0..N_SEQS).map(SeqId) {
                            let end = |m: &M| m.positions(seq).map(|has| has.last);
                            assert_eq!(end(&memory), end(&before));
                            let source = |m: &M| m.source_positions(seq);
                            assert_eq!(source(&memory), source(&before));
                        }
                    }
                }
                is_last = false;
            }
        }
    }
}
