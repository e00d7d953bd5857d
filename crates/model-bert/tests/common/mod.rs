//! The tiny encoders of these tests, and what an independent implementation made of them.

#![allow(clippy::unwrap_used)]
#![allow(dead_code)] // each test file uses a part of this

pub(crate) mod subject;

use std::path::{Path, PathBuf};

use model_core::architecture::Registry;
use model_tests::fixture;
use serde_json::Value;

/// Directories of the fixtures' `encoders`.
pub(crate) const BERT: &str = "bert_tiny";
pub(crate) const MODERN: &str = "modern_bert_tiny";

pub(crate) fn data(name: &str) -> PathBuf {
    fixture("encoders").join(name)
}

pub(crate) fn registry() -> Registry {
    let mut registry = Registry::new();
    model_bert::register(&mut registry);
    registry
}

/// `make_reference.py` of that folder wrote it.
pub(crate) struct Reference(Value);

impl Reference {
    pub(crate) fn of(name: &str) -> Self {
        let text = std::fs::read(data(&format!("{name}.reference.json"))).unwrap();
        Self(serde_json::from_slice(&text).unwrap())
    }

    pub(crate) fn get<T: serde::de::DeserializeOwned>(&self, key: &str) -> T {
        serde_json::from_value(self.0[key].clone()).unwrap()
    }
}

/// A directory with a copy of a model, which may be changed.
pub(crate) fn copy(name: &str) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    copy_into(&data(name), copy.path());
    copy
}

fn copy_into(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            std::fs::create_dir(&to).unwrap();
            copy_into(&entry.path(), &to);
        } else {
            std::fs::copy(entry.path(), to).unwrap();
        }
    }
}

pub(crate) fn edit_json(path: &Path, edit: impl FnOnce(&mut Value)) {
    let mut json: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    edit(&mut json);
    std::fs::write(path, serde_json::to_vec(&json).unwrap()).unwrap();
}
