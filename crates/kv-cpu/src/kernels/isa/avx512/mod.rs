//! The tables for x86-64 with AVX-512 and VNNI, with and without dot products of BF16.
//!
//! They pack weights: sixteen rows interleaved, one in each lane ([`pack`]), and floats in thirteen
//! bits where that loses nothing ([`packed_float`]). Stored weights take AVX2's GEMV, but those of
//! grids where there is VBMI ([`grids`]). Sums over lanes are AVX2's too, so that every instruction
//! set of x86-64 gives the same bits and the same text. A table must only be handed out where its
//! [`Isa`] is available.

pub(crate) mod attend;
mod bf16;
mod block_scales;
mod dot;
mod float;
mod gemm_pairs;
mod gemm_skinny;
mod gemv;
mod grids;
mod matmul;
mod pack;
mod packed_float;
mod quantize;
mod row_group;
mod scan;
mod unpack;
mod unpack_panel;
mod vector;

use half::f16;

use self::vector::Avx512;
use super::avx2;
use crate::isa::Isa;
use crate::kernels::vector::vector_table;
use crate::kernels::{Kernels, PackFns};

pub(in crate::kernels) const TABLE: Kernels = vector_table!("avx512f,avx2,fma,f16c", Avx512::new(),
    isa: Isa::Avx512Vnni,
    dot_f32: avx2::TABLE.dot_f32,
    dot_f16: avx2::TABLE.dot_f16,
    exp_sum: avx2::TABLE.exp_sum,
    rms_norm: avx2::TABLE.rms_norm,
    // SAFETY: the table is handed out only where these features are available.
    scan_tile: |tile| unsafe { scan::scan_tile(tile) },
    // SAFETY: as above.
    quantize: |values, row| unsafe { quantize::quantize(values, row) },
    // SAFETY: as above.
    multiply: |weights, acts, tokens, out| unsafe {
        matmul::matmul(weights, acts, tokens, out)
    },
    pack: Some(&PackFns {
        group_rows: row_group::ROWS,
        row_bytes: pack::row_bytes,
        block_len: pack::block_len,
        // SAFETY: as above.
        pack: |stored, to| unsafe { pack::pack(stored, to) },
        // SAFETY: as above.
        stored_block: |weights, row, b, to| unsafe { pack::stored_block(weights, row, b, to) },
    }),
);

/// With dot products of BF16, in addition to what [`TABLE`] needs.
pub(in crate::kernels) const BF16_TABLE: Kernels = Kernels {
    isa: Isa::Avx512Bf16,
    // SAFETY: the table is handed out only where these features are available.
    round_bf16: |from, to| unsafe { bf16::round(from, to) },
    // SAFETY: as above.
    multiply: |weights, acts, tokens, out| unsafe {
        matmul::matmul_bf16(weights, acts, tokens, out)
    },
    pack_bf16: Some(&PackFns {
        group_rows: row_group::ROWS,
        row_bytes: packed_float::bf16::row_bytes,
        block_len: |_| packed_float::bf13::COLUMNS,
        // SAFETY: as above.
        pack: |stored, to| unsafe { packed_float::bf16::pack(stored, to) },
        // SAFETY: as above.
        stored_block: |weights, row, b, to| unsafe {
            packed_float::bf16::stored_block(weights, row, b, to)
        },
    }),
    ..TABLE
};

#[cfg(test)]
mod tests {
    use super::*;

    /// Small operations give the bits of AVX2's, wherever a value stands.
    #[test]
    fn small_operations_have_the_bits_of_avx2() {
        if !Isa::Avx512Vnni.is_available() {
            return;
        }
        let wave = |n: usize, by: f32| -> Vec<f32> {
            (0..n).map(|i| (i as f32 * 0.37).sin() * by).collect()
        };
        for (n, by) in [(1, 3.0), (17, 40.0), (64, 1e-3), (333, 9.0), (900, 120.0)] {
            let (x, y) = (wave(n, by), wave(n, by * 0.7));
            let all = |k: &Kernels| -> Vec<u32> {
                let changed = |change: &dyn Fn(&mut [f32])| {
                    let mut to = x.clone();
                    change(&mut to);
                    to
                };
                let mut normed = vec![0.0; n];
                (k.rms_norm)(&x, &y, 1e-6, &mut normed);
                let mut values = [
                    normed,
                    changed(&|to| (k.silu_mul)(to, &y)),
                    changed(&|to| (k.sigmoid_mul)(to, &y)),
                    changed(&|to| (k.gelu_tanh_mul)(to, &y)),
                    changed(&|to| (k.gelu_erf_mul)(to, &y)),
                    changed(&|to| (k.softplus)(to)),
                    changed(&|to| (k.soft_cap)(to, 30.0)),
                    changed(&|to| (k.multiply_add)(to, &x, &y)),
                    changed(&|to| (k.axpy_f32)(to, 0.3, &y)),
                ]
                .concat();
                values.extend([(k.dot_f32)(&x, &y), (k.max)(&x)]);
                values.push((k.exp_sum)(&mut x.clone(), by));
                values.iter().map(|v| v.to_bits()).collect()
            };
            assert_eq!(all(&TABLE), all(&avx2::TABLE), "{n} values");
        }
    }
}
