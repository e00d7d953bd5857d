//! [`FAMILY`]: the members, one row each.

use kv_core::graph::{Activation, RouteGate, RouteSum};
use kv_core::rope::RopeStyle;
use model_core::blocks::{PostNorms, QkNorm, QkvBias, Weighed};
use model_core::windows::{FullLayer, WindowPattern};

use crate::member::{EmbeddingScale, LayerWindows, LlamaLike, Mixtures, Routing, ScoreScale};

/// The first member, which the others differ from.
const LLAMA: LlamaLike = LlamaLike {
    name: "llama",
    rope: RopeStyle::Norm,
    bias: QkvBias::None,
    qk_norm: QkNorm::None,
    post_norms: PostNorms::None,
    activation: Activation::Silu,
    embedding: EmbeddingScale::One,
    scores: ScoreScale::KeyDim,
    windows: LayerWindows::Every,
    mixtures: Mixtures::Allowed(SOFTMAX_OF_CHOSEN),
};

/// The softmax over a row's chosen experts weighs what comes out of them.
const SOFTMAX_OF_CHOSEN: Routing = Routing {
    gate: RouteGate::Softmax,
    sum: RouteSum::One,
    weighed: Weighed::Outputs,
};

/// All members.
pub const FAMILY: [LlamaLike; 4] = [
    LLAMA,
    LlamaLike {
        name: "qwen2",
        rope: RopeStyle::Neox,
        bias: QkvBias::Qkv,
        windows: LayerWindows::None,
        mixtures: Mixtures::None,
        ..LLAMA
    },
    LlamaLike {
        name: "qwen3moe",
        windows: LayerWindows::None,
        rope: RopeStyle::Neox,
        qk_norm: QkNorm::PerHead,
        mixtures: Mixtures::Always(SOFTMAX_OF_CHOSEN),
        ..LLAMA
    },
    LlamaLike {
        name: "gemma3",
        rope: RopeStyle::Neox,
        qk_norm: QkNorm::PerHead,
        post_norms: PostNorms::Both,
        activation: Activation::GeluTanh,
        embedding: EmbeddingScale::SqrtDim,
        scores: ScoreScale::KeyDimUnlessLayers(62),
        windows: LayerWindows::Sliding {
            pattern: WindowPattern {
                period: 6,
                full: FullLayer::Last,
            },
            rope_base: 10_000.0,
        },
        mixtures: Mixtures::None,
        ..LLAMA
    },
];
