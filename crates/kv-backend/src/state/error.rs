//! [`StateError`]: why a state cannot be saved, read or restored, with numbers.

use std::io;

use kv_core::{
    ids::{LayerIdx, SeqId, TokenId},
    memory::{Refusal, SnapshotError},
};
use kv_rows::KvType;

use crate::{BackendError, RowKind};

/// Why a state cannot be saved, read or restored. A refused state has changed nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// Rows could not be read.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The bytes could not be written.
    #[error("the state could not be written")]
    Write(#[from] io::Error),
    /// Rows that cannot be stored as this type.
    #[error(
        "layer {layer}: rows of {len} values cannot be saved as {kv_type}, whose blocks hold \
         {block_len} values", block_len = .kv_type.block_len()
    )]
    RowType {
        /// The layer.
        layer: LayerIdx,
        /// Values of a row.
        len: usize,
        /// The type that was asked for.
        kv_type: KvType,
    },
    /// The bytes are something else.
    #[error("this is no saved state: it does not begin like one")]
    NotAState,
    /// There are too few bytes.
    #[error("the state is cut off: {wanted} bytes are needed, {got} are there")]
    Truncated {
        /// Bytes that there should be at least.
        wanted: u64,
        /// Bytes that there are.
        got: u64,
    },
    /// Something follows the end.
    #[error("the state ends after {end} bytes, but {got} are there")]
    Trailing {
        /// The end of the state.
        end: u64,
        /// Bytes that there are.
        got: u64,
    },
    /// It was written by a later version, or by none.
    #[error("the state has format version {found}; versions 1 to {known} can be read")]
    Version {
        /// Its version.
        found: u32,
        /// The newest version that can be read.
        known: u32,
    },
    /// A part of it is damaged.
    #[error("the state is damaged: {what} at byte {at} has checksum {got:016x}, not {wanted:016x}")]
    Checksum {
        /// The damaged part.
        what: String,
        /// The start of the part.
        at: u64,
        /// The checksum that is stored.
        wanted: u64,
        /// The checksum of what is there.
        got: u64,
    },
    /// A section of a kind that is not known, without which the others mean something else.
    #[error("the state has a section '{tag}', which this version does not know")]
    UnknownSection {
        /// Its name.
        tag: String,
    },
    /// A section is there twice, or not at all.
    #[error("the state has {n} sections '{tag}', not {wanted}")]
    SectionCount {
        /// Its name.
        tag: String,
        /// Their number.
        n: usize,
        /// Number of ids there must be.
        wanted: usize,
    },
    /// A section says something that cannot be.
    #[error("section '{tag}' makes no sense: {reason}")]
    Section {
        /// Its name.
        tag: String,
        /// The reason, with numbers.
        reason: String,
    },
    /// A snapshot that no memory could hold.
    #[error("the state makes no sense")]
    Snapshot(#[from] SnapshotError),
    /// A token that the model does not have.
    #[error("the state has token {token} in sequence {seq}, but the model's are below {n_vocab}")]
    Token {
        /// The sequence.
        seq: SeqId,
        /// The token.
        token: TokenId,
        /// Size of the vocabulary.
        n_vocab: u32,
    },
    /// It was saved with other ages of rows.
    #[error(
        "the state has {saved}, but here are {here}: restore it with as many recent tokens as it was \
         saved with"
    )]
    OtherAges {
        /// The saved rows.
        saved: String,
        /// The rows here.
        here: String,
    },
    /// It was saved with other adapters.
    #[error(
        "the state's adapters are {saved}, but here they are {here}: restore it with the adapters and \
         scales that it was saved with"
    )]
    OtherAdapters {
        /// Of the state, with their scales.
        saved: String,
        /// Of the text here.
        here: String,
    },
    /// It was saved with another model.
    #[error("the state is another model's: its {what} is {saved}, but here it is {here}")]
    OtherModel {
        /// The name of the difference.
        what: &'static str,
        /// The saved rows.
        saved: String,
        /// The rows here.
        here: String,
    },
    /// Rows that are needed are missing, or have another shape.
    #[error("layer {layer}: {} rows were saved as {saved}, but here they are {here}", kind_name(*.kind))]
    Rows {
        /// The layer.
        layer: LayerIdx,
        /// The kind of the rows.
        kind: RowKind,
        /// The saved rows.
        saved: String,
        /// The rows here.
        here: String,
    },
    /// The memory refuses it.
    #[error(transparent)]
    Refused(#[from] Refusal),
}

/// The name of rows in errors.
pub(super) fn kind_name(kind: RowKind) -> &'static str {
    match kind {
        RowKind::K => "K",
        RowKind::V => "V",
        RowKind::Conv => "convolution",
        RowKind::State => "state",
    }
}
