//! Tile loops in plain Rust: the specification of those of every ISA, which differ in that their
//! multiply-adds round once. (Without the instruction, `mul_add` is a call.) Knows no intrinsics.

pub(crate) mod dequantize;
pub(crate) mod scores;
pub(crate) mod softmax;
pub(crate) mod transpose;
pub(crate) mod values;

use crate::attend::tile_kernels::TileKernels;

/// The loops without any CPU feature.
pub(crate) const KERNELS: TileKernels = TileKernels {
    scores: scores::scores,
    softmax: softmax::softmax,
    accumulate: values::accumulate,
    transpose: transpose::transpose,
};
