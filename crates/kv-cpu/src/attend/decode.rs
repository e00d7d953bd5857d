//! [`Decoder`]: stored values of a head as `f32`, for every type of rows and instruction set.
//!
//! Invariant: every value has the very bits that [`KvType::decode_row`] gives it, which is what plain
//! code uses, whether rows are decoded, turned or added as they are stored. Where scores are computed from
//! stored bytes it is queries that are rounded ([`super::bytes`]). Knows nothing else of queries.

use std::ops::Range;

use kv_core::KvType;

use super::bytes::{BLOCK, ByteScores};
use super::tile::TILE;
use super::walk::{Ahead, Tile};
#[cfg(target_arch = "aarch64")]
use super::widen::arm;
#[cfg(target_arch = "x86_64")]
use super::widen::x86;
use crate::isa::Isa;

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
pub(super) type Decode = fn(&Heads<'_>, &Tile, &mut [f32]);

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
    /// `None`: scores are products of numbers.
    bytes: Option<ByteScores>,
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
            _ if isa.is_avx512() && isa.is_available() => x86::avx512(kv_type),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon | Isa::NeonDot | Isa::NeonI8mm if isa.is_available() => arm::neon(kv_type),
            _ => None,
        };
        let decoder = Self {
            kv_type,
            fast,
            turn: None,
            add: None,
            bytes: None,
        };
        #[cfg(target_arch = "x86_64")]
        if isa.is_avx512() && isa.is_available() {
            return decoder.with_avx512();
        }
        decoder
    }

    /// With what AVX-512, which must be available, need not decode first.
    #[cfg(target_arch = "x86_64")]
    fn with_avx512(mut self) -> Self {
        use super::{avx512, avx512_bytes};
        match self.kv_type {
            KvType::F16 => {
                // SAFETY: the caller found the instruction set available.
                self.turn = Some(|heads, tile, k| unsafe { avx512::f16_columns(heads, tile, k) });
                // SAFETY: as above.
                self.add = Some(|out, weights, of_cells, ahead| unsafe {
                    avx512::accumulate_f16(out, weights, of_cells, ahead)
                });
            }
            KvType::Q8_0 => {
                self.bytes = Some((
                    // SAFETY: as above.
                    |q, blocks| unsafe { avx512_bytes::quantise(q, blocks) },
                    // SAFETY: as above.
                    |q, keys, out, ahead| unsafe { avx512_bytes::scores(q, keys, out, ahead) },
                ));
                // SAFETY: as above.
                self.add = Some(|out, weights, of_cells, ahead| unsafe {
                    avx512_bytes::accumulate(out, weights, of_cells, ahead)
                });
            }
            _ => {}
        }
        self
    }

    /// Scores of the keys of a head as they are stored, where there are such.
    #[inline]
    pub(super) fn byte_scores(&self, heads: &Heads<'_>, k_dim: usize) -> Option<ByteScores> {
        let whole = heads.n_values == k_dim && k_dim.is_multiple_of(BLOCK);
        self.bytes.filter(|_| whole)
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
            None => {
                for (place, cell) in tile.places() {
                    let values = &mut values[place * heads.n_values..][..heads.n_values];
                    self.kv_type.decode_row(heads.of(cell), values);
                }
            }
        }
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
            let wanted = if isa.is_avx512() { 12 } else { 0 };
            assert_eq!(turned, wanted, "{isa}");
        }
    }

    /// Rows of one head of `n` values that a model could have: whole blocks with small scales.
    fn sensible(kv_type: KvType, n: usize) -> Vec<u8> {
        let values: Vec<f32> = (0..40 * n).map(|i| (i as f32 * 0.3).sin() * 3.0).collect();
        let mut bytes = vec![0; 40 * kv_type.row_bytes(n)];
        let rows = bytes.chunks_exact_mut(kv_type.row_bytes(n));
        for (values, row) in values.chunks_exact(n).zip(rows) {
            kv_type.encode_row(values, row);
        }
        bytes
    }

    /// All of each row is one head.
    fn whole(kv_type: KvType, n: usize, bytes: &[u8]) -> Heads<'_> {
        let n_bytes = kv_type.row_bytes(n);
        Heads {
            bytes,
            stride: n_bytes,
            first_byte: 0,
            n_bytes,
            n_values: n,
            skip: 0,
        }
    }

    /// Values are added as they are stored with the bits of those that were decoded first.
    #[test]
    fn stored_values_are_added_like_decoded_ones() {
        for (kv_type, n) in [(KvType::F16, 80), (KvType::Q8_0, 96)] {
            let bytes = sensible(kv_type, n);
            let heads = whole(kv_type, n, &bytes);
            let places: Vec<(usize, u32)> = (0..TILE).map(|i| (i, 39 - i as u32)).collect();
            let (tile, none) = (Tile::of(&places), Tile::default());
            let nothing = [heads; 2];
            for isa in Isa::all_available() {
                let decoder = Decoder::new(isa, kv_type);
                let mut rows = vec![0.0; TILE * n];
                decoder.decode(&heads, &tile, &mut rows);
                for n_queries in 1..=FEW {
                    let Some(add) = decoder.adds(&heads, (n, n_queries)) else {
                        assert!(!isa.is_avx512());
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
                    assert_eq!(got, wanted, "{isa}: {n_queries} queries of {kv_type}");
                }
                assert!(decoder.adds(&heads, (n, FEW + 1)).is_none());
            }
        }
    }

    /// Scores of `queries` and the cells of a whole tile as they are stored, where there is a way.
    fn byte_scores(isa: Isa, queries: &[f32], heads: &Heads<'_>) -> Option<Vec<[f32; TILE]>> {
        let (n, nothing) = (heads.n_values, [*heads; 2]);
        let (quantise, scores) = Decoder::new(isa, KvType::Q8_0).byte_scores(heads, n)?;
        let mut blocks = vec![crate::attend::QueryBlock::default(); queries.len() / BLOCK];
        quantise(queries, &mut blocks);
        let places: Vec<(usize, u32)> = (0..TILE).map(|i| (i, 39 - i as u32)).collect();
        let (tile, none) = (Tile::of(&places), Tile::default());
        let mut out = vec![[9.0; TILE]; queries.len() / n];
        let mut ahead = Ahead::new(&none, &nothing);
        scores(&blocks, (heads, &tile), &mut out, &mut ahead);
        Some(out)
    }

    /// As near to the definition as sums of single precision are, whatever the size of a query, and by the
    /// query and the cell alone.
    #[test]
    fn scores_of_stored_bytes_are_those_of_the_definition() {
        let n = 96;
        let bytes = sensible(KvType::Q8_0, n);
        let heads = whole(KvType::Q8_0, n, &bytes);
        let mut keys = vec![0.0; 40 * n];
        KvType::Q8_0.decode_row(&bytes, &mut keys);
        let sizes = [1.0, 1e-12, 3e20, 1e-35, 0.0, 1.0, 1.0, -7.5, 0.01];
        let mut queries: Vec<f32> = (0..sizes.len() * n)
            .map(|i| (i as f32 * 0.77).cos() * sizes[i / n])
            .collect();
        // One value far above the others, and one that is no number.
        (queries[5 * n + 40], queries[6 * n + 70]) = (4e5, f32::INFINITY);
        for isa in Isa::all_available() {
            let Some(all) = byte_scores(isa, &queries, &heads) else {
                assert!(!isa.is_avx512());
                continue;
            };
            for (i, (q, scores)) in queries.chunks_exact(n).zip(&all).enumerate() {
                let alone = byte_scores(isa, q, &heads).unwrap();
                let bits = |scores: &[f32; TILE]| scores.map(f32::to_bits);
                assert_eq!(bits(&alone[0]), bits(scores), "query {i} by itself");
                for (lane, &score) in scores.iter().enumerate() {
                    let key = &keys[(39 - lane) * n..][..n];
                    let products = q
                        .iter()
                        .zip(key)
                        .map(|(q, k)| f64::from(*q) * f64::from(*k));
                    let wanted: f64 = products.sum();
                    let most = q.iter().fold(0.0, |a: f32, q| a.max(q.abs()));
                    let allowed = f64::from(most) * 3.0 * n as f64 * 2e-7 + 1e-28;
                    let near = (f64::from(score) - wanted).abs() <= allowed;
                    assert!(
                        if i == 6 { score.is_nan() } else { near },
                        "{isa}, query {i}, place {lane}: {score}, not {wanted}"
                    );
                }
            }
        }
    }

    #[test]
    fn heads_that_are_not_whole_blocks_have_no_byte_scores() {
        let bytes = sensible(KvType::Q8_0, 64);
        let heads = whole(KvType::Q8_0, 64, &bytes);
        for isa in Isa::all_available() {
            let decoder = Decoder::new(isa, KvType::Q8_0);
            assert!(decoder.byte_scores(&heads, 48).is_none());
            assert!(
                Decoder::new(isa, KvType::F16)
                    .byte_scores(&heads, 64)
                    .is_none()
            );
        }
    }
}
