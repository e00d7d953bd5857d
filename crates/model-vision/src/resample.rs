//! [`Resampling`]: a square of learned rows brought to the rows and columns of a picture's patches;
//! [`AxisRows`]: learned rows for each of these.
//!
//! Done on the host, for each picture: a graph has no operation for it, and it is little next to a
//! layer. Invariant: the weights of a row's sources sum up to 1. Knows no file.

use kv_graph::weights::Weight;
use model_core::media::MediaKind;
use model_core::picture::{PictureError, Tile};

/// The way from places of the square to those of patches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Resampling {
    /// Rows, and columns, of the square.
    pub(crate) side: usize,
    pub(crate) corners: Corners,
}

/// The places of the square and of the patches that lie on each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Corners {
    /// The middles of the first and last places, and straight lines in between (Qwen3-VL).
    Middles,
    /// The outer edges, and cubic curves through the four nearest places (GLM-4.1V).
    Cubic,
    /// The outer edges, with all that lies under a place where the square is larger (SigLIP 2).
    Edges,
    /// The outer edges before the first places, and the one place under each (MiniCPM-V 4.6).
    Nearest,
}

/// A place of the square along one axis, and its part in a patch's row.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Source {
    at: usize,
    part: f32,
}

impl Resampling {
    /// The rows that are added to the patches of a tile, out of the square's rows of `dim` values.
    pub(crate) fn rows(self, square: &[f32], dim: usize, tile: &Tile) -> Vec<f32> {
        let (height, width) = tile.sides();
        let along = |n: usize| (0..n).map(|at| self.sources(at, n)).collect::<Vec<_>>();
        let (down, across) = (along(height), along(width));
        let mut out = vec![0.0f32; tile.places.len() * dim];
        for (to, place) in out.chunks_exact_mut(dim.max(1)).zip(&tile.places) {
            let rows = down.get(place.y as usize).map_or(&[][..], Vec::as_slice);
            let columns = across.get(place.x as usize).map_or(&[][..], Vec::as_slice);
            for (y, x) in rows
                .iter()
                .flat_map(|y| columns.iter().map(move |x| (y, x)))
            {
                let start = (y.at * self.side + x.at) * dim;
                let row = square.get(start..start + dim).unwrap_or_default();
                let part = y.part * x.part;
                to.iter_mut()
                    .zip(row)
                    .for_each(|(sum, value)| *sum += part * value);
            }
        }
        out
    }

    /// The sources of place `at` of `n`.
    fn sources(self, at: usize, n: usize) -> Vec<Source> {
        let last = self.side.saturating_sub(1);
        match self.corners {
            Corners::Edges => self.under(at, n),
            Corners::Nearest => vec![Source {
                at: (at * self.side / n.max(1)).min(last),
                part: 1.0,
            }],
            Corners::Cubic => self.nearest_four(at, n),
            Corners::Middles => {
                let place = at as f32 * last as f32 / (n.saturating_sub(1).max(1)) as f32;
                let floor = (place as usize).min(last);
                let part = place - floor as f32;
                let next = Source {
                    at: (floor + 1).min(last),
                    part,
                };
                vec![
                    Source {
                        at: floor,
                        part: 1.0 - part,
                    },
                    next,
                ]
            }
        }
    }
}

/// The slope of cubic curves (Keys, IEEE ASSP 29, 1981), as PyTorch has it.
const CUBIC: f32 = -0.75;

/// The part of a place that is so far away.
fn cubic(distance: f32) -> f32 {
    let d = distance.abs();
    if d <= 1.0 {
        ((CUBIC + 2.0) * d - (CUBIC + 3.0)) * d * d + 1.0
    } else if d < 2.0 {
        ((d - 5.0) * d + 8.0) * d * CUBIC - 4.0 * CUBIC
    } else {
        0.0
    }
}

impl Resampling {
    /// The four sources around place `at` of `n`; those at the edge stand for what is outside.
    fn nearest_four(self, at: usize, n: usize) -> Vec<Source> {
        let last = self.side.saturating_sub(1) as f32;
        let centre = (at as f32 + 0.5) * (self.side as f32 / n.max(1) as f32) - 0.5;
        let floor = centre.floor();
        let source = |step: f32| Source {
            at: (floor + step).clamp(0.0, last) as usize,
            part: cubic(centre - floor - step),
        };
        [-1.0, 0.0, 1.0, 2.0].map(source).to_vec()
    }

    /// The sources that lie under place `at` of `n`, the nearer the larger.
    fn under(self, at: usize, n: usize) -> Vec<Source> {
        let scale = self.side as f32 / n.max(1) as f32;
        let support = scale.max(1.0);
        let centre = (at as f32 + 0.5) * scale - 0.5;
        let near = |source: usize| (1.0 - (source as f32 - centre).abs() / support).max(0.0);
        let sources = (0..self.side).map(|source| Source {
            at: source,
            part: near(source),
        });
        let mut sources: Vec<Source> = sources.filter(|source| source.part > 0.0).collect();
        let sum: f32 = sources.iter().map(|source| source.part).sum();
        sources.iter_mut().for_each(|source| source.part /= sum);
        sources
    }
}

/// Learned rows of columns, and behind them as many of rows: a patch has the sum of its two (Gemma
/// 4). They are many, and a picture needs few.
pub(crate) struct AxisRows {
    tables: Weight,
    /// Rows of each.
    n: usize,
}

