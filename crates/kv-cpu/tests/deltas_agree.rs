//! Kernels of the gated delta rule: every ISA of this machine against the scalar one, which is the
//! specification and which the contract compares with `f64`.

#![allow(clippy::unwrap_used)] // a failed unwrap fails the test

use std::ops::Range;

use kv_contract::Random;
use kv_cpu::isa::Isa;
use kv_cpu::kernels::{
    DELTA_WIDTH, DeltaDecay, DeltaScratch, DeltaTile, F32x32, Kernels, SCAN_WIDTH,
};
use kv_rows::StateType;

fn scalar() -> &'static Kernels {
    Kernels::for_isa(Isa::Scalar).unwrap()
}

fn tables() -> Vec<&'static Kernels> {
    let all = Isa::all_available().into_iter();
    all.map(|isa| Kernels::for_isa(isa).unwrap()).collect()
}

/// The values that decay as one.
#[derive(Clone, Copy, Debug)]
enum DecayPer {
    Head,
    Key,
}

/// Operands of a delta rule over the states of one tile of channels.
struct Delta {
    n_channels: usize,
    k_dim: usize,
    rounding: StateType,
    rows: Vec<u32>,
    /// Queries from the first value on, keys from the third.
    qk: Vec<f32>,
    v: Vec<F32x32>,
    beta: Vec<f32>,
    /// For each token, or for each key value of each row.
    decays: Vec<f32>,
}

/// State, and outputs of the channels that there are.
type Result = (Vec<f32>, Vec<f32>);

impl Delta {
    fn new(n_channels: usize, k_dim: usize, n_rows: u32) -> Self {
        let mut random = Random::new(u64::from(n_rows) + 91);
        let n = n_rows as usize;
        let mut between = |len: usize, low: f32, high: f32| -> Vec<f32> {
            let mut value = || low + (high - low) * (0.5 + 0.5 * random.value());
            (0..len).map(|_| value()).collect()
        };
        // Keys of a length below 1, without which states would grow.
        let size = 1.0 / (k_dim as f32).sqrt();
        let v = between(n * DELTA_WIDTH, -1.0, 1.0);
        Self {
            n_channels,
            k_dim,
            rounding: StateType::F32,
            // Not in order, and not every row.
            rows: (0..n_rows).rev().map(|row| 2 * row).collect(),
            qk: between(2 * n * (k_dim + 3) + 9, -size, size),
            v: v.as_chunks().0.to_vec(),
            beta: between(n, 0.0, 1.0),
            decays: between(2 * n * k_dim + 5, 0.0, 1.0),
        }
    }

    fn rounded_to(self, rounding: StateType) -> Self {
        Self { rounding, ..self }
    }

    /// The tokens `range` of the channels `channels`.
    fn tile<'a>(
        &'a self,
        per: DecayPer,
        range: Range<usize>,
        state: &'a mut [f32],
        values: &'a mut [F32x32],
        scratch: DeltaScratch<'a>,
    ) -> DeltaTile<'a> {
        DeltaTile {
            state,
            k_dim: self.k_dim,
            rounding: self.rounding,
            scale: 0.7,
            decay: match per {
                DecayPer::Head => DeltaDecay::PerHead(&self.decays[range.clone()]),
                DecayPer::Key => DeltaDecay::PerKey {
                    factors: &self.decays,
                    stride: self.k_dim,
                },
            },
            rows: &self.rows[range.clone()],
            q: &self.qk,
            k: &self.qk[2..],
            stride: self.k_dim + 3,
            beta: &self.beta[range.clone()],
            values: &mut values[range],
            scratch,
        }
    }

    /// States and outputs of the delta rule in pieces of so many tokens.
    fn run(&self, kernels: &Kernels, per: DecayPer, piece: usize) -> Result {
        let mut state = Random::new(3).values(self.n_channels * self.k_dim);
        let round = |s: &mut f32| *s = self.rounding.round(*s);
        state.iter_mut().for_each(round);
        let mut values = self.v.clone();
        let mut lanes = vec![[f32::NAN; SCAN_WIDTH]; self.k_dim];
        let mut products = vec![f32::NAN; self.k_dim];
        for first in (0..self.rows.len()).step_by(piece) {
            let range = first..self.rows.len().min(first + piece);
            let scratch = DeltaScratch {
                lanes: &mut lanes,
                products: &mut products,
            };
            (kernels.delta_tile)(self.tile(per, range, &mut state, &mut values, scratch));
        }
        let lanes = values.iter().flat_map(|out| &out[..self.n_channels]);
        (state, lanes.copied().collect())
    }
}

