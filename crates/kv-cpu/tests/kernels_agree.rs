//! Every instruction set that this machine has against the scalar kernels, which are the
//! specification, and every matrix against sums in `f64`.

#![allow(clippy::unwrap_used)] // a failed unwrap fails the test

use half::f16;
use kv_block::{BlockFormat, dequantize, quantize};
use kv_contract::set_scales;
use kv_cpu::activations::{ActivationKind, Activations, Int8Buffer, RowBuffer, ScaleSpan};
use kv_cpu::isa::Isa;
use kv_cpu::kernels::Kernels;
use kv_cpu::matrix::Matrix;
use kv_cpu::output::{OutputColumns, SharedOutput};
use kv_graph::weights::Weight;

/// A small reproducible source of numbers (xorshift64*, Vigna, arXiv 1402.6246).
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// In −1..1.
    fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    fn units(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.unit()).collect()
    }
}

/// Rows of `n` values that are hard in different ways.
fn rows(n: usize) -> Vec<Vec<f32>> {
    let mut random = Random(n as u64 + 1);
    let mut outlier = random.units(n);
    if let Some(x) = outlier.last_mut() {
        *x = 4.0e4;
    }
    vec![
        random.units(n),
        random.units(n).iter().map(|x| x * 1.0e4).collect(),
        random.units(n).iter().map(|x| x * 1.0e-40).collect(),
        vec![0.0; n],
        vec![-0.75; n],
        outlier,
    ]
}

/// Lengths with every kind of tail.
const LENGTHS: [usize; 14] = [0, 1, 3, 7, 8, 9, 31, 32, 33, 40, 63, 64, 100, 257];

fn scalar() -> &'static Kernels {
    Kernels::for_isa(Isa::Scalar).unwrap()
}

fn tables() -> Vec<&'static Kernels> {
    let all = Isa::all_available().into_iter();
    all.map(|isa| Kernels::for_isa(isa).unwrap()).collect()
}

fn halves(x: &[f32]) -> Vec<f16> {
    x.iter().map(|x| f16::from_f32(*x)).collect()
}

/// Sum of products and of their magnitudes, in `f64`.
fn exact_dot(a: &[f32], b: &[f32]) -> (f64, f64) {
    let products = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b));
    products.fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p.abs()))
}

fn assert_near(got: f32, wanted: f64, allowed: f64, what: &str) {
    let error = (f64::from(got) - wanted).abs();
    assert!(
        error <= allowed,
        "{what}: {got}, not {wanted} (error {error:e} > {allowed:e})"
    );
}

/// Each value within `relative` of the scalar kernel's, or within `absolute`.
fn assert_rows_near(got: &[f32], wanted: &[f32], (relative, absolute): (f32, f32), what: &str) {
    for (i, (got, wanted)) in got.iter().zip(wanted).enumerate() {
        let same = got == wanted || (got.is_nan() && wanted.is_nan());
        let near = (got - wanted).abs() <= absolute.max(relative * wanted.abs());
        assert!(same || near, "{what}[{i}]: {got}, not {wanted}");
    }
}

#[test]
fn dot_products_and_maxima() {
    for kernels in tables() {
        for n in LENGTHS {
            let all = rows(n);
            for a in &all {
                for b in &all {
                    let what = format!("{} dot of {n}", kernels.isa);
                    let (wanted, size) = exact_dot(a, b);
                    assert_near((kernels.dot_f32)(a, b), wanted, 3e-6 * size + 1e-38, &what);
                    let b = halves(b);
                    let widened: Vec<f32> = b.iter().map(|b| b.to_f32()).collect();
                    let (wanted, size) = exact_dot(a, &widened);
                    assert_near((kernels.dot_f16)(a, &b), wanted, 3e-6 * size + 1e-38, &what);
                }
                assert_eq!(
                    (kernels.max)(a),
                    (scalar().max)(a),
                    "{} max of {n}",
                    kernels.isa
                );
            }
        }
        assert_eq!((kernels.max)(&[f32::NAN, -1.0, f32::NEG_INFINITY]), -1.0);
    }
}

