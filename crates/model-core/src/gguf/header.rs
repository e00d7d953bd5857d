//! The contents of one GGUF file: version, metadata, and tensors with their place in it.
//!
//! Invariant of a [`Header`]: the bytes of every tensor whose type has a known size lie inside the
//! file, are aligned, and overlap no other's; names and keys are unique. Knows nothing of paths or
//! other parts.
//!
//! ```text
//! "GGUF", version u32, n_tensors u64, n_metadata u64
//! metadata:  key, type u32, value          (an array: type u32, length u64, elements)
//! tensors:   name, n_dimensions u32, dimensions u64 (fastest first), type u32, offset u64
//! padding to the alignment, then tensor data; offsets count from here
//! ```
//! Strings are a length u64 and that many bytes.

use std::collections::HashSet;

use super::metadata::Metadata;
use super::reader::Reader;
use super::tensor::{TensorInfo, TensorType};
use super::value::{Array, Value};
use super::{ALIGNMENT_KEY, DEFAULT_ALIGNMENT, MAGIC, MAX_DIMENSIONS};
use crate::error::{GgufError, lfs_pointer};

/// Longest key, in bytes (the specification's limit).
const MAX_KEY: u64 = 65_535;
/// Longest tensor name, in bytes. The specification says 64; some files exceed it a little.
const MAX_NAME: u64 = 1024;
/// Longest string value, in bytes. The longest known are whole tokenizer descriptions.
const MAX_STRING: u64 = 1 << 28;
/// Most elements of an array. The longest known are vocabularies and their merges.
const MAX_ELEMENTS: u64 = 1 << 24;
/// Most metadata keys.
const MAX_KEYS: u64 = 1 << 16;
/// Most tensors.
const MAX_TENSORS: u64 = 1 << 20;
/// The most levels of arrays that a value may have.
const MAX_NESTING: usize = 8;
/// The type number of arrays.
const ARRAY: u32 = 9;
/// Fewest bytes of a key with its value: a length, a type, and a value of one byte.
const MIN_ENTRY: u64 = 8 + 4 + 1;
/// Fewest bytes of a tensor's description: a length, no dimensions, a type and an offset.
const MIN_TENSOR: u64 = 8 + 4 + 4 + 8;

/// The contents of one file.
#[derive(Clone, Debug)]
pub(super) struct Header {
    pub(super) version: u32,
    pub(super) metadata: Metadata,
    pub(super) tensors: Vec<TensorInfo>,
}

impl Header {
    /// Reads the header of a whole file and checks that its tensors are there.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, GgufError> {
        Self::parse_start(bytes, Some(bytes.len() as u64))
    }

    /// Reads the header out of the first bytes of a file of `file_len`, and checks that its tensors
    /// lie inside of that.
    pub(super) fn parse_start(bytes: &[u8], file_len: Option<u64>) -> Result<Self, GgufError> {
        if bytes.is_empty() {
            return Err(GgufError::Empty);
        }
        let file_len = file_len.unwrap_or(i64::MAX as u64);
        let mut reader = Reader::new(bytes);
        let described = HeaderDescription::read(&mut reader).map_err(|error| match error {
            GgufError::Truncated { .. } | GgufError::TooMany { .. }
                if (bytes.len() as u64) < file_len =>
            {
                GgufError::StartTooShort {
                    n_bytes: bytes.len() as u64,
                }
            }
            other => other,
        })?;
        let HeaderDescription {
            version,
            metadata,
            tensors,
        } = described;
        let layout = Layout {
            alignment: alignment(&metadata)?,
            described_to: reader.position(),
            file_len,
        };
        let tensors = tensors.into_iter().map(|tensor| layout.place(tensor));
        let tensors = tensors.collect::<Result<Vec<_>, _>>()?;
        check_overlap(&tensors)?;
        Ok(Self {
            version,
            metadata,
            tensors,
        })
    }
}

/// A header, before the place of any tensor is known.
struct HeaderDescription {
    version: u32,
    metadata: Metadata,
    tensors: Vec<TensorDescription>,
}

