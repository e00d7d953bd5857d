//! One token against weights in super-blocks of 256, sixteen rows one after the other.
//!
//! For processors that bring most into their second-level cache, and that best in the order of memory
//! ([`Level::Second`]). What belongs to a super-block of sixteen rows is put down until all of them have it.
//!
//! Invariant: the additions of [`one_row_super`](super::one_row_super), in its order.

use std::arch::x86_64::*;

use super::one_row_super::{self as in_step, Super};
use super::reduce::{ROWS, quarters, store};
use crate::activations::{Int8Row, SUPER_BLOCK};
use crate::kernels::WeightRows;
use crate::kernels::ahead::AHEAD;
use crate::kernels::avx2::beside::sums_of_four;
use crate::kernels::fetch::Level;
use crate::kernels::side_by_side::side_by_side;

/// Super-blocks of rows that are read one after the other, at most.
const MOST: usize = 8;

/// What is known of some super-blocks of sixteen rows before it is added.
struct Pending {
    sums: [[__m512i; ROWS]; MOST],
    minima: [[__m128i; ROWS]; MOST],
    scales: [[u16; ROWS]; MOST],
    scale_minima: [[u16; ROWS]; MOST],
}

impl Pending {
    /// Of nothing yet.
    #[target_feature(enable = "avx512f")]
    fn new() -> Self {
        Self {
            sums: [[_mm512_setzero_si512(); ROWS]; MOST],
            minima: [[_mm_setzero_si128(); ROWS]; MOST],
            scales: [[0; ROWS]; MOST],
            scale_minima: [[0; ROWS]; MOST],
        }
    }

    /// Adds super-block `s` of these.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    fn add<F: Super<BYTES>, const BYTES: usize>(
        &self,
        s: usize,
        act_scale: f32,
        acc: __m512,
    ) -> __m512 {
        let (mut sums, mut minima) = ([_mm512_setzero_si512(); 4], [_mm_setzero_si128(); 4]);
        let (all_sums, _) = self.sums[s].as_chunks();
        let (all_minima, _) = self.minima[s].as_chunks();
        for quarter in 0..ROWS / 4 {
            sums[quarter] = quarters(all_sums[quarter]);
            if F::MINIMA {
                minima[quarter] = sums_of_four(all_minima[quarter]);
            }
        }
        let scales = (&self.scales[s], &self.scale_minima[s]);
        in_step::add::<F, BYTES>((sums, minima), scales, act_scale, acc)
    }
}

/// The sums of sixteen rows that lie one after the other, perhaps the last one instead of those that are missing.
///
/// # Safety
/// The rows have `n_supers` blocks, at most [`MOST`]; the activations at least as many.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn tile<F: Super<BYTES>, const BYTES: usize>(
    rows: &[*const [u8; BYTES]; ROWS],
    n_supers: usize,
    acts: &Int8Row<'_>,
    pending: &mut Pending,
) -> __m512 {
    // All rows are read in the order in which they lie.
    for (r, row) in rows.iter().enumerate() {
        for s in 0..n_supers {
            // SAFETY: the block is inside the row.
            let block = unsafe { &*row.add(s) };
            let at = std::ptr::from_ref(block).cast::<u8>();
            Level::Second.fetch(at.wrapping_add(AHEAD), BYTES);
            let head = F::head(block);
            pending.scales[s][r] = head.scale.to_bits();
            pending.scale_minima[s][r] = head.minimum.to_bits();
            let first = s * SUPER_BLOCK;
            // SAFETY: this function needs the same features.
            let (q, numbers) = unsafe { (F::quants(block), F::numbers(block)) };
            // SAFETY: the activations have this super-block.
            let a = unsafe { in_step::activations(acts, first) };
            let (sum, minima) = in_step::dot::<F, BYTES>(&q, &a, numbers, acts, first);
            pending.sums[s][r] = sum;
            if F::MINIMA {
                pending.minima[s][r] = minima;
            }
        }
    }
    let mut acc = _mm512_setzero_ps();
    for s in 0..n_supers {
        acc = pending.add::<F, BYTES>(s, acts.scales[s * SUPER_BLOCK], acc);
    }
    acc
}

