//! [`Preparation`]: from pixels to the patches that a tower takes, as a model's own processor does
//! it.
//!
//! Invariant: a picture gives as many rows in a prompt as its runs say. Knows no file format and no
//! graph.

use std::cmp::Ordering;

use kv_core::GridPos;
use model_core::picture::{PictureError, PictureGrid, PictureRow, Tile};

use crate::pixels::{Filter, Pixels};
use crate::size::{Size, SmartSize, filled, fitted, shorter_side};
use crate::slices::SliceRules;
use crate::tiles::{TileGrid, Tiling};

/// The way from pictures to patches.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Preparation {
    /// Rows and columns of pixels of a patch.
    pub(crate) patch: u32,
    /// Subtracted from red, green and blue, which are from 0 to 1.
    pub(crate) mean: [f32; 3],
    /// They are divided by it then.
    pub(crate) std: [f32; 3],
    pub(crate) filter: Filter,
    pub(crate) precision: Precision,
    pub(crate) shape: Shape,
}

/// The precision in which a processor computes with the values of pixels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Precision {
    /// That of `f32`.
    #[default]
    Single,
    /// Each step is rounded to bfloat16 (Llama 4).
    Bf16,
}

impl Precision {
    fn rounded(self, value: f32) -> f32 {
        match self {
            Self::Single => value,
            Self::Bf16 => {
                let bits = value.to_bits();
                // To the nearest, and of two to the even one.
                let odd = (bits >> 16) & 1;
                f32::from_bits(bits.wrapping_add(0x7fff + odd) & 0xffff_0000)
            }
        }
    }
}

/// The row of a tile that is no patch's. It comes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum ClassRow {
    /// There is none.
    #[default]
    None,
    /// It is in no row and column (CLIP).
    Plain,
    /// It is in row and column 0, and patches are from 1 on (Llama 4, in whose files its learned
    /// position is the last one).
    Corner,
}

impl ClassRow {
    /// Their number.
    pub(crate) fn n_rows(self) -> u32 {
        match self {
            Self::None => 0,
            Self::Plain | Self::Corner => 1,
        }
    }
}

/// The sizes and the order of patches.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Shape {
    /// Nearly as the picture is, in squares of `merge` patches that follow each other (Qwen2-VL).
    Natural {
        /// Patches of a row of a square.
        merge: u32,
        size: SmartSize,
        /// Patches of a row of a window, where layers see windows.
        window: Option<u32>,
    },
    /// As the picture is, made larger to whole squares of `merge` patches, up to a longer side of
    /// so many pixels (Pixtral).
    Fitted {
        /// Patches of a row of a square.
        merge: u32,
        /// Pixels of the longer side.
        longest: u32,
    },
    /// A square of this side, whatever the picture's shape is.
    Stretched(u32),
    /// As large as so many pixels allow, in whole squares of so many pixels in a row, whatever the
    /// picture's size is (Gemma 4).
    Filled {
        /// Pixels of a row of a square.
        square: u32,
        /// The most pixels.
        most: u64,
    },
    /// The middle of the picture, whose shorter side has this length.
    Middle(u32),
    /// Tiles.
    Tiled {
        tiling: Tiling,
        /// Pixels of a row of a tile.
        side: u32,
        class_row: ClassRow,
    },
    /// The whole, and slices: squares of squares of patches follow each other (MiniCPM-V 4.6).
    Sliced(SliceRules),
}

/// A picture as a tower takes it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PreparedPicture {
    pub(crate) tiles: Vec<Tile>,
    /// Rows and columns of what comes out of a tile, where positions follow them.
    pub(crate) grid: Option<PictureGrid>,
    /// Rows and columns of tiles, where it was cut.
    pub(crate) tile_grid: TileGrid,
    /// Its rows in a prompt, where they are not those of all tiles.
    pub(crate) layout: Vec<PictureRow>,
}

