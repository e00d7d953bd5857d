//! [`Error`]: why a model cannot be opened or go on. Decides nothing.

use std::io;
use std::path::PathBuf;

use cellar_engine::EngineError;
use cellar_engine::serve::ServiceError;
use kv_backend::BackendError;
use kv_block::QuantizeError;
use kv_graph::weights::{SourceChanged, WeightError};
use model_core::architecture::ModelError;
use model_core::chat_template::ChatTemplateError;
use model_core::error::{GgufError, MetadataError, ModelFileError};
use model_core::picture::PictureError;

use crate::choice::DeviceShortage;

/// Why a model cannot be opened or go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file is not usable.
    #[error(transparent)]
    File(#[from] ModelFileError),
    /// The backend cannot be opened.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The model does not fit the memory of the device that was asked for.
    #[error(
        "what the GPU computes of the model takes {} bytes on {} (weights {}, KV rows and states {}, scratch {}), which has \
         room for {}; {}",
        .0.needs.total(),
        .0.device.description,
        .0.needs.weights,
        .0.needs.rows,
        .0.needs.scratch,
        .0.room,
        largest(.0)
    )]
    DeviceMemory(Box<DeviceShortage>),
    /// The model cannot build its graph, or cannot be shared between a GPU and the CPU as was asked
    /// for.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Experts cannot be given to the CPU as was asked for.
    #[error("{0}")]
    HostExperts(String),
    /// The engine refuses or fails.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A picture or a sound cannot be read or computed, or the tower not be used.
    #[error(transparent)]
    Picture(Box<PictureError>),
    /// Pictures for a model without a vision tower.
    #[error("the model has no vision tower: it does not see pictures")]
    SeesNothing,
    /// Sounds for a model without an audio tower.
    #[error("the model has no audio tower: it does not hear sounds")]
    HearsNothing,
    /// A request is refused, or its text has failed.
    #[error(transparent)]
    Text(#[from] ServiceError),
    /// The chat template is broken, or refuses the messages.
    #[error(transparent)]
    Template(#[from] ChatTemplateError),
    /// The file's metadata is wrong.
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    /// A file that was to be a head is a model of its own.
    #[error("'{}' is no head that drafts, but a model of its own", path.display())]
    NoHead {
        /// The file or directory.
        path: PathBuf,
    },
    /// A state of no sequence, or of several.
    #[error("the state has {n_seqs} sequences, and one is needed")]
    SequencesOfState {
        /// Sequences in it.
        n_seqs: usize,
    },
    /// An importance matrix is of another model, or is needed and not there.
    #[error("{0}")]
    ColumnWeights(String),
    /// A tensor cannot be read.
    #[error(transparent)]
    Weight(#[from] WeightError),
    /// A tensor cannot be encoded.
    #[error("tensor '{name}': {source}")]
    Quantize {
        /// Its name.
        name: String,
        /// The reason.
        source: QuantizeError,
    },
    /// A tensor cannot be written as it is stored.
    #[error(
        "tensor '{name}' is stored as {stored}, which no type of GGUF tensors holds as it is ({n_more} more \
         are like it); choose f32, which keeps every value, or a smaller type"
    )]
    NotInGguf {
        /// Its name, the first of all.
        name: String,
        /// Its form in the files.
        stored: String,
        /// Others of which that is true.
        n_more: usize,
    },
    /// A model's file has changed since it was opened.
    #[error(transparent)]
    Changed(#[from] SourceChanged),
    /// A converted model would not be GGUF.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A file cannot be written.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The model has no chat template.
    #[error(
        "the model has no chat template, which messages, pictures and sounds need: it continues texts alone"
    )]
    NoChatTemplate,
    /// The chat template renders these messages to nothing.
    #[error("the chat template makes nothing of these messages")]
    EmptyChat,
}

impl From<PictureError> for Error {
    fn from(error: PictureError) -> Self {
        Self::Picture(Box::new(error))
    }
}

fn largest(shortage: &DeviceShortage) -> String {
    let n_ctx = match shortage.largest_n_ctx {
        Some(n_ctx) => format!("the largest context that fits is {n_ctx}"),
        None => "no context fits".to_owned(),
    };
    let layers = match shortage.most_layers {
        Some(n) => format!("{n_ctx}, and of the layers the last {n} do"),
        None => n_ctx,
    };
    match shortage.host_experts {
        Some(n) => format!("{layers}, or all with the experts of the first {n} on the CPU"),
        None => layers,
    }
}
