//! Asking for memory before it is needed.

/// A function that asks for a line, by the hint that x86-64 has for it and by AArch64's instruction.
macro_rules! fetch {
    ($(#[$doc:meta])+ $name:ident: $hint:ident, $prfm:literal) => {
        $(#[$doc])+
        #[inline(always)]
        pub(crate) fn $name(at: *const u8) {
            #[cfg(target_arch = "x86_64")]
            {
                use std::arch::x86_64::{$hint, _mm_prefetch};
                // SAFETY: any address may be asked for, and every x86-64 has the instruction.
                unsafe { _mm_prefetch::<$hint>(at.cast()) };
            }
            #[cfg(target_arch = "aarch64")]
            // SAFETY: any address may be asked for, and every AArch64 has the instruction.
            unsafe {
                std::arch::asm!(concat!("prfm ", $prfm, ", [{at}]"), at = in(reg) at,
                    options(readonly, nostack, preserves_flags));
            }
            #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
            let _ = at;
        }
    };
}

fetch! {
    /// Asks for the line at an address, which may be any; where there is no way to ask, nothing happens.
    fetch_line: _MM_HINT_T0, "pldl1keep"
}

fetch! {
    /// As [`fetch_line`], to the second-level cache.
    fetch_to_second: _MM_HINT_T1, "pldl2keep"
}

/// Asks for all lines that lie `64 · n` bytes from an address on, up to `n_bytes`.
#[inline(always)]
pub(crate) fn fetch_bytes(from: *const u8, n_bytes: usize) {
    for at in (0..n_bytes).step_by(64) {
        fetch_line(from.wrapping_add(at));
    }
}