impl Preparation {
    /// The tiles of a picture.
    ///
    /// # Errors
    /// [`PictureError`] where its shape is none that the model takes.
    pub(crate) fn prepare(&self, pixels: &Pixels) -> Result<PreparedPicture, PictureError> {
        let size = pixels.size();
        let resized = |size: Size| pixels.resized(size.width, size.height, self.filter);
        match self.shape {
            Shape::Natural {
                merge,
                size: smart,
                window,
            } => {
                let size = smart.of(size)?;
                Ok(self.natural(&resized(size)?, merge, window))
            }
            Shape::Fitted { merge, longest } => {
                let size = fitted(size, self.patch * merge, longest);
                Ok(self.natural(&resized(size)?, merge, None))
            }
            Shape::Stretched(side) => {
                let square = resized(Size {
                    width: side,
                    height: side,
                })?;
                Ok(PreparedPicture::of(self.tile(&square, ClassRow::None)))
            }
            Shape::Filled { square, most } => {
                let filled = resized(filled(size, square, most))?;
                Ok(PreparedPicture::of(self.tile(&filled, ClassRow::None)))
            }
            Shape::Middle(side) => {
                let pixels = resized(shorter_side(size, side))?;
                let start = |length: u32| (i64::from(length) - i64::from(side)) / 2;
                let corner = [start(pixels.width), start(pixels.height)];
                let middle = pixels.cropped(corner, side, side);
                Ok(PreparedPicture::of(self.tile(&middle, ClassRow::Plain)))
            }
            Shape::Tiled {
                ref tiling,
                side,
                class_row,
            } => {
                let cut = tiling.cut(pixels, side, self.filter)?;
                let tiles = cut.parts.iter().map(|part| self.tile(part, class_row));
                Ok(PreparedPicture {
                    tiles: tiles.collect(),
                    grid: None,
                    tile_grid: cut.grid,
                    layout: tiling.layout(size, cut.grid, side / self.patch),
                })
            }
            Shape::Sliced(rules) => {
                let cut = rules.cut(pixels, self.filter)?;
                let side = rules.factor / self.patch;
                let tiles = cut.parts.iter().map(|part| self.nested(part, side));
                Ok(PreparedPicture {
                    tiles: tiles.collect(),
                    grid: None,
                    tile_grid: cut.grid,
                    layout: Vec::new(),
                })
            }
        }
    }

    /// A tile of squares of `side` patches, in each of which squares of two patches follow each
    /// other.
    fn nested(&self, pixels: &Pixels, side: u32) -> Tile {
        let factor = self.patch * side;
        let [height, width] = [pixels.height, pixels.width].map(|length| length / factor);
        let outer = squares([height, width]);
        let inner = outer.flat_map(|square| places_of(square, side / 2));
        let mut tile = Tile::default();
        for place in inner.flat_map(|square| places_of(square, 2)) {
            self.push_patch(pixels, place, &mut tile.patches);
            tile.places.push(place);
        }
        tile.positions = (0..).take(tile.places.len()).collect();
        tile
    }

    /// Patches in reading order, behind the row that is none.
    fn tile(&self, pixels: &Pixels, class_row: ClassRow) -> Tile {
        let (width, height) = (pixels.width / self.patch, pixels.height / self.patch);
        let places = squares([height, width]);
        let n_before = class_row.n_rows();
        let mut tile = Tile::default();
        let n_empty = n_before as usize * self.patch_len();
        tile.patches.resize(n_empty, 0.0);
        for place in places.clone() {
            self.push_patch(pixels, place, &mut tile.patches);
        }
        let before = (0..n_before).map(|_| GridPos::default());
        let first = match class_row {
            ClassRow::None | ClassRow::Plain => 0,
            ClassRow::Corner => 1,
        };
        let places = places.map(|place| GridPos {
            y: first + place.y,
            x: first + place.x,
        });
        tile.positions = (0..n_before + width * height).collect();
        tile.places = before.chain(places).collect();
        tile
    }

