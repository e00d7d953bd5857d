//! Dequantizes stored K and V: one function per KV type, and the macro that makes an ISA's table
//! of them.
//!
//! The functions are `#[inline(always)]`; [`dequantize_table`] compiles them for an ISA's features
//! and the compiler vectorises them. Invariant: every value has the bits that
//! [`KvType::decode_row`](kv_rows::KvType::decode_row) gives it. Knows nothing of heads.

/// Values of a block of the quantized types.
pub(crate) const BLOCK_LEN: usize = 32;

/// A half-precision number as `f32`, exactly.
#[inline(always)]
pub(crate) fn half(bytes: [u8; 2]) -> f32 {
    let bits = u32::from(u16::from_le_bytes(bytes));
    let magnitude = (bits & 0x7fff) << 13;
    // 2^112 rebases half-precision exponents to single precision, for subnormals too.
    let value = f32::from_bits(magnitude) * f32::from_bits(0x7780_0000);
    let special = f32::from_bits(magnitude | 0x7f80_0000);
    let unsigned = if bits & 0x7c00 == 0x7c00 {
        special
    } else {
        value
    };
    f32::from_bits(unsigned.to_bits() | (bits & 0x8000) << 16)
}

/// Applies `decode(block, values)` to all whole blocks of `BYTES`.
#[inline(always)]
pub(crate) fn blocks<const BYTES: usize>(
    bytes: &[u8],
    values: &mut [f32],
    decode: impl Fn(&[u8; BYTES], &mut [f32; BLOCK_LEN]),
) {
    let blocks = bytes.as_chunks::<BYTES>().0.iter();
    for (block, values) in blocks.zip(values.as_chunks_mut::<BLOCK_LEN>().0) {
        decode(block, values);
    }
}

#[inline(always)]
pub(crate) fn f32(bytes: &[u8], values: &mut [f32]) {
    for (v, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
        *v = f32::from_le_bytes(*bytes);
    }
}

#[inline(always)]
pub(crate) fn f16(bytes: &[u8], values: &mut [f32]) {
    for (v, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
        *v = half(*bytes);
    }
}

#[inline(always)]
pub(crate) fn bf16(bytes: &[u8], values: &mut [f32]) {
    for (v, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
        *v = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
    }
}

#[inline(always)]
pub(crate) fn q8_0(bytes: &[u8], values: &mut [f32]) {
    blocks(bytes, values, |[d0, d1, qs @ ..]: &[u8; 34], values| {
        let d = half([*d0, *d1]);
        for (q, v) in qs.iter().zip(values) {
            *v = d * f32::from(*q as i8);
        }
    });
}

/// Applies `value` to the low nibbles of `qs` for the first half of a block, to the high ones for
/// the second.
#[inline(always)]
fn nibbles(qs: &[u8; 16], values: &mut [f32; BLOCK_LEN], value: impl Fn(u8) -> f32) {
    let (low, high) = values.split_at_mut(BLOCK_LEN / 2);
    for (q, v) in qs.iter().zip(low) {
        *v = value(q & 15);
    }
    for (q, v) in qs.iter().zip(high) {
        *v = value(q >> 4);
    }
}

#[inline(always)]
pub(crate) fn q4_0(bytes: &[u8], values: &mut [f32]) {
    blocks(bytes, values, |[d0, d1, qs @ ..]: &[u8; 18], values| {
        let d = half([*d0, *d1]);
        nibbles(qs, values, |q| d * (f32::from(q) - 8.0));
    });
}

#[inline(always)]
pub(crate) fn q4_1(bytes: &[u8], values: &mut [f32]) {
    blocks(
        bytes,
        values,
        |[d0, d1, m0, m1, qs @ ..]: &[u8; 20], values| {
            let (d, m) = (half([*d0, *d1]), half([*m0, *m1]));
            nibbles(qs, values, |q| d * f32::from(q) + m);
        },
    );
}

/// Applies `value` to the five-bit quants of a block; `high` has their fifth bits.
#[inline(always)]
fn five_bits(
    high: [u8; 4],
    qs: &[u8; 16],
    values: &mut [f32; BLOCK_LEN],
    value: impl Fn(f32) -> f32,
) {
    let bits = u32::from_le_bytes(high);
    let mut numbers = [0u32; BLOCK_LEN];
    let (low, upper) = numbers.split_at_mut(BLOCK_LEN / 2);
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
pub(crate) fn q5_0(bytes: &[u8], values: &mut [f32]) {
    blocks(
        bytes,
        values,
        |[d0, d1, h0, h1, h2, h3, qs @ ..]: &[u8; 22], values| {
            let d = half([*d0, *d1]);
            five_bits([*h0, *h1, *h2, *h3], qs, values, |q| d * (q - 16.0));
        },
    );
}

#[inline(always)]
pub(crate) fn q5_1(bytes: &[u8], values: &mut [f32]) {
    blocks(
        bytes,
        values,
        |[d0, d1, m0, m1, h0, h1, h2, h3, qs @ ..]: &[u8; 24], values| {
            let (d, m) = (half([*d0, *d1]), half([*m0, *m1]));
            five_bits([*h0, *h1, *h2, *h3], qs, values, |q| d * q + m);
        },
    );
}

/// `dequantize(kv_type)`: the [`Dequantize`](crate::attend::kv_reader::Dequantize) functions of an
/// ISA, compiled for its features. `$f16`, `$q8_0` and `$iq4_nl` are the ISA's own functions for
/// these types; all other types use the scalar ones.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! dequantize_table {
    ($features:literal, $f16:path, $q8_kind:ident $q8_0:path, $iq4_nl:path) => {
        /// The function for `kv_type`, if there is one. Call it only if the CPU has the features.
        pub(crate) fn dequantize(
            kv_type: kv_rows::KvType,
        ) -> Option<$crate::attend::kv_reader::Dequantize> {
            use kv_rows::KvType;

            use $crate::attend::kv_tiles::StoredTile;
            use $crate::kernels::isa::scalar::attend::dequantize as scalar;

            macro_rules! direct {
                ($function:path) => {{
                    #[target_feature(enable = $features)]
                    fn inner(stored: StoredTile<'_>, values: &mut [f32]) {
                        let n = stored.head.n_values;
                        for (lane, cell) in stored.tile.lanes() {
                            $function(stored.head.row(cell), &mut values[lane * n..][..n]);
                        }
                    }
                    // SAFETY: `KvReader::new` returns this only if the CPU has the features.
                    Some(|stored, values| unsafe { inner(stored, values) })
                }};
            }
            // Vectorised by the compiler in a function of its own: inside the loop over cells it
            // often is not.
            macro_rules! outlined {
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
                KvType::F32 => outlined!(scalar::f32),
                KvType::F16 => direct!($f16),
                KvType::BF16 => outlined!(scalar::bf16),
                KvType::Q8_0 => $q8_kind!($q8_0),
                KvType::Q4_0 => outlined!(scalar::q4_0),
                KvType::Q4_1 => outlined!(scalar::q4_1),
                KvType::Q5_0 => outlined!(scalar::q5_0),
                KvType::Q5_1 => outlined!(scalar::q5_1),
                KvType::IQ4_NL => outlined!($iq4_nl),
                _ => None,
            }
        }
    };
}
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) use dequantize_table;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_is_converted_exactly() {
        for bits in 0..=u16::MAX {
            let (got, wanted) = (
                half(bits.to_le_bytes()),
                half::f16::from_bits(bits).to_f32(),
            );
            assert!(got.to_bits() == wanted.to_bits() || got.is_nan() && wanted.is_nan());
        }
    }
}
