//! [`CASES`]: one row for every file with a reference.

#![allow(dead_code)] // each test file uses a part of this

use model_tests::{Case, KeyOrder, Setting};

pub(crate) const fn case(name: &'static str) -> Case {
    Case {
        folder: concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data"),
        register: model_llama::register,
        name,
        file: name,
        keys: KeyOrder::Same,
        settings: &[],
    }
}

const fn pairs(name: &'static str) -> Case {
    Case {
        keys: KeyOrder::Pairs,
        ..case(name)
    }
}

/// Every file with a reference.
pub(crate) const CASES: &[Case] = &[
    pairs("llama_gqa_tied"),
    pairs("llama_gqa_untied"),
    Case {
        file: "llama_gqa_untied",
        settings: &[
            ("llama.rope.scaling.type", Setting::Text("linear")),
            ("llama.rope.scaling.factor", Setting::Number(4.0)),
        ],
        ..pairs("llama_rope_linear")
    },
    pairs("llama_rope_llama3"),
    pairs("llama_rope_yarn"),
    pairs("mixtral"),
    case("llama4_chunk16"),
    case("qwen2"),
    case("qwen3"),
    case("qwen3_moe"),
    case("gemma2_swa8"),
    case("gemma3_iswa8"),
    case("phi3"),
    Case {
        file: "phi3",
        settings: &[
            ("phi3.rope.dimension_count", Setting::Count(8)),
            ("phi3.attention.sliding_window", Setting::Count(8)),
        ],
        ..case("phi3_partial_swa8")
    },
    case("cohere2_swa8"),
    case("granite"),
    case("smollm3"),
    case("olmo2"),
    case("starcoder2"),
    case("gpt_oss_swa8"),
];
