//! [`AnyMemory`]: the memory that a model's layers ask for, whichever that is.
//!
//! The one place that decides which module remembers what. Invariant: part `p` of the memory is part
//! `p` of the [`LayerMap`]. Knows nothing of how modules work.

use serde::{Deserialize, Serialize};

use super::error::{
    CopyRefused, NoSuchSequence, PlanError, RemoveRefused, RollbackRefused, ShiftRefused,
};
use super::hybrid::{Pair, PairError};
use super::iswa::{Iswa, SwaSize};
use super::nothing::NoMemory;
use super::recurrent::{Recurrent, RecurrentConfig, RecurrentConfigError};
use super::shift::PosChange;
use super::unified::{Streams, Unified, UnifiedConfigError};
use super::{Compacted, Copied, Memory, MemoryInputs, Removed, RowsWritten, Seqs, Shifted};
use super::{Contents, RestoreInto, RestoreRefused, Restored};
use crate::batch::{SplitPolicy, UBatch};
use crate::ids::{PartIdx, SeqId};
use crate::layers::{LayerMap, LayerMapError};
use crate::window::{Causality, PosRange, Window};

/// How much is to be remembered, whatever the model's layers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryConfig {
    /// Cells of each stream of a part with a full window.
    pub n_ctx: u32,
    /// Number of sequences.
    pub n_seqs: u32,
    /// Who shares cells.
    pub streams: Streams,
    /// Tokens of the largest ubatch.
    pub n_ubatch: u32,
    /// Whether tokens see later ones.
    pub causality: Causality,
    /// How many cells windowed parts have.
    pub swa: SwaSize,
    /// Earlier states of each sequence that recurrent layers keep: how many tokens can be taken back.
    pub n_snapshots: u32,
}

