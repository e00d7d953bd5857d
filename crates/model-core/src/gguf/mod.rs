//! GGUF files: typed metadata, and weights by name out of a memory map.
//!
//! [`GgufFile`] opens a file, all parts of a split one, or bytes in memory. Nothing in a file is
//! trusted: lengths and counts are compared with the bytes that are there before anything is
//! allocated, sizes are computed with checked arithmetic, and every mistake is a [`GgufError`]
//! with its numbers. After opening, every tensor of a supported format lies inside its file.
//!
//! Versions 2 and 3, little endian, are read; [`GgufWriter`] writes version 3. What a key means
//! for a model or a tokenizer is not known here.
//!
//! Source: the GGUF specification of the ggml project.

mod file;
mod header;
mod latents;
mod metadata;
mod reader;
mod split;
mod tensor;
mod value;
mod writer;

pub(crate) use file::integers;
pub use file::{GgufFile, is_of_convolutions};
pub use metadata::{FromValue, Metadata, Mismatch};
pub use split::part_file_name;
pub use tensor::{TensorInfo, TensorType};
pub use value::{Array, Value};
pub use writer::{GgufWriter, PendingWeight};

pub use crate::error::{GgufError, MetadataError};

/// The first four bytes of every GGUF file.
const MAGIC: [u8; 4] = *b"GGUF";
/// The key that changes the alignment of tensor data.
const ALIGNMENT_KEY: &str = "general.alignment";
/// Alignment of tensor data, in bytes, where a file does not specify it.
const DEFAULT_ALIGNMENT: u32 = 32;
/// Most dimensions a tensor has.
const MAX_DIMENSIONS: usize = 4;
