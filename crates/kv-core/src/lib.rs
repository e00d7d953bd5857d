//! What a language model remembers: cells, windows, visibility and memory modules.
//!
//! In reading order: [`ids`] (index types), [`layers`] (what a model declares), [`batch`] (what a
//! caller submits), [`memory`] with [`cells`], [`slot`], [`window`] and [`visibility`] (what is
//! remembered where, and who sees it), [`memory_plan`] (what that costs), [`kv_type`] and [`block`]
//! (the formats of its rows). What is computed is the crate `kv-graph`; who computes it is
//! `kv-backend`. Nothing here knows a tensor library, a thread or a file.

pub mod batch;
pub mod binary_units;
pub mod block;
pub mod cells;
pub mod grid;
pub mod hadamard;
pub mod ids;
pub mod kv_type;
pub mod kv_types;
pub mod layers;
pub mod memory;
pub mod memory_plan;
pub mod seq_set;
pub mod slot;
pub mod state_type;
pub mod visibility;
pub mod window;

pub use binary_units::BinaryUnits;
pub use grid::GridPos;
pub use ids::{CellIdx, LayerIdx, MAX_SEQS, PartIdx, Pos, PosDelta, SeqId, StreamIdx, TokenId};
pub use kv_type::KvType;
pub use kv_types::KvTypes;
pub use seq_set::SeqSet;
pub use state_type::StateType;
pub use visibility::{CellRun, Visibility, VisibleGroup};
pub use window::{Causality, PosRange, Window};
