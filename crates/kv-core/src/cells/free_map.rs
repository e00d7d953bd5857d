//! Which cells are free, as a bitmap with two summaries.
//!
//! Invariant: a bit of `any_free` is set where the word has a free cell, one of `all_free` where
//! all 64 cells of the word are free; bits beyond the last cell are never set. Numbers here count
//! from 0 in one stream. Knows nothing of what cells hold.

const BITS: u32 = u64::BITS;

/// The free cells of one stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FreeMap {
    n_cells: u32,
    n_free: u32,
    words: Vec<u64>,
    /// By word: whether one of its cells is free.
    any_free: Vec<u64>,
    /// By word: whether it is 64 free cells.
    all_free: Vec<u64>,
}

impl FreeMap {
    /// All of `n_cells` cells are free.
    pub fn all_free(n_cells: u32) -> Self {
        let n_words = n_cells.div_ceil(BITS);
        let mut all_free = ones(n_cells / BITS);
        all_free.resize(n_words.div_ceil(BITS) as usize, 0);
        Self {
            n_cells,
            n_free: n_cells,
            words: ones(n_cells),
            any_free: ones(n_words),
            all_free,
        }
    }

    /// Number of cells.
    pub fn n_cells(&self) -> u32 {
        self.n_cells
    }

    /// Number of free cells.
    pub fn n_free(&self) -> u32 {
        self.n_free
    }

    /// True if cell `i` is free.
    #[inline]
    pub fn is_free(&self, i: u32) -> bool {
        self.words
            .get((i / BITS) as usize)
            .is_some_and(|w| w >> (i % BITS) & 1 != 0)
    }

    /// Marks cell `i` as used; no effect where it is not free.
    pub fn take(&mut self, i: u32) {
        if !self.is_free(i) {
            return;
        }
        let (word, bit) = (i / BITS, i % BITS);
        let left = &mut self.words[word as usize];
        *left &= !(1 << bit);
        let (at, summary_bit) = ((word / BITS) as usize, 1 << (word % BITS));
        self.all_free[at] &= !summary_bit;
        if *left == 0 {
            self.any_free[at] &= !summary_bit;
        }
        self.n_free -= 1;
    }

    /// Marks cell `i` as free; no effect where it is free or does not exist.
    pub fn release(&mut self, i: u32) {
        if i >= self.n_cells || self.is_free(i) {
            return;
        }
        let (word, bit) = (i / BITS, i % BITS);
        let left = &mut self.words[word as usize];
        *left |= 1 << bit;
        let (at, summary_bit) = ((word / BITS) as usize, 1 << (word % BITS));
        self.any_free[at] |= summary_bit;
        if *left == u64::MAX {
            self.all_free[at] |= summary_bit;
        }
        self.n_free += 1;
    }

    /// The first free cell at `from` or after it.
    pub fn next_free(&self, from: u32) -> Option<u32> {
        let word = from / BITS;
        let here = self.words.get(word as usize)? & (u64::MAX << (from % BITS));
        if here != 0 {
            return Some(word * BITS + here.trailing_zeros());
        }
        let word = next_one(&self.any_free, word + 1)?;
        Some(word * BITS + self.words[word as usize].trailing_zeros())
    }

    /// The first block of `len` free cells at `from` or after it. Blocks are aligned to their
    /// length, a power of two up to 64.
    pub fn next_free_block(&self, from: u32, len: u32) -> Option<u32> {
        let from = from.checked_next_multiple_of(len)?;
        if len == BITS {
            return Some(next_one(&self.all_free, from / BITS)? * BITS);
        }
        let mut mask = u64::MAX << (from % BITS);
        let mut word = from / BITS;
        loop {
            let free = self.words.get(word as usize)? & mask;
            let starts = block_starts(free, len);
            if starts != 0 {
                return Some(word * BITS + starts.trailing_zeros());
            }
            mask = u64::MAX;
            word = next_one(&self.any_free, word + 1)?;
        }
    }

    /// Bytes on the heap.
    pub(super) fn heap_bytes(&self) -> usize {
        let words = [&self.words, &self.any_free, &self.all_free];
        words.map(|w| w.capacity() * size_of::<u64>()).iter().sum()
    }
}

/// The bits at multiples of `len` from which on `len` bits are set; `len` is a power of two below
/// 64.
fn block_starts(bits: u64, len: u32) -> u64 {
    let (mut starts, mut checked) = (bits, 1);
    while checked < len {
        starts &= starts >> checked;
        checked *= 2;
    }
    // `u64::MAX / (2^len - 1)` has a bit at every multiple of `len`.
    starts & (u64::MAX / ((1 << len) - 1))
}

/// The first bit set at `from` or after it.
fn next_one(bits: &[u64], from: u32) -> Option<u32> {
    let start = from / BITS;
    let mut mask = u64::MAX << (from % BITS);
    for (at, &bits) in (start..).zip(bits.get(start as usize..)?) {
        if bits & mask != 0 {
            return Some(at * BITS + (bits & mask).trailing_zeros());
        }
        mask = u64::MAX;
    }
    None
}

/// `n` one bits in words, the rest of the last word zero.
fn ones(n: u32) -> Vec<u64> {
    let mut words = vec![u64::MAX; n.div_ceil(BITS) as usize];
    if let Some(last) = words.last_mut() {
        *last >>= (BITS - n % BITS) % BITS;
    }
    words
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_cell_that_does_not_exist_cannot_be_released() {
        let mut map = FreeMap::all_free(10);
        map.release(10);
        assert_eq!((map.n_free(), map.next_free(10)), (10, None));
    }

    proptest! {
        #[test]
        fn agrees_with_a_list_of_flags(
            n in 1u32..9000,
            edits in prop::collection::vec((any::<bool>(), any::<u32>()), 0..200),
            full_until in any::<u32>(),
        ) {
            let mut map = FreeMap::all_free(n);
            let mut flags = vec![true; n as usize];
            for i in 0..full_until % (n + 1) {
                map.take(i);
                flags[i as usize] = false;
            }
            for (release, i) in edits {
                let i = i % n;
                if release { map.release(i) } else { map.take(i) }
                flags[i as usize] = release;
            }
            prop_assert_eq!(map.n_free() as usize, flags.iter().filter(|f| **f).count());
            for from in (0..n + 3).step_by(1 + n as usize / 50) {
                let expected = (from..n).find(|&i| flags[i as usize]);
                prop_assert_eq!(map.next_free(from), expected, "from {}", from);
                for len in [1u32, 2, 8, 32, 64] {
                    let is_block = |i: &u32| {
                        let cells = flags.get(*i as usize..(*i + len) as usize);
                        cells.is_some_and(|cells| cells.iter().all(|&free| free))
                    };
                    let first = from.next_multiple_of(len);
                    let expected = (first..n).step_by(len as usize).find(is_block);
                    let found = map.next_free_block(from, len);
                    prop_assert_eq!(found, expected, "{} from {}", len, from);
                }
            }
        }
    }
}
