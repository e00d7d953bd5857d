//! The contract suite of memories, on every kind of memory of this crate.

#![allow(clippy::unwrap_used)] // a test

use kv_contract::memory::kinds::{self, hybrid, hybrid_iswa, iswa, roomy, three_windows};
use kv_contract::memory_contract;
use kv_core::memory::{Composite, Recurrent, RecurrentConfig};

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

memory_contract!(unified, kinds::unified(), roomy: roomy());
memory_contract!(two_windows, iswa(), roomy: composite());
memory_contract!(more_windows, three_windows(), roomy: composite());
memory_contract!(hybrid_of_one_window, hybrid(), roomy: with_states());
memory_contract!(hybrid_of_two_windows, hybrid_iswa(), roomy: with_states());
memory_contract!(recurrent, kinds::recurrent(), roomy: Recurrent::new(states()).unwrap());
