//! Encoding into the formats with grids (layouts: [`iq_grid`](super::super::iq_grid)).

use std::sync::LazyLock;

use super::super::grid;
use super::grid_fit::{Eight, Grid, GridBlock, GridFormat, SideBits};
use super::grid_search::GridSearch;
use super::{half, joined};

static IQ2_XXS: LazyLock<GridFormat> =
    LazyLock::new(|| iq2(&grid::IQ2_XXS, SideBits::EvenSigns, 32));
static IQ2_XS: LazyLock<GridFormat> = LazyLock::new(|| iq2(&grid::IQ2_XS, SideBits::EvenSigns, 16));
static IQ2_S: LazyLock<GridFormat> = LazyLock::new(|| iq2(&grid::IQ2_S, SideBits::Signs, 16));
static IQ3_XXS: LazyLock<GridFormat> = LazyLock::new(|| GridFormat {
    side_bits: SideBits::EvenSigns,
    unit: 0.25,
    ..iq3(&grid::IQ3_XXS_ENTRIES)
});
static IQ3_S: LazyLock<GridFormat> = LazyLock::new(|| iq3(&grid::IQ3_S_ENTRIES));

static IQ1_S: LazyLock<GridFormat> = LazyLock::new(|| iq1(SideBits::ShiftOfGroup, 32));
static IQ1_M: LazyLock<GridFormat> = LazyLock::new(|| iq1(SideBits::Shift, 16));

fn iq1(side_bits: SideBits, group_len: usize) -> GridFormat {
    // The grid has 16 more than the values.
    let entries = grid::IQ1.iter();
    let entries = entries.map(|entry| entry.to_le_bytes().map(|level| level as i8 - 16));
    GridFormat {
        grid: Grid::Eights(GridSearch::new(entries)),
        side_bits,
        last_scale: 7,
        group_len,
        unit: 0.125,
        reach: [0.8, 3.0],
    }
}

fn iq2(grid: &[u64], side_bits: SideBits, group_len: usize) -> GridFormat {
    let entries = grid
        .iter()
        .map(|entry| entry.to_le_bytes().map(|level| level as i8));
    GridFormat {
        grid: Grid::Eights(GridSearch::new(entries)),
        side_bits,
        last_scale: 15,
        group_len,
        unit: 0.125,
        reach: [0.65, 2.2],
    }
}

fn iq3(grid: &[u32]) -> GridFormat {
    let entries = grid
        .iter()
        .map(|entry| entry.to_le_bytes().map(|level| level as i8));
    GridFormat {
        grid: Grid::Fours(GridSearch::new(entries)),
        side_bits: SideBits::Signs,
        last_scale: 15,
        group_len: 32,
        unit: 1.0,
        reach: [0.75, 1.6],
    }
}

/// `IQ2_XXS`: indices of eight bits, even signs, a scale for 32 values.
pub(super) fn encode_iq2_xxs(values: &[f32; 256], importance: &[f32; 256]) -> [u8; 66] {
    let block = IQ2_XXS.fit(values, importance);
    let mut bytes = [0; 66];
    bytes[..2].copy_from_slice(&half(block.d));
    for (g, bytes) in bytes[2..].as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let eights = &block.eights[4 * g..];
        let indices = [0, 1, 2, 3].map(|k| eights[k].entries[0] as u8);
        *bytes = joined(&[&indices, &signs_and_scale(&block, g)]);
    }
    bytes
}

/// `IQ2_XS`: indices of nine bits, even signs, a scale for 16 values.
pub(super) fn encode_iq2_xs(values: &[f32; 256], importance: &[f32; 256]) -> [u8; 74] {
    let block = IQ2_XS.fit(values, importance);
    let mut indices = [0; 64];
    for (eight, bytes) in block.eights.iter().zip(indices.as_chunks_mut().0) {
        let both = eight.entries[0] | u16::from(eight.side_bits & 127) << 9;
        *bytes = both.to_le_bytes();
    }
    joined(&[&half(block.d), &indices, &scales::<8>(&block)])
}

/// `IQ2_S`: indices of ten bits, all signs, a scale for 16 values.
pub(super) fn encode_iq2_s(values: &[f32; 256], importance: &[f32; 256]) -> [u8; 82] {
    let block = IQ2_S.fit(values, importance);
    let mut high = [0; 8];
    for (i, eight) in block.eights.iter().enumerate() {
        high[i / 4] |= ((eight.entries[0] >> 8) as u8) << (2 * (i % 4));
    }
    joined(&[
        &half(block.d),
        &lower_bits(&block),
        &signs(&block),
        &high,
        &scales::<8>(&block),
    ])
}

