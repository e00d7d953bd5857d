//! [`GgufFile`]: an open model file, all its parts mapped. Knows nothing of what is in it.

use std::collections::HashMap;
use std::fmt;
use std::path::Path;

use kv_block::BlockFormat;
use kv_graph::weights::{
    SharedBytes, SourceChanged, Weight, WeightError, WeightInfo, WeightSource,
};

use super::header::Header;
use super::latents::{self, LatentHeads, LatentPart};
use super::metadata::Metadata;
use super::split::{Split, other_parts};
use super::tensor::{TensorInfo, TensorType};
use crate::error::{GgufError, ModelFileError};
use crate::file_start::FileStart;
use crate::head_file::HeadWeights;
use crate::map::{MapError, map_file};

/// A GGUF model: metadata, and weights that are read where they lie.
///
/// A file is mapped, not read: opening is fast, weights are shared with the system's file cache,
/// and a [`Weight`] keeps the map alive. A file that is changed in place while it is open makes
/// [`WeightSource::check`] fail from then on; one that is replaced by renaming stays as it was.
pub struct GgufFile {
    label: String,
    version: u32,
    metadata: Metadata,
    tensors: Vec<TensorInfo>,
    by_name: HashMap<String, usize>,
    parts: Vec<SharedBytes>,
}

