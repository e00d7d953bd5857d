//! The sizes that pictures are brought to. Plain arithmetic, as the models' own processors do it.

use model_core::picture::PictureError;

/// Width and height in pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Size {
    pub(crate) width: u32,
    pub(crate) height: u32,
}

/// The longest side of a picture, in shorter ones, that Qwen's processors take.
const MAX_RATIO: u32 = 200;

impl Size {
    /// Refuses a size that is longer in one direction than Qwen's processors take.
    ///
    /// # Errors
    /// [`PictureError::TooNarrow`].
    pub(crate) fn check_ratio(self) -> Result<(), PictureError> {
        let Self { width, height } = self;
        if width.max(height) <= width.min(height).saturating_mul(MAX_RATIO) {
            return Ok(());
        }
        let limit = MAX_RATIO;
        Err(PictureError::TooNarrow {
            width,
            height,
            limit,
        })
    }
}

/// Sizes whose sides are multiples of a factor, and whose pixels are within bounds (Qwen2-VL: Wang
/// et al., arXiv 2409.12191).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SmartSize {
    pub(crate) factor: u32,
    /// The fewest and the most pixels.
    pub(crate) pixels: [u64; 2],
    pub(crate) small: SmallSides,
}

/// The treatment of sides that are shorter than the factor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SmallSides {
    /// None: the fewest pixels make them larger.
    AsTheyAre,
    /// Each becomes as long as the factor (LFM2-VL).
    WholeFactor,
    /// The picture is taken for a larger one of the same shape, whose sides are long enough
    /// (GLM-4.1V).
    Enlarged,
}

impl SmartSize {
    /// The size nearest to a picture's, before its pixels are looked at.
    fn nearest(self, Size { width, height }: Size) -> [f64; 2] {
        let factor = f64::from(self.factor.max(1));
        let least = match self.small {
            SmallSides::WholeFactor => factor,
            SmallSides::AsTheyAre | SmallSides::Enlarged => 0.0,
        };
        let nearest =
            |side: u32| ((f64::from(side) / factor).round_ties_even() * factor).max(least);
        [nearest(width), nearest(height)]
    }

    /// The size that a picture is taken for.
    fn enlarged(self, size: Size) -> Size {
        let shorter = size.width.min(size.height).max(1);
        if self.small != SmallSides::Enlarged || shorter >= self.factor {
            return size;
        }
        let scale = f64::from(self.factor) / f64::from(shorter);
        let side = |side: u32| (f64::from(side) * scale) as u32;
        Size {
            width: side(size.width),
            height: side(size.height),
        }
    }

    /// True if a picture has more than so many times the most pixels.
    pub(crate) fn is_exceeded(self, size: Size, tolerance: f32) -> bool {
        let [width, height] = self.nearest(size);
        let [_, most] = self.pixels;
        width * height > most as f64 * f64::from(tolerance)
    }

    /// The size nearest to a picture's.
    ///
    /// # Errors
    /// [`PictureError::TooNarrow`].
    pub(crate) fn of(self, size: Size) -> Result<Size, PictureError> {
        let size = self.enlarged(size);
        let Size { width, height } = size;
        let [least, most] = self.pixels;
        size.check_ratio()?;
        let (w, h, f) = (
            f64::from(width),
            f64::from(height),
            f64::from(self.factor.max(1)),
        );
        let [nearest_width, nearest_height] = self.nearest(size);
        let n_pixels = nearest_width * nearest_height;
        let (width, height) = if n_pixels > most as f64 {
            let beta = (w * h / most as f64).sqrt();
            let fitted = |side: f64| ((side / beta / f).floor() * f).max(f);
            (fitted(w), fitted(h))
        } else if n_pixels < least as f64 {
            let beta = (least as f64 / (w * h)).sqrt();
            let fitted = |side: f64| (side * beta / f).ceil() * f;
            (fitted(w), fitted(h))
        } else {
            (nearest_width, nearest_height)
        };
        Ok(Size {
            width: width as u32,
            height: height as u32,
        })
    }
}

