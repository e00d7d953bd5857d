//! Tile kernels for NEON: the portable loops, vectorised by the compiler, with hand-written
//! [`transpose`] and [`dequantize`].

pub(super) mod dequantize;
mod transpose;

use super::portable::portable_kernels;
use super::tile_kernels::TileKernels;

pub(super) const KERNELS: TileKernels = portable_kernels!("neon", transpose::transpose);
