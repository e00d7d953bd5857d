//! The contract of scans by heads, as in Mamba-2.

use std::ops::Range;

use super::Subject;
use super::ops::builder;
use super::recurrent::{LAYER, Layer, RecurrentPair, decaying_weights};
use kv_backend::{Backend, BackendError};
use kv_core::layers::RecurrentMemory;
use kv_graph::weights::MemoryWeights;
use kv_graph::{Graph, HeadScanSpec, Input};

/// Sizes of one layer.
#[derive(Clone, Copy)]
pub(super) struct Heads {
    n_heads: usize,
    head_dim: usize,
    n_groups: usize,
    d_state: usize,
}

const SMALL: Heads = Heads {
    n_heads: 4,
    head_dim: 4,
    n_groups: 2,
    d_state: 8,
};
pub(super) const SIZES: [Heads; 4] = [
    SMALL,
    Heads {
        n_heads: 3,
        head_dim: 50,
        n_groups: 1,
        d_state: 16,
    },
    Heads {
        n_heads: 6,
        head_dim: 1,
        n_groups: 3,
        d_state: 5,
    },
    Heads {
        n_heads: 2,
        head_dim: 64,
        n_groups: 2,
        d_state: 128,
    },
];

impl Heads {
    fn channels(self) -> usize {
        self.n_heads * self.head_dim
    }

    fn narrow(self) -> usize {
        self.n_groups * self.d_state
    }

    fn scan(self) -> HeadScanSpec {
        HeadScanSpec {
            n_heads: self.n_heads,
            n_groups: self.n_groups,
            d_state: self.d_state,
            a: "a".into(),
            d: "d".into(),
            dt_bias: "dt.b".into(),
        }
    }
}

impl Layer for Heads {
    fn memory(self) -> RecurrentMemory {
        RecurrentMemory {
            conv_row: 0,
            state_row: self.channels() * self.d_state,
        }
    }

    /// dt, x, B and C.
    fn dim(self) -> usize {
        self.n_heads + self.channels() + 2 * self.narrow()
    }

    fn steps(self) -> Range<usize> {
        0..self.n_heads
    }

    fn graph(self, n_tokens: usize) -> Graph {
        let mut b = builder(n_tokens, 0);
        let all = b.input(Input::Embeddings { dim: self.dim() }).unwrap();
        let states = b.input(Input::States).unwrap();
        let mut first = 0;
        let mut next = |name: &str, width: usize| {
            first += width;
            b.columns(name, all, first - width..first).unwrap()
        };
        let dt = next("dt", self.n_heads);
        let x = next("x", self.channels());
        let [bs, cs] = ["B", "C"].map(|name| next(name, self.narrow()));
        let y = b.scan_heads("scan", LAYER, &self.scan(), [x, dt, bs, cs, states]);
        b.finish(&[y.unwrap()]).unwrap()
    }

    fn weights(self) -> MemoryWeights {
        decaying_weights(&self.graph(1), [self.n_heads, 1])
    }
}

/// Prompts and single tokens of several sequences, mixed in any order, over several runs.
pub fn scans_by_heads_compute<B: Backend>(subject: &Subject<B>) {
    for sizes in SIZES {
        RecurrentPair::new(subject, sizes).run_mixed();
    }
}

/// A graph whose scan does not fit the layer's states, or has none.
pub fn head_states_of_another_shape_are_refused<B: Backend>(subject: &Subject<B>) {
    let other = Heads {
        d_state: 5,
        ..SMALL
    };
    let compiled = subject.compile(&SMALL.graph(2), &SMALL.weights(), &other.layout(4));
    assert!(matches!(
        compiled.err().unwrap(),
        BackendError::RowShape { layer: LAYER, .. }
    ));
}
