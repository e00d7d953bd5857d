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
        vectors: &[],
    }
}

const fn pairs(name: &'static str) -> Case {
    Case {
        keys: KeyOrder::Pairs,
        ..case(name)
    }
}

/// `sqrt(1 + ln(512 / 32) / ln(32))`
const ATTENTION_FACTOR: f32 = 1.341_640_8;

/// A model whose trained length is beyond the original context.
const LONG_ROPE: Case = Case {
    name: "phi3_longrope_long",
    file: "phi3",
    settings: &[
        ("phi3.rope.scaling.type", Setting::Text("longrope")),
        (
            "phi3.rope.scaling.original_context_length",
            Setting::Count(32),
        ),
        (
            "phi3.rope.scaling.attn_factor",
            Setting::Number(ATTENTION_FACTOR),
        ),
    ],
    vectors: &[
        (
            "rope_factors_long.weight",
            &[1.0, 1.37, 1.74, 2.11, 4.5, 8.25, 12.5, 15.75],
        ),
        (
            "rope_factors_short.weight",
            &[1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 1.75, 2.0],
        ),
    ],
    ..case("phi3")
};

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
    Case {
        folder: concat!(env!("CARGO_MANIFEST_DIR"), "/../cli/tests/data/directories"),
        ..pairs("mistral_swa8")
    },
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
    LONG_ROPE,
    Case {
        name: "phi3_longrope_short",
        settings: &[
            ("phi3.rope.scaling.type", Setting::Text("longrope")),
            (
                "phi3.rope.scaling.original_context_length",
                Setting::Count(512),
            ),
            (
                "phi3.rope.scaling.attn_factor",
                Setting::Number(ATTENTION_FACTOR),
            ),
        ],
        ..LONG_ROPE
    },
    case("cohere2_swa8"),
    case("granite"),
    case("smollm3"),
    case("olmo2"),
    case("starcoder2"),
    case("gpt_oss_swa8"),
];
