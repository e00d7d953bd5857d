//! Mamba (Gu and Dao, arXiv 2312.00752) and Mamba-2 (arXiv 2405.21060): layers of one mixer each,
//! with residuals.
//!
//! Sizes are read from the file, mixers are shared blocks. Invariant: a model's layers remember
//! states only, so its memory does not grow with the text. Knows nothing of devices or memories.
//!
//! ```
//! use model_core::architecture::Registry;
//!
//! let mut registry = Registry::new();
//! model_mamba::register(&mut registry);
//! assert!(registry.get("mamba").is_ok());
//! ```

mod decoder;
mod hf;
mod mamba;
mod model;
mod read;

pub use decoder::{Mixer, MixerDecoder, MixerLayer, Multipliers};
pub use mamba::{Mamba, Mamba2};
pub use model::MambaModel;

use model_core::architecture::Registry;

/// Adds the architectures to a registry, and how directories of their models are read.
pub fn register(registry: &mut Registry) {
    registry.register(Mamba);
    registry.register(Mamba2);
    for class in hf::CLASSES {
        registry.register_hf(*class);
    }
}
