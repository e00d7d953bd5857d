//! [`members`]: the members, one row each. A row holds what cannot be read from the member's files.

use kv_graph::rope::{RopeStyle, SectionOrder};
use kv_graph::{Activation, ClampedGate, RouteGate, RouteSum};
use model_core::architecture::MaskPlace;
use model_core::blocks::{
    Arrangement, ExpertBias, ExpertGate, ExpertScaling, FeedForwardForm, NormKind, QkNorm, QkvBias,
    QkvWeights, SharedShare,
};
use model_core::windows::{FullLayer, WindowPattern};

use crate::further;
use crate::member::{
    AttentionForm, Biases, EmbeddingNorm, EmbeddingScale, HeadWidths, LayerSinks, LayerWindows,
    LlamaLike, LogitScale, Mixture, MixtureRouting, Mixtures, Parallel, PerLayer, Positions,
    QkNormed, QkvClamp, QueryScale, ResidualRows, ResidualScale, RotatedLayers, RowSharing,
    ScoreScale, Sections, Sight, SoftCaps, SubNorms, ValueForm, WindowedRope,
};

/// The base of the rows below; Llama itself adds little.
pub(crate) const PLAIN: LlamaLike = LlamaLike {
    name: "",
    norm: NormKind::Rms,
    arrangement: Arrangement::PreNorm,
    parallel: Parallel::AsArranged,
    feed_forward_norm: "ffn_norm.weight",
    sight: Sight::Earlier,
    attention: AttentionForm::KeysAndValues,
    qkv: QkvWeights::Separate,
    bias: Biases::Of(QkvBias::None),
    qk_norm: QkNorm::None,
    qk_normed: QkNormed::Always,
    values: ValueForm::Projected,
    sharing: RowSharing::None,
    head_widths: HeadWidths::Same,
    rope: RopeStyle::Neox,
    rotated: RotatedLayers::All,
    sections: Sections::None,
    positions: Positions::None,
    clamp: QkvClamp::None,
    windows: LayerWindows::None,
    scores: ScoreScale::KeyDim,
    query_scale: QueryScale::None,
    sinks: LayerSinks::None,
    sub_norms: SubNorms::None,
    feed_forward: FeedForwardForm::Gated,
    activation: Activation::Silu,
    mixtures: Mixtures::None,
    per_layer: PerLayer::Nothing,
    embedding: EmbeddingScale::One,
    embedding_norm: EmbeddingNorm::None,
    residual: ResidualScale::One,
    residual_rows: ResidualRows::BeforeNorms,
    logits: LogitScale::One,
    soft_caps: SoftCaps::None,
};

/// The softmax over a row's chosen experts weighs what comes out of them.
pub(crate) const SOFTMAX_OF_CHOSEN: Mixture = Mixture {
    route: RouteGate::Softmax,
    routing: MixtureRouting::Plain,
    sum: RouteSum::One,
    scaling: ExpertScaling::Outputs,
    gate: ExpertGate::Activation(Activation::Silu),
    bias: ExpertBias::None,
    shared: SharedShare::Whole,
};

/// As that, after a choice by probabilities with biases.
const BIASED_SOFTMAX: Mixture = Mixture {
    routing: MixtureRouting::Biased,
    ..SOFTMAX_OF_CHOSEN
};

/// Scores by themselves, divided by the sum of the chosen ones.
pub(crate) const SIGMOID: Mixture = Mixture {
    route: RouteGate::Sigmoid,
    ..SOFTMAX_OF_CHOSEN
};

/// Scores by themselves with biases on the choice, divided by the sum of the chosen ones.
pub(crate) const BIASED_SIGMOID: Mixture = Mixture {
    route: RouteGate::Sigmoid,
    ..BIASED_SOFTMAX
};

/// All layers, where the file names a window.
const EVERY_IF_NAMED: LayerWindows = LayerWindows::IfNamed {
    pattern: WindowPattern::EVERY,
    rope: WindowedRope::Same,
};

