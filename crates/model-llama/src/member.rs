//! [`LlamaLike`]: what sets one member of the family apart, as data.
//!
//! Knows no member and no file.

use kv_core::Window;
use kv_graph::rope::{RopeStyle, SectionOrder};
use kv_graph::{Activation, RouteGate, RouteSum};
use model_core::architecture::MaskPlace;
use model_core::blocks::{
    Arrangement, ExpertBias, ExpertGate, ExpertScaling, FeedForwardForm, NormKind, QkNorm, QkvBias,
    QkvWeights, SharedShare,
};
use model_core::windows::WindowPattern;

/// The models whose pairs rotate with rows and columns of images, and the layout of these pairs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sections {
    /// None.
    #[default]
    None,
    /// All.
    Always(SectionOrder),
    /// Those whose files say how many pairs do. The rows of their queries and keys are arranged for
    /// [`RopeStyle::Neox`] (GLM-4.1V and 4.5V).
    IfNamed(SectionOrder),
}

impl Sections {
    /// The layout in all models of the member, where they have such pairs.
    pub(crate) fn of_all(self) -> Option<SectionOrder> {
        match self {
            Self::Always(order) => Some(order),
            Self::None | Self::IfNamed(_) => None,
        }
    }
}

/// The traits of one member of the family.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LlamaLike {
    /// The name in `general.architecture`.
    pub name: &'static str,
    /// The norms of rows.
    pub norm: NormKind,
    /// The places of the norms.
    pub arrangement: Arrangement,
    /// Models of the member whose blocks read the same rows.
    pub parallel: Parallel,
    /// The name in files of the gain of the norm before the feed-forward block, behind the layer.
    pub feed_forward_norm: &'static str,
    /// The visibility of a text's tokens.
    pub sight: Sight,
    /// The rows that attention stores.
    pub attention: AttentionForm,
    /// The matrices of queries, keys and values.
    pub qkv: QkvWeights,
    /// The projections that have a bias.
    pub bias: Biases,
    /// Norms of queries and keys; those without a gain in layers that rotate only.
    pub qk_norm: QkNorm,
    /// The models that have them.
    pub qk_normed: QkNormed,
    /// The values of an attention.
    pub values: ValueForm,
    /// Layers that attend over the rows of others.
    pub sharing: RowSharing,
    /// Widths of heads.
    pub head_widths: HeadWidths,
    /// The rotation of queries and keys. The rows of `llama` files are arranged for
    /// [`RopeStyle::Norm`].
    pub rope: RopeStyle,
    /// In which layers they do.
    pub rotated: RotatedLayers,
    /// The pairs that rotate with rows and columns of images.
    pub sections: Sections,
    /// Positions besides rotations.
    pub positions: Positions,
    /// Bound of queries, keys and values.
    pub clamp: QkvClamp,
    /// Layers that see a window.
    pub windows: LayerWindows,
    /// Factor on the attention scores, where the file names none.
    pub scores: ScoreScale,
    /// Factor on the queries by position.
    pub query_scale: QueryScale,
    /// Layers with scores without a value.
    pub sinks: LayerSinks,
    /// Norms inside of blocks, before their output matrices.
    pub sub_norms: SubNorms,
    /// The matrices of a dense feed-forward block.
    pub feed_forward: FeedForwardForm,
    /// Applied in the feed-forward block.
    pub activation: Activation,
    /// Mixtures of experts.
    pub mixtures: Mixtures,
    /// The further inputs of every layer.
    pub per_layer: PerLayer,
    /// Factor on the embeddings.
    pub embedding: EmbeddingScale,
    /// Norm of the embeddings.
    pub embedding_norm: EmbeddingNorm,
    /// Factor on what blocks add to the residual.
    pub residual: ResidualScale,
    /// The rows that blocks add to.
    pub residual_rows: ResidualRows,
    /// Factor on the logits.
    pub logits: LogitScale,
    /// Soft caps on attention scores and logits.
    pub soft_caps: SoftCaps,
}

/// The visibility of a text's tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sight {
    /// Each sees those before it.
    #[default]
    Earlier,
    /// Each sees those before it; where a token of a picture is shown later ones of it, it sees
    /// them in the layers alone that have a window (Gemma 4).
    EarlierInFull,
    /// Each sees all, nothing is remembered, and the logits are of masks: in these rows, where the
    /// file does not say.
    WholeText(MaskPlace),
}

/// The rows that the attention of a model stores for each token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AttentionForm {
    /// Keys and values.
    #[default]
    KeysAndValues,
    /// A latent, and a key that all heads share (DeepSeek).
    Latents,
    /// The same, and the key of an indexer, which chooses whom to attend over (DeepSeek V3.2, and
    /// GLM-5, where it rotates otherwise).
    IndexedLatents {
        /// The rotation of the indexer's queries and keys.
        rope: RopeStyle,
    },
}

