//! [`Keys`]: metadata under construction, for one architecture, with the tensors that follow from
//! them.

use kv_graph::weights::{Weight, WeightError};

use crate::gguf::{Metadata, Value};

/// Metadata under construction.
#[derive(Debug)]
pub struct Keys {
    architecture: &'static str,
    metadata: Metadata,
    tensors: Vec<Weight>,
}

impl Keys {
    pub(super) fn new(architecture: &'static str) -> Self {
        Self {
            architecture,
            metadata: Metadata::new(),
            tensors: Vec::new(),
        }
    }

    /// Sets `{architecture}.{name}`.
    pub fn set(&mut self, name: &str, value: impl Into<Value>) {
        self.metadata
            .insert(&format!("{}.{name}", self.architecture), value);
    }

    /// Sets a whole key.
    pub fn set_whole(&mut self, key: &str, value: impl Into<Value>) {
        self.metadata.insert(key, value);
    }

    /// The keys that were set.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Adds a vector that is no tensor of the files.
    ///
    /// # Errors
    /// None in practice: a vector has as many values as it is long.
    pub fn add_vector(&mut self, name: &str, values: &[f32]) -> Result<(), WeightError> {
        self.add_tensor(name, vec![values.len()], values)
    }

    /// Adds a column, `[values, 1]`, that is no tensor of the files.
    ///
    /// # Errors
    /// As [`Keys::add_vector`].
    pub fn add_column(&mut self, name: &str, values: &[f32]) -> Result<(), WeightError> {
        self.add_tensor(name, vec![values.len(), 1], values)
    }

    /// Adds a matrix, `[rows, values]`, that is no tensor of the files.
    ///
    /// # Errors
    /// As [`Keys::add_vector`], also where there are not as many values as that.
    pub fn add_matrix(
        &mut self,
        name: &str,
        shape: [usize; 2],
        values: &[f32],
    ) -> Result<(), WeightError> {
        self.add_tensor(name, shape.to_vec(), values)
    }

    fn add_tensor(
        &mut self,
        name: &str,
        shape: Vec<usize>,
        values: &[f32],
    ) -> Result<(), WeightError> {
        self.tensors.push(Weight::from_f32(name, shape, values)?);
        Ok(())
    }

    pub(super) fn into_parts(self) -> (Metadata, Vec<Weight>) {
        (self.metadata, self.tensors)
    }
}
