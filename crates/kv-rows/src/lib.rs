//! How what a memory remembers is stored: types, the rows of each layer, and their bytes.
//!
//! In reading order: [`KvType`] (how a row of K or V is stored, in blocks of the crate
//! [`kv_block`]), [`KvTypes`] (those of all layers) and [`StateType`]; [`HeadRotation`] (why a
//! rotated row loses less); [`RowShape`], [`LayerRows`] and [`StateRows`] (the rows of a layer);
//! [`RowLayout`] (those of all layers); [`MemoryPlan`] (what they take). Nothing is allocated or
//! computed here: a backend does both by a layout.

mod error;
mod hadamard;
mod kv_type;
mod kv_types;
mod layout;
mod memory_plan;
mod row;
mod rows;
mod state_type;

pub use error::LayoutError;
pub use hadamard::{HeadRotation, MAX_GROUP};
pub use kv_type::{KvType, KvTypeError};
pub use kv_types::{KvRotation, KvTypes, LayerKvTypes, OldKvTypes, kv_pair};
pub use layout::RowLayout;
pub use memory_plan::{MemoryPlan, PlannedKind, PlannedRows, largest_n_ctx, largest_that_fits};
pub use row::{HeadBlocks, RowShape};
pub use rows::{LayerRows, StateRows, ValueRows};
pub use state_type::StateType;
