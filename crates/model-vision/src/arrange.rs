//! [`Arrangement`]: what becomes of a tower's rows before the projector: merged, averaged, moved.
//!
//! Plain copies and sums on the host: a graph has as many rows at its end as at its beginning.
//! Invariant: a tile of as many patches as the settings say gives the rows that they promise. Knows
//! no weights.

use kv_core::GridPos;
use model_core::picture::Tile;

/// The arrangement of the rows of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arrangement {
    /// So many that follow each other become one (Qwen2-VL).
    Joined {
        /// Rows that become one.
        n: usize,
        /// Patches of each of them: more than one behind a merger (MiniCPM-V 4.6).
        n_patches: usize,
    },
    /// Those of squares become one, and those before patches go (CLIP, InternVL, Idefics 3).
    Squares {
        /// Rows of a square.
        side: usize,
        /// Rows that are no patch's.
        n_before: usize,
    },
    /// Those of squares of so many rows and columns become their mean (Gemma 3).
    Averaged {
        /// Rows of a square.
        kernel: usize,
    },
    /// So many that follow each other become their mean; what is over goes (Qwen2-Audio).
    Pooled(usize),
}

impl Arrangement {
    /// The width of rows of `dim` values afterwards.
    pub(crate) fn width(self, dim: usize) -> usize {
        match self {
            Self::Averaged { .. } | Self::Pooled(_) => dim,
            Self::Joined { n, .. } => n * dim,
            Self::Squares { side, .. } => side * side * dim,
        }
    }

    /// Number of rows of a tile afterwards.
    pub(crate) fn n_rows(self, tile: &Tile) -> usize {
        let n = tile.places.len();
        match self {
            Self::Pooled(joined) => n / joined.max(1),
            Self::Joined {
                n: joined,
                n_patches,
            } => n / (joined * n_patches).max(1),
            Self::Squares { side, n_before } => {
                let [height, width] = patch_sides(tile, n_before);
                (height / side.max(1)) * (width / side.max(1))
            }
            Self::Averaged { kernel } => {
                let (height, width) = tile.sides();
                (height / kernel.max(1)) * (width / kernel.max(1))
            }
        }
    }

    /// The rows of a tile of so many rows and columns of patches, afterwards.
    pub(crate) fn apply(self, rows: Vec<f32>, dim: usize, tile: &Tile) -> Vec<f32> {
        let (height, width) = tile.sides();
        let rows = match self {
            Self::Joined { .. } => rows,
            Self::Squares { side, n_before } => {
                let rows = rows.get(n_before * dim..).unwrap_or_default();
                joined(rows, dim, patch_sides(tile, n_before), side)
            }
            Self::Averaged { kernel } => averaged(&rows, dim, [height, width], kernel),
            Self::Pooled(n) => pooled(&rows, dim, n.max(1)),
        };
        reordered(rows, self.width(dim), &tile.order)
    }
}

/// Rows and columns of a tile's patches, which are behind so many rows that are none.
fn patch_sides(tile: &Tile, n_before: usize) -> [usize; 2] {
    let patches = tile.places.get(n_before..).unwrap_or_default();
    [|place: &GridPos| place.y, |place: &GridPos| place.x].map(|side| {
        let first = patches.iter().map(side).min().unwrap_or(0);
        let end = patches.iter().map(side).max().map_or(0, |last| last + 1);
        (end - first) as usize
    })
}

/// The rows in reading order: `order` has the place of each.
fn reordered(rows: Vec<f32>, width: usize, order: &[u32]) -> Vec<f32> {
    if order.is_empty() {
        return rows;
    }
    let mut out = vec![0.0; rows.len()];
    for (row, &place) in rows.chunks_exact(width.max(1)).zip(order) {
        let at = place as usize * width;
        if let Some(to) = out.get_mut(at..at + width) {
            to.copy_from_slice(row);
        }
    }
    out
}

fn row_at(rows: &[f32], dim: usize, at: usize) -> &[f32] {
    rows.get(at * dim..(at + 1) * dim).unwrap_or_default()
}

fn averaged(rows: &[f32], dim: usize, [height, width]: [usize; 2], kernel: usize) -> Vec<f32> {
    let kernel = kernel.max(1);
    let mut out = Vec::with_capacity(rows.len() / (kernel * kernel));
    for (y, x) in corners([height, width], kernel) {
        let mut mean = vec![0.0f32; dim];
        for (dy, dx) in corners([kernel, kernel], 1) {
            let row = row_at(rows, dim, (y + dy) * width + x + dx);
            mean.iter_mut()
                .zip(row)
                .for_each(|(sum, value)| *sum += value);
        }
        let n = (kernel * kernel) as f32;
        out.extend(mean.iter().map(|sum| sum / n));
    }
    out
}

