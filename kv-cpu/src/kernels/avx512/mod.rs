//! The table for x86-64 with AVX-512 and VNNI: int8 dot products of 64 values in one instruction.
//!
//! What is not bound by arithmetic is shared with AVX2. Knows nothing of how the instruction set
//! was detected: the table must only be handed out where [`Isa::Avx512Vnni`] is available.

mod by_rows;
mod chunks;
mod floats;
mod heads;
mod lanes;
mod multiply;
mod one_row;
mod one_row_super;
mod one_row_vbmi;
mod pack;
mod pack_vbmi;
mod reduce;
mod scan;
mod sixteen;
mod stored;
mod table;

use super::{Kernels, avx2};
use crate::isa::Isa;

pub(super) const TABLE: Kernels = Kernels {
    isa: Isa::Avx512Vnni,
    // SAFETY: the table is handed out only where these features are available.
    multiply: |weights, acts, tokens, out| unsafe {
        multiply::multiply(weights, acts, tokens, out)
    },
    // SAFETY: as above.
    scan_tile: |tile| unsafe { scan::scan_tile(tile) },
    ..avx2::TABLE
};

/// With VBMI and GFNI, beside what [`TABLE`] needs.
pub(super) const VBMI_TABLE: Kernels = Kernels {
    isa: Isa::Avx512Vbmi,
    // SAFETY: the table is handed out only where these features are available.
    multiply: |weights, acts, tokens, out| unsafe {
        multiply::multiply_vbmi(weights, acts, tokens, out)
    },
    ..TABLE
};
