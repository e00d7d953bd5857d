//! From the text of an answer to its reasoning, its text and its calls of tools, piece by piece.
//!
//! Invariant: where nothing is marked, the pieces are the text unchanged; a piece does not depend on
//! how the text was cut, and what looks like a mark but is none comes out as text. Which marks a
//! model writes follows from its chat template.

mod call;
pub(crate) mod grammar;
mod harmony;
#[cfg(test)]
mod harmony_tests;
mod header;
mod split;
#[cfg(test)]
mod split_tests;
mod xml;

pub(crate) use split::{ChatSplitter, Part};

/// Marks around reasoning. The first pair is always looked for.
const REASONING: [Marks; 4] = [
    Marks::new("<think>", "</think>"),
    Marks::new("[THINK]", "[/THINK]"),
    Marks::new("<seed:think>", "</seed:think>"),
    Marks::new("<|START_THINKING|>", "<|END_THINKING|>"),
];

/// What begins and ends a section.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Marks {
    open: &'static str,
    close: &'static str,
}

impl Marks {
    const fn new(open: &'static str, close: &'static str) -> Self {
        Self { open, close }
    }
}

/// How a model writes calls of tools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ToolFormat {
    /// `<tool_call>{"name": …, "arguments": …}</tool_call>`: Hermes, Qwen and many others.
    Hermes,
    /// The whole answer is `{"name": …, "parameters": …}`, perhaps after `<|python_tag|>`.
    Llama,
    /// `[TOOL_CALLS][{"name": …, "arguments": …}]`, or `[TOOL_CALLS]name[ARGS]{…}`.
    Mistral,
    /// `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`, or with a type before the name.
    DeepSeek,
    /// `<function=name><parameter=key>value</parameter></function>`: Qwen3-Coder, Seed-OSS.
    Xml,
    /// The answer is calls and nothing else, as a grammar demands.
    Forced,
}

impl ToolFormat {
    /// How models with this template write calls.
    pub(crate) fn of_template(template: &str) -> Self {
        if template.contains("[TOOL_CALLS]") {
            Self::Mistral
        } else if template.contains("<｜tool▁call▁begin｜>") {
            Self::DeepSeek
        } else if template.contains(xml::OPEN) && template.contains(xml::PARAMETER) {
            Self::Xml
        } else if template.contains("<tool_call>") {
            Self::Hermes
        } else if template.contains("<|python_tag|>") || template.contains("\"parameters\"") {
            Self::Llama
        } else {
            Self::Hermes
        }
    }

    /// What begins a call, wherever it stands.
    fn open(self) -> Option<&'static str> {
        match self {
            Self::Hermes => Some("<tool_call>"),
            Self::Xml => Some(xml::OPEN),
            Self::Mistral => Some("[TOOL_CALLS]"),
            Self::DeepSeek => Some("<｜tool▁call▁begin｜>"),
            Self::Llama | Self::Forced => None,
        }
    }

    /// Marks around calls, which say nothing.
    fn noise(self) -> &'static [&'static str] {
        match self {
            Self::Hermes => &["</tool_call>"],
            Self::Xml => &[
                "<tool_call>",
                "</tool_call>",
                "<seed:tool_call>",
                "</seed:tool_call>",
            ],
            Self::DeepSeek => &[
                "<｜tool▁calls▁begin｜>",
                "<｜tool▁calls▁end｜>",
                "<｜tool▁call▁end｜>",
            ],
            Self::Mistral | Self::Llama | Self::Forced => &[],
        }
    }
}

/// The pairs of marks that a model with this template may write.
fn reasoning_marks(template: &str) -> Vec<Marks> {
    let (first, others) = (REASONING[0], &REASONING[1..]);
    let others = others.iter().filter(|pair| template.contains(pair.close));
    std::iter::once(first).chain(others.copied()).collect()
}
