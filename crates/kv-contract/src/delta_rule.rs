//! The contract of the gated delta rule and of its decay factors.

use std::ops::Range;

use super::ops::{alone, builder, compare, step};
use super::recurrent::{LAYER, Layer, RecurrentPair};
use super::scene::memory_weights;
use super::{Random, Subject};
use kv_backend::{Backend, BackendError};
use kv_core::layers::RecurrentMemory;
use kv_core::memory::{Memory as _, Seqs};
use kv_core::{Pos, PosRange, SeqId};
use kv_graph::weights::MemoryWeights;
use kv_graph::{
    Activation, DecaySpec, DeltaSpec, Graph, GraphBuilder, Input, KeySharing, NodeId, NormGain,
};

/// The values that decay as one.
#[derive(Clone, Copy)]
enum DecayPer {
    /// The whole state of a head.
    Head,
    /// One key value of it.
    Key,
}

/// Sizes of one layer.
#[derive(Clone, Copy)]
pub(super) struct Delta {
    n_heads: usize,
    key_heads: usize,
    v_dim: usize,
    k_dim: usize,
    sharing: KeySharing,
    decay: DecayPer,
}

const SMALL: Delta = Delta {
    n_heads: 4,
    key_heads: 2,
    v_dim: 4,
    k_dim: 8,
    sharing: KeySharing::Neighbours,
    decay: DecayPer::Head,
};
pub(super) const SIZES: [Delta; 6] = [
    SMALL,
    Delta {
        sharing: KeySharing::Interleaved,
        decay: DecayPer::Key,
        ..SMALL
    },
    Delta {
        n_heads: 3,
        key_heads: 1,
        v_dim: 50,
        k_dim: 16,
        ..SMALL
    },
    Delta {
        n_heads: 6,
        key_heads: 3,
        v_dim: 1,
        k_dim: 5,
        sharing: KeySharing::Interleaved,
        ..SMALL
    },
    Delta {
        n_heads: 2,
        key_heads: 2,
        v_dim: 64,
        k_dim: 128,
        ..SMALL
    },
    Delta {
        n_heads: 2,
        key_heads: 1,
        v_dim: 20,
        k_dim: 21,
        decay: DecayPer::Key,
        ..SMALL
    },
];

impl Delta {
    fn keys(self) -> usize {
        self.key_heads * self.k_dim
    }

    fn channels(self) -> usize {
        self.n_heads * self.v_dim
    }

    fn decays(self) -> usize {
        match self.decay {
            DecayPer::Head => self.n_heads,
            DecayPer::Key => self.n_heads * self.k_dim,
        }
    }

    fn spec(self) -> DeltaSpec {
        DeltaSpec {
            n_heads: self.n_heads,
            key_heads: self.key_heads,
            k_dim: self.k_dim,
            sharing: self.sharing,
            scale: 0.75,
        }
    }

    /// Rows of length 1, without which states would grow.
    fn unit(self, b: &mut GraphBuilder, name: &str, x: NodeId) -> NodeId {
        let n = b.shape_of(x)[0];
        let heads = b.reshape(
            &format!("{name} heads"),
            x,
            &[n, self.key_heads, self.k_dim],
        );
        let normed = b.rms_norm_with(
            &format!("{name} normed"),
            heads.unwrap(),
            NormGain::None,
            1e-6,
        );
        let factor = 1.0 / (self.k_dim as f32).sqrt();
        let unit = b.scale(&format!("{name} unit"), normed.unwrap(), factor);
        b.reshape(&format!("{name} rows"), unit.unwrap(), &[n, self.keys()])
            .unwrap()
    }
}

fn decay_spec(n_heads: usize) -> DecaySpec {
    DecaySpec {
        n_heads,
        a: "a".into(),
        dt_bias: "dt.b".into(),
    }
}

/// Random weights of a graph, and rates that let decay.
fn decaying(graph: &Graph, a_shape: &[usize]) -> MemoryWeights {
    let mut weights = memory_weights(graph, 81);
    let mut random = Random::new(82);
    let n = a_shape.iter().product();
    let a: Vec<f32> = (0..n).map(|_| -0.1 - 2.0 * random.value().abs()).collect();
    weights.insert_f32("a", a_shape, &a).unwrap();
    weights
}

impl Layer for Delta {
    fn memory(self) -> RecurrentMemory {
        RecurrentMemory {
            conv_row: 0,
            state_row: self.channels() * self.k_dim,
        }
    }

    /// Step sizes, q, k, v and beta.
    fn dim(self) -> usize {
        self.decays() + 2 * self.keys() + self.channels() + self.n_heads
    }

