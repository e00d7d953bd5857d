//! Products of stored weight rows with activations, in plain Rust: GEMV and GEMM alike.

use std::ops::Range;

use kv_block::dequantize;

use crate::kernels::WeightRows;
use crate::operands::Activations;
use crate::output::OutputColumns;

/// Values of a weight row that are decoded at a time: a multiple of every format's block length.
const CHUNK: usize = 256;

/// Weights are decoded by the specification of their format, activations are taken for what they
/// stand for, and both are multiplied and summed from the first column to the last.
pub(in crate::kernels) fn matmul(
    weights: WeightRows<'_>,
    acts: Activations<'_>,
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    let n = weights.n_columns;
    match acts {
        Activations::F32(rows) => {
            let row = |token: usize| rows.get(token * n..(token + 1) * n).unwrap_or_default();
            matmul_values(weights, |token, c| row(token)[c], tokens, out);
        }
        Activations::Int8(rows) => {
            let value = |token: usize, c: usize| {
                let (scale, quant) = rows.value(token, c);
                scale * f32::from(quant)
            };
            matmul_values(weights, value, tokens, out);
        }
        Activations::Bf16(rows) => {
            let row = |token: usize| rows.row(token).unwrap_or_default();
            matmul_values(weights, |token, c| row(token)[c].to_f32(), tokens, out);
        }
    }
}

fn matmul_values(
    weights: WeightRows<'_>,
    value: impl Fn(usize, usize) -> f32,
    tokens: Range<usize>,
    out: &mut OutputColumns<'_>,
) {
    let WeightRows {
        format,
        // This table packs nothing.
        layout: _,
        bytes,
        row_bytes,
        first,
        n_columns,
    } = weights;
    let chunk_bytes = CHUNK / format.block_len() * format.block_bytes();
    for (column, row) in (first..).zip(bytes.chunks_exact(row_bytes.max(1))) {
        for token in tokens.clone() {
            let mut sum = 0.0;
            for (c, bytes) in row.chunks(chunk_bytes).enumerate() {
                let columns = c * CHUNK..n_columns.min((c + 1) * CHUNK);
                let mut values = [0.0; CHUNK];
                let values = &mut values[..columns.len()];
                dequantize(format, bytes, values);
                sum = values
                    .iter()
                    .zip(columns)
                    .fold(sum, |sum, (w, c)| sum + w * value(token, c));
            }
            out.set(token, column, sum);
        }
    }
}
