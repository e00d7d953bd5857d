//! Random operations on [`Unified`], [`Iswa`] and pairs of pairs, against a model that never recycles
//! anything.
//!
//! The model keeps every token of every sequence that was not removed on purpose, and asks
//! [`Window`] who sees whom. So whatever cells the memory reuses, shares, copies or gives back after
//! a failure, the tokens that a row sees must be the model's. A simulated backend holds one token id
//! for each row, and overwrites rows as a real one does; beside it, the position that the row's key
//! is rotated to, which must be the one that its cell says.
#![allow(clippy::unwrap_used, clippy::panic)] // a test

#[path = "memory_model/edits.rs"]
mod edits;
#[path = "memory_model/memories.rs"]
mod memories;
#[path = "memory_model/ops.rs"]
mod ops;
#[path = "memory_model/states.rs"]
mod states;
#[path = "memory_model/world.rs"]
mod world;

use memories::{Attention, iswa, pair_of_pairs, unified};
use ops::{Op, ops};
use proptest::prelude::*;
use world::World;

fn run<M: Attention>(memory: M, ops: &[Op]) {
    let mut world = World::new(memory);
    for op in ops {
        world.apply(op);
        world.check();
    }
}

proptest! {
    // A case takes about 0.2 ms a part; `PROPTEST_CASES` overrides the number.
    #![proptest_config(ProptestConfig::with_cases(2048))]

    #[test]
    fn a_memory_shows_what_a_memory_without_limits_would(memory in unified(), ops in ops()) {
        run(memory, &ops);
    }

    #[test]
    fn both_parts_of_an_iswa_show_what_a_memory_without_limits_would(
        memory in iswa(),
        ops in ops(),
    ) {
        run(memory, &ops);
    }

    #[test]
    fn so_do_pairs_of_pairs(memory in pair_of_pairs(), ops in ops()) {
        run(memory, &ops);
    }
}
