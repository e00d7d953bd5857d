//! How many int8 multiplications and additions a core can do at all: the limit that prompts are
//! compared with. Nothing is read from memory. Knows no format.

use crate::isa::Isa;

/// Independent sums, enough to hide the latency of one.
const CHAINS: usize = 20;

/// Does dot products of int8 values in registers, `rounds` times as many as there are sums.
///
/// Returns how many operations that were (a multiplication and an addition are two), or `None`
/// where the instruction set has no int8 dot product. The second value is what was computed: it
/// keeps the compiler from leaving the work out.
pub fn int8_operations(isa: Isa, rounds: usize) -> Option<(u64, i32)> {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Vnni if isa.is_available() => {
            // SAFETY: the instruction set is available.
            let sum = unsafe { avx512_vnni(rounds) };
            Some(((rounds * CHAINS * 2 * 64) as u64, sum))
        }
        _ => None,
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vnni")]
fn avx512_vnni(rounds: usize) -> i32 {
    use std::arch::x86_64::*;
    use std::hint::black_box;

    let x = _mm512_set1_epi32(black_box(0x0102_0304));
    let y = _mm512_set1_epi32(black_box(0x0101_0101));
    let mut sums = [_mm512_setzero_si512(); CHAINS];
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm512_dpbusd_epi32(*sum, x, y);
        }
    }
    let mut total = _mm512_setzero_si512();
    for sum in sums {
        total = _mm512_add_epi32(total, sum);
    }
    _mm512_reduce_add_epi32(total)
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
