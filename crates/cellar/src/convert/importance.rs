//! [`ColumnWeights`]: the importance of each column of a model's matrices, to quantize with.
//!
//! Invariant: an importance matrix fits the model, or nothing is converted.

use std::path::{Path, PathBuf};

use kv_block::{BlockFormat, QuantizeError, WEIGHTED_FORMATS, quantize_weighted};
use kv_graph::weights::Weight;
use model_core::error::ModelFileError;
use model_core::gguf::Metadata;
use model_core::imatrix::ImportanceMatrix;

use super::file_type::{AS_STORED, FileType, LowMix, Mix};
use super::mix::NamedShape;
use super::pieces::{in_pieces, n_threads};
use crate::error::Error;

/// The least importance of a column, as a part of the mean of its matrix: a column that was always
/// 0 in the text is not lost.
const LEAST_IMPORTANCE: f32 = 1e-6;

/// An importance matrix of the model that is converted.
#[derive(Debug)]
pub struct ColumnWeights {
    path: PathBuf,
    matrix: ImportanceMatrix,
}

impl ColumnWeights {
    /// Reads an importance matrix of `cellar imatrix` or `llama-imatrix`, GGUF or `.dat`. Errors
    /// and the converted file name it by its `path`.
    ///
    /// # Errors
    /// Where the bytes are no importance matrix.
    pub fn from_bytes(path: &Path, bytes: Vec<u8>) -> Result<Self, ModelFileError> {
        Ok(Self::new(path, ImportanceMatrix::from_bytes(path, bytes)?))
    }

    /// An importance matrix that was read; errors and the converted file name it by its `path`.
    pub fn new(path: &Path, matrix: ImportanceMatrix) -> Self {
        Self {
            path: path.to_owned(),
            matrix,
        }
    }

    /// Checks that it was made with this model. Returns a note on what is quantized without it.
    ///
    /// # Errors
    /// [`Error::ColumnWeights`] where an entry names no tensor, or one of another shape.
    pub(super) fn check(
        &self,
        tensors: &[NamedShape],
        formats: &[BlockFormat],
    ) -> Result<Option<String>, Error> {
        let of_another = format!("'{}' is of another model", self.path.display());
        let shape_of = |name: &str| tensors.iter().find(|t| t.name == name).map(|t| &t.shape);
        let entries = &self.matrix.entries;
        let unknown: Vec<&String> = entries.keys().filter(|n| shape_of(n).is_none()).collect();
        if let Some(first) = unknown.first() {
            return Err(Error::ColumnWeights(format!(
                "{of_another}: {} of its {} entries name no tensor of this one, the first '{first}'; \
                 make one with 'cellar imatrix', or choose the file of this model",
                unknown.len(),
                entries.len(),
            )));
        }
        for (name, entry) in entries {
            let shape = shape_of(name).map_or(&[][..], Vec::as_slice);
            if entry.mean_squares(shape).is_none() {
                return Err(Error::ColumnWeights(format!(
                    "{of_another}: its '{name}' has {} columns in all, but the tensor here is \
                     {shape:?} and has {}; make one with 'cellar imatrix', or choose the file of \
                     this model",
                    entry.sums.len(),
                    n_columns(shape),
                )));
            }
        }
        let weighted = tensors
            .iter()
            .zip(formats)
            .filter(|(_, f)| WEIGHTED_FORMATS.contains(f));
        let weighted: Vec<&str> = weighted.map(|(tensor, _)| tensor.name.as_str()).collect();
        let without: Vec<&str> = weighted
            .iter()
            .copied()
            .filter(|&name| !entries.contains_key(name))
            .collect();
        if weighted.is_empty() {
            let note = "the importance matrix changes nothing: files of this type have no format \
                        that takes weights";
            return Ok(Some(note.to_owned()));
        }
        Ok(without.first().map(|first| {
            format!(
                "{} of {} quantized tensors have no entry in '{}' and are quantized without \
                 weights, the first '{first}'",
                without.len(),
                weighted.len(),
                self.path.display(),
            )
        }))
    }

    /// Records in the file what it was made with, as llama-quantize does.
    pub(super) fn describe(&self, metadata: &mut Metadata) {
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let name = self.path.file_name().map(|name| name.to_string_lossy());
        metadata.insert("quantize.imatrix.file", &*name.unwrap_or_default());
        if let Some(dataset) = self.matrix.datasets.first() {
            metadata.insert("quantize.imatrix.dataset", dataset.as_str());
        }
        let n_entries = count(self.matrix.entries.len());
        metadata.insert("quantize.imatrix.entries_count", n_entries);
        metadata.insert("quantize.imatrix.chunks_count", self.matrix.n_chunks);
    }