/// `IQ3_XXS`: indices of eight bits, even signs, a scale for 32 values.
pub(super) fn encode_iq3_xxs(values: &[f32; 256], importance: &[f32; 256]) -> [u8; 98] {
    let block = IQ3_XXS.fit(values, importance);
    let mut indices = [0; 64];
    for (eight, indices) in block.eights.iter().zip(indices.as_chunks_mut().0) {
        *indices = eight.entries.map(|index| index as u8);
    }
    let mut words = [0; 32];
    for (g, word) in words.as_chunks_mut().0.iter_mut().enumerate() {
        *word = signs_and_scale(&block, g);
    }
    joined(&[&half(block.d), &indices, &words])
}

/// `IQ3_S`: indices of nine bits, all signs, a scale for 32 values.
pub(super) fn encode_iq3_s(values: &[f32; 256], importance: &[f32; 256]) -> [u8; 110] {
    let block = IQ3_S.fit(values, importance);
    let (mut low, mut high) = ([0; 64], [0; 8]);
    for (i, eight) in block.eights.iter().enumerate() {
        for (k, index) in eight.entries.into_iter().enumerate() {
            let [lower, upper] = index.to_le_bytes();
            low[2 * i + k] = lower;
            high[i / 4] |= upper << (2 * (i % 4) + k);
        }
    }
    joined(&[
        &half(block.d),
        &low,
        &high,
        &signs(&block),
        &scales::<4>(&block),
    ])
}

/// `IQ1_S`: indices of eleven bits, a shift and a scale for 32 values.
pub(super) fn encode_iq1_s(values: &[f32; 256], importance: &[f32; 256]) -> [u8; 50] {
    let block = IQ1_S.fit(values, importance);
    let mut words = [0; 16];
    for (g, bytes) in words.as_chunks_mut().0.iter_mut().enumerate() {
        let eights = &block.eights[4 * g..4 * g + 4];
        let side_bits = u16::from(eights[0].side_bits) << 15 | u16::from(block.scales[g]) << 12;
        let upper = eights
            .iter()
            .rev()
            .fold(0, |word, eight| word << 3 | eight.entries[0] >> 8);
        *bytes = (side_bits | upper).to_le_bytes();
    }
    joined(&[&half(block.d), &lower_bits(&block), &words])
}

/// `IQ1_M`: indices of eleven bits, a shift for eight values, a scale for 16.
pub(super) fn encode_iq1_m(values: &[f32; 256], importance: &[f32; 256]) -> [u8; 56] {
    let block = IQ1_M.fit(values, importance);
    let nibble = |eight: &Eight| (eight.entries[0] >> 8) as u8 | eight.side_bits << 3;
    let (pairs, _) = block.eights.as_chunks::<2>();
    let high: [u8; 16] = std::array::from_fn(|i| nibble(&pairs[i][0]) | nibble(&pairs[i][1]) << 4);
    let d = u16::from_le_bytes(half(block.d));
    let mut words = [0; 8];
    for (i, bytes) in words.as_chunks_mut().0.iter_mut().enumerate() {
        let scales = block.scales[4 * i..4 * i + 4].iter().rev();
        let scales = scales.fold(0, |word, scale| word << 3 | u16::from(*scale));
        *bytes = (scales | (d >> (4 * i) & 15) << 12).to_le_bytes();
    }
    joined(&[&lower_bits(&block), &high, &words])
}

/// The lower eight bits of each index.
fn lower_bits(block: &GridBlock) -> [u8; 32] {
    block.eights.map(|eight| eight.entries[0] as u8)
}

/// Four times seven bits of signs, and the scale of 32 values.
fn signs_and_scale(block: &GridBlock, g: usize) -> [u8; 4] {
    let eights = block.eights[4 * g..4 * g + 4].iter().rev();
    let signs = eights.fold(0, |word, eight| {
        word << 7 | u32::from(eight.side_bits & 127)
    });
    (signs | u32::from(block.scales[g]) << 28).to_le_bytes()
}

/// A byte of signs for each eight values.
fn signs(block: &GridBlock) -> [u8; 32] {
    block.eights.map(|eight| eight.side_bits)
}