/// The size of a picture whose longer side is at most `longest`, made larger to multiples of
/// `factor` (Pixtral: Agrawal et al., arXiv 2410.07073).
pub(crate) fn fitted(Size { width, height }: Size, factor: u32, longest: u32) -> Size {
    let ratio = f64::from(width.max(height)) / f64::from(longest.max(1));
    let side = |side: u32| {
        let shrunk = if ratio > 1.0 {
            (f64::from(side) / ratio).floor() as u32
        } else {
            side
        };
        shrunk.max(1).next_multiple_of(factor.max(1))
    };
    Size {
        width: side(width),
        height: side(height),
    }
}

/// The largest size of whole squares with at most so many pixels that nearly has a picture's shape;
/// one square high or wide where that is too narrow for more (Gemma 4).
pub(crate) fn filled(Size { width, height }: Size, square: u32, most: u64) -> Size {
    let (w, h) = (f64::from(width.max(1)), f64::from(height.max(1)));
    let side = f64::from(square.max(1));
    let factor = (most as f64 / (w * h)).sqrt();
    let squares = |length: f64| (factor * length / side).floor();
    // Squares of a row where there is one row.
    let longest = (most as f64 / (side * side)).floor();
    let (across, down) = match (squares(w), squares(h)) {
        (_, down) if down < 1.0 => ((w / h).floor().min(longest), 1.0),
        (across, _) if across < 1.0 => (1.0, (h / w).floor().min(longest)),
        both => both,
    };
    Size {
        width: (across.max(1.0) * side) as u32,
        height: (down.max(1.0) * side) as u32,
    }
}

/// The size of a picture whose shorter side gets this length.
pub(crate) fn shorter_side(Size { width, height }: Size, side: u32) -> Size {
    let (short, long) = (width.min(height), width.max(height));
    let other = u64::from(side) * u64::from(long) / u64::from(short.max(1));
    let other = u32::try_from(other).unwrap_or(u32::MAX);
    if width <= height {
        Size {
            width: side,
            height: other,
        }
    } else {
        Size {
            width: other,
            height: side,
        }
    }
}

/// The columns and rows of squares, from `least` to `most` together, whose shape is nearest to a
/// picture's. Of two that are as near, that with more squares, unless they have more than twice the
/// picture's pixels (InternVL: Chen et al., arXiv 2404.16821).
pub(crate) fn nearest_grid(size: Size, square: u32, [least, most]: [u32; 2]) -> Size {
    let (width, height) = (f64::from(size.width), f64::from(size.height));
    let sides = 1..=most.max(1);
    let grids = sides
        .clone()
        .flat_map(|width| sides.clone().map(move |height| Size { width, height }));
    let n_squares = |grid: &Size| u64::from(grid.width) * u64::from(grid.height);
    let allowed = u64::from(least)..=u64::from(most.max(1));
    let mut grids: Vec<Size> = grids
        .filter(|grid| allowed.contains(&n_squares(grid)))
        .collect();
    // Of as many squares, the narrow ones first.
    grids.sort_by_key(n_squares);
    let mut best = (
        f64::INFINITY,
        Size {
            width: 1,
            height: 1,
        },
    );
    for grid in grids {
        let off = (width / height - f64::from(grid.width) / f64::from(grid.height)).abs();
        let pixels = f64::from(square).powi(2) * n_squares(&grid) as f64;
        if off < best.0 || (off == best.0 && width * height > 0.5 * pixels) {
            best = (off, grid);
        }
    }
    best.1
}

/// Of these sizes the one that keeps most of a picture's pixels when it fits into it, and wastes
/// fewest of its own (LLaVA 1.6).
pub(crate) fn best_of(Size { width, height }: Size, sizes: &[Size]) -> Option<Size> {
    let n_pixels = u64::from(width) * u64::from(height);
    let key = |&size: &Size| {
        let scale = (f64::from(size.width) / f64::from(width.max(1)))
            .min(f64::from(size.height) / f64::from(height.max(1)));
        let shrunk = |side: u32| (f64::from(side) * scale) as u64;
        let kept = n_pixels.min(shrunk(width) * shrunk(height));
        (
            kept,
            std::cmp::Reverse(u64::from(size.width) * u64::from(size.height)),
        )
    };
    // Of equal ones the first.
    sizes.iter().copied().rev().max_by_key(key)
}

