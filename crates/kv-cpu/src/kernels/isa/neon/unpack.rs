//! Unpacks quants of few bits to int8, 32 at a time, in two registers. Knows no format.

use std::arch::aarch64::*;

use half::f16;
use kv_block::{FourIndices, IQ4_VALUES, Quants32};

use super::vector::{f16_to_f32, transpose_4x4};
use crate::kernels::gemm::unpack_panel::Interleave;

/// 32 quants.
pub(in crate::kernels) type Quants = [int8x16_t; 2];
/// 32 bytes.
pub(in crate::kernels) type Bytes = [uint8x16_t; 2];

#[inline]
#[target_feature(enable = "neon")]
pub(in crate::kernels) fn load16(block: &[u8], at: usize) -> uint8x16_t {
    let bytes = &block[at..at + 16];
    // SAFETY: 16 readable bytes; the load needs no alignment.
    unsafe { vld1q_u8(bytes.as_ptr()) }
}

#[inline]
#[target_feature(enable = "neon")]
pub(in crate::kernels) fn load32(block: &[u8], at: usize) -> Bytes {
    [load16(block, at), load16(block, at + 16)]
}

#[inline]
#[target_feature(enable = "neon")]
pub(in crate::kernels) fn signed([low, high]: Bytes) -> Quants {
    [vreinterpretq_s8_u8(low), vreinterpretq_s8_u8(high)]
}

/// Low nibbles of 16 bytes, then their high nibbles.
#[inline]
#[target_feature(enable = "neon")]
pub(in crate::kernels) fn nibbles(bytes: uint8x16_t) -> Bytes {
    [vandq_u8(bytes, vdupq_n_u8(15)), vshrq_n_u8::<4>(bytes)]
}

/// Each byte from bit `from` on, as much as the mask has.
#[inline]
#[target_feature(enable = "neon")]
fn bits<const MASK: u8>([low, high]: Bytes, from: usize) -> Bytes {
    let (by, mask) = (vdupq_n_s8(-(from as i8)), vdupq_n_u8(MASK));
    [
        vandq_u8(vshlq_u8(low, by), mask),
        vandq_u8(vshlq_u8(high, by), mask),
    ]
}

/// The low (0) or high (1) nibbles of 32 bytes.
#[inline]
#[target_feature(enable = "neon")]
pub(in crate::kernels) fn nibble(bytes: Bytes, which: usize) -> Bytes {
    bits::<15>(bytes, 4 * which)
}

/// Bits `2·which` and the next of 32 bytes.
#[inline]
#[target_feature(enable = "neon")]
pub(in crate::kernels) fn two_bits(bytes: Bytes, which: usize) -> Bytes {
    bits::<3>(bytes, 2 * which)
}

/// Bit `g` of 32 bytes, as 0 or 1.
#[inline]
#[target_feature(enable = "neon")]
pub(in crate::kernels) fn bit(bytes: Bytes, g: usize) -> Bytes {
    bits::<1>(bytes, g)
}

/// Each byte of `q`, which is below `2^AT`, with more bits from there on.
#[inline]
#[target_feature(enable = "neon")]
pub(in crate::kernels) fn high_bits<const AT: i32>(q: Bytes, more: Bytes) -> Bytes {
    [
        vsliq_n_u8::<AT>(q[0], more[0]),
        vsliq_n_u8::<AT>(q[1], more[1]),
    ]
}

#[inline]
#[target_feature(enable = "neon")]
pub(in crate::kernels) fn less([low, high]: Bytes, offset: u8) -> Bytes {
    let offset = vdupq_n_u8(offset);
    [vsubq_u8(low, offset), vsubq_u8(high, offset)]
}

/// Nibbles with their fifth bits, which are those of a word.
#[inline]
#[target_feature(enable = "neon")]
pub(in crate::kernels) fn fives(q: Bytes, fifth: u32) -> Bytes {
    let ([low, high], sixteen) = (bit_masks(fifth), vdupq_n_u8(16));
    [
        vorrq_u8(q[0], vandq_u8(low, sixteen)),
        vorrq_u8(q[1], vandq_u8(high, sixteen)),
    ]
}

/// All bits of byte `i` set where bit `i` is.
#[inline]
#[target_feature(enable = "neon")]
fn bit_masks(bits: u32) -> Bytes {
    // Bit `i` of a byte, in each of eight.
    let bit_of = vreinterpretq_u8_u64(vdupq_n_u64(0x8040_2010_0804_0201));
    let [a, b, c, d] = bits.to_le_bytes();
    [
        vtstq_u8(vcombine_u8(vdup_n_u8(a), vdup_n_u8(b)), bit_of),
        vtstq_u8(vcombine_u8(vdup_n_u8(c), vdup_n_u8(d)), bit_of),
    ]
}