#[test]
fn elementwise_operations() {
    type Binary = fn(&Kernels) -> fn(&mut [f32], &[f32]);
    // Products may be fused with sums, so errors are measured against the largest operand.
    let binary: [(&str, Binary, f32); 6] = [
        ("add", |k| k.add, 0.0),
        ("mul", |k| k.mul, 0.0),
        ("silu_mul", |k| k.silu_mul, 1e-6),
        ("sigmoid_mul", |k| k.sigmoid_mul, 1e-6),
        ("gelu_tanh_mul", |k| k.gelu_tanh_mul, 4e-6),
        ("gelu_erf_mul", |k| k.gelu_erf_mul, 4e-6),
    ];
    for kernels in tables() {
        for n in LENGTHS {
            for (a, b) in rows(n).iter().zip(rows(n).iter().cycle().skip(1)) {
                for (name, of, relative) in binary {
                    let (mut got, mut wanted) = (a.clone(), a.clone());
                    of(kernels)(&mut got, b);
                    of(scalar())(&mut wanted, b);
                    let what = format!("{} {name} of {n}", kernels.isa);
                    assert_rows_near(&got, &wanted, (relative, 1e-36), &what);
                }
                let halves = halves(b);
                let largest = a.iter().chain(b).fold(0.0f32, |m, x| m.max(x.abs()));
                for w in [0.0, -1.5, 1.0e3] {
                    let (mut got, mut wanted) = (a.clone(), a.clone());
                    (kernels.axpy_f32)(&mut got, w, b);
                    (scalar().axpy_f32)(&mut wanted, w, b);
                    let near = (0.0, largest * (w.abs() + 1.0) * 2e-7 + 1e-38);
                    assert_rows_near(&got, &wanted, near, "axpy_f32");
                    (kernels.axpy_f16)(&mut got, w, &halves);
                    (scalar().axpy_f16)(&mut wanted, w, &halves);
                    assert_rows_near(&got, &wanted, (0.0, 2.0 * near.1), "axpy_f16");
                    let (mut got, mut wanted) = (a.clone(), a.clone());
                    (kernels.scale)(&mut got, w);
                    (scalar().scale)(&mut wanted, w);
                    assert_eq!(got, wanted, "{} scale", kernels.isa);
                }
                let (mut got, mut wanted) = (vec![0.0; n], vec![0.0; n]);
                (kernels.rms_norm)(a, b, 1e-6, &mut got);
                (scalar().rms_norm)(a, b, 1e-6, &mut wanted);
                assert_rows_near(&got, &wanted, (4e-6, 1e-36), "rms_norm");
                let (mut got, mut wanted) = (a.clone(), a.clone());
                (kernels.soft_cap)(&mut got, 30.0);
                (scalar().soft_cap)(&mut wanted, 30.0);
                assert_rows_near(&got, &wanted, (0.0, 30.0 * 3e-7), "soft_cap");
            }
        }
    }
}

#[test]
fn half_precision_rounds_as_the_standard_says() {
    let special = [
        0.0,
        -0.0,
        65504.0,
        65520.0,
        1e9,
        6e-8,
        2.9e-8,
        1e-40,
        f32::INFINITY,
    ];
    for kernels in tables() {
        for n in LENGTHS {
            let x: Vec<f32> = rows(n)[1].iter().chain(&special).copied().collect();
            let (mut got, mut back) = (vec![f16::ONE; x.len()], vec![f32::NAN; x.len()]);
            (kernels.f32_to_f16)(&x, &mut got);
            let wanted = halves(&x);
            assert!(
                got.iter()
                    .zip(&wanted)
                    .all(|(a, b)| a.to_bits() == b.to_bits())
            );
            (kernels.f16_to_f32)(&got, &mut back);
            assert!(
                back.iter()
                    .zip(&wanted)
                    .all(|(a, b)| a.to_bits() == b.to_f32().to_bits())
            );
        }
    }
}

#[test]
fn the_exponential_is_accurate_everywhere() {
    // 1.2 million points over the whole range, subnormal results included.
    let x: Vec<f32> = (0..1_200_000)
        .map(|i| -106.0 + i as f32 * 1.62e-4)
        .collect();
    for kernels in tables() {
        let mut got = x.clone();
        (kernels.exp_sum)(&mut got, 0.0);
        for (x, got) in x.iter().zip(&got) {
            let wanted = f64::from(*x).exp();
            // Overflow begins half a unit above the largest number.
            if wanted > f64::from(f32::MAX) {
                assert!(*got >= f32::MAX, "{} e^{x}: {got}", kernels.isa);
                continue;
            }
            // A unit in the last place is at most 2^-23 of a normal number.
            let allowed = (wanted * 2.0f64.powi(-22)).max(2.0f64.powi(-148));
            assert_near(*got, wanted, allowed, &format!("{} e^{x}", kernels.isa));
        }
        let mut special = [0.0, f32::NEG_INFINITY, f32::NAN, f32::INFINITY, -1e30, 1e30];
        (kernels.exp_sum)(&mut special, 0.0);
        assert_eq!(special[..2], [1.0, 0.0], "{}", kernels.isa);
        assert!(special[2].is_nan());
        assert_eq!(special[3..], [f32::INFINITY, 0.0, f32::INFINITY]);
    }
}

