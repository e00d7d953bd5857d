//! What can be wrong with a GGUF file, in words a user can act on. Decides nothing.

use std::io;
use std::path::PathBuf;

use super::metadata::MetadataError;

/// A GGUF file that cannot be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GgufError {
    /// The file cannot be found, read or mapped.
    #[error("cannot open '{}': {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The path is a directory or a device.
    #[error("'{}' is not a file", path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
    /// The contents are not what a GGUF file holds.
    #[error("{file}: {source}")]
    Format {
        /// The file's path, or what the bytes are.
        file: String,
        /// What is wrong.
        source: FormatError,
    },
    /// The parts of a split file do not belong together.
    #[error("{file}: {source}")]
    Split {
        /// The file's path, or what the bytes are.
        file: String,
        /// What is wrong.
        source: SplitError,
    },
}

/// Bytes that are not a GGUF file of a supported kind.
#[derive(Clone, Debug, thiserror::Error, PartialEq)]
#[non_exhaustive]
pub enum FormatError {
    /// No bytes at all.
    #[error("the file is empty")]
    Empty,
    /// The first bytes are not `GGUF`.
    #[error("not a GGUF file: it begins with \"{}\", not \"GGUF\"", found.escape_ascii())]
    Magic {
        /// The first four bytes.
        found: [u8; 4],
    },
    /// A file for big-endian machines.
    #[error("a big-endian GGUF file; only little-endian files can be read")]
    BigEndian,
    /// A version that is too old or too new.
    #[error("GGUF version {version} cannot be read, only versions 2 and 3")]
    Version {
        /// The version in the header.
        version: u32,
    },
    /// The bytes end too early.
    #[error("truncated in {part} at byte {at}: {wanted} bytes wanted, {available} available")]
    Truncated {
        /// What was being read.
        part: String,
        /// Where it begins, in bytes from the start of the file.
        at: u64,
        /// Bytes it takes.
        wanted: u64,
        /// Bytes that are left there.
        available: u64,
    },
    /// More things claimed than a file may have or than the rest of this one could hold.
    #[error(
        "truncated or damaged: {count} {part} claimed, but there can be at most {at_most} in the \
         bytes that are left"
    )]
    TooMany {
        /// What is counted.
        part: String,
        /// The count in the file.
        count: u64,
        /// The most there can be.
        at_most: u64,
    },
    /// A name, key or string beyond its limit.
    #[error("{part}: a length of {length} bytes, where at most {at_most} are allowed")]
    TooLong {
        /// What was being read.
        part: String,
        /// The length in the file.
        length: u64,
        /// The limit.
        at_most: u64,
    },
    /// Text that is not UTF-8.
    #[error("{part} is not UTF-8 (first bad byte after {valid} good ones)")]
    NotUtf8 {
        /// What was being read.
        part: String,
        /// Length of the valid start, in bytes.
        valid: usize,
    },
    /// A truth value that is neither 0 nor 1.
    #[error("metadata '{key}': {found} is not a truth value (0 or 1)")]
    BadBool {
        /// The key.
        key: String,
        /// The byte found.
        found: u8,
    },
    /// A metadata type that the specification does not know.
    #[error("metadata '{key}' has unknown type {code}")]
    UnknownValueType {
        /// The key.
        key: String,
        /// The type number in the file.
        code: u32,
    },
    /// An array of arrays.
    #[error("metadata '{key}' is an array of arrays, which is not supported")]
    NestedArray {
        /// The key.
        key: String,
    },
    /// A key that is there twice.
    #[error("metadata '{key}' is there twice")]
    DuplicateKey {
        /// The key.
        key: String,
    },
    /// Two tensors of one name.
    #[error("tensor '{name}' is there twice")]
    DuplicateTensor {
        /// The name.
        name: String,
    },
    /// A key that this reader needs has a wrong type or value.
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    /// An alignment that is no power of two.
    #[error("general.alignment is {found}, which is not a power of two")]
    Alignment {
        /// The alignment in the file.
        found: u32,
    },
    /// More dimensions than a tensor may have.
    #[error("tensor '{name}' has {n_dimensions} dimensions, at most 4 are allowed")]
    Dimensions {
        /// The tensor.
        name: String,
        /// Its number of dimensions.
        n_dimensions: u32,
    },
    /// A tensor without values, or with more than can be counted.
    #[error("tensor '{name}': shape {shape:?} is empty or too large")]
    Shape {
        /// The tensor.
        name: String,
        /// Its dimensions, outermost first.
        shape: Vec<u64>,
    },
    /// The rows of a tensor are no whole number of blocks.
    #[error(
        "tensor '{name}': rows of {columns} values cannot be stored as {stored}, whose blocks hold \
         {block_len}"
    )]
    PartialBlock {
        /// The tensor.
        name: String,
        /// Length of one row.
        columns: u64,
        /// How it is stored.
        stored: String,
        /// Values in one block.
        block_len: u64,
    },
    /// Tensor data that does not begin at a multiple of the alignment.
    #[error("tensor '{name}' begins at offset {offset}, which is not a multiple of {alignment}")]
    Misaligned {
        /// The tensor.
        name: String,
        /// Its offset in the data section.
        offset: u64,
        /// The file's alignment.
        alignment: u32,
    },
    /// Two tensors share bytes.
    #[error("tensors '{first}' and '{second}' overlap by {n_bytes} bytes")]
    Overlap {
        /// The tensor that begins first.
        first: String,
        /// The tensor that begins inside it.
        second: String,
        /// Bytes they share.
        n_bytes: u64,
    },
}

/// Parts of a split file that do not belong together.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum SplitError {
    /// Another part than the first was opened.
    #[error("this is part {part} of {n_parts}; open the first part instead")]
    NotFirst {
        /// Number of the part, from 1.
        part: u64,
        /// Number of parts.
        n_parts: u64,
    },
    /// The file says that it has parts, but its name does not lead to them.
    #[error("this is the first of {n_parts} parts, but it is not named '…{suffix}'")]
    Name {
        /// Number of parts.
        n_parts: u64,
        /// How its name should end.
        suffix: String,
    },
    /// A part in memory has no neighbours.
    #[error("this is the first of {n_parts} parts; bytes in memory cannot be split")]
    InMemory {
        /// Number of parts.
        n_parts: u64,
    },
    /// A part says that it is another one, or one of another number of parts.
    #[error(
        "says it is part {found_part} of {found_n_parts}, but it was opened as part {part} of \
         {n_parts}"
    )]
    Mismatch {
        /// Number of the part by its name, from 1.
        part: u64,
        /// Number of parts, as the first part says.
        n_parts: u64,
        /// Number of the part by its own metadata, from 1.
        found_part: u64,
        /// Number of parts by its own metadata.
        found_n_parts: u64,
    },
    /// The parts together hold another number of tensors than the first part says.
    #[error("the parts hold {found} tensors together, but should hold {wanted}")]
    TensorCount {
        /// Tensors that the first part announces.
        wanted: u64,
        /// Tensors in all parts.
        found: u64,
    },
}
