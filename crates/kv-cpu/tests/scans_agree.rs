//! Kernels of recurrent layers: every ISA of this machine against the scalar kernels, which are the
//! specification, and the scalar ones against `f64`.

#![allow(clippy::unwrap_used)] // a failed unwrap fails the test

use kv_contract::Random;
use kv_cpu::isa::Isa;
use kv_cpu::kernels::{Decay, F32x16, Kernels, SCAN_WIDTH, ScanTile};
use kv_rows::StateType;

/// Lengths with every kind of remainder.
const LENGTHS: [usize; 9] = [0, 1, 7, 8, 9, 31, 33, 64, 257];

fn scalar() -> &'static Kernels {
    Kernels::for_isa(Isa::Scalar).unwrap()
}

fn tables() -> Vec<&'static Kernels> {
    let all = Isa::all_available().into_iter();
    all.map(|isa| Kernels::for_isa(isa).unwrap()).collect()
}

fn assert_near(got: f32, wanted: f64, allowed: f64, what: &str) {
    let error = (f64::from(got) - wanted).abs();
    assert!(
        error <= allowed,
        "{what}: {got}, not {wanted} (error {error:e} > {allowed:e})"
    );
}

#[test]
fn softplus_is_near_its_definition() {
    let mut random = Random::new(5);
    let mut x: Vec<f32> = (0..4000).map(|_| random.value() * 40.0).collect();
    x.extend([
        0.0,
        -0.0,
        1e-30,
        -1e-30,
        -80.0,
        -100.0,
        88.0,
        1e4,
        f32::MIN_POSITIVE,
    ]);
    for kernels in tables() {
        let mut got = x.clone();
        (kernels.softplus)(&mut got);
        for (got, x) in got.iter().zip(&x) {
            let x = f64::from(*x);
            let wanted = x.max(0.0) + (-x.abs()).exp().ln_1p();
            assert_near(
                *got,
                wanted,
                4e-7 * wanted + 1e-38,
                &format!("{kernels:?}: {x}"),
            );
        }
        for n in LENGTHS {
            let mut start = x[..n].to_vec();
            (kernels.softplus)(&mut start);
            assert_eq!(start, got[..n], "{kernels:?}, {n} values");
        }
    }
}

#[test]
fn multiply_add_is_near_its_definition() {
    for n in LENGTHS {
        let (a, b) = (Random::new(7).values(n), Random::new(8).values(n));
        let before = Random::new(9).values(n);
        for kernels in tables() {
            let mut got = before.clone();
            (kernels.multiply_add)(&mut got, &a, &b);
            let what = format!("{kernels:?}, {n} values");
            for (i, got) in got.iter().enumerate() {
                let product = f64::from(a[i]) * f64::from(b[i]);
                let wanted = f64::from(before[i]) + product;
                let size = f64::from(before[i]).abs() + product.abs();
                assert_near(*got, wanted, 2e-7 * size, &what);
            }
        }
    }
}

/// The decay of states.
#[derive(Clone, Copy, Debug)]
enum Variant {
    /// Each state value of a channel by itself.
    Mamba,
    /// All values of a channel alike.
    Mamba2,
}

/// Operands of a scan over the states of one tile of channels.
struct Scan {
    n_channels: usize,
    d_state: usize,
    rounding: StateType,
    rows: Vec<u32>,
    steps: Vec<F32x16>,
    rates: Vec<F32x16>,
    added: Vec<F32x16>,
    /// B from the first value on, C from the fourth.
    bc: Vec<f32>,
}

impl Scan {
    fn new(n_channels: usize, d_state: usize, n_rows: u32) -> Self {
        let mut random = Random::new(u64::from(n_rows) + 77);
        let mut lanes = |n: usize, map: fn(f32) -> f32| -> Vec<F32x16> {
            let mut lanes = || std::array::from_fn(|_| map(random.value()));
            (0..n).map(|_| lanes()).collect()
        };
        let n = n_rows as usize;
        Self {
            n_channels,
            d_state,
            rounding: StateType::F32,
            // Not in order, and not every row.
            rows: (0..n_rows).rev().map(|row| 2 * row).collect(),
            // Decays from nearly none to complete, also beyond the range of `f32`.
            steps: lanes(n, |x| (6.0 * x).exp()),
            rates: lanes(d_state, |x| -3.0 * x.abs()),
            added: lanes(n, |x| x),
            bc: random.values(2 * n * (d_state + 3) + 9),
        }
    }