impl HeaderDescription {
    fn read(reader: &mut Reader<'_>) -> Result<Self, GgufError> {
        let version = read_version(reader)?;
        let n_tensors = reader.u64(format_args!("the number of tensors"))?;
        let n_keys = reader.u64(format_args!("the number of metadata keys"))?;
        let metadata = read_metadata(reader, n_keys)?;
        let n_tensors =
            reader.check_count(n_tensors, MIN_TENSOR, MAX_TENSORS, format_args!("tensors"))?;
        let mut tensors = Vec::new();
        let mut names = HashSet::new();
        for i in 0..n_tensors {
            let tensor = TensorDescription::read(reader, i)?;
            if !names.insert(tensor.name.clone()) {
                return Err(GgufError::DuplicateTensor { name: tensor.name });
            }
            tensors.push(tensor);
        }
        Ok(Self {
            version,
            metadata,
            tensors,
        })
    }
}

fn read_version(reader: &mut Reader<'_>) -> Result<u32, GgufError> {
    let is_pointer = lfs_pointer(reader.rest()).is_some();
    let found = reader.array(format_args!("the magic number"))?;
    if is_pointer {
        return Err(GgufError::LfsPointer);
    }
    if found != MAGIC {
        return Err(GgufError::Magic { found });
    }
    match reader.u32(format_args!("the version"))? {
        version @ (2 | 3) => Ok(version),
        // Versions are small numbers; from a big-endian file they arrive with their bytes swapped.
        version if version != 0 && version & 0xffff == 0 => Err(GgufError::BigEndian),
        version => Err(GgufError::Version { version }),
    }
}

/// The alignment of tensor data, in bytes.
pub(super) fn alignment(metadata: &Metadata) -> Result<u32, GgufError> {
    let found = metadata
        .optional(ALIGNMENT_KEY)?
        .unwrap_or(DEFAULT_ALIGNMENT);
    if found.is_power_of_two() {
        Ok(found)
    } else {
        Err(GgufError::Alignment { found })
    }
}

fn read_metadata(reader: &mut Reader<'_>, n_keys: u64) -> Result<Metadata, GgufError> {
    let n_keys = reader.check_count(n_keys, MIN_ENTRY, MAX_KEYS, format_args!("metadata keys"))?;
    let mut metadata = Metadata::new();
    for i in 0..n_keys {
        let key = reader.utf8(MAX_KEY, format_args!("key {i} of the metadata"))?;
        let code = reader.u32(format_args!("the type of metadata '{key}'"))?;
        let Some(value) = read_value(reader, key, code)? else {
            tracing::warn!(
                "metadata '{key}' is an array of arrays, which nothing here reads: it is left out"
            );
            continue;
        };
        if metadata.insert(key, value).is_some() {
            return Err(GgufError::DuplicateKey {
                key: key.to_owned(),
            });
        }
    }
    Ok(metadata)
}

/// A value; `None` for an array of arrays, which is passed over.
fn read_value(reader: &mut Reader<'_>, key: &str, code: u32) -> Result<Option<Value>, GgufError> {
    let part = format_args!("metadata '{key}'");
    Ok(Some(match code {
        0 => Value::U8(u8::from_le_bytes(reader.array(part)?)),
        1 => Value::I8(i8::from_le_bytes(reader.array(part)?)),
        2 => Value::U16(u16::from_le_bytes(reader.array(part)?)),
        3 => Value::I16(i16::from_le_bytes(reader.array(part)?)),
        4 => Value::U32(u32::from_le_bytes(reader.array(part)?)),
        5 => Value::I32(i32::from_le_bytes(reader.array(part)?)),
        6 => Value::F32(f32::from_le_bytes(reader.array(part)?)),
        7 => Value::Bool(truth(key, u8::from_le_bytes(reader.array(part)?))?),
        // As in arrays, and as llama.cpp, which does not look at the encoding.
        8 => Value::String(String::from_utf8_lossy(reader.text(MAX_STRING, part)?).into_owned()),
        9 => {
            let code = reader.u32(format_args!("the element type of metadata '{key}'"))?;
            let n = reader.u64(format_args!("the length of metadata '{key}'"))?;
            if code == ARRAY {
                skip_arrays(reader, key, n, MAX_NESTING)?;
                return Ok(None);
            }
            Value::Array(read_array(reader, key, code, n)?)
        }
        10 => Value::U64(u64::from_le_bytes(reader.array(part)?)),
        11 => Value::I64(i64::from_le_bytes(reader.array(part)?)),
        12 => Value::F64(f64::from_le_bytes(reader.array(part)?)),
        code => {
            return Err(GgufError::UnknownValueType {
                key: key.to_owned(),
                code,
            });
        }
    }))
}