    /// The values of a weight in this format, if that takes weights and there is an entry.
    pub(super) fn quantize(
        &self,
        weight: &Weight,
        values: &[f32],
        format: BlockFormat,
    ) -> Option<Result<Vec<u8>, QuantizeError>> {
        let entry = self.matrix.entries.get(weight.name());
        let means = entry.and_then(|entry| entry.mean_squares(weight.shape()));
        let columns = weight.shape().last().copied().unwrap_or(0);
        match means {
            Some(mut means) if WEIGHTED_FORMATS.contains(&format) && columns > 0 => {
                means.chunks_exact_mut(columns).for_each(raise_least);
                Some(quantize_matrices(values, &means, columns, format))
            }
            _ => None,
        }
    }
}

/// Columns of all matrices of a weight.
fn n_columns(shape: &[usize]) -> usize {
    let (columns, outer) = match shape {
        [outer @ .., _, columns] => (*columns, outer),
        _ => return 0,
    };
    columns * outer.iter().product::<usize>()
}

/// Formats that lose too much where all columns count alike; as for `llama-quantize`.
fn needs_weights(format: BlockFormat, file_type: Option<FileType>) -> bool {
    match format {
        BlockFormat::IQ2_XXS | BlockFormat::IQ2_XS | BlockFormat::IQ2_S => true,
        BlockFormat::IQ3_XXS | BlockFormat::IQ1_S | BlockFormat::IQ1_M => true,
        BlockFormat::Q2_K => {
            file_type.is_some_and(|file_type| file_type.mix == Mix::Low(LowMix::Q2KS))
        }
        _ => false,
    }
}

/// Embeddings and the output matrix, of which no columns are measured.
const NOT_MEASURED: [&str; 3] = [
    "token_embd.weight",
    "per_layer_token_embd.weight",
    "output.weight",
];

/// Checks that the tensors that are quantized have the importance that their formats need, in a
/// file of a type or in a copy of the model.
///
/// # Errors
/// [`Error::ColumnWeights`] that names the first that has none.
pub(super) fn check_needed<'a>(
    file_type: Option<FileType>,
    quantized: impl Iterator<Item = (&'a str, BlockFormat)>,
    weighting: Option<&ColumnWeights>,
) -> Result<(), Error> {
    let has_entry = |name| weighting.is_some_and(|w| w.matrix.entries.contains_key(name));
    let lacking: Vec<(&str, BlockFormat)> = quantized
        .filter(|&(name, format)| needs_weights(format, file_type) && !has_entry(name))
        .filter(|(name, _)| !NOT_MEASURED.contains(name))
        .collect();
    let Some((name, format)) = lacking.first() else {
        return Ok(());
    };
    let file = file_type.map_or(AS_STORED, |file_type| file_type.name);
    let n = lacking.len();
    Err(Error::ColumnWeights(match weighting {
        None => format!(
            "files of {file} need an importance matrix: {n} tensors of few bits lose too much \
             without, the first '{name}' ({format}); make one with 'cellar imatrix' and pass it \
             with --imatrix"
        ),
        Some(weighting) => format!(
            "'{}' lacks {n} tensors of few bits, the first '{name}' ({format}), which lose too much \
             without; make one with 'cellar imatrix' and a longer text, or choose a larger type \
             than {file}",
            weighting.path.display()
        ),
    }))
}

/// Gives each column of a matrix some importance; the same, where none has any.
fn raise_least(importance: &mut [f32]) {
    let sum: f64 = importance.iter().map(|&x| f64::from(x)).sum();
    let mean = (sum / importance.len().max(1) as f64) as f32;
    if mean > 0.0 && mean.is_finite() {
        let scaled = importance.iter_mut();
        scaled.for_each(|x| *x = (*x / mean).max(LEAST_IMPORTANCE));
    } else {
        importance.fill(1.0);
    }
}

/// Quantizes the matrices of a weight, `[matrices, rows, columns]`, on all cores, with the
/// importance of their columns, `[matrices, columns]`.
fn quantize_matrices(
    values: &[f32],
    importance: &[f32],
    columns: usize,
    format: BlockFormat,
) -> Result<Vec<u8>, QuantizeError> {
    let n_matrices = (importance.len() / columns).max(1);
    let matrix_len = values.len() / n_matrices;
    let piece_len = (matrix_len / columns).div_ceil(n_threads()).max(1) * columns;
    let mut bytes = Vec::new();
    for (values, importance) in values
        .chunks(matrix_len.max(1))
        .zip(importance.chunks_exact(columns))
    {
        bytes.extend(in_pieces(values, piece_len, |rows| {
            quantize_rows(rows, importance, format)
        })?);
    }
    Ok(bytes)
}

