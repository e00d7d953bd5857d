//! The errors of files and of the models in them. Each names the file, key or tensor, with numbers.
//!
//! [`ModelFileError`] is about a path; [`GgufError`], [`MetadataError`] and [`ModelError`] are
//! about contents, wherever these come from. Invariant: an error either prints its cause or returns
//! it as its source, never both. Decides nothing.

use std::io;
use std::path::PathBuf;

use kv_block::BlockFormat;
use kv_graph::GraphError;
use kv_graph::weights::{SourceChanged, WeightError, WeightInfo};

use crate::adapters::AdapterError;
use crate::tokenizer::TokenizerError;

/// Most names that are listed.
const MAX_LISTED: usize = 8;

/// The number of known names, and those that begin as the wrong one does.
fn known_names(wrong: &str, known: &[String]) -> String {
    let n_shared = |name: &str| {
        let pairs = name.chars().zip(wrong.chars());
        pairs.take_while(|(a, b)| a.eq_ignore_ascii_case(b)).count()
    };
    let most = known.iter().map(|name| n_shared(name)).max().unwrap_or(0);
    let similar = known.iter().filter(|name| n_shared(name) == most);
    let similar: Vec<_> = similar.take(MAX_LISTED).map(String::as_str).collect();
    let n_known = known.len();
    if most < 3 {
        format!("known are {n_known}: docs/architectures.md lists them")
    } else {
        let similar = similar.join(", ");
        format!("known are {n_known} (docs/architectures.md), with a similar name {similar}")
    }
}

