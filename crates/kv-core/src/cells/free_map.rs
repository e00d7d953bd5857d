//! Which cells are free, as a bitmap with a summary.
//!
//! Invariant: a bit of the summary is set where the word has a free cell; bits beyond the last
//! cell are never set. Numbers here count from 0 in one stream. Knows nothing of contents.

const BITS: u32 = u64::BITS;

/// The free cells of one stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FreeMap {
    n_cells: u32,
    n_free: u32,
    words: Vec<u64>,
    summary: Vec<u64>,
}

impl FreeMap {
    /// All of `n_cells` cells are free.
    pub fn all_free(n_cells: u32) -> Self {
        Self {
            n_cells,
            n_free: n_cells,
            words: ones(n_cells),
            summary: ones(n_cells.div_ceil(BITS)),
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

    /// Whether cell `i` is free.
    #[inline]
    pub fn is_free(&self, i: u32) -> bool {
        self.words
            .get((i / BITS) as usize)
            .is_some_and(|w| w >> (i % BITS) & 1 != 0)
    }

    /// Takes cell `i`; no effect where it is not free.
    pub fn take(&mut self, i: u32) {
        if self.is_free(i) {
            let (word, bit) = (i / BITS, i % BITS);
            let left = &mut self.words[word as usize];
            *left &= !(1 << bit);
            if *left == 0 {
                self.summary[(word / BITS) as usize] &= !(1 << (word % BITS));
            }
            self.n_free -= 1;
        }
    }

    /// Makes cell `i` free; no effect where it is free or does not exist.
    pub fn release(&mut self, i: u32) {
        if i < self.n_cells && !self.is_free(i) {
            let (word, bit) = (i / BITS, i % BITS);
            self.words[word as usize] |= 1 << bit;
            self.summary[(word / BITS) as usize] |= 1 << (word % BITS);
            self.n_free += 1;
        }
    }

    /// The first free cell at `from` or behind it.
    pub fn next_free(&self, from: u32) -> Option<u32> {
        let word = from / BITS;
        let here = self.words.get(word as usize)? & (u64::MAX << (from % BITS));
        if here != 0 {
            return Some(word * BITS + here.trailing_zeros());
        }
        let word = self.next_word(word + 1)?;
        Some(word * BITS + self.words[word as usize].trailing_zeros())
    }

    /// The first word at `from` or behind it that has a free cell.
    fn next_word(&self, from: u32) -> Option<u32> {
        let start = from / BITS;
        let mut mask = u64::MAX << (from % BITS);
        for (at, &bits) in (start..).zip(self.summary.get(start as usize..)?) {
            if bits & mask != 0 {
                return Some(at * BITS + (bits & mask).trailing_zeros());
            }
            mask = u64::MAX;
        }
        None
    }
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
            }
        }
    }
}
