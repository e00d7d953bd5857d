//! [`Codes`]: a matrix of whole numbers of a few bits, several of which share a word.

use std::ops::Range;

use kv_graph::weights::SharedBytes;

/// Columns whose codes are unpacked together where rows share words.
const COLUMNS_AT_ONCE: usize = 32;

/// The rows or the columns of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Axis {
    Rows,
    Columns,
}

/// The order of the codes in a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WordOrder {
    /// The first in the lowest bits; a code may continue in the next word.
    Ascending,
    /// Eight codes: those with even places first, then those with odd ones.
    EvenFirst,
    /// Four codes that are as far apart as there are words: all first ones come first.
    Apart(usize),
}

impl WordOrder {
    /// The place at which a code is stored.
    fn place(self, place: usize) -> usize {
        match self {
            Self::Ascending => place,
            Self::EvenFirst => place / 8 * 8 + place % 2 * 4 + place % 8 / 2,
            Self::Apart(n_words) => place % n_words.max(1) * 4 + place / n_words.max(1),
        }
    }
}

/// A matrix of whole numbers. Invariant: [`Self::new`] checked that there are bytes for all of
/// them.
#[derive(Clone, Debug)]
pub(super) struct Codes {
    bytes: SharedBytes,
    bits: usize,
    /// Bytes of a word: 1 or 4.
    word_bytes: usize,
    /// What the codes of one word differ by.
    along: Axis,
    order: WordOrder,
    /// Words from one row, or word of rows, to the next; the same for columns.
    row_step: usize,
    column_step: usize,
    /// Bits that are stored the other way round: the sign of numbers that have one.
    flipped: u32,
}

/// The place of codes: a stored matrix of words, outermost dimension first.
#[derive(Clone, Copy, Debug)]
pub(super) struct WordGrid {
    pub(super) shape: [usize; 2],
    pub(super) word_bytes: usize,
    /// The dimension of the stored matrix that counts rows: 0 or 1.
    pub(super) row_dimension: usize,
    pub(super) along: Axis,
}

impl Codes {
    /// Codes of so many bits in words of this shape; `None` where there are fewer bytes.
    pub(super) fn new(bytes: SharedBytes, bits: usize, grid: WordGrid) -> Option<Self> {
        let [outer, inner] = grid.shape;
        let n_bytes = outer.checked_mul(inner)?.checked_mul(grid.word_bytes)?;
        let (row_step, column_step) = if grid.row_dimension == 0 {
            (inner, 1)
        } else {
            (1, inner)
        };
        (bytes.len() == n_bytes).then_some(Self {
            bytes,
            bits,
            word_bytes: grid.word_bytes,
            along: grid.along,
            order: WordOrder::Ascending,
            row_step,
            column_step,
            flipped: 0,
        })
    }

    /// The same with another order in words.
    pub(super) fn in_order(self, order: WordOrder) -> Self {
        Self { order, ..self }
    }

    /// Signed numbers of 8 bits, which are read as what they are above the least.
    pub(super) fn signed_bytes(self) -> Self {
        let flipped = 0x80;
        Self { flipped, ..self }
    }

    pub(super) fn bits(&self) -> usize {
        self.bits
    }

    pub(super) fn bytes(&self) -> &SharedBytes {
        &self.bytes
    }

    /// The code of a row and column, below `2^bits`.
    pub(super) fn get(&self, row: usize, column: usize) -> u32 {
        let (place, start, step) = match self.along {
            Axis::Rows => (row, column * self.column_step, self.row_step),
            Axis::Columns => (column, row * self.row_step, self.column_step),
        };
        let place = self.order.place(place);
        let (bit, word_bits) = (place * self.bits, self.word_bytes * 8);
        let (at, shift) = (bit / word_bits, bit % word_bits);
        let mut code = self.word(start + at * step) >> shift;
        if shift + self.bits > word_bits {
            code |= self.word(start + (at + 1) * step) << (word_bits - shift);
        }
        (code & ((1 << self.bits) - 1)) ^ self.flipped
    }

