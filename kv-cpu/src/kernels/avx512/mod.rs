//! The table for x86-64 with AVX-512 and VNNI: int8 dot products of 64 values in one instruction.
//!
//! Knows nothing of how the instruction set
//! was detected: the table must only be handed out where [`Isa::Avx512Vnni`] is available.

mod by_rows;
mod chunks;
mod floats;
mod heads;
mod lanes;
mod multiply;
mod numbers;
mod one_row;
mod one_row_super;
mod one_row_vbmi;
mod pack;
mod pack_vbmi;
mod quantize;
mod reduce;
mod scan;
mod sixteen;
mod stored;
mod table;

use half::f16;

use self::numbers::Avx512;
use super::Kernels;
use super::vector::vector_table;
use crate::isa::Isa;

pub(super) const TABLE: Kernels = vector_table!("avx512f,avx2,fma,f16c", Avx512::new(),
    isa: Isa::Avx512Vnni,
    // SAFETY: the table is handed out only where these features are available.
    scan_tile: |tile| unsafe { scan::scan_tile(tile) },
    // SAFETY: as above.
    quantize: |values, row| unsafe { quantize::quantize(values, row) },
    // SAFETY: as above.
    multiply: |weights, acts, tokens, out| unsafe {
        multiply::multiply(weights, acts, tokens, out)
    },
);

/// With VBMI and GFNI, beside what [`TABLE`] needs.
pub(super) const VBMI_TABLE: Kernels = Kernels {
    isa: Isa::Avx512Vbmi,
    // SAFETY: the table is handed out only where these features are available.
    multiply: |weights, acts, tokens, out| unsafe {
        multiply::multiply_vbmi(weights, acts, tokens, out)
    },
    ..TABLE
};
