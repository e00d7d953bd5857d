//! [`KvReader`]: how one KV type is read on one ISA.
//!
//! K and V of a tile are dequantized, or, where that is faster, transposed, multiplied or
//! accumulated straight from their stored form.
//!
//! Invariant: every value has the bits that [`KvType::decode_row`] gives it, whichever way it is
//! read. The one exception is [`IntegerScores`], which rounds *queries* ([`super::query_i24`]).
//! Knows nothing of visibility.

use std::ops::Range;

use kv_rows::KvType;

use super::kv_tiles::{KvPrefetcher, StoredTile};
use super::query_i24::{BLOCK_LEN, IntegerScores};
use super::tile_kernels::KV_TILE;
use crate::isa::Isa;
use crate::kv_rows::HeadRows;

/// The largest number of queries for which values are accumulated as stored: more queries would
/// dequantize each value more than twice.
const MAX_STORED_QUERIES: usize = 8;

/// Dimensions must be a multiple of this to be transposed as stored.
const TRANSPOSE_STEP: usize = 8;

/// Dequantizes a head of the cells of a tile to `[KV_TILE, n_values]`; lanes without a cell keep
/// what they have.
pub(crate) type Dequantize = fn(StoredTile<'_>, &mut [f32]);

/// Reads a head of the cells of a tile as columns `[n_values, KV_TILE]`; lanes without a cell get
/// any value.
type ReadColumns = fn(StoredTile<'_>, &mut [[f32; KV_TILE]]);

/// `out[q][j] += Σ_lane weights[q][lane] · v[lane][j]` of stored values, with the order and bits of
/// [`TileKernels::accumulate`](super::tile_kernels::TileKernels).
type AccumulateStored = fn(&mut [f32], &[[f32; KV_TILE]], StoredLanes<'_>, &mut KvPrefetcher<'_>);

/// Stored values of a tile and the lanes to add: AVX-512 alone reads them.
#[derive(Clone, Debug)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(crate) struct StoredLanes<'a> {
    pub(crate) lanes: Range<usize>,
    pub(crate) stored: StoredTile<'a>,
}

/// The functions for one KV type on one ISA; what is `None` has no faster way than dequantizing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KvReader {
    kv_type: KvType,
    /// `None`: as the specification does.
    dequantize: Option<Dequantize>,
    /// `None`: rows are dequantized, then transposed.
    columns: Option<ReadColumns>,
    /// `None`: values are dequantized, then accumulated.
    accumulate: Option<AccumulateStored>,
    /// `None`: scores are `f32` products.
    integer_scores: Option<IntegerScores>,
}

