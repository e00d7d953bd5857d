//! Damaged and malicious GGUF files: always an error, never a panic, and never an allocation out of
//! proportion to the file.
#![allow(clippy::unwrap_used, clippy::panic)] // a test

#[path = "hostile_tokenizers.rs"]
mod hostile_tokenizers;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};

use kv_block::BlockFormat;
use kv_graph::weights::{Weight, WeightSource};
use model_core::error::ModelFileError;
use model_core::gguf::{Array, GgufError, GgufFile, GgufWriter, Value};
use proptest::prelude::*;

/// The system's allocator, which remembers the largest request of each thread.
struct WatchedHeap;

thread_local! {
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

fn note(size: usize) {
    // A thread that is ending has no such variable any more; nothing is measured then.
    let _ = LARGEST.try_with(|largest| largest.set(largest.get().max(size)));
}

// SAFETY: every call is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for WatchedHeap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        // SAFETY: the caller's promises are those that `System` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the memory came from `System`, with this layout.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note(size);
        // SAFETY: the memory came from `System`, with this layout.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static WATCHED: WatchedHeap = WatchedHeap;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/fixtures")
        .join(name)
}

/// Opens the bytes and takes all weights. Panics where an allocation is larger than what the bytes
/// can justify: a string of 8 bytes in the file takes 24 in memory, growing vectors double, and a
/// tensor's entry takes about seven times its description.
fn open(bytes: Vec<u8>) -> Result<GgufFile, ModelFileError> {
    let allowed = 16 * bytes.len() + 4096;
    let shared = bytes.into();
    LARGEST.set(0);
    let file = GgufFile::from_bytes(shared);
    if let Ok(file) = &file {
        for tensor in file.tensors() {
            match file.weight(tensor.name()) {
                Ok(weight) => assert_eq!(Some(weight.bytes().len() as u64), tensor.n_bytes()),
                Err(error) => assert!(tensor.stored().format().is_none(), "{error}"),
            }
        }
    }
    assert!(
        LARGEST.get() <= allowed,
        "allocated {} bytes, {allowed} allowed",
        LARGEST.get()
    );
    file
}

fn format_error(bytes: Vec<u8>) -> GgufError {
    match open(bytes) {
        Err(ModelFileError::Gguf { reason, .. }) => reason,
        other => panic!("not a format error: {other:?}"),
    }
}

fn small_model() -> Vec<u8> {
    let mut writer = GgufWriter::new();
    writer
        .set("general.architecture", "none")
        .set("general.alignment", 32u32);
    writer
        .set("flag", true)
        .set("eps", 1e-5)
        .set("wide", Value::U64(5));
    writer.set(
        "tokens",
        Array::String(vec!["a".into(), "bc".into(), String::new()]),
    );
    writer
        .set("heads", Array::U32(vec![1, 2, 3]))
        .set("mask", Array::Bool(vec![true, false]));
    let plain = [
        ("a", vec![2, 3], BlockFormat::F32),
        ("b", vec![2, 256], BlockFormat::Q4_K),
        ("c", vec![8], BlockFormat::F16),
    ];
    // Formats of low bits: one block each.
    let low_bits = BlockFormat::ALL
        .into_iter()
        .filter(|f| *f > BlockFormat::MXFP4);
    let low_bits = low_bits.map(|f| (f.name(), vec![f.block_len()], f));
    for (name, shape, format) in plain.into_iter().chain(low_bits) {
        let n = shape.iter().product::<usize>() / format.block_len() * format.block_bytes();
        writer
            .add(Weight::new(name, shape, format, vec![1u8; n].into()).unwrap())
            .unwrap();
    }
    writer.to_bytes().unwrap()
}

/// A file put together by hand.
struct RawFile(Vec<u8>);

impl RawFile {
    fn new(n_tensors: u64, n_keys: u64) -> Self {
        Self(b"GGUF\x03\0\0\0".to_vec()).u64(n_tensors).u64(n_keys)
    }

    fn u32(mut self, number: u32) -> Self {
        self.0.extend(number.to_le_bytes());
        self
    }

    fn u64(mut self, number: u64) -> Self {
        self.0.extend(number.to_le_bytes());
        self
    }

    fn text(self, text: &[u8]) -> Self {
        let mut raw = self.u64(text.len() as u64);
        raw.0.extend(text);
        raw
    }