/// Passes over `n` arrays, whose elements may be arrays.
fn skip_arrays(reader: &mut Reader<'_>, key: &str, n: u64, levels: usize) -> Result<(), GgufError> {
    let too_deep = || GgufError::NestedArray {
        key: key.to_owned(),
        limit: MAX_NESTING,
    };
    let levels = levels.checked_sub(1).ok_or_else(too_deep)?;
    // An array takes at least its type and its length.
    let part = format_args!("elements of metadata '{key}'");
    for _ in 0..reader.check_count(n, 12, MAX_ELEMENTS, part)? {
        let code = reader.u32(format_args!("the element type of metadata '{key}'"))?;
        let n = reader.u64(format_args!("the length of metadata '{key}'"))?;
        match code {
            ARRAY => skip_arrays(reader, key, n, levels)?,
            _ => drop(read_array(reader, key, code, n)?),
        }
    }
    Ok(())
}

fn read_array(reader: &mut Reader<'_>, key: &str, code: u32, n: u64) -> Result<Array, GgufError> {
    Ok(match code {
        0 => Array::U8(numbers(reader, key, n, u8::from_le_bytes)?),
        1 => Array::I8(numbers(reader, key, n, i8::from_le_bytes)?),
        2 => Array::U16(numbers(reader, key, n, u16::from_le_bytes)?),
        3 => Array::I16(numbers(reader, key, n, i16::from_le_bytes)?),
        4 => Array::U32(numbers(reader, key, n, u32::from_le_bytes)?),
        5 => Array::I32(numbers(reader, key, n, i32::from_le_bytes)?),
        6 => Array::F32(numbers(reader, key, n, f32::from_le_bytes)?),
        7 => {
            let bytes = numbers(reader, key, n, u8::from_le_bytes)?;
            Array::Bool(
                bytes
                    .into_iter()
                    .map(|b| truth(key, b))
                    .collect::<Result<_, _>>()?,
            )
        }
        8 => Array::String(strings(reader, key, n)?),
        10 => Array::U64(numbers(reader, key, n, u64::from_le_bytes)?),
        11 => Array::I64(numbers(reader, key, n, i64::from_le_bytes)?),
        12 => Array::F64(numbers(reader, key, n, f64::from_le_bytes)?),
        code => {
            return Err(GgufError::UnknownValueType {
                key: key.to_owned(),
                code,
            });
        }
    })
}

/// `n` numbers of `N` bytes each. Not one is allocated before all are known to be there.
fn numbers<T, const N: usize>(
    reader: &mut Reader<'_>,
    key: &str,
    n: u64,
    decode: impl Fn([u8; N]) -> T,
) -> Result<Vec<T>, GgufError> {
    let n = reader.check_count(
        n,
        N as u64,
        MAX_ELEMENTS,
        format_args!("elements of metadata '{key}'"),
    )?;
    let bytes = reader.take((n * N) as u64, format_args!("metadata '{key}'"))?;
    Ok(bytes
        .as_chunks::<N>()
        .0
        .iter()
        .map(|chunk| decode(*chunk))
        .collect())
}

/// `n` strings, bad UTF-8 replaced (see [`Array`] for why).
fn strings(reader: &mut Reader<'_>, key: &str, n: u64) -> Result<Vec<String>, GgufError> {
    // A string takes at least its length of 8 bytes.
    let n = reader.check_count(
        n,
        8,
        MAX_ELEMENTS,
        format_args!("elements of metadata '{key}'"),
    )?;
    let mut strings = Vec::new();
    for i in 0..n {
        let text = reader.text(MAX_STRING, format_args!("element {i} of metadata '{key}'"))?;
        strings.push(String::from_utf8_lossy(text).into_owned());
    }
    Ok(strings)
}

fn truth(key: &str, found: u8) -> Result<bool, GgufError> {
    match found {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(GgufError::BadBool {
            key: key.to_owned(),
            found,
        }),
    }
}

/// A tensor as described in the header, before its place in the file is known.
struct TensorDescription {
    name: String,
    /// Outermost first.
    shape: Vec<u64>,
    stored: TensorType,
    /// From the start of the data section.
    offset: u64,
}

