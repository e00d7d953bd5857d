//! Saving and restoring what an [`Engine`] remembers.
//!
//! A restoration is all or nothing: bytes are checked whole, cells are found, and only then rows
//! are written, into unused cells as long as there are enough. The state says nothing of
//! samplers. Knows no files.

use std::io::Write;

use kv_backend::state::{
    Fingerprint, SavedState, SeqTokens, StateError, StateToSave, check_kv_type, check_state_type,
    save,
};
use kv_backend::{Backend, RowStorage};
use kv_core::{
    Pos, PosRange, SeqId,
    memory::{Edit, Memory, Restoration, RestoreInto, Seqs, Snapshot, TargetRows},
};
use kv_graph::Graph;
use kv_graph::weights::WeightSource;
use kv_rows::{KvType, RowLayout};
use model_core::architecture::Model;

use crate::decode::Engine;
use crate::error::{EngineError, Replaced};
use crate::guard::Forgetting;

/// What is saved, and how.
#[derive(Clone, Copy, Debug)]
pub struct SaveOptions<'a> {
    /// Of which sequences.
    pub seqs: Seqs,
    /// Their tokens, as far as the caller knows them: the engine keeps none.
    pub tokens: &'a [SeqTokens],
    /// How keys and values are saved; `None` as they are stored, to the bit.
    pub kv_type: Option<KvType>,
    /// How recurrent states are saved but for the inputs of convolutions; `None` as they are
    /// stored, to the bit.
    pub state_type: Option<KvType>,
}

/// What was restored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RestoredState {
    /// Tokens that sequences were given, in the part of the memory that holds most of them; a token
    /// of two sequences counts twice.
    pub n_tokens: u32,
    /// The tokens of the sequences, as they are called now.
    pub tokens: Vec<SeqTokens>,
}

/// The fingerprint of a model with this graph, and with these of what it is computed with besides:
/// its encoder, its head.
pub(crate) fn fingerprint_of<'g>(
    model: &dyn Model,
    n_vocab: u32,
    graph: &Graph,
    others: impl IntoIterator<Item = &'g Graph>,
    weights: &dyn WeightSource,
) -> Fingerprint {
    let (architecture, layers) = (model.architecture(), model.layers());
    let fingerprint = Fingerprint::new(architecture, n_vocab, layers, graph, weights);
    let others = others.into_iter();
    others.fold(fingerprint, |all, graph| all.with_graph(graph, weights))
}

/// The note of a range: the caller who restores it knows of which adapters it is.
const RANGE: &str = "range";

impl<B: Backend, M: Memory + Clone> Engine<B, M> {
    /// Which model this is: what a state must have been saved with.
    pub fn fingerprint(&self) -> &Fingerprint {
        &self.fingerprint
    }

    /// Whether keys and values of this model can be saved as `kv_type`: to be asked before a text
    /// is computed that could not be saved then.
    ///
    /// # Errors
    /// [`EngineError::State`] for the first layer whose rows are no whole blocks.
    pub fn check_save_type(&self, kv_type: KvType) -> Result<(), EngineError> {
        Ok(check_kv_type(self.runner.rows.layout(), kv_type)?)
    }

    /// The same for recurrent states.
    ///
    /// # Errors
    /// [`EngineError::State`] for the first layer whose states are no whole blocks.
    pub fn check_save_state_type(&self, kv_type: KvType) -> Result<(), EngineError> {
        Ok(check_state_type(self.runner.rows.layout(), kv_type)?)
    }

    /// Writes what is remembered of sequences, and returns how many bytes that took. Nothing is
    /// queued for later in this memory, so what is written is what the next token would see.
    ///
    /// # Errors
    /// [`EngineError::Refused`] or [`EngineError::State`]; what was written by then is not a
    /// state.
    pub fn save_state(
        &self,
        options: &SaveOptions<'_>,
        out: &mut impl Write,
    ) -> Result<u64, EngineError> {
        let fingerprint = match &self.runner.adapters {
            None => self.fingerprint.clone(),
            Some(active) => {
                let seqs = self.memory.snapshot(options.seqs)?.seqs();
                let described = seqs.iter().map(|seq| active.describe(seq));
                let mut described: Vec<String> = described.collect();
                described.dedup();
                self.fingerprint.clone().with_adapters(described.join("; "))
            }
        };
        self.save_with_fingerprint(&fingerprint, options, "", out)
    }

