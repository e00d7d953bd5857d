//! Saving and restoring: through the bytes of a state, with the rows of the simulated backend.

use kv_core::backend::{RowKind, RowSpan};
use kv_core::graph::{GraphBuilder, GraphShape};
use kv_core::layers::{LayerMap, LayerRows, RowLayout, RowShape};
use kv_core::memory::{RestoreInto, RestoreRefused, Restored, RowsTaken, Seqs};
use kv_core::state::{Fingerprint, SavedState, StateToSave, save};
use kv_core::weights::MemoryWeights;
use kv_core::{KvType, LayerIdx, Pos, SeqId};

use crate::memories::Attention;
use crate::ops::N_SEQS;
use crate::world::{GARBAGE, Row, World};

/// Whether rows can be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    Works,
    /// At the last row.
    Fails,
}

/// What was saved, and what the model had then.
pub(crate) struct Saved {
    bytes: Vec<u8>,
    model: Vec<Vec<(Pos, u64)>>,
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

impl<M: Attention> World<M> {
    /// One layer for each part, with the number of the part; a row is a key of 16 bytes.
    fn layout(&self) -> RowLayout {
        let shape = |dim| RowShape {
            heads: 1,
            dim,
            kv_type: KvType::F32,
        };
        let rows = |part: &&kv_core::memory::Unified| LayerRows {
            layer: LayerIdx(part.config().part.0),
            part: part.config().part,
            n_rows: part.n_cells() as usize,
            k: shape(4),
            v: shape(0),
        };
        let layers: Vec<LayerRows> = self.memory.parts().iter().map(rows).collect();
        serde_json::from_value(serde_json::json!({ "layers": layers })).unwrap()
    }

    pub(crate) fn save(&mut self, seqs: Seqs) {
        let contents = self.memory.contents(seqs).unwrap();
        let state = StateToSave {
            fingerprint: &fingerprint(),
            contents: &contents,
            tokens: &[],
            layout: &self.layout(),
            kv_type: None,
        };
        let mut bytes = Vec::new();
        let mut read = |span: RowSpan, out: &mut [u8]| {
            let (first, len) = (span.first.as_usize(), span.len as usize);
            let rows = &self.rows[span.layer.as_usize()][first..first + len];
            out.copy_from_slice(&rows.iter().flat_map(to_bytes).collect::<Vec<u8>>());
            Ok(())
        };
        save(&state, &mut read, &mut bytes).unwrap();
        let mut model = self.model.clone();
        for (s, tokens) in (0u32..).map(SeqId).zip(&mut model) {
            if !matches!(seqs, Seqs::All) && seqs != Seqs::One(s) {
                tokens.clear();
            }
        }
        self.saved = Some(Saved { bytes, model });
    }

    pub(crate) fn restore(&mut self, into: RestoreInto, device: Device) {
        let Some(saved) = self.saved.take() else {
            return;
        };
        let state = SavedState::parse(&saved.bytes).unwrap();
        let before = self.memory.clone();
        let check = self.memory.check_restore(state.contents(), into);
        let restored = self.memory.restore(state.contents(), into);
        assert_eq!(restored.as_ref().err(), check.as_ref().err());
        match restored {
            Ok(restored) => {
                self.write_rows(&state, &restored);
                if restored.rows_taken == RowsTaken::Free {
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

    fn write_rows(&mut self, state: &SavedState<'_>, restored: &Restored) {
        let layout = self.layout();
        state.check_rows(&layout).unwrap();
        let mut write = |span: RowSpan, bytes: &[u8]| {
            assert_eq!(span.kind, RowKind::K);
            let (first, len) = (span.first.as_usize(), span.len as usize);
            let rows = &mut self.rows[span.layer.as_usize()][first..first + len];
            let values = bytes.as_chunks::<16>().0;
            assert_eq!(values.len(), len);
            for (row, bytes) in rows.iter_mut().zip(values) {
                *row = from_bytes(bytes);
            }
            Ok(())
        };
        state.write_rows(restored, &layout, &mut write).unwrap();
    }

    fn spoil_rows(&mut self, restored: &Restored) {
        for write in &restored.row_writes {
            let (first, len) = (write.to.as_usize(), write.len as usize);
            self.rows[write.part.as_usize()][first..first + len].fill(GARBAGE);
        }
    }

    fn forget(&mut self, into: RestoreInto) {
        match into {
            RestoreInto::All => {
                self.memory.clear();
                self.model.iter_mut().for_each(Vec::clear);
            }
            RestoreInto::One { to, .. } => {
                let all = kv_core::PosRange::ALL;
                self.memory.remove(Seqs::One(to), all).unwrap();
                self.model[to.as_usize()].clear();
            }
        }
    }

    fn restore_model(&mut self, saved: &Saved, into: RestoreInto) {
        match into {
            RestoreInto::All => self.model.clone_from(&saved.model),
            RestoreInto::One { from, to } => {
                self.model[to.as_usize()].clone_from(&saved.model[from.as_usize()]);
            }
        }
    }

    fn check_restore_refusal(&self, saved: &Saved, into: RestoreInto, refused: RestoreRefused) {
        match (refused, into) {
            (RestoreRefused::NotSaved { seq, .. }, RestoreInto::One { from, .. }) => {
                assert_eq!(seq, from);
                assert!(saved.model[from.as_usize()].is_empty());
            }
            (
                RestoreRefused::NoRoom {
                    part,
                    window,
                    n_wanted,
                    n_free,
                    n_cells,
                    ..
                },
                _,
            ) => {
                assert!(n_wanted > n_free && n_free <= n_cells, "{refused}");
                assert_eq!(self.config(part).window, window);
                assert_ne!(into, RestoreInto::All, "it all fitted before");
            }
            (other, _) => panic!("{other}"),
        }
    }
}

fn to_bytes(row: &Row) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&row.id.to_le_bytes());
    bytes[8..].copy_from_slice(&row.rotated_to.to_le_bytes());
    bytes
}

fn from_bytes(bytes: &[u8; 16]) -> Row {
    let [id, rotated_to] = [0, 8].map(|at| bytes[at..at + 8].try_into().unwrap());
    Row {
        id: u64::from_le_bytes(id),
        rotated_to: i64::from_le_bytes(rotated_to),
    }
}

/// A restoration of all sequences, or of any one into any other.
pub(crate) fn restore_into() -> impl proptest::strategy::Strategy<Value = RestoreInto> {
    use proptest::prelude::*;
    let seq = || (0..N_SEQS).prop_map(SeqId);
    prop_oneof![
        1 => Just(RestoreInto::All),
        3 => (seq(), seq()).prop_map(|(from, to)| RestoreInto::One { from, to }),
    ]
}