impl TensorDescription {
    fn read(reader: &mut Reader<'_>, i: usize) -> Result<Self, GgufError> {
        let name = reader.utf8(MAX_NAME, format_args!("the name of tensor {i}"))?;
        let n_dimensions =
            reader.u32(format_args!("the number of dimensions of tensor '{name}'"))?;
        if n_dimensions as usize > MAX_DIMENSIONS {
            return Err(GgufError::Dimensions {
                name: name.to_owned(),
                n_dimensions,
            });
        }
        let mut shape = Vec::with_capacity(n_dimensions as usize);
        for _ in 0..n_dimensions {
            shape.push(reader.u64(format_args!("the dimensions of tensor '{name}'"))?);
        }
        shape.reverse();
        let code = reader.u32(format_args!("the type of tensor '{name}'"))?;
        let offset = reader.u64(format_args!("the offset of tensor '{name}'"))?;
        Ok(Self {
            name: name.to_owned(),
            shape,
            stored: TensorType::from_code(code),
            offset,
        })
    }

    /// Bytes that the tensor takes: 0 for a type of unknown size.
    fn n_bytes(&self) -> Result<u64, GgufError> {
        let bad_shape = || GgufError::Shape {
            name: self.name.clone(),
            shape: self.shape.clone(),
        };
        let n_values = self.shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d));
        // What `i64` cannot count cannot be in a file, and a tensor of no values is a mistake.
        let is_countable = self.shape.iter().all(|&d| usize::try_from(d).is_ok());
        let n_values = n_values.filter(|&n| n > 0 && i64::try_from(n).is_ok() && is_countable);
        let n_values = n_values.ok_or_else(bad_shape)?;
        let Some((block_len, block_bytes)) = self.stored.block() else {
            return Ok(0);
        };
        let columns = self.shape.last().copied().unwrap_or(1);
        if !columns.is_multiple_of(block_len) {
            return Err(GgufError::PartialBlock {
                name: self.name.clone(),
                columns,
                stored: self.stored.to_string(),
                block_len,
            });
        }
        (n_values / block_len)
            .checked_mul(block_bytes)
            .ok_or_else(bad_shape)
    }
}

/// The place of tensor data in a file.
struct Layout {
    alignment: u32,
    /// The end of the descriptions.
    described_to: u64,
    file_len: u64,
}

impl Layout {
    fn place(&self, tensor: TensorDescription) -> Result<TensorInfo, GgufError> {
        let n_bytes = tensor.n_bytes()?;
        let TensorDescription {
            name,
            shape,
            stored,
            offset,
        } = tensor;
        if !offset.is_multiple_of(u64::from(self.alignment)) {
            let alignment = self.alignment;
            return Err(GgufError::Misaligned {
                name,
                offset,
                alignment,
            });
        }
        // The position in the file is below 2^63 and the alignment below 2^32: no overflow.
        let data_start = self
            .described_to
            .next_multiple_of(u64::from(self.alignment));
        let start = data_start.checked_add(offset);
        let end = start.and_then(|start| start.checked_add(n_bytes));
        match (start, end) {
            (Some(start), Some(end)) if end <= self.file_len => {
                let data = start..end;
                let shape = shape.into_iter().map(|d| d as usize).collect();
                Ok(TensorInfo {
                    name,
                    shape,
                    stored,
                    part: 0,
                    data,
                })
            }
            _ => {
                let at = start.unwrap_or(u64::MAX);
                Err(GgufError::Truncated {
                    part: format!("the data of tensor '{name}'"),
                    at,
                    wanted: n_bytes,
                    available: self.file_len.saturating_sub(at),
                })
            }
        }
    }
}

fn check_overlap(tensors: &[TensorInfo]) -> Result<(), GgufError> {
    let mut by_place: Vec<&TensorInfo> = tensors.iter().filter(|t| !t.data.is_empty()).collect();
    by_place.sort_by_key(|tensor| tensor.data.start);
    for (first, second) in by_place.iter().zip(by_place.iter().skip(1)) {
        if second.data.start < first.data.end {
            return Err(GgufError::Overlap {
                first: first.name.clone(),
                second: second.name.clone(),
                n_bytes: first.data.end.min(second.data.end) - second.data.start,
            });
        }
    }
    Ok(())
}
