//! Saving and restoring: through the bytes of a state, with the rows of the simulated backend.

use kv_backend::RowSpan;
use kv_backend::state::{Fingerprint, SavedState, StateToSave, save};
use kv_core::layers::LayerMap;
use kv_core::memory::{NoRoom, Refusal, Restoration, RestoreInto, Seqs, TargetRows};
use kv_core::{PartIdx, Pos, PosRange, SeqId, Window};
use kv_graph::weights::MemoryWeights;
use kv_graph::{GraphBuilder, GraphShape};
use proptest::prelude::*;

use super::batches::N_SEQS;
use super::world::{GARBAGE, Row, World};
use super::{MemoryUnderTest, PartView};

/// The device's ability to write rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    Works,
    /// At the last row.
    Fails,
}

/// The saved bytes, and the memory of then.
#[derive(Clone)]
pub(crate) struct SavedMemory {
    bytes: Vec<u8>,
    /// The bytes' description, without rows.
    pub(crate) snapshot: String,
    /// By part and number in the state.
    pub(crate) rows: Vec<(PartIdx, Vec<Row>)>,
    /// By number in the state: the tokens of a recurrent state.
    pub(crate) states: Vec<Vec<u64>>,
    pub(crate) model: Vec<Vec<(Pos, u64)>>,
    pub(crate) sources: Vec<Vec<(Pos, u64)>>,
}

fn fingerprint() -> Fingerprint {
    let shape = GraphShape {
        n_tokens: 1,
        n_outputs: 0,
    };
    let graph = GraphBuilder::new(shape).finish(&[]).unwrap();
    let layers = LayerMap::new(vec![]);
    Fingerprint::new("model", 1, &layers, &graph, &MemoryWeights::new())
}

impl<M: MemoryUnderTest> World<M> {
    pub(crate) fn save(&mut self, seqs: Seqs) {
        let snapshot = match self.memory.snapshot(seqs) {
            Ok(snapshot) => snapshot,
            Err(Refusal::Unsupported { .. }) => return,
            Err(refused) => panic!("{refused}"),
        };
        let state = StateToSave {
            fingerprint: &fingerprint(),
            snapshot: &snapshot,
            tokens: &[],
            layout: self.real.layout(),
            kv_type: None,
            state_type: None,
            note: "",
        };
        let mut bytes = Vec::new();
        let mut read = |span: RowSpan, out: &mut [u8]| self.real.read(span, out);
        save(&state, &mut read, &mut bytes).unwrap();
        let of_seqs = |tokens: &Vec<Vec<(Pos, u64)>>| {
            let all = (0u32..).map(SeqId).zip(tokens);
            let saved = all.map(|(seq, tokens)| match seqs {
                Seqs::One(one) if one != seq => Vec::new(),
                _ => tokens.clone(),
            });
            saved.collect()
        };
        let rows = snapshot.parts().iter().map(|part| {
            let rows = &self.rows[part.part.as_usize()];
            let own = part.cells.iter().map(|t| rows[t.row.as_usize()]);
            (part.part, own.collect())
        });
        let states = snapshot.state_rows();
        let states = states.iter().map(|row| self.states.get(*row).unwrap());
        self.saved = Some(SavedMemory {
            rows: rows.collect(),
            states: states.collect(),
            bytes,
            snapshot: format!("{snapshot:?}"),
            model: of_seqs(&self.model),
            sources: of_seqs(&self.sources),
        });
    }

    pub(crate) fn restore(&mut self, into: RestoreInto, device: Device) {
        let Some(saved) = self.saved.take() else {
            return;
        };
        let state = SavedState::parse(&saved.bytes).unwrap();
        let before = self.memory.clone();
        let check = self.memory.check_restore(state.snapshot(), into);
        let restored = self.memory.restore(state.snapshot(), into);
        assert_eq!(restored.as_ref().err(), check.as_ref().err());
        match restored {
            Ok(restored) => {
                self.write_rows(&saved, &state, &restored);
                if restored.rows_taken == TargetRows::Free {
                    // What was there before is as good as it was, also when writing fails.
                    let after = std::mem::replace(&mut self.memory, before);
                    self.check();
                    match device {
                        Device::Fails => self.spoil_rows(&restored),
                        Device::Works => self.memory = after,
                    }
                } else if device == Device::Fails {
                    self.spoil_rows(&restored);
                    self.forget(into);
                }
                if device == Device::Works {
                    self.restore_model(&saved, into);
                }
            }
            Err(refused) => {
                assert_eq!(self.memory, before);
                self.check_restore_refusal(&saved, into, refused);
            }
        }
        self.saved = Some(saved);
    }

