//! [`classes`]: how directories of the family's models are translated. Data over the tables that
//! [`model_core::hf`] shares.

mod apertus;
mod deepseek;
mod diffusion;
mod eagle3;
mod further;
mod gemma3n;
mod gemma4;
mod gemma4_assistant;
mod gpt;
mod gpt_tensors;
mod keys;
mod mimo;
mod phimoe;
mod published;
mod recent;
mod routed;
mod solar;
mod tensors;
mod vision;

use model_core::hf::{
    ATTENTION_TENSORS, ATTENTION_VECTORS, DECODER_KEYS, EMBEDDING_TENSORS, GATED_TENSORS,
    GEMMA_NORMS, GRANITE_FACTORS, HEAD_TENSORS, HfClass, HfHead, INPUT_NORM, Key, NORM_BEFORE_FFN,
    PAIRED_ATTENTION, RMS_EPS, ROPE_KEYS, SILU, full_attention, gemma3_windows, window_of_all,
};

use deepseek::{
    DEEPSEEK_EXPERTS, DEEPSEEK_FEED_FORWARD, DEEPSEEK_V2_KEYS, DEEPSEEK_V3_KEYS, DEEPSEEK_V32_KEYS,
    GLM_DSA_KEYS, INDEXER, LATENT_ATTENTION, MISTRAL4_EXPERTS, MISTRAL4_KEYS,
};
use keys::{
    COHERE2_KEYS, EXPERT_KEYS, GEMMA_KEYS, GPT_OSS_KEYS, LLAMA4_KEYS, QWEN3_MOE_KEYS, SMOLLM3_KEYS,
    STARCODER2_KEYS, alternating_windows, gemma3_rope, phi3_window,
};
use tensors::{
    GEMMA_EMBEDDING, GPT_OSS_EXPERTS, GPT_OSS_NORM, LLAMA4_DENSE, LLAMA4_EXPERTS, LLAMA4_ROUTER,
    MIXTRAL_TENSORS, OLMO2_NORMS, PHI3_TENSORS, QWEN3_MOE_TENSORS, STARCODER2_FEED_FORWARD,
    STARCODER2_NORM_BIASES,
};

/// Tables of buffers that old files hold.
const UNUSED: &[&str] = &["model.layers.{l}.self_attn.rotary_emb.inv_freq"];

const LLAMA: HfClass = HfClass {
    name: "LlamaForCausalLM",
    architecture: "llama",
    keys: &[DECODER_KEYS, RMS_EPS, ROPE_KEYS, &[SILU]],
    tensors: &[
        EMBEDDING_TENSORS,
        INPUT_NORM,
        PAIRED_ATTENTION,
        NORM_BEFORE_FFN,
        GATED_TENSORS,
    ],
    unused: UNUSED,
    ..HfClass::EMPTY
};

const LLAMA4: HfClass = HfClass {
    name: "Llama4ForCausalLM",
    architecture: "llama4",
    keys: &[DECODER_KEYS, RMS_EPS, ROPE_KEYS, EXPERT_KEYS, LLAMA4_KEYS],
    tensors: &[
        EMBEDDING_TENSORS,
        INPUT_NORM,
        ATTENTION_TENSORS,
        ATTENTION_VECTORS,
        NORM_BEFORE_FFN,
        LLAMA4_DENSE,
        LLAMA4_ROUTER,
        LLAMA4_EXPERTS,
    ],
    defaults: &[("head_dim", 128), ("rope_theta", 500_000)],
    ..LLAMA
};

/// All classes.
pub(crate) fn classes() -> impl Iterator<Item = &'static HfClass> {
    CLASSES
        .iter()
        .chain(recent::CLASSES)
        .chain(routed::CLASSES)
        .chain(phimoe::CLASSES)
        .chain(gpt::CLASSES)
        .chain(vision::CLASSES)
        .chain(diffusion::CLASSES)
        .chain(gemma4::CLASSES)
        .chain(gemma4_assistant::CLASSES)
        .chain(gemma3n::CLASSES)
        .chain(eagle3::CLASSES)
        .chain(further::CLASSES)
        .chain(mimo::CLASSES)
        .chain(published::CLASSES)
        .chain(apertus::CLASSES)
        .chain(solar::CLASSES)
}