/// Two scales a byte.
fn scales<const N: usize>(block: &GridBlock) -> [u8; N] {
    std::array::from_fn(|i| block.scales[2 * i] | block.scales[2 * i + 1] << 4)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::super::super::{BlockFormat, dequantize};
    use super::super::tests::noise;
    use super::super::{quantize, quantize_into, quantize_weighted};

    /// The formats, with the most that may be left of the squares of nearly normal values.
    const LEFT: [(BlockFormat, f64); 7] = [
        (BlockFormat::IQ1_S, 0.2),
        (BlockFormat::IQ1_M, 0.17),
        (BlockFormat::IQ2_XXS, 0.112),
        (BlockFormat::IQ2_XS, 0.083),
        (BlockFormat::IQ2_S, 0.057),
        (BlockFormat::IQ3_XXS, 0.032),
        (BlockFormat::IQ3_S, 0.0165),
    ];

    fn read(format: BlockFormat, bytes: &[u8], n: usize) -> Vec<f32> {
        let mut values = vec![f32::NAN; n];
        dequantize(format, bytes, &mut values);
        values
    }

    /// The squared error, as a part of the squares.
    fn left(values: &[f32], read: &[f32]) -> f64 {
        let square = |x: f32| f64::from(x) * f64::from(x);
        let errors: f64 = values.iter().zip(read).map(|(x, y)| square(x - y)).sum();
        errors / values.iter().map(|x| square(*x)).sum::<f64>()
    }

    #[test]
    fn little_of_the_values_is_lost() {
        let values = noise(256 * 16, 1);
        for (format, most) in LEFT {
            let bytes = quantize(format, &values).unwrap();
            let found = left(&values, &read(format, &bytes, values.len()));
            assert!(found < most && found > 0.8 * most, "{format}: {found}");
        }
    }

    /// Values of any size are encoded as well as others: sums are of values near 1.
    #[test]
    fn no_size_of_values_is_lost() {
        for (format, most) in LEFT {
            for size in [1e-3, 1e4] {
                let values: Vec<f32> = noise(1024, 2).iter().map(|x| x * size).collect();
                let importance = vec![1e30; 1024];
                for bytes in [
                    quantize(format, &values).unwrap(),
                    quantize_weighted(format, &values, &importance).unwrap(),
                ] {
                    let found = left(&values, &read(format, &bytes, 1024));
                    assert!(found < 1.1 * most, "{format} of {size}: {found}");
                }
            }
        }
    }

    /// A group of zeros has no scale; a value that is none counts as 0, and its neighbours stay.
    #[test]
    fn zeros_and_values_that_are_none_are_zeros() {
        for (format, most) in LEFT {
            let mut values = noise(512, 5);
            values[..256].fill(0.0);
            values[300] = f32::NAN;
            let mut bytes = vec![0; format.row_bytes(512).unwrap()];
            quantize_into(format, &values, &mut bytes).unwrap();
            let read = read(format, &bytes, 512);
            values[300] = 0.0;
            assert_eq!(read[..256], [0.0; 256], "{format}");
            let found = left(&values[256..], &read[256..]);
            assert!(found < 1.3 * most, "{format}: {found}");
        }
    }

    /// Values that were encoded once stay: their scales and entries are found again.
    #[test]
    fn encoding_again_changes_nothing() {
        let values = noise(256 * 16, 3);
        for (format, _) in LEFT {
            let once = read(format, &quantize(format, &values).unwrap(), values.len());
            let twice = read(format, &quantize(format, &once).unwrap(), values.len());
            let found = left(&once, &twice);
            assert!(found < 1e-3, "{format}: {found}");
        }
    }

    /// Columns that matter a hundred times as much get smaller errors than they have alone.
    #[test]
    fn important_columns_are_kept() {
        let values = noise(256 * 16, 4);
        let is_heavy = |column: usize| column.is_multiple_of(5);
        let importance: Vec<f32> = (0..values.len())
            .map(|column| if is_heavy(column) { 100.0 } else { 1.0 })
            .collect();
        let heavy = |of: &[f32]| -> Vec<f32> {
            let heavy = of
                .iter()
                .enumerate()
                .filter(|(column, _)| is_heavy(*column));
            heavy.map(|(_, x)| *x).collect()
        };
        for (format, _) in LEFT {
            let plain = quantize(format, &values).unwrap();
            let weighted = quantize_weighted(format, &values, &importance).unwrap();
            let [plain, weighted] = [plain, weighted].map(|bytes| {
                let read = read(format, &bytes, values.len());
                left(&heavy(&values), &heavy(&read))
            });
            assert!(
                weighted < 0.6 * plain,
                "{format}: {plain} became {weighted}"
            );
        }
    }
}
