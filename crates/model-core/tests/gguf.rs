//! GGUF files that are what they should be, and the errors for those that are not.
#![allow(clippy::unwrap_used, clippy::panic)] // a test

use std::fs;
use std::path::{Path, PathBuf};

use kv_block::{BlockFormat, quantize};
use kv_graph::weights::{SharedBytes, Weight, WeightError, WeightSource};
use model_core::error::ModelFileError;
use model_core::file_start::FileStart;
use model_core::gguf::{
    Array, GgufError, GgufFile, GgufWriter, Metadata, TensorType, Value, part_file_name,
};
use proptest::prelude::*;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/fixtures")
        .join(name)
}

fn weight(name: &str, shape: &[usize], format: BlockFormat) -> Weight {
    let n: usize = shape.iter().product();
    let values: Vec<f32> = (0..n)
        .map(|i| (i as f32 * 0.3).sin() + name.len() as f32)
        .collect();
    let bytes = quantize(format, &values).unwrap();
    Weight::new(name, shape.to_vec(), format, bytes.into()).unwrap()
}

fn open(writer: &GgufWriter) -> Result<GgufFile, ModelFileError> {
    GgufFile::from_bytes(writer.to_bytes().unwrap().into())
}

fn format_error(result: Result<GgufFile, ModelFileError>) -> GgufError {
    match result {
        Err(ModelFileError::Gguf { reason, .. }) => reason,
        other => panic!("not a format error: {other:?}"),
    }
}

/// One value of every type.
fn every_type() -> Metadata {
    let mut metadata = Metadata::new();
    metadata.insert("u8", Value::U8(u8::MAX));
    metadata.insert("i8", Value::I8(i8::MIN));
    metadata.insert("u16", Value::U16(u16::MAX));
    metadata.insert("i16", Value::I16(i16::MIN));
    metadata.insert("u32", Value::U32(u32::MAX));
    metadata.insert("i32", Value::I32(i32::MIN));
    metadata.insert("u64", Value::U64(u64::MAX));
    metadata.insert("i64", Value::I64(i64::MIN));
    metadata.insert("f32", Value::F32(-0.1));
    metadata.insert("f64", Value::F64(1e300));
    metadata.insert("true", true);
    metadata.insert("false", false);
    metadata.insert("string", "žluťoučký \0 kůň");
    metadata.insert("empty", "");
    metadata.insert("u8s", Array::U8(vec![1, 2, 3]));
    metadata.insert("i8s", Array::I8(vec![-1, 2]));
    metadata.insert("u16s", Array::U16(vec![1, 65535]));
    metadata.insert("i16s", Array::I16(vec![-1]));
    metadata.insert("u32s", Array::U32(vec![]));
    metadata.insert("i32s", Array::I32(vec![-7, 7]));
    metadata.insert("u64s", Array::U64(vec![u64::MAX]));
    metadata.insert("i64s", Array::I64(vec![i64::MIN]));
    metadata.insert("f32s", Array::F32(vec![0.5, -0.0]));
    metadata.insert("f64s", Array::F64(vec![0.1]));
    metadata.insert("bools", Array::Bool(vec![true, false]));
    metadata.insert(
        "strings",
        Array::String(vec![String::new(), "a b".to_owned()]),
    );
    metadata
}

