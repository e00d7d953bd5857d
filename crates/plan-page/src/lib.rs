//! What the page `page/` asks of Rust: a plan of a model's memory from the header of its file, and
//! walks through a memory, cell by cell.
//!
//! [`Page::answer`] takes a question as bytes and gives an answer as JSON; in a browser `abi` is
//! around it. A plan is that of the engine ([`cellar_engine::MemoryReport`]), a walk is done by the
//! memories of [`kv_core`]: the page computes nothing of its own. Neither reads a file, or needs a
//! value of a tensor.

#[cfg(target_family = "wasm")]
mod abi;
mod header;
mod page;
mod plan;
mod walk;
mod walks;

pub use header::{DirectoryHeaders, HeaderError, HeaderModel};
pub use page::Page;
pub use plan::{ContextBytes, HeaderPlan, PlanOptions};
pub use walk::{Cell, Frame, Sight, Walk};
pub use walks::{walk, walk_names};
