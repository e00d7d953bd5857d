//! [`CASES`]: one row for every file with a reference.

/// How a file's keys lie, beside the reference's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyOrder {
    /// The same.
    Same,
    /// Each head's halves as pairs.
    Pairs,
}

/// A file with a reference: tokens, logits and continuations, and the keys and values of some layers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    /// Name of the reference.
    pub(crate) name: &'static str,
    /// Name of the file.
    pub(crate) file: &'static str,
    /// How the file's keys lie.
    pub(crate) keys: KeyOrder,
    /// Settings in place of the file's: references with the same weights share a file.
    pub(crate) settings: &'static [(&'static str, Setting)],
}

/// A setting.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Setting {
    Count(u32),
    Number(f32),
    Text(&'static str),
}

const fn case(name: &'static str) -> Case {
    Case {
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