#[test]
fn what_is_written_reads_back() {
    let mut writer = GgufWriter::with_metadata(every_type());
    let weights = [
        weight("scalar", &[], BlockFormat::F32),
        weight("odd", &[3], BlockFormat::F16),
        weight("matrix", &[5, 64], BlockFormat::Q4_0),
        weight("experts", &[2, 3, 32], BlockFormat::Q8_0),
        weight("four", &[2, 1, 3, 7], BlockFormat::BF16),
    ];
    for weight in &weights {
        writer.add(weight.clone()).unwrap();
    }
    let file = open(&writer).unwrap();
    assert_eq!(file.version(), 3);
    assert_eq!(file.metadata(), &every_type());
    assert_eq!(file.names(), ["scalar", "odd", "matrix", "experts", "four"]);
    for wanted in &weights {
        let got = file.get(wanted.name()).unwrap();
        assert_eq!(
            (got.shape(), got.format()),
            (wanted.shape(), wanted.format())
        );
        assert_eq!(&got.bytes()[..], &wanted.bytes()[..], "{}", wanted.name());
        let info = file.tensor(wanted.name()).unwrap();
        assert_eq!(info.n_bytes(), Some(wanted.bytes().len() as u64));
        assert_eq!(info.file_offset() % 32, 0);
    }
    assert_eq!(
        file.require("absent").unwrap_err(),
        WeightError::Missing {
            name: "absent".into()
        }
    );
}

#[test]
fn a_file_is_mapped_and_weights_outlive_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let mut writer = GgufWriter::new();
    writer
        .set("general.architecture", "none")
        .set("general.alignment", 128u32);
    writer.add(weight("a", &[3, 5], BlockFormat::F32)).unwrap();
    writer.add(weight("b", &[7], BlockFormat::F32)).unwrap();
    fs::write(&path, writer.to_bytes().unwrap()).unwrap();

    let file = GgufFile::open(&path).unwrap();
    assert_eq!(file.tensor("b").unwrap().file_offset() % 128, 0);
    let b = file.get("b").unwrap();
    drop(file);
    assert_eq!(b.to_f32(), weight("b", &[7], BlockFormat::F32).to_f32());
}

#[test]
fn a_model_of_another_program_reads_as_it_was_written() {
    let file = GgufFile::open(data("gguf/granite_llama_cpp.gguf")).unwrap();
    let metadata = file.metadata();
    assert_eq!(metadata.get::<&str>("general.architecture"), Ok("granite"));
    assert_eq!(
        metadata.get::<usize>("granite.attention.head_count_kv"),
        Ok(2)
    );
    assert_eq!(
        metadata.get::<f32>("granite.attention.layer_norm_rms_epsilon"),
        Ok(1e-5)
    );
    assert_eq!(
        metadata.get::<bool>("tokenizer.ggml.add_eos_token"),
        Ok(false)
    );
    let tokens: &[String] = metadata.get("tokenizer.ggml.tokens").unwrap();
    assert_eq!((tokens.len(), tokens[2].as_str()), (512, "</s>"));
    assert_eq!(
        metadata
            .get::<Vec<i32>>("tokenizer.ggml.token_type")
            .unwrap()[..4],
        [2, 3, 3, 6]
    );

    assert_eq!(file.tensors().len(), 39);
    let down = file.get("blk.0.ffn_down.weight").unwrap();
    assert_eq!(
        down.shape(),
        [32, 64],
        "outermost first: 32 outputs of 64 inputs"
    );
    assert_eq!(down.format(), BlockFormat::F32);
    assert!(down.to_f32().iter().all(|v| v.is_finite()));
    let norm = file.get("blk.0.attn_norm.weight").unwrap();
    assert_eq!(norm.shape(), [32]);
}

#[test]
fn version_2_reads_and_others_do_not() {
    let mut writer = GgufWriter::new();
    writer.add(weight("a", &[4], BlockFormat::F32)).unwrap();
    let good = writer.to_bytes().unwrap();
    let with_version = |version: [u8; 4]| {
        let mut bytes = good.clone();
        bytes[4..8].copy_from_slice(&version);
        GgufFile::from_bytes(bytes.into())
    };
    assert_eq!(with_version([2, 0, 0, 0]).unwrap().version(), 2);
    assert_eq!(
        format_error(with_version([1, 0, 0, 0])),
        GgufError::Version { version: 1 }
    );
    assert_eq!(
        format_error(with_version([4, 0, 0, 0])),
        GgufError::Version { version: 4 }
    );
    assert_eq!(
        format_error(with_version([0, 0, 0, 3])),
        GgufError::BigEndian
    );
}

