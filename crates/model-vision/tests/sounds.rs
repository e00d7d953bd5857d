//! Frames and rows of towers that hear against transformers, and sounds of all kinds.

#![allow(clippy::unwrap_used)] // a test

use std::path::Path;

use kv_backend::{Backend, CancelFlag};
use model_core::architecture::Registry;
use model_core::model_file::ModelFile;
use model_core::picture::PictureEncoder;
use model_tests::sound::{RATE, flac, samples, sound, wav};
use model_tests::vision::{HEARING, SIZES, expand, picture, recipe};
use model_tests::{candle, cpu, distance};
use model_vision::Vision;

/// Largest difference of a value of a row.
const TOLERANCE: f32 = 2e-4;

/// The same where llama.cpp's converter wrote the convolutions, whose values have 16 bits there.
const MMPROJ_TOLERANCE: f32 = 2e-3;

/// Largest difference of a value of a frame.
const FRAME_TOLERANCE: f32 = 1e-4;

/// The size of the tone in `fixtures/audio/tone.mp3`.
const TONE: [u32; 2] = [50, 0];

/// The sizes of the sounds of a reference: the last is as long as the models take.
const SOUNDS: [[u32; 2]; 3] = [SIZES[0], SIZES[1], [199, 80]];

fn open(name: &str, mark: &str) -> Vision {
    open_with(name, mark, None)
}

fn open_with(name: &str, mark: &str, mmproj: Option<&Path>) -> Vision {
    let folder = tempfile::tempdir().unwrap();
    expand(name, mark, folder.path());
    let mut registry = Registry::new();
    model_llama::register(&mut registry);
    let file = ModelFile::open(folder.path(), &registry).unwrap();
    Vision::of(&file, folder.path(), mmproj).unwrap().unwrap()
}

fn rows_agree<B: Backend>(name: &str, vision: &Vision, backend: B, tolerance: f32) {
    let reference = recipe(name).reference();
    let mut encoder = vision.encoder(backend).unwrap();
    for (number, size) in SOUNDS.into_iter().enumerate() {
        let read = vision.reader().read_sound(&sound(size)).unwrap();
        let cancel = CancelFlag::default();
        let rows = encoder.encode(&read.picture, &cancel).unwrap();
        let (shape, wanted) = reference.values(&format!("rows_{number}")).unwrap();
        assert_eq!(read.picture.n_rows(), shape[0], "{name}");
        let off = distance(&rows, &wanted);
        assert!(off < tolerance, "{name}, {number}: off by {off}");
    }
}

