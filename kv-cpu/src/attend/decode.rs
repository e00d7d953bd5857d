//! [`Decoder`]: stored values of a head as `f32`, for every type of rows and instruction set.
//!
//! One text for every instruction set: the compiler makes vector code of it for the features that a
//! wrapper names. Invariant: every value has the very bits that [`KvType::decode_row`] gives it,
//! which is what plain code uses. Knows nothing of heads or cells.

use std::ops::Range;

use kv_core::KvType;

use super::tile::TILE;
use super::walk::{Ahead, Tile};
use crate::isa::Isa;

/// Values of a block of the quantised types.
const BLOCK: usize = 32;

/// Queries that are few: values are read twice for them at most.
const FEW: usize = 8;

/// Values that are turned at a time.
pub(super) const PIECE: usize = 8;

/// One head of all cells of a layer: whole blocks.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Heads<'a> {
    /// The rows of all cells.
    pub(crate) bytes: &'a [u8],
    /// Bytes from one cell to the next.
    pub(crate) stride: usize,
    /// Bytes of a cell before its head.
    pub(crate) first_byte: usize,
    /// Bytes of one cell's head.
    pub(crate) n_bytes: usize,
    /// Values of one cell's head, in whole blocks.
    pub(crate) n_values: usize,
    /// Values of other heads before the head's.
    pub(crate) skip: usize,
}

impl<'a> Heads<'a> {
    /// Where the head of a cell begins, to be asked for: the cell need not exist.
    #[inline(always)]
    pub(super) fn at(&self, cell: usize) -> *const u8 {
        let at = cell.wrapping_mul(self.stride).wrapping_add(self.first_byte);
        self.bytes.as_ptr().wrapping_add(at)
    }

    /// The head of a cell.
    #[inline(always)]
    pub(super) fn of(&self, cell: usize) -> &'a [u8] {
        &self.bytes[cell * self.stride + self.first_byte..][..self.n_bytes]
    }
}

/// `(heads, tile, values)`: the heads of the cells of a tile become `values`,
/// `[TILE, n_values]`, each at its place; other places stay as they are.
type Decode = fn(&Heads<'_>, &Tile, &mut [f32]);

/// `(heads, tile, k)`: the heads of the cells of a tile become columns. Places that have no cell get
/// some number.
type Turn = fn(&Heads<'_>, &Tile, &mut [[f32; TILE]]);

/// Reads values of one type.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Decoder {
    kv_type: KvType,
    /// `None`: as the specification does.
    fast: Option<Decode>,
    /// `None`: rows are read, then turned.
    turn: Option<Turn>,
    /// `None`: rows are read, then added.
    add: Option<Add>,
}

/// `out[i][j] += Σ_c weights[i][c] · v[c][j]` over a range of places of a tile, as
/// [`super::tile::TileKernels::accumulate`] adds them: `(out, weights, (places, (heads, tile)))`.
type Add = fn(&mut [f32], &[[f32; TILE]], (Range<usize>, (&Heads<'_>, &Tile)), &mut Ahead<'_>);

impl Decoder {
    /// For rows of `kv_type` on `isa`, which must be available.
    pub(crate) fn new(isa: Isa, kv_type: KvType) -> Self {
        let fast = match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::AvxVnni if isa.is_available() => x86::avx2(kv_type),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni if isa.is_available() => x86::avx512(kv_type),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon | Isa::NeonDot | Isa::NeonI8mm if isa.is_available() => arm::neon(kv_type),
            _ => None,
        };
        let turn: Option<Turn> = match (isa, kv_type) {
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512Vnni, KvType::F16) if isa.is_available() => {
                // SAFETY: the instruction set is available.
                Some(|heads, tile, k| unsafe { super::avx512::f16_columns(heads, tile, k) })
            }
            _ => None,
        };
        let add: Option<Add> = match (isa, kv_type) {
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512Vnni, KvType::F16) if isa.is_available() => {
                // SAFETY: as above.
                Some(|out, weights, of_cells, ahead| unsafe {
                    super::avx512::accumulate_f16(out, weights, of_cells, ahead)
                })
            }
            _ => None,
        };
        Self {
            kv_type,
            fast,
            turn,
            add,
        }
    }

    /// What adds the values of a head to so many queries as they are stored, where that takes less than
    /// decoding them first.
    #[inline]
    pub(super) fn adds(&self, heads: &Heads<'_>, (v_dim, n): (usize, usize)) -> Option<Add> {
        self.add.filter(|_| heads.n_values == v_dim && n <= FEW)
    }

    /// Reads the heads of the cells of a tile as columns `[n_values, TILE]`, if there is a way to: the
    /// values that [`Decoder::decode`] gives.
    #[inline]
    pub(super) fn columns(&self, heads: &Heads<'_>, tile: &Tile, k: &mut [[f32; TILE]]) -> bool {
        let Some(turn) = self.turn else { return false };
        let fits = heads.n_values == k.len() && k.len().is_multiple_of(PIECE);
        if fits {
            turn(heads, tile, k);
        }
        fits
    }

    /// Reads the heads of the cells of a tile to their places in `values`, `[TILE, n_values]`.
    #[inline]
    pub(super) fn decode(&self, heads: &Heads<'_>, tile: &Tile, values: &mut [f32]) {
        match self.fast {
            Some(decode) => decode(heads, tile, values),
            None => each(heads, tile, values, |bytes, values| {
                self.kv_type.decode_row(bytes, values);
            }),
        }
    }
}

