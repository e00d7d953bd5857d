//! Writing GGUF files, version 3, little endian: for conversions and tests.
//!
//! Invariant: what is written reads back as it was given, in the same order.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use kv_core::weights::{Weight, WeightInfo};

use super::header::alignment;
use super::metadata::Metadata;
use super::tensor::TensorType;
use super::value::{Array, Value};
use super::{MAGIC, MAX_DIMENSIONS};
use crate::error::{GgufError, ModelFileError};

/// The version that is written.
const VERSION: u32 = 3;

/// Collects metadata and weights, then writes them.
#[derive(Clone, Debug, Default)]
pub struct GgufWriter {
    metadata: Metadata,
    weights: Vec<Weight>,
}

/// A weight that is yet to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Announced {
    /// Its name.
    pub name: String,
    /// Its shape and format.
    pub info: WeightInfo,
}

impl GgufWriter {
    /// An empty file.
    pub fn new() -> Self {
        Self::default()
    }

    /// A file with this metadata.
    pub fn with_metadata(metadata: Metadata) -> Self {
        Self {
            metadata,
            weights: Vec::new(),
        }
    }

    /// Sets a key, replacing its value where it is there already.
    pub fn set(&mut self, key: &str, value: impl Into<Value>) -> &mut Self {
        self.metadata.insert(key, value);
        self
    }

    /// Adds a weight.
    ///
    /// # Errors
    /// [`GgufError`] where the name is taken, or GGUF cannot hold the weight.
    pub fn add(&mut self, weight: Weight) -> Result<&mut Self, GgufError> {
        check_one(weight.name(), &weight.info())?;
        if self
            .weights
            .iter()
            .any(|other| other.name() == weight.name())
        {
            let name = weight.name().to_owned();
            return Err(GgufError::DuplicateTensor { name });
        }
        self.weights.push(weight);
        Ok(self)
    }

    /// The whole file in memory.
    ///
    /// # Errors
    /// [`GgufError`] where `general.alignment` is no power of two.
    pub fn to_bytes(&self) -> Result<Vec<u8>, GgufError> {
        let alignment = alignment(&self.metadata)? as usize;
        let mut bytes = self.header(&self.announced(), alignment);
        for weight in &self.weights {
            bytes.extend_from_slice(weight.bytes());
            pad(&mut bytes, alignment);
        }
        Ok(bytes)
    }

    /// Writes a temporary file and renames it, so that `path` never holds half a model.
    ///
    /// # Errors
    /// [`ModelFileError`] where `general.alignment` is no power of two, or the system refuses;
    /// `path` is then as it was.
    pub fn write(&self, path: impl AsRef<Path>) -> Result<(), ModelFileError> {
        let path = path.as_ref();
        let alignment = alignment(&self.metadata).map_err(|reason| in_file(path, reason))?;
        let mut file = AtomicFile::create(path)?;
        file.write(&self.header(&self.announced(), alignment as usize))?;
        for weight in &self.weights {
            file.write_padded(weight.bytes(), alignment as usize)?;
        }
        file.finish()
    }

    /// Writes a file whose weights are made one after the other, for models that do not fit in
    /// memory twice; weights that were added are not written.
    ///
    /// # Errors
    /// The errors of `make`, and [`ModelFileError`] as [`GgufWriter::write`], for weights that
    /// [`GgufWriter::add`] refuses, and where a weight is not what was announced; `path` is then as
    /// it was.
    pub fn write_each<E: From<ModelFileError>>(
        &self,
        path: impl AsRef<Path>,
        announced: &[Announced],
        mut make: impl FnMut(&Announced) -> Result<Weight, E>,
    ) -> Result<(), E> {
        let path = path.as_ref();
        let refused = |reason| in_file(path, reason);
        let alignment = alignment(&self.metadata).map_err(refused)? as usize;
        check(announced).map_err(refused)?;
        let mut file = AtomicFile::create(path)?;
        file.write(&self.header(announced, alignment))?;
        for announced in announced {
            let weight = make(announced)?;
            if weight.info() != announced.info {
                let changed = GgufError::Changed {
                    name: announced.name.clone(),
                    wanted: announced.info.clone(),
                    got: weight.info(),
                };
                return Err(refused(changed).into());
            }
            file.write_padded(weight.bytes(), alignment)?;
        }
        Ok(file.finish()?)
    }