/// The values of bytes that are negated or not.
#[inline]
#[target_feature(enable = "neon")]
pub(in crate::kernels) fn negated(quants: Quants32) -> Bytes {
    let [a, b, c, d] = quants.bytes;
    let bytes = [
        vcombine_u8(vcreate_u8(a), vcreate_u8(b)),
        vcombine_u8(vcreate_u8(c), vcreate_u8(d)),
    ];
    let masks = bit_masks(quants.signs);
    [
        vsubq_u8(veorq_u8(bytes[0], masks[0]), masks[0]),
        vsubq_u8(veorq_u8(bytes[1], masks[1]), masks[1]),
    ]
}

/// The values of eight entries of a grid, negated or not.
#[inline]
#[target_feature(enable = "neon")]
pub(in crate::kernels) fn fours<const N: usize>(grid: &[u32; N], indices: FourIndices) -> Bytes {
    negated(indices.quants(grid))
}

/// The first digits to base three of bytes times powers of three.
#[inline]
#[target_feature(enable = "neon")]
pub(in crate::kernels) fn digits(bytes: Bytes, powers: Bytes) -> Bytes {
    let three = vdupq_n_u8(3);
    std::array::from_fn(|half| {
        let products = vmulq_u8(bytes[half], powers[half]);
        let low = vshrn_n_u16::<8>(vmull_u8(vget_low_u8(products), vget_low_u8(three)));
        let high = vshrn_n_u16::<8>(vmull_high_u8(products, three));
        vcombine_u8(low, high)
    })
}

/// The same, less 16.
#[inline]
#[target_feature(enable = "neon")]
pub(in crate::kernels) fn signed_fives(q: Bytes, fifth: u32) -> Bytes {
    less(fives(q, fifth), 16)
}

/// The 32 values that 16 bytes of indices into a table stand for.
#[inline]
#[target_feature(enable = "neon")]
pub(in crate::kernels) fn lookup(table: &[i8; 16], bytes: uint8x16_t) -> Bytes {
    // SAFETY: the table is 16 readable bytes; the load needs no alignment.
    let table = unsafe { vld1q_u8(table.as_ptr().cast()) };
    let [low, high] = nibbles(bytes);
    [vqtbl1q_u8(table, low), vqtbl1q_u8(table, high)]
}

/// The table's entries of a block of `IQ4_NL`.
#[inline]
#[target_feature(enable = "neon")]
pub(crate) fn iq4_entries(block: &[u8; 18]) -> [i8; 32] {
    let mut entries = [0; 32];
    let [low, high] = signed(lookup(&IQ4_VALUES, load16(block, 2)));
    // SAFETY: 32 writable bytes; the stores need no alignment.
    unsafe {
        vst1q_s8(entries.as_mut_ptr(), low);
        vst1q_s8(entries.as_mut_ptr().add(16), high);
    }
    entries
}

/// Quants plus an offset.
#[inline]
#[target_feature(enable = "neon")]
pub(in crate::kernels) fn offset_by([low, high]: Quants, offset: i8) -> Quants {
    let offset = vdupq_n_s8(offset);
    [vaddq_s8(low, offset), vaddq_s8(high, offset)]
}

/// From eight rows of eight words to eight words of eight rows.
#[inline]
#[target_feature(enable = "neon")]
pub(in crate::kernels) fn transpose(rows: [Quants; 8]) -> [Quants; 8] {
    let mut columns = rows;
    for half in 0..2 {
        for first in [0, 4] {
            let [a, b, c, d] = [0, 1, 2, 3].map(|i| vreinterpretq_u32_s8(rows[first + i][half]));
            for (i, words) in transpose_4x4([a, b, c, d]).into_iter().enumerate() {
                columns[4 * half + i][first / 4] = vreinterpretq_s8_u32(words);
            }
        }
    }
    columns
}

/// Each pair of steps is eight columns of every row, which lie together: of the first four rows in
/// one step, of the others in the next.
pub(super) struct RowPairs;

impl Interleave for RowPairs {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn steps(rows: [Quants; 8]) -> [Quants; 8] {
        let mut steps = rows;
        for (k, step) in steps.iter_mut().enumerate() {
            for (pair, step) in step.iter_mut().enumerate() {
                let row = k % 2 * 4 + pair * 2;
                let [a, b] = [row, row + 1].map(|row| vreinterpretq_s64_s8(rows[row][k / 4]));
                *step = vreinterpretq_s8_s64(match k / 2 % 2 {
                    0 => vzip1q_s64(a, b),
                    _ => vzip2q_s64(a, b),
                });
            }
        }
        steps
    }
}

#[inline]
#[target_feature(enable = "neon")]
pub(in crate::kernels) fn store([low, high]: Quants, to: &mut [[u8; 4]; 8]) {
    let to = to.as_mut_ptr().cast::<i8>();
    // SAFETY: 32 writable bytes; the stores need no alignment.
    unsafe {
        vst1q_s8(to, low);
        vst1q_s8(to.add(16), high);
    }
}

/// A half-precision number, exactly.
#[inline]
#[target_feature(enable = "neon")]
pub(in crate::kernels) fn number(x: f16) -> f32 {
    vgetq_lane_f32::<0>(f16_to_f32(vdupq_n_u16(x.to_bits()))[0])
}