    fn tensor(self, name: &str, dimensions: &[u64], code: u32, offset: u64) -> Self {
        let raw = self.text(name.as_bytes()).u32(dimensions.len() as u32);
        dimensions
            .iter()
            .fold(raw, |raw, &d| raw.u64(d))
            .u32(code)
            .u64(offset)
    }

    fn data(mut self, n: usize) -> Vec<u8> {
        self.0.resize(self.0.len().next_multiple_of(32) + n, 0);
        self.0
    }
}

const F32: u32 = 0;

#[test]
fn a_model_cut_short_anywhere_is_an_error() {
    let bytes = fs::read(data("gguf/granite_llama_cpp.gguf")).unwrap();
    let whole = open(bytes.clone()).unwrap();
    let header = whole
        .tensors()
        .iter()
        .map(|t| t.file_offset() as usize)
        .min()
        .unwrap();
    let in_data = (1..=200).map(|i| header + (bytes.len() - header - 1) * i / 200);
    let mut parts = std::collections::BTreeSet::new();
    for cut in (0..header).chain(in_data) {
        match format_error(bytes[..cut].to_vec()) {
            GgufError::Empty => assert_eq!(cut, 0),
            GgufError::Truncated {
                part,
                at,
                wanted,
                available,
            } => {
                // What begins behind the cut has nothing left at all.
                let expected = (cut as u64).saturating_sub(at);
                assert_eq!(available, expected, "cut at {cut}: {part}");
                assert!(available < wanted, "cut at {cut}: {part}");
                parts.insert(part);
            }
            GgufError::TooMany { count, at_most, .. } => assert!(at_most < count),
            other => panic!("cut at {cut}: {other}"),
        }
    }
    for part in [
        "the version",
        "metadata 'granite.vocab_size'",
        "the data of tensor 'blk.2.ffn_up.weight'",
    ] {
        assert!(parts.contains(part), "no cut fell into {part}");
    }
}

#[test]
fn every_prefix_of_a_small_model_is_an_error() {
    let bytes = small_model();
    let file = open(bytes.clone()).unwrap();
    let end = file
        .tensors()
        .iter()
        .map(|t| (t.file_offset() + t.n_bytes().unwrap()) as usize)
        .max()
        .unwrap();
    for cut in 0..end {
        assert!(open(bytes[..cut].to_vec()).is_err(), "cut at {cut}");
    }
    assert!(
        open(bytes[..end].to_vec()).is_ok(),
        "padding at the end is not needed"
    );
}

#[test]
fn flipped_bits_never_panic() {
    let bytes = small_model();
    let mut n_refused = 0;
    for i in 0..bytes.len() {
        for bit in 0..8 {
            let mut flipped = bytes.clone();
            flipped[i] ^= 1 << bit;
            n_refused += usize::from(open(flipped).is_err());
        }
    }
    assert!(
        n_refused > 1000,
        "only {n_refused} of the flips were noticed"
    );
}

#[test]
fn flipped_bits_in_the_header_of_a_real_model_never_panic() {
    let bytes = fs::read(data("gguf/granite_llama_cpp.gguf")).unwrap();
    let header = open(bytes.clone()).unwrap().tensors()[0].file_offset();
    let mut n_refused = 0;
    for i in 0..header as usize {
        let mut flipped = bytes.clone();
        flipped[i] ^= 1 << (i % 8);
        n_refused += usize::from(open(flipped).is_err());
    }
    assert!(
        n_refused > 1000,
        "only {n_refused} of the flips were noticed"
    );
}

#[test]
fn absurd_counts_are_refused_before_anything_is_allocated() {
    let counts = [3, 1000, 1 << 32, (1 << 61) + 1, u64::MAX];
    for count in counts {
        for raw in [RawFile::new(count, 0), RawFile::new(0, count)] {
            assert!(matches!(
                format_error(raw.data(16)),
                GgufError::TooMany { count: found, at_most: 0..3, .. } if found == count
            ));
        }
        for code in [0u32, 7, 8, 12] {
            let raw = RawFile::new(0, 1).text(b"k").u32(9).u32(code).u64(count);
            let error = format_error(raw.0);
            assert_eq!(
                error.to_string(),
                format!(
                    "truncated or damaged: {count} elements of metadata 'k' claimed, but there can be \
                     at most 0 in the bytes that are left"
                )
            );
        }
        let error = format_error(RawFile::new(0, 1).u64(count).data(0));
        assert!(
            matches!(error, GgufError::TooLong { .. } | GgufError::TooMany { .. })
                || matches!(error, GgufError::Truncated { wanted, .. } if wanted == count),
            "{error}"
        );
    }
}