/// From Llama to gpt-oss.
const CLASSES: &[HfClass] = &[
    LLAMA,
    HfClass {
        name: "LlamaModel",
        head: HfHead::None,
        ..LLAMA
    },
    MISTRAL,
    HfClass {
        name: "MistralModel",
        head: HfHead::None,
        ..MISTRAL
    },
    HfClass {
        name: "MixtralForCausalLM",
        keys: &[
            DECODER_KEYS,
            RMS_EPS,
            ROPE_KEYS,
            EXPERT_KEYS,
            &[SILU, Key::With(window_of_all)],
        ],
        tensors: &[
            EMBEDDING_TENSORS,
            INPUT_NORM,
            PAIRED_ATTENTION,
            NORM_BEFORE_FFN,
            MIXTRAL_TENSORS,
        ],
        defaults: &[("rope_theta", 1_000_000)],
        ..LLAMA
    },
    QWEN2,
    HfClass {
        name: "Qwen2Model",
        head: HfHead::None,
        ..QWEN2
    },
    QWEN3,
    HfClass {
        name: "Qwen3Model",
        head: HfHead::None,
        ..QWEN3
    },
    HfClass {
        name: "Qwen3MoeForCausalLM",
        architecture: "qwen3moe",
        keys: &[
            DECODER_KEYS,
            RMS_EPS,
            ROPE_KEYS,
            EXPERT_KEYS,
            QWEN3_MOE_KEYS,
        ],
        tensors: QWEN3_MOE_TENSORS,
        ..LLAMA
    },
    GEMMA2,
    GEMMA3,
    HfClass {
        name: "Phi3ForCausalLM",
        architecture: "phi3",
        keys: &[
            DECODER_KEYS,
            RMS_EPS,
            ROPE_KEYS,
            &[SILU, Key::With(phi3_window)],
        ],
        tensors: &[EMBEDDING_TENSORS, INPUT_NORM, NORM_BEFORE_FFN, PHI3_TENSORS],
        defaults: &[("original_max_position_embeddings", 4096)],
        ..LLAMA
    },
    HfClass {
        name: "Cohere2ForCausalLM",
        architecture: "cohere2",
        keys: &[DECODER_KEYS, ROPE_KEYS, COHERE2_KEYS],
        tensors: &[
            EMBEDDING_TENSORS,
            INPUT_NORM,
            ATTENTION_TENSORS,
            ATTENTION_VECTORS,
            GATED_TENSORS,
        ],
        defaults: &[("sliding_window", 4096)],
        ..LLAMA
    },
    HfClass {
        name: "GptOssForCausalLM",
        architecture: "gpt-oss",
        keys: &[DECODER_KEYS, RMS_EPS, EXPERT_KEYS, GPT_OSS_KEYS],
        tensors: &[
            EMBEDDING_TENSORS,
            INPUT_NORM,
            ATTENTION_TENSORS,
            ATTENTION_VECTORS,
            GPT_OSS_NORM,
            GPT_OSS_EXPERTS,
        ],
        defaults: &[("head_dim", 64), ("rope_theta", 150_000)],
        ..LLAMA
    },
    LLAMA4,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    HfClass {
        name: "Glm4MoeLiteForCausalLM",
        aliases: &[("head_dim", "qk_rope_head_dim")],
        defaults: &[
            ("first_k_dense_replace", 1),
            ("n_group", 1),
            ("topk_group", 1),
            ("num_key_value_heads", 20),
            ("q_lora_rank", 768),
        ],
        ..DEEPSEEK_V3
    },
    HfClass {
        name: "Mistral4ForCausalLM",
        architecture: "mistral4",
        keys: &[RMS_EPS, MISTRAL4_KEYS],
        tensors: &[
            EMBEDDING_TENSORS,
            INPUT_NORM,
            NORM_BEFORE_FFN,
            LATENT_ATTENTION,
            DEEPSEEK_FEED_FORWARD,
            MISTRAL4_EXPERTS,
        ],
        defaults: &[("num_key_value_heads", 32), ("q_lora_rank", 1024)],
        ..DEEPSEEK_V2
    },
    DEEPSEEK_V32,
    HfClass {
        name: "GlmMoeDsaForCausalLM",
        architecture: "glm-dsa",
        keys: &[RMS_EPS, GLM_DSA_KEYS],
        aliases: &[("head_dim", "qk_rope_head_dim")],
        defaults: &[
            ("first_k_dense_replace", 3),
            ("n_group", 1),
            ("topk_group", 1),
            ("num_key_value_heads", 64),
            ("q_lora_rank", 2048),
            ("index_n_heads", 32),
            ("index_head_dim", 128),
            ("index_topk", 2048),
        ],
        ..DEEPSEEK_V32
    },
    GRANITE,
    SMOLLM3,
    OLMO2,
    STARCODER2,
];

/// Latent attention, and groups of experts.
const DEEPSEEK_V2: HfClass = HfClass {
    name: "DeepseekV2ForCausalLM",
    architecture: "deepseek2",
    keys: &[RMS_EPS, DEEPSEEK_V2_KEYS],
    tensors: &[
        EMBEDDING_TENSORS,
        INPUT_NORM,
        NORM_BEFORE_FFN,
        LATENT_ATTENTION,
        DEEPSEEK_FEED_FORWARD,
        DEEPSEEK_EXPERTS,
        HEAD_TENSORS,
    ],
    defaults: &[("q_lora_rank", 1536)],
    ..LLAMA
};