    fn write_rows(&mut self, saved: &SavedMemory, state: &SavedState<'_>, restored: &Restoration) {
        let layout = self.real.layout().clone();
        state.check_rows(&layout).unwrap();
        let mut write = |span: RowSpan, bytes: &[u8]| self.real.write(span, bytes);
        state.write_rows(restored, &layout, &mut write).unwrap();
        for write in &restored.row_writes {
            let (_, from) = saved
                .rows
                .iter()
                .find(|(part, _)| *part == write.part)
                .unwrap();
            let from = &from[write.from.as_usize()..][..write.len as usize];
            let to = write.to.as_usize()..write.to.as_usize() + from.len();
            self.rows[write.part.as_usize()][to].copy_from_slice(from);
        }
        for write in &restored.state_writes {
            let state = saved.states[write.from.as_usize()].clone();
            self.states.set(write.to, Some(state));
        }
    }

    fn spoil_rows(&mut self, restored: &Restoration) {
        for write in &restored.row_writes {
            let (first, len) = (write.to.as_usize(), write.len as usize);
            self.rows[write.part.as_usize()][first..first + len].fill(GARBAGE);
            let cells: Vec<_> = (0..write.len).map(|i| write.to.offset(i)).collect();
            self.real.destroy(write.part, &cells);
        }
        for write in &restored.state_writes {
            self.states.set(write.to, None);
        }
    }

    fn forget(&mut self, into: RestoreInto) {
        match into {
            RestoreInto::All => {
                self.memory.clear();
                (0..N_SEQS).for_each(|seq| self.forget_model(SeqId(seq)));
            }
            RestoreInto::One { to, .. } | RestoreInto::Behind { to, .. } => {
                self.memory.remove(Seqs::One(to), PosRange::ALL).unwrap();
                self.forget_model(to);
            }
        }
    }

    fn restore_model(&mut self, saved: &SavedMemory, into: RestoreInto) {
        match into {
            RestoreInto::All => {
                self.model.clone_from(&saved.model);
                self.sources.clone_from(&saved.sources);
            }
            RestoreInto::One { from, to } => {
                let (from, to) = (from.as_usize(), to.as_usize());
                self.model[to].clone_from(&saved.model[from]);
                self.sources[to].clone_from(&saved.sources[from]);
            }
            RestoreInto::Behind { from, to } => {
                let added = &saved.model[from.as_usize()];
                self.model[to.as_usize()].extend_from_slice(added);
            }
        }
    }

    fn check_restore_refusal(&self, saved: &SavedMemory, into: RestoreInto, refused: Refusal) {
        match (refused.clone(), into) {
            (
                Refusal::NotSaved { seq, .. },
                RestoreInto::One { from, .. } | RestoreInto::Behind { from, .. },
            ) => {
                assert_eq!(seq, from);
                assert!(saved.model[from.as_usize()].is_empty());
                assert!(saved.sources[from.as_usize()].is_empty());
            }
            (
                Refusal::NoRoom(NoRoom {
                    part,
                    window,
                    n_wanted,
                    n_free,
                    n_cells,
                    ..
                }),
                _,
            ) => {
                assert!(n_wanted > n_free && n_free <= n_cells, "{refused}");
                assert_eq!(self.config(part).window, window);
                assert_ne!(into, RestoreInto::All, "it all fitted before");
            }
            (Refusal::NotBehind { next, first, .. }, RestoreInto::Behind { from, to }) => {
                let [has, saved] = [&self.model[to.as_usize()], &saved.model[from.as_usize()]];
                assert_eq!(next, has.last().map_or(Pos(0), |(pos, _)| pos.next()));
                assert_eq!(Some(first), saved.first().map(|(pos, _)| *pos));
                assert_ne!(first, next);
            }
            // Only full attention has ranges.
            (Refusal::Unsupported { .. }, RestoreInto::Behind { .. }) => {
                let parts = self.memory.parts();
                let is_full = |part: &PartView| part.config().window == Window::Full;
                let has_others =
                    self.memory.recurrent().is_some() || self.memory.source().is_some();
                assert!(has_others || !parts.iter().all(is_full), "{refused}");
            }
            (other, _) => panic!("{other}"),
        }
    }
}

/// A restoration of all sequences, of any one into any other, or behind any other.
pub(crate) fn restore_into() -> impl Strategy<Value = RestoreInto> {
    let seq = || (0..N_SEQS).prop_map(SeqId);
    prop_oneof![
        1 => Just(RestoreInto::All),
        3 => (seq(), seq()).prop_map(|(from, to)| RestoreInto::One { from, to }),
        1 => (seq(), seq()).prop_map(|(from, to)| RestoreInto::Behind { from, to }),
    ]
}