    /// One tile of squares of patches, window by window where there are such.
    fn natural(&self, pixels: &Pixels, merge: u32, window: Option<u32>) -> PreparedPicture {
        let merge = merge.max(1);
        let side = self.patch * merge;
        let (width, height) = (pixels.width / side, pixels.height / side);
        let mut squares: Vec<GridPos> = squares([height, width]).collect();
        let mut tile = Tile::default();
        // Squares of a row of a window, and the window of a square.
        let across = window.map(|window| (window / merge).max(1));
        let window_of = |square: &GridPos| match across {
            Some(n) => (square.y / n, square.x / n),
            None => (0, 0),
        };
        let in_order = |a: &GridPos, b: &GridPos| match window_of(a).cmp(&window_of(b)) {
            Ordering::Equal => a.cmp(b),
            other => other,
        };
        squares.sort_by(in_order);
        if across.is_some() {
            tile.order = squares
                .iter()
                .map(|square| square.y * width + square.x)
                .collect();
        }
        // In a window, positions begin at a multiple of its patches.
        let n_window = across.map_or(u32::MAX, |n| (n * merge).pow(2));
        let (mut number, mut last) = (0, None);
        let mut next = 0;
        for square in squares {
            let window = window_of(&square);
            if last.is_some_and(|last| last != window) {
                number += 1;
                next = number * n_window;
            }
            last = Some(window);
            for place in places_of(square, merge) {
                self.push_patch(pixels, place, &mut tile.patches);
                tile.places.push(place);
                tile.positions.push(next);
                next += 1;
            }
        }
        PreparedPicture {
            tiles: vec![tile],
            grid: Some(PictureGrid {
                height: height as usize,
                width: width as usize,
            }),
            tile_grid: TileGrid::default(),
            layout: Vec::new(),
        }
    }

    /// Values of a patch.
    pub(crate) fn patch_len(&self) -> usize {
        3 * (self.patch as usize).pow(2)
    }

    /// Adds the values of a patch: all reds, greens and blues, row by row.
    fn push_patch(&self, pixels: &Pixels, place: GridPos, to: &mut Vec<f32>) {
        let (patch, width) = (self.patch as usize, pixels.width as usize);
        let (top, left) = (place.y as usize * patch, place.x as usize * patch);
        for ((channel, mean), std) in self.mean.iter().enumerate().zip(self.std) {
            for y in top..top + patch {
                let row = (y * width + left) * 3;
                let row = pixels.values.get(row..row + patch * 3).unwrap_or_default();
                let of_channel = row.iter().skip(channel).step_by(3);
                to.extend(of_channel.map(|&value| {
                    let part = self.precision.rounded(f32::from(value) / 255.0);
                    self.precision
                        .rounded(self.precision.rounded(part - mean) / std)
                }));
            }
        }
    }
}

impl PreparedPicture {
    /// One tile, without rows and columns.
    pub(crate) fn of(tile: Tile) -> Self {
        Self {
            tiles: vec![tile],
            grid: None,
            tile_grid: TileGrid::default(),
            layout: Vec::new(),
        }
    }
}

/// So many rows and columns, in reading order.
fn squares([height, width]: [u32; 2]) -> impl Iterator<Item = GridPos> + Clone {
    (0..height).flat_map(move |y| (0..width).map(move |x| GridPos { y, x }))
}

