//! The search for the scales and entries of a block of a format with a grid.
//!
//! First each group tries scales, from one that clips its largest value to one that leaves the
//! outer levels unused, and keeps the weighted sums of what each gives. From these sums follows
//! about how well each `d` of the block does with the scales that can be stored; the best is
//! taken. Then each group takes the best of the neighbouring scales with exactly the entries that
//! fit it, and `d` becomes that of least squares. Knows no bytes of blocks.
//!
//! Values are computed with after a power of two made the largest one near 1, so that no sum is
//! beyond all floats. Invariant: all that is found is finite.

use std::array::from_fn;

use super::fit::Group;
use super::grid_search::GridSearch;
use super::k_formats::groups;
use super::{extreme, inverse, representable, stored};

/// Scales that a group tries, for values as they usually are.
const N_TRIALS: usize = 8;
/// Candidates for the scale of a block.
const N_BLOCK_SCALES: u8 = 24;

/// The grid of a format.
pub(super) enum Grid {
    /// Of entries of eight values.
    Eights(GridSearch<8, 3, 9>),
    /// Of entries of four values.
    Fours(GridSearch<4, 8, 8>),
}

/// The bits that a format stores of eight values, in addition to entries.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum SideBits {
    /// Their signs.
    Signs,
    /// The signs of seven: the number of negative ones is even.
    EvenSigns,
    /// The sign of the 1 that is added to the values of entries.
    Shift,
    /// The same for all of a group.
    ShiftOfGroup,
}

/// A format: what its blocks can hold.
pub(super) struct GridFormat {
    pub(super) grid: Grid,
    pub(super) side_bits: SideBits,
    /// The largest number that is stored for a scale.
    pub(super) last_scale: u8,
    /// Values that share a scale: 16 or 32.
    pub(super) group_len: usize,
    /// The factor of an entry of the grid, in addition to the scales.
    pub(super) unit: f32,
    /// The least and the largest number, times the largest level, that is tried for the largest
    /// value of a group.
    pub(super) reach: [f32; 2],
}

/// Eight values: one entry or two, and their side bits.
#[derive(Clone, Copy, Default)]
pub(super) struct Eight {
    pub(super) entries: [u16; 2],
    /// A bit for each value that is negative; or 1 where 1 is subtracted from all.
    pub(super) side_bits: u8,
}

/// The best encoding that is found of a block: value `v` is
/// `d · unit · (2·scales[v / group_len] + 1) · entry`, with the sign of `side_bits`, or shifted.
pub(super) struct GridBlock {
    pub(super) d: f32,
    pub(super) scales: [u8; 16],
    pub(super) eights: [Eight; 32],
}

/// The weighted sums of some entries: with their values `t`, `Σ t·x` and `Σ t²`.
#[derive(Clone, Copy, Default)]
struct Sums {
    products: f32,
    squares: f32,
}

impl Sums {
    fn of(values: &[f32; 8], weights: &[f32; 8], levels: &[f32; 8]) -> Self {
        let mut sums = Self::default();
        for ((x, w), level) in values.iter().zip(weights).zip(levels) {
            sums.products += w * x * level;
            sums.squares += w * level * level;
        }
        sums
    }

    fn and(self, other: Self) -> Self {
        Self {
            products: self.products + other.products,
            squares: self.squares + other.squares,
        }
    }

    /// The squared error with this scale, less that of all zeros.
    fn error(self, scale: f32) -> f32 {
        scale * (scale * self.squares - 2.0 * self.products)
    }

    /// The scale of least squares; 0 where that is negative, or there is none.
    fn scale(self) -> f32 {
        let scale = self.products / self.squares;
        if scale > 0.0 && scale.is_finite() {
            scale
        } else {
            0.0
        }
    }

    /// Of entries that are multiplied by this.
    fn times(self, factor: f32) -> Self {
        Self {
            products: self.products * factor,
            squares: self.squares * factor * factor,
        }
    }
}

/// The sums by each scale that a group tried; then by that for values of one magnitude, and at last
/// by that of least squares.
type Trials = [Sums; N_TRIALS + 2];

/// The number of a scale, the entries that it gives, and their sums.
#[derive(Clone, Copy, Default)]
struct Choice {
    scale: u8,
    eights: [Eight; 4],
    sums: Sums,
}

