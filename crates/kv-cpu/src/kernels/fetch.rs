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

/// The cache into which weights are asked that one token is multiplied with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    First,
    Second,
}

/// Bytes that stay in a first-level cache of 32 KiB with as many that were asked for, and what else is read.
const STAY: usize = 11 * 1024;

impl Level {
    /// The one that serves this processor best where so many bytes are read at a time and as many asked for.
    ///
    /// AMD's processors before Zen 5 have 24 buffers for what their first-level cache misses, and what is asked for
    /// waits in those: one core of Zen 4 gets 8.5 GB/s so, and 15 to 20 into the second-level cache. What then
    /// stays in the first one is still better off there.
    pub(crate) fn of_tile(n_bytes: usize) -> Self {
        match few_first_level_misses() {
            true if n_bytes > STAY => Self::Second,
            _ => Self::First,
        }
    }

    /// The one that serves this processor best for what is read from beginning to end.
    pub(crate) fn of_streams() -> Self {
        match few_first_level_misses() {
            true => Self::Second,
            false => Self::First,
        }
    }

    /// Asks for all lines that lie `64 · n` bytes from an address on, up to `n_bytes`.
    #[inline(always)]
    pub(crate) fn fetch(self, from: *const u8, n_bytes: usize) {
        match self {
            Self::First => fetch_bytes(from, n_bytes),
            Self::Second => {
                for at in (0..n_bytes).step_by(64) {
                    fetch_to_second(from.wrapping_add(at));
                }
            }
        }
    }
}

/// Whether the first-level cache misses so few lines at a time that it is better not asked.
fn few_first_level_misses() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        /// The first of AMD's families with more.
        const ZEN5: u32 = 0x1a;
        static ANSWER: std::sync::LazyLock<bool> =
            std::sync::LazyLock::new(|| amd_family().is_some_and(|family| family < ZEN5));
        *ANSWER
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// The processor's family, if it is AMD's.
#[cfg(target_arch = "x86_64")]
fn amd_family() -> Option<u32> {
    use std::arch::x86_64::{__cpuid, CpuidResult};

    #[allow(unused_unsafe)] // newer toolchains have it as a safe function
    let cpuid = |leaf: u32| -> CpuidResult {
        // SAFETY: every x86-64 has the instruction, and these leaves.
        unsafe { __cpuid(leaf) }
    };
    let maker = cpuid(0);
    let name = [maker.ebx, maker.edx, maker.ecx].map(u32::to_le_bytes);
    if name.as_flattened() != b"AuthenticAMD" {
        return None;
    }
    let version = cpuid(1).eax;
    // The family is the sum of two fields.
    Some((version >> 8 & 0xf) + (version >> 20 & 0xff))
}

/// Asks for all lines that lie `64 · n` bytes from an address on, up to `n_bytes`.
#[inline(always)]
fn fetch_bytes(from: *const u8, n_bytes: usize) {
    for at in (0..n_bytes).step_by(64) {
        fetch_line(from.wrapping_add(at));
    }
}
