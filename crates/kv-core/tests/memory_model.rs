//! Random operations on every kind of memory, against a model that never recycles anything.
//!
//! The model keeps every token of every sequence that was not removed on purpose, and asks
//! [`Window`] who sees whom. So whatever cells the memory reuses, shares, copies or gives back after
//! a failure, the tokens that a row sees must be the model's, and attention over the rows that it
//! sees must be attention over the model's. A simulated backend holds one token id for each row, and
//! overwrites rows as a real one does; beside it, the position that the row's key is rotated to, which
//! must be the one that its cell says; and K and V themselves. Of a hybrid it also holds the states.
#![allow(clippy::unwrap_used, clippy::panic)] // a test

#[path = "memory_model/attention.rs"]
mod attention;
#[path = "memory_model/edits.rs"]
mod edits;
#[path = "memory_model/memories.rs"]
mod memories;
#[path = "memory_model/ops.rs"]
mod ops;
mod oracle;
#[path = "memory_model/saves.rs"]
mod saves;
#[path = "memory_model/world.rs"]
mod world;

use memories::{Attention, hybrid, hybrid_iswa, iswa, three_windows, unified};
use ops::{Op, ops, ops_with_images};
use proptest::prelude::*;
use world::World;

fn run<M: Attention>(name: &'static str, memories: impl Strategy<Value = M>) {
    run_ops(name, memories, ops());
}

fn run_ops<M: Attention>(
    name: &'static str,
    memories: impl Strategy<Value = M>,
    ops: impl Strategy<Value = Vec<Op>>,
) {
    oracle::run((name, file!()), &(memories, ops), |(memory, ops)| {
        let mut world = World::new(memory);
        for op in &ops {
            world.apply(op);
            world.check();
        }
    });
}

#[test]
fn a_memory_shows_what_a_memory_without_limits_would() {
    run("unified", unified());
}

#[test]
fn both_parts_of_an_iswa_show_what_a_memory_without_limits_would() {
    run("iswa", iswa());
}

#[test]
fn so_do_three_windows() {
    run("three windows", three_windows());
}

#[test]
fn hybrids_show_it_too_and_their_states_have_taken_in_all_of_it() {
    run("hybrid", hybrid());
}

#[test]
fn so_do_hybrids_with_two_windows() {
    run("hybrid iswa", hybrid_iswa());
}

/// Rows and columns of images come along whatever is done, and who sees whom at one position is a
/// matter of reading order.
#[test]
fn images_in_a_memory_are_seen_as_in_a_memory_without_limits() {
    run_ops("images, unified", unified(), ops_with_images());
}

#[test]
fn so_are_images_in_both_parts_of_an_iswa() {
    run_ops("images, iswa", iswa(), ops_with_images());
}

#[test]
fn so_are_images_in_hybrids() {
    run_ops("images, hybrid", hybrid(), ops_with_images());
}

#[test]
fn so_are_images_in_hybrids_with_two_windows() {
    run_ops("images, hybrid iswa", hybrid_iswa(), ops_with_images());
}
