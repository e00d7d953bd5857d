//! Planes, embeddings and products in every block format at odd sizes, against the decoding that
//! defines the formats.

#![allow(clippy::unwrap_used, clippy::panic)]

use kv_backend::GraphInputs;
use kv_block::BlockFormat;
use kv_contract::{Random, block_weight};
use kv_gpu::{Precision, has_kernels};
use kv_graph::weights::{MemoryWeights, Weight, WeightSource};
use kv_graph::{Affine, GraphBuilder, GraphShape, Input};

use crate::support::{compare, graph, run};

/// The formats that there are kernels for.
fn formats() -> impl Iterator<Item = BlockFormat> {
    BlockFormat::ALL.into_iter().filter(|f| has_kernels(*f))
}

/// Widths of rows of a format: its shortest, an odd one, and one that four warps share.
fn widths(format: BlockFormat) -> &'static [usize] {
    match format.block_len() {
        1 => &[1, 37, 40, 1160],
        32 => &[32, 96, 2112],
        64 => &[64, 192, 2112],
        128 => &[128, 384, 2176],
        _ => &[256, 2304],
    }
}

/// Errors that products may have, relative to their size: with floats, and as fast as possible.
fn tolerances(format: BlockFormat, n_tokens: usize) -> [f64; 2] {
    match (format, n_tokens > 8) {
        // Halves have 11 bits.
        (_, true) => [1e-6, 4e-4],
        (BlockFormat::F32 | BlockFormat::F16 | BlockFormat::BF16, _) => [1e-6, 1e-6],
        // 127 steps of a block's largest activation.
        (_, false) => [1e-6, 8e-3],
    }
}

fn weights_of(name: &str, n_rows: usize, width: usize, format: BlockFormat) -> MemoryWeights {
    let mut weights = MemoryWeights::new();
    weights.insert(block_weight(name, &[n_rows, width], format));
    weights
}

#[test]
fn planes_hold_what_the_scalar_decoding_gives() {
    for format in formats() {
        for &width in widths(format) {
            let mut b = GraphBuilder::new(GraphShape {
                n_tokens: 7,
                n_outputs: 0,
            });
            let tokens = b.input(Input::Tokens).unwrap();
            let y = b.embed("y", tokens, "w", [7, width]).unwrap();
            let graph = b.finish(&[y]).unwrap();
            let weights = weights_of("w", 7, width, format);
            let inputs = GraphInputs {
                tokens: &[0, 1, 2, 3, 4, 5, 6],
                ..GraphInputs::default()
            };
            let wanted = weights.get("w").unwrap().to_f32();
            let got = run(&graph, &weights, inputs, Precision::Fast);
            // Bit for bit.
            assert_eq!(got[0], wanted, "{format}, rows of {width}");
        }
    }
}

#[test]
fn one_to_eight_tokens_are_multiplied_in_every_format() {
    for format in formats() {
        for (&width, n_tokens) in widths(format).iter().zip([1, 3, 8, 1]) {
            let graph = graph(n_tokens, width, |b, x| {
                vec![b.affine("y", x, Affine::new("w").bias("b"), 19).unwrap()]
            });
            let mut weights = weights_of("w", 19, width, format);
            let mut random = Random::new(3);
            weights.insert_f32("b", &[19], &random.values(19)).unwrap();
            let x = random.values(n_tokens * width);
            compare(&graph, &weights, &x, tolerances(format, n_tokens));
        }
    }
}

#[test]
fn many_tokens_are_multiplied_in_every_format() {
    for format in formats() {
        let widths = widths(format);
        for (&width, n_tokens) in widths[..widths.len() - 1].iter().zip([9, 130, 11]) {
            let graph = graph(n_tokens, width, |b, x| {
                vec![b.affine("y", x, Affine::new("w").bias("b"), 67).unwrap()]
            });
            let mut weights = weights_of("w", 67, width, format);
            let mut random = Random::new(4);
            weights.insert_f32("b", &[67], &random.values(67)).unwrap();
            let x = random.values(n_tokens * width);
            compare(&graph, &weights, &x, tolerances(format, n_tokens));
        }
    }
}

