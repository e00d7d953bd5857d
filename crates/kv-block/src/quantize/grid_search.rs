//! The entry of a grid that is nearest to some values: of least weighted squared error, exactly.
//!
//! An entry is a path of four digits through a tree. The error of a path is the sum of its
//! digits', so a branch is passed over where its error so far, with the least that any further
//! digits can add, is not below that of the best entry found. The caller names an entry to start
//! with; a good one, as that of a scale next to this one, leaves few branches.
//! Knows no block, and no scale.

use std::array::from_fn;

/// The digits of an entry: two levels of three each, or one of eight.
const N_DIGITS: usize = 4;

/// A grid of entries of `DIM` values, made for searches.
///
/// `LEVELS` is how many different values entries have, `DIGITS` how many there are of the values
/// that belong to one digit: `DIGITS = LEVELS ^ (DIM / 4)`.
pub(super) struct GridSearch<const DIM: usize, const LEVELS: usize, const DIGITS: usize> {
    /// Ascending.
    levels: [f32; LEVELS],
    /// The entries, by their index.
    entries: Vec<Entry<DIM>>,
    /// By their first digit.
    seconds: [Vec<Second>; DIGITS],
}

/// An entry, as values and as digits.
struct Entry<const DIM: usize> {
    values: [f32; DIM],
    digits: [u8; N_DIGITS],
}

/// A second digit after a first one.
struct Second {
    digit: u8,
    ends: Vec<End>,
}

/// The third digit and the fourth, which end at an entry.
struct End {
    digits: [u8; 2],
    index: u16,
}

impl<const DIM: usize, const LEVELS: usize, const DIGITS: usize> GridSearch<DIM, LEVELS, DIGITS> {
    /// Of the entries of a grid, which has at most 65,536.
    pub(super) fn new(grid: impl Iterator<Item = [i8; DIM]>) -> Self {
        let grid: Vec<[i8; DIM]> = grid.collect();
        let mut all: Vec<i8> = grid.iter().flatten().copied().collect();
        all.sort_unstable();
        all.dedup();
        debug_assert!(all.len() == LEVELS && DIGITS == LEVELS.pow((DIM / N_DIGITS) as u32));
        let level = |value: i8| all.iter().position(|&level| level == value).unwrap_or(0);
        let digits = |entry: &[i8; DIM]| -> [u8; N_DIGITS] {
            from_fn(|digit| {
                let values = entry.iter().skip(digit * (DIM / N_DIGITS));
                let values = values.take(DIM / N_DIGITS);
                values.fold(0, |digit, &value| digit * LEVELS + level(value)) as u8
            })
        };
        let entry = |entry: &[i8; DIM]| Entry {
            values: entry.map(f32::from),
            digits: digits(entry),
        };
        let entries: Vec<Entry<DIM>> = grid.iter().map(entry).collect();
        let mut seconds: [Vec<Second>; DIGITS] = from_fn(|_| Vec::new());
        for (entry, index) in entries.iter().zip(0..=u16::MAX) {
            let [first, digit, digits @ ..] = entry.digits;
            let seconds = &mut seconds[usize::from(first)];
            let end = End { digits, index };
            match seconds.iter_mut().find(|second| second.digit == digit) {
                Some(second) => second.ends.push(end),
                None => seconds.push(Second {
                    digit,
                    ends: vec![end],
                }),
            }
        }
        Self {
            levels: from_fn(|i| f32::from(all[i])),
            entries,
            seconds,
        }
    }

    /// The least positive value of entries, and the largest.
    pub(super) fn bounds(&self) -> (f32, f32) {
        let largest = self.levels[LEVELS - 1];
        let positive = self.levels.iter().find(|level| **level > 0.0);
        (positive.copied().unwrap_or(largest), largest)
    }

    /// The values of an entry.
    pub(super) fn entry(&self, index: u16) -> &[f32; DIM] {
        &self.entries[usize::from(index)].values
    }

