//! The safetensors files of a directory: one, or several with an index; or the same in memory.
//!
//! Invariant: every tensor of the list lies inside its mapped file (the safetensors crate checks
//! the header), no name is there twice, and the files hold what the index promises.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kv_block::BlockFormat;
use kv_graph::weights::{SharedBytes, WeightSource};
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::config::Bounds;
use super::fp8::{self, Fp8Scales};
use super::packed::{self, Packed};
use super::quantization::Storage;
use super::{HfConfig, ModelFileError};
use crate::error::lfs_pointer;
use crate::file_start::FileStart;
use crate::map::{MapError, map_file};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// One tensor as it lies in its file.
#[derive(Clone, Debug)]
pub(crate) struct TensorLocation {
    /// Outermost dimension first.
    pub(crate) shape: Vec<usize>,
    /// As the file calls it, where it is none that can be read.
    pub(crate) format: Result<BlockFormat, String>,
    pub(crate) bytes: SharedBytes,
    /// Where `bytes` are not the values in their format: how these are made.
    pub(super) coding: Option<TensorCoding>,
}

/// How values are made of several tensors of the files.
#[derive(Clone, Debug)]
pub(super) enum TensorCoding {
    /// 8-bit floats with these scales.
    Fp8(Fp8Scales),
    /// Numbers of fewer bits, whose codes are the bytes.
    Packed(Arc<Packed>),
}

impl TensorCoding {
    /// The kind of numbers, in words.
    pub(super) fn description(&self) -> String {
        match self {
            Self::Fp8(_) => "floats of 8 bits with scales".to_owned(),
            Self::Packed(packed) => packed.description(),
        }
    }
}

impl TensorLocation {
    /// The values in their format; packed numbers also in a wider one.
    pub(super) fn values(&self, format: BlockFormat) -> SharedBytes {
        match &self.coding {
            Some(TensorCoding::Fp8(scales)) => scales.decode(&self.bytes),
            Some(TensorCoding::Packed(packed)) => packed.decode(format),
            None => self.bytes.clone(),
        }
    }

    /// The format that holds the values of this tensor and of one in another format, where packed
    /// numbers may take a wider one.
    pub(super) fn joint_format(&self, other: &Self) -> Option<Result<BlockFormat, String>> {
        let is_packed = |stored: &Self| matches!(stored.coding, Some(TensorCoding::Packed(_)));
        match (&self.format, &other.format) {
            (Ok(a), Ok(b)) if is_packed(self) && is_packed(other) => {
                Some(Ok(packed::wider(*a, *b)))
            }
            (a, b) => (a == b).then(|| a.clone()),
        }
    }
}

/// What a safetensors header says of a tensor. Its places are `u64`: files are larger than the
/// memory of a 32-bit machine, which can read headers all the same.
#[derive(Debug, Deserialize)]
struct HeaderEntry {
    dtype: Dtype,
    shape: Vec<usize>,
    /// From the end of the header.
    data_offsets: [u64; 2],
}

impl HeaderEntry {
    /// Bytes of its values, if these can be counted and are whole bytes.
    fn n_bytes(&self) -> Option<u64> {
        let bits = self.dtype.bitsize() as u64;
        let mut dims = self.shape.iter().map(|&dim| dim as u64);
        let bits = dims.try_fold(bits, u64::checked_mul)?;
        bits.is_multiple_of(8).then_some(bits / 8)
    }
}

/// All tensors of a directory, by name.
#[derive(Debug, Default)]
pub(crate) struct TensorFiles {
    pub(crate) tensors: BTreeMap<String, TensorLocation>,
    /// The files, whole.
    pub(crate) maps: Vec<SharedBytes>,
}

