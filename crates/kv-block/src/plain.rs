//! Values without a scale: `F32`, `F16`, `BF16`, little endian, one value a block. Does not
//! know rows.

use half::{bf16, f16};

/// `F32`: 4 bytes, IEEE single precision.
pub(super) fn decode_f32(block: &[u8; 4], values: &mut [f32; 1]) {
    values[0] = f32::from_le_bytes(*block);
}

/// `F16`: 2 bytes, IEEE half precision.
pub(super) fn decode_f16(block: &[u8; 2], values: &mut [f32; 1]) {
    values[0] = half_at(*block);
}

/// `BF16`: 2 bytes, the upper half of an `f32`.
pub(super) fn decode_bf16(block: &[u8; 2], values: &mut [f32; 1]) {
    values[0] = bf16::from_le_bytes(*block).to_f32();
}

/// The half-precision scale that most blocks start or end with.
pub(super) fn half_at(bytes: [u8; 2]) -> f32 {
    f16::from_le_bytes(bytes).to_f32()
}