/// The places of the patches of a square of `merge` rows and columns.
fn places_of(square: GridPos, merge: u32) -> impl Iterator<Item = GridPos> + Clone {
    squares([merge, merge]).map(move |in_square| GridPos {
        y: square.y * merge + in_square.y,
        x: square.x * merge + in_square.x,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;
    use crate::size::SmallSides;

    /// Pixels whose red is the column and green the row.
    fn pixels(width: u32, height: u32) -> Pixels {
        let places = (0..height).flat_map(|y| (0..width).map(move |x| [x as u8, y as u8, 7]));
        Pixels {
            width,
            height,
            values: places.flatten().collect(),
        }
    }

    fn preparation(shape: Shape) -> Preparation {
        Preparation {
            patch: 2,
            mean: [0.0; 3],
            std: [1.0 / 255.0; 3],
            filter: Filter::Bicubic,
            precision: Precision::Single,
            shape,
        }
    }

    #[test]
    fn patches_have_their_colours_one_after_the_other() {
        let plain = preparation(Shape::Stretched(4));
        let prepared = plain.prepare(&pixels(4, 4)).unwrap();
        let tile = &prepared.tiles[0];
        let patch: Vec<u32> = tile.patches[12..24]
            .iter()
            .map(|v| v.round() as u32)
            .collect();
        assert_eq!(patch, [2, 3, 2, 3, 0, 0, 1, 1, 7, 7, 7, 7]);
        assert_eq!(tile.positions, [0, 1, 2, 3]);
    }

    #[test]
    fn squares_come_window_by_window() {
        let shape = Shape::Natural {
            merge: 2,
            size: SmartSize {
                factor: 4,
                pixels: [1, 1 << 20],
                small: SmallSides::AsTheyAre,
            },
            window: Some(4),
        };
        // 6 x 3 squares of 4 pixels; windows of 2 x 2 squares.
        let prepared = preparation(shape).prepare(&pixels(24, 12)).unwrap();
        let grid = prepared.grid.unwrap();
        assert_eq!((grid.height, grid.width), (3, 6));
        let tile = &prepared.tiles[0];
        assert_eq!(tile.order[..5], [0, 1, 6, 7, 2]);
        assert_eq!(tile.order[12..], [12, 13, 14, 15, 16, 17]);
        assert_eq!(tile.positions[15..18], [15, 16, 17]);
        // The windows of the last row have 8 patches of 16.
        assert_eq!(
            tile.positions[48..58],
            [48, 49, 50, 51, 52, 53, 54, 55, 64, 65]
        );
        assert_eq!(tile.places[4], GridPos { y: 0, x: 2 });
    }

    #[test]
    fn squares_are_in_squares() {
        let sliced = preparation(Shape::Sliced(SliceRules {
            side: 16,
            factor: 8,
            most: 1,
        }));
        // Two squares of 4 x 4 patches.
        let prepared = sliced.prepare(&pixels(24, 10)).unwrap();
        let tile = &prepared.tiles[0];
        assert_eq!(tile.places.len(), 48);
        let at = |y, x| GridPos { y, x };
        let first = [at(0, 0), at(0, 1), at(1, 0), at(1, 1), at(0, 2)];
        assert_eq!(tile.places[..5], first);
        assert_eq!(tile.places[8..10], [at(2, 0), at(2, 1)]);
        assert_eq!(tile.places[16], at(0, 4));
        assert_eq!(tile.positions[47], 47);
    }

    #[test]
    fn a_row_of_its_own_is_in_the_corner() {
        let tiled = preparation(Shape::Tiled {
            tiling: Tiling::Canvas(4),
            side: 4,
            class_row: ClassRow::Corner,
        });
        let prepared = tiled.prepare(&pixels(4, 4)).unwrap();
        let tile = &prepared.tiles[0];
        assert_eq!(tile.positions, [0, 1, 2, 3, 4]);
        let at = |y, x| GridPos { y, x };
        assert_eq!(tile.places[..3], [at(0, 0), at(1, 1), at(1, 2)]);
        assert!(tile.patches[..12].iter().all(|&value| value == 0.0));
    }

    #[test]
    fn bfloat16_has_eight_bits() {
        let rounded = |value| Precision::Bf16.rounded(value);
        assert_eq!(rounded(255.0), 255.0);
        assert_eq!(rounded(257.0), 256.0); // of two as near, the even one
        assert_eq!(rounded(259.0), 260.0);
        assert_eq!(rounded(-257.5), -258.0);
        assert_eq!(Precision::Single.rounded(257.0), 257.0);
    }

    #[test]
    fn the_middle_is_cut_out() {
        let middle = preparation(Shape::Middle(4));
        let prepared = middle.prepare(&pixels(8, 4)).unwrap();
        let tile = &prepared.tiles[0];
        assert_eq!(tile.places.len(), 5);
        assert!(tile.patches[..12].iter().all(|&value| value == 0.0));
        assert_eq!(tile.patches[12].round(), 2.0);
    }
}