/// All weight rows against one token: `out[row]`.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn multiply<F: Super<BYTES>, const BYTES: usize>(
    weights: &WeightRows<'_>,
    acts: &Int8Row<'_>,
    out: &mut [f32],
) {
    let n_stored = (weights.row_bytes / BYTES).min(acts.n_blocks() / SUPER_BLOCK);
    match Level::of_tile(ROWS * weights.row_bytes) {
        Level::Second if n_stored <= MOST => {
            row_after_row::<F, BYTES>(weights, n_stored, acts, out)
        }
        _ => in_step::multiply::<F, BYTES>(weights, acts, out),
    }
}

/// The same for rows of `n_stored` super-blocks, at most [`MOST`].
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn row_after_row<F: Super<BYTES>, const BYTES: usize>(
    weights: &WeightRows<'_>,
    n_stored: usize,
    acts: &Int8Row<'_>,
    out: &mut [f32],
) {
    let mut pending = Pending::new();
    for (rows, out) in side_by_side(weights, out) {
        // SAFETY: `n_stored` blocks can be read from the start of each row on, and the activations have as
        // many.
        let sums = unsafe { tile::<F, BYTES>(&rows, n_stored, acts, &mut pending) };
        store(sums, out);
    }
}

#[cfg(test)]
mod tests {
    use kv_core::block::BlockFormat;

    use super::super::{TABLE, one_row_super as f};
    use super::*;
    use crate::activations::{Int8Buffer, ScaleSpan};
    use crate::isa::Isa;
    use crate::kernels::Arrangement;

    /// Both ways of one format, for rows of so many super-blocks, of which the last tile has a few.
    fn both<F: Super<BYTES>, const BYTES: usize>(format: BlockFormat, n_supers: usize) {
        const N_ROWS: usize = 2 * ROWS + 5;
        let n_columns = n_supers * 256;
        // No byte has bit 6, so that no scale is infinite.
        let bytes: Vec<u8> = (0..(N_ROWS * n_supers * BYTES) as u32)
            .map(|i| (i.wrapping_mul(2_654_435_761) >> 23) as u8 & 0xbf)
            .collect();
        let values: Vec<f32> = (0..n_columns).map(|i| (i as f32 * 0.37).sin()).collect();
        let mut buffer = Int8Buffer::with_span(ScaleSpan::SuperBlock);
        buffer.reshape(1, n_columns);
        buffer.prepare(&TABLE, &values);
        let weights = WeightRows {
            format,
            arrangement: Arrangement::Stored,
            bytes: &bytes,
            row_bytes: n_supers * BYTES,
            first: 0,
            n_columns,
        };
        let acts = buffer.rows().row(0).expect("one row");
        let mut sums = [[0.0; N_ROWS]; 2];
        // SAFETY: the caller asked for the instruction set; rows have so many super-blocks.
        unsafe {
            row_after_row::<F, BYTES>(&weights, n_supers, &acts, &mut sums[0]);
            in_step::multiply::<F, BYTES>(&weights, &acts, &mut sums[1]);
        }
        let [after, step] = sums.map(|sums| sums.map(f32::to_bits));
        assert_eq!(after, step, "{format}, {n_supers} super-blocks");
        assert!(sums[0].iter().all(|x| x.is_finite()) && sums[0].iter().any(|x| *x != 0.0));
    }

    #[test]
    fn the_order_of_rows_changes_no_bit() {
        if !Isa::Avx512Vnni.is_available() {
            return;
        }
        for n in [1, 2, 5, MOST] {
            both::<f::Q2K, 84>(BlockFormat::Q2_K, n);
            both::<f::Q3K, 110>(BlockFormat::Q3_K, n);
            both::<f::Q4K, 144>(BlockFormat::Q4_K, n);
            both::<f::Q5K, 176>(BlockFormat::Q5_K, n);
            both::<f::Q6K, 210>(BlockFormat::Q6_K, n);
            both::<f::Iq4Xs, 136>(BlockFormat::IQ4_XS, n);
        }
    }
}
