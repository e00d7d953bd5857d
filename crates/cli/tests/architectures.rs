//! `docs/architectures.md`: every architecture that the program knows, what it was tested against,
//! and which nodes of the graphs of neighbours differ.
//!
//! The page is rendered here and fails this test when it is stale. A new architecture is a row of
//! [`ROWS`] and, where it has a near relative, a pair of [`NEIGHBOURS`].

#![allow(clippy::unwrap_used)] // helpers of tests

use std::collections::HashSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use kv_core::Window;
use kv_core::layers::{LayerMap, LayerMemory};
use kv_graph::{Graph, GraphShape};
use model_core::architecture::Registry;
use model_tests::{Recipe, fixture};

/// One architecture.
struct Row {
    architecture: &'static str,
    /// What people know it as.
    models: &'static str,
    /// Which layers see how much.
    windows: &'static str,
    /// Recipes; GGUF files with a reference (by path, without the ending); and directories outside
    /// of the recipes (with a `/` at the end).
    fixtures: &'static [&'static str],
    against: Reference,
    /// Largest difference of a logit, or of a value of an encoder's vectors, that the tests allow.
    tolerance: &'static str,
}

/// Where the numbers came from.
#[derive(Clone, Copy)]
enum Reference {
    Transformers,
    /// In float64, from the papers.
    Numpy,
}

const fn row(
    architecture: &'static str,
    models: &'static str,
    windows: &'static str,
    fixtures: &'static [&'static str],
) -> Row {
    Row {
        architecture,
        models,
        windows,
        fixtures,
        against: Reference::Transformers,
        tolerance: "2e-4",
    }
}

/// A row of an encoder without windows.
const fn encoder(
    architecture: &'static str,
    models: &'static str,
    fixtures: &'static [&'static str],
) -> Row {
    Row {
        tolerance: "2e-5 (rows), 2e-6 (vectors)",
        ..row(
            architecture,
            models,
            "none; tokens see later ones",
            fixtures,
        )
    }
}

/// A row of a decoder without windows that transformers has not.
const fn numpy(
    architecture: &'static str,
    models: &'static str,
    fixtures: &'static [&'static str],
) -> Row {
    Row {
        against: Reference::Numpy,
        ..row(architecture, models, "none", fixtures)
    }
}

/// A row of a diffusion model.
const fn diffusion(
    architecture: &'static str,
    models: &'static str,
    fixtures: &'static [&'static str],
) -> Row {
    Row {
        against: Reference::Numpy,
        ..row(
            architecture,
            models,
            "none; tokens see later ones",
            fixtures,
        )
    }
}