    /// As [`Engine::save_state`], with a text that [`SavedState::note`] gives back, for a caller
    /// who knows of which adapters the rows are: the state does not tell.
    pub(crate) fn save_state_with_note(
        &self,
        options: &SaveOptions<'_>,
        note: &str,
        out: &mut impl Write,
    ) -> Result<u64, EngineError> {
        self.save_with_fingerprint(&self.fingerprint, options, note, out)
    }

    fn save_with_fingerprint(
        &self,
        fingerprint: &Fingerprint,
        options: &SaveOptions<'_>,
        note: &str,
        out: &mut impl Write,
    ) -> Result<u64, EngineError> {
        let snapshot = self.memory.snapshot(options.seqs)?;
        self.save_snapshot(fingerprint, &snapshot, options, note, out)
    }

    /// As [`Engine::save_state`], of a range of positions, to be restored
    /// [behind](RestoreInto::Behind) what comes before. The caller knows of which adapters its rows
    /// are.
    pub(crate) fn save_range(
        &self,
        options: &SaveOptions<'_>,
        range: PosRange,
        out: &mut impl Write,
    ) -> Result<u64, EngineError> {
        let snapshot = self.memory.snapshot(options.seqs)?.within(range)?;
        self.save_snapshot(&self.fingerprint, &snapshot, options, RANGE, out)
    }

    /// Whether ranges of its sequences can be saved and restored: where every layer that remembers
    /// sees all tokens.
    pub(crate) fn saves_ranges(&self) -> bool {
        let snapshot = self.memory.snapshot(Seqs::One(SeqId(0)));
        snapshot.is_ok_and(|snapshot| snapshot.within(PosRange::ALL).is_ok())
    }

    fn save_snapshot(
        &self,
        fingerprint: &Fingerprint,
        snapshot: &Snapshot,
        options: &SaveOptions<'_>,
        note: &str,
        out: &mut impl Write,
    ) -> Result<u64, EngineError> {
        let state = StateToSave {
            fingerprint,
            snapshot,
            tokens: options.tokens,
            layout: self.runner.rows.layout(),
            kv_type: options.kv_type,
            state_type: options.state_type,
            note,
        };
        let mut read =
            |span, out: &mut [u8]| self.runner.backend.read_rows(&self.runner.rows, span, out);
        Ok(save(&state, &mut read, out)?)
    }

    /// Whether a state is restored to the bit: its rows are stored as they are here.
    pub(crate) fn stores_as(&self, state: &SavedState<'_>) -> bool {
        state.is_stored_as(self.runner.rows.layout())
    }

    /// Checks that a state is of this model, and of the adapters of the sequences that it goes to,
    /// where its note does not say that somebody else knows them.
    fn check_fingerprint(
        &self,
        state: &SavedState<'_>,
        into: RestoreInto,
    ) -> Result<(), EngineError> {
        let here = self.fingerprint.clone();
        let here = match &self.runner.adapters {
            Some(active) if state.note().is_empty() => {
                let seqs = state.snapshot().seqs();
                let seqs = seqs.iter().filter_map(|seq| into.seq(seq));
                let mut described: Vec<String> = seqs.map(|seq| active.describe(seq)).collect();
                described.dedup();
                here.with_adapters(described.join("; "))
            }
            _ => here,
        };
        Ok(here.check(state.fingerprint())?)
    }

