//! Tile kernels for AVX-512. All loops are hand-written: what the compiler makes of the scalar
//! ones moves more than it multiplies.
//!
//! Invariant: the same products and additions in the same order as the scalar loops, so the same
//! bits. `scores_q8_0`, [`values_f16`](values::accumulate_f16) and `values_q8_0` read K and V as
//! they are stored; only `scores_q8_0` rounds (see [`crate::attend::query_i24`]).

pub(crate) mod dequantize;
mod scores;
pub(crate) mod scores_q8_0;
mod softmax;
pub(crate) mod transpose;
pub(crate) mod values;
pub(crate) mod values_q8_0;

use crate::attend::tile_kernels::TileKernels;

/// `f32` values of a ZMM register.
const F32_LANES: usize = 16;

pub(crate) const KERNELS: TileKernels = TileKernels {
    // SAFETY: `TileKernels::for_isa` returns this table only if the CPU has AVX-512.
    scores: |q, k, out, prefetch| unsafe { scores::scores(q, k, out, prefetch) },
    // SAFETY: the CPU has AVX-512, as above.
    softmax: |scores, visible, states, rescale| unsafe {
        softmax::softmax(scores, visible, states, rescale)
    },
    // SAFETY: the CPU has AVX-512, as above.
    accumulate: |out, weights, values, prefetch| unsafe {
        values::accumulate(out, weights, values, prefetch)
    },
    // SAFETY: the CPU has AVX-512, as above.
    transpose: |rows, lanes, k| unsafe { transpose::transpose(rows, lanes, k) },
};
