//! Software prefetch: which cache level weights are prefetched into, and how far ahead.
//!
//! GEMV reads the rows of a tile in lock-step: some blocks of every row, then the next blocks of
//! every row. Memory is fastest in address order, so while a small tile is read, the next one is
//! prefetched from its beginning to its end. A tile too large for the cache is prefetched
//! [`DISTANCE`] bytes ahead: further on in the same row, or in the next tile. Which cache level is
//! best depends on the processor ([`CacheLevel`]). Knows no format.

/// Defines a prefetch of one cache line by x86-64's hint and by AArch64's instruction.
macro_rules! prefetch {
    ($(#[$doc:meta])+ $name:ident: $hint:ident, $prfm:literal) => {
        $(#[$doc])+
        #[inline(always)]
        pub(crate) fn $name(at: *const u8) {
            #[cfg(target_arch = "x86_64")]
            {
                use std::arch::x86_64::{$hint, _mm_prefetch};
                // SAFETY: any address may be prefetched, and every x86-64 has the instruction.
                unsafe { _mm_prefetch::<$hint>(at.cast()) };
            }
            #[cfg(target_arch = "aarch64")]
            // SAFETY: any address may be prefetched, and every AArch64 has the instruction.
            unsafe {
                std::arch::asm!(concat!("prfm ", $prfm, ", [{at}]"), at = in(reg) at,
                    options(readonly, nostack, preserves_flags));
            }
            #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
            let _ = at;
        }
    };
}

prefetch! {
    /// Prefetches the line at an address, which may be any, into the first-level cache.
    prefetch_l1: _MM_HINT_T0, "pldl1keep"
}

prefetch! {
    /// As [`prefetch_l1`], into the second-level cache.
    prefetch_l2: _MM_HINT_T1, "pldl2keep"
}

/// Bytes of a cache line.
const LINE: usize = 64;

/// Bytes between prefetch and use: some 300 ns of one core's share of the memory bandwidth.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const DISTANCE: usize = 8 * 1024;

/// The same for the second-level cache and bytes that are read from beginning to end. Each line is
/// prefetched twice: when memory is busy, processors drop prefetches (one core of Zen 4 multiplies
/// 24 GB/s this way and 20 GB/s with one prefetch for each line, of the 29 GB/s that it reads).
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const STREAM_DISTANCES: [usize; 2] = [12 * 1024, 6 * 1024];

/// Bytes of the largest tile that is prefetched as a whole into the first-level cache.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const MAX_L1_TILE: usize = 30 * 1024;
/// The same for the second-level cache.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const MAX_L2_TILE: usize = 256 * 1024;

/// Bytes that stay in a first-level cache of 32 KiB next to as many prefetched ones and what else
/// is read.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const MAX_L1_RESIDENT: usize = 11 * 1024;

/// The cache that weights are prefetched into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CacheLevel {
    /// First-level cache.
    L1,
    /// Second-level cache.
    L2,
}

impl CacheLevel {
    /// The level that is fastest on this processor for tiles of so many bytes.
    ///
    /// AMD's processors before Zen 5 have 24 miss buffers at their first-level cache, which
    /// prefetches occupy: one core of Zen 4 reads 8.5 GB/s that way, and 15 to 20 GB/s through the
    /// second level. Tiles that stay in the first level are still faster there.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    fn for_tile(n_bytes: usize) -> Self {
        if has_few_l1_miss_buffers() && n_bytes > MAX_L1_RESIDENT {
            Self::L2
        } else {
            Self::L1
        }
    }

    /// The level that is fastest on this processor for bytes read from beginning to end.
    pub(crate) fn for_streams() -> Self {
        if has_few_l1_miss_buffers() {
            Self::L2
        } else {
            Self::L1
        }
    }

    /// Prefetches the lines that lie `64 · n` bytes from an address on, up to `n_bytes`.
    #[inline(always)]
    pub(crate) fn prefetch(self, from: *const u8, n_bytes: usize) {
        for at in (0..n_bytes).step_by(LINE) {
            match self {
                Self::L1 => prefetch_l1(from.wrapping_add(at)),
                Self::L2 => prefetch_l2(from.wrapping_add(at)),
            }
        }
    }
}

/// True if the first-level cache has so few miss buffers that prefetches had better avoid it.
fn has_few_l1_miss_buffers() -> bool {
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
    use std::arch::x86_64::__cpuid;

    let maker = __cpuid(0);
    let name = [maker.ebx, maker.edx, maker.ecx].map(u32::to_le_bytes);
    if name.as_flattened() != b"AuthenticAMD" {
        return None;
    }
    let version = __cpuid(1).eax;
    // The family is the sum of two fields.
    Some((version >> 8 & 0xf) + (version >> 20 & 0xff))
}

/// Prefetches what follows a line of bytes that are read from beginning to end.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(in crate::kernels) fn prefetch_stream<const L2: bool>(line: *const u8) {
    if L2 {
        for distance in STREAM_DISTANCES {
            prefetch_l2(line.wrapping_add(distance));
        }
    } else {
        prefetch_l1(line.wrapping_add(DISTANCE));
    }
}

/// The same into the second-level cache for a line at byte `at` of row `row` of a tile of `N` rows
/// that begins at `first` and is read in lock-step.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[inline(always)]
pub(in crate::kernels) fn prefetch_next_tile<const N: usize>(
    first: *const u8,
    at: usize,
    row: usize,
    row_bytes: usize,
) {
    let [far, near] = STREAM_DISTANCES;
    // At least one tile ahead: all rows of this one are being read.
    let line = first.wrapping_add(N * at + row * LINE + far.max(N * row_bytes));
    prefetch_l2(line);
    prefetch_l2(line.wrapping_sub(far - near));
}

/// Prefetches the piece that is needed some time after a piece of a row of a tile.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[derive(Clone, Copy)]
pub(in crate::kernels) struct Prefetcher {
    /// Distance from the piece of the first row.
    bytes: usize,
    /// The step from row to row (perhaps negative, wrapped).
    each_row: usize,
    /// Bytes to prefetch.
    piece: usize,
    level: CacheLevel,
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
impl Prefetcher {
    /// For a piece of `piece` bytes at byte `at` of `N` rows of `row_bytes`.
    #[inline(always)]
    pub(in crate::kernels) fn new<const N: usize>(
        at: usize,
        piece: usize,
        row_bytes: usize,
    ) -> Self {
        let tile = N * row_bytes;
        let level = CacheLevel::for_tile(tile);
        let max_tile = match level {
            CacheLevel::L1 => MAX_L1_TILE,
            CacheLevel::L2 => MAX_L2_TILE,
        };
        if tile <= max_tile {
            return Self {
                bytes: tile + (N - 1) * at,
                each_row: piece.wrapping_sub(row_bytes),
                piece,
                level,
            };
        }
        let further = DISTANCE.div_ceil(N * piece.max(1)) * piece;
        let in_row = at + further < row_bytes;
        let next_tile = tile - row_bytes + further.min(row_bytes);
        Self {
            bytes: if in_row { further } else { next_tile },
            each_row: 0,
            piece,
            level,
        }
    }

    /// Prefetches what follows the piece at `from`, in row `row` of the tile. Past the end of the
    /// weights this does nothing.
    #[inline(always)]
    pub(in crate::kernels) fn prefetch<T>(self, from: *const T, row: usize) {
        let bytes = self.bytes.wrapping_add(row.wrapping_mul(self.each_row));
        // Neighbouring pieces share lines, so whole lines of one are enough.
        let from = from.cast::<u8>().wrapping_add(bytes);
        self.level.prefetch(from, self.piece);
    }
}
