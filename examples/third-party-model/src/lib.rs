//! RetNet (Sun et al., arXiv 2307.08621) for Cellar, written outside of Cellar.
//!
//! A layer remembers a matrix for each head instead of keys and values: its operation is not one of
//! Cellar's, so it is a custom one ([`Retention`]). Everything else is put together from
//! what `kv-core` has. Invariant: depends on the public interface only.
//!
//! ```
//! use model_core::architecture::Registry;
//!
//! let mut registry = Registry::new();
//! retnet_for_cellar::register(&mut registry);
//! assert!(registry.get("retnet").is_ok());
//! ```

mod model;
mod retention;

pub use model::{RetNet, RetNetModel, RetNetSizes};
pub use retention::Retention;

use kv_backend::CustomOps;
use model_core::architecture::Registry;

/// Adds the architecture to a registry.
pub fn register(registry: &mut Registry) {
    registry.register(RetNet);
}

/// The custom operations that a backend must be given to run it.
pub fn custom_ops() -> CustomOps {
    CustomOps::new().with(Retention)
}
