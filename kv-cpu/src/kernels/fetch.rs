//! Asking for memory before it is needed.

/// Asks for the line at an address, which may be any; where there is no way to ask, nothing happens.
#[inline(always)]
pub(crate) fn fetch_line(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: any address may be asked for, and every x86-64 has the instruction.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: any address may be asked for, and every AArch64 has the instruction.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{at}]", at = in(reg) at,
            options(readonly, nostack, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = at;
}

/// Asks for all lines that lie `64 · n` bytes from an address on, up to `n_bytes`.
#[inline(always)]
pub(crate) fn fetch_bytes(from: *const u8, n_bytes: usize) {
    for at in (0..n_bytes).step_by(64) {
        fetch_line(from.wrapping_add(at));
    }
}

/// As [`fetch_line`], to the second-level cache.
#[inline(always)]
pub(crate) fn fetch_to_second(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: any address may be asked for, and every x86-64 has the instruction.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) };
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: any address may be asked for, and every AArch64 has the instruction.
    unsafe {
        std::arch::asm!("prfm pldl2keep, [{at}]", at = in(reg) at,
            options(readonly, nostack, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = at;
}
