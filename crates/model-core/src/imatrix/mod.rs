//! Importance matrices: for each weight matrix, how large the columns of its inputs are on a
//! calibration text. Quantization weights errors by them.
//!
//! [`ImportanceMatrix::open`] reads llama.cpp's two forms: a GGUF file (`gguf`) and its older
//! `.dat` (`legacy`); [`ImportanceMatrix::to_bytes`] writes the first. Invariant: sums and counts
//! that were read are finite and at least 0. Does not know how they are measured or used.

mod gguf;
mod legacy;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::error::ModelFileError;
use crate::gguf::GgufError;

/// The mean squares of the inputs of a model's matrices in a calibration text.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ImportanceMatrix {
    /// By the name of the weight matrix.
    pub entries: BTreeMap<String, Importance>,
    /// Names of the texts.
    pub datasets: Vec<String>,
    /// Chunks of text that were evaluated.
    pub n_chunks: u32,
    /// Tokens of a chunk; `None` in the older form.
    pub chunk_size: Option<u32>,
}

/// Sums over the inputs of one weight matrix, or of the matrices of all experts of a layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Importance {
    /// Sum of the squares of each column, `[matrices, in]`.
    pub sums: Vec<f32>,
    /// The divisors that make means of the sums: one number for each matrix, or one for all.
    pub counts: Vec<f32>,
}

impl Importance {
    /// The mean square of each column for a weight of this shape, `[.., out, in]`: as many values
    /// as it has matrices and columns, `[matrices, in]`. A matrix that saw no input has 1
    /// everywhere. `None` where the weight has other matrices or columns.
    pub fn mean_squares(&self, shape: &[usize]) -> Option<Vec<f32>> {
        let (&columns, outer) = shape.split_last()?;
        let matrices = outer.split_last().map_or(&[][..], |(_, matrices)| matrices);
        let n_matrices = matrices.iter().product::<usize>();
        let n_counts = self.counts.len();
        if Some(self.sums.len()) != columns.checked_mul(n_matrices)
            || ![1, n_matrices].contains(&n_counts)
        {
            return None;
        }
        let counts = self.counts.iter().cycle();
        let matrices = self.sums.chunks_exact(columns.max(1)).zip(counts);
        let means = matrices.flat_map(|(sums, &count)| {
            sums.iter()
                .map(move |sum| if count > 0.0 { sum / count } else { 1.0 })
        });
        Some(means.collect())
    }

    /// The sums of one matrix: columns, if the file has its count.
    fn check(&self, name: &str) -> Result<(), String> {
        let (n_values, n_counts) = (self.sums.len(), self.counts.len());
        if n_values == 0 || n_counts == 0 || !n_values.is_multiple_of(n_counts) {
            return Err(format!(
                "'{name}' has {n_values} sums and {n_counts} counts"
            ));
        }
        let values = self.sums.iter().chain(&self.counts);
        match values.copied().find(|v| !(0.0..f32::INFINITY).contains(v)) {
            Some(v) => Err(format!("'{name}': {v} is no sum of squares and no count")),
            None => Ok(()),
        }
    }
}

impl ImportanceMatrix {
    /// Reads a file in either form.
    ///
    /// # Errors
    /// [`ModelFileError`] where it cannot be read or is no importance matrix.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, ModelFileError> {
        let path = path.as_ref();
        let bytes = fs::read(path).map_err(|source| ModelFileError::Io {
            attempt: "read",
            path: path.to_owned(),
            source,
        })?;
        Self::from_bytes(path, bytes)
    }

    /// Reads the bytes of a file, which errors call by its path.
    ///
    /// # Errors
    /// [`ModelFileError::Format`] where they are no importance matrix.
    pub fn from_bytes(path: &Path, bytes: Vec<u8>) -> Result<Self, ModelFileError> {
        Self::parse(bytes).map_err(|reason| ModelFileError::Format {
            path: path.to_owned(),
            reason,
        })
    }

    fn parse(bytes: Vec<u8>) -> Result<Self, String> {
        let matrix = if bytes.starts_with(b"GGUF") {
            gguf::read(bytes)?
        } else {
            legacy::read(&bytes)?
        };
        if matrix.entries.is_empty() {
            return Err("an importance matrix without entries".to_owned());
        }
        for (name, entry) in &matrix.entries {
            entry.check(name)?;
        }
        Ok(matrix)
    }

    /// The GGUF form.
    ///
    /// # Errors
    /// [`GgufError`] where a weight's name cannot be written.
    pub fn to_bytes(&self) -> Result<Vec<u8>, GgufError> {
        gguf::write(self)
    }
}