impl TensorFiles {
    /// The files of a directory whose matrices are stored in this way.
    pub(super) fn open(directory: &Path, storage: Storage) -> Result<Self, ModelFileError> {
        let index = directory.join(INDEX);
        if !index.exists() {
            let mut files = Self::default();
            files.add(&directory.join(SINGLE))?;
            return files.joined(storage);
        }
        let config = HfConfig::open(&index)?;
        let map = config
            .value("weight_map")
            .and_then(|map| map.as_object())
            .ok_or_else(|| config.missing("weight_map", "an object of file names"))?;
        let mut places = HashMap::new();
        for (tensor, file) in map {
            let file = file.as_str().filter(|name| is_plain(name));
            let file = file.ok_or_else(|| {
                config.wrong(
                    &format!("weight_map.{tensor}"),
                    "the name of a file next to it",
                )
            })?;
            places.insert(tensor.as_str(), file);
        }
        let mut files = Self::default();
        for file in places.values().collect::<BTreeSet<_>>() {
            files.add(&directory.join(file))?;
        }
        match places
            .keys()
            .find(|&&name| !files.tensors.contains_key(name))
        {
            None => files.joined(storage),
            Some(&name) => Err(ModelFileError::Tensor {
                name: name.to_owned(),
                reason: format!(
                    "{} says that it is in '{}', but it is not",
                    config.file(),
                    places.get(name).copied().unwrap_or_default()
                ),
            }),
        }
    }

    /// The same with each matrix that is stored in several tensors as one.
    fn joined(mut self, storage: Storage) -> Result<Self, ModelFileError> {
        fp8::join(&mut self)?;
        packed::join(&mut self, storage)?;
        Ok(self)
    }

    /// The sizes that these tensors allow.
    pub(super) fn bounds(&self) -> Bounds {
        if self.tensors.is_empty() {
            return Bounds::UNKNOWN;
        }
        let dimensions = self.tensors.values().flat_map(|stored| &stored.shape);
        Bounds {
            n_tensors: self.tensors.len(),
            longest: dimensions.copied().max().unwrap_or(0),
        }
    }

    /// Tensors in memory, under the names that they have in files.
    pub(super) fn from_source(source: &dyn WeightSource) -> Result<Self, ModelFileError> {
        let stored = |name: String| match source.require(&name) {
            Ok(weight) => {
                let stored = TensorLocation {
                    shape: weight.shape().to_vec(),
                    format: Ok(weight.format()),
                    bytes: weight.bytes().clone(),
                    coding: None,
                };
                Ok((name, stored))
            }
            Err(error) => Err(ModelFileError::Tensor {
                reason: error.to_string(),
                name,
            }),
        };
        let tensors = source.names().into_iter().map(stored);
        let tensors = tensors.collect::<Result<_, _>>()?;
        let maps = Vec::new();
        Ok(Self { tensors, maps })
    }

    /// The tensors that headers name, without their values.
    pub(super) fn from_headers(starts: &[FileStart]) -> Result<Self, ModelFileError> {
        let mut files = Self::default();
        for start in starts {
            files.add_header(start)?;
        }
        fp8::join(&mut files)?;
        Ok(files)
    }

    /// Adds the tensors of a file of which only the header is known. As the safetensors crate does
    /// for whole files, this checks that they follow each other without gaps up to the file's end.
    fn add_header(&mut self, start: &FileStart) -> Result<(), ModelFileError> {
        let wrong = |reason: String| ModelFileError::Format {
            path: start.name.clone().into(),
            reason: format!("no sound safetensors file: {reason}"),
        };
        let n_read = start.bytes.len();
        let Some((length, rest)) = start.bytes.split_first_chunk() else {
            return Err(wrong(format!("{n_read} bytes are no header")));
        };
        let n_header = u64::from_le_bytes(*length);
        let header = usize::try_from(n_header).ok().and_then(|n| rest.get(..n));
        let header = header.ok_or_else(|| {
            wrong(format!(
                "its header takes {n_header} bytes, but only {n_read} of the file are there"
            ))
        })?;
        let json = |error: serde_json::Error| wrong(error.to_string());
        let mut entries: Map<String, Value> = serde_json::from_slice(header).map_err(json)?;
        entries.remove("__metadata__");
        let entries = entries.into_iter().map(|(name, entry)| {
            let entry: HeaderEntry = serde_json::from_value(entry).map_err(json)?;
            Ok((name, entry))
        });
        let mut entries = entries.collect::<Result<Vec<_>, ModelFileError>>()?;
        entries.sort_by_key(|(_, entry)| entry.data_offsets);
        let mut end = 0;
        for (name, entry) in entries {
            let [from, to] = entry.data_offsets;
            if from != end || entry.n_bytes() != to.checked_sub(from) {
                return Err(wrong(format!(
                    "the values of '{name}' are not at {from}..{to} behind the header"
                )));
            }
            end = to;
            let stored = TensorLocation {
                shape: entry.shape,
                format: format(entry.dtype),
                bytes: Vec::new().into(),
                coding: None,
            };
            self.insert(name, stored, &start.name)?;
        }
        let wanted = end.saturating_add(n_header).saturating_add(8);
        match start.file_len {
            Some(found) if found != wanted => Err(wrong(format!(
                "it has {found} bytes, but its header is of one of {wanted}"
            ))),
            _ => Ok(()),
        }
    }

