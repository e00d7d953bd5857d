//! [`SEQ2SEQ_FAMILY`]: the encoder-decoders, one row each. A row holds what cannot be read from the
//! model's files.

use kv_graph::Activation;
use model_core::blocks::{FeedForwardForm, NormKind, QkvBias};

use super::graph::NormPlace;

/// The traits of one encoder-decoder.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Seq2SeqLike {
    /// The name in `general.architecture`.
    pub name: &'static str,
    /// Every norm.
    pub norm: NormKind,
    /// The place of the layers' norms.
    pub norms: NormPlace,
    /// The way positions are encoded.
    pub positions: Seq2SeqPositions,
    /// The projections of attentions that have a bias.
    pub bias: QkvBias,
    /// The matrices of a feed-forward block that has no gate.
    pub feed_forward: FeedForwardForm,
    /// Applied in it, where the file names nothing else.
    pub activation: Activation,
}

/// The encoding of positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seq2SeqPositions {
    /// By rows that were learnt, for each stack.
    Learnt,
    /// By waves, which the file has as rows for both stacks (Vaswani et al., arXiv 1706.03762).
    Waves,
    /// By biases of scores by distance, which the layers of a stack share. Scores have no other
    /// factor (Raffel et al., arXiv 1910.10683).
    Biases,
}

/// Every encoder-decoder.
pub const SEQ2SEQ_FAMILY: &[Seq2SeqLike] = &[
    Seq2SeqLike {
        name: "t5",
        norm: NormKind::Rms,
        norms: NormPlace::Before,
        positions: Seq2SeqPositions::Biases,
        bias: QkvBias::None,
        feed_forward: FeedForwardForm::Plain,
        activation: Activation::Relu,
    },
    // Lewis et al., arXiv 1910.13461.
    Seq2SeqLike {
        name: "bart",
        norm: NormKind::LayerWithBias,
        norms: NormPlace::After,
        positions: Seq2SeqPositions::Learnt,
        bias: QkvBias::All,
        feed_forward: FeedForwardForm::PlainWithBias,
        activation: Activation::GeluErf,
    },
    // Fan et al., arXiv 2010.11125; NLLB-200 too.
    Seq2SeqLike {
        name: "m2m-100",
        norm: NormKind::LayerWithBias,
        norms: NormPlace::Before,
        positions: Seq2SeqPositions::Waves,
        bias: QkvBias::All,
        feed_forward: FeedForwardForm::PlainWithBias,
        activation: Activation::Relu,
    },
];