/// Layers or sizes for which there is no memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryConfigError {
    /// More kinds of windows than a memory can have.
    #[error("the layers have {} kinds of windows ({}): there may be 2", windows.len(), list(windows))]
    TooManyWindows {
        /// The windows that occur.
        windows: Vec<Window>,
    },
    /// A part with impossible sizes.
    #[error("part {part} ({window}): {source}")]
    Part {
        /// The part.
        part: PartIdx,
        /// Its window.
        window: Window,
        /// What is wrong.
        source: UnifiedConfigError,
    },
    /// Layers that cannot be as they are declared.
    #[error(transparent)]
    Layers(#[from] LayerMapError),
    /// Recurrent states with impossible sizes.
    #[error(transparent)]
    Recurrent(#[from] RecurrentConfigError),
    /// Parts that do not suit each other.
    #[error(transparent)]
    Pair(#[from] PairError),
}

fn list(windows: &[Window]) -> String {
    let names: Vec<String> = windows.iter().map(Window::to_string).collect();
    names.join(", ")
}

impl MemoryConfig {
    /// Cells of each part over all streams, by number of the part: the rows that a backend needs for
    /// it, as [`RowLayout::new`](crate::layers::RowLayout::new) takes them. Makes no memory yet.
    ///
    /// # Errors
    /// [`MemoryConfigError`], as from [`AnyMemory::new`].
    pub fn cells_per_part(&self, layers: &LayerMap) -> Result<Vec<usize>, MemoryConfigError> {
        let shape = Shape::of(layers)?;
        let cells = shape.parts().iter().map(|&(part, window)| {
            match self.part(part, window).n_all_cells() {
                Ok(n) => Ok(n as usize),
                Err(source) => Err(MemoryConfigError::Part {
                    part,
                    window,
                    source,
                }),
            }
        });
        cells.collect()
    }

    /// State rows of each recurrent layer: as
    /// [`RowLayout::with_states`](crate::layers::RowLayout::with_states) takes them.
    pub fn n_state_rows(&self) -> usize {
        self.recurrent().n_rows() as usize
    }

    /// How many of them are there only for snapshots.
    pub fn n_snapshot_rows(&self) -> usize {
        let without = RecurrentConfig::new(self.n_seqs).n_rows() as usize;
        self.n_state_rows().saturating_sub(without)
    }

    fn recurrent(&self) -> RecurrentConfig {
        RecurrentConfig::new(self.n_seqs).with_snapshots(self.n_snapshots)
    }

    fn unified(&self, (part, window): (PartIdx, Window)) -> Result<Unified, MemoryConfigError> {
        Unified::new(self.part(part, window)).map_err(|source| MemoryConfigError::Part {
            part,
            window,
            source,
        })
    }
}

/// What the layers ask for: attention, states or both.
struct Shape {
    attention: AttentionShape,
    states: States,
}

/// The attention layers' part of it.
enum AttentionShape {
    None,
    One([(PartIdx, Window); 1]),
    Two([(PartIdx, Window); 2]),
}

/// Whether layers remember states.
enum States {
    None,
    Some,
}

impl Shape {
    fn of(layers: &LayerMap) -> Result<Self, MemoryConfigError> {
        layers.check()?;
        let windows: Vec<Window> = layers.parts().iter().map(|part| part.window).collect();
        let attention = match *windows {
            [] => AttentionShape::None,
            [one] => AttentionShape::One([(PartIdx(0), one)]),
            [first, second] => AttentionShape::Two([(PartIdx(0), first), (PartIdx(1), second)]),
            _ => return Err(MemoryConfigError::TooManyWindows { windows }),
        };
        let is_recurrent = |(layer, _)| layers.recurrent(layer).is_some();
        let states = match layers.iter().any(is_recurrent) {
            true => States::Some,
            false => States::None,
        };
        Ok(Self { attention, states })
    }

    fn parts(&self) -> &[(PartIdx, Window)] {
        match &self.attention {
            AttentionShape::None => &[],
            AttentionShape::One(parts) => parts,
            AttentionShape::Two(parts) => parts,
        }
    }
}

/// A memory of any shape that layers can ask for.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AnyMemory {
    /// No layer remembers anything.
    None(NoMemory),
    /// All attention layers have the same window.
    Unified(Unified),
    /// They have windows of two kinds.
    Iswa(Iswa),
    /// All layers that remember are recurrent.
    Recurrent(Recurrent),
    /// Recurrent layers beside attention layers of one window.
    Hybrid(Pair<Unified, Recurrent>),
    /// Recurrent layers beside attention layers of two windows.
    HybridIswa(Pair<Iswa, Recurrent>),
}

/// Where the ubatches of a plan go, for [`AnyMemory`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum AnyPlacement {
    /// Nowhere.
    None,
    /// In a [`Unified`].
    Unified(<Unified as Memory>::Placement),
    /// In an [`Iswa`].
    Iswa(<Iswa as Memory>::Placement),
    /// In a [`Recurrent`].
    Recurrent(<Recurrent as Memory>::Placement),
    /// In a hybrid.
    Hybrid(<Pair<Unified, Recurrent> as Memory>::Placement),
    /// In a hybrid with two windows.
    HybridIswa(<Pair<Iswa, Recurrent> as Memory>::Placement),
}

/// What is needed to undo a step, for [`AnyMemory`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum AnyUndo {
    /// In a [`Unified`].
    Unified(<Unified as Memory>::Undo),
    /// In an [`Iswa`].
    Iswa(<Iswa as Memory>::Undo),
    /// In a [`Recurrent`].
    Recurrent(<Recurrent as Memory>::Undo),
    /// In a hybrid.
    Hybrid(<Pair<Unified, Recurrent> as Memory>::Undo),
    /// In a hybrid with two windows.
    HybridIswa(<Pair<Iswa, Recurrent> as Memory>::Undo),
    /// Nothing was done: nothing is remembered, or the placement was that of another memory.
    Nothing,
}

impl AnyMemory {
    /// The empty memory that these layers ask for.
    ///
    /// # Errors
    /// [`MemoryConfigError`] where there is none, or sizes are impossible.
    pub fn new(layers: &LayerMap, config: &MemoryConfig) -> Result<Self, MemoryConfigError> {
        let Shape { attention, states } = Shape::of(layers)?;
        let recurrent = || Recurrent::new(config.recurrent());
        Ok(match (attention, states) {
            (AttentionShape::None, States::None) => Self::None(NoMemory::new(config.n_seqs)),
            (AttentionShape::None, States::Some) => Self::Recurrent(recurrent()?),
            (AttentionShape::One([one]), States::None) => Self::Unified(config.unified(one)?),
            (AttentionShape::One([one]), States::Some) => {
                Self::Hybrid(Pair::new(config.unified(one)?, recurrent()?)?)
            }
            (AttentionShape::Two(two), States::None) => Self::Iswa(Iswa::iswa(config, two)?),
            (AttentionShape::Two(two), States::Some) => {
                Self::HybridIswa(Pair::new(Iswa::iswa(config, two)?, recurrent()?)?)
            }
        })
    }