#[test]
fn lengths_of_strings_are_checked() {
    let value = |length: u64| RawFile::new(0, 1).text(b"k").u32(8).u64(length).data(40);
    assert!(matches!(
        format_error(value(1000)),
        GgufError::Truncated { wanted: 1000, .. }
    ));
    assert!(matches!(
        format_error(value(u64::MAX)),
        GgufError::TooLong { .. }
    ));
    let name = RawFile::new(1, 0).text(&[b'n'; 1025]).data(64);
    assert!(matches!(
        format_error(name),
        GgufError::TooLong {
            length: 1025,
            at_most: 1024,
            ..
        }
    ));
}

#[test]
fn shapes_that_overflow_are_refused() {
    for dimensions in [
        &[u64::MAX, 2][..],
        &[1 << 32, 1 << 32],
        &[1 << 63],
        &[1 << 16, 1 << 16, 1 << 16, 1 << 16],
        &[0],
        &[4, 0, 4],
    ] {
        let error = format_error(RawFile::new(1, 0).tensor("t", dimensions, F32, 0).data(64));
        assert!(
            matches!(error, GgufError::Shape { .. }),
            "{dimensions:?}: {error}"
        );
    }
    // The number of values fits, the number of bytes does not.
    let error = format_error(
        RawFile::new(1, 0)
            .tensor("t", &[(1 << 62) + 1], F32, 0)
            .data(64),
    );
    assert!(matches!(error, GgufError::Shape { .. }), "{error}");
    let error = format_error(RawFile::new(1, 0).tensor("t", &[1; 5], F32, 0).data(64));
    assert_eq!(
        error,
        GgufError::Dimensions {
            name: "t".into(),
            n_dimensions: 5
        }
    );
    let error = format_error(RawFile::new(1, 0).tensor("t", &[48], 8, 0).data(64));
    assert!(matches!(
        error,
        GgufError::PartialBlock {
            columns: 48,
            block_len: 32,
            ..
        }
    ));
}

#[test]
fn tensors_lie_inside_the_file_and_apart() {
    let two = |second: u64, n: usize| {
        RawFile::new(2, 0)
            .tensor("a", &[16], F32, 0)
            .tensor("b", &[16], F32, second)
            .data(n)
    };
    assert!(open(two(64, 128)).is_ok());
    assert_eq!(
        format_error(two(64, 127)).to_string(),
        "truncated in the data of tensor 'b' at byte 160: 64 bytes wanted, 63 available"
    );
    assert_eq!(
        format_error(two(32, 128)),
        GgufError::Overlap {
            first: "a".into(),
            second: "b".into(),
            n_bytes: 32
        }
    );
    assert_eq!(
        format_error(two(0, 128)),
        GgufError::Overlap {
            first: "a".into(),
            second: "b".into(),
            n_bytes: 64
        }
    );
    assert_eq!(
        format_error(two(65, 256)),
        GgufError::Misaligned {
            name: "b".into(),
            offset: 65,
            alignment: 32
        }
    );
    for offset in [1 << 40, u64::MAX - 31, u64::MAX - 127] {
        assert!(matches!(
            format_error(two(offset, 128)),
            GgufError::Truncated { .. }
        ));
    }
}

#[test]
fn names_and_keys_are_unique() {
    let twice = RawFile::new(2, 0)
        .tensor("a", &[8], F32, 0)
        .tensor("a", &[8], F32, 32)
        .data(64);
    assert_eq!(
        format_error(twice),
        GgufError::DuplicateTensor { name: "a".into() }
    );
    let twice = RawFile::new(0, 2)
        .text(b"k")
        .u32(4)
        .u32(1)
        .text(b"k")
        .u32(4)
        .u32(2)
        .data(0);
    assert_eq!(
        format_error(twice),
        GgufError::DuplicateKey { key: "k".into() }
    );
}

