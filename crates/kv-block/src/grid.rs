//! The grids of the IQ1, IQ2 and IQ3 formats: tables of four or eight values that are stored as one
//! index.
//!
//! `grids.bin` has them packed, two or three bits a value (`tests/fixtures/kv-block/make_grids.py`
//! makes it); here they are bytes. The grids are facts of the formats: which points they have
//! follows from no rule. Knows no block.

/// All grids, one after the other: 16 bits an entry, little endian.
const PACKED: &[u8; 9216] = include_bytes!("grids.bin");

/// Magnitudes of the IQ2 formats.
const IQ2_LEVELS: [u8; 4] = [8, 25, 43, 0];
/// Eight times the values of the IQ1 formats (-1, 0 and 1), plus 16.
const IQ1_LEVELS: [u8; 4] = [8, 16, 24, 0];

/// Magnitudes of `IQ3_XXS`.
const IQ3_XXS_LEVELS: [u8; 8] = [4, 12, 20, 28, 36, 44, 52, 62];
/// Magnitudes of `IQ3_S`.
const IQ3_S_LEVELS: [u8; 8] = [1, 3, 5, 7, 9, 11, 13, 15];

/// A grid whose entries are numbers of levels: two bits for each of eight values, or three for each
/// of four, the first value in the lowest bits.
#[derive(Debug)]
pub struct PackedGrid<const N: usize> {
    /// The low byte of each entry.
    pub low: [u8; N],
    /// The high byte of each entry.
    pub high: [u8; N],
    /// The levels; of four, the others are 0.
    pub levels: [u8; 8],
}

/// Entries of `IQ2_XXS`.
pub static IQ2_XXS_GRID: PackedGrid<256> = packed(0, of_four(IQ2_LEVELS));
/// Entries of `IQ2_XS`.
pub static IQ2_XS_GRID: PackedGrid<512> = packed(256, of_four(IQ2_LEVELS));
/// Entries of `IQ2_S`.
pub static IQ2_S_GRID: PackedGrid<1024> = packed(768, of_four(IQ2_LEVELS));
/// Entries of `IQ3_XXS`.
pub static IQ3_XXS_GRID: PackedGrid<256> = packed(3840, IQ3_XXS_LEVELS);
/// Entries of `IQ3_S`.
pub static IQ3_S_GRID: PackedGrid<512> = packed(4096, IQ3_S_LEVELS);

// The number of entries before each grid stands in the call.
pub(super) static IQ2_XXS: [u64; 256] = eights(0, IQ2_LEVELS);
pub(super) static IQ2_XS: [u64; 512] = eights(256, IQ2_LEVELS);
pub(super) static IQ2_S: [u64; 1024] = eights(768, IQ2_LEVELS);
/// Of `IQ1_S` and `IQ1_M`.
pub(super) static IQ1: [u64; 2048] = eights(1792, IQ1_LEVELS);
/// The four values of each entry of `IQ3_XXS`, a byte each.
pub static IQ3_XXS_ENTRIES: [u32; 256] = fours(3840, IQ3_XXS_LEVELS);
/// The same of `IQ3_S`.
pub static IQ3_S_ENTRIES: [u32; 512] = fours(4096, IQ3_S_LEVELS);

/// The eight signs that seven bits stand for: the number of those set is even.
pub(super) static EVEN_SIGNS: [u8; 128] = {
    let (mut signs, mut i) = ([0; 128], 0u8);
    while i < 128 {
        signs[i as usize] = i | ((i.count_ones() as u8 & 1) << 7);
        i += 1;
    }
    signs
};

const fn entry(at: usize) -> u16 {
    u16::from_le_bytes([PACKED[2 * at], PACKED[2 * at + 1]])
}

const fn of_four([a, b, c, d]: [u8; 4]) -> [u8; 8] {
    [a, b, c, d, 0, 0, 0, 0]
}

/// Entries from number `first` on, as they are packed.
const fn packed<const N: usize>(first: usize, levels: [u8; 8]) -> PackedGrid<N> {
    let (mut low, mut high, mut i) = ([0; N], [0; N], 0);
    while i < N {
        [low[i], high[i]] = entry(first + i).to_le_bytes();
        i += 1;
    }
    PackedGrid { low, high, levels }
}

/// Entries from number `first` on, of eight values in the order of the bytes.
const fn eights<const N: usize>(first: usize, levels: [u8; 4]) -> [u64; N] {
    let (mut grid, mut i) = ([0; N], 0);
    while i < N {
        let (packed, mut value) = (entry(first + i), 0);
        while value < 8 {
            let level = levels[(packed >> (2 * value) & 3) as usize];
            grid[i] |= (level as u64) << (8 * value);
            value += 1;
        }
        i += 1;
    }
    grid
}

/// The same, of four values.
const fn fours<const N: usize>(first: usize, levels: [u8; 8]) -> [u32; N] {
    let (mut grid, mut i) = ([0; N], 0);
    while i < N {
        let (packed, mut value) = (entry(first + i), 0);
        while value < 4 {
            let level = levels[(packed >> (3 * value) & 7) as usize];
            grid[i] |= (level as u32) << (8 * value);
            value += 1;
        }
        i += 1;
    }
    grid
}

/// 32 neighbouring values of a block, before they are scaled: bytes, and which of them are negated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quants32 {
    /// The bytes, eight to a number, the first in its lowest bits.
    pub bytes: [u64; 4],
    /// Bit `i` is set where value `i` is the negative of its byte.
    pub signs: u32,
}

impl Quants32 {
    /// The bytes as they are.
    #[inline]
    pub(super) const fn positive(bytes: [u64; 4]) -> Self {
        Self { bytes, signs: 0 }
    }

    /// The values, less an offset.
    #[inline]
    pub fn values(self, offset: i8) -> [i8; 32] {
        std::array::from_fn(|i| {
            let byte = self.bytes[i / 8].to_le_bytes()[i % 8] as i8;
            let negated = (self.signs >> i) & 1 == 1;
            (if negated { -byte } else { byte }) - offset
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// No two entries of a grid are equal, and no level is one that does not exist.
    #[test]
    fn grids_have_no_entry_twice() {
        let eights: [&[u64]; 4] = [&IQ2_XXS, &IQ2_XS, &IQ2_S, &IQ1];
        let fours = [IQ3_XXS_ENTRIES.as_slice(), IQ3_S_ENTRIES.as_slice()];
        let fours = fours.map(|grid| grid.iter().map(|&entry| entry.into()).collect::<Vec<u64>>());
        for grid in eights.into_iter().chain(fours.iter().map(Vec::as_slice)) {
            let mut entries = grid.to_vec();
            entries.sort_unstable();
            entries.dedup();
            assert_eq!(entries.len(), grid.len());
        }
        let all = eights.into_iter().flatten();
        assert!(all.copied().flat_map(u64::to_le_bytes).all(|byte| byte > 0));
    }

    #[test]
    fn signs_are_even() {
        for (i, signs) in EVEN_SIGNS.iter().enumerate() {
            assert_eq!(usize::from(signs & 127), i);
            assert!(signs.count_ones().is_multiple_of(2));
        }
    }
}