#[test]
fn exponentials_do_not_depend_on_where_they_stand() {
    let x: Vec<f32> = Random(5).units(70).iter().map(|x| x * 20.0).collect();
    for kernels in tables() {
        for n in 1..x.len() {
            let (mut part, mut whole) = (x[..n].to_vec(), x.clone());
            let sum = (kernels.exp_sum)(&mut part, 20.0);
            (kernels.exp_sum)(&mut whole, 20.0);
            assert_eq!(part, whole[..n], "{} of {n}", kernels.isa);
            let exact: f64 = part.iter().map(|e| f64::from(*e)).sum();
            assert_near(sum, exact, 2e-6 * exact, "sum of exponentials");
        }
    }
}

#[test]
fn quantised_activations_are_the_same_bits_everywhere() {
    for n in [1, 31, 32, 33, 96, 256, 300] {
        for mut x in rows(n) {
            for special in [None, Some(f32::NAN), Some(f32::INFINITY), Some(1.5e-36)] {
                if let Some(special) = special {
                    x[n / 2] = special;
                }
                for span in [ScaleSpan::Block, ScaleSpan::SuperBlock] {
                    let of = |kernels: &Kernels| {
                        let mut buffer = Int8Buffer::with_span(span);
                        buffer.reshape(1, n);
                        buffer.quantize(kernels, &x);
                        // Everything in it, by its exact decimal form.
                        format!("{:?}", buffer.rows())
                    };
                    for kernels in tables() {
                        assert_eq!(of(kernels), of(scalar()), "{} {n} {special:?}", kernels.isa);
                    }
                }
            }
        }
    }
}

#[test]
fn int8_activations_are_within_half_a_step() {
    for x in rows(300) {
        for (span, len) in [(ScaleSpan::Block, 32), (ScaleSpan::SuperBlock, 256)] {
            let mut buffer = Int8Buffer::with_span(span);
            buffer.reshape(1, x.len());
            buffer.quantize(scalar(), &x);
            let got = buffer.rows().dequantized(0).unwrap();
            for (x, got) in x.chunks(len).zip(got.chunks(len)) {
                let largest = x.iter().fold(0.0f32, |m, x| m.max(x.abs()));
                let step = largest / 127.0;
                assert!(
                    x.iter()
                        .zip(got)
                        .all(|(a, b)| (a - b).abs() <= 0.5001 * step + 2e-36)
                );
            }
        }
    }
}

#[test]
fn activations_of_bf16_are_the_nearest_everywhere() {
    let special = [
        (0.0, 0.0),
        (-0.0, -0.0),
        (f32::MIN_POSITIVE, f32::MIN_POSITIVE),
        // Subnormal numbers count as zero, even the last one, which would be rounded up.
        (f32::MIN_POSITIVE / 2.0, 0.0),
        (-f32::from_bits(0x007f_ffff), -0.0),
        // Ties go to even.
        (1.0 + 1.0 / 256.0, 1.0),
        (1.0 + 3.0 / 256.0, 1.0 + 1.0 / 64.0),
        (1.0 + 3.1 / 256.0, 1.0 + 1.0 / 64.0),
        (f32::MAX, f32::INFINITY),
        (f32::NEG_INFINITY, f32::NEG_INFINITY),
    ];
    for n in [1, 15, 16, 33, 64, 300] {
        for kernels in tables() {
            let of = |x: &[f32]| -> Vec<f32> {
                let mut buffer = RowBuffer::of_each_kind().into_iter().last().unwrap();
                buffer.reshape(1, n);
                buffer.quantize(kernels, x);
                let Activations::Bf16(rows) = buffer.rows() else {
                    panic!("not BF16");
                };
                rows.row(0).unwrap().iter().map(|x| x.to_f32()).collect()
            };
            for x in rows(n) {
                for (x, got) in x.iter().zip(of(&x)) {
                    let at_most = f32::MIN_POSITIVE.max(x.abs() / 256.0);
                    assert!((x - got).abs() <= at_most, "{}: {x} to {got}", kernels.isa);
                }
            }
            for (x, wanted) in special {
                let got = of(&vec![x; n])[n - 1];
                assert_eq!(got.to_bits(), wanted.to_bits(), "{}: {x:e}", kernels.isa);
            }
            assert!(of(&vec![f32::NAN; n])[n - 1].is_nan(), "{}", kernels.isa);
        }
    }
}