    /// The attention memories that it consists of.
    pub fn attention_parts(&self) -> Vec<&Unified> {
        match self {
            Self::Unified(unified) => vec![unified],
            Self::Iswa(iswa) => iswa.parts().to_vec(),
            Self::None(_) | Self::Recurrent(_) => vec![],
            Self::Hybrid(hybrid) => vec![hybrid.first()],
            Self::HybridIswa(hybrid) => hybrid.first().parts().to_vec(),
        }
    }

    /// Number of cells in use, over all parts and streams; states are not counted.
    pub fn n_used(&self) -> u32 {
        self.attention_parts()
            .iter()
            .map(|part| part.n_used())
            .sum()
    }

    /// Number of tokens of a sequence that are remembered, in the part that remembers most of them.
    pub fn n_tokens(&self, seq: SeqId) -> u32 {
        let parts = self.attention_parts();
        let counts = parts
            .iter()
            .map(|part| part.runs(seq).iter().map(|run| run.len).sum());
        counts.max().unwrap_or(0)
    }
}

/// The same for every shape.
macro_rules! every_shape {
    ($memory:expr, $m:ident => $body:expr) => {
        match $memory {
            AnyMemory::None($m) => $body,
            AnyMemory::Unified($m) => $body,
            AnyMemory::Iswa($m) => $body,
            AnyMemory::Recurrent($m) => $body,
            AnyMemory::Hybrid($m) => $body,
            AnyMemory::HybridIswa($m) => $body,
        }
    };
}

impl Memory for AnyMemory {
    type Placement = AnyPlacement;
    type Undo = AnyUndo;

    fn n_seqs(&self) -> u32 {
        every_shape!(self, m => m.n_seqs())
    }

    fn positions(&self, seq: SeqId) -> Option<PosRange> {
        every_shape!(self, m => m.positions(seq))
    }

    fn split_policy(&self) -> SplitPolicy {
        every_shape!(self, m => m.split_policy())
    }

    fn place(&self, ubatches: &[UBatch]) -> Result<AnyPlacement, PlanError> {
        match self {
            Self::None(m) => m.place(ubatches).map(|()| AnyPlacement::None),
            Self::Unified(m) => m.place(ubatches).map(AnyPlacement::Unified),
            Self::Iswa(m) => m.place(ubatches).map(AnyPlacement::Iswa),
            Self::Recurrent(m) => m.place(ubatches).map(AnyPlacement::Recurrent),
            Self::Hybrid(m) => m.place(ubatches).map(AnyPlacement::Hybrid),
            Self::HybridIswa(m) => m.place(ubatches).map(AnyPlacement::HybridIswa),
        }
    }

    fn commit(&mut self, ubatch: &UBatch, placement: &AnyPlacement, step: usize) -> AnyUndo {
        match (self, placement) {
            (Self::None(_), AnyPlacement::None) => AnyUndo::Nothing,
            (Self::Unified(m), AnyPlacement::Unified(p)) => {
                AnyUndo::Unified(m.commit(ubatch, p, step))
            }
            (Self::Iswa(m), AnyPlacement::Iswa(p)) => AnyUndo::Iswa(m.commit(ubatch, p, step)),
            (Self::Recurrent(m), AnyPlacement::Recurrent(p)) => {
                AnyUndo::Recurrent(m.commit(ubatch, p, step))
            }
            (Self::Hybrid(m), AnyPlacement::Hybrid(p)) => {
                AnyUndo::Hybrid(m.commit(ubatch, p, step))
            }
            (Self::HybridIswa(m), AnyPlacement::HybridIswa(p)) => {
                AnyUndo::HybridIswa(m.commit(ubatch, p, step))
            }
            _ => {
                debug_assert!(false, "a placement of another memory");
                AnyUndo::Nothing
            }
        }
    }

    fn check_rollback(&self, undo: &AnyUndo, rows: RowsWritten) -> Result<(), RollbackRefused> {
        match (self, undo) {
            (Self::Unified(m), AnyUndo::Unified(undo)) => m.check_rollback(undo, rows),
            (Self::Iswa(m), AnyUndo::Iswa(undo)) => m.check_rollback(undo, rows),
            (Self::Recurrent(m), AnyUndo::Recurrent(undo)) => m.check_rollback(undo, rows),
            (Self::Hybrid(m), AnyUndo::Hybrid(undo)) => m.check_rollback(undo, rows),
            (Self::HybridIswa(m), AnyUndo::HybridIswa(undo)) => m.check_rollback(undo, rows),
            _ => Ok(()),
        }
    }