const ROWS: &[Row] = &[
    row(
        "llama",
        "Llama 1 to 3, Mistral, Ministral 8B, Mixtral",
        "none; all layers where the file names a window (Mistral), or those that it names",
        &[
            "llama_gqa_tied",
            "llama_gqa_untied",
            "llama_rope_llama3",
            "llama_rope_yarn",
            "llama_rope_linear",
            "mistral_noswa",
            "mistral_swa8",
            "ministral",
            "mixtral",
        ],
    ),
    row(
        "llama4",
        "Llama 4 (text)",
        "chunks of 8192, every 4th layer full and unrotated",
        &["llama4_chunk16", "llama4_chunk8192", "llama4_maverick"],
    ),
    row("qwen2", "Qwen 2 and 2.5", "none", &["qwen2"]),
    row(
        "qwen2vl",
        "Qwen 2 and 2.5 VL (text, over given rows of images)",
        "none",
        &["images/qwen2_vl/", "images/qwen2_5_vl/"],
    ),
    diffusion("dream", "Dream", &["diffusion/dream/"]),
    diffusion("llada", "LLaDA", &["diffusion/llada/"]),
    diffusion("llada-moe", "LLaDA MoE", &["diffusion/llada_moe/"]),
    diffusion("rnd1", "RND1", &["diffusion/rnd1/"]),
    row("qwen2moe", "Qwen 1.5 and 2 MoE", "none", &["qwen2_moe"]),
    row("qwen3", "Qwen 3", "none", &["qwen3"]),
    row(
        "qwen3vl",
        "Qwen 3 VL (text, over given rows of images)",
        "none",
        &["images/qwen3_vl/"],
    ),
    row("qwen3moe", "Qwen 3 MoE", "none", &["qwen3_moe"]),
    row(
        "qwen3vlmoe",
        "Qwen 3 VL MoE (text, over given rows of images)",
        "none",
        &["images/qwen3_vl_moe/"],
    ),
    row("gemma", "Gemma 1", "none", &["gemma"]),
    row(
        "gemma2",
        "Gemma 2",
        "every other layer, from the first",
        &["gemma2_swa8"],
    ),
    row(
        "gemma3",
        "Gemma 3 (text)",
        "five of six layers, or as the file says",
        &["gemma3_iswa8", "stories/stories-gemma3"],
    ),
    row(
        "gemma4",
        "Gemma 4 (text)",
        "five of six layers, or as the file says",
        &["gemma4_e", "gemma4_moe"],
    ),
    Row {
        tolerance: "5e-4",
        ..row(
            "gemma3n",
            "Gemma 3n (text)",
            "four of five layers, or as the file says",
            &["gemma3n"],
        )
    },
    row(
        "phi3",
        "Phi-3, 3.5 and 4-mini, with LongRoPE",
        "all layers where the file names a window",
        &[
            "phi3",
            "phi3_partial",
            "phi3_partial_swa8",
            "phi3_longrope_long",
            "phi3_longrope_short",
        ],
    ),
    row(
        "command-r",
        "Command R and R+",
        "none",
        &["cohere", "cohere_qk"],
    ),
    row(
        "cohere2moe",
        "Command A's mixtures of experts",
        "three of four layers, or as the file says; the others are unrotated",
        &["cohere2_moe"],
    ),
    row(
        "cohere2",
        "Command R7B",
        "three of four layers; the others are unrotated",
        &["cohere2_swa8"],
    ),
    row(
        "granite",
        "Granite 3",
        "none",
        &["granite", "gguf/granite_llama_cpp"],
    ),
    row(
        "granitemoe",
        "Granite 3 MoE",
        "none",
        &["granitemoe", "granitemoeshared"],
    ),
    row(
        "granite_swa",
        "Granite with windows",
        "three of four layers, from the second, or as the file says; those that it names are unrotated",
        &["granite_swa"],
    ),
    row(
        "smollm3",
        "SmolLM 3",
        "none; every 4th layer is unrotated, or those that the file names",
        &["smollm3", "smollm3_ropes"],
    ),
    row("olmo", "OLMo 1", "none", &["olmo"]),
    row("olmoe", "OLMoE", "none", &["olmoe"]),
    row("arcee", "AFM 4.5B", "none", &["arcee"]),
    row(
        "exaone-moe",
        "K-EXAONE",
        "none; three of four layers where the file names a window, and then the others are unrotated",
        &["exaone_moe"],
    ),
    row("dots1", "dots.llm1", "none", &["dots1"]),
    row("hy_v3", "Hunyuan 3", "none", &["hy_v3"]),
    Row {
        against: Reference::Numpy,
        ..row(
            "chatglm",
            "ChatGLM 2 and 3, GLM-4 9B",
            "none",
            &["chatglm", "glm"],
        )
    },
    row("dbrx", "DBRX", "none", &["dbrx"]),
    row("jais2", "Jais 2", "none", &["jais2"]),
    row(
        "mimo2",
        "MiMo-V2 Flash",
        "as the file says; windowed layers have more keys and values",
        &["mimo_v2_flash"],
    ),
    numpy("internlm2", "InternLM 2 and 2.5", &["internlm2"]),
    numpy("minicpm", "MiniCPM 1 and 2", &["minicpm"]),
    numpy(
        "baichuan",
        "Baichuan 1 and 2, 7B and 13B",
        &["baichuan", "baichuan_13b", "baichuan2"],
    ),
    row("minicpm3", "MiniCPM 3", "none", &["minicpm3"]),
    row("apertus", "Apertus", "none", &["apertus"]),
    row("bitnet", "BitNet b1.58", "none", &["bitnet"]),
    numpy("xverse", "XVERSE", &["xverse"]),
    numpy("exaone", "EXAONE 3 and 3.5", &["exaone"]),
    numpy("pangu-embedded", "openPangu Embedded", &["pangu_embedded"]),
    numpy("codeshell", "CodeShell 7B", &["codeshell"]),
    numpy("orion", "Orion 14B", &["orion"]),
    numpy("deepseek", "DeepSeekMoE", &["deepseek"]),
    numpy("bailingmoe2", "Ling 2 and Ring 2", &["bailing_moe_v2"]),
    row(
        "olmo2",
        "OLMo 2 and 3",
        "none; three of four layers where the file names a window (OLMo 3), which are not stretched",
        &["olmo2", "olmo3"],
    ),
    row(
        "exaone4",
        "EXAONE 4",
        "none; three of four layers where the file names a window, and then the others are unrotated",
        &["exaone4", "exaone4_full"],
    ),
    row(
        "seed_oss",
        "Seed-OSS",
        "none",
        &["seed_oss", "seed_oss_bias"],
    ),
    row("glm4", "GLM-4, GLM-4.1V", "none", &["glm4"]),
    row(
        "glm4moe",
        "GLM-4.5, GLM-4.5V, GLM-4.6; Solar Open",
        "none",
        &["glm4_moe", "solar_open"],
    ),
    row(
        "ernie4_5",
        "ERNIE 4.5",
        "none",
        &["ernie4_5", "ernie4_5_bias"],
    ),
    row("ernie4_5-moe", "ERNIE 4.5 MoE", "none", &["ernie4_5_moe"]),
    row(
        "mistral3",
        "Ministral 3",
        "none; all layers where the file names a window",
        &["ministral3"],
    ),
    row(
        "hunyuan-dense",
        "Hunyuan dense",
        "none",
        &["hunyuan_v1_dense"],
    ),
    row("hunyuan-moe", "Hunyuan MoE", "none", &["hunyuan_v1_moe"]),
    row("minimax-m2", "MiniMax M2", "none", &["minimax_m2"]),
    row(
        "phimoe",
        "Phi-3.5 MoE",
        "all layers where the file names a window",
        &["phimoe"],
    ),
    row(
        "starcoder2",
        "StarCoder 2",
        "none; all layers where the file names a window",
        &["starcoder2"],
    ),
    row(
        "gpt-oss",
        "gpt-oss",
        "every other layer, from the first",
        &["gpt_oss_swa8"],
    ),
    row("phi2", "Phi-1, 1.5 and 2", "none", &["phi", "phi_qk"]),
    row("nemotron", "Nemotron and Minitron", "none", &["nemotron"]),
    row("stablelm", "StableLM", "none", &["stablelm", "stablelm_qk"]),
    row("gpt2", "GPT-2", "none", &["gpt2", "gpt2_gelu"]),
    row(
        "starcoder",
        "SantaCoder, StarCoder",
        "none",
        &["gpt_bigcode", "gpt_bigcode_mha"],
    ),
    row(
        "gptneo",
        "GPT-Neo",
        "every other layer, from the second",
        &["gpt_neo"],
    ),
    row("gptj", "GPT-J", "none", &["gptj"]),
    row("codegen", "CodeGen", "none", &["codegen"]),
    row("opt", "OPT", "none", &["opt", "opt_350m"]),
    row("gptneox", "GPT-NeoX, Pythia", "none", &["gpt_neox"]),
    row(
        "falcon",
        "Falcon 7B, 40B, 180B and RW",
        "none",
        &["falcon", "falcon_alibi", "falcon_40b"],
    ),
    row("bloom", "BLOOM", "none", &["bloom", "bloom_normed"]),
    row("mpt", "MPT", "none", &["mpt"]),
    row(
        "deepseek2",
        "DeepSeek V2, V2-Lite, V3, R1; GLM-4.7 Flash; Youtu-LLM; Kimi K2.5 and Kimi-VL (text)",
        "none",
        &[
            "deepseek_v2",
            "deepseek_v2_lite",
            "deepseek_v3",
            "deepseek_v3_noqlora",
            "glm4_moe_lite",
            "youtu",
        ],
    ),
    row("mistral4", "Mistral 4", "none", &["mistral4"]),
    row("deepseek32", "DeepSeek V3.2", "none", &["deepseek_v32"]),
    row("glm-dsa", "GLM-5 and 5.1", "none", &["glm_moe_dsa"]),
    row(
        "mamba",
        "Mamba, Falcon Mamba",
        "none",
        &[
            "mamba",
            "mamba_untied",
            "falcon_mamba",
            "falcon_mamba_eps5",
            "stories/stories-mamba",
        ],
    ),
    row("mamba2", "Mamba-2", "none", &["mamba2"]),
    row("jamba", "Jamba", "none", &["jamba"]),
    row(
        "nemotron_h",
        "Nemotron-H, Nemotron Nano 2",
        "none",
        &["nemotron_h"],
    ),
    row(
        "nemotron_h_moe",
        "Nemotron 3 Nano",
        "none",
        &["nemotron_h_moe", "nemotron_h_groups"],
    ),
    row(
        "granitehybrid",
        "Bamba, Granite 4",
        "none",
        &["bamba", "granitemoehybrid"],
    ),
    row("falcon-h1", "Falcon-H1", "none", &["falcon_h1"]),
    row("qwen3next", "Qwen3-Next", "none", &["qwen3_next"]),
    Row {
        tolerance: "5e-4",
        ..row(
            "qwen35",
            "Qwen 3.5 (text, also over given rows of images)",
            "none",
            &["qwen3_5", "images/qwen3_5_vl_text/"],
        )
    },
    row("qwen35moe", "Qwen 3.5 MoE (text)", "none", &["qwen3_5_moe"]),
    row(
        "kimi-linear",
        "Kimi Linear",
        "none",
        &["kimi_linear", "kimi_linear_heads"],
    ),
    row(
        "recurrentgemma",
        "RecurrentGemma, Griffin",
        "all layers that attend",
        &["recurrent_gemma"],
    ),
    Row {
        tolerance: "5e-4",
        ..row("zamba2", "Zamba2", "none", &["zamba2"])
    },
    row("minimax", "MiniMax-Text-01", "none", &["minimax"]),
    row("xlstm", "xLSTM", "none", &["xlstm"]),
    row("lfm2", "LFM2", "none", &["lfm2", "lfm2_bias"]),
    row("lfm2moe", "LFM2-MoE", "none", &["lfm2_moe"]),
    row("rwkv4", "RWKV-4", "none", &["rwkv4"]),
    Row {
        against: Reference::Numpy,
        ..row("rwkv6", "RWKV-6 (Finch)", "none", &["rwkv6"])
    },
    Row {
        against: Reference::Numpy,
        ..row("rwkv7", "RWKV-7 (Goose)", "none", &["rwkv7"])
    },
    Row {
        against: Reference::Numpy,
        tolerance: "2e-6 (vectors), 5e-6 (scores)",
        ..row(
            "bert",
            "BERT, RoBERTa, XLM-RoBERTa, DistilBERT; their sentence encoders (MiniLM, BGE, E5) and \
             rerankers",
            "none; tokens see later ones",
            &[
                "encoders/bert_cased/",
                "encoders/distilbert_classifier/",
                "encoders/roberta_classifier/",
                "encoders/xlm_roberta_reranker/",
                "encoders/bert_tiny/",
                "encoders/bert_rerank_tiny/",
                "encoders/xlm_roberta_rerank_tiny/",
            ],
        )
    },
    Row {
        against: Reference::Numpy,
        tolerance: "2e-6 (vectors)",
        ..row(
            "modern-bert",
            "ModernBERT",
            "symmetric, two of three layers; tokens see later ones",
            &[
                "encoders/modern_bert_tiny/",
                "encoders/modernbert_classifier/",
            ],
        )
    },
    encoder(
        "albert",
        "ALBERT, whose layers share weights",
        &["encoders/albert/", "encoders/albert_inner_layers/"],
    ),
    Row {
        against: Reference::Numpy,
        ..encoder(
            "jina-bert-v2",
            "Jina Embeddings v2, with linear biases",
            &["encoders/jina_bert_v2/"],
        )
    },
    encoder(
        "jina-bert-v3",
        "Jina Embeddings v3, without adapters",
        &["encoders/jina_embeddings_v3/"],
    ),
    encoder(
        "nomic-bert",
        "Nomic Embed 1 and 1.5",
        &["encoders/nomic_bert/"],
    ),
    Row {
        against: Reference::Numpy,
        ..encoder(
            "nomic-bert-moe",
            "Nomic Embed 2, every other layer a mixture of experts",
            &["encoders/nomic_bert_moe/"],
        )
    },
    encoder(
        "mpnet",
        "MPNet; its sentence encoders",
        &["encoders/mpnet/"],
    ),
    Row {
        tolerance: "2e-5 (scores)",
        ..encoder(
            "deberta-v2",
            "DeBERTa v2 and v3; their rerankers",
            &[
                "encoders/deberta_v2_reranker/",
                "encoders/deberta_v2_own_keys/",
            ],
        )
    },
    encoder("eurobert", "EuroBERT", &["encoders/eurobert/"]),
    Row {
        windows: "symmetric, five of six layers, or as the file says; tokens see later ones",
        ..encoder(
            "gemma-embedding",
            "EmbeddingGemma",
            &["encoders/embedding_gemma/"],
        )
    },
    Row {
        against: Reference::Numpy,
        ..encoder("neo-bert", "NeoBERT", &["encoders/neobert/"])
    },
    Row {
        against: Reference::Numpy,
        tolerance: "2e-4 (rows)",
        ..row(
            "wavtokenizer-dec",
            "the decoder of WavTokenizer, the vocoder of OuteTTS: rows of a spectrogram from audio codes",
            "none; tokens see later ones",
            &["gguf/wavtokenizer_dec"],
        )
    },
    row(
        "t5",
        "T5, T5 v1.1, Flan-T5, mT5",
        "none",
        &["seq2seq/t5_relu_tied/", "seq2seq/t5_v1_1/"],
    ),
    row("bart", "BART", "none", &["seq2seq/bart/"]),
    row(
        "m2m-100",
        "M2M-100, NLLB-200",
        "none",
        &["seq2seq/m2m_100/"],
    ),
];