#[test]
fn a_buffer_forgets_what_it_held() {
    let x = Random(3).units(3 * 40);
    for kernels in tables() {
        let mut fresh = Int8Buffer::with_capacity(3, 40);
        let mut used = Int8Buffer::with_capacity(5, 1024);
        used.quantize(kernels, &vec![1.0; 5 * 1024]);
        used.reshape(3, 40);
        used.quantize(kernels, &x);
        fresh.quantize(kernels, &x);
        assert_eq!(format!("{:?}", used.rows()), format!("{:?}", fresh.rows()));
    }
}

/// Random bytes, with scales of sane size where the format has them.
fn random_weight(format: BlockFormat, n_rows: usize, n_columns: usize, seed: u64) -> Weight {
    let mut random = Random(seed * 977 + format as u64 + 1);
    let n_blocks = n_rows * n_columns / format.block_len();
    let mut bytes = Vec::new();
    for _ in 0..n_blocks {
        let mut block: Vec<u8> = (0..format.block_bytes())
            .map(|_| random.bits() as u8)
            .collect();
        let size = match format {
            BlockFormat::F32 => {
                block.copy_from_slice(&random.unit().to_le_bytes());
                0.0
            }
            BlockFormat::F16 => 1.0,
            BlockFormat::BF16 => {
                block.copy_from_slice(&half::bf16::from_f32(random.unit()).to_le_bytes());
                0.0
            }
            _ => 0.02,
        };
        set_scales(format, &mut block, || random.unit() * size);
        bytes.extend(block);
    }
    Weight::new("w", vec![n_rows, n_columns], format, bytes.into()).unwrap()
}

/// Numbers of columns that a format can have, with every kind of tail.
fn widths(format: BlockFormat) -> &'static [usize] {
    match format.block_len() {
        1 => &[1, 5, 8, 13, 16, 24, 31, 256, 300],
        32 => &[32, 64, 96, 224, 256, 352, 1024],
        64 => &[64, 192, 256, 320, 1088],
        128 => &[128, 384, 512, 1152],
        _ => &[256, 512, 1280],
    }
}

/// The weight with every kind of activations that it can have.
fn matrices(weight: &Weight) -> Vec<Matrix> {
    let mut kinds = vec![ActivationKind::Int8, ActivationKind::F32];
    if weight.format() == BlockFormat::BF16 {
        kinds.push(ActivationKind::Bf16);
    }
    let matrix = |kind| Matrix::with_activations(weight.clone(), kind).unwrap();
    kinds.into_iter().map(matrix).collect()
}

/// A matrix with the kernels of every instruction set.
fn with_tables(matrix: Matrix) -> Vec<(Matrix, &'static Kernels)> {
    tables()
        .into_iter()
        .map(|kernels| (matrix.clone(), kernels))
        .collect()
}

/// Memory for the activations that `matrix` wants, unless they are taken as they are.
fn buffer_for(matrix: &Matrix, n_tokens: usize) -> Option<RowBuffer> {
    let mut buffers = RowBuffer::of_each_kind().into_iter();
    let mut buffer = buffers.find(|rows| rows.kind() == matrix.activation_kind())?;
    buffer.reshape(n_tokens, matrix.n_columns());
    Some(buffer)
}

/// All outputs of `matrix` for the rows of `x`.
fn product(matrix: &Matrix, kernels: &Kernels, x: &[f32]) -> Vec<f32> {
    let n_tokens = x.len() / matrix.n_columns();
    let mut values = vec![f32::NAN; n_tokens * matrix.n_rows()];
    let mut out = OutputColumns::all(&mut values, matrix.n_rows());
    let mut buffer = buffer_for(matrix, n_tokens);
    let acts = buffer.as_mut().map_or(Activations::F32(x), |rows| {
        rows.quantize(kernels, x);
        rows.rows()
    });
    matrix.multiply(kernels, acts, &mut out).unwrap();
    values
}