/// The size of a picture that fits into another and touches it (LLaVA 1.6).
pub(crate) fn fit_into(Size { width, height }: Size, into: Size) -> Size {
    let across = f64::from(into.width) / f64::from(width.max(1));
    let down = f64::from(into.height) / f64::from(height.max(1));
    let side =
        |side: u32, scale: f64, most: u32| ((f64::from(side) * scale).ceil() as u32).min(most);
    if across < down {
        Size {
            width: into.width,
            height: side(height, across, into.height).max(1),
        }
    } else {
        Size {
            width: side(width, down, into.width).max(1),
            height: into.height,
        }
    }
}

/// Of `places` rows and columns that a picture's shape lies in the middle of, the number of rows
/// above and below it, or of columns at its sides (LLaVA 1.6).
pub(crate) fn margins(Size { width, height }: Size, places: Size) -> Size {
    let (w, h) = (f64::from(width.max(1)), f64::from(height.max(1)));
    let (columns, rows) = (f64::from(places.width), f64::from(places.height));
    let whole = |value: f64| ((value * 1e7).round_ties_even() / 1e7) as u32;
    if w / h > columns / rows {
        let used = whole(h * (columns / w));
        Size {
            width: 0,
            height: places.height.saturating_sub(used) / 2,
        }
    } else {
        let used = whole(w * (rows / h));
        Size {
            width: places.width.saturating_sub(used) / 2,
            height: 0,
        }
    }
}

/// The canvases of at most so many squares: those of one shape follow each other, the larger
/// first, and shapes come in the order in which the largest of them are found.
fn canvases(square: u32, most: u32) -> Vec<Size> {
    let mut shapes: Vec<([u32; 2], Vec<Size>)> = Vec::new();
    for n in (1..=most).rev() {
        for rows in (1..=n).filter(|&rows| n.is_multiple_of(rows)) {
            let columns = n / rows;
            let canvas = Size {
                width: columns * square,
                height: rows * square,
            };
            let is_alike = |shape: &[u32; 2]| shape[0] * columns == rows * shape[1];
            match shapes.iter_mut().find(|(shape, _)| is_alike(shape)) {
                Some((_, alike)) => alike.push(canvas),
                None => shapes.push(([rows, columns], vec![canvas])),
            }
        }
    }
    shapes.into_iter().flat_map(|(_, alike)| alike).collect()
}

/// The canvas of at most so many squares on which a picture grows least, or where it grows on none,
/// the one on which it shrinks least. Of equal ones the smallest (Llama 4).
pub(crate) fn best_canvas(size: Size, square: u32, most: u32) -> Size {
    // In 32 bits, as the processor computes it: equal scales decide.
    let scale = |canvas: &Size| {
        let across = canvas.width as f32 / size.width as f32;
        let down = canvas.height as f32 / size.height as f32;
        across.min(down)
    };
    let all = canvases(square, most);
    let scales = || all.iter().map(scale);
    let least_growth = scales().filter(|&scale| scale >= 1.0).reduce(f32::min);
    let chosen = least_growth.or_else(|| scales().reduce(f32::max));
    let chosen = all.iter().filter(|canvas| Some(scale(canvas)) == chosen);
    let best = chosen.min_by_key(|canvas| u64::from(canvas.width) * u64::from(canvas.height));
    best.copied().unwrap_or(Size {
        width: square,
        height: square,
    })
}

