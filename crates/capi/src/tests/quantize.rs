//! Files that are written: formats are those that were asked for, and what is refused writes
//! nothing.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::path::{Path, PathBuf};

use cellar::convert::Conversion;
use model_core::gguf::{GgufFile, GgufWriter, Metadata, Value};
use model_core::model_file::OpenModel;
use tempfile::TempDir;

use super::scene::{LoadedModel, STORIES, Text};
use crate::abi::{ImatrixData, QuantizeParams, TensorOverride};
use crate::defaults::llama_model_quantize_default_params;
use crate::ffi::In;
use crate::quantize::*;

struct Output {
    folder: TempDir,
}

impl Output {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        Self { folder }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("out.gguf")
    }

    fn quantize(&self, from: &str, change: impl FnOnce(&mut QuantizeParams)) -> u32 {
        let mut params = llama_model_quantize_default_params();
        change(&mut params);
        let (from, to) = (Text::new(from), Text::new(self.path().to_str().unwrap()));
        llama_model_quantize(from.get(), to.get(), In::of(&raw const params))
    }

    /// The formats of all tensors by name.
    fn formats(&self) -> BTreeMap<String, String> {
        let file = GgufFile::open(self.path()).unwrap();
        let tensors = file.tensors().iter();
        tensors
            .map(|t| (t.name().to_owned(), t.stored().to_string()))
            .collect()
    }
}

const UP: &str = "blk.0.ffn_up.weight";
const EMBEDDING: &str = "token_embd.weight";

#[test]
fn files_are_those_of_convert() {
    let out = Output::new();
    let model = OpenModel::open(STORIES, &cellar::architectures()).unwrap();
    // The rows of the stories are too short for iq2_m, which takes IQ4_NL then.
    for (name, number) in [("q8_0", 7), ("q4_k_m", 15), ("f32", 0), ("iq2_m", 29)] {
        assert_eq!(
            out.quantize(STORIES, |params| params.ftype = number),
            0,
            "{name}"
        );
        let mut wanted = Vec::new();
        let conversion = Conversion::new(&model, name.parse().unwrap(), None).unwrap();
        conversion.write(&mut wanted, |_| ()).unwrap();
        assert_eq!(std::fs::read(out.path()).unwrap(), wanted, "{name}");
    }
    // Nothing else is left in the folder.
    assert_eq!(std::fs::read_dir(out.folder.path()).unwrap().count(), 1);
}

#[test]
fn single_tensors_get_other_formats() {
    let out = Output::new();
    assert_eq!(out.quantize(STORIES, |params| params.ftype = 2), 0);
    let plain = out.formats();
    assert_eq!(
        (plain[UP].as_str(), plain[EMBEDDING].as_str()),
        ("Q4_0", "Q8_0")
    );
    let pattern = CString::new("ffn_(up|gate)").unwrap();
    let other = CString::new("blk").unwrap();
    let rule = |pattern: &CString, kind| TensorOverride {
        pattern: pattern.as_ptr(),
        kind,
    };
    let end = TensorOverride {
        pattern: std::ptr::null(),
        kind: 0,
    };
    let rules = [rule(&pattern, 6), rule(&other, 8), end];
    let change = |params: &mut QuantizeParams| {
        (params.ftype, params.token_embedding_type) = (2, 1);
        params.tt_overrides = rules.as_ptr();
    };
    assert_eq!(out.quantize(STORIES, change), 0);
    let changed = out.formats();
    assert_eq!(
        (changed[UP].as_str(), changed[EMBEDDING].as_str()),
        ("Q5_0", "F16")
    );
    assert_eq!(changed["blk.0.attn_q.weight"], "Q8_0");
    assert_eq!(changed["blk.0.attn_norm.weight"], "F32");
    let pure = |params: &mut QuantizeParams| (params.ftype, params.pure) = (2, true);
    assert_eq!(out.quantize(STORIES, pure), 0);
    assert_eq!(out.formats()[EMBEDDING], "Q4_0");
}

#[test]
fn an_importance_matrix_changes_what_is_rounded() {
    let out = Output::new();
    assert_eq!(out.quantize(STORIES, |params| params.ftype = 2), 0);
    let plain = std::fs::read(out.path()).unwrap();
    let name = CString::new(UP).unwrap();
    let n = GgufFile::open(STORIES).unwrap().tensor(UP).unwrap().shape()[1];
    let values: Vec<f32> = (0..n).map(|column| (column % 7) as f32).collect();
    let entry = |size| ImatrixData {
        name: name.as_ptr(),
        data: values.as_ptr(),
        size,
    };
    let end = || ImatrixData {
        name: std::ptr::null(),
        data: std::ptr::null(),
        size: 0,
    };
    let entries = [entry(n), end()];
    let weighted = |params: &mut QuantizeParams| {
        (params.ftype, params.imatrix) = (2, entries.as_ptr());
    };
    assert_eq!(out.quantize(STORIES, weighted), 0);
    assert_ne!(std::fs::read(out.path()).unwrap(), plain);
    let of_other_model = [entry(n - 1), end()];
    let wrong = |params: &mut QuantizeParams| params.imatrix = of_other_model.as_ptr();
    assert_eq!(out.quantize(STORIES, wrong), 1);
}