    /// The index of the entry which, times `scale`, is nearest to these values; `start` is that of
    /// one that may be near.
    pub(super) fn nearest(
        &self,
        values: &[f32; DIM],
        weights: &[f32; DIM],
        scale: f32,
        start: u16,
    ) -> u16 {
        let errors = self.errors(values, weights, scale);
        let least = errors.map(|of_digit| of_digit.into_iter().fold(f32::INFINITY, f32::min));
        let of = |digit: usize, value: u8| errors[digit][usize::from(value)];
        let after_second = least[2] + least[3];
        let after_first = least[1] + after_second;
        let digits = self.entries[usize::from(start)].digits;
        let start_error: f32 = (0..N_DIGITS).map(|digit| of(digit, digits[digit])).sum();
        let (mut best, mut found) = (start_error, start);
        for (first, seconds) in errors[0].iter().zip(&self.seconds) {
            if first + after_first >= best {
                continue;
            }
            for second in seconds {
                let error = first + of(1, second.digit);
                if error + after_second >= best {
                    continue;
                }
                for end in &second.ends {
                    let error = error + of(2, end.digits[0]) + of(3, end.digits[1]);
                    if error < best {
                        (best, found) = (error, end.index);
                    }
                }
            }
        }
        found
    }

    /// The error of each digit, of each of its values.
    fn errors(
        &self,
        values: &[f32; DIM],
        weights: &[f32; DIM],
        scale: f32,
    ) -> [[f32; DIGITS]; N_DIGITS] {
        let of_value = |v: usize| {
            self.levels.map(|level| {
                let off = values[v] - scale * level;
                weights[v] * off * off
            })
        };
        let of_values: [[f32; LEVELS]; DIM] = from_fn(of_value);
        from_fn(|digit| {
            from_fn(|of_digit| match DIM / N_DIGITS {
                1 => of_values[digit][of_digit],
                _ => {
                    let [i, j] = [of_digit / LEVELS, of_digit % LEVELS];
                    of_values[2 * digit][i] + of_values[2 * digit + 1][j]
                }
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::grid;
    use super::*;

    /// The search finds what comparing with each entry finds, for values near the grid and far off.
    #[test]
    fn the_nearest_entry_is_the_nearest_of_all() {
        let eights = GridSearch::<8, 3, 9>::new(
            grid::IQ2_S.iter().map(|e| e.to_le_bytes().map(|b| b as i8)),
        );
        let fours = GridSearch::<4, 8, 8>::new(
            grid::IQ3_S_ENTRIES
                .iter()
                .map(|e| e.to_le_bytes().map(|b| b as i8)),
        );
        let mut state = 1u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32
        };
        for round in 0..300 {
            let scale = 0.3 + next();
            let values: [f32; 8] = from_fn(|_| (70.0 * next() - 10.0) * scale);
            let weights: [f32; 8] = from_fn(|_| next() * if round % 3 == 0 { 0.01 } else { 9.0 });
            check(&eights, &values, &weights, scale);
            let (values, weights) = (values.as_chunks().0, weights.as_chunks().0);
            check(&fours, &values[0].map(|x: f32| x / 3.0), &weights[0], scale);
        }
    }

    fn check<const DIM: usize, const LEVELS: usize, const DIGITS: usize>(
        search: &GridSearch<DIM, LEVELS, DIGITS>,
        values: &[f32; DIM],
        weights: &[f32; DIM],
        scale: f32,
    ) {
        let error = |entry: &[f32; DIM]| -> f32 {
            let each = values.iter().zip(weights).zip(entry);
            each.map(|((x, w), q)| w * (x - scale * q) * (x - scale * q))
                .sum()
        };
        let found = error(search.entry(search.nearest(values, weights, scale, 0)));
        let least = search
            .entries
            .iter()
            .map(|e| error(&e.values))
            .fold(f32::INFINITY, f32::min);
        assert!(found <= least * 1.0001, "{found} above {least}");
    }
}
