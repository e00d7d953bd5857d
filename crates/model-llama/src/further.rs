//! [`MEMBERS`]: members that recombine what those of [`crate::family`] brought, a row each.

use kv_graph::rope::{RopeStyle, SectionOrder};
use kv_graph::{Activation, RouteGate, RouteSum};
use model_core::architecture::MaskPlace;
use model_core::blocks::{
    FeedForwardForm, NormKind, QkNorm, QkvBias, QkvWeights, SharedShare, Xielu,
};
use model_core::windows::{FullLayer, WindowPattern};

use crate::family::{
    BIASED_SIGMOID, COHERE2, DEEPSEEK2, GRANITE, PLAIN, QWEN3, SIGMOID, SOFTMAX_OF_CHOSEN, last_of,
};
use crate::member::{
    AttentionForm, Biases, EmbeddingScale, LayerSinks, LayerWindows, LlamaLike, LogitScale,
    Mixture, MixtureRouting, Mixtures, Positions, QkNormed, QkvClamp, ResidualScale, RotatedLayers,
    Sections, Sight, SubNorms, ValueForm, WindowedRope,
};

/// The weights of a row's experts are their shares of all, which add up to less than 1.
const SHARES_OF_ALL: Mixtures = Mixtures::Always(Mixture {
    sum: RouteSum::Free,
    ..SOFTMAX_OF_CHOSEN
});

