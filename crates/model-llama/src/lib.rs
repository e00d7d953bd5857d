//! The Llama family: each member is a table row over the shared decoder block.
//!
//! A member specifies what cannot be read from its files: how its positions rotate, which biases
//! and norms its blocks have, which layers see a window. Invariant: no member of the table has code
//! of its own here; Gemma 3n, which is wired otherwise, heads of EAGLE-3 and assistants of
//! Gemma 4 are modules. Knows
//! nothing of devices or memories.
//!
//! ```
//! use model_core::architecture::Registry;
//!
//! let mut registry = Registry::new();
//! model_llama::register(&mut registry);
//! assert!(registry.get("llama").is_ok());
//! ```

mod attention;
mod eagle3;
mod example;
mod factors;
mod family;
mod further;
mod gemma3n;
mod gemma4_assistant;
mod hf;
mod latent;
mod layers;
mod member;
mod mixtures;
mod read;

pub use family::members;
pub use member::{
    AttentionForm, Biases, EmbeddingNorm, EmbeddingScale, HeadWidths, LayerSinks, LayerWindows,
    LlamaLike, LogitScale, Mixture, MixtureRouting, Mixtures, Parallel, PerLayer, Positions,
    QkNormed, QkvClamp, QueryScale, ResidualScale, RotatedLayers, RowSharing, ScoreScale, Sections,
    SoftCaps, ValueForm, WindowedRope,
};

use model_core::architecture::Registry;

/// Adds every member of the family to a registry, and how directories of its models are read.
pub fn register(registry: &mut Registry) {
    for member in members() {
        registry.register(*member);
    }
    registry.register(gemma3n::Gemma3nArchitecture);
    registry.register_head(eagle3::Eagle3);
    registry.register_head(gemma4_assistant::Gemma4Assistant);
    for class in hf::classes() {
        registry.register_hf(*class);
    }
}