/// Architectures whose graphs are compared.
const NEIGHBOURS: &[[&str; 2]] = &[
    ["llama", "qwen2"],
    ["qwen2", "qwen3"],
    ["qwen2", "qwen2vl"],
    ["qwen2", "dream"],
    ["llama", "llada"],
    ["llada", "llada-moe"],
    ["qwen3", "qwen3vl"],
    ["qwen3", "qwen3moe"],
    ["qwen3moe", "rnd1"],
    ["qwen3moe", "gpt-oss"],
    ["llama", "llama4"],
    ["llama", "granite"],
    ["llama", "smollm3"],
    ["llama", "cohere2"],
    ["cohere2", "command-r"],
    ["cohere2", "cohere2moe"],
    ["llama", "gemma"],
    ["llama", "olmo"],
    ["olmo2", "olmoe"],
    ["llama", "arcee"],
    ["arcee", "apertus"],
    ["llama", "bitnet"],
    ["deepseek2", "minicpm3"],
    ["granite", "granite_swa"],
    ["exaone4", "exaone-moe"],
    ["qwen3moe", "dots1"],
    ["glm4moe", "bailingmoe2"],
    ["glm4", "chatglm"],
    ["llama", "dbrx"],
    ["nemotron", "jais2"],
    ["gpt-oss", "mimo2"],
    ["llama", "deepseek"],
    ["gpt2", "codeshell"],
    ["stablelm", "orion"],
    ["qwen3vl", "qwen3vlmoe"],
    ["llama", "deepseek2"],
    ["deepseek2", "deepseek32"],
    ["deepseek32", "glm-dsa"],
    ["deepseek2", "mistral4"],
    ["qwen2", "phi3"],
    ["qwen3", "olmo2"],
    ["olmo2", "exaone4"],
    ["qwen2", "seed_oss"],
    ["qwen2", "qwen2moe"],
    ["gemma2", "glm4"],
    ["qwen3moe", "glm4moe"],
    ["granite", "granitemoe"],
    ["ernie4_5", "ernie4_5-moe"],
    ["llama", "mistral3"],
    ["qwen3", "hunyuan-dense"],
    ["hunyuan-dense", "hunyuan-moe"],
    ["glm4moe", "minimax-m2"],
    ["qwen2moe", "phimoe"],
    ["starcoder2", "gpt2"],
    ["gpt2", "gptneo"],
    ["gpt2", "opt"],
    ["gpt2", "bloom"],
    ["bloom", "mpt"],
    ["phi2", "gptj"],
    ["phi2", "gptneox"],
    ["gptneox", "falcon"],
    ["qwen2", "stablelm"],
    ["starcoder2", "nemotron"],
    ["qwen2", "starcoder2"],
    ["llama", "gemma2"],
    ["gemma2", "gemma3"],
    ["gemma3", "gemma4"],
    ["gemma4", "gemma3n"],
    ["mamba", "mamba2"],
    ["mamba", "jamba"],
    ["mamba2", "granitehybrid"],
    ["mamba2", "nemotron_h"],
    ["nemotron_h", "nemotron_h_moe"],
    ["granitehybrid", "falcon-h1"],
    ["mamba2", "qwen3next"],
    ["qwen3next", "qwen35moe"],
    ["qwen35moe", "qwen35"],
    ["qwen35moe", "kimi-linear"],
    ["gemma2", "recurrentgemma"],
    ["granitehybrid", "zamba2"],
    ["mamba2", "xlstm"],
    ["granitehybrid", "minimax"],
    ["rwkv6", "rwkv7"],
    ["qwen3", "lfm2"],
    ["lfm2", "lfm2moe"],
    ["bert", "albert"],
    ["bert", "mpnet"],
    ["mpnet", "deberta-v2"],
    ["bert", "jina-bert-v2"],
    ["bert", "jina-bert-v3"],
    ["jina-bert-v3", "nomic-bert"],
    ["jina-bert-v3", "nomic-bert-moe"],
    ["bert", "modern-bert"],
    ["modern-bert", "eurobert"],
    ["eurobert", "neo-bert"],
    ["eurobert", "gemma-embedding"],
    ["t5", "bart"],
    ["bart", "m2m-100"],
];