/// The values that the prepared activations stand for.
fn as_prepared(matrix: &Matrix, x: &[f32]) -> Vec<f32> {
    let Some(mut buffer) = buffer_for(matrix, 1) else {
        return x.to_vec();
    };
    buffer.quantize(scalar(), x);
    match buffer.rows() {
        Activations::F32(values) => values.to_vec(),
        Activations::Int8(rows) => rows.dequantized(0).unwrap(),
        Activations::Bf16(rows) => rows.row(0).unwrap().iter().map(|x| x.to_f32()).collect(),
    }
}

#[test]
fn products_are_those_of_decoded_weights() {
    const ROWS: usize = 3;
    for format in BlockFormat::ALL {
        for &n in widths(format) {
            let weight = random_weight(format, ROWS, n, 3);
            let decoded = weight.to_f32();
            for (matrix, kernels) in matrices(&weight).into_iter().flat_map(with_tables) {
                for x in rows(n) {
                    let got = product(&matrix, kernels, &x);
                    let prepared = as_prepared(&matrix, &x);
                    // An int8 step is 1/127 of a block's largest value; half of it is lost.
                    let largest = x.iter().fold(0.0f32, |m, x| m.max(x.abs()));
                    for (got, row) in got.iter().zip(decoded.chunks(n)) {
                        let what = format!("{} {format} of {n}", kernels.isa);
                        let (wanted, size) = exact_dot(row, &prepared);
                        assert_near(*got, wanted, 1e-5 * size + 1e-37, &what);
                        let (wanted, size) = exact_dot(row, &x);
                        let weights: f64 = row.iter().map(|w| f64::from(w.abs())).sum();
                        let lost = weights * f64::from(largest) / 250.0;
                        assert_near(*got, wanted, lost + 1e-5 * size + 1e-30, &what);
                    }
                }
            }
        }
    }
}

/// Floats go through panels of columns where there are many tokens: of several, of a part of one,
/// with columns, rows and tokens that are left over.
#[test]
fn products_of_many_tokens_are_those_of_one() {
    for format in [BlockFormat::F32, BlockFormat::F16, BlockFormat::BF16] {
        for (n_rows, n) in [(6, 512), (13, 1024), (7, 1100), (25, 2071)] {
            let weight = random_weight(format, n_rows, n, 5);
            for (matrix, kernels) in matrices(&weight).into_iter().flat_map(with_tables) {
                for n_tokens in [15, 16, 33, 62] {
                    let x = Random(n_tokens as u64).units(n_tokens * n);
                    let got = product(&matrix, kernels, &x);
                    let alone = x.chunks(n).flat_map(|x| product(&matrix, kernels, x));
                    let what = format!("{} {format}, {n_tokens} of {n_rows} x {n}", kernels.isa);
                    assert!(
                        got.into_iter()
                            .map(f32::to_bits)
                            .eq(alone.map(f32::to_bits)),
                        "{what}"
                    );
                }
            }
        }
    }
}

/// What is subtracted as a minimum counts as a product of its own: so many scales for each value.
fn largest_minimum(format: BlockFormat) -> f64 {
    match format {
        BlockFormat::Q4_1 | BlockFormat::Q5_1 => 1.0,
        BlockFormat::Q2_K => 15.0,
        BlockFormat::Q4_K | BlockFormat::Q5_K => 63.0,
        _ => 0.0,
    }
}

/// All products against sums in `f64`; `scale` is the largest of the weights.
fn assert_products(weight: &Weight, x: &[f32], scale: f32) {
    let (format, n) = (weight.format(), weight.n_columns());
    let decoded = weight.to_f32();
    for matrix in matrices(weight) {
        let rows = x.chunks(n).flat_map(|x| {
            let x = as_prepared(&matrix, x);
            let sizes: f64 = x.iter().map(|x| f64::from(x.abs())).sum();
            let minima = f64::from(scale.abs()) * largest_minimum(format) * sizes;
            let row = decoded.chunks(n).map(move |w| (exact_dot(w, &x), minima));
            row.collect::<Vec<_>>()
        });
        let wanted: Vec<_> = rows.collect();
        for kernels in tables() {
            let what = format!("{} {format} scaled {scale:e}", kernels.isa);
            let got = product(&matrix, kernels, x);
            for (got, ((wanted, size), minima)) in got.iter().zip(&wanted) {
                // The smallest powers of two make products of scales that are no normal numbers.
                assert_near(*got, *wanted, 1e-5 * (size + minima) + 1e-39, &what);
            }
        }
    }
}