    fn rollback(&mut self, undo: AnyUndo, rows: RowsWritten) {
        match (self, undo) {
            (Self::Unified(m), AnyUndo::Unified(undo)) => m.rollback(undo, rows),
            (Self::Iswa(m), AnyUndo::Iswa(undo)) => m.rollback(undo, rows),
            (Self::Recurrent(m), AnyUndo::Recurrent(undo)) => m.rollback(undo, rows),
            (Self::Hybrid(m), AnyUndo::Hybrid(undo)) => m.rollback(undo, rows),
            (Self::HybridIswa(m), AnyUndo::HybridIswa(undo)) => m.rollback(undo, rows),
            (_, undo) => {
                debug_assert!(matches!(undo, AnyUndo::Nothing), "a step of another memory")
            }
        }
    }

    fn inputs(
        &self,
        ubatch: &UBatch,
        placement: &AnyPlacement,
        step: usize,
        inputs: &mut MemoryInputs,
    ) {
        match (self, placement) {
            (Self::None(_), AnyPlacement::None) => {}
            (Self::Unified(m), AnyPlacement::Unified(p)) => m.inputs(ubatch, p, step, inputs),
            (Self::Iswa(m), AnyPlacement::Iswa(p)) => m.inputs(ubatch, p, step, inputs),
            (Self::Recurrent(m), AnyPlacement::Recurrent(p)) => m.inputs(ubatch, p, step, inputs),
            (Self::Hybrid(m), AnyPlacement::Hybrid(p)) => m.inputs(ubatch, p, step, inputs),
            (Self::HybridIswa(m), AnyPlacement::HybridIswa(p)) => m.inputs(ubatch, p, step, inputs),
            _ => debug_assert!(false, "a placement of another memory"),
        }
    }

    fn check_remove(&self, seqs: Seqs, range: PosRange) -> Result<(), RemoveRefused> {
        every_shape!(self, m => m.check_remove(seqs, range))
    }

    fn remove(&mut self, seqs: Seqs, range: PosRange) -> Result<Removed, RemoveRefused> {
        every_shape!(self, m => m.remove(seqs, range))
    }

    fn check_copy(&self, from: SeqId, to: SeqId, range: PosRange) -> Result<(), CopyRefused> {
        every_shape!(self, m => m.check_copy(from, to, range))
    }

    fn copy(&mut self, from: SeqId, to: SeqId, range: PosRange) -> Result<Copied, CopyRefused> {
        every_shape!(self, m => m.copy(from, to, range))
    }

    fn check_reposition(
        &self,
        seq: SeqId,
        range: PosRange,
        change: PosChange,
    ) -> Result<(), ShiftRefused> {
        every_shape!(self, m => m.check_reposition(seq, range, change))
    }

    fn reposition(
        &mut self,
        seq: SeqId,
        range: PosRange,
        change: PosChange,
    ) -> Result<Shifted, ShiftRefused> {
        every_shape!(self, m => m.reposition(seq, range, change))
    }

    fn n_holes(&self) -> u32 {
        every_shape!(self, m => m.n_holes())
    }

    fn compact(&mut self) -> Compacted {
        every_shape!(self, m => m.compact())
    }

    fn keep_only(&mut self, seq: SeqId) -> Result<Removed, NoSuchSequence> {
        every_shape!(self, m => m.keep_only(seq))
    }

    fn contents(&self, seqs: Seqs) -> Result<Contents, NoSuchSequence> {
        every_shape!(self, m => m.contents(seqs))
    }

    fn check_restore(&self, contents: &Contents, into: RestoreInto) -> Result<(), RestoreRefused> {
        every_shape!(self, m => m.check_restore(contents, into))
    }

    fn restore(
        &mut self,
        contents: &Contents,
        into: RestoreInto,
    ) -> Result<Restored, RestoreRefused> {
        every_shape!(self, m => m.restore(contents, into))
    }

    fn clear(&mut self) -> Removed {
        every_shape!(self, m => m.clear())
    }
}