#[test]
fn what_is_not_a_model_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let absent = GgufFile::open(dir.path().join("absent.gguf")).unwrap_err();
    assert!(matches!(&absent, ModelFileError::Io { .. }), "{absent}");
    assert!(absent.to_string().contains("absent.gguf"));
    assert!(matches!(
        GgufFile::open(dir.path()),
        Err(ModelFileError::NotAFile { .. })
    ));

    let path = dir.path().join("x.gguf");
    let with_contents = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        format_error(GgufFile::open(&path))
    };
    assert_eq!(with_contents(b""), GgufError::Empty);
    assert_eq!(
        with_contents(b"<!DOCTYPE html>").to_string(),
        "not a GGUF file: it begins with \"<!DO\", not \"GGUF\""
    );
    assert_eq!(
        with_contents(b"GG").to_string(),
        "truncated in the magic number at byte 0: 4 bytes wanted, 2 available"
    );
    let error = GgufFile::open(&path).unwrap_err().to_string();
    assert!(
        error.starts_with(&format!("'{}': truncated in", path.display())),
        "{error}"
    );
}

#[test]
fn the_writer_refuses_what_could_not_be_read() {
    let mut writer = GgufWriter::new();
    writer.add(weight("a", &[4], BlockFormat::F32)).unwrap();
    assert!(matches!(
        writer.add(weight("a", &[5], BlockFormat::F32)),
        Err(GgufError::DuplicateTensor { name }) if name == "a"
    ));
    assert!(matches!(
        writer.add(weight("b", &[1, 1, 1, 1, 1], BlockFormat::F32)),
        Err(GgufError::Dimensions {
            n_dimensions: 5,
            ..
        })
    ));
    for alignment in [0u32, 24] {
        writer.set("general.alignment", alignment);
        assert!(matches!(
            writer.to_bytes(),
            Err(GgufError::Alignment { .. })
        ));
    }
    writer.set("general.alignment", "32");
    assert!(matches!(writer.to_bytes(), Err(GgufError::Metadata(_))));
}

/// The bytes of a file whose one tensor `a` is of type `code`.
fn with_tensor_type(code: u32) -> Vec<u8> {
    let mut writer = GgufWriter::new();
    writer.set("general.name", "unsupported");
    writer
        .add(weight("a", &[2, 256], BlockFormat::F32))
        .unwrap();
    let mut bytes = writer.to_bytes().unwrap();
    // Two dimensions (256 and 2) and the type number F32 = 0.
    let dimensions: Vec<u8> = [256u64, 2].iter().flat_map(|d| d.to_le_bytes()).collect();
    let at = bytes
        .windows(16)
        .position(|window| window == dimensions)
        .unwrap()
        + 16;
    bytes[at..at + 4].copy_from_slice(&code.to_le_bytes());
    bytes
}

#[test]
fn unsupported_types_can_be_listed_but_not_taken() {
    for (code, name, n_bytes) in [
        (9, "Q8_1", Some(576)),
        (31, "Q4_0_4_4", Some(288)),
        (26, "I32", Some(2048)),
        (4242, "type 4242", None),
    ] {
        let file = GgufFile::from_bytes(with_tensor_type(code).into()).unwrap();
        let info = file.tensor("a").unwrap();
        assert_eq!(info.stored(), TensorType::Unsupported(code));
        assert_eq!(
            (info.stored().to_string().as_str(), info.n_bytes()),
            (name, n_bytes)
        );
        assert_eq!(info.shape(), [2, 256]);
        assert!(file.get("a").is_none());
        assert_eq!(
            file.require("a").unwrap_err().to_string(),
            format!(
                "tensor 'a' is stored as {name} (tensor type number {code}), which cannot be read"
            )
        );
    }
}

