//! Models whose layers, or some of them, are recurrent: Mamba (Gu and Dao, arXiv 2312.00752), Falcon
//! Mamba, Mamba-2 (arXiv 2405.21060), and the hybrids Jamba, Bamba, Granite 4 and Falcon-H1.
//!
//! Sizes are read from the file; mixers, attention and feed-forward blocks are shared ones, and
//! [`Decoder`](model_core::blocks::Decoder) wires them. Invariant: a recurrent layer's memory does not
//! grow with the text. Knows nothing of devices or memories.
//!
//! RWKV-4 is not here. Its state would fit the memory as it is (a row of fixed size a layer, replaced
//! whole: two token shifts, and numerator, denominator and exponent of its average), but not the
//! graph: a layer shifts twice, by its attention's and its feed-forward's input, where
//! [`Op::Conv`](kv_core::graph::Op::Conv) is the one reader of a layer's convolution row, and its
//! average is a third recurrence. No GGUF file of it exists (those are of RWKV-6 and 7), so there was
//! nothing to run it from. A crate of its own can bring it with
//! [`Op::Custom`](kv_core::graph::Op::Custom). Whoever opens a directory of one is told so.
//!
//! ```
//! use model_core::architecture::Registry;
//!
//! let mut registry = Registry::new();
//! model_mamba::register(&mut registry);
//! assert!(registry.get("mamba").is_ok());
//! ```

mod family;
mod hf;
mod hybrids;
mod mamba;
mod read;

pub use family::{FAMILY, MambaLike};

use model_core::architecture::Registry;

/// What is said of a directory with an RWKV-4.
const NO_RWKV: &str = "a layer of RWKV-4 shifts tokens twice and averages by a recurrence of its own, which no operation of \
     the graph computes; a crate of its own can bring it with custom operations, as \
     examples/third-party-model does for RetNet";

/// Adds the architectures to a registry, and how directories of their models are read.
pub fn register(registry: &mut Registry) {
    for member in FAMILY {
        registry.register(*member);
    }
    for class in hf::classes() {
        registry.register_hf(class);
    }
    registry.decline_hf("RwkvForCausalLM", NO_RWKV);
}
