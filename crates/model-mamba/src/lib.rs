//! Models whose layers, or some of them, are recurrent: Mamba (Gu and Dao, arXiv 2312.00752),
//! Falcon Mamba, Mamba-2 (arXiv 2405.21060), RWKV-4, 6 and 7, xLSTM, and the hybrids Jamba, Bamba,
//! Granite 4, Falcon-H1, Qwen3-Next, Qwen 3.5, LFM2, Kimi Linear, RecurrentGemma, Zamba2 and
//! MiniMax-Text-01.
//!
//! Sizes are read from the file; mixers, attention and feed-forward blocks are shared ones, and
//! [`Decoder`](model_core::blocks::Decoder) wires them. Invariant: a recurrent layer's memory does
//! not grow with the text. Knows nothing of devices or memories.
//!
//! [`RWKV`] are the versions of RWKV, whose blocks shift tokens and sum up values with operations
//! of their own, which the model brings along (`Model::custom_ops`).
//!
//! ```
//! use model_core::architecture::Registry;
//!
//! let mut registry = Registry::new();
//! model_mamba::register(&mut registry);
//! assert!(registry.get("mamba").is_ok());
//! ```

mod delta;
mod family;
mod feed_forwards;
mod griffin;
mod hf;
mod hybrids;
mod kimi;
mod mamba;
mod members;
mod minimax;
mod nemotron;
mod read;
mod rwkv;
mod short_conv;
mod xlstm;
mod zamba;

pub use family::MambaLike;
pub use members::FAMILY;
pub use rwkv::{RWKV, Rwkv};

use model_core::architecture::Registry;

/// Adds the architectures to a registry, and how directories of their models are read.
pub fn register(registry: &mut Registry) {
    for member in FAMILY {
        registry.register(*member);
    }
    for version in RWKV {
        registry.register(*version);
    }
    for class in hf::classes() {
        registry.register_hf(class);
    }
}
