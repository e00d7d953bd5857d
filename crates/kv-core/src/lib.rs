//! What a language model remembers: cells, windows, visibility and memory modules.
//!
//! In reading order: [`ids`] (index types), [`layers`] (what a model declares), [`batch`] (what a
//! caller submits), [`memory`] with [`cells`], [`slot`], [`window`] and [`visibility`] (what is
//! remembered where, and who sees it). How its rows are stored is the crate `kv-rows`; what is
//! computed is `kv-graph`; who computes it is `kv-backend`. Nothing here knows a tensor library, a
//! thread or a file.

pub mod batch;
pub mod binary_units;
pub mod cells;
pub mod grid;
pub mod ids;
pub mod layers;
pub mod memory;
pub mod seq_set;
pub mod slot;
pub mod visibility;
pub mod window;

pub use binary_units::BinaryUnits;
pub use grid::GridPos;
pub use ids::{CellIdx, LayerIdx, MAX_SEQS, PartIdx, Pos, PosDelta, SeqId, StreamIdx, TokenId};
pub use seq_set::SeqSet;
pub use visibility::{CellRun, Visibility, VisibleGroup};
pub use window::{Causality, PosRange, Window};
