//! [`CASES`]: one row for every model with a reference.

#![allow(dead_code)] // each test file uses a part of this

use model_tests::checks::NOISY_TOLERANCE;
use model_tests::{Case, KeyOrder, Source};

pub(crate) const fn case(name: &'static str) -> Case {
    Case::recipe(name, model_llama::register)
}

/// A model whose keys are rotated as pairs of neighbours, and as halves in the reference.
const fn pairs(name: &'static str) -> Case {
    Case {
        keys: KeyOrder::Pairs,
        ..case(name)
    }
}

/// A model of latents.
const fn latents(name: &'static str, keys: KeyOrder) -> Case {
    Case { keys, ..case(name) }
}

/// Noise of a millionth in its embeddings moves its reference's logits by 6.3e-4.
const GEMMA3N: Case = Case {
    tolerance: NOISY_TOLERANCE,
    ..case("gemma3n")
};

/// The reference has the divisors of short contexts, which are those of up to 256 tokens.
const PHIMOE: Case = Case {
    context: Some(256),
    ..case("phimoe")
};

/// The trained model, without a reference of logits.
pub(crate) const STORIES: Case = Case {
    source: Source::Gguf("stories"),
    ..case("stories-gemma3-f16")
};

/// A file that llama.cpp's converter wrote, with llama.cpp's numbers.
pub(crate) const GGUF: Case = Case {
    source: Source::Gguf("gguf"),
    ..case("granite_llama_cpp")
};

/// The text decoders of models that see images.
pub(crate) const IMAGE_CASES: &[Case] = &[
    with_images("qwen2_vl"),
    with_images("qwen2_5_vl"),
    with_images("qwen3_vl"),
    with_images("qwen3_vl_moe"),
];

const fn with_images(name: &'static str) -> Case {
    Case {
        source: Source::RecipeIn("images"),
        ..case(name)
    }
}

/// Every model with a reference.
pub(crate) const CASES: &[Case] = &[
    pairs("llama_gqa_tied"),
    pairs("llama_gqa_untied"),
    pairs("llama_rope_linear"),
    pairs("llama_rope_llama3"),
    pairs("llama_rope_yarn"),
    pairs("mistral_noswa"),
    pairs("mistral_swa8"),
    pairs("mixtral"),
    PHIMOE,
    case("llama4_chunk16"),
    case("llama4_chunk8192"),
    case("llama4_maverick"),
    case("qwen2"),
    case("qwen3"),
    case("qwen3_moe"),
    case("gemma2_swa8"),
    case("gemma3_iswa8"),
    case("gemma4_e"),
    case("gemma4_moe"),
    GEMMA3N,
    case("phi3"),
    case("phi3_partial"),
    case("phi3_partial_swa8"),
    case("phi3_longrope_long"),
    case("phi3_longrope_short"),
    case("cohere2_swa8"),
    pairs("granite"),
    pairs("smollm3"),
    case("olmo2"),
    case("starcoder2"),
    case("gpt_oss_swa8"),
    latents("deepseek_v2", KeyOrder::Latents),
    latents("deepseek_v2_lite", KeyOrder::Latents),
    latents("deepseek_v3", KeyOrder::LatentsInPairs),
    latents("deepseek_v3_noqlora", KeyOrder::LatentsInPairs),
    latents("deepseek_v32", KeyOrder::LatentsInPairs),
    latents("mistral4", KeyOrder::LatentsInPairs),
    GGUF,
    case("olmo3"),
    case("exaone4"),
    case("exaone4_full"),
    case("seed_oss"),
    case("glm4"),
    case("ernie4_5"),
    pairs("granitemoe"),
    pairs("ministral"),
    pairs("ministral3"),
    case("hunyuan_v1_dense"),
    case("hunyuan_v1_moe"),
    case("qwen2_moe"),
    case("glm4_moe"),
    case("ernie4_5_moe"),
    case("minimax_m2"),
    case("phi"),
    case("nemotron"),
    case("stablelm"),
    case("gpt2"),
    case("gpt_bigcode"),
    case("gpt_neo"),
    case("gptj"),
    case("codegen"),
    case("opt"),
    case("opt_350m"),
    case("gpt_neox"),
    case("falcon"),
    case("falcon_alibi"),
    case("bloom"),
    case("mpt"),
    case("gemma"),
    case("cohere"),
    case("cohere2_moe"),
    case("olmoe"),
    pairs("arcee"),
    pairs("granite_swa"),
    pairs("granitemoeshared"),
    case("exaone_moe"),
    case("dots1"),
    case("hy_v3"),
    case("glm"),
    case("dbrx"),
    case("chatglm"),
    case("jais2"),
    case("mimo_v2_flash"),
    pairs("internlm2"),
    pairs("minicpm"),
    pairs("baichuan"),
    pairs("baichuan_13b"),
    pairs("baichuan2"),
    pairs("xverse"),
    case("exaone"),
    case("pangu_embedded"),
    case("codeshell"),
    case("orion"),
    case("apertus"),
    case("bitnet"),
    latents("minicpm3", KeyOrder::Latents),
    latents("youtu", KeyOrder::LatentsInPairs),
    case("solar_open"),
    pairs("deepseek"),
    case("bailing_moe_v2"),
    latents("glm4_moe_lite", KeyOrder::LatentsInPairs),
    case("falcon_40b"),
    case("phi_qk"),
    pairs("smollm3_ropes"),
    case("gpt_bigcode_mha"),
    case("seed_oss_bias"),
    case("ernie4_5_bias"),
    pairs("olmo"),
    case("cohere_qk"),
    case("stablelm_qk"),
    case("gpt2_gelu"),
    case("bloom_normed"),
    latents("glm_moe_dsa", KeyOrder::IndexInPairs(8)),
];