    /// Adds a tensor of a file.
    fn insert(
        &mut self,
        name: String,
        stored: TensorLocation,
        file: &str,
    ) -> Result<(), ModelFileError> {
        if self.tensors.contains_key(&name) {
            let reason = format!("it is in '{file}' and in another file");
            return Err(ModelFileError::Tensor { name, reason });
        }
        self.tensors.insert(name, stored);
        Ok(())
    }

    /// Adds the tensors of a module in a folder of its own, whose names get `prefix`.
    pub(super) fn add_module(&mut self, folder: &Path, prefix: &str) -> Result<(), ModelFileError> {
        let mut module = Self::default();
        module.add(&folder.join(SINGLE))?;
        let named = module.tensors.into_iter();
        self.maps.append(&mut module.maps);
        self.tensors
            .extend(named.map(|(name, stored)| (format!("{prefix}{name}"), stored)));
        Ok(())
    }

    pub(crate) fn add(&mut self, path: &Path) -> Result<(), ModelFileError> {
        let bytes = map(path)?;
        let wrong = |error: &dyn std::fmt::Display| ModelFileError::Format {
            path: path.to_owned(),
            reason: format!("no sound safetensors file: {error}"),
        };
        if let Some(reason) = lfs_pointer(&bytes) {
            let path = path.to_owned();
            return Err(ModelFileError::Format { path, reason });
        }
        // This checks that offsets are in order, without gaps, and end where the file ends.
        let (n_header, header) = SafeTensors::read_metadata(&bytes).map_err(|e| wrong(&e))?;
        let start = n_header + 8;
        for (name, info) in header.tensors() {
            let (from, to) = info.data_offsets;
            let data = bytes.slice(start + from..start + to);
            let stored = TensorLocation {
                shape: info.shape.clone(),
                format: format(info.dtype),
                bytes: data.ok_or_else(|| wrong(&"a tensor reaches beyond the end"))?,
                coding: None,
            };
            self.insert(name.clone(), stored, &path.display().to_string())?;
        }
        self.maps.push(bytes);
        Ok(())
    }
}

/// Names of weights in one directory, not paths out of it.
fn is_plain(name: &str) -> bool {
    let path = PathBuf::from(name);
    path.file_name() == Some(path.as_os_str())
}

fn format(stored: Dtype) -> Result<BlockFormat, String> {
    match stored {
        Dtype::F32 => Ok(BlockFormat::F32),
        Dtype::F16 => Ok(BlockFormat::F16),
        Dtype::BF16 => Ok(BlockFormat::BF16),
        other => Err(format!("{other:?}")),
    }
}

fn map(path: &Path) -> Result<SharedBytes, ModelFileError> {
    let wrong = |reason: &str| ModelFileError::Format {
        path: path.to_owned(),
        reason: reason.to_owned(),
    };
    map_file(path).map_err(|error| match error {
        MapError::Io(source) => ModelFileError::Io {
            attempt: "read",
            path: path.to_owned(),
            source,
        },
        MapError::NotAFile => wrong("it is no file"),
        MapError::Empty => wrong("it is empty"),
    })
}