impl KvReader {
    /// For rows of `kv_type` on `isa`; the specification if this machine does not have it.
    pub(crate) fn new(isa: Isa, kv_type: KvType) -> Self {
        let dequantize = match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::AvxVnni if isa.is_available() => {
                crate::kernels::isa::avx2::attend::dequantize::dequantize(kv_type)
            }
            #[cfg(target_arch = "x86_64")]
            _ if isa.is_avx512() && isa.is_available() => {
                crate::kernels::isa::avx512::attend::dequantize::dequantize(kv_type)
            }
            #[cfg(target_arch = "aarch64")]
            Isa::Neon | Isa::NeonDot | Isa::NeonI8mm if isa.is_available() => {
                crate::kernels::isa::neon::attend::dequantize::dequantize(kv_type)
            }
            _ => None,
        };
        let reader = Self {
            kv_type,
            dequantize,
            columns: None,
            accumulate: None,
            integer_scores: None,
        };
        #[cfg(target_arch = "x86_64")]
        if isa.is_avx512() && isa.is_available() {
            return reader.with_avx512();
        }
        reader
    }

    /// Adds what AVX-512, which must be available, does without dequantizing first.
    #[cfg(target_arch = "x86_64")]
    fn with_avx512(mut self) -> Self {
        use crate::kernels::isa::avx512::attend::{scores_q8_0, transpose, values, values_q8_0};
        match self.kv_type {
            KvType::F16 => {
                // SAFETY: the caller found AVX-512 available.
                self.columns = Some(|keys, k| unsafe { transpose::columns_f16(keys, k) });
                // SAFETY: the caller found AVX-512 available.
                self.accumulate = Some(|out, weights, lanes, prefetch| unsafe {
                    values::accumulate_f16(out, weights, lanes, prefetch)
                });
            }
            KvType::Q8_0 => {
                self.integer_scores = Some(IntegerScores {
                    // SAFETY: the caller found AVX-512 available.
                    quantize: |q, blocks| unsafe { scores_q8_0::quantize_queries(q, blocks) },
                    // SAFETY: the caller found AVX-512 available.
                    scores: |q, keys, out, prefetch| unsafe {
                        scores_q8_0::scores(q, keys, out, prefetch)
                    },
                });
                // SAFETY: the caller found AVX-512 available.
                self.accumulate = Some(|out, weights, lanes, prefetch| unsafe {
                    values_q8_0::accumulate(out, weights, lanes, prefetch)
                });
            }
            _ => {}
        }
        self
    }

    /// Integer scores of the stored keys of a head, if there are and the head is whole blocks.
    #[inline]
    pub(crate) fn integer_scores(
        &self,
        head: &HeadRows<'_>,
        k_dim: usize,
    ) -> Option<IntegerScores> {
        let is_whole = head.n_values == k_dim && k_dim.is_multiple_of(BLOCK_LEN);
        self.integer_scores.filter(|_| is_whole)
    }

    /// The function that accumulates the stored values of a head for `n_queries`, if that is faster
    /// than dequantizing them first.
    #[inline]
    pub(crate) fn accumulate(
        &self,
        head: &HeadRows<'_>,
        v_dim: usize,
        n_queries: usize,
    ) -> Option<AccumulateStored> {
        self.accumulate
            .filter(|_| head.n_values == v_dim && n_queries <= MAX_STORED_QUERIES)
    }

    /// Reads a head of the cells of a tile as columns `[n_values, KV_TILE]`, with the values of
    /// [`KvReader::dequantize`]; returns whether there is a way.
    #[inline]
    pub(crate) fn read_columns(&self, stored: StoredTile<'_>, k: &mut [[f32; KV_TILE]]) -> bool {
        let Some(columns) = self.columns else {
            return false;
        };
        let fits = stored.head.n_values == k.len() && k.len().is_multiple_of(TRANSPOSE_STEP);
        if fits {
            columns(stored, k);
        }
        fits
    }

    /// Dequantizes a head of the cells of a tile to `values`, `[KV_TILE, n_values]`; lanes without
    /// a cell keep what they have.
    #[inline]
    pub(crate) fn dequantize(&self, stored: StoredTile<'_>, values: &mut [f32]) {
        match self.dequantize {
            Some(dequantize) => dequantize(stored, values),
            None => {
                let n = stored.head.n_values;
                for (lane, cell) in stored.tile.lanes() {
                    let row = stored.head.row(cell);
                    self.kv_type.decode_row(row, &mut values[lane * n..][..n]);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attend::kv_tiles::KvTile;
    use crate::attend::query_i24::QueryBlockI24;
    use crate::attend::tile_kernels::{TileKernels, ValueLanes};

    fn stored<'a>(tile: &'a KvTile, head: &'a HeadRows<'a>) -> StoredTile<'a> {
        StoredTile { tile, head }
    }

    /// Random bytes, with scales that are at times subnormal, zero, negative, infinite or NaN.
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
                    let head = HeadRows {
                        bytes: &bytes,
                        cell_stride: bytes.len() / 2,
                        first_byte: 0,
                        n_bytes: bytes.len() / 2,
                        n_values: n / 2,
                        skip: 0,
                    };
                    let tile = KvTile::of(&[(0, 0), (1, 1)]);
                    KvReader::new(isa, kv_type).dequantize(stored(&tile, &head), &mut got);
                    for (got, wanted) in got.iter().zip(&wanted) {
                        let same =
                            got.to_bits() == wanted.to_bits() || (got.is_nan() && wanted.is_nan());
                        assert!(same, "{isa}, {kv_type}: {got}, not {wanted}");
                    }
                }
            }
        }
    }

    /// Random bytes: `f16` of every kind.
    fn noise(n: usize) -> Vec<u8> {
        let mut state = 7u32;
        let mut byte = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        (0..n).map(|_| byte()).collect()
    }

    #[test]
    fn columns_are_the_dequantized_rows_transposed() {
        let n_transposed = |isa: Isa, kv_type: KvType, n: usize, tile: &KvTile| {
            let stride = 3 * kv_type.row_bytes(n);
            let bytes = noise(40 * stride);
            let head = HeadRows {
                bytes: &bytes,
                cell_stride: stride,
                first_byte: kv_type.row_bytes(n),
                n_bytes: kv_type.row_bytes(n),
                n_values: n,
                skip: 0,
            };
            let reader = KvReader::new(isa, kv_type);
            let mut rows = vec![0.0; KV_TILE * n];
            reader.dequantize(stored(tile, &head), &mut rows);
            let mut k = vec![[0.0f32; KV_TILE]; n];
            if !reader.read_columns(stored(tile, &head), &mut k) {
                return 0;
            }
            for (lane, _) in tile.lanes() {
                for (d, column) in k.iter().enumerate() {
                    let (got, wanted) = (column[lane], rows[lane * n + d]);
                    let same = got.to_bits() == wanted.to_bits() || got.is_nan() && wanted.is_nan();
                    assert!(
                        same,
                        "{isa}, {kv_type}: value {d} of lane {lane}: {got}, not {wanted}"
                    );
                }
            }
            1
        };
        let whole: Vec<(usize, u32)> = (0..KV_TILE).map(|i| (i, (i as u32 * 7 + 3) % 40)).collect();
        let tiles = [
            KvTile::of(&whole),
            KvTile::of(&[(5, 39)]),
            KvTile::of(&whole[3..29]),
        ];
        for isa in Isa::all_available() {
            let count = |kv_type: KvType| -> usize {
                let each = |tile| [32, 64, 96, 128].map(|n| n_transposed(isa, kv_type, n, tile));
                tiles.iter().flat_map(each).sum()
            };
            let transposed: usize = KvType::ALL.into_iter().map(count).sum();
            let wanted = if isa.is_avx512() { 12 } else { 0 };
            assert_eq!(transposed, wanted, "{isa}");
        }
    }

    /// 40 rows of one head of `n` values in the range of a model: whole blocks with small scales.
    fn encoded_wave(kv_type: KvType, n: usize) -> Vec<u8> {
        let values: Vec<f32> = (0..40 * n).map(|i| (i as f32 * 0.3).sin() * 3.0).collect();
        let mut bytes = vec![0; 40 * kv_type.row_bytes(n)];
        let rows = bytes.chunks_exact_mut(kv_type.row_bytes(n));
        for (values, row) in values.chunks_exact(n).zip(rows) {
            kv_type.encode_row(values, row);
        }
        bytes
    }

    /// Rows that consist of one head.
    fn whole(kv_type: KvType, n: usize, bytes: &[u8]) -> HeadRows<'_> {
        let n_bytes = kv_type.row_bytes(n);
        HeadRows {
            bytes,
            cell_stride: n_bytes,
            first_byte: 0,
            n_bytes,
            n_values: n,
            skip: 0,
        }
    }

    /// Stored values are accumulated with the bits of values that were dequantized first.
    #[test]
    fn stored_values_are_accumulated_like_dequantized_ones() {
        for (kv_type, n) in [(KvType::F16, 80), (KvType::Q8_0, 96)] {
            let bytes = encoded_wave(kv_type, n);
            let head = whole(kv_type, n, &bytes);
            let lanes: Vec<(usize, u32)> = (0..KV_TILE).map(|i| (i, 39 - i as u32)).collect();
            let (tile, empty) = (KvTile::of(&lanes), KvTile::default());
            let heads = [head; 2];
            for isa in Isa::all_available() {
                let reader = KvReader::new(isa, kv_type);
                let mut rows = vec![0.0; KV_TILE * n];
                reader.dequantize(stored(&tile, &head), &mut rows);
                for n_queries in 1..=MAX_STORED_QUERIES {
                    let Some(accumulate_stored) = reader.accumulate(&head, n, n_queries) else {
                        assert!(!isa.is_avx512());
                        continue;
                    };
                    let weights: Vec<[f32; KV_TILE]> = (0..n_queries)
                        .map(|q| std::array::from_fn(|lane| (q * KV_TILE + lane) as f32 * 0.1))
                        .collect();
                    let mut got = vec![0.5; n_queries * n];
                    let mut wanted = got.clone();
                    let mut prefetch = KvPrefetcher::new(&empty, &heads);
                    let lanes = StoredLanes {
                        lanes: 2..31,
                        stored: stored(&tile, &head),
                    };
                    accumulate_stored(&mut got, &weights, lanes, &mut prefetch);
                    let accumulate = TileKernels::for_isa(isa).accumulate;
                    let values = ValueLanes {
                        lanes: 2..31,
                        values: &rows,
                    };
                    accumulate(&mut wanted, &weights, values, &mut prefetch);
                    assert_eq!(got, wanted, "{isa}: {n_queries} queries of {kv_type}");
                }
                assert!(
                    reader
                        .accumulate(&head, n, MAX_STORED_QUERIES + 1)
                        .is_none()
                );
            }
        }
    }

    /// Integer scores of `queries` and the cells of a full tile, if this ISA has them.
    fn integer_scores(
        isa: Isa,
        queries: &[f32],
        head: &HeadRows<'_>,
    ) -> Option<Vec<[f32; KV_TILE]>> {
        let (n, heads) = (head.n_values, [*head; 2]);
        let integer = KvReader::new(isa, KvType::Q8_0).integer_scores(head, n)?;
        let mut blocks = vec![QueryBlockI24::default(); queries.len() / BLOCK_LEN];
        (integer.quantize)(queries, &mut blocks);
        let lanes: Vec<(usize, u32)> = (0..KV_TILE).map(|i| (i, 39 - i as u32)).collect();
        let (tile, empty) = (KvTile::of(&lanes), KvTile::default());
        let mut out = vec![[9.0; KV_TILE]; queries.len() / n];
        let mut prefetch = KvPrefetcher::new(&empty, &heads);
        (integer.scores)(&blocks, stored(&tile, head), &mut out, &mut prefetch);
        Some(out)
    }

    /// As precise as `f32` sums whatever the size of a query, and independent of other queries.
    #[test]
    fn integer_scores_are_those_of_the_definition() {
        let n = 96;
        let bytes = encoded_wave(KvType::Q8_0, n);
        let head = whole(KvType::Q8_0, n, &bytes);
        let mut keys = vec![0.0; 40 * n];
        KvType::Q8_0.decode_row(&bytes, &mut keys);
        let sizes = [1.0, 1e-12, 3e20, 1e-35, 0.0, 1.0, 1.0, -7.5, 0.01];
        let mut queries: Vec<f32> = (0..sizes.len() * n)
            .map(|i| (i as f32 * 0.77).cos() * sizes[i / n])
            .collect();
        // One value far above the others, and an infinite one.
        (queries[5 * n + 40], queries[6 * n + 70]) = (4e5, f32::INFINITY);
        for isa in Isa::all_available() {
            let Some(all) = integer_scores(isa, &queries, &head) else {
                assert!(!isa.is_avx512());
                continue;
            };
            for (i, (q, scores)) in queries.chunks_exact(n).zip(&all).enumerate() {
                let alone = integer_scores(isa, q, &head).unwrap();
                let bits = |scores: &[f32; KV_TILE]| scores.map(f32::to_bits);
                assert_eq!(bits(&alone[0]), bits(scores), "query {i} alone");
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
                        "{isa}, query {i}, lane {lane}: {score}, not {wanted}"
                    );
                }
            }
        }
    }

    #[test]
    fn heads_that_are_not_whole_blocks_have_no_integer_scores() {
        let bytes = encoded_wave(KvType::Q8_0, 64);
        let head = whole(KvType::Q8_0, 64, &bytes);
        for isa in Isa::all_available() {
            let reader = KvReader::new(isa, KvType::Q8_0);
            assert!(reader.integer_scores(&head, 48).is_none());
            assert!(
                KvReader::new(isa, KvType::F16)
                    .integer_scores(&head, 64)
                    .is_none()
            );
        }
    }
}