    fn steps(self) -> Range<usize> {
        0..self.decays()
    }

    fn graph(self, n_tokens: usize) -> Graph {
        let mut b = builder(n_tokens, 0);
        let all = b.input(Input::Embeddings { dim: self.dim() }).unwrap();
        let states = b.input(Input::States).unwrap();
        let mut first = 0;
        let mut next = |b: &mut GraphBuilder, name: &str, width: usize| {
            first += width;
            b.columns(name, all, first - width..first).unwrap()
        };
        let dt = next(&mut b, "dt", self.decays());
        let [q, k] = ["q", "k"].map(|name| {
            let x = next(&mut b, name, self.keys());
            self.unit(&mut b, name, x)
        });
        let v = next(&mut b, "v", self.channels());
        let beta = next(&mut b, "beta", self.n_heads);
        let beta = b.activate("rate", Activation::Sigmoid, beta).unwrap();
        let spec = decay_spec(self.n_heads);
        let decay = b.decay("decay", dt, &spec, &[self.n_heads]).unwrap();
        let operands = [q, k, v, decay, beta, states];
        let y = b.delta("delta", LAYER, self.spec(), operands).unwrap();
        b.finish(&[y]).unwrap()
    }

    fn weights(self) -> MemoryWeights {
        decaying(&self.graph(1), &[self.n_heads])
    }
}

/// `1 / (1 + e^-x)` of every value and as a gate, far into both tails.
pub fn sigmoid_gates<B: Backend>(subject: &Subject<B>) {
    for factor in [1.0, 6.0, 300.0] {
        alone(subject, 24, subject.tolerance.elementwise, |b, x| {
            let large = b.scale("large", x, factor).unwrap();
            b.activate("y", Activation::Sigmoid, large).unwrap()
        });
        alone(subject, 24, subject.tolerance.elementwise, |b, x| {
            let large = b.scale("large", x, factor).unwrap();
            b.gate("y", Activation::Sigmoid, large, x).unwrap()
        });
    }
}

/// Factors between 0 and 1 from step sizes of all magnitudes, whatever the shape of the rates.
pub fn decays_fall<B: Backend>(subject: &Subject<B>) {
    for (n_heads, per_head, a_shape) in [
        (4, 1, &[4][..]),
        (3, 14, &[1, 1, 3, 1]),
        (2, 150, &[2, 1]),
        (1, 7, &[1]),
    ] {
        let (n, columns) = (5, n_heads * per_head);
        let mut b = builder(n, 0);
        let x = b.input(Input::Embeddings { dim: columns }).unwrap();
        let large = b.scale("large", x, 30.0).unwrap();
        let y = b.decay("y", large, &decay_spec(n_heads), a_shape).unwrap();
        let graph = b.finish(&[y, large]).unwrap();
        let weights = decaying(&graph, a_shape);
        let tolerance = subject.tolerance.recurrent;
        compare(subject, &graph, weights, &step(n, 0, columns, 1), tolerance);
    }
}

/// Prompts and single tokens of several sequences, mixed in any order, over several runs.
pub fn delta_rules_compute<B: Backend>(subject: &Subject<B>) {
    for sizes in SIZES {
        RecurrentPair::new(subject, sizes).run_mixed();
    }
}

/// A sequence that went back gives the same bits as one that never went further.
pub fn delta_states_go_back<B: Backend>(subject: &Subject<B>) {
    for sizes in [SIZES[1], SIZES[2]] {
        let mut both = RecurrentPair::new(subject, sizes);
        let prompt = both.step(&[0; 9]);
        both.run(&prompt);
        let copied = both.memory().copy(SeqId(0), SeqId(1), PosRange::ALL);
        copied.map(drop).unwrap();
        let further = both.step(&[0, 0]);
        both.run(&further);
        let back = PosRange::from(Pos(9)..);
        both.memory().remove(Seqs::One(SeqId(0)), back).unwrap();
        let mut step = both.step(&[0, 1]);
        step.embeddings.copy_within(..sizes.dim(), sizes.dim());
        let values = both.run(&step).concat();
        let (a, b) = values.split_at(values.len() / 2);
        assert_eq!(a, b);
    }
}

/// A graph whose delta rule does not fit the layer's states.
pub fn delta_states_of_another_shape_are_refused<B: Backend>(subject: &Subject<B>) {
    let other = Delta { k_dim: 5, ..SMALL };
    let compiled = subject.compile(&SMALL.graph(2), &SMALL.weights(), &other.layout(4));
    assert!(matches!(
        compiled.err().unwrap(),
        BackendError::RowShape { layer: LAYER, .. }
    ));
}
