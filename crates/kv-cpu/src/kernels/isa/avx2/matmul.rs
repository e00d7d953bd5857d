//! Products of weight rows with activations, with and without VNNI.

use super::dot::{Avx2Tile, Maddubs, Vnni};
use super::float;
use crate::kernels::matmul_stored::matmul_stored;

matmul_stored!(matmul: Avx2Tile<Maddubs>, "avx2,fma,f16c", float::matmul, 1, 2, 3, 4);
matmul_stored!(matmul_vnni: Avx2Tile<Vnni>, "avx2,fma,f16c,avxvnni", float::matmul, 1, 2, 3, 4);