impl GgufFile {
    /// Opens a file; for the first part of a split one (`NAME-00001-of-00003.gguf`), all parts,
    /// which must be in the same directory.
    ///
    /// # Errors
    /// [`ModelFileError`] where a file cannot be opened, is no complete GGUF file, or parts do not
    /// belong together.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, ModelFileError> {
        let path = path.as_ref();
        let label = |path: &Path| format!("'{}'", path.display());
        let mut file = Self::from_part(map(path)?, label(path))?;
        let split_error = |reason| in_file(&label(path), reason);
        let Some(split) = file.split()? else {
            return Ok(file);
        };
        let Split {
            part,
            n_parts,
            n_tensors,
        } = split;
        if part != 1 {
            return Err(split_error(GgufError::NotFirstPart { part, n_parts }));
        }
        let paths = other_parts(path, n_parts).map_err(split_error)?;
        for (part, path) in (2..).zip(paths) {
            file.append_part(Self::from_part(map(&path)?, label(&path))?, part, n_parts)?;
        }
        file.check_tensor_count(n_tensors)?;
        Ok(file)
    }

    /// A model of which only the first bytes of its file are known, or of all files of a split one,
    /// in any order: what a file's header says without the rest of it. Tensors can be described
    /// then; [`WeightError::NotRead`] is the answer for values behind these bytes.
    ///
    /// # Errors
    /// [`ModelFileError`] as of [`GgufFile::open`]; [`GgufError::StartTooShort`] where a header is
    /// longer than the bytes given.
    pub fn from_starts(starts: Vec<FileStart>) -> Result<Self, ModelFileError> {
        let n_given = starts.len() as u64;
        let mut parts = Vec::new();
        for start in starts {
            let header = Header::parse_start(&start.bytes, start.file_len);
            let header = header.map_err(|reason| in_file(&start.name, reason))?;
            let file = Self::new(header, start.bytes, start.name);
            parts.push((file.split()?, file));
        }
        // The one that is whole, or the first part.
        parts.sort_by_key(|(split, _)| split.map_or(0, |split| split.part));
        let mut parts = parts.into_iter();
        let Some((split, mut file)) = parts.next() else {
            return Err(in_file("model", GgufError::Empty));
        };
        let Some(Split {
            part,
            n_parts,
            n_tensors,
        }) = split
        else {
            return match parts.next() {
                None => Ok(file),
                Some((_, other)) => file.append_part(other, 2, n_given).map(|()| file),
            };
        };
        if part != 1 {
            return Err(in_file(
                &file.label,
                GgufError::NotFirstPart { part, n_parts },
            ));
        }
        if n_given < n_parts {
            return Err(in_file(
                &file.label,
                GgufError::PartsMissing { n_parts, n_given },
            ));
        }
        for (part, (_, other)) in (2..).zip(parts) {
            file.append_part(other, part, n_parts)?;
        }
        file.check_tensor_count(n_tensors)?;
        Ok(file)
    }

    /// A whole file in memory, such as one that is part of the program.
    ///
    /// # Errors
    /// [`ModelFileError`] where the bytes are no complete GGUF file, or part of a split one.
    pub fn from_bytes(bytes: SharedBytes) -> Result<Self, ModelFileError> {
        let file = Self::from_part(bytes, "model in memory".to_owned())?;
        let reason = match file.split()? {
            None => return Ok(file),
            Some(Split {
                part: 1, n_parts, ..
            }) => GgufError::PartInMemory { n_parts },
            Some(Split { part, n_parts, .. }) => GgufError::NotFirstPart { part, n_parts },
        };
        Err(in_file(&file.label, reason))
    }

    /// The file's name in errors: its path in quotes, or a description of the bytes.
    pub fn label(&self) -> &str {
        &self.label
    }

    /// Version of the format: 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// All metadata (of a split model: that of the first part).
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// All tensors, in the order of the file.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The header's entry of the tensor with this name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name.get(name).and_then(|&i| self.tensors.get(i))
    }

    /// The bytes of all files.
    pub(crate) fn files(&self) -> &[SharedBytes] {
        &self.parts
    }

    /// Number of files: 1, or the parts of a split one.
    pub fn n_parts(&self) -> usize {
        self.parts.len()
    }

    /// The weight with this name, without copying it.
    ///
    /// # Errors
    /// [`WeightError::Missing`], or [`WeightError::UnsupportedFormat`] with the name or number of
    /// a tensor type that cannot be read.
    pub fn weight(&self, name: &str) -> Result<Weight, WeightError> {
        if let Some((tensor, heads, part)) = self.part_of_latents(name) {
            let whole = self.described(&tensor.name)?;
            let missing = || WeightError::Missing {
                name: name.to_owned(),
            };
            let info = heads.describe(part, &whole).ok_or_else(missing)?;
            let bytes = heads.bytes(part, &whole, &self.bytes_of(tensor)?);
            return Weight::new(name, info.shape, info.format, bytes.ok_or_else(missing)?);
        }
        let (tensor, format) = self.readable(name)?;
        Weight::new(name, computed_shape(tensor), format, self.bytes_of(tensor)?)
    }

    /// The tensor that holds the one of this name together with another: a matrix of latent
    /// attention that the file does not have by itself.
    fn part_of_latents(&self, name: &str) -> Option<(&TensorInfo, LatentHeads, LatentPart)> {
        let (whole, part) = latents::whole_of(name)?;
        let whole = self
            .tensor(&whole)
            .filter(|_| self.tensor(name).is_none())?;
        let heads = LatentHeads::of(&self.metadata)?;
        heads.fit(&whole.shape).then_some((whole, heads, part))
    }

    fn described(&self, name: &str) -> Result<WeightInfo, WeightError> {
        let (tensor, format) = self.readable(name)?;
        Ok(WeightInfo {
            shape: computed_shape(tensor),
            format,
        })
    }

    fn bytes_of(&self, tensor: &TensorInfo) -> Result<SharedBytes, WeightError> {
        let place = usize::try_from(tensor.data.start).ok();
        let place = place.zip(usize::try_from(tensor.data.end).ok());
        let part = self.parts.get(tensor.part).zip(place);
        let bytes = part.and_then(|(part, (start, end))| part.slice(start..end));
        bytes.ok_or_else(|| WeightError::NotRead {
            name: tensor.name.clone(),
        })
    }

    /// A tensor whose format can be read.
    fn readable(&self, name: &str) -> Result<(&TensorInfo, BlockFormat), WeightError> {
        let tensor = self.tensor(name).ok_or_else(|| WeightError::Missing {
            name: name.to_owned(),
        })?;
        match tensor.stored {
            TensorType::Supported(format) => Ok((tensor, format)),
            TensorType::Unsupported(code) => Err(WeightError::UnsupportedFormat {
                name: name.to_owned(),
                stored: format!("{} (tensor type number {code})", tensor.stored),
            }),
        }
    }

    fn from_part(bytes: SharedBytes, label: String) -> Result<Self, ModelFileError> {
        let header = Header::parse(&bytes).map_err(|reason| in_file(&label, reason))?;
        Ok(Self::new(header, bytes, label))
    }

    fn new(header: Header, bytes: SharedBytes, label: String) -> Self {
        let Header {
            version,
            metadata,
            tensors,
        } = header;
        let tensors: Vec<_> = tensors.into_iter().map(usually_named).collect();
        let names = tensors.iter().map(|tensor| tensor.name.clone());
        let by_name = names.zip(0..).collect();
        Self {
            label,
            version,
            metadata,
            tensors,
            by_name,
            parts: vec![bytes],
        }
    }

    fn split(&self) -> Result<Option<Split>, ModelFileError> {
        Split::from_metadata(&self.metadata).map_err(|reason| in_file(&self.label, reason))
    }

    /// Adds the tensors of a file that is to be part `part` of `n_parts`.
    fn append_part(&mut self, other: Self, part: u64, n_parts: u64) -> Result<(), ModelFileError> {
        // A part without the keys is the only one.
        let (found_part, found_n_parts) = other.split()?.map_or((1, 1), |s| (s.part, s.n_parts));
        if (found_part, found_n_parts) != (part, n_parts) {
            let reason = GgufError::PartMismatch {
                part,
                n_parts,
                found_part,
                found_n_parts,
            };
            return Err(in_file(&other.label, reason));
        }
        self.append(other)
    }

    /// Whether all parts together have as many tensors as the first one says.
    fn check_tensor_count(&self, wanted: Option<u64>) -> Result<(), ModelFileError> {
        let found = self.tensors.len() as u64;
        match wanted {
            Some(wanted) if wanted != found => Err(in_file(
                &self.label,
                GgufError::TensorCount { wanted, found },
            )),
            _ => Ok(()),
        }
    }

    fn append(&mut self, other: Self) -> Result<(), ModelFileError> {
        for mut tensor in other.tensors {
            let name = tensor.name.clone();
            if self.by_name.contains_key(&name) {
                return Err(in_file(&other.label, GgufError::DuplicateTensor { name }));
            }
            tensor.part = self.parts.len();
            self.by_name.insert(name, self.tensors.len());
            self.tensors.push(tensor);
        }
        self.parts.extend(other.parts);
        Ok(())
    }
}