fn pooled(rows: &[f32], dim: usize, n: usize) -> Vec<f32> {
    let groups = rows.chunks_exact((n * dim).max(1));
    let value = |group: &[f32], at: usize| {
        let sum: f32 = group.iter().skip(at).step_by(dim.max(1)).sum();
        sum / n as f32
    };
    groups
        .flat_map(|group| (0..dim).map(move |at| value(group, at)))
        .collect()
}

fn joined(rows: &[f32], dim: usize, [height, width]: [usize; 2], side: usize) -> Vec<f32> {
    let side = side.max(1);
    let mut out = Vec::with_capacity(rows.len());
    for (y, x) in corners([height, width], side) {
        for dy in 0..side {
            let start = ((y + dy) * width + x) * dim;
            out.extend_from_slice(rows.get(start..start + side * dim).unwrap_or_default());
        }
    }
    out
}

/// The upper left corners of whole squares, in reading order.
fn corners([height, width]: [usize; 2], step: usize) -> impl Iterator<Item = (usize, usize)> {
    let ends = (0..height / step).map(move |y| y * step);
    ends.flat_map(move |y| (0..width / step).map(move |x| (y, x * step)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tile of places whose rows have two values: the place, and 100 more.
    fn tile(height: u32, width: u32) -> (Tile, Vec<f32>) {
        let places = (0..height).flat_map(|y| (0..width).map(move |x| GridPos { y, x }));
        let tile = Tile {
            places: places.collect(),
            ..Tile::default()
        };
        let rows = (0..height * width).flat_map(|at| [at as f32, at as f32 + 100.0]);
        (tile, rows.collect())
    }

    #[test]
    fn squares_become_their_mean() {
        let (tile, rows) = tile(2, 4);
        let averaged = Arrangement::Averaged { kernel: 2 };
        assert_eq!(averaged.n_rows(&tile), 2);
        assert_eq!(
            averaged.apply(rows.clone(), 2, &tile),
            [2.5, 102.5, 4.5, 104.5]
        );
    }

    #[test]
    fn rows_that_follow_each_other_become_their_mean() {
        let (tile, rows) = tile(5, 1);
        let pooled = Arrangement::Pooled(2);
        assert_eq!((pooled.width(2), pooled.n_rows(&tile)), (2, 2));
        assert_eq!(pooled.apply(rows, 2, &tile), [0.5, 100.5, 2.5, 102.5]);
    }

    #[test]
    fn squares_become_one_row() {
        let (tile, rows) = tile(2, 4);
        let squares = Arrangement::Squares {
            side: 2,
            n_before: 1,
        };
        assert_eq!((squares.width(2), squares.n_rows(&tile)), (8, 2));
        let behind_one = [vec![-1.0, -2.0], rows].concat();
        let joined = squares.apply(behind_one, 2, &tile);
        let first = [0.0, 100.0, 1.0, 101.0, 4.0, 104.0, 5.0, 105.0];
        assert_eq!(joined[..8], first);
        assert_eq!(joined[8..10], [2.0, 102.0]);
    }

    #[test]
    fn joined_rows_come_back_to_their_places() {
        let (mut tile, rows) = tile(1, 6);
        tile.order = vec![2, 0, 1];
        let (n, n_patches) = (2, 1);
        let joined = Arrangement::Joined { n, n_patches };
        assert_eq!((joined.width(2), joined.n_rows(&tile)), (4, 3));
        let back = joined.apply(rows, 2, &tile);
        assert_eq!(back[..4], [2.0, 102.0, 3.0, 103.0]);
        assert_eq!(back[8..], [0.0, 100.0, 1.0, 101.0]);
    }

    #[test]
    fn rows_that_were_merged_before_are_fewer() {
        let (tile, _) = tile(4, 4);
        let (n, n_patches) = (2, 4);
        let joined = Arrangement::Joined { n, n_patches };
        assert_eq!((joined.width(2), joined.n_rows(&tile)), (4, 2));
        let merged: Vec<f32> = (0..8).map(|value| value as f32).collect();
        assert_eq!(joined.apply(merged.clone(), 2, &tile), merged);
    }
}
