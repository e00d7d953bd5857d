//! The contract of scans by heads, as in Mamba-2.

use std::ops::Range;
use std::sync::Arc;

use super::ops::builder;
use super::recurrent::{Both, LAYER, Layer, columns, decaying_weights};
use super::{Subject, assert_close};
use kv_core::backend::{Backend, BackendError, ScanHeads};
use kv_core::graph::{Graph, HeadScanSpec, Input};
use kv_core::layers::RecurrentMemory;
use kv_core::weights::{MemoryWeights, WeightSource};

/// Sizes of one layer.
#[derive(Clone, Copy)]
struct Heads {
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
const SIZES: [Heads; 4] = [
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
        Both::new(subject, sizes).run_mixed();
    }
}

/// The operation as a method of the backend.
pub fn scans_by_heads_by_themselves_compute<B: Backend>(subject: &Subject<B>) {
    for sizes in SIZES {
        let mut both = Both::new(subject, sizes);
        let backend = &subject.backend;
        let mut rows = backend.allocate(&both.layout).unwrap();
        let weight = |name: &str| both.weights.get(name).unwrap().to_f32();
        let (a, d, dt_bias) = (weight("a"), weight("d"), weight("dt.b"));
        for seqs in [&[0, 1, 0][..], &[1, 2, 2, 2, 1], &[2, 0]] {
            let step = both.step(seqs);
            let wanted = both.run(&step);
            let mut first = 0;
            let mut next = |width: usize| -> Vec<f32> {
                first += width;
                columns(&step, sizes.dim(), first - width..first)
            };
            let (dt, x) = (next(sizes.n_heads), next(sizes.channels()));
            let [b, c] = [0; 2].map(|_| next(sizes.narrow()));
            let args = ScanHeads {
                layer: LAYER,
                n_groups: sizes.n_groups,
                x: &x,
                dt: &dt,
                b: &b,
                c: &c,
                a: &a,
                d: &d,
                dt_bias: &dt_bias,
                groups: &step.states,
            };
            let mut out = vec![f32::NAN; x.len()];
            backend.scan_heads(&mut rows, args, &mut out).unwrap();
            let wanted: Vec<f64> = wanted[0].iter().map(|&v| f64::from(v)).collect();
            assert_close("scan", &out, &wanted, 2.0 * subject.tolerance.recurrent);
            for wrong in [
                ScanHeads {
                    dt: &dt[1..],
                    ..args
                },
                ScanHeads {
                    n_groups: 7,
                    ..args
                },
                ScanHeads {
                    n_groups: 0,
                    ..args
                },
                ScanHeads { c: &c[1..], ..args },
                ScanHeads { d: &d[1..], ..args },
            ] {
                let refused = backend.scan_heads(&mut rows, wrong, &mut out);
                assert!(matches!(refused, Err(BackendError::WrongLength { .. })));
            }
        }
    }
}

/// A graph whose scan does not fit the layer's states, or has none.
pub fn head_states_of_another_shape_are_refused<B: Backend>(subject: &Subject<B>) {
    let backend = &subject.backend;
    let loaded = backend.load_weights(Arc::new(SMALL.weights())).unwrap();
    let other = Heads {
        d_state: 5,
        ..SMALL
    };
    let error = backend.compile(&SMALL.graph(2), &loaded, &other.layout(4));
    assert!(matches!(
        error.map(|_| ()).unwrap_err(),
        BackendError::RowShape { layer: LAYER, .. }
    ));
}
