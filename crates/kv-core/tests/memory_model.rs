//! The contract suite of memories, on every kind of memory of this crate.

#![allow(clippy::unwrap_used)] // a test

use kv_contract::memory::kinds::{self, hybrid, hybrid_iswa, iswa, roomy, three_windows};
use kv_contract::memory_contract;
use kv_core::memory::{Composite, Recurrent, RecurrentConfig, Unified, UnifiedConfig};
use kv_core::{PartIdx, Window};

/// One part as a [`Composite`], with and without states.
fn composite() -> Composite {
    Composite::unified(*roomy().config()).unwrap()
}

fn states() -> RecurrentConfig {
    RecurrentConfig::new(roomy().config().n_seqs)
}

fn with_states() -> Composite {
    Composite::hybrid(&[*roomy().config()], states()).unwrap()
}

/// A part and the sources of sequences.
fn sources() -> Composite {
    let own = *roomy().config();
    let (part, window) = (PartIdx(1), Window::Source);
    let source = UnifiedConfig {
        part,
        window,
        ..own
    };
    let parts = [own, source].map(|part| Unified::new(part).unwrap());
    Composite::from_parts(parts.to_vec(), None).unwrap()
}

// Latents and an indexer's keys are rows of the same cells: `unified` and the hybrids are the
// memories of latent models, too.
memory_contract!(unified, kinds::unified(), roomy: roomy());
memory_contract!(two_windows, iswa(), roomy: composite());
memory_contract!(more_windows, three_windows(), roomy: composite());
memory_contract!(hybrid_of_one_window, hybrid(), roomy: with_states());
memory_contract!(hybrid_of_two_windows, hybrid_iswa(), roomy: with_states());
memory_contract!(with_sources, kinds::with_sources(), roomy: sources());
memory_contract!(recurrent, kinds::recurrent(), roomy: Recurrent::new(states()).unwrap());