#[test]
fn rows_are_the_references() {
    for (name, mark) in HEARING {
        let vision = open(name, mark);
        rows_agree(name, &vision, cpu(), TOLERANCE);
        rows_agree(name, &vision, candle(), TOLERANCE);
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
    for (name, mark) in HEARING {
        let file = Path::new(&files).join(format!("{name}.gguf"));
        let vision = open_with(name, mark, Some(&file));
        rows_agree(name, &vision, cpu(), MMPROJ_TOLERANCE);
    }
}

#[test]
fn frames_are_the_processors() {
    for (name, mark) in HEARING {
        let vision = open(name, mark);
        let reference = recipe(name).reference();
        for (number, size) in SOUNDS.into_iter().enumerate() {
            let read = vision.reader().read_sound(&sound(size)).unwrap();
            let (shape, wanted) = reference.values(&format!("mel_{number}")).unwrap();
            // Before the first frame there is an empty one.
            let frames: Vec<&[f32]> = read.picture.tiles()[0]
                .patches
                .chunks_exact(shape[1])
                .skip(1)
                .collect();
            let n_frames = samples(size).len().div_ceil(160);
            let got = [frames[0], frames[3], frames[n_frames - 1]].concat();
            let off = distance(&got, &wanted);
            assert!(off < FRAME_TOLERANCE, "{name}, {number}: off by {off}");
        }
    }
}

fn hearing() -> Vision {
    let (name, mark) = HEARING[0];
    open(name, mark)
}

fn error_of(vision: &Vision, bytes: &[u8]) -> String {
    vision.reader().read_sound(bytes).unwrap_err().to_string()
}

/// The frames of a sound, one after the other.
fn frames(vision: &Vision, bytes: &[u8]) -> Vec<f32> {
    let read = vision.reader().read_sound(bytes).unwrap();
    read.picture.tiles()[0].patches.clone()
}

/// The sound of a size in other forms of WAV: format, channels, bits, and bytes of each sample.
fn wav_of(size: [u32; 2], form: [u16; 3], bytes: impl Fn(i16) -> Vec<u8>) -> Vec<u8> {
    let data: Vec<u8> = samples(size).into_iter().flat_map(bytes).collect();
    wav(RATE, form, &data)
}

#[test]
fn all_kinds_of_samples_are_read() {
    let vision = hearing();
    let size = SIZES[0];
    let wanted = vision.reader().read_sound(&sound(size)).unwrap();
    let wide = |sample: i16| i32::from(sample) << 16;
    for (form, file) in [
        (
            "stereo",
            wav_of(size, [1, 2, 16], |s| [s.to_le_bytes(); 2].concat()),
        ),
        (
            "24 bits",
            wav_of(size, [1, 1, 24], |s| wide(s).to_le_bytes()[1..].to_vec()),
        ),
        (
            "32 bits",
            wav_of(size, [1, 1, 32], |s| wide(s).to_le_bytes().to_vec()),
        ),
        (
            "floats",
            wav_of(size, [3, 1, 32], |s| {
                (f32::from(s) / 32_768.0).to_le_bytes().to_vec()
            }),
        ),
        ("FLAC", flac(size)),
    ] {
        let read = vision.reader().read_sound(&file).unwrap();
        assert_eq!(read.picture.name(), wanted.picture.name(), "{form}");
    }
    let floats: Vec<f32> = samples(size)
        .iter()
        .map(|&s| f32::from(s) / 32_768.0)
        .collect();
    let read = vision.reader().read_samples(RATE, &floats).unwrap();
    assert_eq!(read.picture.name(), wanted.picture.name());
    // Eight bits are coarser.
    let eight = wav_of(size, [1, 1, 8], |s| vec![((s >> 8) + 128) as u8]);
    let (wanted, got) = (frames(&vision, &sound(size)), frames(&vision, &eight));
    let off = mean_difference(&got, &wanted);
    assert!(
        got.len() == wanted.len() && off < 0.1,
        "8 bits: off by {off}"
    );
}

fn mean_difference(a: &[f32], b: &[f32]) -> f32 {
    let off: f32 = a.iter().zip(b).map(|(a, b)| (a - b).abs()).sum();
    off / a.len().min(b.len()) as f32
}

/// An encoder puts some silence before a sound, and drops what is not heard.
#[test]
fn mp3_files_are_nearly_what_they_were() {
    const N_BINS: usize = 20;
    let vision = hearing();
    let tone = std::fs::read(model_tests::fixture("audio/tone.mp3")).unwrap();
    let wanted = frames(&vision, &sound(TONE));
    let got = frames(&vision, &tone);
    // Without the empty frame, and what looks behind the end.
    let wanted = &wanted[N_BINS..wanted.len() - 3 * N_BINS];
    let shifted =
        (0..12).map(|n| mean_difference(&got[(n + 1) * N_BINS..][..wanted.len()], wanted));
    let off = shifted.fold(f32::MAX, f32::min);
    assert!(off < 0.15, "off by {off}");
}

#[test]
fn other_rates_are_the_same_sound() {
    let vision = hearing();
    let tone = |rate: u32| {
        let step = 2.0 * std::f64::consts::PI * 700.0 / f64::from(rate);
        let sample = |at: u32| ((f64::from(at) * step).sin() * 12_000.0) as i16;
        let data: Vec<u8> = (0..rate / 2)
            .flat_map(|at| sample(at).to_le_bytes())
            .collect();
        frames(&vision, &wav(rate, [1, 1, 16], &data))
    };
    let wanted = tone(RATE);
    for rate in [8000, 22_050, 44_100, 48_000] {
        let got = tone(rate);
        assert_eq!(got.len(), wanted.len());
        // The bins of the tone itself: what is nearly silent is rounded otherwise.
        let off = got.iter().zip(&wanted).filter(|(_, b)| **b > 1.0);
        let off = off.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(off < 0.01, "{rate}: off by {off}");
    }
}

#[test]
fn what_is_no_sound_is_said() {
    let vision = hearing();
    let whole = sound(SIZES[0]);
    let mut ten_hours = whole.clone();
    ten_hours[40..44].copy_from_slice(&(36_000u32 * RATE * 2).to_le_bytes());
    let mut open_end = whole.clone();
    open_end[40..44].copy_from_slice(&u32::MAX.to_le_bytes());
    assert_eq!(frames(&vision, &open_end), frames(&vision, &whole));
    let mut no_rate = whole.clone();
    no_rate[24..28].copy_from_slice(&0u32.to_le_bytes());
    let mut packed = whole.clone();
    packed[20..22].copy_from_slice(&2u16.to_le_bytes());
    let floats = |value: f32| wav(RATE, [3, 1, 32], &value.to_le_bytes().repeat(2000));
    for (bytes, why) in [
        (Vec::new(), "there are no bytes"),
        (b"not a sound at all".to_vec(), "none of WAV, MP3 and FLAC"),
        (picture([20, 12]), "none of WAV, MP3 and FLAC"),
        (b"RIFF\0\0\0\0WAVE".to_vec(), "the chunk 'data' is missing"),
        (whole[..20].to_vec(), "'fmt ' has 0 bytes: 16 are needed"),
        (b"fLaC".to_vec(), "cannot be read"),
        (b"ID3\x04".to_vec(), "cannot be read"),
        (
            whole[..5000].to_vec(),
            "it is cut short: 2478 of 9690 samples are there",
        ),
        (
            flac(SIZES[0])[..12_000].to_vec(),
            "of 9690 samples are there",
        ),
        (
            ten_hours,
            "the sound has 36000 seconds: at most 1 are taken",
        ),
        (
            sound([200, 1]),
            "the sound has 2 seconds: at most 1 are taken",
        ),
        (
            sound([4, 0]),
            "the sound has 320 samples at 16000 Hz: at least 321 are needed",
        ),
        (no_rate, "it has 0 samples of a second"),
        (packed, "its samples are of kind 2 with 16 bits"),
        (wav(RATE, [1, 65, 16], &[0; 1300]), "it has 65 channels"),
        (wav(RATE, [1, 1, 12], &[0; 1300]), "of kind 1 with 12 bits"),
        (floats(f32::NAN), "sample 0 is NaN"),
        (floats(f32::INFINITY), "sample 0 is inf"),
        (
            vec![0; (32 << 20) + 1],
            "33554433 bytes: at most 33554432 are taken",
        ),
    ] {
        let error = error_of(&vision, &bytes);
        assert!(error.contains(why), "{why}: {error}");
    }
    assert!(vision.reader().read_sound(&sound([200, 0])).is_ok());
    assert!(vision.reader().read_sound(&sound([4, 1])).is_ok());
}

/// Prefixes and changes: an error or a sound, and no panic.
#[test]
fn mutants_are_errors_or_sounds() {
    let vision = hearing();
    let mut state = 7u64;
    let mut below = |n: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
        (state >> 33) as usize % n
    };
    let tone = std::fs::read(model_tests::fixture("audio/tone.mp3")).unwrap();
    let floats = wav(8000, [3, 2, 32], &0.25f32.to_le_bytes().repeat(600));
    for whole in [sound([8, 0]), floats, flac([8, 0]), tone] {
        for n in (0..whole.len()).step_by(whole.len() / 40 + 1) {
            let _error_or_sound = vision.reader().read_sound(&whole[..n]);
        }
        for _ in 0..125 {
            let mut changed = whole.clone();
            for _ in 0..1 + below(4) {
                // Every second one in the header.
                let n = if below(2) == 0 { 64 } else { changed.len() };
                let at = below(n);
                changed[at] = below(256) as u8;
            }
            let _error_or_sound = vision.reader().read_sound(&changed);
        }
    }
}
