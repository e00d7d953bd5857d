//! Tile loops in portable Rust: the specification, and the code of every ISA that has no loop of
//! its own.
//!
//! The functions are `#[inline(always)]`; [`portable_kernels`] compiles them once per CPU feature
//! set, and the compiler vectorises them for it. Knows no intrinsics.

pub(super) mod dequantize;
pub(super) mod scores;
pub(super) mod softmax;
pub(super) mod transpose;
pub(super) mod values;

use super::tile_kernels::TileKernels;

/// Multiply-adds round the product and the sum.
pub(super) const SEPARATE: u8 = 0;
/// Multiply-adds round once.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(super) const FUSED: u8 = 1;

/// The loops without any CPU feature.
pub(super) const KERNELS: TileKernels = TileKernels {
    scores: scores::scores::<SEPARATE>,
    softmax: softmax::softmax::<SEPARATE>,
    accumulate: values::accumulate::<SEPARATE>,
    transpose: transpose::transpose,
};

/// `a · b + c`, fused unless `FMA` is [`SEPARATE`]: without the instruction, `mul_add` is a call.
#[inline(always)]
fn multiply_add<const FMA: u8>(a: f32, b: f32, c: f32) -> f32 {
    if FMA == SEPARATE {
        a * b + c
    } else {
        a.mul_add(b, c)
    }
}

/// The [`TileKernels`] of an ISA: the portable loops compiled for its `features`, with its own
/// `transpose`, a `#[target_feature]` function.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! portable_kernels {
    ($features:literal, $transpose:path) => {{
        use std::ops::Range;

        use crate::attend::kv_tiles::KvPrefetcher;
        use crate::attend::partial::SoftmaxState;
        use crate::attend::portable::{FUSED, scores, softmax, values};
        use crate::attend::tile_kernels::{KV_TILE, TileKernels, ValueLanes};

        #[target_feature(enable = $features)]
        fn scores_inner(
            q: &[f32],
            k: &[[f32; KV_TILE]],
            out: &mut [[f32; KV_TILE]],
            prefetch: &mut KvPrefetcher<'_>,
        ) {
            scores::scores::<FUSED>(q, k, out, prefetch);
        }
        #[target_feature(enable = $features)]
        fn softmax_inner(
            scores: &mut [[f32; KV_TILE]],
            visible: u32,
            states: &mut [SoftmaxState],
            rescale: &mut [f32],
        ) {
            softmax::softmax::<FUSED>(scores, visible, states, rescale);
        }
        #[target_feature(enable = $features)]
        fn accumulate_inner(
            out: &mut [f32],
            weights: &[[f32; KV_TILE]],
            values: ValueLanes<'_>,
            prefetch: &mut KvPrefetcher<'_>,
        ) {
            values::accumulate::<FUSED>(out, weights, values, prefetch);
        }
        TileKernels {
            // SAFETY: `TileKernels::for_isa` returns this table only if the CPU has the features.
            scores: |q, k, out, prefetch| unsafe { scores_inner(q, k, out, prefetch) },
            // SAFETY: the CPU has the features, as above.
            softmax: |scores, visible, states, rescale| unsafe {
                softmax_inner(scores, visible, states, rescale)
            },
            // SAFETY: the CPU has the features, as above.
            accumulate: |out, weights, values, prefetch| unsafe {
                accumulate_inner(out, weights, values, prefetch)
            },
            // SAFETY: the CPU has the features, as above.
            transpose: |rows: &[f32], lanes: Range<usize>, k| unsafe { $transpose(rows, lanes, k) },
        }
    }};
}
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(super) use portable_kernels;
