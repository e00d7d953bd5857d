//! Pictures that are cut short, changed, enormous or of other kinds: an error, or a picture.

#![allow(clippy::unwrap_used)] // a test

use std::io::Cursor;

use image::{DynamicImage, ImageFormat, RgbImage};
use model_core::architecture::Registry;
use model_core::model_file::ModelFile;
use model_tests::vision::{expand, picture};
use model_vision::{MAX_BYTES, MAX_PIXELS, Vision};

fn vision() -> Vision {
    let folder = tempfile::tempdir().unwrap();
    expand("qwen2_vl", "<|image_pad|>", folder.path());
    let mut registry = Registry::new();
    model_llama::register(&mut registry);
    let file = ModelFile::open(folder.path(), &registry).unwrap();
    Vision::of(&file, folder.path(), None).unwrap().unwrap()
}

fn encoded(picture: &DynamicImage, format: ImageFormat) -> Vec<u8> {
    let mut file = Cursor::new(Vec::new());
    picture.write_to(&mut file, format).unwrap();
    file.into_inner()
}

fn slopes() -> DynamicImage {
    RgbImage::from_fn(40, 30, |x, y| image::Rgb([(x * 5) as u8, (y * 8) as u8, 7])).into()
}

fn error_of(vision: &Vision, bytes: &[u8]) -> String {
    vision.reader().read(bytes).unwrap_err().to_string()
}

#[test]
fn all_formats_and_depths_are_read() {
    let vision = vision();
    let wanted = vision
        .reader()
        .read(&encoded(&slopes(), ImageFormat::Png))
        .unwrap();
    for format in [ImageFormat::Bmp, ImageFormat::WebP] {
        let read = vision.reader().read(&encoded(&slopes(), format)).unwrap();
        assert_eq!(read.picture.name(), wanted.picture.name(), "{format:?}");
    }
    for deep in [
        DynamicImage::from(slopes().to_rgb16()),
        DynamicImage::from(slopes().to_rgba16()),
        DynamicImage::from(slopes().to_rgba8()),
    ] {
        let read = vision
            .reader()
            .read(&encoded(&deep, ImageFormat::Png))
            .unwrap();
        assert_eq!(read.picture.name(), wanted.picture.name());
    }
    let grey = DynamicImage::from(slopes().to_luma16());
    for (picture, format) in [
        (&grey, ImageFormat::Png),
        (&slopes(), ImageFormat::Jpeg),
        (&slopes(), ImageFormat::Gif),
    ] {
        let read = vision.reader().read(&encoded(picture, format)).unwrap();
        assert_eq!(read.picture.n_rows(), wanted.picture.n_rows());
    }
}

#[test]
fn what_is_too_large_is_refused_before_it_is_decoded() {
    let vision = vision();
    let side = (MAX_PIXELS as u32).isqrt() + 1;
    // A header alone: what would follow is never looked at.
    let mut huge = picture([4, 4]);
    huge[18..22].copy_from_slice(&side.to_le_bytes());
    huge[22..26].copy_from_slice(&side.to_le_bytes());
    let error = error_of(&vision, &huge);
    assert!(error.contains("pixels: at most 67108864"), "{error}");
    let error = error_of(&vision, &vec![0; MAX_BYTES + 1]);
    assert!(
        error.contains("33554433 bytes: at most 33554432"),
        "{error}"
    );
    let narrow = picture([20_000, 1]);
    let error = error_of(&vision, &narrow);
    assert!(
        error.contains("20000 x 1 pixels is more than 200 times"),
        "{error}"
    );
}

#[test]
fn what_is_no_picture_is_said() {
    let vision = vision();
    for (bytes, why) in [
        (&b""[..], "there are no bytes"),
        (
            b"not a picture at all",
            "none of PNG, JPEG, WebP, GIF and BMP",
        ),
        (b"\x89PNG\r\n\x1a\n", "cannot be read"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "none of PNG"),
    ] {
        let error = error_of(&vision, bytes);
        assert!(error.contains(why), "{error}");
    }
}

/// Every prefix and two thousand changes: an error or a picture, and no panic.
#[test]
fn mutants_are_errors_or_pictures() {
    let vision = vision();
    let mut state = 7u64;
    let mut below = |n: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
        (state >> 33) as usize % n
    };
    for format in [
        ImageFormat::Png,
        ImageFormat::Jpeg,
        ImageFormat::Gif,
        ImageFormat::WebP,
        ImageFormat::Bmp,
    ] {
        let whole = encoded(&slopes(), format);
        for n in (0..whole.len()).step_by(whole.len() / 40 + 1) {
            let _error_or_picture = vision.reader().read(&whole[..n]);
        }
        for _ in 0..400 {
            let mut changed = whole.clone();
            for _ in 0..1 + below(4) {
                let at = below(changed.len());
                changed[at] = below(256) as u8;
            }
            let _error_or_picture = vision.reader().read(&changed);
        }
    }
}
