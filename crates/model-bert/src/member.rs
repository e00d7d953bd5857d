//! [`EncoderLike`]: what sets one encoder apart, as data.
//!
//! Knows no encoder and no file.

use kv_graph::Activation;
use kv_graph::rope::RopeStyle;
use model_core::blocks::{FeedForwardForm, NormKind, QkNorm, QkvBias};
use model_core::windows::WindowPattern;

use crate::encoder::{EncoderNorms, InputNorm};
use crate::head::HeadActivation;

/// The traits of one encoder.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EncoderLike {
    /// The name in `general.architecture`.
    pub name: &'static str,
    /// The norms of rows.
    pub norm: NormKind,
    /// The place of the layers' norms.
    pub norms: EncoderNorms,
    /// The name in files of the norm after the last layer, where there is one.
    pub output_norm: &'static str,
    /// The norm of rows before the first layer.
    pub input_norm: InputNorm,
    /// Factor on the embeddings.
    pub embedding: EmbeddingScale,
    /// The way positions are encoded.
    pub positions: Positions,
    /// The layers that compute with the same weights.
    pub sharing: LayerSharing,
    /// The projections of an attention that have a bias.
    pub bias: QkvBias,
    /// Norms of queries and keys.
    pub qk_norm: QkNorm,
    /// Layers that see a window.
    pub windows: EncoderWindows,
    /// The matrices of a feed-forward block.
    pub feed_forward: FeedForwardForm,
    /// Layers with a mixture of experts instead.
    pub mixtures: Mixtures,
    /// Applied in it, where the file names nothing else.
    pub activation: Activation,
    /// The function after the dense layer of a classification head, where the file names nothing
    /// else.
    pub head: HeadActivation,
}

/// The layers of an encoder that have a mixture of experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mixtures {
    /// None: a file with experts is refused.
    #[default]
    None,
    /// The second and every one so many layers later, as the file says: without gates, by the
    /// softmax over all experts (Nomic Embed v2, arXiv 2502.07972).
    EveryFew,
}

/// The encoding of positions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Positions {
    /// By rows that were learnt.
    Learnt,
    /// By these and biases of scores by the distance of tokens, in buckets that grow up to this
    /// distance (MPNet, arXiv 2004.09297).
    LearntWithBiases {
        /// From which distance on all share the last bucket.
        max_distance: usize,
    },
    /// By keys and queries of distances, whose buckets are as many as the file has and grow up to
    /// the distance that it names (DeBERTa).
    Disentangled,
    /// By rotating queries and keys.
    Rotated(RopeStyle),
    /// By linear biases of scores by distance, of which the largest is this (Press et al.,
    /// arXiv 2108.12409).
    Biases(f32),
}

/// The layers that compute with the same weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LayerSharing {
    /// Each has its own.
    #[default]
    None,
    /// Those of one group of as many as the file names: a group of one layer or several is
    /// computed as a whole, as often as there are layers for it (ALBERT).
    Groups,
}

/// The layers of an encoder that see a window.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum EncoderWindows {
    /// None, whatever the file specifies.
    #[default]
    None,
    /// Those that the file names, or else the pattern, half their width to either side.
    Symmetric {
        /// The windowed layers where the file does not specify them.
        pattern: WindowPattern,
        /// The base by which they rotate, where the file names none.
        base: WindowedBase,
    },
}

/// The base by which layers with a window rotate, where the file names none.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum WindowedBase {
    /// That of the others.
    #[default]
    Same,
    /// This one.
    Own(f64),
}

/// Factor on the embeddings of an encoder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EmbeddingScale {
    /// 1.
    #[default]
    One,
    /// Square root of the width (Gemma).
    SqrtDim,
}