impl AxisRows {
    /// Those in a tensor of `n` rows for each axis.
    pub(crate) fn new(tables: Weight, n: usize) -> Self {
        Self { tables, n }
    }

    /// The rows that are added to the patches of a tile.
    ///
    /// # Errors
    /// [`PictureError::TooLarge`] where it has more rows or columns of patches than there are.
    pub(crate) fn rows(&self, tile: &Tile) -> Result<Vec<f32>, PictureError> {
        let dim = self.tables.n_columns().max(1);
        let (height, width) = tile.sides();
        let (across, down) = (self.first(0, width)?, self.first(self.n, height)?);
        let mut out = Vec::with_capacity(tile.places.len() * dim);
        let row = |rows: &[f32], at: u32| {
            let start = at as usize * dim;
            rows.get(start..start + dim).unwrap_or_default().to_vec()
        };
        for place in &tile.places {
            let of_row = row(&down, place.y);
            let sums = row(&across, place.x).into_iter().zip(of_row);
            out.extend(sums.map(|(a, b)| a + b));
        }
        Ok(out)
    }

    /// The first `n` rows from row number `from` on.
    fn first(&self, from: usize, n: usize) -> Result<Vec<f32>, PictureError> {
        let too_large = || PictureError::TooLarge {
            media: MediaKind::Picture,
            got: n as u64,
            unit: "patches in a row or column",
            limit: self.n as u64,
        };
        let tables = &self.tables;
        let n_bytes = tables.bytes().len() / (2 * self.n).max(1);
        let bytes = tables.bytes().slice(from * n_bytes..(from + n) * n_bytes);
        let bytes = bytes.filter(|_| n <= self.n).ok_or_else(too_large)?;
        let shape = vec![n, tables.n_columns()];
        let rows = Weight::new(tables.name(), shape, tables.format(), bytes);
        Ok(rows.map_err(|_| too_large())?.to_f32())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use kv_core::GridPos;

    use super::*;

    /// A tile of so many rows and columns.
    fn tile(height: u32, width: u32) -> Tile {
        let places = (0..height).flat_map(|y| (0..width).map(move |x| GridPos { y, x }));
        Tile {
            places: places.collect(),
            ..Tile::default()
        }
    }

    #[test]
    fn corners_stay_and_what_is_between_is_mixed() {
        let resampling = Resampling {
            side: 3,
            corners: Corners::Middles,
        };
        // The value of a place is ten times its row and its column.
        let square = [0.0, 1.0, 2.0, 10.0, 11.0, 12.0, 20.0, 21.0, 22.0];
        let rows = resampling.rows(&square, 1, &tile(2, 5));
        assert_eq!(
            rows,
            [0.0, 0.5, 1.0, 1.5, 2.0, 20.0, 20.5, 21.0, 21.5, 22.0]
        );
        assert_eq!(resampling.rows(&square, 1, &tile(1, 1)), [0.0]);
    }

    #[test]
    fn the_place_under_each_is_taken() {
        let nearest = Resampling {
            side: 3,
            corners: Corners::Nearest,
        };
        let square = [0.0, 1.0, 2.0, 10.0, 11.0, 12.0, 20.0, 21.0, 22.0];
        let rows = nearest.rows(&square, 1, &tile(1, 5));
        assert_eq!(rows, [0.0, 0.0, 1.0, 1.0, 2.0]);
        assert_eq!(nearest.rows(&square, 1, &tile(2, 1)), [0.0, 10.0]);
    }

    #[test]
    fn cubic_curves_go_through_what_is_there() {
        let cubic = Resampling {
            side: 4,
            corners: Corners::Cubic,
        };
        let square: Vec<f32> = (0..16).map(|at| (at % 4) as f32).collect();
        let rows = cubic.rows(&square, 1, &tile(1, 4));
        assert_eq!(rows, [0.0, 1.0, 2.0, 3.0]);
        // Half way between two: as much of each, and the outer ones count less than nothing.
        let rows = cubic.rows(&square, 1, &tile(1, 2));
        assert_eq!(rows, [0.40625, 2.59375]);
    }

    #[test]
    fn columns_and_rows_have_rows_of_their_own() {
        let values: Vec<f32> = (0..3).map(|x| x as f32).chain([10.0, 20.0, 30.0]).collect();
        let tables = Weight::from_f32("positions", vec![2, 3, 1], &values).unwrap();
        let axes = AxisRows::new(tables, 3);
        let rows = axes.rows(&tile(2, 3)).unwrap();
        assert_eq!(rows, [10.0, 11.0, 12.0, 20.0, 21.0, 22.0]);
        let error = axes.rows(&tile(1, 4)).unwrap_err().to_string();
        assert!(
            error.contains("4 patches in a row or column: at most 3"),
            "{error}"
        );
    }

    #[test]
    fn what_lies_under_a_place_is_mixed() {
        let edges = |side| Resampling {
            side,
            corners: Corners::Edges,
        };
        let square = [0.0, 4.0, 8.0, 12.0];
        // Twice as many places: a quarter and three quarters of neighbours, and none outside.
        let rows = edges(2).rows(&square, 1, &tile(1, 4));
        assert_eq!(rows, [4.0, 5.0, 7.0, 8.0]);
        assert_eq!(edges(2).rows(&square, 1, &tile(1, 1)), [6.0]);
    }
}