/// Writes the parts of a model of four tensors, two a part; `edit` may spoil a part.
fn write_parts(dir: &Path, edit: impl Fn(u16, &mut GgufWriter)) -> PathBuf {
    for number in 0..2u16 {
        let mut writer = GgufWriter::new();
        if number == 0 {
            writer.set("general.architecture", "none");
            writer.set("split.tensors.count", Value::I32(4));
        }
        writer
            .set("split.no", Value::U16(number))
            .set("split.count", Value::U16(2));
        for i in 0..2 {
            let name = format!("t{}", 2 * number + i);
            writer
                .add(weight(
                    &name,
                    &[usize::from(number) + 2, 32],
                    BlockFormat::Q8_0,
                ))
                .unwrap();
        }
        edit(number, &mut writer);
        let path = dir.join(part_file_name("m", u64::from(number) + 1, 2));
        fs::write(path, writer.to_bytes().unwrap()).unwrap();
    }
    dir.join("m-00001-of-00002.gguf")
}

fn split_error(result: Result<GgufFile, ModelFileError>) -> GgufError {
    match result {
        Err(ModelFileError::Gguf { reason, .. }) => reason,
        other => panic!("not a split error: {other:?}"),
    }
}

#[test]
fn all_parts_of_a_split_file_are_one_model() {
    let dir = tempfile::tempdir().unwrap();
    let first = write_parts(dir.path(), |_, _| ());
    let file = GgufFile::open(&first).unwrap();
    assert_eq!(file.n_parts(), 2);
    assert_eq!(file.names(), ["t0", "t1", "t2", "t3"]);
    assert_eq!(
        file.metadata().get::<&str>("general.architecture"),
        Ok("none")
    );
    for (i, rows) in [(0, 2), (1, 2), (2, 3), (3, 3)] {
        let name = format!("t{i}");
        let got = file.get(&name).unwrap();
        assert_eq!(
            got.to_f32(),
            weight(&name, &[rows, 32], BlockFormat::Q8_0).to_f32()
        );
    }
}

#[test]
fn the_starts_of_files_describe_a_model() {
    let dir = tempfile::tempdir().unwrap();
    let file = GgufFile::open(write_parts(dir.path(), |_, _| ())).unwrap();
    let headers = [0, 2].map(|i| file.tensors()[i].file_offset() as usize);
    let start = |part: u64, n_bytes: usize| {
        let bytes = fs::read(dir.path().join(part_file_name("m", part, 2))).unwrap();
        FileStart {
            name: format!("part {part}"),
            file_len: Some(bytes.len() as u64),
            bytes: bytes[..n_bytes].to_vec().into(),
        }
    };
    let [first, second] = headers;
    let starts = GgufFile::from_starts(vec![start(2, second), start(1, first)]).unwrap();
    assert_eq!(starts.names(), file.names());
    for name in file.names() {
        assert_eq!(starts.describe(&name), file.describe(&name));
        let error = starts.require(&name).unwrap_err();
        assert_eq!(error, WeightError::NotRead { name });
    }
    let error = |starts| split_error(GgufFile::from_starts(starts));
    assert_eq!(
        error(vec![start(1, first)]),
        GgufError::PartsMissing {
            n_parts: 2,
            n_given: 1
        }
    );
    assert_eq!(
        error(vec![start(2, second)]),
        GgufError::NotFirstPart {
            part: 2,
            n_parts: 2
        }
    );
    assert_eq!(
        error(vec![start(1, 40), start(2, second)]),
        GgufError::StartTooShort { n_bytes: 40 }
    );
    let twice = error(vec![start(1, first), start(1, first)]);
    assert!(
        matches!(
            twice,
            GgufError::PartMismatch {
                part: 2,
                found_part: 1,
                ..
            }
        ),
        "{twice:?}"
    );
}