fn registry() -> Registry {
    let mut registry = Registry::new();
    model_llama::register(&mut registry);
    model_mamba::register(&mut registry);
    model_bert::register(&mut registry);
    registry
}

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// What kind of memory follows from these layers.
fn memory(layers: &LayerMap) -> &'static str {
    let recurrent = layers
        .iter()
        .any(|(layer, _)| layers.recurrent(layer).is_some());
    if layers
        .parts()
        .iter()
        .any(|part| part.window == Window::Source)
    {
        return "unified, and sources";
    }
    let is_latent = |(_, memory)| matches!(memory, LayerMemory::Latent(_));
    if layers.iter().any(is_latent) {
        return if recurrent {
            "hybrid, latent"
        } else {
            "latent"
        };
    }
    let shares = |(_, memory)| matches!(memory, LayerMemory::SharedWith(_));
    if layers.iter().any(shares) && layers.parts().len() > 1 {
        return "iSWA, shared by the last layers";
    }
    match (layers.parts().len(), recurrent) {
        (0, false) => "none",
        (0, true) => "recurrent",
        (1, false) => "unified",
        (1, true) => "hybrid",
        (_, false) => "iSWA",
        (_, true) => "hybrid iSWA",
    }
}

/// A node's name without its layer.
fn stem(name: &str) -> &str {
    name.rsplit_once('-').map_or(name, |(stem, _)| stem)
}

