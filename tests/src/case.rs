//! [`Case`]: a file or directory with a reference.

use std::path::Path;
use std::sync::Arc;

use kv_core::block::BlockFormat;
use kv_core::weights::{Weight, WeightSource};
use model_core::architecture::{Model, Registry};
use model_core::directory::HfDirectory;
use model_core::gguf::{GgufFile, Metadata};

use crate::Reference;

/// How a file's keys lie, beside the reference's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyOrder {
    /// The same.
    Same,
    /// Each head's halves as pairs.
    Pairs,
    /// The halves of the first values of each head, so many, as pairs.
    FirstPairs(usize),
}

/// A setting in place of the file's.
#[derive(Clone, Copy, Debug)]
pub enum Setting {
    /// A whole number.
    Count(u32),
    /// A number.
    Number(f32),
    /// A text.
    Text(&'static str),
}

/// A file with a reference: tokens, logits and continuations, and what layers remembered.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Where both are.
    pub folder: &'static str,
    /// Adds the architectures that the file may be of.
    pub register: fn(&mut Registry),
    /// Name of the reference.
    pub name: &'static str,
    /// Name of the GGUF file, without the ending, or of a model directory.
    pub file: &'static str,
    /// How the file's keys lie.
    pub keys: KeyOrder,
    /// Settings in place of the file's: references with the same weights share a file.
    pub settings: &'static [(&'static str, Setting)],
    /// Vectors beside the file's tensors.
    pub vectors: &'static [(&'static str, &'static [f32])],
}

/// A file's tensors and vectors beside them.
struct Extended {
    file: Arc<dyn WeightSource>,
    vectors: Vec<Weight>,
}

impl WeightSource for Extended {
    fn get(&self, name: &str) -> Option<Weight> {
        let own = self.vectors.iter().find(|w| w.name() == name);
        own.cloned().or_else(|| self.file.get(name))
    }

    fn names(&self) -> Vec<String> {
        let own = self.vectors.iter().map(|w| w.name().to_owned());
        self.file.names().into_iter().chain(own).collect()
    }
}

impl Case {
    /// The case of this name among `cases`.
    pub fn named(cases: &'static [Self], name: &str) -> &'static Self {
        cases.iter().find(|case| case.name == name).unwrap()
    }

    /// Path of a file beside that of the case.
    pub fn path(&self, file: &str) -> String {
        format!("{}/{file}", self.folder)
    }

    /// The architectures.
    pub fn registry(&self) -> Registry {
        let mut registry = Registry::new();
        (self.register)(&mut registry);
        registry
    }

    fn stored(&self) -> (Arc<dyn WeightSource>, Metadata) {
        let directory = self.path(self.file);
        if Path::new(&directory).is_dir() {
            let directory = HfDirectory::open(directory, &self.registry()).unwrap();
            let weights = Arc::clone(directory.weights());
            return (weights, directory.metadata().clone());
        }
        let file = GgufFile::open(format!("{directory}.gguf")).unwrap();
        let metadata = file.metadata().clone();
        (Arc::new(file), metadata)
    }

    /// The tensors, and what the file says with the case's settings.
    pub fn open(&self) -> (Arc<dyn WeightSource>, Metadata) {
        let (file, mut metadata) = self.stored();
        for &(key, value) in self.settings {
            match value {
                Setting::Count(n) => metadata.insert(key, n),
                Setting::Number(x) => metadata.insert(key, x),
                Setting::Text(text) => metadata.insert(key, text),
            };
        }
        if self.vectors.is_empty() {
            return (file, metadata);
        }
        let vectors = self.vectors.iter().map(|(name, values)| {
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            Weight::new(*name, vec![values.len()], BlockFormat::F32, bytes.into()).unwrap()
        });
        let vectors = vectors.collect();
        (Arc::new(Extended { file, vectors }), metadata)
    }

    /// The model.
    pub fn model(&self) -> Arc<dyn Model> {
        let (file, metadata) = self.open();
        self.registry().model(&metadata, &*file).unwrap()
    }

    /// What an independent implementation computed.
    pub fn reference(&self) -> Reference {
        let directory = self.path(self.name);
        match Path::new(&directory).is_dir() {
            true => Reference::open(&format!("{directory}/reference.safetensors")),
            false => Reference::open(&format!("{directory}.reference.safetensors")),
        }
    }
}