/// Why a file or directory cannot be opened, read or written as a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelFileError {
    /// The file cannot be found, read, mapped or written.
    #[error("cannot {attempt} '{}'", path.display())]
    Io {
        /// The attempt: open, read or write.
        attempt: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The path is a directory or a device.
    #[error("'{}' is not a file: check the path", path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
    /// The contents are not those of a GGUF file.
    #[error("{file}: {reason}")]
    Gguf {
        /// The file's path in quotes, or what the bytes are.
        file: String,
        /// The reason.
        reason: GgufError,
    },
    /// A file of a directory has not the contents that its name promises.
    #[error("'{}': {reason}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// A key is not there.
    #[error("{file}: '{key}' is missing ({expected} wanted)")]
    MissingKey {
        /// The file.
        file: String,
        /// The key.
        key: String,
        /// The value that should be there.
        expected: String,
    },
    /// A key has a value that it cannot have.
    #[error("{file}: '{key}' is {found}, not {expected}")]
    WrongKey {
        /// The file.
        file: String,
        /// The key.
        key: String,
        /// The value in the file.
        found: String,
        /// The value that should be there.
        expected: String,
    },
    /// A class of models without a translation.
    #[error(
        "{file}: class '{class}' is not supported; {}",
        known_names(class, known)
    )]
    UnknownClass {
        /// The file.
        file: String,
        /// The class in the file.
        class: String,
        /// Classes that are known.
        known: Vec<String>,
    },
    /// Weights are quantized in a way that is not read.
    #[error(
        "{file}: weights in {method}, which Cellar does not read; take the model without it, or a \
         GGUF file"
    )]
    Quantization {
        /// The file.
        file: String,
        /// The method and its variant.
        method: String,
    },
    /// A class of models that is not computed, on purpose.
    #[error("{file}: class '{class}' is not supported: {reason}")]
    Declined {
        /// The file.
        file: String,
        /// The class in the file.
        class: String,
        /// Why not, and what to do instead.
        reason: &'static str,
    },
    /// An adapter or a control vector that cannot be used.
    #[error("adapter {file}: {reason}")]
    Adapter {
        /// The file or directory.
        file: String,
        /// The reason.
        reason: Box<AdapterError>,
    },
    /// A tensor is not as the translation needs it.
    #[error("tensor '{name}': {reason}")]
    Tensor {
        /// Its name in the file.
        name: String,
        /// The reason.
        reason: String,
    },
    /// A tensor's bytes and shape do not agree.
    #[error(transparent)]
    Weight(#[from] WeightError),
    /// A file was changed while it was opened.
    #[error(transparent)]
    Changed(#[from] SourceChanged),
    /// The contents make no model that can be used.
    #[error("{file}: {reason}")]
    Model {
        /// The file or directory.
        file: String,
        /// The key or tensor that is missing or wrong.
        reason: ModelError,
    },
}

/// The message for a file that Git has not fetched.
const LFS_POINTER: &str = "a Git LFS pointer, not the file itself: run 'git lfs pull' in its folder, \
    or download it again";

/// The reason why these bytes are not the file that they should be, where Git left a pointer there.
pub(crate) fn lfs_pointer(bytes: &[u8]) -> Option<String> {
    bytes
        .starts_with(b"version https://git-lfs")
        .then(|| LFS_POINTER.to_owned())
}

/// Bytes that are not a GGUF file of a supported kind, or a model that GGUF cannot hold.
#[derive(Clone, Debug, thiserror::Error, PartialEq)]
#[non_exhaustive]
pub enum GgufError {
    /// No bytes at all.
    #[error("the file is empty")]
    Empty,
    /// The first bytes are not `GGUF`.
    #[error("not a GGUF file: it begins with \"{}\", not \"GGUF\"", found.escape_ascii())]
    Magic {
        /// The first four bytes.
        found: [u8; 4],
    },
    /// The pointer that Git leaves in the place of a large file that was not fetched.
    #[error("{LFS_POINTER}")]
    LfsPointer,
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
        /// The part that was being read.
        part: String,
        /// Its start, in bytes from the start of the file.
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
        /// The things that are counted.
        part: String,
        /// The count in the file.
        count: u64,
        /// The most there can be.
        at_most: u64,
    },
    /// More things than this program reads, though the file may hold them.
    #[error("{count} {part}, where at most {limit} are read")]
    OverLimit {
        /// The things that are counted.
        part: String,
        /// The count in the file.
        count: u64,
        /// The limit.
        limit: u64,
    },
    /// A name, key or string beyond its limit.
    #[error("{part}: a length of {length} bytes, where at most {at_most} are allowed")]
    TooLong {
        /// The part that was being read.
        part: String,
        /// The length in the file.
        length: u64,
        /// The limit.
        at_most: u64,
    },
    /// Text that is not UTF-8.
    #[error("{part} is not UTF-8 (first bad byte after {valid} good ones)")]
    NotUtf8 {
        /// The part that was being read.
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
    /// Arrays of arrays of arrays, too many levels deep.
    #[error("metadata '{key}' has arrays within arrays, more than {limit} levels deep")]
    NestedArray {
        /// The key.
        key: String,
        /// The limit.
        limit: usize,
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
        /// The way it is stored.
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
    /// Another part than the first was opened.
    #[error("this is part {part} of {n_parts}; open the first part instead")]
    NotFirstPart {
        /// Number of the part, from 1.
        part: u64,
        /// Number of parts.
        n_parts: u64,
    },
    /// The file is one of several parts, but its name is not that of the first.
    #[error("this is the first of {n_parts} parts, but it is not named '…{suffix}'")]
    PartName {
        /// Number of parts.
        n_parts: u64,
        /// The ending that its name should have.
        suffix: String,
    },
    /// A part in memory has no neighbours.
    #[error("this is the first of {n_parts} parts; bytes in memory cannot be split")]
    PartInMemory {
        /// Number of parts.
        n_parts: u64,
    },
    /// Parts of a split file that are not among those that were given.
    #[error("the model has {n_parts} parts, but only {n_given} of them are there: add the others")]
    PartsMissing {
        /// Number of parts.
        n_parts: u64,
        /// Parts that are there.
        n_given: u64,
    },
    /// The header is longer than what was read of the file.
    #[error("the header goes on behind the first {n_bytes} bytes: read more of the file")]
    StartTooShort {
        /// Bytes that were read.
        n_bytes: u64,
    },
    /// A part's metadata has another part number or number of parts.
    #[error(
        "says it is part {found_part} of {found_n_parts}, but it was opened as part {part} of \
         {n_parts}"
    )]
    PartMismatch {
        /// Number of the part by its name, from 1.
        part: u64,
        /// Number of parts by the first part's metadata.
        n_parts: u64,
        /// Number of the part by its own metadata, from 1.
        found_part: u64,
        /// Number of parts by its own metadata.
        found_n_parts: u64,
    },
    /// The parts together hold another number of tensors than the first part announces.
    #[error("the parts hold {found} tensors together, but should hold {wanted}")]
    TensorCount {
        /// Tensors that the first part announces.
        wanted: u64,
        /// Tensors in all parts.
        found: u64,
    },
    /// A format that GGUF has no number for.
    #[error("tensor '{name}': GGUF has no number for {format}")]
    UnknownFormat {
        /// The tensor.
        name: String,
        /// Its format.
        format: BlockFormat,
    },
    /// A weight to be written is not what was announced.
    #[error("tensor '{name}' was announced as {wanted:?} and came as {got:?}")]
    Changed {
        /// The tensor.
        name: String,
        /// The header's entry.
        wanted: WeightInfo,
        /// The weight that came.
        got: WeightInfo,
    },
}

