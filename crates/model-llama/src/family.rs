//! [`FAMILY`]: the members, one row each. A row holds what cannot be read from the member's files.

use kv_core::graph::{Activation, ClampedGate, RouteGate, RouteSum};
use kv_core::rope::RopeStyle;
use model_core::blocks::{
    Arrangement, ExpertBias, ExpertGate, ExpertScaling, FeedForwardForm, NormKind, QkNorm, QkvBias,
    QkvWeights, Sinks,
};
use model_core::windows::{FullLayer, WindowPattern};

use crate::member::{
    EmbeddingScale, LayerWindows, LlamaLike, LogitScale, Mixture, MixtureRouting, Mixtures,
    QueryScale, ResidualScale, RotatedLayers, ScoreScale, SoftCaps, WindowedRope,
};

/// What the rows below differ from; Llama itself adds little.
const PLAIN: LlamaLike = LlamaLike {
    name: "",
    norm: NormKind::Rms,
    arrangement: Arrangement::PreNorm,
    feed_forward_norm: "ffn_norm.weight",
    qkv: QkvWeights::Separate,
    bias: QkvBias::None,
    qk_norm: QkNorm::None,
    qk_norm_unless_experts: None,
    rope: RopeStyle::Neox,
    rotated: RotatedLayers::All,
    windows: LayerWindows::None,
    scores: ScoreScale::KeyDim,
    query_scale: QueryScale::None,
    sinks: Sinks::None,
    feed_forward: FeedForwardForm::Gated,
    activation: Activation::Silu,
    mixtures: Mixtures::None,
    embedding: EmbeddingScale::One,
    residual: ResidualScale::One,
    logits: LogitScale::One,
    soft_caps: SoftCaps::None,
};

/// The softmax over a row's chosen experts weighs what comes out of them.
const SOFTMAX_OF_CHOSEN: Mixture = Mixture {
    route: RouteGate::Softmax,
    routing: MixtureRouting::Plain,
    sum: RouteSum::One,
    scaling: ExpertScaling::Outputs,
    gate: ExpertGate::Activation(Activation::Silu),
    bias: ExpertBias::None,
};

/// Of every `period` layers the last sees everything.
const fn last_of(period: u32) -> WindowPattern {
    WindowPattern {
        period,
        full: FullLayer::Last,
    }
}

const GEMMA2: LlamaLike = LlamaLike {
    name: "gemma2",
    arrangement: Arrangement::PreAndPostNorm,
    activation: Activation::GeluTanh,
    embedding: EmbeddingScale::SqrtDim,
    scores: ScoreScale::KeyDimUnlessLayers(46),
    windows: LayerWindows::Sliding {
        pattern: last_of(2),
        rope: WindowedRope::Same,
    },
    soft_caps: SoftCaps::FromFile,
    ..PLAIN
};

const QWEN3: LlamaLike = LlamaLike {
    name: "qwen3",
    qk_norm: QkNorm::PerHead,
    ..PLAIN
};

/// All members.
pub const FAMILY: &[LlamaLike] = &[
    // Also Mistral and Mixtral.
    LlamaLike {
        name: "llama",
        rope: RopeStyle::Norm,
        windows: LayerWindows::Every,
        mixtures: Mixtures::Allowed(SOFTMAX_OF_CHOSEN),
        ..PLAIN
    },
    LlamaLike {
        name: "llama4",
        rope: RopeStyle::Norm,
        rotated: RotatedLayers::AllButEvery(4),
        qk_norm: QkNorm::PerHeadPlain,
        qk_norm_unless_experts: Some(128),
        windows: LayerWindows::Chunked {
            pattern: last_of(4),
            n_tokens: 8192,
        },
        query_scale: QueryScale::Tempered {
            every: 8192,
            strength: 0.1,
        },
        mixtures: Mixtures::Always(Mixture {
            route: RouteGate::Sigmoid,
            sum: RouteSum::Free,
            scaling: ExpertScaling::Inputs,
            ..SOFTMAX_OF_CHOSEN
        }),
        ..PLAIN
    },
    LlamaLike {
        name: "qwen2",
        bias: QkvBias::Qkv,
        ..PLAIN
    },
    QWEN3,
    LlamaLike {
        name: "qwen3moe",
        mixtures: Mixtures::Always(SOFTMAX_OF_CHOSEN),
        ..QWEN3
    },
    GEMMA2,
    LlamaLike {
        name: "gemma3",
        qk_norm: QkNorm::PerHead,
        scores: ScoreScale::KeyDimUnlessLayers(62),
        windows: LayerWindows::Sliding {
            pattern: last_of(6),
            rope: WindowedRope::Own(10_000.0),
        },
        soft_caps: SoftCaps::None,
        ..GEMMA2
    },
    LlamaLike {
        name: "phi3",
        qkv: QkvWeights::Fused,
        feed_forward: FeedForwardForm::FusedGate,
        windows: LayerWindows::Every,
        ..PLAIN
    },
    // Command R7B.
    LlamaLike {
        name: "cohere2",
        norm: NormKind::Layer,
        arrangement: Arrangement::Parallel,
        rope: RopeStyle::Norm,
        rotated: RotatedLayers::Windowed,
        windows: LayerWindows::Sliding {
            pattern: last_of(4),
            rope: WindowedRope::Same,
        },
        logits: LogitScale::Times,
        ..PLAIN
    },
    LlamaLike {
        name: "granite",
        rope: RopeStyle::Norm,
        rotated: RotatedLayers::IfTrained,
        embedding: EmbeddingScale::FromFile,
        residual: ResidualScale::FromFile,
        logits: LogitScale::DividedBy,
        ..PLAIN
    },
    LlamaLike {
        name: "smollm3",
        rope: RopeStyle::Norm,
        rotated: RotatedLayers::AllButEvery(4),
        ..PLAIN
    },
    LlamaLike {
        name: "olmo2",
        arrangement: Arrangement::PostNorm,
        qk_norm: QkNorm::WholeRow,
        ..PLAIN
    },
    LlamaLike {
        name: "starcoder2",
        norm: NormKind::LayerWithBias,
        bias: QkvBias::All,
        feed_forward: FeedForwardForm::PlainWithBias,
        windows: LayerWindows::Every,
        activation: Activation::GeluTanh,
        ..PLAIN
    },
    LlamaLike {
        name: "gpt-oss",
        feed_forward_norm: "post_attention_norm.weight",
        bias: QkvBias::All,
        sinks: Sinks::PerHead,
        windows: LayerWindows::Sliding {
            pattern: last_of(2),
            rope: WindowedRope::Same,
        },
        mixtures: Mixtures::Always(Mixture {
            gate: ExpertGate::Clamped(ClampedGate {
                slope: 1.702,
                limit: 7.0,
            }),
            bias: ExpertBias::All,
            ..SOFTMAX_OF_CHOSEN
        }),
        ..PLAIN
    },
];