    fn announced(&self) -> Vec<Announced> {
        let announced = |weight: &Weight| Announced {
            name: weight.name().to_owned(),
            info: weight.info(),
        };
        self.weights.iter().map(announced).collect()
    }

    /// Everything before the tensor data, padded.
    fn header(&self, weights: &[Announced], alignment: usize) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend(VERSION.to_le_bytes());
        out.extend((weights.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in self.metadata.iter() {
            push_string(&mut out, key);
            push_value(&mut out, value);
        }
        let mut offset = 0;
        for Announced { name, info } in weights {
            push_string(&mut out, name);
            out.extend((info.shape.len() as u32).to_le_bytes());
            let dimensions = info.shape.iter().rev();
            out.extend(dimensions.flat_map(|&d| (d as u64).to_le_bytes()));
            // What is announced was checked: no format is without a number, no row without end.
            let code = TensorType::Supported(info.format).code();
            out.extend(code.unwrap_or(u32::MAX).to_le_bytes());
            out.extend((offset as u64).to_le_bytes());
            let n_values = info.shape.iter().product();
            let n_bytes = info.format.row_bytes(n_values).unwrap_or(0);
            offset += n_bytes.next_multiple_of(alignment);
        }
        pad(&mut out, alignment);
        out
    }
}

/// A file under a temporary name, which gets its own name when it is complete.
struct AtomicFile<'p> {
    path: &'p Path,
    temporary: PathBuf,
    /// `None` once the file is complete.
    out: Option<BufWriter<File>>,
}

impl<'p> AtomicFile<'p> {
    fn create(path: &'p Path) -> Result<Self, ModelFileError> {
        let mut temporary = path.as_os_str().to_owned();
        temporary.push(".part");
        let temporary = PathBuf::from(temporary);
        let file = File::create(&temporary).map_err(|source| cannot_write(path, source))?;
        Ok(Self {
            path,
            temporary,
            out: Some(BufWriter::new(file)),
        })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), ModelFileError> {
        let written = self.out.as_mut().map_or(Ok(()), |out| out.write_all(bytes));
        written.map_err(|source| cannot_write(self.path, source))
    }

    fn write_padded(&mut self, bytes: &[u8], alignment: usize) -> Result<(), ModelFileError> {
        self.write(bytes)?;
        let n = bytes.len();
        self.write(&vec![0; n.next_multiple_of(alignment) - n])
    }

    fn finish(mut self) -> Result<(), ModelFileError> {
        let Some(out) = self.out.take() else {
            return Ok(());
        };
        let renamed = out
            .into_inner()
            .map_err(|error| error.into_error())
            .and_then(|file| file.sync_all())
            .and_then(|()| fs::rename(&self.temporary, self.path));
        if renamed.is_err() {
            // The error to report is why writing failed.
            let _ = fs::remove_file(&self.temporary);
        }
        renamed.map_err(|source| cannot_write(self.path, source))
    }
}

