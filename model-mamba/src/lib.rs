//! Mamba (Gu and Dao, arXiv 2312.00752): layers of one mixer each, with residuals.
//!
//! Sizes are read from the file, the mixer is the shared block. Invariant: a model's layers remember
//! states only, so its memory does not grow with the text. Knows nothing of devices or memories.
//!
//! ```
//! use model_core::architecture::Registry;
//!
//! let mut registry = Registry::new();
//! model_mamba::register(&mut registry);
//! assert!(registry.get("mamba").is_ok());
//! ```

mod hf;
mod mamba;
mod model;

pub use mamba::Mamba;
pub use model::{MambaModel, MambaSizes};

use model_core::architecture::Registry;

/// Adds the architecture to a registry, and how directories of its models are read.
pub fn register(registry: &mut Registry) {
    registry.register(Mamba);
    for class in hf::CLASSES {
        registry.register_hf(*class);
    }
}
