//! Block formats of weights: layout, decoding and encoding.
//!
//! A row of weights is a sequence of blocks; a block holds a fixed number of values and a fixed
//! number of bytes. [`dequantize()`] is the specification that every faster kernel is tested
//! against. Layouts: the GGUF specification and the `ggml` quantisation types it names.

mod blocks32;
mod dequantize;
mod few_bits;
mod format;
mod grid;
mod iq4;
mod iq_grid;
mod k_quants;
mod mxfp4;
mod plain;
mod quantize;

pub use dequantize::dequantize;
pub use few_bits::{q1_0_quants, q2_0_quants, tq1_0_digits};
pub use format::BlockFormat;
pub use grid::{
    IQ2_S_GRID, IQ2_XS_GRID, IQ2_XXS_GRID, IQ3_S_ENTRIES, IQ3_S_GRID, IQ3_XXS_ENTRIES,
    IQ3_XXS_GRID, PackedGrid, Quants32,
};
pub use iq_grid::{
    FourIndices, iq1_m_quants, iq1_m_scales, iq1_s_quants, iq1_s_scales, iq2_s_quants, iq2_scales,
    iq2_xs_quants, iq2_xxs_quants, iq2_xxs_scales, iq3_s_indices, iq3_s_scales, iq3_xxs_indices,
    iq3_xxs_scales,
};
pub use iq4::{IQ4_VALUES, iq4_xs_scales};
pub use k_quants::{q3_k_scales, q4_k_scales};
pub use mxfp4::{MXFP4_VALUES, mxfp4_scale};
pub use quantize::{
    QuantizeError, WEIGHTED_FORMATS, check_range, integer_block, integer_formats, mxfp4_block,
    quantize, quantize_into, quantize_weighted,
};