/// Tokens whose products with equal weights are as large as they get, and others beside them.
fn extreme_rows(n: usize) -> Vec<f32> {
    let alternating = (0..n).map(|i| if i % 2 == 0 { 3.0 } else { -3.0 });
    [vec![3.0; n], vec![-3.0; n], alternating.collect()]
        .into_iter()
        .chain(rows(n))
        .flatten()
        .collect()
}

#[test]
fn extreme_quants_do_not_overflow() {
    // All bits set or none: the largest magnitudes of quants against the largest activations.
    const ROWS: usize = 19;
    for format in BlockFormat::ALL.into_iter().filter(|f| f.block_len() > 1) {
        let n = 512;
        for fill in [0x00, 0xff, 0x80, 0x7f] {
            let mut bytes = vec![fill; ROWS * n / format.block_len() * format.block_bytes()];
            for block in bytes.chunks_mut(format.block_bytes()) {
                set_scales(format, block, || 0.5);
            }
            let weight = Weight::new("w", vec![ROWS, n], format, bytes.into()).unwrap();
            assert_products(&weight, &extreme_rows(n), 0.5);
            assert_products(&weight, &vec![3.0; n], 0.5);
        }
    }
}

/// Eight tokens whose quants are the values, with signs alike or not, and whose magnitudes sum up
/// to `sum` in each half of a block but the first, where one value is the largest.
fn rows_of_sum(n: usize, sum: usize) -> Vec<f32> {
    let mut x = vec![0.0; 8 * n];
    for (token, row) in x.chunks_mut(n).enumerate() {
        for (i, half) in row.chunks_mut(16).enumerate() {
            for (j, x) in half.iter_mut().enumerate() {
                *x = (sum / 16 + usize::from(j < sum % 16)) as f32;
                *x *= if token % 2 == 1 || token > 3 && i % 3 == 0 {
                    -1.0
                } else {
                    1.0
                };
            }
            if i % 16 == 0 {
                half.fill(0.0);
                half[0] = 127.0;
            }
        }
    }
    x
}

#[test]
fn sums_just_within_sixteen_bits_and_beyond_them() {
    const ROWS: usize = 32;
    let n = 512;
    for format in BlockFormat::ALL
        .into_iter()
        .filter(|f| f.block_len() == 256)
    {
        for fill in [0x00, 0xff] {
            let mut bytes = vec![fill; ROWS * n / format.block_len() * format.block_bytes()];
            for block in bytes.chunks_mut(format.block_bytes()) {
                set_scales(format, block, || 0.5);
            }
            let weight = Weight::new("w", vec![ROWS, n], format, bytes.into()).unwrap();
            let matrix = Matrix::new(weight).unwrap();
            // 32 · 1023 and 15 · 2 · 1092 are the largest products of 16 bits with Q6_K and Q4_K.
            for sum in [1022, 1023, 1024, 1025, 1091, 1092, 1093, 1094, 1500] {
                let x = rows_of_sum(n, sum);
                for kernels in tables().into_iter().filter(|k| k.isa != Isa::Scalar) {
                    let together = product(&matrix, kernels, &x);
                    for (x, together) in x.chunks(n).zip(together.chunks(ROWS)) {
                        let alone = product(&matrix, kernels, x);
                        assert_eq!(alone, together, "{} {format}: {sum}", kernels.isa);
                    }
                }
            }
        }
    }
}

/// The weight with this scale in all blocks; numbers without one are multiplied by it.
fn rescaled(weight: &Weight, scale: f32) -> Weight {
    let format = weight.format();
    let mut bytes: Vec<u8> = weight.bytes().to_vec();
    match format {
        BlockFormat::F32 | BlockFormat::F16 | BlockFormat::BF16 => {
            let values: Vec<f32> = weight.to_f32().iter().map(|w| w * scale).collect();
            bytes = quantize(format, &values).unwrap();
        }
        _ => {
            for block in bytes.chunks_mut(format.block_bytes()) {
                set_scales(format, block, || scale);
            }
        }
    }
    Weight::new("w", weight.shape().to_vec(), format, bytes.into()).unwrap()
}