#[test]
fn what_is_refused_leaves_the_file() {
    let out = Output::new();
    assert_eq!(out.quantize(STORIES, |params| params.ftype = 2), 0);
    let before = std::fs::read(out.path()).unwrap();
    let quantized = out.folder.path().join("q.gguf");
    std::fs::copy(out.path(), &quantized).unwrap();
    let quantized = quantized.to_str().unwrap();
    let layers = [0, -1];
    assert_eq!(out.quantize(STORIES, |params| params.ftype = 38), 1);
    assert_eq!(out.quantize(STORIES, |params| params.ftype = -1), 1);
    assert_eq!(
        out.quantize(STORIES, |params| params.output_tensor_type = 99),
        1
    );
    assert_eq!(
        out.quantize(STORIES, |params| params.token_embedding_type = 9),
        1
    );
    assert_eq!(
        out.quantize(STORIES, |params| params.prune_layers = layers.as_ptr()),
        1
    );
    assert_eq!(out.quantize("/no/such/file", |_| ()), 1);
    assert_eq!(
        out.quantize(quantized, |params| params.ftype = 7),
        1,
        "again"
    );
    assert_eq!(out.quantize(STORIES, |params| params.dry_run = true), 0);
    assert_eq!(std::fs::read(out.path()).unwrap(), before);
    let again = |params: &mut QuantizeParams| (params.ftype, params.allow_requantize) = (7, true);
    assert_eq!(out.quantize(quantized, again), 0);
    assert_eq!(out.formats()[UP], "Q8_0");
    assert_eq!(out.quantize(quantized, |params| params.only_copy = true), 0);
    assert_eq!(out.formats()[UP], "Q4_0");
}

fn tensors(path: &Path) -> Vec<(String, Vec<u8>)> {
    let file = GgufFile::open(path).unwrap();
    let of = |name: &str| file.weight(name).unwrap().bytes().to_vec();
    let names = file.tensors().iter().map(|t| t.name().to_owned());
    let mut all: Vec<_> = names.map(|name| (name.clone(), of(&name))).collect();
    all.sort();
    all
}

#[test]
fn a_model_is_saved_as_it_was_opened() {
    let out = Output::new();
    let model = LoadedModel::new();
    llama_model_save_to_file(model.0, Text::new(out.path().to_str().unwrap()).get());
    assert_eq!(tensors(&out.path()), tensors(Path::new(STORIES)));
    let [saved, opened] = [out.path(), PathBuf::from(STORIES)].map(|path| {
        let file = GgufFile::open(path).unwrap();
        file.metadata().value("general.file_type").cloned()
    });
    assert_eq!(saved, opened);
    LoadedModel::open(out.path().to_str().unwrap());
}

/// The stories' model in two files; the path of the first.
fn in_parts(folder: &Path) -> PathBuf {
    let file = GgufFile::open(STORIES).unwrap();
    let parts = [1, 2].map(|part| folder.join(format!("parts-0000{part}-of-00002.gguf")));
    for (number, path) in parts.iter().enumerate() {
        let metadata = if number == 0 {
            file.metadata().clone()
        } else {
            Metadata::new()
        };
        let mut writer = GgufWriter::with_metadata(metadata);
        writer.set("split.no", Value::U16(number as u16));
        writer.set("split.count", Value::U16(2));
        let n_tensors = file.tensors().len();
        writer.set("split.tensors.count", Value::I32(n_tensors as i32));
        for tensor in file.tensors().iter().skip(number).step_by(2) {
            writer.add(file.weight(tensor.name()).unwrap()).unwrap();
        }
        std::fs::write(path, writer.to_bytes().unwrap()).unwrap();
    }
    parts[0].clone()
}

#[test]
fn a_model_in_parts_becomes_one_file() {
    let out = Output::new();
    let parts = in_parts(out.folder.path());
    let parts = parts.to_str().unwrap();
    assert_eq!(out.quantize(parts, |params| params.keep_split = true), 1);
    assert!(!out.path().exists());
    assert_eq!(out.quantize(parts, |params| params.only_copy = true), 0);
    assert_eq!(tensors(&out.path()), tensors(Path::new(STORIES)));
    LoadedModel::open(out.path().to_str().unwrap());
}
