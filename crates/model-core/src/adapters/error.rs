//! [`AdapterError`]: why an adapter cannot be used. Each names the matrix or setting, with numbers.

use crate::architecture::ModelError;

/// Why an adapter or a control vector cannot be used with a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdapterError {
    /// A GGUF file of another kind.
    #[error("this is no {wanted}: 'general.type' or 'adapter.type' is '{found}'")]
    NoAdapter {
        /// The kind that is wanted.
        wanted: &'static str,
        /// The kind in the file.
        found: String,
    },
    /// An adapter of a model of another architecture.
    #[error("this adapter is for {adapter} models, and the model is {model}")]
    Architecture {
        /// Of the adapter.
        adapter: String,
        /// Of the model.
        model: String,
    },
    /// A method that is not computed.
    #[error("adapters with {method} are not computed, only plain LoRA")]
    Method {
        /// The method or setting, by its name.
        method: String,
    },
    /// One matrix of a pair is not there.
    #[error("'{matrix}' has no matrix {missing}")]
    Pair {
        /// The matrix that the pair is for.
        matrix: String,
        /// The part that is missing.
        missing: &'static str,
    },
    /// Nothing in the file.
    #[error("it has no matrices")]
    Empty,
    /// A tensor that belongs to no pair.
    #[error("tensor '{tensor}' is no matrix of a pair")]
    Tensor {
        /// Its name.
        tensor: String,
    },
    /// A module or matrix that the model does not have.
    #[error(
        "'{module}' is no matrix of this model ({architecture}); is the adapter another model's?"
    )]
    Unknown {
        /// The module or matrix.
        module: String,
        /// Of the model.
        architecture: String,
    },
    /// A matrix that the model uses in a way that adapters cannot be added to.
    #[error("'{matrix}' is used by '{op}', to which no adapter can be added")]
    Use {
        /// The matrix.
        matrix: String,
        /// The operation.
        op: String,
    },
    /// Matrices that do not fit the model's.
    #[error(
        "'{matrix}' is {model:?} in the model, and the adapter's matrices are {a:?} and {b:?}; is \
         it another model's?"
    )]
    Shape {
        /// The matrix.
        matrix: String,
        /// Its shape.
        model: Vec<usize>,
        /// Of the first of the pair.
        a: Vec<usize>,
        /// Of the second.
        b: Vec<usize>,
    },
    /// A rank that settings and matrices disagree about, or 0.
    #[error("'{matrix}' has rank {found}, where the settings say {wanted}")]
    Rank {
        /// The matrix.
        matrix: String,
        /// Of the matrices.
        found: usize,
        /// Of the settings, in words.
        wanted: String,
    },
    /// A value that is not a finite number.
    #[error("{what} is {value}, which is no finite number")]
    NotFinite {
        /// Where.
        what: String,
        /// The value.
        value: f32,
    },
    /// Too many adapters.
    #[error("{got} adapters; at most {most} can be loaded")]
    TooMany {
        /// Their number.
        got: usize,
        /// The most.
        most: usize,
    },
    /// Two adapters of one name.
    #[error("two adapters are called '{name}': give one another name")]
    SameName {
        /// The name.
        name: String,
    },
    /// More or fewer scales than adapters.
    #[error("{got} scales, and there are {wanted} adapters")]
    ScaleCount {
        /// Adapters.
        wanted: usize,
        /// Scales.
        got: usize,
    },
    /// A scale that is not a number.
    #[error("the scale of adapter '{name}' is {scale}, which is no finite number")]
    Scale {
        /// The adapter.
        name: String,
        /// Its scale.
        scale: f32,
    },
    /// Layers that the model does not have.
    #[error("layers {first} to {last} are not in the model, which has layers 1 to {most}")]
    Layers {
        /// The first.
        first: usize,
        /// The last.
        last: usize,
        /// The last of the model.
        most: usize,
    },
    /// A graph that adapters cannot be added to.
    #[error("{architecture} models take no {what}: {reason}")]
    Graph {
        /// Of the model.
        architecture: String,
        /// Adapters or control vectors.
        what: &'static str,
        /// Why.
        reason: String,
    },
    /// The model cannot build its graphs.
    #[error(transparent)]
    Model(#[from] ModelError),
}