#[test]
fn scales_of_any_size_and_rows_of_any_number() {
    // Half precision from its smallest subnormal number to its largest.
    let scales = [0.0, 6e-8, -3e-5, 1.0, -65504.0];
    for format in BlockFormat::ALL {
        let n = widths(format)[widths(format).len() / 2];
        for (n_rows, scale) in [1, 7, 8, 33, 47].into_iter().zip(scales) {
            let weight = rescaled(&random_weight(format, n_rows, n, 31), scale);
            assert_products(&weight, &extreme_rows(n), scale);
            assert_products(&weight, &rows(n)[0], scale);
        }
    }
}

/// Powers of two reach further than half precision. A block with one value shows them exactly, also
/// where they are no normal numbers.
#[test]
fn powers_of_two_of_any_size_are_exact() {
    let format = BlockFormat::MXFP4;
    let mut x = vec![0.0; format.block_len()];
    x[0] = 127.0 / 256.0; // 127 steps of a power of two
    for index in 0..16 {
        let mut bytes = vec![0; 256 * format.block_bytes()];
        for (e, block) in (0..=255).zip(bytes.chunks_mut(format.block_bytes())) {
            (block[0], block[1]) = (e, index);
        }
        let weight = Weight::new("w", vec![256, x.len()], format, bytes.into()).unwrap();
        let decoded = weight.to_f32();
        let first = decoded.chunks(x.len()).map(|row| row[0]);
        let matrix = Matrix::new(weight).unwrap();
        for kernels in tables() {
            for n_tokens in [1, 3] {
                let got = product(&matrix, kernels, &x.repeat(n_tokens));
                let all = got.iter().zip(first.clone().cycle()).enumerate();
                // With the largest exponents some values are larger than any `f32`.
                for (i, (got, w)) in all.filter(|(_, (_, w))| w.is_finite()) {
                    assert_eq!(*got, w * x[0], "{} e {} of {w:e}", kernels.isa, i % 256);
                }
            }
        }
    }
}

/// Sums within blocks are exact, and what is made of them is one chain of fused additions: whatever
/// the width of registers, for one token and for several, and for rows so long that only few of
/// them are taken together.
#[test]
fn int8_products_are_the_same_bits_with_registers_of_any_width() {
    // `NVFP4` is multiplied as floats.
    let formats = BlockFormat::ALL
        .into_iter()
        .filter(|f| *f != BlockFormat::NVFP4);
    for format in formats.filter(|f| f.block_len() > 1) {
        let long = 113 * 32_usize.max(format.block_len() / 4);
        let long = long.next_multiple_of(format.block_len());
        for n in [widths(format)[widths(format).len() - 1], long] {
            let matrix = Matrix::new(random_weight(format, 45, n, 41)).unwrap();
            for x in [extreme_rows(n), Random(43).units(n), rows(n)[0].clone()] {
                let vector = tables().into_iter().filter(|k| k.isa != Isa::Scalar);
                let all: Vec<_> = vector
                    .map(|kernels| (kernels.isa, product(&matrix, kernels, &x)))
                    .collect();
                for pair in all.windows(2) {
                    assert_eq!(
                        pair[0].1, pair[1].1,
                        "{format}, {n} columns: {} {}",
                        pair[0].0, pair[1].0
                    );
                }
                let last = &x[x.len() - n..];
                for kernels in tables() {
                    let alone = product(&matrix, kernels, last);
                    let together = product(&matrix, kernels, &x);
                    assert!(
                        together.ends_with(&alone),
                        "{format}, {n} columns: {}",
                        kernels.isa
                    );
                }
            }
        }
    }
}

