//! [`LlamaLike`]: what sets one member of the family apart, as data.
//!
//! Knows no member and no file.

use kv_core::graph::{Activation, RouteGate, RouteSum};
use kv_core::rope::RopeStyle;
use model_core::blocks::{PostNorms, QkNorm, QkvBias, Weighed};
use model_core::windows::WindowPattern;

/// What sets one member of the family apart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LlamaLike {
    /// The name in `general.architecture`.
    pub name: &'static str,
    /// How queries and keys rotate. The rows of `llama` files are arranged for
    /// [`RopeStyle::Norm`].
    pub rope: RopeStyle,
    /// Which projections have a bias.
    pub bias: QkvBias,
    /// Norms of queries and keys.
    pub qk_norm: QkNorm,
    /// Norms behind the blocks.
    pub post_norms: PostNorms,
    /// Applied to the gate of the feed-forward block.
    pub activation: Activation,
    /// Factor on the embeddings.
    pub embedding: EmbeddingScale,
    /// Factor on the attention scores, where the file names none.
    pub scores: ScoreScale,
    /// Layers that see a window.
    pub windows: LayerWindows,
    /// Mixtures of experts.
    pub mixtures: Mixtures,
}

/// Factor on the embeddings of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EmbeddingScale {
    /// 1.
    #[default]
    One,
    /// Square root of the width (Gemma).
    SqrtDim,
}

/// Factor on the attention scores of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ScoreScale {
    /// `1 / sqrt(k_dim)`.
    #[default]
    KeyDim,
    /// As that, but `1 / sqrt(dim / n_heads)` for a model of this many layers: the largest Gemma 3
    /// was trained with another factor, and only its number of layers tells.
    KeyDimUnlessLayers(usize),
}

/// Which layers of a model see a window.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum LayerWindows {
    /// None, whatever the file says.
    #[default]
    None,
    /// All of them, where the file names a window (Mistral; its GGUF files, which call themselves
    /// `llama`, never do).
    Every,
    /// Those that the file names, or else the pattern.
    Sliding {
        /// Where the file does not say which layers are windowed.
        pattern: WindowPattern,
        /// Base of the rotation in windowed layers, where the file names none. It is not stretched:
        /// no distance in a window is beyond what the model was trained with.
        rope_base: f64,
    },
}

/// Whether a model has mixtures of experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mixtures {
    /// None: a file with experts is refused.
    #[default]
    None,
    /// In every layer that has a router, where the file has experts.
    Allowed(Routing),
    /// In every layer that has a router: a file without experts is refused.
    Always(Routing),
}

/// How a mixture of experts is routed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Routing {
    /// Makes weights of a router's logits, where the file does not say.
    pub gate: RouteGate,
    /// What the weights add up to, where the file does not say.
    pub sum: RouteSum,
    /// What they are applied to.
    pub weighed: Weighed,
}
