//! The memories under test: what they are made of, and their parts.

use kv_core::memory::{
    Iswa, Memory, Pair, Recurrent, RecurrentConfig, Streams, Unified, UnifiedConfig,
};
use kv_core::{Causality, PartIdx, Window};
use proptest::prelude::*;

use crate::oracle::batches::N_SEQS;

fn window() -> impl Strategy<Value = Window> {
    prop_oneof![
        2 => Just(Window::Full),
        3 => (0u32..7).prop_map(Window::Sliding),
        2 => (0u32..7).prop_map(Window::Chunked),
        1 => (0u32..9).prop_map(Window::Symmetric),
    ]
}

/// Configurations of `N` parts with the same streams.
fn configs<const N: usize>() -> impl Strategy<Value = [UnifiedConfig; N]> {
    let streams = prop_oneof![2 => Just(Streams::Shared), 1 => Just(Streams::PerSequence)];
    let causality = prop_oneof![4 => Just(Causality::Causal), 1 => Just(Causality::NonCausal)];
    let parts = prop::collection::vec((1u32..40, window()), N);
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

pub(crate) fn unified() -> impl Strategy<Value = Unified> {
    configs().prop_map(|[one]| Unified::new(one).unwrap())
}

pub(crate) fn iswa() -> impl Strategy<Value = Iswa> {
    configs().prop_map(|parts| pair(parts.map(|config| Unified::new(config).unwrap())))
}

fn pair<M: Memory>([first, second]: [M; 2]) -> Pair<M, M> {
    Pair::new(first, second).unwrap()
}

pub(crate) fn pair_of_pairs() -> impl Strategy<Value = Pair<Iswa, Unified>> {
    configs().prop_map(|parts| {
        let [a, b, c] = parts.map(|config| Unified::new(config).unwrap());
        Pair::new(pair([a, b]), c).unwrap()
    })
}

fn recurrent() -> impl Strategy<Value = Recurrent> {
    (0u32..5).prop_map(|n| Recurrent::new(RecurrentConfig::new(N_SEQS).with_snapshots(n)).unwrap())
}

/// Parts that can be beside recurrent states, which no later token changes.
fn causal<const N: usize>() -> impl Strategy<Value = [Unified; N]> {
    let causality = Causality::Causal;
    let unified = move |c| Unified::new(UnifiedConfig { causality, ..c }).unwrap();
    configs().prop_map(move |parts| parts.map(unified))
}

pub(crate) fn hybrid() -> impl Strategy<Value = Pair<Unified, Recurrent>> {
    (causal(), recurrent()).prop_map(|([a], b)| Pair::new(a, b).unwrap())
}

pub(crate) fn hybrid_iswa() -> impl Strategy<Value = Pair<Iswa, Recurrent>> {
    (causal(), recurrent()).prop_map(|(a, b)| Pair::new(pair(a), b).unwrap())
}

/// A memory that consists of attention memories, and perhaps one recurrent one.
pub(crate) trait Attention:
    Memory<Placement: std::fmt::Debug> + Clone + PartialEq + std::fmt::Debug
{
    fn parts(&self) -> Vec<&Unified>;

    fn recurrent(&self) -> Option<&Recurrent> {
        None
    }
}

impl Attention for Recurrent {
    fn parts(&self) -> Vec<&Unified> {
        Vec::new()
    }

    fn recurrent(&self) -> Option<&Recurrent> {
        Some(self)
    }
}

impl Attention for Unified {
    fn parts(&self) -> Vec<&Unified> {
        vec![self]
    }
}

impl<A: Attention, B: Attention> Attention for Pair<A, B> {
    fn parts(&self) -> Vec<&Unified> {
        [self.first().parts(), self.second().parts()].concat()
    }

    fn recurrent(&self) -> Option<&Recurrent> {
        self.first().recurrent().or(self.second().recurrent())
    }
}