/// A tensor by the name that most converters give it. That of Hunyuan 3 leaves out that the biases
/// on the choice of experts are biases.
fn usually_named(tensor: TensorInfo) -> TensorInfo {
    if tensor.name.ends_with(".exp_probs_b") {
        let name = format!("{}.bias", tensor.name);
        return TensorInfo { name, ..tensor };
    }
    tensor
}

/// The shape that graphs want of a tensor. An outermost dimension of 1 means nothing in GGUF, and
/// converters write or leave it out: biases on the choice of experts are vectors, the router of a
/// shared expert is a matrix.
fn computed_shape(tensor: &TensorInfo) -> Vec<usize> {
    match *tensor.shape {
        [1, n] if tensor.name.ends_with(".exp_probs_b.bias") => vec![n],
        [n] if tensor.name.ends_with(".ffn_gate_inp_shexp.weight") => vec![1, n],
        [n, 1] if is_of_convolutions(&tensor.name) => vec![n],
        [outputs, inputs, kernel @ (1 | 3 | 7)] if is_of_convolutions(&tensor.name) => {
            vec![outputs, inputs * kernel]
        }
        _ => tensor.shape.clone(),
    }
}

/// True if a tensor is one of WavTokenizer's convolutions over tokens, which are matrices over the
/// rows of several tokens, or a bias or norm between them, which has a dimension for tokens in
/// files.
pub fn is_of_convolutions(name: &str) -> bool {
    let of_conv_next = name.strip_prefix("convnext.");
    name.starts_with("conv1d.")
        || name.starts_with("posnet.")
        || of_conv_next.is_some_and(|name| name.contains(".dw."))
}

impl WeightSource for GgufFile {
    fn get(&self, name: &str) -> Option<Weight> {
        self.weight(name).ok()
    }

    fn names(&self) -> Vec<String> {
        let names = self.tensors.iter().flat_map(|tensor| {
            let parts = latents::parts_of(&tensor.name).filter(|parts| {
                let mut parts = parts.iter();
                parts.all(|part| self.part_of_latents(part).is_some())
            });
            parts.map_or_else(|| vec![tensor.name.clone()], Vec::from)
        });
        names.collect()
    }

    fn require(&self, name: &str) -> Result<Weight, WeightError> {
        self.weight(name)
    }

    fn describe(&self, name: &str) -> Result<WeightInfo, WeightError> {
        match self.part_of_latents(name) {
            None => self.described(name),
            Some((whole, heads, part)) => {
                let part = heads.describe(part, &self.described(&whole.name)?);
                part.ok_or_else(|| WeightError::Missing {
                    name: name.to_owned(),
                })
            }
        }
    }

    fn check(&self) -> Result<(), SourceChanged> {
        self.parts.iter().try_for_each(SharedBytes::check)
    }
}

impl HeadWeights for GgufFile {
    fn integers(&self, name: &str) -> Result<Option<Vec<i64>>, WeightError> {
        let Some(tensor) = self.tensor(name) else {
            return Ok(None);
        };
        let numbers = integers(&tensor.stored.to_string(), &self.bytes_of(tensor)?);
        let numbers = numbers.ok_or_else(|| WeightError::UnsupportedFormat {
            name: name.to_owned(),
            stored: tensor.stored.to_string(),
        });
        numbers.map(Some)
    }
}

/// The numbers in bytes that are stored as `I64` or `I32`; `None` of other types.
pub(crate) fn integers(stored: &str, bytes: &[u8]) -> Option<Vec<i64>> {
    let (wide, _) = bytes.as_chunks::<8>();
    let (narrow, _) = bytes.as_chunks::<4>();
    match stored {
        "I64" => Some(wide.iter().map(|n| i64::from_le_bytes(*n)).collect()),
        "I32" => {
            let numbers = narrow.iter().map(|n| i32::from_le_bytes(*n));
            Some(numbers.map(i64::from).collect())
        }
        _ => None,
    }
}

impl fmt::Debug for GgufFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GgufFile")
            .field("version", &self.version)
            .field("n_keys", &self.metadata.len())
            .field("n_tensors", &self.tensors.len())
            .field("parts", &self.parts)
            .finish()
    }
}

fn in_file(label: &str, reason: GgufError) -> ModelFileError {
    ModelFileError::Gguf {
        file: label.to_owned(),
        reason,
    }
}

fn map(path: &Path) -> Result<SharedBytes, ModelFileError> {
    map_file(path).map_err(|error| match error {
        MapError::Io(source) => ModelFileError::Io {
            attempt: "open",
            path: path.to_owned(),
            source,
        },
        MapError::NotAFile => ModelFileError::NotAFile {
            path: path.to_owned(),
        },
        MapError::Empty => in_file(&format!("'{}'", path.display()), GgufError::Empty),
    })
}