#[test]
fn matrices_of_one_input_are_multiplied_together() {
    let (q4_0, q8_0) = (BlockFormat::Q4_0, BlockFormat::Q8_0);
    for n_tokens in [1, 5, 12] {
        let graph = graph(n_tokens, 96, |b, x| {
            let mut outputs = Vec::new();
            for (name, n_out) in [("q", 21), ("k", 5), ("other", 3), ("v", 8), ("gate", 1)] {
                let affine = Affine::new(name).bias("b");
                outputs.push(match name {
                    "k" => b.affine(name, x, affine, n_out).unwrap(),
                    _ => b.linear(name, x, name, n_out).unwrap(),
                });
            }
            // Another input, which is made of one of the results.
            outputs.push(b.linear("last", outputs[0], "last", 2).unwrap());
            outputs
        });
        let mut weights = MemoryWeights::new();
        for (name, n_out) in [("q", 21), ("k", 5), ("v", 8), ("gate", 1)] {
            weights.insert(block_weight(name, &[n_out, 96], q4_0));
        }
        weights.insert(block_weight("other", &[3, 96], q8_0));
        weights.insert(block_weight("last", &[2, 21], BlockFormat::F16));
        let mut random = Random::new(5);
        weights.insert_f32("b", &[5], &random.values(5)).unwrap();
        let x = random.values(n_tokens * 96);
        compare(&graph, &weights, &x, [1e-5, 2e-2]);
    }
}

#[test]
fn activations_of_any_size_are_multiplied() {
    // Rows beyond what halves hold, rows of zeros, and tiny ones.
    for (n_tokens, scale) in [(9, 3e30), (9, 1e-30), (9, 0.0), (2, 1e30), (2, 0.0)] {
        let graph = graph(n_tokens, 64, |b, x| vec![b.linear("y", x, "w", 5).unwrap()]);
        let weights = weights_of("w", 5, 64, BlockFormat::Q8_0);
        let x: Vec<f32> = Random::new(6).values(n_tokens * 64);
        let x: Vec<f32> = x.iter().map(|x| x * scale).collect();
        if scale == 0.0 {
            let inputs = GraphInputs {
                embeddings: &x,
                ..GraphInputs::default()
            };
            let got = run(&graph, &weights, inputs, Precision::Fast);
            assert!(got[0].iter().all(|&y| y == 0.0), "{:?}", got[0]);
        } else {
            compare(&graph, &weights, &x, [1e-6, 1e-2]);
        }
    }
}

/// Halves end at 65504 and have few bits below 2^-14.
#[test]
fn weights_that_halves_do_not_hold_are_multiplied() {
    for format in [BlockFormat::F32, BlockFormat::BF16] {
        for (scale, width) in [(1e9, 72), (1e-12, 72), (3e5, 37), (1e-12, 37)] {
            let graph = graph(9, width, |b, x| vec![b.linear("y", x, "w", 67).unwrap()]);
            let mut random = Random::new(8);
            let bits = random
                .values(67 * width)
                .into_iter()
                .map(|w| (w * scale).to_bits());
            let bytes: Vec<u8> = match format {
                BlockFormat::F32 => bits.flat_map(u32::to_le_bytes).collect(),
                // Its upper half.
                _ => bits
                    .flat_map(|bits| ((bits >> 16) as u16).to_le_bytes())
                    .collect(),
            };
            let mut weights = MemoryWeights::new();
            weights.insert(Weight::new("w", vec![67, width], format, bytes.into()).unwrap());
            let x = random.values(9 * width);
            compare(&graph, &weights, &x, [1e-6, 4e-4]);
        }
    }
}

#[test]
fn values_that_are_not_finite_are_seen_in_products() {
    for (n_tokens, precision) in [
        (1, Precision::Fast),
        (9, Precision::Fast),
        (1, Precision::Precise),
    ] {
        let graph = graph(n_tokens, 64, |b, x| vec![b.linear("y", x, "w", 5).unwrap()]);
        let weights = weights_of("w", 5, 64, BlockFormat::Q8_0);
        let mut x: Vec<f32> = Random::new(6).values(n_tokens * 64);
        x[40] = f32::NAN;
        let inputs = GraphInputs {
            embeddings: &x,
            ..GraphInputs::default()
        };
        let got = run(&graph, &weights, inputs, precision);
        assert!(got[0][..5].iter().all(|y| y.is_nan()), "{:?}", got[0]);
        assert!(got[0][5..].iter().all(|y| y.is_finite()), "{:?}", got[0]);
    }
}