fn assert_near(got: &[f32], wanted: &[f32], what: &str) {
    assert_within(4e-6, got, wanted, what);
}

fn assert_within(allowed: f32, got: &[f32], wanted: &[f32], what: &str) {
    assert_eq!(got.len(), wanted.len(), "{what}");
    for (got, wanted) in got.iter().zip(wanted) {
        let error = (got - wanted).abs();
        assert!(error <= allowed, "{what}: {got}, not {wanted}");
    }
}

const SIZES: [(usize, usize, u32); 11] = [
    (32, 128, 5),
    (32, 30, 6),
    (21, 12, 9),
    (16, 16, 20),
    (16, 128, 5),
    (16, 256, 3),
    (12, 12, 9),
    (5, 3, 7),
    (9, 21, 4),
    (16, 300, 2),
    (1, 1, 1),
];

#[test]
fn delta_rules_agree_with_the_scalar_one_and_do_not_depend_on_pieces() {
    for (n_channels, k_dim, n_rows) in SIZES {
        let delta = Delta::new(n_channels, k_dim, n_rows);
        for per in [DecayPer::Head, DecayPer::Key] {
            let (state, out) = delta.run(scalar(), per, 64);
            assert!(out.iter().any(|out| out.abs() > 1e-3), "{k_dim}");
            for kernels in tables() {
                let what = format!("{kernels:?}, {n_channels} x {k_dim}, {per:?}");
                let whole = delta.run(kernels, per, 64);
                assert_near(&whole.0, &state, &what);
                assert_near(&whole.1, &out, &what);
                for piece in [1, 3] {
                    let cut = delta.run(kernels, per, piece);
                    assert_eq!(cut, whole, "{what}, pieces of {piece}");
                }
            }
        }
    }
}

/// What a token adds may be rounded one way or the other where kernels differ in the last bits.
#[test]
fn rounded_states_agree_and_do_not_depend_on_pieces() {
    for (rounding, allowed) in [(StateType::F16, 2e-3), (StateType::BF16, 2e-2)] {
        for (n_channels, k_dim, n_rows) in SIZES {
            let delta = Delta::new(n_channels, k_dim, n_rows).rounded_to(rounding);
            let plain = Delta::new(n_channels, k_dim, n_rows);
            for per in [DecayPer::Head, DecayPer::Key] {
                let (state, out) = delta.run(scalar(), per, 64);
                if k_dim > 3 {
                    assert_ne!(state, plain.run(scalar(), per, 64).0, "nothing is rounded");
                }
                for kernels in tables() {
                    let what = format!("{kernels:?}, {n_channels} x {k_dim}, {per:?}, {rounding}");
                    let whole = delta.run(kernels, per, 64);
                    assert_within(allowed, &whole.0, &state, &what);
                    assert_within(allowed, &whole.1, &out, &what);
                    let rounded = whole.0.iter().map(|s| rounding.round(*s));
                    assert!(rounded.eq(whole.0.iter().copied()), "{what}");
                    for piece in [1, 3] {
                        let cut = delta.run(kernels, per, piece);
                        assert_eq!(cut, whole, "{what}, pieces of {piece}");
                    }
                }
            }
        }
    }
}

#[test]
fn vector_instruction_sets_give_the_same_bits() {
    let vectors: Vec<_> = tables()
        .into_iter()
        .filter(|kernels| kernels.isa != Isa::Scalar)
        .collect();
    for (n_channels, k_dim, n_rows) in SIZES {
        for (pair, rounding) in vectors
            .windows(2)
            .flat_map(|pair| StateType::ALL.map(|rounding| (pair, rounding)))
        {
            let delta = Delta::new(n_channels, k_dim, n_rows).rounded_to(rounding);
            for per in [DecayPer::Head, DecayPer::Key] {
                let [a, b] = [0, 1].map(|at: usize| delta.run(pair[at], per, 64));
                assert_eq!(
                    a, b,
                    "{pair:?}, {n_channels} x {k_dim}, {per:?}, {rounding}"
                );
            }
        }
    }
}

#[test]
fn a_channel_does_not_depend_on_its_neighbours() {
    for kernels in tables() {
        let (state, out) = Delta::new(32, 20, 9).run(kernels, DecayPer::Head, 64);
        let part = Delta::new(6, 20, 9).run(kernels, DecayPer::Head, 64);
        assert_eq!(part.0, state[..6 * 20], "{kernels:?}");
        for (part, whole) in part.1.chunks(6).zip(out.chunks(32)) {
            assert_eq!(part, &whole[..6], "{kernels:?}");
        }
    }
}