/// Rows of one matrix.
fn quantize_rows(
    values: &[f32],
    importance: &[f32],
    format: BlockFormat,
) -> Result<Vec<u8>, QuantizeError> {
    let mut bytes = Vec::new();
    for row in values.chunks_exact(importance.len()) {
        bytes.extend(quantize_weighted(format, row, importance)?);
    }
    Ok(bytes)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use std::collections::BTreeMap;

    use model_core::imatrix::Importance;

    use super::super::encode;
    use super::*;

    const COLUMNS: usize = 512;
    const ROWS: usize = 12;

    /// Numbers that look random, nearly normal.
    fn noise(n: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..n).map(|_| next() + next() + next()).collect()
    }

    fn weight(values: &[f32], shape: &[usize]) -> Weight {
        Weight::from_f32("w", shape.to_vec(), values).unwrap()
    }

    fn weighting(sums: Vec<f32>, n_matrices: usize) -> ColumnWeights {
        let counts = vec![3.0; n_matrices];
        let entry = Importance { sums, counts };
        ColumnWeights {
            path: "i.gguf".into(),
            matrix: ImportanceMatrix {
                entries: BTreeMap::from([("w".to_owned(), entry)]),
                ..ImportanceMatrix::default()
            },
        }
    }

    fn read(bytes: Vec<u8>, format: BlockFormat, shape: &[usize]) -> Vec<f32> {
        let weight = Weight::new("w", shape.to_vec(), format, bytes.into());
        weight.unwrap().to_f32()
    }

    /// The error weighted by importance goes down for each format; by expert, each with its own.
    #[test]
    fn the_weighted_error_goes_down_for_each_format() {
        let shape = [2, ROWS, COLUMNS];
        let values = noise(2 * ROWS * COLUMNS, 1);
        let sums: Vec<f32> = noise(2 * COLUMNS, 2)
            .iter()
            .map(|x| (2.5 * x).exp())
            .collect();
        let (plain, weights) = (weight(&values, &shape), weighting(sums.clone(), 2));
        let formats = WEIGHTED_FORMATS.into_iter();
        let mut n_formats = 0;
        for format in formats {
            let error = |bytes: Vec<u8>| -> f64 {
                let read = read(bytes, format, &shape);
                let rows = read.chunks(COLUMNS).zip(values.chunks(COLUMNS)).enumerate();
                let of_row = |(row, (a, b)): (usize, (&[f32], &[f32]))| -> f64 {
                    let importance = &sums[row / ROWS * COLUMNS..];
                    let each = a.iter().zip(b).zip(importance);
                    each.map(|((a, b), w)| f64::from(w * (a - b) * (a - b)))
                        .sum()
                };
                rows.map(of_row).sum()
            };
            let before = error(encode(&values, format).unwrap());
            let weighted = weights.quantize(&plain, &values, format).unwrap();
            let after = error(weighted.unwrap());
            eprintln!("{format}: {:.3}", after / before);
            assert!(after < 0.95 * before, "{format}: {before} became {after}");
            n_formats += 1;
        }
        assert_eq!(n_formats, 18);
    }

    /// Columns that were always 0 in the text, and matrices that saw none, give finite numbers near
    /// the originals.
    #[test]
    fn columns_without_importance_are_kept() {
        let values = noise(ROWS * COLUMNS, 5);
        let one = |column| {
            let mut sums = vec![0.0; COLUMNS];
            sums[column] = 1e9;
            sums
        };
        for sums in [vec![0.0; COLUMNS], one(77), vec![f32::MAX; COLUMNS]] {
            let weights = weighting(sums, 1);
            let shape = [ROWS, COLUMNS];
            for format in WEIGHTED_FORMATS {
                let quantized = weights.quantize(&weight(&values, &shape), &values, format);
                let read = read(quantized.unwrap().unwrap(), format, &shape);
                let worst = read.iter().zip(&values).map(|(a, b)| (a - b).abs());
                // A NaN is not below.
                assert!(worst.clone().all(|off| off < 3.0), "{format}");
            }
        }
    }

    #[test]
    fn other_formats_and_names_take_no_weights() {
        let values = noise(ROWS * COLUMNS, 5);
        let plain = weight(&values, &[ROWS, COLUMNS]);
        let weights = weighting(vec![1.0; COLUMNS], 1);
        for format in [BlockFormat::Q8_0, BlockFormat::F16, BlockFormat::F32] {
            assert_eq!(weights.quantize(&plain, &values, format), None);
        }
        let shape = plain.shape().to_vec();
        let other = Weight::new("v", shape, BlockFormat::F32, plain.bytes().clone());
        let quantized = weights.quantize(&other.unwrap(), &values, BlockFormat::Q4_0);
        assert_eq!(quantized, None);
    }

    #[test]
    fn an_importance_matrix_of_another_model_is_refused_with_numbers() {
        let tensor = |name: &str, shape: &[usize]| NamedShape {
            name: name.to_owned(),
            shape: shape.to_vec(),
        };
        let weights = weighting(vec![1.0; COLUMNS], 1);
        let check = |tensors: &[NamedShape]| weights.check(tensors, &[BlockFormat::Q4_0]);
        assert!(check(&[tensor("w", &[8, COLUMNS])]).is_ok());
        let refused = check(&[tensor("w", &[8, 256])]).unwrap_err().to_string();
        let wanted = "its 'w' has 512 columns in all, but the tensor here is [8, 256] and has 256";
        assert!(refused.contains(wanted), "{refused}");
        let refused = check(&[tensor("v", &[8, COLUMNS])])
            .unwrap_err()
            .to_string();
        let wanted = "1 of its 1 entries name no tensor of this one, the first 'w'";
        assert!(refused.contains(wanted), "{refused}");
    }
}
