//! [`FAMILY`]: the encoders, one row each. A row holds what cannot be read from the encoder's
//! files.

use kv_graph::Activation;
use kv_graph::rope::RopeStyle;
use model_core::blocks::{FeedForwardForm, NormKind, QkNorm, QkvBias};
use model_core::windows::{FullLayer, WindowPattern};

use crate::encoder::{EncoderNorms, InputNorm};
use crate::head::HeadActivation;
use crate::member::{
    EmbeddingScale, EncoderLike, EncoderWindows, LayerSharing, Mixtures, Positions, WindowedBase,
};

/// BERT (Devlin et al., arXiv 1810.04805), which the rows below differ from; also RoBERTa,
/// XLM-RoBERTa and DistilBERT.
const BERT: EncoderLike = EncoderLike {
    name: "bert",
    norm: NormKind::LayerWithBias,
    norms: EncoderNorms::PostNorm,
    output_norm: "output_norm",
    input_norm: InputNorm::Normed,
    embedding: EmbeddingScale::One,
    positions: Positions::Learnt,
    sharing: LayerSharing::None,
    bias: QkvBias::All,
    qk_norm: QkNorm::None,
    windows: EncoderWindows::None,
    feed_forward: FeedForwardForm::PlainWithBias,
    mixtures: Mixtures::None,
    activation: Activation::GeluErf,
    head: HeadActivation::Tanh,
};

/// Jina Embeddings v3 (Sturua et al., arXiv 2409.10173): BERT with rotary positions.
const JINA_V3: EncoderLike = EncoderLike {
    name: "jina-bert-v3",
    positions: Positions::Rotated(RopeStyle::Neox),
    ..BERT
};

/// EuroBERT (Boizard et al., arXiv 2503.05500): the layers of Llama.
const EUROBERT: EncoderLike = EncoderLike {
    name: "eurobert",
    norm: NormKind::Rms,
    norms: EncoderNorms::PreNorm,
    input_norm: InputNorm::None,
    positions: Positions::Rotated(RopeStyle::Neox),
    bias: QkvBias::None,
    feed_forward: FeedForwardForm::Gated,
    activation: Activation::Silu,
    ..BERT
};

/// All encoders.
pub const FAMILY: &[EncoderLike] = &[
    BERT,
    // Lan et al., arXiv 1909.11942.
    EncoderLike {
        name: "albert",
        sharing: LayerSharing::Groups,
        activation: Activation::GeluTanh,
        ..BERT
    },
    // Warner et al., arXiv 2412.13663: the first layer of three sees everything.
    EncoderLike {
        name: "modern-bert",
        norm: NormKind::Layer,
        norms: EncoderNorms::PreNorm,
        positions: Positions::Rotated(RopeStyle::Neox),
        bias: QkvBias::None,
        windows: EncoderWindows::Symmetric {
            pattern: WindowPattern {
                period: 3,
                full: FullLayer::First,
            },
            base: WindowedBase::Same,
        },
        feed_forward: FeedForwardForm::FusedGate,
        head: HeadActivation::Gelu,
        ..BERT
    },
    // Günther et al., arXiv 2310.19923.
    EncoderLike {
        name: "jina-bert-v2",
        positions: Positions::Biases(8.0),
        feed_forward: FeedForwardForm::GatedDownBias,
        ..BERT
    },
    JINA_V3,
    // Nussbaum et al., arXiv 2402.01613.
    EncoderLike {
        name: "nomic-bert",
        bias: QkvBias::None,
        feed_forward: FeedForwardForm::Gated,
        activation: Activation::Silu,
        ..JINA_V3
    },
    EncoderLike {
        name: "nomic-bert-moe",
        mixtures: Mixtures::EveryFew,
        ..JINA_V3
    },
    EUROBERT,
    // Le Breton et al., arXiv 2502.19587.
    EncoderLike {
        name: "neo-bert",
        output_norm: "enc.output_norm",
        positions: Positions::Rotated(RopeStyle::Norm),
        feed_forward: FeedForwardForm::FusedGate,
        ..EUROBERT
    },
    // Schechter Vera et al., arXiv 2509.20354: the layers of Gemma 3.
    EncoderLike {
        name: "gemma-embedding",
        norms: EncoderNorms::PreAndPostNorm,
        embedding: EmbeddingScale::SqrtDim,
        qk_norm: QkNorm::PerHead,
        windows: EncoderWindows::Symmetric {
            pattern: WindowPattern {
                period: 6,
                full: FullLayer::Last,
            },
            base: WindowedBase::Own(10_000.0),
        },
        activation: Activation::GeluTanh,
        ..EUROBERT
    },
    EncoderLike {
        name: "mpnet",
        positions: Positions::LearntWithBiases { max_distance: 128 },
        ..BERT
    },
    // He et al., arXiv 2006.03654 and 2111.09543.
    EncoderLike {
        name: "deberta-v2",
        positions: Positions::Disentangled,
        head: HeadActivation::Gelu,
        ..BERT
    },
];