/// The size of a picture on its canvas: it keeps its shape, and grows to one square at most.
pub(crate) fn on_canvas(Size { width, height }: Size, canvas: Size, square: u32) -> Size {
    // What the canvas bounds, the processor has in 32 bits.
    let bound = |side: u32, canvas: u32| {
        let most = side.max(square);
        if canvas < most {
            let scale = canvas as f32 / side as f32;
            (canvas, f64::from(scale), Bits::Of32)
        } else {
            (most, f64::from(most) / f64::from(side), Bits::Of64)
        }
    };
    let (target_width, across, bits_across) = bound(width, canvas.width);
    let (target_height, down, bits_down) = bound(height, canvas.height);
    let is_wide = match (bits_across, bits_down) {
        (Bits::Of64, Bits::Of64) => across < down,
        _ => (across as f32) < down as f32,
    };
    let scaled = |side: u32, scale: f64, bits: Bits| match bits {
        Bits::Of32 => (side as f32 * scale as f32).floor() as u32,
        Bits::Of64 => (f64::from(side) * scale).floor() as u32,
    };
    if is_wide {
        Size {
            width: target_width,
            height: scaled(height, across, bits_across).clamp(1, target_height),
        }
    } else {
        Size {
            width: scaled(width, down, bits_down).clamp(1, target_width),
            height: target_height,
        }
    }
}

/// The precision of a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bits {
    Of32,
    Of64,
}

/// The size of a picture whose longer side gets this length, with an even shorter one (Idefics 3:
/// Laurençon et al., arXiv 2408.12637).
pub(crate) fn longer_side(Size { width, height }: Size, side: u32) -> Size {
    let even = |length: f64| (length as u32).next_multiple_of(2).max(1);
    let ratio = f64::from(width) / f64::from(height.max(1));
    if width >= height {
        Size {
            width: side,
            height: even(f64::from(side) / ratio),
        }
    } else {
        Size {
            width: even(f64::from(side) * ratio),
            height: side,
        }
    }
}

