//! The reference backend of Cellar: any graph with plain candle operations, on any candle device.
//!
//! Invariant: an operation is computed as its description in [`kv_graph::Op`] says, in `f32`,
//! with no fusion and no kernel of its own, so that faster backends can be compared with it.
//! Everything that a call can refuse is checked before the first row changes. Knows nothing of
//! models or of how cells are chosen.
//!
//! ```
//! use kv_candle::CandleBackend;
//! use kv_backend::Backend;
//!
//! assert_eq!(CandleBackend::cpu().info().device, "CPU");
//! ```

mod backend;
mod custom;
mod error;
mod execute;
mod ops;
mod program;
mod rows;
mod weights;

pub use backend::CandleBackend;
pub use program::Program;
pub use rows::Rows;
pub use weights::Weights;