/// A key that is not there, or not as it is wanted.
#[derive(Clone, Debug, thiserror::Error, PartialEq)]
#[non_exhaustive]
pub enum MetadataError {
    /// No such key.
    #[error("metadata '{key}' is missing ({expected} wanted)")]
    Missing {
        /// The key.
        key: String,
        /// The type wanted.
        expected: &'static str,
    },
    /// A value of another type.
    #[error("metadata '{key}' is {found}, not {expected}")]
    WrongType {
        /// The key.
        key: String,
        /// The type wanted.
        expected: &'static str,
        /// The type in the file.
        found: String,
    },
    /// A number that the wanted type cannot hold.
    #[error("metadata '{key}' is {found}, which is out of range for {expected}")]
    OutOfRange {
        /// The key.
        key: String,
        /// The type wanted.
        expected: &'static str,
        /// The number in the file.
        found: String,
    },
    /// A list with another number of elements than the model has layers.
    #[error("metadata '{key}' has {found} elements, but there are {n_layers} layers")]
    LayerCount {
        /// The key.
        key: String,
        /// Layers of the model.
        n_layers: usize,
        /// Elements in the file.
        found: usize,
    },
}

/// Why what a file holds makes no model that can be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// No architecture of this name is known.
    #[error("unknown architecture '{name}'; {}", known_names(name, known))]
    UnknownArchitecture {
        /// The name in the file.
        name: String,
        /// The names in the registry.
        known: Vec<String>,
    },
    /// A file that goes with a model.
    #[error("it is {kind}, not a model: give it with {flag}, next to the model")]
    NotAModel {
        /// The kind of file.
        kind: &'static str,
        /// The flag that takes it.
        flag: &'static str,
    },
    /// A head that drafts for models of other files.
    #[error(
        "it is a head that drafts for another model ('{name}'), not a model of its own: name the \
         model with -m and the head with --draft-model, without --speculate draft"
    )]
    HeadAlone {
        /// Its architecture.
        name: String,
    },
    /// A model without rows that a head of another file could read.
    #[error(
        "a head of another file reads rows of layers, which '{architecture}' does not give, or not \
         with adapters"
    )]
    NoLayerRows {
        /// The model's architecture.
        architecture: String,
    },
    /// A metadata key is missing or of the wrong type.
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    /// A setting that no model can have.
    #[error("{key}: {reason}")]
    Setting {
        /// The metadata key.
        key: String,
        /// The reason, with numbers.
        reason: String,
    },
    /// A tensor that the model needs is absent.
    #[error("tensor '{name}' is missing; the model needs it as {shape:?}")]
    MissingTensor {
        /// Its name.
        name: String,
        /// The shape it should have, outermost dimension first.
        shape: Vec<usize>,
    },
    /// A tensor of a layer that the model does not compute with: it is of a variant.
    #[error("tensor '{name}' is not used: this variant of the architecture is not supported")]
    UnusedTensor {
        /// Its name.
        name: String,
    },
    /// A tensor is stored in a way that cannot be read.
    #[error(transparent)]
    Weight(WeightError),
    /// A tensor has another shape than the metadata requires.
    #[error("tensor '{name}' has shape {got:?}, but the metadata asks for {wanted:?}")]
    TensorShape {
        /// Its name.
        name: String,
        /// The shape it should have.
        wanted: Vec<usize>,
        /// The shape it has.
        got: Vec<usize>,
    },
    /// A vector (norm, bias) or convolution is stored in a format for matrices.
    #[error("tensor '{name}' is stored as {format}; expected F32, F16 or BF16")]
    TensorFormat {
        /// Its name.
        name: String,
        /// Its format.
        format: BlockFormat,
    },
    /// Sizes that do not fit together.
    #[error(transparent)]
    Graph(#[from] GraphError),
    /// A graph that adapters cannot be added to.
    #[error("{0}")]
    Adapters(String),
    /// A directory without a tokenizer.
    #[error("there is no 'tokenizer.json', which text needs")]
    NoTokenizer,
    /// A file whose tokens are no text.
    #[error(
        "it has no tokenizer ('tokenizer.ggml.model' is 'none'), because its tokens are no text"
    )]
    NotText,
    /// The tokenizer cannot be built.
    #[error("tokenizer: {0}")]
    Tokenizer(TokenizerError),
    /// Tokenizer and logits do not match.
    #[error(
        "the tokenizer has {n_tokens} tokens, but the model's logits are {n_logits} wide; a token \
         would have no logit"
    )]
    VocabTooLarge {
        /// Tokens of the tokenizer.
        n_tokens: usize,
        /// Width of the logits.
        n_logits: usize,
    },
}

impl From<TokenizerError> for ModelError {
    fn from(error: TokenizerError) -> Self {
        Self::Tokenizer(error)
    }
}