impl Drop for AtomicFile<'_> {
    /// Removes an incomplete file.
    fn drop(&mut self) {
        if self.out.take().is_some() {
            // The error to report is why writing failed.
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

fn cannot_write(path: &Path, source: io::Error) -> ModelFileError {
    ModelFileError::Io {
        attempt: "write",
        path: path.to_owned(),
        source,
    }
}

fn in_file(path: &Path, reason: GgufError) -> ModelFileError {
    ModelFileError::Gguf {
        file: format!("'{}'", path.display()),
        reason,
    }
}

/// What [`GgufWriter::add`] makes sure of.
fn check(announced: &[Announced]) -> Result<(), GgufError> {
    let mut names = HashSet::new();
    for Announced { name, info } in announced {
        check_one(name, info)?;
        if !names.insert(name) {
            return Err(GgufError::DuplicateTensor { name: name.clone() });
        }
    }
    Ok(())
}

fn check_one(name: &str, info: &WeightInfo) -> Result<(), GgufError> {
    let name = || name.to_owned();
    let n_dimensions = info.shape.len();
    if n_dimensions > MAX_DIMENSIONS {
        return Err(GgufError::Dimensions {
            name: name(),
            n_dimensions: u32::try_from(n_dimensions).unwrap_or(u32::MAX),
        });
    }
    match TensorType::Supported(info.format).code() {
        Some(_) => Ok(()),
        None => Err(GgufError::UnknownFormat {
            name: name(),
            format: info.format,
        }),
    }
}

fn pad(out: &mut Vec<u8>, alignment: usize) {
    out.resize(out.len().next_multiple_of(alignment), 0);
}

fn push_string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// The type number and the value.
fn push_value(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::U8(v) => push_scalar(out, 0, v.to_le_bytes()),
        Value::I8(v) => push_scalar(out, 1, v.to_le_bytes()),
        Value::U16(v) => push_scalar(out, 2, v.to_le_bytes()),
        Value::I16(v) => push_scalar(out, 3, v.to_le_bytes()),
        Value::U32(v) => push_scalar(out, 4, v.to_le_bytes()),
        Value::I32(v) => push_scalar(out, 5, v.to_le_bytes()),
        Value::F32(v) => push_scalar(out, 6, v.to_le_bytes()),
        Value::Bool(v) => push_scalar(out, 7, [u8::from(*v)]),
        Value::String(v) => {
            out.extend(8u32.to_le_bytes());
            push_string(out, v);
        }
        Value::Array(v) => {
            out.extend(9u32.to_le_bytes());
            push_array(out, v);
        }
        Value::U64(v) => push_scalar(out, 10, v.to_le_bytes()),
        Value::I64(v) => push_scalar(out, 11, v.to_le_bytes()),
        Value::F64(v) => push_scalar(out, 12, v.to_le_bytes()),
    }
}

fn push_scalar<const N: usize>(out: &mut Vec<u8>, code: u32, bytes: [u8; N]) {
    out.extend(code.to_le_bytes());
    out.extend(bytes);
}

/// The element type's number, the length, and the elements.
fn push_array(out: &mut Vec<u8>, array: &Array) {
    match array {
        Array::U8(v) => push_numbers(out, 0, v, |n| n.to_le_bytes()),
        Array::I8(v) => push_numbers(out, 1, v, |n| n.to_le_bytes()),
        Array::U16(v) => push_numbers(out, 2, v, |n| n.to_le_bytes()),
        Array::I16(v) => push_numbers(out, 3, v, |n| n.to_le_bytes()),
        Array::U32(v) => push_numbers(out, 4, v, |n| n.to_le_bytes()),
        Array::I32(v) => push_numbers(out, 5, v, |n| n.to_le_bytes()),
        Array::F32(v) => push_numbers(out, 6, v, |n| n.to_le_bytes()),
        Array::Bool(v) => push_numbers(out, 7, v, |n| [u8::from(*n)]),
        Array::String(v) => {
            push_length(out, 8, v.len());
            v.iter().for_each(|text| push_string(out, text));
        }
        Array::U64(v) => push_numbers(out, 10, v, |n| n.to_le_bytes()),
        Array::I64(v) => push_numbers(out, 11, v, |n| n.to_le_bytes()),
        Array::F64(v) => push_numbers(out, 12, v, |n| n.to_le_bytes()),
    }
}

fn push_numbers<T, const N: usize>(
    out: &mut Vec<u8>,
    code: u32,
    numbers: &[T],
    encode: impl Fn(&T) -> [u8; N],
) {
    push_length(out, code, numbers.len());
    out.extend(numbers.iter().flat_map(encode));
}

fn push_length(out: &mut Vec<u8>, code: u32, n: usize) {
    out.extend(code.to_le_bytes());
    out.extend((n as u64).to_le_bytes());
}