/// The values of an attention.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ValueForm {
    /// A projection.
    #[default]
    Projected,
    /// The same, times a factor where the file names one (MiMo-V2).
    ScaledIfNamed,
    /// One that is normed head by head, without a gain (Gemma 3n).
    Normed,
    /// The same; in layers without a matrix for it, of the keys (Gemma 4).
    NormedOrKeys,
}

/// The layers whose attention has a score without a value for every head.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LayerSinks {
    /// None of them.
    #[default]
    None,
    /// All (gpt-oss).
    All,
    /// Those that see a window (MiMo-V2).
    Windowed,
}

/// Norms inside of the blocks of a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SubNorms {
    /// None of them.
    #[default]
    None,
    /// Of what heads attend to, and of what goes through the gate of a feed-forward block (BitNet).
    BeforeOutputs,
}

/// The layers that attend over the keys and values of others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RowSharing {
    /// None of them.
    #[default]
    None,
    /// The last, as many as the file says, over those of the last layer before them with the same
    /// window (Gemma 4).
    LastLayers,
}

/// Widths of the heads of an attention.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HeadWidths {
    /// The same in all layers.
    #[default]
    Same,
    /// Others in layers with a window, which rotate by a base and a width of their own, unstretched
    /// (Gemma 4).
    ByWindow,
}

/// Per-layer embeddings of a token: a further input of every layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PerLayer {
    /// Nothing.
    #[default]
    Nothing,
    /// Embeddings of its own where the file names their width, and a factor where the file has one
    /// (Gemma 4).
    InputsAndScales,
}

/// The models of a member that compute both blocks of a layer from the same rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Parallel {
    /// As the member's arrangement says.
    #[default]
    AsArranged,
    /// Those without a norm before the feed-forward block (StableLM 2 12B, Falcon); with a second
    /// norm before the attention, each block has its own (Falcon 40B).
    WithoutSecondNorm,
    /// Those whose files say so, with a norm for each block (GPT-NeoX).
    IfNamed,
}

/// The encoding of positions besides the rotation of queries and keys.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Positions {
    /// It does not.
    #[default]
    None,
    /// By rows that were learnt, instead (GPT-2).
    Learnt,
    /// By biases of scores instead: the largest is the file's, or else this (BLOOM).
    Biases(f32),
    /// The same in models of so many layers, of which nothing else tells (Baichuan 13B).
    BiasesOfLayers {
        /// The number of layers.
        n_layers: usize,
        /// The largest bias.
        usual: f32,
    },
    /// The same where the file names the largest (MPT).
    BiasesIfNamed,
    /// The same, with biases that are scaled as scores are (Falcon).
    ScaledBiasesIfNamed,
}

/// The bound on the values of queries, keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum QkvClamp {
    /// They have none.
    #[default]
    None,
    /// The file's bound, if it names one (MPT).
    IfNamed,
}

/// The norm of embeddings before the first layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EmbeddingNorm {
    /// They are not.
    #[default]
    None,
    /// As the rows between blocks are (BLOOM).
    Normed,
}

/// The projections of an attention that have a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Biases {
    /// These.
    Of(QkvBias),
    /// Those that the file has in its first layer.
    AsInFile,
}

/// The models of a member that have norms of queries and keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum QkNormed {
    /// All.
    #[default]
    Always,
    /// All but those with this number of experts: the largest Llama 4, of which only that number
    /// tells.
    UnlessExperts(u32),
    /// Those whose files have them (GLM-4.5).
    AsInFile,
}

/// The layers that rotate queries and keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RotatedLayers {
    /// All.
    #[default]
    All,
    /// None of them.
    None,
    /// Those that see a window (Command R7B).
    Windowed,
    /// The same where the file names a window, or else all (EXAONE 4).
    WindowedIfNamed,
    /// All, unless the file specifies that they were not trained to (Granite).
    IfTrained,
    /// All but the last of so many (SmolLM 3, Llama 4), or those that the file names.
    AllButEvery(usize),
    /// Those that the file names, or else all (Granite with windows).
    NamedOrAll,
}

/// The layers of a model that see a window.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum LayerWindows {
    /// None, whatever the file specifies.
    #[default]
    None,
    /// Those that the file names, or else the pattern.
    Sliding {
        /// The windowed layers where the file does not specify them.
        pattern: WindowPattern,
        /// Their rotation.
        rope: WindowedRope,
    },
    /// The same where the file names a window, or else none (Mistral and StarCoder 2, whose GGUF
    /// files never do; OLMo 3 next to 2).
    IfNamed {
        /// The windowed layers where the file does not specify them.
        pattern: WindowPattern,
        /// Their rotation.
        rope: WindowedRope,
    },
    /// Those of the pattern, in chunks.
    Chunked {
        /// The pattern of windowed layers.
        pattern: WindowPattern,
        /// Tokens of a chunk, where the file does not specify it.
        n_tokens: u32,
    },
}

