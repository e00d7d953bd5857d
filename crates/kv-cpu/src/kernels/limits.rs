//! The int8 peak of a core: how many multiplications and additions it can do at all, without
//! memory.
//!
//! Prompt speeds are compared with it. Knows no format.

use crate::isa::Isa;

/// Does dot products of int8 values in registers, `rounds` times as many as there are sums.
///
/// Returns how many operations that were (a multiplication and an addition are two), or `None`
/// where the instruction set has no int8 dot product. The second value is what was computed: it
/// keeps the compiler from leaving the work out.
#[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))] // no dot products elsewhere yet
pub fn int8_operations(isa: Isa, rounds: usize) -> Option<(u64, i32)> {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the instruction set is available.
        Isa::AvxVnni if isa.is_available() => Some(unsafe { x86::avx_vnni(rounds) }),
        #[cfg(target_arch = "x86_64")]
        _ if isa.is_avx512() && isa.is_available() => {
            // SAFETY: as above.
            Some(unsafe { x86::avx512_vnni(rounds) })
        }
        _ => None,
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::hint::black_box;

    /// Dot products in registers of so many 32-bit lanes, with so many independent sums: enough to
    /// hide the latency of one, and no more than there are registers.
    macro_rules! dot_products {
        ($name:ident: $features:literal, $sums:literal of $lanes:literal,
         $splat:path, $dot:path, $store:path) => {
            #[target_feature(enable = $features)]
            pub(super) fn $name(rounds: usize) -> (u64, i32) {
                let (x, y) = (
                    $splat(black_box(0x0102_0304)),
                    $splat(black_box(0x0101_0101)),
                );
                let mut sums = [$splat(0); $sums];
                for _ in 0..rounds {
                    for sum in &mut sums {
                        *sum = $dot(*sum, x, y);
                    }
                }
                let mut lanes = [[0i32; $lanes]; $sums];
                for (lanes, sum) in lanes.iter_mut().zip(sums) {
                    // SAFETY: the array has the register's size; the store needs no alignment.
                    unsafe { $store(lanes.as_mut_ptr().cast(), sum) };
                }
                let all = lanes.as_flattened().iter();
                let sum = all.fold(0i32, |sum, lane| sum.wrapping_add(*lane));
                ((rounds * $sums * $lanes * 4 * 2) as u64, sum)
            }
        };
    }

    dot_products!(avx_vnni: "avx2,avxvnni", 12 of 8,
        _mm256_set1_epi32, _mm256_dpbusd_avx_epi32, _mm256_storeu_si256);
    dot_products!(avx512_vnni: "avx512f,avx512vnni", 20 of 16,
        _mm512_set1_epi32, _mm512_dpbusd_epi32, _mm512_storeu_si512);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_what_was_computed() {
        for isa in Isa::all_available() {
            if let Some((operations, sum)) = int8_operations(isa, 3) {
                // Each product of four bytes adds 1 + 2 + 3 + 4 to one lane: eight operations.
                assert_eq!(operations / 8 * 10, sum as u64, "{isa}");
            }
        }
        assert!(int8_operations(Isa::Scalar, 1).is_none());
    }
}
