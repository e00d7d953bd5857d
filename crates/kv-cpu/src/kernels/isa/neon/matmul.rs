//! Products of weight rows with activations, with and without the extensions for int8.

use super::dot::{DotProd, NeonTile, Widening};
use super::dot_i8mm::I8mm;
use super::float;
use crate::kernels::matmul_stored::matmul_stored;

matmul_stored!(matmul: NeonTile<Widening>, "neon", float::matmul, 1, 2, 3, 4, 5, 6);
matmul_stored!(matmul_dot: NeonTile<DotProd>, "neon,dotprod", float::matmul, 1, 2, 3, 4, 5, 6);
matmul_stored!(matmul_i8mm: NeonTile<I8mm>, "neon,dotprod,i8mm", float::matmul, 1, 2, 3, 4, 5, 6);
