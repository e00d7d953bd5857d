//! Rows of towers against transformers: the same pictures, prepared and computed.

#![allow(clippy::unwrap_used)] // a test

use std::path::Path;

use kv_backend::{Backend, CancelFlag};
use model_core::architecture::Registry;
use model_core::model_file::ModelFile;
use model_core::picture::PictureEncoder;
use model_tests::vision::{MODELS, SIZES, exact_size, expand, picture, recipe};
use model_tests::{candle, cpu, distance};
use model_vision::Vision;

/// Largest difference of a value of a row, where patches are the processor's.
const TOLERANCE: f32 = 2e-4;

/// The same where a picture was resized: antialiasing rounds some values of patches to the next
/// step of 8 bits, in the processor or here.
const RESIZED_TOLERANCE: f32 = 0.04;

/// Largest difference of a value of a patch: one step of 8 bits, in the unit of its deviation.
const PIXEL_TOLERANCE: f32 = 1.5 / 255.0 / 0.26;

pub(crate) fn open(name: &str, mark: &str) -> Vision {
    open_with(name, mark, None)
}

fn open_with(name: &str, mark: &str, mmproj: Option<&Path>) -> Vision {
    let folder = tempfile::tempdir().unwrap();
    expand(name, mark, folder.path());
    let mut registry = Registry::new();
    model_llama::register(&mut registry);
    model_mamba::register(&mut registry);
    let file = ModelFile::open(folder.path(), &registry).unwrap();
    Vision::of(&file, folder.path(), mmproj).unwrap().unwrap()
}

fn rows_agree<B: Backend>(name: &str, vision: &Vision, backend: B) {
    let reference = recipe(name).reference();
    let mut encoder = vision.encoder(backend).unwrap();
    for (number, size) in SIZES.into_iter().enumerate() {
        let read = vision.reader().read(&picture(size)).unwrap();
        let rows = encoder
            .encode(&read.picture, &CancelFlag::default())
            .unwrap();
        let (shape, wanted) = reference.values(&format!("rows_{number}")).unwrap();
        assert_eq!(read.picture.n_rows(), shape[0], "{name}");
        let off = distance(&rows, &wanted);
        // Gemma's second picture is enlarged to the same values, Mistral's are as they are.
        let tolerance = if number == 1 && ["gemma3", "mistral3", "pixtral"].contains(&name) {
            TOLERANCE
        } else {
            RESIZED_TOLERANCE
        };
        assert!(off < tolerance, "{name}, {number}: off by {off}");
    }
    if let Some((size, n_rows)) = exact_size(name) {
        let read = vision.reader().read(&picture(size)).unwrap();
        let cancel = CancelFlag::default();
        let rows = encoder.encode(&read.picture, &cancel).unwrap();
        let (shape, wanted) = reference.values("rows_2").unwrap();
        assert_eq!(read.picture.n_rows(), shape[0], "{name}");
        let n = n_rows * shape[1];
        let off = distance(&rows[..n], &wanted[..n]);
        assert!(off < TOLERANCE, "{name}, as it is: off by {off}");
    }
}

#[test]
fn rows_are_the_references() {
    for (name, mark) in MODELS {
        let vision = open(name, mark);
        rows_agree(name, &vision, cpu());
        rows_agree(name, &vision, candle());
    }
}

/// `CELLAR_MMPROJ` names a folder with `NAME.gguf`, which llama.cpp's converter made of the towers
/// of these models.
#[test]
fn mmproj_files_are_the_directories() {
    let Some(files) = std::env::var_os("CELLAR_MMPROJ") else {
        eprintln!("SKIPPED: no CELLAR_MMPROJ");
        return;
    };
    let mut n_compared = 0;
    for (name, mark) in MODELS {
        let file = Path::new(&files).join(format!("{name}.gguf"));
        if !file.exists() {
            continue;
        }
        let (vision, other) = (open(name, mark), open_with(name, mark, Some(&file)));
        let read = vision.reader().read(&picture(SIZES[0])).unwrap();
        let rows = |vision: &Vision| {
            let mut encoder = vision.encoder(cpu()).unwrap();
            encoder
                .encode(&read.picture, &CancelFlag::default())
                .unwrap()
        };
        let off = distance(&rows(&vision), &rows(&other));
        assert!(off < TOLERANCE, "{name}: off by {off}");
        n_compared += 1;
    }
    assert!(n_compared > 0, "no file for any model");
}

#[test]
fn patches_are_the_processors() {
    for (name, mark) in MODELS {
        let vision = open(name, mark);
        let reference = recipe(name).reference();
        for (number, size) in SIZES.into_iter().enumerate() {
            let read = vision.reader().read(&picture(size)).unwrap();
            let tiles = read.picture.tiles();
            // The processor of LLaVA 1.6 has the whole first.
            let first_tile = if name == "llava_next" {
                tiles.last()
            } else {
                tiles.first()
            };
            let tile = first_tile.unwrap();
            let patches = &tile.patches;
            let n = patches.len() / tile.places.len();
            let (_, wanted) = reference.values(&format!("pixels_{number}")).unwrap();
            // The processor's of Qwen's towers has each colour twice, for films; others are whole
            // pictures, whose first row is that of the first patches.
            let side = (n / 3).isqrt();
            let first = if name.starts_with("qwen") || name.starts_with("glm4v") {
                wanted[..side].to_vec()
            } else {
                wanted[..side.min(wanted.len())].to_vec()
            };
            let before =
                usize::from(["llava", "llava_next", "internvl", "llama4"].contains(&name)) * n;
            let off = distance(&patches[before..before + side], &first);
            assert!(off < PIXEL_TOLERANCE, "{name}, {number}: off by {off}");
        }
    }
}

#[test]
fn names_follow_what_is_seen() {
    let (vision, other) = (
        open("qwen2_vl", "<|image_pad|>"),
        open("qwen2_5_vl", "<|image_pad|>"),
    );
    let name = |vision: &Vision, size| vision.reader().read(&picture(size)).unwrap().picture.name();
    assert_eq!(name(&vision, SIZES[0]), name(&vision, SIZES[0]));
    assert_ne!(name(&vision, SIZES[0]), name(&vision, SIZES[1]));
    assert_ne!(name(&vision, SIZES[0]), name(&other, SIZES[0]));
}
