//! Dequantizes stored K and V with NEON: F16 by widening moves, `IQ4_NL` by a table lookup, the
//! rest by the scalar functions.

use core::arch::aarch64::{vld1q_u16, vst1q_f32};

use crate::kernels::isa::neon::{f16_to_f32, iq4_entries};
use crate::kernels::isa::scalar::attend::dequantize::{
    self as scalar, blocks, dequantize_table, half,
};

dequantize_table!("neon", f16, outlined scalar::q8_0, iq4_nl);

#[target_feature(enable = "neon")]
#[inline]
fn f16(bytes: &[u8], values: &mut [f32]) {
    let (bytes, bytes_left) = bytes.as_chunks::<16>();
    let (values, values_left) = values.as_chunks_mut::<8>();
    for (bytes, values) in bytes.iter().zip(values) {
        // SAFETY: 16 bytes are read and 8 values written; neither needs alignment.
        unsafe {
            let [low, high] = f16_to_f32(vld1q_u16(bytes.as_ptr().cast()));
            vst1q_f32(values.as_mut_ptr(), low);
            vst1q_f32(values.as_mut_ptr().add(4), high);
        }
    }
    scalar::f16(bytes_left, values_left);
}

#[target_feature(enable = "neon")]
#[inline]
fn iq4_nl(bytes: &[u8], values: &mut [f32]) {
    blocks(bytes, values, |block: &[u8; 18], values| {
        let d = half([block[0], block[1]]);
        for (entry, v) in iq4_entries(block).iter().zip(values) {
            *v = d * f32::from(*entry);
        }
    });
}
