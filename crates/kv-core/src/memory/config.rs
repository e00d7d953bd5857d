//! [`MemoryConfig`]: how much is to be remembered, whatever the model's layers are, and the sizes
//! that follow from it.
//!
//! Invariant: sizes are known, and refused where they are impossible, before anything is allocated.
//! Knows nothing of rows.

use serde::{Deserialize, Serialize};

use super::iswa::SwaSize;
use super::recurrent::RecurrentConfig;
use super::unified::{Streams, UnifiedConfig};
use crate::ids::{LayerIdx, MAX_SEQS, PartIdx};
use crate::layers::{AttentionMemory, LayerMap, LayerMemory};
use crate::window::{Causality, Window};

/// The largest context length: beyond it positions would not be countable.
pub const MAX_N_CTX: u32 = 1 << 30;

/// Bytes that are kept of each cell in addition to its rows: its sequences and position.
pub const BYTES_PER_CELL: u64 = 128;

/// The sizes of a memory, whatever the model's layers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryConfig {
    /// Cells of each stream of a part with a full window.
    pub n_ctx: u32,
    /// Number of sequences.
    pub n_seqs: u32,
    /// The sequences that share cells.
    pub streams: Streams,
    /// Tokens of the largest ubatch.
    pub n_ubatch: u32,
    /// The visibility of later tokens.
    pub causality: Causality,
    /// The number of cells windowed parts have.
    pub swa: SwaSize,
    /// Earlier states of each sequence that recurrent layers keep: how many tokens can be taken
    /// back.
    pub n_snapshots: u32,
    /// Sequences that grow at the same time, at most [`n_seqs`](Self::n_seqs); `None` for all.
    /// Windowed parts have cells, and recurrent layers states, for so many: the others are ids that
    /// use the room that is left, for example for cached prefixes.
    pub n_active: Option<u32>,
}

/// The rows that a backend must allocate for a memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RowCounts {
    /// Cells of each part over all streams, by number of the part, as
    /// `RowLayout::new` of `kv-rows` takes them.
    pub cells: Vec<usize>,
    /// State rows of each recurrent layer, as
    /// `RowLayout::with_states` of `kv-rows` takes them.
    pub states: usize,
}

/// Layers or sizes for which there is no memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryConfigError {
    /// No sequences, or more than can be.
    #[error("a memory for {n_seqs} sequences: there must be 1 to {MAX_SEQS}")]
    SeqCount {
        /// Sequences wanted.
        n_seqs: u32,
    },
    /// No sequences that grow, or more than there are.
    #[error("{n_active} sequences that grow at the same time: there must be 1 to {n_seqs}")]
    ActiveCount {
        /// Sequences that grow at the same time.
        n_active: u32,
        /// Sequences.
        n_seqs: u32,
    },
    /// No cells, or more than can be numbered.
    #[error(
        "part {part} ({window}): {n_streams} streams of {n_cells} cells: there must be 1 to {} in \
         all",
        i32::MAX
    )]
    CellCount {
        /// The part.
        part: PartIdx,
        /// Its window.
        window: Window,
        /// Cells of each stream.
        n_cells: u32,
        /// Streams.
        n_streams: u32,
    },
    /// Too few rows to evaluate even one token, or more than can be numbered.
    #[error(
        "{n_rows} state rows with {n_snapshots} snapshots: one sequence alone needs {n_needed}, \
         and there can be {} at most",
        i32::MAX
    )]
    StateRowCount {
        /// Rows wanted.
        n_rows: u32,
        /// Snapshots of each sequence.
        n_snapshots: u32,
        /// Rows with which one sequence can go on token by token.
        n_needed: u64,
    },
    /// Parts that hold different numbers of sequences.
    #[error("one part holds {first} sequences and another {second}: there must be as many")]
    SeqCountsDiffer {
        /// Sequences of the parts before it.
        first: u32,
        /// Sequences of the part.
        second: u32,
    },
    /// A layer whose memory the caller has to bring.
    #[error("layer {layer} needs a memory of its own kind: give the engine one")]
    CustomLayer {
        /// The first such layer.
        layer: LayerIdx,
    },
    /// Rows of a layer that has not been computed yet.
    #[error("layer {layer} shares the rows of layer {with}, which does not come before it")]
    SharedWithLater {
        /// The layer.
        layer: LayerIdx,
        /// The layer whose rows it would share.
        with: LayerIdx,
    },
    /// A layer without rows of its own.
    #[error("layer {layer} shares the rows of layer {with}, which has none of its own")]
    NothingToShare {
        /// The layer.
        layer: LayerIdx,
        /// The layer whose rows it would share.
        with: LayerIdx,
    },
    /// Keys that are too narrow to hold the values.
    #[error("layer {layer}: {v_dim} values of a head cannot be among the {k_dim} of its key")]
    LatentTooNarrow {
        /// The layer.
        layer: LayerIdx,
        /// Values of a key head.
        k_dim: usize,
        /// Values of a value head.
        v_dim: usize,
    },
}

