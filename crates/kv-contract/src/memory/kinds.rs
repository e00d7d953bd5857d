//! The memories of this project, of every kind and with random sizes and windows.

use kv_core::memory::{Composite, Recurrent, RecurrentConfig, Streams, Unified, UnifiedConfig};
use kv_core::{Causality, PartIdx, Window};
use proptest::prelude::*;

use super::batches::N_SEQS;

fn window() -> impl Strategy<Value = Window> {
    prop_oneof![
        2 => Just(Window::Full),
        3 => (0u32..7).prop_map(Window::Sliding),
        2 => (0u32..7).prop_map(Window::Chunked),
        1 => (0u32..9).prop_map(Window::Symmetric),
        2 => (0u32..4, 0u32..7).prop_map(|(first, last)| Window::Ends { first, last }),
    ]
}

/// Configurations of `N` parts with the same streams.
fn configs<const N: usize>() -> impl Strategy<Value = [UnifiedConfig; N]> {
    let streams = prop_oneof![2 => Just(Streams::Shared), 1 => Just(Streams::PerSequence)];
    let causality = prop_oneof![4 => Just(Causality::Causal), 1 => Just(Causality::NonCausal)];
    // The larger ones give cells to sequences in blocks.
    let n_cells = prop_oneof![3 => 1u32..40, 1 => 40u32..200];
    let parts = prop::collection::vec((n_cells, window()), N);
    (streams, causality, parts).prop_map(|(streams, causality, parts)| {
        // Numbered from 1, the last first.
        std::array::from_fn(|i| UnifiedConfig {
            part: PartIdx((N - i) as u32),
            n_seqs: N_SEQS,
            n_cells: parts[i].0,
            streams,
            window: parts[i].1,
            causality,
        })
    })
}

/// One part, as a memory of its own.
pub fn unified() -> impl Strategy<Value = Unified> {
    configs().prop_map(|[one]| Unified::new(one).unwrap())
}

/// Parts with two windows.
pub fn iswa() -> impl Strategy<Value = Composite> {
    configs::<2>().prop_map(|parts| Composite::iswa(&parts).unwrap())
}

/// Parts with three windows.
pub fn three_windows() -> impl Strategy<Value = Composite> {
    configs::<3>().prop_map(|parts| Composite::iswa(&parts).unwrap())
}

/// Recurrent states, as a memory of their own.
pub fn recurrent() -> impl Strategy<Value = Recurrent> {
    (0u32..5).prop_map(|n| Recurrent::new(RecurrentConfig::new(N_SEQS).with_snapshots(n)).unwrap())
}

/// Parts that go with recurrent states, which no later token changes.
fn causal<const N: usize>() -> impl Strategy<Value = [Unified; N]> {
    let causality = Causality::Causal;
    let unified = move |c| Unified::new(UnifiedConfig { causality, ..c }).unwrap();
    configs().prop_map(move |parts| parts.map(unified))
}

/// One part and recurrent states.
pub fn hybrid() -> impl Strategy<Value = Composite> {
    hybrid_of::<1>()
}

/// Parts with two windows and recurrent states.
pub fn hybrid_iswa() -> impl Strategy<Value = Composite> {
    hybrid_of::<2>()
}

fn hybrid_of<const N: usize>() -> impl Strategy<Value = Composite> {
    let made = |(parts, states): ([Unified; N], _)| {
        Composite::from_parts(parts.to_vec(), Some(states)).unwrap()
    };
    (causal(), recurrent()).prop_map(made)
}

/// One part or two, and the sources of sequences, which every token sees: the memory of
/// encoder-decoder models.
pub fn with_sources() -> impl Strategy<Value = Composite> {
    prop_oneof![with_sources_of::<2>(), with_sources_of::<3>()]
}

/// `N` parts of which the last holds sources.
fn with_sources_of<const N: usize>() -> impl Strategy<Value = Composite> {
    configs::<N>().prop_map(|mut parts| {
        parts[N - 1].window = Window::Source;
        let parts = parts.map(|part| Unified::new(part).unwrap());
        Composite::from_parts(parts.to_vec(), None).unwrap()
    })
}

/// A part with a full window and room for every test.
pub fn roomy() -> Unified {
    let config = UnifiedConfig {
        part: PartIdx(0),
        n_seqs: N_SEQS,
        n_cells: 16,
        streams: Streams::Shared,
        window: Window::Full,
        causality: Causality::Causal,
    };
    Unified::new(config).unwrap()
}
