//! [`Pixels`]: from the bytes of a file to red, green and blue.
//!
//! Invariant: sizes are known, and refused where they are too large, before anything of that size
//! is allocated; turned pictures are turned back. Knows no model.

use std::io::Cursor;

use fast_image_resize::images::{Image, ImageRef};
use fast_image_resize::{FilterType, PixelType, ResizeAlg, ResizeOptions, Resizer};
use image::metadata::Orientation;
use image::{DynamicImage, ImageDecoder, ImageReader, Limits};
use model_core::media::MediaKind;
use model_core::picture::PictureError;

use crate::size::Size;

/// The most bytes of a file that are read.
pub const MAX_BYTES: usize = 32 << 20;

/// The most pixels of a picture that are decoded.
pub const MAX_PIXELS: u64 = 1 << 26;

/// The most bytes that a decoder may take for itself.
const MAX_ALLOCATED: u64 = 512 << 20;

/// A picture in red, green and blue, 8 bits each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pixels {
    pub(crate) width: u32,
    pub(crate) height: u32,
    /// Row by row.
    pub(crate) values: Vec<u8>,
}

/// The filter that makes a picture larger or smaller, with what lies around each pixel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Filter {
    /// Triangles.
    Bilinear,
    /// Cubic splines.
    #[default]
    Bicubic,
    /// Windowed sinc.
    Lanczos,
}

impl Pixels {
    /// Width and height.
    pub(crate) fn size(&self) -> Size {
        Size {
            width: self.width,
            height: self.height,
        }
    }

    /// A picture of these values, row by row.
    ///
    /// # Errors
    /// [`PictureError::TooLarge`]; [`PictureError::Unreadable`] where there are none, or more or
    /// fewer than `3 * width * height`.
    pub(crate) fn new(width: u32, height: u32, values: Vec<u8>) -> Result<Self, PictureError> {
        let n_pixels = u64::from(width) * u64::from(height);
        if n_pixels > MAX_PIXELS {
            return Err(too_large(n_pixels, "pixels", MAX_PIXELS));
        }
        if n_pixels == 0 || values.len() as u64 != 3 * n_pixels {
            let n = values.len();
            return Err(unreadable(format!(
                "{n} values for {height} x {width} pixels of 3"
            )));
        }
        Ok(Self {
            width,
            height,
            values,
        })
    }

    /// Decodes a file: PNG, JPEG, WebP, BMP, or the first frame of a GIF.
    ///
    /// # Errors
    /// [`PictureError::TooLarge`] before it is decoded; [`PictureError::Unreadable`].
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, PictureError> {
        if bytes.len() > MAX_BYTES {
            return Err(too_large(bytes.len() as u64, "bytes", MAX_BYTES as u64));
        }
        if bytes.is_empty() {
            return Err(unreadable("there are no bytes"));
        }
        let reader = ImageReader::new(Cursor::new(bytes)).with_guessed_format();
        let mut reader = reader.map_err(unreadable)?;
        if reader.format().is_none() {
            return Err(unreadable("it is none of PNG, JPEG, WebP, GIF and BMP"));
        }
        let mut limits = Limits::no_limits();
        limits.max_alloc = Some(MAX_ALLOCATED);
        reader.limits(limits);
        let mut decoder = reader.into_decoder().map_err(unreadable)?;
        let (width, height) = decoder.dimensions();
        let n_pixels = u64::from(width) * u64::from(height);
        if n_pixels > MAX_PIXELS {
            return Err(too_large(n_pixels, "pixels", MAX_PIXELS));
        }
        let n_bytes = decoder.total_bytes();
        if n_bytes > MAX_ALLOCATED {
            return Err(too_large(
                n_bytes,
                "bytes when it is decoded",
                MAX_ALLOCATED,
            ));
        }
        if n_pixels == 0 {
            return Err(unreadable("it has no pixels"));
        }
        let orientation = decoder.orientation().unwrap_or(Orientation::NoTransforms);
        let mut picture = DynamicImage::from_decoder(decoder).map_err(unreadable)?;
        picture.apply_orientation(orientation);
        let rgb = picture.into_rgb8();
        let (width, height) = rgb.dimensions();
        Ok(Self {
            width,
            height,
            values: rgb.into_raw(),
        })
    }

    /// The picture in another size. Each pixel is made of all those that lie under it, as in
    /// Pillow.
    ///
    /// # Errors
    /// [`PictureError::Unreadable`] where there is no such size.
    pub(crate) fn resized(
        &self,
        width: u32,
        height: u32,
        filter: Filter,
    ) -> Result<Self, PictureError> {
        if (width, height) == (self.width, self.height) {
            return Ok(self.clone());
        }
        let kind = PixelType::U8x3;
        let source = ImageRef::new(self.width, self.height, &self.values, kind);
        let source = source.map_err(unreadable)?;
        let mut target = Image::new(width, height, kind);
        let filter = match filter {
            Filter::Bilinear => FilterType::Bilinear,
            Filter::Bicubic => FilterType::CatmullRom,
            Filter::Lanczos => FilterType::Lanczos3,
        };
        let options = ResizeOptions::new().resize_alg(ResizeAlg::Convolution(filter));
        let resized = Resizer::new().resize(&source, &mut target, &options);
        resized.map_err(unreadable)?;
        Ok(Self {
            width,
            height,
            values: target.into_vec(),
        })
    }

    /// A part of the picture. What lies outside is black.
    pub(crate) fn cropped(&self, [left, top]: [i64; 2], width: u32, height: u32) -> Self {
        let mut values = vec![0; width as usize * height as usize * 3];
        for (y, row) in (0i64..).zip(values.chunks_exact_mut(width.max(1) as usize * 3)) {
            for (x, pixel) in (0i64..).zip(row.chunks_exact_mut(3)) {
                if let Some(found) = self.at(left + x, top + y) {
                    pixel.copy_from_slice(found);
                }
            }
        }
        Self {
            width,
            height,
            values,
        }
    }

    fn at(&self, x: i64, y: i64) -> Option<&[u8]> {
        let (x, y) = (u32::try_from(x).ok()?, u32::try_from(y).ok()?);
        if x >= self.width || y >= self.height {
            return None;
        }
        let at = (y as usize * self.width as usize + x as usize) * 3;
        self.values.get(at..at + 3)
    }
}

pub(crate) fn unreadable(reason: impl ToString) -> PictureError {
    let reason = reason.to_string();
    let media = MediaKind::Picture;
    PictureError::Unreadable { media, reason }
}

fn too_large(got: u64, unit: &'static str, limit: u64) -> PictureError {
    PictureError::TooLarge {
        media: MediaKind::Picture,
        got,
        unit,
        limit,
    }
}
