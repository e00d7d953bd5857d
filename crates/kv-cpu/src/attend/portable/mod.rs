//! Tile loops in portable Rust: the specification of those of every ISA, which differ in that their
//! multiply-adds round once. (Without the instruction, `mul_add` is a call.) Knows no intrinsics.

pub(super) mod dequantize;
pub(super) mod scores;
pub(super) mod softmax;
pub(super) mod transpose;
pub(super) mod values;

use super::tile_kernels::TileKernels;

/// The loops without any CPU feature.
pub(super) const KERNELS: TileKernels = TileKernels {
    scores: scores::scores,
    softmax: softmax::softmax,
    accumulate: values::accumulate,
    transpose: transpose::transpose,
};
