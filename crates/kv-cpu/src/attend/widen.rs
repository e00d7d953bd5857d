//! Stored values of every type as `f32`: the functions for one row, and their tables.
//!
//! One text for every instruction set: the compiler makes vector code of it for the features that a
//! wrapper names. Invariant: every value has the very bits that
//! [`KvType::decode_row`](kv_core::KvType::decode_row) gives it,
//! which is what plain code uses. Knows nothing of heads.

use super::decode::{Decode, Heads};
use super::walk::Tile;

/// Values of a block of the quantised types.
const BLOCK: usize = 32;

/// The value of a half-precision number, exactly.
#[inline(always)]
fn half(bytes: [u8; 2]) -> f32 {
    let bits = u32::from(u16::from_le_bytes(bytes));
    let magnitude = (bits & 0x7fff) << 13;
    // 2^112: from the exponents of half precision to those of single precision, subnormals too.
    let value = f32::from_bits(magnitude) * f32::from_bits(0x7780_0000);
    let special = f32::from_bits(magnitude | 0x7f80_0000);
    let unsigned = if bits & 0x7c00 == 0x7c00 {
        special
    } else {
        value
    };
    f32::from_bits(unsigned.to_bits() | (bits & 0x8000) << 16)
}

/// Applies `decode(block, values)` to whole blocks of `BYTES`.
#[inline(always)]
fn blocks<const BYTES: usize>(
    bytes: &[u8],
    values: &mut [f32],
    decode: impl Fn(&[u8; BYTES], &mut [f32; BLOCK]),
) {
    let blocks = bytes.as_chunks::<BYTES>().0.iter();
    for (block, values) in blocks.zip(values.as_chunks_mut::<BLOCK>().0) {
        decode(block, values);
    }
}

#[inline(always)]
fn f32(bytes: &[u8], values: &mut [f32]) {
    for (v, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
        *v = f32::from_le_bytes(*bytes);
    }
}

#[inline(always)]
fn f16(bytes: &[u8], values: &mut [f32]) {
    for (v, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
        *v = half(*bytes);
    }
}

#[inline(always)]
fn bf16(bytes: &[u8], values: &mut [f32]) {
    for (v, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
        *v = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
    }
}

#[inline(always)]
fn q8_0(bytes: &[u8], values: &mut [f32]) {
    blocks(bytes, values, |[d0, d1, qs @ ..]: &[u8; 34], values| {
        let d = half([*d0, *d1]);
        for (q, v) in qs.iter().zip(values) {
            *v = d * f32::from(*q as i8);
        }
    });
}

/// `value(low)` of the low and `value(high)` of the high nibbles of `qs`, halves of a block.
#[inline(always)]
fn nibbles(qs: &[u8; 16], values: &mut [f32; BLOCK], value: impl Fn(u8) -> f32) {
    let (low, high) = values.split_at_mut(BLOCK / 2);
    for (q, v) in qs.iter().zip(low) {
        *v = value(q & 15);
    }
    for (q, v) in qs.iter().zip(high) {
        *v = value(q >> 4);
    }
}

#[inline(always)]
fn q4_0(bytes: &[u8], values: &mut [f32]) {
    blocks(bytes, values, |[d0, d1, qs @ ..]: &[u8; 18], values| {
        let d = half([*d0, *d1]);
        nibbles(qs, values, |q| d * (f32::from(q) - 8.0));
    });
}

#[inline(always)]
fn q4_1(bytes: &[u8], values: &mut [f32]) {
    blocks(
        bytes,
        values,
        |[d0, d1, m0, m1, qs @ ..]: &[u8; 20], values| {
            let (d, m) = (half([*d0, *d1]), half([*m0, *m1]));
            nibbles(qs, values, |q| d * f32::from(q) + m);
        },
    );
}

/// `value(q)` of the five-bit numbers of a block.
#[inline(always)]
fn fives(high: [u8; 4], qs: &[u8; 16], values: &mut [f32; BLOCK], value: impl Fn(f32) -> f32) {
    let bits = u32::from_le_bytes(high);
    let mut numbers = [0u32; BLOCK];
    let (low, upper) = numbers.split_at_mut(BLOCK / 2);
    for (q, n) in qs.iter().zip(low) {
        *n = u32::from(q & 15);
    }
    for (q, n) in qs.iter().zip(upper) {
        *n = u32::from(q >> 4);
    }
    for (i, (n, v)) in numbers.iter().zip(values).enumerate() {
        *v = value((n | ((bits >> i) & 1) << 4) as f32);
    }
}