/// A size whose sides are made larger to multiples of `square`: the longer one, and the shorter one
/// that goes with it.
pub(crate) fn whole_squares(Size { width, height }: Size, square: u32) -> Size {
    let whole = |length: u32| length.max(1).next_multiple_of(square.max(1));
    let ratio = f64::from(width) / f64::from(height.max(1));
    if width >= height {
        let width = whole(width);
        let height = whole((f64::from(width) / ratio) as u32);
        Size { width, height }
    } else {
        let height = whole(height);
        let width = whole((f64::from(height) * ratio) as u32);
        Size { width, height }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    fn size(width: u32, height: u32) -> Size {
        Size { width, height }
    }

    #[test]
    fn sides_are_multiples_within_bounds() {
        let smart = SmartSize {
            factor: 28,
            pixels: [56 * 56, 28 * 28 * 1280],
            small: SmallSides::AsTheyAre,
        };
        assert!(smart.is_exceeded(size(1500, 1400), 2.0));
        assert!(!smart.is_exceeded(size(1400, 1400), 2.0));
        for (given, wanted) in [
            (size(640, 480), size(644, 476)),
            (size(28, 28), size(56, 56)),
            (size(4000, 3000), size(1148, 840)),
            (size(42, 42), size(56, 56)),
            (size(70, 70), size(56, 56)), // 2.5 is rounded to the even 2
        ] {
            assert_eq!(smart.of(given).unwrap(), wanted, "{given:?}");
        }
        let error = smart.of(size(100_000, 1)).unwrap_err();
        assert!(error.to_string().contains("100000 x 1"), "{error}");
    }

    #[test]
    fn small_sides_grow() {
        let smart = |small| SmartSize {
            factor: 8,
            pixels: [1, 1 << 20],
            small,
        };
        let enlarged = smart(SmallSides::Enlarged).of(size(20, 4)).unwrap();
        assert_eq!(enlarged, size(40, 8));
        let whole = smart(SmallSides::WholeFactor).of(size(20, 2)).unwrap();
        assert_eq!(whole, size(16, 8)); // 2.5 is rounded to the even 2
    }

    #[test]
    fn the_longer_side_is_bounded() {
        for (given, wanted) in [
            (size(100, 50), size(112, 64)),
            (size(32, 32), size(32, 32)),
            (size(2000, 1010), size(1024, 528)), // 1024 x 517.1 pixels
            (size(3000, 1), size(1024, 16)),
        ] {
            assert_eq!(fitted(given, 16, 1024), wanted, "{given:?}");
        }
    }

    #[test]
    fn squares_are_as_near_as_they_can_be() {
        for (given, bounds, wanted) in [
            (size(120, 90), [1, 4], size(2, 2)),
            (size(20, 12), [1, 4], size(2, 1)),
            (size(10, 10), [1, 4], size(1, 1)), // 100 pixels are no half of four squares
            (size(800, 600), [1, 12], size(4, 3)),
            (size(100, 900), [1, 6], size(1, 6)),
            (size(300, 300), [2, 3], size(1, 2)),
        ] {
            assert_eq!(nearest_grid(given, 16, bounds), wanted, "{given:?}");
        }
    }

    #[test]
    fn pictures_fit_into_the_best_of_sizes() {
        let sizes = [size(32, 16), size(16, 32), size(32, 32)];
        for (given, best, fitted, at_sides) in [
            (size(120, 90), sizes[2], size(32, 24), size(0, 1)),
            (size(20, 12), sizes[0], size(27, 16), size(1, 0)),
            (size(16, 16), sizes[0], size(16, 16), size(2, 0)),
        ] {
            assert_eq!(best_of(given, &sizes), Some(best), "{given:?}");
            assert_eq!(fit_into(given, best), fitted, "{given:?}");
            let places = size(best.width / 4, best.height / 4);
            assert_eq!(margins(given, places), at_sides, "{given:?}");
        }
    }

    #[test]
    fn the_longer_side_decides() {
        for (given, wanted) in [
            (size(120, 90), size(48, 36)),
            (size(20, 12), size(48, 28)),
            (size(12, 19), size(30, 48)),
            (size(1000, 1), size(48, 1)),
        ] {
            assert_eq!(longer_side(given, 48), wanted, "{given:?}");
        }
        assert_eq!(whole_squares(size(48, 28), 16), size(48, 32));
        assert_eq!(whole_squares(size(36, 50), 16), size(48, 64));
    }

    #[test]
    fn pictures_lie_on_canvases() {
        for (given, square, most, canvas, there) in [
            (size(120, 90), 16, 4, size(32, 32), size(32, 24)),
            (size(20, 12), 16, 4, size(32, 16), size(20, 12)),
            (size(20, 12), 336, 16, size(336, 336), size(336, 201)),
            (size(120, 90), 16, 16, size(64, 48), size(64, 48)),
            (size(100, 50), 16, 16, size(80, 48), size(80, 40)),
            (size(900, 1), 336, 16, size(1008, 336), size(900, 1)),
            (size(700, 900), 336, 16, size(1008, 1008), size(700, 900)),
        ] {
            assert_eq!(best_canvas(given, square, most), canvas, "{given:?}");
            assert_eq!(on_canvas(given, canvas, square), there, "{given:?}");
        }
    }

    #[test]
    fn pictures_fill_what_pixels_allow() {
        for (given, square, n_squares, wanted) in [
            (size(120, 90), 12, 12, size(48, 36)),
            (size(20, 12), 12, 12, size(48, 24)),
            (size(1024, 768), 48, 280, size(912, 672)),
            (size(70, 70), 48, 280, size(768, 768)),
            (size(5000, 20), 48, 280, size(12_672, 48)),
            (size(20, 5000), 48, 280, size(48, 12_672)),
            (size(100_000, 1), 48, 280, size(13_440, 48)),
        ] {
            let most = n_squares * u64::from(square) * u64::from(square);
            assert_eq!(filled(given, square, most), wanted, "{given:?}");
        }
    }

    #[test]
    fn the_shorter_side_decides() {
        assert_eq!(shorter_side(size(640, 480), 336), size(448, 336));
        assert_eq!(shorter_side(size(480, 641), 336), size(336, 448));
    }
}
