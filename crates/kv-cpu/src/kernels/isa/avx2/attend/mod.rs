//! Tile kernels for AVX2 and AVX-VNNI: the loops of [`eight_lanes`](crate::attend::eight_lanes)
//! over YMM registers, with own [`transpose`] and [`dequantize`].

pub(crate) mod dequantize;
mod transpose;
mod ymm;

use crate::attend::eight_lanes::{scores, softmax, values};
use crate::attend::kv_tiles::KvPrefetcher;
use crate::attend::partial::SoftmaxState;
use crate::attend::tile_kernels::{KV_TILE, TileKernels, ValueLanes};
use ymm::Ymm;

pub(crate) const KERNELS: TileKernels = TileKernels {
    // SAFETY: `TileKernels::for_isa` returns this table only if the CPU has AVX2 and FMA.
    scores: |q, k, out, prefetch| unsafe { scores(q, k, out, prefetch) },
    // SAFETY: the CPU has AVX2 and FMA, as above.
    softmax: |scores, visible, states, rescale| unsafe {
        softmax(scores, visible, states, rescale)
    },
    // SAFETY: the CPU has AVX2 and FMA, as above.
    accumulate: |out, weights, values, prefetch| unsafe {
        accumulate(out, weights, values, prefetch)
    },
    // SAFETY: the CPU has AVX2 and FMA, as above.
    transpose: |rows, lanes, k| unsafe { transpose::transpose(rows, lanes, k) },
};

#[target_feature(enable = "avx2,fma")]
fn scores(
    q: &[f32],
    k: &[[f32; KV_TILE]],
    out: &mut [[f32; KV_TILE]],
    prefetch: &mut KvPrefetcher<'_>,
) {
    // SAFETY: the CPU has the features of this function.
    unsafe { scores::scores::<Ymm>(q, k, out, prefetch) }
}

#[target_feature(enable = "avx2,fma")]
fn softmax(
    scores: &mut [[f32; KV_TILE]],
    visible: u32,
    states: &mut [SoftmaxState],
    rescale: &mut [f32],
) {
    // SAFETY: the CPU has the features of this function.
    unsafe { softmax::softmax::<Ymm>(scores, visible, states, rescale) }
}

#[target_feature(enable = "avx2,fma")]
fn accumulate(
    out: &mut [f32],
    weights: &[[f32; KV_TILE]],
    lanes: ValueLanes<'_>,
    prefetch: &mut KvPrefetcher<'_>,
) {
    // SAFETY: the CPU has the features of this function.
    unsafe { values::accumulate::<Ymm>(out, weights, lanes, prefetch) }
}