#[inline(always)]
fn q5_0(bytes: &[u8], values: &mut [f32]) {
    blocks(
        bytes,
        values,
        |[d0, d1, h0, h1, h2, h3, qs @ ..]: &[u8; 22], values| {
            let d = half([*d0, *d1]);
            fives([*h0, *h1, *h2, *h3], qs, values, |q| d * (q - 16.0));
        },
    );
}

#[inline(always)]
fn q5_1(bytes: &[u8], values: &mut [f32]) {
    blocks(
        bytes,
        values,
        |[d0, d1, m0, m1, h0, h1, h2, h3, qs @ ..]: &[u8; 24], values| {
            let (d, m) = (half([*d0, *d1]), half([*m0, *m1]));
            fives([*h0, *h1, *h2, *h3], qs, values, |q| d * q + m);
        },
    );
}

/// The functions of an instruction set, compiled for its features: most are the ones above.
macro_rules! for_features {
    ($table:ident, $features:literal, $f16:path, $q8_kind:ident $q8_0:path, $iq4_nl:path) => {
        pub(in crate::attend) fn $table(kv_type: KvType) -> Option<Decode> {
            macro_rules! direct {
                ($function:path) => {{
                    #[target_feature(enable = $features)]
                    fn inner(heads: &Heads<'_>, tile: &Tile, values: &mut [f32]) {
                        for (place, cell) in tile.places() {
                            let values = &mut values[place * heads.n_values..][..heads.n_values];
                            $function(heads.of(cell), values);
                        }
                    }
                    // SAFETY: `Decoder::new` gives this out only where the features are there.
                    Some(|heads, tile, values| unsafe { inner(heads, tile, values) })
                }};
            }
            // What the compiler makes vector code of, in a function of its own: within the loop it
            // often does not.
            macro_rules! wrapped {
                ($function:path) => {{
                    #[inline(never)]
                    #[target_feature(enable = $features)]
                    fn one(bytes: &[u8], values: &mut [f32]) {
                        $function(bytes, values);
                    }
                    direct!(one)
                }};
            }
            match kv_type {
                KvType::F32 => wrapped!(super::f32),
                KvType::F16 => direct!($f16),
                KvType::BF16 => wrapped!(super::bf16),
                KvType::Q8_0 => $q8_kind!($q8_0),
                KvType::Q4_0 => wrapped!(super::q4_0),
                KvType::Q4_1 => wrapped!(super::q4_1),
                KvType::Q5_0 => wrapped!(super::q5_0),
                KvType::Q5_1 => wrapped!(super::q5_1),
                KvType::IQ4_NL => wrapped!($iq4_nl),
                _ => None,
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
pub(super) mod x86 {
    use core::arch::x86_64::*;

    use kv_core::KvType;
    use kv_core::block::IQ4_VALUES;

    use super::{BLOCK, Decode, Heads, Tile, blocks};

    for_features!(avx2, "avx2,f16c", f16_by_8, wrapped super::q8_0, iq4_nl);
    for_features!(
        avx512,
        "avx2,f16c,avx512f,avx512bw,avx512vl,avx512dq",
        f16_by_16,
        direct q8_0_by_16,
        iq4_nl
    );

    #[target_feature(enable = "f16c")]
    #[inline]
    fn half(bytes: [u8; 2]) -> f32 {
        _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(
            u16::from_le_bytes(bytes),
        ))))
    }

    #[target_feature(enable = "f16c")]
    #[inline]
    fn f16_by_8(bytes: &[u8], values: &mut [f32]) {
        let (bytes, bytes_left) = bytes.as_chunks::<16>();
        let (values, values_left) = values.as_chunks_mut::<8>();
        for (bytes, values) in bytes.iter().zip(values) {
            // SAFETY: 16 bytes are read and 8 values written; neither needs alignment.
            unsafe {
                let wide = _mm256_cvtph_ps(_mm_loadu_si128(bytes.as_ptr().cast()));
                _mm256_storeu_ps(values.as_mut_ptr(), wide);
            }
        }
        super::f16(bytes_left, values_left);
    }

    #[target_feature(enable = "f16c,avx512f")]
    #[inline]
    fn f16_by_16(bytes: &[u8], values: &mut [f32]) {
        let (bytes, bytes_left) = bytes.as_chunks::<32>();
        let (values, values_left) = values.as_chunks_mut::<16>();
        for (bytes, values) in bytes.iter().zip(values) {
            // SAFETY: 32 bytes are read and 16 values written; neither needs alignment.
            unsafe {
                let wide = _mm512_cvtph_ps(_mm256_loadu_si256(bytes.as_ptr().cast()));
                _mm512_storeu_ps(values.as_mut_ptr(), wide);
            }
        }
        super::f16(bytes_left, values_left);
    }

    #[target_feature(enable = "f16c,avx512f")]
    #[inline]
    fn q8_0_by_16(bytes: &[u8], values: &mut [f32]) {
        let (blocks, _) = bytes.as_chunks::<34>();
        for ([d0, d1, qs @ ..], values) in blocks.iter().zip(values.as_chunks_mut::<BLOCK>().0) {
            let d = _mm512_set1_ps(half([*d0, *d1]));
            let (qs, _) = qs.as_chunks::<16>();
            let (values, _) = values.as_chunks_mut::<16>();
            for (qs, values) in qs.iter().zip(values) {
                // SAFETY: 16 bytes are read and 16 values written; neither needs alignment.
                unsafe {
                    let wide = _mm512_cvtepi8_epi32(_mm_loadu_si128(qs.as_ptr().cast()));
                    let wide = _mm512_mul_ps(d, _mm512_cvtepi32_ps(wide));
                    _mm512_storeu_ps(values.as_mut_ptr(), wide);
                }
            }
        }
    }

    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    fn iq4_nl(bytes: &[u8], values: &mut [f32]) {
        blocks(bytes, values, |[d0, d1, qs @ ..]: &[u8; 18], values| {
            let d = half([*d0, *d1]);
            let entries = iq4_entries(qs);
            for (entry, v) in entries.iter().zip(values) {
                *v = d * f32::from(*entry);
            }
        });
    }

    /// The table's entries of a block of `IQ4_NL`, looked up by a shuffle of bytes.
    #[target_feature(enable = "ssse3")]
    #[inline]
    fn iq4_entries(qs: &[u8; 16]) -> [i8; BLOCK] {
        let mut entries = [0; BLOCK];
        let (low, high) = entries.split_at_mut(16);
        // SAFETY: 16 bytes are read from each of two arrays of 16 bytes.
        let (table, qs) = unsafe {
            (
                _mm_loadu_si128(IQ4_VALUES.as_ptr().cast()),
                _mm_loadu_si128(qs.as_ptr().cast()),
            )
        };
        let mask = _mm_set1_epi8(15);
        let indices = [
            (low, _mm_and_si128(qs, mask)),
            (high, _mm_and_si128(_mm_srli_epi16::<4>(qs), mask)),
        ];
        for (to, indices) in indices {
            // SAFETY: each half of the entries has 16 bytes.
            unsafe {
                _mm_storeu_si128(to.as_mut_ptr().cast(), _mm_shuffle_epi8(table, indices));
            }
        }
        entries
    }
}

#[cfg(target_arch = "aarch64")]
pub(super) mod arm {
    use core::arch::aarch64::{vld1q_u16, vst1q_f32};

    use kv_core::KvType;

    use super::{Decode, Heads, Tile, blocks, half};
    use crate::kernels::neon::{iq4_entries, widened};

    for_features!(neon, "neon", f16_by_8, wrapped super::q8_0, iq4_nl);

    #[target_feature(enable = "neon")]
    #[inline]
    fn f16_by_8(bytes: &[u8], values: &mut [f32]) {
        let (bytes, bytes_left) = bytes.as_chunks::<16>();
        let (values, values_left) = values.as_chunks_mut::<8>();
        for (bytes, values) in bytes.iter().zip(values) {
            // SAFETY: 16 bytes are read and 8 values written; neither needs alignment.
            unsafe {
                let [low, high] = widened(vld1q_u16(bytes.as_ptr().cast()));
                vst1q_f32(values.as_mut_ptr(), low);
                vst1q_f32(values.as_mut_ptr().add(4), high);
            }
        }
        super::f16(bytes_left, values_left);
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_widens_exactly() {
        for bits in 0..=u16::MAX {
            let (got, wanted) = (
                half(bits.to_le_bytes()),
                half::f16::from_bits(bits).to_f32(),
            );
            assert!(got.to_bits() == wanted.to_bits() || got.is_nan() && wanted.is_nan());
        }
    }
}