/// Calls `decode(bytes, values)` for each place of a tile.
#[inline(always)]
fn each(
    heads: &Heads<'_>,
    tile: &Tile,
    values: &mut [f32],
    mut decode: impl FnMut(&[u8], &mut [f32]),
) {
    for (place, cell) in tile.places() {
        let values = &mut values[place * heads.n_values..][..heads.n_values];
        decode(heads.of(cell), values);
    }
}

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
        pub(super) fn $table(kv_type: KvType) -> Option<Decode> {
            macro_rules! wrapped {
                ($function:path) => {{
                    #[target_feature(enable = $features)]
                    fn inner(heads: &Heads<'_>, tile: &Tile, values: &mut [f32]) {
                        for (place, cell) in tile.places() {
                            let values = &mut values[place * heads.n_values..][..heads.n_values];
                            one(heads.of(cell), values);
                        }
                    }
                    // A function of its own: within the loop the compiler often makes no
                    // vector code of it.
                    #[inline(never)]
                    #[target_feature(enable = $features)]
                    fn one(bytes: &[u8], values: &mut [f32]) {
                        $function(bytes, values);
                    }
                    // SAFETY: `Decoder::new` gives this out only where the features are there.
                    Some(|heads, tile, values| unsafe { inner(heads, tile, values) })
                }};
            }
            // What is vector code already.
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
mod x86 {
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
mod arm {
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

    /// Random bytes, with scales that are subnormal, zero, negative, infinite or no number at times.
    #[test]
    fn every_value_has_the_bits_of_the_specification() {
        let mut state = 1u64;
        let mut byte = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        };
        for kv_type in KvType::ALL {
            let n = 64;
            for _ in 0..500 {
                let bytes: Vec<u8> = (0..kv_type.row_bytes(n)).map(|_| byte()).collect();
                let mut wanted = vec![0.0; n];
                kv_type.decode_row(&bytes, &mut wanted);
                for isa in Isa::all_available() {
                    let mut got = vec![9.0; n];
                    let heads = Heads {
                        bytes: &bytes,
                        stride: bytes.len() / 2,
                        first_byte: 0,
                        n_bytes: bytes.len() / 2,
                        n_values: n / 2,
                        skip: 0,
                    };
                    let tile = Tile::of(&[(0, 0), (1, 1)]);
                    Decoder::new(isa, kv_type).decode(&heads, &tile, &mut got);
                    for (got, wanted) in got.iter().zip(&wanted) {
                        let same =
                            got.to_bits() == wanted.to_bits() || (got.is_nan() && wanted.is_nan());
                        assert!(same, "{isa}, {kv_type}: {got}, not {wanted}");
                    }
                }
            }
        }
    }

    /// Random bytes: numbers of every kind.
    fn noise(n: usize) -> Vec<u8> {
        let mut state = 7u32;
        let mut byte = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        (0..n).map(|_| byte()).collect()
    }

    #[test]
    fn columns_are_the_decoded_rows_turned() {
        let n_turned = |isa: Isa, kv_type: KvType, n: usize, tile: &Tile| {
            let stride = 3 * kv_type.row_bytes(n);
            let bytes = noise(40 * stride);
            let heads = Heads {
                bytes: &bytes,
                stride,
                first_byte: kv_type.row_bytes(n),
                n_bytes: kv_type.row_bytes(n),
                n_values: n,
                skip: 0,
            };
            let decoder = Decoder::new(isa, kv_type);
            let mut rows = vec![0.0; TILE * n];
            decoder.decode(&heads, tile, &mut rows);
            let mut k = vec![[0.0f32; TILE]; n];
            if !decoder.columns(&heads, tile, &mut k) {
                return 0;
            }
            for (place, _) in tile.places() {
                for (d, column) in k.iter().enumerate() {
                    let (got, wanted) = (column[place], rows[place * n + d]);
                    let same = got.to_bits() == wanted.to_bits() || got.is_nan() && wanted.is_nan();
                    assert!(
                        same,
                        "{isa}, {kv_type}: value {d} of place {place}: {got}, not {wanted}"
                    );
                }
            }
            1
        };
        let whole: Vec<(usize, u32)> = (0..TILE).map(|i| (i, (i as u32 * 7 + 3) % 40)).collect();
        let tiles = [
            Tile::of(&whole),
            Tile::of(&[(5, 39)]),
            Tile::of(&whole[3..29]),
        ];
        for isa in Isa::all_available() {
            let count = |kv_type: KvType| -> usize {
                let each = |tile| [32, 64, 96, 128].map(|n| n_turned(isa, kv_type, n, tile));
                tiles.iter().flat_map(each).sum()
            };
            let turned: usize = KvType::ALL.into_iter().map(count).sum();
            let wanted = if isa == Isa::Avx512Vnni { 12 } else { 0 };
            assert_eq!(turned, wanted, "{isa}");
        }
    }

    /// Values are added as they are stored with the bits of those that were decoded first.
    #[test]
    fn stored_values_are_added_like_decoded_ones() {
        let n = 80;
        let kv_type = KvType::F16;
        let bytes: Vec<u8> = (0..40 * n)
            .flat_map(|i| half::f16::from_f32((i as f32 * 0.3).sin()).to_le_bytes())
            .collect();
        let heads = Heads {
            bytes: &bytes,
            stride: 2 * n,
            first_byte: 0,
            n_bytes: 2 * n,
            n_values: n,
            skip: 0,
        };
        let places: Vec<(usize, u32)> = (0..TILE).map(|i| (i, 39 - i as u32)).collect();
        let (tile, none) = (Tile::of(&places), Tile::default());
        let nothing = [heads; 2];
        for isa in Isa::all_available() {
            let decoder = Decoder::new(isa, kv_type);
            let mut rows = vec![0.0; TILE * n];
            decoder.decode(&heads, &tile, &mut rows);
            for n_queries in 1..=FEW {
                let Some(add) = decoder.adds(&heads, (n, n_queries)) else {
                    assert_ne!(isa, Isa::Avx512Vnni);
                    continue;
                };
                let weights: Vec<[f32; TILE]> = (0..n_queries)
                    .map(|q| std::array::from_fn(|lane| (q * TILE + lane) as f32 * 0.1))
                    .collect();
                let mut got = vec![0.5; n_queries * n];
                let mut wanted = got.clone();
                let mut ahead = Ahead::new(&none, &nothing);
                add(&mut got, &weights, (2..31, (&heads, &tile)), &mut ahead);
                let accumulate = crate::attend::TileKernels::for_isa(isa).accumulate;
                accumulate(&mut wanted, &weights, (2..31, &rows), &mut ahead);
                assert_eq!(got, wanted, "{isa}: {n_queries} queries");
            }
            assert!(decoder.adds(&heads, (n, FEW + 1)).is_none());
        }
    }

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