pub(crate) const MEMBERS: &[LlamaLike] = &[
    // arXiv 2403.08295.
    LlamaLike {
        name: "gemma",
        activation: Activation::GeluTanh,
        embedding: EmbeddingScale::SqrtDim,
        ..PLAIN
    },
    // Command R, and with norms of queries and keys Command R+.
    LlamaLike {
        name: "command-r",
        qk_norm: QkNorm::PerHeadGains,
        qk_normed: QkNormed::AsInFile,
        rotated: RotatedLayers::All,
        windows: LayerWindows::None,
        ..COHERE2
    },
    LlamaLike {
        name: "cohere2moe",
        mixtures: Mixtures::Always(Mixture {
            shared: SharedShare::Mean,
            ..SIGMOID
        }),
        ..COHERE2
    },
    // Groeneveld et al., arXiv 2402.00838.
    LlamaLike {
        name: "olmo",
        norm: NormKind::LayerPlain,
        rope: RopeStyle::Norm,
        clamp: QkvClamp::IfNamed,
        ..PLAIN
    },
    // Muennighoff et al., arXiv 2409.02060.
    LlamaLike {
        name: "olmoe",
        qk_norm: QkNorm::WholeRow,
        mixtures: SHARES_OF_ALL,
        ..PLAIN
    },
    // AFM 4.5B.
    LlamaLike {
        name: "arcee",
        rope: RopeStyle::Norm,
        feed_forward: FeedForwardForm::Plain,
        activation: Activation::ReluSquared,
        ..PLAIN
    },
    LlamaLike {
        name: "granite_swa",
        rotated: RotatedLayers::NamedOrAll,
        sinks: LayerSinks::All,
        windows: LayerWindows::Sliding {
            pattern: WindowPattern {
                period: 4,
                full: FullLayer::First,
            },
            rope: WindowedRope::Same,
        },
        ..GRANITE
    },
    // K-EXAONE.
    LlamaLike {
        name: "exaone-moe",
        qk_norm: QkNorm::PerHead,
        rotated: RotatedLayers::WindowedIfNamed,
        windows: LayerWindows::IfNamed {
            pattern: last_of(4),
            rope: WindowedRope::Same,
        },
        mixtures: Mixtures::Always(BIASED_SIGMOID),
        ..PLAIN
    },
    LlamaLike {
        name: "dots1",
        mixtures: Mixtures::Always(BIASED_SIGMOID),
        ..QWEN3
    },
    // Hunyuan 3.
    LlamaLike {
        name: "hy_v3",
        mixtures: Mixtures::Always(BIASED_SIGMOID),
        ..QWEN3
    },
    // ChatGLM 2 and 3, GLM-4 9B.
    LlamaLike {
        name: "chatglm",
        qkv: QkvWeights::Fused,
        bias: Biases::AsInFile,
        rope: RopeStyle::Norm,
        feed_forward: FeedForwardForm::FusedGate,
        ..PLAIN
    },
    LlamaLike {
        name: "dbrx",
        norm: NormKind::Layer,
        feed_forward_norm: "attn_output_norm.weight",
        qkv: QkvWeights::Fused,
        clamp: QkvClamp::IfNamed,
        mixtures: Mixtures::Always(SOFTMAX_OF_CHOSEN),
        ..PLAIN
    },
    LlamaLike {
        name: "jais2",
        norm: NormKind::LayerWithBias,
        bias: Biases::Of(QkvBias::All),
        feed_forward: FeedForwardForm::PlainWithBias,
        activation: Activation::ReluSquared,
        ..PLAIN
    },
    // MiMo-V2 Flash.
    LlamaLike {
        name: "mimo2",
        values: ValueForm::ScaledIfNamed,
        sinks: LayerSinks::Windowed,
        windows: LayerWindows::Sliding {
            pattern: last_of(6),
            rope: WindowedRope::Own(10_000.0),
        },
        mixtures: Mixtures::Always(BIASED_SIGMOID),
        ..PLAIN
    },
    // Cai et al., arXiv 2403.17297.
    LlamaLike {
        name: "internlm2",
        rope: RopeStyle::Norm,
        ..PLAIN
    },
    // Hu et al., arXiv 2404.06395.
    LlamaLike {
        name: "minicpm",
        rotated: RotatedLayers::All,
        ..GRANITE
    },
    // Yang et al., arXiv 2309.10305: 7B rotates, 13B has linear biases.
    LlamaLike {
        name: "baichuan",
        rope: RopeStyle::Norm,
        positions: Positions::BiasesOfLayers {
            n_layers: 40,
            usual: 8.0,
        },
        ..PLAIN
    },
    // DeepSeekMoE: Dai et al., arXiv 2401.06066.
    LlamaLike {
        name: "deepseek",
        rope: RopeStyle::Norm,
        mixtures: SHARES_OF_ALL,
        ..PLAIN
    },
    // Ling 2 and Ring 2.
    LlamaLike {
        name: "bailingmoe2",
        qkv: QkvWeights::Fused,
        qk_norm: QkNorm::PerHead,
        mixtures: Mixtures::Always(BIASED_SIGMOID),
        ..PLAIN
    },
    LlamaLike {
        name: "qwen3vlmoe",
        sections: Sections::Always(SectionOrder::Interleaved),
        mixtures: Mixtures::Always(SOFTMAX_OF_CHOSEN),
        ..QWEN3
    },
    // GLM-5 and 5.1.
    LlamaLike {
        name: "glm-dsa",
        attention: AttentionForm::IndexedLatents {
            rope: RopeStyle::Norm,
        },
        mixtures: Mixtures::Allowed(Mixture {
            route: RouteGate::Sigmoid,
            routing: MixtureRouting::BiasedAfterSigmoid,
            sum: RouteSum::Free,
            ..SOFTMAX_OF_CHOSEN
        }),
        ..DEEPSEEK2
    },
    // Qwen 3's mixtures, whose tokens see each other.
    LlamaLike {
        name: "rnd1",
        sight: Sight::WholeText(MaskPlace::Before),
        mixtures: Mixtures::Always(SOFTMAX_OF_CHOSEN),
        ..QWEN3
    },
    // EXAONE 3 and 3.5.
    LlamaLike {
        name: "exaone",
        ..PLAIN
    },
    LlamaLike {
        name: "pangu-embedded",
        bias: Biases::AsInFile,
        ..PLAIN
    },
    LlamaLike {
        name: "codeshell",
        norm: NormKind::LayerWithBias,
        qkv: QkvWeights::Fused,
        bias: Biases::Of(QkvBias::All),
        feed_forward: FeedForwardForm::PlainWithBias,
        activation: Activation::GeluTanh,
        ..PLAIN
    },
    LlamaLike {
        name: "xverse",
        rope: RopeStyle::Norm,
        ..PLAIN
    },
    LlamaLike {
        name: "orion",
        norm: NormKind::LayerWithBias,
        ..PLAIN
    },
    // Hernandez-Cano et al., arXiv 2509.14233. The slopes are the file's, layer by layer.
    LlamaLike {
        name: "apertus",
        qk_norm: QkNorm::PerHead,
        feed_forward: FeedForwardForm::PlainXielu(Xielu {
            positive: 0.8,
            negative: 0.8,
            beta: 0.5,
        }),
        ..PLAIN
    },
    // Ma et al., arXiv 2402.17764 and 2504.12285.
    LlamaLike {
        name: "bitnet",
        sub_norms: SubNorms::BeforeOutputs,
        ..PLAIN
    },
    // MiniCPM 3, which rotates in halves. llama.cpp's files leave out the factors of the one model
    // that was published.
    LlamaLike {
        name: "minicpm3",
        attention: AttentionForm::Latents,
        rope: RopeStyle::Neox,
        rotated: RotatedLayers::All,
        embedding: EmbeddingScale::FromFileOr(12.0),
        residual: ResidualScale::FromFileOrDepth(1.4),
        logits: LogitScale::DividedByOrWidth(256),
        ..GRANITE
    },
];
