//! Tile kernels for NEON: the loops of [`eight_lanes`](crate::attend::eight_lanes) over
//! pairs of registers, with own [`transpose`] and [`dequantize`].

pub(crate) mod dequantize;
mod pair;
mod transpose;

use crate::attend::eight_lanes::{scores, softmax, values};
use crate::attend::tile_kernels::TileKernels;
use pair::Pair;

pub(crate) const KERNELS: TileKernels = TileKernels {
    // SAFETY: every AArch64 CPU that this is compiled for has NEON.
    scores: |q, k, out, prefetch| unsafe { scores::scores::<Pair>(q, k, out, prefetch) },
    // SAFETY: the CPU has NEON, as above.
    softmax: |scores, visible, states, rescale| unsafe {
        softmax::softmax::<Pair>(scores, visible, states, rescale)
    },
    // SAFETY: the CPU has NEON, as above.
    accumulate: |out, weights, lanes, prefetch| unsafe {
        values::accumulate::<Pair>(out, weights, lanes, prefetch)
    },
    // SAFETY: the CPU has NEON, as above.
    transpose: |rows, lanes, k| unsafe { transpose::transpose(rows, lanes, k) },
};