impl GridFormat {
    /// Entries and scales for a block, with the importance of each value.
    pub(super) fn fit(&self, values: &[f32; 256], importance: &[f32; 256]) -> GridBlock {
        let power = power_below(extreme(values));
        let values = values.map(|x| if x.is_nan() { 0.0 } else { x * inverse(power) });
        let most = power_below(extreme(importance));
        let importance = importance.map(|importance| importance * inverse(most));
        let eights: [Group<'_, 8>; 32] = groups(&values, &importance);
        let per_group = self.group_len / 8;
        let mut trials = [Trials::default(); 16];
        for (group, trials) in eights.chunks(per_group).zip(&mut trials) {
            *trials = self.trials(group);
        }
        let trials = &trials[..256 / self.group_len];
        let of_storage = self.unit * inverse(power);
        let stored = |scale: f32| stored(scale * inverse(of_storage)) * of_storage;
        let scale = stored(self.block_scale(trials));
        let mut choices = [Choice::default(); 16];
        for ((group, trials), choice) in eights.chunks(per_group).zip(trials).zip(&mut choices) {
            *choice = self.choice(group, trials, scale);
        }
        let of_choice = |choice: &Choice| choice.sums.times(odd(choice.scale));
        let sums = choices
            .iter()
            .map(of_choice)
            .fold(Sums::default(), Sums::and);
        GridBlock {
            d: representable(sums.scale() * inverse(of_storage)),
            scales: choices.map(|choice| choice.scale),
            eights: from_fn(|i| choices[i / per_group].eights[i % per_group]),
        }
    }

    /// The least positive level, and the largest.
    fn levels(&self) -> (f32, f32) {
        match &self.grid {
            Grid::Eights(grid) => grid.bounds(),
            Grid::Fours(grid) => grid.bounds(),
        }
    }

    /// The sums that scales give, without choosing one.
    fn trials(&self, group: &[Group<'_, 8>]) -> Trials {
        let mut trials = Trials::default();
        let largest = group
            .iter()
            .map(|eight| extreme(eight.values).abs())
            .fold(0.0, f32::max);
        if largest == 0.0 {
            return trials;
        }
        let [first, last] = self.reach;
        let step = (last / first).powf(1.0 / (N_TRIALS - 1) as f32);
        let mut eights = [Eight::default(); 4];
        let mut scale = largest / (self.levels().1 * last);
        for trial in &mut trials[..N_TRIALS] {
            *trial = self.entries(group, scale, &mut eights);
            scale *= step;
        }
        let scale = largest / self.levels().0;
        trials[N_TRIALS] = self.entries(group, scale, &mut eights);
        let scale = best_scale(&trials[..=N_TRIALS]);
        trials[N_TRIALS + 1] = self.entries(group, scale, &mut eights);
        trials
    }

    /// The entries that are nearest to the values of a group, from these on, and their sums.
    fn entries(&self, group: &[Group<'_, 8>], scale: f32, eights: &mut [Eight]) -> Sums {
        match self.side_bits {
            SideBits::Signs | SideBits::EvenSigns => {
                let each = group.iter().zip(eights);
                let sums = each.map(|(values, eight)| self.signed(values, scale, eight));
                sums.fold(Sums::default(), Sums::and)
            }
            SideBits::Shift => {
                let each = group.chunks(1).zip(eights.chunks_mut(1));
                let sums = each.map(|(values, eight)| self.up_or_down(values, scale, eight));
                sums.fold(Sums::default(), Sums::and)
            }
            SideBits::ShiftOfGroup => self.up_or_down(group, scale, eights),
        }
    }

    /// The same with the better shift of all.
    fn up_or_down(&self, group: &[Group<'_, 8>], scale: f32, eights: &mut [Eight]) -> Sums {
        let mut others = [Eight::default(); 4];
        others[..group.len()].copy_from_slice(&eights[..group.len()]);
        let [up, down] = [(0, &mut *eights), (1, &mut others[..])].map(|(side_bits, eights)| {
            let each = group.iter().zip(eights);
            let sums = each.map(|(values, eight)| self.shifted(values, scale, side_bits, eight));
            sums.fold(Sums::default(), Sums::and)
        });
        if down.error(scale) < up.error(scale) {
            eights[..group.len()].copy_from_slice(&others[..group.len()]);
            down
        } else {
            up
        }
    }

    /// The best of the scales near what the trials say, with the block's scale.
    fn choice(&self, group: &[Group<'_, 8>], trials: &Trials, scale: f32) -> Choice {
        let (near, _) = self.nearest_scale(trials, scale);
        let mut eights = [Eight::default(); 4];
        let mut best: Option<(f32, Choice)> = None;
        for number in near.saturating_sub(1)..=(near + 1).min(self.last_scale) {
            let sums = self.entries(group, scale * odd(number), &mut eights);
            let error = sums.error(scale * odd(number));
            if best.is_none_or(|(least, _)| error < least) {
                let choice = Choice {
                    scale: number,
                    eights,
                    sums,
                };
                best = Some((error, choice));
            }
        }
        best.map(|(_, choice)| choice).unwrap_or_default()
    }

    /// The entries that are nearest to eight values by magnitudes and signs, from these on, and
    /// their sums.
    fn signed(&self, values: &Group<'_, 8>, scale: f32, eight: &mut Eight) -> Sums {
        let mut magnitudes = values.values.map(f32::abs);
        let bits = values.values.map(|x| u8::from(x < 0.0));
        eight.side_bits = bits.iter().rev().fold(0, |signs, bit| signs << 1 | bit);
        if self.side_bits == SideBits::EvenSigns && eight.side_bits.count_ones() % 2 == 1 {
            let flipped = self.cheapest_flip(&magnitudes, &values.weights, scale);
            eight.side_bits ^= 1 << flipped;
            magnitudes[flipped] = -magnitudes[flipped];
        }
        let levels = self.nearest(&magnitudes, &values.weights, scale, &mut eight.entries);
        Sums::of(&magnitudes, &values.weights, &levels)
    }

    /// The same by shifted values: up, or down where `side_bits` is 1.
    fn shifted(&self, values: &Group<'_, 8>, scale: f32, side_bits: u8, eight: &mut Eight) -> Sums {
        let shift = 1.0 - 2.0 * f32::from(side_bits);
        let moved = values.values.map(|x| x - scale * shift);
        eight.side_bits = side_bits;
        let levels = self.nearest(&moved, &values.weights, scale, &mut eight.entries);
        Sums::of(
            values.values,
            &values.weights,
            &levels.map(|level| level + shift),
        )
    }

    /// Changes entries to those nearest to these values, and returns what is in them.
    fn nearest(
        &self,
        values: &[f32; 8],
        weights: &[f32; 8],
        scale: f32,
        entries: &mut [u16; 2],
    ) -> [f32; 8] {
        match &self.grid {
            Grid::Eights(grid) => {
                entries[0] = grid.nearest(values, weights, scale, entries[0]);
                *grid.entry(entries[0])
            }
            Grid::Fours(grid) => {
                let (values, weights) = (values.as_chunks().0, weights.as_chunks().0);
                for (i, entry) in entries.iter_mut().enumerate() {
                    *entry = grid.nearest(&values[i], &weights[i], scale, *entry);
                }
                let levels = entries.map(|entry| *grid.entry(entry));
                from_fn(|i| levels[i / 4][i % 4])
            }
        }
    }

    /// The value whose wrong sign costs least: it gets the lowest level instead of its nearest one.
    fn cheapest_flip(&self, magnitudes: &[f32; 8], weights: &[f32; 8], scale: f32) -> usize {
        let (lowest, largest) = self.levels();
        let (lowest, largest) = (lowest * scale, largest * scale);
        let cost = |i: usize| {
            let beyond = magnitudes[i] - magnitudes[i].clamp(lowest, largest);
            let flipped = magnitudes[i] + lowest;
            weights[i] * (flipped * flipped - beyond * beyond)
        };
        let costs: [f32; 8] = from_fn(cost);
        (1..8).fold(0, |best, i| if costs[i] < costs[best] { i } else { best })
    }

    /// The number of the scale that is best, by what was tried, with the block's scale; and its
    /// error.
    fn nearest_scale(&self, trials: &Trials, scale: f32) -> (u8, f32) {
        let number = ((best_scale(trials) * inverse(scale) - 1.0) / 2.0) as u8;
        let near = number.min(self.last_scale)..=(number.saturating_add(1)).min(self.last_scale);
        let error = |number: u8| {
            let of_trial = |trial: &Sums| trial.error(scale * odd(number));
            trials.iter().map(of_trial).fold(f32::INFINITY, f32::min)
        };
        let errors = near.map(|number| (number, error(number)));
        let best = errors.reduce(|best, next| if next.1 < best.1 { next } else { best });
        best.unwrap_or_default()
    }

    /// The scale of a block that does best with what its groups tried.
    fn block_scale(&self, trials: &[Trials]) -> f32 {
        let largest = trials
            .iter()
            .map(|trials| best_scale(trials))
            .fold(0.0, f32::max);
        let full = largest / odd(self.last_scale);
        let candidates = (0..N_BLOCK_SCALES).map(|i| full * (0.85 + f32::from(i) / 40.0));
        let errors = candidates.map(|scale| {
            let error: f32 = trials
                .iter()
                .map(|trials| self.nearest_scale(trials, scale).1)
                .sum();
            (error, scale)
        });
        let best = errors.reduce(|best, next| if next.0 < best.0 { next } else { best });
        best.map_or(0.0, |(_, scale)| scale)
    }
}

/// The scale of least squares of the best of these.
fn best_scale(trials: &[Sums]) -> f32 {
    let scales = trials
        .iter()
        .map(|trial| (trial.error(trial.scale()), trial.scale()));
    let best = scales.reduce(|best, next| if next.0 < best.0 { next } else { best });
    best.map_or(0.0, |(_, scale)| scale)
}

/// The factor of a scale with this number.
fn odd(number: u8) -> f32 {
    2.0 * f32::from(number) + 1.0
}

/// The power of two at or below a magnitude, unless that is extreme: its inverse is one, too, also
/// after it is multiplied by a unit.
fn power_below(value: f32) -> f32 {
    let exponent = (value.abs().to_bits() >> 23).clamp(10, 244);
    f32::from_bits(exponent << 23)
}

#[cfg(test)]
mod tests {
    use super::super::super::grid;
    use super::*;

    /// The encoding that is found is better than the scale that each group's largest value gives,
    /// and the sums that it was chosen by are those of the values that a reader computes.
    #[test]
    fn the_search_beats_the_scale_of_the_largest_value() {
        let entries = |entry: &u64| entry.to_le_bytes().map(|level| level as i8);
        for (side_bits, most) in [(SideBits::EvenSigns, 0.82), (SideBits::Signs, 0.82)] {
            let format = GridFormat {
                grid: Grid::Eights(GridSearch::new(grid::IQ2_XS.iter().map(entries))),
                side_bits,
                last_scale: 15,
                group_len: 16,
                unit: 0.125,
                reach: [0.65, 2.2],
            };
            let values: [f32; 256] = from_fn(|i| ((i * i) as f32).sin() + (i as f32 * 0.7).cos());
            let eights: [Group<'_, 8>; 32] = groups(&values, &[1.0; 256]);
            let mut naive = 0.0;
            for group in eights.chunks(2) {
                let largest = group.iter().flat_map(|eight| eight.values);
                let largest = largest.fold(0.0, |most: f32, x| most.max(x.abs()));
                let scale = largest / format.levels().1;
                let error = format
                    .entries(group, scale, &mut [Eight::default(); 4])
                    .error(scale);
                naive += error + group.iter().map(|eight| eight.error(|_| 0.0)).sum::<f32>();
            }
            let found = format.fit(&values, &[1.0; 256]);
            let mut error = 0.0;
            for (i, (eight, values)) in found.eights.iter().zip(&eights).enumerate() {
                let Grid::Eights(grid) = &format.grid else {
                    return;
                };
                let scale = found.d * format.unit * odd(found.scales[i / 2]);
                let levels = grid.entry(eight.entries[0]);
                for (v, (x, w)) in values.values.iter().zip(&values.weights).enumerate() {
                    let is_negative = eight.side_bits >> v & 1 == 1;
                    let read = scale * if is_negative { -levels[v] } else { levels[v] };
                    error += w * (x - read) * (x - read);
                }
                let n_negative = eight.side_bits.count_ones();
                assert!(side_bits == SideBits::Signs || n_negative.is_multiple_of(2));
            }
            assert!(error < most * naive, "{error} of {naive}");
        }
    }
}
