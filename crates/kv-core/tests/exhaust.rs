//! Every short sequence of operations on small memories of each kind.
//!
//! `CELLAR_EXHAUST_DEPTH` is the number of operations, 4 without it. Six take hours:
//!
//! ```text
//! export CELLAR_EXHAUST_DEPTH=6
//! cargo test --release -p cellar-kv-core --test kv_core -- exhaust:: --nocapture
//! ```

#![allow(clippy::unwrap_used)] // a test

use std::time::Instant;

use kv_contract::memory::batches::N_SEQS;
use kv_contract::memory::{MemoryUnderTest, every_sequence_of_operations};
use kv_core::memory::{Composite, Recurrent, RecurrentConfig, Streams, Unified, UnifiedConfig};
use kv_core::{Causality, PartIdx, Window};

/// Operations in a row, without a wish.
const DEPTH: u32 = 4;

const WINDOWS: [Window; 5] = [
    Window::Full,
    Window::Sliding(2),
    Window::Chunked(2),
    Window::Symmetric(2),
    Window::Ends { first: 1, last: 2 },
];

fn explore<M: MemoryUnderTest>(name: &str, memory: M) {
    let depth = std::env::var("CELLAR_EXHAUST_DEPTH");
    let depth = depth.map_or(DEPTH, |depth| depth.parse().unwrap());
    let started = Instant::now();
    let explored = every_sequence_of_operations(memory, depth);
    println!(
        "{name}: {} states, {} operations, depth {depth}, {:.1?}",
        explored.n_states,
        explored.n_operations,
        started.elapsed()
    );
    // A search that ends at once has looked at nothing.
    assert!(explored.n_states > 1000, "{explored:?}");
}

fn part(number: u32, n_cells: u32, window: Window, streams: Streams) -> Unified {
    Unified::new(UnifiedConfig {
        part: PartIdx(number),
        n_seqs: N_SEQS,
        n_cells,
        streams,
        window,
        causality: Causality::Causal,
    })
    .unwrap()
}

#[test]
fn parts_that_share_cells() {
    for window in WINDOWS {
        let memory = part(0, 6, window, Streams::Shared);
        explore(&format!("shared, {window}"), memory);
    }
}

#[test]
fn parts_with_a_stream_for_each_sequence() {
    for window in WINDOWS {
        let memory = part(0, 4, window, Streams::PerSequence);
        explore(&format!("per sequence, {window}"), memory);
    }
}

#[test]
fn two_windows() {
    for streams in [Streams::Shared, Streams::PerSequence] {
        let parts = [
            part(0, 6, Window::Full, streams),
            part(1, 5, Window::Sliding(2), streams),
        ];
        let memory = Composite::from_parts(parts.to_vec(), None).unwrap();
        explore(&format!("two windows, {streams:?}"), memory);
    }
}

fn states(n_snapshots: u32) -> Recurrent {
    Recurrent::new(RecurrentConfig::new(N_SEQS).with_snapshots(n_snapshots)).unwrap()
}

#[test]
fn recurrent_states() {
    for n_snapshots in 0..3 {
        explore(&format!("{n_snapshots} snapshots"), states(n_snapshots));
    }
}

#[test]
fn states_with_attention() {
    for n_snapshots in 0..3 {
        let parts = vec![part(0, 6, Window::Full, Streams::Shared)];
        let memory = Composite::from_parts(parts, Some(states(n_snapshots))).unwrap();
        explore(&format!("hybrid, {n_snapshots} snapshots"), memory);
    }
}

#[test]
fn sources() {
    let parts = vec![
        part(0, 6, Window::Full, Streams::Shared),
        part(1, 3, Window::Source, Streams::Shared),
    ];
    explore("sources", Composite::from_parts(parts, None).unwrap());
}