    /// The codes of some rows, one row after the other: those of a word together, where none
    /// continues in the next word.
    pub(super) fn unpack(&self, rows: Range<usize>, n_columns: usize, out: &mut [u8]) {
        let (bits, mask) = (self.bits, (1 << self.bits) - 1);
        let per_word = self.word_bytes * 8 / bits;
        let is_even = (self.word_bytes * 8).is_multiple_of(bits);
        match self.along {
            Axis::Columns if is_even => {
                for at in 0..n_columns.div_ceil(per_word) {
                    let lines = out.chunks_mut(n_columns);
                    for (row, line) in rows.clone().zip(lines) {
                        let mut word = self.word(row * self.row_step + at * self.column_step);
                        for code in line.iter_mut().skip(at * per_word).take(per_word) {
                            *code = ((word & mask) ^ self.flipped) as u8;
                            word >>= bits;
                        }
                    }
                }
            }
            Axis::Rows if matches!(self.order, WordOrder::Apart(_)) => {
                for (row, line) in rows.zip(out.chunks_mut(n_columns)) {
                    let place = self.order.place(row);
                    let (at, shift) = (place / per_word, place % per_word * bits);
                    for (column, code) in line.iter_mut().enumerate() {
                        let word = self.word(at * self.row_step + column * self.column_step);
                        *code = ((word >> shift & mask) ^ self.flipped) as u8;
                    }
                }
            }
            Axis::Rows if is_even && rows.start.is_multiple_of(per_word) => {
                let mut words = [0u32; COLUMNS_AT_ONCE];
                for columns in (0..n_columns).step_by(COLUMNS_AT_ONCE) {
                    for first in rows.clone().step_by(per_word) {
                        let start = first / per_word * self.row_step;
                        for (column, word) in (columns..n_columns).zip(&mut words) {
                            *word = self.word(start + column * self.column_step);
                        }
                        let lines = out.chunks_mut(n_columns).skip(first - rows.start);
                        for (place, line) in (0..per_word).zip(lines) {
                            let shift = self.order.place(place) * bits;
                            for (code, word) in line.iter_mut().skip(columns).zip(&words) {
                                *code = ((word >> shift & mask) ^ self.flipped) as u8;
                            }
                        }
                    }
                }
            }
            _ => {
                for (row, line) in rows.zip(out.chunks_mut(n_columns)) {
                    for (column, code) in line.iter_mut().enumerate() {
                        *code = self.get(row, column) as u8;
                    }
                }
            }
        }
    }