    /// The tokens `range`, for the kernel.
    fn tile<'a>(
        &'a self,
        variant: Variant,
        range: std::ops::Range<usize>,
        state: &'a mut [f32],
        out: &'a mut [F32x16],
    ) -> ScanTile<'a> {
        let steps = &self.steps[range.clone()];
        ScanTile {
            state,
            d_state: self.d_state,
            rounding: self.rounding,
            decay: match variant {
                Variant::Mamba => Decay::PerValue {
                    steps,
                    rates: &self.rates,
                },
                Variant::Mamba2 => Decay::PerChannel(&self.added[range.clone()]),
            },
            added: &self.added[range.clone()],
            rows: &self.rows[range.clone()],
            b: &self.bc,
            c: &self.bc[3..],
            stride: self.d_state + 3,
            out: &mut out[range],
        }
    }

    /// States and outputs of a scan in pieces of so many tokens.
    fn run(&self, kernels: &Kernels, variant: Variant, piece: usize) -> (Vec<f32>, Vec<F32x16>) {
        let mut state = Random::new(3).values(self.n_channels * self.d_state);
        let round = |s: &mut f32| *s = self.rounding.round(*s);
        state.iter_mut().for_each(round);
        let mut out = vec![[0.25; SCAN_WIDTH]; self.rows.len()];
        for first in (0..self.rows.len()).step_by(piece) {
            let range = first..self.rows.len().min(first + piece);
            (kernels.scan_tile)(self.tile(variant, range, &mut state, &mut out));
        }
        (state, out)
    }
}

#[test]
fn scans_agree_with_the_scalar_one_and_do_not_depend_on_pieces() {
    for (n_channels, d_state, n_rows) in
        [(16, 16, 20), (16, 128, 5), (5, 3, 7), (9, 21, 4), (1, 1, 1)]
    {
        let scan = Scan::new(n_channels, d_state, n_rows);
        for variant in [Variant::Mamba, Variant::Mamba2] {
            let (state, out) = scan.run(scalar(), variant, 64);
            for kernels in tables() {
                let what = format!("{kernels:?}, {n_channels} channels, {d_state} values");
                let whole = scan.run(kernels, variant, 64);
                for (got, wanted) in whole.0.iter().zip(&state) {
                    assert_near(*got, f64::from(*wanted), 4e-6, &what);
                }
                let lanes = |out: &[F32x16]| -> Vec<f32> {
                    out.iter().flat_map(|o| o[..n_channels].to_vec()).collect()
                };
                for (got, wanted) in lanes(&whole.1).iter().zip(lanes(&out)) {
                    let allowed = 4e-6 * (d_state as f64).sqrt();
                    assert_near(*got, f64::from(wanted), allowed, &what);
                }
                for piece in [1, 3] {
                    let cut = scan.run(kernels, variant, piece);
                    assert_eq!(cut.0, whole.0, "{what}, pieces of {piece}");
                    assert_eq!(lanes(&cut.1), lanes(&whole.1), "{what}, pieces of {piece}");
                }
            }
        }
    }
}

/// What a row adds may be rounded one way or the other where kernels differ in the last bits.
#[test]
fn rounded_states_agree_and_do_not_depend_on_pieces() {
    for (rounding, allowed) in [(StateType::F16, 4e-3), (StateType::BF16, 4e-2)] {
        for (n_channels, d_state, n_rows) in [(16, 16, 20), (16, 128, 5), (5, 3, 7), (9, 21, 4)] {
            let scan = Scan {
                rounding,
                ..Scan::new(n_channels, d_state, n_rows)
            };
            for variant in [Variant::Mamba, Variant::Mamba2] {
                let (state, _) = scan.run(scalar(), variant, 64);
                for kernels in tables() {
                    let what = format!("{kernels:?}, {n_channels} x {d_state}, {rounding}");
                    let whole = scan.run(kernels, variant, 64);
                    for (got, wanted) in whole.0.iter().zip(&state) {
                        assert_near(*got, f64::from(*wanted), allowed, &what);
                        assert_eq!(rounding.round(*got), *got, "{what}");
                    }
                    let lanes = |out: &[F32x16]| -> Vec<f32> {
                        out.iter().flat_map(|o| o[..n_channels].to_vec()).collect()
                    };
                    for piece in [1, 3] {
                        let cut = scan.run(kernels, variant, piece);
                        assert_eq!(cut.0, whole.0, "{what}, pieces of {piece}");
                        assert_eq!(lanes(&cut.1), lanes(&whole.1), "{what}, pieces of {piece}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_channel_does_not_depend_on_its_neighbours() {
    for kernels in tables() {
        let scan = Scan::new(16, 20, 9);
        let whole = scan.run(kernels, Variant::Mamba, 64);
        let fewer = Scan {
            n_channels: 6,
            ..Scan::new(16, 20, 9)
        };
        let part = fewer.run(kernels, Variant::Mamba, 64);
        assert_eq!(part.0, whole.0[..6 * 20], "{kernels:?}");
        for (part, whole) in part.1.iter().zip(&whole.1) {
            assert_eq!(part[..6], whole[..6], "{kernels:?}");
        }
    }
}