/// Those with indexers.
const DEEPSEEK_V32: HfClass = HfClass {
    name: "DeepseekV32ForCausalLM",
    architecture: "deepseek32",
    keys: &[RMS_EPS, DEEPSEEK_V32_KEYS],
    tensors: &[
        EMBEDDING_TENSORS,
        INPUT_NORM,
        NORM_BEFORE_FFN,
        LATENT_ATTENTION,
        INDEXER,
        DEEPSEEK_FEED_FORWARD,
        DEEPSEEK_EXPERTS,
        HEAD_TENSORS,
    ],
    defaults: &[
        ("n_group", 8),
        ("topk_group", 4),
        ("num_key_value_heads", 128),
        ("q_lora_rank", 1536),
        ("index_n_heads", 64),
        ("index_head_dim", 128),
        ("index_topk", 2048),
    ],
    ..DEEPSEEK_V2
};

/// Routes by sigmoids.
const DEEPSEEK_V3: HfClass = HfClass {
    name: "DeepseekV3ForCausalLM",
    keys: &[RMS_EPS, DEEPSEEK_V3_KEYS],
    defaults: &[
        ("n_group", 8),
        ("topk_group", 4),
        ("num_key_value_heads", 128),
        ("q_lora_rank", 1536),
    ],
    ..DEEPSEEK_V2
};

/// Llama with a window.
const MISTRAL: HfClass = HfClass {
    name: "MistralForCausalLM",
    keys: &[
        DECODER_KEYS,
        RMS_EPS,
        ROPE_KEYS,
        &[SILU, Key::With(window_of_all)],
    ],
    defaults: &[("sliding_window", 4096)],
    ..LLAMA
};

/// Llama with factors of its own.
const GRANITE: HfClass = HfClass {
    name: "GraniteForCausalLM",
    architecture: "granite",
    keys: &[DECODER_KEYS, RMS_EPS, ROPE_KEYS, GRANITE_FACTORS, &[SILU]],
    ..LLAMA
};

/// Llama whose every fourth layer does not rotate.
const SMOLLM3: HfClass = HfClass {
    name: "SmolLM3ForCausalLM",
    architecture: "smollm3",
    keys: &[DECODER_KEYS, RMS_EPS, ROPE_KEYS, SMOLLM3_KEYS],
    defaults: &[("rope_theta", 2_000_000)],
    ..LLAMA
};

const GEMMA2: HfClass = HfClass {
    name: "Gemma2ForCausalLM",
    architecture: "gemma2",
    keys: &[
        DECODER_KEYS,
        RMS_EPS,
        ROPE_KEYS,
        GEMMA_KEYS,
        &[Key::With(alternating_windows)],
    ],
    tensors: &[
        GEMMA_EMBEDDING,
        GEMMA_NORMS,
        ATTENTION_TENSORS,
        GATED_TENSORS,
    ],
    defaults: &[
        ("head_dim", 256),
        ("num_key_value_heads", 4),
        ("query_pre_attn_scalar", 256),
        ("sliding_window", 4096),
        ("attn_logit_softcapping", 50),
        ("final_logit_softcapping", 30),
    ],
    ..LLAMA
};

const GEMMA3: HfClass = HfClass {
    name: "Gemma3ForCausalLM",
    architecture: "gemma3",
    keys: &[
        DECODER_KEYS,
        RMS_EPS,
        GEMMA_KEYS,
        &[Key::With(gemma3_windows), Key::With(gemma3_rope)],
    ],
    defaults: &[
        ("head_dim", 256),
        ("num_key_value_heads", 4),
        ("query_pre_attn_scalar", 256),
        ("sliding_window", 4096),
        ("rope_theta", 1_000_000),
        ("rope_local_base_freq", 10_000),
    ],
    ..GEMMA2
};

const OLMO2: HfClass = HfClass {
    name: "Olmo2ForCausalLM",
    architecture: "olmo2",
    tensors: &[
        EMBEDDING_TENSORS,
        OLMO2_NORMS,
        ATTENTION_TENSORS,
        ATTENTION_VECTORS,
        GATED_TENSORS,
    ],
    ..LLAMA
};

const STARCODER2: HfClass = HfClass {
    name: "Starcoder2ForCausalLM",
    architecture: "starcoder2",
    keys: &[DECODER_KEYS, ROPE_KEYS, STARCODER2_KEYS],
    tensors: &[
        EMBEDDING_TENSORS,
        INPUT_NORM,
        ATTENTION_TENSORS,
        ATTENTION_VECTORS,
        NORM_BEFORE_FFN,
        STARCODER2_NORM_BIASES,
        STARCODER2_FEED_FORWARD,
    ],
    ..LLAMA
};

const QWEN2: HfClass = HfClass {
    name: "Qwen2ForCausalLM",
    architecture: "qwen2",
    keys: &[
        DECODER_KEYS,
        RMS_EPS,
        ROPE_KEYS,
        &[SILU, Key::With(full_attention)],
    ],
    tensors: &[
        EMBEDDING_TENSORS,
        INPUT_NORM,
        ATTENTION_TENSORS,
        ATTENTION_VECTORS,
        NORM_BEFORE_FFN,
        GATED_TENSORS,
    ],
    ..LLAMA
};

const QWEN3: HfClass = HfClass {
    name: "Qwen3ForCausalLM",
    architecture: "qwen3",
    defaults: &[("head_dim", 128)],
    ..QWEN2
};