impl RotatedLayers {
    /// True if this layer with this window rotates, in a file that names windows where it has them.
    pub(crate) fn includes(self, layer: usize, window: Window) -> bool {
        match self {
            Self::All | Self::IfTrained | Self::NamedOrAll => true,
            Self::None => false,
            Self::Windowed | Self::WindowedIfNamed => window != Window::Full,
            Self::AllButEvery(n) => !(layer + 1).is_multiple_of(n),
        }
    }
}

impl LayerWindows {
    /// The rotation of layers with a window.
    pub(crate) fn rope(self) -> WindowedRope {
        match self {
            Self::Sliding { rope, .. } | Self::IfNamed { rope, .. } => rope,
            Self::None | Self::Chunked { .. } => WindowedRope::Same,
        }
    }
}

/// The rotation of windowed layers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum WindowedRope {
    /// As the others.
    #[default]
    Same,
    /// By this base, where the file names none. It is not stretched: no distance in a window is
    /// beyond what the model was trained with.
    Own(f64),
    /// The same by the base of the others, where the file names none (OLMo 3).
    Unstretched,
}

/// Factor on the attention scores of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ScoreScale {
    /// `1 / sqrt(k_dim)`.
    #[default]
    KeyDim,
    /// 1 (GPT-Neo).
    One,
    /// As that, but `1 / sqrt(dim / n_heads)` for a model of this many layers: the largest Gemma 2
    /// and 3 were trained with another factor, and only their numbers of layers differ.
    KeyDimUnlessLayers(usize),
}

/// Factor on queries by position.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum QueryScale {
    /// None.
    #[default]
    None,
    /// [`PositionScale`](kv_graph::PositionScale) with these, where the file names no others,
    /// in layers that do not rotate.
    Tempered {
        /// After how many positions it grows.
        every: u32,
        /// The strength of the growth.
        strength: f32,
    },
    /// One that grows after each original context, in all layers, where the file names its strength
    /// (Ministral 3).
    Stretched,
}

/// Factor on the embeddings of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum EmbeddingScale {
    /// 1.
    #[default]
    One,
    /// Square root of the width (Gemma).
    SqrtDim,
    /// The file's value (Granite).
    FromFile,
    /// The file's value, or this one where the file has none (MiniCPM 3).
    FromFileOr(f32),
}

/// Factor on what the blocks of a model add to the residual.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum ResidualScale {
    /// 1.
    #[default]
    One,
    /// The file's value (Granite).
    FromFile,
    /// The file's value, or this number over the square root of the number of layers where the file
    /// has none (MiniCPM 3).
    FromFileOrDepth(f32),
}

/// The rows that the blocks of a model add to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ResidualRows {
    /// Those before their norms.
    #[default]
    BeforeNorms,
    /// Those behind their norms, where the file says so (BLOOM).
    NormedIfNamed,
    /// The same, where the file says that norms are behind the sums (OPT-350m).
    SumsNormedIfNamed,
}

/// Factor on the logits of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogitScale {
    /// 1.
    #[default]
    One,
    /// The file's value (Cohere).
    Times,
    /// The file's value, as a divisor (Granite).
    DividedBy,
    /// The same, or the width over this one where the file has none (MiniCPM 3).
    DividedByOrWidth(u32),
}

/// The soft caps of a model's scores and logits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SoftCaps {
    /// It does not: a file with caps is refused.
    #[default]
    None,
    /// The file's caps, if it names any.
    FromFile,
    /// The same for logits alone (Gemma 4).
    Logits,
}

/// The mixtures of experts of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Mixtures {
    /// None: a file with experts is refused.
    #[default]
    None,
    /// In every layer that has a router, where the file has experts.
    Allowed(Mixture),
    /// In every layer that has a router: a file without experts is refused.
    Always(Mixture),
    /// Next to a dense block in every layer that has a router, where the file has experts (Gemma
    /// 4).
    WithDense(Mixture),
}

/// The parts of a mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mixture {
    /// Makes weights of a router's logits, where the file does not specify it.
    pub route: RouteGate,
    /// The rule that, besides the logits, decides on the experts of a row and their weights.
    pub routing: MixtureRouting,
    /// The sum of the weights, where the file does not specify it.
    pub sum: RouteSum,
    /// The rows that the weights are applied to.
    pub scaling: ExpertScaling,
    /// The gate of an expert.
    pub gate: ExpertGate,
    /// Biases of the router and of the experts.
    pub bias: ExpertBias,
    /// The share of a shared expert without a router of its own.
    pub shared: SharedShare,
}

/// The rule that, besides a router's logits, decides on the experts of a row and their weights.
///
/// Biases are of the choice only. A factor on the weights, and groups of experts of which only the
/// best are chosen from, are those that the file names: after a softmax a group is worth its best
/// expert, after a sigmoid its two best.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MixtureRouting {
    /// Nothing: a file with a factor or with groups is refused.
    #[default]
    Plain,
    /// Biases, and what the file names.
    Biased,
    /// The file's groups and factor, and biases where a sigmoid makes weights of logits (DeepSeek).
    BiasedAfterSigmoid,
}
