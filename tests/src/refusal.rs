//! [`refusal`]: why a file that was made wrong is no model; [`remove_key`] makes one wrong.

use kv_graph::weights::{Weight, WeightSource};
use model_core::gguf::Metadata;

use crate::Case;

/// A file without one of its tensors.
struct MissingTensor<'a>(&'a dyn WeightSource, &'a str);

impl WeightSource for MissingTensor<'_> {
    fn get(&self, name: &str) -> Option<Weight> {
        self.0.get(name).filter(|_| name != self.1)
    }

    fn names(&self) -> Vec<String> {
        let names = self.0.names().into_iter();
        names.filter(|name| name != self.1).collect()
    }
}

/// The refusal of the file with other settings, and without a tensor where one is named.
pub fn refusal(case: &Case, edit: impl FnOnce(&mut Metadata), without: &str) -> String {
    let (file, mut metadata) = case.open();
    edit(&mut metadata);
    let model = case
        .registry()
        .model(&metadata, &MissingTensor(&*file, without));
    model.unwrap_err().to_string()
}

/// Forgets a setting.
pub fn remove_key(metadata: &mut Metadata, key: &str) {
    assert!(metadata.contains(key), "no {key}");
    let mut rest = Metadata::new();
    for (other, value) in metadata.iter().filter(|(other, _)| *other != key) {
        rest.insert(other, value.clone());
    }
    *metadata = rest;
}
