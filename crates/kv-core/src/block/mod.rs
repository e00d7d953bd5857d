//! Block formats of weights: layout, decoding and encoding.
//!
//! A row of weights is a sequence of blocks; a block holds a fixed number of values and a fixed
//! number of bytes. [`dequantize()`] is the specification that every faster kernel is tested
//! against. Layouts: the GGUF specification and the `ggml` quantisation types it names.

mod blocks32;
mod dequantize;
mod format;
mod iq4;
mod k_quants;
mod mxfp4;
mod plain;
mod quantize;

pub use dequantize::dequantize;
pub use format::BlockFormat;
pub use iq4::{IQ4_VALUES, iq4_xs_scales};
pub use k_quants::{q3_k_scales, q4_k_scales};
pub use mxfp4::{MXFP4_VALUES, mxfp4_scale};
pub use quantize::{QuantizeError, quantize, quantize_into, quantize_weighted};