/// What a node computes, out of the text `name: type = operation`.
fn operation(text: &str) -> &str {
    text.split_once(" = ")
        .map_or(text, |(_, operation)| operation)
}

/// The stems of nodes, each once.
fn stems(texts: &[String]) -> String {
    let mut seen = HashSet::new();
    let names = texts
        .iter()
        .map(|text| text.split(':').next().unwrap_or(text));
    let stems = names.map(stem).filter(|stem| seen.insert(*stem));
    stems
        .map(|stem| format!("`{stem}`"))
        .collect::<Vec<_>>()
        .join(", ")
}

/// The shape of compared graphs.
const SHAPE: GraphShape = GraphShape {
    n_tokens: 8,
    n_outputs: 1,
};

fn render_pair(page: &mut String, names: [&str; 2]) {
    let registry = registry();
    let graphs = names.map(|name| {
        let model = registry.get(name).unwrap().example().unwrap();
        model.graph(SHAPE).unwrap()
    });
    render_diff(page, names, &graphs);
}

/// Mistral is no architecture of its own: two recipes of `llama`.
fn render_mistral(page: &mut String) {
    let graphs = ["llama_gqa_untied", "mistral_swa8"].map(|name| {
        let directory = Recipe::named(name).directory(&registry()).unwrap();
        directory.model().graph(SHAPE).unwrap()
    });
    render_diff(page, ["llama", "Mistral"], &graphs);
}

