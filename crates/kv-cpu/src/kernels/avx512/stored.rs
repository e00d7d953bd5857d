//! [`Stored`]: where the parts of small blocks lie, for permutations of two neighbouring ones in a register.
//!
//! Where the bits of a value lie is described at the formats' scalar decoders in `kv_core::block`.

use std::arch::x86_64::*;

use kv_core::block::{IQ4_VALUES, MXFP4_VALUES};

use crate::kernels::groups as g;
use crate::kernels::panel::pack::Packed;

/// Bytes of a register.
const REGISTER: usize = 64;

/// Where the parts of a block of `BYTES` bytes lie: scale and minimum are its first ones, nibbles its last
/// ones. The low nibbles of 16 bytes are columns 0 to 15.
pub(super) trait Stored<const BYTES: usize>: Packed<BYTES> {
    /// Where four bytes of fifth bits begin, a bit for each column.
    const FIFTH_BITS: Option<usize> = None;
    /// Bytes of a scale.
    const SCALE_BYTES: usize = if Self::POWERS { 1 } else { 2 };
    /// What nibbles are indices of, if they are.
    const TABLE: Option<&'static [i8; 16]> = None;

    /// Which bytes of two blocks hold the nibbles of 64 columns.
    const NIBBLE_BYTES: [u8; 64] = nibble_bytes(BYTES);
    /// Which bytes go beside them; see [`head_bytes`].
    const HEAD_BYTES: [u8; 64] = head_bytes(BYTES, Self::SCALE_BYTES, Self::FIFTH_BITS);
    /// Which bytes of two blocks make up words; see [`word_bytes`].
    const WORD_BYTES: [u8; 64] = word_bytes(BYTES, Self::SCALE_BYTES, Self::FIFTH_BITS);
}

impl Stored<18> for g::Q4_0 {}
impl Stored<20> for g::Q4_1 {}
impl Stored<22> for g::Q5_0 {
    const FIFTH_BITS: Option<usize> = Some(2);
}
impl Stored<24> for g::Q5_1 {
    const FIFTH_BITS: Option<usize> = Some(4);
}
impl Stored<18> for g::Iq4Nl {
    const TABLE: Option<&'static [i8; 16]> = Some(&IQ4_VALUES);
}
impl Stored<17> for g::Mxfp4 {
    const TABLE: Option<&'static [i8; 16]> = Some(&MXFP4_VALUES);
}

/// A byte after two blocks: zero where only those are read.
const NONE: u8 = REGISTER as u8 - 1;

/// The block's last 16 bytes twice, for columns of the low nibbles and of the high ones.
const fn nibble_bytes(bytes: usize) -> [u8; 64] {
    assert!(2 * bytes < REGISTER);
    let mut all = [0; 64];
    let mut i = 0;
    while i < 64 {
        all[i] = (i / 32 * bytes + bytes - 16 + i % 16) as u8;
        i += 1;
    }
    all
}

/// Eight bytes for every eight columns. The fourth is their fifth bits. The last four are what is stored
/// as the scales of both blocks (beside columns of the first) or as their minima (of the second), 16
/// bits each.
const fn head_bytes(bytes: usize, scale_bytes: usize, fifth_bits: Option<usize>) -> [u8; 64] {
    let mut all = [NONE; 64];
    let mut eight = 0;
    while eight < 8 {
        let (at, block) = (8 * eight, eight / 4);
        if let Some(fifth_bits) = fifth_bits {
            all[at + 3] = (block * bytes + fifth_bits + eight % 4) as u8;
        }
        let mut i = 0;
        while i < 4 {
            let (of, byte) = (i / 2, i % 2);
            if byte < scale_bytes {
                all[at + 4 + i] = (of * bytes + 2 * block + byte) as u8;
            }
            i += 1;
        }
        eight += 1;
    }
    all
}

/// Words of both blocks: scales, minima (16 bits of each block), fifth bits of the first, of the second;
/// four of nibbles of the first, four of the second.
const fn word_bytes(bytes: usize, scale_bytes: usize, fifth_bits: Option<usize>) -> [u8; 64] {
    let mut all = [NONE; 64];
    let mut i = 0;
    while i < 48 {
        let (word, byte) = (i / 4, i % 4);
        let of_head = byte / 2 * bytes + 2 * word + byte % 2;
        all[i] = match (word, fifth_bits) {
            (0 | 1, _) if byte % 2 < scale_bytes => of_head as u8,
            (2 | 3, Some(fifth_bits)) => ((word - 2) * bytes + fifth_bits + byte) as u8,
            (4.., _) => (i / 32 * bytes + bytes - 16 + i % 16) as u8,
            _ => NONE,
        };
        i += 1;
    }
    all
}

/// The lowest bytes of a register, so many.
#[inline(always)]
pub(super) fn readable(n_bytes: usize) -> u64 {
    !0 >> (REGISTER - n_bytes)
}

/// Tables like those of [`Stored`], in a register.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn load(all: &[u8; 64]) -> __m512i {
    // SAFETY: 64 readable bytes; the load needs no alignment.
    unsafe { _mm512_loadu_si512(all.as_ptr().cast()) }
}
