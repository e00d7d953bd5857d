//! All architectures of Cellar in one registry. Knows no file.

use model_core::architecture::Registry;

/// Every architecture that comes with Cellar; more can be added to it.
pub fn architectures() -> Registry {
    let mut registry = Registry::new();
    model_llama::register(&mut registry);
    model_mamba::register(&mut registry);
    model_bert::register(&mut registry);
    registry
}