fn render_diff(page: &mut String, [left, right]: [&str; 2], [a, b]: &[Graph; 2]) {
    let diff = a.diff(b);
    assert!(!diff.is_empty(), "{left} and {right} are alike");
    writeln!(page, "\n### {left} and {right}\n").unwrap();
    for (name, texts) in [(left, &diff.only_left), (right, &diff.only_right)] {
        if !texts.is_empty() {
            writeln!(page, "- only in {name}: {}", stems(texts)).unwrap();
        }
    }
    let mut seen = HashSet::new();
    for change in &diff.changed {
        if seen.insert(stem(&change.name)) {
            let (mut from, mut to) = (operation(&change.left), operation(&change.right));
            if from == to {
                (from, to) = (&change.left, &change.right);
            }
            writeln!(page, "- `{}`: `{from}` becomes `{to}`", stem(&change.name)).unwrap();
        }
    }
}

fn render() -> String {
    let mut page = "# Architectures

Made by `crates/cli/tests/architectures.rs`, which fails when this page is stale; do not edit it by hand.

Every architecture has a fixture: a tiny model with generated weights (`stories` are trained models), listed in
`tests/fixtures/MANIFEST.md`. Its logits are compared with the reference on kv-cpu and kv-candle: the prompt whole, in
pieces, token by token, and three sequences in one batch. kv-cpu gives the same bits each time. The greedy continuation is
equal, and so are the keys, values and states that the reference recorded. *Memory* is the memory of the whole model.

| fixture | compared by |
| --- | --- |
| a name without `/` | logits of a model directory; it computes the same bits as the GGUF file that `cellar convert` makes of it |
| `gguf/` | logits of a stored GGUF file (Granite's with llama.cpp's numbers); rows for WavTokenizer, in the keys, names and shapes of llama.cpp's converter |
| `stories/` | greedy texts |
| `encoders/` | vectors or scores, alone and in batches |
| `images/` | logits over rows of images in place of tokens |
| `seq2seq/` | logits over the sources of texts |

Every decoder gives vectors too (`cellar embed`): `crates/cellar/tests/embed.rs` compares final rows times the output matrix with
the logits of the reference.

| architecture | models | memory | windows | fixtures | reference | logits within |
| --- | --- | --- | --- | --- | --- | --- |
"
    .to_owned();
    let registry = registry();
    for row in ROWS {
        let example = registry.get(row.architecture).unwrap().example().unwrap();
        let against = match row.against {
            Reference::Transformers => "transformers, f32",
            Reference::Numpy => "numpy, f64",
        };
        writeln!(
            page,
            "| {} | {} | {} | {} | {} | {against} | {} |",
            row.architecture,
            row.models,
            memory(example.layers()),
            row.windows,
            row.fixtures.join(", "),
            row.tolerance
        )
        .unwrap();
    }
    page.push_str(&crate::real_files::section());
    page.push_str(
        "
## What sets neighbours apart

The nodes of typical graphs (two layers: the first of the pattern and the last) that differ, each
named once, without its layer.
",
    );
    render_mistral(&mut page);
    for pair in NEIGHBOURS {
        render_pair(&mut page, *pair);
    }
    page
}