/// Of every `period` layers the last sees everything.
pub(crate) const fn last_of(period: u32) -> WindowPattern {
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

/// The parts of Gemma 3n that are the family's: all but how its layers are wired.
pub(crate) const GEMMA3N: LlamaLike = LlamaLike {
    name: "gemma3n",
    qk_norm: QkNorm::PerHead,
    values: ValueForm::Normed,
    sharing: RowSharing::LastLayers,
    scores: ScoreScale::One,
    windows: LayerWindows::Sliding {
        pattern: last_of(5),
        rope: WindowedRope::Own(10_000.0),
    },
    per_layer: PerLayer::InputsAndScales,
    soft_caps: SoftCaps::Logits,
    ..GEMMA2
};

const ERNIE: LlamaLike = LlamaLike {
    name: "ernie4_5",
    bias: Biases::AsInFile,
    rope: RopeStyle::Norm,
    ..PLAIN
};

pub(crate) const GRANITE: LlamaLike = LlamaLike {
    name: "granite",
    rope: RopeStyle::Norm,
    rotated: RotatedLayers::IfTrained,
    embedding: EmbeddingScale::FromFile,
    residual: ResidualScale::FromFile,
    logits: LogitScale::DividedBy,
    ..PLAIN
};

const HUNYUAN: LlamaLike = LlamaLike {
    name: "hunyuan-dense",
    qk_norm: QkNorm::PerHeadRotated,
    ..PLAIN
};

pub(crate) const QWEN3: LlamaLike = LlamaLike {
    name: "qwen3",
    qk_norm: QkNorm::PerHead,
    ..PLAIN
};

/// Command R7B.
pub(crate) const COHERE2: LlamaLike = LlamaLike {
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
};

/// DeepSeek V2, V3 and R1.
pub(crate) const DEEPSEEK2: LlamaLike = LlamaLike {
    name: "deepseek2",
    attention: AttentionForm::Latents,
    rope: RopeStyle::Norm,
    mixtures: Mixtures::Allowed(Mixture {
        routing: MixtureRouting::BiasedAfterSigmoid,
        sum: RouteSum::Free,
        ..SOFTMAX_OF_CHOSEN
    }),
    ..PLAIN
};

/// Phi-2.
const PHI2: LlamaLike = LlamaLike {
    name: "phi2",
    norm: NormKind::LayerWithBias,
    arrangement: Arrangement::Parallel,
    bias: Biases::Of(QkvBias::All),
    qk_norm: QkNorm::PerHeadCentred,
    qk_normed: QkNormed::AsInFile,
    feed_forward: FeedForwardForm::PlainWithBias,
    activation: Activation::GeluTanh,
    ..PLAIN
};

const GPT2: LlamaLike = LlamaLike {
    name: "gpt2",
    norm: NormKind::LayerWithBias,
    qkv: QkvWeights::Fused,
    bias: Biases::Of(QkvBias::All),
    rotated: RotatedLayers::None,
    positions: Positions::Learnt,
    feed_forward: FeedForwardForm::PlainWithBias,
    activation: Activation::GeluTanh,
    ..PLAIN
};

/// Gemma 4 (text).
pub(crate) const GEMMA4: LlamaLike = LlamaLike {
    name: "gemma4",
    sight: Sight::EarlierInFull,
    qk_norm: QkNorm::PerHead,
    values: ValueForm::NormedOrKeys,
    sharing: RowSharing::LastLayers,
    head_widths: HeadWidths::ByWindow,
    scores: ScoreScale::One,
    windows: LayerWindows::Sliding {
        pattern: last_of(6),
        rope: WindowedRope::Own(10_000.0),
    },
    mixtures: Mixtures::WithDense(Mixture {
        gate: ExpertGate::Activation(Activation::GeluTanh),
        ..SOFTMAX_OF_CHOSEN
    }),
    per_layer: PerLayer::InputsAndScales,
    soft_caps: SoftCaps::Logits,
    ..GEMMA2
};

/// The layer of a head of EAGLE-3, which is no member: its attention reads two rows.
pub(crate) const EAGLE3_LAYER: LlamaLike = LlamaLike {
    name: "eagle3",
    rope: RopeStyle::Norm,
    bias: Biases::AsInFile,
    ..PLAIN
};

/// All members.
pub fn members() -> impl Iterator<Item = &'static LlamaLike> {
    MEMBERS.iter().chain(further::MEMBERS)
}

