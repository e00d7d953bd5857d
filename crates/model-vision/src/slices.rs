//! [`SliceRules`]: a large picture as slices, with the whole before them (MiniCPM-V).
//!
//! Unlike tiles, slices are no squares: picture and slices nearly keep their shapes. Invariant: the
//! whole comes first, then slices in reading order. Knows no patches.

use model_core::picture::PictureError;

use crate::pixels::{Filter, Pixels};
use crate::size::Size;
use crate::tiles::{CutPicture, TileGrid};

/// The sizes of a whole and of slices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SliceRules {
    /// Each has about as many pixels as a square of this side.
    pub(crate) side: u32,
    /// Their sides are multiples of so many pixels.
    pub(crate) factor: u32,
    /// The most slices.
    pub(crate) most: u32,
}

impl SliceRules {
    /// The whole and the slices of a picture.
    ///
    /// # Errors
    /// [`PictureError::TooNarrow`], as the processor takes pictures of any shape;
    /// [`PictureError::Unreadable`] where there is no such size.
    pub(crate) fn cut(self, pixels: &Pixels, filter: Filter) -> Result<CutPicture, PictureError> {
        let size = pixels.size();
        size.check_ratio()?;
        let resized = |size: Size| pixels.resized(size.width, size.height, filter);
        let grid = self.grid(size);
        let whole = self.fitted(f64::from(size.width), f64::from(size.height));
        let mut parts = vec![resized(whole)?];
        if grid != TileGrid::default() {
            let slice = self.slice(size, grid);
            let size = Size {
                width: slice.width * grid.columns,
                height: slice.height * grid.rows,
            };
            parts.extend(grid.cut(&resized(size)?, slice));
        }
        Ok(CutPicture { parts, grid })
    }

    /// The rows and columns of slices whose shape is nearest to a picture's: about as many as it
    /// has squares, and none where it is one.
    fn grid(self, Size { width, height }: Size) -> TileGrid {
        let (w, h) = (f64::from(width), f64::from(height));
        let n_squares = (w * h / f64::from(self.side).powi(2)).ceil() as u32;
        let n = n_squares.min(self.most);
        let mut best = (f64::INFINITY, TileGrid::default());
        if n <= 1 {
            return best.1;
        }
        let allowed = (n - 1..=n + 1).filter(|&n| n > 1 && n <= self.most);
        for n in allowed {
            for rows in (1..=n).filter(|&rows| n.is_multiple_of(rows)) {
                let columns = n / rows;
                let shape = f64::from(columns) / f64::from(rows);
                let off = ((w / h).ln() - shape.ln()).abs();
                if off < best.0 || (off == best.0 && rows > best.1.rows) {
                    best = (off, TileGrid { rows, columns });
                }
            }
        }
        best.1
    }

    /// The size of each slice.
    fn slice(self, size: Size, grid: TileGrid) -> Size {
        let (columns, rows) = (f64::from(grid.columns.max(1)), f64::from(grid.rows.max(1)));
        let width = multiple(f64::from(size.width), columns) / columns;
        let height = multiple(f64::from(size.height), rows) / rows;
        self.fitted(width, height)
    }

    /// The size of about as many pixels as the square, in the shape of another.
    fn fitted(self, width: f64, height: f64) -> Size {
        let shape = width / height;
        let height = (f64::from(self.side) / shape.sqrt()).floor();
        let width = (height * shape).floor();
        self.whole_squares(width, height)
    }

    /// The size nearest to this one of whole multiples of the factor.
    fn whole_squares(self, width: f64, height: f64) -> Size {
        let [width, height] =
            [width, height].map(|side| multiple(side, f64::from(self.factor)) as u32);
        Size { width, height }
    }
}

/// The multiple of `factor` that is nearest to a length, and not 0.
fn multiple(length: f64, factor: f64) -> f64 {
    let factor = factor.max(1.0);
    ((length / factor).round_ties_even() * factor).max(factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sizes of pictures, and of whole, rows and columns, and slices, by the models' processor.
    #[test]
    fn sizes_are_the_processors() {
        let rules = SliceRules {
            side: 448,
            factor: 56,
            most: 9,
        };
        for (size, whole, grid, slice) in [
            ([448, 448], [448, 448], [0, 0], [0, 0]),
            ([600, 400], [560, 392], [1, 2], [392, 504]),
            ([1000, 500], [616, 336], [1, 2], [448, 448]),
            ([333, 1777], [168, 1008], [4, 1], [392, 504]),
            ([1920, 1080], [616, 336], [2, 4], [448, 448]),
            ([2000, 300], [1176, 168], [1, 4], [560, 336]),
            ([64, 48], [504, 392], [0, 0], [0, 0]),
            ([900, 1200], [392, 504], [3, 2], [448, 448]),
            ([3000, 20], [5376, 56], [0, 0], [0, 0]),
        ] {
            let size = Size {
                width: size[0],
                height: size[1],
            };
            let sides = |size: Size| [size.width, size.height];
            let found = rules.grid(size);
            assert_eq!([found.rows, found.columns], grid, "{size:?}");
            let fitted = rules.fitted(size.width.into(), size.height.into());
            assert_eq!(sides(fitted), whole, "{size:?}");
            if grid != [0, 0] {
                assert_eq!(sides(rules.slice(size, found)), slice, "{size:?}");
            }
        }
    }
}
