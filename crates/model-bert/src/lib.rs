//! Encoders: BERT (Devlin et al., arXiv 1810.04805) and ModernBERT (Warner et al., arXiv
//! 2412.13663), whose local layers see a symmetric window.
//!
//! With a classification head, BERT (and RoBERTa and XLM-RoBERTa, which are files of its architecture
//! with other tokenizers) scores pairs of texts.
//!
//! An encoder remembers nothing: its tokens see each other, later ones too, within one ubatch, and
//! what comes out is a row for each of them. What becomes of rows is [`model_core::sentence`]'s.
//! Sizes are read from the file; attention, feed-forward and norms are shared blocks, and
//! [`Encoder`] wires them. Knows nothing of devices.
//!
//! ```
//! use model_core::architecture::Registry;
//!
//! let mut registry = Registry::new();
//! model_bert::register(&mut registry);
//! assert!(registry.get("bert").is_ok());
//! ```

mod bert;
mod encoder;
mod hf;
mod model;
mod modern;
mod read;

pub use bert::Bert;
pub use encoder::{Encoder, EncoderLayer, EncoderNorms, HeadDense, ScoreHead};
pub use model::EncoderModel;
pub use modern::ModernBert;

use model_core::architecture::Registry;

/// Adds the architectures to a registry, and how directories of their models are read.
pub fn register(registry: &mut Registry) {
    registry.register(Bert);
    registry.register(ModernBert);
    for class in hf::CLASSES {
        registry.register_hf(*class);
    }
}
