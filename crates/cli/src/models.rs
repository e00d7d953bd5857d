//! The architectures that the program knows, and the model that is compiled into it.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::Context;
use cellar::architectures;
use kv_graph::weights::SharedBytes;
use kv_graph::weights::WeightSource;
use model_core::directory::HfDirectory;
use model_core::gguf::{GgufFile, Metadata};
use model_core::model_file::{ModelFile, OpenModel, open_tokenizer, tokenizer_from_bytes};
use model_core::tokenizer::Tokenizer;

use crate::by_name::locate;
use crate::failure::usage;
use crate::input;

/// The first bytes of a GGUF file.
pub(crate) const GGUF_MAGIC: &[u8] = b"GGUF";

/// The longest header of a safetensors file, by its specification.
const MAX_SAFETENSORS_HEADER: u64 = 100_000_000;

/// Where a model comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ModelSource {
    /// The binary itself.
    Embedded,
    /// A GGUF file, a directory with safetensors files, or the name of a downloaded model.
    File(PathBuf),
}

/// The contents of a file or directory, whether its model can run or not.
#[derive(Debug)]
pub(crate) enum Contents {
    /// A GGUF file.
    Gguf(GgufFile),
    /// A directory.
    Directory(HfDirectory),
}

impl Contents {
    /// Its name in errors.
    pub(crate) fn label(&self) -> &str {
        match self {
            Self::Gguf(file) => file.label(),
            Self::Directory(directory) => directory.label(),
        }
    }

    /// All metadata, in the keys of GGUF.
    pub(crate) fn metadata(&self) -> &Metadata {
        match self {
            Self::Gguf(file) => file.metadata(),
            Self::Directory(directory) => directory.metadata(),
        }
    }

    /// All tensors, under the names of GGUF.
    pub(crate) fn weights(&self) -> &dyn WeightSource {
        match self {
            Self::Gguf(file) => file,
            Self::Directory(directory) => &**directory.weights(),
        }
    }
}

/// The model of commands that name none: the environment variable `CELLAR_MODEL`.
pub(crate) fn default_model() -> Option<PathBuf> {
    let path = std::env::var_os("CELLAR_MODEL").filter(|path| !path.is_empty());
    path.map(PathBuf::from)
}

impl ModelSource {
    /// The file, or else that of `CELLAR_MODEL`, or else the model in the binary.
    pub(crate) fn new(file: Option<&Path>) -> Self {
        let file = file.map(Path::to_owned).or_else(default_model);
        file.map_or(Self::Embedded, Self::File)
    }

    /// The file, or else that of `CELLAR_MODEL`, for what the model in the binary cannot do.
    ///
    /// # Errors
    /// A usage error where there is neither.
    pub(crate) fn given(file: Option<&Path>) -> anyhow::Result<Self> {
        match Self::new(file) {
            Self::Embedded => usage(
                "no model: give one with --model or before the texts, or set CELLAR_MODEL; the built-in \
                 model is not made for this",
            ),
            source @ Self::File(_) => Ok(source),
        }
    }

    /// Whether it is a directory.
    pub(crate) fn is_directory(&self) -> bool {
        match self {
            Self::Embedded => false,
            Self::File(path) => locate(path).is_ok_and(|path| path.is_dir()),
        }
    }

    /// Its name in messages.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Embedded => "the model in the binary".to_owned(),
            Self::File(path) => path.display().to_string(),
        }
    }

    /// Opens it without building the model of a GGUF file.
    pub(crate) fn contents(&self) -> anyhow::Result<Contents> {
        Ok(match self {
            Self::Embedded => Contents::Gguf(GgufFile::from_bytes(embedded())?),
            Self::File(path) if input::is_stdin(path) => {
                Contents::Gguf(GgufFile::from_bytes(from_stdin()?)?)
            }
            Self::File(path) => match locate(path)? {
                path if path.is_dir() => {
                    Contents::Directory(HfDirectory::open(&path, &architectures())?)
                }
                path => Contents::Gguf(GgufFile::open(&path)?),
            },
        })
    }

    /// The model without its tokenizer.
    pub(crate) fn open(&self) -> anyhow::Result<OpenModel> {
        let registry = architectures();
        Ok(match self {
            Self::Embedded => OpenModel::from_bytes(embedded(), &registry)?,
            Self::File(path) if input::is_stdin(path) => {
                OpenModel::from_bytes(from_stdin()?, &registry)?
            }
            Self::File(path) => OpenModel::open(&locate(path)?, &registry)?,
        })
    }

    /// The model with its tokenizer.
    pub(crate) fn load(&self) -> anyhow::Result<ModelFile> {
        Ok(ModelFile::with_tokenizer(self.open()?)?)
    }

    /// Reads its tokenizer alone: files without weights have one, too.
    pub(crate) fn load_tokenizer(&self) -> anyhow::Result<Tokenizer> {
        Ok(match self {
            Self::Embedded => tokenizer_from_bytes(embedded())?,
            Self::File(path) if input::is_stdin(path) => tokenizer_from_bytes(from_stdin()?)?,
            Self::File(path) => open_tokenizer(locate(path)?)?,
        })
    }
}

/// True for a model: a GGUF or safetensors file that is neither an importance matrix nor the logits
/// that `cellar logits` writes. A GGUF file that cannot be read counts as a model.
pub(crate) fn is_model_file(path: &Path) -> bool {
    let Ok(mut file) = File::open(path) else {
        return false;
    };
    let mut start = [0; 8];
    if file.read_exact(&mut start).is_err() {
        return false;
    }
    if start.starts_with(GGUF_MAGIC) {
        let opened = GgufFile::open(path);
        return !opened.is_ok_and(|file| file.metadata().get("general.type") == Ok("imatrix"));
    }
    // A safetensors file begins with the length of a JSON object, which lists the tensors.
    let mut header = Vec::new();
    let len = u64::from_le_bytes(start).min(MAX_SAFETENSORS_HEADER);
    if file.take(len).read_to_end(&mut header).is_err() {
        return false;
    }
    let tensors: HashMap<String, serde_json::Value> = match serde_json::from_slice(&header) {
        Ok(tensors) => tensors,
        Err(_) => return false,
    };
    let mut names = tensors.keys().filter(|name| *name != "__metadata__");
    names.any(|name| !name.starts_with("logits"))
}

/// A GGUF file on standard input, which is read once.
fn from_stdin() -> anyhow::Result<SharedBytes> {
    static BYTES: Mutex<Option<SharedBytes>> = Mutex::new(None);
    let mut bytes = BYTES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(bytes) = &*bytes {
        return Ok(bytes.clone());
    }
    let read = || {
        let mut stdin = input::stdin()?;
        // What is no GGUF file may have no end.
        let mut start = Vec::new();
        stdin.by_ref().take(4).read_to_end(&mut start)?;
        if start == GGUF_MAGIC {
            start.extend(input::read_bytes(stdin)?);
        }
        anyhow::Ok(SharedBytes::from(start))
    };
    let read = read().context("cannot read the model on stdin")?;
    Ok(bytes.insert(read).clone())
}

fn embedded() -> SharedBytes {
    SharedBytes::new(std::sync::Arc::new(cellar_stories::STORIES_LLAMA))
}
