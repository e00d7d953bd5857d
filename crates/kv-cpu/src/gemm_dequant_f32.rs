//! GEMV and GEMM on quantized weights with `f32` activations: weights are dequantized piece by
//! piece.
//!
//! Invariant: each output adds up the pieces of its weight row in order, so it does not depend on
//! the other tokens or on how rows are divided. Takes stored weights only. Knows nothing of
//! threads.

use kv_block::{BlockFormat, dequantize};

use crate::kernels::{Kernels, WeightLayout, WeightRows};
use crate::output::OutputColumns;

/// Values that are dequantized at a time: the longest block.
const PIECE: usize = 256;

/// `out[t][r] = Σ_c acts[t][c] · weights[r][c]` for the given rows and all tokens, `acts` being
/// `[tokens, columns]`.
pub(crate) fn multiply(
    kernels: &Kernels,
    weights: &WeightRows<'_>,
    acts: &[f32],
    out: &mut OutputColumns<'_>,
) {
    debug_assert!(weights.layout == WeightLayout::Stored);
    let n_columns = weights.n_columns;
    let mut decoded = [0.0; PIECE];
    for (row, bytes) in weights
        .bytes
        .chunks_exact(weights.row_bytes.max(1))
        .enumerate()
    {
        let column = weights.first + row;
        for token in 0..out.n_tokens() {
            out.set(token, column, 0.0);
        }
        for start in (0..n_columns).step_by(PIECE) {
            let piece = &mut decoded[..PIECE.min(n_columns - start)];
            dequantize(
                weights.format,
                blocks(weights.format, bytes, start, piece.len()),
                piece,
            );
            for (token, acts) in acts.chunks_exact(n_columns).enumerate() {
                let product = (kernels.dot_f32)(piece, &acts[start..start + piece.len()]);
                out.add(token, column, product);
            }
        }
    }
}

/// The bytes of `len` values from value `start` of a row on; both are whole blocks.
fn blocks(format: BlockFormat, row: &[u8], start: usize, len: usize) -> &[u8] {
    let at = |values: usize| values / format.block_len() * format.block_bytes();
    row.get(at(start)..at(start + len)).unwrap_or_default()
}
