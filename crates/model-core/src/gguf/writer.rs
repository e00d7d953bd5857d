//! Writing GGUF files, version 3, little endian: for conversions and tests.
//!
//! Invariant: what is written reads back as it was given, in the same order.

use std::collections::HashSet;
use std::io::{self, Write};

use kv_graph::weights::{Weight, WeightInfo};

use super::header::alignment;
use super::metadata::Metadata;
use super::tensor::TensorType;
use super::value::{Array, Value};
use super::{MAGIC, MAX_DIMENSIONS};
use crate::error::GgufError;

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
pub struct PendingWeight {
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

    /// Writes a file whose weights are made one after the other, for models that do not fit in
    /// memory twice; weights that were added are not written. Returns the bytes of the file.
    ///
    /// # Errors
    /// The errors of `make` and of `out`; [`GgufError`] where `general.alignment` is no power of
    /// two, for weights that [`GgufWriter::add`] refuses, and where a weight is not what was
    /// announced. What was written by then is not a GGUF file.
    pub fn write_each<E: From<GgufError> + From<io::Error>>(
        &self,
        out: &mut impl Write,
        announced: &[PendingWeight],
        mut make: impl FnMut(&PendingWeight) -> Result<Weight, E>,
    ) -> Result<u64, E> {
        let alignment = alignment(&self.metadata)? as usize;
        check(announced)?;
        let header = self.header(announced, alignment);
        out.write_all(&header)?;
        let mut n_bytes = header.len() as u64;
        for announced in announced {
            let weight = make(announced)?;
            if weight.info() != announced.info {
                return Err(E::from(GgufError::Changed {
                    name: announced.name.clone(),
                    wanted: announced.info.clone(),
                    got: weight.info(),
                }));
            }
            let n = weight.bytes().len();
            let n_padded = n.next_multiple_of(alignment);
            out.write_all(weight.bytes())?;
            out.write_all(&vec![0; n_padded - n])?;
            n_bytes += n_padded as u64;
        }
        Ok(n_bytes)
    }

    fn announced(&self) -> Vec<PendingWeight> {
        let announced = |weight: &Weight| PendingWeight {
            name: weight.name().to_owned(),
            info: weight.info(),
        };
        self.weights.iter().map(announced).collect()
    }

    /// Everything before the tensor data, padded.
    fn header(&self, weights: &[PendingWeight], alignment: usize) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend(VERSION.to_le_bytes());
        out.extend((weights.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in self.metadata.iter() {
            push_string(&mut out, key);
            push_value(&mut out, value);
        }
        let mut offset = 0;
        for PendingWeight { name, info } in weights {
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

/// The checks of [`GgufWriter::add`].
fn check(announced: &[PendingWeight]) -> Result<(), GgufError> {
    let mut names = HashSet::new();
    for PendingWeight { name, info } in announced {
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