#[test]
fn every_architecture_has_a_row_and_every_row_its_files() {
    let mut known = registry().names();
    let mut rows: Vec<_> = ROWS.iter().map(|row| row.architecture.to_owned()).collect();
    known.sort();
    rows.sort();
    assert_eq!(rows, known);
    let named: Vec<&str> = ROWS.iter().flat_map(|row| row.fixtures).copied().collect();
    for recipe in Recipe::all_in(&fixture("recipes")) {
        let name = recipe.name();
        assert!(named.contains(&&*name), "no row has the recipe {name}");
    }
    for name in named {
        let is_there = |path: String| fixture(&path).exists();
        if let Some(name) = name.strip_suffix('/') {
            assert!(is_there(format!("{name}/config.json")), "{name}");
        } else if name.contains('/') {
            let has = |endings: [&str; 2]| endings.map(|e| is_there(format!("{name}{e}")));
            assert!(has([".gguf", "-f16.gguf"]).contains(&true), "{name}");
            let references = [".reference.safetensors.lzma", ".reference.json"];
            assert!(has(references).contains(&true), "{name}");
        } else {
            let has = |file: &str| is_there(format!("recipes/{name}/{file}"));
            assert!(
                has("recipe.json") && has("reference.safetensors.lzma"),
                "{name}"
            );
        }
    }
}

#[test]
fn the_page_is_not_stale() {
    let path = root().join("docs/architectures.md");
    let page = render();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, &page).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        found == page,
        "docs/architectures.md is stale: run this test with UPDATE_DOCS=1 and read the difference"
    );
}