#[test]
fn a_row_is_the_same_bits_alone_and_in_company() {
    const ROWS: usize = 37;
    const TOKENS: usize = 23;
    for format in BlockFormat::ALL {
        let n = widths(format)[widths(format).len() - 1];
        let mut x = Random(format as u64 + 7).units(TOKENS * n);
        x[3 * n + 1] = f32::NAN; // stays in its own row
        let weight = random_weight(format, ROWS, n, 9);
        for (matrix, kernels) in matrices(&weight).into_iter().flat_map(with_tables) {
            let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            let together = product(&matrix, kernels, &x);
            for n_tokens in [1, 2, 4, 5, 8, 9, 16] {
                for (first, part) in x.chunks(n_tokens * n).enumerate() {
                    let at = first * n_tokens * ROWS;
                    let alone = product(&matrix, kernels, part);
                    assert_eq!(
                        bits(&alone),
                        bits(&together[at..at + alone.len()]),
                        "{} {format}: {n_tokens} tokens",
                        kernels.isa
                    );
                }
            }
            assert!(together[3 * ROWS..4 * ROWS].iter().all(|v| v.is_nan()));
            assert!(together[..3 * ROWS].iter().all(|v| v.is_finite()));
            assert_eq!(
                bits(&in_threads(&matrix, kernels, &x)),
                bits(&together),
                "{format}"
            );
        }
    }
}

/// The same product, computed by three threads with uneven shares of the weight rows.
fn in_threads(matrix: &Matrix, kernels: &'static Kernels, x: &[f32]) -> Vec<f32> {
    let (n_rows, n_tokens) = (matrix.n_rows(), x.len() / matrix.n_columns());
    let mut values = vec![f32::NAN; n_tokens * n_rows];
    let out = SharedOutput::new(&mut values, n_rows);
    let mut buffer = buffer_for(matrix, n_tokens);
    if let Some(shared) = buffer.as_mut().map(RowBuffer::shared) {
        std::thread::scope(|scope| {
            for first in 0..2 {
                scope.spawn(move || {
                    let rows = x.chunks(matrix.n_columns()).enumerate();
                    for (token, values) in rows.skip(first).step_by(2) {
                        // SAFETY: the two threads prepare different rows, which are not read yet.
                        unsafe { shared.quantize_row(kernels, token, values) };
                    }
                });
            }
        });
    }
    let acts = buffer.as_ref().map_or(Activations::F32(x), RowBuffer::rows);
    std::thread::scope(|scope| {
        for columns in [0..1, 1..n_rows / 2, n_rows / 2..n_rows] {
            // SAFETY: the three ranges do not overlap.
            let mut out = unsafe { out.columns(columns) };
            scope.spawn(move || matrix.multiply(kernels, acts, &mut out).unwrap());
        }
    });
    values
}

#[test]
fn rows_decode_to_the_specification() {
    for format in BlockFormat::ALL {
        let n = widths(format)[1];
        let weight = random_weight(format, 4, n, 21);
        let matrix = Matrix::new(weight.clone()).unwrap();
        let row_bytes = format.row_bytes(n).unwrap();
        for i in 0..4 {
            let (mut got, mut wanted) = (vec![f32::NAN; n], vec![f32::NAN; n]);
            matrix.row(scalar(), i, &mut got).unwrap();
            dequantize(
                format,
                &weight.bytes()[i * row_bytes..(i + 1) * row_bytes],
                &mut wanted,
            );
            assert_eq!(got, wanted, "{format} row {i}");
        }
        assert!(matrix.row(scalar(), 4, &mut vec![0.0; n]).is_err());
        assert!(matrix.row(scalar(), 0, &mut vec![0.0; n + 1]).is_err());
    }
}

#[test]
fn what_does_not_fit_is_an_error() {
    let vector = Weight::new("b", vec![4], BlockFormat::F32, vec![0; 16].into()).unwrap();
    let error = Matrix::new(vector).unwrap_err().to_string();
    assert!(error.contains("'b'") && error.contains("[4]"), "{error}");

    let matrix = Matrix::new(random_weight(BlockFormat::Q8_0, 2, 64, 1)).unwrap();
    let (x, mut values) = (vec![1.0; 64], vec![0.0; 2]);
    let mut multiply = |acts: Activations<'_>, n_columns| {
        let mut out = OutputColumns::all(&mut values, n_columns);
        matrix
            .multiply(scalar(), acts, &mut out)
            .unwrap_err()
            .to_string()
    };
    assert!(multiply(Activations::F32(&x), 2).contains("Int8"));
    let mut buffer = Int8Buffer::with_capacity(1, 32);
    buffer.quantize(scalar(), &x[..32]);
    assert!(multiply(Activations::Int8(buffer.rows()), 2).contains("32"));
    buffer.reshape(1, 64);
    buffer.quantize(scalar(), &x);
    assert!(multiply(Activations::Int8(buffer.rows()), 1).contains("2"));
}