const MEMBERS: &[LlamaLike] = &[
    // Also Mistral and Mixtral.
    LlamaLike {
        name: "llama",
        rope: RopeStyle::Norm,
        windows: EVERY_IF_NAMED,
        mixtures: Mixtures::Allowed(SOFTMAX_OF_CHOSEN),
        ..PLAIN
    },
    LlamaLike {
        name: "llama4",
        rope: RopeStyle::Norm,
        rotated: RotatedLayers::AllButEvery(4),
        qk_norm: QkNorm::PerHeadPlain,
        qk_normed: QkNormed::UnlessExperts(128),
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
        bias: Biases::Of(QkvBias::Qkv),
        ..PLAIN
    },
    // Wang et al., arXiv 2409.12191: Qwen 2 whose keys know rows and columns of images.
    LlamaLike {
        name: "qwen2vl",
        bias: Biases::Of(QkvBias::Qkv),
        sections: Sections::Always(SectionOrder::Consecutive),
        ..PLAIN
    },
    LlamaLike {
        name: "qwen2moe",
        bias: Biases::Of(QkvBias::Qkv),
        mixtures: Mixtures::Always(Mixture {
            sum: RouteSum::Free,
            ..SOFTMAX_OF_CHOSEN
        }),
        ..PLAIN
    },
    // Ye et al., arXiv 2508.15487: Qwen 2.5 whose tokens see each other.
    LlamaLike {
        name: "dream",
        sight: Sight::WholeText(MaskPlace::Before),
        bias: Biases::Of(QkvBias::Qkv),
        ..PLAIN
    },
    // Nie et al., arXiv 2502.09992.
    LlamaLike {
        name: "llada",
        sight: Sight::WholeText(MaskPlace::Own),
        rope: RopeStyle::Norm,
        ..PLAIN
    },
    LlamaLike {
        name: "llada-moe",
        sight: Sight::WholeText(MaskPlace::Own),
        qk_norm: QkNorm::PerHead,
        mixtures: Mixtures::Always(Mixture {
            sum: RouteSum::Free,
            ..SOFTMAX_OF_CHOSEN
        }),
        ..PLAIN
    },
    QWEN3,
    LlamaLike {
        name: "qwen3vl",
        sections: Sections::Always(SectionOrder::Interleaved),
        ..QWEN3
    },
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
    GEMMA4,
    LlamaLike {
        name: "phi3",
        qkv: QkvWeights::Fused,
        feed_forward: FeedForwardForm::FusedGate,
        windows: EVERY_IF_NAMED,
        ..PLAIN
    },
    // Phi-3.5 MoE (Abdin et al., arXiv 2404.14219). llama.cpp computes RMS norms and a softmax over
    // two experts in its place.
    LlamaLike {
        name: "phimoe",
        norm: NormKind::LayerWithBias,
        bias: Biases::AsInFile,
        windows: EVERY_IF_NAMED,
        mixtures: Mixtures::Always(Mixture {
            route: RouteGate::Sparsemixer { jitter: 0.01 },
            sum: RouteSum::Free,
            ..SOFTMAX_OF_CHOSEN
        }),
        ..PLAIN
    },
    COHERE2,
    GRANITE,
    LlamaLike {
        name: "granitemoe",
        mixtures: Mixtures::Always(SOFTMAX_OF_CHOSEN),
        ..GRANITE
    },
    LlamaLike {
        name: "smollm3",
        rope: RopeStyle::Norm,
        rotated: RotatedLayers::AllButEvery(4),
        ..PLAIN
    },
    // Also OLMo 3, whose files name a window.
    LlamaLike {
        name: "olmo2",
        arrangement: Arrangement::PostNorm,
        qk_norm: QkNorm::WholeRow,
        windows: LayerWindows::IfNamed {
            pattern: last_of(4),
            rope: WindowedRope::Unstretched,
        },
        ..PLAIN
    },
    LlamaLike {
        name: "exaone4",
        arrangement: Arrangement::PostNorm,
        qk_norm: QkNorm::PerHead,
        rotated: RotatedLayers::WindowedIfNamed,
        windows: LayerWindows::IfNamed {
            pattern: last_of(4),
            rope: WindowedRope::Same,
        },
        ..PLAIN
    },
    LlamaLike {
        name: "seed_oss",
        feed_forward_norm: "post_attention_norm.weight",
        bias: Biases::AsInFile,
        ..PLAIN
    },
    // GLM-4-0414, and the decoder of GLM-4.1V.
    LlamaLike {
        name: "glm4",
        sections: Sections::IfNamed(SectionOrder::Consecutive),
        arrangement: Arrangement::PreAndPostNorm,
        bias: Biases::AsInFile,
        rope: RopeStyle::Norm,
        feed_forward: FeedForwardForm::FusedGate,
        ..PLAIN
    },
    // GLM-4.5 and 4.6, and the decoder of GLM-4.5V.
    LlamaLike {
        name: "glm4moe",
        sections: Sections::IfNamed(SectionOrder::Consecutive),
        feed_forward_norm: "post_attention_norm.weight",
        bias: Biases::AsInFile,
        qk_norm: QkNorm::PerHead,
        qk_normed: QkNormed::AsInFile,
        mixtures: Mixtures::Always(BIASED_SIGMOID),
        ..PLAIN
    },
    ERNIE,
    LlamaLike {
        name: "ernie4_5-moe",
        mixtures: Mixtures::Always(BIASED_SOFTMAX),
        ..ERNIE
    },
    LlamaLike {
        name: "minimax-m2",
        qk_norm: QkNorm::WholeRow,
        mixtures: Mixtures::Always(BIASED_SIGMOID),
        ..PLAIN
    },
    // Ministral 3.
    LlamaLike {
        name: "mistral3",
        rope: RopeStyle::Norm,
        windows: EVERY_IF_NAMED,
        query_scale: QueryScale::Stretched,
        ..PLAIN
    },
    HUNYUAN,
    LlamaLike {
        name: "hunyuan-moe",
        mixtures: Mixtures::Always(SOFTMAX_OF_CHOSEN),
        ..HUNYUAN
    },
    LlamaLike {
        name: "starcoder2",
        norm: NormKind::LayerWithBias,
        bias: Biases::Of(QkvBias::All),
        feed_forward: FeedForwardForm::PlainWithBias,
        windows: EVERY_IF_NAMED,
        activation: Activation::GeluTanh,
        ..PLAIN
    },
    DEEPSEEK2,
    // DeepSeek V3.2: the same with indexers.
    LlamaLike {
        name: "deepseek32",
        attention: AttentionForm::IndexedLatents {
            rope: RopeStyle::Neox,
        },
        ..DEEPSEEK2
    },
    // Latents, and queries that grow with the position.
    LlamaLike {
        name: "mistral4",
        query_scale: QueryScale::Stretched,
        ..DEEPSEEK2
    },
    LlamaLike {
        name: "gpt-oss",
        feed_forward_norm: "post_attention_norm.weight",
        bias: Biases::Of(QkvBias::All),
        sinks: LayerSinks::All,
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
    PHI2,
    LlamaLike {
        name: "gptj",
        bias: Biases::Of(QkvBias::None),
        rope: RopeStyle::Norm,
        ..PHI2
    },
    LlamaLike {
        name: "codegen",
        bias: Biases::Of(QkvBias::None),
        rope: RopeStyle::Norm,
        ..PHI2
    },
    LlamaLike {
        name: "nemotron",
        norm: NormKind::LayerWithBias,
        bias: Biases::AsInFile,
        feed_forward: FeedForwardForm::Plain,
        activation: Activation::ReluSquared,
        ..PLAIN
    },
    LlamaLike {
        name: "stablelm",
        norm: NormKind::LayerWithBias,
        parallel: Parallel::WithoutSecondNorm,
        bias: Biases::AsInFile,
        // Of 12B.
        qk_norm: QkNorm::PerHeadGains,
        qk_normed: QkNormed::AsInFile,
        ..PLAIN
    },
    GPT2,
    // SantaCoder and StarCoder.
    LlamaLike {
        name: "starcoder",
        ..GPT2
    },
    LlamaLike {
        name: "gptneo",
        qkv: QkvWeights::Separate,
        bias: Biases::Of(QkvBias::Output),
        scores: ScoreScale::One,
        windows: LayerWindows::Sliding {
            pattern: WindowPattern {
                period: 2,
                full: FullLayer::First,
            },
            rope: WindowedRope::Same,
        },
        ..GPT2
    },
    LlamaLike {
        name: "opt",
        residual_rows: ResidualRows::SumsNormedIfNamed,
        qkv: QkvWeights::Separate,
        activation: Activation::Relu,
        ..GPT2
    },
    LlamaLike {
        name: "gptneox",
        norm: NormKind::LayerWithBias,
        parallel: Parallel::IfNamed,
        qkv: QkvWeights::Fused,
        bias: Biases::Of(QkvBias::All),
        feed_forward: FeedForwardForm::PlainWithBias,
        activation: Activation::GeluErf,
        ..PLAIN
    },
    LlamaLike {
        name: "falcon",
        norm: NormKind::LayerWithBias,
        parallel: Parallel::WithoutSecondNorm,
        qkv: QkvWeights::Fused,
        bias: Biases::AsInFile,
        positions: Positions::ScaledBiasesIfNamed,
        feed_forward: FeedForwardForm::Plain,
        activation: Activation::GeluErf,
        ..PLAIN
    },
    LlamaLike {
        name: "bloom",
        residual_rows: ResidualRows::NormedIfNamed,
        positions: Positions::Biases(8.0),
        embedding_norm: EmbeddingNorm::Normed,
        ..GPT2
    },
    LlamaLike {
        name: "mpt",
        norm: NormKind::Layer,
        qkv: QkvWeights::Fused,
        rotated: RotatedLayers::None,
        positions: Positions::BiasesIfNamed,
        clamp: QkvClamp::IfNamed,
        feed_forward: FeedForwardForm::Plain,
        activation: Activation::GeluErf,
        ..PLAIN
    },
];