    /// Takes back what was saved, by this engine or by another of the same model: contexts, streams
    /// and types of K, V and states may differ.
    ///
    /// # Errors
    /// [`EngineError::State`]: nothing has changed then. [`EngineError::RestoreRows`] where rows
    /// could not be written: it says whether what was to be replaced is still there.
    pub fn restore_state(
        &mut self,
        state: &SavedState<'_>,
        into: RestoreInto,
    ) -> Result<RestoredState, EngineError> {
        self.check_fingerprint(state, into)?;
        self.complete_rows()?;
        let layout = self.runner.rows.layout().clone();
        state.check_rows(&layout)?;
        let replaces = match into {
            RestoreInto::All => {
                (0..self.memory.n_seqs()).any(|seq| has_any(&self.memory, SeqId(seq)))
            }
            RestoreInto::One { to, .. } => has_any(&self.memory, to),
            RestoreInto::Behind { .. } => false,
        };
        let restored = if replaces {
            self.replace(state, into, &layout)?
        } else {
            self.add(state, into, &layout)?
        };
        let tokens = state.tokens().iter().filter_map(|tokens| {
            let seq = into.seq(tokens.seq)?;
            Some(SeqTokens {
                seq,
                ..tokens.clone()
            })
        });
        Ok(RestoredState {
            n_tokens: restored.n_tokens,
            tokens: tokens.collect(),
        })
    }

    /// Restores where nothing is replaced: in this memory, which loses the new tokens again where
    /// their rows cannot be written.
    fn add(
        &mut self,
        state: &SavedState<'_>,
        into: RestoreInto,
        layout: &RowLayout,
    ) -> Result<Restoration, EngineError> {
        let first = match into {
            RestoreInto::Behind { to, .. } => self.memory.next_pos(to),
            RestoreInto::All | RestoreInto::One { .. } => Pos(0),
        };
        let restored = self.memory.restore(state.snapshot(), into);
        let restored = restored.map_err(StateError::from)?;
        self.runner.note_edit(removal(into, first));
        let added = Forgetting::new(&mut self.memory, removal(into, first));
        let mut write = |span, bytes: &[u8]| {
            self.runner
                .backend
                .write_rows(&mut self.runner.rows, span, bytes)
        };
        let written = state.write_rows(&restored, layout, &mut write);
        if let Err(source) = written {
            let replaced = Replaced::Kept;
            return Err(EngineError::RestoreRows { replaced, source });
        }
        added.keep();
        Ok(restored)
    }

    /// Restores in place of others: in a copy of the memory, so that what is replaced is still
    /// there where rows cannot be written, as long as they were written to unused cells.
    fn replace(
        &mut self,
        state: &SavedState<'_>,
        into: RestoreInto,
        layout: &RowLayout,
    ) -> Result<Restoration, EngineError> {
        let mut after = self.memory.clone();
        let restored = after
            .restore(state.snapshot(), into)
            .map_err(StateError::from)?;
        self.runner.note_edit(removal(into, Pos(0)));
        let mut write = |span, bytes: &[u8]| {
            self.runner
                .backend
                .write_rows(&mut self.runner.rows, span, bytes)
        };
        let (replaced, written) = match restored.rows_taken {
            TargetRows::Free => (
                Replaced::Kept,
                state.write_rows(&restored, layout, &mut write),
            ),
            TargetRows::InUse => {
                // Rows of what is replaced are lost from here on. Where all are written, another
                // memory takes the place of this one.
                let _overwritten = Forgetting::new(&mut self.memory, removal(into, Pos(0)));
                let written = state.write_rows(&restored, layout, &mut write);
                (Replaced::Forgotten, written)
            }
        };
        if let Err(source) = written {
            return Err(EngineError::RestoreRows { replaced, source });
        }
        self.memory = after;
        Ok(restored)
    }
}

/// True if a sequence has tokens, or a source.
fn has_any(memory: &impl Memory, seq: SeqId) -> bool {
    memory.positions(seq).is_some() || memory.source_positions(seq).is_some()
}

/// Removes what a restoration puts in place of others, or behind `first`.
fn removal(into: RestoreInto, first: Pos) -> Edit {
    match into {
        RestoreInto::All => Edit::Clear,
        RestoreInto::One { to, .. } => Edit::Remove {
            seqs: Seqs::One(to),
            range: PosRange::ALL,
        },
        RestoreInto::Behind { to, .. } => Edit::Remove {
            seqs: Seqs::One(to),
            range: PosRange::new(first, PosRange::ALL.last),
        },
    }
}
