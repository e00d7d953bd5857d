//! [`Tiling`]: large pictures as tiles of one size, each of which a tower sees by itself, and the
//! whole as one more.
//!
//! Invariant: the tiles come first, in reading order, and the whole is the last. Knows no patches.

use model_core::picture::PictureError;

use crate::pixels::{Filter, Pixels};
use crate::size::{Size, SmartSize, longer_side, nearest_grid, whole_squares};

/// The number of tiles.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Tiling {
    /// From so many to so many, in the shape that is nearest to the picture's; a picture of one
    /// tile has no other (InternVL).
    Nearest([u32; 2]),
    /// Those that cover the picture, whose longer side gets this length before (Idefics 3).
    Covering(u32),
    /// As `Nearest`, for pictures of more than so many times the most pixels alone; the whole keeps
    /// its shape (LFM2-VL).
    OfLarge {
        tiles: [u32; 2],
        whole: SmartSize,
        tolerance: f32,
    },
}

/// A picture in tiles.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct CutPicture {
    /// The tiles, and the whole.
    pub(crate) parts: Vec<Pixels>,
    pub(crate) grid: TileGrid,
}

impl CutPicture {
    /// The whole without tiles.
    fn alone(whole: Pixels) -> Self {
        Self {
            parts: vec![whole],
            grid: TileGrid::default(),
        }
    }
}

/// Rows and columns of tiles; none where there is the whole alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TileGrid {
    pub(crate) rows: u32,
    pub(crate) columns: u32,
}

/// The longest side of a picture, whatever a model's settings say (Idefics 3).
const MAX_SIDE: u32 = 4096;

impl Tiling {
    /// The tiles of a picture, squares of this side.
    ///
    /// # Errors
    /// [`PictureError::Unreadable`] where there is no such size.
    pub(crate) fn cut(
        self,
        pixels: &Pixels,
        side: u32,
        filter: Filter,
    ) -> Result<CutPicture, PictureError> {
        let side = side.max(1);
        let resized = |pixels: &Pixels, size: Size| pixels.resized(size.width, size.height, filter);
        let square = Size {
            width: side,
            height: side,
        };
        let nearest = |bounds: [u32; 2]| {
            let grid = nearest_grid(pixels.size(), side, bounds);
            let size = Size {
                width: side * grid.width,
                height: side * grid.height,
            };
            resized(pixels, size)
        };
        let (tiled, whole) = match self {
            Self::Nearest(bounds) => (nearest(bounds)?, resized(pixels, square)?),
            Self::OfLarge {
                tiles,
                whole,
                tolerance,
            } => {
                let size = pixels.size();
                let fitted = resized(pixels, whole.of(size)?)?;
                if !whole.is_exceeded(size, tolerance) {
                    return Ok(CutPicture::alone(fitted));
                }
                (nearest(tiles)?, fitted)
            }
            Self::Covering(longest) => {
                let size = longer_side(pixels.size(), longest.min(MAX_SIDE));
                let fitted = resized(pixels, size)?;
                let tiled = resized(&fitted, whole_squares(size, side))?;
                let whole = resized(&tiled, square)?;
                (tiled, whole)
            }
        };
        let (rows, columns) = (tiled.height / side, tiled.width / side);
        if rows * columns <= 1 {
            return Ok(CutPicture::alone(whole));
        }
        let corners = (0..rows).flat_map(|y| (0..columns).map(move |x| [x, y]));
        let tile = |[x, y]: [u32; 2]| {
            let corner = [i64::from(x * side), i64::from(y * side)];
            tiled.cropped(corner, side, side)
        };
        Ok(CutPicture {
            parts: corners.map(tile).chain([whole]).collect(),
            grid: TileGrid { rows, columns },
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    /// Pixels whose red is the column and green the row.
    fn pixels(width: u32, height: u32) -> Pixels {
        let places = (0..height).flat_map(|y| (0..width).map(move |x| [x as u8, y as u8, 7]));
        Pixels::new(width, height, places.flatten().collect()).unwrap()
    }

    #[test]
    fn tiles_come_in_reading_order_and_the_whole_last() {
        let cut = Tiling::Covering(12).cut(&pixels(12, 8), 4, Filter::Lanczos);
        let CutPicture { parts, grid } = cut.unwrap();
        assert_eq!((grid.rows, grid.columns), (2, 3));
        assert_eq!(parts.len(), 7);
        assert!(parts.iter().all(|part| (part.width, part.height) == (4, 4)));
        // The second tile of the second row begins at column 4 and row 4.
        assert_eq!(parts[4].values[..3], [4, 4, 7]);
    }

    #[test]
    fn what_is_one_tile_is_the_whole() {
        for tiling in [Tiling::Nearest([1, 4]), Tiling::Covering(4)] {
            let cut = tiling.cut(&pixels(4, 4), 4, Filter::Bicubic).unwrap();
            assert_eq!(cut.parts, [pixels(4, 4)]);
            assert_eq!(cut.grid, TileGrid::default());
        }
    }
}
