//! The GGUF form: `general.type` is `imatrix`; the tensors `NAME.in_sum2` (`[matrices, in]`) and
//! `NAME.counts` (`[matrices, 1]`), of one matrix without the first dimension, hold the sums of a
//! weight `NAME`. Other tensors have no meaning here.

use kv_graph::weights::Weight;

use super::{Importance, ImportanceMatrix};
use crate::gguf::{Array, GgufError, GgufFile, GgufWriter, MetadataError, Value};

const SUMS: &str = ".in_sum2";
const COUNTS: &str = ".counts";
const TYPE: &str = "general.type";
const DATASETS: &str = "imatrix.datasets";
const N_CHUNKS: &str = "imatrix.chunk_count";
const CHUNK_SIZE: &str = "imatrix.chunk_size";

pub(super) fn read(bytes: Vec<u8>) -> Result<ImportanceMatrix, String> {
    let file = GgufFile::from_bytes(bytes.into()).map_err(|error| error.to_string())?;
    let metadata = file.metadata();
    let of_metadata = |error: MetadataError| error.to_string();
    match metadata.value(TYPE) {
        Some(Value::String(found)) if found == "imatrix" => {}
        Some(Value::String(found)) => {
            return Err(format!(
                "no importance matrix: {TYPE} is '{found}', not 'imatrix'"
            ));
        }
        _ => {
            return Err(format!(
                "no importance matrix: {TYPE} is missing, not 'imatrix'"
            ));
        }
    }
    let datasets: Option<&[String]> = metadata.optional(DATASETS).map_err(of_metadata)?;
    let mut matrix = ImportanceMatrix {
        datasets: datasets.unwrap_or_default().to_vec(),
        n_chunks: metadata
            .optional(N_CHUNKS)
            .map_err(of_metadata)?
            .unwrap_or(0),
        chunk_size: metadata.optional(CHUNK_SIZE).map_err(of_metadata)?,
        ..ImportanceMatrix::default()
    };
    for tensor in file.tensors() {
        let Some(name) = tensor.name().strip_suffix(SUMS) else {
            if let Some(name) = tensor.name().strip_suffix(COUNTS)
                && file.tensor(&format!("{name}{SUMS}")).is_none()
            {
                return Err(format!("'{name}' has counts, but no sums ({SUMS})"));
            }
            continue;
        };
        let values = |suffix: &str| -> Result<Vec<f32>, String> {
            let weight = file.weight(&format!("{name}{suffix}"));
            let weight = weight.map_err(|error| error.to_string())?;
            Ok(weight.to_f32())
        };
        let entry = Importance {
            sums: values(SUMS)?,
            counts: values(COUNTS)?,
        };
        matrix.entries.insert(name.to_owned(), entry);
    }
    Ok(matrix)
}

pub(super) fn write(matrix: &ImportanceMatrix) -> Result<Vec<u8>, GgufError> {
    let mut writer = GgufWriter::new();
    writer.set(TYPE, "imatrix");
    writer.set(DATASETS, Array::String(matrix.datasets.clone()));
    writer.set(N_CHUNKS, matrix.n_chunks);
    if let Some(size) = matrix.chunk_size {
        writer.set(CHUNK_SIZE, size);
    }
    for (name, Importance { sums, counts }) in &matrix.entries {
        let n_matrices = counts.len();
        for (suffix, values) in [(SUMS, sums), (COUNTS, counts)] {
            let columns = values.len() / n_matrices.max(1);
            let shape = match n_matrices {
                1 => vec![columns],
                _ => vec![n_matrices, columns],
            };
            let name = format!("{name}{suffix}");
            // Of sums that their counts do not divide, the shape would not be that of the values.
            let weight = Weight::from_f32(&name, shape, values);
            writer.add(weight.map_err(|_| GgufError::Shape {
                name,
                shape: vec![n_matrices as u64, values.len() as u64],
            })?)?;
        }
    }
    writer.to_bytes()
}