impl MemoryConfig {
    /// Checks that layers that say something of other layers or of their own widths make sense.
    ///
    /// # Errors
    /// [`MemoryConfigError`], for the first that does not.
    pub fn check_layers(layers: &LayerMap) -> Result<(), MemoryConfigError> {
        for (layer, memory) in layers.iter() {
            match memory {
                LayerMemory::SharedWith(with) if with >= layer => {
                    return Err(MemoryConfigError::SharedWithLater { layer, with });
                }
                LayerMemory::SharedWith(with) if layers.attention(with).is_none() => {
                    return Err(MemoryConfigError::NothingToShare { layer, with });
                }
                LayerMemory::Latent(AttentionMemory { k_dim, v_dim, .. }) if v_dim > k_dim => {
                    return Err(MemoryConfigError::LatentTooNarrow {
                        layer,
                        k_dim,
                        v_dim,
                    });
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// The attention parts that these layers need, by number of the part.
    ///
    /// # Errors
    /// [`MemoryConfigError`] where layers cannot be as declared, or need a custom memory.
    pub fn parts(&self, layers: &LayerMap) -> Result<Vec<UnifiedConfig>, MemoryConfigError> {
        Self::check_layers(layers)?;
        let n_seqs = self.n_seqs;
        if let Some(n_active) = self.n_active.filter(|n| !(1..=n_seqs).contains(n)) {
            return Err(MemoryConfigError::ActiveCount { n_active, n_seqs });
        }
        let is_custom = |memory| matches!(memory, LayerMemory::Custom(_));
        if let Some((layer, _)) = layers.iter().find(|&(_, memory)| is_custom(memory)) {
            return Err(MemoryConfigError::CustomLayer { layer });
        }
        let windows = layers.parts().into_iter().map(|part| part.window);
        let numbered = (0u32..).map(PartIdx).zip(windows);
        Ok(numbered
            .map(|(part, window)| self.part(part, window))
            .collect())
    }

    /// Sequences that grow at the same time.
    pub fn n_active(&self) -> u32 {
        self.n_active.unwrap_or(self.n_seqs)
    }

    /// The configuration of the part for layers with this window.
    pub fn part(&self, part: PartIdx, window: Window) -> UnifiedConfig {
        UnifiedConfig {
            part,
            n_seqs: self.n_seqs,
            n_cells: self.n_cells(window),
            streams: self.streams,
            window,
            causality: self.causality,
        }
    }

    /// Cells of each part over all streams, by number of the part: the rows that a backend needs
    /// for it, as `RowLayout::new` of `kv-rows` takes them. Makes no memory
    /// yet.
    ///
    /// # Errors
    /// [`MemoryConfigError`], as from [`Composite::new`](super::Composite::new).
    pub fn cells_per_part(&self, layers: &LayerMap) -> Result<Vec<usize>, MemoryConfigError> {
        let parts = self.parts(layers)?;
        let cells = parts.iter().map(UnifiedConfig::n_all_cells);
        cells.map(|n| n.map(|n| n as usize)).collect()
    }

    /// The configuration of the recurrent states.
    pub fn states(&self) -> RecurrentConfig {
        let rows = |n_seqs| RecurrentConfig::new(n_seqs).with_snapshots(self.n_snapshots);
        rows(self.n_seqs).with_rows(rows(self.n_active()).n_rows())
    }

    /// State rows of each recurrent layer: as
    /// `RowLayout::with_states` of `kv-rows` takes them.
    pub fn n_state_rows(&self) -> usize {
        self.states().n_rows() as usize
    }

    /// The number of them that are there only for snapshots.
    pub fn n_snapshot_rows(&self) -> usize {
        let without = RecurrentConfig::new(self.n_active()).n_rows() as usize;
        self.n_state_rows().saturating_sub(without)
    }
}