    fn word(&self, at: usize) -> u32 {
        if self.word_bytes == 1 {
            return self.bytes.get(at).copied().map_or(0, u32::from);
        }
        let bytes = self.bytes.get(4 * at..).and_then(<[u8]>::first_chunk);
        bytes.map_or(0, |bytes| u32::from_le_bytes(*bytes))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    fn grid(shape: [usize; 2], row_dimension: usize, along: Axis) -> WordGrid {
        WordGrid {
            shape,
            word_bytes: 4,
            row_dimension,
            along,
        }
    }

    fn words(words: &[u32]) -> SharedBytes {
        let bytes = words.iter().flat_map(|word| word.to_le_bytes());
        bytes.collect::<Vec<u8>>().into()
    }

    #[test]
    fn codes_of_three_bits_continue_in_the_next_word() {
        // 0, 1, 2 … 31 modulo 8, as one number of 96 bits.
        let all = (0..32u128).fold(0, |all, i| all | (i % 8) << (3 * i));
        let parts = [0, 32, 64].map(|shift| (all >> shift) as u32);
        let codes = Codes::new(words(&parts), 3, grid([3, 1], 1, Axis::Columns)).unwrap();
        for column in 0..32 {
            assert_eq!(codes.get(0, column), column as u32 % 8, "{column}");
        }
    }

    #[test]
    fn rows_and_columns_are_found_in_each_arrangement() {
        let all = words(&[0x7654_3210, 0xfedc_ba98]);
        let wide = Codes::new(all.clone(), 4, grid([1, 2], 0, Axis::Columns)).unwrap();
        assert_eq!([wide.get(0, 3), wide.get(0, 9)], [3, 9]);
        let tall = Codes::new(all.clone(), 4, grid([1, 2], 1, Axis::Columns)).unwrap();
        assert_eq!([tall.get(0, 3), tall.get(1, 3)], [3, 11]);
        let rows = Codes::new(all.clone(), 4, grid([2, 1], 1, Axis::Rows)).unwrap();
        assert_eq!([rows.get(3, 0), rows.get(3, 1)], [3, 11]);
        let even = rows.in_order(WordOrder::EvenFirst);
        let order: Vec<u32> = (0..8).map(|row| even.get(row, 0)).collect();
        assert_eq!(order, [0, 4, 1, 5, 2, 6, 3, 7]);
        assert!(Codes::new(all, 4, grid([1, 3], 0, Axis::Columns)).is_none());
    }

    #[test]
    fn rows_are_unpacked_as_their_codes_are_found() {
        let numbers = words(&std::array::from_fn::<u32, 96, _>(|i| {
            (i as u32).wrapping_mul(0x9E37_79B1)
        }));
        let eight = |along| (4, grid([8, 12], 1, along), 8 * 12, 8);
        for (order, (bits, grid, n_rows, n_columns)) in [
            (
                WordOrder::Ascending,
                (4, grid([12, 8], 0, Axis::Columns), 12, 61),
            ),
            (
                WordOrder::Ascending,
                (8, grid([12, 8], 0, Axis::Columns), 12, 32),
            ),
            (
                WordOrder::Ascending,
                (4, grid([8, 12], 1, Axis::Columns), 12, 64),
            ),
            (
                WordOrder::Ascending,
                (3, grid([6, 16], 1, Axis::Columns), 16, 64),
            ),
            (WordOrder::Ascending, eight(Axis::Rows)),
            (WordOrder::EvenFirst, eight(Axis::Rows)),
        ] {
            let codes = Codes::new(numbers.clone(), bits, grid)
                .unwrap()
                .in_order(order);
            let mut found = vec![0xff; 8 * n_columns];
            let first = n_rows - 8;
            codes.unpack(first..n_rows, n_columns, &mut found);
            for (at, code) in found.into_iter().enumerate() {
                let (row, column) = (first + at / n_columns, at % n_columns);
                assert_eq!(u32::from(code), codes.get(row, column), "{codes:?}: {at}");
            }
        }
    }

    #[test]
    fn rows_that_share_a_word_may_be_far_apart() {
        let bytes: Vec<u8> = (0..3 * 5).map(|i| (i * 37 + i / 4) as u8).collect();
        let grid = WordGrid {
            word_bytes: 1,
            ..grid([3, 5], 0, Axis::Rows)
        };
        let codes = Codes::new(bytes.clone().into(), 2, grid).unwrap();
        let codes = codes.in_order(WordOrder::Apart(3));
        let mut found = vec![0; 12 * 5];
        codes.unpack(0..12, 5, &mut found);
        for (at, code) in found.into_iter().enumerate() {
            let (row, column) = (at / 5, at % 5);
            let wanted = bytes[row % 3 * 5 + column] >> (2 * (row / 3)) & 3;
            assert_eq!(code, wanted, "{row}, {column}");
            assert_eq!(codes.get(row, column), u32::from(wanted));
        }
    }

    #[test]
    fn signed_bytes_are_read_above_the_least() {
        let bytes = SharedBytes::from(vec![0x80, 0xff, 0, 0x7f]);
        let grid = WordGrid {
            word_bytes: 1,
            ..grid([2, 2], 0, Axis::Columns)
        };
        let codes = Codes::new(bytes, 8, grid).unwrap().signed_bytes();
        let all = [(0, 0), (0, 1), (1, 0), (1, 1)].map(|(row, column)| codes.get(row, column));
        assert_eq!(all, [0, 127, 128, 255]);
    }
}