#[test]
fn parts_that_do_not_belong_together_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let first = write_parts(dir.path(), |_, _| ());
    let second = dir.path().join(part_file_name("m", 2, 2));
    assert_eq!(
        split_error(GgufFile::open(&second)),
        GgufError::NotFirstPart {
            part: 2,
            n_parts: 2
        }
    );
    let renamed = dir.path().join("renamed.gguf");
    fs::copy(&first, &renamed).unwrap();
    assert_eq!(
        split_error(GgufFile::open(&renamed)),
        GgufError::PartName {
            n_parts: 2,
            suffix: "-00001-of-00002.gguf".into()
        }
    );
    assert_eq!(
        split_error(GgufFile::from_bytes(fs::read(&first).unwrap().into())),
        GgufError::PartInMemory { n_parts: 2 }
    );
    fs::copy(&first, &second).unwrap();
    assert_eq!(
        split_error(GgufFile::open(&first)),
        GgufError::PartMismatch {
            part: 2,
            n_parts: 2,
            found_part: 1,
            found_n_parts: 2
        }
    );
    fs::remove_file(&second).unwrap();
    let missing = GgufFile::open(&first).unwrap_err();
    assert!(
        matches!(&missing, ModelFileError::Io { path, .. } if *path == second),
        "{missing}"
    );

    let first = write_parts(dir.path(), |number, writer| {
        writer.set("split.count", Value::U16(2 + number));
    });
    assert_eq!(
        split_error(GgufFile::open(first)),
        GgufError::PartMismatch {
            part: 2,
            n_parts: 2,
            found_part: 2,
            found_n_parts: 3
        }
    );
    let first = write_parts(dir.path(), |_, writer| {
        writer.set("split.tensors.count", 5u32);
    });
    assert_eq!(
        split_error(GgufFile::open(first)),
        GgufError::TensorCount {
            wanted: 5,
            found: 4
        }
    );
    let first = write_parts(dir.path(), |_, writer| {
        writer.add(weight("both", &[1], BlockFormat::F32)).unwrap();
    });
    assert_eq!(
        format_error(GgufFile::open(first)),
        GgufError::DuplicateTensor {
            name: "both".into()
        }
    );
}

/// Any metadata value.
fn value() -> impl Strategy<Value = Value> {
    prop_oneof![
        any::<u32>().prop_map(Value::U32),
        any::<i64>().prop_map(Value::I64),
        any::<bool>().prop_map(Value::Bool),
        // Not NaN, which equals nothing.
        (-1e30f32..1e30).prop_map(Value::F32),
        ".{0,20}".prop_map(Value::String),
        prop::collection::vec(any::<i16>(), 0..20).prop_map(|v| Value::Array(Array::I16(v))),
        prop::collection::vec(".{0,9}", 0..9).prop_map(|v| Value::Array(Array::String(v))),
    ]
}

proptest! {
    #[test]
    fn any_metadata_and_shapes_survive(
        entries in prop::collection::btree_map(".{1,12}", value(), 0..12),
        shapes in prop::collection::vec(prop::collection::vec(1usize..5, 0..5), 0..6),
        alignment in 0u32..9,
    ) {
        let mut writer = GgufWriter::new();
        for (key, value) in &entries {
            writer.set(key, value.clone());
        }
        writer.set("general.alignment", 1 << alignment);
        let weights: Vec<Weight> = shapes
            .iter()
            .enumerate()
            .map(|(i, shape)| weight(&format!("w{i}"), shape, BlockFormat::F16))
            .collect();
        for weight in &weights {
            writer.add(weight.clone()).unwrap();
        }
        let bytes = writer.to_bytes().unwrap();
        let file = GgufFile::from_bytes(SharedBytes::from(bytes)).unwrap();
        for (key, value) in &entries {
            prop_assert_eq!(file.metadata().value(key), Some(value));
        }
        for weight in &weights {
            let got = file.get(weight.name()).unwrap();
            prop_assert_eq!(got.shape(), weight.shape());
            prop_assert_eq!(&got.bytes()[..], &weight.bytes()[..]);
        }
    }
}
