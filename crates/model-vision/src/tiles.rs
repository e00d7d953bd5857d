//! [`Tiling`]: large pictures as tiles of one size, each of which a tower sees by itself, and the
//! whole as one more.
//!
//! Invariant: the tiles come first, in reading order, and the whole is the last. Knows no patches.

use model_core::picture::{PictureError, PictureRow};

use crate::pixels::{Filter, Pixels};
use crate::size::{
    Size, SmartSize, best_canvas, best_of, fit_into, longer_side, margins, nearest_grid, on_canvas,
    whole_squares,
};

/// The number of tiles.
#[derive(Clone, Debug, PartialEq)]
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
    /// Those of the best of these sizes, in whose middle the picture lies (LLaVA 1.6).
    Padded(Vec<Size>),
    /// At most so many, in the shape that shrinks the picture least; it lies in the upper left
    /// corner (Llama 4).
    Canvas(u32),
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

impl TileGrid {
    /// The parts of a picture of this size each, in reading order.
    pub(crate) fn cut(self, pixels: &Pixels, part: Size) -> impl Iterator<Item = Pixels> {
        let corners = (0..self.rows).flat_map(move |y| (0..self.columns).map(move |x| [x, y]));
        corners.map(move |[x, y]| {
            let corner = [x * part.width, y * part.height].map(i64::from);
            pixels.cropped(corner, part.width, part.height)
        })
    }
}

/// The longest side of a picture, whatever a model's settings say (Idefics 3).
const MAX_SIDE: u32 = 4096;

impl Tiling {
    /// The tiles of a picture, squares of this side.
    ///
    /// # Errors
    /// [`PictureError::Unreadable`] where there is no such size.
    pub(crate) fn cut(
        &self,
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
        let (tiled, whole) = match *self {
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
            Self::Padded(ref sizes) => {
                let size = best_of(pixels.size(), sizes).unwrap_or(square);
                let fitted = resized(pixels, fit_into(pixels.size(), size))?;
                let start = |outer: u32, inner: u32| -i64::from(outer.saturating_sub(inner) / 2);
                let corner = [
                    start(size.width, fitted.width),
                    start(size.height, fitted.height),
                ];
                let padded = fitted.cropped(corner, size.width, size.height);
                (padded, resized(pixels, square)?)
            }
            Self::Canvas(most) => {
                let canvas = best_canvas(pixels.size(), side, most);
                let fitted = resized(pixels, on_canvas(pixels.size(), canvas, side))?;
                let padded = fitted.cropped([0, 0], canvas.width, canvas.height);
                if canvas == square {
                    return Ok(CutPicture::alone(padded));
                }
                (padded, resized(pixels, square)?)
            }
            Self::Covering(longest) => {
                let size = longer_side(pixels.size(), longest.min(MAX_SIDE));
                let fitted = resized(pixels, size)?;
                let tiled = resized(&fitted, whole_squares(size, side))?;
                let whole = resized(&tiled, square)?;
                (tiled, whole)
            }
        };
        let grid = TileGrid {
            rows: tiled.height / side,
            columns: tiled.width / side,
        };
        if grid.rows * grid.columns <= 1 && !matches!(self, Self::Padded(_)) {
            return Ok(CutPicture::alone(whole));
        }
        Ok(CutPicture {
            parts: grid.cut(&tiled, square).chain([whole]).collect(),
            grid,
        })
    }

    /// The rows in a prompt of a picture of this size, cut into tiles of so many rows and columns,
    /// each a square of patches; none where they are those of all tiles.
    pub(crate) fn layout(&self, size: Size, grid: TileGrid, side: u32) -> Vec<PictureRow> {
        let Self::Padded(_) = self else {
            return Vec::new();
        };
        let n_tile = side * side;
        let whole = grid.rows * grid.columns * n_tile;
        let mut layout: Vec<PictureRow> = (whole..whole + n_tile).map(PictureRow::OfTile).collect();
        let places = Size {
            width: grid.columns * side,
            height: grid.rows * side,
        };
        // Patches outside of the picture are left out.
        let at_sides = margins(size, places);
        for y in at_sides.height..places.height.saturating_sub(at_sides.height) {
            for x in at_sides.width..places.width.saturating_sub(at_sides.width) {
                let tile = y / side * grid.columns + x / side;
                let in_tile = y % side * side + x % side;
                layout.push(PictureRow::OfTile(tile * n_tile + in_tile));
            }
            layout.push(PictureRow::LineEnd);
        }
        layout
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
    fn lines_end_and_margins_are_left_out() {
        let size = |width, height| Size { width, height };
        let tiling = Tiling::Padded(vec![size(8, 4)]);
        let picture = pixels(4, 4);
        let CutPicture { parts, grid } = tiling.cut(&picture, 4, Filter::Bicubic).unwrap();
        assert_eq!((grid.rows, grid.columns, parts.len()), (1, 2, 3));
        // The picture begins in the middle of the first tile.
        assert_eq!(parts[0].values[..12], [0, 0, 0, 0, 0, 0, 0, 0, 7, 1, 0, 7]);
        let layout = tiling.layout(picture.size(), grid, 2);
        let of_tiles = |numbers: &[u32]| -> Vec<PictureRow> {
            numbers
                .iter()
                .map(|&number| PictureRow::OfTile(number))
                .collect()
        };
        let end = [PictureRow::LineEnd];
        let lines = [
            of_tiles(&[1, 4]),
            end.to_vec(),
            of_tiles(&[3, 6]),
            end.to_vec(),
        ];
        assert_eq!(layout, [of_tiles(&[8, 9, 10, 11]), lines.concat()].concat());
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