#[test]
fn values_are_of_known_types() {
    let array = |code: u32| {
        RawFile::new(0, 1)
            .text(b"k")
            .u32(9)
            .u32(code)
            .u64(1)
            .data(64)
    };
    // An array of one array of 32-bit numbers is left out; ten levels are refused.
    let nested = RawFile::new(0, 1)
        .text(b"k")
        .u32(9)
        .u32(9)
        .u64(1)
        .u32(4)
        .u64(2);
    let file = open(nested.u32(1).u32(2).data(0)).unwrap();
    assert!(file.metadata().is_empty());
    let mut deep = RawFile::new(0, 1).text(b"k").u32(9);
    for _ in 0..10 {
        deep = deep.u32(9).u64(1);
    }
    assert_eq!(
        format_error(deep.u32(4).u64(0).data(64)),
        GgufError::NestedArray {
            key: "k".into(),
            limit: 8
        }
    );
    assert_eq!(
        format_error(array(13)),
        GgufError::UnknownValueType {
            key: "k".into(),
            code: 13
        }
    );
    let value = |code: u32| RawFile::new(0, 1).text(b"k").u32(code).u32(2).data(64);
    assert_eq!(
        format_error(value(13)),
        GgufError::UnknownValueType {
            key: "k".into(),
            code: 13
        }
    );
    assert_eq!(
        format_error(value(7)),
        GgufError::BadBool {
            key: "k".into(),
            found: 2
        }
    );
    for bad in [0u32, 3, 33] {
        let raw = RawFile::new(0, 1)
            .text(b"general.alignment")
            .u32(4)
            .u32(bad)
            .data(64);
        let is_bad = open(
            RawFile::new(1, 1)
                .text(b"general.alignment")
                .u32(4)
                .u32(bad)
                .0,
        )
        .is_err();
        assert!(is_bad);
        assert_eq!(format_error(raw), GgufError::Alignment { found: bad });
    }
}

#[test]
fn what_git_left_in_the_place_of_a_file_is_named() {
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 491400032\n";
    let error = open(pointer.to_vec()).unwrap_err().to_string();
    assert!(
        error.contains("a Git LFS pointer, not the file itself"),
        "{error}"
    );
}

#[test]
fn bad_utf8_is_refused_in_names_and_replaced_in_values() {
    let key = RawFile::new(0, 1).text(b"k\xff").u32(4).u32(1).data(0);
    assert!(matches!(
        format_error(key),
        GgufError::NotUtf8 { valid: 1, .. }
    ));
    let value = RawFile::new(0, 1)
        .text(b"k")
        .u32(8)
        .text(b"caf\xe9")
        .data(0);
    let file = open(value).unwrap();
    assert_eq!(file.metadata().get::<&str>("k"), Ok("caf\u{FFFD}"));
    let list = RawFile::new(0, 1)
        .text(b"k")
        .u32(9)
        .u32(8)
        .u64(2)
        .text(b"a\xff")
        .text(b"b")
        .data(0);
    let file = open(list).unwrap();
    let words: &[String] = file.metadata().get("k").unwrap();
    assert_eq!(words, ["a\u{fffd}", "b"]);
}

#[test]
fn inputs_that_once_failed_are_handled() {
    let mut n_files = 0;
    for entry in fs::read_dir(data("gguf-regressions")).unwrap() {
        let path = entry.unwrap().path();
        // Whatever the outcome, `open` has checked it.
        let outcome = open(fs::read(&path).unwrap());
        let name = path.file_name().unwrap().to_string_lossy();
        assert_eq!(
            outcome.is_ok(),
            name.starts_with("ok-"),
            "{name}: {outcome:?}"
        );
        n_files += 1;
    }
    assert!(n_files > 0);
}

proptest! {
    #[test]
    fn any_bytes_behind_the_magic_are_handled(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = open([b"GGUF\x03\0\0\0", &bytes[..]].concat());
    }

    #[test]
    fn any_damage_is_handled(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        keep in any::<prop::sample::Index>(),
    ) {
        let mut bytes = small_model();
        for (at, byte) in edits {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        bytes.truncate(keep.index(bytes.len()) + 1);
        if let Ok(file) = open(bytes) {
            prop_assert_eq!(file.names().len(), file.tensors().len());
        }
    }
}
